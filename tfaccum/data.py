"""TFDS to per-epoch tf.data datasets: seeded, sharded by example, cached.

The order of the examples is a pure function of (seed, epoch), and every worker
computes it. A worker then keeps its own rows of each dataset batch, so that 1
worker and 4 workers train on the same batches, from one file or from many.
"""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfaccum.arrays import integer, share
from tfaccum.datasets import source

ID = "tfaccum_id"
_CHECKED_EXAMPLES = 8


class Pipeline:
    """A split of a TFDS dataset, as one `tf.data.Dataset` per epoch.

    With one worker, an epoch is

    ```
    order = a permutation of the positions 0..num_examples-1,
            drawn from (seed, epoch)
    for b in range(num_batches):
        batch = order[b * batch_size : (b + 1) * batch_size]
        yield stack(augment_fn(map_fn(example[p]), seed=(seed, epoch, p))
                    for p in batch)
    ```

    and worker w of W yields `batch[first:end]` with `first, end =
    share(len(batch), w, W)` instead of `batch`. So in every epoch each example
    is seen exactly once over all workers, whatever files it lies in. All
    workers yield the same number of batches; in a batch of fewer examples than
    workers, some yield a batch of 0 rows.

    ```
    train = Pipeline(name="digits", split="train", batch_size=64, cache=True,
                     map_fn=lambda e: (e["image"], e["label"]))
    for epoch in range(3):
        model.fit(train.epoch(epoch), initial_epoch=epoch, epochs=epoch + 1)
    ```

    `epoch(e, skip_batches=b)` is the rest of epoch e after b batches.

    Args:
        name: A TFDS name, for instance `"mnist"`. The datasets of
            `tfaccum.datasets` are prepared on first use.
        split: A split or a slice of one, for instance `"train[:80%]"`.
        batch_size: The dataset batch: examples over all workers, at least 1.
        data_dir: The directory in which TFDS keeps datasets. Default None:
            the default of TFDS.
        shuffle: Whether the order changes from epoch to epoch. Default True;
            False keeps the order of the split.
        seed: Seed of the order and of `augment_fn`, at least 0. Default 0. The
            global seed of TensorFlow is neither read nor set.
        shuffle_buffer: Examples among which the next one is drawn, at least 1.
            Default None: the whole split, the only value which makes all
            orders equally likely.
        cache: Whether the decoded examples stay in memory after the first
            epoch. Default False. It saves reading and decoding, which each
            worker then does for the whole split, once; without it a worker
            decodes only its own rows.
        map_fn: From an example, a dict of tensors, to `(x, y)` or whatever
            `Model.fit` takes. Default None: the dict itself. Called in graph
            mode, in every epoch, on one example.
        augment_fn: `augment_fn(element, seed)`, on what `map_fn` returns, with
            an int64 [2] seed for `tf.random.stateless_*` and
            `tf.image.stateless_random_*`, which depends on (seed, epoch,
            position) and on nothing else. Default None.
        with_ids: Whether `map_fn` finds the example's position in the split
            under `"tfaccum_id"`, int64 []. Default False.
        num_parallel_calls: Examples decoded and mapped at a time, at least 1.
            Default None: chosen by tf.data. It never changes the order.
        prefetch: Batches kept ready, at least 0. Default None: chosen by
            tf.data.
        drop_remainder: Whether the last batch of an epoch is dropped when it
            is short; its examples, other ones in each epoch, are not seen.
            Default False.
        download: Whether TFDS may fetch the dataset if it is not in
            `data_dir`. Default False.

    State:
        Holds the cache; datasets of all epochs share it. A dataset which is
        not read to its end does not fill it.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of range.
        ValueError: if TFDS does not know `name` or `split`.
        ValueError: if the dataset is not in `data_dir` and `download` is False.
        ValueError: if the files of the dataset are not TFRecords.
        ValueError: if `drop_remainder` would leave no batch.
    """

    def __init__(
        self,
        *,
        name: str,
        split: str = "train",
        batch_size: int,
        data_dir: str | os.PathLike | None = None,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_buffer: int | None = None,
        cache: bool = False,
        map_fn: Callable[[dict[str, Any]], Any] | None = None,
        augment_fn: Callable[[Any, tf.Tensor], Any] | None = None,
        with_ids: bool = False,
        num_parallel_calls: int | None = None,
        prefetch: int | None = None,
        drop_remainder: bool = False,
        download: bool = False,
    ):
        """Checks the arguments and finds or prepares the files."""
        self._batch_size = integer("batch_size", batch_size, 1)
        self._seed = integer("seed", seed, 0)
        if shuffle_buffer is not None:
            integer("shuffle_buffer", shuffle_buffer, 1)
        self._parallel = tf.data.AUTOTUNE
        if num_parallel_calls is not None:
            self._parallel = integer(
                "num_parallel_calls", num_parallel_calls, 1
            )
        self._prefetch = tf.data.AUTOTUNE
        if prefetch is not None:
            self._prefetch = integer("prefetch", prefetch, 0)
        for label, text in (("name", name), ("split", split)):
            if not isinstance(text, str):
                raise TypeError(
                    f"`{label}` must be a string. Received: {label}={text!r}. "
                    "Pass it as TFDS spells it, for instance "
                    "name='mnist', split='train[:80%]'."
                )
        for label, function, takes in (
            ("map_fn", map_fn, "one example"),
            ("augment_fn", augment_fn, "one element and a seed"),
        ):
            if function is not None and not callable(function):
                raise TypeError(
                    f"`{label}` must be callable or None. Received: "
                    f"{label}={function!r}. Pass a function of {takes}."
                )
        self._shuffle = bool(shuffle)
        self._cache = bool(cache)
        self._with_ids = bool(with_ids)
        self._drop_remainder = bool(drop_remainder)
        self._map_fn = map_fn
        self._augment_fn = augment_fn
        self._builder = source.prepared_builder(
            name, data_dir=data_dir, download=download
        )
        self._split = split
        self._split_info = source.split_info(self._builder, split)
        self._shuffle_buffer = shuffle_buffer or self.num_examples
        if self.num_batches == 0:
            raise ValueError(
                "`batch_size` must be at most the number of examples when "
                f"drop_remainder=True. Received: batch_size={batch_size} with "
                f"{self.num_examples} examples in {name!r}, split {split!r}. "
                "Lower batch_size or pass drop_remainder=False."
            )
        self._records = source.records(self._split_info)
        self._base = self._records
        if self._cache:
            self._base = self._decoded(self._records).cache()

    @property
    def info(self) -> Any:
        """The `tfds.core.DatasetInfo`: features, classes, citation, licence."""
        return self._builder.info

    @property
    def batch_size(self) -> int:
        """Examples in a dataset batch, over all workers."""
        return self._batch_size

    @property
    def num_examples(self) -> int:
        """Examples in the split."""
        return self._split_info.num_examples

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, the same for every worker."""
        full, rest = divmod(self.num_examples, self._batch_size)
        return full + (rest > 0 and not self._drop_remainder)

    def epoch(
        self,
        epoch: int,
        *,
        worker: int = 0,
        num_workers: int = 1,
        skip_batches: int = 0,
    ) -> tf.data.Dataset:
        """Makes one worker's dataset of one epoch.

        It is sharded already: give it to
        `strategy.distribute_datasets_from_function`, or to `fit` of a single
        worker. Every call with the same arguments gives the same elements,
        in any process.

        Args:
            epoch: Number of the epoch, at least 0.
            worker: This worker, 0 to `num_workers` - 1. Default 0.
            num_workers: Number of workers, at least 1. Default 1.
            skip_batches: Dataset batches to leave out at the beginning, at
                least 0; those that follow are the same as without. Skipped
                examples are neither mapped nor augmented. Nor are they
                decoded, except into the cache if there is one, which only a
                pass over the whole split fills. Their records are read if
                they have to go through the shuffle buffer. Default 0.

        Returns:
            A `tf.data.Dataset` of `num_batches` batches without those that
            are skipped, its cardinality known. Elements are what `map_fn` and
            `augment_fn` return, with a leading dimension of the worker's rows.

        Raises:
            TypeError: if an argument is not an integer.
            ValueError: if an argument is out of range.
        """
        epoch = integer("epoch", epoch, 0)
        num_workers = integer("num_workers", num_workers, 1)
        if integer("worker", worker, 0) >= num_workers:
            raise ValueError(
                "`worker` must be less than num_workers. Received: "
                f"worker={worker}, num_workers={num_workers}. Workers are "
                "numbered from 0."
            )
        skipped = integer("skip_batches", skip_batches, 0)
        skipped = min(skipped, self.num_batches)
        shuffle_seed, augment_seed = _seeds(self._seed, epoch)
        ordered = self._ordered(shuffle_seed, skipped * self._batch_size)
        batches = self._batches(
            ordered, augment_seed, worker, num_workers, skipped
        )
        batches = batches.apply(
            tf.data.experimental.assert_cardinality(self.num_batches - skipped)
        )
        if self._prefetch:
            batches = batches.prefetch(self._prefetch)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        return batches.with_options(options)

    def checksum(self) -> str:
        """Hashes what is read and in which order, for workers to compare.

        It covers the settings which decide the order (split, batch size, seed,
        shuffling), the names, sizes and ranges of the files, and the first
        examples, decoded. Directories do not matter. It is cheap: the files
        are not read through.

        Returns:
            64 hexadecimal digits, equal on all workers which may train
            together.
        """
        facts = {
            "dataset": self.info.full_name,
            "split": self._split,
            "num_examples": self.num_examples,
            "order": [
                self._batch_size,
                self._shuffle and [self._seed, self._shuffle_buffer],
                self._drop_remainder,
            ],
            "files": [
                [
                    os.path.basename(file.filename),
                    tf.io.gfile.stat(file.filename).length,
                    file.skip,
                    file.take,
                ]
                for file in self._split_info.file_instructions
            ],
        }
        digest = hashlib.sha256(json.dumps(facts).encode())
        for element in self._decoded(self._records.take(_CHECKED_EXAMPLES)):
            for tensor in tf.nest.flatten(element, expand_composites=True):
                digest.update(tf.io.serialize_tensor(tensor).numpy())
        return digest.hexdigest()

    def _ordered(
        self, seeds: tuple[int, int], num_skipped: int
    ) -> tf.data.Dataset:
        """(position, stored example) of an epoch without its first ones."""
        if self._shuffle:
            ordered = _shuffled(self._base, self._shuffle_buffer, seeds)
        elif self._cache:
            ordered = self._base
        else:
            return source.records(self._split_info, num_skipped)
        return ordered.skip(num_skipped) if num_skipped else ordered

    def _decoded(self, records: tf.data.Dataset) -> tf.data.Dataset:
        deserialize = self.info.features.deserialize_example

        def decode(position, record):
            return position, deserialize(record)

        return records.map(
            decode, num_parallel_calls=self._parallel, deterministic=True
        )

    def _mapped(
        self, ordered: tf.data.Dataset, augment_seed: int
    ) -> tf.data.Dataset:
        """From (position, stored example) to what the user's functions make."""
        deserialize = self.info.features.deserialize_example

        def element(position, example):
            if not self._cache:
                example = deserialize(example)
            if self._with_ids:
                example = {**example, ID: position}
            if self._map_fn is not None:
                example = self._map_fn(example)
            if self._augment_fn is not None:
                seed = tf.stack([augment_seed, position])
                example = self._augment_fn(example, seed)
            return example

        return ordered.map(
            element, num_parallel_calls=self._parallel, deterministic=True
        )

    def _batches(
        self,
        ordered: tf.data.Dataset,
        augment_seed: int,
        worker: int,
        num_workers: int,
        skipped: int,
    ) -> tf.data.Dataset:
        """This worker's rows of every batch left, empty ones included."""
        num_full, rest = divmod(self.num_examples, self._batch_size)
        num_full -= skipped
        if self._drop_remainder or num_full < 0:
            rest = 0
        full = share(self._batch_size, worker, num_workers)
        last = share(rest, worker, num_workers)
        rows = full[1] - full[0]
        if rows == 0:
            return self._empty_batch().repeat(self.num_batches - skipped)
        if num_workers > 1:
            ordered = self._selected(ordered, num_full, full, last)
        batches = self._mapped(ordered, augment_seed).batch(
            rows, drop_remainder=self._drop_remainder
        )
        if rest and last[0] == last[1]:
            batches = batches.concatenate(self._empty_batch())
        return batches

    def _selected(
        self,
        ordered: tf.data.Dataset,
        num_full: int,
        full: tuple[int, int],
        last: tuple[int, int],
    ) -> tf.data.Dataset:
        """Keeps rows `full` of the full batches and rows `last` of the last."""

        def mine(index, _):
            batch, row = index // self._batch_size, index % self._batch_size
            in_full = (row >= full[0]) & (row < full[1])
            in_last = (row >= last[0]) & (row < last[1])
            return tf.where(batch < num_full, in_full, in_last)

        def unnumbered(_, element):
            return element

        return ordered.enumerate().filter(mine).map(unnumbered)

    def _empty_batch(self) -> tf.data.Dataset:
        """One batch of 0 rows, its other dimensions those of a real example.

        The number of rows comes from a dataset, so that it is not known
        statically and the element has the same signature as full batches.
        """
        first = self._records.take(1)
        if self._cache:
            first = self._decoded(first)
        one = self._mapped(first, augment_seed=0).batch(1)
        rows = tf.data.Dataset.from_tensors(np.int64(0))

        def cut(batch, rows):
            return tf.nest.map_structure(lambda tensor: tensor[:rows], batch)

        return tf.data.Dataset.zip((one, rows)).map(cut).cache()


def _seeds(seed: int, epoch: int) -> tuple[tuple[int, int], int]:
    """Draws the seeds of an epoch: two for the order, one for augmentation."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    first, second, third = sequence.generate_state(3, np.uint64) >> np.uint64(1)
    return (int(first), int(second)), int(third)


def _shuffled(
    dataset: tf.data.Dataset, buffer_size: int, seeds: tuple[int, int]
) -> tf.data.Dataset:
    """`dataset.shuffle`, with an order which depends on `seeds` alone.

    `Dataset.shuffle` mixes the global seed of TensorFlow into its own, and
    workers whose global seeds differ would see some examples twice and others
    never.

    Source: tensorflow/python/data/ops/shuffle_op.py.
    """
    types, shapes = [], []
    for spec in tf.nest.flatten(dataset.element_spec):
        dense = isinstance(spec, tf.TensorSpec)
        types.append(spec.dtype if dense else tf.variant)
        shapes.append(spec.shape if dense else tf.TensorShape(None))
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=seeds[0],
        seed2=seeds[1],
        output_types=types,
        output_shapes=shapes,
        reshuffle_each_iteration=False,
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)
