"""Speed and memory on one or more GPUs.

    python -m benchmarks.gpu [--memory_mb=2048]

Prints one JSON line for each of

* `gpu_step_time`: as in step_time.py, on a GPU, with and without XLA;
* `gpu_memory`: the most that the first GPU has held beside what it held
  before, for a global batch uncut and cut into 8 micro-batches;
* `gpu_limit`: whether an update of a batch that the memory does not hold is
  made, uncut and cut, with `--memory_mb` of it; expected: no, and yes;
* `gpu_replicas`: milliseconds of a window on one GPU, two, and so on, with as
  many micro-batches on each.

Each is measured in a process of its own: the memory of a GPU can be limited
only before it is first used. Without a GPU it says so, with status 0.
"""

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

import benchmarks
import tfaccum
from benchmarks import step_time
from benchmarks.memory import PIECES
from benchmarks.models import CASES, WIDE

# 256 examples of `WIDE` take about 0.5 GB; these take ten times that.
TOO_MANY = 2560


def update(rows, micro_batch):
    """Makes a function that trains on one batch of so many rows."""
    model = WIDE.compiled(
        tfaccum.Model, micro_batch_size=micro_batch, jit_compile=False
    )
    x, y = WIDE.data(rows)
    with tf.device("CPU"):
        data = tf.data.Dataset.from_tensors((x, y))
    return functools.partial(model.fit, data, verbose=0)


def fits(train):
    """Whether there is memory for it."""
    try:
        train()
    except tf.errors.ResourceExhaustedError:
        return False
    return True


def speed(name, jit, rounds):
    """A line of step_time.py."""
    row = step_time.measure(name, jit=jit, rounds=rounds, threads=None)
    return row | {"what": "gpu_step_time"}


def memory(rows, rounds):
    """Megabytes that a batch takes, uncut and cut."""
    device, found = "GPU:0", []
    for micro_batch in (None, rows // PIECES):
        train = update(rows, micro_batch)
        train()
        peaks = []
        for _ in range(rounds):
            tf.config.experimental.reset_memory_stats(device)
            before = tf.config.experimental.get_memory_info(device)["current"]
            train()
            info = tf.config.experimental.get_memory_info(device)
            peaks.append((info["peak"] - before) / 2**20)
        found.append(peaks)
    uncut, cut = found
    return {
        "what": "gpu_memory",
        "rows": rows,
        "pieces": PIECES,
        "rounds": rounds,
        "uncut_mb": benchmarks.spread(uncut, 1),
        "cut_mb": benchmarks.spread(cut, 1),
        **benchmarks.against(cut, uncut, 0.35),
    }


def limit(megabytes, rows):
    """Whether a batch fits into so much memory, uncut and cut."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("GPU")[0],
        [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)],
    )
    return {
        "what": "gpu_limit",
        "memory_mb": megabytes,
        "rows": rows,
        "micro_batch": WIDE.micro_batch,
        # The cut one first: memory that has run out once may be in pieces.
        "cut_fits": fits(update(rows, WIDE.micro_batch)),
        "uncut_fits": fits(update(rows, None)),
    }


def replicas(number, name, rounds):
    """Milliseconds of a window on the first GPUs."""
    strategy = tfaccum.make_strategy(
        devices=[f"GPU:{i}" for i in range(number)]
    )
    case, steps = CASES[name], step_time.STEPS
    with strategy.scope():
        model = case.compiled(
            tfaccum.Model, gradient_accumulation_steps=steps, jit_compile=False
        )
    rows = case.micro_batch * number
    data = tf.data.Dataset.from_tensor_slices(
        case.data(rows * steps * case.updates)
    )
    data = data.batch(rows).cache().prefetch(2 * steps)
    fit = functools.partial(model.fit, data, verbose=0)
    fit()
    run = functools.partial(benchmarks.timed, fit)
    seconds = benchmarks.in_turn({"window": run}, rounds)["window"]
    return {
        "what": "gpu_replicas",
        "model": name,
        "replicas": number,
        "steps": steps,
        "rounds": rounds,
        "ms": benchmarks.spread([1e3 * s / case.updates for s, _ in seconds]),
    }


def parts(gpus, asked):
    """Name and arguments of each function that is to print a line."""
    for jit in (False, True):
        for name in CASES:
            yield "speed", name, jit, asked.rounds
    yield "memory", asked.rows, asked.rounds
    yield "limit", asked.memory_mb, asked.too_many
    for number in range(1, gpus + 1):
        yield "replicas", number, "transformer", asked.rounds


def main():
    """Measures each part in a process, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--memory_mb", type=int, default=2048)
    parser.add_argument("--too_many", type=int, default=TOO_MANY)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        name, *arguments = asked.child
        line = benchmarks.where() | globals()[name](*arguments)
        print(json.dumps(line), flush=True)
        return 0
    gpus = len(tf.config.list_physical_devices("GPU"))
    if not gpus:
        print(json.dumps({"what": "gpu", "skipped": "no GPU here"}))
        return 0
    failed = 0
    for part in parts(gpus, asked):
        command = [sys.executable, "-m", "benchmarks.gpu", "--child"]
        done = subprocess.run(
            [*command, json.dumps(part)],
            cwd=Path(__file__).parents[1],
            check=False,
        )
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
