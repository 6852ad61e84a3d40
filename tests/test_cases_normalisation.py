"""Cases A: every example counts with its own weight, wherever it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests.toy import (
    Product,
    batches,
    fit,
    iterations_of,
    product,
    scalar,
    strategy_of,
    toy,
    value_of,
    weight_of,
    weights_of,
)

PADDING = -1.0


def masked():
    """Layers for T over tokens, where PADDING does not count."""
    return [keras.layers.Masking(PADDING), scalar()]


# --- A1: micro-batches of different size -----------------------------------


@pytest.mark.parametrize(
    "replicas, eager",
    [(1, False), (2, False), (4, False), (1, True), (2, True)],
)
def test_A1_ragged_dataset_batches(replicas, eager):
    model = toy(replicas, gradient_accumulation_steps=2, run_eagerly=eager)
    seen = fit(model, batches([1] * 4 * replicas, [4] * 2 * replicas))
    # 12 / 6, where the mean of the means is 2.5 and their sum 5.
    assert weight_of(model) == -2
    (update,) = seen.updates
    assert update.examples == update.weight == 6 * replicas
    assert update.gradient_norm == 2
    assert seen.iterations == [1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_A1_ragged_cuts_of_one_batch(replicas):
    model = toy(replicas, micro_batch_size=2)
    # Cut on one replica into 1,1 | 1,4 | 4; on two into 1,1 1 | 4 4.
    seen = fit(model, batches([1, 1, 1, 4, 4]))
    assert weight_of(model) == pytest.approx(-11 / 5, abs=1e-6)
    assert seen.iterations == [1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_A1_both_ways_at_once(replicas):
    model = toy(replicas, micro_batch_size=2, gradient_accumulation_steps=2)
    seen = fit(model, batches([1, 1, 1, 1, 1], [4, 4], [7]))
    assert seen.weights[0] == [pytest.approx(-13 / 7, abs=1e-6)]
    assert seen.weights[1] == [pytest.approx(-13 / 7 - 7, abs=1e-6)]
    assert seen.of_updates("examples") == [7, 1]


def test_A1_logged_loss_is_that_of_the_whole_window():
    model = toy(start=3, gradient_accumulation_steps=2)
    seen = fit(model, batches([1, 1, 1, 1], [4, 4]))
    assert seen.logs["loss"] == [6]
    assert seen.updates[0].loss == 6


# --- A2: replicas with different numbers of tokens -------------------------

# One valid 8; seven valid zeros.
A2_ROWS = [[8] + [PADDING] * 7, [0] * 7 + [PADDING]]


@pytest.mark.parametrize("eager", [False, True])
def test_A2_tokens_count_and_not_replicas(eager):
    model = toy(2, layers=masked, shape=(8, 1), run_eagerly=eager)
    seen = fit(model, batches(A2_ROWS))
    # 8 / 8, where the mean of the replicas is 4.
    assert weight_of(model) == pytest.approx(-1, abs=1e-6)
    assert seen.updates[0].weight == 8
    assert seen.updates[0].examples == 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_A2_tokens_count_and_not_micro_steps(replicas):
    model = toy(
        replicas, layers=masked, shape=(8, 1), gradient_accumulation_steps=2
    )
    rows = np.repeat(np.array(A2_ROWS), replicas, axis=0)
    fit(model, batches(rows[:replicas], rows[replicas:]))
    assert weight_of(model) == pytest.approx(-1, abs=1e-6)


A2_WORKER = """
import json
import os

import tfaccum

strategy = tfaccum.make_strategy()

from tests.test_cases_normalisation import A2_ROWS, masked
from tests.toy import batches, fit, toy, weight_of

weights = []
for steps, dataset in (
    (1, batches(A2_ROWS)),
    # Worker 0 gets 8, 0..., 8; worker 1 gets 0..., nothing.
    (3, batches(A2_ROWS, A2_ROWS[1:], A2_ROWS[:1])),
):
    model = toy(
        strategy=strategy,
        layers=masked,
        shape=(8, 1),
        gradient_accumulation_steps=steps,
    )
    fit(model, dataset)
    weights.append(weight_of(model))
with open(os.environ["TFACCUM_RESULT"], "w") as file:
    json.dump(weights, file)
"""


def test_A2_tokens_count_and_not_workers(tmp_path, run_workers):
    script = tmp_path / "worker.py"
    script.write_text(A2_WORKER)
    for worker in run_workers(script, 2, timeout=120):
        # 8 / 8; then (8 + 8) / (1 + 7 + 7 + 1).
        assert worker.result == pytest.approx([-1, -1], abs=1e-6)


# --- A4: token means, and nothing but padding ------------------------------

A4_ROWS = [
    [1, 1, 1],
    [5, PADDING, PADDING],
    [PADDING, PADDING, PADDING],
]


@pytest.mark.parametrize(
    "replicas, steps, cut",
    [
        (1, 3, None),
        (2, 1, 1),
        (4, 1, None),
        pytest.param(1, 1, 1, marks=pytest.mark.slow),
        pytest.param(2, 3, None, marks=pytest.mark.slow),
    ],
)
def test_A4_token_mean_is_over_all_tokens(replicas, steps, cut):
    model = toy(
        replicas,
        layers=masked,
        shape=(3, 1),
        gradient_accumulation_steps=steps,
        micro_batch_size=cut,
    )
    rows = [[row] for row in A4_ROWS] if steps == 3 else [A4_ROWS]
    seen = fit(model, batches(*rows))
    # (3 * 1 + 1 * 5) / 4, where the mean of the means is 2 or 3.
    assert weight_of(model) == pytest.approx(-2, abs=1e-6)
    assert seen.updates[0].weight == 4


@pytest.mark.parametrize("eager", [False, True])
def test_A4_tokens_count_without_a_mask_too(eager):
    """Batches of sequences of their own length, and no padding."""
    model = toy(
        shape=(None, 1), gradient_accumulation_steps=2, run_eagerly=eager
    )
    short = np.full([1, 2, 1], 1, np.float32)
    long = np.full([1, 4, 1], 5, np.float32)
    dataset = tf.data.Dataset.from_generator(
        lambda: [(short, short), (long, long)],
        output_signature=(tf.TensorSpec([None, None, 1], tf.float32),) * 2,
    )
    seen = fit(model, dataset)
    # Keras divides the loss by the number of tokens, 2 and 4.
    assert weight_of(model) == pytest.approx(-(2 * 1 + 4 * 5) / 6, abs=1e-6)
    assert seen.updates[0].weight == 6


@pytest.mark.parametrize(
    "replicas, steps, eager",
    [
        (1, 1, False),
        (1, 2, False),
        (2, 2, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(1, 2, True, marks=pytest.mark.slow),
    ],
)
def test_A4_window_of_padding_changes_nothing(replicas, steps, eager):
    def momentum_on_a_schedule():
        rate = keras.optimizers.schedules.PiecewiseConstantDecay(
            [0, 1, 2], [1.0, 2.0, 4.0, 8.0]
        )
        return keras.optimizers.SGD(
            rate, momentum=0.5, weight_decay=0.0, use_ema=True
        )

    model = toy(
        replicas,
        layers=masked,
        shape=(3, 1),
        optimizer=momentum_on_a_schedule,
        gradient_accumulation_steps=steps,
        run_eagerly=eager,
    )
    good, padding = [A4_ROWS[0]] * 2, [A4_ROWS[2]] * 2
    rows = [good] * steps + [padding] * steps + [good]
    with pytest.warns(UserWarning, match="total weight of zero") as warned:
        seen = fit(model, batches(*rows))
    assert len(warned) == 1
    assert seen.iterations == [1, 1, 2]
    assert seen.of_updates("update") == [1, 1, 2]
    assert seen.of_updates("weight") == [6 * steps, 0, 6]
    assert seen.of_updates("skipped") == [False] * 3
    before, after, last = seen.optimizer_states
    for value, other in zip(before, after, strict=True):
        assert np.array_equal(value, other)
    # Momentum: -1 at rate 1; then 0.5 * -1 - 1 at rate 2 makes -2.5.
    assert seen.weights == [[-1], [-1], [-3.5]]
    assert np.isfinite(np.hstack([value.ravel() for value in last])).all()
    assert np.isfinite(seen.logs["loss"]).all()


# --- A5: auxiliary losses --------------------------------------------------


class Penalised(keras.layers.Layer):
    """w * x, with 0.1 * w ** 2 added to the loss."""

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones", name="w")

    def call(self, inputs):
        self.add_loss(0.1 * self.w**2)
        return self.w * inputs


def penalised():
    return [Penalised()]


def regularised():
    return [scalar(1, kernel_regularizer=keras.regularizers.L2(0.1))]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(penalised, id="add_loss"),
        pytest.param(regularised, id="regularizer", marks=pytest.mark.slow),
    ],
)
def test_A5_added_loss_counts_once(layers, replicas, steps):
    model = toy(replicas, layers=layers, gradient_accumulation_steps=steps)
    parts = [[1], [2, 3], [4, 5, 6], [7, 8]]
    seen = fit(
        model, batches(*parts) if steps == 4 else batches(sum(parts, []))
    )
    # From w = 1 with gradient mean(x) + 2 * 0.1 * w = 4.5 + 0.2.
    assert seen.iterations == [1]
    assert weight_of(model) == pytest.approx(1 - 4.7, abs=1e-6)
    assert seen.updates[0].loss == pytest.approx(4.5 + 0.1, abs=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_A5_activity_regularizer(replicas):
    def layers():
        return [scalar(1, activity_regularizer=keras.regularizers.L2(0.1))]

    model = toy(replicas, layers=layers, micro_batch_size=2)
    fit(model, batches([1, 2, 3, 4, 5]))
    # The mean over examples of w * x + 0.1 * (w * x) ** 2, from w = 1.
    assert weight_of(model) == pytest.approx(1 - (3 + 0.2 * 11), abs=1e-6)


@pytest.mark.parametrize("replicas, steps", [(1, 2), (2, 1)])
def test_A5_regularizer_beside_a_mean_over_tokens(replicas, steps):
    def layers():
        return [keras.layers.Masking(PADDING), *regularised()]

    model = toy(
        replicas,
        layers=layers,
        shape=(8, 1),
        gradient_accumulation_steps=steps,
    )
    rows = [A2_ROWS] if steps == 1 else [[row] for row in A2_ROWS]
    fit(model, batches(*rows))
    assert weight_of(model) == pytest.approx(1 - (1 + 0.2), abs=1e-6)


# --- A7: terms that are divided by different numbers -----------------------

REFUSED = "All terms of the loss must be divided by the same number"


def two_outputs(
    replicas=1, *, left=product, right=product, masks=(True, False), **compiled
):
    """Two scalars, each over tokens of its own, masked or not."""
    with strategy_of(replicas).scope():
        inputs, outputs = {}, {}
        for name, is_masked in zip(("left", "right"), masks, strict=True):
            inputs[name] = value = keras.Input((2, 1), name=name)
            if is_masked:
                value = keras.layers.Masking(PADDING)(value)
            outputs[name] = scalar(name=f"w_{name}")(value)
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            optimizer=keras.optimizers.SGD(1.0),
            loss={"left": left, "right": right},
            **compiled,
        )
    return model


def two_inputs(*parts):
    """A dataset of (left, right) batches, each a list of token lists."""

    def generate():
        for left, right in parts:
            x = {
                "left": np.array(left, np.float32)[..., None],
                "right": np.array(right, np.float32)[..., None],
            }
            yield x, x

    spec = dict.fromkeys(
        ("left", "right"), tf.TensorSpec([None, 2, 1], tf.float32)
    )
    return tf.data.Dataset.from_generator(
        generate, output_signature=(spec, spec)
    )


def left_and_right(model):
    """Both weights, by name."""
    values = {v.path.split("/")[-2]: v for v in model.trainable_variables}
    return [value_of(model, values[n]).item() for n in ("w_left", "w_right")]


# Left: 1, 2, 6 and one padding over both; right: 1..6.
A7_PARTS = (
    ([[1, 2], [6, PADDING]], [[1, 2], [3, 4]]),
    ([[9, 9]], [[5, 6]]),
)


@pytest.mark.parametrize(
    "replicas, accumulation, eager",
    [
        (1, {"gradient_accumulation_steps": 2}, False),
        (1, {"micro_batch_size": 1}, False),
        (2, {}, False),
        (2, {}, True),
    ],
)
def test_A7_different_divisors_are_refused(replicas, accumulation, eager):
    model = two_outputs(replicas, run_eagerly=eager, **accumulation)
    with pytest.raises(ValueError, match=REFUSED):
        model.fit(two_inputs(*A7_PARTS), verbose=0)
    assert left_and_right(model) == [0, 0]
    assert iterations_of(model) == 0


@pytest.mark.parametrize(
    "replicas, accumulation",
    [
        (1, {"gradient_accumulation_steps": 2}),
        (1, {"micro_batch_size": 1}),
        (2, {}),
    ],
)
def test_A7_a_batch_of_evaluation_is_one_micro_step_if_uncut(
    replicas, accumulation
):
    """Means of 3 and 2.5 in two rows, of 9 and 5.5 in one."""
    model = two_outputs(replicas, **accumulation)
    model.set_weights([np.ones([1, 1]), np.ones([1, 1])])
    data = two_inputs(*A7_PARTS)
    if "gradient_accumulation_steps" in accumulation:
        loss, *_ = model.evaluate(data, verbose=0)
        assert loss == pytest.approx((2 * 5.5 + 14.5) / 3)
    else:
        with pytest.raises(ValueError, match=REFUSED):
            model.evaluate(data, verbose=0)


def test_A7_different_divisors_are_exact_in_one_micro_step():
    model = two_outputs()
    model.fit(two_inputs(A7_PARTS[0]), verbose=0)
    assert left_and_right(model) == pytest.approx([-3, -2.5], abs=1e-6)


@pytest.mark.parametrize(
    "replicas", [2, pytest.param(1, marks=pytest.mark.slow)]
)
def test_A7_terms_by_examples_are_exact(replicas):
    model = two_outputs(
        replicas, masks=(False, False), gradient_accumulation_steps=2
    )
    model.fit(two_inputs(*A7_PARTS), verbose=0)
    left = -(1 + 2 + 6 + PADDING + 9 + 9) / 6
    assert left_and_right(model) == pytest.approx([left, -3.5], abs=1e-6)


@pytest.mark.parametrize(
    "replicas", [2, pytest.param(1, marks=pytest.mark.slow)]
)
def test_A7_weighted_terms_by_examples_are_exact(replicas):
    model = two_outputs(
        replicas,
        masks=(False, False),
        micro_batch_size=1,
        loss_weights={"left": 2.0, "right": 10.0},
    )
    model.fit(two_inputs(A7_PARTS[0], A7_PARTS[1]), verbose=0)
    left = -2 * ((1 + 2 + 6 + PADDING) / 4 + 9)
    assert left_and_right(model) == pytest.approx([left, -80], abs=1e-5)


@pytest.mark.parametrize("eager", [False, True])
def test_A7_two_masks_are_refused(eager):
    model = two_outputs(
        masks=(True, True), gradient_accumulation_steps=2, run_eagerly=eager
    )
    with pytest.raises(ValueError, match=REFUSED):
        model.fit(two_inputs(*A7_PARTS), verbose=0)
    assert left_and_right(model) == [0, 0]


@pytest.mark.parametrize("eager", [False, True])
def test_A7_two_masks_made_by_losses_are_refused(eager):
    """Masks that no layer knows of, and that live as long as one loss."""

    def loss():
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0
        )

    inputs = keras.Input((1,))
    outputs = [
        keras.layers.Dense(3, kernel_initializer="zeros", name=name)(inputs)
        for name in ("left", "right")
    ]
    model = tfaccum.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(1.0),
        loss=[loss(), loss()],
        gradient_accumulation_steps=2,
        run_eagerly=eager,
    )
    x = np.ones([4, 1], np.float32)
    y = [np.array([0, 0, 0, 1]), np.array([1, 1, 2, 0])]
    with pytest.raises(ValueError, match=REFUSED):
        model.fit(x, y, batch_size=2, verbose=0)


@pytest.mark.parametrize("eager", [False, True])
def test_A7_one_mask_for_two_terms_is_exact_or_refused(eager):
    inputs = keras.Input((2, 1))
    shared = keras.layers.Masking(PADDING)(inputs)
    model = tfaccum.Model(
        inputs, [scalar(name=name)(shared) for name in ("w_left", "w_right")]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(1.0),
        loss=[product, product],
        gradient_accumulation_steps=2,
        run_eagerly=eager,
    )
    dataset = batches([[1, 2], [6, PADDING]], [[9, 9]])
    dataset = dataset.map(lambda x, y: (x, (y, y)))
    try:
        model.fit(dataset, verbose=0)
    except ValueError as error:
        assert REFUSED in str(error)
        assert left_and_right(model) == [0, 0]
    else:
        expected = pytest.approx(-27 / 5, abs=1e-6)
        assert left_and_right(model) == [expected, expected]


@pytest.mark.parametrize(
    "left, right",
    [
        ("sum", "sum_over_batch_size"),
        ("mean_with_sample_weight", "sum_over_batch_size"),
    ],
)
def test_A7_two_reductions_are_refused(left, right):
    model = two_outputs(
        left=Product(reduction=left),
        right=Product(reduction=right),
        masks=(False, False),
        gradient_accumulation_steps=2,
    )
    dataset = two_inputs(*A7_PARTS).map(
        lambda x, y: (x, y, 2 * tf.ones([tf.shape(x["left"])[0]]))
    )
    with pytest.raises(ValueError, match=REFUSED):
        model.fit(dataset, verbose=0)
    assert left_and_right(model) == [0, 0]


def test_A7_added_loss_beside_a_mean_over_tokens_is_refused():
    def layers():
        penalised = Penalised()
        penalised.supports_masking = True
        return [keras.layers.Masking(PADDING), penalised]

    model = toy(layers=layers, shape=(8, 1), gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=REFUSED):
        fit(model, batches(A2_ROWS[:1], A2_ROWS[1:]))
    assert weights_of(model) == [1]


# --- A8: what a weighted loss is divided by --------------------------------

# x = 2, 2, 3 with weights 0, 1, 3 makes a sum of 11.
A8_EXPECTED = {
    "sum_over_batch_size": -11 / 3,
    "mean_with_sample_weight": -11 / 4,
    "sum": -11,
}


@pytest.mark.parametrize("reduction", A8_EXPECTED)
def test_A8_both_conventions_in_one_batch(reduction):
    model = toy(loss=Product(reduction=reduction))
    fit(model, batches([2, 2], weights=[[0, 1]]))
    expected = {"sum_over_batch_size": -1}.get(reduction, -2)
    assert weight_of(model) == expected


@pytest.mark.parametrize(
    "replicas", [1, pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("reduction", A8_EXPECTED)
def test_A8_both_conventions_over_micro_steps(reduction, replicas):
    model = toy(
        replicas,
        loss=Product(reduction=reduction),
        gradient_accumulation_steps=3,
    )
    fit(model, batches([2], [2], [3], weights=[[0], [1], [3]]))
    assert weight_of(model) == pytest.approx(A8_EXPECTED[reduction], abs=1e-6)


@pytest.mark.parametrize("cut", [None, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", A8_EXPECTED)
def test_A8_both_conventions_over_replicas(reduction, cut):
    model = toy(2, loss=Product(reduction=reduction), micro_batch_size=cut)
    fit(model, batches([2, 2, 3], weights=[[0, 1, 3]]))
    assert weight_of(model) == pytest.approx(A8_EXPECTED[reduction], abs=1e-6)


# --- A11: the number of replicas -------------------------------------------


@pytest.mark.parametrize(
    "replicas, steps, cut",
    [
        (1, 1, None),
        (2, 1, None),
        (4, 1, None),
        (2, 2, None),
        (2, 1, 2),
        pytest.param(1, 2, None, marks=pytest.mark.slow),
        pytest.param(4, 2, None, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_A11_global_batch_of_8_whatever_the_replicas(replicas, steps, cut):
    x = np.random.default_rng(0).normal(size=[3, 8]).astype(np.float32)
    w = velocity = 0.0
    for mean in x.mean(axis=1):
        velocity = 0.9 * velocity - 0.1 * mean
        w += velocity

    model = toy(
        replicas,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        gradient_accumulation_steps=steps,
        micro_batch_size=cut,
    )
    seen = fit(model, batches(*x.reshape([3 * steps, 8 // steps])))
    assert seen.iterations == [1, 2, 3]
    assert seen.of_updates("examples") == [8, 8, 8]
    assert weight_of(model) == pytest.approx(w, abs=1e-6)


# --- A15: losses of one's own ----------------------------------------------


class OwnLoss(tfaccum.Model):
    """A plain mean over the examples of this replica."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean(y_pred)


def scalar_mean(y, y_pred):
    return tf.reduce_mean(y_pred)


SCALAR_MEAN, OWN_LOSS = {"loss": scalar_mean}, {"model_class": OwnLoss}


@pytest.mark.parametrize(
    "custom, replicas, accumulates",
    [
        (SCALAR_MEAN, 2, False),
        (SCALAR_MEAN, 2, True),
        (OWN_LOSS, 2, False),
        (OWN_LOSS, 2, True),
        pytest.param(SCALAR_MEAN, 1, False, marks=pytest.mark.slow),
        pytest.param(OWN_LOSS, 1, False, marks=pytest.mark.slow),
        pytest.param(SCALAR_MEAN, 1, True, marks=pytest.mark.slow),
        pytest.param(OWN_LOSS, 1, True, marks=pytest.mark.slow),
        pytest.param(OWN_LOSS, 4, True, marks=pytest.mark.slow),
    ],
)
def test_A15_custom_mean_is_not_divided_by_replicas(
    custom, replicas, accumulates
):
    steps = {"gradient_accumulation_steps": 2} if accumulates else {}
    model = toy(replicas, start=2, **custom, **steps)
    x = np.arange(1, 6)
    # Two micro-steps of 3 and 2 examples, or one of 5.
    seen = fit(model, batches(x[:3], x[3:]) if accumulates else batches(x))
    assert seen.logs["loss"] == [pytest.approx(2 * 3, abs=1e-6)]
    assert seen.updates[0].loss == pytest.approx(2 * 3, abs=1e-6)
    assert weight_of(model) == pytest.approx(2 - 3, abs=1e-6)
    # Ragged: the mean of 1, 2, 3 and of 4, 5.
    loss = model.evaluate(batches(x[:3], x[3:]), verbose=0)
    assert loss == pytest.approx(-1 * 3, abs=1e-6)
    loss = model.train_on_batch(x.astype(np.float32)[:, None], x)
    assert loss == pytest.approx(-1 * 3, abs=1e-6)
    assert weight_of(model) == pytest.approx(-1 - 3, abs=1e-6)
