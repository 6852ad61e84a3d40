"""One worker of a run in which one worker meets with a fault.

    python -m tests.faults.job folder --fault=sigkill --on=1

`--on` does it after update `--at`, or before training if that is 0, once all
workers have come so far and are about to wait for this one. Each writes
`weights-<index>.jsonl`, a line per update, and at its end `end-<index>.json`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

BATCHES_OF_A_WINDOW = 2
# How long a worker that is slow takes longer in each batch, in seconds.
SLOW = 0.1


def arguments(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="none")
    parser.add_argument("--on", type=int, default=-1, help="worker")
    parser.add_argument("--at", type=int, default=5, help="update")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--stopped", type=float, default=0.0, help="seconds")
    parser.add_argument("--checkpoint", action="store_true")
    return parser.parse_args(argv)


def end_with_parent():
    """Also when the test that has started this process is killed."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(asked):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfaccum
    from tfaccum import strategy as strategies

    strategy = tfaccum.make_strategy(start_timeout=120)
    mine, num_workers = strategies.worker_index(strategy)
    is_here = mine == asked.on

    def num_seen(worker):
        path = asked.folder / f"weights-{worker}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def note_time():
        """When it happens, for the test; all others wait for this worker."""
        while min(map(num_seen, range(num_workers))) < asked.at:
            time.sleep(0.01)
        time.sleep(0.3)
        (asked.folder / "fault").write_text(repr(time.time()))

    def rows(context):
        """Batches of this worker; the fault is in one of window `at` + 1."""
        if is_here and asked.fault == "function":
            note_time()
            raise OSError("the data are not there")
        rng = np.random.default_rng(context.input_pipeline_id)
        bad = BATCHES_OF_A_WINDOW * asked.at

        def generate():
            for batch in range(BATCHES_OF_A_WINDOW * asked.updates):
                x = rng.normal(size=(4, 3)).astype("float32")
                if is_here and batch == bad and asked.fault == "data":
                    note_time()
                    raise OSError("the disk of the data is gone")
                if is_here and batch == bad and asked.fault == "nan":
                    x[:] = np.nan
                if is_here and asked.fault == "slow":
                    time.sleep(SLOW)
                yield x, x[:, :1]

        spec = tf.TensorSpec([4, 3]), tf.TensorSpec([4, 1])
        return tf.data.Dataset.from_generator(generate, output_signature=spec)

    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input((3,))
        x = keras.layers.Dense(8, activation="tanh")(inputs)
        model = tfaccum.Model(inputs, keras.layers.Dense(1)(x))
        model.compile(
            keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
            "mse",
            gradient_accumulation_steps=BATCHES_OF_A_WINDOW,
        )

    def state():
        variables = [*model.variables, *model.optimizer.variables]
        return "".join(v.numpy().tobytes().hex() for v in variables)

    class Watch(keras.callbacks.Callback):
        """Keeps what each update has made, and does what is asked for."""

        calls = 0

        def on_train_batch_end(self, batch, logs=None):
            with open(asked.folder / f"weights-{mine}.jsonl", "a") as file:
                print(json.dumps(state()), file=file)
            self.calls += 1
            time.sleep(asked.pause)
            if is_here and self.calls == asked.at:
                commit()

    def commit():
        if asked.fault in ("none", "data", "function", "nan", "slow"):
            return
        note_time()
        if asked.fault == "exception":
            raise ArithmeticError("the callback cannot go on")
        elif asked.fault == "interrupt":
            raise KeyboardInterrupt
        elif asked.fault == "exit":
            sys.exit(3)
        elif asked.stopped:
            wake = f"sleep {asked.stopped}; kill -CONT {os.getpid()}"
            subprocess.Popen(["/bin/sh", "-c", wake])
        os.kill(os.getpid(), getattr(signal, asked.fault.upper()))
        time.sleep(0.1)  # A signal to this process may reach it a bit later.

    callbacks = [Watch()]
    if asked.checkpoint:
        folder = asked.folder / "model"
        checkpoint = tfaccum.Checkpoint(folder, save_every_updates=2)
        callbacks.append(checkpoint)
    error = None
    try:
        if is_here and asked.at == 0:
            commit()
        model.fit(rows, verbose=0, callbacks=callbacks)
    except BaseException as caught:
        error = caught
        raise
    finally:
        end = {
            "error": type(error).__name__ if error else None,
            "text": str(error),
            "cause": str(error.__cause__) if error else None,
            "state": state(),
            "updates": int(model.optimizer.iterations.numpy()),
            "time": time.time(),
        }
        path = asked.folder / f"end-{mine}.json"
        path.write_text(json.dumps(end))


if __name__ == "__main__":
    end_with_parent()
    main(arguments(sys.argv[1:]))
