"""What accumulators of each dtype hold of one and the same gradients.

The gradients are those of a small CNN on the digits; the reference is their
sum in numpy's float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from experiments import accumulator_dtype
from tfaccum import accumulator
from tfaccum.datasets import digits

# Micro-batches of 32 and of 2: products with those are exact. The mean over
# 96 is not, so that a sum that was rounded before it shows.
EXAMPLES = 96
STEPS = (3, 48)
# Examples, loss and weight are summed in float32 whatever the gradients are.
OTHER_BYTES = 3 * 4
SIGNIFICANT_BITS = {"bfloat16": 8, "float32": 24, "float64": 53}


@pytest.fixture(scope="module")
def network():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


@pytest.fixture(scope="module")
def examples():
    x, y = digits.load()
    return x[:EXAMPLES, ..., np.newaxis].astype("float32") / 16, y[:EXAMPLES]


@pytest.fixture(scope="module")
def windows(network, examples):
    """For each K: the micro-steps' products, and the gradient by dtype."""
    found = {}
    for steps in STEPS:
        products = accumulator_dtype.micro_gradients(network, *examples, steps)
        by_dtype = {}
        for dtype in accumulator_dtype.DTYPES:
            model = accumulator_dtype.for_gradients(
                network,
                micro_batch_size=EXAMPLES // steps,
                accumulator_dtype=dtype,
            )
            by_dtype[dtype] = accumulator_dtype.gradient(model, *examples)
        found[steps] = products, by_dtype
    return found


def test_bytes_are_those_of_the_weights_and_halve_exactly(network, examples):
    # 3x3 kernels to 4 channels, and a dense layer on 6x6 places.
    weights = 9 * 4 + 4 + 6 * 6 * 4 * 10 + 10
    found = {}
    for dtype in (None, *accumulator_dtype.DTYPES):
        model = accumulator_dtype.for_gradients(
            network, micro_batch_size=EXAMPLES, accumulator_dtype=dtype
        )
        accumulator_dtype.gradient(model, *examples)
        found[dtype] = (model.accumulator_bytes - OTHER_BYTES) / weights
    assert found == {None: 4, "bfloat16": 2, "float32": 4, "float64": 8}


def test_the_gradients_of_the_micro_steps_differ(windows):
    """Or an accumulator that keeps one of them alone would pass."""
    for steps, (products, _) in windows.items():
        assert products.dtype == np.float32 and len(products) == steps
        mean = products.mean(0)
        for product in products:
            assert np.linalg.norm(product - mean) > 0.2 * np.linalg.norm(mean)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", accumulator_dtype.DTYPES)
def test_accumulators_are_numpys_running_sum_to_the_bit(windows, dtype, steps):
    """In their dtype; divided in float32 or wider, and rounded to float32."""
    products, by_dtype = windows[steps]
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    total = np.zeros(products.shape[1:], numpy_dtype)
    for product in products:
        total = total + product.astype(numpy_dtype)
    if dtype == "bfloat16":
        total = total.astype("float32")
    expected = (total / total.dtype.type(EXAMPLES)).astype("float32")
    np.testing.assert_array_equal(by_dtype[dtype], expected)


def test_float64_sums_are_exact_before_they_are_divided(windows):
    products, _ = windows[STEPS[-1]]
    sums = accumulator.ReplicaSums.zeros(
        tf.TensorSpec(products.shape[1:], tf.float64)
    )
    for product in products:
        sums.add(tf.constant(product))
    total = sums.values()
    assert total.dtype == tf.float64
    np.testing.assert_allclose(
        total.numpy(), products.sum(0, dtype="float64"), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("steps", STEPS)
def test_errors_are_those_of_the_digits_and_of_K(windows, steps):
    """Each of K casts or additions rounds by 2**-bits at most."""
    products, by_dtype = windows[steps]
    products = products.astype("float64")
    exact = products.sum(0) / EXAMPLES
    magnitude = np.abs(products).sum(0) / EXAMPLES
    found = {}
    for dtype, gradient in by_dtype.items():
        bits = SIGNIFICANT_BITS[dtype]
        bound = ((1 + 2.0**-bits) ** steps - 1) * magnitude
        # The mean is rounded to float32 twice, or once.
        bound += 2 * 2.0**-24 * magnitude
        assert (np.abs(gradient - exact) <= bound).all()
        found[dtype], _ = accumulator_dtype.errors(gradient, exact)
    # An error that is there: bfloat16 casts alone make about 2**-10.
    assert 2.0**-11 < found["bfloat16"] < 2.0**-8 * steps
    assert found["float64"] <= 2.0**-24
    assert found["float64"] <= found["float32"] < 1e-3 * found["bfloat16"]


def test_bfloat16_loses_more_in_more_micro_steps(windows):
    few, many = (
        accumulator_dtype.errors(
            by_dtype["bfloat16"], products.sum(0, dtype="float64") / EXAMPLES
        )[0]
        for products, by_dtype in windows.values()
    )
    assert many > 2 * few


def test_gradient_leaves_weights_and_the_next_gradient_alone(network, examples):
    x, y = examples
    model = accumulator_dtype.for_gradients(network)
    before = model.get_weights()
    first = accumulator_dtype.gradient(model, x, y)
    for weight, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    np.testing.assert_array_equal(
        accumulator_dtype.gradient(model, x, y), first
    )


@pytest.mark.parametrize("dtype", accumulator_dtype.DTYPES)
def test_a_frequent_token_counts_in_full(dtype):
    """One addition per micro-step, not per token: bfloat16 sticks at 256."""
    inputs = keras.Input((513,), dtype="int32")
    table = keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
    model = tfaccum.Model(inputs, table(inputs))
    model.compile(
        keras.optimizers.SGD(1.0),
        lambda y, y_pred: tf.reduce_sum(y_pred, axis=[1, 2]),
        gradient_accumulation_steps=2,
        accumulator_dtype=dtype,
    )
    tokens = np.ones((4, 513), "int32")
    tokens[2:, 512] = 2
    model.fit(
        tokens, np.zeros((4, 513, 1)), batch_size=2, shuffle=False, verbose=0
    )
    # The sums are 2 * 513 + 2 * 512 and 2; in bfloat16 1026 becomes 1024, and
    # 2048 is exact.
    first = 512.0 if dtype == "bfloat16" else 512.5
    np.testing.assert_array_equal(
        model.get_weights()[0].ravel(), [0, -first, -0.5]
    )


def test_the_experiments_measures_by_hand():
    """|(0, -4)| / |(3, 4)|, and the angle to the first axis."""
    found = accumulator_dtype.errors(np.float32([3, 0]), np.array([3.0, 4.0]))
    np.testing.assert_allclose(found, [4 / 5, 1 - 3 / 5], rtol=1e-15)
    # Means 2 and 0, variances 2 and 0 over 2 micro-steps.
    noise = accumulator_dtype.noise(np.float32([[1, 0], [3, 0]]))
    assert noise == pytest.approx(1 / 2, rel=1e-15)
