"""AdaSum against a numpy twin: as a formula, in windows, on weight changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfaccum
from tests import precision, toy, workers
from tests.multi_worker import adasum_checks as twin
from tests.multi_worker import graphs
from tests.multi_worker.adasum_checks import build, fit, rows, weights
from tfaccum import adasum, callbacks
from tfaccum.boost import AdaSum

# --- The formula -----------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([1, 0], [0, 1], [1, 1]),  # Orthogonal: the sum.
        ([1, 0], [1, 0], [1, 0]),  # Equal: themselves.
        ([2, 0], [1, 0], [1.5, 0]),  # Parallel: the mean.
        ([1, 0], [-1, 0], [0, 0]),
        ([1, 0], [1, 1], [1.25, 0.75]),
        ([0, 0], [3, 4], [3, 4]),  # Nothing changes nothing.
        ([0, 0], [0, 0], [0, 0]),
    ],
)
def test_pairs_by_hand(a, b, expected):
    for first, second in ((a, b), (b, a)):
        found = adasum.pair(tf.constant(first, tf.float32), np.float32(second))
        np.testing.assert_array_equal(found, expected)


vectors = st.lists(
    st.floats(-8, 8, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3),
    min_size=4,
    max_size=4,
).map(np.float32)


@given(vectors, vectors, st.sampled_from([2.0**-60, 0.5, -4.0, 2.0**40]))
def test_pairs_are_symmetric_and_scale(a, b, factor):
    found = adasum.pair(a, b).numpy()
    np.testing.assert_array_equal(adasum.pair(b, a), found)
    # A power of two rounds nothing: not even tiny gradients are summed.
    np.testing.assert_array_equal(
        adasum.pair(np.float32(factor) * a, np.float32(factor) * b),
        np.float32(factor) * found,
    )
    expected = twin.pair(np.float64(a), np.float64(b))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_squares_beyond_float32():
    found = adasum.pair(np.float32([1e30, 0]), np.float32([1e30, 1e30]))
    np.testing.assert_allclose(found, [1.25e30, 0.75e30], rtol=1e-6)


class Updates(keras.callbacks.Callback):
    """What happened at each update."""

    def on_train_begin(self, logs=None):
        self.updates = []

    def on_train_batch_end(self, batch, logs=None):
        self.updates += self.model.last_updates


# --- In a window -----------------------------------------------------------


def trained(replicas, x, batch_size, steps, **how):
    model = build(
        toy.strategy_of(replicas),
        gradient_accumulation_steps=steps,
        **how,
    )
    fit(model, x, batch_size)
    return weights(model)


@pytest.mark.parametrize("coefficients", ["tensor", "model"])
@pytest.mark.parametrize("replicas, steps", [(2, 1), (2, 3), (4, 2)])
def test_gradients_of_whole_windows(replicas, steps, coefficients):
    """Ragged: batches of 9, the last of 1, so that replicas stay empty."""
    x = rows(37)
    found = trained(
        replicas,
        x,
        9,
        steps,
        replica_reduction=AdaSum(coefficients=coefficients),
    )
    windows = list(twin.means(x, 9, steps, replicas))
    expected = twin.by_gradients(windows, coefficients)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # Neither the mean, nor the other kind of coefficients.
    other = "model" if coefficients == "tensor" else "tensor"
    assert np.abs(twin.by_gradients(windows, other) - expected).max() > 1e-2
    mean = twin.by_gradients(windows, workers=1)
    assert np.abs(mean - expected).max() > 1e-2


def test_four_are_a_tree_and_not_a_row():
    x = rows(8, seed=4)
    found = trained(4, x, 8, 1, replica_reduction="adasum")
    parts = [part.mean(0, dtype=np.float64) for part in np.split(x, 4)]
    expected = -twin.adasum(parts)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    row = parts[0]
    for part in parts[1:]:
        row = twin.adasum([row, part])
    assert np.abs(found + row).max() > 1e-3


def test_one_worker_is_averaged_in_the_hierarchical_form():
    x = rows(37)
    found = trained(2, x, 9, 2, replica_reduction=AdaSum(hierarchical=True))
    windows = twin.means(x, 9, 2, 2)
    np.testing.assert_allclose(
        found, twin.by_gradients(windows, workers=1), rtol=1e-5
    )


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("coefficients", ["tensor", "model"])
def test_changes_of_optimizers_of_their_own(replicas, coefficients):
    x = rows(37)
    strategy = toy.strategy_of(replicas)
    model = build(
        strategy,
        twin.with_momentum,
        gradient_accumulation_steps=2,
        replica_reduction=AdaSum("delta", coefficients),
    )
    fit(model, x, 9, callbacks=[callbacks.CompareReplicas(1)])
    windows = list(twin.means(x, 9, 2, replicas))
    expected = twin.by_changes(windows, coefficients)
    np.testing.assert_allclose(weights(model), expected, rtol=1e-5)
    assert model.num_updates == len(windows) == 3
    momenta = [
        copy.numpy()
        for copy in strategy.experimental_local_results(
            model.optimizer.momentums[0].value
        )
    ]
    assert not np.array_equal(momenta[0], momenta[1])


def test_a_constraint_holds_after_changes_are_combined():
    strategy = toy.strategy_of(2)
    with strategy.scope():
        inputs = keras.Input((2,))
        layer = keras.layers.Dense(
            1,
            use_bias=False,
            kernel_initializer="zeros",
            kernel_constraint=keras.constraints.MaxNorm(1.0),
        )
        model = tfaccum.Model(inputs, layer(inputs))
        model.compile(
            keras.optimizers.SGD(1.0),
            toy.product,
            replica_reduction=AdaSum("delta"),
        )
    x = np.float32([[-2, 0], [0, -2]])
    fit(model, x, 2)
    # Each step is held at length 1; both are orthogonal, their sum is not.
    np.testing.assert_allclose(weights(model), np.sqrt([0.5, 0.5]), rtol=1e-6)


@pytest.mark.parametrize("form", ["gradient", "delta"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_replica_drops_the_window(form, bad):
    """The verdict comes first: nothing of the second window is applied."""
    x = rows(24)
    x[15] = bad  # On the second replica.
    model = build(
        toy.strategy_of(2),
        twin.with_momentum,
        gradient_accumulation_steps=2,
        replica_reduction=AdaSum(form),
    )
    seen = Updates()
    fit(model, x, 4, callbacks=[seen])
    assert [u.skipped for u in seen.updates] == [False, True, False]
    assert seen.updates[1].nonfinite_replica == 1
    good = np.concatenate([x[:8], x[16:]])
    if form == "delta":
        expected = twin.by_changes(twin.means(good, 4, 2, 2))
        np.testing.assert_allclose(weights(model), expected, rtol=1e-5)


@pytest.mark.parametrize("form", ["gradient", "delta"])
def test_under_a_loss_scale(form):
    """float16: an overflow on replica 1 halves the scale and moves nothing."""
    strategy = toy.strategy_of(2)
    with precision.policy("mixed_float16"), strategy.scope():
        inputs = keras.Input((2,))
        outputs = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros"
        )(inputs)
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(1.0),
            toy.product,
            replica_reduction=AdaSum(form),
            loss_scale=tfaccum.LossScale(initial=2.0**15),
        )
    x = np.float32([[0.25, 0], [0, 0.5], [0.25, 0.5], [60, 0.5]])
    seen = Updates()
    fit(model, x, 2, callbacks=[seen])
    assert [u.skipped for u in seen.updates] == [False, True]
    np.testing.assert_array_equal(weights(model), [-0.25, -0.5])
    assert toy.value_of(model, model.optimizer.dynamic_scale) == 2.0**14


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_gradients_that_travel_in_two_bytes(wire_dtype, magnitude):
    x = rows(8) * np.float32(magnitude)
    found = trained(
        2, x, 8, 1, replica_reduction="adasum", wire_dtype=wire_dtype
    )
    expected = twin.by_gradients(twin.means(x, 8, 1, 2))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < 2.0 ** {"bfloat16": -7, "float16": -10}[wire_dtype]


def test_logs_are_those_of_the_whole_window():
    x = rows(16)
    model = build(toy.strategy_of(2), replica_reduction="adasum")
    seen = Updates()
    fit(model, x, 8, callbacks=[seen])
    (first, second) = seen.updates
    assert (first.examples, first.weight, first.loss) == (8, 8.0, 0.0)
    w = twin.by_gradients(twin.means(x[:8], 8, 1, 2))
    np.testing.assert_allclose(second.loss, (x[8:] @ w).mean(), rtol=1e-5)
    np.testing.assert_allclose(
        first.gradient_norm, np.linalg.norm(w), rtol=1e-5
    )


def test_is_done_once_per_window():
    """One gathering of the gradients, one sum of all else, for any K."""

    def communicated(steps):
        model = build(
            toy.strategy_of(2),
            replica_reduction="adasum",
            gradient_accumulation_steps=steps,
        )
        with graphs.traced() as traced:
            fit(model, rows(16), 4)
        traced = [graph for graph in traced if graphs.operations(graph)]
        whole = max(traced, key=lambda graph: len(graphs.operations(graph)))
        return sorted(graphs.collectives(whole))

    once = communicated(2)
    assert once == communicated(4)
    # On each of two replicas; TensorFlow gathers the numbers of rows first.
    assert once == ["CollectiveGatherV2"] * 4 + ["CollectiveReduceV2"] * 2


def test_one_replica_is_the_law():
    x = rows(37)
    with_adasum = trained(1, x, 9, 2, replica_reduction="adasum")
    np.testing.assert_array_equal(with_adasum, trained(1, x, 9, 2))


# --- On two workers --------------------------------------------------------


@pytest.mark.parametrize("local", [1, 2])
def test_two_workers(local, tmp_path):
    """With one replica each, and with two: the means of workers differ."""
    results = workers.run_checks(
        "adasum_checks", ["every_kind"], tmp_path, replicas=local
    )
    found = workers.same(results, "every_kind")
    for form, expected in (
        ("gradient", twin.by_gradients),
        ("delta", twin.by_changes),
    ):
        for hierarchical in (False, True):
            windows = twin.means(rows(37), 9, 2, 2 * local)
            np.testing.assert_allclose(
                found[f"{form} {hierarchical}"],
                expected(windows, workers=2 if hierarchical else None),
                rtol=1e-5,
            )


# --- Saved and resumed -----------------------------------------------------


def test_moments_of_each_replica_are_resumed(tmp_path):
    """Stopped after epoch 1 and gone on with: the same bits."""

    def run(directory, *epochs):
        for end in epochs:
            model = build(
                toy.strategy_of(2),
                twin.with_momentum,
                replica_reduction=AdaSum("delta"),
            )
            checkpoint = tfaccum.Checkpoint(directory, save_every_updates=1)
            fit(model, rows(24), 8, epochs=end, callbacks=[checkpoint])
        return weights(model)

    whole = run(tmp_path / "whole", 3)
    np.testing.assert_array_equal(run(tmp_path / "parts", 1, 3), whole)


def test_a_compiled_model_is_saved_and_loaded(tmp_path):
    chosen = AdaSum("delta", "model", hierarchical=True)
    model = build(toy.strategy_of(1), replica_reduction=chosen)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"product": toy.product}
    )
    assert loaded.replica_reduction == chosen
    assert loaded.adasum == chosen


# --- What is refused -------------------------------------------------------


def test_three_replicas_are_refused():
    with pytest.raises(ValueError, match="Received: 3 replicas.*Use 2 or 4"):
        build(toy.strategy_of(3), replica_reduction="adasum")
    # One worker is a power of two.
    build(toy.strategy_of(3), replica_reduction=AdaSum(hierarchical=True))


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"form": "weights"}, "form='weights'"),
        ({"coefficients": "layer"}, "coefficients='layer'"),
        ({"hierarchical": "yes"}, "hierarchical='yes'"),
    ],
)
def test_bad_arguments(arguments, name):
    with pytest.raises(ValueError, match=f"Received: {name}"):
        AdaSum(**arguments)


@pytest.mark.parametrize("value", ["sum", None, AdaSum])
def test_what_is_no_reduction_is_refused(value):
    with pytest.raises(ValueError, match="Received: replica_reduction="):
        build(toy.strategy_of(1), replica_reduction=value)


def test_scales_by_group_are_refused():
    strategy = toy.strategy_of(2)
    with strategy.scope():
        groups = tfaccum.GroupLossScale([["a"], ["b"]])
    with pytest.raises(ValueError, match="tfaccum.GroupLossScale, and"):
        build(strategy, replica_reduction="adasum", loss_scale=groups)
