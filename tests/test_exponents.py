import collections
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import exponents
from tfaccum.gradient_report import GradientReport


def bins(value):
    counts = exponents.count(tf.constant([value], tf.float32)).numpy()
    return int(counts.argmax())


@pytest.mark.parametrize(
    "value, expected",
    [
        (0.0, 0),
        (-0.0, 0),
        (2.0**-25, 1),
        (2.0**-126, 1),  # the least normal float32
        (2.0**-24, 2),
        (-(2.0**-24), 2),
        (1.0, 2 + 24),
        (1.99, 2 + 24),
        (65504.0, 2 + 24 + 15),  # the largest float16
        (65536.0, 42),
        (-np.inf, 42),
        (np.nan, 42),
    ],
)
def test_bins_are_the_exponents_of_float16(value, expected):
    assert exponents.NUM_BINS == 43
    assert bins(value) == expected


def test_counts_are_exact_beyond_the_integers_of_float32():
    counts = exponents.count(tf.zeros([2**24 + 2])).numpy()
    assert counts.tolist() == [2**24 + 2] + [0] * 42


def test_fractions_and_sparse_gradients():
    slices = tf.IndexedSlices(
        tf.constant([[0.0, 1.0], [np.inf, 2.0**-30]]), tf.constant([3, 3])
    )
    report = exponents.Exponents(
        ["table", "none"],
        np.stack([exponents.count(slices).numpy(), np.zeros(43)]),
    )
    np.testing.assert_array_equal(report.underflow, [0.5, 0.0])
    np.testing.assert_array_equal(report.overflow, [0.25, 0.0])
    # float16's exponents -24 and 15 lie where their bins say.
    assert report.edges[2:4].tolist() == [-24, -23]
    assert report.edges[41:43].tolist() == [15, 16]


def events(folder):
    """(tag, step) -> value, of all event files."""
    found = {}
    for path in Path(folder).glob("events*"):
        for record in tf.compat.v1.train.summary_iterator(str(path)):
            for value in record.summary.value:
                found[value.tag, record.step] = tf.make_ndarray(value.tensor)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_report_of_a_whole_window_to_tensorboard(tmp_path, replicas):
    """Gradient of w is x: one example of each size, in 2 micro-steps."""
    strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])

    class Model(tfaccum.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(2,), initializer="zeros", name="w")
            self.built = True

        def call(self, x):
            return x * self.w

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self(data))
            self.accumulate(tape, loss, 1.0)
            return {}

    with strategy.scope():
        model = Model()
        model.compile(
            keras.optimizers.SGD(1e-9),
            gradient_accumulation_steps=4 // replicas,
            loss_scale=1024.0,
        )
    # Scaled by 1024: 2**-24 and 0; 2**-25 and 1024; 2**-10 and 2**16; 1, 0.
    x = np.array(
        [[2.0**-34, 0], [2.0**-35, 1], [2.0**-20, 64], [2.0**-10, 0]],
        "float32",
    )
    data = tf.data.Dataset.from_tensor_slices(x).batch(replicas).repeat(3)
    model.fit(data, verbose=0, callbacks=[GradientReport(tmp_path, 2)])
    counts = collections.Counter({0: 2, 1: 1, 2: 1, 16: 1, 26: 1, 36: 1, 42: 1})
    expected = [counts[i] for i in range(43)]
    np.testing.assert_array_equal(model.last_exponents.counts, [expected])
    found = events(tmp_path)
    steps = {step for _, step in found}
    assert steps == {1, 3}
    path = model.w.path
    assert found[f"gradient_underflow/{path}", 1] == np.float32(3 / 8)
    assert found[f"gradient_overflow/{path}", 3] == np.float32(1 / 8)
    histogram = found[f"gradient_exponents/{path}", 3]
    np.testing.assert_array_equal(histogram[:, 2], expected)
    assert histogram[2, 0] == -24


def test_report_of_a_compiled_step(tmp_path):
    """Gradient of w is the mean of x: 2, then 0.5."""
    model = toy.toy(jit_compile=True)
    toy.fit(
        model, toy.batches([1, 3], [0.5]), callbacks=[GradientReport(tmp_path)]
    )
    counts = model.last_exponents.counts
    assert np.argwhere(counts).tolist() == [[0, 2 + 24 - 1]]
    assert toy.weight_of(model) == -2.5


def test_counting_ends_when_fit_fails(tmp_path):
    model = toy.toy()
    data = toy.batches([1], [2])
    with pytest.raises(toy.Stopped):
        model.fit(
            data,
            verbose=0,
            callbacks=[GradientReport(tmp_path), toy.StopAfter(1)],
        )
    assert model.last_exponents is not None
    assert not model.counts_exponents
    assert ("gradient_overflow/" + model.weights[0].path, 1) in events(tmp_path)


def test_report_says_what_is_wrong():
    with pytest.raises(ValueError, match="Received: every_updates=0"):
        GradientReport("somewhere", every_updates=0)
