"""The models that are measured; torch_loop.py has the same in PyTorch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with random data of ten classes.

    Attributes:
        layers: makes inputs and outputs.
        micro_batch: examples in a micro-step.
        draw: random inputs, from a generator and their number.
        updates: in one timed `fit`: enough to hide what a `fit` costs; see
            `benchmarks.start` for that.
    """

    layers: Callable[[], tuple[Any, Any]]
    micro_batch: int
    draw: Callable[[np.random.Generator, int], np.ndarray]
    updates: int

    def data(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The same inputs and classes whenever they are asked for."""
        rng = np.random.default_rng(0)
        return self.draw(rng, rows), rng.integers(0, 10, rows)

    def compiled(self, kind: Any, **arguments: Any) -> Any:
        """A model of this kind, with the same weights each time."""
        keras.utils.set_random_seed(1)
        model = kind(*self.layers())
        arguments.setdefault("optimizer", keras.optimizers.Adam())
        model.compile(loss=loss(), **arguments)
        return model


def rows_of(arrays: tuple[np.ndarray, ...]) -> tf.data.Dataset:
    """Row by row, for passes of any contender.

    Without autotuning: an iterator that has not come to its end would wait for
    a thread that sleeps for twice as long each time, whoever makes the pass.
    `tfaccum.Model.fit` sets this by itself.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices(arrays).with_options(options)


def loss() -> keras.losses.Loss:
    """Of ten classes."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def transformer():
    """About 0.7 M parameters, 32 tokens."""
    inputs = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(1000, 128)(inputs)
    for _ in range(3):
        attended = keras.layers.MultiHeadAttention(4, 32)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(512, activation="relu")(x)
        x = keras.layers.LayerNormalization()(
            x + keras.layers.Dense(128)(hidden)
        )
    x = keras.layers.GlobalAveragePooling1D()(x)
    return inputs, keras.layers.Dense(10)(x)


def cnn():
    """Residual blocks on 32 x 32 x 3."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, padding="same")(inputs)
    for filters in (32, 64, 128):
        y = keras.layers.Conv2D(filters, 3, 2, padding="same")(x)
        y = keras.layers.ReLU()(keras.layers.GroupNormalization(8)(y))
        y = keras.layers.Conv2D(filters, 3, padding="same")(y)
        x = keras.layers.Conv2D(filters, 1, 2)(x)
        x = keras.layers.ReLU()(x + y)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return inputs, keras.layers.Dense(10)(x)


def mlp():
    """So small that only what surrounds it counts."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    return inputs, keras.layers.Dense(10)(x)


def wide(size: int = 64, depth: int = 6):
    """Few parameters, many activations."""
    inputs = keras.Input((size, size, 3))
    x = inputs
    for _ in range(depth):
        x = keras.layers.Conv2D(16, 1, activation="relu")(x)
    return inputs, keras.layers.Dense(10)(
        keras.layers.GlobalAveragePooling2D()(x)
    )


def heavy(size: int = 1024, depth: int = 8):
    """Many parameters, few activations."""
    inputs = x = keras.Input((size,))
    for _ in range(depth):
        x = keras.layers.Dense(size, activation="relu")(x)
    return inputs, keras.layers.Dense(10)(x)


def deep(depth: int = 20):
    """Many small layers: takes longer to trace than to run."""
    inputs = x = keras.Input((8,))
    for _ in range(depth):
        x = keras.layers.Dense(8, activation="relu")(x)
    return inputs, keras.layers.Dense(10)(x)


def _normal(*shape):
    return lambda rng, rows: rng.normal(size=(rows, *shape)).astype("float32")


CASES = {
    "transformer": Case(
        transformer,
        32,
        lambda rng, rows: rng.integers(0, 1000, (rows, 32)).astype("int32"),
        updates=12,
    ),
    "cnn": Case(cnn, 128, _normal(32, 32, 3), updates=6),
    "mlp": Case(mlp, 8, _normal(8), updates=384),
}
# For memory, and for the start of a run.
WIDE = Case(wide, 32, _normal(64, 64, 3), updates=1)
HEAVY = Case(heavy, 4, _normal(1024), updates=1)
DEEP = Case(deep, 8, _normal(8), updates=1)
