"""How far two runs of the same mathematics may differ, and why."""

import keras
import numpy as np
import tensorflow as tf


def tolerance(dtype, num_additions=1000):
    """Largest relative difference between two orders of the same sum.

    Adding n numbers in another order changes a sum by about sqrt(n) roundings
    of relative size 2**-mantissa. Updates repeat this a few times; 8 covers
    that. Two devices of one kind round alike, so that the device adds nothing
    on CPU.

    Args:
        dtype: of the sums, float32 or float64.
        num_additions: examples and replicas that meet in one sum.
    """
    mantissa = {tf.float32: 23, tf.float64: 52}[tf.as_dtype(dtype)]
    return 8 * num_additions**0.5 * 2.0**-mantissa


def masked_loss_dtype():
    """In which dtype Keras computes a masked loss of float64 values.

    Keras 3.10 goes through float32 there, whatever the values are, so that
    its own one big batch is no better than that.
    """
    y_pred = tf.constant([[1.0], [2.0], [4.0]], tf.float64)
    y_pred._keras_mask = tf.constant([True, True, False])
    loss = keras.losses.MeanSquaredError(dtype="float64")
    y_true = tf.constant([[0.1], [0.2], [0.0]], tf.float64)
    expected = (0.9**2 + 1.8**2) / 2
    found = float(loss(y_true, y_pred))
    exact = np.isclose(found, expected, rtol=1e-14, atol=0)
    # 3 / 2, the ratio of all to unmasked rows, is exact in float32 as well.
    y_pred = tf.constant(np.ones((7, 1)), tf.float64)
    y_pred._keras_mask = tf.constant([True] * 3 + [False] * 4)
    found = float(loss(tf.zeros_like(y_pred), y_pred))
    exact &= np.isclose(found, 1.0, rtol=1e-14, atol=0)
    return tf.float64 if exact else tf.float32
