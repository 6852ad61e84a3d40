"""LessBN: which normalizations go, and the normalized head by numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import boost

LAYERS = keras.layers


def conv(x, filters, size, name):
    return LAYERS.Conv2D(filters, size, padding="same", name=name)(x)


def bottleneck(
    x,
    name,
    *,
    projects=False,
    main_first=True,
    activation="relu",
    norms=3,
    normalization=LAYERS.BatchNormalization,
    add=None,
):
    """A residual block; as many BatchNormalizations in its main branch."""
    start = x
    for number in range(1, norms + 1):
        size = 3 if number == 2 else 1
        x = conv(x, 4, size, f"{name}_conv{number}")
        x = normalization(name=f"{name}_bn{number}")(x)
        if number < norms:
            x = LAYERS.Activation(activation)(x)
    if projects:
        start = conv(start, 4, 1, f"{name}_conv0")
        start = normalization(name=f"{name}_bn0")(start)
    operands = [x, start] if main_first else [start, x]
    x = add(*operands) if add else LAYERS.Add(name=f"{name}_add")(operands)
    return LAYERS.Activation(activation)(x)


def network(*blocks, model_class=keras.Model, head=None):
    """A stem, blocks and a head; every weight different."""
    inputs = keras.Input((6, 6, 2), name="image")
    x = LAYERS.BatchNormalization(name="stem_bn")(conv(inputs, 4, 3, "stem"))
    x = LAYERS.ReLU()(x)
    for block in blocks:
        x = block(x)
    x = LAYERS.GlobalAveragePooling2D()(x)
    outputs = (head or LAYERS.Dense(3, name="head"))(x)
    model = model_class(inputs, outputs)
    rng = np.random.default_rng(5)
    model.set_weights(
        [rng.uniform(0.1, 1.0, w.shape) for w in model.get_weights()]
    )
    return model


def images(number=3):
    rng = np.random.default_rng(1)
    return rng.normal(size=(number, 6, 6, 2)).astype("float32")


def block(name, **how):
    return lambda x: bottleneck(x, name, **how)


def identity(layer):
    """A BatchNormalization that does nothing to its inputs."""
    ones, zeros = np.ones(4), np.zeros(4)
    layer.epsilon = 0.0
    layer.set_weights([ones, zeros, zeros, ones])


# --- Which go --------------------------------------------------------------


def test_check_9_resnet50_loses_32_of_53():
    model = keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=5
    )
    less, report = boost.with_less_bn(model)
    assert str(report) == "removed 32 of 53 BatchNormalizations"
    assert len(report.removed) == 32 and len(report.kept) == 21
    assert all(name.endswith(("_1_bn", "_2_bn")) for name in report.removed)
    found = [x for x in less.layers if isinstance(x, LAYERS.BatchNormalization)]
    assert [x.name for x in found] == list(report.kept)
    gone = {w.path for w in model.weights} - {w.path for w in less.weights}
    assert {path.split("/")[0] for path in gone} == set(report.removed)
    for layer in less.layers:
        old = model.get_layer(layer.name).get_weights()
        for mine, theirs in zip(layer.get_weights(), old, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_check_9_basic_blocks_lose_none_and_it_warns():
    model = network(block("a", norms=2), block("b", norms=2, projects=True))
    with pytest.warns(UserWarning, match="removed no BatchNormalization"):
        less, report = boost.with_less_bn(model)
    assert report.removed == ()
    assert len(report.kept) == 6
    np.testing.assert_array_equal(less(images()), model(images()))


@pytest.mark.parametrize("main_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu", "linear"])
@pytest.mark.parametrize("projects", [True, False])
def test_the_first_two_of_the_main_branch_go(main_first, activation, projects):
    how = {"main_first": main_first, "activation": activation}
    model = network(block("a", projects=projects, **how))
    _, report = boost.with_less_bn(model)
    assert report.removed == ("a_bn1", "a_bn2")
    last = ("a_bn3", "a_bn0") if projects else ("a_bn3",)
    assert set(report.kept) == {"stem_bn", *last}


def test_the_sum_of_two_tensors_and_a_subclass_are_known():
    model = network(
        block(
            "a",
            add=lambda x, y: x + y,
            normalization=tfaccum.layers.WindowBatchNormalization,
        )
    )
    assert boost.with_less_bn(model)[1].removed == ("a_bn1", "a_bn2")


def test_the_rest_computes_what_it_did():
    """With removed ones that do nothing, both models are one function."""
    model = network(block("a", projects=True), block("b"))
    for name in ("a_bn1", "a_bn2", "b_bn1", "b_bn2"):
        identity(model.get_layer(name))
    less, report = boost.with_less_bn(model)
    assert report.removed == ("a_bn1", "a_bn2", "b_bn1", "b_bn2")
    np.testing.assert_allclose(less(images()), model(images()), rtol=1e-6)
    identity(model.get_layer("a_bn3"))
    changed = np.abs(less(images()) - model(images())).max()
    assert changed > 1e-3


def test_the_model_stays_as_it_is():
    model = network(block("a"))
    before, outputs = model.get_weights(), model(images())
    less, _ = boost.with_less_bn(model)
    less.set_weights([w * 0 for w in less.get_weights()])
    for mine, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)
    np.testing.assert_array_equal(model(images()), outputs)


def other_start(x):
    """The shortcut has its convolution, but begins elsewhere."""
    other = LAYERS.BatchNormalization()(conv(x, 4, 1, "other"))
    shortcut = LAYERS.BatchNormalization()(conv(other, 4, 1, "c0"))
    x = bottleneck(x, "a", add=lambda main, _: LAYERS.Add()([main, shortcut]))
    return LAYERS.Concatenate()([x, other])


def used_twice(x):
    """What the first normalization gives goes elsewhere too."""
    first = LAYERS.BatchNormalization(name="a_bn1")(conv(x, 4, 1, "c1"))
    second = LAYERS.BatchNormalization(name="a_bn2")(conv(first, 4, 3, "c2"))
    third = LAYERS.BatchNormalization(name="a_bn3")(conv(second, 4, 1, "c3"))
    return LAYERS.Concatenate()([LAYERS.Add()([third, x]), first])


def shared(x):
    """Two blocks have their first and second normalization in common."""
    norms = {
        f"bn{i}": LAYERS.BatchNormalization(name=f"shared{i}") for i in (1, 2)
    }

    def norm(name):
        own = LAYERS.BatchNormalization(name=name)
        return norms.get(name.partition("_")[2], own)

    x = bottleneck(x, "a", normalization=norm)
    return bottleneck(x, "b", normalization=norm)


def pre_activation(x):
    y = x
    for number in range(3):
        y = LAYERS.BatchNormalization()(y)
        y = conv(LAYERS.ReLU()(y), 4, 1, f"c{number}")
    return LAYERS.Add()([y, x])


def inverted(x):
    """The block of MobileNetV2: its middle convolution is depthwise."""
    y = LAYERS.BatchNormalization()(conv(x, 8, 1, "c1"))
    y = LAYERS.DepthwiseConv2D(3, padding="same")(LAYERS.ReLU(6.0)(y))
    y = LAYERS.ReLU(6.0)(LAYERS.BatchNormalization()(y))
    y = LAYERS.BatchNormalization()(conv(y, 4, 1, "c3"))
    return LAYERS.Add()([y, x])


@pytest.mark.parametrize(
    "other", [other_start, used_twice, shared, pre_activation, inverted]
)
def test_what_is_no_bottleneck_stays(other):
    model = network(other)
    with pytest.warns(UserWarning, match="removed no"):
        less, report = boost.with_less_bn(model)
    assert report.removed == ()
    np.testing.assert_allclose(less(images()), model(images()), rtol=1e-6)


def test_a_model_in_the_model_is_looked_through():
    inner = network(block("a"))
    inner.get_layer("a_conv1").trainable = False
    inputs = {"first": keras.Input((6, 6, 2), name="first")}
    model = keras.Model(inputs, LAYERS.Dense(1)(inner(inputs["first"])))
    less, report = boost.with_less_bn(model)
    assert report.removed == tuple(f"{inner.name}/a_bn{i}" for i in (1, 2))
    assert f"{inner.name}/stem_bn" in report.kept
    assert less({"first": images()}).shape == (3, 1)
    lost = sum(len(inner.get_layer(f"a_bn{i}").weights) for i in (1, 2))
    assert len(less.weights) == len(model.weights) - lost
    frozen = less.get_layer(inner.name).get_layer("a_conv1")
    assert not frozen.trainable
    inner.trainable = False
    less, _ = boost.with_less_bn(model)
    assert len(less.trainable_variables) == 2


def test_layers_in_others_are_copied_and_counted():
    sequential = keras.Sequential(
        [LAYERS.BatchNormalization(name="inside")], name="row"
    )
    inputs = keras.Input((6, 6, 2))
    x = sequential(Normalized(3, name="own")(inputs))
    model = network(block("a"))
    x = LAYERS.Conv2D(2, 1)(x)
    model = keras.Model(inputs, model(x))
    for weights in model.trainable_variables:
        weights.assign(weights + 0.25)
    less, report = boost.with_less_bn(model)
    assert len(report.removed) == 2
    assert {"own/inside", "row/inside"} < set(report.kept)
    assert len(report.kept) == 4
    copy = less.get_layer("own")
    assert isinstance(copy, Normalized)
    np.testing.assert_array_equal(
        copy(images()), model.get_layer("own")(images())
    )


@pytest.mark.parametrize("kind", [dict, list])
def test_inputs_and_outputs_keep_names_and_places(kind):
    first = keras.Input((6, 6, 4), name="z")
    second = keras.Input((2,), name="a", dtype="float16")
    x = LAYERS.GlobalAveragePooling2D()(bottleneck(first, "block"))
    parts = LAYERS.Dense(1, name="q")(second), LAYERS.Dense(3, name="p")(x)
    inputs, outputs = [first, second], list(parts)
    if kind is dict:
        inputs = {"z": first, "a": second}
        outputs = dict(zip("qp", parts, strict=True))
    less, report = boost.with_less_bn(
        tfaccum.Model(inputs, outputs), normalized_head=True
    )
    assert report.heads == ("p", "q")
    found = {x.name: (x.shape[1:], x.dtype) for x in less.inputs}
    assert found == {"z": ((6, 6, 4), "float32"), "a": ((2,), "float16")}
    shapes = keras.tree.map_structure(lambda x: x.shape[1:], less.output)
    by_name = {"q": (1,), "p": (3,)}
    assert shapes == (by_name if kind is dict else [(1,), (3,)])


def test_it_saves_loads_and_trains(tmp_path):
    """On two replicas, with two micro-steps."""
    with toy.strategy_of(2).scope():
        model = network(block("a"), model_class=tfaccum.Model)
        less, report = boost.with_less_bn(
            model, normalized_head=True, head_multiplier=16.0
        )
        less.compile("sgd", "mse", gradient_accumulation_steps=2)
    assert isinstance(less, tfaccum.Model)
    assert report.heads == ("head",)
    before = less.get_weights()
    x, y = images(8), np.ones((8, 3), "float32")
    with pytest.warns(UserWarning, match="micro-batches"):
        less.fit(x, y, batch_size=4, epochs=1, verbose=0)
    assert toy.iterations_of(less) == 1
    still = {
        variable.path
        for variable, old, new in zip(
            less.weights, before, less.get_weights(), strict=True
        )
        if (old == new).all()
    }
    # A bias has no effect where a normalization takes it out again; here no
    # ReLU of the block cuts anything off.
    assert still <= {f"{x}/bias" for x in ("stem", "a_conv2", "a_conv3")}
    less.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, tfaccum.Model)
    assert isinstance(loaded.get_layer("head"), boost.NormalizedHead)
    np.testing.assert_allclose(loaded(x), less(x), rtol=1e-5)


# --- The head --------------------------------------------------------------


def test_the_head_has_the_kernel_of_the_dense_layer():
    dense = LAYERS.Dense(3, activation="softmax", name="head")
    model = network(block("a"), head=dense)
    less, report = boost.with_less_bn(model, normalized_head=True)
    assert str(report).endswith(
        "of 4 BatchNormalizations; normalized head: head"
    )
    head = less.get_layer("head")
    for mine, old in ((head.kernel, dense.kernel), (head.bias, dense.bias)):
        np.testing.assert_array_equal(mine, old)
    assert head.multiplier.numpy() == 1
    np.testing.assert_allclose(np.sum(less(images()), -1), 1, rtol=1e-6)
    without, _ = boost.with_less_bn(
        model, normalized_head=True, head_bias=False, head_multiplier=20.0
    )
    head = without.get_layer("head")
    assert head.bias is None and len(head.weights) == 2
    assert head.multiplier.numpy() == 20


def test_the_head_keeps_regularizers_and_constraints(tmp_path):
    model = network(
        block("a"),
        head=LAYERS.Dense(
            3,
            name="head",
            kernel_regularizer=keras.regularizers.L2(0.5),
            bias_regularizer="l1",
            activity_regularizer="l2",
            kernel_constraint=keras.constraints.MaxNorm(2.0),
            bias_constraint="non_neg",
        ),
    )
    dense = model.get_layer("head")
    dense.bias.assign([1.0, -2.0, 3.0])
    less, _ = boost.with_less_bn(model, normalized_head=True)
    less.save(tmp_path / "model.keras")
    head = keras.saving.load_model(tmp_path / "model.keras").get_layer("head")
    outputs = head(np.ones([1, dense.kernel.shape[0]], "float32"))
    expected = [
        0.5 * np.sum(np.square(dense.kernel)),
        0.01 * 6,
        0.01 * np.sum(np.square(outputs)),
    ]
    np.testing.assert_allclose(sorted(head.losses), sorted(expected), 1e-6)
    assert head.kernel.constraint.max_value == 2
    assert head.bias.constraint([-1.0, 2.0]).numpy().tolist() == [0, 2]


def test_the_head_is_found_behind_an_activation():
    class Both(LAYERS.Layer):
        def __call__(self, x):
            x = LAYERS.Dense(5, name="hidden")(x)
            return LAYERS.Softmax()(LAYERS.Dense(3, name="last")(x))

    model = network(block("a"), head=Both())
    _, report = boost.with_less_bn(model, normalized_head=True)
    assert report.heads == ("last",)


def head_by_numpy(x, kernel, bias, multiplier):
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    x = x / np.sqrt((x**2).sum(-1, keepdims=True))
    kernel = kernel / np.sqrt((kernel**2).sum(0, keepdims=True))
    return multiplier * (x @ kernel + bias)


def a_head(**how):
    head = boost.NormalizedHead(2, **how)
    head.build((None, 3))
    kernel = np.float32([[1, 2], [0, -1], [2, 0.5]])
    bias = np.float32([0.25, -0.5])
    head.set_weights([kernel, np.float32(3), bias])
    return head, kernel, bias


def test_check_10_the_head_by_numpy():
    head, kernel, bias = a_head()
    x = np.float32([[3, 4, 0], [1, -2, 5]])
    expected = head_by_numpy(x, kernel, bias, 3)
    np.testing.assert_allclose(head(x), expected, rtol=1e-5)
    # [3, 4, 0] / 5 and [1, 0, 2] / sqrt(5); the bias inside of the product.
    by_hand = 3 * (0.6 / np.sqrt(5) + 0.25)
    np.testing.assert_allclose(head(x)[0, 0], by_hand, rtol=1e-6)


def test_check_10_lengths_do_not_matter():
    head, kernel, bias = a_head()
    x = np.float32([[3, 4, 0], [1, -2, 5]])
    y = head(x)
    for factor in (1e-3, 7, 1e4):
        np.testing.assert_allclose(head(factor * x), y, rtol=1e-5)
        head.kernel.assign(factor * kernel)
        np.testing.assert_allclose(head(x), y, rtol=1e-5)
        head.kernel.assign(kernel)
    np.testing.assert_allclose(
        head(-x) - 3 * bias, -(y - 3 * bias), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_lengths_beyond_float16_are_right(dtype):
    """The square of 3e4 is no float16."""
    head, kernel, bias = a_head(dtype=dtype)
    x = np.float32([[3e4, 4e4, 0]])
    y = head(x)
    assert y.dtype == dtype.removeprefix("mixed_")
    expected = head_by_numpy(x, kernel, bias, 3)
    np.testing.assert_allclose(tf.cast(y, tf.float32), expected, rtol=2e-2)


def test_an_empty_row_gives_the_bias_and_finite_gradients():
    head, _, bias = a_head()
    x = tf.zeros([1, 3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = head(x)
    np.testing.assert_allclose(y, 3 * bias[None], rtol=1e-6)
    gradients = tape.gradient(y, [x, *head.trainable_variables])
    assert all(np.isfinite(g).all() for g in gradients)


# --- Errors ----------------------------------------------------------------


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


class Normalized(keras.Model):
    """Functional, but for its constructor: its config has no layers."""

    def __init__(self, units, **how):
        inputs = keras.Input((6, 6, 2))
        outputs = LAYERS.BatchNormalization(name="inside")(
            LAYERS.Conv2D(units, 1)(inputs)
        )
        super().__init__(inputs, outputs, **how)
        self.units = units

    def get_config(self):
        return {"units": self.units, "name": self.name}


@pytest.mark.parametrize(
    "model",
    [
        Subclassed,
        lambda: keras.Sequential([LAYERS.Dense(1)]),
        lambda: Normalized(2),
    ],
)
def test_a_model_that_is_not_functional_is_refused(model):
    with pytest.raises(TypeError, match="must be functional.*Received: model="):
        boost.with_less_bn(model())


def test_errors():
    model = network(block("a"), head=LAYERS.Reshape((2, 2)))
    with pytest.raises(ValueError, match="no Dense layer.*reshape"):
        boost.with_less_bn(model, normalized_head=True)
    with pytest.raises(ValueError, match="`head_multiplier`.*Received.*=0"):
        boost.with_less_bn(model, head_multiplier=0)
    with pytest.raises(ValueError, match="`units`.*Received: units=0"):
        boost.NormalizedHead(0)
