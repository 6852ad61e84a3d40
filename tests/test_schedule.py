"""K by update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum.schedule import AccumulationSchedule, updates_alike


def by_function(update):
    return 1 + update // 2


@pytest.mark.parametrize(
    "steps,expected,text",
    [
        (3, [3] * 6, "3"),
        ([(0, 1), (2, 4), (5, 2)], [1, 1, 4, 4, 4, 2], "1, 4 from update 2, "),
        ([[0, 2]], [2] * 6, "2"),
        (by_function, [1, 1, 2, 2, 3, 3], "by_function"),
    ],
)
def test_k_of_each_update(steps, expected, text):
    schedule = AccumulationSchedule(steps)
    assert [schedule.at(update) for update in range(6)] == expected
    assert str(schedule).startswith(text)
    assert schedule.largest == (None if callable(steps) else max(expected))


def test_updates_alike():
    schedule = AccumulationSchedule([(0, 1), (2, 4), (5, 2)])
    assert [updates_alike(schedule.at, u, 8) for u in range(6)] == [
        *(2, 1, 3, 2, 1, 8)
    ]
    assert updates_alike(schedule.at, 2, 2) == 2


@pytest.mark.parametrize(
    "steps,kind,message",
    [
        (0, ValueError, "at least 1. Received: gradient_accumulation_steps=0"),
        (2.0, TypeError, "Received: gradient_accumulation_steps=2.0"),
        (True, TypeError, "gradient_accumulation_steps=True"),
        ("8", TypeError, "gradient_accumulation_steps="),
        ([(0, 2), (5, 0)], ValueError, "gradient_accumulation_steps=0"),
        ([(0, 2), (5, 1.5)], TypeError, "gradient_accumulation_steps=1.5"),
        ([(1, 2)], ValueError, "begin at update 0"),
        ([(0, 2), (5, 3), (5, 4)], ValueError, "and rise"),
        ([(0, 2), ("5", 3)], ValueError, "and rise"),
        ([], ValueError, "begin at update 0"),
        ([2, 4], TypeError, "a list of"),
        (lambda update: 0, ValueError, "gradient_accumulation_steps=0"),
    ],
)
def test_what_is_no_schedule_is_refused(steps, kind, message):
    with pytest.raises(kind, match=message):
        AccumulationSchedule(steps).at(0)


class CountTraces(tfaccum.Model):
    traces = 0

    def train_step(self, data):
        CountTraces.traces += 1
        return super().train_step(data)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("windows_in_a_call", [1, 3])
@pytest.mark.parametrize("steps", [[(0, 1), (2, 3)], by_function])
def test_windows_grow_by_hand_and_nothing_is_traced_again(
    replicas, windows_in_a_call, steps
):
    """Eight batches: windows 1, 1, 3, 3; or 1, 1, 2, 2 and what is left."""
    CountTraces.traces = 0
    model = toy.toy(
        replicas,
        model_class=CountTraces,
        gradient_accumulation_steps=steps,
        steps_per_execution=windows_in_a_call,
    )
    xs = [[1, 2], [3], [4, 6], [5], [7, 8], [9, 2], [2], [1, 1]]
    seen = toy.fit(model, toy.batches(*xs))
    sizes = [1, 1, 2, 2, 2] if callable(steps) else [1, 1, 3, 3]
    w, expected, first = 0.0, [], 0
    for size in sizes:
        window = np.concatenate(xs[first : first + size])
        w, first = w - window.mean(), first + size
        expected.append((w, len(window)))
    assert seen.of_updates("examples") == [n for _, n in expected]
    assert toy.weight_of(model) == pytest.approx(w, rel=1e-6)
    assert toy.iterations_of(model) == len(sizes)
    traces = CountTraces.traces
    toy.fit(model, toy.batches(*xs))
    # The update counter goes on: from update 4 or 5 on.
    assert CountTraces.traces == traces


def test_a_skipped_update_does_not_move_the_schedule():
    model = toy.toy(gradient_accumulation_steps=[(0, 1), (2, 2)])
    xs = [[1], [np.inf], [2], [3], [5]]
    seen = toy.fit(model, toy.batches(*xs))
    assert seen.of_updates("skipped") == [False, True, False, False]
    assert [w for (w,) in seen.weights] == [-1, -1, -3, -7]


def test_a_run_goes_on_with_its_schedule(tmp_path):
    """Interrupted inside the second epoch; a different one is refused."""

    class Stop(keras.callbacks.Callback):
        runs_last = True

        def on_train_batch_end(self, batch, logs=None):
            if self.model.current_run.num_updates == 5:
                raise KeyError

    def run(steps, *callbacks):
        model = toy.toy(gradient_accumulation_steps=steps)
        data = toy.batches([1], [2], [3], [4], [5], [6])
        seen = toy.fit(model, data, epochs=3, callbacks=list(callbacks))
        return seen.weights, seen.of_updates("examples")

    steps = [(0, 1), (3, 2)]
    weights, sizes = run(steps)
    # Batches 1, 1, 1, 2 and 1; then 2, 2, 2 twice.
    assert sizes == [1, 1, 1, 2, 1, 2, 2, 2, 2, 2, 2]
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(KeyError):
        run(steps, saver, Stop())
    with pytest.raises(ValueError, match="global batch: 1 x 1, 2 from update"):
        run([(0, 1), (4, 2)], tfaccum.Checkpoint(tmp_path))
    rest, _ = run(steps, tfaccum.Checkpoint(tmp_path))
    assert rest == weights[5:]


def test_it_is_saved_with_the_model(tmp_path):
    model = toy.toy(gradient_accumulation_steps=[(0, 1), (2, 3)], loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [loaded.accumulation_schedule.at(u) for u in (0, 2)] == [1, 3]
    assert tf.is_tensor(loaded(tf.ones([1, 1])))
