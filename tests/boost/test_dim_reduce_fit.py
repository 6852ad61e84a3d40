"""DimReduce through `tfaccum.Model.fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.boost.test_dim_reduce import Twin
from tfaccum import boost

LAYERS = keras.layers
RNG = np.random.default_rng(8)
X = RNG.normal(size=(26, 3))
Y = X @ RNG.normal(size=(3, 2)) + RNG.normal(size=(26, 2))
SHAPES = {"d/kernel": (3, 2), "d/bias": (2,)}


def basis_of(rows, shapes):
    """One direction of all variables is one row; in reversed order."""
    ends = np.cumsum([np.prod(s, dtype=int) for s in shapes.values()])[:-1]
    parts = np.split(np.float32(rows), ends, axis=1)
    found = {
        path: part.reshape(len(rows), *shape)
        for (path, shape), part in zip(shapes.items(), parts, strict=True)
    }
    return boost.Basis(
        dict(reversed(found.items())), np.full(len(rows), 1 / len(rows))
    )


def orthonormal(n, size):
    q, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(size, n)))
    return q.T.astype("float32")


def flat(model, variables):
    return np.concatenate([toy.value_of(model, v).ravel() for v in variables])


# --- Against numpy ---------------------------------------------------------


def linear(replicas, optimizer, **how):
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,))
        model = tfaccum.Model(inputs, LAYERS.Dense(2, name="d")(inputs))
        model.compile(optimizer(), "mse", **how)
    return model


def mse(w, x, y):
    errors = x @ w[:6].reshape(3, 2) + w[6:] - y
    gradient = np.concatenate([(x.T @ errors).ravel(), errors.sum(0)])
    return np.mean(errors**2), gradient / len(x)


class States(keras.callbacks.Callback):
    """Weights and step sizes after each update."""

    def __init__(self, optimizer=None):
        super().__init__()
        self.weights, self.sizes = [], []
        self.optimizer = optimizer

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        self.weights.append(flat(model, model.trainable_variables))
        optimizer = self.optimizer or model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(optimizer, "step_size"):
            self.sizes.append(toy.value_of(model, optimizer.step_size).item())


@pytest.mark.parametrize(
    "replicas, sharded, steps, cut",
    [
        (1, False, 1, False),
        (1, False, 3, False),
        (1, True, 3, True),
        (2, False, 1, True),
        (2, False, 3, False),
        (2, True, 1, False),
        (2, True, 3, True),
    ],
)
def test_each_update_is_that_of_numpy(replicas, sharded, steps, cut):
    """The loss of the line search is that of the last micro-batch.

    The last window is short: 2 rows.
    """
    rows = orthonormal(3, 8)
    arguments = {"alpha": 0.0625, "trials": 3}
    batch = 4 * steps if cut else 4
    how = (
        {"micro_batch_size": 4 // replicas}
        if cut
        else {"gradient_accumulation_steps": steps}
    )
    model = linear(
        replicas,
        lambda: boost.DimReduce(
            basis_of(rows, SHAPES), sharded=sharded, **arguments
        ),
        **how,
    )
    twin = Twin(rows, flat(model, model.trainable_variables), **arguments)
    states = States()
    model.fit(
        X,
        Y,
        batch_size=batch,
        epochs=2,
        shuffle=False,
        callbacks=[states],
        verbose=0,
    )
    weights, sizes = [], []
    for _ in range(2):
        for first in range(0, 26, 4 * steps):
            x, y = (v[first : first + 4 * steps] for v in (X, Y))
            last = [v[(len(x) - 1) // 4 * 4 :] for v in (x, y)]
            twin.update(mse(twin.w, x, y)[1], lambda w, xy=last: mse(w, *xy)[0])
            weights.append(twin.w)
            sizes.append(twin.t)
    assert len(weights) == len(states.weights)
    np.testing.assert_allclose(states.sizes, sizes, rtol=1e-12)
    np.testing.assert_allclose(states.weights, weights, rtol=1e-7, atol=1e-9)
    assert toy.iterations_of(model) == len(weights)
    assert len(set(sizes)) > 1


# --- What trials leave behind ----------------------------------------------

DIGITS = RNG.normal(size=(22, 5)).astype("float32")
LABELS = RNG.integers(0, 3, 22)


def network(replicas, optimizer, policy="float32", **how):
    """Dropout, moving statistics, metrics, a regularizer."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((5,))
        x = LAYERS.Dense(6, name="first", kernel_regularizer="l2")(inputs)
        x = LAYERS.BatchNormalization(name="bn")(x)
        x = LAYERS.Dropout(0.5, seed=4, name="drop")(x)
        x = LAYERS.Dense(3, name="last")(x)
        outputs = LAYERS.Activation("softmax", dtype="float32")(x)
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            optimizer(model),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **how,
        )
    return model


def no_directions(model, **arguments):
    return directions(model, 0 * orthonormal(3, size_of(model)), **arguments)


def size_of(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def directions(model, rows=None, **arguments):
    if rows is None:
        rows = orthonormal(3, size_of(model))
    shapes = {v.path: tuple(v.shape) for v in model.trainable_variables}
    return boost.DimReduce(basis_of(rows, shapes), **arguments)


def fit(model, *callbacks, epochs=2, x=DIGITS):
    return model.fit(
        x,
        LABELS,
        batch_size=4,
        shuffle=False,
        epochs=epochs,
        callbacks=list(callbacks),
        verbose=0,
    ).history


@pytest.mark.parametrize(
    "replicas, steps, policy",
    [(1, 1, "float32"), (1, 3, "mixed_float16"), (2, 3, "mixed_float16")],
)
def test_trials_leave_no_trace(replicas, steps, policy):
    """Without directions all is as with SGD, after 2 trials an update.

    A trial's loss is exactly that of the old weights: both see the same
    dropout masks. So it is never less, and no step is made.
    """
    how = {"gradient_accumulation_steps": steps, "policy": policy}
    if policy == "mixed_float16":  # The first windows overflow.
        how["loss_scale"] = tfaccum.LossScale(initial=2.0**24)
    ours = network(replicas, lambda m: no_directions(m, alpha=0.05), **how)
    sgd = network(
        replicas, lambda _: keras.optimizers.SGD(0.05, momentum=0.9), **how
    )
    seen = States()
    sgd_logs = fit(sgd, epochs=4)
    logs = fit(ours, seen, epochs=4)
    assert toy.iterations_of(ours) == toy.iterations_of(sgd)
    assert set(seen.sizes) == {0.0}
    tolerance = 1e-5 if policy == "float32" else 2e-3
    for one, other in zip(ours.variables, sgd.variables, strict=True):
        mine, wanted = (
            [
                copy.numpy()
                for copy in m.distribute_strategy.experimental_local_results(
                    v.value
                )
            ]
            for m, v in ((ours, one), (sgd, other))
        )
        exact = "seed" in one.path
        np.testing.assert_allclose(
            mine, wanted, 0 if exact else tolerance, 0 if exact else tolerance
        )
    for name, values in sgd_logs.items():
        np.testing.assert_allclose(logs[name], values, rtol=tolerance)


class Two(tfaccum.Model):
    """Two layers that know nothing of each other, each with an optimizer."""

    def __init__(self, has_first):
        super().__init__()
        self.first = LAYERS.Dense(1, use_bias=False, name="first")
        self.second = LAYERS.Dense(1, use_bias=False, name="second")
        self.has_first = has_first

    def build(self, shape):
        for layer in (self.first, self.second):
            layer.build(shape)
        self.second.kernel.assign([[0.5], [-1.0], [2.0]])
        self.built = True

    def train_step(self, x):
        pairs = [(self.second, self.search)]
        if self.has_first:
            pairs.insert(0, (self.first, self.optimizer))
        for layer, optimizer in pairs:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(layer(x)[:, 0] - x[:, 0])) / 4
            self.accumulate(
                tape,
                loss,
                weight=tf.shape(x)[0],
                optimizer=optimizer,
                variables=layer.trainable_variables,
            )
        return {}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_second_optimizer_looks_at_its_own_loss(replicas):
    """As if the first one, and its loss, were not there."""
    found = []
    for has_first in (False, True):
        with toy.strategy_of(replicas).scope():
            model = Two(has_first)
            model.build((None, 3))
            path = model.second.kernel.path
            model.search = boost.DimReduce(
                basis_of(np.eye(3), {path: (3, 1)}), alpha=0.0
            )
            model.compile("sgd")
        states = States(model.search)
        model.fit(
            np.float32(X), batch_size=9, shuffle=False, verbose=0,
            callbacks=[states],
        )  # fmt: skip
        found.append(
            (toy.value_of(model, model.second.kernel).tolist(), states.sizes)
        )
    assert found[0] == found[1]
    assert max(states.sizes) > 0


def test_an_update_that_is_skipped_changes_nothing():
    x = DIGITS.copy()
    x[9] = np.nan
    model = network(1, directions)
    states = AllStates()
    model.fit(
        x, LABELS, batch_size=4, shuffle=False, verbose=0, callbacks=[states]
    )
    before, after = states.seen[1], states.seen[2]
    differs = {name for name in before if before[name] != after[name]}
    assert {
        model.variables[int(n.removeprefix("model/"))].path for n in differs
    } == {v.path for v in model.variables if "seed" in v.path}
    assert toy.iterations_of(model) == 5


# --- Saved and resumed -----------------------------------------------------


class AllStates(keras.callbacks.Callback):
    """All variables on all replicas after each update, as bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        copies = model.distribute_strategy.experimental_local_results
        kinds = {"model": model, "optimizer": model.optimizer}
        self.seen.append(
            {
                f"{kind}/{index}": [
                    c.numpy().tobytes() for c in copies(v.value)
                ]
                for kind, owner in kinds.items()
                for index, v in enumerate(owner.variables)
            }
        )


@pytest.mark.parametrize("replicas, sharded", [(1, False), (2, True)])
def test_a_run_that_goes_on_is_the_same_to_the_bit(tmp_path, replicas, sharded):
    def model():
        arguments = {"alpha": 0.05, "sharded": sharded, "trials": 8}
        return network(
            replicas,
            lambda m: saved(m, tmp_path, **arguments),
            gradient_accumulation_steps=2,
        )

    whole = AllStates()
    fit(model(), whole, epochs=3)
    for calls in (4, 3, None):
        states = AllStates()
        saver = tfaccum.Checkpoint(tmp_path / "run", save_every_updates=1)
        others = [toy.StopAfter(calls)] if calls else []
        try:
            fit(model(), states, saver, *others, epochs=3)
        except toy.Stopped:
            pass
    assert len(whole.seen) == 9
    assert states.seen == whole.seen[7:]


def saved(model, folder, **arguments):
    optimizer = directions(model)
    basis = optimizer.basis.save(folder / "basis.npz")
    return boost.DimReduce(basis.path, **arguments)


def test_a_model_is_saved_and_loaded(tmp_path):
    model = network(
        1,
        lambda m: saved(m, tmp_path, alpha=0.05, trials=8),
        "mixed_float16",
    )
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    for seed, other in zip(
        model.non_trainable_variables,
        loaded.non_trainable_variables,
        strict=True,
    ):
        other.assign(seed)  # Keras does not save a dropout's seed.
    fit(model)
    fit(loaded)
    for one, other in zip(
        [*model.trainable_variables, *model.optimizer.variables],
        [*loaded.trainable_variables, *loaded.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_a_basis_of_another_model_is_refused_before_the_first_update():
    model = network(
        1,
        lambda _: boost.DimReduce(basis_of(orthonormal(3, 8), SHAPES)),
    )
    with pytest.raises(ValueError, match="`basis` must be of the variables"):
        fit(model)


# --- Two workers -----------------------------------------------------------

WORKER = """
import json, os, sys
import keras, numpy as np, tfaccum
from tfaccum import boost
from tests.boost import test_dim_reduce_fit as job

model = job.linear_under(
    tfaccum.make_strategy(), sys.argv[1], gradient_accumulation_steps=3)
json.dump(job.trained(model), open(os.environ["TFACCUM_RESULT"], "w"))
"""


def linear_under(strategy, basis, **how):
    keras.utils.set_random_seed(3)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with strategy.scope():
        inputs = keras.Input((3,))
        model = tfaccum.Model(inputs, LAYERS.Dense(2, name="d")(inputs))
        optimizer = boost.DimReduce(basis, alpha=0.05, trials=3, sharded=True)
        model.compile(optimizer, "mse", **how)
    return model


def trained(model):
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    optimizer = model.optimizer
    variables = [*model.trainable_variables, *optimizer.variables]
    return np.concatenate([np.ravel(v.numpy()) for v in variables]).tolist()


def test_two_workers_are_two_replicas(tmp_path, run_workers):
    basis_of(orthonormal(3, 8), SHAPES).save(tmp_path / "basis.npz")
    (tmp_path / "worker.py").write_text(WORKER)
    first, second = run_workers(
        tmp_path / "worker.py",
        2,
        args=[tmp_path / "basis.npz"],
        timeout=120,
    )
    assert first.result == second.result
    model = linear_under(
        toy.strategy_of(2),
        tmp_path / "basis.npz",
        gradient_accumulation_steps=3,
    )
    np.testing.assert_allclose(first.result, trained(model), rtol=1e-9)
