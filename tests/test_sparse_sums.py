"""Sums of sparse gradients: in the rows touched, and equal to dense ones."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy, workers
from tests.multi_worker import graphs, sparse_checks
from tests.multi_worker.sparse_checks import two_tables
from tests.test_cases_sparse import (
    IDS,
    OPTIMIZERS,
    ROWS,
    TABLE,
    TARGETS,
    WIDTH,
    assert_same_tables,
    embedding_model,
    one_hot_reference,
    start,
)
from tfaccum import reduction, sparse
from tfaccum.accumulator import ReplicaSums
from tfaccum.boost import AdaSum
from tfaccum.train import report

INDEX_BYTES = 8


def fit(model, ids=IDS, targets=TARGETS, batch_size=3, epochs=2):
    model.fit(
        ids,
        targets,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return model


def assert_sparse(model):
    assert model.table_sums
    assert all(table.is_sparse for table in model.table_sums)


def table_of(model):
    return toy.value_of(model, model.trainable_variables[0])


def in_each(slices):
    """The rows of slices as a dict; each index stands there once."""
    indices = slices.indices.numpy().tolist()
    assert len(set(indices)) == len(indices)
    return dict(zip(indices, slices.values.numpy().tolist(), strict=True))


# --- The law ---------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_G1_sparse_sums_equal_the_dense_one_hot_model(name, replicas):
    """Windows of 3 + 3 and 2 ids; ids are repeated in and between them."""
    model = fit(
        embedding_model(
            replicas,
            OPTIMIZERS[name],
            gradient_accumulation_steps=2,
            sparse_sums=True,
        )
    )
    assert_sparse(model)
    assert_same_tables(model, one_hot_reference(OPTIMIZERS[name], 6))


@pytest.mark.parametrize(
    "replicas,how",
    [
        (1, {"micro_batch_size": 1}),
        (1, {"micro_batch_size": 2, "jit_compile": True}),
        (2, {}),  # No sums: the slices of one micro-step are gathered.
        (2, {"micro_batch_size": 1}),  # The last micro-step is worker 0's.
        (3, {"micro_batch_size": 2, "steps_per_execution": 2}),
        (2, {"micro_batch_size": 2, "run_eagerly": True}),
        (2, {"micro_batch_size": 2, "accumulator_dtype": "float64"}),
    ],
)
def test_G1_other_ways_to_make_the_same_windows(replicas, how):
    model = fit(
        embedding_model(
            replicas, OPTIMIZERS["adam_clipped"], sparse_sums=True, **how
        ),
        batch_size=5,
    )
    assert_sparse(model)
    assert_same_tables(model, one_hot_reference(OPTIMIZERS["adam_clipped"], 5))


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_example_per_batch_leaves_a_replica_without_rows(replicas):
    model = embedding_model(
        replicas,
        OPTIMIZERS["adam"],
        gradient_accumulation_steps=4,
        sparse_sums=True,
    )
    assert_same_tables(
        fit(model, batch_size=1), one_hot_reference(OPTIMIZERS["adam"], 4)
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_rows_of_replicas_differ_and_may_be_none_at_all(steps):
    """The last batch has rows without ids, so that no replica has a slice."""
    batches = [[[1, 1, 2, 3, 99, 1], [2]], [[], [7, 7]], [[], []]]
    with toy.strategy_of(2).scope():
        model = toy.MeanOfRows()
        model.table.build()
        model.compile(
            keras.optimizers.SGD(1.0, momentum=0.5),
            gradient_accumulation_steps=steps,
            sparse_sums=True,
        )
    data = tf.data.Dataset.from_generator(
        lambda: (tf.ragged.constant(b, tf.int32, 1) for b in batches),
        output_signature=tf.RaggedTensorSpec([None, None], tf.int32),
    )
    model.fit(data, verbose=0)
    table, velocity = np.zeros((2, 100, 4))
    for first in range(0, 3, steps):
        window = batches[first : first + steps]
        gradient = np.zeros((100, 4))
        rows = [row for batch in window for row in batch]
        np.add.at(gradient, sum(rows, []), 1 / len(rows))
        velocity = 0.5 * velocity - gradient
        table += velocity
    np.testing.assert_allclose(
        toy.value_of(model, model.table.embeddings), table, atol=1e-6
    )


def tied_model(model_class, is_read_out, **how):
    """One table for two inputs; and also as a matrix."""
    with toy.strategy_of(how.pop("replicas", 1)).scope():
        inputs = [keras.Input((size,), dtype="int32") for size in (2, 3)]
        table = keras.layers.ReversibleEmbedding(
            ROWS, WIDTH, embeddings_initializer=start()
        )
        first, second = (
            keras.ops.sum(table(tensor), 1, keepdims=True) for tensor in inputs
        )
        vectors = first * keras.ops.tanh(second)
        if is_read_out:
            vectors = table(vectors, reverse=True)
        model = model_class(inputs, keras.ops.mean(vectors, axis=(1, 2)))
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse", **how)
    return model


@pytest.mark.parametrize("is_read_out", [False, True])
def test_a_table_that_is_used_twice(is_read_out):
    """TensorFlow joins the slices; with a matrix product they are dense."""
    ids = [np.array([[1, 2], [2, 2], [5, 1], [999, 2]])]
    ids.append(np.array([[2, 2, 1], [7, 1, 1], [3, 3, 3], [0, 5, 999]]))
    expected = tied_model(keras.Model, is_read_out)
    fit(expected, ids, TARGETS[:4], batch_size=4)
    model = tied_model(
        tfaccum.Model,
        is_read_out,
        replicas=2,
        micro_batch_size=1,
        sparse_sums=True,
    )
    fit(model, ids, TARGETS[:4], batch_size=4)
    assert [t.is_sparse for t in model.table_sums] == [True] * (not is_read_out)
    assert_same_tables(model, expected)


class VectorTable(keras.layers.Layer):
    """A table whose rows are numbers, or matrices."""

    def __init__(self, row_shape):
        super().__init__()
        self.row_shape = row_shape

    def build(self, _):
        self.table = self.add_weight(shape=(9, *self.row_shape), name="table")

    def call(self, ids):
        rows = tf.gather(self.table, ids)
        return tf.reduce_sum(tf.reshape(rows, [tf.shape(ids)[0], -1]), 1)


@pytest.mark.parametrize("row_shape", [(), (2, 3)])
def test_tables_of_other_ranks(row_shape):
    found = []
    for how in (True, False):
        keras.utils.set_random_seed(3)
        with toy.strategy_of(2).scope():
            inputs = keras.Input((2,), dtype="int32")
            model = tfaccum.Model(inputs, VectorTable(row_shape)(inputs))
            model.compile(
                "adam", "mse", gradient_accumulation_steps=2, sparse_sums=how
            )
        fit(
            model,
            np.array([[1, 1], [8, 1], [0, 8], [2, 3], [2, 2]]),
            TARGETS[:5],
        )
        found.append(table_of(model))
    assert [t.is_sparse for t in model.table_sums] == [False]
    np.testing.assert_allclose(*found, rtol=1e-6)


# --- Memory ----------------------------------------------------------------


def test_G3_a_table_of_5_million_rows_takes_its_rows_touched():
    """320 MB; of 4 micro-steps of 8 ids the sums take less than 3 kB."""
    rows, width = 5_000_000, 16
    inputs = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(rows, width, embeddings_initializer="zeros")
    model = tfaccum.Model(inputs, table(inputs))
    model.compile(
        keras.optimizers.SGD(1.0),
        lambda y, y_pred: tf.reduce_sum(y_pred, -1),
        gradient_accumulation_steps=4,
    )
    ids = np.random.default_rng(0).choice(rows, 32, replace=False)
    ids[31] = ids[0]
    fit(model, ids, np.zeros((32, 1)), batch_size=8, epochs=1)
    (chosen,) = model.table_sums
    assert str(chosen) == (
        f"{table.embeddings.path}: sparse, because a window touches at most 32 "
        "of 5,000,000 rows"
    )
    # Rows, and the scalars: examples, loss and weight.
    sums = 31 * (4 * width + INDEX_BYTES) + 3 * 4
    assert model.accumulator_bytes == sums < 0.01 * 4 * rows * width
    expected = np.full([31, width], -1 / 32, np.float32)
    expected[0] *= 2
    np.testing.assert_array_equal(
        tf.gather(table.embeddings, ids[:31]).numpy(), expected
    )
    assert np.count_nonzero(table.embeddings.numpy()) == 31 * width


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("how", [True, False])
def test_nothing_of_the_size_of_the_table_is_made(how, steps):
    """From the micro-step to the optimizer, on two replicas."""
    model = embedding_model(
        2,
        OPTIMIZERS["sgd"],
        gradient_accumulation_steps=steps,
        sparse_sums=how,
    )
    with graphs.traced() as traced:
        fit(model, epochs=1)
    found = set().union(*(graphs.of_shape(g, TABLE.shape) for g in traced))
    assert (found <= {"ReadVariableOp", "Identity"}) == how, found


@pytest.mark.parametrize(
    "how,row_bytes",
    [
        (True, 4 * WIDTH + INDEX_BYTES),
        (False, None),
    ],
)
def test_the_bytes_of_either_kind(how, row_bytes):
    model = embedding_model(
        2,
        OPTIMIZERS["sgd"],
        gradient_accumulation_steps=2,
        sparse_sums=how,
    )
    fit(model)
    others = 4 * (WIDTH + 1) + 3 * 4  # The layer behind it, and scalars.
    # Replica 0 sees ids 1, 1 and 2, 3; then 1.
    table = 3 * row_bytes if how else 4 * ROWS * WIDTH
    assert model.accumulator_bytes == others + table


def test_between_windows_no_rows_are_held():
    model = embedding_model(
        1, OPTIMIZERS["sgd"], gradient_accumulation_steps=2, sparse_sums=True
    )
    fit(model)
    sums = model.train_window.sums.values()["sums"][0]["gradients"]
    assert isinstance(sums[0], tf.IndexedSlices)
    assert sums[0].values.shape == (0, WIDTH)
    assert sums[0].indices.shape == (0,)


# --- Bad values, precision -------------------------------------------------


def test_inf_in_one_row_on_replica_1_changes_nothing():
    """The first window is skipped, the second one made."""
    model = embedding_model(
        2, OPTIMIZERS["adam"], gradient_accumulation_steps=2, sparse_sums=True
    )
    targets = TARGETS.copy()
    targets[3] = np.inf
    before = [v.numpy() for v in model.trainable_variables]
    fit(model, IDS[:4], targets[:4], batch_size=2, epochs=1)
    (update,) = model.last_updates
    assert update.skipped and update.nonfinite_replica == 1
    assert "embedding" in update.nonfinite_variable
    for variable, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(toy.value_of(model, variable), old)
    for variable in model.optimizer.variables[2:]:
        assert not np.any(toy.value_of(model, variable))
    # And the rows have been forgotten.
    other = embedding_model(
        2, OPTIMIZERS["adam"], gradient_accumulation_steps=2, sparse_sums=True
    )
    assert_same_tables(fit(model), fit(other))


def float16_model(scale, **how):
    return embedding_model(
        2,
        lambda: keras.optimizers.LossScaleOptimizer(
            OPTIMIZERS["momentum"](), initial_scale=scale
        ),
        gradient_accumulation_steps=2,
        **how,
    )


@pytest.mark.parametrize("scale,skips", [(128.0, False), (2.0**24, True)])
def test_float16_with_a_loss_scale(scale, skips):
    keras.config.set_dtype_policy("mixed_float16")
    model, other = (
        fit(float16_model(scale, sparse_sums=how), epochs=1)
        for how in (True, False)
    )
    assert_sparse(model)
    assert model.last_updates[0].skipped == skips
    assert_same_tables(model, other)
    assert np.array_equal(table_of(model), TABLE) == skips


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_frequent_token_counts_in_full(dtype):
    """As in dense sums; each window adds to a row twice."""
    inputs = keras.Input((513,), dtype="int32")
    table = keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
    model = tfaccum.Model(inputs, table(inputs))
    model.compile(
        keras.optimizers.SGD(1.0),
        lambda y, y_pred: tf.reduce_sum(y_pred, axis=[1, 2]),
        gradient_accumulation_steps=2,
        accumulator_dtype=dtype,
        sparse_sums=True,
    )
    tokens = np.ones((4, 513), "int32")
    tokens[2:, 512] = 2
    fit(model, tokens, np.zeros((4, 513, 1)), batch_size=2, epochs=1)
    first = 512.0 if dtype == "bfloat16" else 512.5
    np.testing.assert_array_equal(
        model.get_weights()[0].ravel(), [0, -first, -0.5]
    )
    size = tf.as_dtype(dtype).size
    assert model.accumulator_bytes == 2 * (size + INDEX_BYTES) + 3 * 4


# --- Between the replicas --------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_two_collectives_whatever_the_number_of_tables(steps):
    """Indices and values; each tells the lengths first. The rest is one."""
    found = {}
    for name, how in {
        "dense": {"sparse_sums": False},
        "sparse": {"sparse_sums": True},
        "one table": {"sparse_sums": True, "second": False},
    }.items():
        model = two_tables(
            toy.strategy_of(2), gradient_accumulation_steps=steps, **how
        )
        with graphs.traced() as traced:
            sparse_checks.fit(model, epochs=1)
        micro_step, *_ = traced
        assert graphs.collectives(micro_step) == []
        ops = max((graphs.collectives(g) for g in traced), key=len)
        found[name] = sorted(ops)
    replicas = 2
    reduces = ["CollectiveReduceV2"] * replicas
    gathers = ["CollectiveGatherV2"] * (2 * 2 * replicas)
    assert found["dense"] == reduces
    assert found["sparse"] == found["one table"] == gathers + reduces


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_rows_travel_in_the_wire_dtype(steps, wire_dtype):
    """Rounded to it once, so that they are off by a rounding, but off."""
    tables = [
        table_of(
            sparse_checks.fit(
                two_tables(
                    toy.strategy_of(2),
                    gradient_accumulation_steps=steps,
                    wire_dtype=wire,
                    sparse_sums=True,
                ),
                batch_size=5,
                epochs=1,
            )
        )
        for wire in (None, wire_dtype)
    ]
    start = two_tables(toy.strategy_of(2)).get_weights()[0]
    exact, rounded = (table - start for table in tables)
    bits = {"bfloat16": 8, "float16": 11}[wire_dtype]
    error = np.abs(rounded - exact)
    assert np.any(error > 0)
    # Each of two parts is off by half a unit; they may cancel a bit.
    assert error.max() <= 2.0**-bits * 2 * np.abs(exact).max()


def test_float16_on_the_wire_keeps_small_and_large_rows():
    """Multiplied by one power of two, the same for all replicas."""
    strategy = toy.strategy_of(2)

    @tf.function
    def reduced():
        def on_replica():
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group, 0)
            # Replica 1 has nothing.
            indices = tf.constant([3, 0])[: tf.where(first, 2, 0)]
            rows = tf.constant([[1e7], [2e6]])[: tf.where(first, 2, 0)]
            slices = tf.IndexedSlices(rows, indices, tf.constant([4, 1]))
            (total,), _ = reduction.all_reduce_gradients(
                [slices], [], "float16"
            )
            return total.indices, total.values

        return strategy.run(on_replica)

    for values, expected in zip(
        reduced(), ([3, 0], [[1e7], [2e6]]), strict=True
    ):
        for copy in strategy.experimental_local_results(values):
            np.testing.assert_allclose(copy, expected, rtol=2.0**-10)


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory):
    """What each of two workers found, with two replicas each."""
    names = ("windows", "few_rows", "bad_row", "collectives")
    directory = tmp_path_factory.mktemp("workers")
    return workers.run_checks(
        "sparse_checks", names, directory, timeout=280, replicas=2
    )


def one_big_batch(batch_size, **arguments):
    """Dense sums on one device, in one process."""
    model = two_tables(toy.strategy_of(1), micro_batch_size=9)
    return sparse_checks.values(
        sparse_checks.fit(model, batch_size=batch_size, **arguments)
    )


def test_four_replicas_on_two_workers(of_workers):
    found = workers.same(of_workers, "windows")
    for name, batch_size in {"one": 3, "two": 6, "cut": 3}.items():
        np.testing.assert_allclose(
            found[name], one_big_batch(batch_size), rtol=1e-5, atol=1e-6
        )
    for name, bits in {"bfloat16": 8, "float16": 11}.items():
        error = np.abs(np.subtract(found[name], found["one"])).max()
        assert 0 < error < 2.0**-bits


def test_workers_without_rows(of_workers):
    found = workers.same(of_workers, "few_rows")
    np.testing.assert_allclose(found, one_big_batch(3), rtol=1e-5, atol=1e-6)


def test_inf_on_the_last_worker_is_seen_by_all(of_workers):
    found = workers.same(of_workers, "bad_row")
    assert found["skipped"] and found["same"]
    np.testing.assert_allclose(
        found["next"], one_big_batch(6), rtol=1e-5, atol=1e-6
    )


def test_collectives_of_two_workers(of_workers):
    """On this worker's two replicas; see above for one process."""
    assert workers.same(of_workers, "collectives") == (
        ["CollectiveGatherV2"] * 8 + ["CollectiveReduceV2"] * 2
    )


# --- The choice ------------------------------------------------------------


def test_auto_keeps_rows_where_a_window_touches_few():
    spec = sparse.SparseSpec(tf.TensorShape([1000, 4]), tf.float32, rows=10)
    chosen = sparse.table_sum("t", spec, steps=5, replicas=5)
    assert chosen.is_sparse  # 4 * 250 is no more than 1000.
    assert str(chosen) == (
        "t: sparse, because a window touches at most 250 of 1,000 rows"
    )
    assert not sparse.table_sum("t", spec, steps=6, replicas=5).is_sparse
    assert not sparse.table_sum("t", spec).is_sparse


@pytest.mark.parametrize("rows,is_sparse", [(2**18, True), (2**18 - 1, False)])
def test_auto_goes_by_the_table_where_rows_are_not_known(rows, is_sparse):
    spec = sparse.SparseSpec(tf.TensorShape([rows, 4]), tf.float32)
    assert sparse.table_sum("t", spec, steps=1).is_sparse == is_sparse
    for asked in (True, False):
        chosen = sparse.table_sum("t", spec, asked=asked)
        assert chosen.is_sparse == asked
        assert chosen.reason == f"sparse_sums={asked}"


@pytest.mark.parametrize(
    "steps,is_sparse", [(2, True), ([(0, 2), (9, 200)], False)]
)
def test_batches_of_one_size_tell_the_rows(steps, is_sparse):
    """The largest window of all that will be."""
    model = embedding_model(
        1, OPTIMIZERS["sgd"], gradient_accumulation_steps=steps
    )
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS))
    model.fit(data.batch(2, drop_remainder=True), verbose=0)
    (chosen,) = model.table_sums
    assert chosen.is_sparse == is_sparse
    number = 4 if is_sparse else 400
    assert chosen.reason == f"a window touches at most {number} of 1,000 rows"


def test_one_micro_step_on_one_replica_has_no_sums():
    model = fit(embedding_model(1, OPTIMIZERS["sgd"], sparse_sums=True))
    assert model.table_sums == () and model.accumulator_bytes == 0


def test_adasum_takes_dense_gradients():
    model = fit(
        embedding_model(2, OPTIMIZERS["sgd"], replica_reduction="adasum")
    )
    (chosen,) = model.table_sums
    assert str(chosen).endswith(
        ": dense, because AdaSum compares dense gradients"
    )
    with pytest.raises(ValueError, match="not be True with AdaSum"):
        embedding_model(
            2,
            OPTIMIZERS["sgd"],
            sparse_sums=True,
            replica_reduction=AdaSum("delta"),
        )


def test_bad_arguments_and_the_config():
    model = toy.toy(sparse_sums=False)
    assert model.get_compile_config()["sparse_sums"] is False
    with pytest.raises(ValueError, match="Received: sparse_sums='yes'"):
        toy.toy(sparse_sums="yes")


def test_a_run_tells_how_tables_were_summed():
    results = report.Results(
        history={},
        updates=1,
        skipped_updates=0,
        examples_per_second=1.0,
        input_wait=0.0,
        accumulator_bytes=8,
        wall_time=1.0,
        table_sums=("embedding/embeddings: sparse, because I say so",),
    )
    lines = report.table(results, pathlib.Path("there")).splitlines()
    (line,) = (line for line in lines if line.startswith("sum of"))
    assert line.endswith(" embedding/embeddings: sparse, because I say so")


class FreezesTheTable:
    """Trains all, then all but the first table, and so on."""

    def group_at(self, update):
        return update % 2

    def frozen(self, model, group):
        return model.trainable_variables[:group]


def test_gradient_freeze_shares_sparse_sums():
    """Windows in which one table of two stands still."""
    found = []
    for how in (True, False):
        model = two_tables(
            toy.strategy_of(2),
            gradient_accumulation_steps=2,
            gradient_freeze=FreezesTheTable(),
            sparse_sums=how,
        )
        sparse_checks.fit(model, batch_size=1, epochs=3)
        found.append([toy.value_of(model, v) for v in model.variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# --- What it rests on: Keras' optimizers -----------------------------------

CLIPS = ({}, {"clipnorm": 0.3}, {"clipvalue": 0.1}, {"global_clipnorm": 0.3})
KERAS = {
    "SGD": CLIPS,
    "Adam": (*CLIPS, {"weight_decay": 0.1}, {"amsgrad": True}),
    "RMSprop": ({}, {"centered": True, "momentum": 0.9}),
    "AdamW": ({},),
    "Adadelta": ({},),
    "Adagrad": ({},),
    "Adamax": ({},),
    "Adafactor": ({},),
    "Nadam": ({},),
    "Ftrl": ({},),
    "Lion": ({},),
    "Lamb": ({},),
}
# Where Keras takes no square of a slice before it adds up repeated ids.
LINEAR = {"SGD", "Lion"}


def after_updates(kind, arguments, steps, is_dense):
    """Table and slots after one update for each pair (indices, values)."""
    rng = np.random.default_rng(0)
    table = keras.Variable(rng.normal(size=(8, 3)).astype("float32"))
    optimizer = getattr(keras.optimizers, kind)(0.1, **arguments)
    optimizer.build([table])
    for indices, values in steps:
        gradient = tf.IndexedSlices(values, indices, tf.constant([8, 3]))
        if is_dense:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply([gradient])
    return [table.numpy(), *(v.numpy() for v in optimizer.variables)]


def slices(*indices, seed=1):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(indices), 3))
    return tf.constant(indices, tf.int64), tf.constant(values, tf.float32)


@pytest.mark.parametrize("kind", KERAS)
def test_keras_does_the_same_with_rows_of_which_each_is_there_once(kind):
    """Momenta of untouched rows decay, and clipping sees the same norm."""
    steps = [slices(1, 3), slices(3, 5, 6), slices(), slices(0)]
    for arguments in KERAS[kind]:
        for one, other in zip(
            after_updates(kind, arguments, steps, is_dense=False),
            after_updates(kind, arguments, steps, is_dense=True),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KERAS)
def test_keras_squares_slices_before_it_adds_up_repeated_ids(kind):
    """Why rows are combined first; raw slices would break the law."""
    one, other = (
        after_updates(kind, {}, [slices(1, 1, 3)], is_dense)[0]
        for is_dense in (False, True)
    )
    assert np.allclose(one, other, rtol=1e-4) == (kind in LINEAR)


# --- The parts -------------------------------------------------------------


def test_a_sum_holds_each_row_once():
    sums = ReplicaSums.zeros(
        [sparse.SparseSpec(tf.TensorShape([9, 2]), tf.float32)]
    )
    assert sums.num_bytes == 0
    for indices in ([4, 4, 1], [1, 8], []):
        rows = tf.ones([len(indices), 2])
        sums.add([tf.IndexedSlices(rows, tf.constant(indices, tf.int32))])
    expected = {4: [2, 2], 1: [2, 2], 8: [1, 1]}
    (total,) = sums.values()
    assert in_each(total) == expected
    assert total.dense_shape.numpy().tolist() == [9, 2]
    sums.reset()
    assert in_each(sums.values()[0]) == {}
    assert sums.num_bytes == 3 * (2 * 4 + INDEX_BYTES)  # The most so far.


def test_values_with_more_that_is_not_kept():
    """Of a sum of rows, of a dense one of the same table, and of a scalar."""
    shape = tf.TensorShape([3, 1])
    sums = ReplicaSums.zeros(
        [
            sparse.SparseSpec(shape, tf.float32),
            tf.TensorSpec(shape, tf.bfloat16),
            tf.TensorSpec([], tf.float32),
        ]
    )

    def found(*indices):
        rows = 1.0 + tf.range(len(indices), dtype=tf.float32)[:, tf.newaxis]
        of_rows = tf.IndexedSlices(rows, tf.constant(indices), shape)
        return [of_rows, of_rows, tf.constant(10.0)]

    sums.add(found(2, 0))
    for _ in range(2):
        rows, table, scalar = sums.values(found(0, 0, 2))
        assert in_each(rows) == {2: [1 + 3], 0: [2 + 1 + 2]}
        assert table.dtype == tf.float32
        assert table.numpy().tolist() == [[2 + 1 + 2], [0], [1 + 3]]
        assert float(scalar) == 20
    rows, table, scalar = sums.values()
    assert in_each(rows) == {2: [1], 0: [2]} and float(scalar) == 10


def test_accumulator_of_ones_own_with_a_sparse_variable():
    """Replica 1 has other rows, and none in the second micro-step."""
    strategy = toy.strategy_of(2)
    with strategy.scope():
        table = keras.Variable(np.zeros((6, 2), "float32"))
        other = keras.Variable(np.zeros(3, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        accumulator = tfaccum.GradientAccumulator(
            [table, other], sparse_variables=[table]
        )

    def micro_step(k):
        context = tf.distribute.get_replica_context()
        r = tf.cast(context.replica_id_in_sync_group, tf.int64)
        rows = tf.ones([2, 2]) * tf.cast(1 + r, tf.float32)
        gradient = tf.IndexedSlices(
            rows, tf.stack([r, tf.constant(5, r.dtype)])
        )
        accumulator.add(
            [gradient if k == 0 else None, tf.ones(3)], weight=r + 1
        )

    @tf.function
    def window():
        with strategy.scope():
            for k in range(2):
                strategy.run(micro_step, args=(k,))
            return accumulator.apply(optimizer)

    for count in (1, 2):
        assert bool(window())
        # Weights are 1, 2, 1, 2; gradients 1 and 2 in the first micro-step.
        expected = np.zeros((6, 2))
        expected[[0, 1, 5]] = [[1], [4], [5]]
        np.testing.assert_allclose(
            table.numpy(), -count * expected / 6, rtol=1e-6
        )
        np.testing.assert_allclose(other.numpy(), [-count] * 3, rtol=1e-6)
    assert accumulator.num_bytes == 2 * (2 * 4 + INDEX_BYTES) + 4 * (3 + 1)


def test_accumulator_refuses_what_is_not_sparse():
    table, other = keras.Variable([[1.0]]), keras.Variable([[1.0]])
    with pytest.raises(ValueError, match="Received: sparse_variables with"):
        tfaccum.GradientAccumulator([table], sparse_variables=[other])
    accumulator = tfaccum.GradientAccumulator([table], sparse_variables=[table])
    with pytest.raises(ValueError, match=r"Received: a tensor of shape \(1, 1"):
        accumulator.add([tf.ones([1, 1])])
