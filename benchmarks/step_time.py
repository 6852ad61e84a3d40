"""Time of one update of K = 8 micro-batches, against everyone.

    python -m benchmarks.step_time [--model=transformer] [--jit]

On one device, for the same examples and the same model, in turn:

* `window`: tfaccum, `gradient_accumulation_steps=8`;
* `cut`: tfaccum, one batch of all examples and `micro_batch_size`;
* `big_batch`: Keras, one batch of all examples;
* `keras`, `keras_steps_8`: Keras' own `gradient_accumulation_steps=8`, with
  `steps_per_execution` 1 and 8;
* `loop`: a `tf.function` written by hand that adds up and applies.

Each is a whole `fit` (or a Python loop) over the same dataset in memory, after
one that traced. Prints one JSON line per model: seconds per update, median,
least and most of `--repeats`; CPU seconds; and ratios of medians.
"""

import argparse
import json
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import benchmarks
import tfaccum

STEPS = 8


def transformer():
    """About 0.7 M parameters, 32 tokens, micro-batch 32."""
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
    outputs = keras.layers.Dense(10)(x)
    return inputs, outputs, 32, lambda rng, n: rng.integers(0, 1000, (n, 32))


def cnn():
    """Residual blocks on 32 x 32 x 3, micro-batch 16."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(16, 3, padding="same")(inputs)
    for filters in (16, 32, 64):
        y = keras.layers.Conv2D(filters, 3, 2, padding="same")(x)
        y = keras.layers.GroupNormalization(8)(y)
        y = keras.layers.Conv2D(filters, 3, padding="same")(
            keras.layers.ReLU()(y)
        )
        x = keras.layers.Conv2D(filters, 1, 2)(x)
        x = keras.layers.ReLU()(x + y)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    return inputs, outputs, 16, lambda rng, n: rng.normal(size=(n, 32, 32, 3))


def mlp():
    """So small that only what surrounds it counts; micro-batch 8."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    return (
        inputs,
        keras.layers.Dense(10)(x),
        8,
        lambda rng, n: rng.normal(size=(n, 8)),
    )


MODELS = {"transformer": transformer, "cnn": cnn, "mlp": mlp}


class Loop:
    """What one would write by hand; `fit` takes a dataset and nothing else."""

    def __init__(self, model, optimizer, loss, jit):
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._sums = [tf.Variable(tf.zeros(v.shape)) for v in model.weights]
        optimizer.build(model.trainable_variables)
        self._gradients = tf.function(self._gradient, jit_compile=jit)

    def _gradient(self, x, y):
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
        found = tape.gradient(loss, self._model.trainable_variables)
        return loss, [tf.convert_to_tensor(g) for g in found]

    @tf.function
    def _update(self, iterator):
        for _ in tf.range(STEPS):
            _, gradients = self._gradients(*next(iterator))
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.assign_add(gradient / STEPS)
        self._optimizer.apply(self._sums, self._model.trainable_variables)
        for total in self._sums:
            total.assign(tf.zeros_like(total))

    def fit(self, data, **_):
        """One pass over the data."""
        iterator = iter(data)
        for _ in range(int(data.cardinality()) // STEPS):
            self._update(iterator)


def contenders(make, jit, updates):
    """(fit, dataset) by name."""
    _, _, micro, draw = make()
    rng = np.random.default_rng(0)
    rows = micro * STEPS * updates
    x = draw(rng, rows).astype("int32" if make is transformer else "float32")
    y = rng.integers(0, 10, rows)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(micro * STEPS)
    cut = tf.data.Dataset.from_tensor_slices((x, y)).batch(micro)
    whole, cut = whole.cache().prefetch(2), cut.cache().prefetch(2 * STEPS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def model(kind, optimizer=None, **arguments):
        keras.utils.set_random_seed(1)
        inputs, outputs, _, _ = make()
        built = kind(inputs, outputs)
        built.compile(
            optimizer or keras.optimizers.Adam(),
            loss,
            jit_compile=jit,
            **arguments,
        )
        return built

    def own(steps):
        adam = keras.optimizers.Adam(gradient_accumulation_steps=STEPS)
        return model(keras.Model, adam, steps_per_execution=steps)

    inputs, outputs, _, _ = make()
    by_hand = keras.Model(inputs, outputs)
    return {
        "window": (
            model(tfaccum.Model, gradient_accumulation_steps=STEPS).fit,
            cut,
        ),
        "cut": (model(tfaccum.Model, micro_batch_size=micro).fit, whole),
        "big_batch": (model(keras.Model).fit, whole),
        "keras": (own(1).fit, cut),
        "keras_steps_8": (own(STEPS).fit, cut),
        "loop": (Loop(by_hand, keras.optimizers.Adam(), loss, jit).fit, cut),
    }


def measure(name, jit, repeats, updates):
    """One model: seconds per update of all contenders, in turn."""
    found = contenders(MODELS[name], jit, updates)
    for fit, data in found.values():
        fit(data, verbose=0)
    wall = {who: [] for who in found}
    cpu = {who: [] for who in found}
    for _ in range(repeats):
        for who, (fit, data) in found.items():
            since, spent = time.perf_counter(), time.process_time()
            fit(data, verbose=0)
            wall[who].append((time.perf_counter() - since) / updates)
            cpu[who].append((time.process_time() - spent) / updates)
    median = {who: statistics.median(times) for who, times in wall.items()}
    best_of_keras = min(median["keras"], median["keras_steps_8"])
    return {
        "what": "step_time",
        "model": name,
        "jit": jit,
        "steps": STEPS,
        "ms_per_update": {
            who: [
                round(1e3 * f(times), 2) for f in (statistics.median, min, max)
            ]
            for who, times in wall.items()
        },
        "cpu_ms_per_update": {
            who: round(1e3 * statistics.median(times), 2)
            for who, times in cpu.items()
        },
        "window_against": {
            "big_batch": round(median["window"] / median["big_batch"], 3),
            "keras_at_its_best": round(median["window"] / best_of_keras, 3),
            "keras_default": round(median["window"] / median["keras"], 3),
            "loop": round(median["window"] / median["loop"], 3),
        },
        **benchmarks.where(),
    }


def main():
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--updates", type=int, default=12)
    asked = parser.parse_args()
    for name in asked.model or MODELS:
        row = measure(name, asked.jit, asked.repeats, asked.updates)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
