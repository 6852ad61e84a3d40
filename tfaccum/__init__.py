"""tfaccum: exact gradient accumulation for Keras on TensorFlow."""

from tfaccum.accumulator import GradientAccumulator
from tfaccum.batching import BatchPlan
from tfaccum.model import Model
from tfaccum.strategy import make_strategy
from tfaccum.window import Update

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "GradientAccumulator",
    "Model",
    "Update",
    "make_strategy",
]
