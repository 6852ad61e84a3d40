"""The command `tfaccum-launch`: real processes, mostly of a tiny program."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.test_train import TINY
from tfaccum import cluster as clusters
from tfaccum import launch
from tfaccum.launch import console, options

ROOT = Path(__file__).parents[1]
WAIT = 60
PRELUDE = """\
import json, os, signal, subprocess, sys, time
folder = sys.argv[1]
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
restart = int(os.environ["TFACCUM_RESTART"])
with open(f"{folder}/{index}.json.new", "w") as file:
    json.dump({"pid": os.getpid(), "env": dict(os.environ)}, file)
os.rename(f"{folder}/{index}.json.new", f"{folder}/{index}.{restart}.json")
def wait_for(index, restart=restart):
    while not os.path.exists(f"{folder}/{index}.{restart}.json"):
        time.sleep(0.02)
"""


class Launch:
    """A launcher of a tiny program, as a process."""

    def __init__(self, folder, program, *launch_flags, env=None, command=()):
        self.folder = folder
        script = folder / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(program))
        self.log_dir = folder / "logs"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tfaccum.launch",
                *launch_flags,
                f"--log_dir={self.log_dir}",
                "--",
                *(command or (sys.executable, script, folder)),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self):
        """Waits; returns the exit code and both outputs."""
        out, err = self.process.communicate(timeout=WAIT)
        return self.process.returncode, out, err

    def started(self, number, restart=0):
        """Waits until so many workers run; returns their process ids."""
        paths = [
            self.folder / f"{index}.{restart}.json" for index in range(number)
        ]
        deadline = time.monotonic() + WAIT
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return [json.loads(path.read_text())["pid"] for path in paths]

    def environment(self, index, restart=0):
        path = self.folder / f"{index}.{restart}.json"
        return json.loads(path.read_text())["env"]

    def log(self, index):
        return (self.log_dir / f"worker-{index}.log").read_text()


@pytest.fixture
def start(tmp_path):
    """Starts a launcher, and ends what it may leave."""
    launches = []

    def run(program, *flags, **more):
        launches.append(Launch(tmp_path, program, *flags, **more))
        return launches[-1]

    yield run
    for each in launches:
        with contextlib.suppress(ProcessLookupError):
            each.process.kill()
        each.process.wait()
        for stream in (each.process.stdout, each.process.stderr):
            stream.close()


def gone(pids):
    """Waits until processes are no more; zombies of others count as gone."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, [p for p in pids if is_alive(p)]
        time.sleep(0.02)
    return True


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] != "Z"


# --- A good run -------------------------------------------------------------


def test_workers_form_a_cluster_and_speak_in_order(start):
    each = start(
        """
        print("out of", index)
        print("err of", index, file=sys.stderr)
        sys.stdout.write("no newline")
        """,
        "--workers=3",
        env={"CUDA_VISIBLE_DEVICES": "-1"},
    )
    code, out, err = each.end()
    assert code == 0
    # Worker 0 alone on standard output, untouched.
    assert out == "out of 0\nno newline"
    lines = err.splitlines()
    assert lines[0] == f"tfaccum-launch: logs of the workers in {each.log_dir}"
    assert sorted(lines[1:]) == [
        f"[worker {index}] err of {index}" for index in range(3)
    ]
    for index in range(3):
        log = each.log(index).splitlines()
        assert log[0] == f"--- worker {index}, start 1"
        assert sorted(log[1:]) == [
            f"err of {index}",
            "no newline",
            f"out of {index}",
        ]
    found = [
        clusters.from_tf_config(each.environment(index)["TF_CONFIG"])
        for index in range(3)
    ]
    assert [cluster.index for cluster in found] == [0, 1, 2]
    assert {cluster.addresses for cluster in found} == {found[0].addresses}
    assert each.environment(0)["CUDA_VISIBLE_DEVICES"] == "-1"
    cores = len(os.sched_getaffinity(0))
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        assert each.environment(2)[name] == str(max(1, cores // 3))


def test_a_port_is_held_for_its_worker(start):
    """Nobody else is given it, and the worker can listen on it."""
    each = start(
        """
        import socket
        host, port = config["cluster"]["worker"][index].split(":")
        with socket.socket() as other:
            try:
                other.bind((host, int(port)))
                sys.exit("not held")
            except OSError:
                pass
        socket.create_server((host, int(port))).close()
        """,
        "--workers=2",
    )
    assert each.end()[0] == 0


def test_a_progress_bar_reaches_the_terminal(tmp_path):
    """The launcher on a terminal: worker 0 has one too."""
    outer, inner = pty.openpty()
    program = """
        assert sys.stdout.isatty() == (index == 0)
        if index == 0:
            for step in range(3):
                print(f"\\b\\r{step}/2", end="", flush=True)
                time.sleep(0.1)
            time.sleep(0.5)
        else:
            wait_for(0)
            time.sleep(0.4)
            print("careful", file=sys.stderr)
        print()
        """
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    process = subprocess.Popen(
        [sys.executable, "-m", "tfaccum.launch", "--workers=2"]
        + [f"--log_dir={tmp_path}", "--", sys.executable, script, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(outer, 4096):
            shown += data
    os.close(outer)
    assert process.wait(WAIT) == 0
    # The terminal itself makes \r\n of \n.
    assert b"\b\r0/2\b\r1/2\b\r2/2" in shown
    # Below the bar, in the color of worker 1.
    assert b"2/2\r\n\x1b[33m[worker 1]\x1b[0m careful\r\n" in shown
    assert (tmp_path / "worker-0.log").read_text().endswith("\n2/2\n")


# --- A failure --------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("sys.exit(7)", 7, "failed with exit code 7"),
        ("sys.exit('no data')", 1, "failed with exit code 1"),
        ("sys.exit(75)", 75, "was preempted (exit code 75)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was ended by SIGSEGV"),
    ],
)
def test_the_first_failure_gives_the_exit_code(start, how, code, text):
    each = start(
        f"""
        if index == 1:
            wait_for(0)
            wait_for(2)
            for line in range(100):
                print("line", line)
            {how}
        if index == 2:
            time.sleep(0.6)
            sys.exit(9)  # As a consequence.
        time.sleep(600)
        """,
        "--workers=3",
        "--grace=1",
    )
    found, _, err = each.end()
    assert found == code
    assert f"tfaccum-launch: worker 1 {text}; gives the others 1 s\n" in err
    assert "ends worker 0, which had not ended" in err
    shown = re.findall(r"^  \| (.*)$", err, re.MULTILINE)
    if code == 75:
        assert not shown
    else:
        assert f"worker 1 {text}; last in {each.log_dir}/worker-1.log" in err
        assert "line 99" in shown and len(shown) == console.TAIL_LINES
    assert gone(each.started(3))


def test_max_restarts_starts_all_again_on_new_ports(start):
    each = start(
        """
        wait_for(1 - index)
        if index == 1 and restart < 2:
            sys.exit(5)
        if restart < 2:
            time.sleep(600)
        print("at last")
        """,
        "--workers=2",
        "--max_restarts=3",
        "--grace=0",
    )
    code, out, err = each.end()
    assert (code, out) == (0, "at last\n")
    assert "starts all workers again (1 of 3)" in err
    assert "starts all workers again (2 of 3)" in err
    assert "(3 of 3)" not in err
    configs = {each.environment(0, restart)["TF_CONFIG"] for restart in (0, 2)}
    assert len(configs) == 2
    assert re.findall("start [0-9]", each.log(1)) == [
        "start 1",
        "start 2",
        "start 3",
    ]


@pytest.mark.parametrize(
    ("code", "starts"), [(5, 2), (clusters.EXIT_PREEMPTED, 2), (2, 1)]
)
def test_restarts_come_to_an_end(start, code, starts):
    each = start(f"sys.exit({code})", "--workers=1", "--max_restarts=1")
    found, _, _ = each.end()
    assert found == code
    assert each.log(0).count("--- worker 0") == starts


# --- Signals ----------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_worker_and_its_children(start, number):
    each = start(
        """
        child = subprocess.Popen(["sleep", "600"])
        with open(f"{folder}/child{index}", "w") as file:
            file.write(str(child.pid))
        os.rename(f"{folder}/child{index}", f"{folder}/{10 + index}.0.json")
        time.sleep(600)
        """,
        "--workers=2",
        "--max_restarts=3",
    )
    pids = each.started(2)
    for index in (10, 11):
        path = each.folder / f"{index}.0.json"
        while not path.exists():
            time.sleep(0.02)
        pids.append(int(path.read_text()))
    each.process.send_signal(number)
    code, _, err = each.end()
    assert code == 128 + number
    assert f"{number.name} to all workers" in err
    assert "again" not in err
    assert gone(pids)


def test_workers_may_save_before_they_end(start):
    each = start(
        """
        def save(*_):
            time.sleep(0.5)
            print("saved")
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        open(f"{folder}/{10 + index}.0.json", "w").close()
        time.sleep(600)
        """,
        "--workers=2",
        "--max_restarts=3",
    )
    pids = each.started(2)
    for index in (10, 11):
        while not (each.folder / f"{index}.0.json").exists():
            time.sleep(0.02)
    each.process.send_signal(signal.SIGTERM)
    code, out, err = each.end()
    assert (code, out) == (clusters.EXIT_PREEMPTED, "saved\n")
    assert "was preempted (exit code 75)" in err and "again" not in err
    assert gone(pids)


@pytest.mark.parametrize("second", [True, False])
def test_workers_that_do_not_listen_are_ended(start, second):
    each = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{folder}/{10 + index}.0.json", "w").close()
        time.sleep(600)
        """,
        "--workers=2",
        f"--grace={600 if second else 0.5}",
    )
    pids = each.started(2)
    for index in (10, 11):
        while not (each.folder / f"{index}.0.json").exists():
            time.sleep(0.02)
    each.process.send_signal(signal.SIGTERM)
    if second:
        time.sleep(0.5)
        assert all(map(is_alive, pids))
        each.process.send_signal(signal.SIGTERM)
    code, _, err = each.end()
    assert code == 128 + signal.SIGKILL
    assert "ends worker 0, 1, which had not ended" in err
    assert gone(pids)


def test_no_worker_outlives_a_launcher_that_is_killed(start):
    each = start("time.sleep(600)", "--workers=2")
    pids = each.started(2)
    assert all(map(is_alive, pids))
    each.process.kill()
    assert gone(pids)


# --- The command line -------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers=2"], "must stand behind `--`. Received: none"),
        (["--workers=2", "true"], "must stand behind `--`. Received: 'true'"),
        (["--", "true"], "--workers must be given"),
        (["--workers=0", "--", "true"], "--workers=0"),
        (["--workers=x", "--", "true"], "--workers=x"),
        (["--worker=2", "--", "true"], "Did you mean: workers"),
        (["--workers=1", "--", "no-such"], "Received: 'no-such', which is no"),
        (["--workers=1", "--grace=-1", "--", "true"], "--grace=-1"),
        (
            ["--workers=1", "--log_dir=setup.cfg", "--", "true"],
            "--log_dir=setup.cfg (File exists)",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments, message, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert launch.main(["tfaccum-launch", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfaccum-launch: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("first_line", "why"),
    [
        ("import sys", "Exec format error"),
        ("#!/nowhere/python", "No such file or directory"),
    ],
)
def test_a_program_that_cannot_be_started_is_said(
    first_line, why, capsys, tmp_path
):
    program = tmp_path / "program.py"
    program.write_text(f"{first_line}\n")
    program.chmod(0o755)
    arguments = ["--workers=2", f"--log_dir={tmp_path}", "--", str(program)]
    assert launch.main(["tfaccum-launch", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"tfaccum-launch: logs of the workers in {tmp_path}",
        "tfaccum-launch: the command of a worker must be one that can be "
        f"started. Received: {str(program)!r} ({why}). A script needs a first "
        "line with #! and its interpreter, or the interpreter before it, such "
        "as python.",
    ]


def test_nothing_of_tensorflow_is_needed():
    program = (
        "import sys, tfaccum.launch as launch\n"
        "assert launch.main(['x', '--workers=2']) == 2\n"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, "tfaccum.launch"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=WAIT,
    )


def test_help_is_readable(capsys):
    assert launch.main(["tfaccum-launch", "--helpshort"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    names = re.findall(r"^  --(\w+)=", text, re.MULTILINE)
    assert names == ["workers", "max_restarts", "grace", "log_dir"]


@pytest.mark.parametrize(
    ("visible", "workers", "shares"),
    [
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("3,1,2", 2, ["3", "1"]),
        ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("1,-1,2", 1, ["1"]),
        ("-1", 2, [None, None]),
        ("", 2, [None, None]),
    ],
)
def test_gpus_are_shared_out(visible, workers, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = options.parse(["x", f"--workers={workers}", "--", "true"])
    assert [
        share.get("CUDA_VISIBLE_DEVICES") for share in found.environments
    ] == shares


def test_fewer_gpus_than_workers_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch.main(["x", "--workers=3", "--", "true"]) == 2
    err = capsys.readouterr().err
    assert "the number of GPUs, 2. Received: --workers=3" in err


def test_gpus_are_found_without_tensorflow(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n"
        "echo '  MIG 1g: x'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert options.visible_gpus({}) == ["0", "1"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert options.visible_gpus({}) == []


def test_threads_that_were_chosen_are_kept(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    for share in options.parse(["x", "--workers=2", "--", "true"]).environments:
        assert list(share) == ["TF_NUM_INTRAOP_THREADS"]
    (alone,) = options.parse(["x", "--workers=1", "--", "true"]).environments
    assert alone == {}


# --- Training ---------------------------------------------------------------


def test_two_workers_train_together(start, tmp_path):
    """With the command, and two virtual devices each."""
    experiment = tmp_path / "tiny.py"
    text = textwrap.dedent(TINY).replace("LAYERS", "keras.layers.Dense(1)")
    text = text.replace("OPTIMIZER", "SGD").replace("UPDATES", "6")
    experiment.write_text(text)
    each = start(
        "",
        "--workers=2",
        command=(
            sys.executable,
            "-m",
            "tfaccum.train",
            f"--experiment={experiment}",
            f"--model_dir={tmp_path / 'm'}",
            "--virtual_devices=2",
            "--micro_batch=2",
        ),
    )
    out, err = each.process.communicate(timeout=200)
    assert each.process.returncode == 0, err
    assert "global batch 16 = 2 micro-batch x 4 replicas x 2 micro-steps" in out
    summary = json.loads((tmp_path / "m/summary.json").read_text())
    assert summary["plan"]["num_replicas"] == 4
    assert summary["results"]["updates"] == 6
    # Worker 1 has its own log, and nothing to say.
    assert "global batch" not in each.log(1)
