"""`WindowBatchNormalization` against numpy and against one big batch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.multi_worker import graphs
from tfaccum import layers, micro_step
from tfaccum.layers import WindowBatchNormalization

Ordinary = keras.layers.BatchNormalization
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def rows(number=44, shape=(3,), mean=0.0, std=1.0, seed=3):
    rng = np.random.default_rng(seed)
    channels = np.arange(1, shape[-1] + 1)
    x = rng.normal(size=(number, *shape)) * channels + channels**2
    return (x * std + mean).astype("float32")


def network(
    layer,
    shape=(3,),
    *,
    replicas=1,
    strategy=None,
    model_class=tfaccum.Model,
    call=lambda norm, inputs: norm(inputs),
    loss="mse",
    **how,
):
    """One weight behind a layer that normalises the inputs; compiled."""
    with (strategy or toy.strategy_of(replicas)).scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input(shape)
        x = keras.layers.Flatten()(call(layer, inputs))
        outputs = keras.layers.Dense(1, name="last", dtype="float32")(x)
        model = model_class(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), loss, **how)
    model.norm = layer
    return model


def fit(model, x, batch_size, **how):
    y = x.reshape(len(x), -1)[:, :1]
    how = {"epochs": 1, "shuffle": False, "verbose": 0, **how}
    return model.fit(x, y, batch_size=batch_size, **how)


def statistics(model):
    """Moving mean and variance, equal on all replicas."""
    variables = (model.norm.moving_mean, model.norm.moving_variance)
    if isinstance(model, tfaccum.Model):
        return [toy.value_of(model, v) for v in variables]
    return [v.numpy() for v in variables]


def by_hand(batches, momentum, axes=(0,), start=(0.0, 1.0)):
    """Moving statistics after one update for each big batch, by numpy."""
    moving_mean, moving_variance = start
    for batch in batches:
        batch = np.asarray(batch, np.float64)
        mean, variance = batch.mean(axes), batch.var(axes)
        moving_mean = momentum * moving_mean + (1 - momentum) * mean
        moving_variance = momentum * moving_variance + (1 - momentum) * variance
    return moving_mean, moving_variance


def windows(x, size):
    return [x[first : first + size] for first in range(0, len(x), size)]


def assert_near(found, expected, rtol=1e-5, atol=1e-6):
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=rtol, atol=atol)


# --- H1, H2 ---------------------------------------------------------------


def two_micro_batches(layer):
    model = network(layer(momentum=0.0), (1,), gradient_accumulation_steps=2)
    fit(model, np.float32([[0], [0], [10], [10]]), 2)
    return [value.item() for value in statistics(model)]


def test_H1_the_statistics_are_those_of_the_window():
    assert two_micro_batches(WindowBatchNormalization) == [5, 25]


def test_H1_the_ordinary_layer_keeps_the_last_micro_batch_and_warns():
    with pytest.warns(UserWarning, match="those of micro-batches"):
        assert two_micro_batches(Ordinary) == [10, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_H2_one_micro_step_is_keras_to_the_bit(policy):
    """Statistics, weights and predictions after four updates."""
    keras.config.set_dtype_policy(policy)
    x = rows(40)
    found = []
    for layer, model_class, how in (
        (WindowBatchNormalization, tfaccum.Model, {}),
        (Ordinary, keras.Model, {"jit_compile": False}),
    ):
        model = network(layer(momentum=0.9), model_class=model_class, **how)
        fit(model, x, 10)
        found.append([v.numpy() for v in model.variables])
        found[-1].append(model.predict(x, 40, 0))
        assert model.norm.moving_mean.dtype == "float32"
    for mine, keras_own in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, keras_own)


# --- Equal to one big batch -----------------------------------------------


@pytest.mark.parametrize(
    "replicas, steps",
    [(1, 1), (1, 2), (1, 3), (1, 8), (2, 1), (2, 2), (2, 8), (4, 1), (4, 3)],
)
def test_equals_keras_with_one_big_batch(replicas, steps):
    """Two epochs of two updates; the last window is ragged."""
    x = rows(44)
    big = network(
        Ordinary(momentum=0.9), model_class=keras.Model, jit_compile=False
    )
    fit(big, x, 24, epochs=2)
    model = network(
        WindowBatchNormalization(momentum=0.9),
        replicas=replicas,
        gradient_accumulation_steps=steps,
    )
    fit(model, x, 24 // steps, epochs=2)
    assert toy.iterations_of(model) == 4
    assert_near(statistics(model), statistics(big), atol=0)
    assert_near(statistics(model), by_hand(windows(x, 24) * 2, 0.9), atol=0)


@pytest.mark.parametrize(
    "how",
    [
        {"micro_batch_size": 5},
        {"micro_batch_size": 5, "run_eagerly": True},
        {"micro_batch_size": 5, "jit_compile": True},
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3},
        {"micro_batch_size": 1, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_in_each_way_to_train(how):
    x = rows(44)
    model = network(WindowBatchNormalization(momentum=0.8), **how)
    fit(model, x, 12)
    size = 12 * how.get("gradient_accumulation_steps", 1)
    assert_near(statistics(model), by_hand(windows(x, size), 0.8))


@pytest.mark.parametrize("eager", [False, True])
def test_replicas_without_rows_count_for_nothing(eager):
    """Parts of 2, 1 and 1, 0 rows; the last window has one row alone."""
    x = np.float32([[1], [2], [6], [4], [9]])
    batches = toy.batches([1, 2, 6], [4], [9])
    model = network(
        WindowBatchNormalization(momentum=0.5),
        (1,),
        replicas=2,
        gradient_accumulation_steps=2,
        run_eagerly=eager,
    )
    model.fit(batches, verbose=0, epochs=2)
    expected = by_hand([x[:4], x[4:]] * 2, 0.5)
    assert_near(statistics(model), expected)


def test_a_batch_of_any_number_of_rows_and_unknown_number_of_batches():
    """The element that ends the data is no micro-batch."""
    model = network(
        WindowBatchNormalization(momentum=0.5),
        (1,),
        gradient_accumulation_steps=3,
    )
    data = toy.batches([1, 2, 6], [4], [9, 3], is_size_known=False)
    model.fit(data, verbose=0, epochs=2)
    assert_near(statistics(model), by_hand([[1, 2, 6, 4, 9, 3]] * 2, 0.5))


@pytest.mark.parametrize(
    "shape, axis", [((4, 5, 3), -1), ((3, 4, 5), 1), ((2, 2, 2, 3), 4)]
)
def test_axis_and_rank(shape, axis):
    x = rows(10, shape)
    model = network(
        WindowBatchNormalization(axis=axis, momentum=0.5),
        shape,
        micro_batch_size=3,
    )
    fit(model, x, 10)
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    assert_near(statistics(model), by_hand([x], 0.5, axes))


@pytest.mark.parametrize("mean, tolerance", [(0, 1e-6), (1e2, 1e-5)])
def test_large_means(mean, tolerance):
    x = rows(64, mean=mean)
    model = network(WindowBatchNormalization(momentum=0.0), micro_batch_size=4)
    fit(model, x, 64)
    assert_near(statistics(model), by_hand([x], 0.0), tolerance)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mean_of_ten_thousand_deviations(replicas):
    """Sums of squares in float32 would be off by 10, not by 0.0002.

    What is left comes from the micro-batches' means: float32 holds 1e4 to
    0.0005, and that times their distance from the mean enters the variance.
    """
    rng = np.random.default_rng(4)
    x = (1e4 + rng.normal(size=(256, 1))).astype("float32")
    model = network(
        WindowBatchNormalization(momentum=0.0),
        (1,),
        replicas=replicas,
        micro_batch_size=4,
    )
    fit(model, x, 256)
    assert_near(statistics(model), by_hand([x], 0.0), 3e-4)


def test_parts_add_up_as_one_number_of_48_bits():
    rng = np.random.default_rng(5)
    values = 1e8 + rng.normal(size=(4096, 3))
    parts = layers._split(tf.constant(values)).numpy()
    assert parts.dtype == np.float32
    # One after the other, as micro-steps are added up.
    total = layers._joined(np.cumsum(parts, 1, np.float32)[:, -1])
    expected = values.sum(0)
    np.testing.assert_allclose(total, expected, rtol=2.0**-44, atol=0)
    for value in (0.0, -1.0, 3e-5, 7e20):
        np.testing.assert_allclose(
            layers._joined(layers._split(tf.constant(value, tf.float64))),
            value,
            rtol=2.0**-47,
        )


# --- Masks ----------------------------------------------------------------


class Masked(tfaccum.Model):
    """Passes the positions of the inputs that are not 0 as a mask."""

    def __init__(self, layer):
        super().__init__()
        self.norm = layer
        self.last = toy.scalar()

    def call(self, x, training=False):
        x, mask = x[..., :-1], x[:, ..., -1] != 0
        x = self.norm(x, training=training, mask=mask)
        x = tf.where(mask[..., tf.newaxis], x, 0)
        return self.last(tf.reduce_mean(x, range(1, x.shape.rank))[:, None])


def masked_statistics(layer, x, mask, micro_batch_size):
    data = np.concatenate([x, mask[..., None]], -1).astype("float32")
    model = Masked(layer)
    model.compile("sgd", "mse", micro_batch_size=micro_batch_size)
    model.fit(data, np.zeros(len(x)), len(x), shuffle=False, verbose=0)
    return statistics(model)


@pytest.mark.parametrize("channels", [1, 3])
def test_masked_elements_do_not_count(channels):
    """The second of three micro-batches has none that counts."""
    x = rows(6, (4, channels))
    mask = np.random.default_rng(6).random((6, 4)) < 0.5
    mask[0, 0], mask[2:4] = True, False
    found = masked_statistics(
        WindowBatchNormalization(momentum=0.5), x, mask, 2
    )
    assert_near(found, by_hand([x[mask]], 0.5), 1e-5)


def test_masked_channels_have_counts_of_their_own():
    """Keras' mask leaves out the last axis, here not that of channels."""
    x = rows(6, (3, 4))
    mask = np.random.default_rng(7).random((6, 3)) < 0.5
    mask[:, 2] = False
    mask[0, :2] = True
    found = masked_statistics(
        WindowBatchNormalization(axis=1, momentum=0.5), x, mask, 2
    )
    expected = np.array(
        [by_hand([x[mask[:, c], c].ravel()], 0.5) for c in (0, 1)]
    ).T
    assert_near([value[:2] for value in found], expected)
    assert [value[2] for value in found] == [0, 1]  # Has not moved.


# --- What does not move them ----------------------------------------------


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_skipped_updates_change_nothing(replicas, policy):
    keras.config.set_dtype_policy(policy)
    x = rows(24)
    bad = np.where(np.arange(24) == 13, np.nan, 0).astype("float32")[:, None]
    model = network(
        WindowBatchNormalization(momentum=0.5),
        replicas=replicas,
        gradient_accumulation_steps=2,
        loss_scale=None,  # It would have to be found first.
    )
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(statistics(model))

    model.fit(x, bad, 4, shuffle=False, verbose=0, callbacks=[Look()])
    first, skipped, third = seen
    np.testing.assert_array_equal(first, skipped)
    rtol = 1e-5 if policy == "float32" else 1e-2
    assert_near(first, by_hand([x[:8]], 0.5), rtol)
    assert_near(third, by_hand([x[:8], x[16:]], 0.5), rtol)


@pytest.mark.parametrize("layer", [WindowBatchNormalization, Ordinary])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_window_without_weight_changes_nothing(layer, steps):
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    model = network(layer(), loss=loss, gradient_accumulation_steps=steps)
    fit(model, rows(8), 4, sample_weight=np.zeros(8))
    assert toy.iterations_of(model) == 0
    assert_near(statistics(model), [np.zeros(3), np.ones(3)], 0, 0)


def test_a_frozen_layer_is_in_inference_mode():
    model = network(
        WindowBatchNormalization(trainable=False, name="norm"),
        gradient_accumulation_steps=2,
    )
    layer = model.norm
    x = rows(8)
    layer.moving_mean.assign([1, 2, 3])
    fit(model, x, 4)
    assert_near(statistics(model), [[1, 2, 3], [1, 1, 1]], 0, 0)
    expected = (x - [1, 2, 3]) / np.sqrt(1 + layer.epsilon)
    assert_near([layer(x, training=True)], [expected])


class TrainingModeTests(tfaccum.Model):
    def test_step(self, data):
        self(data[0], training=True)
        return super().test_step(data)


def test_an_evaluation_changes_nothing():
    """Not even one that calls the layer in training mode."""
    x = rows(24)
    found = []
    for validation in (None, (x[:10] + 5, x[:10, :1])):
        model = network(
            WindowBatchNormalization(momentum=0.5),
            replicas=2,
            model_class=TrainingModeTests,
            gradient_accumulation_steps=2,
        )
        fit(model, x, 4, epochs=2, validation_data=validation)
        found.append(statistics(model))
        model.evaluate(x, x[:, :1], verbose=0)
        model.predict(x, verbose=0)
        found.append(statistics(model))
    for others in found[1:]:
        np.testing.assert_array_equal(found[0], others)


# --- The layer among others -----------------------------------------------


def test_a_layer_that_is_called_twice_moves_twice_as_in_keras():
    def twice(norm, inputs):
        return norm(2.0 * norm(inputs) + 1.0)

    x = rows(24)
    found = []
    for layer, model_class, how in (
        (WindowBatchNormalization, tfaccum.Model, {}),
        (Ordinary, keras.Model, {"jit_compile": False}),
    ):
        model = network(
            layer(momentum=0.5), model_class=model_class, call=twice, **how
        )
        fit(model, x, 12)
        found.append(statistics(model))
    np.testing.assert_array_equal(*found)


def test_synchronized_is_one_big_batch_in_the_forward_pass_too():
    """Of a micro-step; with K = 1 the whole update is that of Keras."""
    x = rows(43)
    big = network(
        Ordinary(momentum=0.5), model_class=keras.Model, jit_compile=False
    )
    model = network(
        WindowBatchNormalization(momentum=0.5, synchronized=True), replicas=2
    )
    for one in (big, model):
        fit(one, x, 9)
    found = [toy.value_of(model, v) for v in model.variables]
    assert_near(found, [v.numpy() for v in big.variables], 1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_ordinary_synchronized_layer_does_not_move_after_the_data(steps):
    """The elements behind the last batch have no rows on any replica."""
    model = network(
        Ordinary(momentum=0.5, synchronized=True),
        (1,),
        replicas=2,
        gradient_accumulation_steps=steps,
    )
    x = [[1, 2, 6], [4, 4, 8, 0], [9, 3], [7, 5, 2, 2]]
    model.fit(toy.batches(*x, is_size_known=False), verbose=0)
    assert_near(statistics(model), by_hand(x, 0.5))


def test_inside_a_function_of_the_model_is_refused():
    def call(norm, inputs):
        return keras.layers.Lambda(
            lambda x: tf.function(lambda y: norm(y, training=True))(x),
            output_shape=(3,),
        )(norm(inputs))

    model = network(
        WindowBatchNormalization(), call=call, gradient_accumulation_steps=2
    )
    with pytest.raises(RuntimeError, match="by the step itself"):
        fit(model, rows(8), 4)


def test_statistics_outside_of_a_step_are_refused():
    with pytest.raises(RuntimeError, match="in the forward pass"):
        micro_step.hand_over_statistics(WindowBatchNormalization(), [])


def test_renorm_is_refused():
    with pytest.raises(ValueError, match="renorm=True"):
        WindowBatchNormalization(renorm=True)


# --- Saving, and Keras' own fit -------------------------------------------


def test_a_saved_model_goes_on_in_tfaccum_and_in_keras(tmp_path):
    x = rows(24)
    arguments = {"axis": 1, "momentum": 0.7, "epsilon": 0.01, "center": False}
    model = network(
        WindowBatchNormalization(**arguments), gradient_accumulation_steps=2
    )
    fit(model, x, 4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    (layer,) = (
        found
        for found in loaded.layers
        if isinstance(found, WindowBatchNormalization)
    )
    assert {key: layer.get_config()[key] for key in arguments} == arguments
    loaded.norm = layer
    np.testing.assert_array_equal(statistics(loaded), statistics(model))
    for one in (model, loaded):
        fit(one, x, 4)
    np.testing.assert_array_equal(statistics(loaded), statistics(model))
    # In Keras' model the layer is Keras', and moves at every batch.
    expected = by_hand(windows(x, 4), 0.7, start=statistics(loaded))
    plain = keras.Model(loaded.inputs, loaded.outputs)
    plain.compile("sgd", "mse", jit_compile=False)
    fit(plain, x, 4)
    assert_near(statistics(loaded), expected)


def test_in_the_fit_of_keras_it_is_the_layer_of_keras():
    x = rows(24)
    found = []
    for layer in (WindowBatchNormalization, Ordinary):
        model = network(
            layer(momentum=0.5), model_class=keras.Model, jit_compile=False
        )
        fit(model, x, 4)
        found.append([v.numpy() for v in model.variables])
    for mine, keras_own in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, keras_own)


def test_it_is_found_by_name():
    assert tfaccum.layers.WindowBatchNormalization is WindowBatchNormalization
    name = keras.saving.get_registered_name(WindowBatchNormalization)
    assert name == "tfaccum>WindowBatchNormalization"


# --- What travels ---------------------------------------------------------


class Marked(tfaccum.Model):
    def train_step(self, data):
        x, y = data
        return super().train_step((tf.identity(x, "in_micro_step"), y))


@pytest.mark.parametrize("steps", [1, 3])
def test_statistics_travel_with_the_gradients(steps):
    """One packed all-reduce for each device, and none in the micro-step."""
    model = network(
        WindowBatchNormalization(),
        replicas=2,
        model_class=Marked,
        gradient_accumulation_steps=steps,
    )
    with graphs.traced() as traced:
        fit(model, rows(12), 4)
    marked = [
        graph
        for graph in traced
        if any("in_micro_step" in name for _, name in graphs.operations(graph))
    ]
    one_step, whole = sorted(marked, key=lambda g: len(graphs.operations(g)))
    assert graphs.collectives(one_step) == []
    assert graphs.collectives(whole) == ["CollectiveReduceV2"] * 2


# --- The warning ----------------------------------------------------------


def warnings_of(layer, calls=1, **how):
    model = network(layer, **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            fit(model, rows(8), 4)
    return [
        str(warning.message)
        for warning in caught
        if "moving statistics" in str(warning.message)
    ]


@pytest.mark.parametrize(
    "how", [{"gradient_accumulation_steps": 2}, {"micro_batch_size": 2}]
)
def test_statistics_of_micro_batches_are_warned_of_once(how):
    (text,) = warnings_of(Ordinary(name="old_norm"), calls=2, **how)
    assert "old_norm" in text
    assert "tfaccum.layers.WindowBatchNormalization" in text


@pytest.mark.parametrize(
    "layer, how",
    [
        (Ordinary, {}),
        (WindowBatchNormalization, {"gradient_accumulation_steps": 2}),
        (
            lambda: Ordinary(trainable=False),
            {"gradient_accumulation_steps": 2},
        ),
        (
            lambda: Ordinary(synchronized=True),
            {"gradient_accumulation_steps": 2},
        ),
    ],
    ids=["one_micro_step", "window", "frozen", "synchronized"],
)
def test_other_layers_are_not_warned_of(layer, how):
    assert warnings_of(layer(), **how) == []
