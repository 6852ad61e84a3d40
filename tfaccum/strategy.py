"""Which strategy, and facts about it."""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tfaccum import cluster as clusters
from tfaccum import keras_private, rendezvous
from tfaccum.cluster import COMMUNICATIONS, Cluster

# How long a worker that has finished waits for the others, in seconds.
EXIT_TIMEOUT = 60

# How long TensorFlow may take to install its handler of SIGTERM, in seconds.
_HANDLER_WAIT = 5

_leaving = False
_has_failed = False
_joined: Cluster | None = None

SUPPORTED = (
    "no strategy",
    "OneDeviceStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
)


def make_strategy(
    devices: Sequence[str] | None = None,
    *,
    cluster: Cluster | str = "auto",
    start_timeout: float = rendezvous.TIMEOUT,
    communication: str = "auto",
    bytes_per_pack: int = 0,
    collective_timeout: float = 0,
    fingerprint: Mapping[str, str] | None = None,
) -> tf.distribute.Strategy:
    """The strategy that fits this machine, ready for `strategy.scope()`.

    * TF_CONFIG with a cluster, or a step of Slurm with several tasks:
      MultiWorkerMirroredStrategy;
    * `devices` or the visible GPUs, two or more: MirroredStrategy;
    * one device: OneDeviceStrategy.

    Strategies may be made as often as wished in one process.

    Args:
        devices: names such as ["GPU:0", "GPU:1"] or ["CPU:0", "CPU:1"]
            (logical devices); default: all visible GPUs, or the CPU.
        cluster: the workers; or where to look for them, "auto", "none",
            "tf_config" or "slurm", as in `tfaccum.cluster.find`.

    The others matter only with a cluster:

    Args:
        start_timeout: how long the workers wait for each other, in seconds.
        communication: "auto", "ring" or "nccl" (for GPUs). "auto" leaves it
            to TensorFlow, which takes NCCL on GPUs and its own ring else.
        bytes_per_pack: the most that travels in one collective. 0: all
            gradients of one dtype travel in one, which needs a buffer of
            their size but waits for the network once.
        collective_timeout: after how many seconds a collective operation
            gives up; 0: never. Each one then holds a sleeping thread for so
            long, also after it has ended, so that this is for finding the
            cause of a hang: a worker that has died is noticed without.
        fingerprint: what else has to be the same on all workers: names and
            values, for messages.

    Returns:
        A `tf.distribute.Strategy`, one of `tfaccum.strategy.SUPPORTED`.

    Raises:
        ValueError: if `devices` names a device that TensorFlow does not see,
            or one twice.
        ValueError: if `devices` is given together with a cluster.
        ValueError: if the description of the cluster is wrong.
        ValueError: if `communication` is none of the three, or "nccl"
            without a GPU.
        ValueError: if this process has joined another cluster before.
        StartError: if the workers of the cluster cannot start together.
    """
    found = clusters.find(cluster) if isinstance(cluster, str) else cluster
    if found is not None:
        if devices is not None:
            raise ValueError(
                f"`devices` must be None when {found.source} describes a "
                f"cluster. Received: devices={list(devices)}. Choose a "
                "worker's devices with CUDA_VISIBLE_DEVICES."
            )
        return _join(
            found,
            tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=bytes_per_pack,
                timeout_seconds=collective_timeout or None,
                implementation=_implementation(communication),
            ),
            start_timeout,
            fingerprint or {},
        )
    visible = [
        device.name.removeprefix("/device:")
        for device in tf.config.list_logical_devices()
    ]
    if devices is None:
        devices = [d for d in visible if d.startswith("GPU:")] or ["CPU:0"]
    names = [d.removeprefix("/").removeprefix("device:") for d in devices]
    unknown = [name for name in names if name not in visible]
    if not names or unknown or len(set(names)) < len(names):
        raise ValueError(
            "`devices` must name visible devices, each once. Received: "
            f"devices={list(devices)}. Visible are {visible}; virtual CPU "
            "devices are made with "
            "tf.config.set_logical_device_configuration."
        )
    if len(names) == 1:
        return tf.distribute.OneDeviceStrategy(f"/{names[0]}")
    keras_private.separate_collective_keys(tf.distribute.MirroredStrategy)
    return tf.distribute.MirroredStrategy([f"/{name}" for name in names])


def _join(
    cluster: Cluster,
    options: tf.distribute.experimental.CommunicationOptions,
    start_timeout: float,
    facts: Mapping[str, str],
) -> tf.distribute.Strategy:
    """Meets the other workers, and starts TensorFlow's server.

    A second strategy of the same process uses the server that runs.
    """
    global _joined
    if _joined not in (None, cluster):
        raise ValueError(
            "`cluster` must be the one that this process has joined, "
            f"{_joined}: TensorFlow's server stays in it until the process "
            f"ends. Received: cluster={cluster}."
        )
    with contextlib.ExitStack() as stack:
        if _joined is None:
            _meet(cluster, options, start_timeout, facts)
            stack.enter_context(_limit(start_timeout))
            stack.enter_context(_own_sigterm())
        else:
            stack.enter_context(keras_private.server_that_runs())
        if count := _num_virtual_devices():
            stack.enter_context(keras_private.local_cpus(count))
        kind = tf.distribute.MultiWorkerMirroredStrategy
        keras_private.separate_collective_keys(kind)
        strategy = kind(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
                task_type="worker",
                task_id=cluster.index,
                rpc_layer="grpc",
            ),
            options,
        )
    _joined = cluster
    _leave_together(strategy)
    return strategy


def _meet(
    cluster: Cluster,
    options: tf.distribute.experimental.CommunicationOptions,
    start_timeout: float,
    facts: Mapping[str, str],
) -> None:
    """Waits until the workers are there, and have the same settings."""
    gpus = tf.config.list_physical_devices("GPU")
    rendezvous.meet(
        cluster,
        {
            "GPUs of a worker": str(len(gpus)),
            "virtual devices of a worker": str(_num_virtual_devices()),
            "communication": options.implementation.value.lower(),
            "bytes_per_pack": str(options.bytes_per_pack),
            "collective_timeout": str(options.timeout_seconds or 0),
            **facts,
        },
        start_timeout,
    )


def _num_virtual_devices() -> int:
    """Logical devices made of the CPU, which stand for GPUs; 0 for none."""
    if tf.config.list_physical_devices("GPU"):
        return 0
    (cpu,) = tf.config.list_physical_devices("CPU")
    return len(tf.config.get_logical_device_configuration(cpu) or ())


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Ends this process, with a traceback, if the body takes longer.

    For a worker that ends after the workers have met, TensorFlow waits an hour
    in C++ with Python locked: no exception, thread or signal gets through.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Gives SIGTERM back to whom it belonged: it ends a process, by default.

    TensorFlow's server takes it for a notice of preemption, whatever Python
    has installed, and does nothing about it. A thread of TensorFlow's installs
    that handler soon after the server has started. Python does not know of
    it, so that only the C library can tell and put back what was there.

    Context: any thread.
    """
    if os.name != "posix":
        yield
        return
    before = _sigterm_action()
    yield
    deadline = time.monotonic() + _HANDLER_WAIT
    while _sigterm_action() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), before, None)


def _sigterm_action() -> bytes:
    """The C library's `struct sigaction`, larger than on any system."""
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, action)
    return action.raw


def _implementation(
    communication: str,
) -> tf.distribute.experimental.CommunicationImplementation:
    """TensorFlow's name for it."""
    if communication not in COMMUNICATIONS:
        raise ValueError(
            f"`communication` must be one of {', '.join(COMMUNICATIONS)}. "
            f"Received: communication={communication!r}."
        )
    if communication == "nccl" and not tf.config.list_physical_devices("GPU"):
        raise ValueError(
            "`communication` must be 'auto' or 'ring' on a worker without a "
            "GPU. Received: communication='nccl' and no visible GPU."
        )
    return tf.distribute.experimental.CommunicationImplementation[
        communication.upper()
    ]


def _leave_together(strategy: tf.distribute.Strategy) -> None:
    """Makes this process wait, when it ends well, until all others end.

    A worker that has all that it needs of the last collective may be gone
    while another still fetches its part from it; that one would wait for ever.
    """
    worker, num_workers = worker_index(strategy)
    notes = {
        word: [f"tfaccum/{word}/{index}" for index in range(num_workers)]
        for word in ("finished", "leaves")
    }

    def leave() -> None:
        if _has_failed or getattr(sys, "last_value", None) is not None:
            return  # An error ends this process; the others must see it go.
        with contextlib.suppress(tf.errors.OpError):
            keras_private.tell_workers(notes["finished"][worker])
            for note in notes["finished"]:
                keras_private.wait_for_note(note, EXIT_TIMEOUT)
            keras_private.tell_workers(notes["leaves"][worker])
            # The first worker keeps the notes, and goes last.
            for note in notes["leaves"] if worker == 0 else ():
                keras_private.wait_for_note(note, EXIT_TIMEOUT)

    global _leaving
    if not _leaving:
        atexit.register(leave)
        _leaving = True


def leave_alone() -> None:
    """Lets this process end without the others: it, or another, has failed."""
    global _has_failed
    _has_failed = True


def check_supported(strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies under which the window would not be exact.

    Raises:
        ValueError: if `strategy` is not one of `SUPPORTED`; names it.
    """
    supported = (
        tf.distribute.OneDeviceStrategy,
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    is_default = not tf.distribute.has_strategy() and strategy is (
        tf.distribute.get_strategy()
    )
    if not (is_default or isinstance(strategy, supported)):
        raise ValueError(
            f"tfaccum must run under one of {', '.join(SUPPORTED)}. Received: "
            f"strategy={type(strategy).__name__}. Make the strategy with "
            "tfaccum.make_strategy()."
        )


def num_replicas(strategy: tf.distribute.Strategy) -> int:
    """Model copies over all workers."""
    return int(strategy.num_replicas_in_sync)


def worker_index(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """(this worker, number of workers)."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    workers = resolver.cluster_spec().as_dict()
    chiefs = len(workers.get("chief", []))
    total = chiefs + len(workers.get("worker", []))
    index = resolver.task_id + (chiefs if resolver.task_type == "worker" else 0)
    return int(index), max(total, 1)


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Model copies on this worker."""
    return num_replicas(strategy) // worker_index(strategy)[1]


def check_xla(strategy: tf.distribute.Strategy) -> None:
    """Refuses XLA where it cannot work.

    XLA on CPU cannot use variables that live on another logical CPU device
    than the first ("Trying to access resource located in device CPU:1").

    Raises:
        ValueError: for a MirroredStrategy over several CPU devices.
    """
    if num_local_replicas(strategy) == 1:
        return
    devices = strategy.extended.worker_devices
    if all("CPU" in device for device in devices):
        raise ValueError(
            "`jit_compile` must be False on several CPU devices: XLA cannot "
            f"reach variables on the second. Received: jit_compile=True with "
            f"devices {list(devices)}. Use one device, GPUs, or one worker "
            "process per CPU replica."
        )
