"""The arithmetic of the batch plan: hand-computed cases and properties."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tfaccum.batching import BatchPlan

SIZES = st.integers(min_value=1, max_value=64)
SOURCES = {
    "global_batch_size": "--global_batch",
    "micro_batch_size": "--micro_batch",
    "num_replicas": "MirroredStrategy",
    "gradient_accumulation_steps": "--accumulation_steps",
}


def advised(message):
    """Reads the changes out of an error: pairs of a name and a value."""
    advice = message.split(" Change ")[1].rstrip(".")
    pairs = []
    for way in advice.split("; or "):
        name, values = way.split(" to ")
        pairs += [(name, int(value)) for value in values.split(" or ")]
    return pairs


@pytest.mark.parametrize(
    "given_sizes",
    [
        {"global_batch_size": 512, "micro_batch_size": 16},
        {"global_batch_size": 512, "gradient_accumulation_steps": 8},
        {"micro_batch_size": 16, "gradient_accumulation_steps": 8},
        {
            "global_batch_size": 512,
            "micro_batch_size": 16,
            "gradient_accumulation_steps": 8,
        },
    ],
)
def test_derives_the_missing_number(given_sizes):
    plan = BatchPlan.derive(num_replicas=4, **given_sizes)
    assert plan == BatchPlan(
        global_batch_size=512,
        micro_batch_size=16,
        num_replicas=4,
        gradient_accumulation_steps=8,
    )
    assert plan.dataset_batch_size == 64
    assert plan.describe() == (
        "global batch 512 = 16 micro-batch x 4 replicas x 8 micro-steps "
        "(8 dataset batches of 64)"
    )


def test_describe_says_one_of_a_thing_in_the_singular():
    plan = BatchPlan.derive(
        num_replicas=1, micro_batch_size=1, gradient_accumulation_steps=1
    )
    assert plan.describe() == (
        "global batch 1 = 1 micro-batch x 1 replica x 1 micro-step "
        "(1 dataset batch of 1)"
    )


def test_plan_is_frozen_hashable_and_pickles():
    plan = BatchPlan.derive(
        num_replicas=2,
        micro_batch_size=3,
        gradient_accumulation_steps=4,
        sources=SOURCES,
    )
    unnamed = BatchPlan(24, 3, 2, 4)
    assert plan == unnamed and hash(plan) == hash(unnamed)
    assert pickle.loads(pickle.dumps(plan)).sources == SOURCES
    with pytest.raises(AttributeError):
        plan.micro_batch_size = 5


def test_sources_are_copied():
    sources = dict(SOURCES)
    plan = BatchPlan.derive(
        num_replicas=1,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sources=sources,
    )
    sources.clear()
    assert plan.sources == SOURCES


def test_numpy_integers_become_ints():
    plan = BatchPlan.derive(
        num_replicas=np.int32(2),
        micro_batch_size=np.int64(3),
        gradient_accumulation_steps=np.uint8(4),
    )
    assert plan.global_batch_size == 24
    for value in (plan.num_replicas, plan.micro_batch_size):
        assert type(value) is int


@pytest.mark.parametrize("name", sorted(SOURCES))
@pytest.mark.parametrize("value", [True, 4.0, "4", np.float32(4), np.True_])
def test_a_number_that_is_no_int_is_a_type_error(name, value):
    numbers = {**dict.fromkeys(SOURCES, 1), name: value}
    for make in (BatchPlan, BatchPlan.derive):
        with pytest.raises(
            TypeError, match=f"`{name}` must be an int. Received: {name}="
        ):
            make(**numbers)


@pytest.mark.parametrize("name", sorted(SOURCES))
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_below_one_is_a_value_error(name, value):
    numbers = {**dict.fromkeys(SOURCES, 1), name: value}
    for make in (BatchPlan, BatchPlan.derive):
        with pytest.raises(
            ValueError,
            match=rf"`{name}` must be at least 1. Received: {name}={value} "
            rf"\(from {SOURCES[name]}\)",
        ):
            make(**numbers, sources=SOURCES)


def test_num_replicas_is_never_derived():
    with pytest.raises(TypeError, match="`num_replicas` must be an int"):
        BatchPlan.derive(
            num_replicas=None,
            global_batch_size=4,
            micro_batch_size=2,
            gradient_accumulation_steps=2,
        )


@pytest.mark.parametrize(
    ("given_sizes", "advice"),
    [
        (
            {},
            "Give two of `global_batch_size`, `micro_batch_size`, "
            "`gradient_accumulation_steps`.",
        ),
        (
            {"global_batch_size": 8},
            "Give `micro_batch_size` or `gradient_accumulation_steps` as well.",
        ),
        (
            {"micro_batch_size": 8},
            "Give `global_batch_size` or `gradient_accumulation_steps` as "
            "well.",
        ),
        (
            {"gradient_accumulation_steps": 8},
            "Give `global_batch_size` or `micro_batch_size` as well.",
        ),
    ],
)
def test_too_little_given_says_what_to_give(given_sizes, advice):
    with pytest.raises(ValueError) as error:
        BatchPlan.derive(num_replicas=2, **given_sizes)
    message = str(error.value)
    assert message.endswith(advice)
    assert "Received: " in message and "num_replicas=2 (given)" in message
    assert "=None (not given)" in message


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        ({"batch": "--batch"}, ValueError),
        ({"num_replicas": 4}, TypeError),
        (["--batch"], TypeError),
    ],
)
def test_sources_are_checked(sources, error):
    with pytest.raises(error, match="`sources` must .* Received: sources="):
        BatchPlan.derive(
            num_replicas=1,
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            sources=sources,
        )


def test_M1_error_names_all_four_numbers_and_their_origin():
    with pytest.raises(ValueError) as error:
        BatchPlan.derive(
            num_replicas=4,
            global_batch_size=256,
            micro_batch_size=24,
            sources=SOURCES,
        )
    assert str(error.value) == (
        "`global_batch_size` must be divisible by micro_batch_size x "
        "num_replicas (= 96), but 256 = 24 x 4 x 2.667 (micro_batch_size x "
        "num_replicas x gradient_accumulation_steps) leaves a rest of 64. "
        "Received: global_batch_size=256 (from --global_batch), "
        "micro_batch_size=24 (from --micro_batch), "
        "num_replicas=4 (from MirroredStrategy), "
        "gradient_accumulation_steps=2.667 (derived, 256 / 96, not whole). "
        "Change global_batch_size to 192 or 288; "
        "or micro_batch_size to 16 or 32."
    )


def test_M1_a_replica_count_seen_as_one_is_shown_in_the_product():
    with pytest.raises(ValueError) as error:
        BatchPlan.derive(
            num_replicas=1,
            global_batch_size=256,
            micro_batch_size=4,
            gradient_accumulation_steps=8,
            sources={"num_replicas": "no strategy"},
        )
    assert str(error.value) == (
        "`global_batch_size` must equal micro_batch_size x num_replicas x "
        "gradient_accumulation_steps, but 256 != 4 x 1 x 8 (= 32). "
        "Received: global_batch_size=256 (given), micro_batch_size=4 (given), "
        "num_replicas=1 (from no strategy), gradient_accumulation_steps=8 "
        "(given). Change global_batch_size to 32; or micro_batch_size to 32; "
        "or num_replicas to 8; or gradient_accumulation_steps to 64."
    )


def test_M1_only_ways_that_are_possible_are_advised():
    # 255 / 32 is below 1 micro-batch for no K, and 255 = 3 x 5 x 17.
    with pytest.raises(ValueError) as error:
        BatchPlan.derive(
            num_replicas=4,
            global_batch_size=255,
            gradient_accumulation_steps=8,
        )
    assert advised(str(error.value)) == [
        ("global_batch_size", 224),
        ("global_batch_size", 256),
    ]
    # A global batch of 0 is below and no plan.
    with pytest.raises(ValueError) as error:
        BatchPlan.derive(
            num_replicas=4, global_batch_size=3, micro_batch_size=8
        )
    assert advised(str(error.value)) == [("global_batch_size", 32)]


@given(replicas=SIZES, size=st.integers(1, 500), factor=SIZES)
@example(replicas=4, size=256, factor=24)
@pytest.mark.parametrize(
    "factor_name", ["micro_batch_size", "gradient_accumulation_steps"]
)
def test_M1_every_advised_value_is_valid_and_nearest(
    factor_name, replicas, size, factor
):
    numbers = {
        "num_replicas": replicas,
        "global_batch_size": size,
        factor_name: factor,
    }
    assume(size % (replicas * factor))
    with pytest.raises(ValueError) as error:
        BatchPlan.derive(**numbers)
    pairs = advised(str(error.value))
    assert pairs
    for name, value in pairs:
        BatchPlan.derive(**{**numbers, name: value})
        step = 1 if value < numbers[name] else -1
        for between in range(value + step, numbers[name], step):
            with pytest.raises(ValueError):
                BatchPlan.derive(**{**numbers, name: between})


@given(size=SIZES, micro=SIZES, replicas=SIZES, steps=SIZES)
def test_M1_numbers_that_disagree_are_refused_with_valid_advice(
    size, micro, replicas, steps
):
    numbers = {
        "global_batch_size": size,
        "micro_batch_size": micro,
        "num_replicas": replicas,
        "gradient_accumulation_steps": steps,
    }
    assume(size != micro * replicas * steps)
    for make in (BatchPlan, BatchPlan.derive):
        with pytest.raises(ValueError) as error:
            make(**numbers)
        message = str(error.value)
        assert f"{size} != {micro} x {replicas} x {steps} (= " in message
        for name, value in numbers.items():
            assert f"{name}={value} (given)" in message
        for name, value in advised(message):
            BatchPlan(**{**numbers, name: value})


@given(micro=SIZES, replicas=SIZES, steps=SIZES)
def test_any_two_sizes_give_the_same_plan(micro, replicas, steps):
    sizes = {
        "global_batch_size": micro * replicas * steps,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": steps,
    }
    plans = {
        BatchPlan.derive(
            num_replicas=replicas,
            **{name: size for name, size in sizes.items() if name != left_out},
        )
        for left_out in (None, *sizes)
    }
    (plan,) = plans
    assert plan.global_batch_size == (
        plan.dataset_batch_size * plan.gradient_accumulation_steps
    )
    numbers = [int(number) for number in re.findall(r"\d+", plan.describe())]
    assert numbers == [
        micro * replicas * steps,
        micro,
        replicas,
        steps,
        steps,
        micro * replicas,
    ]


def test_B3_windows_of_one_epoch_are_counted_one_by_one():
    for num_batches in range(1, 13):
        for steps in range(1, 6):
            plan = BatchPlan.derive(
                num_replicas=2,
                micro_batch_size=3,
                gradient_accumulation_steps=steps,
            )
            executed = 0
            left = num_batches
            while left > 0:
                left -= steps
                executed += 1
            assert plan.windows(num_batches) == executed
            examples = num_batches * plan.dataset_batch_size
            for epochs in range(1, 4):
                planned = epochs * plan.updates_per_epoch(examples)
                assert planned == epochs * executed


@given(
    micro=SIZES, replicas=SIZES, steps=SIZES, num_examples=st.integers(0, 9999)
)
def test_B3_updates_by_examples_and_by_batches_agree(
    micro, replicas, steps, num_examples
):
    plan = BatchPlan.derive(
        num_replicas=replicas,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
    )
    updates = plan.updates_per_epoch(num_examples)
    batches = plan.batches_per_epoch(num_examples)
    assert plan.windows(batches) == updates
    # No example is left out, and no window is empty.
    assert updates * plan.global_batch_size >= num_examples
    assert (updates - 1) * plan.global_batch_size < max(num_examples, 1)
    assert batches * plan.dataset_batch_size >= num_examples
    assert (batches - 1) * plan.dataset_batch_size < max(num_examples, 1)


def test_B5_schedule_length_counts_the_short_last_window():
    plan = BatchPlan.derive(
        num_replicas=1, micro_batch_size=1, gradient_accumulation_steps=4
    )
    assert plan.windows(10) == 3
    assert plan.updates_per_epoch(10) == 3
    assert [5 * plan.updates_per_epoch(n) for n in (8, 9, 12)] == [10, 15, 15]


def test_counting_is_exact_beyond_the_integers_of_a_float():
    plan = BatchPlan(3, 1, 1, 3)
    assert plan.windows(3 * 10**20 + 1) == 10**20 + 1
    assert plan.updates_per_epoch(3 * 10**20) == 10**20


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("updates_per_epoch", "num_examples"),
        ("batches_per_epoch", "num_examples"),
        ("windows", "num_batches"),
    ],
)
def test_counts_are_checked(method, name):
    count = getattr(BatchPlan(1, 1, 1, 1), method)
    assert count(0) == 0
    with pytest.raises(ValueError, match=f"`{name}` must be at least 0"):
        count(-1)
    with pytest.raises(TypeError, match=f"`{name}` must be an int"):
        count(2.0)


def test_module_runs_without_tensorflow():
    path = Path(__file__).parents[1] / "tfaccum" / "batching.py"
    program = (
        "import runpy, sys\n"
        f"names = runpy.run_path({str(path)!r})\n"
        "print(names['BatchPlan'](6, 1, 2, 3).describe())\n"
        "heavy = {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("global batch 6 = 1 micro-batch x 2 replicas")
