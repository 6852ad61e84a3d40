"""LessBN: residual bottlenecks without their first two normalizations.

In a residual bottleneck, an addition of

    start -> Conv -> BN -> Conv -> BN -> Conv -> BN     the main branch
    start [-> Conv -> BN]                               the shortcut

with any activations in between, the first two BatchNormalizations of the main
branch are taken out. Its last one and the shortcut's stay.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfaccum import keras_private

_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)
# Read from the addition backwards; one letter for each BN and convolution.
_MAIN = "BCBCBC"
_SHORTCUTS = ("", "BC")

# Which output of which call of which layer: (name, call, output).
_Tensor = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class LessBN:
    """What `with_less_bn` has done. The names are those of layers.

    A layer inside a model or layer of the model is called "outer/layer".

    Attributes:
        removed: the BatchNormalizations that were taken out.
        kept: the BatchNormalizations that are left.
        heads: the Dense layers that are now a `NormalizedHead`.
    """

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line: how many of how many."""
        text = (
            f"removed {len(self.removed)} of "
            f"{len(self.removed) + len(self.kept)} BatchNormalizations"
        )
        if self.heads:
            text += f"; normalized head: {', '.join(self.heads)}"
        return text


@keras.saving.register_keras_serializable("tfaccum")
class NormalizedHead(keras.layers.Layer):
    """A cosine classifier with a learned temperature.

    outputs = activation(multiplier * (|x| @ |kernel| + bias))

    where |x| is `x` divided by its length over the last axis, and |kernel| is
    `kernel` with each column divided by its length. Neither the length of
    `x` nor that of a column changes the result. Lengths are float32.

    Args:
        units: number of outputs, > 0.
        activation: as in `keras.layers.Dense`. Default: none.
        use_bias: whether there is a bias; it stands inside the product.
        multiplier: the temperature that training starts with, > 0. Default
            1: without a bias, logits in [-1, 1]. 16 to 30 is common.
        kernel_initializer: default "glorot_uniform".
        bias_initializer: default "zeros".
        kernel_regularizer: of the kernel as it is, not divided. Default none.
        bias_regularizer: default none.
        kernel_constraint: default none.
        bias_constraint: default none.
        epsilon: the least squared length that is divided by, > 0.
        **kwargs: as in `keras.layers.Layer`.

    State: `kernel` [features, units], `multiplier` [] and with `use_bias`
    `bias` [units], all trained.

    Raises:
        ValueError: if a number is out of its range.

    Source: `CommonHeadLastFN` of MindSpore's `boost`.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        multiplier: float = 1.0,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        epsilon: float = 1e-12,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        for name, value in (
            ("units", units),
            ("multiplier", multiplier),
            ("epsilon", epsilon),
        ):
            if not value > 0:
                raise ValueError(
                    f"`{name}` must be more than 0. Received: {name}={value}."
                )
        self.units = units
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.start = multiplier
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.epsilon = epsilon

    def build(self, input_shape: Any) -> None:
        """Makes the weights.

        Args:
            input_shape: the last entry is the number of features.
        """
        self.kernel = self.add_weight(
            shape=(input_shape[-1], self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            name="kernel",
        )
        self.multiplier = self.add_weight(
            shape=(),
            initializer=keras.initializers.Constant(self.start),
            name="multiplier",
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
                name="bias",
            )
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The outputs [..., units] of `inputs` [..., features]."""
        outputs = keras.ops.matmul(
            self._of_length_one(inputs, -1), self._of_length_one(self.kernel, 0)
        )
        if self.bias is not None:
            outputs += self.bias
        return self.activation(outputs * self.multiplier)

    def _of_length_one(self, x: Any, axis: int) -> Any:
        dtype = keras.backend.result_type(x.dtype, "float32")
        wide = keras.ops.cast(x, dtype)
        square = keras.ops.sum(keras.ops.square(wide), axis, keepdims=True)
        wide *= keras.ops.rsqrt(keras.ops.maximum(square, self.epsilon))
        return keras.ops.cast(wide, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Shape of the outputs for a shape of the inputs."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        objects = {
            f"{of}_{kind}": getattr(self, f"{of}_{kind}")
            for of in ("kernel", "bias")
            for kind in ("initializer", "regularizer", "constraint")
        }
        return {
            **super().get_config(),
            **{
                name: keras.saving.serialize_keras_object(value)
                for name, value in objects.items()
            },
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "multiplier": self.start,
            "epsilon": self.epsilon,
        }


def with_less_bn(
    model: keras.Model,
    *,
    normalized_head: bool = False,
    head_bias: bool = True,
    head_multiplier: float = 1.0,
) -> tuple[keras.Model, LessBN]:
    """A copy of a functional model with fewer BatchNormalizations.

    ```
    model, report = with_less_bn(keras.applications.ResNet50(weights=None))
    print(report)  # removed 32 of 53 BatchNormalizations
    ```

    The copy has layers and weights of its own, with the same names and the
    values of `model`, which stays as it is. Convolutions are not rescaled and
    get no bias in place of a normalization: the copy computes another
    function, and has to be trained. Functional models inside the model are
    looked through too. If `model` is compiled then so is the copy, with a new
    optimizer, as by `keras.models.clone_model`.

    Args:
        model: functional, built. Under a strategy: call this in its scope.
        normalized_head: whether each Dense layer that makes an output of the
            model, itself or through activations, becomes a `NormalizedHead`
            with its kernel and activation. Default False.
        head_bias: whether the head keeps the bias of the Dense layer. Default
            True; MindSpore drops it.
        head_multiplier: the head's first temperature, > 0. Default 1.

    Returns:
        (the copy, which layers it concerns). Warns where nothing was removed.

    Raises:
        TypeError: if `model` is not functional.
        ValueError: if there is no head to replace, or `head_multiplier` is
            out of its range.

    Source: `LessBN` of MindSpore's `boost`. Its pass of the compiler finds a
    bottleneck only with the main branch first and ReLU behind each
    normalization, and says nothing where it finds none.
    """
    if not _is_functional(model):
        raise TypeError(
            "`model` must be functional, that is made by `keras.Model(inputs, "
            f"outputs)`. Received: model={model.__class__.__name__}. The "
            "layers of a Sequential model do not say what is added to what, "
            "nor do those of a class with a constructor of its own; if that "
            "calls `super().__init__(inputs, outputs)`, pass "
            "`keras.Model(model.inputs, model.outputs)`."
        )
    if not head_multiplier > 0:
        raise ValueError(
            "`head_multiplier` must be more than 0. Received: "
            f"head_multiplier={head_multiplier}."
        )
    heads = set(_Graph(model).heads()) if normalized_head else set()
    if normalized_head and not heads:
        raise ValueError(
            "`normalized_head` must be False where no Dense layer makes an "
            "output of the model. Received: normalized_head=True for "
            f"outputs of {sorted(_Graph(model).output_names())}. Put a "
            "tfaccum.boost.NormalizedHead into the model."
        )
    copy, report = _copied(
        model, heads, {"use_bias": head_bias, "multiplier": head_multiplier}
    )
    if not report.removed:
        warnings.warn(
            f"LessBN has removed no BatchNormalization of {model.name!r}: it "
            "has no residual bottleneck, that is an addition of Conv-BN-Conv-"
            "BN-Conv-BN and a shortcut from the same tensor.",
            stacklevel=2,
        )
    return copy, report


def _is_functional(layer: Any) -> bool:
    """Whether its config says how its layers are connected."""
    return (
        isinstance(layer, keras_private.FunctionalModel)
        and "layers" in layer.get_config()
    )


def _copied(
    model: keras.Model, heads: set[str], head_arguments: dict[str, Any]
) -> tuple[keras.Model, LessBN]:
    """The copy of one model, and by recursion of those in it."""
    graph = _Graph(model)
    removed = set(graph.removable())
    inner: dict[str, LessBN] = {}

    def clone(layer: Any) -> Any:
        if _is_functional(layer):
            copy, inner[layer.name] = _copied(layer, set(), {})
            return copy
        if layer.name in heads:
            return _head_like(layer, **head_arguments)
        return layer.__class__.from_config(layer.get_config())

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.name in removed:
            return args[0] if args else kwargs["inputs"]
        return layer(*args, **kwargs)

    copy = keras.models.clone_model(
        model,
        input_tensors=graph.new_inputs(),
        clone_function=clone,
        call_function=call,
    )
    for layer in copy.layers:
        if layer.name in heads:
            _copy_head(model.get_layer(layer.name), layer)
        elif layer.name not in inner:
            layer.set_weights(model.get_layer(layer.name).get_weights())
    if not model.trainable:  # Layers have kept theirs; the model's is lost.
        copy.trainable = False
    return copy, _report(model, removed, heads, inner)


def _report(
    model: keras.Model,
    removed: set[str],
    heads: set[str],
    inner: dict[str, LessBN],
) -> LessBN:
    """Names in the order of the model's layers."""
    gone, kept = [], []
    for layer in model.layers:
        if layer.name in inner:
            report = inner[layer.name]
            gone += [f"{layer.name}/{name}" for name in report.removed]
            kept += [f"{layer.name}/{name}" for name in report.kept]
        elif layer.name in removed:
            gone.append(layer.name)
        elif isinstance(layer, keras.layers.BatchNormalization):
            kept.append(layer.name)
        else:
            kept += [
                f"{layer.name}/{inside.name}"
                for inside in keras_private.all_layers(layer)
                if isinstance(inside, keras.layers.BatchNormalization)
            ]
    return LessBN(tuple(gone), tuple(kept), tuple(sorted(heads)))


def _head_like(
    dense: keras.layers.Dense, use_bias: bool, multiplier: float
) -> NormalizedHead:
    """The head in place of a Dense layer, without its weights."""
    return NormalizedHead(
        dense.units,
        activation=dense.activation,
        use_bias=use_bias and dense.use_bias,
        multiplier=multiplier,
        kernel_initializer=dense.kernel_initializer,
        bias_initializer=dense.bias_initializer,
        kernel_regularizer=dense.kernel_regularizer,
        bias_regularizer=dense.bias_regularizer,
        kernel_constraint=dense.kernel_constraint,
        bias_constraint=dense.bias_constraint,
        activity_regularizer=dense.activity_regularizer,
        name=dense.name,
        dtype=dense.dtype_policy,
        trainable=dense.trainable,
    )


def _copy_head(dense: keras.layers.Dense, head: NormalizedHead) -> None:
    """Kernel, and bias if there is one, of a Dense layer."""
    head.kernel.assign(dense.kernel)
    if head.bias is not None:
        head.bias.assign(dense.bias)


class _Graph:
    """Which tensor goes where in a functional model, read from its config.

    The config is the only public place that says it.
    """

    def __init__(self, model: keras.Model) -> None:
        config = model.get_config()
        self.model = model
        self.operations = {op.name: op for op in model.operations}
        self.inputs: dict[str, list[list[_Tensor]]] = {
            layer["name"]: [
                list(_tensors(call)) for call in layer["inbound_nodes"]
            ]
            for layer in config["layers"]
        }
        self.input_layers = config["input_layers"]
        self.outputs = list(_histories(config["output_layers"]))
        self.uses: dict[_Tensor, int] = {}
        for tensor in self.outputs:
            self.uses[tensor] = self.uses.get(tensor, 0) + 1
        for calls in self.inputs.values():
            for call in calls:
                for tensor in call:
                    self.uses[tensor] = self.uses.get(tensor, 0) + 1

    def removable(self) -> Iterator[str]:
        """Names of the BatchNormalizations that LessBN takes out."""
        for name, operation in self.operations.items():
            # `keras.layers.Add`, and `x + y` of two tensors.
            if not isinstance(operation, keras.layers.Add) and (
                type(operation).__name__ != "Add"
            ):
                continue
            for operands in self.inputs.get(name, []):
                if len(operands) == 2:
                    yield from self._of_block(*operands)

    def heads(self) -> Iterator[str]:
        """Names of the Dense layers that make the outputs."""
        for output in self.outputs:
            tensor: _Tensor | None = output
            while tensor:
                operation = self.operations[tensor[0]]
                if isinstance(operation, keras.layers.Dense):
                    if len(self.inputs[tensor[0]]) == 1:
                        yield tensor[0]
                    break
                if _kind(operation):
                    break
                tensor = self._before(tensor)

    def output_names(self) -> set[str]:
        """Names of the layers that the outputs come from."""
        return {name for name, *_ in self.outputs}

    def new_inputs(self) -> Any:
        """Inputs with the names of the model's: a clone's would be lost."""
        layers = iter(
            self.operations[name] for name, *_ in _histories(self.input_layers)
        )
        return keras.tree.map_structure(
            lambda _: keras.Input(**next(layers).get_config()),
            self.model.input,
        )

    def _of_block(self, first: _Tensor, second: _Tensor) -> Iterator[str]:
        for main, shortcut in ((first, second), (second, first)):
            kinds, names, start = self._chain(main)
            others, _, other_start = self._chain(shortcut)
            if kinds == _MAIN and others in _SHORTCUTS and start == other_start:
                yield from (names[2], names[4])
                return

    def _chain(self, tensor: _Tensor) -> tuple[str, list[str], _Tensor]:
        """(kinds, names, start) of a branch, from its end to its start.

        The start is the first tensor that something else uses too, or that
        comes from a layer which does not belong into a branch.
        """
        kinds, names = "", []
        while self.uses.get(tensor) == 1:
            before = self._before(tensor)
            if not before:
                break
            kind = _kind(self.operations[tensor[0]])
            if kind:
                kinds += kind
                names.append(tensor[0])
            tensor = before
        return kinds, names, tensor

    def _before(self, tensor: _Tensor) -> _Tensor | None:
        """The one tensor that `tensor` is made of by a layer of a branch."""
        operation = self.operations[tensor[0]]
        calls = self.inputs[tensor[0]]
        if len(calls) != 1 or len(calls[0]) != 1:
            return None  # Shared, an input, or made of several.
        if not _kind(operation) and not _is_plain(operation):
            return None
        return calls[0][0]


def _kind(operation: Any) -> str:
    """One letter for what counts in a branch, or nothing."""
    if isinstance(operation, keras.layers.BatchNormalization):
        return "B"
    return "C" if isinstance(operation, _CONVOLUTIONS) else ""


def _is_plain(operation: Any) -> bool:
    """Whether it may stand in a branch: activations, padding, pooling."""
    if isinstance(operation, keras.layers.PReLU):
        return True
    return not getattr(operation, "weights", [])


def _tensors(value: Any) -> Iterator[_Tensor]:
    """All tensors in the arguments of one call, as a config writes them."""
    if isinstance(value, dict):
        if value.get("class_name") == "__keras_tensor__":
            name, call, output = value["config"]["keras_history"]
            yield name, call, output
            return
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _histories(value: Any) -> Iterator[_Tensor]:
    """All tensors in a config's `output_layers` or `input_layers`."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if not isinstance(value, list | tuple):
        return
    if len(value) == 3 and isinstance(value[0], str):
        yield value[0], value[1], value[2]
        return
    for part in value:
        yield from _histories(part)
