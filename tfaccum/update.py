"""One update: clip, decay, apply, constraints, moving average.

Takes gradients that have been summed over the replicas, divided by their
weight and unscaled, and that are the same on every replica.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from tfaccum import keras_private, loss_scale, reduction
from tfaccum.reduction import Gradient


@runtime_checkable
class SearchingOptimizer(Protocol):
    """An optimizer that looks at the loss while it applies a gradient."""

    def apply_with_losses(
        self,
        strategy: tf.distribute.Strategy,
        gradients: Any,
        variables: Sequence[keras.Variable],
        losses: Callable[[], tf.Tensor],
    ) -> None:
        """Applies one reduced gradient, and counts it.

        Args:
            strategy: under which the optimizer was built.
            gradients: per-replica list, as in `apply_update`.
            variables: in the order of `gradients`.
            losses: runs the forward pass of the window's last micro-batch
                with the present weights: the mean loss over all replicas,
                float32 scalar. It changes nothing, not even the seeds of
                dropout.

        Context: cross-replica; conditions and loops have to enclose `losses`
            there.
        """


@runtime_checkable
class AbsorbingOptimizer(Protocol):
    """An optimizer that takes the gradient of each micro-batch at once.

    No sum of gradients is kept for it. At the end of a window `settle` is
    called, and then `apply` with a scalar zero for each gradient.
    """

    def absorb(
        self,
        parts: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Takes what one micro-batch adds to the gradient of its window.

        Args:
            parts: dense, unscaled, float32 or wider; one for each variable.
                Over all micro-steps and replicas they add up to the gradient.
            variables: of a built optimizer.

        Context: replica; communicates nothing. Not called where a replica has
            no rows.
        """

    def settle(self, variables: Sequence[keras.Variable]) -> None:
        """Makes what each replica has absorbed the same on all of them.

        Not called for a window without rows, or whose gradient is not finite.

        Args:
            variables: those that parts were absorbed for.

        Context: replica.
        """


def check_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    """Refuses an optimizer that would count or accumulate by itself.

    Raises:
        TypeError: if `optimizer` is not a Keras optimizer.
        ValueError: if it is a MultiOptimizer.
        ValueError: if `optimizer.gradient_accumulation_steps` is set.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`{name}` must be a keras.optimizers.Optimizer. Received: "
            f"{name}={optimizer!r} of type {type(optimizer).__name__}."
        )
    kind = type(loss_scale.unwrapped(optimizer)).__name__
    if kind == "MultiOptimizer":
        raise ValueError(
            f"`{name}` must be one optimizer. Received: {name}={kind}. Give "
            "each optimizer a window of its own: `self.accumulate(..., "
            "optimizer=..., variables=...)` in `train_step`."
        )
    steps = loss_scale.unwrapped(optimizer).gradient_accumulation_steps
    if steps:
        raise ValueError(
            f"`{name}.gradient_accumulation_steps` must not be set. Received: "
            f"{name}.gradient_accumulation_steps={steps}. Keras' own "
            "accumulation is wrong for ragged batches, short last windows and "
            "schedules. Write `model.compile(..., "
            f"gradient_accumulation_steps={steps})` instead."
        )


def check_home(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Refuses an optimizer that was made outside the model's strategy.

    Its counter would be one variable that every replica moves.

    Raises:
        ValueError: if there are several replicas, and the optimizer's
            variables do not belong to `strategy`.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    counter = loss_scale.unwrapped(optimizer).iterations.value
    home = getattr(counter, "distribute_strategy", None)
    if home is not strategy:
        raise ValueError(
            "`optimizer` must be made under the strategy of its model. "
            f"Received: optimizer={optimizer.name} made under "
            f"{type(home).__name__ if home else 'no strategy'}. Make it inside "
            "`with strategy.scope():`."
        )


def described(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Kind and settings of an optimizer, flat: plain values by name."""
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__}

    def add(prefix: str, config: dict[str, Any]) -> None:
        for name, value in config.items():
            if isinstance(value, dict):
                add(f"{prefix}.{name}", value)
            elif name != "name":  # Depends on what was made before.
                plain = value is None or isinstance(
                    value, bool | int | float | str
                )
                found[f"{prefix}.{name}"] = (
                    value if plain else type(value).__name__
                )

    try:
        add("optimizer", optimizer.get_config())
    except NotImplementedError:  # A schedule of the user's own, for instance.
        pass
    return found


def needs_losses(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer is a `SearchingOptimizer`."""
    return isinstance(loss_scale.unwrapped(optimizer), SearchingOptimizer)


def absorbs(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Whether the optimizer is an `AbsorbingOptimizer`."""
    return isinstance(loss_scale.unwrapped(optimizer), AbsorbingOptimizer)


def build_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> None:
    """Creates the optimizer's variables where that has not been done.

    Context: cross-replica, under the strategy's scope.
    """
    if not optimizer.built:
        with tf.init_scope():  # `GradientAccumulator.apply` may be traced.
            optimizer.build(list(variables))


def is_overwritten(variable: Any) -> bool:
    """Whether Keras takes the variable's gradient for its new value.

    So it is with the scales of float8. That value carries no loss scale, and
    is not averaged.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def judged(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
) -> tuple[list[Gradient], tf.Tensor, tf.Tensor]:
    """Unscales reduced gradients and looks whether they are finite.

    Args:
        optimizer: whose loss scale the gradients carry.
        gradients: reduced over the replicas; at least one.
        variables: in the order of `gradients`.

    Returns:
        (gradients, their global norm, whether all elements are finite). Values
        that overwrite a variable are not in the norm.

    Context: replica.
    """
    are_values = [is_overwritten(v) for v in variables]
    scale = loss_scale.current_scale(optimizer)
    if scale is not None:
        gradients = [
            g if is_value else reduction.divided(g, scale)
            for g, is_value in zip(gradients, are_values, strict=True)
        ]
    counted = [
        g
        for g, is_value in zip(gradients, are_values, strict=True)
        if not is_value
    ]
    norm = reduction.global_norm(counted)
    finite = reduction.all_finite(counted, norm)
    if any(are_values):
        finite &= tf.reduce_all(reduction.each_finite(gradients))
    return list(gradients), norm, finite


def update_if(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    gradients: Any,
    variables: Sequence[keras.Variable],
    finite: tf.Tensor,
    has_weight: tf.Tensor,
    *,
    applies_nonfinite: bool = False,
    floor: float = loss_scale.LossScale.floor,
    losses: Callable[[], tf.Tensor] | None = None,
    combine_changes: Callable[[Any], Any] | None = None,
) -> None:
    """Applies a good gradient; moves the loss scale once either way.

    Args:
        strategy: under which the optimizer was built.
        optimizer: a built Keras optimizer, with its loss scale if any.
        gradients: as in `apply_update`.
        variables: the variables in the order of `gradients`.
        finite: scalar bool: the verdict on the gradients.
        has_weight: scalar bool: whether the window's weight is not zero;
            otherwise nothing happened that could be judged.
        applies_nonfinite: whether a bad gradient is applied all the same.
        floor: of the loss scale.
        losses: as in `apply_update`.
        combine_changes: as in `apply_update`.

    Context: cross-replica.
    """
    good = has_weight if applies_nonfinite else finite & has_weight
    only_if(
        good,
        lambda: apply_update(
            strategy,
            optimizer,
            gradients,
            variables,
            losses,
            combine_changes,
        ),
    )
    only_if(has_weight, lambda: loss_scale.move(optimizer, finite, floor))


def only_if(condition: tf.Tensor, action: Callable[[], None]) -> None:
    """Runs `action` where `condition` (bool scalar) holds."""

    def branch() -> tf.Tensor:
        action()
        return tf.constant(True)

    tf.cond(condition, branch, lambda: tf.constant(False))


def apply_update(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    gradients: Any,
    variables: Sequence[keras.Variable],
    losses: Callable[[], tf.Tensor] | None = None,
    combine_changes: Callable[[Any], Any] | None = None,
) -> None:
    """Applies one reduced gradient with a Keras optimizer.

    In this order: clipping, weight decay, the optimizer's own step,
    constraints, `iterations += 1`, moving average. Communicates nothing,
    but for a `SearchingOptimizer`, what was absorbed, and `combine_changes`.

    Args:
        strategy: under which the optimizer was built.
        optimizer: a built Keras optimizer; its loss scale is not looked at.
        gradients: per-replica list, one tensor or IndexedSlices per variable,
            the same on every replica. None: the optimizer has absorbed them.
        variables: the variables in the order of `gradients`.
        losses: what a `SearchingOptimizer` needs.
        combine_changes: where each replica has gradients of its own: makes
            one list of changes, one tensor per variable, of what each one's
            step has changed. Context: replica.

    Context: cross-replica.

    Raises:
        ValueError: if the optimizer needs `losses`, and there are none.
    """
    optimizer = loss_scale.unwrapped(optimizer)
    if isinstance(optimizer, SearchingOptimizer):
        if losses is None:
            raise ValueError(
                "`optimizer` must not search along a line where there is no "
                f"loss to look at. Received: {type(optimizer).__name__}. Train "
                "with `tfaccum.Model.fit`."
            )
        optimizer.apply_with_losses(strategy, gradients, variables, losses)
    else:
        before = combine_changes and strategy.run(_values, args=(variables,))
        if gradients is None:
            strategy.run(optimizer.settle, args=(variables,))
            gradients = [tf.zeros([])] * len(variables)
        with keras_private.reduced_gradients_only(optimizer):
            strategy.run(
                lambda gradients: optimizer.apply(gradients, list(variables)),
                args=(gradients,),
            )
        if combine_changes:
            strategy.run(_combine, args=(combine_changes, before, variables))
    if optimizer.use_ema:
        strategy.run(_move_averages, args=(optimizer, variables))


def _values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.identity(v.value) for v in variables]


def _combine(
    combine_changes: Callable[[Any], Any],
    before: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """Moves all replicas' weights by what was made of each one's changes."""
    changes = combine_changes(
        [
            tf.identity(v.value) - old
            for v, old in zip(variables, before, strict=True)
        ]
    )
    for variable, old, change in zip(variables, before, changes, strict=True):
        value = old + change
        if variable.constraint is not None:
            value = variable.constraint(value)
        variable.assign(value)


def _move_averages(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Keras' moving average of the weights, moved after the constraints.

    Keras moves it before them, so that it averages values that were never
    used. Without constraints the two are the same, to the bit. All averages
    move; only `variables`, those that train, are overwritten with theirs.
    """
    trained = {id(variable) for variable in variables}
    first = tf.equal(tf.convert_to_tensor(optimizer.iterations), 1)
    frequency = optimizer.ema_overwrite_frequency
    for variable, average in keras_private.moving_averages(optimizer):
        value = tf.convert_to_tensor(variable)
        momentum = tf.where(
            first,
            tf.zeros([], value.dtype),
            tf.constant(optimizer.ema_momentum, value.dtype),
        )
        moved = (
            momentum * tf.convert_to_tensor(average) + (1 - momentum) * value
        )
        average.assign(moved)
        if frequency and id(variable) in trained:
            due = tf.equal(
                tf.convert_to_tensor(optimizer.iterations) % frequency, 0
            )
            variable.assign(tf.where(due, moved, value))
