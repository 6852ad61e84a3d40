"""Cases C: updates are counted, and not micro-batches."""

import struct

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests.toy import (
    EachUpdate,
    LogRows,
    batches,
    fit,
    iterations_of,
    scalar,
    strategy_of,
    toy,
    value_of,
    weight_of,
)


class Counting(keras.optimizers.schedules.LearningRateSchedule):
    """lr(t) = t + 1."""

    def __call__(self, step):
        return tf.cast(step, tf.float32) + 1.0


def sgd_counting():
    return keras.optimizers.SGD(Counting())


# Two ways to make one update of several micro-steps with one example on every
# replica.
def ones(updates, steps, replicas, way):
    """Data for so many updates of so many micro-steps with x = 1."""
    if way == "by cutting":
        return batches(*[[1] * (replicas * steps)] * updates)
    return batches(*[[1] * replicas] * (updates * steps))


def accumulating(steps, way):
    """The arguments of `compile` for one way."""
    if way == "by cutting":
        return {"micro_batch_size": 1}
    return {"gradient_accumulation_steps": steps}


both_ways = pytest.mark.parametrize("way", ["by dataset batches", "by cutting"])


# --- C1: Adam's t and the decay --------------------------------------------


def dense(model_class, replicas, **accumulation):
    """A linear model with 12 weights, 4 of them never at rest."""
    with strategy_of(replicas).scope():
        layer = keras.layers.Dense(
            3, kernel_initializer=keras.initializers.GlorotUniform(seed=1)
        )
        inputs = keras.Input((4,))
        model = model_class(inputs, layer(inputs))
        model.compile(
            optimizer=keras.optimizers.AdamW(0.1, weight_decay=0.1),
            loss="mse",
            **accumulation,
        )
    return model


@pytest.mark.parametrize(
    "replicas, batch_size, accumulation",
    [
        (1, 4, {"gradient_accumulation_steps": 3}),
        (1, 12, {"micro_batch_size": 4}),
        (2, 4, {"gradient_accumulation_steps": 3}),
        (2, 12, {"micro_batch_size": 2}),
    ],
)
def test_C1_adamw_moves_once_per_update(replicas, batch_size, accumulation):
    random = np.random.default_rng(0)
    x = random.normal(size=[60, 4]).astype(np.float32)
    y = random.normal(size=[60, 3]).astype(np.float32)
    arguments = {"y": y, "shuffle": False, "verbose": 0}
    one_batch = dense(keras.Model, 1)
    one_batch.fit(x, batch_size=12, **arguments)
    model = dense(tfaccum.Model, replicas, **accumulation)
    model.fit(x, batch_size=batch_size, **arguments)
    assert iterations_of(model) == 5
    for variables in (
        (model.weights, one_batch.weights),
        (model.optimizer.variables, one_batch.optimizer.variables),
    ):
        for variable, expected in zip(*variables, strict=True):
            np.testing.assert_allclose(
                value_of(model, variable), expected, rtol=0, atol=1e-6
            )


# --- C2: a schedule counts updates -----------------------------------------


@both_ways
@pytest.mark.parametrize("replicas, eager", [(1, False), (1, True), (2, False)])
def test_C2_schedule_counts_updates(replicas, eager, way):
    model = toy(
        replicas,
        optimizer=sgd_counting,
        run_eagerly=eager,
        **accumulating(4, way),
    )
    seen = fit(model, ones(3, 4, replicas, way))
    # Counted in micro-batches it would be -24.
    assert weight_of(model) == -(1 + 2 + 3)
    assert seen.of_updates("learning_rate") == [1, 2, 3]


# --- C4: the curve of the learning rate ------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_C4_learning_rates_do_not_depend_on_k(replicas):
    length, updates = 8, 5
    expected = [
        0.5 * (1 + np.cos(np.pi * update / length)) for update in range(updates)
    ]
    curves = {}
    for steps in (1, 2, 8):
        model = toy(
            replicas,
            optimizer=lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.CosineDecay(1.0, length)
            ),
            gradient_accumulation_steps=steps,
        )
        data = ones(updates, steps, replicas, "by dataset batches")
        seen = fit(model, data)
        curves[steps] = [(u.update, u.learning_rate) for u in seen.updates]
    assert [update for update, _ in curves[1]] == [1, 2, 3, 4, 5]
    rates = [rate for _, rate in curves[1]]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert curves[1] == curves[2] == curves[8]


# --- C5: iterations --------------------------------------------------------


@both_ways
@pytest.mark.parametrize("replicas", [1, 2])
def test_C5_updates_and_micro_steps(replicas, way):
    model = toy(replicas, model_class=LogRows, **accumulating(4, way))
    seen = fit(model, ones(2, 4, replicas, way))
    assert len(model.micro_steps) == 8 * replicas
    assert len(seen.updates) == 2
    assert seen.of_updates("update") == [1, 2]
    assert seen.iterations == [1, 2]


# --- C6: the moving average of the weights ---------------------------------


def with_average(momentum=0.5, **arguments):
    return lambda: keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=momentum, **arguments
    )


class Average(keras.callbacks.Callback):
    """Keeps the only moving average after each update."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        (average,) = [
            v for v in self.model.optimizer.variables if "average" in v.path
        ]
        self.values.append(value_of(self.model, average).item())


@both_ways
@pytest.mark.parametrize("replicas, eager", [(1, False), (1, True), (2, False)])
def test_C6_average_moves_once_per_update(replicas, eager, way):
    model = toy(
        replicas,
        optimizer=with_average(),
        run_eagerly=eager,
        **accumulating(2, way),
    )
    average = Average()
    seen = fit(model, ones(3, 2, replicas, way), callbacks=[average])
    assert seen.weights == [[-1], [-2], [-3]]
    # Starts from the first updated value.
    assert average.values == [-1, -1.5, -2.25]
    # As Keras does at the end of `fit`.
    assert weight_of(model) == -2.25


@pytest.mark.parametrize("replicas", [1, 2])
def test_C6_average_overwrites_every_second_update(replicas):
    model = toy(
        replicas,
        optimizer=with_average(ema_overwrite_frequency=2),
        gradient_accumulation_steps=2,
    )
    average = Average()
    data = ones(4, 2, replicas, "by dataset batches")
    seen = fit(model, data, callbacks=[average])
    # Updates 2 and 4 overwrite -2 and -3.5.
    assert average.values == [-1, -1.5, -2, -2.75]
    assert seen.weights == [[-1], [-1.5], [-2.5], [-2.75]]


class AtLeast(keras.constraints.Constraint):
    """Keeps weights at or above a bound."""

    def __init__(self, bound):
        self.bound = bound

    def __call__(self, w):
        return keras.ops.maximum(w, self.bound)


@pytest.mark.parametrize("replicas", [1, 2])
def test_C6_average_comes_after_clipping_decay_and_constraints(replicas):
    """Gradient 8 clipped to 1, decay 0.25 of w, w >= -1.5, the average."""
    model = toy(
        replicas,
        layers=lambda: [scalar(kernel_constraint=AtLeast(-1.5))],
        optimizer=with_average(weight_decay=0.25, clipvalue=1.0),
        gradient_accumulation_steps=2,
    )
    average = Average()
    data = batches(*[[8] * replicas] * 6)
    seen = fit(model, data, callbacks=[average])
    # 0 - 1; 0.75 * -1 - 1 = -1.75, bounded; the same from -1.5.
    assert seen.weights == [[-1], [-1.5], [-1.5]]
    assert average.values == [-1, -1.25, -1.375]


# --- C8: intervals of validation and checkpoints ---------------------------


class EveryFive(keras.callbacks.Callback):
    """Validates and saves after every fifth update."""

    def __init__(self, folder, data):
        super().__init__()
        self.folder = folder
        self.data = data
        self.losses = {}

    def on_train_batch_end(self, batch, logs=None):
        (update,) = self.model.last_updates
        if update.update % 5 == 0:
            loss = self.model.evaluate(self.data, verbose=0)
            self.losses[update.update] = loss
            path = self.folder / f"{update.update}.weights.h5"
            self.model.save_weights(path)


@pytest.mark.parametrize("replicas", [1, 2])
def test_C8_intervals_count_updates(replicas, tmp_path):
    model = toy(replicas, gradient_accumulation_steps=3)
    five = EveryFive(tmp_path, batches([1, 3], [2]))
    seen = fit(
        model, batches(*[[1] * replicas] * 67), epochs=3, callbacks=[five]
    )
    # 67 micro-batches make 23 updates, 3 epochs 69.
    assert seen.iterations == [*range(1, 70)]
    expected = [*range(5, 70, 5)]
    names = sorted(int(p.name.split(".")[0]) for p in tmp_path.iterdir())
    assert names == expected
    # Validation loss w * 2, where w = -update.
    assert list(five.losses) == expected
    assert [*five.losses.values()] == [-2 * update for update in expected]
    for update in expected:
        model.load_weights(tmp_path / f"{update}.weights.h5")
        assert weight_of(model) == -update


# --- C9: the step of summaries ---------------------------------------------


class Summaries(EachUpdate):
    """Writes w after each update."""

    def on_train_batch_end(self, batch, logs=None):
        for update in self.model.last_updates:
            tf.summary.scalar("w", weight_of(self.model), step=update.update)
        super().on_train_batch_end(batch, logs)


class SummarisingModel(tfaccum.Model):
    """Writes inside of each micro-step, with the optimizer's own step."""

    def train_step(self, data):
        tf.summary.scalar(
            "micro", tf.reduce_sum(data[0]), step=self.optimizer.iterations
        )
        return super().train_step(data)


def read_scalars(folder):
    """The (step, value) of each tag that was written, in order."""
    scalars = {}
    for path in sorted(folder.iterdir()):
        for event in records(path.read_bytes()):
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor).item()
                scalars.setdefault(value.tag, []).append((event.step, number))
    return scalars


def records(content):
    """The events in a TFRecord file: length, checksum, data, checksum."""
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield tf.compat.v1.Event.FromString(content[12 : 12 + length])
        content = content[12 + length + 4 :]


@pytest.mark.parametrize("eager", [False, True])
def test_C9_summaries_have_the_step_of_the_update(eager, tmp_path):
    model = toy(
        model_class=SummarisingModel,
        gradient_accumulation_steps=2,
        run_eagerly=eager,
    )
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        fit(
            model,
            batches([1], [2], [3], [4], [5]),
            epochs=2,
            callbacks=[Summaries()],
        )
    writer.close()
    scalars = read_scalars(tmp_path)
    # Means 1.5, 3.5 and 5, twice.
    assert scalars["w"] == list(
        enumerate([-1.5, -5, -10, -11.5, -15, -20], start=1)
    )
    # Inside a window the number of updates made before it.
    (micro,) = [v for tag, v in scalars.items() if tag.endswith("micro")]
    steps = [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert micro == list(zip(steps, [*range(1, 6)] * 2, strict=True))


def test_C9_tags_in_a_graph_are_those_of_the_user(tmp_path):
    model = toy(model_class=SummarisingModel, gradient_accumulation_steps=2)
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        fit(model, batches([1], [2]))
        writer.close()
    assert list(read_scalars(tmp_path)) == ["micro"]


@pytest.mark.parametrize("eager", [False, True])
def test_C9_summaries_with_two_replicas(eager, tmp_path):
    model = toy(2, gradient_accumulation_steps=2, run_eagerly=eager)
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        fit(model, batches([1, 1], [2], [3, 5]), callbacks=[Summaries()])
    writer.close()
    first, second = -4 / 3, -4 / 3 - 4
    (step_1, w_1), (step_2, w_2) = read_scalars(tmp_path)["w"]
    assert (step_1, step_2) == (1, 2)
    assert (w_1, w_2) == pytest.approx((first, second), abs=1e-6)
