"""AdaSum: replicas combined by how much their gradients agree.

    AdaSum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

Orthogonal vectors are added up, parallel ones averaged. Of 2^k vectors: a
binary tree, the first half with the second half.

Source: Maleki et al., Scaling Distributed Training with Adaptive Summation
(2021), arXiv:2006.02924.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import reduction
from tfaccum import strategy as strategies

FORMS = ("gradient", "delta")
COEFFICIENTS = ("tensor", "model")


@keras.saving.register_keras_serializable("tfaccum")
@dataclasses.dataclass(frozen=True)
class AdaSum:
    """A way to combine replicas: `compile(replica_reduction=AdaSum(...))`.

    Each replica's own mean gradient over the window, not its sum, takes part,
    once per window, after the verdict whether all of them are finite. All
    replicas compute the same tree from the same values and end with the same
    bits.

    Attributes:
        form: "gradient": gradients are combined, then the optimizer makes one
            step with the result. "delta": each replica makes a step of its
            own, with moments of its own, and the changes of the weights are
            combined.
        coefficients: "tensor": one pair of factors for each variable;
            "model": one for all of them together.
        hierarchical: replicas of one worker are averaged by weight first, and
            AdaSum combines the workers.

    Raises:
        ValueError: if an argument is not one of those.
    """

    form: str = "gradient"
    coefficients: str = "tensor"
    hierarchical: bool = False

    def __post_init__(self) -> None:
        """Checks what was given."""
        choices = {
            "form": FORMS,
            "coefficients": COEFFICIENTS,
            "hierarchical": (False, True),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"`{name}` must be one of "
                    f"{', '.join(map(repr, allowed))}. Received: "
                    f"{name}={value!r}."
                )

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AdaSum":
        """As in Keras."""
        return cls(**config)

    def check(self, strategy: tf.distribute.Strategy) -> None:
        """Refuses numbers of replicas that a binary tree cannot combine.

        Raises:
            ValueError: if the number of participants is no power of two.
        """
        replicas = strategies.num_replicas(strategy)
        _, workers = strategies.worker_index(strategy)
        number = workers if self.hierarchical else replicas
        if number & (number - 1):
            below = 1 << (number.bit_length() - 1)
            what = "workers" if self.hierarchical else "replicas"
            raise ValueError(
                f"AdaSum must have a power of two of {what}. Received: "
                f"{number} {what} ({workers} workers, {replicas} replicas). "
                f"Use {below} or {2 * below}."
            )

    def combined(
        self,
        tensors: Sequence[tf.Tensor],
        weight: tf.Tensor | None,
        wire_dtype: str | None = None,
    ) -> list[tf.Tensor]:
        """AdaSum of each replica's tensors, or of each worker's mean.

        Args:
            tensors: float, of this replica, with static shapes.
            weight: scalar float, >= 0, by which replicas of one worker are
                averaged when `hierarchical`; None: they have the same.
            wire_dtype: in which tensors travel, "bfloat16" or "float16"; each
                replica's own are multiplied by powers of two to fit.

        Returns:
            In the shapes and dtypes of `tensors`; the same on every replica.

        Context: replica. One gathering of all tensors of one dtype: each
            replica receives and holds those of all others.
        """
        rows = _gathered(tensors, wire_dtype)
        if self.hierarchical:
            rows = _means_of_workers(rows, weight)
        if self.coefficients == "model":
            wide = max((t.dtype for t in tensors), key=lambda dtype: dtype.size)
            rows = [[_flat(row, wide)] for row in rows]
            (flat,) = _tree(rows)
            parts = tf.split(flat, [t.shape.num_elements() for t in tensors])
            return [
                tf.cast(tf.reshape(part, t.shape), t.dtype)
                for part, t in zip(parts, tensors, strict=True)
            ]
        return _tree(rows)

    def of_worker(
        self,
        tensors: Sequence[tf.Tensor],
        weight: tf.Tensor,
        wire_dtype: str | None = None,
    ) -> list[tf.Tensor]:
        """What this replica's own step takes when changes are combined.

        Args:
            tensors: as in `combined`, like all that follow.
            weight: scalar float.
            wire_dtype: "bfloat16", "float16" or None.

        Returns:
            Its own tensors; when `hierarchical` the mean of its worker's.

        Context: replica.
        """
        if not self.hierarchical:
            return list(tensors)
        context = tf.distribute.get_replica_context()
        worker, _ = strategies.worker_index(context.strategy)
        return _means_of_workers(_gathered(tensors, wire_dtype), weight)[worker]


def check_replica_reduction(value: Any) -> AdaSum | None:
    """What `compile(replica_reduction=)` asks for; None for the mean.

    Raises:
        ValueError: if it is not "mean", "adasum" or an `AdaSum`.
    """
    if isinstance(value, AdaSum):
        return value
    if value not in ("mean", "adasum"):
        raise ValueError(
            "`replica_reduction` must be 'mean', 'adasum' or a "
            f"tfaccum.boost.AdaSum. Received: replica_reduction={value!r}."
        )
    return AdaSum() if value == "adasum" else None


def pair(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """AdaSum of two tensors of any one shape.

    Products are summed in float64. A vector of zeros changes nothing: the
    factor of a vector without length is 1, as in Horovod (which takes it for
    1 below |a|^2 = 1e-8 already, so that small gradients add up; not here).
    """
    dot = _product(a, b)

    def factor(vector: tf.Tensor) -> tf.Tensor:
        square = _product(vector, vector)
        return tf.cast(1 - tf.math.divide_no_nan(dot, 2 * square), vector.dtype)

    return factor(a) * a + factor(b) * b


def _product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """a.b over all axes, scalar float64."""
    return tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64))


def _tree(rows: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """AdaSum of each column of a power of two of rows."""
    if len(rows) == 1:
        return list(rows[0])
    half = len(rows) // 2
    return [
        pair(a, b)
        for a, b in zip(_tree(rows[:half]), _tree(rows[half:]), strict=True)
    ]


def _means_of_workers(
    rows: Sequence[Sequence[tf.Tensor]], weight: tf.Tensor | None
) -> list[list[tf.Tensor]]:
    """One row for each worker: the weighted mean of its replicas' rows.

    Args:
        rows: of all replicas.
        weight: of this replica; None where a worker's rows are the same.
    """
    context = tf.distribute.get_replica_context()
    local = strategies.num_local_replicas(context.strategy)
    if weight is None or local == 1:
        return [list(row) for row in rows[::local]]
    weights = tf.unstack(reduction.from_each_replica(weight), len(rows))
    return [
        _mean(rows[i : i + local], weights[i : i + local])
        for i in range(0, len(rows), local)
    ]


def _mean(
    rows: Sequence[Sequence[tf.Tensor]], weights: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The weighted mean of each column; zero if all weights are."""
    return [
        reduction.divided(
            tf.add_n(
                [
                    reduction.weighted(t, w)
                    for t, w in zip(column, weights, strict=True)
                ]
            ),
            tf.add_n(weights),
        )
        for column in zip(*rows, strict=True)
    ]


def _flat(tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], 0)


def _gathered(
    tensors: Sequence[tf.Tensor], wire_dtype: str | None
) -> list[list[tf.Tensor]]:
    """All replicas' tensors, one list for each replica in order."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if replicas == 1:
        return [list(tensors)]
    if wire_dtype is None:
        return _gathered_as_they_are(tensors)
    scales = reduction.wire_scales(tensors, wire_dtype)
    sent = [
        reduction.as_sent(t, scale, wire_dtype)
        for t, scale in zip(tensors, scales, strict=True)
    ]
    received = _gathered_as_they_are([*sent, *scales])
    return [
        [
            reduction.as_received(part, scale, wire_dtype)
            for part, scale in zip(
                row[: len(sent)], row[len(sent) :], strict=True
            )
        ]
        for row in received
    ]


def _gathered_as_they_are(
    tensors: Sequence[tf.Tensor],
) -> list[list[tf.Tensor]]:
    """All tensors of one dtype travel in one packed collective."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    found: list[list[Any]] = [[None] * len(tensors) for _ in range(replicas)]
    for dtype in {t.dtype: None for t in tensors}:
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        sizes = [tensors[i].shape.num_elements() for i in places]
        packed = _flat([tensors[i] for i in places], dtype)
        gathered = reduction.from_each_replica(packed)
        rows = [gathered[r] for r in range(replicas)]  # Not copied.
        for replica, row in enumerate(rows):
            for place, part in zip(places, tf.split(row, sizes), strict=True):
                found[replica][place] = tf.reshape(part, tensors[place].shape)
    return found
