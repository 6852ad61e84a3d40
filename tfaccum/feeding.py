"""How a dataset reaches the replicas.

Whatever `fit` is given becomes a stream of micro-batches, one element per
replica and micro-step, cut from the dataset's batches:

    ((rows, last, total), data)

`rows` (int32) counts the examples of this element, or is left for
`next_elements` to count; `last` (bool) says that the micro-step ends a dataset
batch; `total` (int32) counts the examples of that batch on this worker. After
the last batch the stream goes on for ever with elements of `rows`
= -1: an endless dataset needs no question to the other workers whether they
still have data, and a worker that has run out still takes part in the last
update, with weight zero.
"""

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
from tfaccum.replay import Replay

NO_MORE_DATA = -1
# Rows that are counted where the element is used: a function of tf.data for
# each element would cost more than a small micro-step does.
_UNCOUNTED = -2

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


def micro_batch_stream(
    dataset: tf.data.Dataset,
    strategy: tf.distribute.Strategy,
    *,
    micro_batch_size: int | None = None,
    is_share: bool = False,
) -> tf.data.Dataset:
    """Turns a dataset of batches into this worker's micro-batches.

    A batch of n rows is split over all replicas into parts that differ by at
    most one row; each worker takes its replicas' parts, and cuts them into
    ceil(largest part / micro_batch_size) micro-steps of equal size, up to one
    row. A part may be empty.

    Args:
        dataset: yields batches; every component has the rows first.
        strategy: under which the micro-batches will be consumed.
        micro_batch_size: the most rows of one replica at once; None: uncut.
        is_share: whether `dataset` yields this worker's share only.

    Returns:
        An endless dataset: one element after the other for each replica of
        this worker, micro-step by micro-step. See `next_elements`.
    """
    worker, num_workers = strategies.worker_index(strategy)
    replicas = strategies.num_local_replicas(strategy)
    place = (0, 1) if is_share else (worker, num_workers)
    stream = _made(
        _stream_of_dataset,
        dataset,
        tf.type_spec_from_value(dataset),
        (*place, replicas, micro_batch_size),
    )
    # The Python functions of a generator live as long as their dataset does.
    stream.made_of = dataset
    return stream


def batch_stream(
    batch: Any,
    strategy: tf.distribute.Strategy,
    *,
    micro_batch_size: int | None = None,
) -> tf.data.Dataset:
    """`micro_batch_stream` of one batch, which needs no functions of tf.data.

    Args:
        batch: nest of tensors with the rows first, the same on every worker.
        strategy: as there.
        micro_batch_size: as there.
    """
    replicas = strategies.num_local_replicas(strategy)
    place = strategies.worker_index(strategy)
    return _made(
        _stream_of_batch,
        batch,
        _spec_of_any_rows(batch),
        (*place, replicas, micro_batch_size),
    )


def any_number_of_rows(batch: Any) -> tf.data.Dataset:
    """A dataset of this one batch, whose spec leaves the rows open."""
    spec = _spec_of_any_rows(batch)
    return _made(tf.data.Dataset.from_tensors, batch, spec)


def _made(
    make: Callable[..., tf.data.Dataset],
    data: Any,
    spec: Any,
    arguments: tuple = (),
) -> tf.data.Dataset:
    """`make(data, *arguments)`; in Python that takes as long as many steps."""
    return _graph(make, arguments).get_concrete_function(spec)(data)


@functools.cache
def _graph(make: Callable[..., tf.data.Dataset], arguments: tuple) -> Any:
    """A function of data, traced once for each spec."""
    return tf.function(lambda data: make(data, *arguments), autograph=False)


def _stream_of_dataset(
    dataset: tf.data.Dataset,
    worker: int,
    num_workers: int,
    replicas: int,
    micro_batch_size: int | None,
) -> tf.data.Dataset:
    # `map` unpacks a batch that is a tuple into arguments.
    is_tuple = type(dataset.element_spec) is tuple

    def whole(arguments: tuple) -> Any:
        return arguments if is_tuple else arguments[0]

    if num_workers > 1:
        dataset = dataset.map(
            lambda *batch: _share(whole(batch), worker, num_workers, replicas)
        )
    if replicas == 1 and micro_batch_size is None:
        stream = _uncut(dataset)
    else:
        stream = dataset.flat_map(
            lambda *batch: _cut(whole(batch), replicas, micro_batch_size)
        )
    return _endless(stream, replicas)


def _stream_of_batch(
    batch: Any,
    worker: int,
    num_workers: int,
    replicas: int,
    micro_batch_size: int | None,
) -> tf.data.Dataset:
    if num_workers > 1:
        batch = _share(batch, worker, num_workers, replicas)
    if replicas == 1 and micro_batch_size is None:
        stream = _uncut(tf.data.Dataset.from_tensors(batch))
    else:
        stream = _cut(batch, replicas, micro_batch_size)
    options = tf.data.Options()
    # There is nothing in it to improve, and looking for it takes longer.
    options.experimental_optimization.apply_default_optimizations = False
    return _endless(stream, replicas).with_options(options)


def _uncut(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Each batch as one micro-step of the only replica."""
    counts = _counts(_UNCOUNTED, True, _UNCOUNTED)
    return tf.data.Dataset.zip(_always(counts), dataset)


def _endless(stream: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """The stream, and after it for ever that there is nothing more."""
    stream = stream.concatenate(_always(nothing(stream.element_spec)))
    stream = stream.prefetch(2 * replicas)
    options = tf.data.Options()
    # With autotuning, deleting an iterator that has not come to its end waits
    # for a thread that may sleep for more than a minute.
    options.autotune.enabled = False
    return stream.with_options(options)


def next_elements(
    iterator: Any, strategy: tf.distribute.Strategy
) -> tuple[tuple, tuple, tuple, tuple]:
    """The next micro-step's (rows, last, total, data).

    Each is a tuple over the replicas of this worker.
    """
    replicas = strategies.num_local_replicas(strategy)
    counts, data = zip(*(next(iterator) for _ in range(replicas)), strict=True)
    rows, last, total = zip(*counts, strict=True)

    def counted(numbers: tuple) -> tuple:
        # What is not counted is a whole batch.
        return tuple(
            tf.where(number == _UNCOUNTED, _num_rows(batch), number)
            for number, batch in zip(numbers, data, strict=True)
        )

    return counted(rows), last, counted(total), data


def _counts(rows: Any, last: Any, total: Any) -> tuple:
    return tf.constant(rows), tf.constant(last), tf.constant(total)


def _always(element: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(element).repeat()


def without_optionals(data: Any) -> Any:
    """Absent components of a batch as None. Source: Keras' trainer."""
    return keras.tree.map_structure(
        lambda leaf: (
            None if isinstance(leaf, tf.experimental.Optional) else leaf
        ),
        data,
    )


def batch_spec(dataset: tf.data.Dataset) -> Any:
    """The spec of one batch with unknown number of rows; None where absent."""

    def open_rows(spec: Any) -> Any:
        if isinstance(spec, tf.OptionalSpec):
            return None
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return spec

    return tf.nest.map_structure(open_rows, dataset.element_spec)


def _spec_of_any_rows(batch: Any) -> Any:
    """The spec of batches like this one, with any number of rows."""

    def of(leaf: Any) -> Any:
        spec = tf.type_spec_from_value(leaf)
        if not hasattr(spec, "shape") or not spec.shape.rank:
            return spec
        shape = [None, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
            )
        return type(spec)(shape, spec.dtype)

    return tf.nest.map_structure(of, batch)


def _leaves(batch: Any) -> list[Any]:
    return [
        leaf
        for leaf in tf.nest.flatten(batch, expand_composites=False)
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
    ]


def _num_rows(batch: Any) -> tf.Tensor:
    """Rows of a batch, scalar int32."""
    leaf = _leaves(batch)[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    if leaf.shape.rank == 0:
        raise ValueError(
            "The dataset must yield batches. Received: an element without "
            f"rows, {batch}. Call dataset.batch(...) first."
        )
    return tf.shape(leaf)[0]


def _rows(batch: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    """A copy of some rows of a batch.

    Kernels write their result into an argument that nobody else needs. Of what
    Python has given to tf.data TensorFlow writes into the user's own array,
    once it is sliced. Source: `SubBuffer` in TensorFlow's tensor.cc.
    """

    def copied(tensor: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.DeepCopy(x=tensor)

    def take(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            begin = tf.concat(
                [[start], tf.zeros([leaf.shape.rank - 1], tf.int32)], 0
            )
            size = tf.concat(
                [[end - start], tf.cast(leaf.dense_shape[1:], tf.int32)], 0
            )
            return tf.sparse.slice(leaf, begin, size)
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor):
            return tf.nest.map_structure(
                copied, leaf[start:end], expand_composites=True
            )
        return leaf  # an absent component: None, or an empty Optional

    return tf.nest.map_structure(take, batch, expand_composites=False)


def _boundary(rows: tf.Tensor, part: Any, num_parts: Any) -> tf.Tensor:
    """First row of a part when rows are split evenly, larger parts first."""
    return part * (rows // num_parts) + tf.minimum(part, rows % num_parts)


def _share(batch: Any, worker: int, num_workers: int, replicas: int) -> Any:
    """The rows of the replicas of one worker."""
    rows = _num_rows(batch)
    total = num_workers * replicas
    return _rows(
        batch,
        _boundary(rows, worker * replicas, total),
        _boundary(rows, (worker + 1) * replicas, total),
    )


def _cut(
    batch: Any, replicas: int, micro_batch_size: int | None
) -> tf.data.Dataset:
    """One batch as a dataset of micro-batches, replica by replica."""
    rows = _num_rows(batch)
    steps = tf.constant(1)
    if micro_batch_size is not None:
        largest = -(-rows // replicas)
        steps = tf.maximum(-(-largest // micro_batch_size), 1)
    parts = steps * replicas
    index = tf.range(parts + 1)
    bounds = _boundary(rows, index, parts)
    counts = tf.data.Dataset.from_tensor_slices(
        (
            bounds[1:] - bounds[:-1],
            index[:-1] // replicas == steps - 1,
            tf.fill([parts], rows),
        )
    )
    if all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch)):
        # Larger parts first; as many rows in each of them.
        size, larger = rows // parts, rows % parts
        middle = larger * (size + 1)
        data = _parts(_rows(batch, 0, middle), larger, size + 1).concatenate(
            _parts(_rows(batch, middle, rows), parts - larger, size)
        )
    else:  # A function for each part takes as long as a small micro-step.
        data = tf.data.Dataset.from_tensor_slices(
            (bounds[:-1], bounds[1:])
        ).map(lambda start, end: _rows(batch, start, end))
    return tf.data.Dataset.zip(counts, data)


def _parts(batch: Any, number: Any, size: Any) -> tf.data.Dataset:
    """Dense tensors as a dataset of so many parts of so many rows each."""

    def folded(leaf: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[number, size], tf.shape(leaf)[1:]], 0)
        result = tf.reshape(leaf, shape)
        result.set_shape([None, None, *leaf.shape[1:]])
        return result

    return tf.data.Dataset.from_tensor_slices(
        tf.nest.map_structure(folded, batch)
    )


def nothing(element_spec: Any) -> Any:
    """The element that says there is no more data."""

    def zeros(spec: Any) -> Any:
        if isinstance(spec, tf.TensorSpec):
            shape = [
                size if size is not None else int(axis > 0)
                for axis, size in enumerate(spec.shape)
            ]
            return tf.zeros(shape, spec.dtype)
        if isinstance(spec, tf.RaggedTensorSpec):
            empty = tf.zeros(
                [0, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype
            )
            for _ in range(spec.ragged_rank):
                empty = tf.RaggedTensor.from_row_splits(
                    empty, tf.zeros([1], spec.row_splits_dtype)
                )
            return empty
        if isinstance(spec, tf.SparseTensorSpec):
            shape = [size or 0 for size in spec.shape]
            return tf.SparseTensor(
                tf.zeros([0, len(shape)], tf.int64),
                tf.zeros([0], spec.dtype),
                shape,
            )
        if isinstance(spec, tf.OptionalSpec):
            return keras_private.empty_optional(spec)
        return None

    _, data_spec = element_spec
    data = tf.nest.map_structure(zeros, data_spec, expand_composites=False)
    return _counts(NO_MORE_DATA, True, 0), data


@dataclasses.dataclass(frozen=True)
class OneBatch:
    """All that `train_on_batch` and its like are given.

    Attributes:
        tensors: nest with the rows first, the same on every worker.
    """

    tensors: Any


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
        self._content = functools.partial(_content, x, **arguments)
        worker, num_workers = strategies.worker_index(strategy)
        self.is_share = True
        if isinstance(x, EpochData):
            self._by_epoch = x
            dataset = self._epoch_dataset(x, 0)
        elif isinstance(x, OneBatch):
            self.is_share = False
            self._batch = None if holds else x
            dataset = any_number_of_rows(x.tensors)
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
        self._stream = self._new_stream(dataset)
        self._iterator: Any = None
        self._left: int | None = None
        self._ahead = range(0)  # Epochs that the iterator goes on with.
        self._size = self._agreed_size(dataset)
        self._available = None if self._size == math.inf else self._size

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
            if int(_num_rows(batch)):
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

    def let_go(self, batches: int) -> None:
        """Forgets the first batches that are held."""
        if self._replay is not None:
            self._replay.let_go(batches)

    def largest_share(self, batches: int) -> int:
        """The most rows of one replica in the first batches that are held."""
        held = self._replay.held(batches) if self._replay is not None else []
        rows = max((int(_num_rows(batch)) for batch in held), default=0)
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
        """Reads some batches; returns how many, and whether the data ended."""
        done, has_more = 0, True
        while done < batches and has_more:
            rows, last, *_ = next_elements(self._iterator, self._strategy)
            has_more = int(rows[0]) != NO_MORE_DATA
            done += has_more and bool(last[0])
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
        )

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
            rows = int(_num_rows(batch))
        if self.is_share:
            told = agreement.exchange(self._strategy, str(rows))
            rows = sum(map(int, told))
        return rows


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
