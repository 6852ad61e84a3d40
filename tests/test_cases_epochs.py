"""Cases B: the short window at an epoch's end, and counts over epochs."""

import logging
import math
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests.toy import LogRows, batches, fit, toy, weight_of

# --- B1: the last window is short ------------------------------------------


@pytest.mark.parametrize(
    "replicas, is_size_known, eager",
    [
        (1, True, False),
        (2, True, False),
        (4, True, False),
        (1, False, False),
        (2, False, False),
        (1, True, True),
        (2, False, True),
        pytest.param(4, False, True, marks=pytest.mark.slow),
    ],
)
def test_B1_short_window_has_its_own_divisor(replicas, is_size_known, eager):
    model = toy(replicas, gradient_accumulation_steps=4, run_eagerly=eager)
    ones = [[1] * replicas] * 10
    seen = fit(model, batches(*ones, is_size_known=is_size_known))
    # A divisor of K for all makes -2.5, and dropping the window -2.
    assert seen.weights == [[-1], [-2], [-3]]
    assert seen.iterations == [1, 2, 3]
    assert seen.of_updates("weight") == [n * replicas for n in (4, 4, 2)]
    # And once more, on the same functions.
    fit(model, batches(*ones, is_size_known=is_size_known))
    assert weight_of(model) == -6


@pytest.mark.parametrize("replicas", [1, 2])
def test_B1_short_window_by_cutting(replicas):
    model = toy(replicas, micro_batch_size=1)
    x = np.ones([10, 1], np.float32)
    seen = fit(model, x, y=x, batch_size=4)
    assert seen.weights == [[-1], [-2], [-3]]
    assert seen.of_updates("examples") == [4, 4, 2]


def test_B1_several_windows_in_one_call():
    model = toy(gradient_accumulation_steps=4, steps_per_execution=2)
    seen = fit(model, batches(*[[1]] * 10), epochs=2)
    assert seen.of_updates("weight") == [4, 4, 2] * 2
    assert seen.of_updates("update") == [1, 2, 3, 4, 5, 6]
    assert weight_of(model) == -6


# --- B2: K larger than the epoch -------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_B2_one_short_window_an_epoch(replicas):
    model = toy(replicas, gradient_accumulation_steps=4)
    x = [[1] * replicas, [2] * replicas, [6] * replicas]
    seen = fit(model, batches(*x), epochs=4)
    assert seen.weights == [[-3], [-6], [-9], [-12]]
    assert seen.iterations == [1, 2, 3, 4]
    assert seen.of_updates("weight") == [3 * replicas] * 4


def test_B2_said_once_at_the_start(capfd, caplog):
    """In whatever way it is said: warned, logged or printed."""
    model = toy(gradient_accumulation_steps=4)
    said = []

    def collect(*_):
        lines = [str(w.message) for w in warned] + caplog.messages
        warned.clear()
        caplog.clear()
        for text in capfd.readouterr():
            lines += text.splitlines()
        # Both numbers are needed to see what is meant.
        said.append([t for t in lines if re.search(r"\b4\b.*\b3\b", t)])

    each_epoch = keras.callbacks.LambdaCallback(on_epoch_begin=collect)
    with (
        caplog.at_level(logging.INFO),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        fit(model, batches([1], [1], [1]), epochs=4, callbacks=[each_epoch])
        collect()
    at_start, *later = said
    assert len(at_start) == 1
    assert not any(later)


# --- B3: planned and executed updates --------------------------------------


@pytest.mark.parametrize(
    "replicas, is_size_known",
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_B3_planned_updates_are_executed(steps, replicas, is_size_known):
    plan = tfaccum.BatchPlan.derive(
        num_replicas=replicas,
        micro_batch_size=1,
        gradient_accumulation_steps=steps,
    )
    model = toy(
        replicas, model_class=LogRows, gradient_accumulation_steps=steps
    )
    updates = 0
    for n in range(1, 13):
        ids = np.arange(n * replicas).reshape([n, replicas])
        seen_after = []

        class EndOfEpoch(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None, seen_after=seen_after):
                seen_after.append(sorted(model.examples_seen))
                model.micro_steps.clear()

        seen = fit(
            model,
            batches(*ids, is_size_known=is_size_known),
            epochs=3,
            callbacks=[EndOfEpoch()],
        )
        planned = math.ceil(n / steps)
        assert plan.windows(n) == planned
        assert plan.updates_per_epoch(n * replicas) == planned
        assert len(seen.updates) == 3 * planned
        assert seen.iterations[-1] - updates == 3 * planned
        updates = seen.iterations[-1]
        assert sum(seen.of_updates("examples")) == 3 * n * replicas
        # Every example once in each of the epochs.
        assert seen_after == [list(range(n * replicas))] * 3


@pytest.mark.parametrize("cut, batch_size", [(1, 3), (2, 5)])
def test_B3_planned_updates_by_cutting(cut, batch_size):
    model = toy(2, model_class=LogRows, micro_batch_size=cut)
    for n in (1, 4, 7, 10, 12):
        ids = np.arange(n, dtype=np.float32)[:, None]
        model.micro_steps.clear()
        seen = fit(model, ids, y=ids, batch_size=batch_size, epochs=2)
        assert len(seen.updates) == 2 * math.ceil(n / batch_size)
        assert sorted(model.examples_seen) == sorted([*range(n)] * 2)
        assert max(map(len, model.micro_steps)) <= cut


# --- B5: the length of a schedule ------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_B5_schedule_ends_with_the_training(replicas):
    epochs = 2
    plan = tfaccum.BatchPlan.derive(
        num_replicas=replicas, micro_batch_size=1, gradient_accumulation_steps=4
    )
    length = epochs * plan.windows(10)
    assert length == 6
    model = toy(
        replicas,
        optimizer=lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.PolynomialDecay(6.0, length, 0.0)
        ),
        gradient_accumulation_steps=4,
    )
    seen = fit(model, batches(*[[1] * replicas] * 10), epochs=epochs)
    rates = seen.of_updates("learning_rate")
    assert rates == pytest.approx([6, 5, 4, 3, 2, 1], abs=1e-5)
    expected = [-6, -11, -15, -18, -20, -21]
    assert np.ravel(seen.weights) == pytest.approx(expected, abs=1e-5)
    assert float(model.optimizer.learning_rate) == 0


# --- B7: the next epochs ---------------------------------------------------


@pytest.mark.parametrize(
    "replicas, eager", [(1, False), (1, True), (2, False), (4, False)]
)
def test_B7_seven_micro_batches_in_windows_of_three(replicas, eager):
    model = toy(replicas, gradient_accumulation_steps=3, run_eagerly=eager)
    x = np.repeat(np.arange(1, 8), replicas).reshape([7, replicas])
    seen = fit(model, batches(*x), epochs=3)
    # Means 2, 5 and 7 in each epoch: nothing is carried over.
    expected = -np.cumsum([2, 5, 7] * 3)
    assert np.ravel(seen.weights) == pytest.approx(expected, abs=1e-5)
    assert seen.iterations == [*range(1, 10)]


# --- B8: nothing is thrown away --------------------------------------------


class Epochs(keras.callbacks.Callback):
    """Splits what a `LogRows` has seen into windows and epochs."""

    def __init__(self):
        super().__init__()
        self.windows = []

    def on_epoch_begin(self, epoch, logs=None):
        self.windows.append([])

    def on_train_batch_end(self, batch, logs=None):
        self.windows[-1].append(self.model.examples_seen)
        self.model.micro_steps.clear()

    def ids(self):
        return [sorted(sum(epoch, [])) for epoch in self.windows]


def as_array(ids):
    x = np.array(ids, np.float32)[:, None]
    return {"x": x, "y": x, "batch_size": 4}


def as_dataset(ids):
    x = tf.constant(ids, tf.float32)[:, None]
    return {"x": tf.data.Dataset.from_tensor_slices((x, x)).batch(4)}


def as_generator(ids):
    def generate():
        while True:
            for start in range(0, len(ids), 4):
                x = np.array(ids[start : start + 4], np.float32)[:, None]
                yield x, x

    return {"x": generate(), "steps_per_epoch": -(-len(ids) // 4)}


class Sequence(keras.utils.PyDataset):
    """The ids, four at a time."""

    def __init__(self, ids):
        super().__init__()
        self.x = np.array(ids, np.float32)[:, None]

    def __len__(self):
        return -(-len(self.x) // 4)

    def __getitem__(self, index):
        x = self.x[4 * index : 4 * index + 4]
        return x, x


def as_sequence(ids):
    return {"x": Sequence(ids), "shuffle": False}


@pytest.mark.parametrize(
    "data, replicas",
    [
        (as_array, 1),
        (as_array, 2),
        (as_dataset, 1),
        (as_dataset, 2),
        (as_generator, 1),
        (as_sequence, 1),
        pytest.param(as_generator, 2, marks=pytest.mark.slow),
        pytest.param(as_sequence, 2, marks=pytest.mark.slow),
    ],
)
def test_B8_every_example_once_an_epoch(data, replicas):
    model = toy(replicas, model_class=LogRows, gradient_accumulation_steps=4)
    epochs = Epochs()
    arguments = data(range(23))
    fit(model, arguments.pop("x"), epochs=3, callbacks=[epochs], **arguments)
    # Six batches: windows of 16 and 7 examples, all different.
    assert epochs.ids() == [[*range(23)]] * 3
    for epoch in epochs.windows:
        assert [len(set(window)) for window in epoch] == [16, 7]


@pytest.mark.parametrize("replicas", [1, 2])
def test_B8_every_example_once_when_cut(replicas):
    model = toy(replicas, model_class=LogRows, micro_batch_size=3)
    epochs = Epochs()
    x = np.arange(23, dtype=np.float32)[:, None]
    fit(model, x, y=x, batch_size=10, epochs=2, callbacks=[epochs])
    assert epochs.ids() == [[*range(23)]] * 2
    for epoch in epochs.windows:
        assert [len(set(window)) for window in epoch] == [10, 10, 3]


@pytest.mark.parametrize("replicas", [1, 2])
def test_B8_epochs_of_fixed_length_go_on_where_the_last_ended(replicas):
    model = toy(replicas, model_class=LogRows, gradient_accumulation_steps=2)
    epochs = Epochs()
    ids = np.arange(15 * replicas).reshape([15, replicas])
    seen = fit(
        model, batches(*ids), epochs=3, steps_per_epoch=5, callbacks=[epochs]
    )
    per_epoch = 5 * replicas
    assert epochs.ids() == [
        [*range(start, start + per_epoch)]
        for start in (0, per_epoch, 2 * per_epoch)
    ]
    # Each epoch ends with a short window of its own.
    assert seen.of_updates("examples") == [n * replicas for n in (2, 2, 1) * 3]
