import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum


def test_loop_of_ones_own_follows_the_law():
    """Two replicas, ragged micro-batches, unequal weights: by numpy."""
    strategy = tfaccum.make_strategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.5, 2.0, size=(3, 2)).astype("float32")
    gradient = rng.normal(size=(3, 2, 4)).astype("float32")
    with strategy.scope():
        w = keras.Variable(np.zeros(4, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        accumulator = tfaccum.GradientAccumulator([w])

    def micro_step(k):
        context = tf.distribute.get_replica_context()
        r = context.replica_id_in_sync_group
        accumulator.add(
            [tf.gather(tf.constant(gradient)[k], r)],
            weight=tf.gather(tf.constant(weight)[k], r),
        )

    @tf.function
    def window():
        with strategy.scope():
            for k in range(3):
                strategy.run(micro_step, args=(k,))
            return accumulator.apply(optimizer)

    expected = -(weight[..., None] * gradient).sum((0, 1)) / weight.sum()
    assert bool(window())
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-6)
    assert bool(window())  # Sums have been reset: the same step again.
    np.testing.assert_allclose(w.numpy(), 2 * expected, rtol=1e-6)
    assert optimizer.iterations.numpy() == 2
    assert accumulator.num_bytes == 4 * (4 + 1)


def test_a_bad_or_empty_window_changes_nothing_and_is_forgotten():
    w = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    accumulator = tfaccum.GradientAccumulator([w])
    accumulator.add([tf.constant([np.inf, 0.0])])
    assert not accumulator.apply(optimizer)
    accumulator.add([tf.constant([np.nan, 5.0])], weight=0.0)
    assert not accumulator.apply(optimizer)
    np.testing.assert_array_equal(w.numpy(), [1.0, 2.0])
    assert int(optimizer.iterations) == 0
    accumulator.add([tf.constant([1.0, 1.0])])
    assert accumulator.apply(optimizer)
    np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])


def test_an_optimizer_that_accumulates_by_itself_is_refused():
    w = keras.Variable([1.0])
    accumulator = tfaccum.GradientAccumulator([w])
    accumulator.add([tf.constant([1.0])])
    with pytest.raises(ValueError, match="must not be set. Received: .*=2"):
        accumulator.apply(
            keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        )
    with pytest.raises(TypeError, match="Received: optimizer='sgd'"):
        accumulator.apply("sgd")


def test_an_optimizer_from_outside_the_strategy_is_refused():
    optimizer = keras.optimizers.SGD(1.0)
    with tfaccum.make_strategy(["CPU:0", "CPU:1"]).scope():
        accumulator = tfaccum.GradientAccumulator([keras.Variable([1.0])])
        with pytest.raises(ValueError, match="optimizer=(sgd|SGD) made un"):
            accumulator.apply(optimizer)


def test_none_and_sparse_gradients():
    table = keras.Variable(np.zeros((5, 2), "float32"))
    other = keras.Variable(np.zeros(3, "float32"))
    accumulator = tfaccum.GradientAccumulator([table, other])
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0]]),
        tf.constant([1, 1]),
        tf.constant([5, 2]),
    )
    accumulator.add([slices, None], weight=2.0)
    accumulator.add([slices, tf.ones(3)], weight=1.0)
    (gradient, second), weight = accumulator.reduce()
    expected = np.zeros((5, 2))
    expected[1] = [4.0, 6.0]  # Repeated ids add up; both micro-steps alike.
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), np.full(3, 1 / 3), rtol=1e-6)
    assert float(weight) == 3.0


def test_sums_of_low_precision_are_kept_in_float32():
    w = keras.Variable(np.zeros(1), dtype="bfloat16")
    accumulator = tfaccum.GradientAccumulator([w])
    for _ in range(512):
        accumulator.add([tf.constant([1.0], tf.bfloat16)])
    (gradient,), weight = accumulator.reduce()
    # In bfloat16 the sum would stick at 256.
    assert gradient.dtype == tf.float32
    assert float(gradient[0]) == 1.0 and float(weight) == 512.0


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least one variable. Received"):
        tfaccum.GradientAccumulator([])
    accumulator = tfaccum.GradientAccumulator([keras.Variable(0.0)])
    with pytest.raises(ValueError, match="0 gradients for 1 variables"):
        accumulator.add([])
