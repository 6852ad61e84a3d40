"""AdaSum on a model whose gradients can be seen, and its numpy twin.

The loss of an example is x . w over two variables, so that the gradient of a
batch is the mean of its rows, and a numpy twin needs no backward pass.
"""

import keras
import numpy as np

import tfaccum
from tests import toy
from tfaccum.boost import AdaSum

SIZES = (3, 2)  # Of the two variables.
RATE, MOMENTUM, DECAY = 0.1, 0.5, 0.01


def rows(count, seed=0):
    """[count, 5] rows, the replicas' means neither parallel nor orthogonal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, sum(SIZES))) + [1, 0, 0, -2, 0.5]
    return x.astype("float32")


def build(strategy, optimizer=None, **how):
    """The model, compiled; `optimizer` is called under the strategy."""
    with strategy.scope():
        inputs = keras.Input((sum(SIZES),))
        first, second = (
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer="zeros", name=name
            )
            for name in "ab"
        )
        outputs = first(inputs[:, : SIZES[0]]) + second(inputs[:, SIZES[0] :])
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(1.0),
            toy.product,
            **how,
        )
    return model


def with_momentum():
    return keras.optimizers.SGD(RATE, MOMENTUM, weight_decay=DECAY)


def fit(model, x, batch_size, **arguments):
    arguments = {"shuffle": False, "verbose": 0} | arguments
    return model.fit(x, x[:, :1], batch_size, **arguments)


def weights(model):
    """All weights as one vector; the same bits on every replica."""
    return np.concatenate(
        [toy.value_of(model, v).ravel() for v in model.trainable_variables]
    )


# --- The numpy twin --------------------------------------------------------


def pair(a, b):
    """The formula, in float64; a vector of zeros has factor 1."""
    dot = a @ b
    factor_a = 1 - dot / (2 * (a @ a)) if a.any() else 1.0
    factor_b = 1 - dot / (2 * (b @ b)) if b.any() else 1.0
    return factor_a * a + factor_b * b


def tree(vectors):
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    return pair(tree(vectors[:half]), tree(vectors[half:]))


def adasum(vectors, coefficients="tensor"):
    vectors = [np.float64(v) for v in vectors]
    if coefficients == "model":
        return tree(vectors)
    parts = [np.split(v, [SIZES[0]]) for v in vectors]
    return np.concatenate(
        [tree(list(column)) for column in zip(*parts, strict=True)]
    )


def shares(batch, replicas):
    """Rows of each replica: consecutive, the first ones with more."""
    return np.array_split(batch, replicas)


def means(x, batch_size, steps, replicas):
    """The mean row of each replica, window by window; and its rows."""
    batches = [x[i : i + batch_size] for i in range(0, len(x), batch_size)]
    for start in range(0, len(batches), steps):
        window = batches[start : start + steps]
        parts = [
            np.concatenate(column)
            for column in zip(
                *(shares(b, replicas) for b in window), strict=True
            )
        ]
        yield (
            [
                part.mean(0, dtype=np.float64)
                if len(part)
                else np.zeros(sum(SIZES))
                for part in parts
            ],
            [len(part) for part in parts],
        )


def in_workers(vectors, counts, workers):
    """The mean of each worker's replicas, by their rows."""
    vectors = np.array_split(np.array(vectors), workers)
    counts = np.array_split(np.array(counts), workers)
    return [
        np.average(v, axis=0, weights=c) if c.sum() else v.mean(0)
        for v, c in zip(vectors, counts, strict=True)
    ]


def by_gradients(found, coefficients="tensor", workers=None):
    """Weights after SGD(1) with AdaSum of gradients."""
    w = np.zeros(sum(SIZES))
    for vectors, counts in found:
        if workers:
            vectors = in_workers(vectors, counts, workers)
        w -= adasum(vectors, coefficients)
    return w


def by_changes(found, coefficients="tensor", workers=None):
    """Weights after `with_momentum`, AdaSum of each one's change."""
    found = list(found)
    participants = workers or len(found[0][0])
    w = np.zeros(sum(SIZES))
    velocities = [np.zeros_like(w) for _ in range(participants)]
    for vectors, counts in found:
        if workers:
            vectors = in_workers(vectors, counts, workers)
        changes = []
        for i, gradient in enumerate(vectors):
            decayed = w - RATE * DECAY * w  # Keras' decay comes first.
            velocities[i] = MOMENTUM * velocities[i] - RATE * gradient
            changes.append(decayed + velocities[i] - w)
        w = w + adasum(changes, coefficients)
    return w


# --- On several workers ----------------------------------------------------


def every_kind(strategy):
    """Weights after windows of two batches, for each form and shape."""
    found = {}
    for form in ("gradient", "delta"):
        for hierarchical in (False, True):
            model = build(
                strategy,
                with_momentum if form == "delta" else None,
                gradient_accumulation_steps=2,
                replica_reduction=AdaSum(form, hierarchical=hierarchical),
            )
            fit(model, rows(37), batch_size=9)
            found[f"{form} {hierarchical}"] = weights(model).tolist()
    return found
