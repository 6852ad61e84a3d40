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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfaccum import keras_private
from tfaccum import strategy as strategies

# How long a worker waits for what the others have to tell, in seconds. One
# may be preparing a dataset meanwhile.
TIMEOUT = 600

# Within how many seconds workers fail that fail together.
TOGETHER = 2

_exchanges = itertools.count()
_calls = itertools.count()

# How an error of TensorFlow's collectives names a worker.
_ABORTED = "Collective ops is aborted by"
_REPORTED = re.compile(r"has stopped: .*", re.DOTALL)
_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")


class WorkerError(RuntimeError):
    """Another worker has failed or does not answer; the message says which.

    Nothing of the update under way was applied: this worker's weights are
    those of the last update that all workers have made.
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

    def of_replica(value: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        total = tf.distribute.ReduceOp.SUM
        return context.all_reduce(total, tf.identity(value))

    return tf.function(lambda value: strategy.run(of_replica, args=(value,)))


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
    prefix = f"tfaccum/exchange/{next(_exchanges)}"
    keras_private.tell_workers(f"{prefix}/{mine}", text)
    told = []
    for worker in range(num_workers):
        try:
            told.append(
                keras_private.wait_for_note(f"{prefix}/{worker}", timeout)
            )
        except tf.errors.DeadlineExceededError as error:
            raise WorkerError(
                f"{_name(strategy, worker)} must tell what it is about to do. "
                f"Received: nothing within {timeout} s. It may not have come "
                "to the same call, or may be preparing its data; look at its "
                "log."
            ) from error
        except tf.errors.OpError as error:
            raise WorkerError(_explained(strategy, str(error))) from error
    return told


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
            TensorFlow notices a silent one after 10 s.
    """
    if strategies.worker_index(strategy)[1] == 1:
        yield
        return
    notes = f"tfaccum/failed/{next(_calls)}"
    try:
        yield
    except WorkerError:
        raise
    except BaseException as error:
        if isinstance(error, tf.errors.OpError) and _ABORTED in str(error):
            raise WorkerError(_explained(strategy, str(error))) from error
        _tell(strategy, notes, error)
        raise


def _tell(
    strategy: tf.distribute.Strategy, notes: str, error: BaseException
) -> None:
    """Makes the collectives of the others fail, unless all have failed."""
    mine, num_workers = strategies.worker_index(strategy)
    text = " ".join(str(error).split())[:1000]
    try:
        keras_private.tell_workers(f"{notes}/{mine}")
        for worker in range(num_workers):
            keras_private.wait_for_note(f"{notes}/{worker}", TOGETHER)
    except tf.errors.OpError:
        with contextlib.suppress(tf.errors.OpError):
            keras_private.report_failure(
                f"Worker {mine} has stopped: {type(error).__name__}: {text}"
            )


def _explained(strategy: tf.distribute.Strategy, text: str) -> str:
    """What a failed collective means, for a person."""
    mine, _ = strategies.worker_index(strategy)
    reason = text.partition(_ABORTED)[2].partition("The error could be from")[0]
    tasks = [int(index) for _, index in _TASK.findall(reason)]
    others = [task for task in tasks if task != mine]
    if told := _REPORTED.search(reason):
        who = _name(strategy, others[0]) if others else "A worker"
        what = f"{who} {' '.join(told.group().split())}"
    elif tasks and not others:
        what = (
            "The other workers have given this one up: it did not answer for "
            "too long (stopped, swapped out, or cut off from the network)."
        )
    else:
        # The first worker keeps the cluster together; only its silence is
        # reported without a name.
        who = _name(strategy, others[-1] if others else 0)
        what = (
            f"{who} does not answer any more: it has been killed, has "
            "crashed, or is cut off from the network. Look at its log."
        )
    return (
        f"{what} Worker {mine} ends too; nothing of the update under way was "
        "applied."
    )


def _name(strategy: tf.distribute.Strategy, worker: int) -> str:
    """A worker with its address."""
    tasks = strategy.cluster_resolver.cluster_spec().as_dict()
    addresses = [*tasks.get("chief", []), *tasks.get("worker", [])]
    return f"Worker {worker} ({addresses[worker]})"
