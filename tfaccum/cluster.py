"""Who takes part in a run: the addresses of the workers, and which one is this.

A cluster is described in one of three ways:

* TF_CONFIG, TensorFlow's own variable;
* a step of Slurm, `srun tfaccum-train ...`;
* `--worker_hosts=a:2222,b:2222 --task_index=0`.

Each is read and checked here with nothing but the standard library, so that a
mistake is reported before TensorFlow takes seconds to start.
"""

import collections
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# How a cluster may be looked for.
SOURCES = ("auto", "none", "tf_config", "slurm")
# How the replicas of different workers may exchange gradients.
COMMUNICATIONS = ("auto", "ring", "nccl")
EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
# EX_TEMPFAIL of sysexits.h: the run was preempted and can be taken up again.
EXIT_PREEMPTED = 75
# In the environment of a launched worker: when the launcher was started.
STARTED = "TFACCUM_STARTED"

_KINDS = ("chief", "worker")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_ANY_HOST = ("0.0.0.0", "::")
# Ports of Slurm steps: below those that the kernel gives out by itself.
_SLURM_PORTS = range(10_000, 32_000, 16)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a run.

    Attributes:
        addresses: "host:port" of every worker, in order; the first is the
            chief.
        index: Which of them this process is, from 0.
        source: Where the description came from, for messages.

    Raises:
        ValueError: If there is no worker.
        ValueError: If an address is not host:port, or its port not from 1 to
            65535.
        ValueError: If two workers have the same address.
        ValueError: If an address is one that each host gives to itself, and
            there are several hosts.
        ValueError: If there is no worker of that index.
    """

    addresses: tuple[str, ...]
    index: int
    source: str = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        """Checks the description."""
        if not self.addresses:
            raise ValueError(
                f"{self.source} must name at least one worker. Received: an "
                "empty list. Write each as host:port, such as host1:2222."
            )
        for number, address in enumerate(self.addresses):
            _check_address(address, f"worker {number} in {self.source}")
        self._check_duplicates()
        self._check_hosts()
        if isinstance(self.index, bool) or not isinstance(self.index, int):
            raise ValueError(
                f"The index of the task in {self.source} must be an int. "
                f"Received: {self.index!r}. Write 0 for the first worker, "
                "without quotes."
            )
        if not 0 <= self.index < self.num_workers:
            raise ValueError(
                f"The index of the task in {self.source} must be from 0 to "
                f"{self.num_workers - 1}, for {self.num_workers} worker(s). "
                f"Received: index={self.index}, workers "
                f"{', '.join(self.addresses)}. Count from 0, or add the "
                "missing worker to the list."
            )

    def _check_duplicates(self) -> None:
        places = collections.defaultdict(list)
        for number, address in enumerate(self.addresses):
            places[address.lower()].append(number)
        for address, numbers in places.items():
            if len(numbers) > 1:
                raise ValueError(
                    "Each worker must have an address of its own. Received: "
                    f"{address!r} for workers {numbers} in {self.source}. "
                    "Several workers on one host need a port each."
                )

    def _check_hosts(self) -> None:
        hosts = [host_and_port(address)[0] for address in self.addresses]
        own = [host for host in hosts if _LOOPBACK.fullmatch(host.lower())]
        if own and len(own) < len(hosts):
            raise ValueError(
                f"{own[0]!r} must not be the host of a worker beside other "
                f"hosts: on each it means that host itself. Received: "
                f"{', '.join(self.addresses)} in {self.source}. Write the "
                "name by which the other hosts reach it."
            )

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self.addresses)

    @property
    def address(self) -> str:
        """The address of this worker."""
        return self.addresses[self.index]

    def name(self, index: int) -> str:
        """A worker's index and address, for messages."""
        return f"worker {index} ({self.addresses[index]})"

    def tf_config(self) -> str:
        """The same cluster as the JSON text of TF_CONFIG."""
        return json.dumps(
            {
                "cluster": {"worker": list(self.addresses)},
                "task": {"type": "worker", "index": self.index},
            }
        )


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port" or "[::1]:port"."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def find(
    source: str = "auto",
    *,
    worker_hosts: Sequence[str] | None = None,
    task_index: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Cluster | None:
    """Looks for the description of a cluster.

    Slurm alone is taken without being asked for only inside a step of two or
    more tasks: the lines of an sbatch script outside `srun` run once, so that
    a worker started there would wait for others that never come.

    Args:
        source: One of `SOURCES`. "auto" takes the hosts if they are given,
            else TF_CONFIG if it names a cluster, else a step of Slurm with
            two or more tasks; "none" takes nothing.
        worker_hosts: "host:port" of every worker. Needs `task_index`.
        task_index: Which of them this process is, from 0.
        environment: Where TF_CONFIG and Slurm's variables are read. Default:
            that of this process.

    Returns:
        The cluster, or None: this process trains alone.

    Raises:
        ValueError: If the description is wrong; see `Cluster`.
        ValueError: If there are two descriptions, or not the one asked for.
    """
    env = os.environ if environment is None else environment
    if source not in SOURCES:
        raise ValueError(
            f"`cluster` must be one of {', '.join(SOURCES)}. Received: "
            f"{source!r}."
        )
    if worker_hosts is not None or task_index is not None:
        return _from_hosts(source, worker_hosts, task_index, env)
    if source == "none":
        return None
    if source != "slurm":
        found = from_tf_config(env.get("TF_CONFIG", ""))
        if found or source == "tf_config":
            return found or _no_tf_config()
    if source == "slurm" or int(_step_tasks(env) or 1) > 1:
        return from_slurm(env)
    return None


def from_hosts(worker_hosts: Sequence[str], task_index: int) -> Cluster:
    """The cluster of `--worker_hosts` and `--task_index`."""
    return Cluster(tuple(worker_hosts), task_index, "--worker_hosts")


def from_tf_config(text: str) -> Cluster | None:
    """Reads TF_CONFIG.

    A chief counts as worker 0, and the workers after it from 1.

    Args:
        text: The value of the variable; "" if it is not set.

    Returns:
        The cluster, or None if there is none in it.

    Raises:
        ValueError: If it is not JSON, or lacks something.
        ValueError: If it names tasks that tfaccum has no use for.
    """
    if not text:
        return None
    config = _json_object(text)
    kinds = config.get("cluster") or {}
    if not kinds:
        return None
    if not isinstance(kinds, dict):
        raise ValueError(
            '"cluster" in TF_CONFIG must be an object with a list of workers. '
            f"Received: {kinds!r}. Write for instance {EXAMPLE}."
        )
    for kind in kinds:
        _check_kind(kind, "cluster")
    chiefs, workers = (_addresses(kinds, kind) for kind in _KINDS)
    if len(chiefs) > 1:
        raise ValueError(
            '"chief" in TF_CONFIG must name one task. Received: '
            f"{list(chiefs)}. List the others as workers."
        )
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise ValueError(
            '"task" in TF_CONFIG must have a type and an index, which say '
            f"what this process is. Received: {task!r}. Write for instance "
            f"{EXAMPLE}."
        )
    kind, index = task["type"], task["index"]
    _check_kind(kind, "task")
    # What it is within its own list, before it is counted within both.
    Cluster(chiefs if kind == "chief" else workers, index, "TF_CONFIG")
    return Cluster(
        chiefs + workers,
        index + (len(chiefs) if kind == "worker" else 0),
        "TF_CONFIG",
    )


def from_slurm(environment: Mapping[str, str]) -> Cluster:
    """Reads the environment of a task of a Slurm step.

    Each task is a worker; the one of local number n on its host listens on
    port base + n, where the base follows from the numbers of job and step, so
    that two steps on one host do not meet.

    TensorFlow's own `SlurmClusterResolver` is not used: it asks nvidia-smi
    for GPUs and fails without, overwrites CUDA_VISIBLE_DEVICES, gives all
    jobs on a host the same ports, and sorts hosts by text, so that with
    node9 and node10 the indices are not those of SLURM_PROCID.

    Raises:
        ValueError: If this is not a task of a step.
        ValueError: If tasks are not numbered host by host.
        ValueError: If the lists of hosts and of tasks do not fit.
    """
    if _step_tasks(environment) is None:
        raise ValueError(
            "--cluster=slurm must be used in a step of Slurm. Received: no "
            "SLURM_STEP_NUM_TASKS, as in an sbatch script outside srun. Put "
            "srun before the command."
        )
    index = _slurm_number(environment, "SLURM_PROCID")
    hosts = expand_hosts(_slurm(environment, "SLURM_STEP_NODELIST"))
    counts = expand_counts(_slurm(environment, "SLURM_STEP_TASKS_PER_NODE"))
    total = _slurm_number(environment, "SLURM_STEP_NUM_TASKS")
    if len(hosts) != len(counts) or sum(counts) != total:
        raise ValueError(
            "Slurm's lists must give each host its tasks. Received: "
            f"{len(hosts)} hosts, tasks per host {counts}, "
            f"SLURM_STEP_NUM_TASKS={total}. Start the tasks with one srun."
        )
    job = _slurm_number(environment, "SLURM_JOB_ID")
    step = _slurm_number(environment, "SLURM_STEP_ID")
    base = _SLURM_PORTS[(job + 31 * step) % len(_SLURM_PORTS)]
    tasks = [
        (node, local) for node, n in enumerate(counts) for local in range(n)
    ]
    place = (
        _slurm_number(environment, "SLURM_NODEID"),
        _slurm_number(environment, "SLURM_LOCALID"),
    )
    if not (0 <= index < total and tasks[index] == place):
        raise ValueError(
            "Slurm must number the tasks host by host. Received: "
            f"SLURM_PROCID={index} for task {place[1]} of host {place[0]}, "
            f"tasks per host {counts}. Give srun --distribution=block."
        )
    addresses = tuple(f"{hosts[node]}:{base + local}" for node, local in tasks)
    return Cluster(addresses, index, "Slurm")


def expand_hosts(text: str) -> list[str]:
    """Expands Slurm's short form of a list of hosts.

    "node[01-03,07],gpu5" is node01, node02, node03, node07 and gpu5.

    Raises:
        ValueError: If it is not of that form.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not parts or ",".join(parts) != text:
        raise _not_a_list("SLURM_STEP_NODELIST", text)
    hosts: list[str] = []
    for part in parts:
        pieces = [
            list(_numbers(piece[1:-1], text)) if piece[0] == "[" else [piece]
            for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part)
        ]
        hosts += ("".join(host) for host in itertools.product(*pieces))
    return hosts


def _numbers(text: str, whole: str) -> Iterator[str]:
    """The numbers 01, 02 and 07 of "01-02,07"."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise _not_a_list("SLURM_STEP_NODELIST", whole)
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's short form of a list of counts.

    "2(x3),1" is 2, 2, 2 and 1.

    Raises:
        ValueError: If it is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise _not_a_list("SLURM_STEP_TASKS_PER_NODE", text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _not_a_list(name: str, text: str) -> ValueError:
    return ValueError(
        f"{name} must be a list in Slurm's short form. Received: {text!r}."
    )


def _step_tasks(environment: Mapping[str, str]) -> str | None:
    """The tasks of the step in which this process runs; None outside.

    Only srun sets this variable: an sbatch script has the others too.
    """
    return environment.get("SLURM_STEP_NUM_TASKS")


def _slurm(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise ValueError(
            f"{name} must be set in a step of Slurm. Received: nothing. "
            "Start the tasks with srun."
        )
    return environment[name]


def _slurm_number(environment: Mapping[str, str], name: str) -> int:
    text = _slurm(environment, name)
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number. Received: {text!r}.")
    return int(text)


def _from_hosts(
    source: str,
    worker_hosts: Sequence[str] | None,
    task_index: int | None,
    environment: Mapping[str, str],
) -> Cluster:
    """The hosts that were given, if nothing else describes a cluster."""
    if worker_hosts is None or task_index is None:
        given = (
            f"--task_index={task_index}"
            if worker_hosts is None
            else f"--worker_hosts={','.join(worker_hosts)}"
        )
        raise ValueError(
            "--worker_hosts and --task_index must be given together. "
            f"Received: {given}. The first lists all workers, the second says "
            "which of them this process is, from 0."
        )
    text = environment.get("TF_CONFIG", "")
    other = f"--cluster={source}" if source != "auto" else ""
    if not other and from_tf_config(text):
        other = f"TF_CONFIG={text!r}"
    if other:
        raise ValueError(
            "One description of the cluster must be given. Received: "
            f"--worker_hosts={','.join(worker_hosts)} and {other}. Leave one "
            "of them out."
        )
    return from_hosts(worker_hosts, task_index)


def _no_tf_config() -> Cluster:
    raise ValueError(
        "--cluster=tf_config needs TF_CONFIG with a cluster. Received: no "
        f"TF_CONFIG. Write for instance TF_CONFIG='{EXAMPLE}'."
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            "TF_CONFIG must be JSON. Received: "
            f"TF_CONFIG={text!r} ({error}). Write for instance {EXAMPLE}."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            "TF_CONFIG must be JSON with a cluster and a task. Received: "
            f"TF_CONFIG={text!r}. Write for instance {EXAMPLE}."
        )
    return config


def _addresses(kinds: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """The tasks of one kind; an empty list is one that was forgotten."""
    if kind not in kinds:
        return ()
    tasks = kinds[kind]
    if (
        not isinstance(tasks, list)
        or not tasks
        or not all(isinstance(task, str) for task in tasks)
    ):
        raise ValueError(
            f'"{kind}" in TF_CONFIG must be a list of one or more "host:port". '
            f"Received: {tasks!r}. Write for instance {EXAMPLE}."
        )
    return tuple(tasks)


def _check_kind(kind: Any, where: str) -> None:
    if kind not in _KINDS:
        raise ValueError(
            f'Tasks in "{where}" of TF_CONFIG must be of type "worker", or '
            f'one "chief". Received: {kind!r}. tfaccum has no parameter '
            "servers and no evaluators: every process trains and evaluates."
        )


def _check_address(address: str, what: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch(r"[\w.-]+|\[[\w:.%]+\]", host):
        raise ValueError(
            "The address of a worker must be host:port. Received: "
            f"{address!r} ({what}). Write it like host1:2222 or [fd00::1]:2222."
        )
    if not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError(
            "The port of a worker must be from 1 to 65535. Received: "
            f"{address!r} ({what}). The others have to know it beforehand: "
            f"choose one that is free there, as in {host}:2222."
        )
    if host.strip("[]") in _ANY_HOST:
        raise ValueError(
            "The host of a worker must be a name by which the others reach "
            f"it. Received: {address!r} ({what}). Write its name or its "
            "address in their network."
        )
