"""The loss scale: one verdict per window, one move of the scale.

The scale lives in Keras' own `LossScaleOptimizer` (its public variables
`dynamic_scale` and `step_counter`), so that it is saved and restored with the
optimizer. Keras' `apply` is never called on it: that looks for non-finite
values on the first replica only and before the sum over replicas.
"""

import keras
import tensorflow as tf


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


def move(optimizer: keras.optimizers.Optimizer, finite: tf.Tensor) -> None:
    """Moves a dynamic scale once, after a window's verdict.

    A window with a non-finite gradient halves the scale; after
    `dynamic_growth_steps` finite windows in a row it doubles.

    Args:
        optimizer: any optimizer; without a dynamic scale nothing happens.
        finite: scalar bool, the same on every replica and worker.

    Context: cross-replica.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    scale = tf.convert_to_tensor(optimizer.dynamic_scale)
    good = tf.convert_to_tensor(optimizer.step_counter) + 1
    grow = finite & (good >= optimizer.dynamic_growth_steps)
    factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
    optimizer.dynamic_scale.assign(scale * factor)
    optimizer.step_counter.assign(tf.where(finite & ~grow, good, 0))
