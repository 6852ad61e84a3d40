"""What the command line and the experiment ask for, checked early.

Imports nothing but the standard library, absl and rooms that need no more, so
that a mistake is reported before TensorFlow takes seconds to start.
"""

import ast
import dataclasses
import hashlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tfaccum import cluster as clusters
from tfaccum.batching import BatchPlan
from tfaccum.cluster import EXIT_PREEMPTED, STARTED, Cluster
from tfaccum.rendezvous import TIMEOUT
from tfaccum.schedule import AccumulationSchedule

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker")
WIRE_DTYPES = ("bfloat16", "float16")
RESUME = ("auto", "must", "never")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")

# What an experiment file has to define.
FUNCTIONS = ("model", "data", "compile_arguments")
# Flags that its DEFAULTS may set.
DEFAULTS = (
    "global_batch",
    "micro_batch",
    "accumulation_steps",
    "cut_batches",
    "epochs",
    "learning_rate",
    "precision",
    "seed",
    "steps_per_execution",
    "jit",
)
# The sizes of a BatchPlan, in the order in which the experiment's fill in
# what the command line leaves open.
_SIZES = {
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation_steps",
}
# How a cluster is found, started and connected.
_CLUSTER = (
    "cluster",
    "worker_hosts",
    "task_index",
    "start_timeout",
    "communication",
    "bytes_per_pack",
    "collective_timeout",
)
_GROUPS = {
    "What to train": ("experiment",),
    "Batches: global = micro x replicas x accumulation steps; two are enough": (
        "global_batch",
        "micro_batch",
        "accumulation_steps",
        "accumulation_schedule",
        "cut_batches",
        "auto_micro_batch",
    ),
    "Training": (
        "epochs",
        "learning_rate",
        "precision",
        "seed",
        "steps_per_execution",
        "jit",
    ),
    "Devices": ("strategy", "devices", "virtual_devices"),
    "Several replicas and workers": (
        *_CLUSTER,
        "wire_dtype",
        "compare_replicas_every",
    ),
    "Files": ("model_dir", "data_dir"),
    "Checkpoints, in --model_dir": (
        "resume",
        "save_every_updates",
        "save_best",
        "keep",
        "max_run_seconds",
        "allow_changes",
    ),
    "Afterwards": ("verify_updates",),
}
_PLACEHOLDERS = {
    "experiment": "FILE",
    "model_dir": "DIR",
    "data_dir": "DIR",
    "devices": "A,B",
    "worker_hosts": "A:1,B:1",
    "accumulation_schedule": "U:K,U:K",
}
# Flags that may differ between the workers of a cluster, and those that are
# compared in another way: the experiment by its content, the others by
# `make_strategy`.
_NOT_IN_FINGERPRINT = (
    "experiment",
    "model_dir",
    "data_dir",
    *_CLUSTER,
)


class UsageError(Exception):
    """The command cannot be run as it was given. The text is one line."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for: flags over the experiment's DEFAULTS.

    Attributes:
        experiment: Path of the experiment file.
        batch_sizes: Two or three of the sizes that `BatchPlan.derive` takes.
        sources: Where each of them came from.
        cluster: The workers, or None.
        model_dir: Where the chief writes.
        flags: Every flag and its value, for the record.

    The others are the flags of the same name.
    """

    experiment: Path
    batch_sizes: Mapping[str, int]
    sources: Mapping[str, str]
    accumulation_schedule: tuple[tuple[int, int], ...]
    cut_batches: bool
    auto_micro_batch: bool
    epochs: int
    learning_rate: float
    precision: str
    seed: int
    steps_per_execution: int
    jit: bool
    strategy: str
    devices: tuple[str, ...] | None
    virtual_devices: int | None
    cluster: Cluster | None
    start_timeout: float
    communication: str
    bytes_per_pack: int
    collective_timeout: float
    wire_dtype: str | None
    compare_replicas_every: int | None
    model_dir: Path
    data_dir: str | None
    resume: str
    save_every_updates: int | None
    save_best: str | None
    keep: int
    max_run_seconds: float | None
    allow_changes: bool
    verify_updates: int
    flags: Mapping[str, Any]

    @property
    def fingerprint(self) -> dict[str, str]:
        """What has to be the same on all workers: names and values."""
        content = hashlib.sha256(self.experiment.read_bytes()).hexdigest()
        return {
            "content of --experiment": content[:12],
            **{
                f"--{name}": str(value)
                for name, value in self.flags.items()
                if name not in _NOT_IN_FINGERPRINT
            },
        }

    def plan(self, num_replicas: int, source: str) -> BatchPlan:
        """The batch plan for so many replicas.

        Args:
            num_replicas: Over all workers.
            source: Where that number came from, for the error.

        Raises:
            UsageError: If there is no such plan.
        """
        try:
            return BatchPlan.derive(
                num_replicas=num_replicas,
                sources={**self.sources, "num_replicas": source},
                **self.batch_sizes,
            )
        except ValueError as error:
            raise UsageError(error) from error


def parse(argv: Sequence[str]) -> Options | None:
    """Reads the command line and the experiment's DEFAULTS.

    Args:
        argv: Program name and arguments.

    Returns:
        The options, or None if help was asked for.

    Raises:
        UsageError: If a flag is unknown or its value is wrong.
        UsageError: If there is no such experiment, or it lacks something.
        UsageError: If there is no such batch plan.
        UsageError: If the description of the cluster is wrong.
        UsageError: If the devices that were asked for contradict each other.
        UsageError: If the chief cannot write to `--model_dir`.
    """
    values = _define_flags()
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(error) from error
    if values["help"].value or values["helpshort"].value:
        return None
    if rest:
        raise UsageError(
            f"every argument must be a flag. Received: {rest[0]!r}. Flags "
            "begin with --; --helpshort lists them."
        )
    if values["experiment"].value is None:
        raise UsageError(
            "--experiment must be given: the path of a .py file or the name "
            "of a module. Received: none. Try "
            "--experiment=experiments/digits_cnn.py."
        )
    path = _find(values["experiment"].value)
    sizes, sources = _apply_defaults(values, path, _read_defaults(path))
    if values["learning_rate"].value is None:
        raise UsageError(
            "--learning_rate must be given, or be in the DEFAULTS of "
            f"{path}. Received: none."
        )
    cluster = _find_cluster(values)
    _check_devices(values, cluster)
    if values["model_dir"].value is None:
        # A launcher that starts the workers again goes on in one directory.
        now = time.strftime("%Y%m%d-%H%M%S")
        stamp = os.environ.get(STARTED, now)
        values["model_dir"].value = f"runs/{path.stem}-{stamp}"
    options = _options(values, path, sizes, sources, cluster)
    _check_plan(options)
    if cluster is None or cluster.index == 0:
        _check_model_dir(options.model_dir, options.resume)
    return options


def _options(
    values: flags.FlagValues,
    path: Path,
    sizes: Mapping[str, int],
    sources: Mapping[str, str],
    cluster: Cluster | None,
) -> Options:
    found: dict[str, Any] = {
        name: values[name].value for group in _GROUPS.values() for name in group
    }
    rest = {k: v for k, v in found.items() if k not in _SIZES.values()}
    del rest["worker_hosts"], rest["task_index"]
    rest["cluster"] = cluster
    rest["experiment"] = path
    rest["model_dir"] = Path(found["model_dir"]).expanduser()
    rest["accumulation_schedule"] = _schedule(values)
    rest["devices"] = found["devices"] and tuple(found["devices"])
    return Options(batch_sizes=sizes, sources=sources, flags=found, **rest)


def _schedule(values: flags.FlagValues) -> tuple[tuple[int, int], ...]:
    """Pairs (update, K) of --accumulation_schedule."""
    given = values["accumulation_schedule"].value or []
    text = ",".join(given)
    try:
        pairs = [tuple(map(int, pair.split(":"))) for pair in given]
        schedule = tuple((update, k) for update, k in pairs)
        AccumulationSchedule([(0, 1), *schedule])
    except (TypeError, ValueError) as error:
        raise UsageError(
            "--accumulation_schedule must be pairs update:steps that rise, "
            f"from 1 on. Received: --accumulation_schedule={text}. Write for "
            "instance 1000:8,5000:32."
        ) from error
    if schedule and values["cut_batches"].value:
        raise UsageError(
            "--accumulation_schedule must not be given with --cut_batches, "
            "where one dataset batch is one update. Received: "
            f"--accumulation_schedule={text}."
        )
    verified = int(values["verify_updates"].value or 0)
    if schedule and verified > schedule[0][0]:
        raise UsageError(
            "--verify_updates must end before the first change of "
            "--accumulation_schedule. Received: "
            f"--verify_updates={verified}, "
            f"--accumulation_schedule={text}."
        )
    return schedule


def help_text() -> str:
    """All flags, by group."""
    values = _define_flags()
    lines = [
        "usage: tfaccum-train --experiment=FILE [flags]",
        "",
        "Trains the model of an experiment file. Flags override its DEFAULTS.",
    ]
    for title, names in _GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _help_of(values[name])
    return "\n".join(lines)


def _help_of(flag: flags.Flag) -> list[str]:
    """The lines of one flag: its form, and its text beside or below."""
    kind = flag.flag_type()
    choices = getattr(flag.parser, "enum_values", None)
    if kind == "bool":
        form = f"--[no]{flag.name}"
    elif choices:
        form = f"--{flag.name}={'|'.join(choices)}"
    else:
        value = _PLACEHOLDERS.get(flag.name, "X" if kind == "float" else "N")
        form = f"--{flag.name}={value}"
    form = f"  {form}"
    # absl puts the values of an enum before its text.
    texts = flag.help.rpartition(">: ")[2].split("\n")
    column = 28
    if len(form) >= column:
        return [form, *(" " * column + text for text in texts)]
    return [
        f"{form if index == 0 else '':{column}}{text}"
        for index, text in enumerate(texts)
    ]


def _define_flags() -> flags.FlagValues:
    """The flags of this command; those of other libraries stay out."""
    values = flags.FlagValues()

    def integer(name: str, default: int | None, text: str, least: int) -> None:
        flags.DEFINE_integer(
            name, default, text, lower_bound=least, flag_values=values
        )

    def string(name: str, text: str) -> None:
        flags.DEFINE_string(name, None, text, flag_values=values)

    def boolean(name: str, text: str) -> None:
        flags.DEFINE_bool(name, False, text, flag_values=values)

    string("experiment", "a .py file or a dotted module")
    integer("global_batch", None, "examples behind one update", 1)
    integer("micro_batch", None, "most examples that a replica holds", 1)
    integer("accumulation_steps", None, "micro-steps in one update", 1)
    flags.DEFINE_list(
        "accumulation_schedule",
        None,
        "other steps after so many updates: 1000:8,5000:32",
        flag_values=values,
    )
    boolean(
        "auto_micro_batch",
        "halve the micro-batch while it does not fit into\n"
        "memory; the global batch stays",
    )
    boolean(
        "cut_batches",
        "the dataset yields global batches, which each\n"
        "replica cuts; otherwise it yields micro x replicas\n"
        "examples, and so many batches make one update",
    )
    integer("epochs", 1, "passes over the data", 1)
    flags.DEFINE_float(
        "learning_rate",
        None,
        "for the experiment's optimizer",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "precision",
        "float32",
        PRECISIONS,
        "default float32",
        flag_values=values,
    )
    integer("seed", 0, "of weights and of the order of examples", 0)
    integer("steps_per_execution", 1, "updates in one call", 1)
    boolean("jit", "compile the micro-step with XLA")
    flags.DEFINE_enum(
        "strategy",
        "auto",
        STRATEGIES,
        "default auto: the workers of a cluster, else all\n"
        "visible GPUs, else the CPU",
        flag_values=values,
    )
    flags.DEFINE_list(
        "devices", None, "for instance GPU:0,GPU:1", flag_values=values
    )
    integer("virtual_devices", None, "replicas to make of the CPU", 1)
    _define_cluster_flags(values)
    string(
        "model_dir",
        "new, or of a run to go on with; default\nruns/<experiment>-<time>",
    )
    string("data_dir", "of TensorFlow Datasets; default its own")
    _define_checkpoint_flags(values)
    integer(
        "verify_updates",
        0,
        "take the first N updates again, and compare them\n"
        "with one big batch on one device; exit code 1 if\n"
        "they differ",
        0,
    )
    for name in ("help", "helpshort"):
        boolean(name, "print this")
    return values


def _define_checkpoint_flags(values: flags.FlagValues) -> None:
    """The flags of saving a run and going on with it."""
    flags.DEFINE_enum(
        "resume",
        "auto",
        RESUME,
        "go on with the newest checkpoint: auto, if there is\n"
        "one; must; never. Default auto",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "save_every_updates",
        None,
        "besides the end of each epoch",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string(
        "save_best",
        None,
        "keep the best too, by a metric such as val_loss",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "keep", 3, "newest checkpoints", lower_bound=1, flag_values=values
    )
    flags.DEFINE_float(
        "max_run_seconds",
        None,
        "then end after the update, with a checkpoint and\n"
        f"exit code {EXIT_PREEMPTED}, as for SIGTERM",
        lower_bound=0.001,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "allow_changes",
        False,
        "go on although model, optimizer or global batch\nhave changed",
        flag_values=values,
    )


def _define_cluster_flags(values: flags.FlagValues) -> None:
    """The flags of training with several workers."""
    flags.DEFINE_enum(
        "cluster",
        "auto",
        clusters.SOURCES,
        "default auto: --worker_hosts, else TF_CONFIG, else\n"
        "a step of Slurm with several tasks",
        flag_values=values,
    )
    flags.DEFINE_list(
        "worker_hosts",
        None,
        "host:port of all workers, the same on each",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "task_index",
        None,
        "which of them this process is, from 0",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "start_timeout",
        TIMEOUT,
        f"seconds to wait for the others; default {TIMEOUT:g}",
        lower_bound=1.0,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "communication",
        "auto",
        clusters.COMMUNICATIONS,
        "default auto: NCCL on GPUs, else TensorFlow's ring",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "bytes_per_pack",
        0,
        "most that travels at once; default 0: all gradients",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "wire_dtype",
        None,
        WIRE_DTYPES,
        "in which gradients travel; default their own",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "compare_replicas_every",
        None,
        "updates between comparisons of all weights",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "collective_timeout",
        0.0,
        "seconds until a collective operation gives up, to\n"
        "find the cause of a hang; default 0: never",
        lower_bound=0.0,
        flag_values=values,
    )


def _find(experiment: str) -> Path:
    """The file of an experiment, by path or by the name of its module."""
    path = Path(experiment).expanduser()
    if path.suffix != ".py" and os.sep not in experiment:
        # As `python -m` does, also for the installed command.
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(experiment)
        except (ImportError, ValueError):
            spec = None
        path = Path(spec.origin) if spec and spec.origin else path
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(
            "--experiment must be the path of a .py file or the name of a "
            f"module. Received: --experiment={experiment}, and there is no "
            "such file."
        )
    return path


def _read_defaults(path: Path) -> dict[str, Any]:
    """The literal DEFAULTS of an experiment file, without running it."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--experiment must be Python. Received: {path} ({error})."
        ) from error
    names: set[str] = set()
    literal = None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            targets = {getattr(target, "id", "") for target in node.targets}
            names |= targets
            literal = node.value if "DEFAULTS" in targets else literal
    missing = [name for name in FUNCTIONS if name not in names]
    if missing:
        raise UsageError(
            f"--experiment must define {', '.join(FUNCTIONS)}. Received: "
            f"{path} without {', '.join(missing)}."
        )
    if literal is None:
        return {}
    try:
        defaults = ast.literal_eval(literal)
    except ValueError:
        defaults = None
    if not isinstance(defaults, dict):
        raise UsageError(
            "DEFAULTS must be written out as a dict of numbers and strings. "
            f"Received: {ast.unparse(literal)} in {path}."
        )
    return defaults


def _apply_defaults(
    values: flags.FlagValues, path: Path, defaults: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, str]]:
    """Gives the experiment's values to flags that are not on the command line.

    The sizes of the batch depend on each other: the experiment's fill in,
    the global batch first, until two are known.

    Returns:
        The sizes that `BatchPlan.derive` takes, and where they came from.
    """
    unknown = [name for name in defaults if name not in DEFAULTS]
    if unknown:
        raise UsageError(
            f"DEFAULTS must name only {', '.join(DEFAULTS)}. Received: "
            f"{unknown[0]!r} in {path}."
        )
    sizes: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for size, name in _SIZES.items():
        if values[name].present:
            sizes[size], sources[size] = values[name].value, f"--{name}"
    wanted = 2 if sizes else 3
    for size, name in _SIZES.items():
        if len(sizes) < wanted and size not in sizes and name in defaults:
            sizes[size] = _set(values, name, defaults[name], path)
            sources[size] = f"DEFAULTS of {path}"
    for name, value in defaults.items():
        if name not in _SIZES.values() and not values[name].present:
            _set(values, name, value, path)
    return sizes, sources


def _set(values: flags.FlagValues, name: str, value: Any, path: Path) -> Any:
    """Sets a flag as the command line would, with the same checks."""
    try:
        values[name].parse(value)
    except flags.Error as error:
        raise UsageError(f"DEFAULTS of {path}: {error}") from error
    return values[name].value


def _find_cluster(values: flags.FlagValues) -> Cluster | None:
    try:
        return clusters.find(
            str(values["cluster"].value),
            worker_hosts=values["worker_hosts"].value,
            task_index=values["task_index"].value,
        )
    except ValueError as error:
        raise UsageError(error) from error


def _check_devices(values: flags.FlagValues, cluster: Cluster | None) -> None:
    """Looks for contradictions."""
    strategy, devices = values["strategy"].value, values["devices"].value
    virtual = values["virtual_devices"].value
    named = "--devices" if devices else "--virtual_devices"
    count = len(devices) if devices else virtual
    if devices and virtual:
        raise UsageError(
            "--devices and --virtual_devices must not be given together. "
            f"Received: --devices={','.join(devices)} and "
            f"--virtual_devices={virtual}."
        )
    if cluster and (devices or strategy not in ("auto", "multi_worker")):
        what = "--devices" if devices else f"--strategy={strategy}"
        raise UsageError(
            f"{what} must not be given when {cluster.source} names a cluster. "
            f"Received: {cluster.num_workers} workers in {cluster.source}. "
            "Choose a worker's GPUs with CUDA_VISIBLE_DEVICES."
        )
    if strategy == "multi_worker" and not cluster:
        raise UsageError(
            "--strategy=multi_worker needs a cluster. Received: no "
            "--worker_hosts, no TF_CONFIG and no step of Slurm. Put "
            "tfaccum-launch before the command to train with several workers "
            "on this machine."
        )
    if count and (
        (strategy == "one_device" and count > 1)
        or (strategy == "mirrored" and count < 2)
    ):
        needs = (
            "one device"
            if strategy == "one_device"
            else ("two or more devices")
        )
        raise UsageError(
            f"--strategy={strategy} needs {needs}. Received: {count} "
            f"device{'s' if count > 1 else ''} in {named}."
        )


def _check_plan(options: Options) -> None:
    """Makes the plan if the number of replicas is known by now.

    Otherwise the global batch has to be divisible at least by what is known.
    """
    if options.virtual_devices or options.strategy == "one_device":
        workers = options.cluster.num_workers if options.cluster else 1
        replicas = workers * (options.virtual_devices or 1)
        options.plan(replicas, _replicas_source(options))
    elif options.devices:
        options.plan(len(options.devices), "--devices")
    elif len(options.batch_sizes) < 3:
        options.plan(1, "one at least; the devices are not known yet")


def _replicas_source(options: Options) -> str:
    if options.virtual_devices:
        return "--virtual_devices"
    return f"--strategy={options.strategy}"


def _check_model_dir(model_dir: Path, resume: str) -> None:
    """Makes the directory and writes to it, to see that it can be done."""
    try:
        is_new = not model_dir.exists()
        model_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=model_dir):
            pass
        used = any(model_dir.iterdir())
        if is_new:
            model_dir.rmdir()
    except OSError as error:
        raise UsageError(
            "--model_dir must be a directory that can be written. Received: "
            f"--model_dir={model_dir} ({error.strerror})."
        ) from error
    has_run = (model_dir / "checkpoints").is_dir()
    if resume == "must" and not has_run:
        raise UsageError(
            "--model_dir must hold a run to go on with. Received: "
            f"--resume=must --model_dir={model_dir}, which has no checkpoints."
        )
    if used and (resume == "never" or not has_run):
        raise UsageError(
            "--model_dir must be new or empty, or hold a run to go on with, "
            "or the files of two runs would be mixed. Received: "
            f"--resume={resume} --model_dir={model_dir}, which is not empty."
        )
