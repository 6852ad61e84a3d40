"""The largest micro-batch that fits, with a memory that ends where it is told.

Memory runs out in the middle of a micro-step: TensorFlow turns a MemoryError
of a step into the ResourceExhaustedError that a device's allocator raises.
"""

import gc
import json
import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy, workers
from tests.multi_worker import memory_checks
from tests.multi_worker.memory_checks import Limited
from tfaccum.replay import Replay


def limited(replicas=1, limits=(8,), layers=None, **how):
    model = toy.toy(replicas, model_class=Limited, layers=layers, **how)
    memory_checks.set_limits(model, limits)
    return model


def rows(count, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, 1)) + 1).astype("float32")


def fit(model, x, batch_size, **arguments):
    arguments = {"shuffle": False, "verbose": 0} | arguments
    return model.fit(x, np.zeros_like(x), batch_size, **arguments)


@pytest.fixture
def said():
    """What is logged, line by line."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("absl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_is_halved_until_it_fits(said):
    """32 does not fit, nor 16; four micro-steps of 8 are the same update."""
    x = rows(64)
    model = limited(micro_batch_size="auto")
    seen = toy.fit(
        model,
        tf.data.Dataset.from_tensor_slices((x, np.zeros_like(x))).batch(32),
    )
    np.testing.assert_allclose(
        seen.weights,
        [[-x[:32].mean()], [-x[:32].mean() - x[32:].mean()]],
        rtol=1e-6,
    )
    assert [u.examples for u in seen.updates] == [32, 32]
    assert model.sizes_run == [8] * 8
    assert model.micro_batch_search.tried == [32, 16]
    assert said == [
        "Micro-batches of 32 do not fit on worker 0; trying 16.",
        "Micro-batches of 16 do not fit on worker 0; trying 8.",
        "Micro-batches of 8 fit.",
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_leaves_nothing_behind(replicas):
    """The same size in both: the same bits of all that training changes."""

    def layers():
        return [
            keras.layers.Dense(4, kernel_initializer="ones"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=3),
            toy.scalar(1.0),
        ]

    x = rows(74)
    found = []
    for size, limit in ((5, 100), (tfaccum.AutoMicroBatch(start=20), 5)):
        model = limited(
            replicas,
            limits=(100, limit)[-replicas:],
            layers=layers,
            optimizer=lambda: keras.optimizers.SGD(0.01),
            micro_batch_size=size,
            gradient_accumulation_steps=2,
            metrics=["mae"],
        )
        history = fit(model, x, 20, epochs=2).history
        copies = [
            copy.numpy().tolist()
            for v in [*model.variables, *model.metrics_variables]
            for copy in model.distribute_strategy.experimental_local_results(
                v.value
            )
        ]
        found.append([history, copies])
    assert model.micro_batch_search.tried == [20, 10][replicas - 1 :]
    assert found[0] == found[1]


def test_what_was_read_once_is_not_lost():
    """A generator cannot be read again, and memory ends in the 2nd batch."""
    batches = [rows(size, seed=size) for size in (3, 16, 5, 12, 7)]
    model = limited(
        limits=(6,),
        micro_batch_size="auto",
        gradient_accumulation_steps=2,
    )
    seen = toy.fit(model, ((x, np.zeros_like(x)) for x in batches))
    expected = np.cumsum(
        [
            -np.concatenate(batches[first : first + 2]).mean()
            for first in (0, 2, 4)
        ]
    )
    np.testing.assert_allclose(np.ravel(seen.weights), expected, rtol=1e-6)
    assert [u.examples for u in seen.updates] == [19, 17, 7]
    assert model.micro_batch_search.tried == [16, 8]


def test_one_of_two_replicas_runs_out():
    x = rows(48)
    model = limited(2, limits=(100, 3), micro_batch_size="auto")
    fit(model, x, 24)
    np.testing.assert_allclose(
        toy.weight_of(model), -x[:24].mean() - x[24:].mean(), rtol=1e-6
    )
    assert model.micro_batch_search.tried == [12, 6]


def test_one_of_two_workers_runs_out(tmp_path):
    """Both take the same window again, in micro-batches of the same size."""
    found = workers.run_checks("memory_checks", ["worker_1"], tmp_path)
    first, second = (result["worker_1"] for result in found)
    assert first == second
    x = memory_checks.rows()
    np.testing.assert_allclose(
        first["weight"], -x[:24].mean() - x[24:].mean(), rtol=1e-6
    )
    assert first["tried"] == [12, 6]
    assert first["sizes"] == [3] * 8
    assert first["examples"] == [24, 24]


@pytest.mark.parametrize("updates", [6, 8])
def test_what_was_over_before_is_not_taken_again(tmp_path, updates):
    """Goes on in epoch 2 of 3, with data of a size that nobody knows."""
    batches = [rows(2, seed=number) for number in range(12)]
    spec = tf.TensorSpec([None, 1])
    dataset = tf.data.Dataset.from_generator(
        lambda: ((x, np.zeros_like(x)) for x in batches),
        output_signature=(spec, spec),
    )

    class EndAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.num_updates == updates:
                self.model.current_run.preempt()

    def train(limit, *callbacks):
        model = limited(limits=(limit,), micro_batch_size="auto")
        model.fit(
            dataset,
            epochs=3,
            steps_per_epoch=3,
            verbose=0,
            callbacks=[*callbacks, tfaccum.Checkpoint(tmp_path)],
        )
        return model

    with pytest.raises(tfaccum.Preempted):
        train(2, EndAt())
    model = train(1)
    assert model.micro_batch_search.tried == [2]
    expected = -sum(x.mean() for x in batches[:9])
    np.testing.assert_allclose(toy.weight_of(model), expected, rtol=1e-6)


def test_the_floor_is_respected():
    model = limited(
        limits=(3,), micro_batch_size=tfaccum.AutoMicroBatch(32, floor=6)
    )
    with pytest.raises(
        RuntimeError, match=r"sizes \[32, 16, 8, 6\] were tried.*allowed is 6"
    ):
        fit(model, rows(64), 32)
    assert toy.weight_of(model) == 0
    assert model.num_updates == 0


def test_is_remembered(tmp_path):
    how = tfaccum.AutoMicroBatch(directory=str(tmp_path / "model"))
    model = limited(limits=(5,), micro_batch_size=how)
    fit(model, rows(16), 16)
    file = tmp_path / "model" / "micro_batch_size.json"
    assert json.loads(file.read_text()) == {"micro_batch_size": 4}
    again = limited(limits=(5,), micro_batch_size=how)
    fit(again, rows(16), 16)
    assert again.micro_batch_search.tried == []
    assert again.sizes_run == [4] * 4


def test_on_a_batch_and_in_evaluation():
    x = rows(16)
    model = limited(limits=(4,), micro_batch_size="auto")
    model.train_on_batch(x, np.zeros_like(x))
    np.testing.assert_allclose(toy.weight_of(model), -x.mean(), rtol=1e-6)
    loss = model.evaluate(x, np.zeros_like(x), 16, verbose=0)
    np.testing.assert_allclose(loss, -x.mean() * x.mean(), rtol=1e-6)


def test_memory_that_ends_in_the_update_is_not_tried_again():
    """Weights may be half updated by then: smaller parts would not help."""

    class Greedy(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            def fail():
                raise MemoryError("no room for slots")

            tf.py_function(fail, [], [])
            return super().update_step(gradient, variable, learning_rate)

    model = limited(
        limits=(100,),
        optimizer=lambda: Greedy(1.0),
        micro_batch_size="auto",
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no room"):
        fit(model, rows(16), 16)
    assert model.micro_batch_search.tried == []


def test_layers_that_communicate_are_refused():
    model = limited(
        2,
        layers=lambda: [
            keras.layers.BatchNormalization(synchronized=True),
            toy.scalar(),
        ],
        micro_batch_size="auto",
    )
    with pytest.raises(ValueError, match="Received: micro_batch_size='auto'"):
        fit(model, rows(16), 16)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"floor": 0}, ValueError, "floor=0"),
        ({"start": 0}, ValueError, "start=0"),
        ({"start": 2.0}, TypeError, "start=2.0"),
        ({"start": 4, "floor": 8}, ValueError, "start=4, floor=8"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=f"Received: {text}"):
        tfaccum.AutoMicroBatch(**arguments)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="Received: micro_batch_size='big'"):
        toy.toy(micro_batch_size="big")


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_no_thread_reads_on_afterwards(method):
    model = toy.toy(micro_batch_size="auto")
    x = np.ones([8, 1], np.float32)
    call = getattr(model, method)
    call(x, x)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        call(x, x)
    gc.collect()
    # TensorFlow keeps the function of a generator, and what it refers to.
    assert not [o for o in gc.get_objects() if type(o) is Replay]
    assert len(os.listdir("/proc/self/task")) <= before + 2
