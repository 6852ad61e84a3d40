"""`tfaccum.Model`: a Keras model whose updates are made once per window."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import keras_private
from tfaccum import strategy as strategies
from tfaccum.adama import check as check_absorbing
from tfaccum.adasum import AdaSum, check_replica_reduction
from tfaccum.auto_micro_batch import AutoMicroBatch, MicroBatchSearch
from tfaccum.batching import check_count
from tfaccum.group_loss_scale import GroupLossScale
from tfaccum.loop import HostLoop
from tfaccum.loss_scale import LossScale, current_scale, with_scale
from tfaccum.micro_batches import length
from tfaccum.micro_step import (
    Backward,
    hand_over,
    is_frozen,
    is_training,
    wants_only_losses,
)
from tfaccum.reduction import check_wire_dtype
from tfaccum.schedule import AccumulationSchedule, Steps
from tfaccum.sparse import check_sparse_sums
from tfaccum.update import (
    absorbs,
    check_home,
    check_optimizer,
    needs_losses,
)
from tfaccum.window import Freeze

ACCUMULATOR_DTYPES = (None, "float32", "bfloat16", "float64")
ON_NONFINITE = ("skip", "raise", "apply")

# What a Keras model may override, and `Model.from_keras` could not take over.
STEPS = (
    "train_step",
    "test_step",
    "predict_step",
    "compute_loss",
    "compute_metrics",
)


@keras.saving.register_keras_serializable("tfaccum")
class Model(HostLoop, keras.Model):
    """A Keras model that trains with batches larger than memory allows.

    One update made from K micro-steps on R replicas equals the update that
    the same examples would have made in one batch on one device:

        g = sum(w * gradient) / sum(w)

    over all micro-steps and replicas, where `gradient` is that of the mean
    loss of one micro-batch on one replica and `w` the number that this mean
    was divided by. It does not hold for BatchNorm statistics, dropout masks,
    and losses that are not a weighted mean over examples.

    Everything else is `keras.Model`: made from inputs and outputs, or
    subclassed. A subclass with a forward pass of its own overrides
    `train_step` and hands its gradients to the window:

        class MyModel(tfaccum.Model):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = my_loss(y, self(x, training=True))
                self.accumulate(tape, loss, weight=tf.shape(x)[0])
                return {}

    `train_step` runs once per micro-step and replica; inside, every loss is a
    plain mean over the examples of this micro-batch on this replica.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "Model":
        """Makes a functional model where inputs and outputs are given."""
        functional = keras_private.has_functional_arguments(args, kwargs)
        if functional and not issubclass(cls, keras_private.FunctionalModel):
            cls = _functional_class(cls)  # type: ignore[arg-type]
        return super().__new__(cls)

    @classmethod
    def from_keras(cls, model: keras.Model) -> "Model":
        """Wraps an existing Keras model, sharing its layers and weights.

        Args:
            model: functional, Sequential or subclassed; compiled or not (it
                has to be compiled again).

        Returns:
            A `tfaccum.Model` with the same inputs, outputs and name.

        Raises:
            TypeError: if `model` is not a `keras.Model`.
            ValueError: if its class has a `train_step`, `test_step`,
                `predict_step`, `compute_loss` or `compute_metrics` of its own.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(
                "`model` must be a keras.Model. Received: model="
                f"{model!r} of type {type(model).__name__}."
            )
        own = [
            name
            for name in STEPS
            if getattr(type(model), name)
            not in (getattr(keras.Model, name), getattr(cls, name))
        ]
        if own:
            raise ValueError(
                "`model` must train as a keras.Model does. Received: model of "
                f"type {type(model).__name__}, which overrides "
                f"{', '.join(own)}. Make it a subclass of tfaccum.Model "
                "instead."
            )
        inputs = getattr(model, "inputs", None)
        if inputs and isinstance(
            model, keras_private.FunctionalModel | keras.Sequential
        ):
            # Sequential keeps lists even for one tensor.
            pick = isinstance(model, keras.Sequential)
            return cls(
                inputs[0] if pick else model.input,
                model.outputs[0] if pick else model.output,
                name=model.name,
            )
        return Wrapped(model, name=model.name)

    def compile(
        self,
        *args: Any,
        gradient_accumulation_steps: Steps = 1,
        micro_batch_size: AutoMicroBatch | int | str | None = None,
        accumulator_dtype: str | None = None,
        wire_dtype: str | None = None,
        sparse_sums: bool | str = "auto",
        replica_reduction: AdaSum | str = "mean",
        gradient_freeze: Freeze | None = None,
        loss_scale: LossScale | GroupLossScale | float | str | None = "auto",
        on_nonfinite: str = "skip",
        max_consecutive_skips: int = 20,
        **kwargs: Any,
    ) -> None:
        """Configures training.

        Args:
            *args: as in `keras.Model.compile`.
            gradient_accumulation_steps: K >= 1: so many dataset batches make
                one update. The last window of an epoch may be shorter. For a
                batch that grows: pairs such as [(0, 2), (1000, 8)], "K is 2,
                and 8 after 1000 updates"; or a function from the number of
                updates made to K, the same on every worker.
            micro_batch_size: the most examples that one replica holds at
                once, >= 1: each dataset batch is cut into micro-batches that
                differ by at most one example. None: not cut. Composes with
                `gradient_accumulation_steps`. "auto", or a
                `tfaccum.AutoMicroBatch`: the largest that fits into memory.
            accumulator_dtype: of the gradient sums: "float32", "bfloat16"
                (half the memory, and sums that lose small gradients) or
                "float64". None: float32, or a variable's own dtype where that
                is wider.
            wire_dtype: in which gradients travel between replicas and are
                added up on their way: "bfloat16" or "float16", half the bytes
                of float32. Everything else stays as it is: the sums of a
                replica, weights, losses, metrics. None: not rounded.
            sparse_sums: whether the sum of gradients that are IndexedSlices
                (an embedding's) is kept in the rows touched, and reaches the
                optimizer so, or as a dense tensor. The results are the same.
                "auto": the rows touched, for tables of which a window touches
                few. `model.table_sums` tells what was chosen, and why.
            replica_reduction: how replicas are combined. "mean": as the law
                says. "adasum", or a `tfaccum.boost.AdaSum`: by how much their
                gradients agree.
            gradient_freeze: a `tfaccum.boost.GradientFreeze`, which says at
                which updates the first variables do not train.
            loss_scale: what the loss is multiplied by in the backward pass.
                "auto": as Keras does, a dynamic scale under `mixed_float16`
                and the optimizer's own otherwise. A `tfaccum.LossScale`, a
                fixed number > 0, a `tfaccum.GroupLossScale` that stands in the
                model, or None for none.
            on_nonfinite: what becomes of an update whose gradient is not
                finite, in any precision. "skip": it is not made. "raise": it
                is not made, and training stops. "apply": it is made, as in
                Keras, and ruins the weights.
            max_consecutive_skips: after so many skipped updates in a row
                training stops with an error, >= 1.
            **kwargs: as in `keras.Model.compile`.

        Raises:
            TypeError: if a count is not an int, or `optimizer` no optimizer.
            ValueError: if a count is less than 1.
            ValueError: if another argument is not one of those named.
            ValueError: if `optimizer.gradient_accumulation_steps` is set.
            ValueError: if AdaSum is to combine a number of replicas that is
                no power of two, and with arguments that exclude it.
            ValueError: if `optimizer` is a `tfaccum.AdamA` and other arguments
                exclude it.
            ValueError: if the model was made under a strategy that is not
                supported, or the optimizer not under the model's.
            ValueError: if `jit_compile=True` on several CPU devices.
        """
        strategies.check_supported(self.distribute_strategy)
        schedule = AccumulationSchedule(gradient_accumulation_steps)
        search = _micro_batch_search(micro_batch_size)
        check_count("max_consecutive_skips", max_consecutive_skips)
        _check_choice(
            "accumulator_dtype", accumulator_dtype, ACCUMULATOR_DTYPES
        )
        check_wire_dtype(wire_dtype)
        adasum = check_replica_reduction(replica_reduction)
        check_sparse_sums(sparse_sums, has_adasum=adasum is not None)
        _check_freeze(gradient_freeze)
        _check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
        _check_loss_scale(loss_scale)
        with self.distribute_strategy.scope():
            super().compile(*args, **kwargs)
        check_optimizer(self.optimizer)
        check_home(self.optimizer, self.distribute_strategy)
        if isinstance(loss_scale, GroupLossScale):  # In the model itself.
            self.optimizer = with_scale(self.optimizer, None)
        elif not isinstance(loss_scale, str):  # "auto" is as Keras made it.
            self.optimizer = with_scale(self.optimizer, loss_scale)
        if adasum:
            adasum.check(self.distribute_strategy)
            _check_adasum(adasum, self.optimizer, loss_scale)
        if self.jit_compile:
            strategies.check_xla(self.distribute_strategy)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.accumulation_schedule = schedule
        self.micro_batch_size = micro_batch_size
        self.micro_batch_search = search
        self.accumulator_dtype = accumulator_dtype
        self.wire_dtype = wire_dtype
        self.sparse_sums = sparse_sums
        self.replica_reduction = replica_reduction
        self.adasum = adasum
        self.gradient_freeze = gradient_freeze
        self.on_nonfinite = on_nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self.loss_scale = loss_scale
        check_absorbing(self.optimizer, self)
        self.reset_training_functions()
        self.overrides_train_step = (
            type(self).train_step is not Model.train_step
        )

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """As in Keras; warns where a plain Keras model would be loaded."""
        if str(filepath).endswith((".h5", ".hdf5")):
            warnings.warn(
                "An HDF5 file is loaded as a plain Keras model, which does not "
                f"accumulate. Received: filepath={filepath}. Save the model as "
                "a .keras file, or its weights with `save_weights`.",
                stacklevel=2,
            )
        super().save(filepath, *args, **kwargs)

    def get_compile_config(self) -> dict[str, Any]:
        """As in Keras, with the arguments of `compile` added here."""
        config = super().get_compile_config()
        if config:
            config |= {
                "gradient_accumulation_steps": self.gradient_accumulation_steps,
                "micro_batch_size": keras.saving.serialize_keras_object(
                    self.micro_batch_size
                ),
                "accumulator_dtype": self.accumulator_dtype,
                "wire_dtype": self.wire_dtype,
                "sparse_sums": self.sparse_sums,
                "replica_reduction": keras.saving.serialize_keras_object(
                    self.replica_reduction
                ),
                "gradient_freeze": keras.saving.serialize_keras_object(
                    self.gradient_freeze
                ),
                "loss_scale": _scale_config(self.loss_scale),
                "on_nonfinite": self.on_nonfinite,
                "max_consecutive_skips": self.max_consecutive_skips,
            }
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """As in Keras: compiles a loaded model as it was saved."""
        if type(self).compile is not Model.compile:
            super().compile_from_config(config)  # Warns, as Keras does.
            return
        config = keras.saving.deserialize_keras_object(config)
        if isinstance(scale := config.get("loss_scale"), dict):
            config["loss_scale"] = (
                self._group_loss_scale(scale["layer"])
                if "layer" in scale
                else LossScale(**scale)
            )
        self.compile(**config)
        if self.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)

    def _group_loss_scale(self, name: str) -> GroupLossScale:
        """The one of this name, in this model or in one inside of it."""
        return next(
            layer
            for layer in keras_private.all_layers(self)
            if isinstance(layer, GroupLossScale) and layer.name == name
        )

    # --- One micro-step, in replica context --------------------------------

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Forward and backward of one micro-batch on one replica.

        Args:
            data: what the dataset yields, with this replica's rows.

        Returns:
            Scalars by name. Metrics are logged over the whole epoch and all
            replicas; any other value as its mean over the window.

        Context: replica.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = keras_private.forward(self, x, training=True)
            loss = keras_private.compute_loss(
                self, x, y, y_pred, sample_weight, training=True
            )
        weight = self.loss_weight(x, y, y_pred, sample_weight)
        self.accumulate(tape, loss, weight)
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Forward pass and loss of one micro-batch, without training."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = keras_private.forward(self, x, training=False)
        loss = keras_private.compute_loss(
            self, x, y, y_pred, sample_weight, training=False
        )
        weight = self.loss_weight(x, y, y_pred, sample_weight)
        hand_over(Backward(None, [], [], loss, weight))
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def compute_loss(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        """As in Keras, a plain mean over this replica's micro-batch.

        An override returns the mean over its own examples, whatever the
        number of replicas.
        """
        with keras_private.recorded_divisors():
            return super().compute_loss(*args, **kwargs)

    def loss_weight(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> tf.Tensor | None:
        """The number that the loss of this micro-batch was divided by.

        By default what the compiled loss divides by: examples for
        `sum_over_batch_size`, unmasked tokens where Keras masks, the sum of
        sample weights for `mean_with_sample_weight`, and None for `sum`. Where
        `compute_loss` is overridden without calling this class': examples.

        Override it for a loss that is divided by something else.

        Args:
            x: inputs.
            y: targets.
            y_pred: outputs of the model.
            sample_weight: as the dataset yields it, or None.

        Returns:
            Scalar, float or int, >= 0; None for a sum over examples, which
            stays a sum over the window.

        Context: replica.

        Raises:
            ValueError: if the terms of the loss are divided by different
                numbers, so that no one weight is right for their sum.
            ValueError: in training with `tfaccum.AdamA`, if it is not divided
                by the number of examples.
        """
        examples = _num_examples(x)
        divisors = keras_private.take_divisors()
        if not divisors:
            return examples
        kind = divisors[0].kind
        differ = not all(divisors[0].equals(other) for other in divisors)
        extra = bool(self.losses) and (
            kind == "sum" or not keras_private.only_regularizes(self)
        )
        if differ or (extra and kind != "examples"):
            if self.is_single_micro_step:
                return examples
            terms = [d.kind for d in divisors] + ["add_loss"] * extra
            raise ValueError(
                "All terms of the loss must be divided by the same number, or "
                "their sum has no exact mean over a window. Received: terms "
                f"divided by {terms}. Give the losses one reduction and one "
                "mask, or override `loss_weight` to say which number counts."
            )
        if kind == "sum":
            return None
        if kind != "examples" and is_training() and absorbs(self.optimizer):
            raise ValueError(
                "The loss must be divided by the number of examples with an "
                "optimizer that absorbs gradients: that of the window has to "
                "be known before the first micro-step. Received: a loss "
                f"divided by {kind}. Use keras.optimizers.Adam."
            )
        return examples if kind == "examples" else divisors[0].value

    def accumulate(
        self,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        weight: Any,
        optimizer: keras.optimizers.Optimizer | None = None,
        variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Hands the gradient of one micro-batch to the window.

        The window adds it up, applies it once with all others, and scales,
        unscales and logs the loss by itself: nothing that the step adds to
        the metric "loss" counts.

        Args:
            tape: which has recorded `loss`.
            loss: scalar float: the mean over this micro-batch's examples.
            weight: scalar >= 0: the number that this mean was divided by. None
                for a loss that is a sum and stays one.
            optimizer: default: the compiled one. Each optimizer has a window
                of its own.
            variables: to train; default: `self.trainable_variables`.

        Context: replica, inside `train_step`.

        Raises:
            RuntimeError: outside `train_step`, or twice for one optimizer.
            ValueError: if `loss` is not a scalar.
            ValueError: if the optimizer accumulates by itself, or was not
                made under the model's strategy.
            ValueError: if the optimizer is a `tfaccum.AdamA`, and the model
                compiled with what excludes it.
            ValueError: if no variable has a gradient.
        """
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank != 0:
            raise ValueError(
                "`loss` must be a scalar: the mean over the examples of the "
                f"micro-batch. Received: a loss of shape {loss.shape}."
            )
        if optimizer is None:
            optimizer = self.optimizer
        else:
            check_optimizer(optimizer)
            check_home(optimizer, self.distribute_strategy)
            check_absorbing(optimizer, self)
        if variables is None:
            variables = self.trainable_variables
        variables = list(variables)
        if wants_only_losses():
            hand_over(Backward(optimizer, [], [], loss, weight))
            return
        scale = current_scale(optimizer)
        seed = None if scale is None else tf.cast(scale, loss.dtype)
        # The backward pass ends at the first variable that trains.
        wanted = [v for v in variables if not is_frozen(v)]
        found = iter(tape.gradient(loss, wanted, output_gradients=seed))
        gradients = [None if is_frozen(v) else next(found) for v in variables]
        missing = [
            v.path
            for v, g in zip(variables, gradients, strict=True)
            if g is None and not is_frozen(v)
        ]
        if not variables:
            self._warn_once("The model does not have any trainable weights.")
        elif missing and len(missing) == len(wanted):
            raise ValueError(
                "`loss` must depend on at least one variable. Received: a loss "
                f"without gradient for any of {missing}. Compute it inside the "
                "tape."
            )
        elif missing:
            self._warn_once(
                f"The loss does not depend on {missing}: these variables are "
                "not trained."
            )
        hand_over(Backward(optimizer, variables, gradients, loss, weight))


@keras.saving.register_keras_serializable("tfaccum")
class Wrapped(Model):
    """A `tfaccum.Model` around a model that has no symbolic inputs.

    Args:
        model: any Keras model.
        name: of the wrapper.
    """

    def __init__(self, model: keras.Model, name: str | None = None):
        super().__init__(name=name)
        self.model = model

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Calls the wrapped model."""
        return keras_private.forward(self.model, inputs, training)

    def get_config(self) -> dict[str, Any]:
        """As in Keras."""
        return {
            "name": self.name,
            "model": keras.saving.serialize_keras_object(self.model),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], **_: Any) -> "Wrapped":
        """As in Keras."""
        model = keras.saving.deserialize_keras_object(config["model"])
        return cls(model, name=config["name"])


@functools.cache
def _functional_class(cls: type[Model]) -> type[Model]:
    """`cls` with Keras' functional model among its bases.

    Keras would write that base into `cls` itself, for good, so that a later
    subclass with an ordinary constructor fails.
    """
    functional = type(
        cls.__name__,
        (cls, keras_private.FunctionalModel),
        {"__module__": cls.__module__, "__doc__": cls.__doc__},
    )
    keras_private.pickle_as(functional, cls)
    registered = keras.saving.get_registered_name(cls)
    if registered != cls.__name__:
        package, name = registered.split(">")
        keras.saving.register_keras_serializable(package, name)(functional)
    return functional


def _num_examples(x: Any) -> tf.Tensor:
    """Rows of the inputs, scalar int32."""
    leaf = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return length(leaf)


def _check_choice(name: str, value: Any, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={value!r}."
        )


def _micro_batch_search(size: Any) -> MicroBatchSearch | None:
    if size == "auto":
        size = AutoMicroBatch()
    if isinstance(size, AutoMicroBatch):
        return MicroBatchSearch(size)
    if isinstance(size, str):
        raise ValueError(
            "`micro_batch_size` must be an int, 'auto', a "
            "tfaccum.AutoMicroBatch or None. Received: micro_batch_size="
            f"{size!r}."
        )
    if size is not None:
        check_count("micro_batch_size", size)
    return None


def _check_freeze(freeze: Any) -> None:
    if freeze is not None and not isinstance(freeze, Freeze):
        raise TypeError(
            "`gradient_freeze` must be a tfaccum.boost.GradientFreeze. "
            f"Received: gradient_freeze={freeze!r} of type "
            f"{type(freeze).__name__}."
        )


def _check_adasum(adasum: AdaSum, optimizer: Any, scale: Any) -> None:
    """Refuses what has no meaning together with AdaSum."""
    if isinstance(scale, GroupLossScale):
        raise ValueError(
            "`loss_scale` must be one for all layers with AdaSum. Received: "
            f"loss_scale={scale.name}, a tfaccum.GroupLossScale, and "
            f"replica_reduction={adasum}. Use a tfaccum.LossScale."
        )
    if adasum.form == "delta" and needs_losses(optimizer):
        raise ValueError(
            "`replica_reduction` must not be AdaSum of weight changes with an "
            "optimizer that searches along a line. Received: "
            f"replica_reduction={adasum} with {optimizer.name}. Use "
            "AdaSum(form='gradient')."
        )


def _check_loss_scale(scale: Any) -> None:
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not (
        scale is None
        or scale == "auto"
        or isinstance(scale, LossScale | GroupLossScale)
        or (is_number and scale > 0)
    ):
        raise ValueError(
            "`loss_scale` must be 'auto', None, a positive number or a "
            f"tfaccum.LossScale. Received: loss_scale={scale!r}."
        )


def _scale_config(scale: Any) -> Any:
    """A loss scale as plain values; one in the model by its layer's name."""
    if isinstance(scale, GroupLossScale):
        return {"layer": scale.name}
    if isinstance(scale, LossScale):
        return dataclasses.asdict(scale)
    return scale
