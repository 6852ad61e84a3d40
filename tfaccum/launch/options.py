"""What the command line of the launcher asks for, checked early.

Also where each worker gets its GPUs and threads from.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tfaccum.train.options import UsageError

_HELP = {
    "workers": ("N", "how many processes to start"),
    "max_restarts": ("N", "start all again after a failure, so often"),
    "grace": ("S", "seconds for workers to end by themselves, after a\n"
                   "signal or the failure of one; then they are ended"),
    "log_dir": ("DIR", "of worker-0.log and so on; default\n"
                       "runs/launch-<time>"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of the launcher, and the command of a worker.

    Attributes:
        command: Program and arguments.
        environments: What each worker's environment has besides: its devices
            and threads.

    The others are the flags of the same name.
    """

    workers: int
    max_restarts: int
    grace: float
    log_dir: Path
    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]


def parse(argv: Sequence[str]) -> Options | None:
    """Reads the command line.

    Returns:
        The options, or None if help was asked for.

    Raises:
        UsageError: If a flag is unknown or its value is wrong.
        UsageError: If there is no command of a worker, or no such program.
        UsageError: If there are fewer GPUs than workers.
    """
    own = list(argv)
    command: list[str] = []
    if "--" in own:
        place = own.index("--")
        own, command = own[:place], own[place + 1 :]
    values = _define_flags()
    try:
        rest = values(own)[1:]
    except flags.Error as error:
        raise UsageError(error) from error
    if values["help"].value or values["helpshort"].value:
        return None
    example = "tfaccum-launch --workers=2 -- tfaccum-train --experiment=FILE"
    if rest or not command:
        received = repr(rest[0]) if rest else "none"
        raise UsageError(
            "the command of a worker must stand behind `--`. Received: "
            f"{received}. Try {example}."
        )
    if shutil.which(command[0]) is None:
        raise UsageError(
            "the command of a worker must begin with a program. Received: "
            f"{command[0]!r}, which is none. Try {example}."
        )
    found: dict[str, Any] = {name: values[name].value for name in _HELP}
    number = found["workers"]
    if number is None:
        raise UsageError(
            f"--workers must be given. Received: none. Try {example}."
        )
    return Options(
        workers=number,
        max_restarts=found["max_restarts"],
        grace=found["grace"],
        log_dir=Path(
            found["log_dir"] or time.strftime("runs/launch-%Y%m%d-%H%M%S")
        ).expanduser(),
        command=tuple(command),
        environments=tuple(_shares(number, os.environ)),
    )


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()

    def define(kind: str, name: str, default: object, **limits: float) -> None:
        function = getattr(flags, f"DEFINE_{kind}")
        _, text = _HELP[name]
        function(name, default, text, flag_values=values, **limits)

    define("integer", "workers", None, lower_bound=1)
    define("integer", "max_restarts", 0, lower_bound=0)
    define("float", "grace", 30.0, lower_bound=0)
    define("string", "log_dir", None)
    for name in ("help", "helpshort"):
        flags.DEFINE_bool(name, False, "print this", flag_values=values)
    return values


def help_text() -> str:
    """All flags."""
    lines = [
        "usage: tfaccum-launch --workers=N [flags] -- COMMAND",
        "",
        "Starts COMMAND once per worker on this machine, as one cluster, and",
        "supervises them.",
        "",
    ]
    for flag, (value, text) in _HELP.items():
        form = f"  --{flag}={value}"
        for line in text.split("\n"):
            lines.append(f"{form:24}{line}")
            form = ""
    return "\n".join(lines)


def _shares(
    number: int, environment: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Each worker's GPUs and threads.

    All get the same number of GPUs, which TensorFlow takes for granted.
    """
    gpus = visible_gpus(environment)
    if gpus and len(gpus) < number:
        raise UsageError(
            f"--workers must be at most the number of GPUs, {len(gpus)}. "
            f"Received: --workers={number}. Start one worker per GPU or "
            "fewer; CUDA_VISIBLE_DEVICES=-1 before the command trains on the "
            "CPU."
        )
    each = len(gpus) // number
    cores = len(os.sched_getaffinity(0))
    for index in range(number):
        share = {}
        if each:
            mine = gpus[index * each : (index + 1) * each]
            share["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if number > 1:
            for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
                if name not in environment:
                    share[name] = str(max(1, cores // number))
        yield share


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that this process may use, for CUDA.

    Looked up without TensorFlow: in CUDA_VISIBLE_DEVICES, else with
    nvidia-smi.
    """
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        listed = [name.strip() for name in names.split(",")]
        # CUDA stops at the first that it does not know.
        end = next((i for i, name in enumerate(listed) if name in ("", "-1")),
                   len(listed))  # fmt: skip
        return listed[:end]
    try:
        text = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", text, re.MULTILINE)
