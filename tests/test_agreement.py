"""Two workers agree before anything takes effect."""

import functools

import numpy as np
import pytest

from tests import workers

CHECKS = (
    "stops",
    "evaluation_stops",
    "plateau_and_early_stopping",
    "differences",
    "same_share",
    "compare_replicas",
    "wire_dtypes",
)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Tells what both workers found, which has to be the same."""
    directory = tmp_path_factory.mktemp("workers")
    results = workers.run_checks("agreement_checks", CHECKS, directory)
    return functools.partial(workers.same, results)


# --- M5: decisions of callbacks -------------------------------------------

MIDDLE = ("worker_1", "chief", "all", "eagerly", "unknown_size")


@pytest.mark.parametrize(
    "name,updates,epochs",
    [(name, 5, 1) for name in MIDDLE]
    + [
        ("three_windows_a_call", 6, 1),
        ("last_batch", 10, 1),
        ("last_batch_of_unknown_size", 10, 1),
        ("epoch_end", 20, 2),
    ],
)
def test_M5_one_worker_stops_both_at_the_same_update(
    both, name, updates, epochs
):
    found = both("stops")[name]
    assert found["updates"] == updates
    assert found["epochs"] == list(range(epochs))
    # Weights, statistics, slots, average, seed: not a bit has moved since.
    assert found["left_no_trace"]
    assert len(found["mae"]) == epochs
    assert found["mae"][-1] == found["last_mae"]


def test_M5_who_stops_makes_no_difference(both):
    found = both("stops")
    for name in ("chief", "all", "unknown_size"):
        assert found[name]["state"] == found["worker_1"]["state"]
        assert found[name]["mae"] == found["worker_1"]["mae"]


def test_M5_evaluation_and_prediction_stop_on_both(both):
    loss, rows = both("evaluation_stops")
    assert loss == np.mean(range(8))  # Two batches of four.
    assert rows == list(range(8))


def test_callbacks_of_keras_decide_the_same_everywhere(both):
    epochs, rates = both("plateau_and_early_stopping")
    # The first epoch sets the mark; each later one is no better.
    assert epochs == 4
    assert rates == [1, 1, 0.5, 0.25]


# --- Different programs ---------------------------------------------------


@pytest.mark.parametrize(
    "name,first,second",
    [
        ("epochs", "1", "2"),
        ("gradient_accumulation_steps", "1", "2"),
        ("content of the data", "", ""),
        ("elements of the data", "float32", "float64"),
        ("number of batches of the data", "2", "3"),
        ("optimizer.momentum", "0.0", "0.5"),
        ("seed", "0", "1"),
    ],
)
def test_workers_that_differ_are_refused(both, name, first, second):
    text = both("differences")[name]
    assert text.startswith(f"`{name}` must be the same on every worker.")
    before, after = text.split(" on worker 0 and ")
    assert first in before and second in after.split(" on worker 1")[0]


def test_workers_that_agree_train_on(both):
    assert both("differences")["nothing"] == "accepted"


def test_J4_two_workers_with_the_same_share_are_refused(both):
    same, different = both("same_share")
    assert "the same first batches on workers 0 and 1" in same
    assert "context.input_pipeline_id" in same
    assert different == "accepted"


# --- Replicas that have come apart ----------------------------------------


def test_D12_replicas_are_compared(both):
    found = both("compare_replicas")
    assert found["well"] == "equal"
    assert found["well updates"] == 30
    # Batches of four: the second update ends with batch 3.
    assert found["corrupt updates"] == 2
    assert "after update 2" in found["corrupt"]
    assert f"{found['path']} of replica(s) [1]" in found["corrupt"]
    assert "(1 of " in found["corrupt"]


# --- What travels ---------------------------------------------------------


def test_gradients_travel_in_two_bytes(both):
    found = both("wire_dtypes")
    weight, whole = found["None"]
    assert weight == pytest.approx(-4.5 - 14 / 3)
    assert whole == {"float32": whole["float32"]}
    for wire_dtype in ("bfloat16", "float16"):
        weight, sizes = found[wire_dtype]
        assert weight == pytest.approx(-4.5 - 14 / 3, rel=2e-7)
        assert sizes[wire_dtype] == [1]
    (all_of_it,) = whole["float32"]
    assert found["bfloat16"][1]["float32"] == [all_of_it - 1]
    assert sorted(found["float16"][1]["float32"]) == [1, all_of_it - 1]
