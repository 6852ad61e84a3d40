"""The window: K micro-steps, one reduction, one update.

`Window.run` is the algorithm, in execution order. It runs in cross-replica
context, so that loops and conditions enclose `strategy.run` and never the
other way round; a micro-step communicates nothing.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf
from absl import logging

from tfaccum import keras_private, loss_scale, reduction
from tfaccum import strategy as strategies
from tfaccum.accumulator import ReplicaSums
from tfaccum.adasum import AdaSum
from tfaccum.exponents import NUM_BINS
from tfaccum.group_loss_scale import GroupLossScale
from tfaccum.micro_batches import (
    NO_MORE_DATA,
    counted,
    next_elements,
    nothing,
    once_per_spec,
)
from tfaccum.micro_step import MicroStep, Trained, is_counter
from tfaccum.reduction import Gradient
from tfaccum.sparse import SparseSpec, TableSum, combined, table_sum
from tfaccum.update import (
    build_optimizer,
    is_overwritten,
    judged,
    needs_losses,
    only_if,
    update_if,
)


@dataclasses.dataclass(frozen=True)
class Update:
    """What happened at one update (or at one that was skipped).

    Attributes:
        update: number of updates made so far (`optimizer.iterations`).
        loss: mean loss over the window, unscaled.
        learning_rate: used for this update.
        gradient_norm: L2 norm of the reduced gradient before clipping. With
            `AdamA` the root of the sum of the squares of what each
            micro-batch has added to it.
        loss_scale: scale of this window; 1 without scaling.
        skipped: whether the update was dropped because a gradient was not
            finite.
        examples: examples in the window, over all replicas.
        weight: sum of the weights; 0 means that nothing was applied.
        nonfinite_replica: this worker's first replica with a gradient that
            is not finite, counted over all workers; None if there is none, or
            if only the sum over the replicas is not finite.
        nonfinite_variable: path of the first such variable on that replica.
        input_wait: seconds in which this worker waited for data.
    """

    update: int
    loss: float
    learning_rate: float
    gradient_norm: float
    loss_scale: float
    skipped: bool
    examples: int
    weight: float
    nonfinite_replica: int | None = None
    nonfinite_variable: str | None = None
    input_wait: float = 0.0


@runtime_checkable
class Freeze(Protocol):
    """Which variables train, update by update: `compile(gradient_freeze=)`.

    Its `str` says all that it depends on: workers compare it.
    """

    def group_at(self, update: int) -> int:
        """The group of the window after so many updates; 0 trains all."""

    def frozen(self, model: Any, group: int) -> Sequence[keras.Variable]:
        """What does not train in a window of this group."""


class Window:
    """One window's computation for one compiled model.

    Args:
        model: a compiled `tfaccum.Model`.
        step: `model.train_step` or `model.test_step`; the latter hands over
            losses without gradients.
        accumulates: whether a window may have more than one micro-step.
            Otherwise no sums are kept, and with one replica the gradient
            reaches the optimizer untouched.
        frozen: variables that are not trained.
        whole: the window of the same step in which all variables train, whose
            sums serve for this one too.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[Any], Any],
        *,
        accumulates: bool,
        frozen: Sequence[keras.Variable] = (),
        whole: "Window | None" = None,
    ):
        self._model = model
        self.strategy = self._strategy = model.distribute_strategy
        self._replicas = strategies.num_replicas(self._strategy)
        self._trains = step == model.train_step
        self._accumulates = accumulates
        self._step = MicroStep(
            model,
            step,
            is_whole_window=self._replicas == 1 and not accumulates,
            frozen=frozen,
        )
        self._whole = whole
        self._spec: Any = None  # Of elements, with their counts.
        self._micro_step: Callable[..., Any] = self._step.run
        self._loss_step: Callable[..., Any] = self._step.losses
        self._traced = once_per_spec(self._trace)
        self.sums: Any = None  # ReplicaSums, where the window accumulates.
        # How the gradients of tables are summed, once a step was traced.
        self.table_sums: tuple[TableSum, ...] | None = None
        self._sparse_ids: set[int] = set()  # Variables whose sum is sparse.
        self._layer_variables = (
            keras_private.layer_state(model) if self._trains else []
        )
        _, self._workers = strategies.worker_index(self._strategy)
        # What micro-steps change beside the sums and moving statistics.
        self._recalled = (
            [
                *model.metrics_variables,
                *(v for v in model.non_trainable_variables if is_counter(v)),
            ]
            if self._workers > 1
            else []
        )
        # By name, in their order; known once `run` was traced.
        self.log_shapes: dict[str, tf.TensorShape] = {}

    @property
    def trained(self) -> list[Trained]:
        """Each optimizer with its variables, once a step was traced."""
        return self._step.trained

    @property
    def _searches(self) -> bool:
        return any(needs_losses(t.optimizer) for t in self.trained)

    @property
    def _peels(self) -> bool:
        """Whether the last micro-step stands behind the loop of the others.

        Its gradients then travel pack by pack while it goes backward. One
        that is cut does not know that it is the last.
        """
        return (
            self._trains
            and self._workers > 1
            and keras_private.bytes_per_pack(self._strategy) > 0
            and self._model.micro_batch_size is None
            and not self._searches
        )

    @property
    def num_fields(self) -> int:
        """Length of the row that `run` returns."""
        return len(dataclasses.fields(Update)) if self._trains else 1

    @property
    def accumulator_bytes(self) -> int:
        """Bytes that the sums take on one replica; 0 without accumulation.

        Of sparse sums, the most that they have taken so far.
        """
        return self.sums.num_bytes if self.sums else 0

    def prepare(self, element_spec: Any) -> None:
        """Traces one micro-step and creates the sums that it needs.

        Before `run` is traced with an iterator of this spec: a micro-step is
        traced once, and variables are made outside of all traces.

        Raises:
            ValueError: if a micro-step is not the whole update, and there are
                variables that are overwritten with their gradient.
        """
        if self._whole:
            self._whole.prepare(element_spec)
        self._spec = counted(element_spec)
        # Eager steps need the trace too: it tells how their results look.
        traced, self._step.trained = self._traced(element_spec)
        self._check_overwritten()
        self._create_variables()
        if self._step.is_incomplete:
            self._step.is_incomplete = False
            self._traced = once_per_spec(self._trace)
            traced, _ = self._traced(element_spec)
        self._micro_step = self._step.run if self._model.run_eagerly else traced
        if self._searches:
            self._loss_step = tf.function(
                self._step.losses, autograph=False
            ).get_concrete_function(self._same_for_all(self._spec))

    def _trace(self, element_spec: Any) -> tuple[Any, list[Trained]]:
        """One micro-step for such elements, and what was handed over in it."""
        has_rows = not element_spec[0]

        def micro_step(elements: list[tuple]) -> Any:
            return self._step.run(elements, has_rows)

        function = tf.function(micro_step, autograph=False)
        try:
            traced = function.get_concrete_function(
                self._same_for_all(counted(element_spec))
            )
            return traced, self._step.trained
        except (AttributeError, NotImplementedError, TypeError) as error:
            if self._model.run_eagerly:
                error.add_note(
                    "A step is traced once with `run_eagerly=True` too, to "
                    "learn how its results look. Write `if tf.executing_"
                    "eagerly():` before what needs values, as `print` does."
                )
            raise

    def _check_overwritten(self) -> None:
        """Refuses what has no mean over micro-steps and replicas."""
        overwritten = [
            v.path
            for t in self.trained
            for v in t.variables
            if is_overwritten(v)
        ]
        is_plain = not (self._accumulates or self._searches)
        if overwritten and not (is_plain and self._replicas == 1):
            raise ValueError(
                "A model of float8 must make each update from one batch on one "
                "device, with an optimizer that does not search: what its "
                "scales are overwritten with has no mean. Received: "
                f"{overwritten[0]} with gradient_accumulation_steps="
                f"{self._model.accumulation_schedule}, micro_batch_size="
                f"{self._model.micro_batch_size}, {self._replicas} replicas, "
                f"{self.trained[0].optimizer.name}. Use the dtype policy "
                "'mixed_bfloat16'."
            )

    def _same_for_all(self, element: Any) -> list[tuple]:
        """One element of the stream, or its spec, for each local replica."""
        (rows, _, total), data = element
        replicas = strategies.num_local_replicas(self._strategy)
        return [(rows, total, data)] * replicas

    # --- The algorithm -----------------------------------------------------

    def run(
        self, iterator: Any, batches: tf.Tensor, stops: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """One update from the next `batches` dataset batches.

        Args:
            iterator: over `micro_batches.micro_batch_stream`.
            batches: int32 scalar, K; fewer where the data end.
            stops: bool scalar: whether this worker wants no more updates. If
                any does, the window leaves no trace on any.

        Returns:
            (logs, row, exponents, more, stopped): float32 [sum of the sizes
            of `log_shapes`], float64 [num_fields] (an `Update`; in evaluation
            the number of examples), float32 [variables, NUM_BINS] (no
            variables unless they are asked for), whether any worker has data
            left, and whether any has stopped (bool scalars).

        Context: cross-replica.
        """
        return self.finish(self.begin(iterator, batches, stops), stops)

    def begin(
        self, iterator: Any, batches: tf.Tensor, stops: tf.Tensor
    ) -> tuple[Any, ...]:
        """The first half of `run`: all micro-steps. Communicates nothing."""
        run = self._strategy.run
        before = run(self._layer_state), run(self._recallable)
        if self._accumulates:
            return before, *self._accumulate(iterator, batches, stops)
        _, more, wait, found, elements = self._next(iterator)
        return before, more, wait, found, elements if self._searches else ()

    def finish(self, begun: tuple[Any, ...], stops: tf.Tensor) -> tuple:
        """The second half of `run`: one reduction, one update."""
        run = self._strategy.run
        (state, before), more, wait, found, elements = begun
        if self._accumulates:
            found = run(self.sums.values, args=(found,))
        reduced = run(self._reduce, args=(more, stops, found))
        stopped = self._local(reduced["stopped"])
        results = self._results(reduced)
        finite = tf.reduce_all([r["finite"] for r in results])
        row = [*self._row(reduced), *self._culprit(finite, found)]
        if self._trains:
            row.append(wait)
        self._reset_sums()
        for index, of_optimizer in enumerate(
            zip(reduced["gradients"], results, strict=True)
        ):
            self._update(index, *of_optimizer, stopped, elements)
        keeps = (
            (finite | (self._model.on_nonfinite == "apply"))
            & tf.reduce_any([r["weight"] > 0 for r in results])
            & ~stopped
        )
        run(self._settle_layer_state, args=(keeps, state, reduced["state"]))
        run(self._end_window, args=(keeps, reduced["statistics"]))
        run(self._recall_if, args=(stopped, before))
        return (
            self._local(reduced["logs"]),
            self._counted(row),
            tf.reshape(
                [self._local(counts) for counts in reduced["exponents"]],
                [-1, NUM_BINS],
            ),
            self._local(reduced["more"]),
            stopped,
        )

    def _accumulate(
        self, iterator: Any, batches: tf.Tensor, stops: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Any, Any]:
        """Adds up micro-steps until `batches` have ended, one after the other.

        Returns:
            Whether there are more, the seconds in which data were waited for,
            what the last micro-step has found if it has not been added (or
            None), and the last elements if they are needed.
        """
        peels = int(self._peels)

        def body(left: tf.Tensor, waited: tf.Tensor, kept: list) -> tuple:
            ends, _, wait, found, elements = self._next(iterator)
            self._strategy.run(self.sums.add, args=(found,))
            if kept:
                had_rows = tf.reduce_any([rows > 0 for rows, *_ in elements])
                kept = tf.cond(
                    had_rows, lambda: _flat(elements), lambda: list(kept)
                )
            return left - ends, waited + wait, kept

        # Where layers communicate every worker makes the same micro-steps.
        runs = ~stops | (self._step.communicates & (self._workers > 1))
        # Only a search looks at a micro-batch again.
        none_yet, specs = (
            (self._same_for_all(e) for e in (nothing(self._spec), self._spec))
            if self._searches
            else ([], [])
        )
        left, wait, kept = tf.while_loop(
            lambda left, *_: left > peels,
            body,
            (
                tf.where(runs, batches, 0),
                tf.zeros([], tf.float64),
                _flat(none_yet),
            ),
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([]),
                [spec.shape for spec in _flat(specs)],
            ),
            # What belongs to a micro-step must not outlive it.
            parallel_iterations=1,
        )
        elements = tf.nest.pack_sequence_as(
            none_yet, kept, expand_composites=True
        )
        more, found = left >= 0, None
        if peels:
            _, more, waited, found, _ = self._next(iterator)
            wait += waited
        return more | ~runs, wait, found, elements

    def _next(self, iterator: Any) -> tuple[Any, ...]:
        """Takes the next micro-batches through forward and backward pass."""
        asked = tf.timestamp()
        with tf.control_dependencies([asked]):
            rows, ends, totals, data = next_elements(iterator, self._strategy)
        # The number of rows may be known before they are there.
        there = [leaf for leaf in _flat(data) if tf.is_tensor(leaf)]
        with tf.control_dependencies(there):
            wait = tf.timestamp() - asked
        elements = list(zip(rows, totals, data, strict=True))
        # No replica begins before: what it computes is not a wait.
        with tf.control_dependencies([wait]):
            found = self._micro_step(elements)
        more = rows[0] != NO_MORE_DATA
        return ends[0], more, wait, found, elements

    def check_search(self) -> None:
        """Refuses to look for a micro-batch size where layers communicate.

        Raises:
            ValueError: if they do.
        """
        if self._step.communicates:
            raise ValueError(
                "`micro_batch_size` must be a number where layers communicate "
                "in their forward pass: a replica that runs out of memory "
                "would leave the others waiting. Received: "
                "micro_batch_size='auto' with a layer that has "
                "`synchronized=True`. Use "
                "tfaccum.layers.WindowBatchNormalization."
            )

    def ends_training(self, row: tf.Tensor) -> tf.Tensor:
        """Whether no window may follow one with this row, scalar bool.

        What it has left, such as moments that have absorbed a bad gradient,
        must not reach the weights before `fit` raises.
        """
        if not self._trains or self._model.on_nonfinite != "raise":
            return tf.constant(False)
        fields = [field.name for field in dataclasses.fields(Update)]
        return row[fields.index("skipped")] > 0

    # --- Taken back --------------------------------------------------------

    @contextlib.contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """Sets the sums to zero if the body fails in the middle of a window.

        The next window must not add to what this one has left.
        """
        try:
            yield
        except BaseException:
            self._reset_sums()
            raise

    def _reset_sums(self) -> None:
        if self.sums:
            self._strategy.run(self.sums.reset)

    def remember(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """What `begin` changes beside the sums, on this worker's replicas."""
        counters = filter(is_counter, self._model.non_trainable_variables)
        variables = [
            *self._layer_variables,
            *self._model.metrics_variables,
            *counters,
        ]
        return [
            (copy, tf.identity(copy))
            for variable in variables
            for copy in self._strategy.experimental_local_results(
                variable.value
            )
        ]

    def put_back(self, before: list[tuple[tf.Variable, tf.Tensor]]) -> None:
        """Takes `begin` back; `before` is what `remember` has returned."""
        for copy, value in before:
            copy.assign(value)
        self._reset_sums()

    # --- In replica context ------------------------------------------------

    def _reduce(
        self, more: tf.Tensor, stops: tf.Tensor, totals: Any
    ) -> dict[str, Any]:
        """Sums over the replicas, then means, the verdict and the logs."""
        totals = totals | {
            "sums": [
                self._as_summed(*pair)
                for pair in zip(self.trained, totals["sums"], strict=True)
            ]
        }
        metrics = [v.value for v in self._model.metrics_variables]
        had_rows = totals["examples"] > 0
        state = self._layer_state()
        adasum = self._model.adasum if self._replicas > 1 else None
        own: list[Any] = []
        if adasum:  # Each replica's own mean, with a verdict of its own.
            own = [
                self._mean(*pair)
                for pair in zip(self.trained, totals["sums"], strict=True)
            ]
        if self._replicas > 1:
            gradients = [sums.pop("gradients") for sums in totals["sums"]]
            (
                gradients,
                (totals, metrics, state, taught, more, stops, own_sums),
            ) = reduction.all_reduce_gradients(
                [] if adasum else gradients,
                (
                    totals,
                    [_own_part(v) for v in self._model.metrics_variables],
                    [reduction.weighted(s, _as_float(had_rows)) for s in state],
                    _as_float(had_rows),
                    _as_float(more),
                    _as_float(stops),
                    [(_as_float(~r["finite"]), r["norm"]) for r in own],
                ),
                self._model.wire_dtype,
            )
            for sums, reduced in zip(totals["sums"], gradients, strict=False):
                sums["gradients"] = reduced
            state = [
                tf.where(taught > 0, reduction.divided(total, taught), own)
                for total, own in zip(state, self._layer_state(), strict=True)
            ]
            more, stops = more > 0, stops > 0
        if adasum:
            results = [
                self._combined(adasum, *of_optimizer)
                for of_optimizer in zip(
                    self.trained, own, totals["sums"], own_sums, strict=True
                )
            ]
        else:
            results = [
                self._mean(trained, sums)
                for trained, sums in zip(
                    self.trained, totals["sums"], strict=True
                )
            ]
        return {
            "gradients": [result.pop("gradients") for result in results],
            "results": results,
            "examples": totals["examples"],
            "exponents": totals["exponents"],
            "state": state,
            "statistics": totals["statistics"],
            "more": more,
            "stopped": stops,
            "logs": self._logs(totals, results, metrics),
        }

    def _as_summed(
        self, trained: Trained, sums: dict[str, Any]
    ) -> dict[str, Any]:
        """A replica's sums: of a table its rows, each once, or all."""

        def of(variable: keras.Variable, gradient: Gradient) -> Gradient:
            # A sum that was kept is as it has to be.
            if self._accumulates or not isinstance(gradient, tf.IndexedSlices):
                return gradient
            if id(variable) in self._sparse_ids:
                return combined(gradient)
            return tf.ensure_shape(
                tf.convert_to_tensor(gradient), variable.shape
            )

        if self._replicas == 1:
            return sums
        return sums | {
            "gradients": [
                of(v, g)
                for v, g in zip(trained.summed, sums["gradients"], strict=True)
            ]
        }

    def _mean(self, trained: Trained, sums: dict[str, Any]) -> dict[str, Any]:
        """Divides one optimizer's sums by their weight, and judges them."""
        weight = sums["weight"]
        divisor = trained.divisor(weight)
        gradients = [self._step.over(g, divisor) for g in sums["gradients"]]
        norm, finite = tf.zeros([]), tf.constant(True)
        of_groups = {}
        if trained.absorbs:
            norm = tf.sqrt(tf.reduce_sum(sums["squares"]))
            finite = tf.math.is_finite(norm)
        elif gradients:
            if groups := self._group_scale(trained):
                gradients = groups.unscaled(gradients, trained.variables)
                of_groups["finite_groups"] = groups.verdicts(
                    gradients, trained.variables
                )
            gradients, norm, finite = judged(
                trained.optimizer, gradients, trained.variables
            )
        return of_groups | {
            "gradients": [
                _cast(g, v.dtype)
                for g, v in zip(gradients, trained.summed, strict=True)
            ],
            "loss": self._step.over(sums["loss"], divisor),
            "weight": weight,
            "norm": norm,
            "finite": finite,
        }

    def _combined(
        self,
        adasum: AdaSum,
        trained: Trained,
        own: dict[str, Any],
        sums: dict[str, Any],
        own_sums: tuple[tf.Tensor, tf.Tensor],
    ) -> dict[str, Any]:
        """As `_mean`, with one gradient made of those of the replicas.

        When changes are combined instead, each replica keeps its own, and the
        norm is the mean of theirs.
        """
        weight, (bad, norms) = sums["weight"], own_sums
        divisor = trained.divisor(weight)
        own_steps = self._model.makes_own_steps
        combine = adasum.of_worker if own_steps else adasum.combined
        gradients, norm = own["gradients"], norms / self._replicas
        if gradients:
            gradients = combine(
                gradients, own["weight"], self._model.wire_dtype
            )
            if not own_steps:
                norm = reduction.global_norm(gradients)
        return {
            "gradients": gradients,
            "loss": self._step.over(sums["loss"], divisor),
            "weight": weight,
            "norm": norm,
            "finite": tf.equal(bad, 0),
        }

    def _logs(
        self,
        totals: Any,
        results: list[dict[str, Any]],
        metrics: list[tf.Tensor],
    ) -> tf.Tensor:
        """All logs as one float32 vector, in the order of `log_shapes`.

        The loss of the whole window enters the loss metric once, with all its
        examples, as one big batch would.
        """
        if self._replicas == 1:
            self._track_loss(totals, results, is_first=True)
            values = self._metrics_result()
        else:
            variables = self._model.metrics_variables
            mapping = list(zip(variables, metrics, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                self._track_loss(totals, results, is_first=True)
                values = self._metrics_result()
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group, 0)
            self._track_loss(totals, results, is_first=first)
        for name, total in totals["logs"].items():
            values[name] = self._step.over(total, totals["examples"])
        tensors = [tf.cast(v, tf.float32) for v in values.values()]
        shapes = (tensor.shape for tensor in tensors)
        self.log_shapes = dict(zip(values, shapes, strict=True))
        # Most are scalars; a metric may have one number for each class.
        return tf.concat([tf.reshape(v, [-1]) for v in tensors], 0)

    def _metrics_result(self) -> dict[str, tf.Tensor]:
        """Metrics by name; a loss of which nothing was counted is NaN."""
        values = dict(self._model.get_metrics_result())
        tracker = keras_private.loss_tracker(self._model)
        if self._tracks_loss():
            loss = tf.convert_to_tensor(values[tracker.name])
            nan = tf.constant(float("nan"), loss.dtype)
            values[tracker.name] = tf.where(tracker.count > 0, loss, nan)
        return values

    def _tracks_loss(self) -> bool:
        """Whether the loss that was handed over is logged as a metric."""
        tracker = keras_private.loss_tracker(self._model)
        return bool(self.trained) and any(
            metric is tracker for metric in self._model.metrics
        )

    def _track_loss(
        self, totals: Any, results: list[dict[str, Any]], is_first: Any
    ) -> None:
        """Adds the window's loss to the loss metric, on one replica only.

        A loss that is not finite is left out: its update is skipped too.
        """
        if not self._tracks_loss():
            return
        tracker = keras_private.loss_tracker(self._model)
        loss = results[0]["loss"]
        counts = tf.math.is_finite(loss) & is_first
        tracker.update_state(
            tf.where(counts, loss, 0),
            sample_weight=tf.where(counts, totals["examples"], 0),
        )

    # --- Layer state: moving statistics ------------------------------------

    def _layer_state(self) -> list[tf.Tensor]:
        """This replica's moving statistics."""
        return [tf.identity(v.value) for v in self._layer_variables]

    def _settle_layer_state(
        self, keeps: tf.Tensor, before: list, after: list
    ) -> None:
        """Moving statistics, equal on all replicas; as before if skipped."""
        for variable, old, new in zip(
            self._layer_variables, before, after, strict=True
        ):
            variable.assign(tf.where(keeps, tf.cast(new, old.dtype), old))

    def _end_window(self, keeps: tf.Tensor, statistics: list) -> None:
        """State of layers that moves once per window, by the reduced sums."""
        for layer, sums in zip(self._step.layers, statistics, strict=True):
            layer.end_window(sums, keeps)

    def _recallable(self) -> list[tf.Tensor]:
        """This replica's metrics, seeds and counters."""
        return [tf.identity(v.value) for v in self._recalled]

    def _recall_if(self, stopped: tf.Tensor, before: list) -> None:
        """Metrics, seeds and counters as before the window, if stopped."""
        for variable, old in zip(self._recalled, before, strict=True):
            variable.assign(tf.where(stopped, old, variable.value))

    # --- In cross-replica context ------------------------------------------

    def _local(self, value: Any) -> Any:
        """One replica's copy of a value that all replicas share."""
        return self._strategy.experimental_local_results(value)[0]

    def _results(self, reduced: dict[str, Any]) -> list[dict[str, Any]]:
        """Loss, weight, norm and verdict of each optimizer's gradient."""
        return [
            {name: self._local(value) for name, value in result.items()}
            for result in reduced["results"]
        ]

    def _choose_sums(self) -> None:
        """Decides which gradients stay sparse, the same on every worker."""
        model = self._model
        found = self._sparse_gradients()
        steps = model.accumulation_schedule.largest
        if self._workers > 1 or model.micro_batch_size is not None:
            steps = None  # A worker knows the rows of its own data at most.
        self.table_sums = tuple(
            table_sum(
                variable.path,
                spec,
                asked=model.sparse_sums,
                steps=steps,
                replicas=self._replicas,
                has_adasum=self._replicas > 1 and model.adasum is not None,
            )
            for variable, spec in found
        )
        self._sparse_ids = {
            id(variable)
            for (variable, _), chosen in zip(
                found, self.table_sums, strict=True
            )
            if chosen.is_sparse
        }
        for chosen in self.table_sums:
            logging.info("tfaccum: %s", chosen)

    def _sparse_gradients(self) -> list[tuple[keras.Variable, SparseSpec]]:
        """The variables with IndexedSlices of which a sum is made."""
        if self._replicas == 1 and not self._accumulates:
            return []
        return [
            (variable, spec)
            for trained, sums in zip(
                self.trained, self._step.specs["sums"], strict=True
            )
            for variable, spec in zip(
                trained.summed, sums["gradients"], strict=True
            )
            if isinstance(spec, SparseSpec)
        ]

    def _create_variables(self) -> None:
        """Sums and optimizers for what a micro-step was found to need."""
        if self.table_sums is None:
            self._choose_sums()
        with self._strategy.scope():
            if self._accumulates and self.sums is None:
                self.sums = (
                    ReplicaSums(self._part_of(self._whole))
                    if self._whole
                    else ReplicaSums.zeros(self._sum_specs())
                )
            for trained in self.trained:
                if trained.variables:
                    build_optimizer(trained.optimizer, trained.all_variables)

    def _part_of(self, whole: "Window") -> Any:
        """The sums of what trains here, among those of the whole window."""
        sums = whole.sums.parts
        trains = {id(v) for trained in self.trained for v in trained.variables}
        kept = [
            [id(v) in trains for v in trained.variables]
            for trained in whole.trained
        ]
        return sums | {
            "exponents": list(
                itertools.compress(
                    sums["exponents"], itertools.chain.from_iterable(kept)
                )
            ),
            "sums": [
                of_optimizer
                | {
                    "gradients": list(
                        itertools.compress(of_optimizer["gradients"], keep)
                    )
                }
                for of_optimizer, keep in zip(sums["sums"], kept, strict=True)
            ],
        }

    def _sum_specs(self) -> Any:
        """Specs of the sums, in the accumulator's dtype."""
        chosen = self._model.accumulator_dtype

        def of(variable: keras.Variable, spec: Any) -> Any:
            dtype = chosen or spec.dtype
            is_sparse = id(variable) in self._sparse_ids
            if is_sparse and isinstance(spec, SparseSpec):
                return SparseSpec(spec.shape, tf.as_dtype(dtype))
            return tf.TensorSpec(spec.shape, dtype)

        specs = self._step.specs
        return specs | {
            "sums": [
                sums
                | {
                    "gradients": [
                        of(v, spec)
                        for v, spec in zip(
                            trained.summed, sums["gradients"], strict=True
                        )
                    ]
                }
                for trained, sums in zip(
                    self.trained, specs["sums"], strict=True
                )
            ]
        }

    def _update(
        self,
        index: int,
        gradients: Any,
        result: dict[str, Any],
        stopped: tf.Tensor,
        elements: Any,
    ) -> None:
        """Applies a good gradient; moves the loss scale once either way."""
        trained = self.trained[index]
        if not trained.variables:
            return
        counts = (result["weight"] > 0) & ~stopped
        update_if(
            self._strategy,
            trained.optimizer,
            None if trained.absorbs else gradients,
            trained.variables,
            finite=result["finite"],
            has_weight=counts,
            applies_nonfinite=self._model.on_nonfinite == "apply",
            floor=self._model.loss_scale_floor,
            losses=(
                functools.partial(self._loss, elements, index)
                if needs_losses(trained.optimizer)
                else None
            ),
            combine_changes=self._combine_changes(),
        )
        if groups := self._group_scale(trained):
            only_if(counts, lambda: groups.move(result["finite_groups"]))

    def _combine_changes(self) -> Callable[[Any], Any] | None:
        """What makes one step of the replicas' own, where they make them."""
        if self._replicas == 1 or not self._model.makes_own_steps:
            return None
        return functools.partial(
            self._model.adasum.combined,
            weight=None,
            wire_dtype=self._model.wire_dtype,
        )

    def _loss(self, elements: Any, index: int) -> tf.Tensor:
        """One optimizer's loss of these; nothing is changed by it."""
        found = self._loss_step(elements)[index]
        total, weight = (
            self._local(value)
            for value in self._strategy.run(
                reduction.all_reduce_sum, args=(found,)
            )
        )
        if self.trained[index].is_sum:
            return total
        return tf.math.divide_no_nan(total, weight)

    def _group_scale(self, trained: Trained) -> GroupLossScale | None:
        """The scales by group of layers, where the optimizer has them."""
        scale = self._model.loss_scale
        is_main = trained.optimizer is self._model.optimizer
        return scale if is_main and isinstance(scale, GroupLossScale) else None

    def _row(self, reduced: dict[str, Any]) -> list[Any]:
        """The first fields of `Update` but for the count."""
        examples = self._local(reduced["examples"])
        if not self._trains:
            return [examples]
        results = self._results(reduced)
        result, optimizer = results[0], self.trained[0].optimizer
        # One that has absorbed what is bad cannot go on, whichever it is.
        judged_by = [
            r["finite"]
            for trained, r in zip(self.trained, results, strict=True)
            if r is result or trained.absorbs
        ]
        scale = loss_scale.current_scale(optimizer)
        return [
            result["loss"],
            loss_scale.unwrapped(optimizer).learning_rate,
            result["norm"],
            1.0 if scale is None else scale,
            ~tf.reduce_all(judged_by),
            examples,
            result["weight"],
        ]

    def _culprit(self, finite: tf.Tensor, found: Any) -> tuple[Any, ...]:
        """(replica, variable) of this worker's first bad gradient; or -1."""
        if not self._trains:
            return ()
        worker, _ = strategies.worker_index(self._strategy)
        replicas = strategies.num_local_replicas(self._strategy)

        def look() -> tuple[tf.Tensor, tf.Tensor]:
            bad = self._strategy.run(self._first_bad_variable, args=(found,))
            bad = tf.stack(self._strategy.experimental_local_results(bad))
            is_bad = tf.reduce_any(bad >= 0)
            first = tf.argmax(tf.cast(bad >= 0, tf.int32), output_type=tf.int32)
            replica = tf.where(is_bad, first + worker * replicas, -1)
            return replica, tf.gather(bad, first)

        return tf.cond(finite, lambda: (tf.constant(-1),) * 2, look)

    def _first_bad_variable(self, found: Any) -> tf.Tensor:
        """Index of this replica's first bad gradient, int32; or -1."""
        finite = [
            tf.math.is_finite(sums["squares"])
            if trained.absorbs
            else reduction.each_finite(sums["gradients"])
            for trained, sums in zip(self.trained, found["sums"], strict=True)
            if trained.variables
        ]
        if not finite:
            return tf.constant(-1)
        bad = tf.cast(~tf.concat(finite, 0), tf.int32)
        first = tf.argmax(bad, output_type=tf.int32)
        return tf.where(tf.reduce_any(bad > 0), first, -1)

    def _counted(self, row: list[Any]) -> tf.Tensor:
        """The row with the number of updates, after the update."""
        if self._trains:
            row = [self.trained[0].optimizer.iterations, *row]
        return tf.stack(
            [tf.cast(tf.convert_to_tensor(v), tf.float64) for v in row]
        )

    @property
    def paths(self) -> list[str]:
        """Of all variables that have a gradient."""
        return [v.path for t in self.trained for v in t.variables]

    def read(self, row: Sequence[float]) -> Update:
        """The `Update` that `run` has written as a row of numbers."""
        count, loss, rate, norm, scale, skipped, examples, weight = row[:8]
        replica, variable = (int(number) for number in row[8:10])
        return Update(
            int(count),
            float(loss),
            float(rate),
            float(norm),
            float(scale),
            bool(skipped),
            int(examples),
            float(weight),
            nonfinite_replica=replica if replica >= 0 else None,
            nonfinite_variable=(
                self.paths[variable] if variable >= 0 else None
            ),
            input_wait=float(row[10]),
        )


def _own_part(variable: keras.Variable) -> tf.Tensor:
    """What this replica adds to a variable that is summed when read."""
    value = tf.identity(variable.value)
    context = tf.distribute.get_replica_context()
    if variable.aggregation == "mean":
        return value / tf.cast(context.num_replicas_in_sync, value.dtype)
    if variable.aggregation == "only_first_replica":
        first = tf.equal(context.replica_id_in_sync_group, 0)
        return tf.where(first, value, tf.zeros_like(value))
    return value


def _as_float(flag: tf.Tensor) -> tf.Tensor:
    return tf.cast(flag, tf.float32)


def _cast(gradient: Gradient, dtype: Any) -> Gradient:
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def _flat(elements: Any) -> list[Any]:
    return tf.nest.flatten(elements, expand_composites=True)
