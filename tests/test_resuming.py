"""Processes that are killed, and go on: digits, with all that has a state.

Dropout, augmentation, moving averages of statistics and of weights, a
schedule, mixed_float16; on one device, 2 replicas and 2 workers.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import workers
from tfaccum.snapshots import Snapshots

MODULE = "tests.resuming.job"
SHAPES = ("one", "two_replicas", "two_workers")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The digits, written before several processes would."""
    import tfaccum.data

    directory = tmp_path_factory.mktemp("digits")
    tfaccum.data.Pipeline(name="digits", batch_size=8, data_dir=directory)
    return directory


@pytest.fixture
def start(tmp_path, data_dir):
    """Runs the job to its end; returns the exit codes of its processes."""

    def run(name, shape, *flags, directory="run"):
        command = [
            tmp_path / directory,
            f"--result={tmp_path / name}",
            f"--data_dir={data_dir}",
            *flags,
        ]
        if shape == "two_workers":
            found = workers.run_workers(
                MODULE,
                2,
                timeout=120,
                args=command,
                check=False,
                directory=tmp_path,
            )
            return [worker.returncode for worker in found]
        if shape == "two_replicas":
            command.append("--replicas=2")
        process = begin(command)
        _, errors = process.communicate(timeout=120)
        if process.returncode not in (0, 75, -9):
            raise AssertionError(errors.decode()[-3000:])
        return [process.returncode]

    return run


def begin(command):
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=workers.ROOT,
    )


def num_workers(shape):
    return 2 if shape == "two_workers" else 1


def results(tmp_path, name, shape):
    return [
        json.loads((tmp_path / f"{name}.{worker}.json").read_text())
        for worker in range(num_workers(shape))
    ]


def ids(directory, shape):
    """Examples of each update, of those that count: the last ones."""
    found = []
    for worker in range(num_workers(shape)):
        updates = {}
        text = (directory / f"ids-{worker}.jsonl").read_text()
        for line in text.splitlines():
            update, batch, seen = json.loads(line)
            updates[update, batch] = sorted(seen)
        found.append(updates)
    return found


def assert_undisturbed(tmp_path, start, shape, *flags):
    """The same state, history and examples as in one go."""
    assert set(start("whole", shape, *flags, directory="whole")) == {0}
    found = results(tmp_path, "end", shape)
    expected = results(tmp_path, "whole", shape)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine["history"] == wanted["history"]
        assert mine["state"] == wanted["state"]
        assert mine["weights"] == wanted["weights"]
    assert ids(tmp_path / "run", shape) == ids(tmp_path / "whole", shape)


# 6 batches and 3 updates an epoch; three epochs.


def test_I2_I7_I9_killed_and_asked_to_end(tmp_path, start):
    """Slots come back to the bit in a new process."""
    assert start("end", "one", "--kill_at=2") == [-signal.SIGKILL]
    assert start("end", "one", "--term_at=2") == [75]
    assert start("end", "one", "--max_run_seconds=0.001") == [75]
    assert start("end", "one") == [0]
    assert_undisturbed(tmp_path, start, "one")


def test_I9_I10_I15_one_of_two_workers_is_asked_to_end(tmp_path, start):
    """SIGTERM reaches worker 1 alone; only worker 0 touches the disk."""
    shape = "two_workers"
    assert start("end", shape, "--term_at=4", "--term_on=1") == [75, 75]
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        "best.json",
        "checkpoints",
        "ids-0.jsonl",
        "ids-1.jsonl",
        "model.json",
    }
    shelf = Snapshots(tmp_path / "run" / "checkpoints")
    snapshot, complaints = shelf.newest()
    assert complaints == [] and snapshot.facts["update"] == 4
    assert not list((tmp_path / "run").rglob("*.partial"))
    for updates in ids(tmp_path / "run", shape):
        assert [update for update, _ in updates] == [1, 2, 3, 4]
    assert start("end", shape) == [0, 0]
    assert_undisturbed(tmp_path, start, shape)


def test_one_worker_then_two(tmp_path, start):
    """Without what the law excepts: the same to float tolerance."""
    plain = ("--plain", "--precision=float32")
    assert start("end", "one", *plain, "--term_at=4") == [75]
    assert start("end", "two_workers", *plain) == [0, 0]
    assert start("whole", "one", *plain, directory="whole") == [0]
    first, second = results(tmp_path, "end", "two_workers")
    (expected,) = results(tmp_path, "whole", "one")
    assert first["weights"] == second["weights"]
    assert first["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(first["history"][name], values, rtol=1e-4)
    for mine, wanted in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=1e-4)
    mine, others = ids(tmp_path / "run", "two_workers")
    (wanted,) = ids(tmp_path / "whole", "one")
    for place, seen in wanted.items():
        assert sorted(mine[place] + others.get(place, [])) == seen


LAUNCHED = """
import json, os, pathlib, signal, time
import keras, numpy as np, tensorflow as tf
import tfaccum.data

DEFAULTS = {"global_batch": 240, "micro_batch": 60, "learning_rate": 0.01,
            "epochs": 6}

def model():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(),
                             keras.layers.Dropout(0.2, seed=1),
                             keras.layers.Dense(10, activation="softmax")])

def data(*, batch_size, seed, data_dir):
    saved = pathlib.Path(os.environ["RUN"]) / "checkpoints"

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    first = os.environ["TFACCUM_RESTART"] == "0" and "DIE" in os.environ

    def dies(x):
        if first and index == 1 and len(list(saved.glob("update-*"))) > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def mapped(example):
        x = tf.cast(example["image"], tf.float32) / 16.0
        x = tf.ensure_shape(tf.py_function(dies, [x], tf.float32), x.shape)
        return x, example["label"]

    return tfaccum.data.Pipeline(
        name="digits", split="train", batch_size=batch_size, seed=seed,
        data_dir=data_dir, map_fn=mapped), None

def compile_arguments(*, learning_rate, num_updates):
    return {"optimizer": keras.optimizers.Adam(learning_rate),
            "loss": "sparse_categorical_crossentropy"}
"""


@pytest.mark.slow
def test_the_launcher_starts_all_again_and_they_go_on(tmp_path, data_dir):
    """Worker 1 is killed when three checkpoints are there."""
    (tmp_path / "experiment.py").write_text(LAUNCHED)
    histories = []
    for name, environment in (("run", {"DIE": "1"}), ("whole", {})):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tfaccum.launch", "--workers=2"),
                *("--max_restarts=1", f"--log_dir={tmp_path / 'logs' / name}"),
                *("--", sys.executable, "-m", "tfaccum.train"),
                f"--experiment={tmp_path / 'experiment.py'}",
                f"--data_dir={data_dir}",
                f"--model_dir={tmp_path / name}",
                "--save_every_updates=1",
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(workers.ROOT),
                "RUN": str(tmp_path / name),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        if environment:
            assert "worker 1 was killed" in done.stderr or (
                "SIGKILL" in done.stderr
            )
            assert "starts all workers again (1 of 1)" in done.stderr
            assert "Going on after update" in done.stdout
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        histories.append(summary["epochs"]["loss"])
    assert histories[0] == histories[1] and len(histories[0]) == 6


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("shape", SHAPES)
def test_I2_I3_I10_killed_at_twenty_random_moments(
    tmp_path, start, data_dir, shape
):
    """Whenever it is: while it starts, trains, validates or writes."""
    rng = np.random.default_rng(2)
    flags = ("--every=1", "--epochs=50")
    command = [
        tmp_path / "run",
        f"--data_dir={data_dir}",
        *flags,
        "--pause=0.05",
    ]
    if shape == "two_replicas":
        command.append("--replicas=2")
    for _ in range(20):
        processes = begin_all(command, shape, tmp_path)
        try:
            for process in processes:
                while process.stdout.readline() != b"begins to train\n":
                    assert process.poll() is None, process.stderr.read()[-3000:]
            time.sleep(rng.uniform(0, 5))
            processes[rng.integers(len(processes))].kill()
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert set(start("end", shape, *flags)) == {0}
    assert_undisturbed(tmp_path, start, shape, *flags)


def begin_all(command, shape, tmp_path):
    if shape != "two_workers":
        return [begin(command)]
    processes = []
    for index, config in enumerate(workers._cluster_configs(2)):
        environment = workers._environment(index, config, None, tmp_path)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", MODULE, *map(str, command)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
        )
    return processes
