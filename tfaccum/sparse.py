"""Sparse gradients: sums in the rows touched, where that is smaller.

The gradient of an embedding's table is `tf.IndexedSlices`: the rows that a
micro-batch has looked up, each with its index. Its sum over a window is kept
as such, or as a dense tensor like all others: `table_sum` decides.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from tfaccum.reduction import Gradient

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


def spec_of(gradient: Gradient) -> tf.TensorSpec | SparseSpec:
    """How a gradient looks; of slices with a static dense shape."""
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.TensorShape(tf.get_static_value(gradient.dense_shape))
        return SparseSpec(shape, gradient.dtype, gradient.values.shape[0])
    return tf.TensorSpec(gradient.shape, gradient.dtype)


def zeros(spec: tf.TensorSpec | SparseSpec) -> Gradient:
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
) -> TableSum:
    """Chooses how the gradient of one table is summed.

    Args:
        path: of the variable.
        spec: of its gradient in a micro-step.
        asked: one of `SPARSE_SUMS`.
        steps: the most micro-steps of a window; None where that is not known.
        replicas: which add up their sums.
    """
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
