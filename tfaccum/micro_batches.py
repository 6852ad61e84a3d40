"""A dataset's batches as micro-batches: one element per replica and step.

    ((rows, ends, total), data)

`rows` (int32) counts the examples of this element, or is left for
`next_elements` to count; `ends` (int32) counts the dataset batches that end
with the micro-step, 0 or 1; `total` (int32) counts the examples of its batch on
this worker. After the last batch the stream goes on for ever with elements of
`rows` = -1 that end more batches than anyone asks for: an endless dataset needs
no question to the other workers whether they still have data, and a worker that
has run out still takes part in the last update, with weight zero.

A stream for one replica whose every element is a whole batch that has rows, and
of which nobody asks for more than there are, says none of this: `((), data)`.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfaccum import keras_private
from tfaccum import strategy as strategies

NO_MORE_DATA = -1
# More than there are: so many batches end behind the data, and of so many rows
# those that there are are counted where the element is used. A function of
# tf.data for each element would cost more than a small micro-step does.
_ALL = tf.int32.max
# Of a component of a batch that is None.
_NONE = tf.type_spec_from_value(None)


def micro_batch_stream(
    dataset: tf.data.Dataset,
    strategy: tf.distribute.Strategy,
    *,
    micro_batch_size: int | None = None,
    is_share: bool = False,
    is_certain: bool = False,
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
        is_certain: whether no batch is empty and nobody will ask for more of
            them than there are; for one replica without a `micro_batch_size`.

    Returns:
        An endless dataset: one element after the other for each replica of
        this worker, micro-step by micro-step. See `next_elements`. One that is
        certain ends with `dataset`. A thread fetches two micro-steps ahead,
        unless `dataset` does so itself and is not cut.
    """
    replicas = strategies.num_local_replicas(strategy)
    place = (0, 1) if is_share else strategies.worker_index(strategy)
    stream = _made(
        _stream_of_dataset,
        dataset,
        tf.type_spec_from_value(dataset),
        (
            *place,
            replicas,
            micro_batch_size,
            is_certain,
            keras_private.is_prefetched(dataset),
        ),
    )
    # The Python functions of a generator live as long as their dataset does.
    stream.made_of = dataset
    return stream


def batch_stream(
    batch: Any,
    spec: Any,
    strategy: tf.distribute.Strategy,
    *,
    micro_batch_size: int | None = None,
) -> tf.data.Dataset:
    """`micro_batch_stream` of one batch, which needs no functions of tf.data.

    Args:
        batch: nest of tensors with the rows first, the same on every worker.
        spec: of it and of others like it, such as `spec_of_any_rows`.
        strategy: as there.
        micro_batch_size: as there.
    """
    replicas = strategies.num_local_replicas(strategy)
    place = strategies.worker_index(strategy)
    return _made(
        _stream_of_batch,
        batch,
        spec,
        (*place, replicas, micro_batch_size),
    )


def dataset_of(batch: Any, spec: Any) -> tf.data.Dataset:
    """A dataset of this one batch, with a spec that others have too."""
    return _made(tf.data.Dataset.from_tensors, batch, spec)


def _made(
    make: Callable[..., tf.data.Dataset],
    data: Any,
    spec: Any,
    arguments: tuple = (),
) -> tf.data.Dataset:
    """`make(data, *arguments)`; in Python that takes as long as many steps."""
    return _graphs(make, arguments)(spec)(data)


@functools.cache
def _graphs(
    make: Callable[..., tf.data.Dataset], arguments: tuple
) -> Callable[[Any], Any]:
    def graph(spec: Any) -> Any:
        # Anew: the one of another spec would take the graph of any number of
        # rows for data of which it is known.
        trace = tf.function(
            lambda data: make(data, *arguments), autograph=False
        )
        return trace.get_concrete_function(spec)

    return once_per_spec(graph)


def once_per_spec(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`make`, called once for each spec of data."""
    made: list[tuple[Any, Any]] = []  # A dict in a spec has no hash.

    def of(spec: Any) -> Any:
        for other, found in made:
            if other == spec:
                return found
        made.append((spec, make(spec)))
        return made[-1][1]

    return of


def _stream_of_dataset(
    dataset: tf.data.Dataset,
    worker: int,
    num_workers: int,
    replicas: int,
    micro_batch_size: int | None,
    is_certain: bool,
    is_prefetched: bool,
) -> tf.data.Dataset:
    shares = num_workers > 1
    cuts = replicas > 1 or micro_batch_size is not None
    # Else a second thread would do nothing but pass batches on.
    ahead = 2 * replicas if shares or cuts or not is_prefetched else 0
    if is_certain:
        return _buffered(tf.data.Dataset.zip((), dataset), ahead)
    # `map` unpacks a batch that is a tuple into arguments.
    is_tuple = type(dataset.element_spec) is tuple

    def whole(arguments: tuple) -> Any:
        return arguments if is_tuple else arguments[0]

    if shares:
        dataset = dataset.map(
            lambda *batch: _share(whole(batch), worker, num_workers, replicas)
        )
    if cuts:
        stream = dataset.flat_map(
            lambda *batch: _cut(whole(batch), replicas, micro_batch_size)
        )
    else:
        stream = _uncut(dataset)
    return _endless(stream, ahead)


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
    return _endless(stream, 2 * replicas).with_options(options)


def _uncut(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Each batch as one micro-step of the only replica."""
    counts = _counts(_ALL, 1, _ALL)
    return tf.data.Dataset.zip(_always(counts), dataset)


def _endless(stream: tf.data.Dataset, ahead: int) -> tf.data.Dataset:
    """The stream, and after it for ever that there is nothing more."""
    stream = stream.concatenate(_always(nothing(stream.element_spec)))
    return _buffered(stream, ahead)


def _buffered(stream: tf.data.Dataset, ahead: int) -> tf.data.Dataset:
    if ahead:
        stream = stream.prefetch(ahead)
    options = tf.data.Options()
    # With autotuning, deleting an iterator that has not come to its end waits
    # for a thread that may sleep for more than a minute.
    options.autotune.enabled = False
    return stream.with_options(options)


def next_elements(
    iterator: Any, strategy: tf.distribute.Strategy
) -> tuple[tuple, tuple, tuple, tuple]:
    """The next micro-step's (rows, ends, total, data).

    Each is a tuple over the replicas of this worker.
    """
    replicas = strategies.num_local_replicas(strategy)
    counts, data = zip(*(next(iterator) for _ in range(replicas)), strict=True)
    there = tuple(map(num_rows, data))
    if not any(counts):
        return there, (tf.constant(1),), there, data
    rows, ends, total = zip(*counts, strict=True)
    # What is not counted is a whole batch.
    totals = [
        tf.where(number == _ALL, all_rows, number)
        for number, all_rows in zip(total, there, strict=True)
    ]
    return tuple(map(tf.minimum, rows, there)), ends, tuple(totals), data


def _counts(rows: int, ends: int, total: int) -> tuple:
    return tf.constant(rows), tf.constant(ends), tf.constant(total)


def counted(element_spec: Any) -> Any:
    """The spec of an element with its counts, if it says them or not."""
    counts, data = element_spec
    return counts or (tf.TensorSpec([], tf.int32),) * 3, data


def _always(element: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(element).repeat()


def is_absent(spec: Any) -> bool:
    """Whether a component of a batch stands for None.

    An empty Optional as Keras' adapters make it, or None itself in a dataset.
    """
    return isinstance(spec, tf.OptionalSpec) or spec == _NONE


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
        if is_absent(spec):
            return None
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return spec

    return tf.nest.map_structure(open_rows, dataset.element_spec)


def spec_of_any_rows(batch: Any) -> Any:
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


class CommonSpecs:
    """Specs of batches, with axes left open where these have differed.

    A graph for each length of a sequence would take seconds each.
    """

    def __init__(self) -> None:
        self._specs: list[Any] = []

    def of(self, batch: Any) -> Any:
        """One for this batch and for all like it so far."""
        spec = spec_of_any_rows(batch)
        for index, known in enumerate(self._specs):
            if (common := _common(known, spec)) is not None:
                self._specs[index] = common
                return common
        self._specs.append(spec)
        return spec


def _common(one: Any, other: Any) -> Any:
    """The spec of what has either of these; None if there is none.

    Axes that differ are open in it.
    """
    try:
        tf.nest.assert_same_structure(one, other, expand_composites=False)
    except (TypeError, ValueError):
        return None
    leaves = [
        a if a == b else a.most_specific_common_supertype([b])
        for a, b in zip(
            tf.nest.flatten(one), tf.nest.flatten(other), strict=True
        )
    ]
    for leaf in leaves:
        scalar = tf.TensorShape([])  # Of a spec without a shape.
        if leaf is None or getattr(leaf, "shape", scalar).rank is None:
            return None
    return tf.nest.pack_sequence_as(one, leaves)


def _leaves(batch: Any) -> list[Any]:
    return [
        leaf
        for leaf in tf.nest.flatten(batch, expand_composites=False)
        if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
    ]


def num_rows(batch: Any) -> tf.Tensor:
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
    return length(leaf)


def length(tensor: tf.Tensor) -> tf.Tensor:
    """The first axis, scalar int32; a constant where it is known."""
    known = tensor.shape[0]
    return tf.shape(tensor)[0] if known is None else tf.constant(known)


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
            first, number = (
                tf.cast([n], tf.int64) for n in (start, end - start)
            )
            begin = tf.pad(first, [[0, leaf.shape.rank - 1]])
            size = tf.concat([number, leaf.dense_shape[1:]], 0)
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
    rows = num_rows(batch)
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
    rows = num_rows(batch)
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
            tf.cast(index[:-1] // replicas == steps - 1, tf.int32),
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
            inner = [size or 0 for size in spec.shape[spec.ragged_rank + 1 :]]
            empty = tf.zeros([0, *inner], spec.dtype)
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
    return _counts(NO_MORE_DATA, _ALL, 0), data
