"""Layers that know of the window: `WindowBatchNormalization`."""

from typing import Any

import keras
import tensorflow as tf

from tfaccum import keras_private, reduction
from tfaccum.micro_step import hand_over_statistics, is_in_window

# Sign, exponent and the first 12 significant bits of a float64.
_HEAD = -(1 << (52 - 11))


@keras.saving.register_keras_serializable("tfaccum")
class WindowBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization whose moving statistics move once per update.

    In place of `keras.layers.BatchNormalization` in a `tfaccum.Model`. At the
    end of a window, if its update is made,

        mean = sum(n * m) / sum(n)
        variance = sum(n * v) / sum(n) + sum(n * (m - mean)**2) / sum(n)
        moving_mean = momentum * moving_mean + (1 - momentum) * mean
        moving_variance = momentum * moving_variance + (1 - momentum) * variance

    where m, v and n are the mean, the variance and the number of elements of
    one micro-batch on one replica, and the sums run over all of them: what
    Keras' layer does with one big batch. Masked elements do not count, and a
    channel without elements in the whole window does not move.

    Inside the forward pass a micro-batch is still normalised with its own
    statistics, or with `synchronized=True` with those of all replicas' at
    this micro-step.

    Outside of a window (in Keras' own `fit`, or a loop of one's own) it is
    Keras' layer, and moves at every call.

    Args:
        *args: as in `keras.layers.BatchNormalization`.
        **kwargs: as in `keras.layers.BatchNormalization`, without `renorm`.

    State: `moving_mean` and `moving_variance`, [channels], as in Keras.

    Raises:
        ValueError: if `renorm` is set: its correction needs statistics that
            move at every micro-step.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances (1979); `BatchNormalization.call` in Keras.
    """

    # Inside a window nothing moves in the forward pass.
    has_forward_state = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if getattr(self, "renorm", False):
            raise ValueError(
                "`renorm` must be False. Received: renorm=True. Use "
                "keras.layers.BatchNormalization, whose statistics move at "
                "every micro-step."
            )

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """Normalises `inputs`; as in Keras.

        Args:
            inputs: float tensor of any rank, channels on `self.axis`.
            training: whether to use the statistics of `inputs`.
            mask: bool, one dimension less than `inputs`; True counts.

        Returns:
            Tensor of the shape of `inputs`, in `self.compute_dtype`.

        Context: any; in a window, replica.
        """
        if not (training and self.trainable and is_in_window()):
            return super().call(inputs, training=training, mask=mask)
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        inputs = keras.ops.cast(inputs, dtype)
        mean, variance = keras_private.batch_moments(self, inputs, mask)
        sums = self._sums(self._count(inputs, mask), mean, variance)
        hand_over_statistics(self, sums)
        outputs = keras.ops.batch_normalization(
            inputs,
            mean,
            variance,
            self.axis,
            offset=keras.ops.cast(self.beta, dtype) if self.center else None,
            scale=keras.ops.cast(self.gamma, dtype) if self.scale else None,
            epsilon=self.epsilon,
        )
        return keras.ops.cast(outputs, self.compute_dtype)

    def end_window(self, sums: list[tf.Tensor], keeps: tf.Tensor) -> None:
        """Moves the statistics once.

        Args:
            sums: what `call` has handed over, added up over the window and
                all replicas.
            keeps: bool scalar: whether the update is made.

        Context: replica; arguments and state are the same on each.
        """
        count, first, second = (_joined(parts) for parts in sums)
        mean = tf.math.divide_no_nan(first, count)
        variance = tf.math.divide_no_nan(second, count) - mean**2
        for variable, value in (
            (self.moving_mean, mean),
            (self.moving_variance, tf.maximum(variance, 0)),
        ):
            old = tf.convert_to_tensor(variable)
            dtype = reduction.accumulator_dtype(old.dtype)
            new = tf.cast(old, dtype) * self.momentum
            new += tf.cast(value, dtype) * (1.0 - self.momentum)
            moves = keeps & (count > 0)
            variable.assign(tf.where(moves, tf.cast(new, old.dtype), old))

    def _count(self, inputs: tf.Tensor, mask: Any) -> tf.Tensor:
        """Elements behind each mean, float64, [] or with a mask [channels]."""
        if mask is None:
            channels = self.moving_mean.shape[0]
            size = tf.size(inputs, tf.int64) // channels
        else:
            axes = list(range(inputs.shape.rank))
            del axes[self.axis]
            counts = tf.cast(mask, tf.bool)[..., tf.newaxis]
            counts = tf.broadcast_to(counts, tf.shape(inputs))
            size = tf.math.count_nonzero(counts, axes, dtype=tf.int64)
        return tf.cast(size, tf.float64)

    def _sums(
        self, count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
    ) -> list[tf.Tensor]:
        """[n, n * mean, n * mean of squares], ready to be added up."""
        # Keras drops the axis of a single channel where there is a mask.
        mean, variance = (
            tf.reshape(tf.cast(value, tf.float64), self.moving_mean.shape)
            for value in (mean, variance)
        )
        # Without elements both are NaN.
        products = (
            tf.math.multiply_no_nan(value, tf.broadcast_to(count, value.shape))
            for value in (mean, variance + mean**2)
        )
        return [_split(value) for value in (count, *products)]


def _split(value: tf.Tensor) -> tf.Tensor:
    """A float64 as three float32 that may be added up as if it was one.

    The difference of a mean of squares and a squared mean needs more digits
    than float32 has, and a float64 would need an all-reduce of its own. The
    first two parts have 12 significant bits, so that float32 adds up 4096 of
    them without an error where they are alike, and where they differ more than
    that little cancels; the third has what is left.

    Args:
        value: float64 [...].

    Returns:
        float32 [3, ...], whose sum is `value` up to 2**-48.
    """
    parts = []
    for _ in range(2):
        # By bits: a compiler may take a cast there and back for nothing.
        bits = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int64), _HEAD)
        head = tf.bitcast(bits, tf.float64)
        parts.append(tf.cast(head, tf.float32))
        value -= head
    return tf.stack([*parts, tf.cast(value, tf.float32)])


def _joined(parts: tf.Tensor) -> tf.Tensor:
    """The float64 of which `_split` has made these parts."""
    return tf.reduce_sum(tf.cast(parts, tf.float64), 0)
