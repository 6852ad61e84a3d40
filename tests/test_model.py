import os
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests.tolerances import tolerance
from tfaccum import update

CLOSE = {"rtol": 10 * tolerance("float32"), "atol": 10 * tolerance("float32")}


def strategy_of(replicas):
    if replicas == 0:
        return tf.distribute.get_strategy()
    return tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])


def arrays(rows=19, features=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    y = rng.normal(size=(rows, 1)).astype("float32")
    return x, y


def weights(model):
    return np.concatenate([np.ravel(v.numpy()) for v in model.weights])


def dense(model_class=tfaccum.Model, **kwargs):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, activation="tanh", **kwargs)(inputs)
    return model_class(inputs, keras.layers.Dense(1)(x))


# --- Making a model --------------------------------------------------------


@keras.saving.register_keras_serializable("tests")
class Subclassed(tfaccum.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = keras.layers.Dense(units, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.out(self.hidden(inputs))

    def get_config(self):
        return {"units": self.units}


@keras.saving.register_keras_serializable("tests")
class WithOwnStep(tfaccum.Model):
    def train_step(self, data):
        return super().train_step(data)


@keras.saving.register_keras_serializable("tests")
class ChildOfWithOwnStep(WithOwnStep):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = keras.layers.Dense(1)

    def call(self, inputs):  # takes no `training`
        return self.out(inputs)

    def get_config(self):
        return {}


def sequential(with_input):
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    if with_input:
        layers.insert(0, keras.Input((4,)))
    return keras.Sequential(layers)


class KerasSubclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.out(inputs)


MAKERS = {
    "functional": dense,
    "subclassed": Subclassed,
    "functional_subclass": lambda: dense(WithOwnStep),
    "ordinary_child_of_functional_subclass": ChildOfWithOwnStep,
    "from_functional": lambda: tfaccum.Model.from_keras(dense(keras.Model)),
    "from_sequential": lambda: tfaccum.Model.from_keras(sequential(True)),
    "from_unbuilt": lambda: tfaccum.Model.from_keras(sequential(False)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_trains_saves_and_loads(maker, tmp_path):
    x, y = arrays()
    model = MAKERS[maker]()
    model.compile(
        keras.optimizers.Adam(0.01),
        "mse",
        gradient_accumulation_steps=2,
        micro_batch_size=3,
    )
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2 * 3  # 19 rows, 8 an update
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert type(loaded).__mro__[0].__name__ == type(model).__name__
    assert loaded.gradient_accumulation_steps == 2
    assert loaded.micro_batch_size == 3
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    # Slots and counters too: both go on alike.
    for m in (model, loaded):
        m.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    np.testing.assert_array_equal(weights(loaded), weights(model))


def test_saving_to_hdf5_warns_of_what_is_loaded(tmp_path):
    x, _ = arrays()
    model = dense()
    with pytest.warns(UserWarning, match="plain Keras .*filepath=.*model.h5"):
        model.save(tmp_path / "model.h5")
    loaded = keras.saving.load_model(tmp_path / "model.h5")
    assert not isinstance(loaded, tfaccum.Model)
    np.testing.assert_array_equal(loaded(x), model(x))
    with warnings.catch_warnings(action="error", category=UserWarning):
        model.save(tmp_path / "model.keras")


@pytest.mark.parametrize("maker", MAKERS)
def test_pickled(maker):
    x, y = arrays()
    model = MAKERS[maker]()
    model.compile("adam", "mse", gradient_accumulation_steps=2)
    model.fit(x, y, batch_size=4, verbose=0)
    again = pickle.loads(pickle.dumps(model))
    assert type(again).__name__ == type(model).__name__
    assert again.gradient_accumulation_steps == 2
    for m in (model, again):
        m.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    np.testing.assert_array_equal(weights(again), weights(model))


def test_functional_use_leaves_the_class_as_it_was():
    bases = WithOwnStep.__bases__
    model = dense(WithOwnStep)
    assert WithOwnStep.__bases__ == bases == (tfaccum.Model,)
    assert isinstance(model, WithOwnStep)
    ChildOfWithOwnStep()  # Fails once Keras has changed the bases.


def test_config_round_trip():
    model = dense()
    copy = type(model).from_config(model.get_config())
    assert isinstance(copy, tfaccum.Model)
    assert [v.shape for v in copy.weights] == [v.shape for v in model.weights]


def test_loads_in_a_new_process(tmp_path):
    model = dense()
    model.compile("sgd", "mse", gradient_accumulation_steps=5)
    path = tmp_path / "model.keras"
    model.save(path)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import tfaccum, keras, sys;"
            "m = keras.saving.load_model(sys.argv[1]);"
            "print(type(m).__name__, m.gradient_accumulation_steps)",
            str(path),
        ],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["Model", "5"], done.stderr[-2000:]


def test_shares_layers_with_the_wrapped_model():
    model = dense(keras.Model)
    wrapped = tfaccum.Model.from_keras(model)
    assert all(
        a is b for a, b in zip(model.weights, wrapped.weights, strict=True)
    )
    assert wrapped.name == model.name


def test_from_keras_refuses_what_is_no_model():
    with pytest.raises(TypeError, match="must be a keras.Model. Received"):
        tfaccum.Model.from_keras(keras.layers.Dense(1))


class WithOwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {}


class WithOwnLoss(KerasSubclass):
    def test_step(self, data):
        return super().test_step(data)

    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    "make, names",
    [
        (WithOwnLoss, "test_step, compute_loss"),
        (lambda: dense(WithOwnMetrics), "compute_metrics"),
    ],
)
def test_from_keras_refuses_what_it_would_drop(make, names):
    with pytest.raises(ValueError, match=f"overrides {names}. .* subclass"):
        tfaccum.Model.from_keras(make())


def test_from_keras_takes_what_is_a_subclass_already():
    model = dense()
    wrapped = tfaccum.Model.from_keras(model)
    assert wrapped.weights[0] is model.weights[0]
    with pytest.raises(ValueError, match="which overrides train_step"):
        tfaccum.Model.from_keras(dense(WithOwnStep))


@pytest.mark.slow
def test_model_of_keras_applications_trains():
    application = keras.applications.MobileNetV2(
        weights=None, input_shape=(32, 32, 3), classes=3, alpha=0.35
    )
    model = tfaccum.Model.from_keras(application)
    model.compile(
        "sgd",
        "sparse_categorical_crossentropy",
        gradient_accumulation_steps=2,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 32, 32, 3)).astype("float32")
    history = model.fit(x, np.arange(12) % 3, batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert int(model.optimizer.iterations) == 2


# --- What compile refuses --------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (
            {"gradient_accumulation_steps": 0},
            ValueError,
            "at least 1. Received: gradient_accumulation_steps=0",
        ),
        (
            {"gradient_accumulation_steps": 2.0},
            TypeError,
            "Received: gradient_accumulation_steps=2.0 of type float",
        ),
        (
            {"micro_batch_size": -4},
            ValueError,
            "at least 1. Received: micro_batch_size=-4",
        ),
        (
            {"micro_batch_size": True},
            TypeError,
            "Received: micro_batch_size=True of type bool",
        ),
    ],
)
def test_compile_refuses_bad_counts(arguments, error, text):
    with pytest.raises(error, match=text):
        dense().compile("sgd", "mse", **arguments)


def test_compile_refuses_accumulation_on_the_optimizer():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        dense().compile(optimizer, "mse")
    scaled = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(gradient_accumulation_steps=4)
    )
    with pytest.raises(ValueError, match="must not be set"):
        dense().compile(scaled, "mse")


def test_compile_refuses_an_unsupported_strategy_by_name():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope():
        model = dense()
        with pytest.raises(ValueError, match="CentralStorageStrategy"):
            model.compile("sgd", "mse")


def test_compile_outside_the_scope_counts_updates_once():
    strategy = strategy_of(2)
    with strategy.scope():
        model = dense()
    model.compile("sgd", "mse", gradient_accumulation_steps=2)
    x, y = arrays()
    model.fit(x, y, batch_size=8, verbose=0)  # 19 rows: 2 windows
    assert model.optimizer.iterations.numpy() == 2


def test_compile_refuses_an_optimizer_made_outside_the_scope():
    with strategy_of(2).scope():
        model = dense()
    with pytest.raises(ValueError, match="made under no strategy. Make it"):
        model.compile(keras.optimizers.SGD(0.1), "mse")


def test_compile_refuses_multi_optimizer_by_name():
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi is None:
        pytest.skip("Keras has no MultiOptimizer before 3.15.0")
    optimizer = multi.__new__(multi)
    with pytest.raises(ValueError, match="optimizer=MultiOptimizer"):
        update.check_optimizer(optimizer)


def test_calls_before_compile_say_so():
    x, y = arrays()
    for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        with pytest.raises(ValueError, match=f"`compile` .* before `{method}`"):
            getattr(dense(), method)(x, y)


# --- A loss is a plain mean everywhere -------------------------------------


class MeanSquares(tfaccum.Model):
    """Overrides `compute_loss` with a plain mean over its examples."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return tf.reduce_mean(tf.square(y - y_pred))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_A15_own_loss_gives_the_same_on_any_number_of_replicas(replicas):
    x, y = arrays()
    reference = dense(keras.Model)
    reference.compile(keras.optimizers.SGD(0.1), "mse")
    expected = reference.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    with strategy_of(replicas).scope():
        model = dense(MeanSquares)
        model.compile(keras.optimizers.SGD(0.1), micro_batch_size=3)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(model), weights(reference), **CLOSE)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], **CLOSE
    )


class OldStyle(MeanSquares):
    """Keras before 3.3 had no `training` argument."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight)


def test_compute_loss_without_training_argument():
    x, y = arrays()
    model = dense(OldStyle)
    model.compile("sgd", gradient_accumulation_steps=2)
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])


def two_outputs(model_class, loss_weights=(1.0, 0.3)):
    keras.utils.set_random_seed(3)
    a = keras.Input((4,), name="a")
    b = keras.Input((2,), name="b")
    x = keras.layers.Concatenate()([a, b])
    x = keras.layers.Dense(
        3, activation="tanh", activity_regularizer="l2", bias_regularizer="l2"
    )(x)
    outputs = {
        "u": keras.layers.Dense(1, name="u")(x),
        "v": keras.layers.Dense(3, name="v")(x),
    }
    model = model_class({"a": a, "b": b}, outputs)
    model.compile(
        keras.optimizers.SGD(0.1),
        loss={
            "u": "mse",
            "v": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"u": loss_weights[0], "v": loss_weights[1]},
        metrics={"u": ["mae"], "v": ["accuracy"]},
        weighted_metrics={"u": ["mse"]},
        **({"micro_batch_size": 3} if model_class is tfaccum.Model else {}),
    )
    return model


@pytest.mark.parametrize("replicas", [0, 2])
def test_dict_inputs_outputs_losses_and_metrics(replicas):
    rng = np.random.default_rng(0)
    # Batches of equal size: over ragged ones Keras logs, for each output, a
    # mean of means.
    x = {
        "a": rng.normal(size=(16, 4)).astype("float32"),
        "b": rng.normal(size=(16, 2)).astype("float32"),
    }
    y = {
        "u": rng.normal(size=(16, 1)).astype("float32"),
        "v": rng.integers(0, 3, 16),
    }
    keys = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
    reference = two_outputs(keras.Model)
    expected = reference.fit(x, y, **keys).history
    with strategy_of(replicas).scope():
        model = two_outputs(tfaccum.Model)
    history = model.fit(x, y, **keys).history
    np.testing.assert_allclose(weights(model), weights(reference), **CLOSE)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, **CLOSE)
    predicted = model.predict(x, batch_size=8, verbose=0)
    for name, rows in reference.predict(x, verbose=0).items():
        np.testing.assert_allclose(predicted[name], rows, **CLOSE)
    # Ragged batches here, and one big batch there.
    results = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    for name, value in reference.evaluate(
        x, y, batch_size=16, verbose=0, return_dict=True
    ).items():
        np.testing.assert_allclose(results[name], value, **CLOSE)


@pytest.mark.parametrize("how", ["class_weight", "sample_weight"])
def test_fit_weights_are_honoured(how):
    rng = np.random.default_rng(0)
    x, y = arrays()[0], rng.integers(0, 3, 19)
    given = {
        "class_weight": {0: 0.2, 1: 1.0, 2: 5.0},
        "sample_weight": rng.uniform(0.1, 3, 19).astype("float32"),
    }
    keys = {"batch_size": 8, "shuffle": False, "verbose": 0, how: given[how]}

    def build(model_class, **arguments):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        model = model_class(
            inputs, keras.layers.Dense(3, activation="softmax")(inputs)
        )
        model.compile("sgd", "sparse_categorical_crossentropy", **arguments)
        return model

    reference = build(keras.Model)
    expected = reference.fit(x, y, **keys).history
    model = build(tfaccum.Model, micro_batch_size=3)
    history = model.fit(x, y, **keys).history
    np.testing.assert_allclose(weights(model), weights(reference), **CLOSE)
    np.testing.assert_allclose(history["loss"], expected["loss"], **CLOSE)


def test_train_on_batch_is_one_update_of_the_whole_batch():
    x, y = arrays()
    reference = dense(keras.Model)
    reference.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    model = dense()
    model.compile(
        keras.optimizers.SGD(0.1), "mse", metrics=["mae"], micro_batch_size=3
    )
    for rows in (19, 7, 19):
        reference.reset_metrics()  # Keras does so by itself from 3.15 on.
        expected = reference.train_on_batch(
            x[:rows], y[:rows], return_dict=True
        )
        got = model.train_on_batch(x[:rows], y[:rows], return_dict=True)
        np.testing.assert_allclose(got["loss"], expected["loss"], **CLOSE)
        np.testing.assert_allclose(got["mae"], expected["mae"], **CLOSE)
    np.testing.assert_allclose(weights(model), weights(reference), **CLOSE)
    np.testing.assert_allclose(
        model.predict_on_batch(x), reference.predict_on_batch(x), **CLOSE
    )
    reference.reset_metrics()
    np.testing.assert_allclose(
        model.test_on_batch(x, y), reference.test_on_batch(x, y), **CLOSE
    )


# --- Variables -------------------------------------------------------------


def test_variable_without_gradient_warns_once_and_stays():
    inputs = keras.Input((4,))
    unused = keras.layers.Dense(2, name="unused")
    unused.build((None, 4))

    class Model(tfaccum.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(1)
            self.unused = unused

        def call(self, inputs):
            return self.used(inputs)

    del inputs
    x, y = arrays()
    model = Model()
    model.compile("sgd", "mse", gradient_accumulation_steps=2, run_eagerly=True)
    before = unused.kernel.numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    texts = [str(w.message) for w in caught if "not trained" in str(w.message)]
    assert len(texts) == 1 and "unused/kernel" in texts[0]
    np.testing.assert_array_equal(unused.kernel.numpy(), before)


@pytest.mark.parametrize("when", ["before_compile", "after_compile"])
def test_frozen_layers_stay(when):
    x, y = arrays()
    model = dense()
    if when == "before_compile":
        model.layers[1].trainable = False
    model.compile("adam", "mse", gradient_accumulation_steps=2)
    if when == "after_compile":
        model.layers[1].trainable = False
    before = [v.numpy() for v in model.layers[1].weights]
    free = model.layers[2].kernel.numpy()
    model.fit(x, y, batch_size=4, verbose=0)
    for variable, value in zip(model.layers[1].weights, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert np.abs(model.layers[2].kernel.numpy() - free).max() > 0


def test_moving_statistics_are_the_mean_over_the_replicas():
    """Momentum 0: each replica's own statistics, then their mean."""
    strategy = strategy_of(2)
    with strategy.scope():
        inputs = keras.Input((1,))
        norm = keras.layers.BatchNormalization(momentum=0.0)
        model = tfaccum.Model(inputs, keras.layers.Dense(1)(norm(inputs)))
        model.compile("sgd", "mse")
    x = np.array([[0.0], [2.0], [4.0], [10.0]], "float32")
    model.fit(x, x, batch_size=4, verbose=0, shuffle=False)
    # Replica 0 saw 0, 2 (mean 1, variance 1), replica 1 saw 4, 10 (7, 9).
    for variable, expected in (
        (norm.moving_mean, 4.0),
        (norm.moving_variance, 5.0),
    ):
        copies = strategy.experimental_local_results(variable.value)
        assert [copy.numpy()[0] for copy in copies] == [expected] * 2


# --- A train_step of one's own ---------------------------------------------


def test_accumulate_outside_a_step_says_what_to_do():
    model = dense()
    model.compile("sgd", "mse")
    x, y = arrays()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    with pytest.raises(RuntimeError, match="inside `train_step`"):
        model.accumulate(tape, loss, 1.0)


def step_of(body):
    class Model(tfaccum.Model):
        def train_step(self, data):
            return body(self, *data)

    model = dense(Model)
    model.compile("sgd", "mse", gradient_accumulation_steps=2)
    return model


def test_step_that_applies_by_itself_is_refused():
    def body(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}

    with pytest.raises(RuntimeError, match="never called `self.accumulate"):
        step_of(body).fit(*arrays(), verbose=0)


def test_loss_that_is_no_scalar_is_refused():
    def body(self, x, y):
        with tf.GradientTape() as tape:
            loss = self(x)[:, 0]
        self.accumulate(tape, loss, tf.shape(x)[0])
        return {}

    with pytest.raises(ValueError, match="`loss` must be a scalar"):
        step_of(body).fit(*arrays(), verbose=0)


def test_second_call_for_one_optimizer_is_refused():
    def body(self, x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(self(x))
        self.accumulate(tape, loss, 1)
        self.accumulate(tape, loss, 1)
        return {}

    with pytest.raises(RuntimeError, match="once per optimizer"):
        step_of(body).fit(*arrays(), verbose=0)


def test_own_logs_are_means_over_the_window_weighted_by_examples():
    def body(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        self.accumulate(tape, loss, tf.shape(x)[0])
        return {"first_feature": tf.reduce_mean(x[:, 0])}

    x, y = arrays(rows=7)
    model = step_of(body)
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    # One window: micro-batches of 4 and 3 rows.
    np.testing.assert_allclose(
        history.history["first_feature"], [x[:, 0].mean()], **CLOSE
    )


def test_precision_of_a_step_of_ones_own_with_a_loss_scale():
    """The step sees and logs the plain loss; the window scales."""
    keras.config.set_dtype_policy("mixed_float16")
    seen = []

    def body(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(x), "float32") - y))
        self.accumulate(tape, loss, tf.shape(x)[0])
        return {"own": loss}

    model = step_of(body)
    scales = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: seen.append(
            (model.last_updates[0].loss_scale, logs["own"], logs["loss"])
        )
    )
    model.fit(*arrays(), batch_size=8, verbose=0, callbacks=[scales])
    assert {scale for scale, _, _ in seen} == {2.0**15}
    assert all(own < 10 and loss < 10 for _, own, loss in seen)
