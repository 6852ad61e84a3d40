"""Per-replica sums of gradients and of their weights."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import reduction, update
from tfaccum.reduction import Gradient


def replica_variable(shape: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A zero variable of which every replica has a copy of its own.

    Assignments in replica context change the replica's own copy and
    communicate nothing.

    Context: cross-replica, under the strategy's scope.
    """
    return tf.Variable(
        lambda: tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.NONE,
    )


class ReplicaSums:
    """Running sums of a nest of tensors, one set per replica.

    Args:
        variables: nest of `replica_variable`s, one for each tensor.
    """

    def __init__(self, variables: Any):
        self.variables = variables

    @classmethod
    def zeros(cls, specs: Any) -> "ReplicaSums":
        """New sums.

        Args:
            specs: nest of `tf.TensorSpec` with full shapes: what will be
                added.

        Context: cross-replica, under the strategy's scope.
        """
        return cls(
            tf.nest.map_structure(
                lambda spec: replica_variable(
                    spec.shape, spec.dtype, "window_sum"
                ),
                specs,
            )
        )

    def add(self, tensors: Any) -> None:
        """Adds a nest of the same structure, cast to the sums' dtypes.

        IndexedSlices stay sparse. A narrower sum is added to once per row,
        however often the row occurs.

        Context: replica.
        """
        for total, tensor in zip(
            tf.nest.flatten(self.variables),
            tf.nest.flatten(tensors, expand_composites=False),
            strict=True,
        ):
            if isinstance(tensor, tf.IndexedSlices):
                if total.dtype.size < tensor.dtype.size:
                    tensor = reduction.combined(tensor)
                total.scatter_add(tf.cast(tensor, total.dtype))
            else:
                total.assign_add(tf.cast(tensor, total.dtype))

    def values(self) -> Any:
        """This replica's sums, a nest of float32 or wider. Context: replica."""
        return tf.nest.map_structure(
            lambda total: tf.cast(
                tf.identity(total), reduction.accumulator_dtype(total.dtype)
            ),
            self.variables,
        )

    def reset(self) -> None:
        """Sets this replica's sums to zero. Context: replica."""
        for total in tf.nest.flatten(self.variables):
            total.assign(tf.zeros_like(total))

    @property
    def num_bytes(self) -> int:
        """Bytes that one replica's sums take."""
        return sum(
            total.shape.num_elements() * total.dtype.size
            for total in tf.nest.flatten(self.variables)
        )


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

    Context: cross-replica, under the strategy's scope.

    State: one variable per trainable variable, of its shape and in float32
        (or its own dtype where that is wider), and one scalar, per replica.

    Raises:
        ValueError: if `variables` is empty.
        ValueError: if `wire_dtype` is not one of those.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable | tf.Variable],
        wire_dtype: str | None = None,
    ):
        reduction.check_wire_dtype(wire_dtype)
        self._wire_dtype = wire_dtype
        self._variables = list(variables)
        if not self._variables:
            raise ValueError(
                "`variables` must hold at least one variable. Received: "
                "variables=[]. Build the model before its accumulator."
            )
        dtypes = [reduction.accumulator_dtype(v.dtype) for v in self._variables]
        self._weight_dtype = max(dtypes, key=lambda dtype: dtype.size)
        self._sums = ReplicaSums.zeros(
            (
                [
                    tf.TensorSpec(v.shape, dtype)
                    for v, dtype in zip(self._variables, dtypes, strict=True)
                ],
                tf.TensorSpec([], self._weight_dtype),
            )
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
        """
        if len(gradients) != len(self._variables):
            raise ValueError(
                "`gradients` must hold one entry per variable. Received: "
                f"{len(gradients)} gradients for {len(self._variables)} "
                "variables. Pass None for a variable without gradient."
            )
        weight = tf.cast(weight, self._weight_dtype)
        products = [
            tf.zeros(v.shape, reduction.accumulator_dtype(v.dtype))
            if g is None
            else reduction.weighted(g, weight)
            for g, v in zip(gradients, self._variables, strict=True)
        ]
        self._sums.add((products, weight))

    def reduce(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The mean gradients over all micro-steps and replicas.

        Returns:
            A list of dense tensors, one per variable, and the total weight,
            a scalar. Both are the same on every replica; with a total weight
            of zero the gradients are zero.

        Context: replica. One group of all-reduces.
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
        """
        strategy = tf.distribute.get_strategy()
        with strategy.scope():
            update.build_optimizer(optimizer, self._variables)

        def mean_gradients() -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
            gradients, weight = self.reduce()
            self.reset()
            gradients, _, finite = update.judged(optimizer, gradients)
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
        """Bytes that the sums take on one replica."""
        return self._sums.num_bytes
