"""Sparse gradients: sums in the rows touched, where that is smaller.

The gradient of an embedding's table is `tf.IndexedSlices`: the rows that a
micro-batch has looked up, each with its index. Its sum over a window is kept
as such, each row once, or as a dense tensor like all others: `table_sum`
decides. Replicas gather each other's rows and add them up.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

SPARSE_SUMS = ("auto", True, False)

# How many rows a window touches on all replicas where that is not known: 128
# sequences of 512 tokens.
UNKNOWN_ROWS = 2**16
# While rows are added or travel they are held up to three times; with an index
# beside each of them.
MARGIN = 4


@dataclasses.dataclass(frozen=True)
class SparseSpec:
    """How an IndexedSlices gradient looks.

    Attributes:
        shape: of the dense gradient.
        dtype: of the values.
        rows: number of indices, where it is always the same; else None.
    """

    shape: tf.TensorShape
    dtype: tf.DType
    rows: int | None = None


def spec_of(gradient: Any) -> tf.TensorSpec | SparseSpec:
    """How a gradient looks; of slices with a static dense shape."""
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.TensorShape(tf.get_static_value(gradient.dense_shape))
        return SparseSpec(shape, gradient.dtype, gradient.values.shape[0])
    return tf.TensorSpec(gradient.shape, gradient.dtype)


def zeros(spec: tf.TensorSpec | SparseSpec) -> Any:
    """A gradient of zeros, or without rows."""
    if isinstance(spec, SparseSpec):
        return tf.IndexedSlices(
            tf.zeros([0, *spec.shape[1:]], spec.dtype),
            tf.zeros([0], tf.int64),
            tf.constant(spec.shape.as_list(), tf.int64),
        )
    return tf.zeros(spec.shape, spec.dtype)


@dataclasses.dataclass(frozen=True)
class TableSum:
    """How the gradient of one table is summed: see `Model.table_sums`.

    Attributes:
        path: of the variable.
        is_sparse: whether the rows touched are kept, or a dense sum.
        reason: why.
    """

    path: str
    is_sparse: bool
    reason: str

    def __str__(self) -> str:
        """`embedding/embeddings: sparse, because ...`."""
        kind = "sparse" if self.is_sparse else "dense"
        return f"{self.path}: {kind}, because {self.reason}"


def table_sum(
    path: str,
    spec: SparseSpec,
    *,
    asked: bool | str = "auto",
    steps: int | None = None,
    replicas: int = 1,
    has_adasum: bool = False,
) -> TableSum:
    """Chooses how the gradient of one table is summed.

    Args:
        path: of the variable.
        spec: of its gradient in a micro-step.
        asked: one of `SPARSE_SUMS`.
        steps: the most micro-steps of a window; None where that is not known.
        replicas: which add up their sums.
        has_adasum: whether AdaSum combines them.
    """
    if has_adasum:
        return TableSum(path, False, "AdaSum compares dense gradients")
    if asked != "auto":
        return TableSum(path, bool(asked), f"sparse_sums={asked}")
    table = spec.shape[0]
    if spec.rows is None or steps is None:
        touched, about = UNKNOWN_ROWS, "about"
    else:
        touched, about = spec.rows * steps * replicas, "at most"
    return TableSum(
        path,
        MARGIN * touched <= table,
        f"a window touches {about} {touched:,} of {table:,} rows",
    )


def check_sparse_sums(value: Any, has_adasum: bool) -> None:
    """Refuses a `sparse_sums` that is none, or excluded by AdaSum.

    Raises:
        ValueError: if it is not one of `SPARSE_SUMS`.
        ValueError: if it is True together with AdaSum.
    """
    if value not in SPARSE_SUMS:
        raise ValueError(
            f"`sparse_sums` must be one of {', '.join(map(repr, SPARSE_SUMS))}"
            f". Received: sparse_sums={value!r}."
        )
    if value is True and has_adasum:
        raise ValueError(
            "`sparse_sums` must not be True with AdaSum, which compares dense "
            "gradients. Received: sparse_sums=True. Leave it 'auto'."
        )


# --- Adding up: over micro-steps, and over replicas ------------------------


def combined(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each index once, added up in its own dtype."""
    indices, places = tf.unique(slices.indices)
    rows = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(rows, indices, slices.dense_shape)


def of_replicas(
    slices: Sequence[tf.IndexedSlices],
) -> list[list[tf.IndexedSlices]]:
    """The slices of all replicas, whose numbers of rows may differ.

    All indices travel together, with how many there are, and so do all values
    of one dtype.

    Args:
        slices: at least one, with static shapes but for the number of rows,
            and indices in int64.

    Returns:
        One list for each replica in order, the same on every replica.

    Context: replica.
    """
    indices = _indices_of_replicas([s.indices for s in slices])
    rows: list[list[Any]] = [[None] * len(slices) for _ in indices]
    for dtype in {s.dtype: None for s in slices}:
        places = [i for i, s in enumerate(slices) if s.dtype == dtype]
        found = _rows_of_replicas(
            [slices[i].values for i in places],
            [[tf.size(own[i], tf.int64) for i in places] for own in indices],
        )
        for row, parts in zip(rows, found, strict=True):
            for i, part in zip(places, parts, strict=True):
                row[i] = part
    return [
        [
            tf.IndexedSlices(v, i, s.dense_shape)
            for v, i, s in zip(*of_replica, slices, strict=True)
        ]
        for of_replica in zip(rows, indices, strict=True)
    ]


def _indices_of_replicas(
    indices: Sequence[tf.Tensor],
) -> list[list[tf.Tensor]]:
    """Several vectors of int64, replica by replica; lengths travel ahead."""
    number = len(indices)
    counts = [tf.size(i, tf.int64) for i in indices]
    packed = gathered(tf.concat([counts, *indices], 0))
    found = []
    for _ in range(_num_replicas()):
        counts, packed = packed[:number], packed[number:]
        end = tf.reduce_sum(counts)
        found.append(tf.split(packed[:end], counts, num=number))
        packed = packed[end:]
    return found


def _rows_of_replicas(
    values: Sequence[tf.Tensor], counts: Sequence[Sequence[tf.Tensor]]
) -> list[list[tf.Tensor]]:
    """Several tensors of one dtype, replica by replica; by numbers of rows."""
    shapes = [v.shape[1:] for v in values]
    sizes = [
        [
            1,
            *(
                n * shape.num_elements()
                for n, shape in zip(own, shapes, strict=True)
            ),
        ]
        for own in counts
    ]
    # One more element, since gathering none at all ends the process.
    flat = [tf.zeros([1], values[0].dtype)]
    flat += [tf.reshape(v, [-1]) for v in values]
    every = len(flat)
    parts = tf.split(
        gathered(tf.concat(flat, 0)),
        list(itertools.chain.from_iterable(sizes)),
        num=every * len(sizes),
    )
    return [
        [
            tf.reshape(part, [-1, *shape])
            for part, shape in zip(
                parts[first + 1 : first + every], shapes, strict=True
            )
        ]
        for first in range(0, len(parts), every)
    ]


def _num_replicas() -> int:
    return tf.distribute.get_replica_context().num_replicas_in_sync


def gathered(tensor: tf.Tensor) -> tf.Tensor:
    """The replicas' tensors, of any lengths, one behind the other.

    Context: replica.
    """
    context = tf.distribute.get_replica_context()
    if tensor.dtype == tf.bfloat16:  # Which no collective gathers.
        bits = gathered(tf.bitcast(tensor, tf.float16))
        return tf.bitcast(bits, tf.bfloat16)
    return context.all_gather(tf.identity(tensor), axis=0)


def added(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The sum of slices of which each holds an index once, and so does it.

    One after the other, so that every replica gets the same bits, also where
    a device adds rows up in any order.
    """
    indices, places = tf.unique(tf.concat([p.indices for p in parts], 0))
    counts = [tf.size(part.indices) for part in parts]
    rows = tf.zeros(
        [tf.size(indices), *parts[0].values.shape[1:]], parts[0].dtype
    )
    for part, place in zip(
        parts, tf.split(places, counts, num=len(parts)), strict=True
    ):
        rows = tf.tensor_scatter_nd_add(rows, place[:, tf.newaxis], part.values)
    return tf.IndexedSlices(rows, indices, parts[0].dense_shape)
