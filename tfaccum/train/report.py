"""What a finished run leaves for people: table, summary.json, curves.png."""

import dataclasses
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfaccum
from tfaccum.batching import BatchPlan
from tfaccum.callbacks import Curves
from tfaccum.train.options import Options
from tfaccum.train.verify import Comparison

SUMMARY = "summary.json"
# In the logs for the progress bar, and in the results under other names.
_NOT_METRICS = ("examples/s", "input_wait", "updates")


@dataclasses.dataclass(frozen=True)
class Results:
    """What a run has come to.

    Attributes:
        history: Metrics by name, one value per epoch; validation's begin
            with `val_`.
        updates: Updates made.
        skipped_updates: Updates dropped because of non-finite gradients.
        examples_per_second: Over all replicas, without the first call.
        input_wait: Part of that time in which data were waited for, in [0, 1].
        accumulator_bytes: What the sums take on one replica.
        table_sums: How the gradient of each table is summed, and why.
        wall_time: Seconds, from the start of TensorFlow to the last epoch.
    """

    history: Mapping[str, list[float]]
    updates: int
    skipped_updates: int
    examples_per_second: float
    input_wait: float
    accumulator_bytes: int
    wall_time: float
    table_sums: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the last epoch."""
        return {
            name: values[-1]
            for name, values in self.history.items()
            if name not in _NOT_METRICS
        }


def table(results: Results, model_dir: Path) -> str:
    """The results, one a line."""
    rows = [(_title(name), f"{value:.4f}") for name, value in _sorted(results)]
    rows += [
        ("updates", f"{results.updates:,}"),
        ("skipped updates", f"{results.skipped_updates:,}"),
        ("examples/s", f"{results.examples_per_second:,.0f}"),
        ("waited for data", f"{100 * results.input_wait:.1f} % of the time"),
        ("accumulators", f"{results.accumulator_bytes:,} bytes per replica"),
        *(("sum of", text) for text in results.table_sums),
        ("wall time", f"{results.wall_time:.1f} s"),
        ("written to", str(model_dir)),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["", *(f"{name:{width}}{value}" for name, value in rows)])


def write(
    options: Options, plan: BatchPlan, results: Results, curves: Curves
) -> None:
    """Writes summary.json and curves.png."""
    summary = {
        "curves": curves.as_dict(),
        "epochs": results.history,
        "experiment": str(options.experiment),
        "flags": options.flags,
        "hardware": hardware(),
        "plan": {
            "description": plan.describe(),
            "global_batch_size": plan.global_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "micro_batch_size": plan.micro_batch_size,
            "num_replicas": plan.num_replicas,
        },
        "results": {
            **results.metrics,
            "accumulator_bytes": results.accumulator_bytes,
            "table_sums": list(results.table_sums),
            "examples_per_second": results.examples_per_second,
            "input_wait": results.input_wait,
            "skipped_updates": results.skipped_updates,
            "updates": results.updates,
            "wall_time": results.wall_time,
        },
        "versions": {
            "keras": keras.version(),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "tfaccum": tfaccum.__version__,
        },
    }
    _write_json(options.model_dir / SUMMARY, summary)
    curves.plot(
        options.model_dir / "curves.png",
        title=f"{options.experiment.stem}\n{plan.describe()}",
    )


def add_verification(model_dir: Path, comparison: Comparison) -> None:
    """Adds the comparison with one big batch to summary.json."""
    path = model_dir / SUMMARY
    summary = json.loads(path.read_text())
    summary["verification"] = {
        **dataclasses.asdict(comparison),
        "equal": comparison.equal,
    }
    _write_json(path, summary)


def hardware() -> str:
    """CPU, its number of cores as this process sees them, and GPUs."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        model = found[1] if found else model
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, {', '.join(gpus) or 'no GPU'}"


def _sorted(results: Results) -> list[tuple[str, float]]:
    """The loss first, training before validation."""
    return sorted(
        results.metrics.items(),
        key=lambda item: (
            item[0].startswith("val_"),
            not item[0].endswith("loss"),
            item[0],
        ),
    )


def _title(name: str) -> str:
    if name.startswith("val_"):
        return f"validation {name.removeprefix('val_')}"
    return f"final {name}" if name == "loss" else name


def _write_json(path: Path, value: Any) -> None:
    """Sorted keys, and lists of numbers on one line."""
    text = json.dumps(value, indent=2, sort_keys=True)
    text = re.sub(
        r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text
    )
    path.write_text(f"{text}\n")
