"""`tfaccum-train`: trains the model of an experiment file.

    tfaccum-train --experiment=experiments/digits_cnn.py --virtual_devices=2

An experiment is a Python file of four names:

    DEFAULTS = {"global_batch": 128, "micro_batch": 16, "learning_rate": 0.1}

    def model():
        return keras.Sequential([...])        # or a tfaccum.Model

    def data(*, batch_size, seed, data_dir):
        return train, validation              # or (train, None)

    def compile_arguments(*, learning_rate, num_updates):
        return {"optimizer": ..., "loss": ..., "metrics": [...]}

* `DEFAULTS` is written out as a literal, so that it can be read without
  running the file. Its keys are flags of training (see `--helpshort`); a flag
  on the command line wins over it.
* `data` returns a `tfaccum.data.Pipeline`, or a `tf.data.Dataset` of global
  batches of `batch_size` examples, the same on every worker.
* `num_updates` is that of the whole run, for schedules; None if the data
  cannot tell their number.

Whatever is wrong with the command ends in one line on stderr and exit code 2,
before TensorFlow is imported if it can be known then. Exit code 1 means that
`--verify_updates` has found a difference, or, in one line too, that the
workers of a cluster could not start together.
"""

import os
import sys
from collections.abc import Sequence

from tfaccum.rendezvous import StartError
from tfaccum.train import options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: program name and arguments. Default: those of this process.

    Returns:
        The exit code.
    """
    argv = list(sys.argv if argv is None else argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        asked = options.parse(argv)
        if asked is None:
            print(options.help_text())
            return 0
        # Brings TensorFlow in, which takes seconds.
        from tfaccum.train import job

        return job.run(asked)
    except options.UsageError as error:
        print(f"tfaccum-train: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"tfaccum-train: {error}", file=sys.stderr)
        return 1
