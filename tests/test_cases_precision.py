"""Cases E: the loss scale, and updates skipped as one."""

import keras
import numpy as np
import pytest

from tests import toy
from tests.precision import (
    GOOD,
    INF,
    NAN,
    START,
    OneMoreEachTime,
    OwnStep,
    bad_windows,
    by_hand,
    momentum_and_average,
    train,
)


@pytest.fixture
def float16():
    keras.config.set_dtype_policy("mixed_float16")


# --- E1: an optimizer with a loss scale, however it got it ----------------


@pytest.mark.parametrize("how", ["wrapped", "unwrapped", "by_policy"])
def test_E1_loss_scale_optimizers_are_accepted(how):
    if how == "by_policy":
        keras.config.set_dtype_policy("mixed_float16")

    def optimizer():
        adam = keras.optimizers.Adam(0.5)
        if how == "wrapped":
            return keras.optimizers.LossScaleOptimizer(adam)
        return adam

    model = toy.toy(optimizer=optimizer, gradient_accumulation_steps=2)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (
        how != "unwrapped"
    )
    seen = toy.fit(model, toy.batches(GOOD, [0.75, 1], GOOD, [0.75, 1]))
    # Adam's first two steps on one and the same gradient.
    np.testing.assert_allclose(
        [w for (w,) in seen.weights], [-0.5, -1.0], rtol=1e-3
    )
    assert seen.iterations == [1, 2]


def test_E1_a_fixed_loss_scale_factor_is_taken_out_again():
    model = toy.toy(
        optimizer=lambda: keras.optimizers.SGD(1.0, loss_scale_factor=1024.0),
        gradient_accumulation_steps=2,
    )
    seen = toy.fit(model, toy.batches([1], [3], [5]))
    assert [w for (w,) in seen.weights] == [-2, -7]
    assert seen.of_updates("gradient_norm") == [2, 5]
    assert seen.of_updates("loss_scale") == [1024, 1024]


# --- E3, E10, E12: one bad gradient anywhere drops the whole update -------


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_E3_E10_E12_inf_on_the_last_replica_skips_the_update(
    float16, replicas, steps
):
    model = toy.toy(
        replicas,
        optimizer=momentum_and_average,
        gradient_accumulation_steps=steps,
    )
    windows = bad_windows(steps, INF)
    seen = train(model, windows)
    skipped = [index % 2 == 1 for index in range(len(windows))]
    assert [u.skipped for u in seen.updates] == skipped
    # All of w, momentum, average and iterations, or not one bit.
    assert [len(moved) for moved in seen.changes()] == [
        0 if is_skipped else 4 for is_skipped in skipped
    ]
    expected = by_hand(skipped)
    assert seen.scales == expected["scales"]
    assert seen.counters == expected["counters"]
    # So the sums were empty when each good window began.
    np.testing.assert_allclose(seen.weights(), expected["weights"], rtol=1e-6)
    assert [u.update for u in seen.updates] == np.cumsum(
        np.logical_not(skipped)
    ).tolist()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_E10_E12_float32_skips_with_adam_and_goes_on(replicas, bad):
    """Count, moments, decay and average stand still, without a loss scale."""
    model = toy.toy(
        replicas,
        optimizer=lambda: keras.optimizers.AdamW(
            0.1, weight_decay=0.1, use_ema=True
        ),
        gradient_accumulation_steps=2,
    )
    window = [[1.0, 2.0], [3.0, bad]]
    good = [[1.0, 2.0], [3.0, 4.0]]
    seen = train(model, [good, window, window, good])
    assert [u.skipped for u in seen.updates] == [False, True, True, False]
    # w, two moments, average, iterations.
    assert [len(moved) for moved in seen.changes()] == [5, 0, 0, 5]

    undisturbed = toy.toy(
        optimizer=lambda: keras.optimizers.AdamW(
            0.1, weight_decay=0.1, use_ema=True
        ),
    )
    expected_states = train(undisturbed, [[[1, 2, 3, 4]]] * 2).states
    for value, expected in zip(
        seen.states[-1].values(), expected_states[-1].values(), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_E3_both_ways_of_execution(float16, eager):
    model = toy.toy(
        2,
        optimizer=momentum_and_average,
        gradient_accumulation_steps=2,
        run_eagerly=eager,
    )
    seen = train(model, [[GOOD, [0.25, INF]], [GOOD, GOOD]])
    assert [len(moved) for moved in seen.changes()] == [0, 4]
    assert seen.scales == [START, START / 2, START / 2]


def test_E3_the_scale_doubles_once_after_many_good_windows(float16):
    model = toy.toy(
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=4, dynamic_growth_steps=3
        ),
        gradient_accumulation_steps=2,
    )
    good, bad = [GOOD, GOOD], [GOOD, [0.25, INF]]
    seen = train(model, [good, good, bad, good, good, good, good])
    assert seen.scales == [4, 4, 4, 2, 2, 2, 4, 4]
    assert seen.counters == [0, 1, 2, 0, 1, 2, 0, 1]


def test_E3_overflow_of_the_scaled_gradient_alone(float16):
    """x = 1.5 is harmless, 1.5 * 2**16 is not: the scale falls until it is."""
    model = toy.toy(
        2,
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=2.0**17
        ),
        gradient_accumulation_steps=2,
    )
    seen = train(model, [[[1.5, 1.5]] * 2] * 4)
    assert [u.skipped for u in seen.updates] == [True, True, False, False]
    assert seen.scales == [2.0**17, 2.0**16, 2.0**15, 2.0**15, 2.0**15]
    assert toy.weight_of(model) == -3


# --- E6: a step of one's own ----------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_E6_float16_equals_float32_through_an_own_step(replicas):
    found = {}
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        model = toy.toy(
            replicas, model_class=OwnStep, gradient_accumulation_steps=2
        )
        # The last batch leaves an empty replica.
        seen = toy.fit(
            model, toy.batches([0.1, 0.7], [0.3, -0.2], [0.9, 0.4], [0.55])
        )
        found[policy] = [w for (w,) in seen.weights] + seen.logs["loss"]
    # Windows of 4 and 3 examples; the loss of the first is 0.
    second = 1.85 / 3
    expected = [-0.225, -0.225 - second, -0.225 * second * 3 / 7]
    np.testing.assert_allclose(found["float32"], expected, rtol=1e-6)
    np.testing.assert_allclose(
        found["mixed_float16"], found["float32"], atol=1e-3
    )


# --- E8, E9, E13 ----------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_E8_a_skipped_update_does_not_move_the_schedule(float16, replicas):
    model = toy.toy(
        replicas,
        optimizer=lambda: keras.optimizers.SGD(OneMoreEachTime()),
        gradient_accumulation_steps=2,
    )
    good, bad = [GOOD, GOOD], [GOOD, [0.25, INF]]
    seen = train(model, [good, bad, bad, good, good])
    assert [u.learning_rate for u in seen.updates] == [1, 2, 2, 2, 3]
    assert toy.weight_of(model) == -0.375 * (1 + 2 + 3)


@pytest.mark.parametrize("steps", [1, 2])
def test_E9_logged_losses_are_not_scaled(float16, steps):
    model = toy.toy(2, start=1.0, gradient_accumulation_steps=steps)
    seen = toy.fit(model, toy.batches(GOOD, [1.5, 0.25]))
    assert seen.of_updates("loss_scale") == [START] * (2 // steps)
    # w is 1, and after the first batch 1 - 0.375.
    if steps == 1:
        losses = [0.375, 0.875 * 0.625]
        epoch = sum(losses) / 2
    else:
        losses = [0.625]
        epoch = 0.625
    np.testing.assert_allclose(seen.of_updates("loss"), losses, rtol=1e-3)
    np.testing.assert_allclose(seen.logs["loss"], [epoch], rtol=1e-3)


def test_E9_a_skipped_window_does_not_spoil_the_epochs_loss(float16):
    model = toy.toy(2, start=1.0, gradient_accumulation_steps=2)
    seen = toy.fit(model, toy.batches(GOOD, [0.25, INF], GOOD, GOOD))
    np.testing.assert_allclose(seen.logs["loss"], [0.375], rtol=1e-3)
    assert seen.of_updates("skipped") == [True, False]
    assert not np.isfinite(seen.of_updates("loss")[0])


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_E13_a_bad_window_between_two_logs_is_caught(policy):
    """Three windows in one call of the function: nobody looks in between."""
    keras.config.set_dtype_policy(policy)
    model = toy.toy(2, gradient_accumulation_steps=2, steps_per_execution=3)
    good, bad = [GOOD, GOOD], [[0.25, NAN], GOOD]
    seen = train(model, [good, bad, good])
    assert len(seen.states) == 2  # before, and after the one call
    assert [u.skipped for u in seen.updates] == [False, True, False]
    assert [u.update for u in seen.updates] == [1, 1, 2]
    assert toy.weight_of(model) == -0.75


# --- Layer state ----------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_E3_moving_statistics_survive_a_bad_window(replicas, steps):
    """They are as before the window, and the next window moves them."""

    def layers():
        return [
            keras.layers.BatchNormalization(momentum=0.5),
            toy.scalar(0.5),
        ]

    model = toy.toy(
        replicas,
        layers=layers,
        loss="mse",
        gradient_accumulation_steps=steps,
    )
    good = [[1.0, 2.0, 3.0, 8.0]] * steps
    bad = [[1.0, 2.0, 3.0, 8.0]] * (steps - 1) + [[1.0, 2.0, 3.0, NAN]]
    seen = train(model, [good, bad, good])
    assert [u.skipped for u in seen.updates] == [False, True, False]
    moved = [[path for _, path in names] for names in seen.changes()]
    assert moved[1] == []
    for paths in (moved[0], moved[2]):
        assert sum("moving" in path for path in paths) == 2
    for value in seen.states[-1].values():
        assert np.isfinite(value).all()


def test_E3_moving_statistics_by_hand():
    """One device, momentum 0.5: means 2.5 and 6.5, the bad one left out."""

    def layers():
        return [
            keras.layers.BatchNormalization(momentum=0.5),
            toy.scalar(0.5),
        ]

    model = toy.toy(layers=layers, loss="mse")
    train(model, [[[1, 2, 3, 4]], [[1, 2, 3, INF]], [[5, 6, 7, 8]]])
    mean, variance = (
        v.numpy().item() for v in model.layers[1].non_trainable_variables
    )
    assert mean == pytest.approx((0 / 2 + 2.5 / 2) / 2 + 6.5 / 2)
    assert variance == pytest.approx((1 / 2 + 1.25 / 2) / 2 + 1.25 / 2)
