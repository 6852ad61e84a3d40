"""Two worker processes, each with its own data, make one update.

Starting a worker takes seconds, so that one pair of them goes through all
checks of `tests/multi_worker/checks.py`, and each test looks at one of them.
"""

import functools

import keras
import numpy as np
import pytest

from tests import workers
from tests.multi_worker import checks

CHECKS = (
    "shuffle_needs_a_seed",  # First: the others set one.
    "t_for_each_window",
    "five_and_four",
    "five_and_four_of_unknown_size",
    "a_worker_without_data",
    "one_row_for_two_workers",
    "own_arrays",
    "masked_tokens",
    "overflow",
    "lost_run",
    "train_on_batch",
    "shuffle_with_a_seed",
    "networks",
    "evaluate_and_predict",
    "predict_uneven_shares",
    "in_step",
    "batch_norm",
    "collectives",
    "micro_steps",
    "micro_steps_of_cut_batches",
    "digits",
)


@pytest.fixture(scope="module", params=[0, 16])
def bytes_per_pack(request):
    """0: all travels at once. Else the last micro-step is peeled."""
    return request.param


@pytest.fixture(scope="module")
def results(tmp_path_factory, bytes_per_pack):
    """What each worker found, by the name of the check."""
    directory = tmp_path_factory.mktemp("workers")
    data_dir = directory / "data"
    checks.pipeline(data_dir)  # Writes the files, before two workers would.
    return workers.run_checks(
        "checks",
        CHECKS,
        directory,
        env={"DIGITS": str(data_dir), "BYTES_PER_PACK": str(bytes_per_pack)},
    )


@pytest.fixture
def both(results):
    """Tells what both workers found, which has to be the same."""
    return functools.partial(workers.same, results)


# --- D1, D16: T by hand ---------------------------------------------------


def test_D1_D16_two_workers_and_windows(both):
    one, three, eager, cut = both("t_for_each_window")
    # Batches [1, 2], [3, 4], [5, 9], [2, 2] and [8].
    assert one["weights"] == [-1.5, -5, -12, -14, -22]
    assert three["weights"] == eager["weights"] == [-4, -8]
    assert three["examples"] == eager["examples"] == [6, 3]
    assert three["iterations"] == eager["iterations"] == [1, 2]
    assert cut["weights"] == one["weights"]
    # w is 0, then -4 for 12 / 3: the mean over all nine of w * x.
    assert three["loss"] == eager["loss"] == [pytest.approx(-48 / 9)]


# --- J3: workers with different numbers of batches ------------------------


def uneven_windows():
    """The mean and the size of each window of two batches per worker."""
    windows = []
    for first in (0, 2, 4):
        x = np.concatenate(
            [
                batch
                for batches in checks.UNEVEN
                for batch in batches[first : first + 2]
            ]
        )
        windows.append((np.mean(x), len(x)))
    return windows


def test_J3_five_and_four_batches(both):
    found = both("five_and_four")
    windows = uneven_windows()
    assert [size for _, size in windows] == [7, 7, 1]
    assert found["examples"] == [7, 7, 1] * 2
    expected = -np.cumsum([mean for mean, _ in windows] * 2)
    np.testing.assert_allclose(found["weights"], expected, rtol=1e-6)
    assert found["iterations"] == [1, 2, 3, 4, 5, 6]


def test_J3_batches_of_unknown_number(both):
    found = both("five_and_four_of_unknown_size")
    windows = uneven_windows()
    assert found["examples"] == [7, 7, 1] * 2
    expected = -np.cumsum([mean for mean, _ in windows] * 2)
    # Two windows in one call: weights are seen after the 2nd and 3rd.
    np.testing.assert_allclose(
        found["weights"], expected[[1, 2, 4, 5]], rtol=1e-6
    )
    means, sizes = zip(*windows, strict=True)
    mean = np.average(means, weights=sizes)
    np.testing.assert_allclose(
        found["evaluated"], expected[-1] * mean, rtol=1e-5
    )


def test_J3_a_worker_without_any_data(both):
    """It takes part in every update, until the other has no more either."""
    for found in both("a_worker_without_data"):
        # Windows [1, 3, 5] and [7, 9].
        assert found["weights"] == [-3, -11, -14, -22]
        assert found["examples"] == [3, 2, 3, 2]


def test_J2_the_last_batch_leaves_a_worker_empty(results):
    (first, w), (second, other_w) = (
        result["one_row_for_two_workers"] for result in results
    )
    assert w == other_w == -11.5  # 10 / 4 and 9.
    assert (first, second) == ([1, 2, 9], [3, 4])


# --- A2: tokens -----------------------------------------------------------


def test_A2_tokens_count_and_not_workers(both):
    assert both("masked_tokens") == pytest.approx(-1, abs=1e-6)


# --- E2, E3: overflow on one worker ---------------------------------------


def test_E2_E3_overflow_on_worker_1_is_skipped_by_both(both):
    found = both("overflow")
    assert found["skipped"] == [False, True, False]
    assert found["scales"] == [2.0**15, 2.0**14, 2.0**14]
    assert found["counter"] == 1
    first, second, third = found["states"]
    assert first == second
    assert sum(a != b for a, b in zip(second, third, strict=True)) == 3
    # v = -0.375, then 0.5 v - 0.375.
    assert found["weight"] == pytest.approx(-0.375 - 0.5625)


def test_E5_lost_run_ends_on_both_and_names_worker_1(both):
    found = both("lost_run")
    text = found["text"]
    assert "3 updates in a row were skipped" in text
    assert f"that of {found['path']} on replica 1 (worker 1)" in text
    assert "the loss was nan (not finite itself)" in text
    assert found["weight"] == pytest.approx(-0.375)
    assert found["scale"] == 2.0


# --- D12, D13: in step ----------------------------------------------------


def test_D12_D13_workers_are_equal_to_the_bit_after_every_update(both):
    states = both("in_step")
    assert len(states) == 20
    for before, after in zip(states[:-1], states[1:], strict=True):
        moved = sum(a != b for a, b in zip(before, after, strict=True))
        # All of 8 weights and statistics, 12 moments, iterations.
        assert moved == 8 + 12 + 1


def test_batch_norm_averages_the_workers(both):
    mean, variance = both("batch_norm")[:2]
    x = np.array([[[1, 2, 3], [3, 2, 1]], [[7, 7, 7], [9, 3, 5]]])
    # Momentum 0.5, from 0 and 1; each worker's own two rows.
    np.testing.assert_allclose(mean, x.mean(1).mean(0) / 2, rtol=1e-6)
    np.testing.assert_allclose(variance, 0.5 + x.var(1).mean(0) / 2, rtol=1e-6)


# --- The law, O1 ----------------------------------------------------------


@pytest.mark.parametrize("name", checks.NETWORKS)
def test_D16_O1_networks_equal_one_big_batch(both, name):
    """Weights, slots, logs and validation; one of them compiled by XLA."""
    found = both("networks")[name]
    optimizer, batch_size, _ = checks.NETWORKS[name]
    reference = checks.network(keras.Model, optimizer)
    expected = checks.train_network(reference, batch_size)
    for value, wanted in zip(found["values"], expected["values"], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)
    assert found["logs"].keys() == expected["logs"].keys()
    for log, values in expected["logs"].items():
        np.testing.assert_allclose(found["logs"][log], values, rtol=1e-5)


# --- Evaluation -----------------------------------------------------------


def test_evaluate_and_predict_are_those_of_one_device(both):
    found = both("evaluate_and_predict")
    x, y, weight = checks.data()
    reference = checks.network(keras.Model, keras.optimizers.SGD)
    expected = reference.evaluate(
        x, y, sample_weight=weight, verbose=0, return_dict=True
    )
    for how in ("evaluated", "unknown_size", "on_batch"):
        assert found[how] == pytest.approx(expected, rel=1e-5), how
    rows = reference.predict(x, verbose=0)
    for how, wanted in (
        ("predicted", rows),
        ("predicted_unknown", rows),
        ("predicted_one", rows[:1]),
    ):
        np.testing.assert_allclose(found[how], wanted, rtol=1e-5)
    first, inputs = found["several"]
    np.testing.assert_allclose(first, rows, rtol=1e-5)
    np.testing.assert_array_equal(np.float32(inputs), x)


def test_predict_takes_all_rows_of_uneven_shares(both):
    rows, refusal = both("predict_uneven_shares")
    assert rows == [1, 2, 10, 3, 4, 5]
    assert "on each worker. Received: 3, 0 batches" in refusal


def test_train_on_batch_takes_each_workers_share(both):
    loss, w = both("train_on_batch")
    assert loss == 0
    assert w == -4  # (1 + 2 + 3 + 4 + 10) / 5


# --- Input ----------------------------------------------------------------


def test_shuffle_without_a_seed_is_refused(both):
    message = both("shuffle_needs_a_seed")
    assert "shuffle=True without a seed" in message
    assert "keras.utils.set_random_seed" in message


def test_nothing_is_written_into_the_arrays_of_the_user(both):
    sevens = [np.full([rows, 16], 7).tolist() for rows in (2, 5, 4)]
    assert both("own_arrays") == [sevens, sevens]


def test_shuffled_arrays_are_shared_out_once(results):
    (first, w), (second, other_w) = (
        result["shuffle_with_a_seed"] for result in results
    )
    assert w == other_w
    assert sorted(first + second) == sorted(2 * list(range(11)))
    # Shares of 2 and 2, 2 and 2, 2 and 1.
    assert (len(first), len(second)) == (12, 10)


def test_J3_digits_are_seen_once_per_epoch(results):
    first, second = (result["digits"] for result in results)
    number = first["examples"]
    assert number > 1000
    batches = -(-number // 250)
    updates = -(-batches // 3)
    assert first["updates"] == second["updates"] == [updates, 2 * updates]
    for mine, others in zip(first["ids"], second["ids"], strict=True):
        assert sorted(mine + others) == list(range(number))
    assert first["ids"][0] != first["ids"][1]


# --- D10: what travels ----------------------------------------------------


@pytest.mark.parametrize("index,steps", [(0, 1), (1, 4)])
def test_D10_one_collective_per_window_and_none_for_the_input(
    both, bytes_per_pack, index, steps
):
    """The dataset is finite, yet no worker is asked whether it has more."""
    micro_step, whole = both("collectives")[index]
    assert micro_step == []
    assert set(whole) == {"CollectiveReduceV2"}
    assert len(whole) == 1 or bytes_per_pack


def test_the_last_of_several_micro_steps_is_peeled_for_packs(
    both, bytes_per_pack
):
    """Then the graph has it twice: in the loop, and behind it."""
    one, four = both("micro_steps")
    assert one == 1
    assert four == (2 if bytes_per_pack else 1)
    assert both("micro_steps_of_cut_batches") == 1
