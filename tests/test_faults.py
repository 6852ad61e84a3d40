"""What becomes of all workers when something happens to one of them.

Real processes on this machine. `docs/clusters.md` has the same table.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from tests import workers
from tests.faults.cluster import START, Run
from tfaccum import agreement
from tfaccum.checkpoint import CHECKPOINTS
from tfaccum.snapshots import Snapshots

AT = 5
UPDATES = 12
SILENT = (
    "does not answer any more: it has been killed or stopped, has crashed, or "
    "is cut off from the network. Look at its log."
)
# Within how many seconds all have ended: at once, and when a worker falls
# silent, of which TensorFlow takes notice after ten.
AT_ONCE, SILENCE = 30, 40


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        what: `--fault` of the job.
        on: The worker that it happens to.
        workers: How many there are.
        code: How that worker ends; None if somebody has to end it.
        told: What the others say of it, after its name.
        within: Seconds from the fault until all others have ended.
        at: The update after which it happens; 0: before training.
    """

    what: str
    on: int
    workers: int
    code: int | None
    told: str
    within: int
    at: int = AT

    def __str__(self):
        before = "-before_training" * (self.at == 0)
        return f"{self.what}-{self.on}_of_{self.workers}{before}"


EXCEPTION = "has stopped: ArithmeticError: the callback cannot go on."
DATA = "has stopped: OSError: the disk of the data is gone."
FUNCTION = "has stopped: OSError: the data are not there."
FAULTS = [
    Fault("exception", 1, 2, 1, EXCEPTION, AT_ONCE),
    Fault("data", 0, 2, 1, DATA, AT_ONCE),
    Fault("sigkill", 1, 2, -9, SILENT, SILENCE),
    Fault("sigterm", 1, 2, -15, SILENT, SILENCE),
]
MORE_FAULTS = [
    Fault("exception", 0, 3, 1, EXCEPTION, AT_ONCE),
    Fault("data", 2, 3, 1, DATA, AT_ONCE),
    Fault("function", 1, 2, 1, FUNCTION, AT_ONCE, at=0),
    Fault("function", 0, 3, 1, FUNCTION, AT_ONCE, at=0),
    Fault("interrupt", 1, 2, -2, "has stopped: KeyboardInterrupt.", AT_ONCE),
    Fault("exit", 0, 2, 3, "has stopped: SystemExit: 3.", AT_ONCE),
    Fault("exit", 2, 3, 3, "has stopped: SystemExit: 3.", AT_ONCE),
    Fault("sigkill", 0, 2, -9, SILENT, SILENCE),
    Fault("sigkill", 0, 3, -9, SILENT, SILENCE),
    Fault("sigkill", 1, 3, -9, SILENT, SILENCE),
    Fault("sigkill", 2, 3, -9, SILENT, SILENCE),
    Fault("sigterm", 0, 2, -15, SILENT, SILENCE),
    Fault("sigterm", 2, 3, -15, SILENT, SILENCE),
    Fault("sigterm", 1, 2, -15, SILENT, SILENCE, at=0),
    Fault("sigterm", 0, 2, -15, SILENT, SILENCE, at=0),
    Fault("sigkill", 1, 3, -9, SILENT, SILENCE, at=0),
    Fault("sigstop", 1, 2, None, SILENT, SILENCE),
    Fault("sigstop", 0, 2, None, SILENT, SILENCE),
    Fault("sigstop", 0, 3, None, SILENT, SILENCE),
    Fault("sigstop", 1, 3, None, SILENT, SILENCE),
]


@pytest.mark.parametrize(
    "fault",
    FAULTS + [pytest.param(f, marks=pytest.mark.slow) for f in MORE_FAULTS],
    ids=str,
)
def test_all_end_in_time_and_name_the_one(fault, tmp_path):
    flags = [f"--fault={fault.what}", f"--on={fault.on}", f"--at={fault.at}"]
    # With one, SIGTERM would only ask for an end after this update.
    has_checkpoint = fault.what != "sigterm" and fault.at
    if has_checkpoint:
        flags.append("--checkpoint")
    with Run(tmp_path, fault.workers, *flags) as run:
        ended = run.watch_others(fault.on, run.wait_for_fault(), fault.within)
        one = ended.pop(fault.on)
        assert one.code == fault.code, run.report()
        assert_ended_well(run, fault.on, ended, fault.told, fault.at)
        # All have come to the same update, the one that failed too.
        assert len(one.states) == fault.at
        assert all(other.states == one.states for other in ended.values())
        if fault.code is None:
            assert_gives_up(run, fault.on)
    assert not [p for p in run.processes if group_is_alive(p.pid)]
    if has_checkpoint:
        assert_nothing_is_half(tmp_path / "model", update=AT - 1)


def assert_ended_well(run, on, ended, told, at=None):
    """Those that live say who has failed, and have applied nothing since."""
    for index, worker in ended.items():
        print(f"\nworker {index} after {worker.after:.1f} s: {told_of(worker)}")
        assert worker.code == 1, run.report()
        assert worker.end["error"] == "WorkerError", run.report()
        assert worker.end["text"] == (
            f"{run.name(on)} {told} "
            + "Look at its log. " * ("Look at" not in told)
            + f"Worker {index} ends too; nothing of the update under way was "
            "applied."
        )
        updates = worker.end["updates"]
        assert updates == len(worker.states)
        assert at is None or updates == at
        if updates:
            assert worker.end["state"] == worker.states[-1]


def told_of(worker):
    return worker.end and worker.end["text"]


def assert_gives_up(run, on):
    """A worker that was stopped and goes on when all others have gone."""
    began = time.time()
    os.kill(run.processes[on].pid, signal.SIGCONT)
    (worker,) = run.watch([on], began, SILENCE).values()
    print(f"\nworker {on} after {worker.after:.1f} s: {told_of(worker)}")
    assert worker.code == 1, run.report()
    assert worker.end["error"] == "WorkerError", run.report()
    assert worker.end["updates"] == AT
    assert worker.end["state"] == worker.states[-1]


def assert_nothing_is_half(model_dir, update):
    """The chief's files are complete: `update` was the last to be saved."""
    assert not list(model_dir.rglob("*.partial*"))
    snapshot, complaints = Snapshots(model_dir / CHECKPOINTS).newest()
    assert not complaints
    assert snapshot.facts["update"] == update


def group_is_alive(pid):
    """Whether a worker, or something that it has started, still runs."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- What TensorFlow says, and what a person is told -------------------------

# As TensorFlow 2.21 has said it, to the worker whose number stands before it.
WRAPPED = """Graph execution error:

Detected at node CollectiveReduceV2 defined at (most recent call last):
  File "/job.py", line 133, in main

{}
The error could be from a previous operation. Restart your program to reset.
\t [[{{{{node CollectiveReduceV2}}}}]] [Op:__inference_execute_1328]"""
CLOSED = """Collective ops is aborted by: Socket closed
Additional GRPC error information from remote target \
/job:worker/replica:0/task:2 while calling /tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed"}"""
CLOSED_ELSEWHERE = """Collective ops is aborted by: Collective ops is aborted \
by: Socket closed
Additional GRPC error information from remote target \
/job:worker/replica:0/task:2 while calling /tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed"}
The error could be from a previous operation. Restart your program to reset.
Additional GRPC error information from remote target \
/job:worker/replica:0/task:1 while calling /tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_message:"Collective ops is aborted"}"""
UNHEALTHY = """Collective ops is aborted by: Error reported from \
/job:worker/task:1: The following tasks are unhealthy (stopped sending \
heartbeats):
{}
The tasks have crashed. Check the task logs for an earlier error, or scheduler \
events (e.g. preemption, eviction) to debug further."""
HEARTBEAT = """Collective ops is aborted by: Deadline Exceeded

RPC: /tensorflow.CoordinationService/Heartbeat"""
REFUSED = """Collective ops is aborted by: Failed to send RPC to coordination \
service. Either the leader task was preempted/died/restarted unexpectedly or \
this task is experiencing network issues.
Additional GRPC error information from remote target \
/job:worker/replica:0/task:0 while calling \
/tensorflow.CoordinationService/Heartbeat:
:UNKNOWN:Error received from peer  {grpc_message:"failed to connect"}"""
NOTE_REFUSED = """failed to connect to all addresses; last error: UNKNOWN: \
ipv4:127.0.0.1:59759: Failed to connect to remote host: Connection refused
Additional GRPC error information from remote target \
/job:worker/replica:0/task:0 while calling \
/tensorflow.CoordinationService/InsertKeyValue:"""
TOLD = """Collective ops is aborted by: Error reported from \
/job:worker/task:0: Worker 2 has stopped: OSError: the disk is gone (told by \
worker 2)"""
TOLD_ELSEWHERE = """Collective ops is aborted by: Collective ops is aborted \
by: Worker 2 has stopped: OSError: the disk is gone (told by worker 2)"""
PASSED_ON = """Collective ops is aborted by: Error reported from \
/job:worker/task:0: Worker 2 does not answer any more. (told by worker 0)"""


@pytest.mark.parametrize(
    "mine, text, expected",
    [
        (0, WRAPPED.format(CLOSED), f"Worker 2 (c:3) {SILENT}"),
        (0, WRAPPED.format(CLOSED_ELSEWHERE), f"Worker 2 (c:3) {SILENT}"),
        (
            0,
            UNHEALTHY.format("/job:worker/replica:0/task:1"),
            f"Worker 1 (b:2) {SILENT}",
        ),
        (
            0,
            UNHEALTHY.format(
                "/job:worker/replica:0/task:1\n/job:worker/replica:0/task:2"
            ),
            f"Worker 1 (b:2) {SILENT} Worker 2 (c:3) {SILENT}",
        ),
        (
            1,
            UNHEALTHY.format("/job:worker/replica:0/task:1"),
            "The other workers have given this one up: it did not answer for "
            "too long (stopped, swapped out, or cut off from the network).",
        ),
        (1, WRAPPED.format(HEARTBEAT), f"Worker 0 (a:1) {SILENT}"),
        (0, HEARTBEAT, f"Another worker {SILENT}"),
        (2, WRAPPED.format(REFUSED), f"Worker 0 (a:1) {SILENT}"),
        (1, NOTE_REFUSED, f"Worker 0 (a:1) {SILENT}"),
        (
            1,
            WRAPPED.format(TOLD),
            "Worker 2 (c:3) has stopped: OSError: the disk is gone. Look at "
            "its log.",
        ),
        (
            1,
            WRAPPED.format(TOLD_ELSEWHERE),
            "Worker 2 (c:3) has stopped: OSError: the disk is gone. Look at "
            "its log.",
        ),
        (
            1,
            WRAPPED.format(PASSED_ON),
            "Worker 2 (c:3) does not answer any more. Look at its log.",
        ),
    ],
)
def test_a_failed_collective_is_explained(mine, text, expected):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["a:1", "b:2", "c:3"]}),
        task_type="worker",
        task_id=mine,
    )

    class Strategy(tf.distribute.MultiWorkerMirroredStrategy):
        """Facts about a cluster that is not there."""

        cluster_resolver = resolver

        def __init__(self):
            pass

    assert agreement._explained(Strategy(), text) == (
        f"{expected} Worker {mine} ends too; nothing of the update under way "
        "was applied."
    )


@pytest.mark.parametrize(
    "error, expected",
    [
        (ArithmeticError("no\nway"), "ArithmeticError: no way"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (
            tf.errors.UnknownError(
                None,
                None,
                "Graph execution error:\n\nDetected at node PyFunc defined at"
                " (most recent call last):\n<stack traces unavailable>\n"
                "OSError: no disk\nTraceback (most recent call last):\n\n"
                '  File "/job.py", line 70, in generate\n    raise OSError("no'
                ' disk")\n\nOSError: no disk\n\n\n\t [[{{node PyFunc}}]]',
            ),
            "OSError: no disk",
        ),
        (
            tf.errors.InvalidArgumentError(
                None,
                None,
                "Graph execution error:\n\nDetected at node Check defined at"
                ' (most recent call last):\n  File "/job.py", line 7\n\n'
                "bad rows\n\t [[{{node Check}}]] [Op:__inference_execute_1]",
            ),
            "InvalidArgumentError: bad rows",
        ),
        (ValueError("x" * 9999), "ValueError: " + "x" * 500),
    ],
)
def test_an_error_is_told_in_one_line(error, expected):
    assert agreement._in_short(error) == expected


# --- What they go on after --------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights and slots after each update, when nothing happens."""
    with Run(tmp_path_factory.mktemp("run"), 2) as run:
        run.wait_for_update(UPDATES)
        ended = run.watch(range(2), time.time(), SILENCE)
    assert [worker.code for worker in ended.values()] == [0, 0]
    assert ended[0].states == ended[1].states
    assert len(set(ended[0].states)) == UPDATES
    return ended[0].states


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--fault=sigstop", "--stopped=3", "--on=1"),
        ("--fault=sigstop", "--stopped=3", "--on=0"),
        ("--fault=slow", "--on=1"),
    ],
    ids=lambda flags: "".join(flags),
)
def test_goes_on_as_if_nothing_had_happened(flags, undisturbed, tmp_path):
    with Run(tmp_path, 2, *flags) as run:
        run.wait_for_update(UPDATES)
        ended = run.watch(range(2), time.time(), AT_ONCE)
        for worker in ended.values():
            assert worker.code == 0, run.report()
            assert worker.states == undisturbed
            assert worker.end["state"] == undisturbed[-1]


@pytest.mark.slow
def test_nan_on_one_worker_is_skipped_by_all(undisturbed, tmp_path):
    with Run(tmp_path, 2, "--fault=nan", "--on=1") as run:
        run.wait_for_update(UPDATES)
        ended = run.watch(range(2), time.time(), AT_ONCE)
        first, second = ended.values()
        assert (first.code, second.code) == (0, 0), run.report()
    assert first.states == second.states
    assert first.end["updates"] == UPDATES - 1
    assert first.states[:AT] == undisturbed[:AT]
    assert first.states[AT] == first.states[AT - 1]
    assert len(set(first.states)) == UPDATES - 1


# --- A cut connection -------------------------------------------------------


def cannot_make_networks():
    """Why not, or ""."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    name = f"tfaccum-{os.getpid()}-try"
    made = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True
    )
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Network:
    """Hosts, each a namespace with a cable to one switch."""

    def __init__(self, number):
        base = f"tfaccum-{os.getpid()}"
        self.switch = f"{base}-switch"
        self.hosts = [f"{base}-{index}" for index in range(number)]
        self.addresses = [
            f"10.211.77.{index + 1}:2222" for index in range(number)
        ]

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.delete)
            for name in (self.switch, *self.hosts):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for index, host in enumerate(self.hosts):
                address = f"10.211.77.{index + 1}/24"
                peer = ("peer", "name", f"p{index}", "netns", self.switch)
                ip("-n", host, "link", "add", "eth0", "type", "veth", *peer)
                ip("-n", host, "addr", "add", address, "dev", "eth0")
                ip("-n", host, "link", "set", "eth0", "up")
                port = ("-n", self.switch, "link", "set", f"p{index}")
                ip(*port, "master", "br0")
                ip(*port, "up")
            stack.pop_all()
        return self

    def __exit__(self, *error):
        self.delete()

    def delete(self):
        for name in (self.switch, *self.hosts):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def cut(self, index):
        """Takes a host's link down, for good."""
        ip("-n", self.switch, "link", "set", f"p{index}", "down")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("number, cut", [(2, 1), (2, 0), (3, 2)])
def test_a_cut_connection_ends_both_sides(number, cut, tmp_path):
    if why := cannot_make_networks():
        pytest.skip(why)
    with Network(number) as network:
        run = Run(
            tmp_path,
            number,
            "--pause=0.2",
            "--updates=1000",
            addresses=network.addresses,
            prefixes=[["ip", "netns", "exec", host] for host in network.hosts],
        )
        with run:
            run.wait_for_update(AT)
            network.cut(cut)
            ended = run.watch(range(number), time.time(), SILENCE)
            one = ended.pop(cut)
            # Nobody is left for it to ask; it names the one it asks first.
            other = 1 if cut == 0 else 0
            assert_ended_well(run, other, {cut: one}, SILENT)
            assert_ended_well(run, cut, ended, SILENT)
            common = min(len(w.states) for w in [one, *ended.values()])
            for worker in ended.values():
                assert len(worker.states) <= common + 1
                assert worker.states[:common] == one.states[:common]
    assert not [p for p in run.processes if group_is_alive(p.pid)]


# --- Under the launcher -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, on, code, lines",
    [
        ("sigkill", 1, 137, ["worker 1 was ended by SIGKILL"]),
        ("exception", 1, 1, ["ArithmeticError: the callback cannot go on"]),
        ("data", 0, 1, ["OSError: the disk of the data is gone"]),
        ("exit", 1, 3, ["worker 1 failed with exit code 3"]),
    ],
)
def test_the_launcher_shows_the_first_failure(what, on, code, lines, tmp_path):
    flags = [f"--fault={what}", f"--on={on}", "--checkpoint"]
    launch = [sys.executable, "-m", "tfaccum.launch", "--workers=2"]
    job = [sys.executable, "-m", "tests.faults.job", tmp_path, *flags]
    found = subprocess.run(
        [*launch, f"--log_dir={tmp_path / 'logs'}", "--", *job],
        cwd=workers.ROOT,
        capture_output=True,
        text=True,
        timeout=START + SILENCE,
    )
    seconds = time.time() - float((tmp_path / "fault").read_text())
    print(f"after {seconds:.1f} s\n{found.stderr[-4000:]}")
    assert seconds < SILENCE
    assert found.returncode == code
    # Nobody had to be killed.
    assert "had not ended" not in found.stderr
    # The part that begins with the last lines of the first that failed.
    shown = found.stderr[found.stderr.rindex(f"worker {on} ") :]
    for line in lines:
        assert line in shown
    assert f"Worker {on} (127.0.0.1:" in found.stderr
    assert_nothing_is_half(tmp_path / "model", update=AT - 1)
