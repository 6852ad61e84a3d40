"""The trajectory on disk, and its principal directions."""

import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import tfaccum
from tests import toy, workers
from tfaccum import boost
from tfaccum.boost.trajectory import recorded

LAYERS = keras.layers
X = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
Y = np.random.default_rng(2).normal(size=(24, 2)).astype("float32")


def model_of(replicas=1, names=("first", "second"), **how):
    keras.utils.set_random_seed(3)
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,))
        x = LAYERS.Dense(4, activation="tanh", name=names[0])(inputs)
        model = tfaccum.Model(inputs, LAYERS.Dense(2, name=names[1])(x))
        model.compile(keras.optimizers.Adam(0.05), "mse", **how)
    return model


class Weights(keras.callbacks.Callback):
    """The weights after each update, by path."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_train_begin(self, logs=None):
        self.look()

    def on_train_batch_end(self, batch, logs=None):
        self.look()

    def look(self):
        variables = self.model.trainable_variables
        self.seen[self.model.current_run.num_updates] = {
            v.path: toy.value_of(self.model, v) for v in variables
        }


def fit(model, *callbacks, batch_size=4, epochs=2, **arguments):
    """6 updates an epoch."""
    model.fit(
        X,
        Y,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=list(callbacks),
        verbose=0,
        **arguments,
    )


def read(directory):
    """Weights by path, by update."""
    found = {}
    for update, path in recorded(directory).items():
        with np.load(path) as file:
            found[update] = {
                n.removeprefix("weights/"): file[n] for n in file.files
            }
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for update, weights in expected.items():
        assert found[update].keys() == weights.keys()
        for path, value in weights.items():
            assert found[update][path].dtype == np.float32
            np.testing.assert_array_equal(found[update][path], value)


# --- Recording -------------------------------------------------------------


@pytest.mark.parametrize(
    "replicas, every, updates",
    [
        (1, None, (0, 6, 12)),
        (1, 1, range(13)),
        (1, 5, (0, 5, 10)),
        (2, 5, (0, 5, 10)),
    ],
)
def test_weights_are_recorded_by_update(tmp_path, replicas, every, updates):
    weights = Weights()
    fit(
        model_of(replicas),
        weights,
        boost.RecordTrajectory(tmp_path / "t", every_updates=every),
    )
    assert_equal(read(tmp_path / "t"), {u: weights.seen[u] for u in updates})
    assert {p for u in weights.seen for p in weights.seen[u]} == {
        "first/kernel", "first/bias", "second/kernel", "second/bias",
    }  # fmt: skip
    names = {path.name for path in (tmp_path / "t").iterdir()}
    assert names == {f"update-{update:08d}.npz" for update in updates}


def test_train_calls_end_where_something_is_recorded(tmp_path):
    """Also if a checkpoint ends them elsewhere, whatever their order."""
    weights = Weights()
    fit(model_of(), weights)
    for name, first in (("a", False), ("b", True)):
        record = boost.RecordTrajectory(tmp_path / name, every_updates=4)
        saver = tfaccum.Checkpoint(
            tmp_path / f"{name}-run", save_every_updates=6
        )
        callbacks = [saver, record] if first else [record, saver]
        fit(model_of(steps_per_execution=100), *callbacks)
        seen = {update: weights.seen[update] for update in (0, 4, 8, 12)}
        assert_equal(read(tmp_path / name), seen)


def test_an_update_that_is_skipped_is_not_recorded_again(tmp_path):
    x = X.copy()
    x[5:] = np.inf
    record = boost.RecordTrajectory(tmp_path, every_updates=1)
    model = model_of(max_consecutive_skips=100)
    model.fit(x, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[record])
    assert list(read(tmp_path)) == [0, 1]


@pytest.mark.parametrize("every, save_every", [(None, None), (2, 3)])
def test_a_run_that_goes_on_records_the_same(tmp_path, every, save_every):
    def run(name, *others):
        fit(
            model_of(),
            boost.RecordTrajectory(tmp_path / name, every_updates=every),
            *others,
        )

    run("whole")
    for calls in (5, 4):
        with pytest.raises(toy.Stopped):
            run(
                "cut",
                tfaccum.Checkpoint(
                    tmp_path / "run", save_every_updates=save_every
                ),
                toy.StopAfter(calls),
            )
    # Of a process that was killed.
    (tmp_path / "cut" / "update-00000099.npz.partial").write_bytes(b"half")
    run("cut", tfaccum.Checkpoint(tmp_path / "run"))
    assert_equal(read(tmp_path / "cut"), read(tmp_path / "whole"))
    assert not list((tmp_path / "cut").glob("*.partial"))


def test_later_updates_of_an_earlier_run_are_removed(tmp_path):
    record = boost.RecordTrajectory(tmp_path)
    fit(model_of(), record, epochs=3)
    assert list(read(tmp_path)) == [0, 6, 12, 18]
    weights = Weights()
    fit(model_of(), weights, record, epochs=1, batch_size=3)
    assert_equal(read(tmp_path), {u: weights.seen[u] for u in (0, 8)})


WORKER = """
import pathlib, sys
import keras, numpy as np, tfaccum
from tfaccum import boost

strategy = tfaccum.make_strategy()
worker = tfaccum.strategy.worker_index(strategy)[0]
folder = pathlib.Path(sys.argv[1]) / str(worker)
keras.utils.set_random_seed(3)
with strategy.scope():
    inputs = keras.Input((3,))
    model = tfaccum.Model(inputs, keras.layers.Dense(2, name="d")(inputs))
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
model.fit(x, x[:, :2], batch_size=4, verbose=0,
          callbacks=[boost.RecordTrajectory(folder, every_updates=1)])
"""


def test_only_the_first_worker_writes(tmp_path, run_workers):
    (tmp_path / "worker.py").write_text(WORKER)
    run_workers(tmp_path / "worker.py", 2, args=[tmp_path / "t"])
    assert list(recorded(tmp_path / "t" / "0")) == [0, 1, 2]
    assert not (tmp_path / "t" / "1").exists()


# --- Killed ----------------------------------------------------------------

KILLED = """
import sys
import keras, numpy as np, tfaccum
from tfaccum import boost

inputs = keras.Input((1000,))
model = tfaccum.Model(inputs, keras.layers.Dense(1000, name="d")(inputs))
model.compile(keras.optimizers.SGD(1e-3), "mse")
x = np.random.default_rng(0).normal(size=(64, 1000)).astype("float32")
model.fit(x, x, batch_size=1, epochs=1000, verbose=0, callbacks=[
    boost.RecordTrajectory(sys.argv[1], every_updates=1)])
"""


def test_a_file_is_complete_or_not_there_when_the_process_is_killed(tmp_path):
    """4 MB each, so that most of the time one is being written."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=workers.ROOT
    )
    try:
        deadline = time.monotonic() + 120
        # A file is half there.
        while len(recorded(tmp_path)) < 3 or not any(
            0 < size < 4_000_000 for size in partial_sizes(tmp_path)
        ):
            assert process.poll() is None and time.monotonic() < deadline
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    found = read(tmp_path)
    assert list(found) == list(range(len(found))) and len(found) >= 3
    for weights in found.values():
        assert weights["d/kernel"].shape == (1000, 1000)
        assert np.isfinite(weights["d/kernel"]).all()
    basis = boost.principal_basis(tmp_path, 2)
    assert basis.rows.shape == (2, 1_001_000)


def partial_sizes(directory):
    for path in directory.glob("*.partial"):
        try:
            yield os.path.getsize(path)
        except FileNotFoundError:  # It is complete now.
            pass


# --- Principal directions --------------------------------------------------

SHAPES = {"weights/b/kernel": (4, 3), "weights/a/bias": (5,)}
SIZE = 17


def write(directory, samples, shapes=SHAPES, first=1):
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1]
    for update, sample in enumerate(samples, first):
        parts = np.split(np.float32(sample), ends)
        np.savez(
            directory / f"update-{update:08d}.npz",
            **{
                name: part.reshape(shape)
                for (name, shape), part in zip(
                    shapes.items(), parts, strict=True
                )
            },
        )


def low_rank(samples, rank, seed=0):
    rng = np.random.default_rng(seed)
    scales = 2.0 ** -np.arange(rank)
    x = rng.normal(size=(samples, rank)) * scales
    return x @ rng.normal(size=(rank, SIZE)) + rng.normal(size=SIZE)


@pytest.mark.parametrize("rank, n", [(1, 1), (3, 3), (3, 5), (4, 8)])
def test_check_15_orthonormal_rows_that_reproduce_low_rank(tmp_path, rank, n):
    samples = low_rank(8, rank)
    write(tmp_path, samples)
    basis = boost.principal_basis(tmp_path, n)
    P = basis.rows
    assert P.shape == (n, SIZE) and P.dtype == np.float32
    np.testing.assert_allclose(P @ P.T, np.eye(n), atol=1e-5)
    centred = samples - samples.mean(0)
    np.testing.assert_allclose(centred @ P.T @ P, centred, atol=1e-5)
    np.testing.assert_allclose(basis.explained_variance_ratio.sum(), 1, 1e-5)
    assert (
        str(basis) == f"{n} directions of 17 weights, 100.00 % of the variance"
    )


def test_it_is_that_of_the_whole_svd(tmp_path):
    samples = low_rank(12, 9)
    write(tmp_path, samples)
    basis = boost.principal_basis(tmp_path, 4)
    _, s, rows = np.linalg.svd(samples - samples.mean(0))
    cosines = np.abs(np.sum(basis.rows * rows[:4], 1))
    np.testing.assert_allclose(cosines, 1, atol=1e-4)
    np.testing.assert_allclose(
        basis.explained_variance_ratio, s[:4] ** 2 / np.sum(s**2), rtol=1e-4
    )
    parts = basis.directions
    assert {n: d.shape for n, d in parts.items()} == {
        "b/kernel": (4, 4, 3), "a/bias": (4, 5),
    }  # fmt: skip
    np.testing.assert_array_equal(
        parts["b/kernel"].reshape(4, -1), basis.rows[:, :12]
    )


def test_the_seed_decides(tmp_path):
    samples = np.random.default_rng(0).normal(size=(16, SIZE))
    write(tmp_path, samples)
    one, same, other = (
        boost.principal_basis(tmp_path, 3, seed=seed) for seed in (0, 0, 1)
    )
    assert one.digest == same.digest != other.digest
    np.random.seed(0)
    assert boost.principal_basis(tmp_path, 3).digest == one.digest


def test_first_update(tmp_path):
    write(tmp_path, 100 * low_rank(6, 5))
    late = low_rank(6, 2, seed=1)
    write(tmp_path, late, first=7)
    basis = boost.principal_basis(tmp_path, 2, first_update=7)
    centred, P = late - late.mean(0), basis.rows
    np.testing.assert_allclose(centred @ P.T @ P, centred, atol=1e-5)


def test_the_order_in_a_file_does_not_matter(tmp_path):
    """Variables go by their paths."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    samples = low_rank(8, 3)
    swapped = np.concatenate([samples[:, 12:], samples[:, :12]], 1)
    write(tmp_path / "one", samples)
    write(tmp_path / "two", samples[:4])
    write(
        tmp_path / "two", swapped[4:], dict(reversed(SHAPES.items())), first=5
    )
    found = [boost.principal_basis(tmp_path / n, 3) for n in ("one", "two")]
    assert found[0].digest == found[1].digest


def test_memory_mapped_samples_leave_nothing_behind(tmp_path):
    write(tmp_path, low_rank(8, 3))
    before = sorted(tmp_path.iterdir())
    boost.principal_basis(tmp_path, 3)
    assert sorted(tmp_path.iterdir()) == before


# --- The file --------------------------------------------------------------


def test_a_basis_is_saved_and_loaded(tmp_path):
    write(tmp_path, low_rank(8, 3))
    made = boost.principal_basis(tmp_path, 3)
    assert made.path is None
    saved = made.save(tmp_path / "basis.npz")
    loaded = boost.Basis.load(tmp_path / "basis.npz")
    assert saved.path == loaded.path == str(tmp_path / "basis.npz")
    assert made.digest == saved.digest == loaded.digest
    np.testing.assert_array_equal(made.rows, loaded.rows)
    np.testing.assert_array_equal(
        made.explained_variance_ratio, loaded.explained_variance_ratio
    )
    assert not list(tmp_path.glob("*.partial"))
    assert list(recorded(tmp_path)) == list(range(1, 9))


# --- Errors ----------------------------------------------------------------


def test_too_few_samples(tmp_path):
    write(tmp_path, low_rank(3, 2))
    with pytest.raises(
        ValueError, match="number of samples. Received: n_components=4;.*has 3 "
    ):
        boost.principal_basis(tmp_path, 4)
    with pytest.raises(ValueError, match="has 2 samples from update 2 on"):
        boost.principal_basis(tmp_path, 3, first_update=2)
    with pytest.raises(ValueError, match="has 0 samples"):
        boost.principal_basis(tmp_path / "nowhere", 3)


def test_too_few_weights(tmp_path):
    write(tmp_path, np.ones((4, 2)), {"weights/a": (2,)})
    with pytest.raises(ValueError, match="n_components=3 for 2 weights"):
        boost.principal_basis(tmp_path, 3)


def test_samples_of_other_variables(tmp_path):
    write(tmp_path, low_rank(4, 2))
    write(tmp_path, np.ones((1, 2)), {"weights/a": (2,)}, first=9)
    with pytest.raises(
        ValueError, match="same variables. Received: update-0+9"
    ):
        boost.principal_basis(tmp_path, 2)


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_samples_without_variance(tmp_path, value):
    write(tmp_path, np.full((4, SIZE), value))
    with pytest.raises(ValueError, match="must be finite, and must differ"):
        boost.principal_basis(tmp_path, 2)


def test_other_errors(tmp_path, monkeypatch):
    for every, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="`every_updates` must be.*Received"):
            boost.RecordTrajectory(tmp_path, every_updates=every)
    for n, error in ((0, ValueError), ("3", TypeError)):
        with pytest.raises(error, match="`n_components` must be.*Received"):
            boost.principal_basis(tmp_path, n)
    (tmp_path / "else.npz").write_bytes(b"")
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    for name in ("nowhere.npz", "other.npz", "else.npz"):
        with pytest.raises(ValueError, match=f"`basis`.*Received.*{name}"):
            boost.Basis.load(tmp_path / name)
    write(tmp_path, low_rank(4, 2))
    basis = boost.principal_basis(tmp_path, 2)
    with pytest.raises(ValueError, match=r"must end in \.npz. Received: path="):
        basis.save(tmp_path / "basis.npy")
    monkeypatch.setitem(sys.modules, "sklearn.utils.extmath", None)
    with pytest.raises(ImportError, match=r"pip install 'tfaccum\[boost\]'"):
        boost.principal_basis(tmp_path, 2)


def test_two_variables_of_one_path_are_refused(tmp_path):
    class Twice(tfaccum.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = LAYERS.Dense(2, name="d"), None
            self.other = LAYERS.Dense(2, name="d")

        def call(self, x):
            return self.one(x) + self.other(x)

    model = Twice()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="path of its own. Received"):
        fit(model, boost.RecordTrajectory(tmp_path))
