"""Workers as processes, watched to the end: when each ended, and how."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

from tests import workers
from tfaccum.cluster import Cluster

# Until the fault has happened: three processes import TensorFlow.
START = 150
# How much later than the others the one that failed may end.
STRAGGLE = 5


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one worker ended.

    Attributes:
        code: Its exit status; None if it has not ended.
        after: Seconds from the fault until then.
        states: Weights and slots after each update.
        end: What it wrote at its end, or None.
    """

    code: int | None
    after: float
    states: list[str]
    end: dict | None


class Run:
    """Runs `tests.faults.job`; always used as a context.

    Args:
        folder: Where everything is written.
        num_workers: Processes.
        flags: Of the job.
        addresses: Of the workers; default free ports of 127.0.0.1.
        prefixes: What stands before the command of each worker.
    """

    def __init__(
        self, folder, num_workers, *flags, addresses=None, prefixes=None
    ):
        self.folder = folder
        self.addresses = addresses or workers.free_addresses(num_workers)
        prefixes = prefixes or [[]] * num_workers
        command = [sys.executable, "-m", "tests.faults.job", folder, *flags]
        self.processes = []
        for index, prefix in enumerate(prefixes):
            cluster = Cluster(tuple(self.addresses), index, "a test")
            with open(folder / f"stderr-{index}", "w") as stderr:
                process = subprocess.Popen(
                    [*prefix, *command],
                    cwd=workers.ROOT,
                    env={**os.environ, "TF_CONFIG": cluster.tf_config()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def name(self, index):
        """As the library writes it."""
        return f"Worker {index} ({self.addresses[index]})"

    def states(self, index):
        """Weights and slots of a worker after each update."""
        path = self.folder / f"weights-{index}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_update(self, number):
        """Waits until all workers have made so many updates."""
        deadline = time.monotonic() + START
        while any(
            len(self.states(i)) < number for i in range(len(self.processes))
        ):
            self.check(deadline)
            time.sleep(0.02)

    def wait_for_fault(self):
        """Waits until the job tells that it happens now; when it did."""
        path = self.folder / "fault"
        deadline = time.monotonic() + START
        while not (path.exists() and path.read_text()):
            self.check(deadline)
            time.sleep(0.02)
        return float(path.read_text())

    def check(self, deadline):
        codes = [process.poll() for process in self.processes]
        assert time.monotonic() < deadline and not any(codes), self.report()

    def watch(self, indices, began, limit):
        """Until these have ended, or `limit` seconds after the fault."""
        after = {}
        while len(after) < len(indices) and time.time() < began + limit:
            for index in indices:
                process = self.processes[index]
                if index not in after and process.poll() is not None:
                    after[index] = time.time() - began
            time.sleep(0.02)
        return {
            index: Ended(
                code=self.processes[index].returncode,
                after=after.get(index, limit),
                states=self.states(index),
                end=self.end(index),
            )
            for index in indices
        }

    def watch_others(self, one, began, limit):
        """Until all others have ended; `one` may have or not."""
        others = [i for i in range(len(self.processes)) if i != one]
        ended = self.watch(others, began, limit)
        return {**ended, **self.watch([one], time.time(), STRAGGLE)}

    def stderr(self, index):
        return (self.folder / f"stderr-{index}").read_text(errors="replace")

    def end(self, index):
        path = self.folder / f"end-{index}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def report(self):
        """The last that each worker wrote, for a failed test."""
        return "\n".join(
            f"--- worker {index}: {process.returncode}\n"
            + self.stderr(index)[-3000:]
            for index, process in enumerate(self.processes)
        )
