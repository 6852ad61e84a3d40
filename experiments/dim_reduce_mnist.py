r"""Two ways to go on: DimReduce in 32 directions, and SGD, on MNIST.

Stage 1 trains LeNet-5 for two epochs with momentum SGD (0.04, 0.9) and batches
of 128 in K = 4 micro-steps, and records its weights every 10 updates. The 32
principal directions of the second epoch are the subspace of stage 2. That is
one more epoch, always from the last weights of stage 1 and on the same
examples in the same order: with SGD as before; with SGD at a tenth of the
learning rate, as a schedule would have it; with DimReduce, also with alpha =
0, in the subspace only, with the smallest step where none is accepted, and
with micro-batches that are 8 times as large, in batches of 1,024 as in the
paper.

    PYTHONPATH=. python experiments/dim_reduce_mnist.py --data_dir=DIR

where DIR holds the `mnist` of TensorFlow Datasets, prepared; the environment
variable TFACCUM_TEST_DATA may name it instead.

Printed are, for each way to go on, the mean loss of the last updates (50 of
128 examples, or 7 of 1,024), loss and accuracy on the test set, how many
updates made a step in the subspace, the forward and backward passes of 32
examples, and the time; with `--plot=FILE` a plot of the losses.

| accuracy on the test set | expected | measured |
|---|---|---|
| SGD as before | - | 98.04 % |
| SGD at a tenth of the learning rate | more | 98.59 % |
| DimReduce | more | 98.39 % |

Expected is what the paper finds for other networks (Li et al., Low Dimensional
Landscape Hypothesis is True, 2021, arXiv:2103.11154). All numbers are in
docs/dim_reduce.md, with commit and machine: 2 cores, 203 s.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import tfaccum  # noqa: E402
from tfaccum import boost  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments import mnist_lenet  # noqa: E402

MICRO_BATCH, STEPS = 32, 4
RATE, MOMENTUM = 0.04, 0.9
LAST = 50


class Curve(keras.callbacks.Callback):
    """The loss of each update, and the step in the subspace where it is."""

    def __init__(self):
        super().__init__()
        self.losses, self.sizes = [], []

    def on_train_batch_end(self, batch, logs=None):
        """Keras' hook."""
        self.losses += [update.loss for update in self.model.last_updates]
        optimizer, update = self.model.optimizer, self.model.last_updates[-1]
        if isinstance(optimizer, boost.DimReduce) and not update.skipped:
            self.sizes.append(float(optimizer.step_size.numpy()))


def compiled(optimizer, weights=None):
    """LeNet-5, the same every time, with other weights if they are given.

    A run that is lost skips all updates that are left.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = tfaccum.Model.from_keras(mnist_lenet.model())
    if weights is not None:
        model.set_weights(weights)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        gradient_accumulation_steps=STEPS,
        max_consecutive_skips=10**6,
    )
    return model


def sgd(rate):
    """As in stage 1, with another learning rate."""
    return keras.optimizers.SGD(rate, momentum=MOMENTUM)


def trained(model, name, test, data_dir, *, seed, larger=1, **arguments):
    """Trains, and prints a row of the table; returns the losses."""
    train, _ = mnist_lenet.data(
        batch_size=larger * MICRO_BATCH, seed=seed, data_dir=data_dir
    )
    curve = Curve()
    started = time.perf_counter()
    callbacks = [curve, *arguments.pop("callbacks", ())]
    model.fit(train, callbacks=callbacks, verbose=0, **arguments)
    seconds = time.perf_counter() - started
    found = model.evaluate(test, verbose=0, return_dict=True)
    sizes = curve.sizes
    # The loss before, and one for each size until one is accepted.
    trials = larger * sum(2 + (size != 1) for size in sizes)
    micro_steps = arguments.get("epochs", 1) * train.num_batches * larger
    row = {
        "": name,
        "updates": model.optimizer.iterations.numpy(),
        "train loss": f"{np.mean(curve.losses[-LAST // larger :]):.4f}",
        "test loss": f"{found['loss']:.4f}",
        "test accuracy": f"{100 * found['accuracy']:.2f} %",
        "steps": f"{np.count_nonzero(sizes)}" if sizes else "-",
        "forward": micro_steps + trials,
        "backward": micro_steps,
        "seconds": f"{seconds:.0f}",
    }
    print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    return curve.losses


def plot(first, others, path):
    """The losses of all ways to go on that make as many updates."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(LAST, len(first) + 1), _smooth(first), "k")
    for name, losses in others.items():
        if len(losses) == len(first) // 2 and np.isfinite(losses).all():
            axes.plot(
                len(first) + np.arange(LAST, len(losses) + 1),
                _smooth(losses),
                label=name.replace("`", ""),
            )
    axes.axvline(len(first), color="gray", linewidth=0.5)
    axes.set(
        title="stage 1, and ways to go on from its end",
        xlabel="update",
        xlim=(len(first) // 3, 1.5 * len(first)),
        ylabel=f"loss, mean of {LAST} updates",
        ylim=(0.02, 0.3),
        yscale="log",
    )
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=100)


def _smooth(losses):
    return np.convolve(losses, np.full(LAST, 1 / LAST), "valid")


def main():
    """Prints the table, draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data_dir", default=os.environ.get("TFACCUM_TEST_DATA")
    )
    parser.add_argument("--plot", help="where to draw it")
    parser.add_argument("--every", type=int, default=10, help="recorded")
    parser.add_argument("--components", type=int, default=32)
    flags = parser.parse_args()
    if not flags.data_dir:
        parser.error("--data_dir must be given. Received: none.")
    tf.get_logger().setLevel("ERROR")  # Many models are not much retracing.
    _, test = mnist_lenet.data(batch_size=500, seed=0, data_dir=flags.data_dir)
    titles = ["", "updates", "loss of the last updates", "test loss"]
    titles += ["test accuracy", "steps in the subspace", "forward passes"]
    titles += ["backward passes", "seconds"]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    with tempfile.TemporaryDirectory() as folder:
        model = compiled(sgd(RATE))
        record = boost.RecordTrajectory(folder, every_updates=flags.every)
        first = trained(
            model,
            "stage 1: SGD",
            test,
            flags.data_dir,
            seed=0,
            epochs=2,
            callbacks=[record],
        )
        weights = model.get_weights()
        started = time.perf_counter()
        basis = boost.principal_basis(
            folder, flags.components, first_update=len(first) // 2
        )
        seconds = time.perf_counter() - started
    smallest = boost.DimReduce(basis, fallback="smallest")
    ways = {
        "SGD": (sgd(RATE), 1),
        "SGD, learning rate / 10": (sgd(RATE / 10), 1),
        "DimReduce": (boost.DimReduce(basis), 1),
        "DimReduce, `alpha=0`": (boost.DimReduce(basis, alpha=0.0), 1),
        'DimReduce, `fallback="smallest"`': (smallest, 1),
        "SGD, batches of 1,024": (sgd(RATE), 8),
        "SGD, learning rate / 10, batches of 1,024": (sgd(RATE / 10), 8),
        "DimReduce, batches of 1,024": (boost.DimReduce(basis), 8),
    }
    others = {}
    for name, (optimizer, larger) in ways.items():
        model = compiled(optimizer, weights)
        others[name] = trained(
            model, name, test, flags.data_dir, seed=1, larger=larger
        )
    print(f"\n{basis}, found in {seconds:.1f} s")
    if flags.plot:
        plot(first, others, flags.plot)


if __name__ == "__main__":
    main()
