r"""What a narrow `wire_dtype` does to a gradient, on MNIST.

One window of the same 256 examples, in K = 4 micro-steps over 2, 4 and 8
replicas, for LeNet-5 from its first weights and after one epoch of training;
`--models=transformer` takes a small transformer instead, and longer. The
replicas' sums travel and are added up in bfloat16, float16 and float32.
Printed is the relative error, in the L2 norm, of the gradient that the
optimizer gets; the reference is the mean of the gradients of the
micro-batches, taken one by one on one device, in numpy's float64. For
comparison the noise: how far the gradient of 256 examples lies from that of
all (relative to its length, estimated from the spread of the micro-batches'
gradients).

    PYTHONPATH=. python experiments/wire_dtype.py --data_dir=DIR

where DIR holds the `mnist` of TensorFlow Datasets, prepared; the environment
variable TFACCUM_TEST_DATA may name it instead. The replicas are logical CPU
devices of one process.

| | expected | measured |
|---|---|---|
| bfloat16 error, 2, 4, 8 replicas | see below | 0.0031, 0.0039, 0.0061 |
| float16 error | 1/8 of that | 1/12, 1/8, 1/11 |
| float32 error | 2^-16 of that, or so | 1e-07 |

A replica's sum is rounded once and every addition of two replicas once, each
time by 2^-8 (bfloat16) or 2^-11 (float16) of the number at most, so that the
error is at most R times that of the sum of the magnitudes that were added. No
result of others is known for these models. Measured is the worse of both
weights; all numbers are in docs/scaling.md, with commit and machine.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfaccum  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments import accumulator_dtype  # noqa: E402

WIRE_DTYPES = ("bfloat16", "float16", None)
REPLICAS = (2, 4, 8)
EXAMPLES, STEPS = 256, 4


def made(experiment, weights=None):
    """The same network every time, with other weights if they are given."""
    # The transformer has numbers that are no weights.
    keras.utils.set_random_seed(0)
    network = experiment.model()
    if weights is not None:
        network.set_weights(weights)
    return network


def measure(experiment, weights, x, y, replicas):
    """The errors for each `wire_dtype`, and the noise."""
    keras.backend.clear_session()
    network = made(experiment, weights)
    products = accumulator_dtype.micro_gradients(
        network, x, y, STEPS * max(REPLICAS)
    )
    exact = products.sum(0, dtype="float64") / len(x)
    found = {"noise": accumulator_dtype.noise(products)}
    strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
    for wire_dtype in WIRE_DTYPES:
        with strategy.scope():
            model = accumulator_dtype.for_gradients(
                made(experiment, weights),
                micro_batch_size=EXAMPLES // STEPS // replicas,
                wire_dtype=wire_dtype,
            )
        gradient = accumulator_dtype.gradient(model, x, y)
        found[wire_dtype], _ = accumulator_dtype.errors(gradient, exact)
    return found


def print_errors(name, data_dir, num_updates):
    """Rows of the table for one model."""
    experiment = accumulator_dtype.EXPERIMENTS[name]
    network = made(experiment)
    train, _ = experiment.data(batch_size=EXAMPLES, seed=1, data_dir=data_dir)
    x, y = next(train.epoch(0).as_numpy_iterator())
    for after in (0, num_updates):
        if after:
            accumulator_dtype.train_network(
                experiment, network, after, data_dir
            )
        for replicas in REPLICAS:
            found = measure(experiment, network.get_weights(), x, y, replicas)
            cells = [found[dtype] for dtype in (*WIRE_DTYPES, "noise")]
            accumulator_dtype.print_row(
                [name, after, replicas] + [f"{cell:.1e}" for cell in cells]
            )


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data_dir", default=os.environ.get("TFACCUM_TEST_DATA")
    )
    parser.add_argument(
        "--updates", type=int, default=469, help="before the second window"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["LeNet-5"],
        choices=list(accumulator_dtype.EXPERIMENTS),
    )
    flags = parser.parse_args()
    if not flags.data_dir:
        parser.error("--data_dir must be given. Received: none.")
    tf.get_logger().setLevel("ERROR")  # Many models are not much retracing.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * max(REPLICAS),
    )
    # So that two runs differ by what travels and by nothing else.
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    accumulator_dtype.print_head(
        ["model", "updates before", "replicas"]
        + [f"{dtype or 'float32'} error" for dtype in WIRE_DTYPES]
        + ["noise"]
    )
    for name in flags.models:
        print_errors(name, flags.data_dir, flags.updates)


if __name__ == "__main__":
    main()
