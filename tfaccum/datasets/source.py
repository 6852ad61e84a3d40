"""From a TFDS name and split to the records on disk."""

import os
import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfaccum.datasets import register


def prepared_builder(
    name: str, *, data_dir: str | os.PathLike | None, download: bool
) -> Any:
    """Finds a dataset by name and sees to it that its files exist.

    Several processes may ask for the same dataset at once: TFDS writes to a
    directory of its own and renames it, and a process that finds that another
    was faster reads what the other wrote, with a new builder: one that was
    made before then knows of no splits.

    Args:
        name: A TFDS name, for instance `"mnist"` or `"glue/cola:2.0.0"`.
        data_dir: The directory in which TFDS keeps datasets. None: the
            default of TFDS.
        download: Whether a dataset that is missing may be fetched. Those in
            `tfaccum.datasets.BUNDLED` are prepared in any case.

    Returns:
        A `tfds.core.DatasetBuilder`, prepared.

    Raises:
        ValueError: if TFDS does not know `name`.
        ValueError: if the dataset is not in `data_dir` and may not be fetched.
    """
    # TFDS takes its time, and `import tfaccum` should not.
    import tensorflow_datasets as tfds

    bundled = register(name)
    place = None if data_dir is None else os.path.expanduser(data_dir)
    try:
        builder = tfds.builder(name, data_dir=place)
    except (ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            "`name` must be a dataset that TFDS knows, as "
            f"'name[/config][:version]'. Received: name={name!r} ({reason}). "
            "See tfds.list_builders() for the names."
        ) from error
    if builder.is_prepared():
        return tfds.builder(name, data_dir=place)
    if not (bundled or download):
        raise ValueError(
            f"`data_dir` must hold the prepared dataset {name!r}. Received: "
            f"data_dir={place!r}, which lacks {builder.data_dir}. Pass "
            "download=True to fetch it, or the directory that has it."
        )
    # TFDS names its temporary directory with `random`, and workers which were
    # given the same seed would write to the same one.
    state = random.getstate()
    random.seed()
    try:
        builder.download_and_prepare()
    except OSError:
        if not tfds.builder(name, data_dir=place).is_prepared():
            raise
    finally:
        random.setstate(state)
    return tfds.builder(name, data_dir=place)


def split_info(builder: Any, split: str) -> Any:
    """Finds the files and ranges behind a split.

    Args:
        builder: A prepared `tfds.core.DatasetBuilder`.
        split: A split or a slice of one, for instance `"train[:80%]"`.

    Returns:
        A `tfds.core.SplitInfo` of at least one example.

    Raises:
        ValueError: if there is no such split, or no example in it.
        ValueError: if the files are not TFRecords.
    """
    name = builder.info.full_name
    try:
        info = builder.info.splits[split]
        reason = "it holds no example" if info.num_examples == 0 else None
    except (KeyError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    if reason is not None:
        raise ValueError(
            f"`split` must be a split of {name} or a slice of one. Received: "
            f"split={split!r} ({reason}). {name} has the splits "
            f"{sorted(builder.info.splits)}; a slice is 'train[:80%]'."
        )
    file_format = builder.info.file_format.value
    if file_format != "tfrecord":
        raise ValueError(
            f"`name` must be a dataset stored as TFRecords. Received: "
            f"name={name!r}, stored as {file_format!r}. Prepare it again with "
            "file_format='tfrecord'."
        )
    return info


def records(info: Any, first: int = 0) -> tf.data.Dataset:
    """Reads a split as it is stored, in its order.

    Args:
        info: What `split_info` returns.
        first: The position to begin with, 0 to the number of examples. Files
            before it are not opened. Default 0.

    Returns:
        A dataset of (position in the split, int64 []; `tf.train.Example`,
        serialized, string []).
    """
    files = info.file_instructions
    skip = np.array([file.skip for file in files], np.int64)
    take = np.array([file.take for file in files], np.int64)
    left_out = np.clip(first - (np.cumsum(take) - take), 0, take)
    slices = (
        np.array([file.filename for file in files], np.str_),
        skip + left_out,
        take - left_out,
    )
    slices = tuple(column[left_out < take] for column in slices)

    def read(filename, skip, take):
        return tf.data.TFRecordDataset(filename).skip(skip).take(take)

    dataset = tf.data.Dataset.from_tensor_slices(slices).flat_map(read)
    return dataset.enumerate(start=first)
