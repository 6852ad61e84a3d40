"""tfaccum: exact gradient accumulation for Keras on TensorFlow."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfaccum import versions

if TYPE_CHECKING:
    from tfaccum.accumulator import GradientAccumulator
    from tfaccum.adama import AdamA
    from tfaccum.agreement import WorkerError
    from tfaccum.auto_micro_batch import AutoMicroBatch
    from tfaccum.batching import BatchPlan
    from tfaccum.checkpoint import Checkpoint, load
    from tfaccum.group_loss_scale import GroupLossScale
    from tfaccum.loss_scale import LossScale
    from tfaccum.model import Model
    from tfaccum.run import Preempted
    from tfaccum.strategy import make_strategy
    from tfaccum.window import Update

__version__ = "0.1.0"

__all__ = [
    "AdamA",
    "AutoMicroBatch",
    "BatchPlan",
    "Checkpoint",
    "GradientAccumulator",
    "GroupLossScale",
    "LossScale",
    "Model",
    "Preempted",
    "Update",
    "WorkerError",
    "load",
    "make_strategy",
]

_HOMES = {
    "AdamA": "adama",
    "AutoMicroBatch": "auto_micro_batch",
    "BatchPlan": "batching",
    "Checkpoint": "checkpoint",
    "GradientAccumulator": "accumulator",
    "GroupLossScale": "group_loss_scale",
    "LossScale": "loss_scale",
    "Model": "model",
    "Preempted": "run",
    "Update": "window",
    "WorkerError": "agreement",
    "load": "checkpoint",
    "make_strategy": "strategy",
}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module of the package, on first use."""
    if name in _HOMES:
        module = importlib.import_module(f"tfaccum.{_HOMES[name]}")
        return getattr(module, name)
    if name in ("boost", "data", "layers"):
        return importlib.import_module(f"tfaccum.{name}")
    raise AttributeError(f"module 'tfaccum' has no attribute {name!r}")


def _is_command() -> bool:
    """Whether Python was started to run one of the package's commands."""
    return (
        Path(sys.argv[0]).name.startswith("tfaccum-")
        or "tfaccum.train" in sys.orig_argv
        or "tfaccum.launch" in sys.orig_argv
    )


versions.check()
# Keras finds the classes of a saved model only once they have been imported.
# A command does without, to refuse a mistyped flag before TensorFlow takes
# seconds to start.
if not _is_command():
    importlib.import_module("tfaccum.model")
