"""An error in the middle of a window, and the windows after it.

In T (tests/toy.py) a window that is not disturbed gives w = -mean(x).
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import toy


class Check(keras.layers.Layer):
    """Fails where an input is 100 or more."""

    def call(self, x):
        check = tf.debugging.assert_less(x, 100.0)
        with tf.control_dependencies([check]):
            return tf.identity(x)


def checked():
    return [Check(), toy.scalar()]


def broken():
    """Two good batches, and an error in place of the third."""
    for x in (50.0, 70.0):
        rows = np.full([2, 1], x, np.float32)
        yield rows, np.zeros_like(rows)
    raise OSError("The disk has gone.")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"run_eagerly": True},
        {"steps_per_execution": 2},
        {"micro_batch_size": "auto"},
    ],
)
def test_data_that_fail_leave_nothing_in_the_sums(replicas, how):
    model = toy.toy(replicas, gradient_accumulation_steps=4, **how)
    with pytest.raises((OSError, tf.errors.OpError)):
        model.fit(broken(), verbose=0)
    toy.fit(model, toy.batches([1, 2], [3, 6]))
    assert toy.weight_of(model) == -3


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_fails_leaves_nothing_in_the_sums(replicas):
    x = np.float32([[1], [2], [3], [6]])
    bad = np.float32([[50], [60], [70], [80], [100]])
    model = toy.toy(replicas, layers=checked, micro_batch_size=1)
    model.set_weights([np.float32([[1]])])
    for call in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(bad, bad)
    assert model.test_on_batch(x, x) == 3
    model.train_on_batch(x, x)
    assert toy.weight_of(model) == -2
    assert model.evaluate(x, x, verbose=0) == -6


def test_rows_of_a_table_that_were_left_are_forgotten():
    """Sums of the rows touched, in place of a whole table."""

    def layers():
        return [
            keras.layers.Embedding(50, 1, embeddings_initializer="zeros"),
            keras.layers.Reshape((1,)),
            Check(),
        ]

    model = toy.toy(
        layers=layers,
        shape=(1,),
        loss=lambda y, y_pred: y[:, 0] * y_pred[:, 0],
        micro_batch_size=1,
        sparse_sums=True,
    )
    ids = np.float32([[7], [7], [9]])
    weights = np.float32([[1], [2], [6]])
    table = model.layers[1].embeddings
    table.assign(tf.tensor_scatter_nd_update(table, [[30]], [[100.0]]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.train_on_batch(np.float32([[8], [30]]), weights[:2])
    model.train_on_batch(ids, weights)
    expected = np.zeros([50, 1])
    expected[30], expected[7], expected[9] = 100, -1, -2
    np.testing.assert_array_equal(table, expected)
