"""One call of `fit`: where it is, and what callbacks may ask of it."""

import contextlib
import dataclasses
import math
from typing import Any

from tfaccum.cluster import EXIT_PREEMPTED
from tfaccum.feeding import Source


class Preempted(SystemExit):
    """The run was asked to end, and has saved a checkpoint.

    Not caught, it ends the process with exit code 75, without a traceback.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


@dataclasses.dataclass(frozen=True)
class Position:
    """The next dataset batch to train on.

    Attributes:
        epoch: counted from 0.
        batch: counted from 0, in this epoch.
    """

    epoch: int
    batch: int = 0


class Run:
    """One call of `fit`, for its callbacks: `model.current_run`.

    Args:
        model: that is trained; its train function has been prepared.
        source: what it is trained on.
        initial_epoch: where `fit` begins.

    Attributes:
        position: the next batch.
        logs: of the last window.
        callbacks: all of this run.
        pauses_every: callbacks get control after each Nth update, whatever
            `steps_per_execution` is; None: when a call has made its windows.
        is_resumed: whether it goes on where another run has stopped.
        is_stopped: whether a callback of that run had ended the training.
        is_preempted: whether it was asked to end, to go on later.
        until_end: what a callback has begun that must end with `fit`, however
            that ends.
    """

    def __init__(self, model: Any, source: Source, initial_epoch: int):
        self._model = model
        self._source = source
        self.position = Position(initial_epoch)
        self.logs: dict[str, float] = {}
        self.callbacks: list[Any] = []
        self.pauses_every: int | None = None
        self.is_resumed = self.is_stopped = self.is_preempted = False
        self.until_end = contextlib.ExitStack()

    def resume(
        self,
        position: Position,
        logs: dict[str, float],
        accumulation: str | int,
        shuffle_seed: int | None,
        is_stopped: bool,
    ) -> None:
        """Goes on where another run has stopped.

        Args:
            position: the next batch, in that run's dataset batches.
            logs: of its last window.
            accumulation: K with which that run has counted; see
                `accumulation`.
            shuffle_seed: of that run's order of arrays, if it had one.
            is_stopped: whether a callback had ended the training there.

        Context: `on_train_begin`.
        """
        batch, now = position.batch, self.accumulation
        if isinstance(now, int) and isinstance(accumulation, int):
            # A window is the same examples, in more or fewer batches.
            if now != accumulation:
                batch = -(-batch // accumulation) * now
        elif now != accumulation:
            raise ValueError(
                "`gradient_accumulation_steps` must stay the same when it is "
                "a schedule and a run goes on. Received: "
                f"{accumulation} before and {now} now."
            )
        self.position = Position(position.epoch, batch)
        self.logs = dict(logs)
        self.is_resumed = True
        self.is_stopped = is_stopped
        if shuffle_seed is not None:
            self._source.shuffle_seed = shuffle_seed

    def pause_every(self, updates: int) -> None:
        """Gives callbacks control after each Nth update.

        Where several ask, after each that one of them has asked for.
        """
        self.pauses_every = math.gcd(self.pauses_every or 0, updates)

    def preempt(self) -> None:
        """Asks to end after this update, on all workers, to go on later.

        `fit` then raises `Preempted`.
        """
        self.is_preempted = self._model.stop_training = True

    @property
    def num_updates(self) -> int:
        """Updates made by the first of `optimizers`."""
        return self._model.num_updates

    @property
    def optimizers(self) -> list[Any]:
        """All that `train_step` hands gradients to."""
        trained = self._model.train_window.trained
        return list({id(t.optimizer): t.optimizer for t in trained}.values())

    @property
    def accumulation(self) -> str | int:
        """K, or its schedule as text."""
        text = str(self._model.accumulation_schedule)
        return int(text) if text.isdigit() else text

    @property
    def global_batch_size(self) -> int | str | None:
        """Examples behind one update, over all replicas and workers.

        Context: all workers ask.
        """
        rows, steps = self._source.batch_size, self.accumulation
        if rows is None or isinstance(steps, int):
            return rows and rows * steps
        return f"{rows} x {steps}"

    @property
    def shuffle_seed(self) -> int | None:
        """Of the order in which arrays are taken; None where they are not."""
        return self._source.shuffle_seed
