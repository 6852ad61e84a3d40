"""Cases E on two worker processes, each with its own data.

One pair of workers goes through all of `precision_checks`, and each test looks
at one case of one of them.
"""

import numpy as np
import pytest

from tests import precision, workers

CHECKS = (
    "optimizers",
    "own_step",
    "schedule",
    "losses",
    "bad_values",
    "bad_values_in_float32",
    "between_two_logs",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each worker found."""
    directory = tmp_path_factory.mktemp("workers")
    return workers.run_checks("precision_checks", CHECKS, directory)


@pytest.fixture
def both(results):
    """Tells what both workers found in a case, the same to the bit.

    Only "culprits" are one list for each worker.
    """

    def of(check, case):
        first, second = (dict(result[check][case]) for result in results)
        culprits = [found.pop("culprits") for found in (first, second)]
        assert first == second
        return {**first, "culprits": culprits}

    return of


# Keras rounds 0.999 to float32, and 1 - 0.999 is 1.3e-5 off by that.
ADAM_TOLERANCE = 1e-4


def adam(gradients, rate, decay=0.0):
    """Adam by its paper, with decoupled decay, from w = 0, by numpy."""
    w = m = v = 0.0
    weights = []
    for t, gradient in enumerate(gradients, start=1):
        w -= rate * decay * w
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        w -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)
        weights.append(w)
    return weights, m, v


# --- E1: an optimizer with a loss scale, however it got it ----------------


@pytest.mark.parametrize(
    "how, scale",
    [("wrapped", 2.0**15), ("unwrapped", 1.0), ("by_policy", 2.0**15)],
)
def test_E1_loss_scale_optimizers_are_accepted(both, how, scale):
    found = both("optimizers", how)
    assert found["optimizer"] == (
        "Adam" if how == "unwrapped" else "LossScaleOptimizer"
    )
    assert found["loss_scale"] == [scale, scale]
    # (0.25 + 0.5 + 0.75 + 1) / 4 and (0.5 + 0 + 0.25 + 0.25) / 4.
    means = [0.625, 0.25]
    assert [float(norm) for norm in found["norms"]] == means
    weights, _, _ = adam(means, 0.5)
    np.testing.assert_allclose(found["weights"], weights, rtol=ADAM_TOLERANCE)
    assert found["update"] == [1, 2]


def test_E1_a_fixed_loss_scale_factor_is_taken_out_again(both):
    found = both("optimizers", "fixed")
    assert found["loss_scale"] == [1024, 1024]
    assert [float(norm) for norm in found["norms"]] == [0.625, 0.25]
    assert found["weights"] == [-0.625, -0.875]


# --- E6: a step of one's own ----------------------------------------------


@pytest.mark.parametrize(
    "policy, tolerance", [("float32", 1e-6), ("mixed_float16", 1e-3)]
)
def test_E6_float16_equals_float32_through_an_own_step(both, policy, tolerance):
    found = both("own_step", policy)
    scale = 1 if policy == "float32" else precision.START
    assert found["loss_scale"] == [scale, scale]
    # Means of 5 and of 4 examples. The loss is 0 first, then -0.3 * 0.5875.
    first, second = 1.5 / 5, 2.35 / 4
    np.testing.assert_allclose(
        found["weights"] + found["epoch_loss"],
        [-first, -first - second, -first * second * 4 / 9],
        atol=tolerance,
    )


# --- E8: the schedule -----------------------------------------------------


def test_E8_a_skipped_update_does_not_move_the_schedule(both):
    found = both("schedule", "skips")
    assert found["skipped"] == [False, True, True, False, False]
    assert found["learning_rate"] == [1, 2, 2, 2, 3]
    assert found["update"] == [1, 1, 1, 2, 3]
    # The means are 0.375, 0.5 and 0.25.
    assert found["weights"] == [-0.375, -0.375, -0.375, -1.375, -2.125]
    assert found["culprits"] == [[None] * 5, [None, 1, 1, None, None]]


# --- E9: logged losses ----------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_E9_logged_losses_are_not_scaled(both, steps):
    found = both("losses", str(steps))
    assert found["loss_scale"] == [precision.START] * (2 // steps)
    # w is 1, and after the first batch alone 1 - 0.375.
    losses = {1: [0.375, 0.875 * 0.625], 2: [0.625]}[steps]
    np.testing.assert_allclose(
        [float(loss) for loss in found["losses"]], losses, rtol=1e-3
    )
    np.testing.assert_allclose(
        found["epoch_loss"], [np.mean(losses)], rtol=1e-3
    )


def test_E9_a_skipped_window_does_not_spoil_the_epochs_loss(both):
    found = both("losses", "skipped")
    assert found["skipped"] == [True, False]
    first, second = (float(loss) for loss in found["losses"])
    assert not np.isfinite(first)
    assert second == pytest.approx(0.625, rel=1e-3)
    np.testing.assert_allclose(found["epoch_loss"], [0.625], rtol=1e-3)


# --- E10, E12: a bad gradient on one worker drops the whole update --------


@pytest.mark.parametrize("steps", [1, 4])
def test_E10_E12_inf_on_worker_1_skips_the_update(both, steps):
    found = both("bad_values", str(steps))
    # Good, bad, good, and so on; bad in micro-steps 0, 2 and 3 of 4.
    skipped = [False] + [True, False] * (1 if steps == 1 else 3)
    assert found["skipped"] == skipped
    assert found["culprits"] == [
        [None] * len(skipped),
        [1 if is_skipped else None for is_skipped in skipped],
    ]
    # All of w, momentum, average and iterations, or not one bit.
    assert found["moved"] == [0 if bad else 4 for bad in skipped]
    expected = precision.by_hand(skipped)
    assert found["scales"] == expected["scales"]
    assert found["counters"] == expected["counters"]
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-6)


@pytest.mark.parametrize("name, worker", [("nan_on_0", 0), ("inf_on_1", 1)])
def test_E10_E12_float32_skips_with_adam_and_goes_on(both, name, worker):
    """Count, moments, decay and average stand still, without a loss scale."""
    found = both("bad_values_in_float32", name)
    assert found["optimizer"] == "AdamW" and found["scales"] == []
    assert found["skipped"] == [False, True, True, False]
    culprits = [[None] * 4, [None] * 4]
    culprits[worker][1:3] = [worker] * 2
    assert found["culprits"] == culprits
    # w, two moments, average, iterations.
    assert found["moved"] == [5, 0, 0, 5]
    (first, second), m, v = adam([2.5, 1.0], 0.1, decay=0.1)
    np.testing.assert_allclose(
        found["weights"], [first, first, first, second], rtol=ADAM_TOLERANCE
    )
    average = 0.99 * first + 0.01 * second
    np.testing.assert_allclose(
        sorted(found["final"]),
        sorted([second, average, m, v, 0.1, 2]),  # And rate and iterations.
        rtol=ADAM_TOLERANCE,
    )


# --- E13: nobody looks in between -----------------------------------------


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_E13_a_bad_window_between_two_logs_is_caught(both, policy):
    found = both("between_two_logs", policy)
    assert len(found["bits"]) == 2  # Before, and after the one call.
    assert found["skipped"] == [False, True, False]
    assert found["update"] == [1, 1, 2]
    assert found["weights"] == [-0.75]
    assert found["culprits"] == [[None] * 3, [None, 1, None]]
