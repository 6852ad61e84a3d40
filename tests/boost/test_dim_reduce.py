"""DimReduce against numpy, one update after the other."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import toy
from tfaccum import boost

SHAPES = {"a": (3, 2), "b": (4,)}
SIZE = 10
# (replicas, whether the basis is sharded over them)
CASES = [(1, False), (1, True), (2, False), (2, True)]


class Twin:
    """The formulas, on one vector of weights."""

    def __init__(self, rows, weights, rho=0.55, gamma=0.9, alpha=0.001,
                 sigma=0.4, trials=2, fallback="zero"):  # fmt: skip
        self.P, self.w = rows.astype(np.float64), weights.copy()
        self.rho, self.gamma, self.sigma = rho, gamma, sigma
        self.alpha = float(np.float32(alpha))  # As every learning rate.
        self.trials, self.fallback = trials, fallback
        n = len(rows)
        self.B, self.s, self.last = np.eye(n), np.zeros(n), None
        self.m, self.t = np.zeros_like(weights), 0.0

    def update(self, g, f):
        gk = self.P @ g
        B = self.B
        if self.last is not None:
            y = gk - self.last
            c = y @ self.s
            if c > 1e-20:
                T = np.eye(len(B)) - np.outer(y, self.s) / c
                B = T.T @ B @ T + np.outer(self.s, self.s) / c
        d = -B @ gk
        before = f(self.w)
        for k in range(self.trials):
            t = self.rho**k
            after = f(self.w + t * self.P.T @ d)
            if after < before + self.sigma * t * (gk @ d):
                break
        else:
            takes = self.fallback == "smallest" and np.isfinite(after)
            t = t if takes else 0.0
        self.m = self.gamma * self.m + (g - self.P.T @ gk)
        self.w = self.w + t * self.P.T @ d - self.alpha * self.m
        self.t = t
        if t:
            self.B, self.s, self.last = B, t * d, gk


class Quadratic:
    """f(w) = w A w / 2 - b w, with A positive definite."""

    def __init__(self, A=None):
        rng = np.random.default_rng(3)
        root = rng.normal(size=(SIZE, SIZE))
        self.A = root @ root.T / 10 if A is None else A
        self.b, self.start = rng.normal(size=(2, SIZE))

    def __call__(self, w):
        return w @ self.A @ w / 2 - self.b @ w

    def gradient(self, w):
        return self.A @ w - self.b


def split(vector):
    parts = np.split(vector, [6], axis=-1)
    return [
        part.reshape(*vector.shape[:-1], *shape)
        for part, shape in zip(parts, SHAPES.values(), strict=True)
    ]


def orthonormal(n, seed=1):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(SIZE, n)))
    return q.T.astype("float32")


def basis_of(rows):
    """In another order than the optimizer's variables."""
    a, b = split(rows)
    return boost.Basis({"b": b, "a": a}, np.full(len(rows), 1 / len(rows)))


class Updates:
    """An optimizer with two variables, and losses by numpy."""

    def __init__(self, rows, start, f, replicas=1, dtype="float64",
                 constraint=None, **arguments):  # fmt: skip
        self.distribute_strategy = toy.strategy_of(replicas)
        self.f, self.dtype, self.num_losses = f, dtype, 0
        with self.distribute_strategy.scope():
            self.variables = [
                keras.Variable(value, dtype=dtype, name=name)
                for name, value in zip(SHAPES, split(start), strict=True)
            ]
            for variable in self.variables:
                variable.constraint = constraint
            self.optimizer = boost.DimReduce(basis_of(rows), **arguments)
            self.optimizer.build(self.variables)
        self.traced = tf.function(self.apply, autograph=False)

    def apply(self, gradients):
        self.optimizer.apply_with_losses(
            self.distribute_strategy, gradients, self.variables, self.losses
        )

    def losses(self):
        def of_replica():
            parts = [tf.reshape(v.value, [-1]) for v in self.variables]
            loss = tf.numpy_function(self.loss, parts, tf.float64)
            return tf.ensure_shape(loss, [])

        found = self.distribute_strategy.run(of_replica)
        return self.distribute_strategy.reduce("MEAN", found, axis=None)

    def loss(self, *parts):
        self.num_losses += 1
        return np.float64(self.f(np.concatenate(parts).astype(np.float64)))

    def update(self, g):
        self.traced([tf.constant(p, self.dtype) for p in split(g)])

    def flat(self, variables):
        values = [toy.value_of(self, v) for v in variables]
        return np.concatenate([value.ravel() for value in values])

    def state(self):
        """Values that have to be the same on every replica."""
        optimizer = self.optimizer
        return {
            "w": self.flat(self.variables),
            "m": self.flat(optimizer.residuals),
            "B": toy.value_of(self, optimizer.inverse_hessian),
            "s": toy.value_of(self, optimizer.last_step),
            "last": toy.value_of(self, optimizer.last_gradient),
            "t": toy.value_of(self, optimizer.step_size),
        }

    def assert_is(self, twin, tolerance=1e-9):
        last = np.zeros_like(twin.s) if twin.last is None else twin.last
        wanted = {**{n: getattr(twin, n) for n in "wmBst"}, "last": last}
        for name, value in self.state().items():
            np.testing.assert_allclose(
                value, wanted[name], tolerance, tolerance, err_msg=name
            )


# --- The formulas ----------------------------------------------------------


@pytest.mark.parametrize("fallback", ["zero", "smallest"])
@pytest.mark.parametrize("replicas, sharded", CASES)
def test_every_update_is_that_of_numpy(replicas, sharded, fallback):
    """5 directions on 2 replicas: one row of zeros is added, none is lost."""
    f, rows, rng = Quadratic(), orthonormal(5), np.random.default_rng(5)
    how = {"alpha": 0.05, "fallback": fallback, "trials": 2, "rho": 0.4}
    updates = Updates(
        rows, f.start, f, replicas=replicas, sharded=sharded, **how
    )
    twin = Twin(rows, f.start, **how)
    sizes = []
    for number in range(1, 13):
        g = f.gradient(twin.w) + 0.3 * rng.normal(size=SIZE)
        twin.update(g, f)
        updates.update(g)
        updates.assert_is(twin)
        assert toy.iterations_of(updates) == number
        sizes.append(twin.t)
    # Each branch was taken.
    assert set(sizes) == ({1, 0.4, 0} if fallback == "zero" else {1, 0.4})
    assert 12 * 2 < updates.num_losses / replicas < 12 * 3


def test_float32_follows_float64():
    f, rows = Quadratic(), orthonormal(4)
    updates = Updates(rows, f.start, f, dtype="float32")
    twin = Twin(rows, f.start)
    for _ in range(4):
        g = f.gradient(twin.w)
        twin.update(g, f)
        updates.update(g)
        updates.assert_is(twin, 1e-4)
    assert {v.dtype for v in updates.optimizer.variables[2:]} == {"float32"}


def test_losses_are_looked_at_only_until_one_is_accepted():
    f, rows = Quadratic(np.eye(SIZE)), orthonormal(3)
    updates = Updates(rows, f.start, f, trials=7)
    updates.update(f.gradient(f.start))
    assert updates.num_losses == 2


def test_slices_are_added_up():
    f, rows = Quadratic(), orthonormal(3)
    updates, twin = Updates(rows, f.start, f), Twin(rows, f.start)
    values = np.float64([[1, 2], [3, 4], [5, 6]])
    b = np.float64([1, 0, 0, 2])
    slices = tf.IndexedSlices(
        tf.constant(values), tf.constant([2, 0, 2]), tf.constant([3, 2])
    )
    updates.traced([slices, tf.constant(b)])
    twin.update(np.concatenate([[3, 4, 0, 0, 6, 8], b]), f)
    updates.assert_is(twin)


def test_variables_without_a_gradient_stay():
    f, rows = Quadratic(), orthonormal(3)
    updates = Updates(rows, f.start, f)
    (a, _), variables = split(f.gradient(f.start)), updates.variables
    updates.optimizer.apply_with_losses(
        updates.distribute_strategy, [a], variables[:1], updates.losses
    )
    assert np.abs(variables[0].numpy() - split(f.start)[0]).max() > 1e-3
    np.testing.assert_array_equal(variables[1].numpy(), split(f.start)[1])


# --- On a quadratic --------------------------------------------------------


@pytest.mark.parametrize("replicas, sharded", CASES)
def test_check_12_the_secant_equation(replicas, sharded):
    """B y = s after each update of B, and B stays symmetric and positive."""
    f, rows = Quadratic(), orthonormal(4)
    updates = Updates(
        rows, f.start, f, replicas=replicas, sharded=sharded, trials=9
    )
    updates.update(f.gradient(f.start))
    for _ in range(5):
        before = updates.state()
        updates.update(f.gradient(before["w"]))
        after = updates.state()
        assert after["t"] > 0
        y = after["last"] - before["last"]
        B = after["B"]
        np.testing.assert_allclose(B @ y, before["s"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(B, B.T, atol=1e-9)
        assert np.linalg.eigvalsh(B).min() > 0


def test_check_12_no_curvature_leaves_B_as_it_is():
    """The gradient is constant: y = 0; and turns around: c < 0."""
    g = np.ones(SIZE)
    updates = Updates(orthonormal(4), np.zeros(SIZE), lambda w: g @ w)
    for gradient in (g, g, 2 * g):
        updates.update(gradient)
        assert updates.state()["t"] == 1
        np.testing.assert_array_equal(updates.state()["B"], np.eye(4))


def test_the_minimum_of_the_subspace_is_found():
    """alpha = 0. One step where P A P' is I; else faster than linearly."""
    rows = orthonormal(4)
    inside = rows.astype("float64").T @ rows
    f = Quadratic(np.eye(SIZE) + 3 * (np.eye(SIZE) - inside))
    updates = Updates(rows, f.start, f, alpha=0)
    updates.update(f.gradient(f.start))
    gradient = rows @ f.gradient(updates.state()["w"])
    np.testing.assert_allclose(gradient, 0, atol=1e-6)

    f = Quadratic()
    updates = Updates(rows, f.start, f, alpha=0, trials=20)
    norms = []
    for _ in range(30):
        g = f.gradient(updates.state()["w"])
        norms.append(np.linalg.norm(rows @ g))
        updates.update(g)
        if norms[-1] < 1e-7:
            break
    assert norms[-1] < 1e-7 < norms[-2]  # As far as float64 losses can tell.
    assert norms[-2] / norms[-3] < 0.1
    P = rows.astype(np.float64)
    nearest = np.linalg.solve(P @ f.A @ P.T, P @ (f.b - f.A @ f.start))
    np.testing.assert_allclose(
        updates.state()["w"], f.start + P.T @ nearest, atol=1e-6
    )


def test_n_steps_suffice_where_the_line_search_is_nearly_exact():
    """With sigma = 1/2 a step is accepted on this side of the minimum only.

    Steps that shrink by 1 % find it nearly, and after as many updates as the
    subspace has dimensions, and not before, the loss is at its minimum there.
    """
    rng = np.random.default_rng(5)
    axes, _ = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))
    # Not flatter than 1, so that the first step, t = 1, is not too short.
    f = Quadratic(axes @ np.diag(np.linspace(1, 4, SIZE)) @ axes.T)
    rows = orthonormal(4)
    P = rows.astype(np.float64)
    nearest = np.linalg.solve(P @ f.A @ P.T, P @ (f.b - f.A @ f.start))
    least = f(f.start + P.T @ nearest)
    updates = Updates(
        rows, f.start, f, alpha=0, sigma=0.5, rho=0.99, trials=200
    )
    above = []
    for _ in range(4):
        updates.update(f.gradient(updates.state()["w"]))
        assert updates.state()["t"] > 0
        left = f(updates.state()["w"]) - least
        above.append(left / (f(f.start) - least))
    assert above[-1] < 1e-5 < above[-2]


# --- Its limits ------------------------------------------------------------


@pytest.mark.parametrize("replicas, sharded", CASES)
def test_check_13_without_directions_it_is_sgd(replicas, sharded):
    f, rows = Quadratic(), np.zeros([3, SIZE], np.float32)
    updates = Updates(
        rows, f.start, f, replicas=replicas, sharded=sharded, alpha=0.05
    )
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    weights = keras.Variable(f.start, dtype="float64")
    for _ in range(6):
        g = f.gradient(weights.numpy())
        updates.update(g)
        sgd.apply([tf.constant(g)], [weights])
        # Keras casts its 0.9 by way of float32.
        np.testing.assert_allclose(
            updates.state()["w"], weights.numpy(), rtol=1e-6
        )


@pytest.mark.parametrize("replicas, sharded", CASES)
def test_check_13_without_alpha_weights_stay_in_the_subspace(replicas, sharded):
    f, rows = Quadratic(), orthonormal(4)
    updates = Updates(
        rows, f.start, f, replicas=replicas, sharded=sharded, alpha=0, trials=9
    )
    for _ in range(4):
        updates.update(f.gradient(updates.state()["w"]))
    P = rows.astype(np.float64)
    change = updates.state()["w"] - f.start
    assert np.linalg.norm(P @ change) > 0.1
    np.testing.assert_allclose(change, P.T @ (P @ change), atol=1e-6)


@pytest.mark.parametrize(
    "replicas, sharded, bad",
    [
        (1, False, 1.0),
        (1, False, float("nan")),
        (2, False, float("inf")),
        (2, True, 1.0),
    ],
)
def test_check_14_a_line_search_that_fails(replicas, sharded, bad):
    """B, s and g_last stay; the weights move by -alpha m only."""
    f, rows = Quadratic(), orthonormal(4)
    updates = Updates(
        rows, f.start, f, replicas=replicas, sharded=sharded, trials=9
    )
    for _ in range(3):
        updates.update(f.gradient(updates.state()["w"]))
    before = updates.state()
    assert before["t"] > 0
    updates.f = lambda w: 0 if np.array_equal(w, before["w"]) else bad
    updates.update(f.gradient(before["w"]))
    after = updates.state()
    for name in ("B", "s", "last"):
        np.testing.assert_array_equal(before[name], after[name])
    assert after["t"] == 0 and np.abs(after["m"]).max() > 0
    alpha = np.float64(np.float32(0.001))
    np.testing.assert_allclose(
        after["w"], before["w"] - alpha * after["m"], rtol=1e-12
    )


@pytest.mark.parametrize(
    "after, size", [(1.0, 0.3), (float("nan"), 0), (float("inf"), 0)]
)
def test_the_smallest_step_is_taken_if_its_loss_is_finite(after, size):
    f, rows = Quadratic(), orthonormal(4)
    updates = Updates(
        rows,
        f.start,
        lambda w: 0 if np.array_equal(w, f.start) else after,
        fallback="smallest",
        rho=0.3,
        alpha=0,
    )
    g = f.gradient(f.start)
    updates.update(g)
    P = rows.astype(np.float64)
    state = updates.state()
    assert state["t"] == size
    np.testing.assert_allclose(state["s"], -size * P @ g, rtol=1e-12)
    np.testing.assert_allclose(
        state["w"], f.start - size * P.T @ (P @ g), rtol=1e-12
    )


def test_a_state_that_is_lost_does_not_reach_the_weights():
    """0 times infinity is not 0."""
    f, rows = Quadratic(), orthonormal(2)
    updates = Updates(rows, f.start, f, alpha=0)
    updates.optimizer.inverse_hessian.assign(np.full((2, 2), np.inf))
    updates.update(f.gradient(f.start))
    np.testing.assert_array_equal(updates.state()["w"], f.start)


def test_constraints_hold_after_each_update():
    """The trials are without them."""
    f, rows = Quadratic(), orthonormal(4)
    start = 0.1 * np.abs(f.start)
    updates = Updates(
        rows, start, f, constraint=keras.constraints.NonNeg(), trials=9
    )
    twin = Twin(rows, start, trials=9)
    g = f.gradient(start)
    twin.update(g, f)
    updates.update(g)
    assert (twin.w < 0).any()
    np.testing.assert_allclose(
        updates.state()["w"], np.maximum(twin.w, 0), rtol=1e-9, atol=1e-12
    )


def test_sharded_replicas_hold_a_part_of_the_rows():
    updates = Updates(
        orthonormal(5), np.zeros(SIZE), lambda w: 0, replicas=2, sharded=True
    )
    strategy = updates.distribute_strategy
    rows = [m for m in updates.optimizer.subspace.matrices.values()]
    shapes = {
        tuple(copy.shape)
        for matrix in rows
        for copy in strategy.experimental_local_results(matrix)
    }
    assert shapes == {(3, 6), (3, 4)}


# --- Saving ----------------------------------------------------------------


def test_the_basis_is_no_part_of_the_state():
    updates = Updates(orthonormal(3), np.zeros(SIZE), lambda w: 0)
    shapes = [tuple(v.shape) for v in updates.optimizer.variables]
    assert shapes == [(), (), (3, 2), (4,), (3, 3), (3,), (3,), ()]


def test_config(tmp_path):
    basis = basis_of(orthonormal(3))
    with pytest.raises(NotImplementedError, match="must be in a file"):
        boost.DimReduce(basis).get_config()
    basis = basis.save(tmp_path / "basis.npz")
    arguments = {
        "rho": 0.5,
        "gamma": 0.8,
        "sigma": 0.3,
        "trials": 4,
        "fallback": "smallest",
        "sharded": True,
        "name": "second",
    }
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    for given in (basis, tmp_path / "basis.npz", str(tmp_path / "basis.npz")):
        for alpha in (0.0, 0.25, schedule):
            made = boost.DimReduce(given, alpha=alpha, **arguments)
            config = keras.saving.serialize_keras_object(made)
            loaded = keras.saving.deserialize_keras_object(config)
            assert loaded.get_config() == made.get_config()
            assert {n: getattr(loaded, n) for n in arguments} == arguments
    basis_of(orthonormal(3, seed=2)).save(tmp_path / "basis.npz")
    with pytest.raises(ValueError, match="file with which.*Received: basis="):
        keras.saving.deserialize_keras_object(config)


# --- Errors ----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"rho": 1.0}, ValueError, r"`rho` must be in \(0, 1\). Received"),
        ({"rho": 0}, ValueError, "`rho`"),
        ({"gamma": 1.0}, ValueError, r"`gamma` must be in \[0, 1\). Received"),
        ({"gamma": -0.1}, ValueError, "`gamma`"),
        ({"sigma": 0.0}, ValueError, "`sigma`.*Received: sigma=0.0"),
        ({"sigma": 1}, ValueError, "`sigma`"),
        ({"alpha": -1}, ValueError, "`alpha`.*Received: alpha=-1"),
        ({"alpha": float("nan")}, ValueError, "`alpha`"),
        ({"trials": 0}, ValueError, "`trials` must be at least 1. Received"),
        ({"trials": 1.5}, TypeError, "`trials` must be an int. Received"),
        ({"fallback": "none"}, ValueError, "`fallback`.*'zero'.*Received"),
        ({"basis": 3}, TypeError, "`basis` must be a .*Received: basis=3"),
        ({"basis": "nowhere.npz"}, ValueError, "`basis`.*nowhere.npz"),
    ],
)
def test_arguments_are_checked(arguments, error, match):
    arguments = {"basis": basis_of(orthonormal(2)), **arguments}
    with pytest.raises(error, match=match):
        boost.DimReduce(**arguments)


@pytest.mark.parametrize(
    "names, shape",
    [("ac", (4,)), ("ab", (2, 2)), ("aa", (4,)), ("a", None), ("abc", (4,))],
)
def test_other_variables_are_refused(names, shape):
    shapes = [(3, 2), shape, (1,)]
    variables = [
        keras.Variable(np.zeros(shapes[i]), name=name)
        for i, name in enumerate(names)
    ]
    optimizer = boost.DimReduce(basis_of(orthonormal(2)))
    with pytest.raises(ValueError, match="`basis` must be of the variables"):
        optimizer.build(variables)


def test_keras_own_way_to_apply_is_refused():
    optimizer = boost.DimReduce(basis_of(orthonormal(2)))
    with pytest.raises(RuntimeError, match=r"tfaccum\.Model\.fit"):
        optimizer.apply([tf.zeros(2)], [keras.Variable(np.zeros(2))])
