"""A callback that shows why the loss scale is what it is."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.histogram import metadata

from tfaccum import strategy as strategies
from tfaccum.exponents import Exponents


class GradientReport(keras.callbacks.Callback):
    """Writes how many gradients leave float16, by variable, to TensorBoard.

    For every variable: `gradient_underflow/PATH` and `gradient_overflow/PATH`,
    fractions in [0, 1], and the histogram `gradient_exponents/PATH` over powers
    of two, of the scaled gradients of all micro-steps of one window. Costs one
    pass over the gradients of every micro-step while it is in use.

    Args:
        log_dir: of the event files; the first worker writes.
        every_updates: updates between two reports, >= 1.

    Raises:
        ValueError: if `every_updates` is less than 1.
    """

    def __init__(self, log_dir: str | Path, every_updates: int = 100):
        super().__init__()
        if every_updates < 1:
            raise ValueError(
                "`every_updates` must be at least 1. Received: "
                f"every_updates={every_updates}."
            )
        self._log_dir = Path(log_dir)
        self._every = every_updates
        self._next = 0
        self._writer: Any = None

    def set_model(self, model: keras.Model) -> None:
        """Asks the model for exponents, which makes it trace again."""
        super().set_model(model)
        model.count_exponents(True)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Opens the event file, on the first worker, until `fit` ends."""
        until_end = self.model.current_run.until_end
        until_end.callback(self.model.count_exponents, False)
        worker, _ = strategies.worker_index(self.model.distribute_strategy)
        if worker == 0:
            self._writer = tf.summary.create_file_writer(str(self._log_dir))
            until_end.callback(self._writer.close)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Writes a report when one is due."""
        updates = self.model.last_updates
        if self._writer is None or updates[-1].update < self._next:
            return
        self._next = updates[-1].update + self._every
        with self._writer.as_default(step=updates[-1].update):
            _write(self.model.last_exponents)


def _write(exponents: Exponents) -> None:
    edges = exponents.edges
    for path, counts, underflow, overflow in zip(
        exponents.paths,
        exponents.counts,
        exponents.underflow,
        exponents.overflow,
        strict=True,
    ):
        tf.summary.scalar(f"gradient_underflow/{path}", underflow)
        tf.summary.scalar(f"gradient_overflow/{path}", overflow)
        tf.summary.write(
            f"gradient_exponents/{path}",
            tf.constant(np.stack([edges[:-1], edges[1:], counts], axis=1)),
            metadata=metadata.create_summary_metadata(None, None),
        )
