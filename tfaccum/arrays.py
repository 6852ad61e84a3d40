"""Arrays by epochs, in an order that is a function of (seed, epoch).

Keras draws a new order from the state of its generator in each epoch, which
no other process can repeat.
"""

import numbers
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def integer(name: str, value: Any, minimum: int) -> int:
    """Checks that an argument is an integer of at least `minimum`.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is less than `minimum`.
    """
    advice = f"Pass an integer of at least {minimum}."
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"`{name}` must be an integer. Received: {name}={value!r}. {advice}"
        )
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum}. Received: "
            f"{name}={value!r}. {advice}"
        )
    return int(value)


def share(num_rows: int, worker: int, num_workers: int) -> tuple[int, int]:
    """Says which rows of a batch belong to a worker.

    The shares are consecutive and differ by at most one row, the first
    workers having the larger ones; a share is empty only if there are fewer
    rows than workers.

    Args:
        num_rows: Rows of the batch over all workers, at least 0.
        worker: This worker, 0 to `num_workers` - 1.
        num_workers: Number of workers, at least 1.

    Returns:
        First row and the row after the last: `batch[first:end]`.
    """
    size, larger = divmod(num_rows, num_workers)
    first = worker * size + min(worker, larger)
    return first, first + size + (worker < larger)


def are_plain(*arrays: Any) -> bool:
    """Whether all leaves of these nests are arrays or dense or ragged tensors.

    Others that Keras takes as arrays (pandas, sparse matrices, other
    frameworks' tensors) are left to Keras.
    """
    plain = np.ndarray | tf.Tensor | tf.RaggedTensor
    return all(
        leaf is None or isinstance(leaf, plain)
        for leaf in keras.tree.flatten(arrays)
    )


class ArrayEpochs:
    """Arrays as an `EpochData`: one `tf.data.Dataset` per epoch.

    With one worker, an epoch is

    ```
    order = range(num_rows), or if `shuffle`
        numpy.random.default_rng(SeedSequence(seed, spawn_key=(epoch,)))
        .permutation(num_rows)
    for b in range(skip_batches, num_batches):
        yield arrays[order[b * batch_size : (b + 1) * batch_size]]
    ```

    and worker w of W yields the rows of each batch that `share` gives it.

    Args:
        x: nest of arrays, rows first, all of the same number of rows.
        y: targets, likewise, or None.
        sample_weight: weights; one array for all targets, or a nest like
            them, or None.
        batch_size: rows of a dataset batch over all workers, at least 1.
        shuffle: True; False; or "batch", which as in Keras changes the order
            inside each batch only.
        seed: of the order, at least 0; needed if `shuffle`.

    State:
        `seed` may be set; it holds from the next call of `epoch`.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int,
        shuffle: bool | str = False,
        seed: int | None = None,
    ):
        one_for_all = keras.tree.is_nested(y) and not keras.tree.is_nested(
            sample_weight
        )
        if sample_weight is not None and one_for_all:
            sample_weight = keras.tree.map_structure(lambda _: sample_weight, y)
        packed = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        packed = keras.tree.lists_to_tuples(packed)
        self._arrays = tf.nest.map_structure(_on_host, packed)
        leaves = [t for t in tf.nest.flatten(packed) if t is not None]
        self._num_rows = int(leaves[0].shape[0])
        self._full_batch = batch_size
        self._shuffle = shuffle
        self.seed = seed

    @property
    def batch_size(self) -> int:
        """Rows of the first batch over all workers; 0 if there is none."""
        return min(self._full_batch, self._num_rows)

    def epoch(
        self,
        epoch: int,
        *,
        worker: int,
        num_workers: int,
        skip_batches: int = 0,
    ) -> tf.data.Dataset:
        """This worker's share of the batches of one epoch, see `EpochData`.

        Nothing is read of the batches that are skipped.
        """
        order = self._order(epoch)
        num_full, num_rest = divmod(self._num_rows, self._full_batch)
        full, rest = np.split(order, [num_full * self._full_batch])
        full = full.reshape(num_full, self._full_batch)
        mine = slice(*share(self._full_batch, worker, num_workers))
        indices = tf.data.Dataset.from_tensor_slices(full[skip_batches:, mine])
        if num_rest:
            mine = slice(*share(num_rest, worker, num_workers))
            last = tf.data.Dataset.from_tensors(rest[mine])
            # Even if nothing is left of it, so that all epochs have one spec.
            indices = indices.concatenate(last.take(skip_batches <= num_full))
        options = tf.data.Options()
        # They would rewrite graphs that hold the arrays. Source: Keras.
        options.experimental_optimization.apply_default_optimizations = False
        return indices.map(
            self._rows, num_parallel_calls=tf.data.AUTOTUNE
        ).with_options(options)

    def _order(self, epoch: int) -> np.ndarray:
        rows = np.arange(self._num_rows)
        if not self._shuffle:
            return rows
        sequence = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
        generator = np.random.default_rng(sequence)
        if self._shuffle == "batch":
            keys = generator.random(self._num_rows)
            return np.lexsort((keys, rows // self._full_batch))
        return generator.permutation(self._num_rows)

    def _rows(self, indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.gather(leaf, indices),
            self._arrays,
        )


def _on_host(leaf: Any) -> Any:
    """A tensor in the host's memory; floats as Keras' `floatx`."""
    if leaf is None:
        return None
    with tf.device("CPU:0"):
        tensor = leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
        if tensor.dtype.is_floating:
            tensor = tf.cast(tensor, keras.config.floatx())
        return tf.identity(tensor)
