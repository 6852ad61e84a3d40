r"""float32, mixed_bfloat16 and mixed_float16, side by side, on MNIST.

Trains LeNet-5 and a small transformer with K = 4 micro-steps behind each
update, in each precision, from the same weights and on the same examples;
prints a table of final loss, accuracy and skipped updates, and draws the loss
and the loss scale over the updates.

    python experiments/precision.py --data_dir=DIR --plot=docs/precision.png

where DIR holds the `mnist` of TensorFlow Datasets, prepared. The growth
interval of the loss scale is 50 instead of 2,000, so that its search for the
limit can be seen in a run as short as this.
"""

import argparse
import sys
import time
from pathlib import Path

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

import tfaccum  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments import mnist_lenet, mnist_transformer  # noqa: E402

EXPERIMENTS = {"LeNet-5": mnist_lenet, "transformer": mnist_transformer}
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
MICRO_BATCH, STEPS = 32, 4
# The tutorial's 0.01 for a sum over 4 micro-batches is 0.04 for their mean.
LEARNING_RATES = {"LeNet-5": 0.04, "transformer": 2e-3}


class Updates(keras.callbacks.Callback):
    """Keeps every update of a run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        """Keras' hook."""
        self.seen.extend(self.model.last_updates)


def run(name, precision, data_dir, num_updates):
    """Trains once; returns a row of the table and the updates."""
    experiment = EXPERIMENTS[name]
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(precision)
    arguments = experiment.compile_arguments(
        learning_rate=LEARNING_RATES[name], num_updates=num_updates
    )
    if precision == "mixed_float16":
        arguments["loss_scale"] = tfaccum.LossScale(growth_interval=50)
    model = tfaccum.Model.from_keras(experiment.model())
    model.compile(**arguments, gradient_accumulation_steps=STEPS)
    train, test = experiment.data(
        batch_size=MICRO_BATCH, seed=0, data_dir=data_dir
    )
    updates = Updates()
    started = time.perf_counter()
    model.fit(
        train,
        steps_per_epoch=num_updates * STEPS,
        verbose=0,
        callbacks=[updates],
    )
    seconds = time.perf_counter() - started
    results = model.evaluate(test, verbose=0, return_dict=True)
    row = {
        "model": name,
        "precision": precision,
        "test loss": f"{results['loss']:.4f}",
        "test accuracy": f"{100 * results['accuracy']:.2f} %",
        "updates": int(model.optimizer.iterations.numpy()),
        "skipped": sum(update.skipped for update in updates.seen),
        "last scale": f"{updates.seen[-1].loss_scale:g}",
        "seconds": f"{seconds:.0f}",
    }
    return row, updates.seen


def plot(seen, path):
    """Loss and loss scale over the windows, for every run."""
    figure, axes = plt.subplots(
        2, len(EXPERIMENTS), figsize=(10, 6), sharex=True, squeeze=False
    )
    for column, name in enumerate(EXPERIMENTS):
        for precision in PRECISIONS:
            updates = seen[name, precision]
            axes[0, column].plot(
                [u.loss for u in updates], label=precision, linewidth=0.9
            )
            if precision == "mixed_float16":
                axes[1, column].plot(
                    [u.loss_scale for u in updates], color="C2", label="scale"
                )
                skipped = [i for i, u in enumerate(updates) if u.skipped]
                axes[1, column].plot(
                    skipped,
                    [updates[i].loss_scale for i in skipped],
                    "x",
                    color="C3",
                    label="skipped update",
                )
        axes[0, column].set(title=name, ylabel="loss", yscale="log")
        axes[1, column].set(ylabel="loss scale", xlabel="window", yscale="log")
        axes[1, column].set_yscale("log", base=2)
    for axis in axes.flat:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main():
    """Runs all, prints the table, draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--plot", default="precision.png")
    parser.add_argument("--updates", type=int, default=400)
    flags = parser.parse_args()
    seen = {}
    for name in EXPERIMENTS:
        for precision in PRECISIONS:
            row, seen[name, precision] = run(
                name, precision, flags.data_dir, flags.updates
            )
            if not seen or len(seen) == 1:
                print("| " + " | ".join(row) + " |")
                print("|" + "---|" * len(row))
            print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    plot(seen, flags.plot)


if __name__ == "__main__":
    main()
