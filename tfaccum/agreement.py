"""What the workers of a cluster tell each other beside the reduction.

Workers run the same program in step; a decision, a difference or an error of
one of them has to reach the others before they wait for it in vain. With one
worker all of this does nothing.
"""

import contextlib
import functools
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfaccum import keras_private, reduction
from tfaccum import strategy as strategies
from tfaccum.cluster import host_and_port

# How long a worker waits for what the others have to tell, in seconds. One
# may be preparing a dataset meanwhile.
TIMEOUT = 600

# Within how many seconds workers fail that fail together.
TOGETHER = 2

# How often in a row, once a second or so, the port of a worker that is waited
# for has to be closed.
REFUSALS = 5

_exchanges = itertools.count()
_calls = itertools.count()

# How much longer than the one that failed the others stay, in seconds: it ends
# first, which tells a launcher which it was; and the first worker, which passes
# on what happened, does not end before the rest have heard of it.
LAST_WORDS = 1

# How an error of TensorFlow's collectives names a worker.
_ABORTED = "Collective ops is aborted by"
_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
# How a worker tells the others which has failed, and finds it in their errors.
_REPORT = "Worker {} {} (told by worker {})"
_REPORTED = re.compile(r"Worker (\d+) (.*?) \(told by worker \d+\)", re.DOTALL)
_SILENT = (
    "does not answer any more: it has been killed or stopped, has crashed, or "
    "is cut off from the network."
)
_LOOK = "Look at its log."
# Lines of an error of TensorFlow's that tell where, and not what.
_STACK = re.compile(
    r"\s|Graph execution error:|Detected at node|<stack traces|Traceback \("
)
_LONGEST = 500


class WorkerError(RuntimeError):
    """Another worker has failed or does not answer; the message says which.

    Nothing of the update under way was applied: this worker's weights are
    those of the last whole update. A worker that dies while an update travels
    may leave the others one update apart.
    """


def any_worker(strategy: tf.distribute.Strategy, flag: bool) -> bool:
    """Whether `flag` is true on any worker. All workers have to ask."""
    if strategies.worker_index(strategy)[1] == 1:
        return flag
    total = _sum_over_replicas(strategy)(tf.constant(float(flag)))
    return bool(strategy.experimental_local_results(total)[0] > 0)


@functools.cache
def _sum_over_replicas(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A traced function; a collective of its own each time would be slow."""

    def total(value: tf.Tensor) -> Any:
        return strategy.run(reduction.all_reduce_sum, args=(value,))

    return tf.function(total, autograph=False)


def gather(strategy: tf.distribute.Strategy, mine: tf.Tensor) -> tf.Tensor:
    """All workers' rows, in the order of the workers.

    Args:
        strategy: of several workers.
        mine: [rows, ...]; the number of rows may differ between workers.

    Context: cross-replica, eager.
    """
    replicas = strategies.num_local_replicas(strategy)

    def of_replica(context: tf.distribute.ReplicaContext) -> tf.Tensor:
        is_first = context.replica_id_in_sync_group % replicas == 0
        return mine if is_first else mine[:0]

    return strategy.gather(
        strategy.experimental_distribute_values_from_function(of_replica),
        axis=0,
    )


def exchange(
    strategy: tf.distribute.Strategy, text: str, timeout: int = TIMEOUT
) -> list[str]:
    """Every worker's text, in the order of the workers. All have to tell.

    Raises:
        WorkerError: if a worker has not told its own within `timeout` seconds.
    """
    mine, num_workers = strategies.worker_index(strategy)
    if num_workers == 1:
        return [text]
    notes = _notes_of_next_exchange()
    try:
        keras_private.tell_workers(f"{notes}/{mine}", text)
        told = [
            _wait_for(strategy, f"{notes}/{worker}", worker, timeout)
            for worker in range(num_workers)
        ]
    except tf.errors.OpError as error:
        raise WorkerError(_explained(strategy, str(error))) from error
    return told


def _notes_of_next_exchange() -> str:
    return f"tfaccum/exchange/{next(_exchanges)}"


def _wait_for(
    strategy: tf.distribute.Strategy, note: str, worker: int, timeout: int
) -> str:
    """What a worker tells, or why it will not: itself, or whoever finds out.

    TensorFlow ends no such wait when a worker dies.
    """
    mine, _ = strategies.worker_index(strategy)
    deadline = time.monotonic() + timeout
    refusals = 0
    while time.monotonic() < deadline:
        try:
            text = keras_private.wait_for_note(note, 1)
        except tf.errors.DeadlineExceededError:
            refusals = refusals + 1 if _has_gone(strategy, worker) else 0
            if refusals == REFUSALS:
                with contextlib.suppress(tf.errors.OpError):
                    keras_private.tell_workers(
                        note, _REPORT.format(worker, _SILENT, mine)
                    )
            continue
        if _REPORTED.fullmatch(text):
            time.sleep(LAST_WORDS)
            raise WorkerError(_explained(strategy, text))
        return text
    raise WorkerError(
        f"{_name(strategy, worker)} must tell what it is about to do. "
        f"Received: nothing within {timeout} s. It may not have come to the "
        "same call, or may be preparing its data; look at its log."
    )


def _has_gone(strategy: tf.distribute.Strategy, worker: int) -> bool:
    """Whether nothing listens any more where TensorFlow's server was."""
    try:
        address = host_and_port(_address(strategy, worker))
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return True
    return False


def check_same(
    strategy: tf.distribute.Strategy, facts: Mapping[str, object]
) -> None:
    """Refuses to go on when the workers are about to do different things.

    Args:
        strategy: whose workers are compared.
        facts: by name; compared as text.

    Raises:
        ValueError: if a fact differs, on every worker; names the fact, the
            workers and both values.
        WorkerError: if a worker has not told its facts in time.
    """
    mine = json.dumps({name: str(value) for name, value in facts.items()})
    first, *others = map(json.loads, exchange(strategy, mine))
    for worker, other in enumerate(others, start=1):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"`{name}` must be the same on every worker. Received: "
                    f"{first.get(name)} on worker 0 and {other.get(name)} on "
                    f"worker {worker}. Start all workers with the same "
                    "program, flags, seed and data."
                )


def check_shares(strategy: tf.distribute.Strategy, mine: str | None) -> None:
    """Refuses data of which two workers would train on the same part.

    Args:
        strategy: whose workers are compared.
        mine: a checksum of this worker's first batches; None if it has none.

    Raises:
        ValueError: if two workers tell the same, on every worker.
    """
    told = exchange(strategy, json.dumps(mine))
    for worker, checksum in enumerate(map(json.loads, told)):
        if checksum is not None and told.index(told[worker]) < worker:
            raise ValueError(
                "Each worker must have its own share of the data. Received: "
                f"the same first batches on workers "
                f"{told.index(told[worker])} and {worker} (checksum "
                f"{checksum}). Shard by `context.input_pipeline_id`, or pass "
                "the tf.data.Dataset itself, which is shared out here."
            )


@contextlib.contextmanager
def shared_fate(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, an error on one worker ends the work of all.

    The worker that fails tells the others why. They wait for it in a
    collective, or come to one soon, and fail there. An error that all workers
    meet is the program's own, and leaves the cluster as it is.

    Raises:
        WorkerError: if another worker has failed, been killed or cut off.
            TensorFlow notices a silent one after 10 s. With three or more
            workers, whoever has noticed tells the rest which it is.
    """
    if strategies.worker_index(strategy)[1] == 1:
        yield
        return
    notes = f"tfaccum/failed/{next(_calls)}"
    try:
        yield
    except WorkerError:
        strategies.leave_alone()
        raise
    except BaseException as error:
        if isinstance(error, tf.errors.OpError) and _ABORTED in str(error):
            strategies.leave_alone()
            _pass_on(strategy, str(error))
            time.sleep(LAST_WORDS)
            raise WorkerError(_explained(strategy, str(error))) from error
        _tell(strategy, notes, error)
        raise


def _tell(
    strategy: tf.distribute.Strategy, notes: str, error: BaseException
) -> None:
    """Makes the collectives of the others fail, unless all have failed."""
    mine, num_workers = strategies.worker_index(strategy)
    try:
        keras_private.tell_workers(f"{notes}/{mine}")
        for worker in range(num_workers):
            keras_private.wait_for_note(f"{notes}/{worker}", TOGETHER)
    except tf.errors.OpError:
        strategies.leave_alone()
        report = _REPORT.format(mine, f"has stopped: {_in_short(error)}", mine)
        with contextlib.suppress(tf.errors.OpError):
            # Where the others would wait for it without a collective.
            next_notes = _notes_of_next_exchange()
            keras_private.tell_workers(f"{next_notes}/{mine}", report)
            keras_private.report_failure(report)


def _pass_on(strategy: tf.distribute.Strategy, text: str) -> None:
    """Tells the others which worker is silent.

    One of them may notice this worker's end first, and take it for the cause.
    """
    mine, num_workers = strategies.worker_index(strategy)
    silent = [task for task in _tasks(_reason(text)) if task != mine]
    if _REPORTED.search(text) or not silent or num_workers == 2:
        return
    with contextlib.suppress(tf.errors.OpError):
        keras_private.report_failure(_REPORT.format(silent[0], _SILENT, mine))


def _in_short(error: BaseException) -> str:
    """One line; without TensorFlow's stacks, which say nothing elsewhere."""
    lines = [
        line
        for line in dict.fromkeys(str(error).splitlines())
        if line and not _STACK.match(line)
    ]
    text = " ".join(" ".join(lines).split())[:_LONGEST]
    # An error of Python's inside of TensorFlow has its own name in the text.
    if isinstance(error, tf.errors.OpError) and "Traceback (" in str(error):
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _explained(strategy: tf.distribute.Strategy, text: str) -> str:
    """What a failed collective means, for a person."""
    mine, _ = strategies.worker_index(strategy)
    reason = _reason(text)
    tasks = _tasks(reason)
    others = [task for task in tasks if task != mine]
    if told := _REPORTED.search(reason):
        worker, what = told.groups()
        what = f"{_name(strategy, int(worker))} {' '.join(what.split())}"
        what = f"{what.rstrip('.')}. {_LOOK}"
    elif tasks and not others:
        what = (
            "The other workers have given this one up: it did not answer for "
            "too long (stopped, swapped out, or cut off from the network)."
        )
    else:
        # The first worker keeps the cluster together; only its silence is
        # reported without a name.
        if not others and mine != 0:
            others = [0]
        names = [_name(strategy, task) for task in others]
        what = " ".join(
            f"{name} {_SILENT} {_LOOK}" for name in names or ["Another worker"]
        )
    return (
        f"{what} Worker {mine} ends too; nothing of the update under way was "
        "applied."
    )


def _reason(text: str) -> str:
    """What TensorFlow says of the cause, without what it wraps around it."""
    before, _, after = text.partition(_ABORTED)
    return (after or before).partition("The error could be from")[0]


def _tasks(reason: str) -> list[int]:
    """The workers that TensorFlow names, each once."""
    return sorted({int(index) for _, index in _TASK.findall(reason)})


def _name(strategy: tf.distribute.Strategy, worker: int) -> str:
    """A worker with its address."""
    return f"Worker {worker} ({_address(strategy, worker)})"


def _address(strategy: tf.distribute.Strategy, worker: int) -> str:
    tasks = strategy.cluster_resolver.cluster_spec().as_dict()
    addresses = [*tasks.get("chief", []), *tasks.get("worker", [])]
    return str(addresses[worker])
