"""The functions of an iterator that train, test and predict, traced once."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccum import agreement, keras_private
from tfaccum import strategy as strategies
from tfaccum.adasum import AdaSum
from tfaccum.auto_micro_batch import MicroBatchSearch
from tfaccum.exponents import NUM_BINS, Exponents
from tfaccum.feeding import OneBatch, Source
from tfaccum.micro_batches import (
    NO_MORE_DATA,
    CommonSpecs,
    next_elements,
    once_per_spec,
)
from tfaccum.micro_step import is_training
from tfaccum.schedule import AccumulationSchedule
from tfaccum.sparse import TableSum
from tfaccum.window import Freeze, Update, Window


def in_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Ends the call on all workers when it fails on one."""

    @functools.wraps(method)
    def on_all_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        with agreement.shared_fate(self.distribute_strategy):
            return method(self, *args, **kwargs)

    return on_all_workers


class Functions:
    """What `fit`, `evaluate` and `predict` of a model call and share."""

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
    gradient_accumulation_steps: Any = 1
    accumulation_schedule = AccumulationSchedule(1)
    micro_batch_size: Any = None
    micro_batch_search: MicroBatchSearch | None = None
    accumulator_dtype: str | None = None
    wire_dtype: str | None = None
    sparse_sums: bool | str = "auto"
    replica_reduction: AdaSum | str = "mean"
    adasum: AdaSum | None = None
    gradient_freeze: Freeze | None = None
    loss_scale: Any = "auto"
    on_nonfinite = "skip"
    max_consecutive_skips = 20

    # What happened at each update of the last call of the train function.
    last_updates: tuple[Update, ...] = ()

    # The call of `fit` that is going on, for its callbacks; None without one.
    current_run: Any = None

    # How many updates in a row were skipped.
    skips_in_a_row = 0

    # Whether exponents of gradients are counted, and those of the last window.
    counts_exponents = False
    last_exponents: Exponents | None = None

    # In which all variables train; None before it is made.
    train_window: Any = None

    @property
    def accumulator_bytes(self) -> int:
        """Bytes that gradient sums take on one replica; 0 without any.

        Of sparse sums, the most that they have taken so far.
        """
        window = self.train_window
        return 0 if window is None else window.accumulator_bytes

    @property
    def table_sums(self) -> tuple[TableSum, ...]:
        """How the gradients of tables are summed, once that is known."""
        window = self.train_window
        return () if window is None else window.table_sums or ()

    @property
    def _has_other_workers(self) -> bool:
        return strategies.worker_index(self.distribute_strategy)[1] > 1

    @property
    def is_single_micro_step(self) -> bool:
        """Whether the window that runs is one micro-step on one replica."""
        is_cut = self.micro_batch_size is not None
        accumulates = self._accumulates() if is_training() else is_cut
        replicas = strategies.num_replicas(self.distribute_strategy)
        return replicas == 1 and not accumulates

    def _accumulates(self) -> bool:
        return (
            not self.accumulation_schedule.is_always_one
            or self.micro_batch_size is not None
        )

    @property
    def cut_size(self) -> int | None:
        """The most examples of one replica at once, now; None: uncut."""
        if self.micro_batch_search is not None:
            return self.micro_batch_search.size
        return self.micro_batch_size

    @property
    def makes_own_steps(self) -> bool:
        """Whether each replica's optimizer has moments of its own."""
        return self.adasum is not None and self.adasum.form == "delta"

    @property
    def num_updates(self) -> int:
        """Updates made by the first optimizer that `train_step` trains.

        By the compiled one until a step was traced.
        """
        trained = self.train_window.trained if self.train_window else []
        optimizer = trained[0].optimizer if trained else self.optimizer
        return int(tf.convert_to_tensor(optimizer.iterations))

    def reset_training_functions(self) -> None:
        """Forgets traced functions and what has been warned about."""
        self.train_function: Any = None
        self.test_function: Any = None
        self.predict_function: Any = None
        self.train_window = None
        self.last_updates = ()
        self.skips_in_a_row = 0
        self._warned: set[str] = set()

    def make_train_function(self, force: bool = False) -> None:
        """Makes `train_function(...) -> (logs, more, stopped)`."""
        if self.train_function is not None and not force:
            return
        freeze = self.gradient_freeze
        if freeze:  # Says now if it cannot.
            freeze.frozen(self, 0)
        accumulates = self._accumulates()
        whole = Window(self, self.train_step, accumulates=accumulates)
        function_of = (
            self._function_of
            if self.micro_batch_search is None
            else self._searching_function_of
        )
        made = {0: (whole, function_of(whole))}

        def of_group(group: int) -> tuple[Window, Any]:
            if group not in made:
                window = Window(
                    self,
                    self.train_step,
                    accumulates=accumulates,
                    frozen=freeze.frozen(self, group) if freeze else (),
                    whole=whole,
                )
                made[group] = window, function_of(window)
            return made[group]

        def train_function(
            source: Source, batches: int, steps: int, stops: bool = False
        ) -> tuple[dict, bool, bool]:
            group = freeze.group_at(self.num_updates) if freeze else 0
            window, execute = of_group(group)
            logs, rows, counts, more, stopped = execute(
                source, batches, steps, stops
            )
            if self.counts_exponents:
                self.last_exponents = Exponents(window.paths, counts)
            updates = [window.read(row) for row in rows]
            while updates and not more and not updates[-1].examples:
                updates.pop()  # Behind the end of the data.
            self.last_updates = tuple(updates)
            return logs, more, stopped

        self.train_function = train_function
        self.train_window = whole

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
            source: Source, batches: int, stops: bool = False
        ) -> tuple[dict, int, bool, bool]:
            logs, examples, _, more, stopped = execute(
                source, batches, 1, stops
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
                done = tf.where(
                    window.ends_training(row), batches, done + steps
                )
                return done, more, stopped, logs, counts, rows

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

        traces: Any = execute
        if not self.run_eagerly:
            traces = tf.function(execute, autograph=False)

        @once_per_spec
        def call_for(spec: Any) -> Callable[..., Any]:
            window.prepare(spec)
            if self.run_eagerly:
                return traces
            scalars = (tf.TensorSpec([], t) for t in ("int32", "int32", "bool"))
            return traces.get_concrete_function(
                tf.data.IteratorSpec(spec), *scalars
            )

        def function(
            source: Source, batches: int, steps: int, stops: bool
        ) -> tuple:
            call = call_for(source.element_spec)
            arguments = (
                source.iterator,
                tf.constant(batches),
                tf.constant(steps),
                tf.constant(stops),
            )
            with window.forgotten_on_error():
                return _read(window, call(*arguments))

        return function

    def _searching_function_of(self, window: Window) -> Any:
        """One window of `batches`, with micro-batches that fit into memory."""
        begin: Any = window.begin
        finish: Any = window.finish
        search: Any = self.micro_batch_search
        if not self.run_eagerly:
            begin = tf.function(begin, autograph=False)
            finish = tf.function(finish, autograph=False)

        @once_per_spec
        def prepare(spec: Any) -> None:
            window.prepare(spec)
            window.check_search()

        def function(
            source: Source, batches: int, steps: int, stops: bool
        ) -> tuple:
            prepare(source.element_spec)
            stop = tf.constant(stops)
            with window.forgotten_on_error():
                begun = search.begin(
                    window,
                    lambda iterator: begin(
                        iterator, tf.constant(batches), stop
                    ),
                    source,
                    batches,
                )
                logs, row, *others = finish(begun, stop)
                return _read(window, (logs, row[tf.newaxis], *others))

        return function

    def make_predict_function(self, force: bool = False) -> None:
        """Makes `predict_function(source) -> (last, outputs)`.

        One micro-step; it gives None where there are no more data, of which
        the model sees nothing.
        """
        if self.predict_function is not None and not force:
            return

        strategy = self.distribute_strategy

        def draw(iterator: Any) -> tuple:
            return next_elements(iterator, strategy)

        def outputs(data: list) -> Any:
            batch = keras_private.per_replica(data)
            return strategy.run(self.predict_step, args=(batch,))

        traced: Any = outputs
        if not self.run_eagerly:
            draw = tf.function(draw, autograph=False)
            traced = tf.function(outputs, autograph=False)

        @once_per_spec
        def call_for(spec: Any) -> Callable[..., Any]:
            if self.run_eagerly:
                return outputs
            replicas = strategies.num_local_replicas(strategy)
            return traced.get_concrete_function([spec] * replicas)

        def predict_function(source: Source) -> tuple[bool, Any] | None:
            rows, ends, _, data = draw(source.iterator)
            if int(rows[0]) == NO_MORE_DATA:
                return None
            _, spec = source.element_spec
            return bool(ends[0]), call_for(spec)(list(data))

        self.predict_function = predict_function

    # --- What `fit`, `evaluate` and `predict` share ------------------------

    def _make_source(self, x: Any, **arguments: Any) -> Source:
        return Source(
            self.distribute_strategy,
            x,
            micro_batch_size=self.cut_size,
            **arguments,
        )

    def _batch_source(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        holds: bool = False,
    ) -> Source:
        """The source whose one batch is this one."""
        batch = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        batch = keras.tree.map_structure(_as_tensor, batch)
        spec = self._batch_specs.of(batch)
        return self._make_source(OneBatch(batch, spec), holds=holds)

    @functools.cached_property
    def _batch_specs(self) -> CommonSpecs:
        return CommonSpecs()

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def _say_if_short(self, source: Source, done: int, argument: str) -> None:
        """Says that data have ended before they should have."""
        total = source.promised_batches
        if total is not None and done < total:
            warnings.warn(
                f"The data ended after {done} of {total} batches. Use "
                f"`.repeat()`, or a smaller `{argument}`.",
                stacklevel=4,
            )

    def _build(self, spec: Any) -> None:
        """Creates all variables before anything is traced."""
        try:
            with self.distribute_strategy.scope():
                keras_private.symbolic_build(self, spec)
        except Exception:
            # A model with a step of its own need not be callable on its data,
            # nor these be what Keras' step takes; its layers are then built by
            # their maker.
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
        container = keras.callbacks.CallbackList(
            callbacks,
            add_history=add_history,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=source.num_batches,
            model=self,
        )
        # One that saves what the others remember comes after them.
        container.callbacks.sort(key=lambda c: getattr(c, "runs_last", False))
        return container

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


def _as_tensor(leaf: Any) -> Any:
    """A tensor of what Keras takes; sparse and ragged ones stay as they are."""
    return leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _read(window: Window, found: tuple) -> tuple:
    """What a window has returned, on the host; its logs by name."""
    logs, rows, counts, more, stopped = found
    named, values = {}, iter(logs.numpy().tolist())
    for name, shape in window.log_shapes.items():
        part = list(itertools.islice(values, shape.num_elements()))
        named[name] = np.reshape(part, shape) if shape.rank else part[0]
    return named, rows.numpy(), counts.numpy(), bool(more), bool(stopped)
