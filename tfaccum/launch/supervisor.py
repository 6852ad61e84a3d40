"""Starts the workers as one group, watches them, and starts them again."""

import signal
import time

from tfaccum.cluster import EXIT_PREEMPTED, STARTED, Cluster
from tfaccum.launch.console import Console
from tfaccum.launch.options import Options
from tfaccum.launch.worker import Worker, free_ports
from tfaccum.train.options import UsageError

# The environment variable that counts starts of the group, from 0.
RESTART = "TFACCUM_RESTART"

# A mistake in the command: the same the second time.
_EXIT_USAGE = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How often the workers are looked at, in seconds.
_PERIOD = 0.1


class Supervisor:
    """Runs a command as a group of workers, as often as asked for."""

    def __init__(self, options: Options):
        self._options = options
        self._console = Console(options.log_dir)
        self._workers: list[Worker] = []
        self._signals: list[int] = []
        self._started = time.strftime("%Y%m%d-%H%M%S")

    def run(self) -> int:
        """Supervises until the end; returns the exit code.

        Raises:
            UsageError: If the folder of the logs cannot be made.
            UsageError: If the program cannot be started.
        """
        try:
            self._options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                "--log_dir must be a folder that can be made. Received: "
                f"--log_dir={self._options.log_dir} ({error.strerror})."
            ) from error
        before = {
            number: signal.signal(number, lambda n, _: self._signals.append(n))
            for number in _SIGNALS
            # Under nohup the end of the terminal is to change nothing.
            if number != signal.SIGHUP
            or signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            return self._run_groups()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_groups(self) -> int:
        self._console.say(f"logs of the workers in {self._options.log_dir}")
        most = self._options.max_restarts
        for restart in range(most + 1):
            code = self._run_group(restart)
            if code in (0, _EXIT_USAGE) or self._signals:
                break
            if restart < most:
                self._console.say(
                    f"starts all workers again ({restart + 1} of {most})"
                )
        return code

    def _run_group(self, restart: int) -> int:
        """Starts all workers; returns the exit code of the first failure."""
        with free_ports(self._options.workers) as addresses:
            try:
                for index, environment in enumerate(self._options.environments):
                    worker = Worker(
                        Cluster(addresses, index, "tfaccum-launch"),
                        self._options.command,
                        {
                            **environment,
                            STARTED: self._started,
                            RESTART: str(restart),
                        },
                        self._console.terminal if index == 0 else None,
                    )
                    self._workers.append(worker)
                    self._console.add(worker, restart + 1)
                failed = self._watch()
            finally:
                self._end()
        if failed is None or failed.code is None:
            return 0
        self._report(failed)
        return failed.code if failed.code >= 0 else 128 - failed.code

    def _watch(self) -> Worker | None:
        """Until all have ended; returns the first that failed."""
        failed = None
        deadline = float("inf")
        passed_on = 0
        while alive := [w for w in self._workers if not w.has_ended()]:
            now = time.monotonic()
            if failed is None and (failed := self._first_failure()):
                deadline = min(deadline, now + self._options.grace)
                if not self._signals:
                    self._console.say(
                        f"worker {failed.index} {failed.end()}; gives the "
                        f"others {self._options.grace:g} s"
                    )
            if len(self._signals) > passed_on:
                number = self._signals[passed_on]
                passed_on += 1
                if passed_on == 1:
                    name = signal.Signals(number).name
                    self._console.say(f"{name} to all workers")
                    self._kill(number)
                    deadline = min(deadline, now + self._options.grace)
                else:
                    deadline = now
            if now >= deadline:
                names = ", ".join(str(worker.index) for worker in alive)
                self._console.say(f"ends worker {names}, which had not ended")
                self._kill(signal.SIGKILL)
                deadline = float("inf")
            self._console.pump(_PERIOD)
        return failed or self._first_failure()

    def _first_failure(self) -> Worker | None:
        """A worker that has failed, at the first look that finds one."""
        return next((worker for worker in self._workers if worker.code), None)

    def _kill(self, number: int) -> None:
        for worker in self._workers:
            worker.kill(number)

    def _end(self) -> None:
        """Leaves nothing behind: processes, unread output, open files."""
        self._kill(signal.SIGKILL)
        while not all([worker.has_ended() for worker in self._workers]):
            self._console.pump(_PERIOD)
        until = time.monotonic() + 2
        while not self._console.is_done() and time.monotonic() < until:
            self._console.pump(_PERIOD)
        self._console.close()
        self._workers = []

    def _report(self, worker: Worker) -> None:
        """Says which worker failed first and shows its last lines."""
        how = f"worker {worker.index} {worker.end()}"
        if worker.code == EXIT_PREEMPTED:
            self._console.say(how)
        elif not self._signals:
            path = self._console.log_path(worker.index)
            tail = self._console.tail(worker.index)
            self._console.say(
                f"{how}; {'last in' if tail else 'no word in'} {path}"
            )
            for line in tail:
                self._console.show("  |", line)
