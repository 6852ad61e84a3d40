"""Gradient centralization: each filter's gradient has mean zero.

    g <- g - mean(g over all axes but the last)

for the kernels of convolutions and Dense layers, once per update, before
anything else that the optimizer does. `centralized(optimizer, kernels(model))`
is that optimizer.

Source: Yong, Huang, Hua and Zhang, Gradient Centralization: A New Optimization
Technique for Deep Neural Networks (2020), arXiv:2004.01461.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import keras_private, loss_scale, reduction
from tfaccum.reduction import Gradient
from tfaccum.update import absorbs

# Layers whose kernel has the outputs on its last axis. Not among them, also
# not by inheritance: depthwise, separable and transposed convolutions,
# normalizations, embeddings, recurrent layers and `NormalizedHead`.
LAYERS = (
    keras.layers.Dense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def kernels(model: keras.Model) -> list[keras.Variable]:
    """The variables that are centralized unless one chooses otherwise.

    The trained kernel of each Dense, Conv1D, Conv2D and Conv3D layer, at any
    depth, but for convolutions with `groups` more than 1. No bias, nothing of
    a normalization and no depthwise kernel.

    Args:
        model: built.

    Returns:
        In the order of the layers; empty if there are none.

    Raises:
        ValueError: if a layer of these has not been built.
    """
    found: dict[int, keras.Variable] = {}
    for layer in keras_private.all_layers(model):
        if not isinstance(layer, LAYERS) or getattr(layer, "groups", 1) > 1:
            continue
        if not layer.built:
            raise ValueError(
                "`model` must be built. Received: model="
                f"{model.name} with {layer.name}, which has no weights. Call "
                "`model.build(input_shape)` first."
            )
        for variable in layer.trainable_weights:
            if variable.name == "kernel":
                found[id(variable)] = variable
    return list(found.values())


def centralize(gradient: Gradient) -> tf.Tensor:
    """`gradient` minus its mean over all axes but the last.

    Args:
        gradient: float, rank 2 or more; IndexedSlices become a tensor. The
            mean is taken in float32 or wider.

    Returns:
        Tensor of the same shape and dtype.
    """
    gradient = tf.convert_to_tensor(gradient)
    wide = tf.cast(gradient, reduction.accumulator_dtype(gradient.dtype))
    axes = list(range(wide.shape.rank - 1))
    wide -= tf.reduce_mean(wide, axes, keepdims=True)
    return tf.cast(wide, gradient.dtype)


class Centralized:
    """What `centralized` adds to the class of an optimizer.

    Every optimizer that it returns is an instance of this class and of the
    one that it was made from.

    Attributes:
        centralized_paths: the paths of the variables whose gradients are
            centralized.
    """

    centralized_paths: tuple[str, ...]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """As in Keras; looks for the centralized variables first.

        Raises:
            ValueError: if none of them is there, or two have one path.
        """
        paths = [variable.path for variable in variables]
        marked = [path for path in paths if path in self.centralized_paths]
        if not marked or len(marked) > len(set(marked)):
            raise ValueError(
                "`variables` must contain centralized ones, each with a path "
                f"of its own. Received: variables with paths {paths}, of which "
                f"{list(self.centralized_paths)} are centralized. Make the "
                "optimizer for the model that it trains, and give layers "
                "names of their own."
            )
        self.built_paths = tuple(paths)
        super().build(variables)  # type: ignore[misc]

    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As in Keras, with centralized gradients.

        Args:
            grads: one for each variable.
            trainable_variables: default: those of `build`.
        """
        if trainable_variables is None:
            paths = getattr(self, "built_paths", ())
        else:
            trainable_variables = list(trainable_variables)
            paths = tuple(v.path for v in trainable_variables)
        if len(paths) == len(grads):  # Otherwise Keras says what is wrong.
            grads = [
                centralize(gradient)
                if gradient is not None and path in self.centralized_paths
                else gradient
                for gradient, path in zip(grads, paths, strict=True)
            ]
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """The optimizer it was made from, and the paths."""
        kind = type(self).__mro__[2]
        return {
            "optimizer": {
                "module": kind.__module__,
                "class_name": kind.__name__,
                "config": super().get_config(),  # type: ignore[misc]
                "registered_name": keras.saving.get_registered_name(kind),
            },
            "paths": list(self.centralized_paths),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> keras.optimizers.Optimizer:
        """As in Keras."""
        # That of `keras.optimizers` does not know all optimizers of Keras.
        optimizer = keras.saving.deserialize_keras_object(
            dict(config["optimizer"]), custom_objects
        )
        return _made(optimizer, tuple(config["paths"]))


def centralized(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> keras.optimizers.Optimizer:
    """An optimizer like this one that centralizes gradients first.

    ```
    optimizer = centralized(keras.optimizers.SGD(0.1), kernels(model))
    model.compile(optimizer, loss, gradient_accumulation_steps=8)
    ```

    In a `tfaccum.Model` it acts on the gradient of the whole window, reduced
    over the replicas and unscaled, once per update: after the verdict whether
    it is finite, and before clipping, weight decay and the optimizer's own
    step. The gradient norms of `tfaccum.Update` are those before.

    Weight decay: what `weight_decay` of a Keras optimizer takes off a weight
    is no gradient and is not centralized. A `kernel_regularizer` is part of
    the gradient and is centralized with it, so that the mean of each filter
    does not decay.

    It is saved and loaded with its model, after `import tfaccum.boost`, and
    has the variables of `optimizer` and no others.

    Args:
        optimizer: not built. Its settings are taken over, but for
            `exclude_from_weight_decay`, which has to be called on the result.
        variables: whose gradients are centralized: `kernels(model)`, or of
            one's own choice, of rank 2 or more with the outputs on the last
            axis. They are known by `path`.

    Returns:
        An instance of `Centralized` and of the class of `optimizer`.

    Raises:
        TypeError: if `optimizer` is no Keras optimizer.
        ValueError: if it is built, has a loss scale, consists of several,
            absorbs gradients, or is centralized already.
        ValueError: if there are no variables, or one has rank 1 or less.

    Source: Yong, Huang, Hua and Zhang, Gradient Centralization (2020),
    arXiv:2004.01461, and `grad_centralization` of MindSpore's optimizers,
    which leave out kernels whose number of inputs is no multiple of 16.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` must be a keras.optimizers.Optimizer. Received: "
            f"optimizer={optimizer!r} of type {type(optimizer).__name__}."
        )
    kind = type(optimizer).__name__
    if loss_scale.unwrapped(optimizer) is not optimizer:
        raise ValueError(
            "`optimizer` must be without a loss scale. Received: optimizer="
            f"{kind}. Write LossScaleOptimizer(centralized(optimizer, ...))."
        )
    if kind == "MultiOptimizer" or isinstance(optimizer, Centralized):
        raise ValueError(
            "`optimizer` must be one ordinary optimizer. Received: optimizer="
            f"{kind}."
        )
    if absorbs(optimizer):
        raise ValueError(
            "`optimizer` must be given the gradient of a window. Received: "
            f"optimizer={kind}, which takes that of each micro-batch. Use "
            "keras.optimizers.Adam."
        )
    if optimizer.built:
        raise ValueError(
            "`optimizer` must not be built: its state would be lost. Received: "
            f"optimizer={kind} with {len(optimizer.variables)} variables."
        )
    paths = tuple(variable.path for variable in variables)
    flat = [v.path for v in variables if len(v.shape) < 2]
    if not paths or flat:
        raise ValueError(
            "`variables` must be some of rank 2 or more. Received: "
            f"variables={list(paths)}, of rank 1 or less: {flat}."
        )
    return _made(optimizer, paths)


def _made(
    optimizer: keras.optimizers.Optimizer, paths: tuple[str, ...]
) -> keras.optimizers.Optimizer:
    kind: Any = _class(optimizer.__class__)
    # The optimizer's own `from_config`, for the new class.
    config = keras_private.config_for_a_copy(optimizer)
    made = super(Centralized, kind).from_config(config)
    made.centralized_paths = paths
    return made


@functools.cache
def _class(kind: Any) -> type:
    """`kind` with `Centralized` in front of it.

    All of these have one registered name: `from_config` finds the class in
    the config, so that a process can load what it has never made.
    """
    made = type("Centralized", (Centralized, kind), {"__module__": __name__})
    return _registered(made)


def _registered(kind: type) -> type:
    return keras.saving.register_keras_serializable("tfaccum", "Centralized")(
        kind
    )


_registered(Centralized)
