"""The host's side of training: epochs, callbacks, logs.

Keras' own `fit`, `evaluate` and `predict` do not run under
MultiWorkerMirroredStrategy and split batches unevenly over replicas; these
have the same arguments, callbacks and results. A Keras "batch" stays a
dataset batch: with K = 8 the progress bar moves by 8.
"""

import contextlib
import json
import math
from typing import Any

import keras

from tfaccum import agreement, keras_private
from tfaccum import strategy as strategies
from tfaccum.evaluation import Evaluation
from tfaccum.feeding import Source
from tfaccum.functions import in_step
from tfaccum.layers import WindowBatchNormalization
from tfaccum.loss_scale import LossScale
from tfaccum.run import Position, Preempted, Run
from tfaccum.schedule import updates_alike
from tfaccum.update import described
from tfaccum.window import Update


class HostLoop(Evaluation):
    """`fit` and `train_on_batch`."""

    # --- Training ----------------------------------------------------------

    @in_step
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Trains the model; as in Keras, with one update per window.

        Args:
            x: as in Keras: data that are the same on every worker and yield
                dataset batches; each worker and replica takes its share. Or a
                `tfaccum.data.Pipeline`, or a function that makes this
                worker's own `tf.data.Dataset` from an
                `tf.distribute.InputContext`.
            y: as in Keras, like all that follow. `steps_per_epoch` counts
                dataset batches.
            batch_size: examples in a dataset batch made of arrays.
            epochs: last epoch, counted from 0.
            verbose: "auto", 0, 1 or 2.
            callbacks: list of `keras.callbacks.Callback`. When a batch ends,
                `model.last_updates` tells what its updates did.
            validation_split: part of the arrays held out, in [0, 1).
            validation_data: for `evaluate` after an epoch.
            shuffle: arrays before each epoch.
            class_weight: weights by class.
            sample_weight: weights by example.
            initial_epoch: epoch to begin with.
            steps_per_epoch: dataset batches per epoch.
            validation_steps: dataset batches of validation.
            validation_batch_size: examples in a batch of validation arrays.
            validation_freq: epochs between validations.

        Returns:
            The `keras.callbacks.History` of this call.

        Raises:
            RuntimeError: if `max_consecutive_skips` updates in a row were
                skipped because a gradient was not finite; names the first
                variable, replica and worker.
            ValueError: if layers communicate in their forward pass, and
                workers may make different numbers of micro-steps.
        """
        self._check_compiled("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = (
                keras_private.train_validation_split(
                    (x, y, sample_weight), validation_split
                )
            )
        source = self._make_source(
            x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            holds=self.micro_batch_search is not None,
        )
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = _unpacked(validation_data)
            validation = self._make_source(
                val_x,
                y=val_y,
                sample_weight=val_weight,
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
            )
        self._check_same(
            {"data": source, "validation data": validation},
            epochs=epochs,
            initial_epoch=initial_epoch,
            validation_freq=validation_freq,
            **self._training_facts(),
        )
        # Variables are made by all workers together.
        self._build(source.spec)
        self._check_normalisation(source)
        self._say_if_windows_are_short(source)
        callbacks = self._callbacks(
            callbacks, verbose, source, epochs=epochs, add_history=True
        )
        self.make_train_function()
        self.train_window.prepare(source.element_spec)
        run = self.current_run = Run(self, source, initial_epoch)
        run.callbacks = callbacks.callbacks
        run.until_end.callback(setattr, self, "current_run", None)
        with run.until_end, contextlib.closing(source):
            return self._fit(
                run, source, validation, callbacks, epochs, validation_freq
            )

    def _fit(
        self,
        run: Run,
        source: Source,
        validation: Source | None,
        callbacks: Any,
        epochs: int,
        validation_freq: Any,
    ) -> keras.callbacks.History:
        """The epochs of `fit`."""
        self.stop_training = False
        callbacks.on_train_begin()
        if (first := keras_private.initial_epoch(self)) is not None:
            run.position = Position(first)  # By Keras' BackupAndRestore.
        first = run.position.epoch
        logs: dict[str, float] = {}
        for epoch in range(first, epochs):
            if not run.position.batch:
                if run.is_stopped:
                    break
                self.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs = self._train_epoch(run, source, callbacks, epochs)
            self._end_if_preempted(run, callbacks)
            if validation is not None and keras_private.should_evaluate(
                self, epoch, validation_freq
            ):
                evaluations = sum(
                    keras_private.should_evaluate(self, e, validation_freq)
                    for e in range(epoch)
                )
                validation.begin_evaluation(evaluations, resumes=run.is_resumed)
                val_logs = self._evaluate(validation, callbacks)
                logs.update({f"val_{k}": v for k, v in val_logs.items()})
            run.position = Position(epoch + 1)
            callbacks.on_epoch_end(epoch, logs)
            self.stop_training = agreement.any_worker(
                self.distribute_strategy, self.stop_training or run.is_stopped
            )
            if self.stop_training:
                self._end_if_preempted(run, callbacks)
                break
        if epochs > first or run.is_resumed:
            self._finalize()
        callbacks.on_train_end(logs)
        return self.history

    def _end_if_preempted(self, run: Run, callbacks: Any) -> None:
        run.is_preempted = agreement.any_worker(
            self.distribute_strategy, run.is_preempted
        )
        if run.is_preempted:
            callbacks.on_train_end(run.logs)
            raise Preempted

    def _training_facts(self) -> dict[str, Any]:
        """What makes two workers train differently, by name."""
        names = (
            "steps_per_execution",
            "accumulator_dtype",
            "wire_dtype",
            "sparse_sums",
            "loss_scale",
            "on_nonfinite",
            "max_consecutive_skips",
        )
        return {
            "gradient_accumulation_steps": self.accumulation_schedule,
            "gradient_freeze": self.gradient_freeze,
            "replica_reduction": self.replica_reduction,
            **{name: getattr(self, name) for name in names},
            **described(self.optimizer),
            "seed": keras_private.global_seed(),
            **{f"shape of {v.path}": tuple(v.shape) for v in self.variables},
        }

    def _check_normalisation(self, source: Source) -> None:
        """Looks for layers whose statistics are not those of a window.

        Raises:
            ValueError: if layers communicate in their forward pass, and
                workers may make different numbers of micro-steps.
        """
        layers = keras_private.all_layers(self)
        together = [
            layer.name
            for layer in layers
            if layer.trainable and getattr(layer, "synchronized", False)
        ]
        uneven = self.micro_batch_size is not None or (
            source.is_share and self._accumulates()
        )
        if self._has_other_workers and together and uneven:
            raise ValueError(
                "A layer with `synchronized=True` needs workers that all make "
                "the same number of micro-steps. Received: "
                f"{', '.join(together)} on several workers, with "
                f"micro_batch_size={self.micro_batch_size} and "
                "gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, on data "
                f"{'of each worker' if source.is_share else 'that are shared'}"
                ". Leave batches uncut and give all workers the same data, or "
                "use tfaccum.layers.WindowBatchNormalization without "
                "`synchronized`."
            )
        apart = [
            layer.name
            for layer in layers
            if isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
            and not isinstance(layer, WindowBatchNormalization)
            and not getattr(layer, "synchronized", False)
        ]
        if apart and self._accumulates():
            self._warn_once(
                f"The moving statistics of {', '.join(apart)} move at every "
                "micro-step, and are those of micro-batches. Use "
                "tfaccum.layers.WindowBatchNormalization, whose statistics "
                "move once per update and are those of the whole window."
            )

    def _say_if_windows_are_short(self, source: Source) -> None:
        steps, batches = self.accumulation_schedule.at(0), source.num_batches
        if batches == 0:
            self._warn_once("The data have no batches: no update is made.")
        elif batches is not None and batches < steps:
            self._warn_once(
                f"`gradient_accumulation_steps` is {steps}, but an epoch has "
                f"only {batches} dataset batches: each epoch makes one update "
                "from a short window, divided by its own weight."
            )

    def _finalize(self) -> None:
        """Lets optimizers with a moving average set the weights to it."""
        for trained in self.train_window.trained:
            if trained.variables:
                trained.optimizer.finalize_variable_values(
                    trained.all_variables
                )

    def _train_epoch(
        self, run: Run, source: Source, callbacks: Any, epochs: int
    ) -> dict[str, float]:
        """The windows of one epoch from `run.position`; returns its logs."""
        epoch, done = run.position.epoch, run.position.batch
        source.begin_epoch(epoch, done if run.is_resumed else None, epochs)
        total, more, stops = source.num_batches, not run.is_stopped, False
        logs, run.logs = run.logs, {}
        while more and (total is None or done < total):
            windows, steps = self._next_windows(run)
            batches = windows * steps
            if total is not None:
                batches = min(batches, total - done)
            callbacks.on_train_batch_begin(done)
            before = self.last_updates
            results, more, stopped = self.train_function(
                source, batches, steps, stops
            )
            if stopped:
                self.stop_training = True
                break
            if not more and not self.last_updates:
                self.last_updates = before
                break
            self._check_updates()
            logs = run.logs = results
            done += batches
            run.position = Position(epoch, done)
            callbacks.on_train_batch_end(done - 1, logs)
            stops = self.stop_training
            if stops and not self._has_other_workers:
                break
        ended = not more and not run.is_stopped
        if ended:
            self._say_if_short(source, done, "steps_per_epoch")
        source.end_epoch(done, exhausted=ended)
        return dict(logs)

    def _next_windows(self, run: Run) -> tuple[int, int]:
        """Windows of the next call of the train function, and their K."""
        windows, schedule = self.steps_per_execution, self.accumulation_schedule
        freeze = self.gradient_freeze
        if self.micro_batch_search is not None:
            windows = 1
        if run.pauses_every is None and schedule.is_constant and not freeze:
            return windows, schedule.at(0)
        update = run.num_updates
        if run.pauses_every is not None:
            windows = min(windows, run.pauses_every - update % run.pauses_every)
        windows = updates_alike(schedule.at, update, windows)
        if freeze:
            windows = updates_alike(freeze.group_at, update, windows)
        return windows, schedule.at(update)

    @property
    def loss_scale_floor(self) -> float:
        """Below which a dynamic loss scale does not fall."""
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale.floor
        return LossScale.floor

    def _check_updates(self) -> None:
        """Looks at what the last updates did; stops a run that is lost."""
        for update in self.last_updates:
            if update.weight == 0:
                self._warn_once(
                    "A window had a total weight of zero (every example "
                    "masked or weighted 0): no update was made."
                )
            if self.on_nonfinite == "apply":
                continue
            self.skips_in_a_row = (
                self.skips_in_a_row + 1 if update.skipped else 0
            )
            limit = self.max_consecutive_skips
            if self.on_nonfinite == "raise":
                limit = 1
            if self.skips_in_a_row >= limit:
                raise RuntimeError(self._lost_run(update))

    def _lost_run(self, update: Update) -> str:
        """What to say when no update can be made any more."""
        replica, variable = self._first_culprit(update)
        if replica is None:
            where = "the sum over the replicas, of finite gradients,"
        else:
            local = strategies.num_local_replicas(self.distribute_strategy)
            where = (
                f"that of {variable} on replica {replica} "
                f"(worker {replica // local})"
            )
        loss = "finite" if math.isfinite(update.loss) else "not finite itself"
        return (
            f"Gradients must be finite; {self.skips_in_a_row} updates in a "
            f"row were skipped. Received: in the window after update "
            f"{update.update} {where} was not finite; the loss was "
            f"{update.loss} ({loss}), the loss scale {update.loss_scale}. The "
            "weights are those of the last good update. Look at the data of "
            "that window, the learning rate and, if only the gradient is not "
            "finite, the loss scale."
        )

    def _first_culprit(self, update: Update) -> tuple[int | None, str | None]:
        """The first bad replica of all workers, and its first bad variable."""
        found = update.nonfinite_replica, update.nonfinite_variable
        mine = json.dumps(found)
        for told in agreement.exchange(self.distribute_strategy, mine):
            replica, variable = json.loads(told)
            if replica is not None:
                return replica, variable
        return None, None

    @in_step
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One update from one dataset batch, cut by `micro_batch_size`.

        As in Keras; metrics are those of this batch.
        """
        self._check_compiled("train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError(
                    "`class_weight` must be None together with "
                    "`sample_weight`. Received: class_weight="
                    f"{class_weight}."
                )
            sample_weight = keras_private.class_weight_to_sample_weight(
                y, class_weight
            )
        source = self._batch_source(
            x,
            y,
            sample_weight,
            holds=self.micro_batch_search is not None,
        )
        self._build(source.spec)
        self._check_normalisation(source)
        self.make_train_function()
        self.reset_metrics()
        source.begin_epoch(0)
        logs, _, _ = self.train_function(source, 1, 1)
        self._check_updates()
        return self._batch_result(logs, return_dict)


def _unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Validation data: a tuple of arrays, or anything else as `x`."""
    if isinstance(data, tuple | list):
        return keras.utils.unpack_x_y_sample_weight(tuple(data))
    return data, None, None
