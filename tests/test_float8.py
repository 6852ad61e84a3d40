"""Variables that Keras overwrites with their gradient: float8's scales."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import boost

POLICIES = {
    "mixed_bfloat16": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "mixed_float16": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1)
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_float8_is_the_same_as_in_keras(policy):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 16)).astype("float32")

    def trained(model_class):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((16,))
        layer = keras.layers.Dense(
            16, dtype=f"float8_from_{policy}", name="float8"
        )
        model = model_class(inputs, layer(inputs))
        model.compile(POLICIES[policy](), "mse", auto_scale_loss=False)
        model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return {v.path: v.numpy() for v in model.trainable_variables}

    ours, theirs = trained(tfaccum.Model), trained(keras.Model)
    assert len(ours) == 8  # Kernel, bias and three scales with histories.
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


class LargestSquare(keras.layers.Layer):
    """Passes its inputs on, and keeps their largest square as float8 would."""

    def build(self, shape):
        self.largest = self.add_weight(
            shape=(), initializer="zeros", overwrite_with_gradient=True
        )

    def call(self, inputs):
        @tf.custom_gradient
        def keep(x, largest):
            found = tf.reduce_max(tf.square(x))
            return tf.identity(x), lambda upstream: (upstream, found)

        return keep(inputs, tf.convert_to_tensor(self.largest))


def keeping(replicas=1, **arguments):
    return toy.toy(
        replicas, layers=lambda: [LargestSquare(), toy.scalar()], **arguments
    )


BASIS = boost.Basis(
    {"w/kernel": np.ones([1, 1, 1]), "largest_square/variable": np.zeros([1])},
    np.ones(1),
)

SCALES = {
    "none": {"loss_scale": None},
    "fixed": {"loss_scale": 8.0},
    "dynamic": {"loss_scale": tfaccum.LossScale(initial=8.0)},
}


@pytest.mark.parametrize("scale", SCALES)
def test_it_carries_no_scale_and_is_not_in_the_norm(scale):
    model = keeping(**SCALES[scale])
    seen = toy.fit(model, toy.batches([1, 3], [-4, 1]))
    assert seen.weights == [[9, -2], [16, -0.5]]
    assert seen.of_updates("gradient_norm") == [2, 1.5]


def test_it_carries_no_scale_of_a_group():
    scale = tfaccum.GroupLossScale([["largest_square"], ["w"]], initial=4.0)
    inputs = keras.Input((1,))
    x = scale(LargestSquare(name="largest_square")(inputs), leaves=1, enters=2)
    outputs = scale(toy.scalar()(x), leaves=2, enters=3)
    model = tfaccum.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1.0), toy.product, loss_scale=scale)
    seen = toy.fit(model, toy.batches([1, 3]))
    assert seen.weights == [[9, -2]]


def test_a_value_that_is_not_finite_skips_the_update():
    """The square of 1e20 is infinite; the gradient of the weight is not."""
    model = keeping()
    seen = toy.fit(model, toy.batches([2], [1e20], [4]))
    assert seen.weights == [[4, -2], [4, -2], [16, -6]]
    assert seen.of_updates("skipped") == [False, True, False]


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        {"micro_batch_size": 1},
        {"replicas": 2},
        {"optimizer": lambda: boost.DimReduce(BASIS)},
    ],
)
def test_what_would_need_its_mean_is_refused(arguments):
    model = keeping(**arguments)
    with pytest.raises(ValueError, match="float8 .* Received: largest_square"):
        toy.fit(model, toy.batches([1, 3], [-4, 1]))
    assert toy.weights_of(model) == [0, 0]


def test_a_loop_of_ones_own_refuses_it():
    layer = keras.layers.Dense(4, dtype="float8_from_mixed_bfloat16")
    layer.build((None, 4))
    with pytest.raises(ValueError, match="Received: variables with .*inputs_s"):
        tfaccum.GradientAccumulator(layer.trainable_variables)
