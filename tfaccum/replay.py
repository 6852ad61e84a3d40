"""Batches of a dataset that can be taken again until they are let go."""

import collections
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfaccum import keras_private
from tfaccum.micro_batches import is_absent


class Replay:
    """Holds what has been read of a dataset, on the host.

    Whatever the dataset is (a generator that cannot be read twice, one that
    shuffles anew), each reading begins with the batches that are held.

    Args:
        dataset: of batches; read once.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._spec = dataset.element_spec
        self._source = iter(dataset)
        self._held: collections.deque[Any] = collections.deque()
        self._first = 0  # Number of the first batch that is held.
        self._reading = 0
        self._lock = threading.Lock()

    def dataset(self) -> tf.data.Dataset:
        """The batches that are held and those that follow.

        Earlier readings end. Rows have to be copied before they are used, as
        `micro_batch_stream` does: this is the memory that is held.
        """
        with self._lock:
            self._reading += 1
            reading, first = self._reading, self._first
        # TensorFlow keeps the function of a generator for ever.
        this = weakref.ref(self)

        def read() -> Iterator[tuple]:
            replay = this()
            return iter(()) if replay is None else replay.read(reading, first)

        present = [spec for spec in _leaves(self._spec) if not is_absent(spec)]
        tensors = tf.data.Dataset.from_generator(
            read,
            output_signature=tuple(
                tf.nest.flatten(present, expand_composites=True)
            ),
        )

        def batch(*flat: tf.Tensor) -> Any:
            found = iter(
                tf.nest.pack_sequence_as(present, flat, expand_composites=True)
            )
            leaves = [
                _absent(spec) if is_absent(spec) else next(found)
                for spec in _leaves(self._spec)
            ]
            return tf.nest.pack_sequence_as(self._spec, leaves)

        return tensors.map(batch)

    def held(self, batches: int) -> list[Any]:
        """The first batches that are held, so many or fewer."""
        with self._lock:
            return list(self._held)[:batches]

    def let_go(self, batches: int) -> None:
        """Forgets the first batches that are held."""
        with self._lock:
            for _ in range(min(batches, len(self._held))):
                self._held.popleft()
                self._first += 1

    def read(self, reading: int, position: int) -> Iterator[tuple]:
        """The batches of one reading from a position on, as flat tensors."""
        while True:
            with self._lock:
                if reading != self._reading:
                    return
                while position >= self._first + len(self._held):
                    batch = next(self._source, None)
                    if batch is None:
                        return
                    self._held.append(batch)
                batch = self._held[position - self._first]
            position += 1
            leaves = zip(_leaves(self._spec), _leaves(batch), strict=True)
            present = [leaf for spec, leaf in leaves if not is_absent(spec)]
            yield tuple(tf.nest.flatten(present, expand_composites=True))


def _leaves(nest: Any) -> list[Any]:
    return tf.nest.flatten(nest)


def _absent(spec: Any) -> Any:
    is_optional = isinstance(spec, tf.OptionalSpec)
    return keras_private.empty_optional(spec) if is_optional else None
