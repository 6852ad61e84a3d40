"""The largest micro-batch that fits: `compile(micro_batch_size="auto")`.

A window is made in two calls. The first one, all micro-steps, communicates
nothing: when memory runs out there, on any worker, nothing has been applied
anywhere. All workers then put back what it has changed, halve their
micro-batches, and take the same batches, which are still held, again.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfaccum import agreement
from tfaccum import strategy as strategies
from tfaccum.batching import check_count
from tfaccum.feeding import Source
from tfaccum.files import replacing
from tfaccum.window import Window

FILE = "micro_batch_size.json"


@keras.saving.register_keras_serializable("tfaccum")
@dataclasses.dataclass(frozen=True)
class AutoMicroBatch:
    """How to look for the largest micro-batch that fits.

    `compile(micro_batch_size="auto")` is `AutoMicroBatch()`.

    Attributes:
        start: the first size to be tried, examples of one replica; None: a
            replica's whole share of a dataset batch.
        floor: below which no size is tried, >= 1.
        directory: where the answer is remembered; None: not, beyond `fit`.

    Raises:
        TypeError: if a size is not an int.
        ValueError: if a size is less than 1, or `start` less than `floor`.
    """

    start: int | None = None
    floor: int = 1
    directory: str | None = None

    def __post_init__(self) -> None:
        """Checks what was given."""
        check_count("floor", self.floor)
        if self.start is not None:
            check_count("start", self.start)
            if self.start < self.floor:
                raise ValueError(
                    "`start` must be at least `floor`. Received: start="
                    f"{self.start}, floor={self.floor}."
                )

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AutoMicroBatch":
        """As in Keras."""
        return cls(**config)


class MicroBatchSearch:
    """The search of one compiled model.

    Args:
        how: what was asked for.

    Attributes:
        size: the size that is used; None: a replica's whole share.
        tried: sizes that did not fit, in order.
    """

    def __init__(self, how: AutoMicroBatch):
        self._how = how
        self.size = how.start
        self.tried: list[int] = []
        self._says = False
        if how.directory is not None:
            path = Path(how.directory, FILE)
            if path.exists():
                known = json.loads(path.read_text())["micro_batch_size"]
                self.size = check_count("micro_batch_size", known)
                logging.info("Micro-batches of %d, as in %s.", known, path)

    def begin(
        self,
        window: Window,
        micro_steps: Callable[[Any], Any],
        source: Source,
        batches: int,
    ) -> Any:
        """All micro-steps of a window, with micro-batches that fit.

        Args:
            window: whose micro-steps they are.
            micro_steps: runs them from an iterator. Communicates nothing.
            source: where the iterator comes from; it holds its batches.
            batches: of the window; they are let go.

        Returns:
            What `micro_steps` has returned.

        Raises:
            RuntimeError: if micro-batches of `floor` do not fit; says which
                sizes were tried, and on which worker memory ran out.
        """
        strategy = window.strategy
        while True:
            before = window.remember()
            begun, mine = None, "0:"
            try:
                begun = micro_steps(source.iterator)
            except tf.errors.ResourceExhaustedError as error:
                whole = source.largest_share(batches)
                mine = f"{min(self.size or whole, whole)}:{error.message}"
            told = agreement.exchange(strategy, mine)
            sizes = [int(text.partition(":")[0]) for text in told]
            if not any(sizes):
                break
            window.put_back(before)
            worker = next(i for i, size in enumerate(sizes) if size)
            self._halve(max(sizes), worker, told[worker].partition(":")[2])
            source.take_again(self.size)
        source.let_go(batches)
        if self._says:
            self._says = False
            logging.info("Micro-batches of %d fit.", self.size)
            if strategies.worker_index(strategy)[0] == 0:
                self._write()
        return begun

    def _halve(self, used: int, worker: int, message: str) -> None:
        self.tried.append(used)
        if used <= self._how.floor:
            raise RuntimeError(
                "A micro-batch must fit into memory. Received: sizes "
                f"{self.tried} were tried, and the smallest that is allowed "
                f"is {self._how.floor}; worker {worker} reports: {message}. "
                "Use a smaller model, mixed precision, or more memory."
            )
        self.size = max(self._how.floor, used // 2)
        self._says = True
        logging.warning(
            "Micro-batches of %d do not fit on worker %d; trying %d.",
            used,
            worker,
            self.size,
        )

    def _write(self) -> None:
        if self._how.directory is None:
            return
        path = Path(self._how.directory, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(
                json.dumps({"micro_batch_size": self.size}) + "\n"
            )
