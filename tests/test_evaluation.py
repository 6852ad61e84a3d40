"""`predict` and `evaluate` on data of every kind; figures by numpy."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum.callbacks import Curves, TensorBoard

WIDTH = 3


def convolution(replicas):
    """Adds up three neighbours; needs sequences of three tokens or more."""
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((None, 1))
        layer = keras.layers.Conv1D(
            1, WIDTH, use_bias=False, kernel_initializer="ones"
        )
        x = keras.layers.GlobalMaxPooling1D()(layer(inputs))
        model = tfaccum.Model(inputs, x)
        model.compile("sgd", "mse")
    return model


def sequences(*shapes):
    """Batches of [rows, tokens], without a known size."""
    rng = np.random.default_rng(2)
    xs = [np.float32(rng.normal(size=(*shape, 1))) for shape in shapes]
    data = tf.data.Dataset.from_generator(
        lambda: iter(xs),
        output_signature=tf.TensorSpec([None, None, 1], tf.float32),
    )
    return xs, data


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_eager", [False, True])
def test_predict_shows_the_model_the_data_and_nothing_else(replicas, is_eager):
    """No element that says that there are no more, of one token."""
    model = convolution(replicas)
    model.run_eagerly = is_eager
    xs, data = sequences((4, 5), (2, 3), (3, 7))
    expected = [
        np.lib.stride_tricks.sliding_window_view(row[:, 0], WIDTH).sum(-1).max()
        for x in xs
        for row in x
    ]
    found = model.predict(data, verbose=0)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)


class Told(keras.utils.PyDataset):
    """Two batches of two rows; notes what Keras tells it."""

    def __init__(self):
        super().__init__(workers=1)
        self.told = []

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full([2, 1], index + 1.0, np.float32)

    def on_epoch_begin(self):
        self.told.append("begin")

    def on_epoch_end(self):
        self.told.append("end")


def test_predict_tells_a_pydataset_that_its_epoch_has_ended():
    model = toy.toy(start=2.0)
    data = Told()
    assert model.predict(data, verbose=0).ravel().tolist() == [2, 2, 4, 4]
    assert data.told == ["begin", "end"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_data_that_end_too_early_are_said(replicas):
    model = toy.toy(replicas)
    data = toy.batches([1, 2], [3])
    says = pytest.warns(
        UserWarning, match="ended after 2 of 3 .*smaller `steps`"
    )
    with says:
        model.evaluate(data, steps=3, verbose=0)
    with says:
        assert len(model.predict(data, steps=3, verbose=0)) == 3
    with says:
        model.fit(data, validation_data=data, validation_steps=3, verbose=0)


def test_data_without_batches_are_said():
    model = toy.toy()
    with pytest.warns(UserWarning, match="no batches: no update") as found:
        model.fit(toy.batches([1]).take(0), verbose=0)
    assert len(found) == 1
    assert toy.iterations_of(model) == 0


def test_data_without_a_known_size_may_end_where_they_do():
    """No warning of windows behind the end, or of a length that was counted."""
    model = toy.toy(
        steps_per_execution=4, gradient_accumulation_steps=[(0, 1), (5, 2)]
    )
    data = toy.batches(*[[1, 2]] * 7, is_size_known=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = toy.EachUpdate()
        model.fit(data, epochs=3, verbose=0, callbacks=[seen])
        model.evaluate(data, verbose=0)
        model.predict(data, verbose=0)
    # 7 and then, two by two, 4 and 4.
    assert toy.iterations_of(model) == 5 + 1 + 4 + 4
    assert seen.of_updates("examples") == [2] * 5 + [4] + [
        *(4, 4, 4, 2),
        *(4, 4, 4, 2),
    ]
    assert all(update.examples for update in model.last_updates)


def test_windows_behind_the_end_do_not_break_a_row_of_skips():
    model = toy.toy(steps_per_execution=4, max_consecutive_skips=5)
    data = toy.batches(*[[np.nan]] * 3, is_size_known=False)
    with pytest.raises(RuntimeError, match="5 updates in a row"):
        model.fit(data, epochs=20, verbose=0)
    assert toy.iterations_of(model) == 0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("windows", [1, 2])
def test_a_metric_may_have_a_number_for_each_class(
    replicas, windows, tmp_path, capfd
):
    """F1 of a class is 2 * hits / (predicted + true)."""
    eye = np.eye(3, dtype="float32")
    y_pred, y = eye[[0, 0, 1, 1, 2]], eye[[0, 1, 1, 1, 0]]
    expected = [2 * 1 / (2 + 2), 2 * 2 / (2 + 3), 0.0]
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,))
        layer = keras.layers.Dense(3, use_bias=False)
        model = tfaccum.Model(inputs, layer(inputs))
        layer.kernel.assign(eye)
        model.compile(
            keras.optimizers.SGD(0.0),
            "mse",
            metrics=[keras.metrics.F1Score(), "mae"],
            gradient_accumulation_steps=2,
            steps_per_execution=windows,
        )
    found = model.fit(
        y_pred,
        y,
        batch_size=2,
        validation_data=(y_pred, y),
        callbacks=[TensorBoard(str(tmp_path)), Curves()],
        verbose=2,
    ).history
    for name in ("f1_score", "val_f1_score"):
        np.testing.assert_allclose(found[name], [expected], rtol=1e-6)
    assert found["mae"] == [pytest.approx(2 * 2 / 15)]
    assert "f1_score" in capfd.readouterr().out
    loss, f1, mae = model.evaluate(y_pred, y, verbose=0)
    np.testing.assert_allclose(f1, expected, rtol=1e-6)
    assert (loss, mae) == (pytest.approx(4 / 15), pytest.approx(4 / 15))
