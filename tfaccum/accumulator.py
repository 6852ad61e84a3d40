"""Per-replica sums of gradients and of their weights."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import reduction, update
from tfaccum.reduction import Gradient
from tfaccum.sparse import SparseSpec, combined, zeros


def replica_variable(shape: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A zero variable of which every replica has a copy of its own.

    Assignments in replica context change the replica's own copy and
    communicate nothing.

    Args:
        shape: an axis that is None is empty at first, and of any size later.
        dtype: of the values.
        name: of the variable.

    Context: cross-replica, under the strategy's scope.
    """
    return tf.Variable(
        lambda: tf.zeros([size or 0 for size in shape], dtype),
        trainable=False,
        name=name,
        shape=shape,
        aggregation=tf.VariableAggregation.NONE,
    )


class DenseSum:
    """A running sum of tensors on each replica.

    Args:
        spec: of what will be added, with its full shape.

    Context: cross-replica, under the strategy's scope.
    """

    def __init__(self, spec: tf.TensorSpec):
        self._total = replica_variable(spec.shape, spec.dtype, "window_sum")

    def add(self, tensor: Gradient) -> None:
        """Adds a tensor or IndexedSlices. Context: replica.

        A sum that is narrower is added to once per row, however often the row
        occurs.
        """
        total = self._total
        if isinstance(tensor, tf.IndexedSlices):
            if total.dtype.size < tensor.dtype.size:
                tensor = combined(tensor)
            total.scatter_add(tf.cast(tensor, total.dtype))
        else:
            total.assign_add(tf.cast(tensor, total.dtype))

    def value(self, plus: Gradient | None = None) -> tf.Tensor:
        """This replica's sum, float32 or wider. Context: replica.

        Args:
            plus: what is added to it here, and not kept.
        """
        total = self._total
        value = tf.cast(
            tf.identity(total), reduction.accumulator_dtype(total.dtype)
        )
        if plus is None:
            return value
        return value + tf.cast(tf.convert_to_tensor(plus), value.dtype)

    def reset(self) -> None:
        """Sets this replica's sum to zero. Context: replica."""
        self._total.assign(tf.zeros_like(self._total))

    @property
    def num_bytes(self) -> int:
        """Bytes that the sum takes on one replica."""
        return self._total.shape.num_elements() * self._total.dtype.size


class SparseSum:
    """A running sum of IndexedSlices: each replica's rows, each of them once.

    It holds the rows that have been added since the last `reset`, and their
    indices. Each `add` makes them anew, with twice the memory for a moment.

    Args:
        spec: of what will be added.

    Context: cross-replica, under the strategy's scope.
    """

    def __init__(self, spec: SparseSpec):
        self._strategy = tf.distribute.get_strategy()
        self._shape = spec.shape
        self._values = replica_variable(
            [None, *spec.shape[1:]], spec.dtype, "window_sum_rows"
        )
        self._indices = replica_variable([None], tf.int64, "window_sum_indices")
        self._most = replica_variable([], tf.int64, "window_sum_most_rows")

    def add(self, slices: tf.IndexedSlices) -> None:
        """Adds IndexedSlices; rows that it already has are added up.

        In float32 or wider, and rounded to the sum's dtype once.

        Context: replica.

        Raises:
            ValueError: if they are a tensor.
        """
        if not isinstance(slices, tf.IndexedSlices):
            raise ValueError(
                "The gradient of a sparse variable must be IndexedSlices. "
                f"Received: a tensor of shape {slices.shape}."
            )
        total = self.value(slices)
        self._values.assign(tf.cast(total.values, self._values.dtype))
        self._indices.assign(total.indices)
        self._most.assign(
            tf.maximum(self._most, tf.size(total.indices, tf.int64))
        )

    def value(self, plus: tf.IndexedSlices | None = None) -> tf.IndexedSlices:
        """This replica's sum, float32 or wider. Context: replica.

        Args:
            plus: what is added to it here, and not kept.
        """
        dtype = reduction.accumulator_dtype(self._values.dtype)
        held = tf.IndexedSlices(
            tf.cast(tf.identity(self._values), dtype),
            tf.identity(self._indices),
            tf.constant(self._shape.as_list(), tf.int64),
        )
        if plus is None:
            return held
        dtype = max((dtype, plus.dtype), key=lambda dtype: dtype.size)
        return combined(
            tf.IndexedSlices(
                tf.concat([tf.cast(s.values, dtype) for s in (held, plus)], 0),
                tf.concat(
                    [tf.cast(s.indices, tf.int64) for s in (held, plus)], 0
                ),
                held.dense_shape,
            )
        )

    def reset(self) -> None:
        """Lets go of all rows of this replica. Context: replica."""
        # Grappler takes the shape that is assigned to a variable for its shape
        # in the whole function, if it can tell, and folds what depends on it.
        none = tf.minimum(self._most, 0)
        self._values.assign(self._values[:none])
        self._indices.assign(self._indices[:none])

    @property
    def num_bytes(self) -> int:
        """The most bytes that the sum has taken so far on one replica."""
        copies = self._strategy.experimental_local_results(self._most)
        row = self._shape[1:].num_elements() * self._values.dtype.size
        return max(map(int, copies)) * (row + tf.int64.size)


class ReplicaSums:
    """Running sums of a nest of tensors, one set per replica.

    Args:
        parts: nest of `DenseSum` and `SparseSum`, one for each tensor.
    """

    def __init__(self, parts: Any):
        self.parts = parts

    @classmethod
    def zeros(cls, specs: Any) -> "ReplicaSums":
        """New sums.

        Args:
            specs: nest of `tf.TensorSpec` with full shapes: what will be
                added. A `SparseSpec` makes a sum of the rows touched.

        Context: cross-replica, under the strategy's scope.
        """
        return cls(
            tf.nest.map_structure(
                lambda spec: (
                    SparseSum(spec)
                    if isinstance(spec, SparseSpec)
                    else DenseSum(spec)
                ),
                specs,
            )
        )

    def add(self, tensors: Any) -> None:
        """Adds a nest of the same structure, cast to the sums' dtypes.

        Context: replica.
        """
        for part, tensor in zip(
            tf.nest.flatten(self.parts),
            tf.nest.flatten(tensors, expand_composites=False),
            strict=True,
        ):
            part.add(tensor)

    def values(self, plus: Any = None) -> Any:
        """This replica's sums, a nest of float32 or wider. Context: replica.

        Args:
            plus: a nest as for `add`, added here and not kept; None: nothing.
        """
        parts = tf.nest.flatten(self.parts)
        added = [None] * len(parts)
        if plus is not None:
            added = tf.nest.flatten(plus, expand_composites=False)
        return tf.nest.pack_sequence_as(
            self.parts,
            [
                part.value(tensor)
                for part, tensor in zip(parts, added, strict=True)
            ],
        )

    def reset(self) -> None:
        """Sets this replica's sums to zero. Context: replica."""
        for part in tf.nest.flatten(self.parts):
            part.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes that one replica's sums take, at most so far."""
        return sum(part.num_bytes for part in tf.nest.flatten(self.parts))


class GradientAccumulator:
    """Sums of weighted gradients over micro-steps, for a loop of one's own.

    `add` K times on every replica, then `reduce` gives

        sum(weight * gradient) / sum(weight)

    over all micro-steps and replicas, with one all-reduce. `tfaccum.Model`
    does the same for `fit`.

        accumulator = tfaccum.GradientAccumulator(model.trainable_variables)

        def micro_step(x, y):                        # strategy.run(micro_step)
            with tf.GradientTape() as tape:
                loss = mean_loss(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            accumulator.add(gradients, weight=tf.shape(x)[0])

        accumulator.apply(optimizer)                 # every K micro-steps

    Args:
        variables: the trainable variables, in the order of the gradients.
        wire_dtype: as in `tfaccum.Model.compile`.
        sparse_variables: those among `variables` whose gradients are always
            IndexedSlices, and summed in the rows touched.

    Context: cross-replica, under the strategy's scope.

    State: one variable per trainable variable, of its shape and in float32
        (or its own dtype where that is wider), and one scalar, per replica.
        For a sparse variable the rows that were added, and their indices.

    Raises:
        ValueError: if `variables` is empty, or a sparse one not among them.
        ValueError: if a variable is overwritten with its gradient (float8).
        ValueError: if `wire_dtype` is not one of those.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable | tf.Variable],
        wire_dtype: str | None = None,
        sparse_variables: Sequence[keras.Variable | tf.Variable] = (),
    ):
        reduction.check_wire_dtype(wire_dtype)
        self._wire_dtype = wire_dtype
        self._variables = list(variables)
        if not self._variables:
            raise ValueError(
                "`variables` must hold at least one variable. Received: "
                "variables=[]. Build the model before its accumulator."
            )
        if values := [v for v in self._variables if update.is_overwritten(v)]:
            raise ValueError(
                "`variables` must have a mean gradient, which scales of float8 "
                f"have not. Received: variables with {values[0].path}. Use the "
                "dtype policy 'mixed_bfloat16'."
            )
        ids = [id(v) for v in self._variables]
        chosen = [id(v) for v in sparse_variables]
        if unknown := [i for i, v in enumerate(chosen) if v not in ids]:
            raise ValueError(
                "`sparse_variables` must be among `variables`. Received: "
                f"sparse_variables with others at {unknown}."
            )
        dtypes = [reduction.accumulator_dtype(v.dtype) for v in self._variables]
        self._weight_dtype = max(dtypes, key=lambda dtype: dtype.size)
        self._specs = [
            SparseSpec(tf.TensorShape(v.shape), dtype)
            if id(v) in chosen
            else tf.TensorSpec(v.shape, dtype)
            for v, dtype in zip(self._variables, dtypes, strict=True)
        ]
        self._sums = ReplicaSums.zeros(
            (self._specs, tf.TensorSpec([], self._weight_dtype))
        )

    def add(
        self, gradients: Sequence[Gradient | None], weight: Any = 1.0
    ) -> None:
        """Adds the gradients of one micro-batch's mean loss.

        Args:
            gradients: one per variable, of its shape; None counts as zero.
            weight: scalar, >= 0: the number that the loss's mean was divided
                by (examples, unmasked tokens, sum of sample weights).

        Context: replica. Communicates nothing.

        Raises:
            ValueError: if there is not one gradient per variable.
            ValueError: if that of a sparse variable is dense.
        """
        if len(gradients) != len(self._variables):
            raise ValueError(
                "`gradients` must hold one entry per variable. Received: "
                f"{len(gradients)} gradients for {len(self._variables)} "
                "variables. Pass None for a variable without gradient."
            )
        weight = tf.cast(weight, self._weight_dtype)
        products = [
            zeros(spec) if g is None else reduction.weighted(g, weight)
            for g, spec in zip(gradients, self._specs, strict=True)
        ]
        self._sums.add((products, weight))

    def reduce(self) -> tuple[list[Gradient], tf.Tensor]:
        """The mean gradients over all micro-steps and replicas.

        Returns:
            A list of dense tensors, one per variable (IndexedSlices, with
            each index once, for the sparse ones), and the total weight, a
            scalar. Both are the same on every replica; with a total weight of
            zero the gradients are zero.

        Context: replica. One group of all-reduces, and one of gatherings.
        """
        sums, weight = self._sums.values()
        totals, weight = reduction.all_reduce_gradients(
            sums, weight, self._wire_dtype
        )
        return [reduction.divided(t, weight) for t in totals], weight

    def reset(self) -> None:
        """Sets all sums to zero. Context: replica."""
        self._sums.reset()

    def apply(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
        """Reduces, applies once with `optimizer`, and resets.

        An update whose gradient is not finite, or whose weight is zero, is
        skipped: not one bit of weights or optimizer changes. For an optimizer
        with a loss scale, `add` the gradients of the loss as scaled by
        `optimizer.scale_loss`; they are unscaled here, and the scale moves.

        Args:
            optimizer: a Keras optimizer.

        Returns:
            Scalar bool: whether the update was made.

        Context: cross-replica.

        Raises:
            TypeError: if `optimizer` is not a Keras optimizer.
            ValueError: if it accumulates by itself, or is a MultiOptimizer.
            ValueError: if it was made outside the strategy.
        """
        strategy = tf.distribute.get_strategy()
        update.check_optimizer(optimizer)
        update.check_home(optimizer, strategy)
        with strategy.scope():
            update.build_optimizer(optimizer, self._variables)

        def mean_gradients() -> tuple[list[Gradient], tf.Tensor, tf.Tensor]:
            gradients, weight = self.reduce()
            self.reset()
            gradients, _, finite = update.judged(
                optimizer, gradients, self._variables
            )
            return gradients, finite, weight > 0

        gradients, finite, has_weight = strategy.run(mean_gradients)
        finite, has_weight = (
            strategy.experimental_local_results(flag)[0]
            for flag in (finite, has_weight)
        )
        update.update_if(
            strategy, optimizer, gradients, self._variables, finite, has_weight
        )
        return finite & has_weight

    @property
    def num_bytes(self) -> int:
        """Bytes that the sums take on one replica, at most so far."""
        return self._sums.num_bytes
