"""Algorithms beside the exact update: what they change is said of each.

`import tfaccum.boost` before loading a model that was saved with one of them.
"""

from tfaccum.adasum import AdaSum
from tfaccum.boost.auto_boost import AutoBoost
from tfaccum.boost.basis import Basis
from tfaccum.boost.dim_reduce import DimReduce
from tfaccum.boost.gradient_centralization import (
    Centralized,
    centralized,
    kernels,
)
from tfaccum.boost.gradient_freeze import GradientFreeze
from tfaccum.boost.less_bn import LessBN, NormalizedHead, with_less_bn
from tfaccum.boost.trajectory import RecordTrajectory, principal_basis

__all__ = [
    "AdaSum",
    "AutoBoost",
    "Basis",
    "Centralized",
    "DimReduce",
    "GradientFreeze",
    "LessBN",
    "NormalizedHead",
    "RecordTrajectory",
    "centralized",
    "kernels",
    "principal_basis",
    "with_less_bn",
]
