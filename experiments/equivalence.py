"""Every strategy, precision and K against one big batch on one device.

For each combination, two updates of a small CNN on the digits, the second
with fewer examples, which neither K nor the replicas divide; and the same two
in plain Keras, without a strategy, each as one batch. Printed is the largest
difference of a weight after an update, divided by the largest change of a
weight in it.

    PYTHONPATH=. python experiments/equivalence.py

Expected: no number above its tolerance, see `tfaccum.train.verify.tolerance`;
otherwise the exit code is 1. Measured, the largest of all strategies and of
K = 1, 2, 8:

| precision | difference | tolerance |
|---|---|---|
| float64 | 2.3e-15 | 2.0e-14 |
| float32 | 4.0e-06 | 1.1e-05 |
| mixed_float16 | 3.2e-04 | 7.8e-03 |
| mixed_bfloat16 | 3.7e-03 | 6.2e-02 |

On one device with K = 1 it is 0 in every precision. Measured at commit
2b58c33 on 2 cores of Intel(R) Xeon(R) Processor, no GPU, beside five other
jobs in about 7 min (160 s with fewer); TensorFlow 2.21.0, Keras 3.15.1.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

tf.get_logger().setLevel("ERROR")  # Many models are not much retracing.

import tfaccum  # noqa: E402
from tfaccum.datasets import digits  # noqa: E402
from tfaccum.train import verify  # noqa: E402

PRECISIONS = ("float64", "float32", "mixed_float16", "mixed_bfloat16")
STEPS = (1, 2, 8)
SIZES = (128, 100)
QUICK_PRECISIONS = ("float32",)
QUICK_STEPS = (1, 8)


def make_model():
    """A convolution and a dense layer."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, dtype=keras.config.floatx()),
        ]
    )


def compile_arguments():
    """Momentum SGD with clipping and weight decay."""
    return {
        "optimizer": keras.optimizers.SGD(
            0.1, momentum=0.9, global_clipnorm=1.0, weight_decay=0.01
        ),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "jit_compile": False,
    }


def windows(steps):
    """The batches of two updates, each cut into so many."""
    images, labels = digits.load()
    images = images[..., np.newaxis] / 16.0
    cuts = np.cumsum([0, *SIZES])
    return [
        [
            (tf.constant(images[rows]), tf.constant(labels[rows]))
            for rows in np.array_split(np.arange(first, end), steps)
        ]
        for first, end in zip(cuts[:-1], cuts[1:], strict=True)
    ]


def measure(strategies, precisions, all_steps):
    """Prints a line per strategy and precision; returns all numbers."""
    rows = []
    for precision in precisions:
        floatx = "float64" if precision == "float64" else "float32"
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(precision)
        keras.utils.set_random_seed(1)
        reference = make_model()
        reference.compile(**compile_arguments())
        expected = verify.big_batch_updates(
            reference, reference.get_weights(), windows(1)
        )
        for name, strategy in strategies.items():
            differences = []
            for steps in all_steps:
                with strategy.scope():
                    model = tfaccum.Model.from_keras(make_model())
                    model.compile(
                        **compile_arguments(),
                        gradient_accumulation_steps=steps,
                    )
                found = verify.relative_differences(
                    model, expected, windows(steps)
                )
                differences.append(max(found, default=float("nan")))
            rows.append((name, precision, differences))
            print(line(*rows[-1]), flush=True)
    return rows


def line(name, precision, differences):
    """One row of the table."""
    cells = "".join(f"{difference:10.1e}" for difference in differences)
    return f"{name:13}{precision:15}{cells}{allowed(precision):12.1e}"


def allowed(precision):
    """What rounding may explain."""
    return verify.tolerance(precision.removeprefix("mixed_"), SIZES[0])


def run_two_workers(arguments):
    """Runs this file as two processes; returns the rows of the chief."""
    with tempfile.TemporaryDirectory() as directory:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        hosts = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for free in sockets:
            free.close()
        result = Path(directory) / "rows.json"
        processes = []
        for index in range(2):
            config = {
                "cluster": {"worker": hosts},
                "task": {"type": "worker", "index": index},
            }
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        __file__,
                        f"--worker={result}",
                        *arguments,
                    ],
                    env={**os.environ, "TF_CONFIG": json.dumps(config)},
                    stdout=None if index == 0 else subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"Two workers ended with {codes}.")
        return json.loads(result.read_text())


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of it")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    what = (PRECISIONS, STEPS)
    if arguments.quick:
        what = (QUICK_PRECISIONS, QUICK_STEPS)
    if arguments.worker:
        strategies = {"2 workers": tfaccum.make_strategy()}
        rows = measure(strategies, *what)
        Path(arguments.worker).write_text(json.dumps(rows))
        return 0
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 4
    )
    devices = [f"CPU:{index}" for index in range(4)]
    strategies = {
        "no strategy": tf.distribute.get_strategy(),
        "OneDevice": tfaccum.make_strategy(devices[:1]),
        "Mirrored x2": tfaccum.make_strategy(devices[:2]),
        "Mirrored x4": tfaccum.make_strategy(devices),
    }
    if arguments.quick:
        del strategies["OneDevice"], strategies["Mirrored x4"]
    heads = "".join(f"{f'K={steps}':>10}" for steps in what[1])
    print(f"{'strategy':13}{'precision':15}{heads}{'tolerance':>12}")
    rows = measure(strategies, *what)
    rows += run_two_workers(["--quick"] if arguments.quick else [])
    # Written so that a NaN is too large.
    large = [
        f"{name}, {precision}"
        for name, precision, differences in rows
        if not max(differences) <= allowed(precision)
    ]
    print(f"larger than the tolerance: {'; '.join(large) or 'none'}")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
