"""Where micro-batches come from: all that `fit` may be given, by epochs."""

import dataclasses
import functools
import itertools
import math
import types
import zlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from tfaccum import agreement, keras_private
from tfaccum import strategy as strategies
from tfaccum.arrays import ArrayEpochs, are_plain, integer
from tfaccum.micro_batches import (
    NO_MORE_DATA,
    batch_spec,
    batch_stream,
    dataset_of,
    is_absent,
    micro_batch_stream,
    next_elements,
    num_rows,
    without_optionals,
)
from tfaccum.replay import Replay

# More rows than any batch has.
_WHOLE_SHARE = 2**30

# A new iterator begins with a pause that counts where epochs are short: of so
# many batches at most. One goes through so many of them.
_SHORT_EPOCH = 100
_EPOCHS_IN_ONE = 8

# How much is looked at to tell whether data are the same.
_CHECKED_BATCHES = 8
_CHECKED_ROWS = 1000


@runtime_checkable
class EpochData(Protocol):
    """Data whose epochs are made by number, such as `tfaccum.data.Pipeline`."""

    def epoch(
        self,
        epoch: int,
        *,
        worker: int,
        num_workers: int,
        skip_batches: int = 0,
    ) -> tf.data.Dataset:
        """This worker's share of every batch of one epoch but the first ones.

        The batches that follow those skipped are the same as without
        skipping, in every call and process. Epochs may be asked for before
        those ahead of them have been read.
        """


DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class OneBatch:
    """All that `train_on_batch` and its like are given.

    Attributes:
        tensors: nest with the rows first, the same on every worker.
        spec: of these and of others that are served by the same graphs.
    """

    tensors: Any
    spec: Any


class Source:
    """Everything that `fit`, `evaluate` or `predict` is given, by epochs.

    Args:
        strategy: under which the micro-batches will be consumed.
        x: what Keras takes (arrays, `tf.data.Dataset`, generator, PyDataset)
            or `OneBatch`, the same on every worker: each takes its share of
            each batch. Or this worker's own share: an `EpochData`, or a
            function that makes a `tf.data.Dataset` from a
            `tf.distribute.InputContext`.
        steps: dataset batches per epoch; None: all that there are.
        micro_batch_size: the most rows of one replica at once, or None.
        holds: whether batches are held until they are let go, so that they
            can be taken again with another `micro_batch_size`.
        shuffle_seed: decides with the epoch's number how arrays are shuffled,
            at least 0. None: the seed of `keras.utils.set_random_seed`; a
            single worker that has none draws one.
        **arguments: y, sample_weight, batch_size, shuffle, class_weight, as
            in Keras.

    Raises:
        TypeError: if `x` is a distributed dataset.
        ValueError: if arrays are to be shuffled on several workers without a
            common seed.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        x: Any,
        *,
        steps: int | None = None,
        micro_batch_size: int | None = None,
        holds: bool = False,
        shuffle_seed: int | None = None,
        **arguments: Any,
    ):
        if isinstance(x, tf.distribute.DistributedDataset):
            raise TypeError(
                "`x` must not be distributed already. Received: x of type "
                f"{type(x).__name__}. Pass the tf.data.Dataset itself: it is "
                "split over the replicas here."
            )
        self._strategy = strategy
        self._micro_batch_size = micro_batch_size
        self._holds = holds
        self._replay: Replay | None = None
        self._steps = steps
        self._by_epoch: EpochData | None = None
        self._arrays: ArrayEpochs | None = None
        self._adapter: Any = None
        self._py_dataset: Any = None
        self._batch: OneBatch | None = None
        self._first_rows: int | None = None
        # Computed for several workers only.
        self._content: Any = functools.partial(_content, x, **arguments)
        worker, num_workers = strategies.worker_index(strategy)
        self.is_share = True
        if isinstance(x, EpochData):
            self._by_epoch = x
            dataset = self._epoch_dataset(x, 0)
        elif isinstance(x, OneBatch):
            self.is_share = False
            self._batch = None if holds else x
            dataset = dataset_of(x.tensors, x.spec)
        elif callable(x) and not isinstance(x, tf.data.Dataset):
            dataset = x(
                tf.distribute.InputContext(
                    num_workers, worker, strategies.num_replicas(strategy)
                )
            )
        else:
            self.is_share = False
            dataset = self._of_keras(x, shuffle_seed, **arguments)
        self._dataset = dataset
        self.spec = batch_spec(dataset)
        self._size = self._agreed_size(dataset)
        self._available = None if self._size == math.inf else self._size
        self._stream = self._new_stream(dataset)
        self._iterator: Any = None
        self._left: int | None = None
        self._ahead = range(0)  # Epochs that the iterator goes on with.

    def _of_keras(
        self,
        x: Any,
        shuffle_seed: int | None,
        shuffle: Any = False,
        **arguments: Any,
    ) -> tf.data.Dataset:
        """The dataset of what Keras takes too; of arrays, that of epoch 0."""
        if isinstance(x, types.GeneratorType):
            first = list(itertools.islice(x, 1))
            x = (batch for batch in itertools.chain(first, x))
        elif isinstance(x, keras.utils.PyDataset):
            self._py_dataset = x
        # Only arrays and a PyDataset can be shuffled by Keras.
        if isinstance(x, tf.data.Dataset | types.GeneratorType):
            shuffle = False
        adapter = keras_private.data_adapter(
            x=x, steps_per_epoch=self._steps, shuffle=shuffle, **arguments
        )
        if isinstance(x, types.GeneratorType):
            self._first_rows = _rows_of(first[0])
        if "Array" in type(adapter).__name__:
            _, num_workers = strategies.worker_index(self._strategy)
            if shuffle_seed is None:
                shuffle_seed = keras_private.global_seed()
            if shuffle and shuffle_seed is None and num_workers > 1:
                raise ValueError(
                    "`shuffle` must give the same order on every worker. "
                    "Received: shuffle=True without a seed. Call "
                    "keras.utils.set_random_seed(number) with one number on "
                    "every worker, or pass shuffle=False."
                )
            y, weight = arguments.get("y"), arguments.get("sample_weight")
            if are_plain(x, y, weight):
                if (class_weight := arguments.get("class_weight")) is not None:
                    weight = keras_private.class_weight_to_sample_weight(
                        y, class_weight
                    )
                if shuffle and shuffle_seed is None:
                    drawn = np.random.SeedSequence().generate_state(1)
                    shuffle_seed = int(drawn[0])
                self._by_epoch = self._arrays = ArrayEpochs(
                    x,
                    y,
                    weight,
                    batch_size=adapter.batch_size,
                    shuffle=shuffle,
                    seed=shuffle_seed if shuffle else None,
                )
                return self._epoch_dataset(self._arrays, 0)
        self._adapter = adapter
        return adapter.get_tf_dataset()

    @property
    def num_batches(self) -> int | None:
        """Dataset batches per epoch; None while that is not known."""
        return self._steps or self._available

    @property
    def promised_batches(self) -> int | None:
        """As `num_batches`, where `steps` or the data say so beforehand."""
        is_finite = self._size is not None and self._size < math.inf
        return self._steps or (self._size if is_finite else None)

    @property
    def batch_size(self) -> int | None:
        """Rows of the first dataset batch over all workers; None without data.

        For arrays and `EpochData` with a `batch_size`, that. Else it is found
        when it is first asked for, by reading the first batch once more (not
        of a generator), and all workers have to ask. A dataset that is
        shuffled anew each time it is read notices.
        """
        if self._first_rows is None:
            self._first_rows = self._find_batch_size()
        return self._first_rows or None

    @property
    def shuffle_seed(self) -> int | None:
        """What decides with the epoch how arrays are shuffled.

        None where they are not, or by Keras. May be set before an epoch.
        """
        return None if self._arrays is None else self._arrays.seed

    @shuffle_seed.setter
    def shuffle_seed(self, seed: int | None) -> None:
        if self._arrays is not None and self._arrays.seed is not None:
            self._arrays.seed = integer("shuffle_seed", seed, 0)

    @property
    def facts(self) -> dict[str, Any]:
        """What has to be the same on every worker, by name."""
        return {
            "elements": self.spec,
            "number of batches": self.num_batches,
            "content": self._content(),
            "shuffle seed": self.shuffle_seed,
        }

    def first_batches(self) -> str | None:
        """A checksum of the first batches with rows; None without any.

        They are read once more for it.
        """
        checksum = None
        for batch in self._dataset.take(_CHECKED_BATCHES):
            if int(num_rows(batch)):
                checksum = _checksum(batch, checksum or 0)
        return None if checksum is None else f"{checksum:08x}"

    @property
    def element_spec(self) -> Any:
        """Of the iterators that `begin_epoch` makes."""
        return self._stream.element_spec

    def begin_epoch(
        self,
        epoch: int,
        skip_batches: int | None = None,
        end: int | None = None,
    ) -> Any:
        """An iterator over the micro-batches of one epoch.

        With `steps` it goes on where the last epoch ended, as in Keras. So it
        may where more epochs follow, of data that tell how long they are:
        then there is no pause between two epochs.

        What is skipped is not read if the data are arrays or an `EpochData`
        that knows how, such as `tfaccum.data.Pipeline`. Of other data the
        batches are made once more and dropped, in an order that is theirs: it
        has to be the same whenever they are read from the beginning, so a
        generator has to be a new one, and a PyDataset must not depend on how
        often it was told that an epoch ended.

        Args:
            epoch: its number, at least 0.
            skip_batches: dataset batches of the epoch that are over already,
                at least 0. None: none are, and the first epoch of this source
                begins where the data do, whatever its number. With a number
                and `steps` the first one begins where a source stands that
                has gone through all epochs before it.
            end: number behind the last epoch that is wanted; default: this
                is the last.
        """
        skipped = 0
        if skip_batches is not None:
            skipped = integer("skip_batches", skip_batches, 0)
        resumes = (
            skip_batches is not None
            and self._steps is not None
            and self._iterator is None
        )
        if resumes and self._size is None:
            self._go_through(epoch)
        if self._adapter is not None:
            self._adapter.on_epoch_begin()
        used_up = self._left is not None and self._left <= 0
        if used_up and not skipped and epoch in self._ahead[:1]:
            self._ahead = self._ahead[1:]
            self._left = self._available
        elif self._steps is None or self._iterator is None or used_up:
            start, used = self._position(epoch) if resumes else (epoch, 0)
            dataset = self._dataset_from(start, used + skipped)
            dataset = self._with_those_ahead(
                dataset, used + skipped, range(epoch + 1, end or 0)
            )
            if self._holds:
                self._replay = Replay(dataset)
                dataset = self._replay.dataset()
            # Making a dataset takes longer than many a step.
            is_same = dataset is self._dataset
            stream = self._stream if is_same else self._new_stream(dataset)
            self._iterator = iter(stream)
            self._left = self._available and self._available - used
        elif skipped:
            self._read(skipped)
        return self._iterator

    @property
    def iterator(self) -> Any:
        """The one that `begin_epoch` or `take_again` has made last."""
        return self._iterator

    def take_again(self, micro_batch_size: int | None) -> None:
        """Goes back to the first batch that is held, and cuts otherwise.

        Args:
            micro_batch_size: from now on; None: uncut.
        """
        self._micro_batch_size = micro_batch_size
        if self._replay is not None:
            self._iterator = iter(self._new_stream(self._replay.dataset()))

    def close(self) -> None:
        """Lets go of the data, and of the threads that read them.

        After that, nothing can be read.
        """
        self._iterator = self._replay = self._dataset = self._stream = None
        self._by_epoch = self._arrays = self._adapter = None
        self._py_dataset = self._batch = self._content = None

    def let_go(self, batches: int) -> None:
        """Forgets the first batches that are held."""
        if self._replay is not None:
            self._replay.let_go(batches)

    def largest_share(self, batches: int) -> int:
        """The most rows of one replica in the first batches that are held."""
        held = self._replay.held(batches) if self._replay is not None else []
        rows = max((int(num_rows(batch)) for batch in held), default=0)
        whole = self.is_share or self._by_epoch is not None
        replicas = (
            strategies.num_local_replicas(self._strategy)
            if whole
            else strategies.num_replicas(self._strategy)
        )
        return -(-rows // replicas)

    def begin_evaluation(self, number: int, resumes: bool) -> Any:
        """An iterator for the evaluation after so many others.

        The same batches each time, or, with `steps`, those that follow the
        last evaluation's, as in Keras.

        Args:
            number: evaluations before, of this run, at least 0.
            resumes: whether another process has made those.
        """
        if self._steps is None:
            return self.begin_epoch(0)
        return self.begin_epoch(number, 0 if resumes else None)

    def end_epoch(self, batches: int, exhausted: bool) -> None:
        """Tells how many batches are over, and whether the data ended.

        Args:
            batches: dataset batches of this epoch, with those skipped.
            exhausted: whether the data ended on all workers.
        """
        if self._left is not None:
            self._left -= batches
        if exhausted:
            self._left = 0
            if self._steps is None and self._available is None:
                self._available = batches
        if self._adapter is not None:
            self._adapter.on_epoch_end()

    def _position(self, epoch: int) -> tuple[int, int]:
        """Where an epoch of `steps` batches begins in data of known size.

        Returns:
            The epoch in which the data were begun, and the batches used since.
        """
        if self._steps is None or self._size is None:
            return epoch, 0
        if self._size == math.inf:
            return 0, epoch * self._steps
        # An epoch in which the data end is cut short; the next begins anew.
        epochs = max(-(-self._size // self._steps), 1)
        return epoch - epoch % epochs, epoch % epochs * self._steps

    def _go_through(self, epochs: int) -> None:
        """Reads these epochs, of data that do not tell their size."""
        for epoch in range(epochs):
            self.begin_epoch(epoch)
            self.end_epoch(*self._read(self._steps or 0))

    def _read(self, batches: int) -> tuple[int, bool]:
        """Reads past batches; returns how many, and whether the data ended."""
        done, has_more = 0, True
        while done < batches and has_more:
            rows, ends, *_ = next_elements(self._iterator, self._strategy)
            has_more = int(rows[0]) != NO_MORE_DATA
            if has_more and bool(ends[0]):
                done += 1
                self.let_go(1)
        return done, not agreement.any_worker(self._strategy, has_more)

    def _dataset_from(self, epoch: int, skip_batches: int) -> tf.data.Dataset:
        """The batches from some one on, of data begun in `epoch`."""
        if self._by_epoch is not None:
            return self._epoch_dataset(self._by_epoch, epoch, skip_batches)
        return (
            self._dataset.skip(skip_batches) if skip_batches else self._dataset
        )

    def _with_those_ahead(
        self, dataset: tf.data.Dataset, skipped: int, following: range
    ) -> tf.data.Dataset:
        """The rest of an epoch, and some that follow; known by counting."""
        self._ahead = range(0)
        size = self._available or 0
        is_short = 0 < size <= _SHORT_EPOCH
        if self._by_epoch is None or self._steps or not is_short:
            return dataset
        following = following[: _EPOCHS_IN_ONE - 1]
        others = [self._epoch_dataset(self._by_epoch, e) for e in following]
        sizes = [int(each.cardinality()) for each in (dataset, *others)]
        # A worker with less data than others would begin the next too early.
        if sizes == [size - skipped] + [size] * len(others):
            for other in others:
                dataset = dataset.concatenate(other)
            self._ahead = following
        return dataset

    def _epoch_dataset(
        self, data: EpochData, epoch: int, skip_batches: int = 0
    ) -> tf.data.Dataset:
        worker, num_workers = strategies.worker_index(self._strategy)
        return data.epoch(
            epoch,
            worker=worker,
            num_workers=num_workers,
            skip_batches=skip_batches,
        )

    def _new_stream(self, dataset: tf.data.Dataset) -> Any:
        if self._batch is not None:
            return batch_stream(
                self._batch.tensors,
                self._batch.spec,
                self._strategy,
                micro_batch_size=self._micro_batch_size,
            )
        return micro_batch_stream(
            dataset,
            self._strategy,
            # Uncut and cut batches have to look the same.
            micro_batch_size=self._micro_batch_size
            or (_WHOLE_SHARE if self._holds else None),
            is_share=self.is_share or self._by_epoch is not None,
            is_certain=self._is_certain(dataset),
        )

    def _is_certain(self, dataset: tf.data.Dataset) -> bool:
        """Whether the only replica finds rows whenever it asks for a batch."""
        if strategies.num_replicas(self._strategy) > 1:
            return False
        if self._micro_batch_size or self._holds or self._batch is not None:
            return False
        # More may be asked for; and data repeated for ever end all the same
        # if they are none the second time.
        if self._steps is not None or self._size in (None, math.inf):
            return False
        # Epochs of other data may have a size of their own.
        is_dataset = self._by_epoch is None and _has_rows(dataset)
        return self._arrays is not None or is_dataset

    def _agreed_size(self, dataset: tf.data.Dataset) -> Any:
        """Batches of the longest worker, math.inf if none has an end.

        None if some worker cannot tell.
        """
        if self._adapter is not None and self._adapter.num_batches is not None:
            return self._adapter.num_batches
        mine = str(int(dataset.cardinality()))
        told = [mine]
        if self.is_share:
            told = agreement.exchange(self._strategy, mine)
        sizes = [int(size) for size in told]
        if all(size == tf.data.INFINITE_CARDINALITY for size in sizes):
            return math.inf
        return max(sizes) if min(sizes) >= 0 else None

    def _find_batch_size(self) -> int:
        if (rows := getattr(self._by_epoch, "batch_size", None)) is not None:
            return int(rows)
        if self._py_dataset is not None:  # Its threads must not start here.
            return _rows_of(self._py_dataset[0])
        rows = 0
        for batch in self._dataset.take(1):
            rows = int(num_rows(batch))
        if self.is_share:
            told = agreement.exchange(self._strategy, str(rows))
            rows = sum(map(int, told))
        return rows


def _has_rows(dataset: tf.data.Dataset) -> bool:
    """Whether the spec of its batches says that there are some."""
    shapes = [
        getattr(spec, "shape", tf.TensorShape([]))
        for spec in tf.nest.flatten(dataset.element_spec)
        if not is_absent(spec)
    ]
    return all(shape.rank and shape[0] for shape in shapes)


def _rows_of(batch: Any) -> int:
    """Rows of a batch as Keras' users make them."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return int(leaves[0].shape[0])


def _content(x: Any, **arguments: Any) -> str | None:
    """Tells data apart that look alike, where that costs next to nothing."""
    if isinstance(x, EpochData):
        return x.checksum() if hasattr(x, "checksum") else None
    arrays = (x, arguments.get("y"), arguments.get("sample_weight"))
    leaves = keras.tree.flatten(arrays)
    if all(leaf is None or hasattr(leaf, "__array__") for leaf in leaves):
        return f"{_checksum(arrays, 0):08x}"
    return None


def _checksum(batch: Any, start: int) -> int:
    """CRC-32 of shapes and of some rows of every tensor of a batch."""
    for leaf in tf.nest.flatten(without_optionals(batch), True):
        if leaf is not None:
            array = np.asarray(leaf)
            if array.dtype == object:  # Strings.
                array = np.array(repr(array.ravel()[:_CHECKED_ROWS].tolist()))
            start = zlib.crc32(f"{array.shape} {array.dtype}".encode(), start)
            step = max(1, len(array) // _CHECKED_ROWS) if array.ndim else 1
            rows = array[::step] if array.ndim else array
            start = zlib.crc32(np.ascontiguousarray(rows).tobytes(), start)
    return start
