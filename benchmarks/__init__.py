"""Benchmarks: each prints JSON lines, with commit and machine."""

import subprocess


def where() -> dict[str, str]:
    """The commit, marked if the tree has changed since, and the machine."""
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
    }
