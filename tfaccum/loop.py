"""The host's side of training: epochs, callbacks, logs.

Keras' own `fit`, `evaluate` and `predict` do not run under
MultiWorkerMirroredStrategy and split batches unevenly over replicas; these
have the same arguments, callbacks and results. A Keras "batch" stays a
dataset batch: with K = 8 the progress bar moves by 8.
"""

import functools
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfaccum import agreement, keras_private
from tfaccum import strategy as strategies
from tfaccum.exponents import NUM_BINS, Exponents
from tfaccum.feeding import (
    NO_MORE_DATA,
    Source,
    any_number_of_rows,
    next_elements,
)
from tfaccum.loss_scale import LossScale
from tfaccum.update import described
from tfaccum.window import Update, Window


def _in_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Ends the call on all workers when it fails on one."""

    @functools.wraps(method)
    def on_all_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        with agreement.shared_fate(self.distribute_strategy):
            return method(self, *args, **kwargs)

    return on_all_workers


class HostLoop:
    """`fit`, `evaluate`, `predict` and their one-batch forms, for a model."""

    # Of the keras.Model that this is mixed into.
    compiled: bool
    distribute_strategy: Any
    history: Any
    optimizer: Any
    run_eagerly: bool
    steps_per_execution: int
    trainable_variables: list
    variables: list
    predict_step: Any
    test_step: Any
    train_step: Any
    overrides_train_step: bool
    reset_metrics: Any

    # Set by `compile`.
    gradient_accumulation_steps = 1
    micro_batch_size: int | None = None
    accumulator_dtype: str | None = None
    wire_dtype: str | None = None
    loss_scale: Any = "auto"
    on_nonfinite = "skip"
    max_consecutive_skips = 20

    # What happened at each update of the last call of the train function.
    last_updates: tuple[Update, ...] = ()

    # Whether exponents of gradients are counted, and those of the last window.
    counts_exponents = False
    last_exponents: Exponents | None = None

    # Bytes that gradient sums take on one replica; 0 without accumulation.
    accumulator_bytes = 0

    @property
    def _has_other_workers(self) -> bool:
        return strategies.worker_index(self.distribute_strategy)[1] > 1

    @property
    def is_single_micro_step(self) -> bool:
        """Whether a window is one micro-step on one replica."""
        replicas = strategies.num_replicas(self.distribute_strategy)
        return replicas == 1 and not self._accumulates()

    def _accumulates(self) -> bool:
        return (
            self.gradient_accumulation_steps > 1
            or self.micro_batch_size is not None
        )

    def reset_training_functions(self) -> None:
        """Forgets traced functions and what has been warned about."""
        self.train_function: Any = None
        self.test_function: Any = None
        self.predict_function: Any = None
        self.last_updates = ()
        self._skips_in_a_row = 0
        self._warned: set[str] = set()

    # --- Functions of an iterator ------------------------------------------

    def make_train_function(self, force: bool = False) -> None:
        """Makes `train_function(...) -> (logs, more, stopped)`."""
        if self.train_function is not None and not force:
            return
        window = Window(self, self.train_step, accumulates=self._accumulates())
        execute = self._function_of(window)

        def train_function(
            iterator: Any, batches: int, stops: bool = False
        ) -> tuple[dict, bool, bool]:
            logs, rows, counts, more, stopped = execute(
                iterator, batches, self.gradient_accumulation_steps, stops
            )
            if self.counts_exponents:
                self.last_exponents = Exponents(window.paths, counts)
            self.last_updates = tuple(window.read(row) for row in rows)
            self.accumulator_bytes = window.accumulator_bytes
            return logs, more, stopped

        self.train_function = train_function
        self._train_window = window

    def count_exponents(self, counts: bool) -> None:
        """Whether `last_exponents` is filled; traces again when it changes."""
        if counts != self.counts_exponents:
            self.counts_exponents = counts
            self.train_function = None

    def make_test_function(self, force: bool = False) -> None:
        """Makes `test_function(...) -> (logs, examples, more, stopped)`."""
        if self.test_function is not None and not force:
            return
        window = Window(
            self,
            self.test_step,
            accumulates=self.micro_batch_size is not None,
        )
        execute = self._function_of(window)

        def test_function(
            iterator: Any, batches: int, stops: bool = False
        ) -> tuple[dict, int, bool, bool]:
            logs, examples, _, more, stopped = execute(
                iterator, batches, 1, stops
            )
            return logs, int(examples.sum()), more, stopped

        self.test_function = test_function

    def _function_of(self, window: Window) -> Any:
        """Windows of `steps` batches until `batches` are used, as a function.

        Traced once, whatever the number of steps.
        """

        def execute(
            iterator: Any,
            batches: tf.Tensor,
            steps: tf.Tensor,
            stops: tf.Tensor,
        ) -> tuple[tf.Tensor, ...]:
            if self.steps_per_execution == 1:
                logs, row, counts, more, stopped = window.run(
                    iterator, batches, stops
                )
                return logs, row[tf.newaxis], counts, more, stopped

            def body(
                done: tf.Tensor, _m: Any, _s: Any, _l: Any, _c: Any, rows: Any
            ) -> tuple:
                logs, row, counts, more, stopped = window.run(
                    iterator, tf.minimum(steps, batches - done), stops
                )
                rows = tf.concat([rows, row[tf.newaxis]], 0)
                return done + steps, more, stopped, logs, counts, rows

            fields = window.num_fields
            start = (
                tf.constant(0),
                tf.constant(True),
                tf.constant(False),
                tf.zeros([0]),
                tf.zeros([0, NUM_BINS]),
                tf.zeros([0, fields], tf.float64),
            )
            _, more, stopped, logs, counts, rows = tf.while_loop(
                lambda done, more, stopped, *_: (
                    (done < batches) & more & ~stopped
                ),
                body,
                start,
                shape_invariants=(
                    tf.TensorShape([]),
                    tf.TensorShape([]),
                    tf.TensorShape([]),
                    tf.TensorShape([None]),
                    tf.TensorShape([None, NUM_BINS]),
                    tf.TensorShape([None, fields]),
                ),
            )
            return logs, rows, counts, more, stopped

        if not self.run_eagerly:
            execute = tf.function(execute, autograph=False)

        prepared_for = None

        def function(
            iterator: Any, batches: int, steps: int, stops: bool
        ) -> tuple:
            nonlocal prepared_for
            if iterator.element_spec != prepared_for:
                window.prepare(iterator.element_spec)
                prepared_for = iterator.element_spec
            logs, rows, counts, more, stopped = execute(
                iterator,
                tf.constant(batches),
                tf.constant(steps),
                tf.constant(stops),
            )
            named = dict(
                zip(window.log_names, logs.numpy().tolist(), strict=True)
            )
            return (
                named,
                rows.numpy(),
                counts.numpy(),
                bool(more),
                bool(stopped),
            )

        return function

    def make_predict_function(self, force: bool = False) -> None:
        """Makes `predict_function(iterator) -> (rows, last, outputs)`."""
        if self.predict_function is not None and not force:
            return

        strategy = self.distribute_strategy

        def predict_function(iterator: Any) -> tuple:
            rows, last, data = next_elements(iterator, strategy)
            batch = keras_private.per_replica(data)
            outputs = strategy.run(self.predict_step, args=(batch,))
            return rows[0], last[0], outputs

        if not self.run_eagerly:
            predict_function = tf.function(predict_function, autograph=False)
        self.predict_function = predict_function

    # --- Training ----------------------------------------------------------

    @_in_step
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
        """
        self._check_compiled("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = (
                keras_private.train_validation_split(
                    (x, y, sample_weight), validation_split
                )
            )
        source = self._source(
            x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = _unpacked(validation_data)
            validation = self._source(
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
        self._say_if_windows_are_short(source)
        callbacks = self._callbacks(
            callbacks, verbose, source, epochs=epochs, add_history=True
        )
        self.stop_training = False
        self.make_train_function()
        callbacks.on_train_begin()
        logs: dict[str, float] = {}
        first = keras_private.initial_epoch(self) or initial_epoch
        for epoch in range(first, epochs):
            self.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs = self._train_epoch(source, epoch, callbacks)
            if validation is not None and keras_private.should_evaluate(
                self, epoch, validation_freq
            ):
                val_logs = self._evaluate(validation, callbacks)
                logs.update({f"val_{k}": v for k, v in val_logs.items()})
            callbacks.on_epoch_end(epoch, logs)
            self.stop_training = agreement.any_worker(
                self.distribute_strategy, self.stop_training
            )
            if self.stop_training:
                break
        if epochs > first:
            self._finalize()
        callbacks.on_train_end(logs)
        return self.history

    def _training_facts(self) -> dict[str, Any]:
        """What makes two workers train differently, by name."""
        names = (
            "gradient_accumulation_steps",
            "steps_per_execution",
            "accumulator_dtype",
            "wire_dtype",
            "loss_scale",
            "on_nonfinite",
            "max_consecutive_skips",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "optimizer": described(self.optimizer),
            "seed": keras_private.global_seed(),
            **{f"shape of {v.path}": tuple(v.shape) for v in self.variables},
        }

    def _check_same(
        self, sources: dict[str, Source | None], **facts: Any
    ) -> None:
        """Refuses to begin when a worker is about to do something else."""
        if not self._has_other_workers:
            return
        given = {name: s for name, s in sources.items() if s is not None}
        for name, source in given.items():
            facts |= {f"{k} of the {name}": v for k, v in source.facts.items()}
        agreement.check_same(self.distribute_strategy, facts)
        for source in given.values():
            if source.is_share:
                agreement.check_shares(
                    self.distribute_strategy, source.first_batches()
                )

    def _say_if_windows_are_short(self, source: Source) -> None:
        steps, batches = self.gradient_accumulation_steps, source.num_batches
        if batches is not None and batches < steps:
            self._warn_once(
                f"`gradient_accumulation_steps` is {steps}, but an epoch has "
                f"only {batches} dataset batches: each epoch makes one update "
                "from a short window, divided by its own weight."
            )

    def _finalize(self) -> None:
        """Lets optimizers with a moving average set the weights to it."""
        for trained in self._train_window.trained:
            if trained.variables:
                trained.optimizer.finalize_variable_values(
                    trained.all_variables
                )

    def _train_epoch(
        self, source: Source, epoch: int, callbacks: Any
    ) -> dict[str, float]:
        """All windows of one epoch; returns its logs."""
        iterator = source.begin_epoch(epoch)
        batches_per_call = (
            self.steps_per_execution * self.gradient_accumulation_steps
        )
        total, done, more, stops = source.num_batches, 0, True, False
        logs: dict[str, float] = {}
        while more and (total is None or done < total):
            batches = batches_per_call
            if total is not None:
                batches = min(batches, total - done)
            callbacks.on_train_batch_begin(done)
            results, more, stopped = self.train_function(
                iterator, batches, stops
            )
            if stopped:
                self.stop_training = True
                break
            if not more and not any(u.examples for u in self.last_updates):
                break
            self._check_updates()
            logs = results
            done += batches
            callbacks.on_train_batch_end(done - 1, logs)
            stops = self.stop_training
            if stops and not self._has_other_workers:
                break
        if not more and total is not None and done < total:
            warnings.warn(
                f"The data ended after {done} of {total} batches. Use "
                "`.repeat()`, or a smaller `steps_per_epoch`.",
                stacklevel=3,
            )
        source.end_epoch(done, exhausted=not more)
        return dict(logs)

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
            self._skips_in_a_row = (
                self._skips_in_a_row + 1 if update.skipped else 0
            )
            limit = self.max_consecutive_skips
            if self.on_nonfinite == "raise":
                limit = 1
            if self._skips_in_a_row >= limit:
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
            f"Gradients must be finite; {self._skips_in_a_row} updates in a "
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

    @_in_step
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
        source = self._batch_source(x, y, sample_weight)
        self._build(source.spec)
        self.make_train_function()
        self.reset_metrics()
        logs, _, _ = self.train_function(source.begin_epoch(0), 1)
        self._check_updates()
        return self._batch_result(logs, return_dict)

    # --- Evaluation --------------------------------------------------------

    @_in_step
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics over all replicas and workers; as in Keras."""
        self._check_compiled("evaluate")
        source = self._source(
            x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps,
        )
        self._check_same({"data": source})
        callbacks = self._callbacks(callbacks, verbose, source)
        logs = self._evaluate(source, callbacks)
        return self._batch_result(logs, return_dict)

    def _evaluate(self, source: Source, callbacks: Any) -> dict[str, float]:
        self._build(source.spec)
        self.make_test_function()
        self.stop_evaluating = False
        callbacks.on_test_begin()
        self.reset_metrics()
        iterator = source.begin_epoch(0)
        total, done, more, stops = source.num_batches, 0, True, False
        logs: dict[str, float] = {}
        while more and (total is None or done < total):
            batches = self.steps_per_execution
            if total is not None:
                batches = min(batches, total - done)
            callbacks.on_test_batch_begin(done)
            results, examples, more, stopped = self.test_function(
                iterator, batches, stops
            )
            if stopped or (not examples and not more):
                break
            logs = results
            done += batches
            callbacks.on_test_batch_end(done - 1, logs)
            stops = self.stop_evaluating
            if stops and not self._has_other_workers:
                break
        source.end_epoch(done, exhausted=not more)
        callbacks.on_test_end(logs)
        return dict(logs)

    @_in_step
    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics of one batch; as in Keras."""
        self._check_compiled("test_on_batch")
        source = self._batch_source(x, y, sample_weight)
        self._build(source.spec)
        self.make_test_function()
        self.reset_metrics()
        logs, *_ = self.test_function(source.begin_epoch(0), 1)
        return self._batch_result(logs, return_dict)

    # --- Prediction --------------------------------------------------------

    @_in_step
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Outputs for all rows, in order, on every worker; as in Keras."""
        source = self._source(x, batch_size=batch_size, steps=steps)
        self._check_same({"data": source})
        callbacks = self._callbacks(callbacks, verbose, source)
        self.make_predict_function()
        self.stop_predicting = False
        callbacks.on_predict_begin()
        iterator = source.begin_epoch(0)
        total, done = source.num_batches, 0
        outputs = []
        while total is None or done < total:
            callbacks.on_predict_batch_begin(done)
            batch = self._predict_batch(iterator)
            if batch is None:
                break
            outputs.append(batch)
            callbacks.on_predict_batch_end(done, {"outputs": batch})
            done += 1
            if self.stop_predicting:
                break
        callbacks.on_predict_end()
        if not outputs:
            raise ValueError(
                "`x` must yield at least one batch. Received: no data."
            )
        return self._all_rows(outputs)

    @_in_step
    def predict_on_batch(self, x: Any) -> Any:
        """Outputs for one batch; as in Keras."""
        self.make_predict_function()
        batch = self._predict_batch(self._batch_source(x).begin_epoch(0))
        return self._all_rows([batch])

    def _predict_batch(self, iterator: Any) -> Any:
        """This worker's outputs for one dataset batch; None without data."""
        strategy = self.distribute_strategy
        parts: list[tuple] = []
        last = False
        while not last:
            rows, lasts, outputs = self.predict_function(iterator)
            if int(rows) == NO_MORE_DATA:
                return None
            last = bool(lasts)
            flat = [
                strategy.experimental_local_results(output)
                for output in keras.tree.flatten(outputs)
            ]
            parts.extend(zip(*flat, strict=True))
        return keras.tree.pack_sequence_as(
            outputs, [_concat(column) for column in zip(*parts, strict=True)]
        )

    def _all_rows(self, batches: list[Any]) -> Any:
        """Outputs of all batches over all workers, as numpy, in order."""
        strategy = self.distribute_strategy
        if self._has_other_workers:  # A callback may have stopped one early.
            counts = agreement.exchange(strategy, str(len(batches)))
            batches = batches[: min(map(int, counts))]
        flat = [keras.tree.flatten(batch) for batch in batches]
        columns = [list(column) for column in zip(*flat, strict=True)]
        if self._has_other_workers:
            columns = [_gathered(strategy, column) for column in columns]
        return keras.tree.pack_sequence_as(
            batches[0],
            [keras_private.concat_outputs(column) for column in columns],
        )

    # --- Small parts -------------------------------------------------------

    def _source(self, x: Any, **arguments: Any) -> Source:
        return Source(
            self.distribute_strategy,
            x,
            micro_batch_size=self.micro_batch_size,
            **arguments,
        )

    def _batch_source(
        self, x: Any, y: Any = None, sample_weight: Any = None
    ) -> Source:
        """The source whose one batch is this one."""
        batch = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
        return self._source(any_number_of_rows(batch))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def _build(self, spec: Any) -> None:
        """Creates all variables before anything is traced."""
        try:
            with self.distribute_strategy.scope():
                keras_private.symbolic_build(self, spec)
        except (RuntimeError, NotImplementedError):
            # A model with a step of its own need not be callable on its data;
            # its layers are then built by their maker.
            if not self.overrides_train_step:
                raise

    def _callbacks(
        self,
        callbacks: Any,
        verbose: Any,
        source: Source,
        epochs: int = 1,
        add_history: bool = False,
    ) -> keras.callbacks.CallbackList:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        return keras.callbacks.CallbackList(
            callbacks,
            add_history=add_history,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=source.num_batches,
            model=self,
        )

    def _batch_result(self, logs: dict[str, float], return_dict: bool) -> Any:
        if return_dict:
            return logs
        return keras_private.flatten_metrics(self, logs)

    def _check_compiled(self, method: str) -> None:
        if not self.compiled:
            raise ValueError(
                f"`compile` must be called before `{method}`. Received: a "
                "model that is not compiled."
            )


def _unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Validation data: a tuple of arrays, or anything else as `x`."""
    if isinstance(data, tuple | list):
        return keras.utils.unpack_x_y_sample_weight(tuple(data))
    return data, None, None


def _concat(parts: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.concat(parts, axis=0)


def _gathered(
    strategy: tf.distribute.Strategy, batches: list[tf.Tensor]
) -> list[tf.Tensor]:
    """All workers' rows of each batch, in the order of the workers."""
    _, workers = strategies.worker_index(strategy)
    sizes = tf.constant([[len(batch) for batch in batches]])
    sizes = agreement.gather(strategy, sizes).numpy()
    rows = agreement.gather(strategy, tf.concat(batches, 0))
    pieces = tf.split(rows, sizes.ravel())
    per_worker = [
        pieces[worker * len(batches) : (worker + 1) * len(batches)]
        for worker in range(workers)
    ]
    return [tf.concat(parts, 0) for parts in zip(*per_worker, strict=True)]
