"""What a run tells while it trains: TensorBoard, throughput, curves.

All of them read `model.last_updates` when a batch ends. There, one train call
has left an entry for each of its updates: one, or `steps_per_execution`.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccum import strategy as strategies
from tfaccum.batching import check_count
from tfaccum.fingerprints import Fingerprints
from tfaccum.micro_step import is_counter
from tfaccum.window import Update

Clock = Callable[[], float]


class UpdateCallback(keras.callbacks.Callback):
    """Sorts the updates of a run: each update once, by its number.

    An update is new if it has raised the update counter. One that was skipped
    has not, nor has one of weight zero: they carry the number of the last
    update that was made, so they are counted and get no point of their own.
    Hence there is exactly one point per update, whatever was skipped.

    Attributes:
        num_updates: the update counter: `model.num_updates`.
        skipped_updates: updates of this run that were skipped so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped_updates = 0
        self.num_updates = 0

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Starts from the updates that the optimizer has made already."""
        self.skipped_updates = 0
        self.num_updates = self.model.num_updates

    def get_state(self) -> dict[str, Any]:
        """What a `tfaccum.Checkpoint` remembers of it, JSON values."""
        return {
            "num_updates": self.num_updates,
            "skipped_updates": self.skipped_updates,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes up what `get_state` has returned."""
        self.num_updates = state["num_updates"]
        self.skipped_updates = state["skipped_updates"]

    def made_updates(self) -> Iterable[Update]:
        """The new updates of the last train call, in order.

        While an update is being looked at, `skipped_updates` holds those
        skipped before it.
        """
        for update in self.model.last_updates:
            self.skipped_updates += update.skipped
            if update.update > self.num_updates:
                self.num_updates = update.update
                yield update


class TensorBoard(UpdateCallback):
    """Writes one point per update, and the metrics of each epoch.

    By update, in `log_dir/train`, at step = the update's number from 1:

    * `loss`: mean over the window, unscaled;
    * `learning_rate`: used for this update;
    * `gradient_norm`: of the reduced gradient, before clipping;
    * `loss_scale`: 1 without loss scaling;
    * `skipped_updates`: how many were skipped before this one;
    * `examples_per_second`: over all replicas and micro-steps, in the time
      since the last train call ended. Updates of one call share it, and the
      first call's includes tracing;
    * `input_wait`: the part of that time, in [0, 1], in which the chief waited
      for data.

    By epoch, as Keras names them: `epoch_<metric>` in `log_dir/train`, and
    those of validation, without their `val_`, in `log_dir/validation`.

    Args:
        log_dir: the directory for `tensorboard --logdir`.
        clock: seconds from any origin. Default `time.perf_counter`.

    Context: every worker has it, and only the chief writes.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike,
        *,
        clock: Clock = time.perf_counter,
    ):
        super().__init__()
        self._log_dir = os.fspath(log_dir)
        self._clock = clock
        self._since = 0.0
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Opens the event files."""
        super().on_train_begin(logs)
        worker, _ = strategies.worker_index(self.model.distribute_strategy)
        names = ("train", "validation") if worker == 0 else ()
        self._writers = {
            name: tf.summary.create_file_writer(
                os.path.join(self._log_dir, name)
            )
            for name in names
        }

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Starts the clock: validation is not training."""
        self._since = self._clock()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Writes the updates of the train call that has ended."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        rate = _rate(_examples(self.model), seconds)
        wait = _rate(_input_wait(self.model), seconds)
        for update in self.made_updates():
            self._write(
                "train",
                update.update,
                loss=update.loss,
                learning_rate=update.learning_rate,
                gradient_norm=update.gradient_norm,
                loss_scale=update.loss_scale,
                skipped_updates=self.skipped_updates,
                examples_per_second=rate,
                input_wait=wait,
            )

    def on_epoch_end(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Writes the metrics of the epoch."""
        train, validation = {}, {}
        for name, value in _scalars(logs).items():
            if name.startswith("val_"):
                validation[f"epoch_{name.removeprefix('val_')}"] = value
            else:
                train[f"epoch_{name}"] = value
        self._write("train", epoch, **train)
        self._write("validation", epoch, **validation)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write(self, writer: str, step: int, **values: float) -> None:
        if writer in self._writers:
            with self._writers[writer].as_default():
                for name, value in values.items():
                    tf.summary.scalar(name, value, step=step)


class Throughput(UpdateCallback):
    """Adds three numbers to the logs: progress bar and history.

    `examples/s` counts the examples of all replicas and micro-steps in this
    epoch, over wall time without validation. `input_wait` is the part of that
    time, in [0, 1], in which this worker waited for data. The first call of
    the train function traces, so it is left out once there is a second.
    `updates` is the number of updates made since the model was compiled.

    Callbacks that come later in the list find them in their logs.

    Args:
        clock: seconds from any origin. Default `time.perf_counter`.
    """

    def __init__(self, *, clock: Clock = time.perf_counter):
        super().__init__()
        self._clock = clock
        self._calls = 0
        self._since = 0.0
        self._epoch = self._finished = _NOTHING

    @property
    def examples_per_second(self) -> float:
        """Over all epochs so far."""
        return self._total.examples_per_second

    @property
    def input_wait(self) -> float:
        """Part of the time in which data were waited for, in [0, 1]."""
        return self._total.input_wait

    @property
    def _total(self) -> "_Work":
        return self._finished + self._epoch

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Forgets an earlier run."""
        super().on_train_begin(logs)
        self._calls = 0
        self._epoch = self._finished = _NOTHING

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Starts the epoch's clock."""
        if self._calls > 1:
            self._finished += self._epoch
        self._epoch = _NOTHING
        self._since = self._clock()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Counts the examples of the train call that has ended."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        call = _Work(_examples(self.model), seconds, _input_wait(self.model))
        self._epoch = call if self._calls < 2 else self._epoch + call
        self._calls += 1
        for _ in self.made_updates():
            pass
        self._add_to(logs)

    def on_epoch_end(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Adds them to the logs of the epoch."""
        self._add_to(logs)

    def _add_to(self, logs: dict[str, float] | None) -> None:
        if logs is not None:
            logs["examples/s"] = _Whole(self._epoch.examples_per_second)
            logs["input_wait"] = self._epoch.input_wait
            logs["updates"] = _Whole(self.num_updates)


class CompareReplicas(UpdateCallback):
    """Stops the run when two replicas do not hold the same weights.

    Every `every_updates` updates, and when training begins, each replica
    hashes each of its weights and optimizer variables (8 bytes a variable),
    and the hashes are gathered in one small collective. All replicas start
    equal and make the same updates, so that a difference means a broken
    device, link or library. Seeds and counters of the model are left out: a
    replica without examples in a micro-step does not move them.

    Args:
        every_updates: N >= 1. With several updates in a train call, the first
            call that has made at least N.

    Raises:
        TypeError: if `every_updates` is not an int.
        ValueError: if it is less than 1.
        RuntimeError: in training, on every worker, if replicas differ; names
            the first variable and the replicas.
    """

    def __init__(self, every_updates: int = 100):
        super().__init__()
        self._every_updates = check_count("every_updates", every_updates)
        self._compared_at = 0
        self._num_variables = 0
        self._fingerprints: Any = None

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Compares what training starts from."""
        super().on_train_begin(logs)
        self._compare()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Compares when enough updates have been made."""
        for _ in self.made_updates():
            pass
        if self.num_updates - self._compared_at >= self._every_updates:
            self._compare()

    def _compare(self) -> None:
        model = self.model
        variables = [v for v in model.variables if not is_counter(v)]
        if not model.makes_own_steps:
            variables += model.optimizer.variables
        # An optimizer makes its variables at its first update.
        if len(variables) != self._num_variables:
            self._num_variables = len(variables)
            self._fingerprints = Fingerprints(
                model.distribute_strategy, variables
            )
        self._compared_at = self.num_updates
        found = self._fingerprints()
        differs = (found != found[0]).any(axis=0)
        if differs.any():
            first = int(differs.argmax())
            others = (found[:, first] != found[0, first]).nonzero()[0].tolist()
            raise RuntimeError(
                "All replicas must hold the same weights. Received: after "
                f"update {self.num_updates}, {variables[first].path} of "
                f"replica(s) {others} differs from that of replica 0 "
                f"({int(differs.sum())} of {len(variables)} variables "
                "differ). A device, a link or a library is broken, or a "
                "callback has changed the weights of one replica only."
            )


class Curves(UpdateCallback):
    """Keeps the loss and the learning rate of every update, and plots them.

    Attributes:
        updates: the updates made in this run, in order.
        epochs: (number of the last update, logs) of every epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Update] = []
        self.epochs: list[tuple[int, dict[str, float]]] = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Forgets an earlier run."""
        super().on_train_begin(logs)
        self.updates, self.epochs = [], []

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Keeps the updates of the train call that has ended."""
        self.updates.extend(self.made_updates())

    def on_epoch_end(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Keeps the logs of the epoch."""
        self.epochs.append((self.num_updates, _scalars(logs)))

    def get_state(self) -> dict[str, Any]:
        """All updates and epochs so far, JSON values."""
        return super().get_state() | {
            "updates": [dataclasses.asdict(update) for update in self.updates],
            "epochs": self.epochs,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes up what `get_state` has returned."""
        super().set_state(state)
        self.updates = [Update(**update) for update in state["updates"]]
        self.epochs = [(number, logs) for number, logs in state["epochs"]]

    def as_dict(self) -> dict[str, list[float]]:
        """Lists of equal length: update, loss, learning_rate."""
        return {
            name: [getattr(update, name) for update in self.updates]
            for name in ("update", "loss", "learning_rate")
        }

    def plot(self, path: str | os.PathLike, title: str = "") -> None:
        """Draws loss and learning rate over updates into an image file.

        Args:
            path: of the file; its ending says which format.
            title: above the plot.
        """
        # Takes half a second, which a run without a plot need not spend.
        from matplotlib.figure import Figure

        curves = self.as_dict()
        figure = Figure(figsize=(8, 6), layout="constrained")
        losses, rates = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        losses.plot(
            *(curves[name] for name in ("update", "loss")),
            "C0",
            linewidth=1,
            alpha=0.35,
            label="each update",
        )
        for name, label, color in (
            ("loss", "mean of the epoch", "C0"),
            ("val_loss", "validation", "C1"),
        ):
            points = [
                (u, logs[name]) for u, logs in self.epochs if name in logs
            ]
            if points:
                losses.plot(
                    *zip(*points, strict=True),
                    f"{color}o-",
                    markersize=3,
                    label=label,
                )
        losses.legend()
        positive = [loss for loss in curves["loss"] if loss > 0]
        if len(positive) == len(curves["loss"]) > 0:
            losses.set_yscale("log")
        losses.set_ylabel("loss")
        losses.set_title(title, fontsize="medium")
        rates.plot(curves["update"], curves["learning_rate"], "C2")
        rates.set(xlabel="update", ylabel="learning rate")
        rates.set_ylim(bottom=0)
        for axes in (losses, rates):
            axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)


class _Whole(float):
    """A number that Keras' progress bar writes without decimals."""

    def __truediv__(self, other: Any) -> "_Whole":
        return _Whole(float(self) / other)

    def __format__(self, spec: str) -> str:
        return f"{float(self):.0f}"


def _examples(model: Any) -> int:
    """Examples of the last train call, over all replicas and micro-steps."""
    return sum(update.examples for update in model.last_updates)


def _input_wait(model: Any) -> float:
    """Seconds of the last train call in which data were waited for."""
    return sum(update.input_wait for update in model.last_updates)


def _scalars(logs: dict[str, Any] | None) -> dict[str, float]:
    """Without metrics that have a number for each class."""
    return {k: v for k, v in (logs or {}).items() if not np.ndim(v)}


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class _Work:
    """What some train calls have done, in which time."""

    examples: int
    seconds: float
    waited: float

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(
            self.examples + other.examples,
            self.seconds + other.seconds,
            self.waited + other.waited,
        )

    @property
    def examples_per_second(self) -> float:
        return _rate(self.examples, self.seconds)

    @property
    def input_wait(self) -> float:
        return _rate(self.waited, self.seconds)


_NOTHING = _Work(0, 0.0, 0.0)
