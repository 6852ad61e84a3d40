"""The trajectory of a model's weights, and its principal directions.

    trajectory/
        update-00000000.npz     the trainable weights by path, before training
        update-00000120.npz     after update 120

Source: Li, Tan, Huang, Tao, Liu and Huang, Low Dimensional Landscape
Hypothesis is True: DNNs can be Trained in Tiny Subspaces (2021),
arXiv:2103.11154.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccum import strategy as strategies
from tfaccum.batching import check_count
from tfaccum.boost.basis import Basis, write_arrays

_NAME = re.compile(r"update-(\d{8,})\.npz")
_WEIGHTS = "weights/"


class RecordTrajectory(keras.callbacks.Callback):
    """Writes the trainable weights to disk while a model trains.

    Before the first update, and at the end of each epoch or after every Nth
    update. One file each, float32, which appears when it is complete.

    A directory holds one run. When training begins, files of later updates
    are removed: this run has not made them yet. So a run that goes on with a
    `tfaccum.Checkpoint` records what it would have recorded in one go.

    Args:
        directory: is made when it is missing; on the first worker's machine.
        every_updates: N >= 1, or None for the ends of epochs. With N, train
            calls end after every Nth update, whatever `steps_per_execution`.

    Context: every worker has it; the first writes.

    Raises:
        TypeError: if `every_updates` is not an int.
        ValueError: if it is less than 1.
        ValueError: when training begins, if two variables have one path.
        OSError: in training, if a file cannot be written.
    """

    def __init__(
        self, directory: str | os.PathLike, *, every_updates: int | None = None
    ):
        super().__init__()
        if every_updates is not None:
            check_count("every_updates", every_updates)
        self._directory = Path(directory)
        self._every = every_updates
        self._has_begun = False
        self._recorded_at = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the first epoch: a checkpoint may be read until then."""
        self._has_begun = False

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Before the first epoch, makes room and records the start."""
        if self._has_begun:
            return
        self._has_begun = True
        run = self.model.current_run
        if self._every:
            run.pause_every(self._every)
        self._recorded_at = run.num_updates
        if self._is_first_worker():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_after(run.num_updates)
        if run.num_updates == 0:
            self._record(0)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Records after every Nth update."""
        update = self.model.current_run.num_updates
        if self._every and update % self._every == 0:
            self._record_once(update)

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Records where there is no N."""
        if not self._every:
            self._record_once(self.model.current_run.num_updates)

    def _record_once(self, update: int) -> None:
        if update != self._recorded_at:  # Else the update was skipped.
            self._recorded_at = update
            self._record(update)

    def _record(self, update: int) -> None:
        variables = self.model.trainable_variables
        weights = {
            _WEIGHTS + v.path: _value(v).astype("float32") for v in variables
        }
        if len(weights) < len(variables):
            paths = sorted(v.path for v in variables)
            raise ValueError(
                "Each trainable variable must have a path of its own. "
                f"Received: paths {paths}. Give the layers other names."
            )
        if self._is_first_worker():
            name = f"update-{update:08d}.npz"
            write_arrays(self._directory / name, weights)

    def _is_first_worker(self) -> bool:
        return strategies.worker_index(self.model.distribute_strategy)[0] == 0

    def _remove_after(self, update: int) -> None:
        for number, path in recorded(self._directory).items():
            if number > update:
                path.unlink()
        for path in self._directory.glob("update-*.npz.partial"):
            path.unlink()  # Of a process that was killed.


def _value(variable: keras.Variable) -> np.ndarray:
    """That of this worker's first replica."""
    return tf.convert_to_tensor(variable.value).numpy()


def recorded(directory: str | os.PathLike) -> dict[int, Path]:
    """The files of a trajectory by the number of the update, in order."""
    found = {
        int(match[1]): path
        for path in Path(directory).glob("update-*.npz")
        if (match := _NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def principal_basis(
    directory: str | os.PathLike,
    n_components: int = 32,
    *,
    seed: int = 0,
    first_update: int = 0,
) -> Basis:
    """The directions in which the weights of a trajectory vary the most.

    ```
    X = weights after each recorded update - their mean     [samples, M]
    U S P = svd(X)                                          P: n first rows
    ```

    The randomised SVD is scikit-learn's, which is imported only here. The
    samples lie in a memory-mapped temporary file in `directory`; in memory
    are a few arrays of the result's size. The same files and seed give the
    same basis.

    Args:
        directory: of a `RecordTrajectory`.
        n_components: the number of directions n, >= 1. MindSpore takes 32,
            the paper 40.
        seed: of the randomised SVD, >= 0.
        first_update: earlier samples are left out, >= 0.

    Returns:
        n orthonormal directions, the most important first, and their shares
        of the variance.

    Raises:
        ImportError: if scikit-learn is not installed.
        TypeError: if `n_components` is not an int.
        ValueError: if it is less than 1, or more than there are samples or
            weights.
        ValueError: if the samples are not of the same variables, or not
            finite, or all the same.

    Source: `random_state` and `n_components` as in scikit-learn's PCA; Li et
    al. (2021), arXiv:2103.11154.
    """
    svd = _library_svd()
    check_count("n_components", n_components)
    paths = [
        path
        for update, path in recorded(directory).items()
        if update >= first_update
    ]
    if len(paths) < n_components:
        raise ValueError(
            "`n_components` must be at most the number of samples. Received: "
            f"n_components={n_components}; {os.fspath(directory)!r} has "
            f"{len(paths)} samples from update {first_update} on. Record more "
            "often, or take fewer components."
        )
    with np.load(paths[0]) as file:
        shapes = {name: file[name].shape for name in file.files}
    size = sum(math.prod(shape) for shape in shapes.values())
    if size < n_components:
        raise ValueError(
            "`n_components` must be at most the number of weights. Received: "
            f"n_components={n_components} for {size} weights."
        )
    with tempfile.TemporaryFile(dir=os.fspath(directory)) as file:
        samples = np.memmap(file, "float32", "w+", shape=(len(paths), size))
        variance = _fill(samples, paths, shapes)
        _, singular, rows = svd(
            samples, n_components=n_components, random_state=seed
        )
        del samples
    return Basis(
        _by_path(rows, shapes), np.square(singular, dtype="float64") / variance
    )


def _fill(
    samples: np.ndarray, paths: list[Path], shapes: dict[str, tuple]
) -> float:
    """Writes the samples without their mean; returns the sum of squares."""
    mean = np.zeros(samples.shape[1])
    for index, path in enumerate(paths):
        with np.load(path) as file:
            weights = dict(file)
        found = {name: values.shape for name, values in weights.items()}
        if found != shapes:
            differ = sorted(set(found.items()) ^ set(shapes.items()))
            raise ValueError(
                "`directory` must hold samples of the same variables. "
                f"Received: {path.name} and {paths[0].name} differ in "
                f"{differ}."
            )
        np.concatenate(
            [weights[name].ravel() for name in shapes], out=samples[index]
        )
        mean += samples[index]
    mean /= len(samples)
    total = 0.0
    for row in samples:
        with np.errstate(invalid="ignore"):  # Said below.
            row -= mean
        total += float(np.sum(np.square(row, dtype="float64")))
    if not 0 < total < math.inf:
        raise ValueError(
            "The samples must be finite, and must differ. Received: "
            f"{len(samples)} samples with a total variance of {total}."
        )
    return total


def _library_svd() -> Callable[..., Any]:
    """The randomised SVD of scikit-learn."""
    try:
        from sklearn.utils.extmath import randomized_svd
    except ImportError as error:
        raise ImportError(
            "principal_basis needs scikit-learn: pip install 'tfaccum[boost]'"
        ) from error
    return randomized_svd


def _by_path(
    rows: np.ndarray, shapes: dict[str, tuple]
) -> dict[str, np.ndarray]:
    """Cuts rows [n, M] into the directions [n, *shape] of each variable."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(np.asarray(rows, "float32"), ends[:-1], axis=1)
    return {
        name.removeprefix(_WEIGHTS): part.reshape(len(rows), *shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
