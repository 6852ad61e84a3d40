"""Benchmarks: each prints JSON lines, with commit and machine."""

import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

# Seconds that have passed, and that all threads together have worked.
Seconds = tuple[float, float]


def where() -> dict[str, str]:
    """The commit, marked if the tree has changed since; machine, versions."""
    # Not before: not every benchmark needs TensorFlow in its own process.
    from tfaccum.train import report

    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=9"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": found.stdout.strip() or "unknown",
        "hardware": report.hardware(),
        "tensorflow": metadata.version("tensorflow"),
        "keras": metadata.version("keras"),
    }


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """Median, least and most."""
    return [round(f(values), digits) for f in (statistics.median, min, max)]


def timed(action: Callable[[], object]) -> Seconds:
    """Seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turn(
    contenders: Mapping[str, Callable[[], Seconds]], rounds: int
) -> dict[str, list[Seconds]]:
    """Seconds of each, once per round: what slows one down slows all down.

    In another order each time, so that none always follows the same one.
    """
    found: dict[str, list[Seconds]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            found[name].append(contenders[name]())
    return found


def against(
    ours: Sequence[float], theirs: Sequence[float], target: float | None = None
) -> dict[str, Any]:
    """Ratios of two measurements, round by round, beside the target."""
    ratio = spread([a / b for a, b in zip(ours, theirs, strict=True)])
    return {
        "ratio": ratio,
        "target": target,
        "met": None if target is None else ratio[0] <= target,
    }
