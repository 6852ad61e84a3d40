"""Cases F: what is clipped is the reduced gradient, once and unscaled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests.toy import (
    batches,
    fit,
    product,
    strategy_of,
    toy,
    value_of,
    weight_of,
)

CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def clipped(**clip):
    return lambda: keras.optimizers.SGD(1.0, **clip)


# --- F1: micro-steps -------------------------------------------------------


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    "accumulation, rows",
    [
        ({"gradient_accumulation_steps": 2}, [[10], [-8]]),
        ({"micro_batch_size": 1}, [[10, -8]]),
    ],
)
def test_F1_clips_the_window_and_not_the_micro_batch(accumulation, rows, clip):
    model = toy(optimizer=clipped(**{clip: 1.0}), **accumulation)
    # Mean 1; then mean 3, which is clipped to 1; then a short window.
    tripled = [[3 * x for x in row] for row in rows]
    seen = fit(model, batches(*rows, *tripled, [0.25]))
    # Clipped per micro-batch the first two would not move w at all.
    assert seen.weights == [[-1], [-2], [-2.25]]
    # The norm is logged as it was before.
    assert seen.of_updates("gradient_norm") == [1, 3, 0.25]


@pytest.mark.parametrize("clip", CLIPS)
def test_F1_clips_the_window_eagerly_and_with_replicas(clip):
    model = toy(
        2,
        optimizer=clipped(**{clip: 1.0}),
        gradient_accumulation_steps=2,
        run_eagerly=True,
    )
    fit(model, batches([10, 10], [-8, -8]))
    assert weight_of(model) == -1


# --- F2: replicas ----------------------------------------------------------


@pytest.mark.parametrize(
    "accumulates, eager", [(False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize("clip", CLIPS)
def test_F2_clips_after_the_reduction(clip, accumulates, eager):
    model = toy(
        2,
        optimizer=clipped(**{clip: 1.0}),
        run_eagerly=eager,
        **({"micro_batch_size": 1} if accumulates else {}),
    )
    # Clipped on each replica: a sum of -2 first, and no move at all then.
    seen = fit(model, batches([3, 5], [10, -8], [10, -9]))
    assert seen.weights == [[-1], [-2], [-2.5]]
    assert seen.of_updates("gradient_norm") == [4, 1, 0.5]


def two_scalars(replicas, optimizer, **arguments):
    """Loss u * x + v * z, so that the gradient has two parts."""
    with strategy_of(replicas).scope():
        inputs = keras.Input((2,))
        parts = [
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer="zeros", name=name
            )(inputs[:, index : index + 1])
            for index, name in enumerate("uv")
        ]
        model = tfaccum.Model(inputs, keras.layers.add(parts))
        model.compile(optimizer(), loss=product, **arguments)
    return model


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "clip, expected",
    [
        ({"global_clipnorm": 1.0}, [-0.6, -0.8]),
        ({"clipnorm": 1.0}, [-1, -1]),
        ({"clipvalue": 3.5}, [-3, -3.5]),
        ({}, [-3, -4]),
    ],
)
def test_F2_the_three_kinds_of_clipping_differ(clip, expected, replicas):
    model = two_scalars(
        replicas,
        optimizer=lambda: keras.optimizers.SGD(1.0, **clip),
        gradient_accumulation_steps=2,
    )
    # The mean of the rows is (3, 4), over replicas and micro-steps.
    rows = np.array([[13, 0], [-5, 8], [1, -6], [3, 14]], np.float32)
    model.fit(rows, rows, batch_size=2, shuffle=False, verbose=0)
    values = [value_of(model, v).item() for v in model.trainable_variables]
    assert values == pytest.approx(expected, abs=1e-6)


# --- F4: unscaling, once, at the borders of epochs too ---------------------


class OwnStep(tfaccum.Model):
    """A step of one's own with nothing but `accumulate`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(product(y, self(x, training=True)))
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return {"loss": loss}


def by_hand(windows, clip):
    """w after each update: the gradient is the mean, at most `clip`."""
    steps = [np.clip(np.mean(window), -clip, clip) for window in windows]
    return -np.cumsum(steps)


# All exact in float16. Five micro-batches with K = 2: the last window is short.
F4_ROWS = [[0.5, 1.5], [0.25], [1.5], [-1.25, -0.5], [0.125, 0.25]]
F4_WINDOWS = [F4_ROWS[0] + F4_ROWS[1], F4_ROWS[2] + F4_ROWS[3], F4_ROWS[4]]


@pytest.mark.parametrize(
    "policy, replicas, model_class, clip",
    [
        ("mixed_float16", 1, OwnStep, "clipnorm"),
        ("mixed_float16", 1, OwnStep, "global_clipnorm"),
        ("mixed_float16", 1, OwnStep, "clipvalue"),
        ("mixed_float16", 2, OwnStep, "clipnorm"),
        ("mixed_float16", 2, OwnStep, "global_clipnorm"),
        ("mixed_float16", 2, OwnStep, "clipvalue"),
        ("mixed_float16", 1, tfaccum.Model, "global_clipnorm"),
        ("mixed_float16", 2, tfaccum.Model, "global_clipnorm"),
        ("mixed_bfloat16", 1, OwnStep, "global_clipnorm"),
        ("float32", 1, OwnStep, "global_clipnorm"),
        ("float32", 2, OwnStep, "clipnorm"),
    ],
)
def test_F4_unscales_once_before_clipping(policy, replicas, model_class, clip):
    keras.config.set_dtype_policy(policy)
    model = toy(
        replicas,
        optimizer=clipped(**{clip: 0.5}),
        model_class=model_class,
        gradient_accumulation_steps=2,
    )
    seen = fit(model, batches(*F4_ROWS), epochs=3)
    # Means 0.75, which is clipped, -1/12 and 0.1875, which are not. A second
    # unscaling would leave nothing of them, clipping the scaled ones 0.5.
    expected = by_hand(F4_WINDOWS * 3, 0.5)
    tolerance = 1e-2 if policy == "mixed_bfloat16" else 1e-3
    assert np.ravel(seen.weights) == pytest.approx(expected, abs=tolerance)
    assert seen.iterations == [*range(1, 10)]
    assert not any(seen.of_updates("skipped"))
    norms = [0.75, 1 / 12, 0.1875] * 3
    assert seen.of_updates("gradient_norm") == pytest.approx(norms, abs=1e-3)
    scale = 2.0**15 if policy == "mixed_float16" else 1.0
    assert seen.of_updates("loss_scale") == [scale] * 9
    assert (policy == "mixed_float16") == isinstance(
        model.optimizer, keras.optimizers.LossScaleOptimizer
    )


def test_F4_unscales_once_when_cut():
    keras.config.set_dtype_policy("mixed_float16")
    model = toy(
        model_class=OwnStep,
        optimizer=clipped(global_clipnorm=0.5),
        micro_batch_size=1,
    )
    seen = fit(model, batches(*F4_WINDOWS), epochs=3)
    expected = by_hand(F4_WINDOWS * 3, 0.5)
    assert np.ravel(seen.weights) == pytest.approx(expected, abs=1e-3)


def test_F4_fixed_loss_scale_is_taken_out_before_clipping():
    model = toy(
        model_class=OwnStep,
        optimizer=clipped(global_clipnorm=0.5, loss_scale_factor=1024.0),
        gradient_accumulation_steps=2,
    )
    seen = fit(model, batches(*F4_ROWS), epochs=3)
    expected = by_hand(F4_WINDOWS * 3, 0.5)
    assert np.ravel(seen.weights) == pytest.approx(expected, abs=1e-6)
