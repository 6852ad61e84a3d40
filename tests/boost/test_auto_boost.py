"""AutoBoost: MindSpore's dict, and the model and arguments it becomes."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import tfaccum
from tests import toy
from tfaccum import boost
from tfaccum.boost.auto_boost import PRECEDENCE
from tfaccum.boost.config import ALGORITHMS, SECTIONS

LAYERS = keras.layers
BASIS = {"dim_reduce": {"pca_mat_path": "basis.npz"}}


def auto(level="O0", mode=None, sections=None, **flags):
    """With these flags in section `boost`."""
    chosen = {"mode": mode} if mode else {}
    return boost.AutoBoost(
        level, {"boost": {**chosen, **flags}, **(sections or {})}
    )


def only(*names, **sections):
    """On at level O0, by hand."""
    flags = dict.fromkeys(names, True)
    return auto(mode="manual", sections={**BASIS, **sections}, **flags)


# --- Levels and modes ------------------------------------------------------


@pytest.mark.parametrize(
    "level, expected",
    [
        ("O0", ()),
        ("O1", ("less_bn", "grad_freeze")),
        ("O2", ("less_bn", "grad_freeze", "adasum")),
    ],
)
@pytest.mark.parametrize("config", [None, {}, "", {"boost": {}}])
def test_levels(level, expected, config):
    assert boost.AutoBoost(level, config).enabled == expected


@pytest.mark.parametrize(
    "mode, level, flags, expected",
    [
        ("auto", "O1", {"adasum": True, "less_bn": False},
         ("less_bn", "grad_freeze")),
        ("manual", "O1", {"adasum": True},
         ("less_bn", "grad_freeze", "adasum")),
        ("manual", "O2", {"grad_freeze": False}, ("less_bn", "adasum")),
        ("manual", "O0", {"less_bn": True}, ("less_bn",)),
        ("manual", "O2", {}, ("less_bn", "grad_freeze", "adasum")),
        ("enable_all", "O0", {"dim_reduce": False},
         ("grad_accumulation", "dim_reduce", "loss_scale_group")),
        ("disable_all", "O2", {"less_bn": True}, ()),
    ],
)  # fmt: skip
def test_modes(mode, level, flags, expected):
    assert auto(level, mode, BASIS, **flags).enabled == expected


def test_no_object_remembers_another():
    """MindSpore has one for the process, and its first arguments stay."""
    auto("O1", "manual", adasum=True, less_bn=False)
    assert boost.AutoBoost("O1").enabled == ("less_bn", "grad_freeze")


@pytest.mark.parametrize("level", ["O3", "o1", 1, None])
def test_an_unknown_level_is_refused(level):
    with pytest.raises(ValueError, match=f"O0, O1, O2. Received: .*{level!r}"):
        boost.AutoBoost(level)


# --- The dict --------------------------------------------------------------


def test_the_dict_of_the_original_and_every_default():
    config = {
        "boost": {
            "mode": "auto",
            "less_bn": False,
            "grad_freeze": False,
            "adasum": False,
            "grad_accumulation": False,
            "dim_reduce": False,
            "loss_scale_group": False,
        },
        "common": {"gradient_split_groups": [50, 100], "device_number": 8},
        "less_bn": {"fn_flag": True, "gc_flag": True},
        "grad_freeze": {
            "param_groups": 10,
            "freeze_type": 1,
            "freeze_p": 0.7,
            "total_steps": 65536,
        },
        "grad_accumulation": {"grad_accumulation_step": 1},
        "dim_reduce": {
            "rho": 0.55,
            "gamma": 0.9,
            "alpha": 0.001,
            "sigma": 0.4,
            "n_components": 32,
            "pca_mat_path": None,
            "weight_load_dir": None,
            "timeout": 1800,
        },
    }
    found = boost.AutoBoost("O0", config)
    assert found.settings == config
    assert {k: list(v) for k, v in config.items()} == {
        k: list(v) for k, v in SECTIONS.items()
    }
    config["common"]["gradient_split_groups"] = None
    assert boost.AutoBoost().settings == config


@pytest.mark.parametrize(
    "config, kind, match",
    [
        ([], TypeError, r"a dict of dicts. Received: config=\[\]"),
        ("O1", TypeError, "a dict of dicts. Received: config='O1'"),
        ({"less_bn": True}, TypeError, r"config\['less_bn'\].*bool"),
        ({"les_bn": {}}, ValueError, "'les_bn'. Did you mean 'less_bn'"),
        ({"mode": "auto"}, ValueError, "'mode'. It belongs in section 'boost'"),
        ({"boost": {"adsum": True}}, ValueError, "Did you mean 'adasum'"),
        (
            {"grad_freeze": {"freeze_prob": 0.5}},
            ValueError,
            "'freeze_prob' in section 'grad_freeze'. Did you mean 'freeze_p'",
        ),
        (
            {"less_bn": {"freeze_p": 0.5}},
            ValueError,
            "'freeze_p' in section 'less_bn'. It belongs in section 'grad_fr",
        ),
        (
            {"boost": {"grad_accumulation_step": 4}},
            ValueError,
            "belongs in section 'grad_accumulation'",
        ),
        (
            {"boost": {"mode": "manul"}},
            ValueError,
            "one of auto, .*mode='manul'. Did you mean 'manual'",
        ),
        ({"boost": {"mode": None}}, ValueError, "mode=None"),
    ],
)
def test_what_has_no_place_is_refused(config, kind, match):
    with pytest.raises(kind, match=match):
        boost.AutoBoost("O0", config)


WRONG = {
    "a bool": [1, "True"],
    "an int": [1.0, True],
    "a number": ["1", None],
    "a path or None": [1, True],
    "an int, a list of ints or None": [1.5, [1.5], (1, 2), True],
}


@pytest.mark.parametrize(
    "section, name",
    [(s, n) for s, keys in SECTIONS.items() for n in keys if n != "mode"],
)
def test_every_key_has_a_type(section, name):
    kind = SECTIONS[section][name].kind
    for value in WRONG[kind]:
        expected = f"`{name}` of section '{section}' must be {kind}. Received: "
        with pytest.raises(TypeError, match=re.escape(expected)):
            boost.AutoBoost("O0", {section: {name: value}})


@pytest.mark.parametrize(
    "sections, names, match",
    [
        ({"grad_freeze": {"freeze_p": 1}}, ["grad_freeze"], "freeze_p.*less"),
        ({"grad_freeze": {"param_groups": 0}}, ["grad_freeze"], "groups=0"),
        ({"grad_freeze": {"freeze_type": 3}}, ["grad_freeze"], "_type=3"),
        ({"grad_freeze": {"total_steps": 0}}, ["grad_freeze"], "updates=0"),
        (
            {"grad_accumulation": {"grad_accumulation_step": 0}},
            ["grad_accumulation"],
            "step=0",
        ),
        ({"dim_reduce": {}}, ["dim_reduce"], "pca_mat_path=None, weight_load"),
        ({"dim_reduce": {"rho": 2.0}}, ["dim_reduce"], "`rho` must.*rho=2.0"),
        ({"dim_reduce": {"alpha": -1.0}}, ["dim_reduce"], "alpha=-1.0"),
        ({"dim_reduce": {"n_components": 0}}, ["dim_reduce"], "nents=0"),
    ],
)
def test_values_out_of_range(sections, names, match):
    with pytest.raises(ValueError, match=match):
        only(*names, **sections)
    assert boost.AutoBoost("O0", sections).enabled == ()  # Off: no matter.


# --- Precedence ------------------------------------------------------------

EXCLUDED = {(winner, loser): why for winner, loser, why in PRECEDENCE}


def test_the_table():
    assert set(EXCLUDED) == {
        ("dim_reduce", "less_bn"),
        ("dim_reduce", "grad_freeze"),
        ("dim_reduce", "adasum"),
        ("loss_scale_group", "adasum"),
    }
    page = (Path(__file__).parents[2] / "docs/auto_boost.md").read_text()
    for winner, loser in EXCLUDED:
        assert f"| {winner} | {loser} |" in boost.AutoBoost.__doc__
        assert f"| `{winner}`, `{loser}` | `{winner}`: " in page


@pytest.mark.parametrize("one", ALGORITHMS)
@pytest.mark.parametrize("other", ALGORITHMS)
def test_precedence_row_by_row(one, other):
    found = only(one, other)
    if (one, other) in EXCLUDED:
        assert found.enabled == (one,)
        why = f"by {one}: {EXCLUDED[one, other]}"
        assert found.switched_off == {other: why}
        assert f"off: {other}, {why}" in found.describe()
    elif (other, one) not in EXCLUDED:
        assert set(found.enabled) == {one, other}
        assert found.switched_off == {}


def test_one_that_is_switched_off_switches_nothing_off():
    """All of them: dim_reduce is named as the reason wherever it is one."""
    found = only(*ALGORITHMS)
    assert list(found.switched_off) == ["adasum", "grad_freeze", "less_bn"]
    reasons = found.switched_off.values()
    assert all(why.startswith("by dim_reduce:") for why in reasons)
    assert found.enabled == (
        "grad_accumulation",
        "dim_reduce",
        "loss_scale_group",
    )


# --- What it says ----------------------------------------------------------


def test_describe():
    sections = {
        "common": {"device_number": 4, "gradient_split_groups": [1]},
        "grad_freeze": {"param_groups": 5},
        "dim_reduce": {"rho": 0.5, "timeout": 60},
    }
    assert auto("O1", None, sections, adasum=True).describe() == (
        "AutoBoost O1, mode auto\n"
        "on: less_bn (fn_flag=True, gc_flag=True)\n"
        "on: grad_freeze (param_groups=5, freeze_type=1, freeze_p=0.7, "
        "total_steps=65536)\n"
        "off: adasum, grad_accumulation, dim_reduce, loss_scale_group\n"
        "ignored: boost.adasum=True: the mode is auto\n"
        "not needed here: common.device_number=4: the strategy knows the "
        "replicas of each worker\n"
        "not needed here: common.gradient_split_groups=[1]: gradients of one "
        "dtype travel in one packed group\n"
        "ignored: dim_reduce.rho=0.5: dim_reduce is off\n"
        "not needed here: dim_reduce.timeout=60: no worker waits for the file "
        "of another"
    )
    text = str(only("dim_reduce", "grad_accumulation"))
    assert "on: grad_accumulation (grad_accumulation_step=1): an upd" in text
    assert "pca_mat_path=basis.npz" in text and "timeout" not in text
    assert boost.AutoBoost().describe().endswith(f": {', '.join(ALGORITHMS)}")
    section = {"pca_mat_path": "basis.npz", "n_components": 4}
    text = only("dim_reduce", dim_reduce=section).describe()
    assert "\nnot needed here: dim_reduce.n_components=4: the file of" in text
    assert "alpha=0.001, sigma=0.4, pca_mat_path=basis.npz)" in text


# --- What it does ----------------------------------------------------------


def residual(replicas=1, kind=tfaccum.Model, scale=None):
    """A stem, a bottleneck, a head: 5 blocks, or 3 after LessBN."""
    with toy.strategy_of(replicas).scope():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((6, 6, 3))
        x = start = LAYERS.Conv2D(4, 3, padding="same", name="stem")(inputs)
        for number, size in enumerate((1, 3, 1), start=1):
            x = LAYERS.Conv2D(4, size, padding="same", name=f"conv{number}")(x)
            x = LAYERS.BatchNormalization(name=f"bn{number}")(x)
            x = LAYERS.ReLU()(x) if number < 3 else LAYERS.Add()([x, start])
        x = LAYERS.GlobalAveragePooling2D()(x)
        if scale:
            x = scale(x, leaves=1, enters=2)
        outputs = LAYERS.Dense(2, name="head")(x)
        if scale:
            outputs = scale(outputs, leaves=2, enters=3)
        return kind(inputs, outputs)


def one_update(model, arguments, batches=1):
    """Compiles with the arguments, trains, returns which weights moved."""
    with model.distribute_strategy.scope():
        model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * batches, 6, 6, 3)).astype("float32")
    y = rng.normal(size=(8 * batches, 2))
    before = {v.path: v.numpy() for v in model.trainable_variables}
    model.fit(x, y, batch_size=8, verbose=0)
    return {
        v.path
        for v in model.trainable_variables
        if (toy.value_of(model, v) != before[v.path]).any()
    }


FREEZE = {
    "param_groups": 3,
    "freeze_type": 0,
    "freeze_p": 0.0,
    "total_steps": 100,
}


def test_nothing_is_on():
    model = residual()
    same, arguments = boost.AutoBoost().apply(model)
    assert same is model and arguments == {}
    _, arguments = boost.AutoBoost().apply(model, "adam")
    assert list(arguments) == ["optimizer"]
    assert isinstance(arguments["optimizer"], keras.optimizers.Adam)


def test_a_model_of_keras_becomes_one_that_has_windows():
    model, arguments = only("grad_accumulation").apply(
        residual(kind=keras.Model)
    )
    assert isinstance(model, tfaccum.Model)
    assert arguments == {"gradient_accumulation_steps": 1}


@pytest.mark.parametrize("replicas", [1, 2])
def test_O1_trains(replicas):
    """LessBN, its head, centralized gradients, and freezing."""
    model = residual(replicas)
    found, arguments = boost.AutoBoost("O1", {"grad_freeze": FREEZE}).apply(
        model, keras.optimizers.SGD(0.1)
    )
    assert set(arguments) == {"optimizer", "gradient_freeze"}
    assert isinstance(arguments["optimizer"], boost.Centralized)
    assert isinstance(found.get_layer("head"), boost.NormalizedHead)
    assert str(arguments["gradient_freeze"]) == (
        "GradientFreeze(groups=3, freeze_type=0, full_step_fraction=0.0, "
        "total_updates=100, seed=0)"
    )
    names = {layer.name for layer in found.layers}
    assert "bn3" in names and not names & {"bn1", "bn2"}
    assert model.get_layer("bn1") and model is not found
    moved = one_update(found, arguments)  # Of group 1.
    frozen = arguments["gradient_freeze"].frozen(found, 1)
    assert frozen and not moved & {v.path for v in frozen}
    assert "head/kernel" in moved


def test_fn_and_gc_are_flags():
    """Without the head and gradient centralization."""
    sections = {"less_bn": {"fn_flag": False, "gc_flag": False}}
    found, arguments = only("less_bn", **sections).apply(residual())
    assert arguments == {}
    assert isinstance(found.get_layer("head"), LAYERS.Dense)
    sgd = keras.optimizers.SGD(0.1)
    _, arguments = only("less_bn", **sections).apply(residual(), sgd)
    assert arguments == {"optimizer": sgd}
    sections = {"less_bn": {"fn_flag": False}}
    found, arguments = only("less_bn", **sections).apply(residual(), "sgd")
    assert "conv1/kernel" in arguments["optimizer"].centralized_paths


def test_O2_combines_two_replicas():
    """AdaSum of weight changes, as there; and in a frozen update too."""
    model, arguments = boost.AutoBoost("O2", {"grad_freeze": FREEZE}).apply(
        residual(2), "sgd"
    )
    assert arguments["replica_reduction"] == boost.AdaSum(form="delta")
    moved = one_update(model, arguments, batches=2)  # Groups 1 and 2.
    assert "head/kernel" in moved and "stem/kernel" not in moved


def test_O2_of_one_replica_says_that_there_is_nothing_to_combine():
    with pytest.warns(UserWarning, match="adasum off.*there is one"):
        _, arguments = only("adasum").apply(residual())
    assert arguments == {}


def test_three_replicas_are_refused():
    with pytest.raises(ValueError, match="power of two.*3 replicas"):
        only("adasum").apply(residual(3))


def test_accumulation():
    sections = {"grad_accumulation": {"grad_accumulation_step": 2}}
    model, arguments = only("grad_accumulation", **sections).apply(residual())
    assert arguments == {"gradient_accumulation_steps": 2}
    assert "stem/kernel" in one_update(model, arguments, batches=2)
    assert toy.iterations_of(model) == 1


def test_a_loss_scale_for_each_group():
    scale = tfaccum.GroupLossScale(
        [["stem", "conv1", "conv2", "conv3", "bn3"], ["head"]]
    )
    model = residual(scale=scale)
    found, arguments = only("loss_scale_group").apply(model)
    assert arguments == {"loss_scale": scale}
    both = only("loss_scale_group", "less_bn", less_bn={"fn_flag": False})
    found, arguments = both.apply(model, "sgd")
    copy = arguments["loss_scale"]
    assert copy is not scale and copy in found.layers
    assert "head/kernel" in one_update(found, arguments)
    with pytest.raises(ValueError, match="one tfaccum.GroupLossScale.*with 0"):
        only("loss_scale_group").apply(residual())


def recorded(directory):
    """A trajectory of 5 samples."""
    model = residual()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 6, 6, 3)).astype("float32")
    record = boost.RecordTrajectory(directory, every_updates=1)
    model.fit(x, x[:, 0, 0, :2], batch_size=8, verbose=0, callbacks=[record])


def test_dim_reduce(tmp_path):
    """From the weights that were recorded, and from a basis in a file."""
    recorded(tmp_path / "run")
    section = {
        "weight_load_dir": str(tmp_path / "run"),
        "n_components": 3,
        "rho": 0.5,
        "gamma": 0.8,
        "alpha": 0.01,
        "sigma": 0.3,
    }
    found = only("dim_reduce", "grad_accumulation", dim_reduce=section)
    model, arguments = found.apply(residual(), "sgd")
    optimizer = arguments["optimizer"]
    assert isinstance(optimizer, boost.DimReduce)
    assert optimizer.basis.num_directions == 3
    settings = (optimizer.rho, optimizer.gamma, optimizer.sigma)
    assert settings == (0.5, 0.8, 0.3)
    assert float(optimizer.learning_rate) == pytest.approx(0.01)
    assert "stem/kernel" in one_update(model, arguments)

    scale = tfaccum.GroupLossScale([["stem", "conv1"], ["head"]])
    both = only("dim_reduce", "loss_scale_group", dim_reduce=section)
    model, arguments = both.apply(residual(scale=scale))
    assert set(arguments) == {"optimizer", "loss_scale"}
    assert "stem/kernel" in one_update(model, arguments)

    optimizer.basis.save(tmp_path / "basis.npz")
    section = {"pca_mat_path": str(tmp_path / "basis.npz")}
    _, arguments = only("dim_reduce", dim_reduce=section).apply(residual())
    assert arguments["optimizer"].basis == section["pca_mat_path"]
    section = {"pca_mat_path": str(tmp_path / "pca.npy")}
    with pytest.raises(ValueError, match="`Basis.save` has written.*pca.npy"):
        only("dim_reduce", dim_reduce=section).apply(residual())


def test_what_the_model_does_not_have_is_said():
    with pytest.raises(ValueError, match="groups=10 for 3 blocks"):
        boost.AutoBoost("O1").apply(residual(), "sgd")
    with pytest.raises(ValueError, match="`optimizer` must be given.*gc_flag"):
        only("less_bn").apply(residual())
    flat = keras.Sequential([keras.Input((3,)), LAYERS.Dense(2)])
    with pytest.raises(TypeError, match="must be functional"):
        only("less_bn").apply(flat, "sgd")
