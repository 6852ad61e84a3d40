"""Whether all replicas hold the same values, at the cost of 8 bytes each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfaccum import reduction

# Odd, so that the product with it loses nothing (2^64 / golden ratio).
_MULTIPLIER = -7046029254386353131
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def fingerprint(value: tf.Tensor) -> tf.Tensor:
    """A hash of a tensor's bits, scalar int64.

    The sum of all elements' bits, each times an odd number of its own, modulo
    2^64: a change of one element always changes it, and a change of several
    almost always.

    Args:
        value: numeric or bool, any shape.
    """
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.int8)
    bits = tf.reshape(tf.bitcast(value, _INTEGERS[value.dtype.size]), [-1])
    odd = 2 * tf.range(tf.size(bits, tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(tf.cast(bits, tf.int64) * (odd * _MULTIPLIER))


class Fingerprints:
    """The hashes of variables on every replica of every worker.

    Args:
        strategy: under which the variables were made.
        variables: Keras or TensorFlow variables.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Sequence[Any]
    ):
        self._variables = list(variables)
        self._strategy = strategy
        self._gather = tf.function(self._gathered, autograph=False)

    def __call__(self) -> np.ndarray:
        """int64 [replicas, variables], the same on every worker.

        One small collective; all workers have to ask.
        """
        local = self._strategy.experimental_local_results(self._gather())
        return local[0].numpy()

    def _gathered(self) -> Any:
        return self._strategy.run(self._of_replica)

    def _of_replica(self) -> tf.Tensor:
        return reduction.from_each_replica(
            tf.stack(
                [fingerprint(tf.convert_to_tensor(v)) for v in self._variables]
            )
        )
