"""Whether the step waits for its data: on the digits and on MNIST.

    python -m benchmarks.input_wait [--data_dir=DIR]

Each experiment of `EXPERIMENTS` trains as it does by itself, on one device and
on two replicas, which share two cores. Of each epoch but the first, in which
all is traced and read: the part of the time that went by between asking for a
micro-batch and having it, in the first window, where the epoch begins, and in
all others; and what those would have waited if one batch had stood ready all
the time, which is what asking costs. DIR holds the prepared `mnist` of
TensorFlow Datasets; without it MNIST is left out. Prints one JSON line for
each experiment and number of replicas.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time

import keras
import tensorflow as tf

import benchmarks
import tfaccum

# With the number of epochs.
EXPERIMENTS = {"digits_cnn": 9, "mnist_lenet": 3}
REPLICAS = (1, 2)


class Waits(keras.callbacks.Callback):
    """Seconds waited for data and passed, per epoch and window."""

    def on_train_begin(self, logs=None):
        """Begins."""
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        """Begins an epoch."""
        self.epochs.append([])
        self._before = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Notes a window."""
        now = time.perf_counter()
        waited = sum(u.input_wait for u in self.model.last_updates)
        self.epochs[-1].append((waited, now - self._before))
        self._before = now


def shares(epochs):
    """Of the epochs' time: waited in first windows, and in all others.

    Args:
        epochs: (seconds waited, seconds passed) of each window, by epoch.

    Returns:
        Two numbers in [0, 1].
    """
    total = sum(passed for epoch in epochs for _, passed in epoch)
    first = sum(epoch[0][0] for epoch in epochs)
    others = sum(waited for epoch in epochs for waited, _ in epoch[1:])
    return first / total, others / total


def trained(experiment, strategy, data, epochs):
    """The waits of all epochs but the first."""
    defaults = experiment.DEFAULTS
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = experiment.model()
        model = tfaccum.Model(layers.inputs, layers.outputs)
        model.compile(
            micro_batch_size=defaults["micro_batch"],
            **experiment.compile_arguments(
                learning_rate=defaults["learning_rate"], num_updates=10_000
            ),
        )
    waits = Waits()
    model.fit(data, epochs=epochs, verbose=0, callbacks=[waits])
    return waits.epochs[1:]


def measure(name, replicas, epochs, data_dir=None):
    """One experiment on so many replicas."""
    experiment = importlib.import_module(f"experiments.{name}")
    strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
    batch = experiment.DEFAULTS["global_batch"]
    train, _ = experiment.data(batch_size=batch, seed=1, data_dir=data_dir)
    found = trained(experiment, strategy, train, epochs)
    ready = train.epoch(0).take(1).repeat(len(found[0])).cache()
    at_hand = trained(experiment, strategy, ready, epochs)
    first, others = shares(found)
    return {
        "what": "input_wait",
        "experiment": name,
        "replicas": replicas,
        "epochs": len(found),
        "windows": len(found[0]),
        "epoch_seconds": benchmarks.spread(
            [sum(passed for _, passed in epoch) for epoch in found]
        ),
        "first_windows": round(first, 4),
        "other_windows": round(others, 4),
        "with_data_at_hand": round(shares(at_hand)[1], 4),
        **benchmarks.where(),
    }


def main():
    """Measures each in a process of its own, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data_dir", default=os.environ.get("TFACCUM_TEST_DATA")
    )
    parser.add_argument(
        "--only", nargs=3, metavar=("EXPERIMENT", "REPLICAS", "EPOCHS")
    )
    asked = parser.parse_args()
    if asked.only:
        name, *numbers = asked.only
        replicas, epochs = map(int, numbers)
        cpu = tf.config.list_physical_devices("CPU")[0]
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * replicas)
        # The digits are in the package, whatever folder is given.
        folder = asked.data_dir if name.startswith("mnist") else None
        print(json.dumps(measure(name, replicas, epochs, folder)), flush=True)
        return
    for name, epochs in EXPERIMENTS.items():
        if name.startswith("mnist") and not asked.data_dir:
            print(f"{name} is left out: no --data_dir", file=sys.stderr)
            continue
        for replicas in REPLICAS:
            only = ("--only", name, str(replicas), str(epochs))
            subprocess.run(
                [sys.executable, "-m", "benchmarks.input_wait", *only]
                + ["--data_dir", asked.data_dir or ""],
                check=True,
            )


if __name__ == "__main__":
    main()
