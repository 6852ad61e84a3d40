"""Orthonormal directions of weights: in a file, and on the replicas.

Everything goes by the path of a variable, so that the order in which a model,
an optimizer or a file lists its variables does not matter.
"""

import dataclasses
import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfaccum import reduction
from tfaccum import strategy as strategies
from tfaccum.files import replacing

_DIRECTIONS = "directions/"


@dataclasses.dataclass(frozen=True, eq=False)
class Basis:
    """n orthonormal directions in the space of M weights.

    Attributes:
        directions: by path of each variable, float32 [n, *shape of it].
        explained_variance_ratio: float64 [n]: the share of the trajectory's
            variance that lies along each direction.
        path: of the file that it was saved to or loaded from; else None.
    """

    directions: Mapping[str, np.ndarray]
    explained_variance_ratio: np.ndarray
    path: str | None = None

    @property
    def num_directions(self) -> int:
        """The number of directions, n."""
        return len(self.explained_variance_ratio)

    @property
    def rows(self) -> np.ndarray:
        """float32 [n, M], the variables side by side in their order."""
        n = self.num_directions
        return np.concatenate(
            [d.reshape(n, -1) for d in self.directions.values()], axis=1
        )

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ where anything differs."""
        found = hashlib.sha256()
        for path, directions in sorted(self.directions.items()):
            found.update(f"{path} {directions.shape}".encode())
            found.update(np.ascontiguousarray(directions, "<f4").tobytes())
        return found.hexdigest()[:16]

    def __str__(self) -> str:
        """One line: how many directions, and what they explain."""
        weights = sum(d[0].size for d in self.directions.values())
        share = 100 * float(np.sum(self.explained_variance_ratio))
        return (
            f"{self.num_directions} directions of {weights:,} weights, "
            f"{share:.2f} % of the variance"
        )

    def save(self, path: str | os.PathLike) -> "Basis":
        """Writes one file, which appears when it is complete.

        Args:
            path: of the file, ending in ".npz".

        Returns:
            This basis, with its path.

        Raises:
            ValueError: if `path` has another ending.
        """
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(
                f"`path` must end in .npz. Received: path={str(path)!r}."
            )
        write_arrays(
            path,
            {
                "explained_variance_ratio": self.explained_variance_ratio,
                "digest": np.array(self.digest),
                **{_DIRECTIONS + p: d for p, d in self.directions.items()},
            },
        )
        return dataclasses.replace(self, path=str(path))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Basis":
        """Reads what `save` has written.

        Raises:
            ValueError: if it is no such file.
        """
        stored_digest(path)
        with np.load(path) as file:
            return cls(
                {
                    name.removeprefix(_DIRECTIONS): file[name]
                    for name in file.files
                    if name.startswith(_DIRECTIONS)
                },
                file["explained_variance_ratio"],
                os.fspath(path),
            )


def stored_digest(path: str | os.PathLike) -> str:
    """`Basis.digest` of a file, without reading all of it.

    Raises:
        ValueError: if `Basis.save` has not written the file.
    """
    if zipfile.is_zipfile(path):  # As .npz is.
        with np.load(path) as file:
            if "digest" in file.files:
                return str(file["digest"])
    raise ValueError(
        "`basis` must be a file that `Basis.save` has written. Received: "
        f"basis={os.fspath(path)!r}."
    )


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz file that is complete, or not there.

    Raises:
        OSError: if the disk is full, for instance.
    """
    with replacing(path) as partial, open(partial, "wb") as file:
        # numpy 1.26 takes `allow_pickle` for the name of one more array.
        np.savez(file, **arrays)  # type: ignore[arg-type]


class Subspace:
    """The span of a basis on the replicas: products with its rows P [n, M].

    Each replica holds all rows, or its own ceil(n / R) of them. They are kept
    in the dtype in which gradients are added up, and are saved nowhere.

    Args:
        basis: whose variables are exactly `variables`.
        variables: of a model.
        sharded: whether the rows are shared out over the replicas; rows of
            zeros are added where n is no multiple of their number.

    Context: the strategy's scope.

    Raises:
        ValueError: if paths or shapes differ.
    """

    def __init__(
        self,
        basis: Basis,
        variables: Sequence[keras.Variable],
        *,
        sharded: bool,
    ):
        _check_variables(basis, variables)
        self._strategy = tf.distribute.get_strategy()
        shards = strategies.num_replicas(self._strategy) if sharded else 1
        self._is_sharded = shards > 1
        self._num_directions = basis.num_directions
        self._num_rows = -(-basis.num_directions // shards)
        self._padding = shards * self._num_rows - basis.num_directions
        self.matrices = {
            v.path: self._matrix(
                basis.directions[v.path], reduction.accumulator_dtype(v.dtype)
            )
            for v in variables
        }
        self.dtype = max(
            (m.dtype for m in self.matrices.values()), key=lambda d: d.size
        )

    def _matrix(self, directions: np.ndarray, dtype: tf.DType) -> tf.Variable:
        """The rows of one variable, [num_rows, its size], by replica."""
        rows = np.reshape(directions, [self._num_directions, -1])
        rows = np.pad(
            rows.astype(dtype.as_numpy_dtype), [(0, self._padding), (0, 0)]
        )
        matrix = tf.Variable(
            rows[: self._num_rows],
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
        )
        if self._is_sharded:
            copies = self._strategy.experimental_local_results(matrix)
            worker, _ = strategies.worker_index(self._strategy)
            for index, copy in enumerate(copies, start=worker * len(copies)):
                first = index * self._num_rows
                copy.assign(rows[first : first + self._num_rows])
        return matrix

    def project(self, gradients: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """P g, [n], to the bit the same on every replica.

        Args:
            gradients: by path; what is missing counts as zero.

        Context: replica.
        """
        parts = []
        for path, gradient in gradients.items():
            matrix = tf.convert_to_tensor(self.matrices[path])
            flat = tf.reshape(tf.cast(gradient, matrix.dtype), [-1])
            part = tf.linalg.matvec(matrix, flat)
            parts.append(tf.cast(part, self.dtype))
        found = reduction.from_each_replica(tf.add_n(parts))
        if self._is_sharded:
            return tf.reshape(found, [-1])[: self._num_directions]
        return found[0]

    def lift(
        self, coefficients: tf.Tensor, variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """The product of coefficients and P: for each variable [k, *shape].

        Args:
            coefficients: [k, n], the same on every replica.
            variables: of which the result is wanted.

        Context: replica.
        """
        if self._is_sharded:
            context = tf.distribute.get_replica_context()
            first = context.replica_id_in_sync_group * self._num_rows
            padded = tf.pad(coefficients, [(0, 0), (0, self._padding)])
            coefficients = padded[:, first : first + self._num_rows]
        found = []
        for variable in variables:
            matrix = tf.convert_to_tensor(self.matrices[variable.path])
            product = tf.matmul(tf.cast(coefficients, matrix.dtype), matrix)
            found.append(tf.reshape(product, [-1, *variable.shape]))
        return reduction.all_reduce_sum(found) if self._is_sharded else found


def _check_variables(basis: Basis, variables: Sequence[keras.Variable]) -> None:
    """Refuses variables that are not those of the basis."""
    found = [(v.path, tuple(v.shape)) for v in variables]
    expected = {p: d.shape[1:] for p, d in basis.directions.items()}
    if len(found) != len(expected) or dict(found) != expected:
        differ = sorted(set(found) ^ set(expected.items()))
        raise ValueError(
            "`basis` must be of the variables that are trained, each with a "
            f"path of its own. Received: {len(found)} variables and a basis "
            f"of {len(expected)}; paths and shapes that are in one of them "
            f"only: {differ}. Give the layers names, so that paths do not "
            "depend on what was made before."
        )
