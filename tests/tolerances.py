"""How far two runs of the same mathematics may differ, and why."""

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
