"""Batches as micro-batches, one for each replica and micro-step.

Expected parts are written out, or cut by numpy.
"""

import gc
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import feeding, micro_batches
from tfaccum.micro_batches import NO_MORE_DATA


def by_numpy(rows, replicas, size):
    """The rows of each part, and whether a batch ends with it."""
    largest = -(-rows // replicas)
    steps = 1 if size is None else -(-largest // size)
    parts = np.array_split(np.arange(rows), steps * replicas)
    return [
        (part.tolist(), i // replicas == steps - 1)
        for i, part in enumerate(parts)
    ]


def elements(stream, strategy):
    """(rows, last, total, data) of each part until there are no more."""
    iterator = iter(stream)
    found = []
    while True:
        got = micro_batches.next_elements(iterator, strategy)
        if int(got[0][0]) == NO_MORE_DATA:
            return found
        found.extend(zip(*got, strict=True))


def both_ways(batch, strategy, size):
    """The parts of a batch, by itself and as a dataset's only one."""
    spec = micro_batches.spec_of_any_rows(batch)
    dataset = micro_batches.dataset_of(batch, spec)
    return [
        elements(stream, strategy)
        for stream in (
            micro_batches.batch_stream(
                batch, spec, strategy, micro_batch_size=size
            ),
            micro_batches.micro_batch_stream(
                dataset, strategy, micro_batch_size=size
            ),
        )
    ]


@pytest.mark.parametrize("rows", [1, 5, 7, 12])
@pytest.mark.parametrize("size", [None, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_batch_is_cut_like_a_dataset_of_it(rows, size, replicas):
    x, y = np.arange(rows, dtype=np.float32), np.arange(rows) * 10
    batch = tf.constant(x[:, np.newaxis]), {"y": tf.constant(y)}
    strategy = toy.strategy_of(replicas)
    expected = by_numpy(rows, replicas, size)
    assert sum(len(part) for part, _ in expected) == rows
    for found in both_ways(batch, strategy, size):
        assert [
            (data[0].numpy()[:, 0].tolist(), bool(last))
            for _, last, _, data in found
        ] == expected
        for (part, _), (count, _, total, (_, labels)) in zip(
            expected, found, strict=True
        ):
            assert labels["y"].numpy().tolist() == [10 * i for i in part]
            assert int(count) == len(part)
            assert int(total) == rows


def test_what_is_cut_by_numpy_is_what_a_hand_cuts():
    assert by_numpy(7, 2, 2) == [
        ([0, 1], False),
        ([2, 3], False),
        ([4, 5], True),
        ([6], True),
    ]
    assert by_numpy(3, 2, None) == [([0, 1], True), ([2], True)]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(tf.ragged.constant([[1, 2], [], [3]]), id="ragged"),
        pytest.param(tf.sparse.eye(3, 4), id="sparse"),
        pytest.param(
            (tf.constant([[1.0], [2.0], [3.0]]), tf.ragged.range([2, 0, 1])),
            id="both",
        ),
    ],
)
def test_a_batch_of_any_leaves_leaves_its_rows_open(batch):
    spec = micro_batches.spec_of_any_rows(batch)
    dataset = micro_batches.dataset_of(batch, spec)
    for spec in tf.nest.flatten(dataset.element_spec):
        assert spec.shape[0] is None
    (found,) = dataset
    for got, given in zip(
        tf.nest.flatten(found, expand_composites=True),
        tf.nest.flatten(batch, expand_composites=True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, given)


def test_batches_of_any_number_of_rows_are_cut_by_one_trace(monkeypatch):
    cuts = []
    cut = micro_batches._cut
    monkeypatch.setattr(
        micro_batches, "_cut", lambda *a: cuts.append(a[1:]) or cut(*a)
    )
    micro_batches._graphs.cache_clear()
    strategy = toy.strategy_of(2)
    for rows in (5, 8, 3, 8):
        batch = tf.random.uniform([rows, 2])
        both_ways(batch, strategy, 2)
    # One trace of a batch, and one of a dataset's.
    assert cuts == [(2, 2)] * 2
    both_ways(tf.constant([1, 2, 3]), strategy, 2)
    assert len(cuts) == 4
    both_ways(tf.constant([1, 2, 3]), strategy, 1)
    assert cuts[4:] == [(2, 1)] * 2


def test_rows_that_are_known_stay_known():
    strategy = toy.strategy_of(1)
    rows = tf.data.Dataset.from_tensor_slices(np.zeros([12, 2], np.float32))
    for known in (False, True, False):
        stream = micro_batches.micro_batch_stream(
            rows.batch(4, drop_remainder=known), strategy
        )
        _, spec = stream.element_spec
        assert spec.shape.as_list() == [4 if known else None, 2]


def test_train_on_batch_traces_nothing_anew(monkeypatch):
    model = toy.toy(replicas=2, micro_batch_size=2)
    x = np.random.default_rng(0).normal(size=(9, 1)).astype(np.float32)
    for method in ("train_on_batch", "test_on_batch"):
        getattr(model, method)(x, x)

    def refuse(*_, **__):
        raise AssertionError("traced again")

    for name in ("_cut", "_share", "nothing"):
        monkeypatch.setattr(micro_batches, name, refuse)
    for rows in (9, 4, 1):
        model.train_on_batch(x[:rows], x[:rows])
        model.test_on_batch(x[:rows], x[:rows])


def test_a_stream_keeps_the_dataset_that_it_is_made_of():
    def generator():
        yield np.array([1, 2], np.float32)

    dataset = tf.data.Dataset.from_generator(
        generator, output_signature=tf.TensorSpec([None], tf.float32)
    )
    found = weakref.ref(dataset)
    stream = micro_batches.micro_batch_stream(dataset, toy.strategy_of(1))
    del dataset
    gc.collect()
    assert found() is not None
    iterator = iter(stream)
    del stream
    gc.collect()
    assert found() is not None  # As of any iterator.
    assert next(iterator)[1].numpy().tolist() == [1, 2]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [None, 2])
def test_sparse_rows_are_cut_as_dense_ones_are(replicas, size):
    rows = np.arange(28.0).reshape(7, 4) % 5 - 2
    batch = tf.sparse.from_dense(rows)
    strategy = toy.strategy_of(replicas)
    for found in both_ways(batch, strategy, size):
        parts = [part for part, _ in by_numpy(7, replicas, size)]
        for (count, *_, data), part in zip(found, parts, strict=True):
            dense = tf.sparse.to_dense(tf.sparse.reorder(data))
            np.testing.assert_array_equal(dense, rows[part])
            assert int(count) == len(part)


HOWS = [{}, {"micro_batch_size": 2}, {"micro_batch_size": "auto"}]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", HOWS)
def test_sparse_batches_train(replicas, how):
    rng = np.random.default_rng(3)
    x = np.float32(rng.normal(size=(9, 3)) * rng.integers(0, 2, (9, 3)))
    y = np.float32(rng.normal(size=(9, 1)))
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,), sparse=True)
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros"
        )
        model = tfaccum.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(0.5), "mse", **how)
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y))
    model.fit(rows.batch(5), verbose=0)
    w = np.zeros((3, 1))
    for part in (slice(5), slice(5, 9)):
        errors = x[part] @ w - y[part]
        w -= 0.5 * 2 * x[part].T @ errors / len(errors)
    np.testing.assert_allclose(toy.value_of(model, layer.kernel), w, 1e-5)
    errors = x @ w - y
    loss = model.test_on_batch(tf.sparse.from_dense(x), y)
    assert float(loss) == pytest.approx(np.mean(errors**2), rel=1e-5)
    model.train_on_batch(tf.sparse.from_dense(x), y)
    w -= 0.5 * 2 * x.T @ errors / 9
    np.testing.assert_allclose(toy.value_of(model, layer.kernel), w, 1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", HOWS)
def test_a_component_that_is_none_is_absent(replicas, how):
    model = toy.toy(replicas, **how)
    data = toy.batches([1, 2, 3, 6], is_size_known=False)
    toy.fit(model, data.map(lambda x, y: (x, y, None)))
    assert toy.weight_of(model) == -3


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", HOWS)
def test_ragged_rows_of_any_width_train(replicas, how):
    """[rows, None, None]; a row's x is the mean over its parts and columns."""

    class Means(tfaccum.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(), initializer="zeros")

        def train_step(self, data):
            with tf.GradientTape() as tape:
                x = tf.reduce_mean(tf.reduce_mean(data, 1), -1)
                loss = self.w * tf.reduce_mean(x)
            self.accumulate(tape, loss, weight=data.nrows())
            return {}

    def rows(*lists):
        return tf.ragged.constant(
            [np.float32(x).reshape(-1, 2) for x in lists], ragged_rank=1
        )

    spec = tf.RaggedTensorSpec([None, None, None], tf.float32, ragged_rank=1)
    data = tf.data.Dataset.from_generator(
        lambda: iter([rows([1, 1], [1, 3], [1, 2, 3, 6])]),
        output_signature=spec,
    )
    with toy.strategy_of(replicas).scope():
        model = Means()
        model.compile(keras.optimizers.SGD(1.0), **how)
    model.fit(data, verbose=0)
    assert toy.value_of(model, model.w) == pytest.approx(-(1 + 2 + 3) / 3)


def test_axes_that_differ_are_left_open():
    specs = micro_batches.CommonSpecs()

    def shapes(*batch):
        return [spec.shape.as_list() for spec in specs.of(batch)]

    x = tf.zeros
    assert shapes(x([2, 5, 3]), x([2])) == [[None, 5, 3], [None]]
    assert shapes(x([7, 5, 3]), x([7])) == [[None, 5, 3], [None]]
    assert shapes(x([2, 8, 3]), x([2])) == [[None, None, 3], [None]]
    assert shapes(x([2, 5, 3]), x([2])) == [[None, None, 3], [None]]
    # Of another dtype, rank or structure: of its own.
    assert shapes(x([2, 5, 3])) == [[None, 5, 3]]
    assert shapes(x([2, 5, 3]), x([2], tf.int32)) == [[None, 5, 3], [None]]
    assert shapes(x([2, 5]), x([2])) == [[None, 5], [None]]
    ragged = specs.of(tf.ragged.constant([[1], [1, 2]]))
    assert ragged == tf.RaggedTensorSpec([None, None], tf.int32, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_many_lengths_are_traced_twice(replicas):
    """A trace of the first length, and one for all that follow."""
    traces = []

    class Traced(tfaccum.Model):
        def train_step(self, data):
            traces.append("train")
            return super().train_step(data)

        def predict_step(self, data):
            traces.append("predict")
            return super().predict_step(data)

    def layers():
        return [keras.layers.GlobalAveragePooling1D(), toy.scalar()]

    model = toy.toy(
        replicas, layers=layers, shape=(None, 1), model_class=Traced
    )
    w = 0.0
    for length in (2, 3, 5, 3, 8):
        x = np.float32(np.arange(4 * length)).reshape(4, length, 1)
        model.train_on_batch(x, x[:, 0])
        w -= x.mean()
        assert toy.weight_of(model) == pytest.approx(w)
        found = model.predict_on_batch(x)
        np.testing.assert_allclose(found, w * x.mean(1), rtol=1e-5)
    assert traces.count("train") == traces.count("predict") == 2 * replicas


# --- Streams that say nothing about their elements -------------------------


def whole(batch_size=4, drop=True, rows=12):
    xs = tf.data.Dataset.from_tensor_slices(column(rows))
    return xs.batch(batch_size, drop_remainder=drop)


def column(rows):
    return np.arange(rows, dtype=np.float32)[:, np.newaxis]


CERTAIN = {
    "arrays": lambda: (column(10), {"batch_size": 4}),
    "arrays, shuffled": lambda: (
        column(10),
        {"batch_size": 4, "shuffle": True, "shuffle_seed": 1},
    ),
    "batches of one size": lambda: (whole(), {}),
}
UNCERTAIN = {
    "batches of any size": lambda: (whole(drop=False), {}),
    "the same for ever": lambda: (whole().repeat(), {"steps": 5}),
    "of unknown number": lambda: (whole().filter(lambda x: x[0, 0] < 5), {}),
    "more steps than data": lambda: (whole(), {"steps": 4}),
    "arrays with steps": lambda: (column(10), {"batch_size": 4, "steps": 2}),
    "cut": lambda: (whole(), {"micro_batch_size": 2}),
    "held": lambda: (whole(), {"holds": True}),
    "one batch": lambda: (
        feeding.OneBatch(column(3), tf.TensorSpec([None, 1], tf.float32)),
        {},
    ),
    "a generator": lambda: (((column(3),) for _ in range(2)), {}),
}


@pytest.mark.parametrize("kind", [*CERTAIN, *UNCERTAIN])
@pytest.mark.parametrize("replicas", [1, 2])
def test_counts_are_said_where_they_are_not_certain(kind, replicas):
    x, how = (CERTAIN | UNCERTAIN)[kind]()
    source = feeding.Source(toy.strategy_of(replicas), x, **how)
    counts, _ = source.element_spec
    is_certain = kind in CERTAIN and replicas == 1
    assert len(counts) == (0 if is_certain else 3)


def test_epochs_of_other_sizes_are_not_certain():
    class Growing:
        def epoch(self, epoch, *, worker, num_workers, skip_batches=0):
            return whole(rows=4 * (epoch + 1)).skip(skip_batches)

    source = feeding.Source(toy.strategy_of(1), Growing())
    counts, _ = source.element_spec
    assert len(counts) == 3


def test_a_certain_stream_is_its_batches():
    strategy = toy.strategy_of(1)
    source = feeding.Source(strategy, column(10), batch_size=4)
    iterator = source.begin_epoch(0)
    for rows in (4, 4, 2):
        got = micro_batches.next_elements(iterator, strategy)
        assert [int(part[0]) for part in got[:3]] == [rows, 1, rows]
        assert got[3][0].shape == (rows, 1)
    assert list(iterator) == []


def conditions(model):
    """How many conditions the micro-step has that was traced last."""
    graph = model.train_window._micro_step.graph.as_graph_def()
    return sum("If" in node.op for node in graph.node)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_both_streams_train_alike(steps_per_execution):
    """Arrays, then the same batches of which nothing is known, and back."""
    xs = [np.float32([[1], [2]]), np.float32([[4], [-3]]), np.float32([[7]])]
    array = np.concatenate(xs)
    dataset = toy.batches(*(x[:, 0] for x in xs), [], is_size_known=False)

    def trained(*data):
        model = toy.toy(
            optimizer=lambda: keras.optimizers.SGD(1.0, momentum=0.5),
            gradient_accumulation_steps=2,
            steps_per_execution=steps_per_execution,
        )
        found = []
        for x in data:
            arrays = x is array
            how = {"batch_size": 2, "shuffle": False} if arrays else {}
            model.fit(x, array if arrays else None, verbose=0, **how)
            found.append((conditions(model), toy.weight_of(model)))
        return found

    # Per epoch two updates: of the mean of four rows, and of the last row.
    expected, w, velocity = [], 0.0, 0.0
    for _ in range(3):
        for gradient in (1.0, 7.0):
            velocity = 0.5 * velocity - gradient
            w += velocity
        expected.append(w)
    assert trained(array, dataset, array) == list(
        zip([0, 1, 0], expected, strict=True)
    )


@pytest.mark.parametrize(
    ("buffer", "arguments", "ahead"),
    [
        (0, {}, 2),
        (1, {}, 1),
        (1, {"is_certain": True}, 1),
        (1, {"micro_batch_size": 1}, 1 + 2),
    ],
)
def test_data_that_are_prefetched_are_buffered_once(buffer, arguments, ahead):
    drawn = []

    def rows():
        for row in range(8):
            drawn.append(row)
            yield np.float32([row])

    dataset = tf.data.Dataset.from_generator(
        rows, output_signature=tf.TensorSpec([1])
    )
    if buffer:
        dataset = dataset.prefetch(buffer)
    stream = micro_batches.micro_batch_stream(
        dataset, toy.strategy_of(1), **arguments
    )
    iterator = iter(stream)
    next(iterator)
    deadline = time.monotonic() + 10
    while len(drawn) < 1 + ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # For what must not come.
    assert len(drawn) == 1 + ahead
