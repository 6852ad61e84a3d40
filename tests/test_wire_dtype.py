"""Gradients that travel in two bytes; everything else is as it was."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.multi_worker import graphs
from tfaccum import reduction

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def on_two_replicas(gradients, wire_dtype, weights=(1.0, 1.0)):
    """The mean of one gradient per replica, as both replicas see it."""
    strategy = tfaccum.make_strategy(["CPU:0", "CPU:1"])
    values, weights = np.float32(gradients), np.float32(weights)
    with strategy.scope():
        variable = tf.Variable(tf.zeros(values.shape[1:]))
        accumulator = tfaccum.GradientAccumulator([variable], wire_dtype)

    def mean():
        context = tf.distribute.get_replica_context()
        r = context.replica_id_in_sync_group
        accumulator.add([tf.gather(values, r)], tf.gather(weights, r))
        (gradient,), weight = accumulator.reduce()
        accumulator.reset()
        return gradient, weight

    found, weight = tf.function(lambda: strategy.run(mean))()
    first, second = (
        value.numpy() for value in strategy.experimental_local_results(found)
    )
    np.testing.assert_array_equal(first, second)
    assert {w.numpy() for w in strategy.experimental_local_results(weight)} == {
        weights.sum()
    }
    return first


@pytest.mark.parametrize("wire_dtype", KINDS)
def test_each_replicas_sum_is_rounded_once_and_their_sum_once(wire_dtype):
    """Numpy rounds in the same three places, to the bit."""
    kind = KINDS[wire_dtype]
    gradients = np.random.default_rng(3).normal(size=(2, 1000))
    gradients = gradients.astype("float32")
    found = on_two_replicas(gradients, wire_dtype)
    # Below 8 no scale changes where float16 rounds.
    first, second = gradients.astype(kind)
    expected = (first + second).astype("float32") / 2
    np.testing.assert_array_equal(found, expected)
    exact = gradients.mean(0)
    assert np.abs(found - exact).max() > 0


@pytest.mark.parametrize("wire_dtype", KINDS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1.0, 1e6, 1e30])
def test_no_magnitude_leaves_the_range_of_the_wire(wire_dtype, magnitude):
    """float16 alone ends at 65,504 and at 6e-8, and the weight is 6,000."""
    gradients = magnitude * np.float32([[1, 0.5, 0, -3], [2, 0.25, 0, -1]])
    found = on_two_replicas(gradients, wire_dtype, weights=(4096, 1904))
    expected = np.average(gradients, axis=0, weights=(4096, 1904))
    bound = 2.0 ** {"bfloat16": -7, "float16": -10}[wire_dtype]
    np.testing.assert_allclose(found, expected, rtol=bound)


@pytest.mark.parametrize("wire_dtype", KINDS)
@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf])
def test_what_is_not_finite_stays_so(wire_dtype, bad):
    found = on_two_replicas([[1, 2], [bad, 3]], wire_dtype)
    assert not np.isfinite(found[0])


def test_the_scale_of_float16_is_a_power_of_two_below_its_limit():
    peaks = np.float32(2.0) ** np.arange(-140, 128, dtype=np.float32)
    peaks = np.concatenate([peaks, np.nextafter(2 * peaks[:-1], 0)])
    scales = reduction.float16_scale(tf.constant(peaks)).numpy()
    mantissa, _ = np.frexp(scales)
    assert set(mantissa) == {0.5}
    products = peaks.astype(np.float64) * scales
    assert products.max() <= 2.0**14
    assert products[peaks > 2.0**-110].min() >= 2.0**12
    for peak in (0.0, np.inf, np.nan):
        assert reduction.float16_scale(tf.constant(peak)) == 1.0


@pytest.mark.parametrize("wire_dtype", KINDS)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_model_trains_by_hand(wire_dtype, run_eagerly):
    """Whole numbers up to 256 are exact in both."""
    model = toy.toy(
        2,
        gradient_accumulation_steps=2,
        wire_dtype=wire_dtype,
        run_eagerly=run_eagerly,
    )
    seen = toy.fit(model, toy.batches([1, 3], [5, 9], [2, 4, 7]))
    assert seen.of_updates("weight") == [4, 3]
    np.testing.assert_allclose(
        [w for (w,) in seen.weights], [-4.5, -4.5 - 13 / 3], rtol=1e-6
    )


def test_only_gradients_travel_in_two_bytes():
    """One collective more for all of them, and one with float16's peaks."""
    found = {}
    for wire_dtype in (None, *KINDS):
        with graphs.traced() as traced:
            model = toy.toy(
                2,
                layers=lambda: [toy.scalar(name="a"), toy.scalar(name="b")],
                gradient_accumulation_steps=2,
                wire_dtype=wire_dtype,
            )
            toy.fit(model, toy.batches([1, 3], [5, 9]))
        found[wire_dtype] = max(map(graphs.collective_sizes, traced), key=len)
    whole = found[None]
    assert set(whole) == {"float32"}
    for wire_dtype in KINDS:
        parts = dict(found[wire_dtype])
        assert parts.pop(wire_dtype) == [2, 2]  # Per replica two gradients.
        assert set(parts) == {"float32"}
    assert found["bfloat16"]["float32"] == [n - 2 for n in whole["float32"]]
    assert len(found["float16"]["float32"]) == 2 * len(whole["float32"])


def test_one_replica_rounds_nothing():
    model = toy.toy(wire_dtype="bfloat16", gradient_accumulation_steps=2)
    toy.fit(model, toy.batches([1.0009765625], [1.0009765625]))
    assert toy.weight_of(model) == -1.0009765625


@pytest.mark.parametrize("bad", ["float32", "int8", 16])
def test_another_dtype_is_refused(bad):
    with pytest.raises(ValueError, match=f"wire_dtype={bad!r}"):
        toy.toy(wire_dtype=bad)
    with pytest.raises(ValueError, match=f"wire_dtype={bad!r}"):
        tfaccum.GradientAccumulator([tf.Variable(1.0)], wire_dtype=bad)
