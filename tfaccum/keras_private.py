"""Every private name of Keras and TensorFlow that tfaccum touches.

One function each, with the reason why no public name does. Nothing else in
the library reaches behind an underscore of another package, so that a new
release of Keras is checked by running `tests/test_keras_private.py`.

This module imports nothing of tfaccum.
"""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from keras.src.models import functional as keras_functional
from keras.src.models.model import functional_init_arguments
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.utils import rng_utils
from tensorflow.python.data.ops import dataset_ops, prefetch_op
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context

# The class that `keras.Model(inputs, outputs)` really makes. Keras exports no
# name for it.
FunctionalModel = keras_functional.Functional

# Whether `Model(*args, **kwargs)` was called with inputs and outputs.
has_functional_arguments = functional_init_arguments


# --- Losses ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Divisor:
    """What one compiled loss divided its sum by.

    Attributes:
        kind: "sum" (nothing), "examples" (the rows of the micro-batch, up to
            a constant factor), or "elements", "mask", "weights".
        value: scalar float tensor; None for "sum", and for "examples", where
            the caller knows the number of rows.
        source: the tensors that tell two divisors of one kind apart.
    """

    kind: str
    value: tf.Tensor | None = None
    source: tuple[Any, ...] = ()

    def equals(self, other: "Divisor") -> bool:
        """Whether both are known to be the same number, up to a constant."""
        return self.kind == other.kind and all(
            mine is theirs
            for mine, theirs in zip(self.source, other.source, strict=True)
        )


class _StepLosses:
    """The losses computed so far in one micro-step of so many rows.

    `fixed` says of each loss whether it has a fixed number of elements per
    row. Only a traced step can tell; an eager one reads what that has written.
    """

    def __init__(self, rows: Any, fixed: dict[int, bool]) -> None:
        self.rows = rows
        self.fixed = fixed
        self.divisors: list[Divisor] = []
        self.recording = False


_step_losses: contextvars.ContextVar[_StepLosses | None] = (
    contextvars.ContextVar("tfaccum_step_losses", default=None)
)


@contextlib.contextmanager
def plain_mean_losses(
    rows: Any = None, fixed: dict[int, bool] | None = None
) -> Iterator[None]:
    """Inside, a Keras loss is a plain mean over the examples of this replica.

    Keras divides every loss by the number of replicas, because its optimizer
    sums the gradients of the replicas. tfaccum weighs each replica by its
    examples instead; here is the one place where that division is taken out,
    for losses, `add_loss` and regularizers alike. It holds for the current
    thread only, so a plain Keras model trained beside keeps its own rule.

    Args:
        rows: scalar: the examples of this micro-batch on this replica.
        fixed: the same dict for every micro-step of a model.

    Context: replica; opened around a user's `train_step` or `test_step`.
    Source: `scale_loss_for_distribution` in keras/src/losses/loss.py.
    """
    token = _step_losses.set(_StepLosses(rows, {} if fixed is None else fixed))
    try:
        yield
    finally:
        _step_losses.reset(token)


@contextlib.contextmanager
def recorded_divisors() -> Iterator[None]:
    """Remembers what each Keras loss called inside is divided by.

    Read it with `take_divisors`. Outside `plain_mean_losses` nothing is kept.
    """
    losses = _step_losses.get() or _StepLosses(None, {})
    losses.recording = True
    try:
        yield
    finally:
        losses.recording = False


def take_divisors() -> list[Divisor]:
    """What has been recorded in this micro-step, and forgets it."""
    losses = _step_losses.get()
    if losses is None:
        return []
    taken, losses.divisors = losses.divisors, []
    return taken


def _plain_inside_a_step(
    original: Callable[[tf.Tensor], tf.Tensor],
) -> Callable[[tf.Tensor], tf.Tensor]:
    def replacement(value: tf.Tensor) -> tf.Tensor:
        return original(value) if _step_losses.get() is None else value

    return replacement


def _recording(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def replacement(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> tf.Tensor:
        losses = _step_losses.get()
        if losses and losses.recording and reduction not in (None, "none"):
            number = len(losses.divisors)
            if not tf.executing_eagerly():
                shape = tf.convert_to_tensor(values).shape
                losses.fixed[number] = shape[1:].is_fully_defined()
            is_fixed = losses.fixed.get(number, True)
            losses.divisors.append(
                _divisor(values, sample_weight, mask, reduction, is_fixed)
            )
        return original(
            values,
            sample_weight=sample_weight,
            mask=mask,
            reduction=reduction,
            dtype=dtype,
        )

    return replacement


def _divisor(
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str,
    is_fixed: bool,
) -> Divisor:
    """The divisor of `reduce_weighted_values` for the same arguments."""
    if reduction == "sum":
        return Divisor("sum")
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:  # The loss function took a mean itself.
        return Divisor("examples")
    if reduction == "mean_with_sample_weight" and (
        sample_weight is not None or mask is not None
    ):
        merged = keras_loss.apply_mask(
            sample_weight, mask, dtype=values.dtype, reduction=reduction
        )
        return Divisor("weights", tf.reduce_sum(merged), (sample_weight, mask))
    if mask is not None:
        valid = tf.reduce_sum(tf.cast(mask, values.dtype))
        return Divisor("mask", valid, (mask,))
    if is_fixed:
        return Divisor("examples")
    elements = tf.cast(tf.size(values), values.dtype)
    return Divisor("elements", elements, (values,))


# Looked up by Keras as globals of this module at each call. Replaced once, at
# import; outside a tfaccum step the replacements call the originals.
keras_loss.scale_loss_for_distribution = _plain_inside_a_step(
    keras_loss.scale_loss_for_distribution
)
keras_loss.unscale_loss_for_distribution = _plain_inside_a_step(
    keras_loss.unscale_loss_for_distribution
)
keras_loss.reduce_weighted_values = _recording(
    keras_loss.reduce_weighted_values
)


# --- Models ----------------------------------------------------------------


def pickle_as(made: type[keras.Model], named: type[keras.Model]) -> None:
    """Lets models of the class `made` be pickled as those of `named`.

    Keras gives pickle a private method of the class, which pickle looks for
    under the name of that class; there it finds `named`.

    Source: `KerasSaveable.__reduce__`.
    """
    made._unpickle_model = named._unpickle_model


def forward(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls the model as Keras' own steps do.

    A `call` without a `training` argument must not be given one, and only
    this private flag tells.
    """
    if model._call_has_training_arg:
        return model(x, training=training)
    return model(x)


def compute_loss(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    training: bool,
) -> tf.Tensor:
    """`model.compute_loss`, also for overrides without a `training` argument.

    Source: `Trainer._compute_loss` in keras/src/trainers/trainer.py.
    """
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def symbolic_build(model: keras.Model, element_spec: Any) -> None:
    """Builds layers, metrics, losses and optimizer from a batch's spec.

    Keras' own way in draws a batch from the distributed iterator and reduces
    it over the replicas, which fails for uneven batches and across workers.
    """
    model._symbolic_build(data_batch=element_spec)
    weigh_output_losses(model)


def weigh_output_losses(model: keras.Model) -> None:
    """Makes the logged loss of each output a mean over examples.

    Keras weighs it by the static batch size, which is unknown in a graph: it
    logs a mean of the batches' means, wrong where batches are ragged.

    Source: `CompileLoss.call` in keras/src/trainers/compile_utils.py.
    """
    compiled = model._compile_loss
    for metric in compiled.metrics if compiled is not None else []:
        if "update_state" not in metric.__dict__:
            metric.update_state = _by_rows(metric.update_state)


def _by_rows(update_state: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(values: Any, sample_weight: Any = None) -> Any:
        losses = _step_losses.get()
        if losses is not None:
            sample_weight = losses.rows
        return update_state(values, sample_weight=sample_weight)

    return replacement


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The metric behind `logs["loss"]`."""
    return model._loss_tracker


@contextlib.contextmanager
def untracked_loss(model: keras.Model) -> Iterator[None]:
    """Inside, nothing is added to the metric behind `logs["loss"]`.

    The step of Keras' guide adds the mean of its batch; the window adds its
    own loss, with all its examples.
    """
    tracker = loss_tracker(model)
    if "update_state" not in vars(tracker):
        tracker.update_state = _if_tracked(tracker.update_state)
    token = _loss_is_tracked.set(False)
    try:
        yield
    finally:
        _loss_is_tracked.reset(token)


# Each replica is traced in a thread of its own.
_loss_is_tracked: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfaccum_loss_is_tracked", default=True
)


def _if_tracked(update_state: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if _loss_is_tracked.get():
            return update_state(*args, **kwargs)
        return None

    return replacement


def all_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Every layer of a model or layer, at any depth, itself included."""
    return list(model._flatten_layers())


def layer_state(model: keras.Model) -> list[keras.Variable]:
    """Float variables that layers assign to in their forward pass.

    Those that a layer made as not trainable, such as moving statistics. A
    frozen layer's weights are not trainable either, but were not made so, and
    only this private list tells. A layer says `has_forward_state = False`
    where its variables change otherwise.
    """
    return list(
        {
            id(variable): variable
            for layer in all_layers(model)
            if layer.trainable and getattr(layer, "has_forward_state", True)
            for variable in layer._non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        }.values()
    )


def batch_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """(mean, variance) of a batch as this layer takes them, [channels] each.

    Only this private method does it with a mask and for all replicas. With a
    mask Keras drops the axis of a single channel.
    """
    return layer._moments(inputs, mask)


def only_regularizes(model: keras.Model) -> bool:
    """Whether `model.losses` holds nothing but weight regularizers."""
    return len(model.losses) == len(model._get_regularization_losses())


def should_evaluate(model: keras.Model, epoch: int, frequency: Any) -> bool:
    """Whether `validation_freq` asks for validation after this epoch."""
    return model._should_eval(epoch, frequency)


def flatten_metrics(model: keras.Model, logs: dict[str, float]) -> Any:
    """Logs as the list or number that `train_on_batch` returns."""
    return model._flatten_metrics_in_order(logs)


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch that a callback has set in `on_train_begin`."""
    return model._initial_epoch


# --- Optimizers ------------------------------------------------------------


@contextlib.contextmanager
def reduced_gradients_only(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[None]:
    """Inside, `optimizer.apply` takes gradients as they are.

    They have been summed over the replicas, unscaled and judged already:
    Keras' optimizer would sum them again (it has no switch for that), divide
    by its loss scale factor, and move the average before the constraints.

    Context: cross-replica; encloses the `strategy.run` that applies.
    Source: `TFOptimizer._all_reduce_sum_gradients`.
    """
    switched_off = {
        "_all_reduce_sum_gradients": lambda grads_and_vars: grads_and_vars,
        "use_ema": False,
        "loss_scale_factor": None,
    }
    saved = {
        name: optimizer.__dict__[name]
        for name in switched_off
        if name in optimizer.__dict__
    }
    optimizer.__dict__.update(switched_off)
    try:
        yield
    finally:
        for name in switched_off:
            del optimizer.__dict__[name]
        optimizer.__dict__.update(saved)


def moving_averages(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """(variable, its moving average) for an optimizer with `use_ema`."""
    return [
        (variable, average)
        for variable, average in zip(
            optimizer._trainable_variables,
            optimizer._model_variables_moving_average,
            strict=True,
        )
        if average is not None
    ]


def config_for_a_copy(
    optimizer: keras.optimizers.Optimizer,
) -> dict[str, Any]:
    """An optimizer's config, with its schedule or callable as it is.

    `get_config` serializes it, which not every learning rate allows, though
    all of them train.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return optimizer.get_config()
    optimizer._learning_rate = 0.0
    try:
        return optimizer.get_config() | {"learning_rate": rate}
    finally:
        optimizer._learning_rate = rate


def adam_moments(
    optimizer: keras.optimizers.Adam, variable: keras.Variable
) -> tuple[keras.Variable, keras.Variable]:
    """Adam's moving averages of a variable's gradient, and of its square.

    Keras has no public name for them.
    """
    index = optimizer._get_variable_index(variable)
    return optimizer._momentums[index], optimizer._velocities[index]


# --- Data ------------------------------------------------------------------


def data_adapter(**arguments: Any) -> Any:
    """What makes a `tf.data.Dataset` of anything that Keras' `fit` takes."""
    return data_adapters.get_data_adapter(**arguments)


def train_validation_split(arrays: Any, validation_split: float) -> Any:
    """The `validation_split` of Keras' `fit`."""
    return array_slicing.train_validation_split(
        arrays, validation_split=validation_split
    )


def class_weight_to_sample_weight(y: Any, class_weight: dict) -> Any:
    """The `class_weight` of Keras' `train_on_batch`."""
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def concat_outputs(outputs: list[tf.Tensor]) -> Any:
    """Rows of `predict`, ragged where their shapes differ."""
    return keras_trainer.convert_to_np_if_not_ragged(
        keras_trainer.potentially_ragged_concat(outputs)
    )


def empty_optional(spec: tf.OptionalSpec) -> tf.experimental.Optional:
    """An absent component of a batch, as Keras' generators make them."""
    return tf.experimental.Optional.empty(spec._element_spec)


def is_prefetched(dataset: tf.data.Dataset) -> bool:
    """Whether a thread of the dataset's own fetches its elements ahead.

    No public name tells by what a dataset was made.
    """
    while isinstance(dataset, dataset_ops._OptionsDataset):
        dataset = dataset._input_dataset
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def global_seed() -> int | None:
    """What `keras.utils.set_random_seed` was given; None if it was not."""
    return rng_utils.get_random_seed()


# --- Distribution ----------------------------------------------------------


def bytes_per_pack(strategy: tf.distribute.Strategy) -> int:
    """The `bytes_per_pack` of a MultiWorkerMirroredStrategy; 0: one pack.

    It is an argument of the strategy, which keeps it to itself.
    """
    options = getattr(strategy.extended, "_communication_options", None)
    return 0 if options is None else options.bytes_per_pack


def per_replica(values: Sequence[Any]) -> Any:
    """A nest with one value per replica of this worker, from existing nests.

    The public way, `experimental_distribute_values_from_function`, does not
    work inside a `tf.function`.
    """
    if len(values) == 1:
        return values[0]
    return tf.nest.map_structure(
        lambda *parts: distributed_values.PerReplica(parts), *values
    )


def tell_workers(key: str, text: str = "yes") -> None:
    """Leaves a note for all workers of the cluster.

    The coordination service that MultiWorkerMirroredStrategy starts keeps
    such notes; only the context's private object reaches it.
    """
    context.context().set_config_key_value(key, text)


def wait_for_note(key: str, timeout_seconds: int) -> str:
    """Waits until some worker has left the note `key`; returns its text.

    Raises:
        tf.errors.OpError: if it is not there in time, or the worker that
            keeps the notes has gone.
    """
    return context.context().get_config_key_value(
        key, timeout_in_ms=1000 * timeout_seconds
    )


def report_failure(message: str) -> None:
    """Makes every collective of the other workers fail with this message.

    Without it they would find out after 10 s, and not learn why; only the
    context's private object reaches the coordination service.
    """
    context.context().report_error_to_cluster(tf.errors.ABORTED, message)


@contextlib.contextmanager
def local_cpus(count: int) -> Iterator[None]:
    """Inside, a MultiWorkerMirroredStrategy has so many CPUs on this worker.

    It counts GPUs alone, and takes one CPU where there are none, whatever
    logical devices there are.

    Source: `CollectiveAllReduceExtended._initialize_local_devices`.
    """

    def local_devices(
        self: Any, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        names = (f"{worker_device}/device:CPU:{i}" for i in range(count))
        return tuple(names), "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    original = extended._initialize_local_devices
    extended._initialize_local_devices = local_devices
    try:
        yield
    finally:
        extended._initialize_local_devices = original


@contextlib.contextmanager
def server_that_runs() -> Iterator[None]:
    """Inside, a MultiWorkerMirroredStrategy does not start the server again.

    Each one starts TensorFlow's server, also where it runs already. What
    another worker is still fetching from this one is thrown away then, and
    that worker fails ("Delete called on non-empty BufRendezvous").

    Source: `CollectiveAllReduceExtended._initialize_multi_worker`.
    """
    running = context.context()
    running.enable_collective_ops = lambda server_def: None
    try:
        yield
    finally:
        del running.enable_collective_ops


# Apart, since of those on one worker each may make what it wishes.
_collective_keys = {
    tf.distribute.MultiWorkerMirroredStrategy: itertools.count(500_000, 10**6),
    tf.distribute.MirroredStrategy: itertools.count(10**6, 10**6),
}


def separate_collective_keys(kind: type[tf.distribute.Strategy]) -> None:
    """Gives the next strategy of this kind collective keys of its own.

    Every new strategy of a process counts from the same key, so that a second
    one joins the groups of the first and aborts ("joining a group with size
    4, but that group has size 2").
    """
    kind._collective_key_base = next(_collective_keys[kind])
