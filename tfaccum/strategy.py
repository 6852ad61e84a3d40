"""Which strategy, and facts about it."""

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Sequence

import tensorflow as tf

from tfaccum import keras_private

# How long a worker that has finished waits for the others, in seconds.
EXIT_TIMEOUT = 60

_leaving = False

SUPPORTED = (
    "no strategy",
    "OneDeviceStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
)


def make_strategy(
    devices: Sequence[str] | None = None,
) -> tf.distribute.Strategy:
    """The strategy that fits this machine, ready for `strategy.scope()`.

    * TF_CONFIG with a cluster: MultiWorkerMirroredStrategy;
    * `devices` or the visible GPUs, two or more: MirroredStrategy;
    * one device: OneDeviceStrategy.

    Strategies may be made as often as wished in one process.

    Args:
        devices: names such as ["GPU:0", "GPU:1"] or ["CPU:0", "CPU:1"]
            (logical devices); default: all visible GPUs, or the CPU.

    Returns:
        A `tf.distribute.Strategy`, one of `tfaccum.strategy.SUPPORTED`.

    Raises:
        ValueError: if `devices` names a device that TensorFlow does not see,
            or one twice.
        ValueError: if `devices` is given together with a cluster in TF_CONFIG.
    """
    if _has_cluster():
        if devices is not None:
            raise ValueError(
                "`devices` must be None when TF_CONFIG describes a cluster. "
                f"Received: devices={list(devices)}. Choose a worker's devices "
                "with CUDA_VISIBLE_DEVICES."
            )
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        _leave_together(strategy)
        return strategy
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
    keras_private.separate_collective_keys()
    return tf.distribute.MirroredStrategy([f"/{name}" for name in names])


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
        if getattr(sys, "last_value", None) is not None:
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


def _has_cluster() -> bool:
    """Whether TF_CONFIG describes a cluster."""
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return False
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            "TF_CONFIG must be JSON. Received: "
            f"TF_CONFIG={text!r} ({error}). Write for instance "
            '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
            '"task": {"type": "worker", "index": 0}}.'
        ) from error
    return bool(config.get("cluster"))


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
