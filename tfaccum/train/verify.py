"""Takes the first updates of a run again, as one big batch on one device.

The law says that every update comes out the same. The big batch is trained by
plain Keras, which knows nothing of windows and replicas.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccum import feeding, keras_private, loss_scale
from tfaccum.micro_batches import dataset_of, spec_of_any_rows
from tfaccum.model import Model

Values = list[np.ndarray]
Arguments = dict[str, Any]
# The dataset batches behind one update.
WindowBatches = list[Any]

_MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        updates: Updates that were compared.
        difference: Largest difference of two weights after an update, divided
            by the largest change of a weight in it; None if no update was
            compared.
        tolerance: What rounding may explain, see `tolerance`.
        dtype: In which layers compute.
        remark: What a reader has to know besides.
    """

    updates: int
    difference: float | None
    tolerance: float
    dtype: str
    remark: str = ""

    @property
    def equal(self) -> bool | None:
        """Whether all are equal, up to rounding; None if not compared."""
        if self.difference is None:
            return None
        return self.difference <= self.tolerance

    def describe(self) -> str:
        """The lines for people; the verdict comes last."""
        verdict = {None: "not compared", True: "yes", False: "no"}[self.equal]
        remark = f" ({self.remark})" if self.remark else ""
        lines = [""]
        if self.difference is not None:
            lines.append(
                f"largest difference of a weight in {self.updates} updates: "
                f"{self.difference:.1e} of the largest change\n"
                f"tolerance for {self.dtype}: {self.tolerance:.1e}"
            )
        lines.append(f"equal to the one-big-batch run: {verdict}{remark}")
        return "\n".join(lines)


def tolerance(dtype: str, num_examples: int) -> float:
    """How far rounding alone may move one update.

    float64 and float32: adding n numbers in another order changes a sum by
    about sqrt(n) roundings. float16 and bfloat16: products are summed in
    float32, and each micro-batch's gradient is rounded to the short dtype
    once, whatever n is. A gradient passes through several layers, for which
    stands 8.

    Args:
        dtype: In which layers compute.
        num_examples: Examples behind one update.
    """
    roundings = num_examples**0.5 if _MANTISSA[dtype] > 10 else 1.0
    return 8 * roundings * 2.0 ** -_MANTISSA[dtype]


class StartFrom(keras.callbacks.Callback):
    """Sets or keeps the state with which `fit` starts.

    Args:
        weights: Of the model; None: as they are.
        slots: Values of `optimizer.variables`; None: as they are.

    Attributes:
        weights: With which the last `fit` has started.
    """

    def __init__(
        self, weights: Values | None = None, slots: Values | None = None
    ):
        super().__init__()
        self.weights = weights
        self._slots = slots

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Here the model is built, whatever kind it is."""
        if self.weights is not None:
            self.model.set_weights(self.weights)
        if self._slots is not None:
            for variable, value in zip(
                self.model.optimizer.variables, self._slots, strict=True
            ):
                variable.assign(value)
        self.weights = self.model.get_weights()


def first_windows(
    train: Any, batches: int, updates: int
) -> list[WindowBatches]:
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


def compare(
    compiled: Callable[[Callable[[Arguments], Arguments]], Model],
    reference: keras.Model,
    arguments: Arguments,
    initial: Values,
    windows: list[WindowBatches],
) -> Comparison:
    """Takes updates in two ways, each from the same state and examples.

        for window in windows:
            the model of the run gets weights and slots of the reference
            the model of the run takes one update from the window
            the reference takes one update from the window as one batch
            compare their weights

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
        windows: As `first_windows` returns them.
    """
    dtype = keras.config.dtype_policy().compute_dtype
    allowed = tolerance(dtype, num_examples(windows[0]))
    exceptions = outside_the_law(reference)
    if exceptions:
        remark = f"the law does not hold for {', '.join(exceptions)}"
        return Comparison(0, None, allowed, dtype, remark)
    reference.compile(**_with_sgd(arguments), jit_compile=False)
    expected = big_batch_updates(reference, initial, windows)
    differences = relative_differences(compiled(_with_sgd), expected, windows)
    remarks = []
    given = _optimizer(arguments)
    if not isinstance(given, keras.optimizers.SGD):
        remarks.append(f"with SGD in the place of {type(given).__name__}")
    left_out = len(windows) - len(differences)
    if left_out:
        remarks.append(f"{left_out} overflowed in one of the two ways only")
    return Comparison(
        len(differences),
        max(differences, default=None),
        allowed,
        dtype,
        "; ".join(remarks),
    )


def num_examples(window: WindowBatches) -> int:
    """Rows of all its batches."""
    return sum(len(tf.nest.flatten(batch)[0]) for batch in window)


@dataclasses.dataclass(frozen=True)
class BigBatchUpdate:
    """One update of the reference.

    Attributes:
        before: Weights before it.
        slots: Values of the optimizer's variables before it; None: new.
        after: Weights after it.
    """

    before: Values
    slots: Values | None
    after: Values


def big_batch_updates(
    model: keras.Model, initial: Values, windows: list[WindowBatches]
) -> list[BigBatchUpdate]:
    """Trains on each window as one batch, update after update."""
    updates = []
    weights, slots = initial, None
    for window in windows:
        batch = tf.nest.map_structure(lambda *p: tf.concat(p, 0), *window)
        after = _after_one_update(model, weights, slots, [batch])
        updates.append(BigBatchUpdate(weights, slots, after))
        weights = after
        slots = list(map(keras.ops.convert_to_numpy, model.optimizer.variables))
    return updates


def relative_differences(
    model: Model, expected: list[BigBatchUpdate], windows: list[WindowBatches]
) -> list[float]:
    """Takes the same updates window by window, each from the same state.

    Returns:
        For each update, the largest difference of a weight divided by the
        largest change of a weight. An update that float16 has skipped in one
        of the two ways only is left out: the gradient of a micro-batch may be
        too large for it where that of the whole batch is not.
    """
    differences = []
    for update, window in zip(expected, windows, strict=True):
        found = _after_one_update(model, update.before, update.slots, window)
        change = _distance(update.after, update.before)
        if bool(change) == bool(_distance(found, update.before)):
            differences.append(_distance(found, update.after) / (change or 1))
    return differences


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
    return loss_scale.unwrapped(keras.optimizers.get(arguments["optimizer"]))


def _with_sgd(arguments: Arguments) -> Arguments:
    """The arguments with an optimizer whose step follows the gradient."""
    given = _optimizer(arguments)
    if isinstance(given, keras.optimizers.SGD):
        return arguments
    optimizer = keras.optimizers.SGD(
        0.01,
        clipnorm=given.clipnorm,
        global_clipnorm=given.global_clipnorm,
        clipvalue=given.clipvalue,
    )
    return {**arguments, "optimizer": optimizer}


def _after_one_update(
    model: keras.Model,
    weights: Values,
    slots: Values | None,
    batches: WindowBatches,
) -> Values:
    """Weights after one window of exactly these batches."""
    parts = [dataset_of(b, spec_of_any_rows(b)) for b in batches]
    dataset = functools.reduce(tf.data.Dataset.concatenate, parts)
    # Its thread would be waited for, for seconds, when an iterator is deleted.
    options = tf.data.Options()
    options.autotune.enabled = False
    start = StartFrom(weights, slots)
    model.fit(
        dataset.with_options(options),
        shuffle=False,
        verbose=0,
        callbacks=[start],
    )
    return model.get_weights()


def _distance(values: Values, others: Values) -> float:
    """The largest difference of two weights."""
    return max(
        float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0))
        for a, b in zip(values, others, strict=True)
    )
