r"""All tables and plots of the boost algorithms, one after the other.

    PYTHONPATH=. python experiments/boost_study.py --data_dir=DIR adasum ...

where DIR holds the `mnist` of TensorFlow Datasets, prepared; the environment
variable TFACCUM_TEST_DATA may name it instead. Without names, all: `adasum`
and `adasum_cost` (docs/adasum.md), `dim_reduce` (docs/dim_reduce.md) and
`gradient_freeze` (docs/gradient_freeze.md), each by the command that stands
beside its table, in a process of its own. Plots are drawn into docs/, all
else is printed. `adasum_cost` counts bytes only as root. What to expect is
said there.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "adasum": ("experiments.adasum_mnist", "--plot=docs/adasum.png"),
    "adasum_cost": ("benchmarks.adasum",),
    "dim_reduce": (
        "experiments.dim_reduce_mnist",
        "--plot=docs/dim_reduce.png",
    ),
    "gradient_freeze": ("benchmarks.gradient_freeze", "--rounds=7"),
}


def main():
    """Runs what was asked for; ends with the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", help="of TensorFlow Datasets")
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []])
    flags = parser.parse_args()
    environment = dict(os.environ)
    if flags.data_dir:
        environment["TFACCUM_TEST_DATA"] = flags.data_dir
    for name in flags.names or COMMANDS:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", *COMMANDS[name]]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
