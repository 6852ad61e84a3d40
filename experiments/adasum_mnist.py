r"""AdaSum against the mean, on MNIST, as the batch and the learning rate grow.

A network of 784-128-10 is trained for one epoch with momentum SGD (0.9), from
the same first weights, by 2, 4 and 8 replicas that see 128 examples each, so
that the global batch is 256, 512 and 1,024, at learning rates from 0.025 to
0.8: with the mean of the replicas' gradients (the law), with AdaSum of
gradients, and with AdaSum of weight changes, where each replica has momentum
of its own. No warm-up, no decay.

    PYTHONPATH=. python experiments/adasum_mnist.py --data_dir=DIR

where DIR holds the `mnist` of TensorFlow Datasets, prepared; the environment
variable TFACCUM_TEST_DATA may name it instead. The replicas are logical CPU
devices of one process.

Printed are test accuracies after the epoch; with `--plot=FILE` a plot of them.
Expected: AdaSum moves up to R times as far as the mean when gradients do not
agree, so that it is ahead of the mean at small learning rates and falls
behind, or diverges, earlier as they grow; Horovod advises 2 to 2.5 times the
learning rate of one worker. All numbers are in docs/adasum.md, with commit and
machine.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_datasets as tfds  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import tfaccum  # noqa: E402
from tfaccum import boost  # noqa: E402

REPLICAS = (2, 4, 8)
EXAMPLES = 128  # Of one replica in one update.
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
WAYS = {
    "mean": "mean",
    "AdaSum of gradients": boost.AdaSum(),
    "AdaSum of changes": boost.AdaSum(form="delta"),
}


def arrays(data_dir, split):
    """Images in [0, 1] as rows of 784, and labels."""
    images, labels = tfds.as_numpy(
        tfds.load(
            "mnist",
            split=split,
            data_dir=data_dir,
            download=False,
            batch_size=-1,
            as_supervised=True,
        )
    )
    return images.reshape(len(images), -1).astype("float32") / 255, labels


def accuracy(train, test, replicas, rate, way):
    """Test accuracy after one epoch."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        inputs = keras.Input((784,))
        x = keras.layers.Dense(128, activation="relu")(inputs)
        model = tfaccum.Model(inputs, keras.layers.Dense(10)(x))
        model.compile(
            keras.optimizers.SGD(rate, 0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            replica_reduction=WAYS[way],
        )
    model.fit(*train, EXAMPLES * replicas, verbose=0)
    return model.evaluate(*test, 1000, verbose=0, return_dict=True)["accuracy"]


def plot(path, found):
    """Accuracy against the learning rate, a panel for each number."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, replicas in zip(
        figure.subplots(1, len(REPLICAS), sharey=True), REPLICAS, strict=True
    ):
        for way in WAYS:
            values = [found[replicas, rate, way] for rate in RATES]
            axes.plot(RATES, values, marker="o", label=way)
        axes.set_xscale("log")
        axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axes.minorticks_off()
        axes.set_ylim(0.8, 1)
        axes.set_title(f"{replicas} replicas, batch {replicas * EXAMPLES}")
        axes.set_xlabel("learning rate")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy after one epoch")
    figure.axes[0].legend(loc="lower left")
    figure.savefig(path, dpi=120)


def main(argv=None):
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data_dir", default=os.environ.get("TFACCUM_TEST_DATA")
    )
    parser.add_argument("--plot", help="where to draw it")
    flags = parser.parse_args(argv)
    if not flags.data_dir:
        parser.error("--data_dir must be given. Received: none.")
    tf.get_logger().setLevel("ERROR")  # Many models are not much retracing.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * max(REPLICAS),
    )
    train, test = (arrays(flags.data_dir, part) for part in ("train", "test"))
    began = time.monotonic()
    print("| replicas | batch | way |", *(f"{rate:g} |" for rate in RATES))
    print("|---" * (3 + len(RATES)) + "|")
    found = {}
    for replicas in REPLICAS:
        for way in WAYS:
            for rate in RATES:
                found[replicas, rate, way] = accuracy(
                    train, test, replicas, rate, way
                )
            row = [found[replicas, rate, way] for rate in RATES]
            best = int(np.argmax(row))
            cells = [f"{100 * value:.2f}" for value in row]
            cells[best] = f"**{cells[best]}**"
            print(
                f"| {replicas} | {replicas * EXAMPLES} | {way} |",
                *(f"{cell} |" for cell in cells),
                flush=True,
            )
    print(f"{time.monotonic() - began:.0f} s")
    if flags.plot:
        plot(flags.plot, found)


if __name__ == "__main__":
    main()
