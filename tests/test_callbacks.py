"""TensorBoard, throughput and curves, read back from what was written."""

import csv
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import tfaccum
from tests import toy
from tfaccum import callbacks

TAGS = {
    "loss",
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "skipped_updates",
    "examples_per_second",
    "input_wait",
}


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Work(keras.callbacks.Callback):
    """Lets time pass: 10 s for the first train call, then 2 s; 50 s a test."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.first = True

    def on_train_batch_end(self, batch, logs=None):
        self.clock.now += 10.0 if self.first else 2.0
        self.first = False

    def on_test_batch_end(self, batch, logs=None):
        self.clock.now += 50.0


class Keep(keras.callbacks.Callback):
    """Keeps all updates, and the logs of all batches."""

    def __init__(self):
        super().__init__()
        self.updates = []
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.updates += self.model.last_updates
        self.batches.append((batch, dict(logs)))


def product(y, y_pred):
    """The loss w * x, whose gradient is x."""
    return y_pred[..., 0]


def compiled(steps=1, replicas=1, rate=0.1, **arguments):
    """One weight, from zero."""
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tfaccum.make_strategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros"
        )
        model = tfaccum.Model(inputs, layer(inputs))
        model.compile(
            keras.optimizers.SGD(rate),
            product,
            gradient_accumulation_steps=steps,
            **arguments,
        )
    return model


def dataset(rows, batch):
    x = np.arange(1.0, rows + 1)[:, None].astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(batch)


def scalars(log_dir):
    """{tag: [(step, value), ...]} of all event files in a directory."""
    events = event_accumulator.EventAccumulator(
        str(log_dir), size_guidance={event_accumulator.TENSORS: 0}
    ).Reload()
    return {
        tag: [
            (event.step, float(tf.make_ndarray(event.tensor_proto)))
            for event in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


def shown(text, name):
    """All values that the bar has shown under a name, as text."""
    return [
        part.split(":")[1].split()[0]
        for part in text.replace("\r", " - ").split(" - ")
        if part.startswith(f"{name}:")
    ]


def test_K1_bar_tensorboard_csv_and_history_agree_for_every_K(tmp_path, capsys):
    seen = {}
    for steps in (1, 2, 4):
        folder = tmp_path / str(steps)
        history = (
            compiled(steps)
            .fit(
                dataset(16, 8 // steps),
                validation_data=dataset(6, 3),
                epochs=2,
                verbose=1,
                callbacks=[
                    callbacks.TensorBoard(folder),
                    callbacks.Throughput(),
                    keras.callbacks.CSVLogger(folder / "log.csv"),
                ],
            )
            .history
        )
        with open(folder / "log.csv") as file:
            rows = list(csv.DictReader(file))
        train, validation = (
            scalars(folder / name) for name in ("train", "validation")
        )
        for kind in ("loss", "val_loss"):
            written = (validation if "val" in kind else train)["epoch_loss"]
            assert [step for step, _ in written] == [0, 1]
            np.testing.assert_allclose(
                [value for _, value in written], history[kind], rtol=1e-6
            )
            np.testing.assert_allclose(
                [float(row[kind]) for row in rows], history[kind], rtol=1e-6
            )
        text = capsys.readouterr().out
        for kind in ("loss", "val_loss"):
            # The last that each epoch's bar has shown.
            bars = [
                shown(epoch, kind)[-1] for epoch in text.split("Epoch ")[1:]
            ]
            assert bars == [f"{value:.4f}" for value in history[kind]]
        assert [float(row["updates"]) for row in rows] == [2, 4]
        # Windows of equal size: the epoch's loss is the mean of its updates'.
        by_update = [value for _, value in train["loss"]]
        np.testing.assert_allclose(
            np.reshape(by_update, (2, 2)).mean(1), history["loss"], rtol=1e-6
        )
        seen[steps] = [history["loss"], history["val_loss"], by_update]
    for steps in (2, 4):
        for value, expected in zip(seen[steps], seen[1], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-6)
    # By hand: x = 1..8 and 9..16, w = 0, then -0.1 * 4.5.
    np.testing.assert_allclose(seen[4][2][:2], [0.0, -0.45 * 12.5], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("windows_per_call", [1, 2])
def test_K2_exactly_one_scalar_of_each_name_per_update(
    tmp_path, windows_per_call, replicas
):
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1.0)
    model = compiled(
        3, replicas, rate=schedule, steps_per_execution=windows_per_call
    )
    keep = Keep()
    # 7 dataset batches: windows of 3, 3 and 1.
    model.fit(
        dataset(13, 2),
        epochs=2,
        verbose=0,
        callbacks=[callbacks.TensorBoard(tmp_path), keep],
    )
    train = scalars(tmp_path / "train")
    assert set(train) == TAGS | {"epoch_loss"}
    for tag in TAGS:
        assert [step for step, _ in train[tag]] == [1, 2, 3, 4, 5, 6], tag
    for tag in TAGS - {
        "skipped_updates",
        "examples_per_second",
        "input_wait",
    }:
        np.testing.assert_allclose(
            [value for _, value in train[tag]],
            [getattr(update, tag) for update in keep.updates],
            rtol=1e-6,
        )
    np.testing.assert_allclose(
        [value for _, value in train["learning_rate"]],
        [0.1 / (1 + step) for step in range(6)],
        rtol=1e-6,
    )
    # Gradients are the mean of x: of 1..6, 7..12, 13.
    np.testing.assert_allclose(
        [value for _, value in train["gradient_norm"]][:3], [3.5, 9.5, 13.0]
    )


@pytest.mark.parametrize("windows_per_call", [1, 4])
def test_K2_a_skipped_update_has_no_point_and_is_counted(
    tmp_path, windows_per_call
):
    model = compiled(2, steps_per_execution=windows_per_call)
    x = np.ones((12, 1), "float32")
    x[2:4] = np.inf  # the second window, and the fifth below
    x[8:10] = np.inf
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(1)
    curves = callbacks.Curves()
    model.fit(
        data,
        verbose=0,
        callbacks=[callbacks.TensorBoard(tmp_path), curves],
    )
    train = scalars(tmp_path / "train")
    for tag in TAGS:
        assert [step for step, _ in train[tag]] == [1, 2, 3, 4], tag
    assert [v for _, v in train["skipped_updates"]] == [0, 1, 1, 2]
    assert (curves.num_updates, curves.skipped_updates) == (4, 2)


def test_K2_a_window_of_weight_zero_has_no_point(tmp_path):
    model = compiled(1)
    x = np.ones((3, 1), "float32")
    weight = np.array([1.0, 0.0, 1.0], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x, weight)).batch(1)
    model.loss_weight = lambda x, y, y_pred, weight: tf.reduce_sum(weight)
    with pytest.warns(UserWarning, match="total weight of zero"):
        model.fit(data, verbose=0, callbacks=[callbacks.TensorBoard(tmp_path)])
    loss = scalars(tmp_path / "train")["loss"]
    assert [step for step, _ in loss] == [1, 2]


def test_K2_steps_go_on_in_a_second_fit(tmp_path):
    model = compiled(2)
    for run in ("first", "second"):
        model.fit(
            dataset(8, 2),
            verbose=0,
            callbacks=[callbacks.TensorBoard(tmp_path / run)],
        )
    steps = {
        run: [step for step, _ in scalars(tmp_path / run / "train")["loss"]]
        for run in ("first", "second")
    }
    assert steps == {"first": [1, 2], "second": [3, 4]}


@pytest.mark.parametrize("windows_per_call", [1, 2])
def test_K3_the_bar_ends_at_its_total_and_the_logs_count_updates(
    capsys, windows_per_call
):
    keep = Keep()
    model = compiled(3, steps_per_execution=windows_per_call)
    history = model.fit(
        dataset(14, 2),
        epochs=2,
        verbose=1,
        callbacks=[callbacks.Throughput(), keep],
    ).history
    # 7 dataset batches, 3 updates per epoch.
    ends = [2, 5, 6] if windows_per_call == 1 else [5, 6]
    assert [batch for batch, _ in keep.batches] == ends * 2
    updates = [1, 2, 3] if windows_per_call == 1 else [2, 3]
    expected = updates + [u + 3 for u in updates]
    assert [logs["updates"] for _, logs in keep.batches] == expected
    assert history["updates"] == [3, 6]
    text = capsys.readouterr().out
    epochs = text.split("Epoch ")[1:]
    for epoch, last in zip(epochs, ("3", "6"), strict=True):
        counts = [
            line.split("\x1b[1m")[1].split("\x1b")[0]
            for line in epoch.split("\r")[1:]
        ]
        assert counts[-1] == "7/7"
        assert {int(count.split("/")[0]) for count in counts} <= {3, 6, 7}
        assert shown(epoch, "updates")[-1] == last


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
def test_K5_examples_per_second_count_K_and_replicas(tmp_path, steps, replicas):
    clock = Clock()
    throughput = callbacks.Throughput(clock=clock)
    # 4 calls an epoch, of 4 examples per micro-step and replica.
    per_update = 4 * steps * replicas
    history = (
        compiled(steps, replicas)
        .fit(
            dataset(4 * per_update, 4 * replicas),
            validation_data=dataset(4, 2),
            epochs=2,
            verbose=0,
            callbacks=[
                Work(clock),
                throughput,
                callbacks.TensorBoard(tmp_path, clock=clock),
            ],
        )
        .history
    )
    assert history["examples/s"] == [per_update / 2.0] * 2
    assert throughput.examples_per_second == per_update / 2.0
    rates = scalars(tmp_path / "train")["examples_per_second"]
    assert [value for _, value in rates] == pytest.approx(
        [per_update / 10.0] + [per_update / 2.0] * 7
    )


@pytest.mark.parametrize("rows", [None, 2])
def test_the_wait_for_data_is_a_part_of_the_time(tmp_path, rows):
    """Each batch takes 0.2 s to come, and the micro-steps next to nothing."""
    clock, keep = Clock(), Keep()

    def slow():
        for first in range(4):
            time.sleep(0.2)
            x = np.float32([[first], [2.0]])
            yield x, x

    data = tf.data.Dataset.from_generator(
        slow,
        output_signature=(tf.TensorSpec([rows, 1]), tf.TensorSpec([rows, 1])),
    ).apply(tf.data.experimental.assert_cardinality(4))
    history = (
        compiled(2)
        .fit(
            data,
            epochs=2,
            verbose=0,
            callbacks=[
                Work(clock),
                callbacks.Throughput(clock=clock),
                callbacks.TensorBoard(tmp_path, clock=clock),
                keep,
            ],
        )
        .history
    )
    waits = [update.input_wait for update in keep.updates]
    assert len(waits) == 4
    # What the second epoch waited for its 4 batches, of twice 2 s.
    assert sum(waits[2:]) > 0.4
    assert history["input_wait"][1] == pytest.approx(sum(waits[2:]) / 4.0)
    written = scalars(tmp_path / "train")["input_wait"]
    assert [value for _, value in written] == pytest.approx(
        [waits[0] / 10.0] + [wait / 2.0 for wait in waits[1:]]
    )


def test_no_replica_computes_while_another_waits():
    """What is computed must not count as a wait for the other's data."""
    seen, begun = [], threading.Event()

    def come(number):
        # The second replica's data are late: time for the first to begin.
        if number % 2:
            begun.wait(0.2)
        else:
            begun.clear()
        seen.append("data")
        return number

    def work(x):
        begun.set()
        seen.append("work")
        return x

    def of_replica(number):
        number = tf.numpy_function(come, [number], tf.int64)
        number = tf.ensure_shape(number, [])
        x = tf.reshape(tf.cast(number, tf.float32), [1, 1])
        return (tf.constant(1),) * 3, (x, x)

    class Noted(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(
                tf.numpy_function(work, [x], tf.float32), x.shape
            )

    model = toy.toy(
        2,
        layers=lambda: [Noted(), toy.scalar()],
        gradient_accumulation_steps=2,
    )
    model.fit(toy.batches([1, 2], [3, 4]), verbose=0)
    seen.clear()

    @tf.function(autograph=False)
    def begin(iterator):
        _, _, wait, *_ = model.train_window.begin(
            iterator, tf.constant(2), tf.constant(False)
        )
        return wait

    options = tf.data.Options()
    options.autotune.enabled = False  # It would fetch ahead.
    elements = tf.data.Dataset.range(4).map(of_replica).with_options(options)
    wait = begin(iter(elements))
    assert seen == ["data", "data", "work", "work"] * 2
    assert wait >= 2 * 0.2


def test_K5_a_single_call_has_a_rate_too():
    clock = Clock()
    throughput = callbacks.Throughput(clock=clock)
    compiled(2).fit(
        dataset(6, 3), verbose=0, callbacks=[Work(clock), throughput]
    )
    assert throughput.examples_per_second == pytest.approx(6 / 10.0)


class ChangeLast(keras.callbacks.Callback):
    """Adds 1 to a variable of the last replica."""

    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def on_train_batch_end(self, batch, logs=None):
        strategy = self.model.distribute_strategy
        copies = strategy.experimental_local_results(self.variable.value)
        copies[-1].assign_add(tf.ones_like(copies[-1]))


def fit_with_dropout(model, *used):
    """Batches of 4 rows and of 1: then one of two replicas has none."""
    x = np.ones([5, 3], np.float32)
    model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=3,
        verbose=0,
        callbacks=[*used, callbacks.CompareReplicas(1)],
    )


def with_dropout():
    strategy = toy.strategy_of(2)
    with strategy.scope():
        inputs = keras.Input((3,))
        dropped = keras.layers.Dropout(0.5, seed=1)(inputs)
        model = tfaccum.Model(inputs, keras.layers.Dense(1)(dropped))
        model.compile("sgd", "mse")
    return model, strategy


def test_seeds_may_differ_between_replicas():
    """The second one draws a mask in every other update only."""
    model, strategy = with_dropout()
    fit_with_dropout(model)
    assert model.num_updates == 6
    seed = model.layers[1].seed_generator.state
    first, second = strategy.experimental_local_results(seed.value)
    assert first.numpy().tolist() != second.numpy().tolist()


@pytest.mark.parametrize("what", ["bias", "iteration"])
def test_weights_and_integers_of_the_optimizer_must_not(what):
    model, _ = with_dropout()
    variable = {
        "bias": model.layers[-1].bias,
        "iteration": model.optimizer.iterations,
    }[what]
    with pytest.raises(RuntimeError, match=f"{what} of replica.s. .1. differs"):
        fit_with_dropout(model, ChangeLast(variable))


def test_curves_are_those_of_the_updates_and_can_be_drawn(tmp_path):
    keep, curves = Keep(), callbacks.Curves()
    compiled(2).fit(
        dataset(12, 2),
        validation_data=dataset(4, 2),
        epochs=2,
        verbose=0,
        callbacks=[curves, keep],
    )
    assert curves.as_dict() == {
        "update": [1, 2, 3, 4, 5, 6],
        "loss": [update.loss for update in keep.updates],
        "learning_rate": [update.learning_rate for update in keep.updates],
    }
    assert [update for update, _ in curves.epochs] == [3, 6]
    assert "val_loss" in curves.epochs[0][1]
    curves.plot(tmp_path / "curves.png", title="a title")
    image = (tmp_path / "curves.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_curves_of_no_update_can_be_drawn(tmp_path):
    callbacks.Curves().plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
