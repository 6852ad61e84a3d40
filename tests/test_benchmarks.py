"""The benchmarks run, print what they promise, and count right.

No time is asserted here. Each is run once, as small as it gets; those that
start many processes with the slow tests.
"""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import benchmarks
from benchmarks import (
    gpu,
    input_wait,
    performance_report,
    step_time,
    window_profile,
)
from benchmarks.models import CASES

ROOT = Path(__file__).parents[1]
FROM = {"commit", "hardware", "tensorflow", "keras"}
QUICK = {
    "step_time": ("--model=mlp", "--rounds=2", "--updates=4"),
    "memory": ("--rows=16", "--rounds=1", "--updates", "20", "60"),
    "start": ("--rounds=1",),
    "window_profile": ("--model=mlp", "--windows=2", "--warm=4"),
    "input_wait": ("--only", "digits_cnn", "2", "2"),
}
NO_GPU = {"what": "gpu", "skipped": "no GPU here"}


@functools.cache
def printed(name):
    """The lines of a benchmark, by what they are about."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *QUICK[name]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["what"]: row for row in rows}


def is_spread(values):
    median, least, most = values
    return 0 <= least <= median <= most


# --- What they print -------------------------------------------------------


def test_step_time():
    row = printed("step_time")["step_time"]
    assert row.keys() >= FROM
    assert row["parameters"] == 8 * 16 + 16 + 16 * 10 + 10
    assert (row["rounds"], row["updates"], row["steps"]) == (2, 4, 8)
    others = {"window", "window_16", "cut", "big_batch", "loop", "loop_16"}
    assert row["ms"].keys() >= others | {"keras", "keras_8", "keras_128"}
    assert row["ms"].keys() == row["cpu_ms"].keys()
    assert all(map(is_spread, [*row["ms"].values(), *row["cpu_ms"].values()]))
    targets = {c["against"]: c["target"] for c in row["comparisons"]}
    assert (
        targets.items()
        >= {
            "big_batch": None,
            "keras_at_its_best": 1.0,
            "keras": 0.5,
            "loop_at_its_best": 1.03,
        }.items()
    )
    for each in row["comparisons"]:
        assert is_spread(each["ratio"]) and is_spread(each["cpu_ratio"])
        if each["target"] is not None:
            assert each["met"] == (each["ratio"][0] <= each["target"])
    if "torch" in row["ms"]:
        assert row["torch"]["parameters"] == row["parameters"]
    else:
        assert row["torch"]["skipped"]


@pytest.mark.slow
def test_memory_of_batches_and_windows():
    rows = printed("memory")
    batch, by_steps = rows["memory_of_a_batch"], rows["memory_by_steps"]
    assert (batch["rows"], batch["pieces"], batch["target"]) == (16, 8, 0.35)
    assert is_spread(batch["uncut_mb"]) and is_spread(batch["cut_mb"])
    assert by_steps["steps"] == [2, 32] and by_steps["target"] == 1.02
    assert all(map(is_spread, by_steps["mb"]))
    assert all(row.keys() >= FROM for row in rows.values())


@pytest.mark.slow
def test_memory_that_malloc_keeps():
    row = printed("memory")["memory_of_malloc"]
    assert (row["rows"], row["batches"]) == (2, 32)
    assert [case["who"] for case in row["cases"]] == [
        "one_update",
        "updates",
        "keras",
    ]
    for case in row["cases"]:
        assert is_spread(case["alone_mb"]) and is_spread(case["told_mb"])


@pytest.mark.slow
def test_sums_take_what_the_parameters_take():
    sizes = {None: 0, "float32": 4, "bfloat16": 2, "float64": 8}
    *cases, of_adama = printed("memory")["memory_of_sums"]["cases"]
    assert [case["accumulator_dtype"] for case in cases] == list(sizes)
    for case in cases:
        size = sizes[case["accumulator_dtype"]]
        # Loss, weight and examples are sums too, if there are any.
        beside = 12 if case["steps"] > 1 else 0
        assert case["bytes"] == case["expected_bytes"] == 314 * size + beside
    # Of four variables one number each.
    assert of_adama["optimizer"] == "AdamA"
    assert of_adama["bytes"] == of_adama["expected_bytes"] == 4 * 4 + 12


@pytest.mark.slow
def test_adama_takes_less_than_adam():
    row = printed("memory")["memory_of_optimizers"]
    assert is_spread(row["adam_mb"]) and is_spread(row["adama_mb"])
    # One set of the parameters less, of 32 MB: what a process takes varies.
    assert row["adam_mb"][0] - row["adama_mb"][0] > 16


@pytest.mark.slow
def test_updates_leave_no_objects_and_no_traces():
    first, last = printed("memory")["memory_after_updates"]["after"]
    assert (first["updates"], last["updates"]) == (20, 60)
    assert first["traces"] == last["traces"] == 2
    assert first["objects"] == last["objects"] > 0


@pytest.mark.slow
def test_traces_and_nodes_do_not_depend_on_the_number_of_steps():
    rows = printed("start")
    first = rows["first_update"]
    few, many = first["traces"]
    # One micro-step, and the window.
    assert few == many and list(few.values()) == [1, 1]
    assert first["nodes"][0] == first["nodes"][1] > 1000
    assert first["target"] == 1.1 and first["steps"] == [2, 64]
    calls = rows["calls"]["calls"]
    assert {(call["who"], call["method"]) for call in calls} == set(
        itertools.product(
            ("window", "cut", "big_batch"),
            ("fit", "train_on_batch", "test_on_batch", "predict_on_batch"),
        )
    )
    for call in calls:
        assert is_spread(call["ms"]) and is_spread(call["cpu_ms"])


@pytest.mark.slow
def test_profile_of_a_window():
    row = printed("window_profile")["window_profile"]
    assert row["windows"] == 2 and row.keys() >= FROM
    assert set(row["parts_ms"]) == set(window_profile.PARTS)
    counts = row["operations"]
    # At least one forward and backward operation per layer and micro-step.
    assert counts["forward and backward"] >= 8 * 2 * 2
    assert counts["update"] > 0 and counts["window"] > 0
    # Nothing but kernels is counted.
    assert "Python" not in counts and "between" not in counts


@pytest.mark.slow
def test_waits_for_data():
    row = printed("input_wait")["input_wait"]
    # 1,438 images in batches of 128; the first epoch is left out.
    assert (row["windows"], row["epochs"], row["replicas"]) == (12, 1, 2)
    assert row.keys() >= FROM and is_spread(row["epoch_seconds"])
    waited = row["first_windows"] + row["other_windows"]
    assert 0 < waited < 1 and 0 < row["with_data_at_hand"] < 1


def test_shares_of_waiting_by_hand():
    epochs = [[(3, 4), (1, 4)], [(1, 4), (0, 4), (2, 4)]]
    # Of 20 seconds 3 + 1, and 1 + 0 + 2.
    assert input_wait.shares(epochs) == (0.2, 0.15)


@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="has a GPU"
)
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 0
    assert json.loads(capsys.readouterr().out) == NO_GPU


def test_a_batch_that_needs_too_much_memory_does_not_fit():
    def train():
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    assert not gpu.fits(train)
    assert gpu.fits(lambda: None)


# --- What they compute with ------------------------------------------------


def test_spread_and_ratios_by_hand():
    assert benchmarks.spread([3, 1, 2]) == [2, 1, 3]
    found = benchmarks.against([2, 3, 8], [1, 2, 2], target=1.9)
    # Round by round: 2, 1.5 and 4.
    assert found == {"ratio": [2, 1.5, 4], "target": 1.9, "met": False}
    assert benchmarks.against([1], [2])["met"] is None


def test_contenders_take_turns():
    order = []

    def contender(name):
        return lambda: order.append(name) or (len(order), 0)

    found = benchmarks.in_turn({n: contender(n) for n in "abcd"}, rounds=8)
    turns = [order[i : i + 4] for i in range(0, 32, 4)]
    assert all(sorted(turn) == list("abcd") for turn in turns)
    # Each has been ahead of each other one.
    pairs = {pair for turn in turns for pair in itertools.pairwise(turn)}
    assert len(pairs) == 4 * 3
    assert found["b"] == [(i + 1, 0) for i, n in enumerate(order) if n == "b"]


def test_contenders_make_the_same_updates():
    """Their weights and their losses after two, of four micro-batches each."""
    found = step_time.contenders(CASES["mlp"], False, updates=2, steps=4)
    weights, losses = {}, {}
    for who, (fit, data) in found.items():
        result = fit(data, verbose=0)
        is_loop = isinstance(result, float)
        losses[who] = result if is_loop else result.history["loss"][0]
        model = fit.__self__.model if is_loop else fit.__self__
        weights[who] = [keras.ops.convert_to_numpy(v) for v in model.weights]
    expected = weights.pop("big_batch")
    for own in weights.values():
        for one, other in zip(own, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert losses == pytest.approx(
        dict.fromkeys(losses, losses["big_batch"]), rel=1e-5
    )


def test_the_best_of_both_are_compared():
    wall = {"window": [2.0], "window_16": [1.0], "big_batch": [4.0]}
    wall |= {"keras": [8.0], "keras_8": [2.5], "keras_128": [4.0]}
    wall |= {"loop": [1.5], "loop_16": [1.6]}
    found = {
        each["against"]: each
        for each in step_time.comparisons("mlp", wall, wall)
    }
    best = found["keras_at_its_best"]
    assert best["which"] == "keras_8" and best["of"] == "window_16"
    assert best["ratio"] == best["cpu_ratio"] == [0.4, 0.4, 0.4]
    assert best["met"] and best["target"] == 1
    best = found["loop_at_its_best"]
    assert (best["which"], best["of"]) == ("loop", "window_16")
    assert best["ratio"][0] == round(1 / 1.5, 3)
    assert found["keras"]["of"] == "window"
    assert found["keras"]["ratio"][0] == 0.25
    assert found["big_batch"]["ratio"][0] == 0.5
    assert "torch" not in found
    assert step_time.at_best("loop", wall) == "loop"
    found = step_time.compared("loop", "big_batch", wall, wall)
    assert found["ratio"][0] == 0.375 and found["target"] is None


@pytest.mark.parametrize("name", CASES)
def test_models_have_data(name):
    case = CASES[name]
    x, y = case.data(3)
    assert len(x) == len(y) == 3
    again, _ = case.data(3)
    assert (x == again).all()


def test_each_moment_belongs_to_one_part():
    marked = [
        ("window", 1, 4),
        ("forward and backward", 2, 3),
        ("input", 0, 2),
        ("window", 3.5, 6),
        ("Python", 9, 12),
    ]
    found = window_profile.partition(marked, 0, 10)
    assert found == {
        "forward and backward": 1,  # 2 to 3
        "update": 0,
        "window": 4,  # 1 to 2, 3 to 6
        "input": 1,  # 0 to 1
        "Python": 1,  # 9 to 10
        "between": 3,  # 6 to 9
    }


@pytest.mark.parametrize(
    ("thread", "name", "part"),
    [
        (
            "tf_Compute/1",
            "while/cond/dense_1_2/Relu:Relu",
            "forward and backward",
        ),
        (
            "tf_Compute/1",
            "while/gradient_tape/x/Tile:Tile",
            "forward and backward",
        ),
        ("tf_Compute/1", "cond_2/then/adam/Sub_10:Sub", "update"),
        ("tf_Compute/1", "while/AssignAddVariableOp_6:Assign", "window"),
        ("tf_data_x/1", "strided_slice:StridedSlice", "input"),
        ("tf_data_x/1", "Iterator::Root::Prefetch", "input"),
        ("tf_Compute/1", "ExecutorState::Process", None),
        ("python", "execute", None),
    ],
)
def test_parts_of_events(thread, name, part):
    found = window_profile.part_of(thread, name, {"dense"}, "adam")
    assert found == part


# --- The page --------------------------------------------------------------


def all_rows():
    return [NO_GPU] + [row for name in QUICK for row in printed(name).values()]


@pytest.mark.slow
def test_page_has_a_place_for_each_table():
    page = performance_report.PAGE.read_text()
    written = performance_report.written(page, all_rows())
    for text in (
        "Without XLA",
        "314",
        "AdamA",
        "nodes",
        "between",
        "no GPU here",
    ):
        assert text in written
    assert performance_report.written(written, all_rows()) == written
    # What was not measured stays.
    assert performance_report.written(written, []) == written


def test_tables_are_markdown():
    assert performance_report.table(["a", "b | c"], [[1, "2 | 3"]]) == [
        "| a | b | c |",
        "| --- | --- | --- |",
        "| 1 | 2 | 3 |",
    ]


def step_row(**changes):
    """A line of step_time.py; every ratio is 1."""
    ratio = {"ratio": [1, 1, 1], "cpu_ratio": [1, 1, 1], "target": None}
    best = {"of": "window", "which": "window", "against": "keras_at_its_best"}
    row = {
        "what": "step_time",
        "jit": False,
        "is_usual": not changes.keys() & performance_report.SWEPT,
        "micro_batch": 8,
        "steps": 8,
        "any_rows": False,
        "ms": {who: [2, 1, 3] for who in ("window", "big_batch")},
        "cpu_ms": {who: [2, 1, 3] for who in ("window", "big_batch")},
        "comparisons": [ratio | best],
        "by_hand": ratio,
        "against_big_batch": {who: [1, 1, 1] for who in ("window", "loop")},
        "parameters": 1,
        "updates": 1,
        "rounds": 1,
        "threads": 2,
        "torch": {"skipped": "not asked for"},
        **dict.fromkeys(FROM, "here"),
    }
    return row | changes


@pytest.mark.parametrize(
    "jit, models, command",
    [
        (False, [*CASES], "step_time"),
        (True, [*CASES], "step_time --jit"),
        (False, ["mlp"], "step_time --model=mlp"),
        (True, ["mlp", "cnn"], "step_time --jit --model=mlp --model=cnn"),
    ],
)
def test_the_command_names_the_models_of_its_table(jit, models, command):
    rows = [step_row(jit=jit, model=model) for model in models]
    text = "\n".join(performance_report.step_time(rows))
    assert f"`python -m benchmarks.{command}`, commit here" in text


def test_a_table_changes_one_thing_at_a_time():
    changes = [{}, {"steps": 2}, {"micro_batch": 4}, {"any_rows": True}]
    rows = [step_row(model="mlp", **change) for change in changes]
    rows += [step_row(model="cnn"), step_row(model="mlp", jit=True)]
    lines = [*performance_report.step_time(rows)]
    for flag, values in {
        "--micro_batch=EXAMPLES": [4, 8],
        "--steps=K": [2, 8],
        "--any_rows": ["no", "yes"],
    }.items():
        (end,) = (i for i, line in enumerate(lines) if flag in line)
        begin = end - 1 - len(values)
        assert [line.split(" | ")[:2] for line in lines[begin : end - 1]] == [
            ["| mlp", str(value)] for value in values
        ]
        assert lines[begin - 1].startswith("| ---")


@pytest.mark.slow
def test_lines_of_a_gpu_become_text():
    step = printed("step_time")["step_time"]
    memory = printed("memory")["memory_of_a_batch"]
    replicas = {"model": "mlp", "replicas": 2, "ms": [2, 1, 3]}
    limit = {"memory_mb": 2048, "rows": 2560, "micro_batch": 32}
    rows = [
        step | {"what": "gpu_step_time"},
        memory | {"what": "gpu_memory"},
        {"what": "gpu_limit", "cut_fits": True, "uncut_fits": False} | limit,
        step | {"what": "gpu_replicas"} | replicas,
    ]
    text = "\n".join(performance_report.gpu(rows))
    assert "2,560 examples does not fit uncut and fits in pieces of 32" in text
    assert "| mlp | 2 | 2.0 (1.0 to 3.0) |" in text
    assert "benchmarks.gpu" in text and "benchmarks.step_time" not in text
    # The tables of the processor do not show what a GPU does.
    assert not list(performance_report.step_time(rows))


def test_what_was_measured_otherwise_has_tables_of_its_own():
    """Of K = 2, 8 and 32, of micro-batches of 4 and 8, and with XLA."""
    best = {
        "against": "keras_at_its_best",
        "of": "window_16",
        "which": "keras_128",
        "ratio": [1.25, 1, 2],
        "cpu_ratio": [1.5, 1, 2],
    }
    usual = step_row(
        model="mlp",
        ms={
            "window_16": [1.6, 1.6, 2.4],
            "keras_128": [0.8, 0.8, 1.6],
            "big_batch": [1, 1, 1],
        },
        comparisons=[best],
        against_big_batch={"window": [4, 3, 5], "loop": [2, 1, 3]},
    )
    other = {"is_usual": False}
    rows = [
        usual | other | {"steps": 32},
        usual | other | {"micro_batch": 4},
        usual | other | {"steps": 2, "jit": True},
        usual | other | {"any_rows": True},
        usual,
    ]
    steps, sizes = (
        performance_report._not_compiled(rows, by)
        for by in ("steps", "micro_batch")
    )
    lines = performance_report._against_keras(steps, "steps", "title", "K")
    assert [line for line in lines if line.startswith("| mlp")] == [
        "| mlp | 8 | 200 (200 to 300) | 100 (100 to 200) "
        "| 1.25 (1.00 to 2.00) | 1.50 (1.00 to 2.00) |",
        "| mlp | 32 | 50 (50 to 75) | 25 (25 to 50) "
        "| 1.25 (1.00 to 2.00) | 1.50 (1.00 to 2.00) |",
    ]
    lines = list(performance_report._by_micro_batch(sizes))
    assert [line[:9] for line in lines if line.startswith("| mlp")] == [
        "| mlp | 4",
        "| mlp | 8",
    ]
    # One alone is no table.
    assert not performance_report._not_compiled([usual], "steps")


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="must have <!-- gpu -->"):
        performance_report.written("", [{"what": "gpu", "skipped": "x"}])


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    performance_report.plot(all_rows(), tmp_path / "bars.png")
    row = printed("window_profile")["window_profile"]
    marked = [("window", 0, 1, "tf_Compute/1", True)]
    window = window_profile.Profiled(0, 2, marked)
    assert window.operations() == {"window": 1}
    window_profile.draw(tmp_path / "profile.png", [row], [window])
    for name in ("bars.png", "profile.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
