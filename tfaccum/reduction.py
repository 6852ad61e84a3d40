"""How micro-steps and replicas are combined: weighted sums, one all-reduce.

    g = sum(weight * gradient) / sum(weight)

Both sums run over the micro-steps of a window first, without communication,
and over the replicas last, in one group of collectives. The division happens
once, after both.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Union

import tensorflow as tf

from tfaccum import sparse

Gradient: TypeAlias = Union[tf.Tensor, tf.IndexedSlices]


WIRE_DTYPES = (None, "bfloat16", "float16")


def check_wire_dtype(wire_dtype: Any) -> None:
    """Refuses a `wire_dtype` that is none.

    Raises:
        ValueError: if it is not one of `WIRE_DTYPES`.
    """
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(
            f"`wire_dtype` must be one of {', '.join(map(repr, WIRE_DTYPES))}. "
            f"Received: wire_dtype={wire_dtype!r}."
        )


def accumulator_dtype(dtype: Any) -> tf.DType:
    """float32, or the variable's own type where that is wider.

    Args:
        dtype: the dtype of a variable or gradient, float.
    """
    dtype = tf.as_dtype(dtype)
    return dtype if dtype.size > tf.float32.size else tf.float32


def weighted(gradient: Gradient, weight: tf.Tensor | None) -> Gradient:
    """`weight * gradient` in the accumulator's dtype, zero for zero weight.

    A replica without examples has weight 0 and, often, a NaN for a gradient;
    0 * NaN must not reach the sum. The product is taken in float32 or wider:
    a weight of thousands of tokens would leave float16.

    Args:
        gradient: float tensor, or IndexedSlices, of any shape.
        weight: scalar float tensor, >= 0; None: 1.
    """
    dtype = accumulator_dtype(gradient.dtype)

    def of(values: tf.Tensor) -> tf.Tensor:
        values = tf.cast(values, dtype)
        if weight is None:
            return values
        return tf.math.multiply_no_nan(values, tf.cast(weight, dtype))

    return of_values(gradient, of)


def of_values(
    gradient: Gradient, function: Callable[[tf.Tensor], tf.Tensor]
) -> Gradient:
    """Applies an elementwise function to a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def divided(total: Gradient, weight: tf.Tensor) -> Gradient:
    """`total / weight`, zero where the weight is zero."""
    return of_values(
        total,
        lambda t: tf.math.divide_no_nan(t, tf.cast(weight, t.dtype)),
    )


def all_reduce_sum(tensors: Any) -> Any:
    """The sum over all replicas of a nest of dense numeric tensors.

    All tensors of one dtype travel in one packed collective. With one replica
    they are returned untouched.

    Context: replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tensors
    # A tensor without a device, such as a function returns, has nowhere to be
    # reduced to; its identity is placed on this replica's.
    flat = [tf.identity(tensor) for tensor in tf.nest.flatten(tensors)]
    for dtype in {tensor.dtype: None for tensor in flat}:
        places = [i for i, tensor in enumerate(flat) if tensor.dtype == dtype]
        reduced = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [flat[i] for i in places]
        )
        for i, tensor in zip(places, reduced, strict=True):
            flat[i] = tensor
    return tf.nest.pack_sequence_as(tensors, flat)


def from_each_replica(tensors: Any) -> Any:
    """A nest of dense tensors with a first axis: the replicas, in order.

    The same on every replica; their shapes have to be the same too.

    Context: replica.
    """
    context = tf.distribute.get_replica_context()
    rows = tf.nest.map_structure(
        lambda tensor: tf.identity(tensor)[tf.newaxis], tensors
    )
    if context.num_replicas_in_sync == 1:
        return rows
    return tf.nest.map_structure(sparse.gathered, rows)


def all_reduce_gradients(
    gradients: Any, others: Any, wire_dtype: Any = None
) -> tuple[Any, Any]:
    """The sums over all replicas of gradients, and of what goes with them.

    In float16 each gradient travels multiplied by a power of two that keeps
    every partial sum in range, whatever the weights are. All replicas have
    to know it, so that a small collective with each gradient's largest
    elements goes ahead.

    Sparse gradients are gathered and added up here, in the order of the
    replicas, in two collectives beside that of the dense ones: indices and
    values.

    Args:
        gradients: nest of float tensors, or IndexedSlices that hold an index
            once.
        others: nest of dense float tensors; they travel as they are.
        wire_dtype: in which gradients travel, and dense ones are added up on
            their way, "bfloat16" or "float16"; None: their own.

    Returns:
        (gradients, others), in the dtypes in which they came.

    Context: replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return gradients, others
    flat = tf.nest.flatten(gradients)
    # The sum of the replicas' largest is never less than that of the sum.
    scales = wire_scales(flat, wire_dtype, all_reduce_sum)
    sent = [
        as_sent(g, s, wire_dtype) for g, s in zip(flat, scales, strict=True)
    ]
    tables = [i for i, g in enumerate(flat) if isinstance(g, tf.IndexedSlices)]
    dense = [i for i in range(len(flat)) if i not in tables]
    received, others = all_reduce_sum(([sent[i] for i in dense], others))
    for i, total in zip(dense, received, strict=True):
        flat[i] = as_received(total, scales[i], wire_dtype)
    parts = sparse.of_replicas([sent[i] for i in tables]) if tables else []
    for i, *of_table in zip(tables, *parts, strict=True):
        flat[i] = sparse.added(
            [as_received(part, scales[i], wire_dtype) for part in of_table]
        )
    return tf.nest.pack_sequence_as(gradients, flat), others


def wire_scales(
    gradients: Sequence[Gradient],
    wire_dtype: Any,
    common: Callable[[list[tf.Tensor]], list[tf.Tensor]] = list,
) -> list[tf.Tensor]:
    """What each gradient is multiplied by to travel: 1 but in float16.

    Args:
        gradients: tensors or IndexedSlices.
        wire_dtype: "bfloat16", "float16" or None.
        common: makes of the largest elements those that scales are chosen by.

    Context: replica.
    """
    if wire_dtype != "float16":
        return [tf.ones([], g.dtype) for g in gradients]
    return [float16_scale(peak) for peak in common(list(map(_peak, gradients)))]


def as_sent(gradient: Gradient, scale: tf.Tensor, wire_dtype: Any) -> Gradient:
    """A gradient as it travels."""
    if wire_dtype is None:
        return gradient
    return of_values(gradient, lambda g: tf.cast(g * scale, wire_dtype))


def as_received(
    gradient: Gradient, scale: tf.Tensor, wire_dtype: Any
) -> Gradient:
    """What `as_sent` was given, or a sum of it."""
    if wire_dtype is None:
        return gradient
    return of_values(gradient, lambda g: tf.cast(g, scale.dtype) / scale)


def _peak(gradient: Gradient) -> tf.Tensor:
    """The largest absolute element; 0 of no elements."""
    return tf.maximum(
        tf.reduce_max(tf.abs(values(gradient))), tf.zeros([], gradient.dtype)
    )


def float16_scale(peak: tf.Tensor) -> tf.Tensor:
    """The power of two that brings `peak` to about 2^14; else 1.

    Half of what float16 holds is left, for a logarithm that is not exact and
    for rounding up on the way.
    """
    exponent = tf.math.floor(tf.math.log(peak) / math.log(2.0))
    usable = tf.math.is_finite(peak) & (peak > 0)
    # 2^127 is the largest that float32 holds.
    wanted = tf.clip_by_value(13.0 - exponent, -126.0, 127.0)
    return tf.where(usable, tf.pow(tf.cast(2.0, peak.dtype), wanted), 1.0)


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """The L2 norm over all gradients, scalar float32 or wider."""
    halves = [
        tf.nn.l2_loss(tf.cast(values(g), accumulator_dtype(g.dtype)))
        for g in gradients
    ]
    widest = max((h.dtype for h in halves), key=lambda dtype: dtype.size)
    return tf.sqrt(2.0 * tf.add_n([tf.cast(h, widest) for h in halves]))


def all_finite(gradients: Sequence[Gradient], norm: tf.Tensor) -> tf.Tensor:
    """Whether every element of every gradient is finite, scalar bool.

    A finite norm proves it at no cost. Squares may overflow where the
    gradients do not, so only an infinite norm makes the elements be read.

    Args:
        gradients: tensors or IndexedSlices.
        norm: their `global_norm`.
    """
    return tf.cond(
        tf.math.is_finite(norm),
        lambda: tf.constant(True),
        lambda: tf.reduce_all(each_finite(gradients)),
    )


def each_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Which gradients are finite everywhere, bool [number of gradients]."""
    return tf.stack(
        [tf.reduce_all(tf.math.is_finite(values(g))) for g in gradients]
    )


def values(gradient: Gradient) -> tf.Tensor:
    """The gradient itself, or the rows that a sparse one holds."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient
