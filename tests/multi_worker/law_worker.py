"""Runs the law's matrix on this worker and writes what came out of it.

    python -m tests.multi_worker.law_worker replicas case ...

A case is a JSON list, the arguments of `law.in_windows`, or the name of a
function.
"""

import json
import os
import sys

import keras
import tensorflow as tf

from tests import law, toy
from tfaccum import callbacks


def in_step(strategy):
    """More than 20 windows, after each of which all replicas are compared."""
    compare = callbacks.CompareReplicas(1)
    return law.in_windows(
        strategy, 3, "adamw", False, epochs=7, callbacks=[compare]
    )


def out_of_step(strategy):
    """The last replica of worker 1 is changed; what is said of it."""

    class Corrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if strategy.cluster_resolver.task_id == 1:
                kernel = self.model.layers[-1].kernel.value
                last = strategy.experimental_local_results(kernel)[-1]
                last.assign_add(tf.fill(last.shape, tf.cast(1e-9, last.dtype)))

    try:
        law.in_windows(
            strategy,
            3,
            "sgd",
            False,
            callbacks=[Corrupt(), callbacks.CompareReplicas(1)],
        )
    except RuntimeError as error:
        return str(error)
    return "equal"


NAMED = {"in_step": in_step, "out_of_step": out_of_step}


def main():
    replicas, *cases = sys.argv[1:]
    strategy = toy.worker_strategy(int(replicas))
    keras.config.set_floatx("float64")
    outcomes = {"replicas": strategy.num_replicas_in_sync}
    for case in cases:
        outcomes[case] = (
            NAMED[case](strategy)
            if case in NAMED
            else law.in_windows(strategy, *json.loads(case))
        )
    with open(os.environ["TFACCUM_RESULT"], "w") as file:
        json.dump(outcomes, file)


main()
