"""How long an update takes: micro-steps, bytes, waiting.

    seconds = K * micro-step + bytes / bandwidth + latency * steps + update
              + delay * trips

Imports nothing but the standard library.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

# Bytes that each number takes on its way.
WIRE_BYTES = {None: 4, "bfloat16": 2, "float16": 2}
# Reductions of an update, one after the other: what is no gradient travels in
# a float32 one of its own, and float16 sends each gradient's largest ahead.
REDUCTIONS = {None: 1, "bfloat16": 2, "float16": 3}


def ring_bytes(workers: int, values: int, bytes_per_value: int = 4) -> float:
    """What each worker sends to add up `values` numbers over all workers.

    In a ring the numbers are cut into as many parts as there are workers; a
    part travels W - 1 times while it is added up, and W - 1 times more.
    """
    return 2 * (workers - 1) / workers * bytes_per_value * values


def ring_steps(workers: int) -> int:
    """How often a worker waits for its neighbour in one reduction."""
    return 2 * (workers - 1)


def trips(workers: int) -> int:
    """How many messages, one after the other, one reduction waits for.

    Each step of the ring is one: a worker asks its neighbour for everything
    when it begins, and later finds its questions there. Only the first one is
    waited for. Before that all workers ask the first one about the reduction,
    which has a number that no other had, and wait for its answer. That makes
    three more, and up to one less where the first worker, which asks nobody,
    can begin ahead of the others.

    Source: TensorFlow, `RingReducer::RunAsyncParts` and
    `CollectiveParamResolverDistributed::CompleteInstanceDistributed`.
    """
    return ring_steps(workers) + 3 if workers > 1 else 0


@dataclasses.dataclass(frozen=True)
class Costs:
    """What does not depend on K, the number of workers and the bandwidth.

    Attributes:
        micro_step: seconds of one micro-step.
        latency: seconds that one step of the ring takes for no bytes.
        update: seconds of work at each update that nothing else counts.
    """

    micro_step: float
    latency: float
    update: float = 0.0


def update_seconds(
    costs: Costs,
    *,
    k: int,
    workers: int,
    num_bytes: float,
    mbit: float,
    delay: float = 0.0,
    reductions: int = 1,
) -> float:
    """The sum of all terms.

    Args:
        costs: of the model and the machine.
        k: micro-steps, >= 1.
        workers: >= 1.
        num_bytes: that each worker sends at each update.
        mbit: of a worker's link, per second, in each direction.
        delay: seconds from one worker to another, of the network alone.
        reductions: of an update, one after the other.
    """
    return (
        k * costs.micro_step
        + num_bytes * 8 / (mbit * 1e6)
        + costs.latency * ring_steps(workers)
        + costs.update
        + delay * reductions * trips(workers)
    )


def efficiency(costs: Costs, *, k: int, **network: Any) -> float:
    """Examples per second and worker, relative to one worker alone."""
    alone = k * costs.micro_step + costs.update
    return alone / update_seconds(costs, k=k, **network)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, intercept) of the line of least squares."""
    return statistics.linear_regression(*zip(*points, strict=True))


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model for the predictions: parameters, and one GPU's micro-step."""

    name: str
    parameters: int
    micro_step: float


# Source: NVIDIA DeepLearningExamples, one A100, mixed precision.
# TensorFlow/Classification/ConvNets/resnet50v1.5/README.md: 2375 images/s with
# batches of 256. TensorFlow2/LanguageModeling/BERT/README.md: BERT-large, 96.52
# sequences of 512 per second with batches of 40; BERT-base has 85 of the 302
# million weights in its encoder, and is taken to be as much faster.
WORKLOADS = (
    Workload("ResNet-50", 25_600_000, 256 / 2375),
    Workload("BERT-base", 110_000_000, 40 / 96.52 * 85 / 302),
)
PREDICTED_WORKERS = (8, 64, 256, 1024)
PREDICTED_GBIT = (25, 100, 400)
PREDICTED_K = (1, 4, 16, 64)
# Assumed: one step of a ring between hosts, with a kernel to be started.
PREDICTED_LATENCY = 20e-6


def predictions(
    latency: float = PREDICTED_LATENCY, bytes_per_value: int = 4
) -> list[dict[str, Any]]:
    """The efficiency that the cost model foresees, for every combination."""
    return [
        {
            "model": workload.name,
            "workers": workers,
            "gbit": gbit,
            "K": k,
            "efficiency": efficiency(
                Costs(workload.micro_step, latency),
                k=k,
                workers=workers,
                num_bytes=ring_bytes(
                    workers, workload.parameters, bytes_per_value
                ),
                mbit=1000 * gbit,
            ),
        }
        for workload in WORKLOADS
        for gbit in PREDICTED_GBIT
        for workers in PREDICTED_WORKERS
        for k in PREDICTED_K
    ]
