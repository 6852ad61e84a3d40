"""Makes the golden checkpoint: `python -m tests.golden.make`.

Not to be run again for the same format: later versions have to read what this
one has written, with the oldest Keras that is supported: an older Keras does
not read every model of a newer one. `tests/test_golden.py` says what is in it.
"""

import json
from pathlib import Path

import keras
import numpy as np

import tfaccum

HERE = Path(__file__).parent


def data():
    x = np.linspace(-1, 1, 60, dtype="float32").reshape(20, 3)
    return x, x.sum(1, keepdims=True)


def build():
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, activation="relu")(inputs)
    x = keras.layers.Dropout(0.5, seed=2)(x)
    x = keras.layers.BatchNormalization()(x)
    model = tfaccum.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    keras.config.set_dtype_policy("float32")
    model.compile(
        keras.optimizers.AdamW(0.01, use_ema=True),
        "mse",
        metrics=["mae"],
        gradient_accumulation_steps=2,
        loss_scale=tfaccum.LossScale(initial=64.0, growth_interval=2),
    )
    return model


class EndAfter(keras.callbacks.Callback):
    """Asks to end after so many train calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def on_train_batch_end(self, batch, logs=None):
        self.calls -= 1
        if not self.calls:
            self.model.current_run.preempt()


def fit(model, directory, *callbacks):
    x, y = data()
    return model.fit(
        x,
        y,
        batch_size=4,
        epochs=3,
        verbose=0,
        callbacks=[*callbacks, tfaccum.Checkpoint(directory, keep=1)],
    ).history


def main():
    try:
        fit(build(), HERE / "format_1", EndAfter(4))
    except tfaccum.Preempted:
        pass
    # What the rest of the run came to, where this was made.
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(HERE / "format_1", copy)
        model = build()
        history = fit(model, copy)
        weights = [w.ravel().tolist() for w in model.get_weights()]
    expected = {"history": history, "weights": weights}
    (HERE / "format_1.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
