"""An epoch begins at any batch, as if those before it had been read.

What is left of an epoch is compared with slices of the whole epoch, of lists
written out, or of an order computed here.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import toy
from tfaccum import arrays, data, feeding
from tfaccum.feeding import Source
from tfaccum.micro_batches import NO_MORE_DATA, num_rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
SEED = 20240607  # What conftest.py sets for each test.


def column(values):
    return np.array(values, np.float32)[:, np.newaxis]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def pipeline(data_dir):
    """Makes a pipeline of 17 digits, which notes whom it maps."""

    def make(n=17, **arguments):
        mapped = []

        def note(position):
            mapped.append(int(position))
            return position

        def map_fn(example):
            position = tf.py_function(note, [example[data.ID]], tf.int64)
            return tf.ensure_shape(position, []), example["label"]

        def augment_fn(element, seed):
            return (*element, tf.random.stateless_uniform([], seed))

        made = data.Pipeline(
            name="digits",
            split=f"train[:{n}]",
            data_dir=data_dir,
            map_fn=map_fn,
            augment_fn=augment_fn,
            with_ids=True,
            **{"batch_size": 5, "seed": 3} | arguments,
        )
        made.mapped = mapped
        return made

    return make


def as_lists(dataset):
    return [
        [tensor.tolist() for tensor in tf.nest.flatten(batch)]
        for batch in dataset.as_numpy_iterator()
    ]


# --- Pipelines -------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"shuffle": False},
        {"cache": True},
        {"cache": True, "shuffle": False},
        {"shuffle_buffer": 4},
        {"drop_remainder": True},
        {"drop_remainder": True, "shuffle": False},
    ],
    ids=str,
)
def test_rest_of_a_pipelines_epoch(pipeline, how, num_workers):
    """17 = 5 + 5 + 5 + 2 examples; each call of `epoch` on its own."""
    whole, part = pipeline(**how), pipeline(**how)
    for worker in range(num_workers):
        who = {"worker": worker, "num_workers": num_workers}
        expected = as_lists(whole.epoch(2, **who))
        assert len(expected) == whole.num_batches
        spec = whole.epoch(2, **who).element_spec
        for skipped in (1, 3, 5):
            part.mapped.clear()
            rest = part.epoch(2, **who, skip_batches=skipped)
            assert rest.cardinality() == max(len(expected) - skipped, 0)
            assert rest.element_spec == spec
            assert as_lists(rest) == expected[skipped:]
            # No other example was mapped, but those that are dropped.
            ids = [i for batch in expected[skipped:] for i in batch[0]]
            everywhere = {i for batch in expected for i in batch[0]}
            if "drop_remainder" in how:
                assert not set(part.mapped) & (everywhere - set(ids))
            else:
                assert sorted(part.mapped) == sorted(ids)


@pytest.mark.parametrize("how", [{}, {"shuffle": False}], ids=str)
def test_skipped_examples_are_not_decoded(pipeline, how, monkeypatch):
    """Also with a worker that has no row of the last batch."""
    made = pipeline(n=11, **how)
    decoded = []
    original = made.info.features.deserialize_example

    def deserialize(record):
        tf.py_function(lambda _: decoded.append(1), [record], [])
        return original(record)

    monkeypatch.setattr(made.info.features, "deserialize_example", deserialize)
    assert len(as_lists(made.epoch(0, skip_batches=1))) == 2
    assert len(decoded) == 6
    decoded.clear()
    rest = made.epoch(0, worker=0, num_workers=2, skip_batches=1)
    assert [len(ids) for ids, *_ in as_lists(rest)] == [3, 1]
    assert len(decoded) == 4
    rest = made.epoch(0, worker=1, num_workers=2, skip_batches=2)
    assert [len(ids) for ids, *_ in as_lists(rest)] == [0]


@pytest.mark.parametrize("how", [{}, {"shuffle": False}], ids=str)
def test_a_cache_begun_in_the_middle_is_complete(pipeline, how, monkeypatch):
    decoded = []

    def noting(self, records, original=data.Pipeline._decoded):
        def note(position, example):
            tf.py_function(lambda p: decoded.append(int(p)), [position], [])
            return position, example

        return original(self, records).map(note)

    monkeypatch.setattr(data.Pipeline, "_decoded", noting)
    made = pipeline(cache=True, **how)
    next(iter(made.epoch(0, skip_batches=1)))  # Not read to its end.
    assert len(as_lists(made.epoch(0, skip_batches=2))) == 2
    assert set(decoded) == set(range(17))
    decoded.clear()
    ids = [i for batch in as_lists(made.epoch(1)) for i in batch[0]]
    assert sorted(ids) == list(range(17))
    assert as_lists(made.epoch(1, skip_batches=4)) == []
    assert decoded == []


def test_files_before_the_position_are_not_opened(tmp_path):
    """Three files of 4, 3 and 5 records, of which a slice leaves out two."""

    class File:
        def __init__(self, number, skip, take):
            self.filename = str(tmp_path / f"{number}")
            self.skip, self.take = skip, take

    class Split:
        file_instructions = [File(0, 1, 3), File(1, 0, 3), File(2, 0, 4)]

    for number, size in enumerate([4, 3, 5]):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}")) as writer:
            for record in range(size):
                writer.write(f"{number}.{record}".encode())
    names = ["0.1", "0.2", "0.3", "1.0", "1.1", "1.2"]
    names += ["2.0", "2.1", "2.2", "2.3"]
    for first in range(12):
        if first >= 6:
            (tmp_path / "1").unlink(missing_ok=True)
        found = [
            (int(position), record.numpy().decode())
            for position, record in data.source.records(Split, first)
        ]
        assert found == list(enumerate(names))[first:]


@pytest.mark.parametrize(
    "skip_batches, error, text",
    [
        (
            -1,
            ValueError,
            "`skip_batches` must be at least 0. Received: skip_batches=-1. "
            "Pass an integer of at least 0.",
        ),
        (
            1.5,
            TypeError,
            "`skip_batches` must be an integer. Received: skip_batches=1.5. "
            "Pass an integer of at least 0.",
        ),
    ],
)
def test_bad_positions(pipeline, skip_batches, error, text):
    source = Source(toy.strategy_of(1), column([1, 2]))
    for begin in (pipeline().epoch, source.begin_epoch):
        with pytest.raises(error) as caught:
            begin(0, skip_batches=skip_batches)
        assert str(caught.value) == text


# --- Arrays ----------------------------------------------------------------


def permutation(n, seed, epoch):
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return np.random.default_rng(sequence).permutation(n)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_rest_of_an_epoch_of_arrays(shuffle, num_workers):
    x = np.arange(17.0)
    made = arrays.ArrayEpochs(
        {"a": x, "b": [tf.constant(x), x.astype(int)]},
        x,
        batch_size=5,
        shuffle=shuffle,
        seed=7,
    )
    order = permutation(17, 7, 2) if shuffle else np.arange(17)
    batches = [order[start : start + 5].tolist() for start in (0, 5, 10, 15)]
    # 5 = 3 + 2 and 2 = 1 + 1.
    shares = [batches]
    if num_workers == 2:
        shares = [
            [batch[:3] for batch in batches[:3]] + [batches[3][:1]],
            [batch[3:] for batch in batches[:3]] + [batches[3][1:]],
        ]
    for worker, expected in enumerate(shares):
        who = {"worker": worker, "num_workers": num_workers}
        spec = made.epoch(0, **who).element_spec
        for skipped in range(6):
            rest = made.epoch(2, **who, skip_batches=skipped)
            assert rest.cardinality() == max(4 - skipped, 0)
            assert rest.element_spec == spec
            found = as_lists(rest)
            assert found == [[batch] * 4 for batch in expected[skipped:]]
    (inputs, target) = spec
    assert inputs["a"].dtype == target.dtype == tf.float32
    assert type(inputs["b"]) is tuple
    assert inputs["b"][1].dtype == tf.int64


def test_arrays_of_a_batch_shuffled_inside_batches_only():
    made = arrays.ArrayEpochs(
        np.arange(23), batch_size=10, shuffle="batch", seed=1
    )
    batches = [
        batch.tolist()
        for batch in made.epoch(0, worker=0, num_workers=1).as_numpy_iterator()
    ]
    assert [sorted(batch) for batch in batches] == [
        [*range(10)],
        [*range(10, 20)],
        [20, 21, 22],
    ]
    assert sum(batches, []) != [*range(23)]
    rest = made.epoch(0, worker=0, num_workers=1, skip_batches=1)
    assert [b.tolist() for b in rest.as_numpy_iterator()] == batches[1:]


WEIGHTS = {
    "none": {},
    "sample_weight": {"sample_weight": np.arange(7.0)},
    "class_weight": {"class_weight": {0: 2.0, 1: 3.0, 5: 0.5}},
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("batch_size", [None, 3, 7])
def test_unshuffled_arrays_are_those_of_keras(kind, batch_size):
    arguments = {
        "x": [np.arange(7.0), np.array(list("abcdefg"), object)],
        "y": np.arange(7),
        "batch_size": batch_size,
        **WEIGHTS[kind],
    }
    expected = Keras(**arguments).get_tf_dataset()
    source = Source(toy.strategy_of(1), **arguments)
    assert_same_elements(source, expected)


def test_one_weight_for_all_targets_and_ragged_inputs():
    y = {"a": np.arange(4), "b": np.arange(4.0)}
    ragged = tf.ragged.constant([[1.0], [], [2.0, 3.0], [4.0]])
    arguments = {"x": ragged, "y": y, "sample_weight": np.arange(4.0)}
    expected = Keras(**arguments, batch_size=3).get_tf_dataset()
    source = Source(toy.strategy_of(1), **arguments, batch_size=3)
    assert_same_elements(source, expected)


def Keras(**arguments):
    from tfaccum import keras_private

    return keras_private.data_adapter(
        **{
            "y": None,
            "sample_weight": None,
            "steps_per_epoch": None,
            "class_weight": None,
        }
        | arguments
    )


def assert_same_elements(source, expected):
    found = [data for _, data in elements(source.begin_epoch(0))]
    expected = list(expected)
    assert len(found) == len(expected) == source.num_batches
    for one, other in zip(found, expected, strict=True):
        tf.nest.assert_same_structure(one, other, expand_composites=True)
        for a, b in zip(
            tf.nest.flatten(one, True),
            tf.nest.flatten(other, True),
            strict=True,
        ):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def elements(iterator, limit=100):
    """(rows, data) until there are no more, of a stream that is not cut."""
    found = []
    for counts, batch in itertools.islice(iterator, limit):
        rows = int(counts[0] if counts else num_rows(batch))
        if rows == NO_MORE_DATA:
            break
        found.append((rows, batch))
    return found


def xs(iterator, limit=100):
    """The first component of each batch, as flat lists."""
    return [
        np.ravel(tf.nest.flatten(batch)[0]).astype(int).tolist()
        for _, batch in elements(iterator, limit)
    ]


def shuffled_source(**arguments):
    return Source(
        toy.strategy_of(1),
        column(range(20)),
        shuffle=True,
        batch_size=6,
        **arguments,
    )


def test_J5_order_is_a_function_of_seed_and_epoch():
    source = shuffled_source()
    assert source.shuffle_seed == SEED
    orders = [sum(xs(source.begin_epoch(epoch)), []) for epoch in range(3)]
    expected = [permutation(20, SEED, epoch).tolist() for epoch in range(3)]
    assert orders == expected
    assert len({tuple(order) for order in orders}) == 3
    tf.random.uniform([]), np.random.uniform()  # They play no part in it.
    assert sum(xs(shuffled_source().begin_epoch(1)), []) == expected[1]
    keras.utils.set_random_seed(1)
    other = sum(xs(shuffled_source().begin_epoch(1)), [])
    assert other == permutation(20, 1, 1).tolist()


def test_seed_of_a_source(monkeypatch):
    assert shuffled_source(shuffle_seed=5).shuffle_seed == 5
    monkeypatch.setattr("tfaccum.keras_private.global_seed", lambda: None)
    first, second = shuffled_source(), shuffled_source()
    assert first.shuffle_seed != second.shuffle_seed
    assert 0 <= first.shuffle_seed < 2**32
    orders = [xs(source.begin_epoch(0)) for source in (first, second)]
    assert orders[0] != orders[1]
    second.shuffle_seed = first.shuffle_seed
    assert xs(second.begin_epoch(0)) == orders[0]
    again = shuffled_source(shuffle_seed=first.shuffle_seed)
    assert xs(again.begin_epoch(0)) == orders[0]
    # Nothing is shuffled here.
    for x in (column([1]), toy.batches([1])):
        source = Source(toy.strategy_of(1), x)
        assert source.shuffle_seed is None
        source.shuffle_seed = 3
        assert source.shuffle_seed is None
    with pytest.raises(ValueError, match="`shuffle_seed` must be at least 0"):
        second.shuffle_seed = -1


PROGRAM = """
import json
import numpy as np, tensorflow as tf
from tfaccum.feeding import Source

tf.random.set_seed(1)
source = Source(tf.distribute.get_strategy(), np.arange(30), shuffle=True,
                batch_size=7, shuffle_seed=11)
orders = []
for epoch in range(2):
    order = []
    for _, x in source.begin_epoch(epoch, skip_batches=1):
        order += x.numpy().tolist()
    orders.append(order)
print(json.dumps(orders))
"""


def test_J5_same_order_of_arrays_in_two_processes():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    found = json.loads(output.splitlines()[-1])
    source = Source(
        toy.strategy_of(1),
        np.arange(30),
        shuffle=True,
        batch_size=7,
        shuffle_seed=11,
    )
    here = [sum(xs(source.begin_epoch(epoch)), []) for epoch in range(2)]
    assert found == [order[7:] for order in here]
    assert here == [permutation(30, 11, epoch).tolist() for epoch in range(2)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_J7_examples_of_a_window_are_distinct(replicas):
    model = toy.toy(
        replicas, model_class=toy.LogRows, gradient_accumulation_steps=3
    )
    x = column(range(30))
    windows = []

    class Windows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            windows.append(model.examples_seen)
            model.micro_steps.clear()

    model.fit(x, x, batch_size=5, epochs=2, verbose=0, callbacks=[Windows()])
    assert [len(set(window)) for window in windows] == [15] * 4
    expected = permutation(30, SEED, 1)[:15]
    assert sorted(windows[2]) == sorted(expected)


# --- All kinds of data -----------------------------------------------------

BATCHES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


class Batches(keras.utils.PyDataset):
    """`BATCHES`, by any number of threads."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return column(BATCHES[index]), column(BATCHES[index])


class Endless(Batches):
    """`BATCHES` over and over."""

    num_batches = None

    def __getitem__(self, index):
        return super().__getitem__(index % 4)


def unknown_size():
    dataset = toy.batches(*BATCHES, [-1.0], is_size_known=False)
    return dataset.filter(lambda x, y: x[0, 0] >= 0)


def generator(times=1):
    for batch in BATCHES * times:
        yield column(batch), column(batch)


class UnknownEpochs:
    """An `EpochData` that neither knows its size nor its batch size."""

    def epoch(self, epoch, *, worker, num_workers, skip_batches=0):
        dataset = unknown_size().map(lambda x, y: (x + 100.0 * epoch, y))
        return dataset.skip(skip_batches)


SOURCES = {
    "arrays": lambda: {"x": column(range(10)), "batch_size": 3},
    "dataset": lambda: {"x": toy.batches(*BATCHES)},
    "unknown_size": lambda: {"x": unknown_size()},
    "generator": lambda: {"x": generator()},
    "py_dataset": lambda: {"x": Batches()},
    "threads": lambda: {"x": Batches(workers=2)},
    "dataset_function": lambda: {"x": lambda context: toy.batches(*BATCHES)},
    "epochs": lambda: {"x": UnknownEpochs()},
    "shuffled": lambda: {
        "x": column(range(10)),
        "batch_size": 3,
        "shuffle": True,
    },
    # They only make sense with steps.
    "endless": lambda: {"x": toy.batches(*BATCHES).repeat()},
    "endless_generator": lambda: {"x": generator(50)},
    "endless_py_dataset": lambda: {"x": Endless()},
}


def make(kind, replicas=1, **arguments):
    return Source(toy.strategy_of(replicas), **SOURCES[kind](), **arguments)


def of_epoch(kind, epoch):
    """The batches of one epoch, derived by hand."""
    if kind == "shuffled":
        order = permutation(10, SEED, epoch)
        return [order[i : i + 3].tolist() for i in (0, 3, 6, 9)]
    more = 100 * epoch if kind == "epochs" else 0
    return [[x + more for x in batch] for batch in BATCHES]


@pytest.mark.parametrize("kind", [k for k in SOURCES if "endless" not in k])
def test_rest_of_an_epoch(kind):
    epoch = 0 if kind == "generator" else 2
    for skipped in (1, 3, 4):
        source = make(kind)
        found = xs(source.begin_epoch(epoch, skipped))
        assert found == of_epoch(kind, epoch)[skipped:]
        source.end_epoch(4, exhausted=True)
        assert source.num_batches == 4
        if kind != "generator":  # The next epoch is whole.
            assert xs(source.begin_epoch(3)) == of_epoch(kind, 3)
    assert xs(make(kind).begin_epoch(epoch, 6)) == []


def test_rest_of_an_epoch_in_micro_batches_on_two_replicas():
    """Batches of 3 = 2 + 1 and of 1 = 1 + 0 rows, at most one at a time."""
    source = make("dataset", replicas=2, micro_batch_size=1)
    found = [
        (int(rows), bool(last), int(total), np.ravel(x).tolist())
        for (rows, last, total), (x, _) in itertools.islice(
            source.begin_epoch(0, skip_batches=2), 8
        )
    ]
    assert found[:6] == [
        (1, False, 3, [6]),
        (1, False, 3, [7]),
        (1, True, 3, [8]),
        (0, True, 3, []),
        (1, True, 1, [9]),
        (0, True, 1, []),
    ]
    assert [rows for rows, *_ in found[6:]] == [NO_MORE_DATA] * 2


def undisturbed(kind, steps, num_epochs):
    """What a source gives in each epoch, read as `fit` does."""
    source = make(kind, steps=steps)
    epochs = []
    for epoch in range(num_epochs):
        iterator = source.begin_epoch(epoch)
        found = []
        while len(found) < steps and (batch := xs(iterator, limit=1)):
            found += batch
        exhausted = len(found) < steps
        source.end_epoch(len(found), exhausted)
        epochs.append(found)
    return epochs


# Keras stops the threads of a PyDataset at the end of an epoch.
WITH_STEPS = [
    *(
        (kind, steps)
        for kind in SOURCES
        for steps in (3, 5)
        if kind not in ("generator", "threads")
    ),
    *((kind, n) for kind in ("dataset", "unknown_size") for n in (1, 2, 4)),
    ("threads", 4),
]


@pytest.mark.parametrize("kind, steps", WITH_STEPS)
def test_steps_go_on_where_an_undisturbed_run_stands(kind, steps):
    expected = undisturbed(kind, steps, 6)
    if kind in ("dataset", "shuffled") and steps == 3:
        # Batches 0 1 2, then the last one, then from the beginning.
        first, third = of_epoch(kind, 0), of_epoch(kind, 2)
        assert expected[:3] == [first[:3], first[3:], third[:3]]
    if "endless" in kind:
        many = itertools.cycle(BATCHES)
        assert sum(expected, []) == list(itertools.islice(many, 6 * steps))
    for epoch, skipped in ((0, 1), (1, 0), (2, 1), (3, 1), (4, 2)):
        skipped = min(skipped, steps)
        source = make(kind, steps=steps)
        iterator = source.begin_epoch(epoch, skipped)
        done = min(skipped, len(expected[epoch]))
        left = xs(iterator, limit=steps - skipped)
        assert left == expected[epoch][skipped:]
        done += len(left)
        source.end_epoch(done, exhausted=done < steps)
        # And so does the epoch after it.
        following = xs(source.begin_epoch(epoch + 1, 0), limit=steps)
        assert following == expected[epoch + 1]


def test_first_epoch_of_a_source_without_a_position():
    """As in Keras, whatever the number of the epoch."""
    source = make("endless", steps=3)
    assert xs(source.begin_epoch(5), limit=3) == BATCHES[:3]
    source.end_epoch(3, exhausted=False)
    assert xs(source.begin_epoch(6), limit=3) == [BATCHES[3], *BATCHES[:2]]


# --- Short epochs in one iterator ------------------------------------------


class Recorded:
    """Epochs of (100 * epoch + batch), of the sizes that are given."""

    def __init__(self, sizes):
        self.sizes, self.asked = sizes, []

    def epoch(self, epoch, *, worker, num_workers, skip_batches=0):
        self.asked.append((epoch, skip_batches))
        size = self.sizes[epoch]
        made = toy.batches(*([100 * epoch + n] for n in range(size or 1)))
        return made.take(size).skip(skip_batches)


def by_epochs(source, first, end, skipped=0):
    """What each epoch gives, read as `fit` does; and the iterators."""
    found, iterators = [], []
    for epoch in range(first, end):
        iterator = source.begin_epoch(epoch, skipped, end)
        batches = xs(iterator, limit=source.num_batches - skipped)
        source.end_epoch(len(batches) + skipped, exhausted=False)
        found.append(sum(batches, []))
        if iterator not in iterators:
            iterators.append(iterator)
        skipped = 0
    return found, iterators


def test_short_epochs_are_of_one_iterator():
    data = Recorded([3] * 20)
    source = Source(toy.strategy_of(1), data)
    found, iterators = by_epochs(source, 1, 20)
    assert found == [[100 * e, 100 * e + 1, 100 * e + 2] for e in range(1, 20)]
    assert len(iterators) == 3  # Of 8, 8 and 3 epochs.
    # Each epoch is asked for once, but for the first look.
    assert data.asked == [(0, 0), *((epoch, 0) for epoch in range(1, 20))]


def test_the_stream_of_a_dataset_is_made_once(monkeypatch):
    made, original = [], feeding.micro_batch_stream

    def noting(*arguments, **options):
        made.append(original(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(feeding, "micro_batch_stream", noting)
    source = make("dataset")
    for epoch in range(3):
        assert xs(source.begin_epoch(epoch)) == of_epoch("dataset", epoch)
        source.end_epoch(4, exhausted=True)
    assert len(made) == 1


def test_short_epochs_from_the_middle_of_one():
    source = Source(toy.strategy_of(1), Recorded([3] * 5))
    found, iterators = by_epochs(source, 1, 4, skipped=2)
    assert found == [[102], [200, 201, 202], [300, 301, 302]]
    assert len(iterators) == 1


def test_short_epochs_of_shuffled_arrays():
    source = shuffled_source()
    found, iterators = by_epochs(source, 0, 3)
    assert found == [permutation(20, SEED, e).tolist() for e in range(3)]
    assert len(iterators) == 1


def test_one_iterator_ends_where_an_epoch_is_left_or_taken_again():
    source = Source(toy.strategy_of(1), Recorded([3] * 9))
    first = source.begin_epoch(0, end=9)
    assert xs(first, limit=2) == [[0], [1]]
    source.end_epoch(2, exhausted=False)
    assert xs(source.begin_epoch(1, 0, 9), limit=3) == [[100], [101], [102]]
    source.end_epoch(3, exhausted=False)
    # Not the one that comes next.
    assert xs(source.begin_epoch(5, 0, 9), limit=1) == [[500]]
    source.end_epoch(3, exhausted=False)
    assert xs(source.begin_epoch(6, 1, 9), limit=1) == [[601]]


@pytest.mark.parametrize("sizes", [[101] * 3, [3, 4, 3], [0, 0, 0]])
def test_epochs_that_are_long_or_differ_are_begun_anew(sizes):
    source = Source(toy.strategy_of(1), Recorded(sizes))
    found = []
    for epoch in range(3):
        found.append(xs(source.begin_epoch(epoch, end=3), limit=300))
        source.end_epoch(len(found[-1]), exhausted=True)
    assert found == [
        [[100 * epoch + n] for n in range(size)]
        for epoch, size in enumerate(sizes)
    ]


def test_a_worker_with_less_data_begins_each_epoch_anew(monkeypatch):
    """The other one has 5 batches, so that an epoch has 5."""
    monkeypatch.setattr(
        "tfaccum.agreement.exchange", lambda _, mine: [mine, "5"]
    )
    source = Source(toy.strategy_of(1), Recorded([3] * 3))
    assert source.num_batches == 5
    found = []
    for epoch in range(3):
        found.append(xs(source.begin_epoch(epoch, end=3), limit=5))
        source.end_epoch(5, exhausted=False)
    assert found == [
        [[100 * e], [100 * e + 1], [100 * e + 2]] for e in range(3)
    ]


# --- The size of a batch ---------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_batch_size(kind):
    source = make(kind, steps=3)
    assert source.batch_size == 3
    expected = of_epoch(kind, 0)[:2]
    assert xs(source.begin_epoch(0), limit=2) == expected
    assert source.batch_size == 3


def test_batch_size_of_a_pipeline_and_by_default(pipeline):
    strategy = toy.strategy_of(1)
    made = pipeline()
    assert Source(strategy, made).batch_size == 5
    assert made.mapped == []
    assert Source(strategy, np.zeros([100, 2])).batch_size == 32
    assert Source(strategy, np.zeros([20, 2])).batch_size == 20
    assert Source(strategy, np.zeros([20, 2]), steps=3).batch_size == 7


def test_batch_size_without_data():
    strategy = toy.strategy_of(1)
    for x in (np.zeros([0, 2]), toy.batches([1]).take(0)):
        source = Source(strategy, x)
        assert source.batch_size is None
        assert xs(source.begin_epoch(0)) == []


def test_batch_size_of_shares_is_their_sum(monkeypatch):
    """The other worker tells 2."""
    source = make("dataset_function")
    monkeypatch.setattr(
        "tfaccum.agreement.exchange", lambda strategy, text: [text, "2"]
    )
    assert source.batch_size == 5
