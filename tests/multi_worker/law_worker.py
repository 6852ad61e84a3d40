"""Runs the law's matrix on this worker and writes what came out of it."""

import json
import os
import sys

import keras
import tensorflow as tf

from tests import law


def main():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.config.set_floatx("float64")
    outcomes = {
        case: law.in_windows(strategy, *json.loads(case))
        for case in sys.argv[1:]
    }
    with open(os.environ["TFACCUM_RESULT"], "w") as file:
        json.dump(outcomes, file)


main()
