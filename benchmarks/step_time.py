"""Time of one update of K micro-batches, against everyone; K is 8.

    python -m benchmarks.step_time [--model=transformer] [--jit] [--steps=K]
        [--any_rows]

On one device, for the same examples and the same model, in turn:

* `window`: tfaccum, `gradient_accumulation_steps=8`; `window_16`: the same with
  16 windows in one call, `steps_per_execution=16`;
* `cut`: tfaccum, one batch of all examples and `micro_batch_size`;
* `big_batch`: Keras, one batch of all examples;
* `keras`, `keras_8`, `keras_128`: Keras' own `gradient_accumulation_steps=8`,
  with `steps_per_execution` 1, 8 and 128, which is 16 windows;
* `loop`: a `tf.function` written by hand that adds up and applies; `loop_16`:
  the same with 16 windows in one call;
* `torch`: the same model and the usual loop in PyTorch, in a process of its
  own, if `--torch_python` has it.

With another K, as many windows are in one call as there are 128 micro-steps.
Batches have a number of rows that is known beforehand (`drop_remainder=True`),
or with `--any_rows` one that is not.

Each is a whole `fit` (or a Python loop) over the same dataset in memory, after
one that traced. Whoever has `steps_per_execution` is compared at its best too.
Prints one JSON line per model: milliseconds per update, wall
and CPU, median, least and most of `--rounds`; and ratios, round by round.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf

import benchmarks
import tfaccum
from benchmarks.models import CASES, loss, rows_of

STEPS = 8
# Micro-steps in one call, where there are several windows.
CALL = 128
# What the window's time over another's is to be at most, by model. Of both the
# best is taken where the other's name says so.
TARGETS = {
    "big_batch": {"transformer": 1.05, "cnn": 1.05},
    "keras_at_its_best": {"transformer": 1.0, "cnn": 1.0, "mlp": 1.0},
    "keras": {"mlp": 0.5},
    "loop_at_its_best": {"transformer": 1.03, "cnn": 1.03, "mlp": 1.03},
    "loop": {},
    "torch": {},
}


class Loop:
    """What one would write by hand; `fit` takes a dataset and nothing else.

    As in TensorFlow's guide, a metric keeps the mean of the loss.
    """

    def __init__(self, model, optimizer, jit, steps, windows):
        self.model, self._optimizer, self._loss = model, optimizer, loss()
        self._mean = keras.metrics.Mean()
        self._steps, self._windows = steps, windows
        self._sums = [tf.Variable(tf.zeros(v.shape)) for v in model.weights]
        optimizer.build(model.trainable_variables)
        self._gradients = tf.function(self._gradient, jit_compile=jit)

    def _gradient(self, x, y):
        with tf.GradientTape() as tape:
            value = self._loss(y, self.model(x, training=True))
        found = tape.gradient(value, self.model.trainable_variables)
        return value, [tf.convert_to_tensor(g) for g in found]

    @tf.function
    def _updates(self, iterator, number):
        for _ in tf.range(number):
            for _ in tf.range(self._steps):
                value, gradients = self._gradients(*next(iterator))
                self._mean.update_state(value)
                for total, gradient in zip(self._sums, gradients, strict=True):
                    total.assign_add(gradient / self._steps)
            self._optimizer.apply(self._sums, self.model.trainable_variables)
            for total in self._sums:
                total.assign(tf.zeros_like(total))

    def fit(self, data, **_):
        """One pass over the data; returns the mean loss."""
        self._mean.reset_state()
        iterator = iter(data)
        left = int(data.cardinality()) // self._steps
        while left:
            number = min(left, self._windows)
            self._updates(iterator, tf.constant(number))
            left -= number
        return float(self._mean.result())


class Torch:
    """torch_loop.py in a process; `found` says what is there, or why not."""

    def __init__(self, python, name, micro_batch, updates, steps, threads):
        numbers = map(str, (micro_batch, updates, steps, threads))
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.torch_loop", name, *numbers],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._process.stdout.readline()
        self.found = json.loads(first or '{"skipped": "it ended at once"}')

    def run(self):
        """Seconds of one pass over its data."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds = tuple(json.loads(self._process.stdout.readline()))
        time.sleep(0.5)  # Its threads wait for more work, and do not sleep yet.
        return seconds

    def end(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def contenders(case, jit, updates, steps=STEPS, any_rows=False):
    """(fit, dataset) by name, all in this process."""
    micro = case.micro_batch
    windows = max(1, CALL // steps)
    rows = rows_of(case.data(micro * steps * updates))

    def batches(size, ahead):
        # Nothing is left over.
        batched = rows.batch(size, drop_remainder=not any_rows)
        return batched.cache().prefetch(ahead)

    whole, cut = batches(micro * steps, 2), batches(micro, 2 * steps)
    model = functools.partial(case.compiled, jit_compile=jit)

    def own(steps_per_execution):
        adam = keras.optimizers.Adam(gradient_accumulation_steps=steps)
        return model(
            keras.Model,
            optimizer=adam,
            steps_per_execution=steps_per_execution,
        ).fit

    def by_hand(windows):
        keras.utils.set_random_seed(1)
        model = keras.Model(*case.layers())
        return Loop(model, keras.optimizers.Adam(), jit, steps, windows).fit

    window = functools.partial(
        model, tfaccum.Model, gradient_accumulation_steps=steps
    )
    several = {
        f"window_{windows}": (window(steps_per_execution=windows).fit, cut),
        f"keras_{windows * steps}": (own(windows * steps), cut),
        f"loop_{windows}": (by_hand(windows), cut),
    }
    return {
        "window": (window().fit, cut),
        "cut": (model(tfaccum.Model, micro_batch_size=micro).fit, whole),
        "big_batch": (model(keras.Model).fit, whole),
        "keras": (own(1), cut),
        f"keras_{steps}": (own(steps), cut),
        "loop": (by_hand(1), cut),
        **(several if windows > 1 else {}),
    }


def measure(
    name,
    *,
    jit=False,
    rounds=7,
    updates=None,
    micro_batch=None,
    steps=STEPS,
    any_rows=False,
    threads=2,
    torch_python=None,
):
    """One model: all contenders in turn, and how the window compares."""
    case = CASES[name]
    if micro_batch:
        case = dataclasses.replace(case, micro_batch=micro_batch)
    updates = updates or max(1, case.updates * STEPS // steps)
    found = contenders(case, jit, updates, steps, any_rows)
    for fit, data in found.values():
        fit(data, verbose=0)
    runs = {
        who: functools.partial(
            benchmarks.timed, functools.partial(fit, data, verbose=0)
        )
        for who, (fit, data) in found.items()
    }
    about_torch = {"skipped": "not asked for"}
    with contextlib.ExitStack() as stack:
        if torch_python:
            torch = Torch(
                torch_python, name, case.micro_batch, updates, steps, threads
            )
            stack.callback(torch.end)
            about_torch = torch.found
            if "skipped" not in about_torch:
                runs["torch"] = torch.run
        seconds = benchmarks.in_turn(runs, rounds)
    wall, cpu = (
        {who: [pair[i] for pair in pairs] for who, pairs in seconds.items()}
        for i in (0, 1)
    )
    return {
        "what": "step_time",
        "model": name,
        "jit": jit,
        "parameters": keras.Model(*case.layers()).count_params(),
        "micro_batch": case.micro_batch,
        "is_usual": not (micro_batch or any_rows) and steps == STEPS,
        "steps": steps,
        "any_rows": any_rows,
        "updates": updates,
        "rounds": rounds,
        "threads": threads,
        "torch": about_torch,
        "ms": per_update(wall, updates),
        "cpu_ms": per_update(cpu, updates),
        "comparisons": comparisons(name, wall, cpu),
        # What nobody can save who makes the same micro-batches.
        "by_hand": compared(at_best("loop", wall), "big_batch", wall, cpu),
        # Of processor time, since it is the arithmetic that counts there.
        "against_big_batch": {
            who: benchmarks.against(cpu[who], cpu["big_batch"])["ratio"]
            for who in ("window", "loop")
        },
        **benchmarks.where(),
    }


def per_update(seconds, updates):
    """Milliseconds by name: median, least, most."""
    return {
        who: benchmarks.spread([1e3 * s / updates for s in values])
        for who, values in seconds.items()
    }


def comparisons(name, wall, cpu):
    """The window's time over that of others, beside the target."""
    found = []
    for other, targets in TARGETS.items():
        ours, theirs = "window", other
        if other.endswith("_at_its_best"):
            ours = at_best("window", wall)
            theirs = at_best(other.partition("_")[0], wall)
        if theirs in wall:
            target = targets.get(name)
            found.append(compared(ours, theirs, wall, cpu, target))
            found[-1]["against"] = other
    return found


def at_best(kind, wall):
    """The fastest of one kind, however many windows it has in a call."""
    found = [who for who in wall if who.partition("_")[0] == kind]
    return min(found, key=lambda who: statistics.median(wall[who]))


def compared(ours, theirs, wall, cpu, target=None):
    """Ratios of one to another, in time and in processor time."""
    return {
        "of": ours,
        "which": theirs,
        **benchmarks.against(wall[ours], wall[theirs], target),
        "cpu_ratio": benchmarks.against(cpu[ours], cpu[theirs])["ratio"],
    }


def use_threads(threads):
    """So many for TensorFlow too, before it has made any."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def main():
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CASES, action="append")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, help="in one fit")
    parser.add_argument("--micro_batch", type=int, help="examples in one")
    parser.add_argument("--steps", type=int, default=STEPS, help="K")
    parser.add_argument("--any_rows", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--torch_python",
        default=sys.executable,
        help="a Python that has PyTorch",
    )
    asked = vars(parser.parse_args())
    use_threads(asked["threads"])
    for name in asked.pop("model") or CASES:
        print(json.dumps(measure(name, **asked)), flush=True)


if __name__ == "__main__":
    main()
