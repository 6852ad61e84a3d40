"""The law: a window's update equals that of one big batch.

    g = sum(w * gradient) / sum(w) over all micro-steps and replicas

Reference: plain Keras, one device, the whole window in one batch.
"""

import functools
import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import law
from tests.tolerances import tolerance

STRATEGIES = {
    "none": lambda: tf.distribute.get_strategy(),
    "one_device": lambda: tfaccum.make_strategy(["CPU:0"]),
    "mirrored2": lambda: tfaccum.make_strategy(["CPU:0", "CPU:1"]),
    "mirrored4": lambda: tfaccum.make_strategy(
        ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    ),
}
STEPS = (1, 2, 3, 8)


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")


@functools.cache
def reference(steps, optimizer):
    return law.one_big_batch(steps, optimizer)


def assert_same(outcome, steps, optimizer):
    expected = reference(steps, optimizer)
    np.testing.assert_allclose(
        outcome["values"],
        expected["values"],
        rtol=0,
        atol=max(tolerance("float64"), 1e-12),
    )
    assert outcome["logs"].keys() == expected["logs"].keys()
    for name, values in expected["logs"].items():
        # Logs are float32 in Keras, whatever the model is.
        np.testing.assert_allclose(
            outcome["logs"][name], values, rtol=tolerance("float32")
        )


def matrix():
    """Every combination; the default run takes a part that meets each pair.

    Compiling costs seconds: in graph mode AdamW (which fails when SGD does)
    meets every strategy, K and way; the other optimizers and eager mode meet
    every strategy and way at K = 3.
    """
    for name, steps, cut, eager, optimizer in itertools.product(
        STRATEGIES, STEPS, (False, True), (False, True), law.OPTIMIZERS
    ):
        is_default = (
            steps == 3
            and not (eager and optimizer != "adamw")
            and not (name == "mirrored4" and optimizer == "sgd")
            or (optimizer == "adamw" and not eager)
        )
        way = "cut" if cut else "steps"
        mode = "eager" if eager else "graph"
        yield pytest.param(
            name,
            steps,
            cut,
            eager,
            optimizer,
            marks=() if is_default else pytest.mark.slow,
            id=f"{name}-{steps}-{way}-{mode}-{optimizer}",
        )


@pytest.mark.parametrize("name, steps, cut, eager, optimizer", [*matrix()])
def test_update_equals_one_big_batch(name, steps, cut, eager, optimizer):
    outcome = law.in_windows(
        STRATEGIES[name](), steps, optimizer, cut, run_eagerly=eager
    )
    assert_same(outcome, steps, optimizer)


def assert_workers_follow_the_law(
    run_workers, cases, timeout, workers=2, replicas=1, more=()
):
    """Returns what came out of `more`."""
    texts = [json.dumps(case) for case in cases]
    first, *others = (
        worker.result
        for worker in run_workers(
            "tests.multi_worker.law_worker",
            workers,
            timeout=timeout,
            args=[replicas, *texts, *more],
        )
    )
    assert first["replicas"] == workers * replicas
    for case, text in zip(cases, texts, strict=True):
        assert_same(first[text], case[0], case[1])
    # Bit for bit the same on all workers.
    assert all(other == first for other in others)
    return [first[name] for name in more]


def test_two_workers_update_as_one_big_batch(run_workers):
    cases = [
        (1, "adamw", False),
        (3, "momentum", False),
        (3, "adamw", True),
        (8, "adamw", False),
    ]
    assert_workers_follow_the_law(run_workers, cases, timeout=120)


def test_two_workers_of_two_replicas_update_as_one_big_batch(run_workers):
    """The last batch leaves one of the four replicas empty."""
    cases = [(3, "adamw", False)]
    assert_workers_follow_the_law(run_workers, cases, timeout=200, replicas=2)


@pytest.mark.slow
def test_two_workers_update_as_one_big_batch_whole_matrix(run_workers):
    cases = list(itertools.product(STEPS, law.OPTIMIZERS, (False, True)))
    assert_workers_follow_the_law(run_workers, cases, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("workers, replicas", [(2, 2), (3, 1), (3, 2)])
def test_more_workers_and_replicas(run_workers, workers, replicas):
    """With six replicas, two are empty in each batch of four."""
    cases = list(itertools.product((1, 3), ("sgd", "adamw"), (False, True)))
    assert_workers_follow_the_law(
        run_workers, cases, timeout=600, workers=workers, replicas=replicas
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("replicas", [1, 2])
def test_D12_D13_three_workers_stay_in_step(run_workers, replicas):
    """All replicas hold the same bits after each of 21 updates."""
    outcome, refusal = assert_workers_follow_the_law(
        run_workers,
        [],
        timeout=400,
        workers=3,
        replicas=replicas,
        more=["in_step", "out_of_step"],
    )
    assert len(outcome["logs"]["loss"]) == 7
    assert outcome["updates"] == 21
    assert f"of replica(s) [{2 * replicas - 1}] differs" in refusal
    assert "after update 1," in refusal


def test_reference_moves_the_weights():
    """The comparison above is not one of nothing with nothing."""
    values = reference(3, "adamw")["values"]
    model = law.build(keras.Model)
    start = np.concatenate(
        [np.ravel(v.numpy()) for v in model.trainable_variables]
    )
    assert np.abs(values[: start.size] - start).max() > 0.01


def test_one_device_without_accumulation_is_keras_bit_for_bit():
    keras.config.set_floatx("float32")
    try:
        expected = law.one_big_batch(2, "adamw")
        model = law.build(tfaccum.Model)
        model.compile(law.OPTIMIZERS["adamw"](), "mse", metrics=["mae"])
        x, y, weight = law.data(2)
        history = model.fit(
            x,
            y,
            sample_weight=weight,
            batch_size=2 * law.ROWS_PER_BATCH,
            epochs=law.EPOCHS,
            shuffle=False,
            verbose=0,
        )
        outcome = law.outcome(model, history)
    finally:
        keras.config.set_floatx("float64")
    assert outcome == expected


@pytest.mark.parametrize("name", ["none", "mirrored2"])
def test_micro_step_is_traced_once_per_replica(name):
    """Whatever K, epochs, ragged windows and further calls of fit."""
    traced = []

    class Counting(tfaccum.Model):
        def train_step(self, data):
            traced.append(1)
            return super().train_step(data)

    strategy = STRATEGIES[name]()
    x, y, weight = law.data(8)
    with strategy.scope():
        model = law.build(Counting)
        model.compile("sgd", "mse", gradient_accumulation_steps=8)
    for epochs in (2, 1):
        model.fit(x, y, sample_weight=weight, batch_size=4, epochs=epochs)
    assert len(traced) == strategy.num_replicas_in_sync


def test_sums_are_allocated_only_for_windows_of_several_micro_steps():
    x, y, _ = law.data(2)
    sizes = {}
    for steps in (1, 2):
        model = law.build(tfaccum.Model)
        model.compile("sgd", "mse", gradient_accumulation_steps=steps)
        model.fit(x, y, batch_size=4, verbose=0)
        sizes[steps] = model.accumulator_bytes
    parameters = FEATURES_TO_4 + FOUR_TO_1
    assert sizes[1] == 0
    # One float64 per parameter; loss and weight; examples in float32.
    assert sizes[2] == 8 * parameters + 2 * 8 + 4


FEATURES_TO_4 = law.FEATURES * 4 + 4
FOUR_TO_1 = 4 * 1 + 1
