"""A model of two tables, and its sparse sums on several workers."""

import keras
import numpy as np

import tfaccum
from tests import toy
from tests.multi_worker import graphs

# Of two ids each; several rows meet in one id, on one replica and on others.
PAIRS = np.array([[1, 2], [2, 2], [49, 0], [7, 1], [1, 1]])
TARGETS = np.random.default_rng(1).normal(size=(5, 1)).astype("float32")


def two_tables(strategy, second=True, model_class=tfaccum.Model, **how):
    """Two tables, of widths 3 and 2, and a dense layer."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int32")
        outputs = keras.layers.Embedding(50, 3)(inputs)
        if second:
            other = keras.layers.Embedding(70, 2)(inputs + 3)
            outputs = keras.layers.Concatenate()([outputs, other])
        outputs = keras.layers.Dense(1)(keras.ops.tanh(outputs))
        model = model_class(inputs, keras.ops.mean(outputs, 1))
        optimizer = keras.optimizers.SGD(0.5, 0.9, global_clipnorm=0.1)
        model.compile(optimizer, "mse", **how)
    return model


def fit(model, targets=TARGETS, batch_size=3, epochs=2):
    model.fit(
        PAIRS,
        targets,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return model


def values(model):
    """All weights and slots as one list, the same on every replica."""
    variables = model.trainable_variables + model.optimizer.variables
    return np.concatenate(
        [np.ravel(toy.value_of(model, v)) for v in variables]
    ).tolist()


def windows(strategy):
    """Values after windows of several kinds."""
    kinds = {
        "one": {},
        "two": {"gradient_accumulation_steps": 2},
        "cut": {"micro_batch_size": 1},
        "bfloat16": {"wire_dtype": "bfloat16"},
        "float16": {"wire_dtype": "float16", "micro_batch_size": 1},
    }
    return {
        name: values(fit(two_tables(strategy, sparse_sums=True, **how)))
        for name, how in kinds.items()
    }


def few_rows(strategy):
    """Batches of one row: one replica of all has examples."""
    model = two_tables(
        strategy, gradient_accumulation_steps=3, sparse_sums=True
    )
    return values(fit(model, batch_size=1))


def bad_row(strategy):
    """inf in the target of the last worker's last row."""
    model = two_tables(
        strategy, gradient_accumulation_steps=2, sparse_sums=True
    )
    targets = TARGETS.copy()
    targets[4] = np.inf
    before = model.get_weights()
    fit(model, targets, batch_size=5, epochs=1)
    (update,) = model.last_updates
    after = model.get_weights()
    return {
        "skipped": update.skipped,
        "same": all(map(np.array_equal, before, after)),
        "next": values(fit(model)),
    }


def collectives(strategy):
    """Types of those of a window, on this worker."""
    model = two_tables(
        strategy, gradient_accumulation_steps=2, sparse_sums=True
    )
    with graphs.traced() as traced:
        fit(model, epochs=1)
    return sorted(max((graphs.collectives(g) for g in traced), key=len))
