"""Memory: of a window, by K, of the sums, and after many updates.

    python -m benchmarks.memory [--rounds=7]

Each measurement is a process of its own, on Linux: once a small batch has been
trained on, so that everything is traced and all variables are there, its peak
is set back (/proc/self/clear_refs) and `fit` runs once more. Printed is by how
much the peak of that `fit` lies above what was resident before, or, of
optimizers, before the model was made. glibc's malloc is told to give large
blocks back as soon as they are free: left alone, it keeps them after a while,
and the holes between them come to what is measured. One JSON line for each of

* `memory_of_a_batch`: a global batch uncut, and cut into 8 micro-batches, of a
  model with few parameters and many activations;
* `memory_by_steps`: K = 2 and K = 32 micro-batches of the same size;
* `memory_of_malloc`: 32 batches in one update and in 32, and with Keras' own
  model, with malloc as it comes and as it is told here;
* `memory_of_optimizers`: Adam and AdamA, of a model with many parameters and
  few activations;
* `memory_of_sums`: counted, for each `accumulator_dtype`, and with AdamA;
* `memory_after_updates`: resident memory, objects and traces after 200 and
  after 1,000 updates.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import benchmarks

PIECES = 8
STEPS = (2, 32)
DTYPES = ("float32", "bfloat16", "float64")
# From 1 MiB on each block is mapped by itself, and unmapped once it is free.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
# Eigen's kernels, which TensorFlow uses where oneDNN has no better ones: of
# those that there are they ask malloc most often.
EIGEN = {"TF_ENABLE_ONEDNN_OPTS": "0"}


# --- In a process of its own -----------------------------------------------


def resident(name):
    """Megabytes: VmRSS, resident now, or VmHWM, the most since."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"`/proc/self/status` must have a line {name}.")


def peak(rows, micro_batch, steps, batches=None, kind="tfaccum"):
    """Megabytes of one `fit`, of one update if not told how many batches."""
    import keras
    import tensorflow as tf

    import tfaccum
    from benchmarks.models import WIDE

    # Operations run in one order, whatever else the machine does.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if kind == "tfaccum":
        model = WIDE.compiled(
            tfaccum.Model,
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=steps,
            jit_compile=False,
        )
    else:
        model = WIDE.compiled(keras.Model, jit_compile=False)
    # One batch again and again: data take the same memory for every K.
    batch = tf.data.Dataset.from_tensor_slices(WIDE.data(rows)).batch(rows)
    data = batch.cache().repeat(batches or steps)
    few = batch.unbatch().take(micro_batch or 1).batch(1)
    model.fit(few, verbose=0)
    for _ in data:
        pass
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model.fit(data, verbose=0)
    return {"idle_mb": before, "mb": resident("VmHWM") - before}


def of_optimizer(name):
    """Megabytes of a model of many parameters and of its updates."""
    import keras
    import tensorflow as tf

    import tfaccum
    from benchmarks.models import HEAVY

    tf.config.threading.set_inter_op_parallelism_threads(1)
    kind = {"Adam": keras.optimizers.Adam, "AdamA": tfaccum.AdamA}[name]
    gc.collect()
    before = resident("VmRSS")
    model = HEAVY.compiled(
        tfaccum.Model,
        optimizer=kind(),
        micro_batch_size=HEAVY.micro_batch,
        on_nonfinite="raise",
        jit_compile=False,
    )
    data = HEAVY.data(4 * HEAVY.micro_batch)
    model.fit(*data, batch_size=len(data[0]), verbose=0)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    model.fit(*data, batch_size=len(data[0]), verbose=0)
    return {"mb": resident("VmHWM") - before}


def sums():
    """Bytes of the sums, counted, beside those of the parameters."""
    import tensorflow as tf

    import tfaccum
    from benchmarks.models import CASES

    case = CASES["mlp"]
    found = []
    for steps, dtype in [(1, None)] + [(2, dtype) for dtype in DTYPES]:
        model = case.compiled(
            tfaccum.Model,
            gradient_accumulation_steps=steps,
            accumulator_dtype=dtype,
        )
        model.fit(*case.data(16), batch_size=8, verbose=0)
        # Beside the gradients: loss, weight and examples, one float32 each.
        size = tf.as_dtype(dtype or "float32").size
        expected = model.count_params() * size + 12 if steps > 1 else 0
        found.append(counted(model, "Adam", steps, dtype, expected))
    model = case.compiled(
        tfaccum.Model,
        optimizer=tfaccum.AdamA(),
        micro_batch_size=4,
        on_nonfinite="raise",
    )
    model.fit(*case.data(16), batch_size=8, verbose=0)
    # In place of gradients one number for each variable.
    expected = 4 * len(model.trainable_variables) + 12
    return [*found, counted(model, "AdamA", 2, None, expected)]


def counted(model, optimizer, steps, dtype, expected):
    """One case of `sums`."""
    return {
        "optimizer": optimizer,
        "steps": steps,
        "accumulator_dtype": dtype,
        "parameters": model.count_params(),
        "bytes": model.accumulator_bytes,
        "expected_bytes": expected,
    }


def after(first, last):
    """What there is after so many updates, in epochs of 20."""
    import keras
    import tensorflow as tf

    from benchmarks import start
    from benchmarks.models import CASES

    case, found = CASES["mlp"], {}
    model = case.compiled(start.Traced, gradient_accumulation_steps=2)

    def look(epoch, logs=None):
        updates = 20 * (epoch + 1)
        # Looking takes memory by itself, the first time.
        if updates in (20, first, last):
            gc.collect()
            kinds = (tf.Tensor, tf.Variable, tf.data.Dataset)
            found[updates] = {
                "updates": updates,
                "mb": round(resident("VmRSS"), 1),
                "objects": sum(isinstance(o, kinds) for o in gc.get_objects()),
                "traces": sum(start.traces(model).values()),
            }

    model.fit(
        *case.data(20 * 2 * case.micro_batch),
        batch_size=case.micro_batch,
        epochs=last // 20,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)],
    )
    return [found[first], found[last]]


# --- In the process that starts them ---------------------------------------


def measured(function, *arguments, environment=MALLOC):
    """What a function of this file returns in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--child"]
        + [json.dumps([function.__name__, *arguments])],
        cwd=Path(__file__).parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{function.__name__}{arguments}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def in_pairs(cases, rounds, function=peak, environment=MALLOC):
    """Megabytes of each case, by round; two at a time, untimed."""

    def case_measured(case):
        return measured(function, *case, environment=environment)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(case_measured, cases * rounds))
    return [
        [each["mb"] for each in found[i :: len(cases)]]
        for i in range(len(cases))
    ]


def of_malloc(rows, rounds):
    """Megabytes of a number of batches, with malloc left alone and told."""
    batches = STEPS[-1]
    cases = {
        "one_update": (rows, None, batches),
        "updates": (rows, None, 1, batches),
        "keras": (rows, None, 1, batches, "keras"),
    }
    found = {
        key: in_pairs(list(cases.values()), rounds, environment=environment)
        for key, environment in [
            ("alone_mb", EIGEN),
            ("told_mb", EIGEN | MALLOC),
        ]
    }
    return {
        "rows": rows,
        "batches": batches,
        "rounds": rounds,
        "cases": [
            {"who": who}
            | {key: benchmarks.spread(mb[i], 1) for key, mb in found.items()}
            for i, who in enumerate(cases)
        ],
    }


def lines(rows, rounds, updates):
    """One line of what was found after the other."""
    micro = rows // PIECES
    uncut, cut = in_pairs([(rows, None, 1), (rows, micro, 1)], rounds)
    yield {
        "what": "memory_of_a_batch",
        "rows": rows,
        "pieces": PIECES,
        "rounds": rounds,
        "uncut_mb": benchmarks.spread(uncut, 1),
        "cut_mb": benchmarks.spread(cut, 1),
        **benchmarks.against(cut, uncut, 0.35),
    }
    few, many = in_pairs([(micro, None, steps) for steps in STEPS], rounds)
    yield {
        "what": "memory_by_steps",
        "rows": micro,
        "steps": STEPS,
        "rounds": rounds,
        "mb": [benchmarks.spread(few, 1), benchmarks.spread(many, 1)],
        **benchmarks.against(many, few, 1.02),
    }
    yield {"what": "memory_of_malloc", **of_malloc(micro, rounds)}
    adam, adama = in_pairs([("Adam",), ("AdamA",)], rounds, of_optimizer)
    yield {
        "what": "memory_of_optimizers",
        "rounds": rounds,
        "adam_mb": benchmarks.spread(adam, 1),
        "adama_mb": benchmarks.spread(adama, 1),
        **benchmarks.against(adama, adam, None),
    }
    yield {"what": "memory_of_sums", "cases": measured(sums)}
    yield {
        "what": "memory_after_updates",
        "after": measured(after, *updates),
    }


def main():
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, nargs=2, default=[200, 1000])
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        name, *arguments = asked.child
        print(json.dumps(globals()[name](*arguments)))
        return
    for line in lines(asked.rows, asked.rounds, asked.updates):
        print(json.dumps(line | benchmarks.where()), flush=True)


if __name__ == "__main__":
    main()
