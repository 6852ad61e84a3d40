"""What workers have to agree on; see `tests/test_agreement.py`."""

import keras
import numpy as np
import tensorflow as tf

import tfaccum
from tests import toy
from tests.multi_worker import checks, graphs
from tfaccum import callbacks

FIT = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}


def network(strategy, **arguments):
    """Everything that has a state: dropout, statistics, slots, an average."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input((3,))
        x = keras.layers.Dropout(0.5, seed=1)(inputs)
        x = keras.layers.BatchNormalization(momentum=0.5)(x)
        model = tfaccum.Model(inputs, keras.layers.Dense(1)(x))
        model.compile(
            keras.optimizers.Adam(0.1, use_ema=True),
            "mse",
            metrics=["mae"],
            gradient_accumulation_steps=2,
            **arguments,
        )
    return model


def data():
    x = np.random.default_rng(0).normal(size=(78, 3)).astype("float32")
    return x, x[:, :1]


def index_of(strategy):
    return strategy.cluster_resolver.task_id


class StopAt(keras.callbacks.Callback):
    """Asks to stop on some workers; keeps the state after each update."""

    def __init__(self, workers, call=None, epoch=None):
        super().__init__()
        self.workers, self.call, self.epoch = workers, call, epoch
        self.states, self.metrics, self.epochs = [], [], []

    def stop(self):
        if index_of(self.model.distribute_strategy) in self.workers:
            self.model.stop_training = True

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(checks.bits(self.model))
        self.metrics.append(dict(logs))
        if len(self.states) == self.call:
            self.stop()

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.stop()


class StateAtEnd(keras.callbacks.Callback):
    """Before the moving average takes the place of the weights."""

    def on_epoch_end(self, epoch, logs=None):
        self.state = checks.bits(self.model)


def stopped(strategy, stop, dataset=None, **arguments):
    model = network(strategy, **arguments)
    end = StateAtEnd()
    x, y = data()
    if dataset is not None:
        x, y = dataset, None
    fit = {**FIT, "batch_size": None} if dataset is not None else FIT
    history = model.fit(x, y, callbacks=[stop, end], **fit).history
    return {
        "updates": toy.iterations_of(model),
        "epochs": stop.epochs,
        "left_no_trace": end.state == stop.states[-1],
        "mae": history["mae"],
        "last_mae": stop.metrics[-1]["mae"],
        "state": end.state,
    }


def stops(strategy):
    """20 batches, 10 updates an epoch."""
    unknown = tf.data.Dataset.from_tensor_slices(data()).batch(4)
    unknown = unknown.filter(lambda *_: True)
    return {
        "worker_1": stopped(strategy, StopAt([1], call=5)),
        "chief": stopped(strategy, StopAt([0], call=5)),
        "all": stopped(strategy, StopAt([0, 1], call=5)),
        "eagerly": stopped(strategy, StopAt([1], call=5), run_eagerly=True),
        "three_windows_a_call": stopped(
            strategy, StopAt([1], call=2), steps_per_execution=3
        ),
        "unknown_size": stopped(strategy, StopAt([1], call=5), unknown),
        "last_batch": stopped(strategy, StopAt([1], call=10)),
        "last_batch_of_unknown_size": stopped(
            strategy, StopAt([1], call=10), unknown
        ),
        "epoch_end": stopped(strategy, StopAt([1], epoch=1)),
    }


class StopEvaluation(keras.callbacks.Callback):
    def __init__(self, worker):
        super().__init__()
        self.worker, self.calls = worker, 0

    def stop(self, name):
        self.calls += 1
        is_here = index_of(self.model.distribute_strategy) == self.worker
        if self.calls == 2 and is_here:
            setattr(self.model, name, True)

    def on_test_batch_end(self, batch, logs=None):
        self.stop("stop_evaluating")

    def on_predict_batch_end(self, batch, logs=None):
        self.stop("stop_predicting")


def evaluation_stops(strategy):
    model = toy.toy(strategy=strategy, start=1.0)
    x = checks.column(range(20))
    loss = model.evaluate(x, x, 4, 0, callbacks=[StopEvaluation(1)])
    rows = model.predict(x, 4, 0, callbacks=[StopEvaluation(1)])
    return [loss, rows.ravel().tolist()]


def plateau_and_early_stopping(strategy):
    """Validation stands still, so that both callbacks act."""
    model = toy.toy(strategy=strategy)
    x = checks.column([0, 0, 0, 0])
    history = model.fit(
        x,
        x,
        batch_size=2,
        epochs=9,
        verbose=0,
        shuffle=False,
        validation_data=(x, x),
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
            keras.callbacks.EarlyStopping(patience=3),
        ],
    ).history
    return [len(history["loss"]), history["learning_rate"]]


def refused(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "accepted"


def differences(strategy):
    """Worker 1 does something else each time; then all is well again."""
    mine = index_of(strategy)
    x = checks.column(range(8))

    def fit(rows=x, x_arguments=(), optimizer=None, **arguments):
        keras.utils.set_random_seed(5)
        model = toy.toy(
            strategy=strategy, optimizer=optimizer, **dict(x_arguments)
        )
        if isinstance(rows, tf.data.Dataset):
            model.fit(tf.data.Dataset.zip((rows, rows)), verbose=0)
        else:
            model.fit(
                rows, rows, **{"batch_size": 4, "verbose": 0, **arguments}
            )

    def seeded():
        keras.utils.set_random_seed(mine)
        toy.toy(strategy=strategy).fit(x, x, verbose=0)

    return {
        "epochs": refused(lambda: fit(epochs=1 + mine)),
        "gradient_accumulation_steps": refused(
            lambda: fit(
                x_arguments={"gradient_accumulation_steps": 1 + mine}.items()
            )
        ),
        "content of the data": refused(lambda: fit(x + mine)),
        "elements of the data": refused(
            lambda: fit(
                tf.data.Dataset.from_tensors(x.astype(f"f{4 + 4 * mine}"))
            )
        ),
        "number of batches of the data": refused(
            lambda: fit(x, batch_size=4 - mine)
        ),
        "optimizer.momentum": refused(
            lambda: fit(
                optimizer=lambda: keras.optimizers.SGD(1.0, momentum=mine / 2)
            )
        ),
        "seed": refused(seeded),
        "nothing": refused(fit),
    }


def same_share(strategy):
    """A function that forgets to look at which worker it is for."""
    model = toy.toy(strategy=strategy)
    return [
        refused(
            lambda: model.fit(lambda context: toy.batches([1, 2]), verbose=0)
        ),
        refused(lambda: model.fit(checks.uneven(), verbose=0)),
    ]


def compare_replicas(strategy):
    """A weight of worker 1 is changed behind the back of all."""

    class Corrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and index_of(strategy) == 1:
                kernel = self.model.layers[-1].kernel.value
                (local,) = strategy.experimental_local_results(kernel)
                local.assign_add(tf.one_hot([2], 3)[0][:, tf.newaxis] * 1e-6)

    found = {}
    for name, used in (
        ("well", [callbacks.CompareReplicas(1)]),
        ("corrupt", [Corrupt(), callbacks.CompareReplicas(2)]),
    ):
        model = network(strategy)
        x, y = data()
        try:
            model.fit(x, y, callbacks=used, **FIT)
            found[name] = "equal"
        except RuntimeError as error:
            found[name] = str(error)
        found[f"{name} updates"] = toy.iterations_of(model)
    found["path"] = model.layers[-1].kernel.path
    return found


def wire_dtypes(strategy):
    """Weights after training, and elements of each collective by dtype."""
    found = {}
    for wire_dtype in (None, "bfloat16", "float16"):
        with graphs.traced() as traced:
            model = toy.toy(
                strategy=strategy,
                gradient_accumulation_steps=2,
                wire_dtype=wire_dtype,
            )
            toy.fit(model, toy.batches([1, 3], [5, 9], [2, 4], [8]))
        sizes = max(map(graphs.collective_sizes, traced), key=len)
        found[str(wire_dtype)] = [toy.weight_of(model), sizes]
    return found
