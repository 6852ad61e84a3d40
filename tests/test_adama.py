"""AdamA: moments that take each micro-batch's gradient at once.

The reference is its definition by numpy, for a linear model:

    m <- beta_1 m + (1 - beta_1) sum_i s_i g_i
    v <- beta_2 v + (1 - beta_2) sum_i (s_i g_i)^2
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.multi_worker import graphs
from tests.tolerances import tolerance
from tfaccum.boost import AdaSum, GradientFreeze, centralized

# Keras passes numbers through float32, which holds these.
BETA_1, BETA_2, EPSILON = 0.75, 0.9375, 2.0**-20
HOW = {"on_nonfinite": "raise"}


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")


def adama(rate=0.05, **arguments):
    return lambda: tfaccum.AdamA(rate, BETA_1, BETA_2, EPSILON, **arguments)


def adam(rate=0.05, **arguments):
    return lambda: keras.optimizers.Adam(
        rate, BETA_1, BETA_2, EPSILON, **arguments
    )


def rows(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(number, 3)), rng.normal(size=(number, 1))


def model_of(
    replicas=1,
    optimizer=None,
    *,
    hidden=(),
    model_class=tfaccum.Model,
    loss="mse",
    **arguments,
):
    keras.utils.set_random_seed(3)
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,))
        outputs = inputs
        for units in hidden:
            outputs = keras.layers.Dense(units, "tanh")(outputs)
        outputs = keras.layers.Dense(1, dtype=keras.config.floatx())(outputs)
        model = model_class(inputs, outputs)
        model.compile((optimizer or adama())(), loss, **arguments)
    return model


def fit(model, number=19, batch_size=8, epochs=1, **arguments):
    x, y = rows(number)
    return model.fit(
        x.astype(keras.config.floatx()),
        y.astype(keras.config.floatx()),
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **arguments,
    )


def trained(replicas=1, micro=2, optimizer=None, of_fit=None, **arguments):
    """A model of two layers after two epochs."""
    model = model_of(
        replicas,
        optimizer,
        hidden=(4,),
        micro_batch_size=micro,
        **HOW,
        **arguments,
    )
    fit(model, **{"number": 20, "epochs": 2, **(of_fit or {})})
    return model


def values(model):
    """Weights and the optimizer's variables, equal on all replicas."""
    return [
        toy.value_of(model, v)
        for v in [*model.trainable_variables, *model.optimizer.variables]
    ]


def assert_same(model, other, rtol=0.0, atol=0.0):
    for mine, theirs in zip(values(model), values(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)


def bits(model):
    return [value.tobytes() for value in values(model)]


def moments(model, name):
    """Those called "momentum", or "velocity", in the order of variables."""
    return [
        toy.value_of(model, v)
        for v in model.optimizer.variables
        if v.path.endswith(name)
    ]


class Norms(keras.callbacks.Callback):
    """Keeps the norm of each update."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def on_train_batch_end(self, batch, logs=None):
        self.norms += [u.gradient_norm for u in self.model.last_updates]


# --- Its definition, by numpy ---------------------------------------------


def parts_of(number, replicas, micro):
    """How a dataset batch is cut, larger parts first."""
    largest = math.ceil(number / replicas)
    steps = max(math.ceil(largest / micro), 1)
    return np.array_split(np.arange(number), steps * replicas)


class ByHand:
    """Of one Dense layer with a bias, and the mean of squares."""

    def __init__(self, theta, rate, decay=0.0, amsgrad=False):
        self.theta, self.rate, self.decay = theta, rate, decay
        self.m, self.v, self.largest = (np.zeros_like(theta) for _ in range(3))
        self.amsgrad, self.updates, self.norms = amsgrad, 0, []

    def gradient(self, x, y):
        x = np.concatenate([x, np.ones([len(x), 1])], axis=1)
        return 2 * x.T @ (x @ self.theta - y) / len(x)

    def update(self, parts):
        """One update from micro-batches, each (x, y)."""
        whole = sum(len(x) for x, _ in parts)
        added = [
            len(x) / whole * self.gradient(x, y) for x, y in parts if len(x)
        ]
        squares = sum(g**2 for g in added)
        self.norms.append(np.sqrt(squares.sum()))
        self.m = BETA_1 * self.m + (1 - BETA_1) * sum(added)
        self.v = BETA_2 * self.v + (1 - BETA_2) * squares
        self.largest = np.maximum(self.largest, self.v)
        rate = self.rate(self.updates)
        self.updates += 1
        self.theta = self.theta - rate * self.decay * self.theta
        m = self.m / (1 - BETA_1**self.updates)
        v = self.largest if self.amsgrad else self.v
        root = np.sqrt(1 - BETA_2**self.updates)
        # Keras adds epsilon before the correction of v.
        self.theta = self.theta - rate * root * m / (np.sqrt(v) + EPSILON)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    "replicas, micro, number",
    [(1, 2, 19), (1, 3, 19), (2, 2, 19), (2, 3, 17), (4, 1, 17)],
    ids=str,
)
def test_updates_are_those_of_its_definition(
    replicas, micro, number, amsgrad, float64
):
    """Unequal parts; a last batch of 3, or of 1 for 2 or 4 replicas."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.125, 1, 0.5)
    model = model_of(
        replicas,
        adama(schedule, weight_decay=0.125, amsgrad=amsgrad),
        micro_batch_size=micro,
        **HOW,
    )
    kernel, bias = (toy.value_of(model, v) for v in model.weights)
    by_hand = ByHand(
        np.concatenate([kernel, bias[:, np.newaxis]]),
        lambda update: 0.125 * 0.5**update,
        decay=0.125,
        amsgrad=amsgrad,
    )
    seen = Norms()
    fit(model, number, epochs=2, callbacks=[seen])
    x, y = rows(number)
    for _ in range(2):
        for start in range(0, number, 8):
            x_all, y_all = x[start : start + 8], y[start : start + 8]
            by_hand.update(
                [
                    (x_all[part], y_all[part])
                    for part in parts_of(len(x_all), replicas, micro)
                ]
            )
    assert toy.iterations_of(model) == by_hand.updates == 6
    np.testing.assert_allclose(seen.norms, by_hand.norms, rtol=1e-12)
    weights = [toy.value_of(model, v) for v in model.trainable_variables]
    m, v = (moments(model, name) for name in ("momentum", "velocity"))
    for found, expected in (
        (weights, by_hand.theta),
        (m, by_hand.m),
        (v, by_hand.v),
    ):
        found = np.concatenate([np.ravel(part) for part in found])
        np.testing.assert_allclose(found, expected[:, 0], rtol=1e-10)


# --- Against Adam ---------------------------------------------------------

EVERYTHING = {
    "weight_decay": 0.01,
    "use_ema": True,
    "ema_momentum": 0.9,
    "ema_overwrite_frequency": 3,
    "amsgrad": True,
}


def test_one_micro_batch_is_adam(float64):
    """With decay, an average and a constraint, which Keras' `apply` makes."""
    found = trained(micro=8, optimizer=adama(**EVERYTHING))
    expected = model_of(optimizer=adam(**EVERYTHING), hidden=(4,))
    fit(expected, 20, epochs=2)
    assert_same(found, expected, rtol=1e-10)


@pytest.mark.parametrize("replicas", [1, 2])
def test_m_is_adams_and_v_is_not(replicas, float64):
    """After one update: (1 - beta_2) times sum of squares, square of sum."""
    model = model_of(replicas, adama(), micro_batch_size=2, **HOW)
    big = model_of(1, adam())
    kernel, bias = (toy.value_of(model, v) for v in model.weights)
    by_hand = ByHand(np.concatenate([kernel, bias[:, np.newaxis]]), float)
    for each in (model, big):
        fit(each, 7)
    for mine, theirs in zip(
        moments(model, "momentum"), moments(big, "momentum"), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)
    x, y = rows(7)
    shares = [
        len(part) / 7 * by_hand.gradient(x[part], y[part])
        for part in parts_of(7, replicas, 2)
    ]
    less = (1 - BETA_2) * (sum(shares) ** 2 - sum(g**2 for g in shares))
    found = [
        np.concatenate([np.ravel(v) for v in moments(each, "velocity")])
        for each in (big, model)
    ]
    np.testing.assert_allclose(found[0] - found[1], less[:, 0], rtol=1e-9)
    assert np.abs(less).min() > 1e-3


def test_m_is_adams_in_float32():
    model = model_of(optimizer=adama(), micro_batch_size=1, **HOW)
    big = model_of(optimizer=adam())
    for each in (model, big):
        fit(each, 8)
    for mine, theirs in zip(
        moments(model, "momentum"), moments(big, "momentum"), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance("float32"))


@pytest.mark.parametrize("replicas, micro", [(2, 2), (4, 2), (2, 4)])
def test_it_is_the_micro_batches_that_count_not_where_they_are(
    replicas, micro, float64
):
    """Of two layers, on batches of 8 that are cut alike."""
    of_fit = {"number": 32, "batch_size": 8}
    found = trained(replicas, micro, of_fit=of_fit)
    expected = trained(1, micro, of_fit=of_fit)
    assert_same(found, expected, rtol=1e-10)


def test_elsewhere_it_is_adam():
    """In plain Keras, and in a loop of one's own: to the bit."""
    mine, theirs = (
        model_of(optimizer=make(**EVERYTHING), model_class=keras.Model)
        for make in (adama, adam)
    )
    for model in (mine, theirs):
        fit(model, epochs=2)
    assert bits(mine) == bits(theirs)
    found = []
    for make in (adama, adam):
        variable, optimizer = keras.Variable([1.0, 2.0]), make()()
        sums = tfaccum.GradientAccumulator([variable])
        for gradient in ([1.0, 3.0], [2.0, -1.0]):
            sums.add([tf.constant(gradient)], weight=2)
        sums.apply(optimizer)
        found.append([v.numpy().tolist() for v in optimizer.variables])
    assert found[0] == found[1]


def test_a_loss_that_is_a_sum():
    """Nothing is divided: the gradient of each micro-batch is its part."""
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = model_of(loss=loss, micro_batch_size=2, **HOW)
    big = model_of(loss=loss, optimizer=adam())
    for each in (model, big):
        fit(each, 7)
    for mine, theirs in zip(
        moments(model, "momentum"), moments(big, "momentum"), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert not np.allclose(moments(model, "velocity")[0], 0)


# --- What is refused ------------------------------------------------------


# What is received, and the arguments of `compile` that it comes from.
REFUSED = {
    "micro_batch_size=None": lambda: {"micro_batch_size": None},
    "micro_batch_size='auto'": lambda: {"micro_batch_size": "auto"},
    "micro_batch_size=AutoMicroBatch": lambda: {
        "micro_batch_size": tfaccum.AutoMicroBatch(start=4)
    },
    "gradient_accumulation_steps=2": lambda: {"gradient_accumulation_steps": 2},
    "gradient_accumulation_steps=[(0, 1)": lambda: {
        "gradient_accumulation_steps": [(0, 1), (5, 2)]
    },
    "on_nonfinite='skip'": lambda: {"on_nonfinite": "skip"},
    "on_nonfinite='apply'": lambda: {"on_nonfinite": "apply"},
    "a dynamic scale": lambda: {"loss_scale": tfaccum.LossScale()},
    "loss_scale=<GroupLossScale": lambda: {
        "loss_scale": tfaccum.GroupLossScale([["dense"]])
    },
    "replica_reduction=AdaSum": lambda: {"replica_reduction": AdaSum()},
    "gradient_freeze=GradientFreeze": lambda: {
        "gradient_freeze": GradientFreeze(total_updates=9)
    },
    "'clipnorm': 1.0": lambda: {"optimizer": adama(clipnorm=1.0)},
    "'clipvalue': 1.0": lambda: {"optimizer": adama(clipvalue=1.0)},
    "'global_clipnorm': 1.0": lambda: {"optimizer": adama(global_clipnorm=1.0)},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_at_compile(text):
    with pytest.raises(ValueError, match="with AdamA. Received: ") as error:
        model_of(**{"micro_batch_size": 2, **HOW, **REFUSED[text]()})
    assert text in str(error.value)


def test_a_scale_of_mixed_float16_is_refused():
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(ValueError, match="loss_scale='auto', a dynamic scale"):
        model_of(micro_batch_size=2, **HOW)


def test_several_workers_are_refused(monkeypatch):
    monkeypatch.setattr(tfaccum.strategy, "worker_index", lambda _: (0, 2))
    with pytest.raises(ValueError, match="Received: 2 workers"):
        model_of(micro_batch_size=2, **HOW)


def test_gradients_cannot_be_centralized():
    model = model_of(micro_batch_size=2, **HOW)
    with pytest.raises(ValueError, match="optimizer=AdamA"):
        centralized(tfaccum.AdamA(), model.weights[:1])


@pytest.mark.parametrize("name", ["beta_1", "beta_2"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_beta_out_of_range_is_refused(name, beta):
    with pytest.raises(ValueError, match=f"`{name}` must be .*={beta}"):
        tfaccum.AdamA(**{name: beta})


def test_another_divisor_is_refused_before_the_first_step():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = model_of(loss=loss, micro_batch_size=2, **HOW)
    before = [w.tobytes() for w in model.get_weights()]
    weights = np.linspace(0, 1, 19)
    with pytest.raises(ValueError, match="Received: a loss divided by weights"):
        fit(model, sample_weight=weights)
    assert [w.tobytes() for w in model.get_weights()] == before
    fit(model)  # Without weights it is divided by examples.
    x, y = rows(8)
    model.evaluate(x, y, sample_weight=weights[:8], verbose=0)


def test_a_mask_is_refused():
    inputs = keras.Input((5, 3))
    x = keras.layers.Masking()(inputs)
    model = tfaccum.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(tfaccum.AdamA(), "mse", micro_batch_size=2, **HOW)
    with pytest.raises(ValueError, match="Received: a loss divided by mask"):
        model.fit(np.ones((4, 5, 3)), np.ones((4, 5, 1)), verbose=0)


class Weighs(tfaccum.Model):
    """Says of its loss that it is divided by twice the examples."""

    def loss_weight(self, x, y, y_pred, sample_weight):
        return 2 * tf.shape(x)[0]


@pytest.mark.parametrize(
    "replicas, arguments",
    [
        (1, {}),
        (2, {}),
        (1, {"jit_compile": True}),
        (1, {"run_eagerly": True}),
    ],
    ids=str,
)
def test_a_wrong_weight_ends_the_first_step(replicas, arguments):
    model = model_of(
        replicas, model_class=Weighs, micro_batch_size=2, **HOW, **arguments
    )
    before = [w.tobytes() for w in model.get_weights()]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="must be the number of examples"
    ):
        fit(model)
    assert [w.tobytes() for w in model.get_weights()] == before


# --- Windows without rows, and with bad gradients -------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_window_without_rows_changes_nothing(replicas):
    model = toy.toy(
        replicas, optimizer=adama(weight_decay=0.1), micro_batch_size=1, **HOW
    )
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(bits(model))
    )
    with pytest.warns(UserWarning, match="total weight of zero"):
        toy.fit(model, toy.batches([1, 2], [], [3]), callbacks=[look])
    assert seen[0] == seen[1] != seen[2]
    assert toy.iterations_of(model) == 2


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_ends_training_and_is_named(replicas, bad):
    """The weights stay; which replica and variable it was is told."""
    layers = [toy.scalar(1.0, name="a"), toy.scalar(1.0, name="b")]
    model = toy.toy(
        replicas,
        layers=lambda: layers,
        optimizer=adama(),
        micro_batch_size=1,
        **HOW,
    )
    seen = toy.EachUpdate()
    with pytest.raises(RuntimeError, match="must be finite") as error:
        model.fit(
            toy.batches([1, 2, 3, 4], [5, 6, 7, bad]),
            verbose=0,
            callbacks=[seen],
        )
    assert f"that of a/kernel on replica {replicas - 1}" in str(error.value)
    assert len(seen.weights) == 1 and toy.weights_of(model) == seen.weights[0]
    assert toy.iterations_of(model) == 1


def test_no_window_follows_a_bad_one_in_the_same_call():
    """Its moments, which are bad now, would reach the weights."""
    model = toy.toy(
        optimizer=adama(), micro_batch_size=1, steps_per_execution=3, **HOW
    )
    with pytest.raises(RuntimeError, match="must be finite"):
        toy.fit(model, toy.batches([0], [np.inf], [3]))
    assert toy.weight_of(model) == 0 and toy.iterations_of(model) == 1
    assert [u.skipped for u in model.last_updates] == [False, True]


# --- What is kept, and what travels ---------------------------------------


def test_no_gradient_is_kept():
    model = trained(2)
    parameters = model.count_params()
    # Loss, weight and examples; one number for each of four variables.
    assert model.accumulator_bytes == 4 * (3 + 4) < 4 * parameters


def test_moments_travel_once_per_update():
    """For each replica all else in one collective, and both moments."""
    with graphs.traced() as traced:
        model = trained(2)
    whole = max(traced, key=lambda graph: len(graphs.operations(graph)))
    others = [g for g in traced if g is not whole]
    assert not any(map(graphs.collectives, others))
    assert graphs.collectives(whole) == ["CollectiveReduceV2"] * 4
    sizes = graphs.collective_sizes(whole)["float32"]
    both = 2 * model.count_params()
    assert sizes.count(both) == 2 and sum(sizes) - 2 * both < 2 * both


def test_one_device_does_not_communicate():
    with graphs.traced() as traced:
        trained()
    assert not any(map(graphs.collectives, traced))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_micro_step_is_traced_once_per_replica(replicas):
    calls = []

    class Counting(tfaccum.Model):
        def train_step(self, data):
            calls.append(1)
            return super().train_step(data)

    model = trained(replicas, model_class=Counting)
    fit(model, 13, epochs=2)
    assert len(calls) == replicas


# --- Other ways to run ----------------------------------------------------


@pytest.mark.parametrize(
    "replicas, arguments",
    [
        (1, {"run_eagerly": True}),
        (2, {"run_eagerly": True}),
        (1, {"jit_compile": True}),
        (1, {"steps_per_execution": 2}),
        (2, {"steps_per_execution": 2}),
    ],
    ids=str,
)
def test_the_way_to_run_makes_no_difference(replicas, arguments):
    assert_same(trained(replicas, **arguments), trained(replicas), 1e-4, 1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_fixed_scale_is_divided_out(replicas):
    assert bits(trained(replicas, loss_scale=1024.0)) == bits(trained(replicas))


@pytest.mark.parametrize(
    "policy, scale", [("mixed_bfloat16", None), ("mixed_float16", 256.0)]
)
def test_mixed_precision(policy, scale):
    """Within what two bytes hold of the gradient."""
    expected = trained(of_fit={"epochs": 1})
    keras.config.set_dtype_policy(policy)
    found = trained(loss_scale=scale, of_fit={"epochs": 1})
    keras.config.set_dtype_policy("float32")
    for mine, theirs in zip(
        moments(found, "momentum"), moments(expected, "momentum"), strict=True
    ):
        assert mine.dtype == "float32"
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=0.03)


def table(replicas):
    keras.utils.set_random_seed(2)
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,), dtype="int32")
        vectors = keras.layers.Embedding(6, 2)(inputs)
        model = tfaccum.Model(
            inputs, keras.layers.Dense(1)(keras.layers.Flatten()(vectors))
        )
        model.compile(adama()(), "mse", micro_batch_size=2, **HOW)
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_ids_that_repeat_are_added_up_before_they_are_squared(replicas):
    """As with the same table by a product, whose gradient is dense."""
    ids = np.int32([[1, 1, 1], [0, 1, 0], [2, 2, 5], [1, 5, 1], [3, 1, 3]])
    y = np.float32([[1], [2], [3], [4], [5]])
    sparse = table(replicas)
    keras.utils.set_random_seed(2)
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3, 6))
        vectors = keras.layers.Dense(2, use_bias=False)(inputs)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(vectors))
        dense = tfaccum.Model(inputs, outputs)
        dense.compile(adama()(), "mse", micro_batch_size=2, **HOW)
    dense.set_weights(sparse.get_weights())
    how = {"batch_size": 5, "epochs": 3, "shuffle": False, "verbose": 0}
    sparse.fit(ids, y, **how)
    dense.fit(np.eye(6, dtype="float32")[ids], y, **how)
    assert sparse.table_sums == ()
    assert_same(sparse, dense, rtol=1e-4, atol=1e-6)


class Two(tfaccum.Model):
    """Two scalars with losses and optimizers of their own: d x, factor g x."""

    def __init__(self, optimizers, factor=1.0):
        super().__init__()
        self.factors = (1.0, factor)
        self.parts = [
            self.add_weight(shape=(), initializer="zeros", name=name)
            for name in "dg"
        ]
        self.optimizers = optimizers

    def train_step(self, data):
        for part, optimizer, factor in zip(
            self.parts, self.optimizers, self.factors, strict=True
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(part * data * factor)
            self.accumulate(tape, loss, tf.shape(data)[0], optimizer, [part])
        return {}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_built", [False, True])
def test_beside_an_optimizer_of_another_kind(replicas, is_built):
    """The compiled one is another; AdamA has no variables yet, or has them."""
    with toy.strategy_of(replicas).scope():
        model = Two([keras.optimizers.SGD(1.0), adama(0.5)()])
        model.compile(model.optimizers[0], micro_batch_size=1, **HOW)
        if is_built:
            model.optimizers[1].build([model.parts[1]])
    x = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 6.0, 3.0]).batch(4)
    model.fit(x, verbose=0)
    assert toy.value_of(model, model.parts[0]) == -3
    m, v = (1 - BETA_1) * 3, (1 - BETA_2) * (1 + 4 + 36 + 9) / 16
    step = 0.5 * np.sqrt(1 - BETA_2) / (1 - BETA_1) * m / np.sqrt(v)
    assert toy.value_of(model, model.parts[1]) == pytest.approx(-step, 1e-5)
    _, _, *found = (
        toy.value_of(model, v) for v in model.optimizers[1].variables
    )
    assert found == pytest.approx([m, v], rel=1e-6)
    # Of one optimizer a gradient; loss and weight of both; the examples.
    assert model.accumulator_bytes == 4 * (1 + 1 + 2 * 2 + 1)


def test_the_second_one_ends_training_too():
    """Its moments are broken, although the first one's update is made."""
    model = Two([keras.optimizers.SGD(1.0), adama()()], factor=1e38)
    model.compile(model.optimizers[0], micro_batch_size=1, **HOW)
    x = tf.data.Dataset.from_tensor_slices([1.0, 20.0]).batch(2)
    with pytest.raises(RuntimeError, match="that of two/g on replica 0"):
        model.fit(x, verbose=0)
    assert [float(part) for part in model.parts] == [-10.5, 0]


def test_another_optimizer_is_looked_at_when_traced():
    model = Two([keras.optimizers.SGD(1.0), adama()()])
    model.compile(model.optimizers[0], gradient_accumulation_steps=2)
    x = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).batch(1)
    with pytest.raises(ValueError, match="`micro_batch_size` must be an int"):
        model.fit(x, verbose=0)


def test_layers_that_communicate(float64):
    """A replica without rows takes part, and adds nothing: as with Adam."""

    def after_one_example(optimizer, **arguments):
        keras.utils.set_random_seed(4)
        with toy.strategy_of(2).scope():
            inputs = keras.Input((3,))
            norm = keras.layers.BatchNormalization(synchronized=True)
            outputs = keras.layers.Dense(1)(norm(inputs))
            model = tfaccum.Model(inputs, outputs)
            model.compile(optimizer(), "mse", **arguments)
        fit(model, 1)
        return model

    found = after_one_example(adama(), micro_batch_size=8, **HOW)
    assert_same(found, after_one_example(adam()), rtol=1e-10)


# --- Saved and resumed ----------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path, replicas):
    def run(*callbacks):
        model = model_of(
            replicas, adama(weight_decay=0.1), micro_batch_size=2, **HOW
        )
        fit(model, epochs=3, callbacks=list(callbacks))
        return bits(model)

    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(toy.Stopped):
        run(saver, toy.StopAfter(5))
    assert run(tfaccum.Checkpoint(tmp_path)) == run()


def test_saved_and_loaded_by_keras(tmp_path):
    model = trained(optimizer=adama(weight_decay=0.1, amsgrad=True))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is tfaccum.AdamA
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert bits(loaded) == bits(model)
    for each in (model, loaded):
        fit(each, 20)
    assert bits(loaded) == bits(model)
