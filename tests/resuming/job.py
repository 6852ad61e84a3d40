"""A run on the digits with everything that has a state.

    python -m tests.resuming.job model_dir result --replicas=2 ...

Writes what it was at the end, and before, which examples each update saw.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

EPOCHS = 3
BATCH = 240  # 1,437 examples: 6 batches, the last of 237.


def arguments(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--micro_batch", type=int)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--steps_per_execution", type=int, default=1)
    parser.add_argument("--precision", default="mixed_float16")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--kill_at", type=int, help="SIGKILL after a batch")
    parser.add_argument("--term_at", type=int, help="SIGTERM after a batch")
    parser.add_argument("--term_on", type=int, default=0, help="worker")
    parser.add_argument("--max_run_seconds", type=float)
    parser.add_argument("--pause", type=float, default=0.0)
    return parser.parse_args(argv)


def run(asked):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfaccum
    import tfaccum.data
    from tfaccum import callbacks

    if asked.replicas > 1 and "TF_CONFIG" not in os.environ:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * asked.replicas,
        )
        devices = [f"CPU:{i}" for i in range(asked.replicas)]
        strategy = tfaccum.make_strategy(devices)
    elif "TF_CONFIG" in os.environ:
        strategy = tfaccum.make_strategy()
    else:
        strategy = tf.distribute.get_strategy()
    worker = int(
        json.loads(os.environ.get("TF_CONFIG", '{"task":{"index":0}}'))["task"][
            "index"
        ]
    )

    seen = []

    class Model(tfaccum.Model):
        """Notes which examples each update has seen."""

        def train_step(self, data):
            x, y, ids = data

            def note(ids):
                seen.extend(ids.numpy().tolist())

            tf.py_function(note, [ids], [])
            return super().train_step((x, y))

    def augmented(element, seed):
        image, label, ids = element
        noise = tf.random.stateless_normal(tf.shape(image), seed, 0.0, 0.1)
        return image + noise, label, ids

    def mapped(example):
        image = tf.cast(example["image"], tf.float32) / 16.0
        return image, example["label"], example[tfaccum.data.ID]

    data = tfaccum.data.Pipeline(
        name="digits",
        split="train",
        batch_size=asked.batch,
        data_dir=asked.data_dir,
        seed=5,
        with_ids=True,
        map_fn=mapped,
        augment_fn=None if asked.plain else augmented,
    )
    keras.utils.set_random_seed(11)
    keras.config.set_dtype_policy(asked.precision)
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        x = keras.layers.Flatten()(inputs)
        x = keras.layers.Dense(16, activation="relu")(x)
        if not asked.plain:
            x = keras.layers.Dropout(0.3, seed=3)(x)
            x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Dense(10, activation="softmax", dtype="float32")(x)
        model = Model(inputs, x)
        schedule = keras.optimizers.schedules.CosineDecay(0.01, 20)
        model.compile(
            keras.optimizers.AdamW(schedule, use_ema=not asked.plain),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            gradient_accumulation_steps=asked.steps,
            micro_batch_size=asked.micro_batch,
            steps_per_execution=asked.steps_per_execution,
            loss_scale=tfaccum.LossScale(initial=1024.0, growth_interval=4)
            if asked.precision == "mixed_float16"
            else "auto",
        )

    ids_file = asked.model_dir / f"ids-{worker}.jsonl"
    asked.model_dir.mkdir(parents=True, exist_ok=True)

    class Watch(keras.callbacks.Callback):
        calls = 0

        def on_train_batch_end(self, batch, logs=None):
            update = int(model.optimizer.iterations.numpy())
            with open(ids_file, "a") as file:
                print(json.dumps([update, batch, seen]), file=file)
            seen.clear()
            Watch.calls += 1
            time.sleep(asked.pause)
            if Watch.calls == asked.kill_at:
                os.kill(os.getpid(), 9)
            if Watch.calls == asked.term_at and worker == asked.term_on:
                os.kill(os.getpid(), 15)

    def numbers(value):
        return np.asarray(value).astype(np.float64).ravel().tolist()

    class End(keras.callbacks.Callback):
        """The state before the moving average takes the weights' place."""

        runs_last = True

        def on_train_begin(self, logs=None):
            self.on_epoch_end(0)  # If nothing is left to train.

        def on_epoch_end(self, epoch, logs=None):
            self.state = [
                value.numpy().tobytes().hex()
                for value in [*model.variables, *model.optimizer.variables]
            ]

    end = End()
    print("begins to train", flush=True)
    history = model.fit(
        data,
        epochs=asked.epochs,
        verbose=2,
        callbacks=[
            Watch(),
            keras.callbacks.EarlyStopping("loss", patience=9),
            callbacks.Curves(),
            tfaccum.Checkpoint(
                # The other workers need not see the first one's files.
                asked.model_dir if not worker else f"/nowhere/{worker}",
                save_every_updates=asked.every,
                save_best="accuracy",
                resume=asked.resume,
                max_run_seconds=asked.max_run_seconds,
            ),
            end,
        ],
    )
    result = {
        "state": getattr(end, "state", None),
        "weights": [numbers(w) for w in model.get_weights()],
        "history": history.history,
        "updates": int(model.optimizer.iterations.numpy()),
    }
    if asked.result is not None:
        path = asked.result.with_suffix(f".{worker}.json")
        path.write_text(json.dumps(result))


if __name__ == "__main__":
    run(arguments(sys.argv[1:]))
