r"""LeNet-5 on MNIST with 4 micro-batches of 32 behind one update.

Source: "Gradient Accumulation Algorithm", a MindSpore tutorial (repository
mindspore-ai/docs, docs/mindspore/programming_guide/source_en/
apply_gradient_accumulation.md): its LeNet-5, images of 32x32, batches of 32,
4 of them behind one update, momentum SGD (0.01, 0.9), 10 epochs. It adds up
the gradients of the 4 batches and does not divide the sum; for the mean that
is taken here, its learning rate is 0.04.

    tfaccum-train --experiment=experiments/mnist_lenet.py --data_dir=DIR

where DIR holds the `mnist` of TensorFlow Datasets, prepared.

| accuracy on the test set | expected | measured | wall time |
|---|---|---|---|
| as above | 96.31 % | 99.07 % | 502 s |
| with --learning_rate=0.04 | 96.31 % | 98.82 % | 364 s |

Expected is what the tutorial reports. Measured at commit 2b58c33 (the second
row on the working tree before 5fdbe6f), on 2 cores of Intel(R) Xeon(R)
Processor, no GPU, beside four other jobs (243 s with fewer); TensorFlow
2.21.0, Keras 3.15.1.
"""

import keras
import tensorflow as tf

from tfaccum.data import Pipeline

DEFAULTS = {
    "global_batch": 128,
    "micro_batch": 32,
    "epochs": 10,
    "learning_rate": 0.01,
}


def model():
    """LeNet-5 as in the tutorial: ReLU, max pooling, normal(0.02) weights."""
    weights = keras.initializers.RandomNormal(stddev=0.02)

    def dense(units, **arguments):
        return keras.layers.Dense(
            units, kernel_initializer=weights, **arguments
        )

    return keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            keras.layers.Conv2D(6, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            dense(120, activation="relu"),
            dense(84, activation="relu"),
            dense(10, dtype="float32"),
        ]
    )


def data(*, batch_size, seed, data_dir):
    """Images resized to 32x32 and standardized, and the digit."""

    def to_xy(example):
        image = tf.image.resize(example["image"], (32, 32)) / 255.0
        return (image - 0.1307) / 0.3081, example["label"]

    def pipeline(split, **arguments):
        return Pipeline(
            name="mnist",
            split=split,
            batch_size=batch_size,
            data_dir=data_dir,
            map_fn=to_xy,
            **arguments,
        )

    return pipeline("train", seed=seed), pipeline("test", shuffle=False)


def compile_arguments(*, learning_rate, num_updates):
    """Momentum SGD at a constant learning rate."""
    return {
        "optimizer": keras.optimizers.SGD(learning_rate, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
