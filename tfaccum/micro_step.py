"""The micro-step: forward and backward pass of one micro-batch per replica.

What a micro-step finds is a nest of tensors that only need adding up, over
the micro-steps of a window and over the replicas:

    {"examples": n, "logs": {name: n * value}, "exponents": [counts, ...],
     "sums": [{"gradients": [w * g, ...], "loss": w * loss, "weight": w}]}

with one entry of "sums" per optimizer.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import exponents, feeding, keras_private, reduction
from tfaccum import strategy as strategies
from tfaccum.reduction import Gradient


@dataclasses.dataclass(frozen=True)
class Backward:
    """What one call of `Model.accumulate` has handed over.

    Attributes:
        optimizer: as the user gave it, with its loss scale if it has one;
            None in evaluation.
        variables: all that the optimizer was asked to train.
        gradients: one per variable, of the scaled loss; None where the loss
            does not depend on the variable.
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
    """What the window remembers of a `Backward`: all but its tensors."""

    optimizer: Any
    all_variables: list[keras.Variable]
    variables: list[keras.Variable]
    is_sum: bool

    @classmethod
    def of(cls, backward: Backward) -> "Trained":
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
        )


_handed_over: contextvars.ContextVar[list[Backward] | None] = (
    contextvars.ContextVar("tfaccum_handed_over", default=None)
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
    if optimizer and any(other.optimizer is optimizer for other in received):
        raise RuntimeError(
            "`accumulate` must be called once per optimizer and micro-step. "
            f"Received: a second call for {optimizer.name}. Add the losses "
            "first, or give each its own optimizer."
        )
    received.append(backward)


@contextlib.contextmanager
def _receiving() -> Iterator[list[Backward]]:
    received: list[Backward] = []
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

    Attributes:
        trained: what was handed over, in order.
        specs: how what a micro-step finds looks. Both are known once a
            micro-step has run or was traced.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[Any], Any],
        *,
        is_whole_window: bool,
    ):
        self.trained: list[Trained] = []
        self.specs: Any = None
        self._fixed: dict[int, bool] = {}  # See keras_private.
        self._model = model
        self._step = step
        self._trains = step == model.train_step
        self._strategy = model.distribute_strategy
        self._is_whole_window = is_whole_window
        self._never_skips = strategies.num_replicas(self._strategy) > 1 and any(
            getattr(layer, "synchronized", False)
            for layer in keras_private.all_layers(model)
        )
        self._computes = self._compute
        if model.jit_compile:
            self._computes = tf.function(
                self._compute, jit_compile=True, autograph=False
            )

    def run(self, elements: Sequence[tuple[Any, Any]]) -> Any:
        """One micro-step. Communicates nothing.

        Args:
            elements: for each replica of this worker its number of examples,
                int32 scalar, and what `train_step` takes.

        Returns:
            What was found, per replica; zeros where a replica had no rows.

        Context: cross-replica.
        """
        rows, data = keras_private.per_replica(elements)
        return self._strategy.run(self._on_replica, args=(rows, data))

    def times(self, value: Any, weight: tf.Tensor) -> Any:
        """`weight * value`, or `value` itself where nothing is added to it."""
        if self._is_whole_window:
            return value
        return reduction.weighted(value, weight)

    def over(self, total: Any, weight: tf.Tensor) -> Any:
        """Undoes `times` once everything has been added."""
        if self._is_whole_window:
            return total
        return reduction.divided(total, weight)

    def _on_replica(self, rows: tf.Tensor, data: Any) -> Any:
        """One micro-batch's weighted sums; zeros where it has no rows."""

        def with_rows() -> Any:
            found = self._computes(rows, data)
            self.specs = tf.nest.map_structure(_spec, found)
            return found

        def without_rows() -> Any:
            return tf.nest.map_structure(_zeros, self.specs)

        if self._never_skips:  # A layer communicates in its forward pass.
            return with_rows()
        return tf.cond(rows > 0, with_rows, without_rows)

    def _compute(self, rows: tf.Tensor, data: Any) -> Any:
        """Runs `train_step` and turns what it hands over into sums."""
        with (
            keras_private.plain_mean_losses(rows, self._fixed),
            _receiving() as received,
            _root_of_names(),
        ):
            logs = self._step(feeding.without_optionals(data))
        if not received and self._trains:
            raise RuntimeError(
                "`train_step` must hand its gradients to the window. "
                f"Received: {type(self._model).__name__}.train_step, which "
                "never called `self.accumulate(tape, loss, weight)`. Call it "
                "instead of `optimizer.apply_gradients`."
            )
        self.trained = [Trained.of(backward) for backward in received]
        examples = tf.cast(tf.maximum(rows, 0), tf.float32)
        gradients = [g for b in received for g in b.gradients if g is not None]
        return {
            "exponents": [
                exponents.count(g)
                for g in gradients
                if self._model.counts_exponents
            ],
            "examples": examples,
            "sums": [self._weighted(backward) for backward in received],
            "logs": {
                name: self.times(value, examples)
                for name, value in self._own_logs(logs).items()
            },
        }

    def _weighted(self, backward: Backward) -> dict[str, Any]:
        """One optimizer's gradients, loss and weight, ready to be added."""
        gradients = [
            _normalised(g, v)
            for g, v in zip(backward.gradients, backward.variables, strict=True)
            if g is not None
        ]
        dtypes = [reduction.accumulator_dtype(g.dtype) for g in gradients]
        widest = max([tf.float32, *dtypes], key=lambda dtype: dtype.size)
        is_sum = backward.weight is None
        weight = tf.cast(1.0 if is_sum else backward.weight, widest)
        return {
            "gradients": [self.times(g, weight) for g in gradients],
            "loss": self.times(tf.cast(backward.loss, widest), weight),
            "weight": weight,
        }

    def _own_logs(self, logs: Any) -> dict[str, tf.Tensor]:
        """What `train_step` returned beside the metrics: scalars, float32."""
        if logs is None:
            return {}
        own = {}
        metrics = self._model.get_metrics_result()
        for name, value in logs.items():
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


def _root_of_names() -> contextlib.AbstractContextManager:
    """Leaves the name scopes that surround a micro-step.

    A tf.summary in a user's step would carry the name of the condition.
    """
    if tf.get_current_name_scope():
        return tf.name_scope("/")
    return contextlib.nullcontext()


def _normalised(gradient: Gradient, variable: keras.Variable) -> Gradient:
    """The gradient with its variable's static shape."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.ensure_shape(gradient.values, [None, *variable.shape[1:]]),
            gradient.indices,
            tf.constant(list(variable.shape), gradient.indices.dtype),
        )
    return tf.ensure_shape(gradient, variable.shape)


@dataclasses.dataclass(frozen=True)
class _SparseSpec:
    """How an IndexedSlices gradient looks."""

    shape: tf.TensorShape
    dtype: tf.DType
    indices_dtype: tf.DType


def _spec(tensor: Any) -> tf.TensorSpec | _SparseSpec:
    """What tells `_zeros` and the sums how the tensor looks."""
    if isinstance(tensor, tf.IndexedSlices):
        shape = tf.TensorShape(tf.get_static_value(tensor.dense_shape))
        return _SparseSpec(shape, tensor.dtype, tensor.indices.dtype)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _zeros(spec: tf.TensorSpec | _SparseSpec) -> Gradient:
    if isinstance(spec, _SparseSpec):
        return tf.IndexedSlices(
            tf.zeros([0, *spec.shape[1:]], spec.dtype),
            tf.zeros([0], spec.indices_dtype),
            tf.constant(spec.shape.as_list(), spec.indices_dtype),
        )
    return tf.zeros(spec.shape, spec.dtype)
