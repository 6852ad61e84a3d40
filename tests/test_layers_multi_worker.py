"""BatchNorm on two worker processes, each with its own data.

One pair of workers goes through all of `norm_checks`.
"""

import functools
import itertools

import numpy as np
import pytest

from tests import workers
from tests.multi_worker import norm_checks

CHECKS = ("windows", "skipped", "collectives", "communicating", "one_stops")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each worker found."""
    directory = tmp_path_factory.mktemp("workers")
    return workers.run_checks("norm_checks", CHECKS, directory, timeout=240)


@pytest.fixture
def both(results):
    """Tells what both workers found, the same to the bit."""
    return functools.partial(workers.same, results)


def moved(batches):
    """Moving statistics after each big batch, by numpy."""
    mean, variance = 0.0, 1.0
    for batch in batches:
        mean = (mean + batch.mean(0)) / 2
        variance = (variance + batch.var(0)) / 2
    return mean, variance


def big_batches(size):
    x = norm_checks.rows().astype(np.float64)
    return [x[first : first + size] for first in range(0, len(x), size)]


def uneven_windows(size):
    """What both workers have in each window of so many batches."""
    return [
        np.concatenate(
            [
                np.array(batch, np.float64)[:, None]
                for batches in norm_checks.UNEVEN
                for batch in batches[first : first + size]
            ]
        )
        for first in range(0, 5, size)
    ]


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name, size", [("one", 8), ("two", 16), ("cut", 8), ("jit", 8)]
)
def test_statistics_are_those_of_the_window_over_all_workers(both, name, size):
    assert_near(both("windows")[name], moved(big_batches(size)))


def test_workers_with_different_numbers_of_batches(both):
    assert_near(both("windows")["uneven"], moved(uneven_windows(2) * 2))


def test_a_bad_gradient_on_one_worker_leaves_the_statistics(both):
    first, second, third = both("skipped")
    assert first == second
    x = norm_checks.rows().astype(np.float64)
    assert_near(first, moved([x[:4]]))
    assert_near(third, moved([x[:4], x[8:12]]))


def test_statistics_travel_in_the_one_all_reduce(both):
    assert both("collectives") == ["CollectiveReduceV2"]


# --- Layers that communicate in the forward pass ---------------------------


def test_synchronized_moves_with_the_micro_batch_of_all_workers(both):
    """K = 1: one big batch. K = 2: once per micro-step."""
    found = both("communicating")
    assert_near(found["one"], moved(big_batches(8)))
    assert_near(found["two"], moved(big_batches(8)))


def test_synchronized_with_uneven_workers(both):
    """The worker that has run out takes part, and counts for nothing."""
    found = both("communicating")["uneven"]
    assert_near(found, moved(uneven_windows(1) * 2))


def test_synchronized_is_refused_where_micro_steps_may_differ(both):
    found = both("communicating")
    assert "micro_batch_size=2" in found["cut"]
    assert "data of each worker" in found["uneven_two"]
    for name in ("cut", "uneven_two"):
        assert "WindowBatchNormalization" in found[name]


def test_synchronized_when_one_worker_stops(both):
    """The others do not wait for it, and the window leaves no trace."""
    batches = itertools.islice(big_batches(4), 2)
    assert_near(both("one_stops"), moved(batches))
