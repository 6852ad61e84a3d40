"""The toy model T, whose every update can be computed by hand.

One trainable scalar w, start 0, no bias; the loss of an example is w * x, so
that its gradient is x. SGD with learning rate 1, unless said. After one exact
update from zero

    w = -sum(a * x) / sum(a)

where a is the weight of an example.
"""

import os

import keras
import numpy as np
import tensorflow as tf

import tfaccum


def product(y, y_pred):
    """The loss of T, example by example or token by token: w * x."""
    return y_pred[..., 0]


class Product(keras.losses.Loss):
    """`product`, with a reduction of one's own choice."""

    def call(self, y_true, y_pred):
        return product(y_true, y_pred)


class LogRows(tfaccum.Model):
    """Keeps what was trained on: one list of x per micro-step and replica."""

    def train_step(self, data):
        def write(x):
            self.micro_steps.append(x.numpy().ravel().tolist())

        tf.py_function(write, [data[0]], [])
        return super().train_step(data)

    @property
    def micro_steps(self):
        # Not an ordinary attribute: Keras puts a copy in place of a list.
        return self.__dict__.setdefault("rows_seen", [])

    @property
    def examples_seen(self):
        return [x for rows in self.micro_steps for x in rows]


class EachUpdate(keras.callbacks.Callback):
    """Keeps what can be seen after each call of the train function."""

    def __init__(self):
        super().__init__()
        self.updates = []
        self.weights = []
        self.iterations = []
        self.optimizer_states = []

    def on_train_batch_end(self, batch, logs=None):
        self.updates += self.model.last_updates
        self.weights.append(weights_of(self.model))
        self.iterations.append(iterations_of(self.model))
        self.optimizer_states.append(
            [value_of(self.model, v) for v in self.model.optimizer.variables]
        )

    def of_updates(self, name):
        """One field of `tfaccum.Update`, for all updates."""
        return [getattr(update, name) for update in self.updates]


class Stopped(Exception):
    """What `StopAfter` raises."""


class StopAfter(keras.callbacks.Callback):
    """Ends `fit` as a crash would, after so many train calls."""

    runs_last = True

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def on_train_batch_end(self, batch, logs=None):
        self.calls -= 1
        if not self.calls:
            raise Stopped


class MeanOfRows(tfaccum.Model):
    """An embedding of ragged rows of ids; the loss is the mean over rows."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(
            100, 4, embeddings_initializer="zeros"
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            vectors = self.table(data.values)
            loss = tf.reduce_sum(vectors) / tf.cast(data.nrows(), tf.float32)
        self.accumulate(tape, loss, weight=data.nrows())
        return {}


def strategy_of(replicas):
    """No strategy for one replica, MirroredStrategy for more."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])


def worker_strategy(replicas):
    """The strategy of a worker with so many replicas.

    Gradients travel in packs of `BYTES_PER_PACK`, if that is set.
    """
    if replicas > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
        )
    return tfaccum.make_strategy(
        bytes_per_pack=int(os.environ.get("BYTES_PER_PACK", "0"))
    )


def scalar(start=0.0, name="w", **arguments):
    """A layer that multiplies a last axis of size 1 by one weight."""
    return keras.layers.Dense(
        1,
        use_bias=False,
        kernel_initializer=keras.initializers.Constant(start),
        name=name,
        **arguments,
    )


def toy(
    replicas=1,
    *,
    strategy=None,
    layers=None,
    shape=(1,),
    start=0.0,
    optimizer=None,
    loss=product,
    model_class=tfaccum.Model,
    **compile_arguments,
):
    """T, compiled.

    `layers` is a function that gives layers for the place of the one scalar,
    and `optimizer` one that makes an optimizer: both are called under the
    strategy.
    """
    with (strategy or strategy_of(replicas)).scope():
        inputs = keras.Input(shape)
        outputs = inputs
        for layer in layers() if layers else [scalar(start)]:
            outputs = layer(outputs)
        model = model_class(inputs, outputs)
        model.compile(
            optimizer=optimizer() if optimizer else keras.optimizers.SGD(1.0),
            loss=loss,
            **compile_arguments,
        )
    return model


def batches(*xs, weights=None, is_size_known=True):
    """A dataset of one batch for each list of x, with weights or without.

    An x is a number, or the list of a sequence's tokens.
    """
    xs = [np.array(x, np.float32)[..., np.newaxis] for x in xs]
    parts = [xs, [np.zeros_like(x) for x in xs]]
    if weights is not None:
        parts.append([np.array(w, np.float32) for w in weights])
    dataset = tf.data.Dataset.from_generator(
        lambda: zip(*parts, strict=True),
        output_signature=tuple(
            tf.TensorSpec([None, *part[0].shape[1:]], tf.float32)
            for part in parts
        ),
    )
    if is_size_known:
        size = tf.data.experimental.assert_cardinality(len(xs))
        dataset = dataset.apply(size)
    return dataset


def aligned(number, rows):
    """Batches of so many rows, all of this number, that TensorFlow shares.

    float32 [rows, 16]: every row begins where TensorFlow wants tensors to.
    """
    found = []
    for count in rows:
        memory = np.empty(64 * (count + 1), np.uint8)
        start = -memory.ctypes.data % 64
        values = memory[start : start + 64 * count].view(np.float32)
        values[:] = number
        found.append(values.reshape(count, 16))
    return found


def from_generator(batches):
    """A dataset of these very arrays."""
    return tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=tf.TensorSpec([None, 16], tf.float32),
    )


class Negated(tfaccum.Model):
    """One weight; the loss is the mean of w * -x, and -x may take x's place."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(), initializer="zeros", name="w")

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        x = x.values if isinstance(x, tf.RaggedTensor) else x
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.w * -x)
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return {}

    @classmethod
    def compiled(cls, strategy, **how):
        with strategy.scope():
            model = cls()
            model.compile(keras.optimizers.SGD(1.0), **how)
        return model


def fit(model, dataset, **arguments):
    """Trains silently and returns what was seen after each update."""
    seen = EachUpdate()
    callbacks = [seen, *arguments.pop("callbacks", [])]
    arguments = {"verbose": 0, **arguments}
    seen.logs = model.fit(dataset, callbacks=callbacks, **arguments).history
    return seen


def value_of(model, variable):
    """A variable's value, which has to be the same on every replica."""
    strategy = model.distribute_strategy
    first, *others = (
        copy.numpy()
        for copy in strategy.experimental_local_results(variable.value)
    )
    for other in others:
        np.testing.assert_array_equal(first, other)
    return first


def iterations_of(model):
    """Updates that the compiled optimizer has made."""
    return value_of(model, model.optimizer.iterations).item()


def weights_of(model):
    """The trainable scalars."""
    return [value_of(model, v).item() for v in model.trainable_variables]


def weight_of(model):
    """The scalar w."""
    (w,) = weights_of(model)
    return w
