"""Steps of the user's own, as Keras' guides write them."""

import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy

X = np.float32([[1], [2], [3], [6], [8]])


class Guide(tfaccum.Model):
    """As in "Customizing fit": all metrics are updated, and returned."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return self.updated(y, y_pred, loss)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self.updated(y, y_pred, self.compute_loss(y=y, y_pred=y_pred))

    def updated(self, y, y_pred, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_step_of_the_guide(replicas):
    """Loss x * w and error |y - x * w| with w = 2, then w = 2 - mean(x)."""
    model = toy.toy(
        replicas,
        start=2.0,
        model_class=Guide,
        metrics=["mae"],
        gradient_accumulation_steps=2,
    )
    history = model.fit(
        X, X, batch_size=2, epochs=1, shuffle=False, verbose=0
    ).history
    w = 2 - 12 / 4
    losses = [*(2 * X[:4, 0]), *(w * X[4:, 0])]
    errors = [*X[:4, 0], *abs((1 - w) * X[4:, 0])]
    assert history["loss"] == [pytest.approx(np.mean(losses))]
    assert history["mae"] == [pytest.approx(np.mean(errors))]
    w -= 8
    assert toy.weight_of(model) == w
    if replicas == 1:  # By batches, as its author has written it.
        found = model.evaluate(X[:4], X[:4], 2, verbose=0, return_dict=True)
        assert found["loss"] == pytest.approx(w * 3)
        assert found["mae"] == pytest.approx((1 - w) * 3)


class OfADict(tfaccum.Model):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data["features"], training=True))
        self.accumulate(tape, loss, weight=tf.shape(data["labels"])[0])
        return {}


class OfFour(tfaccum.Model):
    def train_step(self, data):
        x, _, _, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True))
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return {}


class OfOneTarget(tfaccum.Model):
    def train_step(self, data):
        x, (y, _) = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return {}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (OfADict, {"features": X, "labels": X}),
        (OfFour, (X, X, X, X)),
        (OfOneTarget, (X, (X, X))),
    ],
)
def test_data_may_look_as_the_step_wants_them(replicas, kind, data):
    """Whatever Keras' own step would have said to them."""
    model = toy.toy(replicas, model_class=kind)
    model.fit(tf.data.Dataset.from_tensors(data), verbose=0)
    assert toy.weight_of(model) == -4


class Prints(tfaccum.Model):
    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True))
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        if tf.executing_eagerly() or self.is_careless:
            self.printed.append(float(loss.numpy()))
        return {}


@pytest.mark.parametrize("is_careless", [False, True])
def test_an_eager_step_is_traced_once_too(is_careless):
    model = toy.toy(model_class=Prints, start=2.0, run_eagerly=True)
    model.is_careless = is_careless
    model.__dict__["printed"] = []
    if is_careless:
        with pytest.raises(AttributeError) as error:
            model.fit(X, X, batch_size=5, verbose=0)
        assert "if tf.executing_eagerly():" in "".join(error.value.__notes__)
    else:
        model.fit(X, X, batch_size=5, verbose=0)
        assert model.printed == [8]
