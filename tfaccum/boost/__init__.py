"""Algorithms beside the exact update: what they change is said of each.

`import tfaccum.boost` before loading a model that was saved with one of them.
"""

from tfaccum.adasum import AdaSum
from tfaccum.boost.gradient_centralization import (
    Centralized,
    centralized,
    kernels,
)
from tfaccum.boost.gradient_freeze import GradientFreeze
from tfaccum.boost.less_bn import LessBN, NormalizedHead, with_less_bn

__all__ = [
    "AdaSum",
    "Centralized",
    "GradientFreeze",
    "LessBN",
    "NormalizedHead",
    "centralized",
    "kernels",
    "with_less_bn",
]
