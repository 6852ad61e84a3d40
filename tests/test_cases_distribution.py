"""Cases D: replicas that see different data make one update."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.multi_worker import graphs

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    **{
        name: lambda name=name: getattr(keras.optimizers, name)(0.05)
        for name in (
            "Adam",
            "AdamW",
            "RMSprop",
            "Adagrad",
            "Adadelta",
            "Adamax",
            "Nadam",
            "Ftrl",
            "Lion",
            "Adafactor",
            "Lamb",
            "Muon",
            "ScheduleFreeAdamW",
        )
        if hasattr(keras.optimizers, name)
    },
    "Everything": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5),
        weight_decay=0.1,
        clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
}


def regression(model_class=keras.Model, batch_norm=False):
    """A small network whose start is always the same."""
    keras.utils.set_random_seed(11)
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, activation="tanh")(inputs)
    if batch_norm:
        x = keras.layers.BatchNormalization(momentum=0.5)(x)
    return model_class(inputs, keras.layers.Dense(2)(x))


def rows(number, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, 3)).astype(keras.config.floatx())
    return x, x[:, :2] * rng.normal(size=(number, 2)).astype(x.dtype)


def state(model):
    """All weights and optimizer variables, the same on every replica."""
    return [
        (v.path, toy.value_of(model, v))
        for v in model.variables + model.optimizer.variables
    ]


# --- D1, D2: nothing crashes ----------------------------------------------


SEVEN = [[1, 2], [3, 4], [5, 9], [2, 2], [8, 0], [1, 5], [4]]
# The means of the windows of 3, 3 and 1 batches are 4, 3 and 4.
AFTER_EACH = [-4, -7, -11]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_D1_windows_under_mirrored_strategy(replicas, eager):
    model = toy.toy(replicas, gradient_accumulation_steps=3, run_eagerly=eager)
    seen = toy.fit(model, toy.batches(*SEVEN))
    assert [w for (w,) in seen.weights] == AFTER_EACH
    assert seen.iterations == [1, 2, 3]


class OwnStep(tfaccum.Model):
    """A mean over sums of products, with a log of its own."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True))
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return {"largest": tf.reduce_mean(x)}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_D2_own_train_step(replicas, eager):
    model = toy.toy(
        replicas,
        model_class=OwnStep,
        gradient_accumulation_steps=3,
        run_eagerly=eager,
    )
    seen = toy.fit(model, toy.batches(*SEVEN))
    assert [w for (w,) in seen.weights] == AFTER_EACH
    assert seen.of_updates("weight") == [6, 6, 1]
    # A log is the mean over the examples of the last window.
    assert seen.logs["largest"] == [4]


# --- D3: nothing moves inside a window ------------------------------------


class LogState(tfaccum.Model):
    """Keeps weights and slots as every micro-step finds them."""

    def train_step(self, data):
        variables = self.trainable_variables + self.optimizer.variables

        def write(*values):
            self.found.append([v.numpy().tolist() for v in values])

        tf.py_function(write, [tf.identity(v.value) for v in variables], [])
        return super().train_step(data)

    @property
    def found(self):
        # Not an ordinary attribute: Keras puts a copy in place of a list.
        return self.__dict__.setdefault("states_found", [])


@pytest.mark.parametrize("eager", [False, True])
def test_D3_momentum_moves_once_per_update(eager):
    model = toy.toy(
        model_class=LogState,
        optimizer=lambda: keras.optimizers.SGD(1.0, momentum=0.9),
        gradient_accumulation_steps=4,
        run_eagerly=eager,
    )
    seen = toy.fit(
        model,
        toy.batches([1], [2], [3], [6], [0], [0], [0], [0], [1], [1], [4]),
    )
    # Gradients 3, 0 and 2; v = 0.9 v - g; w = w + v.
    velocities = np.float32([-3, -2.7, -0.9 * 2.7 - 2])
    np.testing.assert_allclose(
        [w for (w,) in seen.weights], np.cumsum(velocities), rtol=1e-6
    )
    (slot,) = [
        i
        for i, v in enumerate(model.optimizer.variables)
        if "momentum" in v.path
    ]
    np.testing.assert_allclose(
        [np.ravel(s[slot])[0] for s in seen.optimizer_states],
        velocities,
        rtol=1e-6,
    )
    assert len(model.found) == 11
    for first in (0, 4, 8):
        window = model.found[first : first + 4]
        assert all(found == window[0] for found in window)
    assert model.found[3] != model.found[4] != model.found[8]


# --- D4: every optimizer --------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_D4_one_device_k1_is_keras_to_the_bit(name):
    states = []
    for model_class in (keras.Model, tfaccum.Model):
        model = regression(model_class)
        model.compile(OPTIMIZERS[name](), "mse")
        # ScheduleFreeAdamW loses its start when Keras builds it in a trace.
        model.optimizer.build(model.trainable_variables)
        history = model.fit(
            *rows(30), batch_size=8, epochs=2, shuffle=False, verbose=0
        )
        states.append((state(model), history.history["loss"]))
    (expected, losses), (found, found_losses) = states
    for (path, value), (_, wanted) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, wanted, err_msg=path)
    assert found_losses == losses


@functools.cache
def one_big_batch(name):
    model = regression()
    model.compile(OPTIMIZERS[name](), "mse", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    model.fit(*rows(13), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return state(model)


# Those whose update is not element by element, or is done in several parts.
QUICK = ("Adam", "Adafactor", "Lamb", "Lion", "Muon", "Everything")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in QUICK else pytest.mark.slow)
        for n in OPTIMIZERS
    ],
)
def test_D4_two_replicas_k2_is_one_big_batch(name):
    keras.config.set_floatx("float64")
    with toy.strategy_of(2).scope():
        model = regression(tfaccum.Model)
        model.compile(
            OPTIMIZERS[name](),
            "mse",
            gradient_accumulation_steps=2,
            run_eagerly=True,  # Tracing takes most of the time.
        )
    model.fit(*rows(13), batch_size=4, epochs=2, shuffle=False, verbose=0)
    expected = one_big_batch(name)
    for (path, value), (_, wanted) in zip(state(model), expected, strict=True):
        np.testing.assert_allclose(
            value, wanted, rtol=1e-9, atol=1e-11, err_msg=path
        )


# --- D6: mixed precision --------------------------------------------------


def test_D6_mixed_float16_under_mirrored_strategy():
    keras.config.set_dtype_policy("mixed_float16")
    model = toy.toy(2, gradient_accumulation_steps=2)
    optimizer = model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # 2**15 times 2 would be infinite in float16.
    toy.fit(model, toy.batches([0.25, 0.5], [1.25, 1]))
    assert toy.weight_of(model) == -0.75
    assert toy.value_of(model, optimizer.step_counter) == 1
    assert toy.value_of(model, optimizer.dynamic_scale) == 2**15


# --- D7: sparse gradients -------------------------------------------------


def test_D7_replicas_with_different_numbers_of_ids():
    ragged = tf.ragged.constant([[1, 1, 2, 3, 99, 1], [2, 7]])
    with toy.strategy_of(2).scope():
        model = toy.MeanOfRows()
        model.table.build()
        model.compile(keras.optimizers.SGD(1.0))
    model.fit(tf.data.Dataset.from_tensors(ragged), verbose=0)
    expected = np.zeros((100, 4), np.float32)
    np.add.at(expected, [1, 1, 2, 3, 99, 1, 2, 7], -1 / 2)
    np.testing.assert_array_equal(
        toy.value_of(model, model.table.embeddings), expected
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_D7_embedding_layer_with_uneven_rows(steps):
    ids = np.array([[1, 1], [2, 3], [99, 1], [5, 2], [1, 7]])
    with toy.strategy_of(2).scope():
        inputs = keras.Input((2,), dtype="int32")
        layer = keras.layers.Embedding(100, 4, embeddings_initializer="zeros")
        model = tfaccum.Model(inputs, layer(inputs))
        model.compile(
            keras.optimizers.SGD(1.0),
            loss=lambda y, y_pred: tf.reduce_sum(y_pred, (1, 2)),
            gradient_accumulation_steps=steps,
        )
    model.fit(
        ids, np.zeros((5, 1)), batch_size=3, shuffle=False, verbose=0
    )  # The replicas see 4 and 2 ids, then 2 and 2.
    expected = np.zeros((100, 4), np.float32)
    if steps == 1:
        np.add.at(expected, ids[:3].ravel(), -1 / 3)
        np.add.at(expected, ids[3:].ravel(), -1 / 2)
    else:
        np.add.at(expected, ids.ravel(), -1 / 5)
    np.testing.assert_allclose(
        toy.value_of(model, layer.embeddings), expected, atol=1e-6
    )


# --- D8: metrics ----------------------------------------------------------


def classifier(model_class, strategy=None, **arguments):
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(3, activation="softmax")(inputs)
        model = model_class(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.0),
            "sparse_categorical_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.SparseTopKCategoricalAccuracy(2),
            ],
            weighted_metrics=["sparse_categorical_crossentropy"],
            **arguments,
        )
    return model


@pytest.mark.parametrize(
    "replicas,steps",
    [(2, 1), (2, 3), pytest.param(4, 3, marks=pytest.mark.slow)],
)
def test_D8_metrics_are_those_of_one_device(replicas, steps):
    x, _ = rows(19)
    data = {
        "x": x,
        "y": np.random.default_rng(1).integers(0, 3, 19),
        "sample_weight": np.linspace(0.1, 2, 19),
        "verbose": 0,
    }
    keras_model = classifier(keras.Model)
    expected = keras_model.evaluate(**data, batch_size=19, return_dict=True)
    model = classifier(
        tfaccum.Model,
        toy.strategy_of(replicas),
        gradient_accumulation_steps=steps,
    )
    # The learning rate is 0: training and evaluation see the same model.
    fit = model.fit(**data, batch_size=5, shuffle=False).history
    found = model.evaluate(**data, batch_size=5, return_dict=True)
    assert 0 < found["accuracy"] < 1
    assert found == pytest.approx(expected, rel=1e-6)
    assert {k: v for k, (v,) in fit.items()} == pytest.approx(
        expected, rel=1e-6
    )


# --- D10: one reduction per window ----------------------------------------


class Marked(tfaccum.Model):
    """A model whose forward pass can be found in a graph."""

    def train_step(self, data):
        x, y = data
        return super().train_step((tf.identity(x, "in_micro_step"), y))

    def test_step(self, data):
        x, y = data
        return super().test_step((tf.identity(x, "in_micro_step"), y))


def is_micro_step(graph):
    return any("in_micro_step" in name for _, name in graphs.operations(graph))


def train_and_micro_step(model, train):
    """The graphs of the whole train function and of the micro-step in it."""
    with graphs.traced() as traced:
        train()
    found = sorted(
        filter(is_micro_step, traced), key=lambda g: len(graphs.operations(g))
    )
    assert len(found) == 2, "one trace of each"
    return found[1], found[0]


@pytest.mark.parametrize(
    "how",
    [
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 8},
        {"micro_batch_size": 1},
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3},
    ],
    ids=str,
)
def test_D10_one_packed_all_reduce_per_window(how):
    with toy.strategy_of(2).scope():
        model = regression(Marked, batch_norm=True)
        model.compile("adam", "mse", metrics=["mae"], **how)
    whole, micro_step = train_and_micro_step(
        model, lambda: model.fit(*rows(12), batch_size=4, verbose=0)
    )
    assert graphs.collectives(micro_step) == []
    # One for each device: everything is float32, and travels packed.
    assert graphs.collectives(whole) == ["CollectiveReduceV2"] * 2


def test_D10_the_reduction_is_outside_of_the_loop():
    """The whole function's only one is not in the body of its loop."""
    with toy.strategy_of(2).scope():
        model = regression(Marked)
        model.compile("sgd", "mse", gradient_accumulation_steps=4)
    whole, _ = train_and_micro_step(
        model, lambda: model.fit(*rows(8), batch_size=4, verbose=0)
    )
    definition = whole.as_graph_def()
    own = [node.op for node in definition.node]
    assert own.count("While") + own.count("StatelessWhile") == 1
    assert [op for op in own if op in graphs.COLLECTIVES] == (
        graphs.collectives(whole)
    )


def test_D10_one_all_reduce_per_dtype():
    with toy.strategy_of(2).scope():
        inputs = keras.Input((3,))
        x = keras.layers.Dense(2, dtype="float64")(inputs)
        outputs = keras.layers.Dense(1, dtype="float32")(x)
        model = Marked(inputs, outputs)
        model.compile("sgd", "mse", gradient_accumulation_steps=2)
    x, y = rows(8)
    whole, micro_step = train_and_micro_step(
        model, lambda: model.fit(x, y[:, :1], batch_size=4, verbose=0)
    )
    assert graphs.collectives(micro_step) == []
    assert graphs.collectives(whole) == ["CollectiveReduceV2"] * 4


def test_D10_evaluation_reduces_once_per_batch():
    with toy.strategy_of(2).scope():
        model = regression(Marked)
        model.compile("sgd", "mse", metrics=["mae"])
    whole, micro_step = train_and_micro_step(
        model, lambda: model.evaluate(*rows(8), batch_size=4, verbose=0)
    )
    assert graphs.collectives(micro_step) == []
    assert graphs.collectives(whole) == ["CollectiveReduceV2"] * 2


def test_D10_one_device_never_communicates():
    model = regression(Marked)
    model.compile("sgd", "mse", gradient_accumulation_steps=2)
    whole, _ = train_and_micro_step(
        model, lambda: model.fit(*rows(8), batch_size=4, verbose=0)
    )
    assert graphs.collectives(whole) == []


# --- D12, D13: replicas stay in step --------------------------------------


def test_D12_D13_twenty_windows_keep_replicas_equal_to_the_bit():
    """Weights, slots and BatchNorm's statistics, after every update."""
    with toy.strategy_of(2).scope():
        model = regression(tfaccum.Model, batch_norm=True)
        model.compile(
            keras.optimizers.Adam(0.05), "mse", gradient_accumulation_steps=2
        )
    states = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(state(model))  # Equal on both, or it raises.

    model.fit(
        *rows(120), batch_size=3, shuffle=False, verbose=0, callbacks=[Look()]
    )
    assert len(states) == 20
    for before, after in zip(states[:-1], states[1:], strict=True):
        for (path, old), (_, new) in zip(before, after, strict=True):
            assert np.array_equal(old, new) == ("learning_rate" in path), path


def test_D13_twenty_windows_are_all_reduced():
    rng = np.random.default_rng(5)
    xs = rng.integers(-8, 8, size=(20, 2, 4)).tolist()
    model = toy.toy(2, gradient_accumulation_steps=2)
    seen = toy.fit(model, toy.batches(*[x for window in xs for x in window]))
    expected = -np.cumsum(np.mean(xs, (1, 2)))
    assert [w for (w,) in seen.weights] == expected.tolist()


def test_D12_a_replica_that_is_out_of_step_is_seen():
    """What these tests rely on: `value_of` compares all replicas."""
    model = toy.toy(2)
    copies = model.distribute_strategy.experimental_local_results(
        model.trainable_variables[0].value
    )
    copies[1].assign_add([[1e-7]])
    with pytest.raises(AssertionError):
        toy.weight_of(model)


# --- D16: no difference between strategies --------------------------------

STRATEGIES = {
    "none": lambda: tf.distribute.get_strategy(),
    "one_device": lambda: tfaccum.make_strategy(["CPU:0"]),
    "mirrored2": lambda: tfaccum.make_strategy(["CPU:0", "CPU:1"]),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_D16_the_strategy_makes_no_difference(name, steps):
    """T with windows of 6 and 4 examples; two worker processes elsewhere."""
    model = toy.toy(
        strategy=STRATEGIES[name](), gradient_accumulation_steps=steps
    )
    x = [[1, 2], [3, 4], [5, 9], [2, 2], [8]]
    losses = toy.fit(model, toy.batches(*x)).logs["loss"]
    means = [24 / 6, 12 / 3] if steps == 3 else [1.5, 3.5, 7, 2, 8]
    assert toy.weight_of(model) == pytest.approx(-sum(means), abs=1e-6)
    before = np.cumsum([0, *means[:-1]])
    sizes = [6, 3] if steps == 3 else [2, 2, 2, 2, 1]
    # The mean over all examples of w * x, with the w of their window.
    expected = -np.average(before * means, weights=sizes)
    assert losses == pytest.approx([expected], rel=1e-6)
