"""The micro-step: forward and backward pass of one micro-batch per replica.

What a micro-step finds is a nest of tensors that only need adding up, over
the micro-steps of a window and over the replicas:

    {"examples": n, "logs": {name: n * value}, "exponents": [counts, ...],
     "sums": [{"gradients": [w * g, ...], "loss": w * loss, "weight": w}],
     "statistics": [whatever a layer has handed over, ...]}

with one entry of "sums" per optimizer, and one of "statistics" per call of a
layer whose state moves once per window. Of an optimizer that absorbs there are
no gradients, but "squares", [variables]: the sum of the squares of what each
gradient has added to that of the window. Where w is known to be the same in all
micro-steps, gradients and loss are not multiplied by it: see `Trained.unit`.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfaccum import exponents, keras_private, reduction, sparse
from tfaccum import strategy as strategies
from tfaccum.loss_scale import current_scale, unwrapped
from tfaccum.micro_batches import NO_MORE_DATA, num_rows, without_optionals
from tfaccum.reduction import Gradient
from tfaccum.update import absorbs


@dataclasses.dataclass(frozen=True)
class Backward:
    """What one call of `Model.accumulate` has handed over.

    Attributes:
        optimizer: as the user gave it, with its loss scale if it has one;
            None in evaluation.
        variables: all that the optimizer was asked to train.
        gradients: one per variable, of the scaled loss; None where the loss
            does not depend on the variable, or where it is frozen.
        loss: scalar, unscaled.
        weight: scalar; None for a loss that is a sum.
    """

    optimizer: Any
    variables: list[keras.Variable]
    gradients: list[Gradient | None]
    loss: tf.Tensor
    weight: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the window remembers of a `Backward`: all but its tensors.

    `unit` is the weight of each micro-step, if it is one number that was known
    when the step was traced. Sums are then of what was not weighted.
    """

    optimizer: Any
    all_variables: list[keras.Variable]
    variables: list[keras.Variable]
    is_sum: bool
    unit: float | None

    @property
    def absorbs(self) -> bool:
        """Whether the optimizer takes gradients at once."""
        return bool(self.variables) and absorbs(self.optimizer)

    @property
    def summed(self) -> list[keras.Variable]:
        """The variables whose gradients are added up."""
        return [] if self.absorbs else self.variables

    def divisor(self, weight: tf.Tensor) -> tf.Tensor:
        """What sums of so much weight have to be divided by."""
        if self.is_sum:
            return tf.ones_like(weight)
        return weight if self.unit is None else weight / self.unit

    @classmethod
    def of(cls, backward: Backward, unit: float | None) -> "Trained":
        """Keeps the variables that have a gradient."""
        with_gradient = [
            v
            for v, g in zip(backward.variables, backward.gradients, strict=True)
            if g is not None
        ]
        return cls(
            backward.optimizer,
            backward.variables,
            with_gradient,
            backward.weight is None,
            unit,
        )


class WindowLayer(Protocol):
    """A layer whose state moves once per window."""

    def end_window(self, sums: Any, keeps: tf.Tensor) -> None:
        """Moves the state.

        Args:
            sums: what one of its calls has handed over, added up over the
                window and all replicas; zeros where there were no examples.
            keeps: bool scalar: whether the update is made; if not, nothing
                may change.

        Context: replica; the same arguments on each.
        """


@dataclasses.dataclass
class _Received:
    """What has been handed over in one micro-step, in the graph of its step."""

    graph: Any
    frozen: frozenset[int]
    trains: bool
    only_losses: bool
    backwards: list[Backward] = dataclasses.field(default_factory=list)
    statistics: list[tuple[WindowLayer, Any]] = dataclasses.field(
        default_factory=list
    )


_handed_over: contextvars.ContextVar[_Received | None] = contextvars.ContextVar(
    "tfaccum_handed_over", default=None
)


def hand_over(backward: Backward) -> None:
    """Gives gradients to the window whose micro-step is running.

    Raises:
        RuntimeError: outside a micro-step, or twice for one optimizer.
    """
    received = _handed_over.get()
    if received is None:
        raise RuntimeError(
            "`accumulate` must be called inside `train_step`, run by `fit` or "
            "`train_on_batch`. Use tfaccum.GradientAccumulator in a loop of "
            "your own."
        )
    optimizer = backward.optimizer
    if optimizer and any(
        other.optimizer is optimizer for other in received.backwards
    ):
        raise RuntimeError(
            "`accumulate` must be called once per optimizer and micro-step. "
            f"Received: a second call for {optimizer.name}. Add the losses "
            "first, or give each its own optimizer."
        )
    received.backwards.append(backward)


def is_frozen(variable: keras.Variable) -> bool:
    """Whether the window whose micro-step is running leaves it as it is."""
    received = _handed_over.get()
    return received is not None and id(variable) in received.frozen


def is_training() -> bool:
    """Whether the micro-step that is running is one of training."""
    received = _handed_over.get()
    return received is not None and received.trains


def wants_only_losses() -> bool:
    """Whether the micro-step that is running needs no gradients."""
    received = _handed_over.get()
    return received is not None and received.only_losses


def is_counter(variable: keras.Variable) -> bool:
    """Whether it is the seed of a generator, or counts something."""
    return not tf.as_dtype(variable.dtype).is_floating


def is_in_window() -> bool:
    """Whether a window's micro-step is running, or being traced."""
    return _handed_over.get() is not None


def hand_over_statistics(layer: WindowLayer, sums: Any) -> None:
    """Gives what a layer's forward pass has found to the window.

    Args:
        layer: whose `end_window` gets the sum over the window, once for each
            call of the layer in a micro-step, in the order of the calls.
        sums: nest of float32 tensors with static shapes that only need adding
            up.

    Raises:
        RuntimeError: outside a micro-step, or in a graph inside of its own.
    """
    received = _handed_over.get()
    if received is None:
        raise RuntimeError(
            "Statistics must be handed over in the forward pass of a "
            "micro-step."
        )
    if tf.compat.v1.get_default_graph() is not received.graph:
        raise RuntimeError(
            f"A {type(layer).__name__} must be called by the step itself, not "
            "inside a tf.function, condition or loop of the model's own. "
            "Unroll the loop, or use a layer of Keras, whose statistics move "
            "at every micro-step."
        )
    received.statistics.append((layer, sums))


@contextlib.contextmanager
def _receiving(
    frozen: frozenset[int], *, trains: bool = True, only_losses: bool = False
) -> Iterator[_Received]:
    graph = tf.compat.v1.get_default_graph()
    received = _Received(graph, frozen, trains, only_losses)
    token = _handed_over.set(received)
    try:
        yield received
    finally:
        _handed_over.reset(token)


class MicroStep:
    """Runs a model's `train_step` or `test_step` on every replica.

    Args:
        model: a compiled `tfaccum.Model`.
        step: `model.train_step` or `model.test_step`; the latter hands over
            losses without gradients.
        is_whole_window: whether nothing will be added to what a micro-step
            finds: then values are not weighted, and reach the optimizer
            untouched.
        frozen: variables that are not trained.

    Attributes:
        trained: what was handed over, in order.
        layers: those that have handed over statistics, one per call.
        specs: how what a micro-step finds looks. All are known once a
            micro-step has run or was traced.
        communicates: whether a layer does so in its forward pass. Then every
            replica has to make every micro-step.
        is_incomplete: whether an optimizer that absorbs had no variables yet
            when the micro-step was traced: it has to be traced again.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[Any], Any],
        *,
        is_whole_window: bool,
        frozen: Sequence[keras.Variable] = (),
    ):
        self.trained: list[Trained] = []
        self.layers: list[WindowLayer] = []
        self.specs: Any = None
        self.is_incomplete = False
        self._fixed: dict[int, bool] = {}  # See keras_private.
        self._model = model
        self._step = step
        self._trains = step == model.train_step
        self._strategy = model.distribute_strategy
        self._is_whole_window = is_whole_window
        self._frozen = frozenset(id(variable) for variable in frozen)
        self.communicates = strategies.num_replicas(self._strategy) > 1 and any(
            getattr(layer, "synchronized", False)
            for layer in keras_private.all_layers(model)
        )
        self._computes = self._compute
        if model.jit_compile:
            self._computes = tf.function(
                self._compute, jit_compile=True, autograph=False
            )

    def run(
        self,
        elements: Sequence[tuple[Any, Any, Any]],
        has_rows: bool = False,
    ) -> Any:
        """One micro-step. Communicates nothing.

        Args:
            elements: for each replica of this worker its number of examples
                and that of the whole dataset batch, int32 scalars, and what
                `train_step` takes.
            has_rows: whether it is known that there are examples.

        Returns:
            What was found, per replica; zeros where a replica had no rows.

        Context: cross-replica.
        """
        element = keras_private.per_replica(elements)
        return self._strategy.run(
            functools.partial(self._on_replica, has_rows=has_rows), args=element
        )

    def losses(
        self, elements: Sequence[tuple[Any, Any, Any]]
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """The losses that a micro-step hands over, and nothing else.

        Seeds, counters, metrics and moving statistics are put back, so that
        each call draws the same dropout masks. Communicates nothing.

        Args:
            elements: as in `run`.

        Returns:
            For each optimizer (weight * loss, weight), per replica, float32
            scalars; zeros where a replica had no rows.

        Context: cross-replica.
        """
        rows, _, data = keras_private.per_replica(elements)
        return self._strategy.run(self._losses_on_replica, args=(rows, data))

    def _losses_on_replica(
        self, rows: tf.Tensor, data: Any
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        variables = [
            *keras_private.layer_state(self._model),
            *(v for v in self._model.non_trainable_variables if is_counter(v)),
            *self._model.metrics_variables,
        ]
        before = [tf.identity(v.value) for v in variables]

        def with_rows() -> list[tuple[tf.Tensor, tf.Tensor]]:
            with (
                keras_private.plain_mean_losses(rows, self._fixed),
                _receiving(frozenset(), only_losses=True) as received,
                _root_of_names(),
            ):
                self._step(without_optionals(data))
            found = []
            for backward in received.backwards:
                is_sum = backward.weight is None
                weight = tf.cast(1.0 if is_sum else backward.weight, tf.float32)
                loss = tf.cast(backward.loss, tf.float32)
                found.append((reduction.weighted(loss, weight), weight))
            return found

        def without_rows() -> list[tuple[tf.Tensor, tf.Tensor]]:
            return [(tf.zeros([]), tf.zeros([]))] * len(self.trained)

        found = (
            with_rows()
            if self.communicates
            else tf.cond(rows > 0, with_rows, without_rows)
        )
        for variable, old in zip(variables, before, strict=True):
            variable.assign(old)
        return found

    def times(self, value: Any, weight: tf.Tensor | None) -> Any:
        """`weight * value`, or `value` itself where nothing is added to it.

        With a weight of None `value` in the accumulator's dtype.
        """
        if self._is_whole_window:
            return value
        return reduction.weighted(value, weight)

    def over(self, total: Any, weight: tf.Tensor) -> Any:
        """Undoes `times` once everything has been added."""
        if self._is_whole_window:
            return total
        return reduction.divided(total, weight)

    def _on_replica(
        self, rows: tf.Tensor, total: tf.Tensor, data: Any, *, has_rows: bool
    ) -> Any:
        """One micro-batch's weighted sums; zeros where it has no rows."""

        def with_rows() -> Any:
            found = self._computes(None if has_rows else rows, data)
            # Here, since a compiled function forgets what is constant, and
            # copies it at each call.
            found["examples"] = _as_examples(rows)
            for trained, sums in zip(self.trained, found["sums"], strict=True):
                if trained.unit is not None:
                    sums["weight"] = tf.constant(
                        trained.unit, sums["loss"].dtype
                    )
                sums["gradients"] = [
                    _normalised(g, v)
                    for g, v in zip(
                        sums["gradients"], trained.variables, strict=True
                    )
                ]
                if trained.absorbs:
                    self._absorb(trained, sums, rows, total)
            self.specs = tf.nest.map_structure(sparse.spec_of, found)
            return found

        def without_rows() -> Any:
            return tf.nest.map_structure(sparse.zeros, self.specs)

        if has_rows:
            return with_rows()
        if self.communicates:
            return self._always(rows, with_rows)
        return tf.cond(rows > 0, with_rows, without_rows)

    def _absorb(
        self,
        trained: Trained,
        sums: dict[str, Any],
        rows: tf.Tensor,
        total: tf.Tensor,
    ) -> None:
        """Gives gradients to their optimizer, and keeps their squares only."""
        weight, checks = sums["weight"], []
        divisor = tf.ones_like(weight)
        if not trained.is_sum:
            divisor = tf.cast(total, weight.dtype)
            checks = [_check_weight(weight, rows)]
        if (scale := current_scale(trained.optimizer)) is not None:
            divisor *= tf.cast(scale, weight.dtype)
        with tf.control_dependencies(checks):
            parts = [
                reduction.divided(tf.convert_to_tensor(g), divisor)
                for g in sums["gradients"]
            ]
        sums["gradients"] = []
        sums["squares"] = tf.stack(
            [2 * tf.cast(tf.nn.l2_loss(p), weight.dtype) for p in parts]
        )
        optimizer = unwrapped(trained.optimizer)
        if optimizer.built:
            optimizer.absorb(parts, trained.variables)
        self.is_incomplete |= not optimizer.built

    def _always(self, rows: tf.Tensor, step: Callable[[], Any]) -> Any:
        """A step without rows too; statistics stay if the data have ended."""
        variables = (
            keras_private.layer_state(self._model) if self._trains else []
        )
        before = [tf.identity(v.value) for v in variables]
        found = step()
        for variable, old in zip(variables, before, strict=True):
            ended = rows == NO_MORE_DATA
            variable.assign(tf.where(ended, old, variable.value))
        return found

    def _compute(self, rows: tf.Tensor | None, data: Any) -> Any:
        """Runs `train_step` and turns what it hands over into sums.

        Args:
            rows: of the data; None: they are known to have some.
            data: what `train_step` takes.
        """
        has_rows = rows is None
        if has_rows:
            rows = num_rows(data)
        with (
            keras_private.plain_mean_losses(rows, self._fixed),
            (
                keras_private.untracked_loss(self._model)
                if self._trains
                else contextlib.nullcontext()
            ),
            _receiving(self._frozen, trains=self._trains) as received,
            _root_of_names(),
        ):
            logs = self._step(without_optionals(data))
        backwards = received.backwards
        if not backwards and self._trains:
            raise RuntimeError(
                "`train_step` must hand its gradients to the window. "
                f"Received: {type(self._model).__name__}.train_step, which "
                "never called `self.accumulate(tape, loss, weight)`. Call it "
                "instead of `optimizer.apply_gradients`."
            )
        # In evaluation nothing moves, in whatever mode a layer is called.
        statistics = received.statistics if self._trains else []
        self.trained = [
            Trained.of(backward, self._unit(backward) if has_rows else None)
            for backward in backwards
        ]
        self.layers = [layer for layer, _ in statistics]
        examples = _as_examples(rows)
        gradients = [g for b in backwards for g in b.gradients if g is not None]
        return {
            "exponents": [
                exponents.count(g)
                for g in gradients
                if self._model.counts_exponents
            ],
            "sums": [
                self._weighted(*pair)
                for pair in zip(backwards, self.trained, strict=True)
            ],
            "statistics": [sums for _, sums in statistics],
            "logs": {
                name: self.times(value, examples)
                for name, value in self._own_logs(logs).items()
            },
        }

    def _unit(self, backward: Backward) -> float | None:
        """The weight, if each micro-step of this trace has the same."""
        if backward.weight is None or absorbs(backward.optimizer):
            return None
        if tf.executing_eagerly():
            return None  # What is known holds for this micro-step alone.
        weight = tf.get_static_value(tf.convert_to_tensor(backward.weight))
        return None if weight is None or weight <= 0 else float(weight)

    def _weighted(self, backward: Backward, trained: Trained) -> dict[str, Any]:
        """One optimizer's gradients, loss and weight, ready to be added."""
        gradients = [g for g in backward.gradients if g is not None]
        dtypes = [reduction.accumulator_dtype(g.dtype) for g in gradients]
        widest = max([tf.float32, *dtypes], key=lambda dtype: dtype.size)
        weight = tf.cast(1.0 if trained.is_sum else backward.weight, widest)
        factor = weight if trained.unit is None else None
        found = {
            "gradients": [self.times(g, factor) for g in gradients],
            "loss": self.times(tf.cast(backward.loss, widest), factor),
        }
        return found if factor is None else found | {"weight": weight}

    def _own_logs(self, logs: Any) -> dict[str, tf.Tensor]:
        """What `train_step` returned beside the metrics: scalars, float32."""
        if logs is None:
            return {}
        own = {}
        metrics = self._model.get_metrics_result()
        for name, value in _flat(logs):
            if name in metrics:
                continue
            value = tf.cast(value, tf.float32)
            if value.shape.rank != 0:
                raise ValueError(
                    "`train_step` must return scalars. Received: "
                    f"logs[{name!r}] of shape {value.shape}."
                )
            own[name] = value
        return own


def _flat(logs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Logs by name; what the compiled metrics give is a dict among them."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, value


def _as_examples(rows: tf.Tensor) -> tf.Tensor:
    """The number of rows, float32; none where there are no more data."""
    return tf.cast(tf.maximum(rows, 0), tf.float32)


def _check_weight(weight: tf.Tensor, rows: tf.Tensor) -> Any:
    """Fails where `weight` is not the number of examples.

    Outside of what XLA compiles: it leaves out what only checks.
    """
    return tf.debugging.assert_equal(
        weight,
        tf.cast(tf.maximum(rows, 0), weight.dtype),
        "`weight` must be the number of examples with an optimizer that "
        "absorbs gradients. That of the window has to be known before the "
        "first micro-step.",
    )


def _root_of_names() -> contextlib.AbstractContextManager:
    """Leaves the name scopes that surround a micro-step.

    A tf.summary in a user's step would carry the name of the condition.
    """
    if tf.get_current_name_scope():
        return tf.name_scope("/")
    return contextlib.nullcontext()


def _normalised(gradient: Gradient, variable: keras.Variable) -> Gradient:
    """The gradient with its variable's static shape, and indices in int64."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.ensure_shape(gradient.values, [None, *variable.shape[1:]]),
            tf.cast(gradient.indices, tf.int64),
            tf.constant(list(variable.shape), tf.int64),
        )
    if gradient.shape == variable.shape:
        return gradient
    return tf.ensure_shape(gradient, variable.shape)
