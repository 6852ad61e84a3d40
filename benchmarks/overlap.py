"""Reducing while the last micro-step goes backward, against reducing behind it.

    python -m benchmarks.overlap

Two workers in network namespaces at 200 Mbit/s train eight dense layers with
about a million parameters, on micro-batches that take about 0.1 s: with all
gradients in one collective, and in packs of half a megabyte, of which each
travels as soon as its gradients are there. Prints lines of JSON: each way's
milliseconds per update by K, median, least and most, round by round, and the
ratio. As root on Linux, 6 minutes.
"""

import json

import benchmarks
from benchmarks import network

PACKS = (0, 500_000)
STEPS = (2, 8)
ROUNDS = 7


def main():
    """Measures, and prints."""
    found = {(k, pack): [] for k in STEPS for pack in PACKS}
    for _ in range(ROUNDS):
        for pack in PACKS:
            cases = [
                network.case(
                    1_000_000, k, None, 200.0, layers=8, micro_batch=2048
                )
                for k in STEPS
            ]
            for row in network.measure(
                cases, workers=2, bytes_per_pack=pack, rounds=1, updates=5
            ):
                if row["what"] == "update":
                    seconds = row["seconds_per_update"]
                    found[row["K"], pack].append(1e3 * seconds)
    for k in STEPS:
        whole, packs = (found[k, pack] for pack in PACKS)
        row = {
            "what": "overlap",
            "K": k,
            "one_collective_ms": benchmarks.spread(whole),
            "in_packs_ms": benchmarks.spread(packs),
            **benchmarks.against(packs, whole),
            **benchmarks.where(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
