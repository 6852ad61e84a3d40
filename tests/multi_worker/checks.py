"""What two workers are made to do; each function returns plain values.

`tests.multi_worker.worker` runs them by name in every worker process, and
`tests/test_multi_worker.py` says what has to come out.
"""

import os

import keras
import numpy as np
import tensorflow as tf

import tfaccum
import tfaccum.data
from tests import toy
from tests.multi_worker import graphs

INF = float("inf")
PADDING = -1.0
GOOD = [0.25, 0.5]


def column(values):
    return np.array(values, np.float32).reshape(-1, 1)


def bits(model):
    """All weights and optimizer variables as text, to compare workers."""
    return [
        v.numpy().tobytes().hex()
        for v in model.variables + model.optimizer.variables
    ]


def seen_values(seen):
    """What `toy.fit` returned, as plain values."""
    return {
        "weights": [w for (w,) in seen.weights],
        "iterations": seen.iterations,
        "examples": seen.of_updates("examples"),
        "loss": seen.logs["loss"],
    }


# --- Input ----------------------------------------------------------------


def shuffle_needs_a_seed(strategy):
    """Has to run before anything sets a seed."""
    model = toy.toy(strategy=strategy)
    x = column(range(8))
    try:
        model.fit(x, x, verbose=0)
    except ValueError as error:
        return str(error)
    return "accepted"


def shuffle_with_a_seed(strategy):
    keras.utils.set_random_seed(12)
    model = toy.toy(strategy=strategy, model_class=toy.LogRows)
    x = column(range(11))
    model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    return [model.examples_seen, toy.weight_of(model)]


# Worker 0 has five micro-batches and worker 1 has four.
UNEVEN = (
    [[1, 1], [2, 2], [3], [4, 4], [5]],
    [[10], [20, 20], [30], [40, 41, 42]],
)


def uneven(is_size_known=True, sources=UNEVEN):
    def dataset(context):
        assert context.num_input_pipelines == 2
        mine = sources[context.input_pipeline_id]
        if not mine:
            return toy.batches([1]).take(0)
        return toy.batches(*mine, is_size_known=is_size_known)

    return dataset


def five_and_four(strategy):
    model = toy.toy(strategy=strategy, gradient_accumulation_steps=2)
    return seen_values(toy.fit(model, uneven(), epochs=2))


def five_and_four_of_unknown_size(strategy):
    """And several windows in one call."""
    model = toy.toy(
        strategy=strategy,
        gradient_accumulation_steps=2,
        steps_per_execution=2,
    )
    found = seen_values(toy.fit(model, uneven(is_size_known=False), epochs=2))
    found["evaluated"] = model.evaluate(uneven(is_size_known=False), verbose=0)
    return found


def a_worker_without_data(strategy):
    """Two windows in each epoch, whether the number of batches is known."""
    sources = ([[1, 3], [5], [7], [9]], [])
    return [
        seen_values(
            toy.fit(
                toy.toy(strategy=strategy, gradient_accumulation_steps=2),
                uneven(is_size_known, sources),
                epochs=2,
            )
        )
        for is_size_known in (True, False)
    ]


def one_row_for_two_workers(strategy):
    """The last batch leaves worker 1 without a row."""
    model = toy.toy(strategy=strategy, model_class=toy.LogRows)
    x = column([1, 2, 3, 4, 9])
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    return [model.examples_seen, toy.weight_of(model)]


def own_arrays(strategy):
    """Each worker takes its rows of arrays that are the user's."""
    found = []
    for micro_batch_size in (None, 1):
        batches = toy.aligned(7, rows=[2, 5, 4])
        model = toy.Negated.compiled(
            strategy, micro_batch_size=micro_batch_size
        )
        model.fit(toy.from_generator(batches), epochs=2, verbose=0)
        found.append([batch.tolist() for batch in batches])
    return found


class SeesIds(tfaccum.Model):
    """Keeps the ids of the examples that this worker trains on."""

    def train_step(self, data):
        x, y, ids = data

        def write(values):
            self.ids.append(values.numpy().tolist())

        tf.py_function(write, [ids], [])
        return super().train_step((x, y))

    @property
    def ids(self):
        # Not an ordinary attribute: Keras puts a copy in place of a list.
        return self.__dict__.setdefault("ids_seen", [])


def pipeline(data_dir):
    return tfaccum.data.Pipeline(
        name="digits",
        split="train",
        batch_size=250,
        data_dir=data_dir,
        with_ids=True,
        map_fn=lambda example: (
            tf.cast(example["image"], tf.float32),
            example["label"],
            example[tfaccum.data.ID],
        ),
    )


def digits(strategy):
    data = pipeline(os.environ["DIGITS"])
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        outputs = keras.layers.Dense(10, activation="softmax")(
            keras.layers.Flatten()(inputs)
        )
        model = SeesIds(inputs, outputs)
        model.compile(
            "sgd",
            "sparse_categorical_crossentropy",
            gradient_accumulation_steps=3,
        )
    updates = []
    epochs = []
    for epoch in range(2):
        model.ids.clear()
        model.fit(data, initial_epoch=epoch, epochs=epoch + 1, verbose=0)
        epochs.append([id for ids in model.ids for id in ids])
        updates.append(toy.iterations_of(model))
    return {"ids": epochs, "updates": updates, "examples": data.num_examples}


# --- The law --------------------------------------------------------------


def t_for_each_window(strategy):
    """T with windows of one and of three batches, and eagerly."""
    x = [[1, 2], [3, 4], [5, 9], [2, 2], [8]]
    return [
        seen_values(
            toy.fit(toy.toy(strategy=strategy, **arguments), toy.batches(*x))
        )
        for arguments in (
            {"gradient_accumulation_steps": 1},
            {"gradient_accumulation_steps": 3},
            {"gradient_accumulation_steps": 3, "run_eagerly": True},
            {"micro_batch_size": 1},
        )
    ]


def masked_tokens(strategy):
    """One valid 8 on worker 0; seven valid zeros on worker 1."""
    model = toy.toy(
        strategy=strategy,
        layers=lambda: [keras.layers.Masking(PADDING), toy.scalar()],
        shape=(8, 1),
    )
    rows = [[8] + [PADDING] * 7, [0] * 7 + [PADDING]]
    toy.fit(model, toy.batches(rows))
    return toy.weight_of(model)


def data():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(27, 3)).astype("float32")
    y = np.argmax(x + rng.normal(size=(27, 3)), 1)
    return x, y, rng.uniform(0.1, 2, 27).astype("float32")


NETWORKS = {
    # (one big batch, K, micro_batch_size)
    "momentum_k2": (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        8,
        {"gradient_accumulation_steps": 2},
    ),
    "adamw_k3_cut": (
        lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5),
            global_clipnorm=0.1,
            use_ema=True,
            ema_momentum=0.5,
        ),
        12,
        {"gradient_accumulation_steps": 3, "micro_batch_size": 1},
    ),
    "jit_adam_k2": (
        lambda: keras.optimizers.Adam(0.05),
        8,
        {"gradient_accumulation_steps": 2, "jit_compile": True},
    ),
}


def network(model_class, optimizer, **arguments):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, activation="tanh")(inputs)
    outputs = keras.layers.Dense(3, activation="softmax")(x)
    model = model_class(inputs, outputs)
    model.compile(
        optimizer(),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        **arguments,
    )
    return model


def train_network(model, batch_size):
    """Weights, slots and logs, with validation in every epoch."""
    x, y, weight = data()
    logs = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[:7], y[:7], weight[:7]),
        validation_batch_size=4,
    ).history
    variables = model.variables + model.optimizer.variables
    return {
        "values": [v.numpy().ravel().tolist() for v in variables],
        "logs": logs,
    }


def networks(strategy):
    found = {}
    for name, (optimizer, _, how) in NETWORKS.items():
        with strategy.scope():
            model = network(tfaccum.Model, optimizer, **how)
        found[name] = {**train_network(model, 4), "bits": bits(model)}
    return found


# --- Evaluation -----------------------------------------------------------


def evaluate_and_predict(strategy):
    x, y, weight = data()
    with strategy.scope():
        model = network(tfaccum.Model, keras.optimizers.SGD)
    unknown = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(2)
    unknown = unknown.filter(lambda *_: True)
    found = {
        "evaluated": model.evaluate(
            x, y, 5, 0, sample_weight=weight, return_dict=True
        ),
        "unknown_size": model.evaluate(unknown, verbose=0, return_dict=True),
        "on_batch": model.test_on_batch(
            x, y, sample_weight=weight, return_dict=True
        ),
        "predicted": model.predict(x, 5, 0).tolist(),
        "predicted_unknown": model.predict(unknown, verbose=0).tolist(),
        "predicted_one": model.predict_on_batch(x[:1]).tolist(),
    }
    with strategy.scope():
        two = tfaccum.Model(
            model.inputs[0],
            {"first": model.outputs[0], "x": model.inputs[0]},
        )
    both = two.predict(x, 4, 0)
    found["several"] = [both["first"].tolist(), both["x"].tolist()]
    return found


def predict_uneven_shares(strategy):
    """Three batches on one worker, one or none on the other."""
    model = toy.toy(strategy=strategy, start=1.0)

    def predicted(*shares):
        def share(context):
            share = shares[context.input_pipeline_id]
            return toy.batches(*share, [0]).take(len(share))

        try:
            return model.predict(share, verbose=0).ravel().tolist()
        except ValueError as error:
            return str(error)

    first = [[1, 2], [3], [4, 5]]
    return [predicted(first, [[10]]), predicted(first, [])]


def train_on_batch(strategy):
    model = toy.toy(strategy=strategy, micro_batch_size=1)
    x = column([1, 2, 3, 4, 10])
    loss = model.train_on_batch(x, x)
    return [float(np.ravel(loss)[0]), toy.weight_of(model)]


# --- Staying in step ------------------------------------------------------


def norm_network(strategy, model_class=tfaccum.Model, **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((3,))
        x = keras.layers.BatchNormalization(momentum=0.5)(inputs)
        x = keras.layers.Dense(4, activation="tanh")(x)
        outputs = keras.layers.Dense(3, activation="softmax")(x)
        model = model_class(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(0.05),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **arguments,
        )
    return model


def in_step(strategy):
    """Everything after each of twenty updates; the last batch is ragged."""
    model = norm_network(strategy, gradient_accumulation_steps=2)
    states = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(bits(model))

    x, y, _ = data()
    x, y = np.tile(x, (6, 1))[:159], np.tile(y, 6)[:159]
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[Look()])
    return states


def batch_norm(strategy):
    """One window of one batch; the rows of the workers differ."""
    model = norm_network(strategy)
    x = np.float32([[1, 2, 3], [3, 2, 1], [7, 7, 7], [9, 3, 5]])
    model.fit(x, np.zeros(4), batch_size=4, shuffle=False, verbose=0)
    return [v.numpy().tolist() for v in model.non_trainable_variables]


def overflow(strategy):
    """Worker 1 alone sees inf, in micro-batch 2 of 4; then goes on."""
    keras.config.set_dtype_policy("mixed_float16")
    model = toy.toy(
        strategy=strategy,
        optimizer=lambda: keras.optimizers.SGD(1.0, momentum=0.5),
        gradient_accumulation_steps=4,
    )
    keras.config.set_dtype_policy("float32")
    good, bad = [GOOD] * 4, [GOOD, [0.25, INF], GOOD, GOOD]
    states, scales, updates = [], [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = model.optimizer
            updates.extend(model.last_updates)
            scales.append(float(optimizer.dynamic_scale.numpy()))
            scaling = (optimizer.dynamic_scale, optimizer.step_counter)
            states.append(
                [
                    v.numpy().tobytes().hex()
                    for v in model.variables + optimizer.variables
                    if not any(v is other for other in scaling)
                ]
            )

    model.fit(toy.batches(*good, *bad, *good), callbacks=[Look()], verbose=0)
    return {
        "states": states,
        "scales": scales,
        "skipped": [u.skipped for u in updates],
        "weight": toy.weight_of(model),
        "counter": int(model.optimizer.step_counter.numpy()),
    }


def lost_run(strategy):
    """Worker 1 alone sees NaN from the third batch on, for ever."""
    model = toy.toy(
        strategy=strategy,
        optimizer=lambda: keras.optimizers.SGD(1.0),
        gradient_accumulation_steps=2,
        max_consecutive_skips=3,
        loss_scale=tfaccum.LossScale(initial=4.0, floor=2.0),
    )
    bad = [0.25, float("nan")]
    try:
        model.fit(toy.batches(GOOD, GOOD, *[bad] * 20), verbose=0)
    except RuntimeError as error:
        text = str(error)
    return {
        "text": text,
        "path": model.trainable_variables[0].path,
        "weight": toy.weight_of(model),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
    }


# --- What travels ---------------------------------------------------------


class Marked(tfaccum.Model):
    def train_step(self, data):
        x, y = data
        return super().train_step((tf.identity(x, "in_micro_step"), y))


def _graphs_with_a_micro_step(strategy, **how):
    """Of the whole train function, and of the micro-step in it."""
    x, y, _ = data()
    finite = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with graphs.traced() as traced:
        norm_network(strategy, Marked, **how).fit(finite, verbose=0)
    marked = [
        graph
        for graph in traced
        if any("in_micro_step" in n for _, n in graphs.operations(graph))
    ]
    return sorted(marked, key=lambda graph: len(graphs.operations(graph)))


def collectives(strategy):
    return [
        [
            graphs.collectives(graph)
            for graph in _graphs_with_a_micro_step(
                strategy, gradient_accumulation_steps=steps
            )
        ]
        for steps in (1, 4)
    ]


def _number_of_micro_steps(strategy, **how):
    """How often the graph of a window has the micro-step, for one of it."""
    micro_step, whole = (
        sum("in_micro_step" in name for _, name in graphs.operations(graph))
        for graph in _graphs_with_a_micro_step(strategy, **how)
    )
    assert whole % micro_step == 0
    return whole // micro_step


def micro_steps(strategy):
    return [
        _number_of_micro_steps(strategy, gradient_accumulation_steps=steps)
        for steps in (1, 4)
    ]


def micro_steps_of_cut_batches(strategy):
    return _number_of_micro_steps(
        strategy, gradient_accumulation_steps=4, micro_batch_size=1
    )
