r"""AdamA against Adam, on the bundled digits, as the learning rate grows.

A network of 64-128-10 is trained for 10 epochs from the same first weights on
global batches of 64, at learning rates from 0.0003 to 0.03: with Adam, whose
update does not depend on how a batch is cut, and with AdamA and batches cut
into 4 and into 16 micro-batches.

    PYTHONPATH=. python experiments/adama_digits.py

Printed are accuracies on the held-out fifth after the last epoch, the means of
`--seeds` runs. Expected: where micro-batches agree, `v` is smaller than Adam's
by as much as their number, so that AdamA moves up to 2 and 4 times as far; it
is ahead of Adam at small learning rates and falls behind earlier as they grow.
All numbers are in docs/adama.md, with commit and machine.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfaccum  # noqa: E402
from tfaccum.datasets import digits  # noqa: E402

BATCH = 64
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
# The optimizer, and into how many micro-batches a batch is cut.
WAYS = {
    "Adam": (keras.optimizers.Adam, 4),
    "AdamA, 4 micro-batches": (tfaccum.AdamA, 4),
    "AdamA, 16 micro-batches": (tfaccum.AdamA, 16),
}


def arrays():
    """Images in [0, 1] as rows of 64, and labels: those to train on, others."""
    images, labels = digits.load()
    images = images.reshape(len(images), -1).astype("float32") / 16
    rows = digits.split_rows(labels)
    return [(images[rows[s]], labels[rows[s]]) for s in ("train", "test")]


def accuracy(train, test, way, rate, epochs, seed):
    """On the held-out fifth after so many epochs."""
    optimizer, pieces = WAYS[way]
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((64,))
    x = keras.layers.Dense(128, activation="relu")(inputs)
    model = tfaccum.Model(inputs, keras.layers.Dense(10)(x))
    model.compile(
        optimizer(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        micro_batch_size=BATCH // pieces,
        on_nonfinite="raise",
    )
    model.fit(*train, BATCH, epochs=epochs, verbose=0)
    return model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]


def main(argv=None):
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    flags = parser.parse_args(argv)
    tf.get_logger().setLevel("ERROR")  # Many models are not much retracing.
    train, test = arrays()
    began = time.monotonic()
    print("| way |", *(f"{rate:g} |" for rate in RATES))
    print("|---" * (1 + len(RATES)) + "|")
    for way in WAYS:
        row = [
            np.mean(
                [
                    accuracy(train, test, way, rate, flags.epochs, seed)
                    for seed in range(flags.seeds)
                ]
            )
            for rate in RATES
        ]
        cells = [f"{100 * value:.2f}" for value in row]
        best = int(np.argmax(row))
        cells[best] = f"**{cells[best]}**"
        print(f"| {way} |", *(f"{cell} |" for cell in cells), flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
