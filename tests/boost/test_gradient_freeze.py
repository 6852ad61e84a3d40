"""Gradient freeze: the sequence, the blocks, and every update by numpy."""

import collections
import itertools

import keras
import numpy as np
import pytest
from tensorflow.python.eager import context

import tfaccum
from tests import toy, workers
from tests.multi_worker.freeze_checks import (
    DECAY,
    FREEZE,
    MOMENTUM,
    RATE,
    START,
    XS,
    model_of,
)
from tfaccum import boost
from tfaccum.boost.gradient_freeze import blocks

LAYERS = keras.layers


def groups_of(number, **arguments):
    freeze = boost.GradientFreeze(**arguments)
    return [freeze.group_at(update) for update in range(number)]


# --- The sequence ----------------------------------------------------------


def test_check_7_continuous_by_hand():
    period = [0, 0, 0, 0, 1, 2, 3, 4]
    found = groups_of(
        24, groups=5, freeze_type=0, full_step_fraction=0.5, total_updates=50
    )
    assert found == 3 * period


@pytest.mark.parametrize(
    "groups, fraction, zeros",
    [
        (10, 0.5, 9),
        (10, 0.7, 21),  # 20 in floating point.
        (10, 0.9, 81),
        (5, 0.8, 16),
        (2, 0.7, 2),
        (4, 0, 0),
    ],
)
def test_check_7_how_many_updates_train_all(groups, fraction, zeros):
    found = groups_of(
        zeros + groups,
        groups=groups,
        freeze_type=0,
        full_step_fraction=fraction,
    )
    again = 0 if zeros else 1
    assert found == [0] * zeros + [*range(1, groups), again]


@pytest.mark.parametrize(
    "fraction, pattern",
    [
        (0.5, "0x0x0x0x0x0x"),
        (0.7, "0x00x00x000x00x00x000x"),  # Not 0x00x00x00x, as in floats.
        (0.9, "0x000000000x000000000x"),
        (0.0, "0xxxxxxx"),
    ],
)
def test_check_7_interval_by_hand(fraction, pattern):
    found = groups_of(len(pattern), full_step_fraction=fraction)
    assert "".join("x" if group else "0" for group in found) == pattern


def test_check_7_a_small_beginning_is_frozen_more_often():
    found = np.array(groups_of(60000, groups=5, full_step_fraction=0.5))
    assert not found[::2].any() and found[1::2].all()
    counts = np.bincount(found[1::2], minlength=5)[1:]
    # Of 30000 draws a count is off by less than 87 in 68 of 100 cases.
    np.testing.assert_allclose(counts / 3000, [4, 3, 2, 1], atol=0.15)


def test_check_8_where_it_begins_anew():
    """101 entries; and 13 periods of 8 are 104."""
    found = groups_of(202, total_updates=100, groups=5)
    assert found[:101] == found[101:]
    assert found[:99] != found[1:100]
    found = groups_of(
        208, total_updates=100, groups=5, freeze_type=0, freeze_p=0.5
    )
    assert found[:104] == found[104:] and found[103] == 4


def test_the_seed_draws_the_sequence():
    draws = [groups_of(200, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_both_names_of_the_fraction():
    one = groups_of(50, full_step_fraction=0.4)
    assert groups_of(50, freeze_p=0.4) == one
    assert boost.GradientFreeze().full_step_fraction == 0.7


# --- The blocks ------------------------------------------------------------


def names_of(found):
    return [[variable.path for variable in block] for block in found]


def test_what_joins_the_block_before_it():
    inputs = keras.Input((8, 8, 3))
    x = LAYERS.Conv2D(4, 3, name="a", use_bias=False)(inputs)
    x = LAYERS.ReLU()(LAYERS.BatchNormalization(name="a_bn")(x))
    x = LAYERS.Conv2D(4, 3, name="b")(x)
    x = LAYERS.GroupNormalization(2, name="b_gn")(x)
    x = LAYERS.DepthwiseConv2D(3, name="c", use_bias=False)(x)
    x = LAYERS.Conv2D(4, 1, name="d", use_bias=False)(x)
    x = tfaccum.layers.WindowBatchNormalization(name="d_bn")(x)
    x = LAYERS.RMSNormalization(name="rms")(x)
    x = LAYERS.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, LAYERS.Dense(2, name="e")(x))
    assert names_of(blocks(model)) == [
        ["a/kernel", "a_bn/gamma", "a_bn/beta"],
        ["b/kernel", "b/bias", "b_gn/gamma", "b_gn/beta"],
        ["c/kernel", "d/kernel", "d_bn/gamma", "d_bn/beta", "rms/scale"],
        ["e/kernel", "e/bias"],
    ]


def test_models_inside_a_model_and_frozen_layers():
    inner = keras.Sequential(
        [
            keras.Input((4,)),
            LAYERS.Dense(4, name="one"),
            LAYERS.LayerNormalization(name="norm"),
        ],
        name="inner",
    )
    inputs = keras.Input((4,))
    x = LAYERS.Dense(4, name="no", trainable=False)(inputs)
    model = keras.Model(inputs, LAYERS.Dense(2, name="two")(inner(x)))
    names = ("one/kernel", "one/bias", "norm/gamma", "norm/beta")
    assert names_of(blocks(model)) == [
        [f"inner/{name}" for name in names],
        ["two/kernel", "two/bias"],
    ]


def chain(length):
    """Blocks of three scalars."""
    inputs = outputs = keras.Input((1,))
    for i in range(length):
        outputs = toy.scalar(START[i % 9], f"w{i}")(outputs)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("count", [10, 11])
def test_check_6_groups_are_nested_suffixes(count):
    model = chain(3 * count)
    freeze = boost.GradientFreeze(groups=5)
    assert freeze.num_groups == 5
    for group in range(5):
        found = [v.path for v in freeze.frozen(model, group)]
        assert found == [f"w{i}/kernel" for i in range(3 * 2 * group)]


def test_check_6_more_groups_than_blocks_are_refused():
    """MindSpore then freezes nothing, and says nothing."""
    freeze = boost.GradientFreeze(groups=20)
    with pytest.raises(ValueError, match="groups=20 for 10 blocks.*groups=10"):
        freeze.frozen(chain(30), 1)
    with pytest.raises(ValueError, match="at least 2 blocks.*with 1"):
        freeze.frozen(chain(2), 1)


# --- Settings --------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, kind, match",
    [
        ({"groups": 1}, ValueError, "at least 2.*groups=1"),
        ({"groups": 0}, ValueError, "groups=0"),
        ({"groups": 2.0}, TypeError, "groups=2.0"),
        ({"freeze_type": 2}, ValueError, "0 .continuous.*freeze_type=2"),
        ({"freeze_p": 1}, ValueError, "less than 1.*full_step_fraction=1"),
        ({"full_step_fraction": -0.1}, ValueError, "full_step_fraction=-0.1"),
        ({"freeze_p": "0.7"}, TypeError, "a number.*'0.7'"),
        ({"freeze_p": True}, TypeError, "a number.*True"),
        ({"total_updates": 0}, ValueError, "total_updates=0"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": None}, ValueError, "seed=None"),
        (
            {"full_step_fraction": 0.5, "freeze_p": 0.5},
            ValueError,
            "both.*full_step_fraction=0.5, freeze_p=0.5",
        ),
    ],
)
def test_errors(arguments, kind, match):
    with pytest.raises(kind, match=match):
        boost.GradientFreeze(**arguments)


def test_all_settings_in_one_line_and_in_a_config():
    freeze = boost.GradientFreeze(5, 0, freeze_p=0.25, seed=3)
    assert str(freeze) == (
        "GradientFreeze(groups=5, freeze_type=0, full_step_fraction=0.25, "
        "total_updates=65536, seed=3)"
    )
    config = keras.saving.serialize_keras_object(freeze)
    again = keras.saving.deserialize_keras_object(config)
    assert str(again) == str(freeze)


# --- Updates by numpy ------------------------------------------------------


def windows(steps):
    """The mean of x over each window."""
    return [
        np.mean(np.concatenate(XS[first : first + steps]))
        for first in range(0, len(XS), steps)
    ]


def by_numpy(means, groups):
    """The nine scalars and their momenta after each update."""
    w, m, seen = START.copy(), np.zeros(9), []
    for mean, group in zip(means, groups, strict=True):
        g, on = mean * w.prod() / w, slice(3 * group, None)
        w[on] -= RATE * DECAY * w[on]
        m[on] = MOMENTUM * m[on] - RATE * g[on]
        w[on] += m[on]
        seen.append((w.copy(), m.copy()))
    return seen


def momenta(state):
    return np.ravel(state[2:])  # Behind the counter and the learning rate.


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_momentum_and_decay_by_numpy(replicas, steps):
    """14 batches: with 3 to an update the last window is ragged."""
    model = model_of(replicas, gradient_accumulation_steps=steps)
    seen = toy.fit(model, toy.batches(*XS))
    means = windows(steps)
    groups = ([0, 0, 1, 2] * 4)[: len(means)]
    expected = by_numpy(means, groups)
    for w, state, (wanted, slots) in zip(
        seen.weights, seen.optimizer_states, expected, strict=True
    ):
        np.testing.assert_allclose(w, wanted, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(momenta(state), slots, rtol=2e-5, atol=1e-7)
    assert seen.iterations == list(range(1, len(means) + 1))
    assert_others_keep_their_bits(seen, groups)


def assert_others_keep_their_bits(seen, groups):
    """What is frozen does not change, nor its momentum; all else does."""
    states = [
        np.stack([np.float32(w), momenta(state)])
        for w, state in zip(seen.weights, seen.optimizer_states, strict=True)
    ]
    pairs = itertools.pairwise(states)
    for (before, after), group in zip(pairs, groups[1:], strict=True):
        same = np.repeat([True, False], [3 * group, 9 - 3 * group])
        np.testing.assert_array_equal(before == after, [same, same])


@pytest.mark.parametrize("replicas", [1, 2])
def test_averages_go_on_and_overwrite_only_what_trains(replicas):
    """Every other update ends with weights that are their averages."""
    model = model_of(
        replicas,
        optimizer=lambda: keras.optimizers.SGD(
            RATE, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
    )
    seen = toy.fit(model, toy.batches(*XS[:8]))
    w, average, kept = START.copy(), None, []
    for i, group in enumerate([0, 0, 1, 2] * 2):
        on = slice(3 * group, None)
        w[on] -= RATE * np.mean(XS[i]) * (w.prod() / w)[on]
        average = w.copy() if i == 0 else (average + w) / 2
        if i % 2:
            w[on] = average[on]
        np.testing.assert_allclose(seen.weights[i], w, rtol=2e-6)
        state = seen.optimizer_states[i][2:]
        np.testing.assert_allclose(np.ravel(state), average, rtol=2e-6)
        if group:
            before, after = (seen.weights[j][: 3 * group] for j in (i - 1, i))
            kept.append(before == after)
    assert kept == [True] * 4


def test_several_windows_in_a_call():
    """A call ends where the group changes."""
    how = {"gradient_accumulation_steps": 2}
    one, four = model_of(**how), model_of(steps_per_execution=4, **how)
    seen = [toy.fit(model, toy.batches(*XS)) for model in (one, four)]
    assert toy.weights_of(one) == toy.weights_of(four)
    assert len(seen[1].weights) < len(seen[0].weights)
    updates = [s.of_updates("update") for s in seen]
    assert updates[0] == updates[1]


class CountTraces(tfaccum.Model):
    traces = 0

    def train_step(self, data):
        CountTraces.traces += 1
        return super().train_step(data)


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_trace_for_each_group(replicas):
    CountTraces.traces = 0
    model = model_of(replicas, model_class=CountTraces)
    toy.fit(model, toy.batches(*XS[:2]))
    of_one = CountTraces.traces
    assert of_one == replicas  # A replica's step is traced by itself.
    toy.fit(model, toy.batches(*XS))
    assert CountTraces.traces == 3 * of_one
    toy.fit(model, toy.batches(*XS), epochs=2)
    assert CountTraces.traces == 3 * of_one


def test_a_skipped_update_keeps_its_group():
    """In float16: x * scale is infinite in the third window and the fourth."""
    keras.config.set_dtype_policy("mixed_float16")
    model = model_of(
        2,
        gradient_accumulation_steps=2,
        loss_scale=tfaccum.LossScale(initial=64.0),
    )
    xs = [[1, 2], [2], [1], [2, 1], [3e4, 1], [2], [2, 1], [6e4], [2], [2, 1],
          [1], [2]]  # fmt: skip
    seen = toy.fit(model, toy.batches(*xs))
    assert seen.of_updates("skipped") == [False, False, True, True, False,
                                          False]  # fmt: skip
    assert seen.of_updates("loss_scale") == [64, 64, 64, 32, 16, 16]
    assert seen.weights[1] == seen.weights[2] == seen.weights[3]
    expected = by_numpy([5 / 3, 4 / 3, 5 / 3, 1.5], [0, 0, 1, 2])
    np.testing.assert_allclose(seen.weights[-1], expected[-1][0], rtol=5e-3)
    kept = [w[:6] for w in seen.weights]
    assert kept[-1] == kept[-2] and kept[-2][:3] == kept[1][:3]


def test_a_run_that_goes_on_takes_up_the_sequence(tmp_path):
    """Two epochs of 5 updates, the second in another process's place."""
    data = toy.batches(*XS[:10])
    how = {"gradient_accumulation_steps": 2}
    whole = model_of(**how)
    toy.fit(whole, data, epochs=2)
    toy.fit(model_of(**how), data, callbacks=[tfaccum.Checkpoint(tmp_path)])
    model = model_of(**how)
    toy.fit(model, data, epochs=2, callbacks=[tfaccum.Checkpoint(tmp_path)])
    assert toy.iterations_of(model) == 10
    assert toy.weights_of(model) == toy.weights_of(whole)


def test_a_loaded_model_freezes_as_before(tmp_path):
    model = model_of()
    toy.fit(model, toy.batches(*XS[:2]))
    model.save(tmp_path / "model.keras")
    with keras.saving.custom_object_scope({"product": toy.product}):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert str(loaded.gradient_freeze) == str(model.gradient_freeze)
    for one in (model, loaded):  # Groups 1 and 2.
        toy.fit(one, toy.batches(*XS[2:4]))
    assert toy.weights_of(loaded) == toy.weights_of(model)


def test_too_many_groups_are_refused_before_the_first_update():
    freeze = boost.GradientFreeze(groups=4, freeze_type=0, freeze_p=0)
    model = model_of(gradient_freeze=freeze)
    with pytest.raises(ValueError, match="groups=4 for 3 blocks"):
        toy.fit(model, toy.batches([1, 2]))
    assert toy.weights_of(model) == START.astype("float32").tolist()


# --- The law ---------------------------------------------------------------


def network(replicas, **how):
    """Three blocks of float64, Adam, clipping, an average."""
    keras.utils.set_random_seed(5)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with toy.strategy_of(replicas).scope():
        inputs = outputs = keras.Input((3,))
        for units in (4, 4, 4, 4, 4, 1):
            outputs = LAYERS.Dense(units, activation="tanh")(outputs)
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            keras.optimizers.AdamW(
                keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5),
                global_clipnorm=0.05,
                use_ema=True,
            ),
            "mse",
            gradient_freeze=boost.GradientFreeze(**FREEZE),
            **how,
        )
    return model


def trained(replicas, batch_size, **how):
    model = network(replicas, **how)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(34, 3)), rng.normal(size=(34, 1))
    a = rng.uniform(0.1, 3.0, 34)
    model.fit(
        x,
        y,
        batch_size,
        sample_weight=a,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    assert toy.iterations_of(model) == 6
    variables = model.trainable_variables + model.optimizer.variables
    return [toy.value_of(model, v) for v in variables]


@pytest.fixture(scope="module")
def big_batch():
    return trained(1, 12)


@pytest.mark.parametrize(
    "replicas, batch_size, how",
    [
        (1, 4, {"gradient_accumulation_steps": 3}),
        (2, 4, {"gradient_accumulation_steps": 3}),
        (2, 12, {"micro_batch_size": 2}),
    ],
)
def test_the_same_as_one_big_batch(big_batch, replicas, batch_size, how):
    found = trained(replicas, batch_size, **how)
    for value, wanted in zip(found, big_batch, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-10, atol=1e-13)


def test_two_workers(tmp_path):
    """As one device; and a worker with another seed is told so."""
    found = workers.run_checks(
        "freeze_checks", ("updates", "another_seed"), tmp_path
    )
    model = model_of(gradient_accumulation_steps=3)
    toy.fit(model, toy.batches(*XS))
    one = workers.same(found, "updates")
    np.testing.assert_allclose(one, toy.weights_of(model), rtol=2e-6)
    for worker in found:
        assert "gradient_freeze" in worker["another_seed"]
        assert "seed=1" in worker["another_seed"]


# --- The backward pass is shorter ------------------------------------------


class Always(boost.GradientFreeze):
    """One group in every update."""

    group = 0

    def group_at(self, update):
        return self.group


def convolutions(group):
    """Four blocks: Conv, BatchNormalization."""
    inputs = x = keras.Input((8, 8, 3))
    for number in range(4):
        x = LAYERS.Conv2D(4, 3, padding="same", name=f"conv{number}")(x)
        x = LAYERS.BatchNormalization(name=f"bn{number}")(x)
        x = LAYERS.ReLU()(x)
    model = tfaccum.Model(
        inputs, LAYERS.Dense(2)(LAYERS.GlobalAveragePooling2D()(x))
    )
    freeze = Always(groups=4)
    freeze.group = group
    model.compile(
        keras.optimizers.SGD(0.1),
        "mse",
        gradient_accumulation_steps=2,
        gradient_freeze=freeze,
    )
    return model


def fit_images(model):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 8, 8, 3)).astype("float32")
    model.fit(x, rng.normal(size=(8, 2)), batch_size=4, verbose=0)


def executed(function):
    """How often each operation stands in the graphs that the runtime ran.

    After all passes that prune and rewrite, a body of a loop counted once.
    """
    context.enable_run_metadata()
    try:
        function()
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    return collections.Counter(node.op for g in graphs for node in g.node)


@pytest.mark.parametrize("group", [0, 1, 2, 3])
def test_what_is_frozen_is_not_computed(group):
    """The first that trains needs no gradient of its inputs."""
    model = convolutions(group)
    found = executed(lambda: fit_images(model))
    counts = {
        name: sum(n for op, n in found.items() if name in op)
        for name in ("Conv2DBackpropFilter", "Conv2DBackpropInput")
    }
    assert list(counts.values()) == [4 - group, 3 - group]


def test_moving_statistics_of_what_is_frozen_move():
    model = convolutions(2)
    before = {v.path: v.numpy() for v in model.variables}
    fit_images(model)
    moved = {
        v.path for v in model.variables if (v.numpy() != before[v.path]).any()
    }
    for number in range(4):
        assert f"bn{number}/moving_mean" in moved
        assert f"bn{number}/moving_variance" in moved
        assert (f"conv{number}/kernel" in moved) == (number >= 2)
        assert (f"bn{number}/beta" in moved) == (number >= 2)
