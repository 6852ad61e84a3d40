"""BatchNorm as two workers see it; each function returns plain values.

`tests/test_layers_multi_worker.py` says what has to come out.
"""

import keras
import numpy as np

import tfaccum
from tests import toy
from tests.multi_worker import graphs

# What each worker has: windows of two batches of each.
UNEVEN = (
    [[1, 2, 6], [4, 0], [3], [8, 8], [5]],
    [[10], [20, 25], [30]],
)
MOMENTUM = 0.5


def network(strategy, layer, model_class=tfaccum.Model, shape=(1,), **how):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input(shape)
        outputs = keras.layers.Dense(1)(layer(inputs))
        model = model_class(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse", **how)
    model.norm = layer
    return model


def window_layer():
    return tfaccum.layers.WindowBatchNormalization(momentum=MOMENTUM)


def synchronized():
    return keras.layers.BatchNormalization(momentum=MOMENTUM, synchronized=True)


def statistics(model):
    return [
        toy.value_of(model, variable).tolist()
        for variable in (model.norm.moving_mean, model.norm.moving_variance)
    ]


def uneven(context):
    return toy.batches(*UNEVEN[context.input_pipeline_id])


def rows():
    rng = np.random.default_rng(9)
    return (rng.normal(size=(21, 3)) * [1, 2, 3] + 4).astype("float32")


def windows(strategy):
    """Shared rows in each way, ragged at the end; then uneven workers."""
    x = rows()
    found = {}
    for name, how in {
        "one": {},
        "two": {"gradient_accumulation_steps": 2},
        "cut": {"micro_batch_size": 2},
        "jit": {"micro_batch_size": 2, "jit_compile": True},
    }.items():
        model = network(strategy, window_layer(), shape=(3,), **how)
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        found[name] = statistics(model)
    model = network(strategy, window_layer(), gradient_accumulation_steps=2)
    model.fit(uneven, epochs=2, verbose=0)
    found["uneven"] = statistics(model)
    return found


def skipped(strategy):
    """NaN on worker 1 alone, in the second window of three."""
    x = rows()[:12]
    y = np.where(np.arange(12) == 7, np.nan, 0).astype("float32")[:, None]
    model = network(
        strategy, window_layer(), shape=(3,), gradient_accumulation_steps=2
    )
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(statistics(model))

    model.fit(x, y, 2, shuffle=False, verbose=0, callbacks=[Look()])
    return seen


def collectives(strategy):
    """Of the micro-step, and of the whole train function."""
    x = rows()
    model = network(
        strategy, window_layer(), shape=(3,), gradient_accumulation_steps=2
    )
    with graphs.traced() as traced:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    traced = [graph for graph in traced if graphs.operations(graph)]
    whole = max(traced, key=lambda graph: len(graphs.operations(graph)))
    return graphs.collectives(whole)


def communicating(strategy):
    """Keras' synchronized layer where it is safe; errors where not."""
    x = rows()
    found = {}
    for name, steps in (("one", 1), ("two", 2)):
        model = network(
            strategy,
            synchronized(),
            shape=(3,),
            gradient_accumulation_steps=steps,
        )
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        found[name] = statistics(model)
    model = network(strategy, synchronized())
    model.fit(uneven, epochs=2, verbose=0)
    found["uneven"] = statistics(model)
    for name, data, how in (
        ("cut", (x, x[:, :1]), {"micro_batch_size": 2}),
        ("uneven_two", (uneven,), {"gradient_accumulation_steps": 2}),
    ):
        shape = (1,) if name == "uneven_two" else (3,)
        model = network(strategy, synchronized(), shape=shape, **how)
        try:
            model.fit(*data, verbose=0)
        except ValueError as error:
            found[name] = str(error)
    return found


def one_stops(strategy):
    """Worker 1 alone asks to stop, after the first of three windows."""
    x = rows()
    model = network(
        strategy, synchronized(), shape=(3,), gradient_accumulation_steps=2
    )

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            worker, _ = tfaccum.strategy.worker_index(strategy)
            self.model.stop_training = worker == 1

    model.fit(x, x[:, :1], 4, shuffle=False, verbose=0, callbacks=[Stop()])
    return statistics(model)
