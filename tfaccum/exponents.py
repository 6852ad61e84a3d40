"""How large gradients are: counts by power of two, as float16 sees them.

float16 holds numbers from 2**-24 (the least subnormal) to just below 2**16.
A loss scale is right when few gradients lie outside.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfaccum import reduction
from tfaccum.reduction import Gradient

LEAST, MOST = -24, 15  # exponents of float16
# Zero, below float16, one for each exponent, above float16 or not finite.
NUM_BINS = MOST - LEAST + 4


def count(gradient: Gradient) -> tf.Tensor:
    """Elements of a gradient by exponent.

    Args:
        gradient: float tensor of any shape, or IndexedSlices (rows that are
            not held are not counted).

    Returns:
        float32 [NUM_BINS].
    """
    values = tf.cast(tf.reshape(reduction.values(gradient), [-1]), tf.float32)
    bits = tf.bitcast(tf.abs(values), tf.int32)
    exponent = tf.bitwise.right_shift(bits, 23) - 127
    bins = tf.clip_by_value(exponent - LEAST + 2, 1, NUM_BINS - 1)
    bins = tf.where(values == 0, 0, bins)
    # XLA does not compile tf.math.bincount.
    counts = tf.math.unsorted_segment_sum(tf.ones_like(bins), bins, NUM_BINS)
    return tf.cast(counts, tf.float32)


@dataclasses.dataclass(frozen=True)
class Exponents:
    """Exponents of the scaled gradients of one window, over all replicas.

    Attributes:
        paths: of the variables.
        counts: float32 [variables, NUM_BINS]: elements of all micro-steps'
            gradients by exponent.
    """

    paths: Sequence[str]
    counts: np.ndarray

    @property
    def underflow(self) -> np.ndarray:
        """Fraction that is zero or below float16, by variable.

        Under mixed_float16 what fell below float16 is zero already. Some
        zeros are true ones, behind a ReLU for instance: compare with a larger
        loss scale.
        """
        return self.counts[:, :2].sum(1) / self._totals

    @property
    def overflow(self) -> np.ndarray:
        """Fraction that is above float16 or not finite, by variable."""
        return self.counts[:, -1] / self._totals

    @property
    def _totals(self) -> np.ndarray:
        return np.maximum(self.counts.sum(1), 1)

    @property
    def edges(self) -> np.ndarray:
        """Powers of two between which the bins lie, float64 [NUM_BINS + 1].

        The bin of zeros is drawn one power below that of tiny numbers.
        """
        return np.arange(LEAST - 2, MOST + 3, dtype=np.float64)
