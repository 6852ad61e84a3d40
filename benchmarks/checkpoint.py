"""What a checkpoint costs training.

    python -m benchmarks.checkpoint

Expected: training stands still for as long as copying the variables takes;
writing goes on beside it. One model, one run; saving after every sixteenth
update and not at all, in turn. Prints one JSON line. docs/resuming.md has what
was measured.
"""

import argparse
import json
import statistics
import tempfile
import time

import keras
import numpy as np

import benchmarks
import tfaccum
from tfaccum.snapshots import Snapshots
from tfaccum.state import TrainingState


class Times(keras.callbacks.Callback):
    """Seconds of each train call, with the callbacks behind it."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        """Ends what the last call has begun."""
        now = time.perf_counter()
        if batch:
            self.seconds.append(now - self.since)
        self.since = now


def main():
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    inputs = keras.Input((asked.units,))
    x = keras.layers.Dense(asked.units, activation="relu")(inputs)
    model = tfaccum.Model(inputs, keras.layers.Dense(asked.units)(x))
    model.compile(keras.optimizers.Adam(), "mse")
    x = np.zeros([128, asked.units], "float32")
    found = {"copy": [], "write": [], "saving": [], "without": []}
    # Every sixteenth update saves: so many of the others lie between.
    every = 16

    class Measure(keras.callbacks.Callback):
        """The parts by themselves, while nothing is being written."""

        def on_train_end(self, logs=None):
            """Measures once."""
            state = TrainingState(self.model)
            arrays = state.read()
            copied, _ = benchmarks.timed(state.read)
            found["copy"].append(copied)
            with tempfile.TemporaryDirectory() as folder:
                written, _ = benchmarks.timed(
                    lambda: Snapshots(folder).write(
                        arrays, {}, update=1, epoch=0, batch=0
                    )
                )
                found["write"].append(written)

    def fit(*callbacks):
        times = Times()
        model.fit(
            x,
            x,
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[times, *callbacks],
        )
        return times.seconds

    fit()
    for _ in range(asked.repeats):
        found["without"].append(statistics.median(fit(Measure())))
        with tempfile.TemporaryDirectory() as folder:
            saver = tfaccum.Checkpoint(folder, save_every_updates=every)
            seconds = fit(saver)
        found["saving"].append(statistics.median(seconds[every - 1 :: every]))
    size = sum(
        v.numpy().nbytes for v in [*model.variables, *model.optimizer.variables]
    )
    print(
        json.dumps(
            {
                "what": "checkpoint",
                "megabytes": round(size / 1e6, 1),
                **{
                    f"{name}_ms": [
                        round(1e3 * statistics.median(values), 1),
                        round(1e3 * min(values), 1),
                        round(1e3 * max(values), 1),
                    ]
                    for name, values in found.items()
                },
                **benchmarks.where(),
            }
        )
    )


if __name__ == "__main__":
    main()
