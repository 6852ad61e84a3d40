import dataclasses

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfaccum
from tfaccum import loss_scale

STEPS, REPLICAS = 3, 2


# --- The state machine -----------------------------------------------------


@dataclasses.dataclass
class Machine:
    """The state machine, in plain Python."""

    scale: float
    growth_interval: int
    floor: float
    good: int = 0

    def move(self, finite):
        if not finite:
            self.scale = max(self.scale / 2, min(self.floor, self.scale))
            self.good = 0
        elif self.good + 1 == self.growth_interval:
            self.scale *= 2
            self.good = 0
        else:
            self.good += 1


@hypothesis.given(
    initial=st.sampled_from([1.0, 8.0, 2.0**15]),
    growth_interval=st.integers(1, 4),
    floor=st.sampled_from([2.0**-3, 1.0]),
    verdicts=st.lists(st.booleans(), max_size=30),
)
def test_scale_moves_as_the_plain_machine(
    initial, growth_interval, floor, verdicts
):
    settings = tfaccum.LossScale(
        initial=initial, growth_interval=growth_interval, floor=floor
    )
    optimizer = loss_scale.with_scale(keras.optimizers.SGD(), settings)
    optimizer.build([keras.Variable(0.0)])
    machine = Machine(initial, growth_interval, floor)
    for finite in verdicts:
        loss_scale.move(optimizer, tf.constant(finite), floor)
        machine.move(finite)
        assert float(optimizer.dynamic_scale.numpy()) == machine.scale
        assert int(optimizer.step_counter.numpy()) == machine.good


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"growth_interval": 0}, "Received: growth_interval=0"),
        ({"floor": 0.0}, "Received: floor=0.0, initial=32768.0"),
        ({"floor": 4.0, "initial": 2.0}, "Received: floor=4.0, initial=2.0"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        tfaccum.LossScale(**arguments)


@pytest.mark.parametrize("scale", [-1.0, 0, "dynamic", True])
def test_compile_refuses_what_is_no_scale(scale):
    with pytest.raises(ValueError, match="`loss_scale` must be 'auto'"):
        toy()[0].compile("sgd", loss_scale=scale)


# --- Whole windows against numpy -------------------------------------------


def toy(replicas=1):
    """w of 2 numbers, start 0; the gradient of an example is its x."""

    class Model(tfaccum.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(2,), initializer="zeros", name="w")
            self.built = True

        def call(self, x):
            return x * self.w

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(self(data), axis=-1))
            self.accumulate(tape, loss, tf.shape(data)[0])
            return {}

    strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        return Model(), strategy


# What a gradient may hold: extremes of float32, but nothing that momentum
# would make subnormal, which TensorFlow flushes to zero.
VALUES = st.sampled_from(
    [0.0, 1.0, -2.5, 2.0**-110, 1e38, -3e38, np.inf, -np.inf, np.nan]
)
WINDOWS = st.lists(
    st.lists(VALUES, min_size=12, max_size=12), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def trained_toy():
    """Compiled once: hypothesis throws many windows at it."""
    model, strategy = toy(REPLICAS)
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(1.0, momentum=0.5),
            gradient_accumulation_steps=STEPS,
            loss_scale=tfaccum.LossScale(
                initial=4.0, growth_interval=2, floor=0.5
            ),
            max_consecutive_skips=10**6,
        )
    start = np.zeros((STEPS * REPLICAS, 2), "float32")
    fit(model, start)
    return model


def fit(model, x):
    data = tf.data.Dataset.from_tensor_slices(x).batch(REPLICAS)
    model.fit(data, verbose=0)


@hypothesis.settings(max_examples=15)
@hypothesis.given(windows=WINDOWS)
def test_any_pattern_of_bad_values_follows_numpy(trained_toy, windows):
    model = trained_toy
    optimizer = model.optimizer
    inner = optimizer.inner_optimizer
    state = {
        "w": np.zeros(2, "float32"),
        "m": np.zeros(2, "float32"),
        "updates": 0,
    }
    machine = Machine(4.0, 2, 0.5)
    model.w.assign(state["w"])
    inner.momentums[0].assign(state["m"])
    inner.iterations.assign(0)
    optimizer.dynamic_scale.assign(4.0)
    optimizer.step_counter.assign(0)
    for window in windows:
        x = np.array(window, "float32").reshape(STEPS * REPLICAS, 2)
        fit(model, x)
        with np.errstate(all="ignore"):
            scale = np.float32(machine.scale)
            # Replica by replica, then their sum: where float32 overflows
            # depends on the order.
            of_replica = [
                np.add.accumulate(x[r::REPLICAS] * scale, axis=0)[-1]
                for r in range(REPLICAS)
            ]
            total = of_replica[0] + of_replica[1]
            gradient = total / np.float32(STEPS * REPLICAS) / scale
        finite = bool(np.isfinite(gradient).all())
        update = model.last_updates[0]
        assert update.skipped == (not finite)
        assert update.loss_scale == machine.scale
        machine.move(finite)
        if finite:
            with np.errstate(all="ignore"):
                state["m"] = state["m"] * np.float32(0.5) - gradient
                state["w"] = state["w"] + state["m"]
            state["updates"] += 1
        bad = [not np.isfinite(g).all() for g in of_replica]
        expected = bad.index(True) if any(bad) and not finite else None
        assert update.nonfinite_replica == expected
        assert int(inner.iterations.numpy()) == state["updates"]
        assert float(optimizer.dynamic_scale.numpy()) == machine.scale
        assert int(optimizer.step_counter.numpy()) == machine.good
        np.testing.assert_allclose(
            inner.momentums[0].numpy(), state["m"], rtol=1e-6
        )
        np.testing.assert_allclose(model.w.numpy(), state["w"], rtol=1e-6)
        hypothesis.assume(np.isfinite(state["w"]).all())


# --- What a run does about it ----------------------------------------------


def bad_data(first_bad, rows=8):
    x = np.ones((rows, 2), "float32")
    x[first_bad:] = np.nan
    return x


@pytest.mark.parametrize("replicas", [1, 2])
def test_E5_permanent_nan_ends_the_run_and_names_where(replicas):
    model, strategy = toy(replicas)
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(1.0),
            gradient_accumulation_steps=2 // replicas,
            max_consecutive_skips=5,
            loss_scale=tfaccum.LossScale(initial=4.0, floor=1.0),
        )
    # Rows 0..3 are good; in every later window only its second row is bad,
    # which is replica 1's where there are two.
    x = np.ones((40, 2), "float32")
    x[5::2] = np.nan
    data = tf.data.Dataset.from_tensor_slices(x).batch(replicas)
    with pytest.raises(RuntimeError) as error:
        model.fit(data, verbose=0)
    text = str(error.value)
    assert "5 updates in a row were skipped" in text
    assert "after update 2 that of" in text
    assert f"{model.w.path} on replica {replicas - 1} (worker 0)" in text
    assert "the loss was nan (not finite itself)" in text
    np.testing.assert_array_equal(model.w.numpy(), [-2.0, -2.0])
    # 4, 2, 1 and not lower.
    assert float(model.optimizer.dynamic_scale.numpy()) == 1.0


def test_good_update_in_between_starts_the_count_again():
    model, _ = toy()
    model.compile(keras.optimizers.SGD(1.0), max_consecutive_skips=2)
    x = np.ones((6, 2), "float32")
    x[[0, 2, 4]] = np.inf
    data = tf.data.Dataset.from_tensor_slices(x).batch(1)
    model.fit(data, verbose=0)
    np.testing.assert_array_equal(model.w.numpy(), [-3.0, -3.0])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("choice", ["skip", "raise", "apply"])
def test_on_nonfinite_in_every_precision(choice, policy):
    keras.config.set_dtype_policy(policy)
    model, _ = toy()
    model.compile(keras.optimizers.SGD(1.0), on_nonfinite=choice)
    x = np.ones((3, 2), "float32")
    x[1] = np.inf
    data = tf.data.Dataset.from_tensor_slices(x).batch(1)
    if choice == "raise":
        with pytest.raises(RuntimeError, match="1 updates in a row"):
            model.fit(data, verbose=0)
        expected, updates = [-1.0, -1.0], 1
    else:
        model.fit(data, verbose=0)
        expected = [-2.0, -2.0] if choice == "skip" else [-np.inf, -np.inf]
        updates = 2 if choice == "skip" else 3
    np.testing.assert_array_equal(model.w.numpy(), expected)
    assert int(model.optimizer.iterations.numpy()) == updates


def test_raise_ends_a_call_of_several_windows():
    """The third window is not made, although it is good."""
    model, _ = toy()
    model.compile(
        keras.optimizers.SGD(1.0), on_nonfinite="raise", steps_per_execution=3
    )
    x = np.ones((3, 2), "float32")
    x[1] = np.inf
    data = tf.data.Dataset.from_tensor_slices(x).batch(1)
    with pytest.raises(RuntimeError, match="1 updates in a row"):
        model.fit(data, verbose=0)
    np.testing.assert_array_equal(model.w.numpy(), [-1.0, -1.0])
    assert int(model.optimizer.iterations.numpy()) == 1


def test_unknown_choices_are_refused():
    model, _ = toy()
    with pytest.raises(ValueError, match="one of 'skip', 'raise', 'apply'"):
        model.compile("sgd", on_nonfinite="ignore")
    with pytest.raises(ValueError, match="Received: accumulator_dtype='int8'"):
        model.compile("sgd", accumulator_dtype="int8")
    with pytest.raises(ValueError, match="max_consecutive_skips=0"):
        model.compile("sgd", max_consecutive_skips=0)


def test_weight_of_thousands_of_tokens_does_not_overflow_float16():
    """float16 gradients near 1 times 100,000 would be infinite in float16."""
    keras.config.set_dtype_policy("float16")
    model, _ = toy()

    def train_step(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(model(data), axis=-1))
        model.accumulate(tape, loss, 100_000.0)
        return {}

    model.train_step = train_step
    model.compile(
        keras.optimizers.SGD(1.0),
        gradient_accumulation_steps=2,
        loss_scale=256.0,
    )
    data = tf.data.Dataset.from_tensor_slices(np.ones((2, 2), "float16"))
    model.fit(data.batch(1), verbose=0)
    assert not model.last_updates[0].skipped
    np.testing.assert_array_equal(model.w.numpy(), [-1.0, -1.0])


def test_accumulator_dtype_holds_what_it_can():
    """513 micro-steps of 1: bfloat16 sums stick at 256."""
    data = tf.data.Dataset.from_tensor_slices(np.ones((513, 2), "float32"))
    found = {}
    for dtype in (None, "bfloat16", "float64"):
        model, _ = toy()
        model.compile(
            keras.optimizers.SGD(1.0),
            gradient_accumulation_steps=513,
            accumulator_dtype=dtype,
        )
        model.fit(data.batch(1), verbose=0)
        found[dtype] = (float(model.w.numpy()[0]), model.accumulator_bytes)
    # Two gradients; examples, loss and weight in float32.
    assert found == {
        None: (-1.0, 4 * 2 + 12),
        "bfloat16": (pytest.approx(-256 / 513, rel=1e-6), 2 * 2 + 12),
        "float64": (-1.0, 8 * 2 + 12),
    }


def test_scale_and_its_counters_are_saved_and_loaded(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((2,))
    model = tfaccum.Model(inputs, keras.layers.Dense(1)(inputs))
    settings = tfaccum.LossScale(initial=8.0, growth_interval=3, floor=0.5)
    model.compile("adam", "mse", loss_scale=settings, on_nonfinite="skip")
    x = np.ones((5, 2), "float32")
    model.fit(x, x[:, :1], batch_size=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.loss_scale == settings
    assert float(loaded.optimizer.dynamic_scale.numpy()) == 16.0
    assert int(loaded.optimizer.step_counter.numpy()) == 2
    for m in (model, loaded):
        m.fit(x[:1], x[:1, :1], verbose=0)
        assert float(m.optimizer.dynamic_scale.numpy()) == 32.0


@pytest.mark.parametrize("given", ["wrapped", "policy", "none", "argument"])
def test_E1_every_way_to_ask_for_a_scale(given):
    if given == "policy":
        keras.config.set_dtype_policy("mixed_float16")
    model, _ = toy()
    optimizer = keras.optimizers.SGD(1.0)
    if given == "wrapped":
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            optimizer, initial_scale=2.0**10
        )
    scale = tfaccum.LossScale(initial=64.0) if given == "argument" else "auto"
    model.compile(optimizer, loss_scale=scale)
    data = tf.data.Dataset.from_tensor_slices(np.ones((2, 2), "float32"))
    model.fit(data.batch(1), verbose=0)
    expected = {
        "wrapped": 2.0**10,
        "policy": 2.0**15,
        "none": 1.0,
        "argument": 64.0,
    }
    assert model.last_updates[0].loss_scale == expected[given]
    np.testing.assert_array_equal(model.w.numpy(), [-2.0, -2.0])
