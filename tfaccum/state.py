"""Everything that training changes, as arrays.

Most of it is the same on all replicas. Metrics and seeds are not: each replica
counts its own examples, and draws nothing for a micro-batch without rows. Nor
are moments of an optimizer that makes a step of its own on each replica.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfaccum import reduction
from tfaccum import strategy as strategies

Arrays = Mapping[str, np.ndarray]


class TrainingState:
    """The variables of a model and of its optimizers, read and written.

    Args:
        model: a `tfaccum.Model` in `fit`, where every optimizer has made its
            variables.
    """

    def __init__(self, model: Any):
        self._strategy = model.distribute_strategy
        kinds = {
            "model": model.variables,
            "optimizer": itertools.chain.from_iterable(
                o.variables for o in model.current_run.optimizers
            ),
        }
        self._shared: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        for kind, variables in kinds.items():
            # By position: automatic names depend on what was made before.
            for index, variable in enumerate(variables):
                is_float = tf.as_dtype(variable.dtype).is_floating
                differs = not is_float
                if kind == "optimizer":
                    differs = model.makes_own_steps
                place = self._own if differs else self._shared
                place[f"{kind}/{index}"] = variable
        for index, variable in enumerate(model.metrics_variables):
            self._own[f"metrics/{index}"] = variable
        self._gather = tf.function(self._gathered, autograph=False)
        self._share = tf.function(self._from_first, autograph=False)

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """All variables, by the names under which they are read."""
        return self._shared | self._own

    def fits(self, name: str, value: np.ndarray) -> bool:
        """Whether `write` can take this value for a variable."""
        variable = self.variables[name]
        shape = value.shape[1:] if name in self._own else value.shape
        return value.dtype == tf.as_dtype(
            variable.dtype
        ).as_numpy_dtype and shape == tuple(variable.shape)

    def read(self) -> dict[str, np.ndarray]:
        """All values, on the first worker; the others only take part.

        Returns:
            By name, the value of a variable that all replicas share, or
            [replicas, ...] of one that they do not.
        """
        own = self._strategy.experimental_local_results(self._gather())[0]
        if strategies.worker_index(self._strategy)[0]:
            return {}
        shared = {name: _local(v) for name, v in self._shared.items()}
        return shared | {name: value.numpy() for name, value in own.items()}

    def write(self, values: Arrays | None) -> None:
        """Sets all variables on all workers.

        Args:
            values: what `read` has returned, perhaps with another number of
                replicas; None on all workers but the first.
        """
        replicas = strategies.num_replicas(self._strategy)
        specs = {
            **{name: _spec(v) for name, v in self._shared.items()},
            **{name: _spec(v, replicas) for name, v in self._own.items()},
        }
        if values is not None:
            values = dict(values)
            for name, variable in self._own.items():
                values[name] = _among(
                    values[name], replicas, variable.aggregation
                )
        worker, num_workers = strategies.worker_index(self._strategy)
        if num_workers > 1:
            values = self._sent_by_the_first(values, specs)
        if values is None:
            raise ValueError(
                "`values` must be given on the first worker. Received: "
                "values=None."
            )
        for name, variable in self._shared.items():
            variable.assign(values[name])
        local = strategies.num_local_replicas(self._strategy)
        for name, variable in self._own.items():
            copies = self._strategy.experimental_local_results(variable.value)
            rows = values[name][worker * local : (worker + 1) * local]
            for copy, row in zip(copies, rows, strict=True):
                copy.assign(row)

    # --- Between workers ---------------------------------------------------

    def _gathered(self) -> Any:
        def of_replica() -> dict[str, tf.Tensor]:
            mine = {name: v.value for name, v in self._own.items()}
            return reduction.from_each_replica(mine)

        return self._strategy.run(of_replica)

    def _sent_by_the_first(
        self, values: Arrays | None, specs: Mapping[str, tf.TensorSpec]
    ) -> dict[str, np.ndarray]:
        """What the first worker has, on all of them.

        A sum with zeros, of bits rather than of numbers: -0 + 0 is not -0.
        """
        mine = [
            _to_bits(np.zeros(spec.shape, spec.dtype.as_numpy_dtype))
            if values is None
            else _to_bits(np.asarray(values[name]))
            for name, spec in specs.items()
        ]
        sent = self._strategy.experimental_local_results(self._share(mine))[0]
        return {
            name: _from_bits(bits.numpy(), spec)
            for (name, spec), bits in zip(specs.items(), sent, strict=True)
        }

    def _from_first(self, bits: Sequence[tf.Tensor]) -> Any:
        def of_replica(bits: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group, 0)
            return reduction.all_reduce_sum(
                [tf.where(first, b, tf.zeros_like(b)) for b in bits]
            )

        return self._strategy.run(of_replica, args=(bits,))


def _local(variable: keras.Variable) -> np.ndarray:
    """The value of this worker's first replica."""
    return tf.convert_to_tensor(variable.value).numpy()


def _spec(variable: keras.Variable, *rows: int) -> tf.TensorSpec:
    return tf.TensorSpec([*rows, *variable.shape], variable.dtype)


def _among(rows: np.ndarray, replicas: int, aggregation: str) -> np.ndarray:
    """Values of some replicas, for another number of replicas."""
    if len(rows) == replicas:
        return rows
    if aggregation == "sum":
        others = np.zeros([replicas - 1, *rows.shape[1:]], rows.dtype)
        total = rows.astype(np.float64).sum(0).astype(rows.dtype)
        return np.concatenate([total[np.newaxis], others])
    if aggregation == "mean":
        rows = rows.astype(np.float64).mean(0, keepdims=True).astype(rows.dtype)
    return np.repeat(rows[:1], replicas, axis=0)


def _to_bits(value: np.ndarray) -> np.ndarray:
    """The same bits as whole numbers that collectives can add."""
    if value.dtype.itemsize < 4:  # float16, bfloat16, bool, small integers.
        value = value.astype(np.float32)  # Holds all of these exactly.
    return np.ascontiguousarray(value).view(
        np.int32 if value.dtype.itemsize == 4 else np.int64
    )


def _from_bits(bits: np.ndarray, spec: tf.TensorSpec) -> np.ndarray:
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    wide = dtype if dtype.itemsize >= 4 else np.dtype(np.float32)
    return np.reshape(bits.view(wide), spec.shape).astype(dtype)
