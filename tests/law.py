"""One training run for the law, in any of the ways it can be run.

The model has a mask and unequal sample weights; the data differ row by row,
so also from replica to replica; the last window is ragged, with fewer rows
than some strategies have replicas. Everything is float64, so that a wrong
weight cannot hide behind rounding.
"""

import keras
import numpy as np

import tfaccum

ROWS_PER_BATCH = 4
LENGTH, FEATURES = 5, 3
EPOCHS = 2

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5),
        weight_decay=0.1,
        global_clipnorm=0.05,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    ),
}


def data(steps):
    """Two full windows and a ragged one, of `steps` micro-steps each."""
    rows = 2 * steps * ROWS_PER_BATCH + 3
    rng = np.random.default_rng(steps)
    x = rng.normal(size=(rows, LENGTH, FEATURES))
    lengths = rng.integers(1, LENGTH + 1, size=rows)
    x[np.arange(LENGTH) >= lengths[:, None]] = 0.0  # masked by the model
    y = rng.normal(size=(rows, LENGTH, 1))
    weight = rng.uniform(0.1, 3.0, size=(rows, LENGTH))
    return x, y, weight


def build(model_class):
    keras.utils.set_random_seed(7)
    inputs = keras.Input((LENGTH, FEATURES))
    x = keras.layers.Masking()(inputs)
    x = keras.layers.Dense(
        4, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)
    )(x)
    return model_class(inputs, keras.layers.Dense(1)(x))


def one_big_batch(steps, optimizer):
    """Plain Keras, one device, one batch per update."""
    x, y, weight = data(steps)
    model = build(keras.Model)
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    history = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=steps * ROWS_PER_BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return outcome(model, history)


def in_windows(
    strategy,
    steps,
    optimizer,
    cut,
    epochs=EPOCHS,
    callbacks=(),
    **compile_arguments,
):
    """The same updates from windows of `steps` micro-steps.

    Args:
        strategy: any supported one.
        steps: micro-steps per full window.
        optimizer: key of `OPTIMIZERS`.
        cut: whether dataset batches are cut into micro-batches; otherwise
            several of them make one update.
        epochs: of training.
        callbacks: of training.
        **compile_arguments: passed on.
    """
    x, y, weight = data(steps)
    if cut:
        replicas = strategy.num_replicas_in_sync
        batch_size = steps * ROWS_PER_BATCH
        how = {"micro_batch_size": -(-ROWS_PER_BATCH // replicas)}
    else:
        batch_size = ROWS_PER_BATCH
        how = {"gradient_accumulation_steps": steps}
    with strategy.scope():
        model = build(tfaccum.Model)
        model.compile(
            OPTIMIZERS[optimizer](),
            "mse",
            metrics=["mae"],
            **how,
            **compile_arguments,
        )
    history = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=list(callbacks),
        shuffle=False,
        verbose=0,
    )
    return outcome(model, history)


def outcome(model, history):
    """Weights, optimizer variables and logs, as plain lists."""
    variables = model.trainable_variables + model.optimizer.variables
    return {
        "values": np.concatenate(
            [np.ravel(v.numpy()).astype("float64") for v in variables]
        ).tolist(),
        "logs": history.history,
        "updates": int(model.optimizer.iterations.numpy()),
    }
