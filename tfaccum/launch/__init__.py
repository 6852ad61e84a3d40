"""`tfaccum-launch`: starts and supervises the workers of one machine.

    tfaccum-launch --workers=2 -- tfaccum-train --experiment=FILE

The command behind `--` runs once per worker, with

* TF_CONFIG: the workers on free ports of 127.0.0.1, and which one it is;
* CUDA_VISIBLE_DEVICES: its share of the GPUs, if there are any;
* TF_NUM_INTRAOP_THREADS and OMP_NUM_THREADS: its share of the cores;
* TFACCUM_RESTART: how often the group has been started again, from 0;
* TFACCUM_STARTED: when the launcher was started, the same after a restart.

On the console, standard output is that of worker 0 alone, untouched; lines on
standard error are shown from all, with the worker in front. Everything is in
the logs, `worker-0.log` and so on.

SIGINT, SIGTERM and SIGHUP are passed on to every worker; a second one, or
`--grace` seconds, ends them. No worker outlives the launcher. The exit code is
that of the worker that failed first, 128 + n if signal n ended it. With
`--max_restarts` the whole group is then started again, unless the command was
wrong (exit code 2) or the launcher had been told to stop.
"""

import sys
from collections.abc import Sequence

from tfaccum.launch import options
from tfaccum.launch.supervisor import Supervisor
from tfaccum.train.options import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Program name and arguments. Default: those of this process.

    Returns:
        The exit code.
    """
    argv = list(sys.argv if argv is None else argv)
    try:
        asked = options.parse(argv)
        if asked is None:
            print(options.help_text())
            return 0
        return Supervisor(asked).run()
    except UsageError as error:
        print(f"tfaccum-launch: {error}", file=sys.stderr)
        return 2
