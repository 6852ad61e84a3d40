"""Gradient centralization against numpy, at every place of an update."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import boost
from tfaccum.boost.gradient_centralization import centralize

LAYERS = keras.layers
X = np.float32(
    [[1, 2, -1], [0, 1, 3], [2, -2, 1], [4, 0, 0], [1, 1, 1], [-3, 2, 5],
     [0.5, 1, -2]]
)  # fmt: skip
Y = np.float32([[1, 2], [0, 1], [-1, 3], [2, 0.5], [1, 1], [0, -2], [4, 1]])
KERNEL = np.float32([[1, -2], [3, 0.5], [0, 4]])
BIAS = np.float32([1, -1])


def loss(y, y_pred):
    """Its gradients are means of products: x * y, and y for the bias."""
    return keras.ops.sum(y * y_pred, -1)


def dense_model(replicas, optimizer, *, centralizes=True, regularizer=None,
                **how):  # fmt: skip
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,))
        layer = LAYERS.Dense(2, name="d", kernel_regularizer=regularizer)
        outputs = LAYERS.Activation("linear", dtype="float32")(layer(inputs))
        model = tfaccum.Model(inputs, outputs)
        layer.set_weights([KERNEL, BIAS])
        optimizer = optimizer()
        if centralizes:
            optimizer = boost.centralized(optimizer, boost.kernels(model))
        model.compile(optimizer, loss, **how)
    return model


def fit(model, x=X, y=Y, batch_size=4):
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return [toy.value_of(model, v) for v in model.trainable_variables]


def without_mean(g):
    """Columns, one by one."""
    columns = [column - column.sum() / column.size for column in g.T]
    return np.stack(columns, -1)


def gradients(x=X, y=Y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return x.T @ y / len(x), y.sum(0) / len(y)


def clipped(g, norm):
    return g * min(1, norm / np.sqrt((g**2).sum()))


def assert_near(found, expected, rtol=1e-5):
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=rtol, atol=rtol)


# --- The formula -----------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3), (4, 6, 3), (7, 7, 3, 64)])
def test_check_11_each_filter_has_mean_zero(shape):
    """Also with 3 channels, where MindSpore leaves the gradient alone."""
    rng = np.random.default_rng(2)
    g = rng.normal(2.0, size=shape).astype("float32")
    found = centralize(tf.constant(g)).numpy()
    rows = found.reshape(-1, shape[-1])
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(
        rows, without_mean(g.reshape(-1, shape[-1])), rtol=1e-4, atol=1e-5
    )


def test_a_hand_computed_value():
    g = tf.constant([[1.0, 5.0], [3.0, -5.0]])
    np.testing.assert_array_equal(centralize(g), [[-1, 5], [1, -5]])


def test_a_mean_beyond_float16_is_right():
    g = tf.constant([[6e4], [4e4], [5e4]], tf.float16)
    found = centralize(g)
    assert found.dtype == tf.float16
    np.testing.assert_allclose(found[:, 0], [1e4, -1e4, 0], atol=32)


def test_slices_are_added_up_first():
    slices = tf.IndexedSlices(
        tf.constant([[3.0], [1.0], [2.0]]), [0, 2, 0], tf.constant([3, 1])
    )
    np.testing.assert_array_equal(centralize(slices), [[3], [-2], [-1]])


# --- Which variables -------------------------------------------------------


def test_kernels_are_chosen_by_layer():
    inner = keras.Sequential(
        [keras.Input((4,)), LAYERS.Dense(2, name="dense")], name="inner"
    )
    inputs = keras.Input((8, 8, 4))
    x = LAYERS.Conv2D(4, 3, name="conv")(inputs)
    x = LAYERS.BatchNormalization()(x)
    x = LAYERS.Conv2D(4, 3, groups=2, name="grouped")(x)
    x = LAYERS.DepthwiseConv2D(3, name="depthwise", padding="same")(x)
    x = LAYERS.SeparableConv2D(4, 1, name="separable")(x)
    x = LAYERS.Conv2DTranspose(4, 1, name="transposed")(x)
    x = LAYERS.LayerNormalization()(LAYERS.GlobalAveragePooling2D()(x))
    x = LAYERS.Dense(4, name="frozen", trainable=False)(x)
    x = boost.NormalizedHead(4, name="cosine")(x)
    model = keras.Model(inputs, LAYERS.Dense(1, name="last")(inner(x)))
    paths = {v.path for v in boost.kernels(model)}
    assert paths == {"conv/kernel", "inner/dense/kernel", "last/kernel"}


# --- In an update ----------------------------------------------------------


@pytest.mark.parametrize("replicas, steps", [(1, 1), (1, 2), (2, 2)])
def test_one_update_by_numpy(replicas, steps):
    """Centralized, then clipped; the decay of the weights is not touched."""
    model = dense_model(
        replicas,
        lambda: keras.optimizers.SGD(0.5, clipnorm=1.5, weight_decay=0.1),
        gradient_accumulation_steps=steps,
    )
    found = fit(model, batch_size=4 if steps == 2 else 7)
    assert toy.iterations_of(model) == 1
    kernel, bias = gradients()
    assert np.sqrt((without_mean(kernel) ** 2).sum()) > 1.5
    kernel = clipped(without_mean(kernel), 1.5)
    bias = clipped(bias, 1.5)
    decayed = 1 - 0.5 * 0.1
    assert_near(
        found, (decayed * KERNEL - 0.5 * kernel, decayed * BIAS - 0.5 * bias)
    )


def test_check_11_the_bias_moves_as_without():
    """And the mean of each column of the kernel does not move at all."""
    sgd = lambda: keras.optimizers.SGD(0.5, momentum=0.9)  # noqa: E731
    how = {"gradient_accumulation_steps": 2}
    kernel, bias = fit(dense_model(2, sgd, **how))
    other, same = fit(dense_model(2, sgd, centralizes=False, **how))
    np.testing.assert_array_equal(bias, same)
    np.testing.assert_allclose(kernel.mean(0), KERNEL.mean(0), rtol=1e-6)
    assert np.abs(other.mean(0) - KERNEL.mean(0)).max() > 0.1


def test_a_regularizer_is_centralized_with_the_gradient():
    model = dense_model(
        2,
        lambda: keras.optimizers.SGD(0.5),
        regularizer=keras.regularizers.L2(0.25),
        gradient_accumulation_steps=2,
    )
    kernel, _ = gradients()
    expected = KERNEL - 0.5 * without_mean(kernel + 0.5 * KERNEL)
    assert_near(fit(model)[:1], [expected])


def test_adam_sees_centralized_gradients():
    model = dense_model(
        2,
        lambda: keras.optimizers.Adam(0.1, use_ema=True),
        gradient_accumulation_steps=2,
    )
    found = fit(model)
    g = [without_mean(gradients()[0]), gradients()[1]]
    expected = [
        w - 0.1 * part / (np.abs(part) + 1e-7)
        for w, part in zip((KERNEL, BIAS), g, strict=True)
    ]
    assert_near(found, expected)
    assert "Adam" in [c.__name__ for c in type(model.optimizer).__mro__]


def test_mixed_float16():
    """Unscaled before it; a window with an infinity changes nothing."""
    keras.config.set_dtype_policy("mixed_float16")
    model = dense_model(
        2,
        lambda: keras.optimizers.SGD(0.5, clipnorm=1.5),
        gradient_accumulation_steps=2,
        loss_scale=tfaccum.LossScale(initial=2.0**8),
    )
    found = fit(model)
    kernel = clipped(without_mean(gradients()[0]), 1.5)
    bias = clipped(gradients()[1], 1.5)
    assert_near(found, (KERNEL - 0.5 * kernel, BIAS - 0.5 * bias), 3e-3)
    scale = float(toy.value_of(model, model.optimizer.dynamic_scale))
    bad = X.copy()
    bad[5] = np.inf
    for new, old in zip(fit(model, bad), found, strict=True):
        np.testing.assert_array_equal(new, old)
    halved = float(toy.value_of(model, model.optimizer.dynamic_scale))
    assert halved == scale / 2


def test_in_keras_own_model_and_in_graph_mode():
    inputs = keras.Input((3,))
    layer = LAYERS.Dense(2, name="d")
    model = keras.Model(inputs, layer(inputs))
    layer.set_weights([KERNEL, BIAS])
    sgd = keras.optimizers.SGD(0.5, clipnorm=1.5)
    model.compile(
        boost.centralized(sgd, boost.kernels(model)), loss, jit_compile=False
    )
    model.fit(X, Y, batch_size=7, verbose=0)
    kernel = clipped(without_mean(gradients()[0]), 1.5)
    bias = clipped(gradients()[1], 1.5)
    assert_near(layer.get_weights(), (KERNEL - 0.5 * kernel, BIAS - 0.5 * bias))


def test_variables_of_ones_own_choice_and_apply_without_variables():
    first = keras.Variable(np.float32([[1], [2]]), name="first")
    second = keras.Variable(np.float32([[1], [2]]), name="second")
    optimizer = boost.centralized(keras.optimizers.SGD(1.0), [second])
    optimizer.build([first, second])
    g = tf.constant([[3.0], [1.0]])
    optimizer.apply([g, g])
    np.testing.assert_array_equal(first, [[-2], [1]])
    np.testing.assert_array_equal(second, [[0], [3]])


# --- Saved and loaded ------------------------------------------------------


LOADER = """
import sys
import keras
import tfaccum.boost
@keras.saving.register_keras_serializable("tests")
class Own(keras.optimizers.SGD):
    pass
model = keras.saving.load_model(sys.argv[1])
assert isinstance(model.optimizer, tfaccum.boost.Centralized)
assert isinstance(model.optimizer, Own)
assert model.optimizer.centralized_paths == ("d/kernel",)
print(model.optimizer.iterations.numpy(), model.optimizer.momentum)
"""


@keras.saving.register_keras_serializable("tests")
class Own(keras.optimizers.SGD):
    """An optimizer that the library does not know."""


def test_another_process_loads_it(tmp_path):
    model = dense_model(1, lambda: Own(0.5, momentum=0.75))
    model.compile(model.optimizer, "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    found = subprocess.run(
        [sys.executable, "-c", LOADER, tmp_path / "model.keras"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["2", "0.75"]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5, clipvalue=2.0),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        ),
    ],
)
def test_training_goes_on_after_loading(optimizer, tmp_path):
    model = dense_model(1, optimizer, gradient_accumulation_steps=2)
    fit(model)
    model.save(tmp_path / "model.keras")
    with keras.saving.custom_object_scope({"loss": loss}):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    ours, theirs = model.optimizer, loaded.optimizer
    assert theirs.get_config() == ours.get_config()
    assert len(theirs.variables) == len(ours.variables)
    for one, other in zip(fit(model), fit(loaded), strict=True):
        np.testing.assert_array_equal(one, other)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """Without `get_config`, and unknown to Keras: it cannot be saved."""

    def __call__(self, step):
        return 0.1 / (1 + keras.ops.cast(step, "float32"))


@pytest.mark.parametrize(
    ("rate", "expected"), [(Falling(), [0.1, 0.05]), (lambda: 0.25, [0.25] * 2)]
)
def test_a_learning_rate_that_cannot_be_saved_trains(rate, expected):
    model = dense_model(1, lambda: keras.optimizers.SGD(rate))
    kernel, bias = fit(model)
    wanted, wanted_bias = KERNEL, BIAS
    for batch, step in zip((slice(4), slice(4, 7)), expected, strict=True):
        g, g_bias = gradients(X[batch], Y[batch])
        wanted = wanted - step * without_mean(g)
        wanted_bias = wanted_bias - step * g_bias
    assert_near([kernel, bias], [wanted, wanted_bias])


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_all_optimizers_of_keras_are_loaded(kind, tmp_path):
    if not hasattr(keras.optimizers, kind):
        pytest.skip(f"keras.optimizers.{kind} is of a later Keras")
    optimizer = getattr(keras.optimizers, kind)
    model = dense_model(1, lambda: optimizer(0.125))
    model.save(tmp_path / "model.keras")
    with keras.saving.custom_object_scope({"loss": loss}):
        loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert isinstance(loaded, optimizer) and isinstance(
        loaded, boost.Centralized
    )
    assert loaded.get_config() == model.optimizer.get_config()


# --- Errors ----------------------------------------------------------------


def test_errors():
    kernel = keras.Variable(KERNEL, name="k")
    bias = keras.Variable(BIAS, name="b")
    sgd = keras.optimizers.SGD
    built = sgd()
    built.build([kernel])
    scaled = keras.optimizers.LossScaleOptimizer(sgd())
    for optimizer, variables, error, match in (
        ("sgd", [kernel], TypeError, "`optimizer` must be.*Received.*'sgd'"),
        (built, [kernel], ValueError, "must not be built.*Received"),
        (scaled, [kernel], ValueError, "without a loss scale.*Received"),
        (sgd(), [], ValueError, r"rank 2 or more. Received: variables=\[\]"),
        (sgd(), [kernel, bias], ValueError, r"rank 1 or less: \['b'\]"),
        (
            boost.centralized(sgd(), [kernel]),
            [kernel],
            ValueError,
            "one ordinary optimizer. Received: optimizer=Centralized",
        ),
    ):
        with pytest.raises(error, match=match):
            boost.centralized(optimizer, variables)


def test_variables_that_are_not_there_are_refused():
    kernel = keras.Variable(KERNEL, name="k")
    same = keras.Variable(KERNEL, name="k")
    other = keras.Variable(KERNEL, name="other")
    for variables in ([other], [kernel, same]):
        optimizer = boost.centralized(keras.optimizers.SGD(), [kernel])
        with pytest.raises(ValueError, match="must contain centralized ones"):
            optimizer.build(variables)


def test_a_model_without_weights_is_refused():
    model = keras.Sequential([LAYERS.Dense(2, name="d")])
    with pytest.raises(ValueError, match="must be built. Received: .* with d,"):
        boost.kernels(model)
