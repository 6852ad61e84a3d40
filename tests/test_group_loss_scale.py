import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tfaccum import group_loss_scale

GROUPS = [["a"], ["b", "c"]]


def build(scale=None, dtype=None):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    cross = scale or (lambda x, **_: x)
    x = keras.layers.Dense(5, activation="tanh", name="a", dtype=dtype)(inputs)
    x = cross(x, leaves=1, enters=2)
    x = keras.layers.Dense(4, activation="tanh", name="b", dtype=dtype)(x)
    x = keras.layers.Dense(1, name="c", dtype=dtype)(x)
    return tfaccum.Model(inputs, cross(x, leaves=2, enters=3))


def data(rows=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1] ** 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_powers_of_two_cancel_to_the_bit(replicas):
    """With scales that round nothing the update is that without scales."""
    x, y = data()
    found = []
    for grouped in (False, True):
        strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
        with strategy.scope():
            scale = None
            if grouped:
                scale = tfaccum.GroupLossScale(GROUPS, initial=[64.0, 4.0])
            model = build(scale)
            model.compile(
                keras.optimizers.SGD(0.1),
                "mse",
                gradient_accumulation_steps=2,
                loss_scale=scale,
            )
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append([v.numpy() for v in model.trainable_variables])
    for plain, scaled in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, scaled)


def test_unscaling_is_exact_where_the_original_is_off():
    """By the scale that the gradient carries, not by the moved one."""
    x, y = data()
    weights = []
    scale = tfaccum.GroupLossScale(GROUPS, initial=[3.0, 7.0])
    for given in (None, scale):
        model = build(given)
        model.compile(keras.optimizers.SGD(1.0), "mse", loss_scale=given)
        before = [v.numpy() for v in model.trainable_variables]
        model.fit(x, y, batch_size=16, epochs=1, verbose=0)
        after = [v.numpy() for v in model.trainable_variables]
        weights.append([b - a for a, b in zip(after, before, strict=True)])
    for plain, scaled in zip(*weights, strict=True):
        # The original would differ by 2**(1/1000) - 1 = 7e-4.
        np.testing.assert_allclose(scaled, plain, rtol=2e-5, atol=1e-8)
    np.testing.assert_allclose(
        scale.scales.numpy(), np.array([3.0, 7.0]) * 2 ** (1 / 1000), rtol=1e-6
    )


def test_overflow_moves_only_its_group_and_skips_the_update():
    """Group 1 overflows float16: its scale alone falls by 2**-0.5."""
    scale = tfaccum.GroupLossScale(GROUPS, initial=[2.0**24, 2.0])
    model = build(scale, dtype="mixed_float16")
    model.compile(keras.optimizers.SGD(0.1), "mse", loss_scale=scale)
    before = [v.numpy() for v in model.trainable_variables]
    x, y = data()
    model.fit(x, y, batch_size=16, verbose=0)
    (update,) = model.last_updates
    assert update.skipped and update.nonfinite_variable == "a/kernel"
    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    np.testing.assert_allclose(
        scale.scales.numpy(),
        [2.0**24 * 2**-0.5, 2.0 * 2 ** (1 / 1000)],
        rtol=1e-6,
    )
    # And goes on falling until an update is made.
    model.fit(x, y, batch_size=16, epochs=19, verbose=0)
    assert int(model.optimizer.iterations.numpy()) > 0


def test_the_originals_own_check():
    """Inputs -inf, 0, 40000, 10, inf at scale 8: overflow or not."""
    inputs = keras.Input((1,))
    scale = tfaccum.GroupLossScale([["only"]], initial=8.0)
    dense = keras.layers.Dense(1, name="only", dtype="float16")
    model = tfaccum.Model(inputs, scale(dense(inputs), leaves=1, enters=2))

    class Sum(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.reduce_sum(y_pred, axis=-1)

    model.compile(keras.optimizers.SGD(0.0), Sum(), loss_scale=scale)
    skipped = []
    for value in (-np.inf, 0.0, 40000.0, 10.0, np.inf):
        x = np.array([[value]], "float32")
        model.fit(x, np.zeros((1, 1), "float32"), verbose=0)
        skipped.append(model.last_updates[0].skipped)
    assert skipped == [True, False, True, False, True]


def test_floor():
    scale = tfaccum.GroupLossScale(GROUPS, initial=1.0, floor=0.9)
    scale.move(tf.constant([True, False]))
    np.testing.assert_allclose(
        scale.scales.numpy(), [2 ** (1 / 1000), 0.9], rtol=1e-6
    )
    assert group_loss_scale.SHRINK == pytest.approx(0.70710678)


def test_the_most():
    """No scale, and no ratio of two, becomes infinite."""
    scale = tfaccum.GroupLossScale(GROUPS, initial=[2.0**100, 1.0])
    for _ in range(2):
        scale.move(tf.constant([True, False]))
    np.testing.assert_allclose(scale.scales.numpy(), [2.0**100, 0.5], rtol=1e-6)
    scale.move(tf.constant([False, True]))
    assert scale.scales.numpy()[0] == pytest.approx(2.0**99.5)


def test_a_frozen_group_answers_for_what_overflows_in_it():
    """Group 2 trains nothing; what it makes infinite shows in group 1."""
    scale = tfaccum.GroupLossScale([["a"], ["b"], ["c"]], [1.0, 2.0**40, 1.0])
    variables = [types.SimpleNamespace(path=f"{n}/kernel") for n in "xac"]
    good, bad = tf.constant([1.0]), tf.constant([np.inf])
    for gradients, verdicts in (
        ([good, good, good], [True, True, True]),
        ([good, bad, good], [False, False, True]),
        ([good, good, bad], [True, True, False]),
    ):
        found = scale.verdicts(gradients, variables)
        assert found.numpy().tolist() == verdicts
    # What is before the first group has a verdict for those without one.
    found = scale.verdicts([bad, good], [variables[0], variables[2]])
    assert found.numpy().tolist() == [False, False, True]


def test_a_frozen_group_in_a_model():
    x, y = data()
    scale = tfaccum.GroupLossScale([["a"], ["b"], ["c"]], [4.0, 2.0**24, 2.0])
    inputs = keras.Input((4,))
    h = keras.layers.Dense(5, name="a", dtype="mixed_float16")(inputs)
    h = scale(h, leaves=1, enters=2)
    h = keras.layers.Dense(4, name="b", dtype="mixed_float16", trainable=False)(
        h
    )
    h = scale(h, leaves=2, enters=3)
    h = keras.layers.Dense(1, name="c")(h)
    model = tfaccum.Model(inputs, scale(h, leaves=3, enters=4))
    model.compile("sgd", "mse", loss_scale=scale, max_consecutive_skips=50)
    model.fit(x, y, batch_size=16, epochs=40, verbose=0)
    assert model.num_updates > 0
    assert scale.scales.numpy()[1] < 2.0**24


def test_saved_and_loaded_with_its_scales(tmp_path):
    scale = tfaccum.GroupLossScale(GROUPS, initial=16.0)
    model = build(scale)
    model.compile("sgd", "mse", loss_scale=scale)
    x, y = data()
    model.fit(x, y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss_scale, tfaccum.GroupLossScale)
    np.testing.assert_array_equal(
        loaded.loss_scale.scales.numpy(), scale.scales.numpy()
    )
    np.testing.assert_allclose(
        scale.scales.numpy(), 16.0 * 2 ** (4 / 1000), rtol=1e-6
    )
    for m in (model, loaded):
        m.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_loaded_where_it_stands_in_a_model_inside(tmp_path):
    scale = tfaccum.GroupLossScale([["a"]], initial=16.0)
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1, name="a")(inputs)
    inner = keras.Model(inputs, scale(outputs, leaves=1, enters=2))
    model = tfaccum.Model(inputs, inner(inputs))
    model.compile("sgd", "mse", loss_scale=scale)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.loss_scale is loaded.layers[1].layers[2]
    assert loaded.loss_scale.scales.numpy() == [16.0]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (([],), "Received: groups="),
        (([["a"], ["a"]],), "each once"),
        ((GROUPS, [1.0]), "for 2 groups"),
        ((GROUPS, -1.0), "must be positive"),
    ],
)
def test_bad_groups_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        tfaccum.GroupLossScale(*arguments)


def test_border_of_a_group_that_is_not_there():
    scale = tfaccum.GroupLossScale(GROUPS)
    with pytest.raises(ValueError, match="from 0 to 3"):
        scale(keras.Input((4,)), leaves=2, enters=4)
