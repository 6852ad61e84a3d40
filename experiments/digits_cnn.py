r"""A small CNN on the bundled UCI digits: 1,438 training images of 8x8.

Source: the data as distributed with scikit-learn, see
tfaccum/datasets/DIGITS.md; every fifth image of a class is held out.

On two virtual replicas in mixed precision, four micro-batches of 16 on each
behind every update, as `make demo` does:

    tfaccum-train --experiment=experiments/digits_cnn.py \
        --virtual_devices=2 --precision=mixed_bfloat16 --verify_updates=5

| | expected | measured |
|---|---|---|
| accuracy on the held-out fifth | at least 97 % | 98.61 % |
| wall time of the training | under a minute | 8.8 s |
| largest difference from the one-big-batch run | under 6.2e-02 | 9.1e-03 |

With --precision=float32: 98.61 %, and a difference of 2.4e-06. In
mixed_float16, which a CPU has to imitate: 98.05 % in 317 s (commit 2b58c33).
The float32 line was measured on the working tree before commit 5fdbe6f.

Measured at commit 8c731fe on 2 cores of Intel(R) Xeon(R) Processor, no GPU
(at 3bc5158 35 s beside four other jobs); TensorFlow 2.21.0, Keras 3.15.1.
"""

import keras
import tensorflow as tf

from tfaccum.data import Pipeline

DEFAULTS = {
    "global_batch": 128,
    "micro_batch": 16,
    "epochs": 15,
    "learning_rate": 0.1,
}


def model():
    """Two convolutions and two dense layers, 38,282 weights."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def data(*, batch_size, seed, data_dir):
    """Pixels in [0, 1], and the digit."""

    def pipeline(split, **arguments):
        return Pipeline(
            name="digits",
            split=split,
            batch_size=batch_size,
            data_dir=data_dir,
            cache=True,
            map_fn=lambda example: (
                tf.cast(example["image"], tf.float32) / 16.0,
                example["label"],
            ),
            **arguments,
        )

    return pipeline("train", seed=seed), pipeline("test", shuffle=False)


def compile_arguments(*, learning_rate, num_updates):
    """Momentum SGD whose learning rate falls to zero along a cosine."""
    return {
        "optimizer": keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(learning_rate, num_updates),
            momentum=0.9,
        ),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
