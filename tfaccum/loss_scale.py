"""The loss scale: one verdict per window, one move of the scale.

The scale lives in Keras' own `LossScaleOptimizer` (its public variables
`dynamic_scale` and `step_counter`), so that it is saved and restored with the
optimizer. Keras' `apply` is never called on it: that looks for non-finite
values on the first replica only and before the sum over replicas.
"""

import dataclasses

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """How a dynamic loss scale moves.

    A window with a non-finite gradient halves the scale and makes no update;
    after `growth_interval` good updates in a row it doubles.

    Args:
        initial: the first scale, > 0.
        growth_interval: good updates until the scale doubles, >= 1.
        floor: the scale never falls below it, > 0 and at most `initial`. The
            default leaves room far below 1: a loss may be large by itself.

    Raises:
        ValueError: if a value is out of its range.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    floor: float = 2.0**-14

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.growth_interval < 1:
            raise ValueError(
                "`growth_interval` must be at least 1. Received: "
                f"growth_interval={self.growth_interval}."
            )
        if not 0 < self.floor <= self.initial:
            raise ValueError(
                "`floor` must be positive and at most `initial`. Received: "
                f"floor={self.floor}, initial={self.initial}."
            )


def unwrapped(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """The optimizer that updates weights, without its loss scale."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def current_scale(
    optimizer: keras.optimizers.Optimizer,
) -> tf.Tensor | float | None:
    """What the loss is multiplied by: scalar, or None for no scaling.

    Constant inside a window.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.convert_to_tensor(optimizer.dynamic_scale)
    return optimizer.loss_scale_factor


def with_scale(
    optimizer: keras.optimizers.Optimizer,
    scale: LossScale | float | None,
) -> keras.optimizers.Optimizer:
    """The optimizer with this loss scale and no other.

    Args:
        optimizer: with or without a loss scale of its own.
        scale: a dynamic one, a fixed number, or None for none.
    """
    inner = unwrapped(optimizer)
    inner.loss_scale_factor = None
    if isinstance(scale, LossScale):
        return keras.optimizers.LossScaleOptimizer(
            inner,
            initial_scale=scale.initial,
            dynamic_growth_steps=scale.growth_interval,
            name="loss_scale_optimizer",
        )
    inner.loss_scale_factor = scale
    return inner


def move(
    optimizer: keras.optimizers.Optimizer,
    finite: tf.Tensor,
    floor: float = LossScale.floor,
) -> None:
    """Moves a dynamic scale once, after a window's verdict.

    Args:
        optimizer: any optimizer; without a dynamic scale nothing happens.
        finite: scalar bool, the same on every replica and worker.
        floor: the least scale.

    Context: cross-replica.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    good = tf.convert_to_tensor(optimizer.step_counter) + 1
    grow = finite & (good >= optimizer.dynamic_growth_steps)
    factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
    # A scale that starts below the floor stays where it is.
    lowest = tf.minimum(scale, floor)
    optimizer.dynamic_scale.assign(tf.maximum(scale * factor, lowest))
    optimizer.step_counter.assign(tf.where(finite & ~grow, good, 0))
