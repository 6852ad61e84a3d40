"""Starts real Python processes that form one cluster on 127.0.0.1."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = "TFACCUM_RESULT"
# Once one worker has failed, how long the others may go on, in seconds.
GRACE = 5.0
TAIL_LINES = 30
_PORT_TAKEN = re.compile(
    "address already in use|could not start grpc server", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """What one worker left behind.

    Attributes:
        index: Its index in the cluster, from 0.
        returncode: Its exit status; None if it had to be killed because it
            had not finished.
        stdout: All that it printed.
        stderr: All that it printed there.
        result: The JSON that it wrote to the path in `TFACCUM_RESULT`, or
            None if it wrote none.
    """

    index: int
    returncode: int | None
    stdout: str
    stderr: str
    result: object

    def report(self):
        """Returns its state and the last lines of its output."""
        state = (
            "had not finished, killed"
            if self.returncode is None
            else f"exit status {self.returncode}"
        )
        lines = [f"--- worker {self.index}: {state}"]
        for name in ("stdout", "stderr"):
            text = getattr(self, name).splitlines()[-TAIL_LINES:]
            lines += [f"{name}: {line}" for line in text]
        return "\n".join(lines)


def run_workers(
    script_or_module,
    num_workers,
    timeout=60,
    *,
    args=(),
    env=None,
    check=True,
    directory=None,
):
    """Runs one program as `num_workers` worker processes of a cluster.

    Each gets its own TF_CONFIG, with free ports of 127.0.0.1, and the path of
    its own JSON result in the environment variable `TFACCUM_RESULT`. When a
    port turns out to be taken after all, the whole cluster is started once
    more.

    Args:
        script_or_module: Path of a Python script (it ends in .py) or the name
            of a module.
        num_workers: Processes to start, at least 1.
        timeout: Seconds until all have to be finished. Default 60.
        args: Command-line arguments, the same for all. Default none.
        env: Environment variables to set besides, for all (a mapping) or for
            one by its index (a function from int to mapping). Default None.
        check: Whether an exit status other than 0 fails too. Default True.
        directory: Where outputs and results are written. Default a temporary
            directory that is removed.

    Returns:
        A list of `WorkerResult`, by worker index.

    Raises:
        AssertionError: If a worker has not finished in time.
        AssertionError: If `check` and a worker's exit status is not 0.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        for attempt in range(2):
            folder = Path(tempfile.mkdtemp(prefix="workers-", dir=directory))
            results = _run_once(
                script_or_module,
                num_workers,
                timeout=timeout,
                args=args,
                env=env,
                # A failed worker leaves the others waiting for it.
                grace=GRACE if check else timeout,
                folder=folder,
            )
            if attempt or not any(map(_port_was_taken, results)):
                break
    unfinished = [w.index for w in results if w.returncode is None]
    failed = [w.index for w in results if w.returncode]
    if unfinished or (check and failed):
        whys = [f"workers {failed} failed"] if failed else []
        if unfinished:
            whys.append(f"workers {unfinished} had not finished")
        reports = "\n".join(worker.report() for worker in results)
        raise AssertionError(
            f"{script_or_module}: {', '.join(whys)} (timeout {timeout} s).\n"
            f"{reports}"
        )
    return results


def run_checks(module, names, directory, timeout=180, replicas=1, **options):
    """What two workers find in checks of a module of `tests.multi_worker`.

    Args:
        module: its name.
        names: of the functions, in the order in which they run.
        directory: where outputs are written.
        timeout: Seconds until both have to be finished. Default 180.
        replicas: of each worker.
        options: as in `run_workers`.

    Returns:
        For each worker a dict of results by name.
    """
    found = run_workers(
        "tests.multi_worker.worker",
        2,
        timeout=timeout,
        args=[
            f"replicas={replicas}",
            *(f"{module}.{name}" for name in names),
        ],
        directory=directory,
        **options,
    )
    return [
        {name: worker.result[f"{module}.{name}"] for name in names}
        for worker in found
    ]


def same(results, name):
    """What both workers have found in a check, which has to be the same."""
    first, second = (result[name] for result in results)
    assert first == second
    return first


def _run_once(
    script_or_module, num_workers, *, timeout, args, env, grace, folder
):
    """Starts one cluster, waits for it, and ends what is left of it."""
    name = str(script_or_module)
    program = [name] if name.endswith(".py") else ["-m", name]
    processes = []
    try:
        for index, config in enumerate(_cluster_configs(num_workers)):
            with (
                open(folder / f"{index}.stdout", "w") as stdout,
                open(folder / f"{index}.stderr", "w") as stderr,
            ):
                process = subprocess.Popen(
                    [sys.executable, *program, *map(str, args)],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=_environment(index, config, env, folder),
                    # Its own group, so that its children end with it.
                    start_new_session=True,
                )
            processes.append(process)
        finished = _wait(processes, timeout, grace)
    finally:
        for process in processes:
            _kill(process)
    return [
        WorkerResult(
            index=index,
            returncode=process.returncode if index in finished else None,
            stdout=_read(folder / f"{index}.stdout"),
            stderr=_read(folder / f"{index}.stderr"),
            result=_read_result(folder / f"{index}.json"),
        )
        for index, process in enumerate(processes)
    ]


def free_addresses(number):
    """Returns addresses of 127.0.0.1 whose ports were free just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]


def _cluster_configs(num_workers):
    """Returns each worker's TF_CONFIG."""
    addresses = free_addresses(num_workers)
    return [
        json.dumps(
            {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
        )
        for index in range(num_workers)
    ]


def _environment(index, config, env, folder):
    """Returns the environment of one worker."""
    more = env(index) if callable(env) else env or {}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": config,
        RESULT: str(folder / f"{index}.json"),
        **more,
    }


def _wait(processes, timeout, grace):
    """Waits for all; returns the indices of those that ended by themselves.

    Once one has failed, the others get `grace` seconds more and no longer.
    """
    deadline = time.monotonic() + timeout
    failure_seen = False
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) and not failure_seen:
            deadline = min(deadline, time.monotonic() + grace)
            failure_seen = True
        if None not in codes or time.monotonic() > deadline:
            return {i for i, code in enumerate(codes) if code is not None}
        time.sleep(0.05)


def _port_was_taken(worker):
    """Whether a worker failed because another process took its port."""
    return worker.returncode != 0 and _PORT_TAKEN.search(worker.stderr)


def _kill(process):
    """Ends one process that this module started, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path):
    """Returns the text of a worker's output."""
    return path.read_text(errors="replace")


def _read_result(path):
    """Returns a worker's JSON result, if it wrote one."""
    return json.loads(path.read_text()) if path.exists() else None
