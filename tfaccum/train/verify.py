"""Takes the first updates of a run again, as one big batch on one device.

The law says that both give the same weights. The big batch is trained by
plain Keras, which knows nothing of windows and replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccum import feeding, keras_private, loss_scale
from tfaccum.model import Model

Weights = list[np.ndarray]
Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        updates: Updates that were compared.
        difference: Largest difference of two weights, divided by the largest
            change of a weight; None if there was nothing to compare.
        tolerance: What rounding may explain, see `tolerance`.
        dtype: In which layers compute.
        remark: What a reader has to know besides, or why nothing was compared.
    """

    updates: int
    difference: float | None
    tolerance: float
    dtype: str
    remark: str = ""

    @property
    def equal(self) -> bool | None:
        """Whether they are equal, up to rounding; None if not compared."""
        if self.difference is None:
            return None
        return self.difference <= self.tolerance

    def describe(self) -> str:
        """The lines for people; the verdict comes last."""
        verdict = {None: "not compared", True: "yes", False: "no"}[self.equal]
        lines = [""]
        if self.remark:
            lines.append(f"({self.remark})")
        if self.difference is not None:
            lines.append(
                f"largest difference of a weight after {self.updates} updates: "
                f"{self.difference:.1e} of the largest change (tolerance "
                f"{self.tolerance:.1e}: {self.dtype})"
            )
        lines.append(f"equal to the one-big-batch run: {verdict}")
        return "\n".join(lines)


def tolerance(dtype: str, num_examples: int) -> float:
    """How far rounding alone may move two runs apart.

    float64 and float32: adding n numbers in another order changes a sum by
    about sqrt(n) roundings. float16 and bfloat16: products are summed in
    float32, and each micro-batch's gradient is rounded once to the short
    dtype, whatever n is. Updates repeat both a few times, for which stands 8.

    Args:
        dtype: In which layers compute.
        num_examples: Examples behind one update.
    """
    mantissa = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
    roundings = num_examples**0.5 if mantissa[dtype] > 10 else 1.0
    return 8 * roundings * 2.0 ** -mantissa[dtype]


def relative_difference(
    weights: Weights, reference: Weights, initial: Weights
) -> float:
    """Max-norm of `weights - reference` over that of the change."""
    difference = max(_distances(weights, reference))
    return difference / max(*_distances(reference, initial), 1e-30)


class InitialWeights(keras.callbacks.Callback):
    """Keeps the weights with which a run starts, or sets them.

    Args:
        weights: To start with; None: as the model was made.
    """

    def __init__(self, weights: Weights | None = None):
        super().__init__()
        self.weights = weights or []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Here the model is built, whatever kind it is."""
        if self.weights:
            self.model.set_weights(self.weights)
        self.weights = self.model.get_weights()


def first_windows(train: Any, batches: int, updates: int) -> list[list[Any]]:
    """The dataset batches of the first windows of the first epoch.

    Args:
        train: As `fit` takes it: an `EpochData` or a `tf.data.Dataset`.
        batches: Dataset batches in a window.
        updates: Windows, at most; an epoch may have fewer.
    """
    if isinstance(train, feeding.EpochData):
        train = train.epoch(0, worker=0, num_workers=1)
    taken = list(train.take(batches * updates))
    return [
        taken[start : start + batches]
        for start in range(0, len(taken), batches)
    ]


def train_in_windows(
    model: Model, initial: Weights, windows: list[list[Any]]
) -> Weights:
    """Weights after these windows, as the model was compiled."""
    batches = [batch for window in windows for batch in window]
    _fit(model, initial, batches)
    return model.get_weights()


def train_in_big_batches(
    model: keras.Model, initial: Weights, windows: list[list[Any]]
) -> Weights:
    """Weights after one update for each window, by plain Keras."""
    big = [
        tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *window)
        for window in windows
    ]
    _fit(model, initial, big)
    return model.get_weights()


def compare(
    compiled: Callable[[Callable[[Arguments], Arguments]], Model],
    reference: keras.Model,
    arguments: Arguments,
    initial: Weights,
    windows: list[list[Any]],
) -> Comparison:
    """Takes updates in two ways, from the same weights and examples.

    An optimizer that divides by the size of the gradient, like Adam, makes
    whole steps of rounding errors where a gradient is close to zero, so that
    its weights say little about its gradients. SGD with the same clipping
    takes its place, in both runs.

    Args:
        compiled: Makes the model of the run and compiles it as there, with
            what the function makes of the arguments of `compile`.
        reference: The same model, for one device, not compiled.
        arguments: Of `compile`, for the latter.
        initial: Weights to start from.
        windows: Dataset batches, as `first_windows` returns them.
    """
    dtype = keras.config.dtype_policy().compute_dtype
    examples = sum(len(tf.nest.flatten(batch)[0]) for batch in windows[0])
    result = Comparison(len(windows), None, tolerance(dtype, examples), dtype)
    exceptions = outside_the_law(reference)
    if exceptions:
        return dataclasses.replace(
            result,
            remark=f"what {', '.join(exceptions)} computes depends on how "
            "examples are batched",
        )
    reference.compile(**_with_sgd(arguments), jit_compile=False)
    expected = train_in_big_batches(reference, initial, windows)
    weights = train_in_windows(compiled(_with_sgd), initial, windows)
    name = type(loss_scale.unwrapped(_optimizer(arguments))).__name__
    return dataclasses.replace(
        result,
        difference=relative_difference(weights, expected, initial),
        remark="" if name == "SGD" else f"with SGD in the place of {name}",
    )


def outside_the_law(model: keras.Model) -> list[str]:
    """Names of layers for which the law makes an exception.

    Those with random numbers, and those with statistics of the batch.
    """
    return sorted(
        {
            type(layer).__name__
            for layer in keras_private.all_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization)
            or getattr(layer, "seed_generator", None) is not None
        }
    )


def _optimizer(arguments: Arguments) -> keras.optimizers.Optimizer:
    return keras.optimizers.get(arguments["optimizer"])


def _with_sgd(arguments: Arguments) -> Arguments:
    """The arguments with an optimizer whose step follows the gradient."""
    given = loss_scale.unwrapped(_optimizer(arguments))
    if isinstance(given, keras.optimizers.SGD):
        return arguments
    optimizer = keras.optimizers.SGD(
        0.01,
        clipnorm=given.clipnorm,
        global_clipnorm=given.global_clipnorm,
        clipvalue=given.clipvalue,
    )
    return {**arguments, "optimizer": optimizer}


def _fit(model: keras.Model, initial: Weights, batches: list[Any]) -> None:
    """One epoch over exactly these batches."""
    spec = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batches[0]
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: batches, output_signature=spec
    ).apply(tf.data.experimental.assert_cardinality(len(batches)))
    model.fit(
        dataset,
        shuffle=False,
        verbose=0,
        callbacks=[InitialWeights(initial)],
    )


def _distances(weights: Weights, others: Weights) -> list[float]:
    """Largest difference in each variable."""
    return [
        float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0))
        for a, b in zip(weights, others, strict=True)
    ]
