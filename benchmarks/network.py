r"""Training over a network of limited bandwidth and delay, on one machine.

Workers train with MultiWorkerMirroredStrategy, each in a network namespace of
its own, and read from their network device how much they have sent. Printed
are one line of JSON for each number of micro-steps K and `wire_dtype`, and
tables, also of what a simple cost model makes of them.

    python benchmarks/network.py --json=FILE --plot=docs/scaling.png
    python benchmarks/network.py --from=FILE

The second measures nothing and reads what the first has written. Measuring
takes Linux, the rights of root, `ip` and `tc` of iproute2, 5 GB of memory, and
23 minutes on two cores that have as much else to do.

What was measured, beside what was expected, is in docs/scaling.md.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import cost_model, network_report  # noqa: E402
from benchmarks.namespaces import JUMBO, Network, NetworkError  # noqa: E402
from benchmarks.network_worker import MICRO_BATCH  # noqa: E402

# Of Ethernet, IPv4, and TCP with timestamps, in each packet.
HEADER_BYTES = 14 + 20 + 32
# A model for which neither bandwidth nor arithmetic matters.
TINY = 100


def case(
    parameters: int,
    k: int,
    wire_dtype: str | None,
    mbit: float | None,
    replica_reduction: str = "mean",
    *,
    layers: int = 1,
    micro_batch: int = MICRO_BATCH,
) -> dict[str, Any]:
    """What a worker is told to measure; about so many parameters."""
    return {
        "parameters": parameters,
        "K": k,
        "wire_dtype": wire_dtype,
        "mbit": mbit,
        "replica_reduction": replica_reduction,
        "layers": layers,
        "micro_batch_size": micro_batch,
    }


def measure(
    cases: Sequence[dict],
    *,
    workers: int,
    mtu: int = JUMBO,
    delay: float | None = None,
    bytes_per_pack: int = 0,
    rounds: int = 3,
    updates: int = 3,
    timeout: float = 1800,
) -> list[dict[str, Any]]:
    """Trains in a network of its own; returns a row for each case.

    The cases take turns, `rounds` times, with `updates` counted each time.
    `delay` is in seconds, from one worker to another; None: no relay.

    Raises:
        NetworkError: if the network cannot be made.
        RuntimeError: if a worker fails or has not finished in time.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(workers, mtu, delay) as network,
    ):
        processes = []
        for index in range(workers):
            told = {
                "index": index,
                "hosts": network.hosts,
                "ends": network.ends(index),
                "bytes_per_pack": bytes_per_pack,
                "cases": list(cases),
                "rounds": rounds,
                "updates": updates,
                "result": f"{folder}/{index}.json",
            }
            with open(f"{folder}/{index}.log", "w") as log:
                processes.append(
                    network.start(
                        index,
                        [
                            *(sys.executable, "-m"),
                            *("benchmarks.network_worker", json.dumps(told)),
                        ],
                        stdout=log,
                        stderr=log,
                        env=_environment(),
                    )
                )
        _wait(processes, folder, timeout)
        found = [
            json.loads(Path(folder, f"{index}.json").read_text())
            for index in range(workers)
        ]
    setting = {
        "workers": workers,
        "mtu": mtu,
        "delay": delay,
        "bytes_per_pack": bytes_per_pack,
        **about_here(),
    }
    rows = [
        _row(what, [worker["cases"][i] for worker in found], setting)
        for i, what in enumerate(cases)
    ]
    if found[0]["path"]:
        limits = [what["mbit"] for what in cases if what["mbit"]]
        rows.append(
            {
                "what": "path",
                "mbit": limits[0] if limits else None,
                **found[0]["path"],
                **setting,
            }
        )
    return rows


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _wait(
    processes: Sequence[subprocess.Popen], folder: str, timeout: float
) -> None:
    """Until all workers have ended well.

    Raises:
        RuntimeError: if one has not; shows the end of what it printed.
    """
    deadline = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in processes]):
        if any(codes) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for index, code in enumerate(codes):
        if code:
            text = Path(folder, f"{index}.log").read_text(errors="replace")
            raise RuntimeError(
                f"Every worker must end well. Received: exit code {code} from "
                f"worker {index}, which printed:\n{text[-3000:]}"
            )
    if None in codes:
        raise RuntimeError(
            f"The workers must end within {timeout:g} s. Received: worker "
            f"{codes.index(None)} had not ended."
        )


def _row(
    what: dict[str, Any], found: Sequence[dict], setting: dict[str, Any]
) -> dict[str, Any]:
    """One line of the results, of what all workers have found for a case."""
    first = found[0]
    seconds = first["seconds"]
    sent = statistics.fmean(
        statistics.median(worker["bytes"]) for worker in found
    )
    packets = statistics.fmean(
        statistics.median(worker["packets"]) for worker in found
    )
    expected = cost_model.ring_bytes(
        setting["workers"],
        first["parameters"],
        cost_model.WIRE_BYTES[what["wire_dtype"]],
    )
    median = statistics.median(seconds)
    examples = what["micro_batch_size"] * setting["workers"] * what["K"]
    return {
        "what": "update",
        **what,
        "parameters": first["parameters"],
        "bytes_sent_per_worker_per_update": round(sent),
        "bytes_expected": round(expected),
        "bytes_ratio": sent / expected,
        "bytes_ratio_without_headers": (sent - HEADER_BYTES * packets)
        / expected,
        "seconds_per_update": median,
        "seconds_least_and_most": [min(seconds), max(seconds)],
        "updates": len(seconds),
        "cpu_seconds_per_worker_per_update": statistics.fmean(
            statistics.median(worker["cpu_seconds"]) for worker in found
        ),
        "examples_per_second": examples / median,
        **setting,
    }


def about_here() -> dict[str, str]:
    """Commit, machine and versions."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    model = "unknown processor"
    with contextlib.suppress(OSError):
        for row in Path("/proc/cpuinfo").read_text().splitlines():
            if row.startswith("model name"):
                model = row.partition(":")[2].strip()
                break
    return {
        "commit": commit or "unknown",
        "hardware": f"{os.cpu_count()} cores of {model}, Linux "
        f"{platform.release()}",
        "tensorflow": metadata.version("tensorflow"),
        "keras": metadata.version("keras"),
    }


def measure_all(
    parameters: int, mbit: float, delays: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """All rows of docs/scaling.md, as they are measured."""
    wires = tuple(cost_model.WIRE_BYTES)
    tiny = [case(TINY, k, None, mbit) for k in (1, 16)]

    def large(rate: float | None, *steps: int) -> list[dict[str, Any]]:
        return [case(parameters, k, w, rate) for w in wires for k in steps]

    steps = (1, 2, 4, 8, 16)
    yield from measure(
        [*large(mbit, *steps), *large(None, *steps), *tiny],
        workers=4,
        rounds=5,
    )
    yield from measure([*large(mbit, 1, 4, 16), *tiny], workers=2, rounds=5)
    yield from measure(
        [case(parameters, k, None, mbit) for k in (1, 4, 16)],
        workers=4,
        mtu=1500,
    )
    waits = [case(TINY, 1, wire, None) for wire in wires]
    for delay in delays:
        yield from measure(
            [*large(mbit, 1, 4, 16), *waits], workers=4, delay=delay, rounds=5
        )
        for workers in (2, 3):
            yield from measure(waits, workers=workers, delay=delay, updates=5)


# --- The command -----------------------------------------------------------


def main() -> None:
    """Measures, or reads what was measured, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file for the lines of JSON")
    parser.add_argument("--from", dest="source", help="such a file to read")
    parser.add_argument("--plot", help="file for the plot")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument(
        "--delay_ms",
        type=float,
        nargs="*",
        default=[0.0, 2.0, 10.0],
        help="from one worker to another; the first rows are without a relay",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=cost_model.PREDICTED_LATENCY,
        help="seconds of a step of the ring, for the predictions",
    )
    flags = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        rows = list(_rows(flags))
    except NetworkError as error:
        sys.exit(str(error))
    print(network_report.report(rows, flags.latency))
    if flags.plot:
        network_report.plot(rows, flags.latency, flags.plot)


def _rows(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if flags.source:
        text = Path(flags.source).read_text()
        yield from map(json.loads, text.splitlines())
        return
    with contextlib.ExitStack() as stack:
        file = flags.json and stack.enter_context(open(flags.json, "w"))
        delays = [ms / 1e3 for ms in flags.delay_ms]
        for row in measure_all(flags.parameters, flags.mbit, delays):
            text = json.dumps(row)
            print(text, flush=True)
            if file:
                print(text, file=file, flush=True)
            yield row


if __name__ == "__main__":
    main()
