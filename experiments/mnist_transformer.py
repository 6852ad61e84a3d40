r"""A small transformer that reads an MNIST image row by row.

28 tokens of 28 pixels, two blocks of width 64, pre-norm, 75 thousand weights.
It is here to have a model whose gradients differ much in size from layer to
layer, for the study of precisions in `experiments/precision.py`.

    tfaccum-train --experiment=experiments/mnist_transformer.py --data_dir=DIR

where DIR holds the `mnist` of TensorFlow Datasets, prepared.
"""

import keras
import tensorflow as tf

from tfaccum.data import Pipeline

DEFAULTS = {
    "global_batch": 128,
    "micro_batch": 32,
    "epochs": 2,
    "learning_rate": 2e-3,
}
TOKENS, WIDTH, HEADS, BLOCKS = 28, 64, 4, 2


def model():
    """Row embedding, two transformer blocks, mean over tokens, logits."""
    inputs = keras.Input((TOKENS, 28))
    x = keras.layers.Dense(WIDTH)(inputs)
    positions = keras.layers.Embedding(TOKENS, WIDTH)
    x = x + positions(keras.ops.arange(TOKENS))
    for _ in range(BLOCKS):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(2 * WIDTH, activation="gelu")(y)
        x = x + keras.layers.Dense(WIDTH)(y)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(x))


def data(*, batch_size, seed, data_dir):
    """Rows of pixels in [0, 1], and the digit."""

    def to_xy(example):
        image = tf.cast(example["image"][..., 0], tf.float32) / 255.0
        return image, example["label"]

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
    """AdamW with a clipped norm, as transformers are trained."""
    schedule = keras.optimizers.schedules.CosineDecay(
        learning_rate, num_updates
    )
    return {
        "optimizer": keras.optimizers.AdamW(schedule, global_clipnorm=1.0),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
