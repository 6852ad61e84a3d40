"""A run that was ended at any moment goes on as if it had not been.

What a checkpoint holds is in `tfaccum.state`, how it lies on the disk in
`tfaccum.snapshots`. Under several workers only the first touches files; what
it has read it sends to the others.
"""

import contextlib
import datetime
import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfaccum import agreement, loss_scale
from tfaccum import strategy as strategies
from tfaccum.batching import check_count
from tfaccum.files import replacing
from tfaccum.run import Position, Run
from tfaccum.snapshots import DamagedError, Snapshot, Snapshots
from tfaccum.state import TrainingState
from tfaccum.update import described

RESUME = ("auto", "must", "never")
CHECKPOINTS = "checkpoints"
MODEL = "model.json"
BEST = "best.json"

# What Keras' own callbacks remember. A callback of one's own that has
# `get_state()` and `set_state(state)`, of JSON values, is remembered as well.
_ATTRIBUTES = {
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


class Checkpoint(keras.callbacks.Callback):
    """Saves a run so that it can go on, and goes on with it.

    A checkpoint is taken between two updates: at the end of each epoch, every
    `save_every_updates` updates, and when the run is asked to end. It holds
    weights, optimizer slots, moving averages, the update counter, the loss
    scale with its counters, metrics of the epoch so far, seeds of layers, the
    position in the data, the history, and what other callbacks remember
    (Keras' own, and those with `get_state` and `set_state`).

    When training begins, the newest good checkpoint is read, and `fit` goes on
    with the first batch that had not been trained on. `epochs` of `fit` stays
    the last epoch.

    SIGTERM, and `max_run_seconds`, end the run after the current update, on
    all workers, with a checkpoint: `fit` raises `tfaccum.Preempted`, which
    ends the process with exit code 75.

    Training stands still while variables are copied; a thread writes them. An
    error there is raised at the next update.

    In `model_dir`:

        checkpoints/update-.../    see `tfaccum.snapshots`; a damaged one that
                                   was passed over ends in ".damaged"
        model.json                 the architecture, for `tfaccum.load`
        best.json                  which checkpoint is the best, and its value

    Args:
        model_dir: directory; on the first worker's machine.
        save_every_updates: N >= 1, or None for the ends of epochs only.
        keep: newest checkpoints that are kept, >= 1.
        save_best: a name in the logs of an epoch, such as "val_loss": the
            best is kept as well. Less is better, but for names with "acc" or
            "auc"; or a pair such as ("val_f1", "max"). NaN is worse than any
            number.
        resume: "auto": if there is a checkpoint. "must": else an error.
            "never": an error if there is one.
        max_run_seconds: from now on, > 0; or None.
        allow_changes: whether a run may go on with another global batch,
            optimizer or model. Of the last two, variables of the same path,
            dtype and shape are taken over, and the update counter.

    Context: every worker has it.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if it is out of range.
        ValueError: when training begins, if `resume` does not fit what is
            there, or the model, optimizer or global batch has changed.
        RuntimeError: at the next update, if writing has failed.
        Preempted: from `fit`, if the run was asked to end.
    """

    # After all other callbacks, so that they have seen what is saved.
    runs_last = True

    def __init__(
        self,
        model_dir: str | os.PathLike,
        *,
        save_every_updates: int | None = None,
        keep: int = 3,
        save_best: str | tuple[str, str] | None = None,
        resume: str = "auto",
        max_run_seconds: float | None = None,
        allow_changes: bool = False,
    ):
        super().__init__()
        if save_every_updates is not None:
            check_count("save_every_updates", save_every_updates)
        check_count("keep", keep)
        if resume not in RESUME:
            raise ValueError(
                f"`resume` must be one of {', '.join(RESUME)}. Received: "
                f"resume={resume!r}."
            )
        self._deadline = None
        if max_run_seconds is not None:
            if not max_run_seconds > 0:
                raise ValueError(
                    "`max_run_seconds` must be more than 0. Received: "
                    f"max_run_seconds={max_run_seconds!r}."
                )
            self._deadline = time.monotonic() + max_run_seconds
        self._best = _BestOf(save_best) if save_best is not None else None
        self._model_dir = Path(model_dir)
        self._every = save_every_updates
        self._keep = keep
        self._resume = resume
        self._allow_changes = allow_changes
        self._snapshots = Snapshots(self._model_dir / CHECKPOINTS)
        self._is_asked_to_end = False

    @property
    def _run(self) -> Run:
        return self.model.current_run

    # --- When training begins ----------------------------------------------

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Reads the newest checkpoint, and goes on from there."""
        model = self.model
        self._is_first = (
            strategies.worker_index(model.distribute_strategy)[0] == 0
        )
        self._writer = _Writer()
        self._run.until_end.callback(self._writer.wait)
        self._run.until_end.enter_context(self._notices_sigterm())
        self._is_asked_to_end = False
        self._state = TrainingState(model)
        self._described = self._what_must_not_change()
        if self._every is not None:
            self._run.pause_every(self._every)
        snapshot = self._found()
        facts = self._told_by_the_first(snapshot and snapshot.facts)
        if facts is None:
            self._say_what_is_missing()
        else:
            self._check_changes(facts["run"])
            self._take_over(snapshot.arrays() if snapshot else None, facts)
            self._take_up(facts)
            if self._is_first:
                print(_going_on(facts), flush=True)
        self._saved_at = (self._run.num_updates, self._run.position)
        if self._is_first:
            self._snapshots.set_aside(snapshot.path if snapshot else None)
            self._snapshots.remove_partial()
            self._write_model()

    def _found(self) -> Snapshot | None:
        """The newest good checkpoint, on the first worker."""
        if not self._is_first:
            return None
        snapshot, complaints = self._snapshots.newest()
        for complaint in complaints:
            instead = f"Using {snapshot.path.name}." if snapshot else ""
            warnings.warn(
                f"A checkpoint is damaged: {complaint}. {instead}", stacklevel=2
            )
        return snapshot

    def _told_by_the_first(self, facts: Any) -> Any:
        strategy = self.model.distribute_strategy
        return json.loads(agreement.exchange(strategy, json.dumps(facts))[0])

    def _say_what_is_missing(self) -> None:
        if self._resume == "must":
            raise ValueError(
                "`resume` must not be 'must' without a checkpoint. Received: "
                f"no good checkpoint in {self._model_dir / CHECKPOINTS}. Use "
                "resume='auto' for a new run."
            )

    def _check_changes(self, before: dict[str, Any]) -> None:
        """Refuses to go on with what is not the same run."""
        if self._resume == "never":
            raise ValueError(
                "`resume` must not be 'never' where there are checkpoints. "
                f"Received: model_dir={self._model_dir}. Use resume='auto' to "
                "go on, or another directory."
            )
        changes = [
            f"  {name}: {before.get(name)} -> {now}"
            for name in {**before, **self._described}
            if before.get(name) != (now := self._described.get(name))
        ]
        if changes and not self._allow_changes:
            raise ValueError(
                "A run must go on with the model, optimizer and global batch "
                "with which it was begun. Received, before and now:\n"
                + "\n".join(changes)
                + "\nUndo the change, use another directory, or allow it with "
                "allow_changes=True."
            )

    def _take_over(self, arrays: Any, facts: dict[str, Any]) -> None:
        """Sets all variables; where the model has changed, what still fits."""
        before = facts["run"]
        if all(self._described[n] == before.get(n) for n in self._paths()):
            self._state.write(arrays)
            return
        mine = self._state.read()
        if arrays is not None:
            by_path = {path: arrays[n] for n, path in facts["paths"].items()}
            # The update counter, whatever the optimizer is called.
            by_path[self._paths()[self._counter()]] = arrays[facts["counter"]]
            fresh = []
            for name, path in self._paths().items():
                value = by_path.get(path)
                if value is not None and self._state.fits(name, value):
                    mine[name] = value
                else:
                    fresh.append(path)
            if fresh:
                warnings.warn(
                    "The run goes on with changes. These variables begin "
                    f"anew: {', '.join(fresh)}.",
                    stacklevel=2,
                )
        self._state.write(mine or None)

    def _counter(self) -> str:
        """The name of the update counter among all variables."""
        counter = loss_scale.unwrapped(self._run.optimizers[0]).iterations
        return next(
            name for name, v in self._state.variables.items() if v is counter
        )

    def _paths(self) -> dict[str, str]:
        return {name: v.path for name, v in self._state.variables.items()}

    def _take_up(self, facts: dict[str, Any]) -> None:
        """Puts the run where the checkpoint was taken."""
        model = self.model
        self._run.resume(
            Position(*facts["position"]),
            facts["logs"],
            facts["accumulation"],
            facts["shuffle_seed"],
            facts["is_stopped"],
        )
        if self._best is not None:
            self._best.value = facts["best"]
        model.skips_in_a_row = facts["skips_in_a_row"]
        states = list(facts["callbacks"])
        for callback in self._others():
            for state in states:
                if state[0] == type(callback).__name__:
                    _set_state(callback, state[1])
                    states.remove(state)
                    break

    def _what_must_not_change(self) -> dict[str, Any]:
        """What must not change when a run goes on."""
        model = self.model
        return {
            "global batch": self._run.global_batch_size,
            **{
                name: f"{v.dtype} {list(map(int, v.shape))}"
                for name, v in self._state.variables.items()
            },
            **described(model.optimizer),
        }

    def _write_model(self) -> None:
        """The architecture, where Keras can tell it."""
        self._model_dir.mkdir(parents=True, exist_ok=True)
        try:
            config = keras.saving.serialize_keras_object(self.model)
            config.pop("compile_config", None)
            text = json.dumps(config, indent=1)
        except (NotImplementedError, TypeError, ValueError):
            return  # `load` says so when it is asked.
        with replacing(self._model_dir / MODEL) as partial:
            partial.write_text(text)

    # --- While it goes on --------------------------------------------------

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Saves when enough updates have been made."""
        self._writer.check()
        update = self._run.num_updates
        if self._every and update // self._every > (
            self._saved_at[0] // self._every
        ):
            self._save(logs)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._is_asked_to_end = True
        if self._is_asked_to_end:
            self._run.preempt()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Saves, and keeps the best."""
        is_best = self._best is not None and self._best.improves(logs or {})
        self._save(logs, is_best)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Saves where a run that was asked to end has stopped."""
        if self._run.is_preempted:
            if self._saved_at[1] != self._run.position:
                self._save(logs)
        self._writer.wait()
        self._run.pauses_every = None

    def _save(self, logs: Any, is_best: bool = False) -> None:
        model = self.model
        update, position = self._run.num_updates, self._run.position
        self._saved_at = (update, position)
        arrays = self._state.read()  # All workers.
        is_stopped = agreement.any_worker(
            model.distribute_strategy,
            model.stop_training and not self._run.is_preempted,
        )
        if not self._is_first:
            return
        facts = {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "update": update,
            "position": [position.epoch, position.batch],
            "logs": dict(logs or {}),
            "shuffle_seed": self._run.shuffle_seed,
            "is_stopped": is_stopped,
            "best": self._best and self._best.value,
            "skips_in_a_row": model.skips_in_a_row,
            "accumulation": self._run.accumulation,
            "micro_batch_size": model.cut_size,
            "replicas": strategies.num_replicas(model.distribute_strategy),
            "callbacks": [
                state for c in self._others() if (state := _state_of(c))
            ],
            "paths": self._paths(),
            "counter": self._counter(),
            "run": self._described,
        }
        facts = json.loads(json.dumps(facts, default=_plain))
        best = None
        if is_best and self._best is not None:
            best = (self._best.name, self._best.value)
        self._writer.begin(lambda: self._write(arrays, facts, best))

    def _write(self, arrays: Any, facts: Any, best: Any) -> None:
        """In a thread of its own, on the first worker."""
        epoch, batch = facts["position"]
        path = self._snapshots.write(
            arrays, facts, update=facts["update"], epoch=epoch, batch=batch
        )
        if best is not None:
            name, value = best
            note = {"checkpoint": path.name, "name": name, "value": value}
            with replacing(self._model_dir / BEST) as partial:
                partial.write_text(json.dumps(note))
        self._snapshots.keep(self._keep, also=_best_path(self._model_dir))

    def _others(self) -> list[Any]:
        return [c for c in self._run.callbacks if c is not self]

    @contextlib.contextmanager
    def _notices_sigterm(self) -> Iterator[None]:
        """Until training ends, SIGTERM only asks for that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            self._is_asked_to_end = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Writer:
    """One thread that writes one thing at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begins once the last has ended."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # Raised where training goes on.
                self._error = error

        self._thread = threading.Thread(target=run, name="tfaccum-checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raises what has gone wrong since the last time."""
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(
                "A checkpoint must be written completely. Received: "
                f"{type(error).__name__}: {error}. Nothing of it is left; the "
                "one before is good. Make room, and start the run again."
            ) from error

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()


class _BestOf:
    """Whether an epoch's value is the best so far."""

    def __init__(self, save_best: str | tuple[str, str]):
        if isinstance(save_best, str):
            more = any(part in save_best for part in ("acc", "auc"))
            save_best = (save_best, "max" if more else "min")
        self.name, self.mode = save_best
        if self.mode not in ("min", "max"):
            raise ValueError(
                "`save_best` must be a name, or a pair of a name and 'min' or "
                f"'max'. Received: save_best={save_best!r}."
            )
        self.value: float | None = None

    def improves(self, logs: dict[str, float]) -> bool:
        """Notes and tells whether this is better than all before."""
        if self.name not in logs:
            raise ValueError(
                "`save_best` must be in the logs of an epoch. Received: "
                f"save_best={self.name!r}; the logs have {sorted(logs)}."
            )
        value = float(logs[self.name])
        sign = 1 if self.mode == "max" else -1
        better = (
            self.value is None
            or math.isnan(self.value)
            or sign * value > sign * self.value
        )
        if better:
            self.value = value
        return better


def load(model_dir: str | os.PathLike, which: str = "best") -> keras.Model:
    """The model of a run, with its best or newest weights, for inference.

    Needs no training code where Keras can make the model from its config: for
    functional and Sequential models of Keras' own layers, and for registered
    classes. Runs no code from the files.

    Args:
        model_dir: that of a `tfaccum.Checkpoint`.
        which: "best": what `save_best` has kept, or the newest without it.
            "newest": the newest.

    Returns:
        A model that is not compiled.

    Raises:
        ValueError: if `which` is neither, or there is no good checkpoint, or
            the best one is damaged or gone, or Keras cannot make the model.
    """
    if which not in ("best", "newest"):
        raise ValueError(
            f"`which` must be 'best' or 'newest'. Received: which={which!r}."
        )
    model_dir = Path(model_dir)
    snapshots = Snapshots(model_dir / CHECKPOINTS)
    best = _best_path(model_dir) if which == "best" else None
    try:
        snapshot = snapshots.read(best) if best else snapshots.newest()[0]
    except DamagedError as error:
        raise ValueError(
            "The best checkpoint must be as it was written. Received: "
            f"{best} ({error}). Use which='newest' for the newest good one."
        ) from error
    if snapshot is None or not (model_dir / MODEL).is_file():
        missing = MODEL if snapshot else "good checkpoint"
        raise ValueError(
            "`model_dir` must hold a checkpoint and a model that Keras can "
            f"make from its config. Received: model_dir={model_dir} without "
            f"{missing}. For a model of your own, make it, and register its "
            "class with keras.saving.register_keras_serializable."
        )
    config = json.loads((model_dir / MODEL).read_text())
    try:
        model = keras.saving.deserialize_keras_object(config, safe_mode=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`model_dir` must hold a model that Keras can make from its "
            f"config. Received: model_dir={model_dir} ({error}). Register "
            "classes of your own with "
            "keras.saving.register_keras_serializable, and import them first."
        ) from error
    arrays = snapshot.arrays()
    for index, variable in enumerate(model.variables):
        value = arrays[f"model/{index}"]
        # A seed has one value for each replica.
        variable.assign(value if value.shape == variable.shape else value[0])
    return model


def _going_on(facts: dict[str, Any]) -> str:
    epoch, batch = facts["position"]
    return (
        f"Going on after update {facts['update']:,}, with batch {batch + 1} of "
        f"epoch {epoch + 1}"
    )


def _best_path(model_dir: Path) -> Path | None:
    """The best checkpoint, if one has been kept."""
    try:
        note = json.loads((model_dir / BEST).read_text())
    except FileNotFoundError:
        return None
    return model_dir / CHECKPOINTS / note["checkpoint"]


def _state_of(callback: Any) -> list[Any] | None:
    """[class, state] of a callback that remembers something."""
    if hasattr(callback, "get_state"):
        return [type(callback).__name__, callback.get_state()]
    for kind, names in _ATTRIBUTES.items():
        if isinstance(callback, kind):
            state = {n: getattr(callback, n) for n in names}
            return [type(callback).__name__, state]
    return None


def _set_state(callback: Any, state: Any) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(state)
    else:
        for name, value in state.items():
            setattr(callback, name, value)


def _plain(value: Any) -> Any:
    """Numbers of numpy and TensorFlow as JSON has them."""
    return np.asarray(value).tolist()
