"""Directories that are complete, or not there."""

import json
import os
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from tfaccum import snapshots
from tfaccum.snapshots import DamagedError, Snapshots

ARRAYS = {
    "model/0": np.float32([[1.5, -0.0], [np.inf, np.nan]]),
    "model/1": np.array([1, 2, 3], ml_dtypes.bfloat16),
    "model/2": np.float64(0.1),
    "seeds/0": np.int64([[1, 2], [3, 4]]),
    "flags/0": np.array([True, False]),
    "empty": np.zeros([0, 3], np.float16),
}


def write(directory, update=1, facts=None, arrays=ARRAYS):
    return Snapshots(directory).write(
        arrays,
        facts or {"update": update},
        update=update,
        epoch=0,
        batch=update,
    )


def test_arrays_come_back_to_the_bit(tmp_path):
    facts = {"logs": {"loss": 0.1 + 0.2, "other": float("inf")}, "n": None}
    path = write(tmp_path, facts=facts)
    found = Snapshots(tmp_path).read(path)
    assert found.facts == facts
    arrays = found.arrays()
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].tobytes() == array.tobytes(), name


def test_the_layout_is_the_documented_one(tmp_path):
    path = write(tmp_path, update=120)
    assert path.name == "update-00000120-epoch-0000-batch-000120"
    assert sorted(p.name for p in path.iterdir()) == [
        "arrays-1.data-00000-of-00001",
        "arrays-1.index",
        "checkpoint",
        "manifest.json",
    ]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    data = manifest["files"]["arrays-1.data-00000-of-00001"]
    assert (
        data["bytes"] == (path / "arrays-1.data-00000-of-00001").stat().st_size
    )


def test_the_newest_of_them_and_how_many_are_kept(tmp_path):
    shelf = Snapshots(tmp_path)
    paths = [write(tmp_path, update) for update in (9, 10, 100, 11)]
    assert shelf.newest()[0].facts == {"update": 100}
    shelf.keep(2, also=paths[0])
    assert shelf.paths() == [paths[0], paths[3], paths[2]]
    shelf.keep(1)
    assert shelf.paths() == [paths[2]]
    assert [p.name for p in tmp_path.iterdir()] == [paths[2].name]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": lambda p: flip(p / "arrays-1.data-00000-of-00001"),
    "a shorter file": lambda p: os.truncate(p / "arrays-1.index", 10),
    "a missing file": lambda p: (p / "arrays-1.index").unlink(),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "half a manifest": lambda p: os.truncate(p / "manifest.json", 30),
    "another format": lambda p: (p / "manifest.json").write_text(
        '{"format": 99, "files": {}, "facts": {}}'
    ),
    "no object": lambda p: (p / "manifest.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_good_one_is_found(tmp_path, damage):
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    DAMAGES[damage](newest)
    with pytest.raises(DamagedError):
        Snapshots(tmp_path).read(newest)
    found, (complaint,) = Snapshots(tmp_path).newest()
    assert found.facts == {"update": 1}
    assert complaint.startswith(f"{newest}: ")
    write(tmp_path, 2)  # In the place of the damaged one.
    assert Snapshots(tmp_path).newest() == (
        Snapshots(tmp_path).read(newest),
        [],
    )


def test_damaged_ones_count_no_more(tmp_path):
    """Nor does one under whose name another was damaged before."""
    shelf = Snapshots(tmp_path)
    for update in (5, 6, 8):
        write(tmp_path, update)
    for _ in range(2):
        damaged = write(tmp_path, 9)
        flip(damaged / "arrays-1.index")
        shelf.set_aside(shelf.newest()[0].path)
    shelf.keep(2)
    names = [f"update-0000000{n}-epoch-0000-batch-00000{n}" for n in (6, 8, 9)]
    names[2] += ".damaged"
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert shelf.newest()[0].facts == {"update": 8}
    for path in shelf.paths():
        flip(path / "arrays-1.index")
    shelf.set_aside(shelf.newest()[0])
    assert shelf.paths() == []
    assert len(list(tmp_path.iterdir())) == 3


def test_nothing_there(tmp_path):
    assert Snapshots(tmp_path / "missing").newest() == (None, [])
    assert Snapshots(tmp_path / "missing").paths() == []


def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "flush", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk(tmp_path):
    """A real file system of 1 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        write(tmp_path, 1)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 2, arrays={"big": np.ones(10**6)})
        found, complaints = Snapshots(tmp_path).newest()
        assert (found.facts, complaints) == ({"update": 1}, [])
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


WRITER = """
import sys, numpy as np
from tfaccum.snapshots import Snapshots
shelf = Snapshots(sys.argv[1])
print("begins", flush=True)
for update in range(1, 10000):
    value = np.full([300000], update, np.float32)
    shelf.write({"a": value}, {"update": update}, update=update, epoch=0,
                batch=0)
    shelf.keep(2)
"""


def test_killed_while_it_writes(tmp_path):
    """Whatever looks complete is complete."""
    rng = np.random.default_rng(7)
    for _ in range(3):
        shutil.rmtree(tmp_path)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(rng.uniform(0.05, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        shelf = Snapshots(tmp_path)
        for path in shelf.paths():
            found = shelf.read(path)
            assert set(found.arrays()["a"]) == {found.facts["update"]}
        shelf.remove_partial()
        assert len(list(tmp_path.iterdir())) == len(shelf.paths())
