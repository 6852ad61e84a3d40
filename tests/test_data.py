"""Tests of tfaccum.data and of the bundled datasets.

Positions are compared with plain counting and Python slices, digits with the
file itself, read here with the csv module.
"""

import csv
import gc
import gzip
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tfaccum import data
from tfaccum.datasets import digits, source

ROOT = pathlib.Path(__file__).resolve().parents[1]
CSV = ROOT / "tfaccum" / "datasets" / "digits.csv.gz"
# Published with the data: archive.ics.uci.edu/dataset/80, testing set.
CLASS_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
FIRST_IMAGE = [
    [0, 0, 5, 13, 9, 1, 0, 0],
    [0, 0, 13, 15, 10, 15, 5, 0],
    [0, 3, 15, 2, 0, 11, 8, 0],
    [0, 4, 12, 0, 0, 8, 8, 0],
    [0, 5, 8, 0, 0, 9, 8, 0],
    [0, 4, 11, 0, 1, 12, 7, 0],
    [0, 2, 14, 5, 10, 12, 0, 0],
    [0, 0, 6, 13, 10, 0, 0, 0],
]


class RaggedNumbers(tfds.core.GeneratorBasedBuilder):
    """Ten examples: number n, and n % 4 words."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "number": np.int64,
                    "words": tfds.features.Sequence(
                        tfds.features.Sequence(tfds.features.Text())
                    ),
                }
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for n in range(10):
            words = [["w"] * (i + 1) for i in range(n % 4)]
            yield n, {"number": n, "words": words}


@pytest.fixture(autouse=True)
def fresh_keras():
    """Replaces the fixture of conftest.py: nothing here uses Keras."""


def position(example):
    return example["tfaccum_id"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def ragged_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("ragged")
    RaggedNumbers(data_dir=str(place)).download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=3)
    )
    return place


@pytest.fixture(scope="module")
def rows():
    """The file's rows, as lists of 65 integers."""
    with gzip.open(CSV, "rt") as file:
        return [[int(cell) for cell in line] for line in csv.reader(file)]


@pytest.fixture
def make(data_dir):
    """Makes a pipeline of the first `n` training digits, yielding positions."""

    def make(n=17, **kwargs):
        kwargs.setdefault("map_fn", position)
        kwargs.setdefault("with_ids", True)
        return data.Pipeline(
            name="digits", split=f"train[:{n}]", data_dir=data_dir, **kwargs
        )

    return make


def batches(pipeline, epoch=0, **kwargs):
    """The batches of one worker's epoch, as lists."""
    dataset = pipeline.epoch(epoch, **kwargs)
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


def flat(lists):
    return [item for part in lists for item in part]


# The order, and which worker sees what.


@pytest.mark.parametrize(
    ("num_rows", "num_workers", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (9, 2, [(0, 5), (5, 9)]),
        (11, 3, [(0, 4), (4, 8), (8, 11)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_share_by_hand(num_rows, num_workers, expected):
    found = [data.share(num_rows, w, num_workers) for w in range(num_workers)]
    assert found == expected


def test_unshuffled_batches_are_slices(make):
    pipeline = make(n=17, batch_size=5, shuffle=False)
    expected = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    expected += [[10, 11, 12, 13, 14], [15, 16]]
    assert batches(pipeline) == expected
    assert batches(pipeline, worker=0, num_workers=2) == [
        [0, 1, 2],
        [5, 6, 7],
        [10, 11, 12],
        [15],
    ]
    assert batches(pipeline, worker=1, num_workers=2) == [
        [3, 4],
        [8, 9],
        [13, 14],
        [16],
    ]
    assert pipeline.num_examples == 17
    assert pipeline.num_batches == 4
    assert pipeline.batch_size == 5


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [2, 7, 17, 40])
def test_workers_share_the_batches_of_one(make, num_workers, batch_size):
    pipeline = make(n=17, batch_size=batch_size, seed=3)
    whole = batches(pipeline, 2)
    sizes = [batch_size] * (17 // batch_size)
    sizes += [17 % batch_size] if 17 % batch_size else []
    assert [len(batch) for batch in whole] == sizes
    assert sorted(flat(whole)) == list(range(17))

    parts = [
        batches(pipeline, 2, worker=w, num_workers=num_workers)
        for w in range(num_workers)
    ]
    for worker in parts:
        assert len(worker) == len(whole) == pipeline.num_batches
    for b, batch in enumerate(whole):
        shares = [worker[b] for worker in parts]
        assert flat(shares) == batch
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) > 0 or len(batch) < num_workers


@pytest.mark.parametrize("cache", [False, True])
def test_J1_one_file_two_workers(data_dir, cache):
    pipeline = data.Pipeline(
        name="digits",
        split="train",
        data_dir=data_dir,
        batch_size=64,
        cache=cache,
        map_fn=position,
        with_ids=True,
    )
    files = list(data_dir.glob("digits/*/digits-train.tfrecord-*"))
    assert len(files) == 1
    first, second = (
        flat(batches(pipeline, worker=w, num_workers=2)) for w in range(2)
    )
    # 22 full batches of 64 and one of 30: 22 * 32 + 15 for each worker.
    assert len(first) == len(second) == 719
    assert set(first) & set(second) == set()
    assert set(first) | set(second) == set(range(1438))


def test_J1_mnist_is_one_file():
    place = os.environ.get("TFACCUM_TEST_DATA")
    if not place:
        pytest.skip("TFACCUM_TEST_DATA names no TFDS data_dir with mnist")
    pipeline = data.Pipeline(
        name="mnist",
        split="test",
        data_dir=place,
        batch_size=32,
        map_fn=lambda e: (e["tfaccum_id"], e["label"]),
        with_ids=True,
    )
    assert pipeline.num_examples == 10_000
    assert pipeline.num_batches == 313
    seen, labels = [], []
    for worker in range(2):
        dataset = pipeline.epoch(0, worker=worker, num_workers=2)
        for ids, label in dataset.as_numpy_iterator():
            seen.extend(ids.tolist())
            labels.extend(label.tolist())
        assert len(seen) == 5000 * (worker + 1)
    assert sorted(seen) == list(range(10_000))
    # The published numbers of 0s to 9s among the 10,000 test images.
    assert np.bincount(labels).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip


def test_B8_all_examples_in_every_epoch(make):
    pipeline = make(n=50, batch_size=8, seed=1)
    for epoch in range(3):
        got = batches(pipeline, epoch)
        assert len(got) == 7
        assert len(got[-1]) == 2
        assert sorted(flat(got)) == list(range(50))


def test_J5_epochs_and_seeds_differ(make):
    orders = {
        (seed, epoch): tuple(flat(batches(pipeline, epoch)))
        for seed in range(2)
        for pipeline in [make(n=50, batch_size=50, seed=seed)]
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 6
    assert tuple(range(50)) not in orders.values()
    again = make(n=50, batch_size=50, seed=1)
    assert tuple(flat(batches(again, 2))) == orders[1, 2]


def test_J5_order_ignores_global_seed_and_batching(make):
    tf.random.set_seed(1)
    one = flat(batches(make(n=50, batch_size=8), 4))
    tf.random.set_seed(2)
    two = flat(batches(make(n=50, batch_size=5, cache=True), 4))
    assert one == two


def test_no_place_is_favoured(make):
    """Each example comes first about equally often: chi squared, 9 degrees."""
    pipeline = make(n=10, batch_size=10)
    firsts = [batches(pipeline, epoch)[0][0] for epoch in range(40)]
    counts = np.bincount(firsts, minlength=10)
    assert np.sum((counts - 4) ** 2 / 4) < 27.9  # 0.999 of the distribution


def test_shuffle_buffer_bounds_the_look_ahead(make):
    pipeline = make(n=50, batch_size=50, shuffle_buffer=5)
    order = flat(batches(pipeline))
    assert sorted(order) == list(range(50))
    assert order != list(range(50))
    assert all(p <= place + 4 for place, p in enumerate(order))


def test_J7_ids_of_a_window_are_distinct(make):
    pipeline = make(n=48, batch_size=6)
    got = batches(pipeline)
    for start in range(0, 8, 4):
        window = flat(got[start : start + 4])
        assert len(window) == len(set(window)) == 24


def test_drop_remainder(make):
    pipeline = make(n=17, batch_size=5, drop_remainder=True)
    assert pipeline.num_batches == 3
    whole = batches(pipeline)
    assert [len(batch) for batch in whole] == [5, 5, 5]
    parts = [batches(pipeline, worker=w, num_workers=2) for w in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    spec = pipeline.epoch(0, worker=1, num_workers=2).element_spec
    assert spec.shape == [2]


def test_rest_of_an_epoch(make):
    pipeline = make(n=17, batch_size=5)
    rest = batches(pipeline, 1, skip_batches=2)
    assert rest == batches(pipeline, 1)[2:]
    assert [len(batch) for batch in rest] == [5, 2]


def test_empty_share_has_the_shape_of_an_example(data_dir):
    def unknown_shape(example):
        image = tf.numpy_function(np.negative, [example["image"]], tf.uint8)
        return {"image": image}, example["label"]

    for map_fn in (None, unknown_shape):
        for cache in (False, True):
            pipeline = data.Pipeline(
                name="digits",
                split="train[:3]",
                data_dir=data_dir,
                batch_size=2,
                cache=cache,
                map_fn=map_fn,
            )
            for worker, rows in ((0, [1, 1]), (1, [1, 0]), (2, [0, 0])):
                dataset = pipeline.epoch(0, worker=worker, num_workers=3)
                shapes = [
                    [t.shape for t in tf.nest.flatten(element)]
                    for element in dataset
                ]
                assert shapes == [[(n, 8, 8, 1), (n,)] for n in rows]
                labels = tf.nest.flatten(dataset.element_spec)[1]
                assert labels.shape.as_list() == [None]


def test_cardinality_and_options(make):
    pipeline = make(n=17, batch_size=5)
    for worker in range(6):
        dataset = pipeline.epoch(0, worker=worker, num_workers=6)
        assert dataset.cardinality() == 4
        assert dataset.element_spec.shape.as_list() == [None]
    options = dataset.options()
    assert options.deterministic
    assert (
        options.experimental_distribute.auto_shard_policy
        == tf.data.experimental.AutoShardPolicy.OFF
    )


def test_distribute_datasets_from_function(make):
    pipeline = make(n=17, batch_size=5)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")

    def dataset(context):
        return pipeline.epoch(
            0,
            worker=context.input_pipeline_id,
            num_workers=context.num_input_pipelines,
        )

    distributed = strategy.distribute_datasets_from_function(dataset)
    assert [b.numpy().tolist() for b in distributed] == batches(pipeline)


# The cache, maps and augmentation.


def test_cache_is_shared_by_all_epochs(data_dir, tmp_path):
    """With the file gone, what was cached can be read and the rest cannot."""
    shutil.copytree(data_dir / "digits", tmp_path / "digits")
    kept, not_kept = (
        data.Pipeline(
            name="digits",
            split="test",
            data_dir=tmp_path,
            batch_size=100,
            cache=cache,
            map_fn=lambda e: e["label"],
        )
        for cache in (True, False)
    )
    orders = [batches(kept, 0), batches(not_kept, 0)]
    assert orders[0] == orders[1]
    (file,) = tmp_path.glob("digits/*/digits-test.tfrecord-*")
    file.unlink()
    assert sorted(flat(batches(kept, 1))) == sorted(flat(orders[0]))
    assert len(flat(batches(kept, 2, worker=1, num_workers=2))) == 179
    with pytest.raises(tf.errors.NotFoundError):
        batches(not_kept, 1)


def test_map_and_augment_depend_on_seed_epoch_and_position_only(make):
    def map_fn(example):
        if example["label"] > 4:  # AutoGraph reaches the user's function
            return example["tfaccum_id"], tf.constant(100.0)
        return example["tfaccum_id"], tf.constant(200.0)

    def augment_fn(element, seed):
        number, value = element
        return number, value + tf.random.stateless_uniform([], seed)

    def values(epoch, num_workers=1, **kwargs):
        kwargs = {"batch_size": 4, "seed": 7} | kwargs
        pipeline = make(n=17, map_fn=map_fn, augment_fn=augment_fn, **kwargs)
        found = {}
        for worker in range(num_workers):
            dataset = pipeline.epoch(
                epoch, worker=worker, num_workers=num_workers
            )
            for ids, value in dataset.as_numpy_iterator():
                found.update(zip(ids.tolist(), value.tolist(), strict=True))
        return found

    tf.random.set_seed(1)
    first = values(0)
    assert sorted(first) == list(range(17))
    noise = {value % 100 for value in first.values()}
    assert len(noise) == 17
    assert all(0 <= value < 1 for value in noise)
    # The first digits of the file are 0, 1, ..., 9.
    assert [int(first[p]) for p in range(4)] == [200] * 4
    tf.random.set_seed(2)
    assert values(0, num_parallel_calls=1) == first
    assert values(0, 3, num_parallel_calls=8, cache=True) == first
    assert values(0, batch_size=17, shuffle=False, prefetch=0) == first
    for other in (values(1), values(0, seed=8)):
        assert all(other[p] != first[p] for p in first)


def test_parallel_map_keeps_the_order(make):
    def slow_for_some(example):
        number = example["tfaccum_id"]
        turns = tf.where(number % 4 == 0, 5_000, 1)
        wait = tf.while_loop(lambda i: i < turns, lambda i: [i + 1], [0])
        return number + 0 * tf.cast(wait[0], tf.int64)

    one = make(n=32, batch_size=8, map_fn=slow_for_some, num_parallel_calls=1)
    many = make(n=32, batch_size=8, map_fn=slow_for_some, num_parallel_calls=8)
    assert batches(one) == batches(many)


def test_dataset_outlives_its_pipeline(make):
    def through_python(example):
        number = tf.numpy_function(abs, [example["tfaccum_id"]], tf.int64)
        return tf.ensure_shape(number, [])

    dataset = make(batch_size=17, map_fn=through_python, cache=True).epoch(0)
    gc.collect()
    assert sorted(next(iter(dataset)).numpy()) == list(range(17))


def test_without_ids_there_is_no_id(make):
    spec = make(batch_size=2, map_fn=None, with_ids=False).epoch(0).element_spec
    assert sorted(spec) == ["image", "label"]
    spec = make(batch_size=2, map_fn=None).epoch(0).element_spec
    assert sorted(spec) == ["image", "label", "tfaccum_id"]
    assert spec["tfaccum_id"].dtype == tf.int64


@pytest.mark.parametrize("cache", [False, True])
def test_several_files_and_ragged_features(ragged_dir, cache):
    assert len(list(ragged_dir.glob("*/*/*.tfrecord-*-of-00003"))) == 3
    pipeline = data.Pipeline(
        name="ragged_numbers",
        data_dir=ragged_dir,
        batch_size=4,
        cache=cache,
        with_ids=True,
        map_fn=lambda e: (e["tfaccum_id"], e["number"], e["words"]),
    )
    seen = []
    for worker in range(3):
        dataset = pipeline.epoch(5, worker=worker, num_workers=3)
        for ids, numbers, words in dataset:
            assert numbers.numpy().tolist() == ids.numpy().tolist()
            expected = [
                [[b"w"] * (i + 1) for i in range(n % 4)]
                for n in numbers.numpy()
            ]
            assert words.to_list() == expected
            seen.extend(ids.numpy().tolist())
    assert sorted(seen) == list(range(10))


def test_a_slice_over_several_files(ragged_dir):
    pipeline = data.Pipeline(
        name="ragged_numbers",
        split="train[7:]+train[2:5]",
        data_dir=ragged_dir,
        batch_size=6,
        shuffle=False,
        with_ids=True,
        map_fn=lambda e: tf.stack([e["tfaccum_id"], e["number"]]),
    )
    expected = [[0, 7], [1, 8], [2, 9], [3, 2], [4, 3], [5, 4]]
    assert batches(pipeline) == [expected]


# The checksum.


def test_checksum_says_what_is_read(make, data_dir, tmp_path):
    base = make(n=17, batch_size=5).checksum()
    assert len(base) == 64
    assert int(base, 16) >= 0
    same = make(
        n=17, batch_size=5, cache=True, num_parallel_calls=1, prefetch=0
    )
    assert same.checksum() == base
    others = [
        make(n=17, batch_size=5, seed=1),
        make(n=17, batch_size=4),
        make(n=16, batch_size=5),
        make(n=17, batch_size=5, shuffle=False),
        make(n=17, batch_size=5, shuffle_buffer=3),
        make(n=17, batch_size=5, drop_remainder=True),
    ]
    assert len({base, *(other.checksum() for other in others)}) == 7

    # The same examples in another directory; then one pixel changed.
    shutil.copytree(data_dir / "digits", tmp_path / "digits")
    (file,) = tmp_path.glob("digits/*/digits-train.tfrecord-*")

    def moved():
        return data.Pipeline(
            name="digits", split="train[:17]", data_dir=tmp_path, batch_size=5
        ).checksum()

    assert moved() == base
    records = list(tf.data.TFRecordDataset(str(file)).as_numpy_iterator())
    example = tf.train.Example.FromString(records[1])
    example.features.feature["image"].int64_list.value[0] += 1
    records[1] = example.SerializeToString()
    with tf.io.TFRecordWriter(str(file)) as writer:
        for record in records:
            writer.write(record)
    assert moved() != base


# Two processes.

PROGRAM = """
import json, pathlib, random, sys, time
import tensorflow as tf
import tensorflow_datasets as tfds
import tfaccum.datasets.digits
from tfaccum import data

me, place = sys.argv[1], pathlib.Path(sys.argv[2])
random.seed(0)  # TFDS names its temporary directory with this generator
tf.random.set_seed(int(me))
(place / f"ready{me}").touch()
deadline = time.time() + 60
while len(list(place.glob("ready*"))) < 2 and time.time() < deadline:
    time.sleep(0.001)
pipeline = data.Pipeline(
    name="digits", split="train", data_dir=place / "data", batch_size=100,
    seed=5, with_ids=True, map_fn=lambda e: e["tfaccum_id"])
orders = [
    [p for b in pipeline.epoch(e).as_numpy_iterator() for p in b.tolist()]
    for e in range(2)]
print(json.dumps({"orders": orders, "checksum": pipeline.checksum(),
                  "drawn": random.random()}))
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Two processes which prepare and read the digits at the same moment."""
    place = tmp_path_factory.mktemp("processes")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), str(place)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        finished = [(p, *p.communicate(timeout=120)) for p in started]
    finally:
        for process in started:
            process.kill()
    for process, _, errors in finished:
        assert process.returncode == 0, errors
    answers = [json.loads(out.splitlines()[-1]) for _, out, _ in finished]
    return place / "data", answers


def test_prepared_at_the_same_time_by_two_processes(two_processes):
    place, answers = two_processes
    assert [path.name for path in (place / "digits").iterdir()] == ["1.0.0"]
    assert answers[0]["checksum"] == answers[1]["checksum"]
    for answer in answers:
        assert sorted(answer["orders"][0]) == list(range(1438))
        # The user's generator goes on as if nothing had been drawn from it.
        assert answer["drawn"] == random.Random(0).random()


def test_prepared_by_another_process_in_between(tmp_path, monkeypatch):
    """After this process has made its builder, and before it looks."""
    made, original = [], tfds.builder

    def builder(name, data_dir):
        made.append(original(name, data_dir=data_dir))
        if len(made) == 1:
            original(name, data_dir=data_dir).download_and_prepare()
        return made[-1]

    monkeypatch.setattr(tfds, "builder", builder)
    found = source.prepared_builder("digits", data_dir=tmp_path, download=False)
    assert source.split_info(found, "train").num_examples == 1438


def test_J5_same_order_in_two_processes(two_processes, data_dir):
    _, (first, second) = two_processes
    assert first["orders"] == second["orders"]
    assert first["orders"][0] != first["orders"][1]
    here = data.Pipeline(
        name="digits",
        data_dir=data_dir,
        batch_size=64,
        seed=5,
        cache=True,
        with_ids=True,
        map_fn=position,
    )
    for epoch in range(2):
        assert flat(batches(here, epoch)) == first["orders"][epoch]


# The digits.


def test_digits_file():
    packed = CSV.read_bytes()
    assert len(packed) < 200_000
    assert hashlib.md5(packed).hexdigest() == "9b335364a7bfd63947c7480a5bd51f2d"
    sha256 = hashlib.sha256(packed).hexdigest()
    assert sha256 == digits.SHA256
    attribution = CSV.with_name("DIGITS.md").read_text()
    assert sha256 in attribution
    assert "CC BY 4.0" in attribution


def test_digits_values(rows):
    images, labels = digits.load()
    assert images.shape == (1797, 8, 8)
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
    assert images[0].tolist() == FIRST_IMAGE
    assert np.bincount(labels).tolist() == CLASS_COUNTS
    assert [r[64] for r in rows] == labels.tolist()
    assert [r[:64] for r in rows] == images.reshape(-1, 64).tolist()


def test_digits_refuses_another_file(monkeypatch, tmp_path):
    other = tmp_path / "digits.csv.gz"
    other.write_bytes(gzip.compress(b"0,0\n"))
    monkeypatch.setattr(digits, "FILE", other)
    with pytest.raises(ValueError, match="must have the sha256 09f66e.*again"):
        digits.load()


def test_digits_splits(rows, data_dir):
    held_out, count = set(), 0
    for label in range(10):
        for row, values in enumerate(rows):
            if values[64] == label:
                count += 1
                if count % 5 == 0:
                    held_out.add(row)
    assert len(held_out) == 359
    expected = {
        "test": [r for i, r in enumerate(rows) if i in held_out],
        "train": [r for i, r in enumerate(rows) if i not in held_out],
    }
    counts = np.zeros(10, int)
    for split, wanted in expected.items():
        pipeline = data.Pipeline(
            name="digits",
            split=split,
            data_dir=data_dir,
            batch_size=2000,
            shuffle=False,
            map_fn=lambda e: (e["image"], e["label"]),
        )
        images, labels = next(pipeline.epoch(0).as_numpy_iterator())
        assert images.shape == (len(wanted), 8, 8, 1)
        assert images.reshape(-1, 64).tolist() == [r[:64] for r in wanted]
        assert labels.tolist() == [r[64] for r in wanted]
        counts += np.bincount(labels)
        each = len(wanted) / 10
        assert np.abs(np.bincount(labels) - each).max() < each * 0.05
    assert counts.tolist() == CLASS_COUNTS


def test_digits_through_tfds(data_dir):
    dataset, info = tfds.load(
        "digits", split="test", data_dir=data_dir, with_info=True
    )
    assert len(dataset) == info.splits["test"].num_examples == 359
    assert info.features["label"].num_classes == 10
    assert "CC BY 4.0" in info.redistribution_info.license


# Errors.


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        (
            {"batch_size": 0},
            ValueError,
            "`batch_size` must be at least 1. Received: batch_size=0. "
            "Pass an integer of at least 1.",
        ),
        (
            {"batch_size": 2.5},
            TypeError,
            "`batch_size` must be an integer. Received: batch_size=2.5. "
            "Pass an integer of at least 1.",
        ),
        (
            {"seed": -1},
            ValueError,
            "`seed` must be at least 0. Received: seed=-1. "
            "Pass an integer of at least 0.",
        ),
        (
            {"seed": True},
            TypeError,
            "`seed` must be an integer. Received: seed=True. "
            "Pass an integer of at least 0.",
        ),
        (
            {"shuffle_buffer": 0},
            ValueError,
            "`shuffle_buffer` must be at least 1. Received: shuffle_buffer=0. "
            "Pass an integer of at least 1.",
        ),
        (
            {"num_parallel_calls": "all"},
            TypeError,
            "`num_parallel_calls` must be an integer. Received: "
            "num_parallel_calls='all'. Pass an integer of at least 1.",
        ),
        (
            {"prefetch": -2},
            ValueError,
            "`prefetch` must be at least 0. Received: prefetch=-2. "
            "Pass an integer of at least 0.",
        ),
        (
            {"name": 3},
            TypeError,
            "`name` must be a string. Received: name=3. Pass it as TFDS spells "
            "it, for instance name='mnist', split='train[:80%]'.",
        ),
        (
            {"split": ["train"]},
            TypeError,
            "`split` must be a string. Received: split=['train']. Pass it as "
            "TFDS spells it, for instance name='mnist', split='train[:80%]'.",
        ),
        (
            {"map_fn": "x"},
            TypeError,
            "`map_fn` must be callable or None. Received: map_fn='x'. "
            "Pass a function of one example.",
        ),
        (
            {"augment_fn": 1},
            TypeError,
            "`augment_fn` must be callable or None. Received: augment_fn=1. "
            "Pass a function of one element and a seed.",
        ),
        (
            {"name": "no_such_dataset"},
            ValueError,
            "`name` must be a dataset that TFDS knows, as "
            "'name[/config][:version]'. Received: name='no_such_dataset' "
            "(Dataset no_such_dataset not found). See tfds.list_builders() "
            "for the names.",
        ),
        (
            {"split": "valid"},
            ValueError,
            "`split` must be a split of digits/1.0.0 or a slice of one. "
            "Received: split='valid' (Unknown split 'valid'. Should be one of "
            "['test', 'train']). digits/1.0.0 has the splits "
            "['test', 'train']; a slice is 'train[:80%]'.",
        ),
        (
            {"split": "train[:0]"},
            ValueError,
            "`split` must be a split of digits/1.0.0 or a slice of one. "
            "Received: split='train[:0]' (it holds no example). digits/1.0.0 "
            "has the splits ['test', 'train']; a slice is 'train[:80%]'.",
        ),
        (
            {"split": "train[:3]", "batch_size": 4, "drop_remainder": True},
            ValueError,
            "`batch_size` must be at most the number of examples when "
            "drop_remainder=True. Received: batch_size=4 with 3 examples in "
            "'digits', split 'train[:3]'. Lower batch_size or pass "
            "drop_remainder=False.",
        ),
    ],
)
def test_bad_arguments(data_dir, kwargs, error, text):
    kwargs = {"name": "digits", "data_dir": data_dir, "batch_size": 4} | kwargs
    with pytest.raises(error) as caught:
        data.Pipeline(**kwargs)
    # TFDS lists the splits in no fixed order.
    found = str(caught.value).replace("['train', 'test']", "['test', 'train']")
    assert found == text


def test_missing_dataset_is_not_fetched(tmp_path):
    with pytest.raises(ValueError) as caught:
        data.Pipeline(name="mnist", data_dir=tmp_path, batch_size=4)
    assert str(caught.value) == (
        f"`data_dir` must hold the prepared dataset 'mnist'. Received: "
        f"data_dir={str(tmp_path)!r}, which lacks {tmp_path}/mnist/3.0.1. Pass "
        "download=True to fetch it, or the directory that has it."
    )
    assert list(tmp_path.iterdir()) == []


def test_other_file_formats_are_refused(ragged_dir):
    builder = tfds.builder("ragged_numbers", data_dir=ragged_dir)
    builder.info.set_file_format(
        "riegeli", override=True, override_if_initialized=True
    )
    with pytest.raises(ValueError) as caught:
        source.split_info(builder, "train")
    assert str(caught.value) == (
        "`name` must be a dataset stored as TFRecords. Received: "
        "name='ragged_numbers/1.0.0', stored as 'riegeli'. Prepare it again "
        "with file_format='tfrecord'."
    )


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        (
            {"epoch": -1},
            ValueError,
            "`epoch` must be at least 0. Received: epoch=-1. "
            "Pass an integer of at least 0.",
        ),
        (
            {"epoch": 0, "num_workers": 0},
            ValueError,
            "`num_workers` must be at least 1. Received: num_workers=0. "
            "Pass an integer of at least 1.",
        ),
        (
            {"epoch": 0, "worker": 2, "num_workers": 2},
            ValueError,
            "`worker` must be less than num_workers. Received: worker=2, "
            "num_workers=2. Workers are numbered from 0.",
        ),
        (
            {"epoch": 0, "worker": None},
            TypeError,
            "`worker` must be an integer. Received: worker=None. "
            "Pass an integer of at least 0.",
        ),
    ],
)
def test_bad_epoch_arguments(make, kwargs, error, text):
    with pytest.raises(error) as caught:
        make(batch_size=4).epoch(**kwargs)
    assert str(caught.value) == text


def test_nothing_is_positional():
    with pytest.raises(TypeError, match="positional"):
        data.Pipeline("digits", "train", 4)
