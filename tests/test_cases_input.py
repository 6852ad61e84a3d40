"""Cases J: whatever the data look like, each example counts once."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum.arrays import ArrayEpochs


def column(values):
    return np.array(values, np.float32)[:, np.newaxis]


def network(model_class=tfaccum.Model, replicas=1, **arguments):
    """BatchNorm, metrics and a fixed start; the same for every replica."""
    with toy.strategy_of(replicas).scope():
        keras.utils.set_random_seed(4)
        inputs = keras.Input((2,))
        x = keras.layers.BatchNormalization(momentum=0.5)(inputs)
        outputs = keras.layers.Dense(3, activation="softmax")(x)
        model = model_class(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
            **arguments,
        )
    return model


def examples(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(number, 2)).astype("float32"), rng.integers(
        0, 3, number
    )


def assert_same_logs(logs, expected):
    assert logs.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


# --- J2: replicas and micro-batches without examples ----------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_J2_nine_examples_in_batches_of_eight(steps):
    model = toy.toy(2, gradient_accumulation_steps=steps)
    seen = toy.fit(model, toy.batches([1, 2, 3, 4, 5, 6, 7, 8], [9]))
    expected = [-4.5, -13.5] if steps == 1 else [-5]
    assert [w for (w,) in seen.weights] == expected
    assert seen.of_updates("examples") == ([8, 1] if steps == 1 else [9])
    assert np.isfinite(seen.logs["loss"]).all()


@pytest.mark.parametrize(
    "replicas,batch_size,micro_batch_size",
    [
        (2, 8, None),
        (2, 8, 3),  # Shares of 4 in 2 micro-steps, shares of 1 and 0 in 1.
        (4, 8, 1),  # Shares of 2 in 2 micro-steps.
        (4, 8, 100),  # Larger than any share.
        (4, 2, None),  # Two replicas never see anything.
        (4, 2, 5),
    ],
)
def test_J2_empty_shares_are_exact(replicas, batch_size, micro_batch_size):
    model = toy.toy(
        replicas,
        model_class=toy.LogRows,
        micro_batch_size=micro_batch_size,
    )
    x = column(range(1, 10))
    model.fit(x, x, batch_size=batch_size, shuffle=False, verbose=0)
    assert sorted(model.examples_seen) == list(range(1, 10))
    limit = micro_batch_size or -(-batch_size // replicas)
    assert max(map(len, model.micro_steps)) <= limit
    batches = np.split(x, range(batch_size, 9, batch_size))
    expected = -sum(np.mean(batch) for batch in batches)
    assert toy.weight_of(model) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "replicas,how",
    [
        (2, {"gradient_accumulation_steps": 2}),
        (4, {}),
        (4, {"micro_batch_size": 1}),
    ],
)
def test_J2_everything_stays_finite(replicas, how):
    """Losses, metrics, weights and BatchNorm's statistics."""
    x, y = examples(9)
    model = network(replicas=replicas, **how)
    logs = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    logs = {**logs, **model.evaluate(x, y, batch_size=8, return_dict=True)}
    for name, values in logs.items():
        assert np.isfinite(values).all(), name
        if "accuracy" in name:
            assert np.max(values) <= 1
    for variable in model.variables:
        assert np.isfinite(toy.value_of(model, variable)).all(), variable.path


@pytest.mark.parametrize("how", [{}, {"micro_batch_size": 1}], ids=str)
def test_J2_one_example_on_four_replicas(how):
    """It makes the statistics too: those of the others do not dilute it."""
    x, y = np.float32([[3.0, -5.0]]), np.array([1])
    model = network(replicas=4, **how)
    logs = model.fit(x, y, verbose=0).history
    reference = network(keras.Model)
    assert_same_logs(logs, reference.fit(x, y, verbose=0).history)
    norm = model.layers[1]
    for variable, value in (
        (norm.moving_mean, [1.5, -2.5]),
        (norm.moving_variance, [0.5, 0.5]),
    ):
        np.testing.assert_allclose(toy.value_of(model, variable), value)
    for one, other in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(
            toy.value_of(model, one), other.numpy(), rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("replicas", [1, 2])
def test_J2_an_empty_batch_in_the_middle_changes_nothing(replicas):
    model = toy.toy(replicas, gradient_accumulation_steps=2)
    seen = toy.fit(model, toy.batches([1, 2], [], [], [], [4, 6]))
    assert [w for (w,) in seen.weights] == [-1.5, -1.5, -6.5]
    assert seen.of_updates("weight") == [2, 0, 2]
    assert seen.iterations == [1, 1, 2]


# --- Weights --------------------------------------------------------------


@pytest.mark.parametrize(
    "weights",
    [
        {"class_weight": {0: 0.5, 1: 2.0, 2: 3.0}},
        {"sample_weight": np.linspace(0.1, 3, 11)},
    ],
    ids=lambda weights: next(iter(weights)),
)
def test_weights_are_those_of_one_big_batch(weights):
    x, y = examples(11)
    models, logs = [], []
    for model_class, replicas, batch_size, how in (
        (keras.Model, 1, 8, {}),
        (tfaccum.Model, 2, 4, {"gradient_accumulation_steps": 2}),
    ):
        with toy.strategy_of(replicas).scope():
            keras.utils.set_random_seed(4)
            inputs = keras.Input((2,))
            outputs = keras.layers.Dense(3, activation="softmax")(inputs)
            model = model_class(inputs, outputs)
            model.compile(
                keras.optimizers.Adam(0.1),
                "sparse_categorical_crossentropy",
                metrics=["accuracy"],
                weighted_metrics=["accuracy"],
                **how,
            )
        history = model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            **weights,
        )
        models.append(model)
        logs.append(history.history)
    assert_same_logs(logs[1], logs[0])
    for one, other in zip(models[1].weights, models[0].weights, strict=True):
        np.testing.assert_allclose(
            toy.value_of(models[1], one), other.numpy(), rtol=1e-4, atol=1e-6
        )


# --- Kinds of data --------------------------------------------------------

NINE = [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
# Windows of two batches: means 4.5 and 9.
TWICE = [-4.5, -13.5, -18, -27]


class Batches(keras.utils.PyDataset):
    """Nine numbers in three batches; counts its epochs."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return column(NINE[index]), column(NINE[index])

    def on_epoch_end(self):
        self.epochs += 1


def generator():
    for _ in range(2):
        for batch in NINE:
            yield column(batch), column(batch)


def unknown_size(batches):
    dataset = toy.batches(*batches, [-1.0], is_size_known=False)
    return dataset.filter(lambda x, y: x[0, 0] >= 0)


def as_dict(batches):
    return toy.batches(*batches).map(lambda x, y: ({"number": x}, y))


SOURCES = {
    "arrays": lambda: {
        "x": column(range(1, 10)),
        "y": column(range(1, 10)),
        "batch_size": 4,
        "shuffle": False,
    },
    "dataset": lambda: {"x": toy.batches(*NINE)},
    "unknown_size": lambda: {"x": unknown_size(NINE)},
    "repeated": lambda: {
        "x": toy.batches(*NINE).repeat(),
        "steps_per_epoch": 3,
    },
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3},
    "py_dataset": lambda: {"x": Batches(), "shuffle": False},
    "dataset_function": lambda: {"x": lambda context: toy.batches(*NINE)},
    "without_targets": lambda: {"x": toy.batches(*NINE).map(lambda x, y: (x,))},
    "without_weights": lambda: {
        "x": ((column(b), column(b), None) for b in NINE * 2),
        "steps_per_epoch": 3,
    },
}


class LogRowsOnly(toy.LogRows):
    """Needs no targets: its loss is the mean output."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean(y_pred)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_kind_of_data_is_seen_once_per_epoch(kind, replicas):
    model = toy.toy(
        replicas, model_class=LogRowsOnly, gradient_accumulation_steps=2
    )
    arguments = SOURCES[kind]()
    data = arguments.pop("x")
    seen = toy.fit(model, data, epochs=2, **arguments)
    assert sorted(model.examples_seen) == sorted(2 * list(range(1, 10)))
    assert [w for (w,) in seen.weights] == TWICE
    assert seen.of_updates("examples") == [8, 1, 8, 1]
    if kind == "py_dataset":
        assert data.epochs == 2


class Aligned(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return (self.batches[index],)


def ragged_rows(x):
    return tf.RaggedTensor.from_row_lengths(x, tf.ones_like(x[:, 0], tf.int32))


OWN_ARRAYS = {
    "dataset": toy.from_generator,
    "generator": lambda batches: ((batch,) for batch in 2 * batches),
    "py_dataset": Aligned,
    "ragged": lambda batches: toy.from_generator(batches).map(ragged_rows),
}


@pytest.mark.parametrize(
    "replicas, micro_batch_size",
    [(1, None), (1, 2), (1, "auto"), (2, None), (2, 1), (2, "auto")],
)
@pytest.mark.parametrize("kind", OWN_ARRAYS)
def test_nothing_is_written_into_the_arrays_of_the_user(
    kind, replicas, micro_batch_size
):
    """TensorFlow shares their memory, and computes in place where it may."""
    batches = toy.aligned(7, rows=[1, 2, 5])
    model = toy.Negated.compiled(
        toy.strategy_of(replicas), micro_batch_size=micro_batch_size
    )
    seen = toy.fit(
        model,
        OWN_ARRAYS[kind](batches),
        epochs=2,
        steps_per_epoch=3 if kind == "generator" else None,
        shuffle=False,
    )
    assert [batch.tolist() for batch in batches] == [
        np.full([rows, 16], 7).tolist() for rows in (1, 2, 5)
    ]
    assert [w for (w,) in seen.weights] == [7, 14, 21, 28, 35, 42]


@pytest.mark.parametrize("replicas", [1, 2])
def test_dict_inputs_and_outputs(replicas):
    with toy.strategy_of(replicas).scope():
        number = keras.Input((1,), name="number")
        other = keras.Input((1,), name="other")
        outputs = {
            "a": toy.scalar(name="a")(number),
            "b": toy.scalar(name="b")(other),
        }
        model = tfaccum.Model({"number": number, "other": other}, outputs)
        model.compile(
            keras.optimizers.SGD(1.0),
            loss={"a": toy.product, "b": toy.product},
            gradient_accumulation_steps=2,
        )
    x = column([1, 2, 3, 4, 5])
    inputs = {"number": x, "other": 10 * x}
    model.fit(inputs, {"a": x, "b": x}, batch_size=2, shuffle=False, verbose=0)
    # Windows of 4 and 1 examples: 2.5 + 5.
    assert toy.weights_of(model) == [-7.5, -75]
    predicted = model.predict(inputs, batch_size=2, verbose=0)
    np.testing.assert_allclose(predicted["a"], -7.5 * x)
    np.testing.assert_allclose(predicted["b"], -750 * x)


@pytest.mark.parametrize("num_batches", [3, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_unknown_cardinality(replicas, num_batches):
    """K = 2 divides 4: nobody may take the end for one more update."""
    xs = [[2 * i + 1, 2 * i + 2] for i in range(num_batches)]
    model = toy.toy(replicas, gradient_accumulation_steps=2)
    seen = toy.fit(model, unknown_size(xs), epochs=2)
    assert seen.iterations == [1, 2, 3, 4]
    last = [6] if num_batches == 3 else [8]
    assert seen.of_updates("examples") == [4, last[0] - 4] * 2
    means = [2.5, np.mean(xs[2:])] * 2
    assert [w for (w,) in seen.weights] == pytest.approx(-np.cumsum(means))
    np.testing.assert_allclose(
        model.evaluate(unknown_size(xs), verbose=0),
        toy.weight_of(model) * np.mean(xs),
        rtol=1e-6,
    )
    predicted = model.predict(unknown_size(xs), verbose=0)
    np.testing.assert_allclose(
        predicted.ravel(), toy.weight_of(model) * np.ravel(xs), rtol=1e-6
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_per_epoch_goes_on_where_the_last_epoch_ended(replicas):
    model = toy.toy(
        replicas, model_class=toy.LogRows, gradient_accumulation_steps=3
    )
    dataset = toy.batches([1, 2], [3, 4], [5]).repeat()
    seen = toy.fit(model, dataset, epochs=3, steps_per_epoch=4)
    # Batches 1 2 3 1, 2 3 1 2, 3 1 2 3 in windows of three and one.
    sums, sizes = {1: 3, 2: 7, 3: 5}, {1: 2, 2: 2, 3: 1}
    windows = [[1, 2, 3], [1], [2, 3, 1], [2], [3, 1, 2], [3]]
    means = [
        sum(sums[b] for b in window) / sum(sizes[b] for b in window)
        for window in windows
    ]
    assert [w for (w,) in seen.weights] == pytest.approx(-np.cumsum(means))
    assert len(model.examples_seen) == sum(
        sizes[b] for window in windows for b in window
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_per_epoch_stops_before_the_data_do(replicas):
    """Two of three batches in each epoch; the third begins the second."""
    model = toy.toy(replicas, gradient_accumulation_steps=2)
    seen = toy.fit(
        model, toy.batches([1, 1], [3, 3], [8]), epochs=2, steps_per_epoch=2
    )
    assert seen.weights[0] == [-2]
    # Keras goes on with the third batch.
    assert seen.weights[1] == [-10]


def test_data_that_end_too_early_are_said():
    model = toy.toy(2, gradient_accumulation_steps=2)
    with pytest.warns(UserWarning, match="ended after 4 of 10 batches|ended"):
        seen = toy.fit(
            model, toy.batches([1, 1], [3, 3], [8]), steps_per_epoch=10
        )
    assert seen.iterations == [1, 2]
    assert toy.weight_of(model) == -10


class KeepRun(keras.callbacks.Callback):
    """Keeps what must not keep the data."""

    def on_train_end(self, logs=None):
        self.run = self.model.current_run


def fit_and_forget(model, kind, **arguments):
    """Trains on data that nobody else has; returns weak references."""

    class Array(np.ndarray):
        pass

    x = column([1, 2, 3]).view(Array)
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(2)
    data = {
        "arrays": (x, x),
        "dataset": (dataset,),
        "function": (lambda context: dataset,),
    }[kind]
    model.fit(*data, verbose=0, **arguments)
    return [weakref.ref(each) for each in (x, dataset, data[0])]


@pytest.mark.parametrize("kind", ["arrays", "dataset", "function"])
def test_nothing_keeps_the_data_after_fit(kind):
    model, keep = toy.toy(), KeepRun()
    kept = fit_and_forget(model, kind, callbacks=[keep])
    assert model.num_updates == (1 if kind == "arrays" else 2)
    gc.collect()
    assert [each() for each in kept] == [None] * 3
    assert not [o for o in gc.get_objects() if type(o) is ArrayEpochs]
    assert keep.run.num_updates == model.num_updates


def test_there_is_a_run_while_fit_goes_on_only():
    model, keep = toy.toy(), KeepRun()
    x = column([1, 2])
    assert model.current_run is None
    model.fit(x, x, verbose=0, callbacks=[keep])
    assert keep.run.position.epoch == 1
    assert model.current_run is None
    with pytest.raises(toy.Stopped):
        model.fit(x, x, verbose=0, callbacks=[toy.StopAfter(1)])
    assert model.current_run is None


@pytest.mark.parametrize("replicas", [1, 2])
def test_shuffled_arrays_are_seen_once_per_epoch(replicas):
    """In an order of its own in each epoch."""
    model = toy.toy(
        replicas, model_class=toy.LogRows, gradient_accumulation_steps=2
    )
    x = column(range(40))
    model.fit(x, x, batch_size=10, epochs=2, verbose=0)
    first, second = np.split(np.array(model.examples_seen), 2)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first.tolist() != list(range(40))
    assert set(first[:10]) != set(second[:10])


@pytest.mark.parametrize("replicas", [1, 2])
def test_validation_is_that_of_keras(replicas):
    x, y = examples(20)
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0}
    reference = network(keras.Model)
    reference.optimizer.learning_rate = 0.0
    expected = reference.fit(x, y, validation_split=0.35, **arguments).history
    model = network(replicas=replicas, gradient_accumulation_steps=3)
    model.optimizer.learning_rate = 0.0
    logs = model.fit(x, y, validation_split=0.35, **arguments).history
    assert logs.keys() == expected.keys()
    if replicas == 1:  # On two, BatchNorm normalises halves of a batch.
        assert_same_logs(logs, expected)
    reference.set_weights([toy.value_of(model, w) for w in model.weights])
    expected = reference.evaluate(x[13:], y[13:], verbose=0, return_dict=True)
    for name, value in expected.items():
        assert logs[f"val_{name}"] == pytest.approx([value], rel=1e-5)


# --- Refused --------------------------------------------------------------


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_distributed_dataset_is_refused(method):
    model = toy.toy(2)
    dataset = model.distribute_strategy.experimental_distribute_dataset(
        toy.batches([1, 2])
    )
    with pytest.raises(TypeError, match="must not be distributed already"):
        getattr(model, method)(dataset)


def test_data_without_rows_are_refused():
    model = toy.toy(2)
    dataset = tf.data.Dataset.from_tensor_slices((np.ones(3), np.ones(3)))
    with pytest.raises(ValueError, match="must yield batches"):
        model.fit(dataset, verbose=0)
