"""Case O1: XLA compiles the micro-step, and changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.multi_worker import graphs


def rows(number):
    rng = np.random.default_rng(6)
    x = rng.normal(size=(number, 4)).astype("float32")
    return x, rng.integers(0, 3, number)


def train(strategy, batch_norm=True, policy="float32", **arguments):
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        keras.utils.set_random_seed(9)
        inputs = keras.Input((4,))
        x = keras.layers.Dense(8, activation="tanh")(inputs)
        if batch_norm:
            x = keras.layers.BatchNormalization(momentum=0.5)(x)
        outputs = keras.layers.Dense(3, activation="softmax", dtype="float32")(
            x
        )
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            keras.optimizers.Adam(0.05),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **arguments,
        )
    x, y = rows(27)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    history = model.fit(dataset, epochs=2, verbose=0)
    return model, history.history


# The last batch has 3 rows, the last window 3 batches or 1.
WAYS = {
    "one": {},
    "steps": {"gradient_accumulation_steps": 2},
    "cut": {
        "devices": ["CPU:0"],
        "gradient_accumulation_steps": 4,
        "micro_batch_size": 3,
    },
    "per_execution": {
        "gradient_accumulation_steps": 2,
        "steps_per_execution": 2,
    },
}


@pytest.mark.parametrize("how", WAYS)
def test_O1_one_device_equals_the_uncompiled_run(how):
    arguments = dict(WAYS[how])
    devices = arguments.pop("devices", None)
    strategy = tfaccum.make_strategy(devices) if devices else toy.strategy_of(1)
    results = [
        train(strategy, jit_compile=jit, **arguments) for jit in (False, True)
    ]
    (plain, logs), (compiled, compiled_logs) = results
    for one, other in zip(
        plain.variables + plain.optimizer.variables,
        compiled.variables + compiled.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_allclose(
            other.numpy(), one.numpy(), rtol=1e-4, atol=1e-6, err_msg=one.path
        )
    for name, values in logs.items():
        np.testing.assert_allclose(compiled_logs[name], values, rtol=1e-5)


def test_O1_mixed_float16():
    """The loss scale lives outside of what XLA compiles."""
    results = [
        train(
            toy.strategy_of(1),
            batch_norm=False,
            policy="mixed_float16",
            jit_compile=jit,
            gradient_accumulation_steps=2,
        )
        for jit in (False, True)
    ]
    (plain, _), (compiled, _) = results
    assert compiled.optimizer.step_counter.numpy() > 0
    for one, other in zip(
        plain.trainable_variables, compiled.trainable_variables, strict=True
    ):
        # Adam divides by the gradient's size: float16's 1e-3 in each step.
        np.testing.assert_allclose(other.numpy(), one.numpy(), atol=2e-2)


def test_O1_evaluation_and_prediction():
    model, _ = train(toy.strategy_of(1), jit_compile=True)
    twin, _ = train(toy.strategy_of(1), jit_compile=False)
    twin.set_weights(model.get_weights())
    x, y = rows(10)
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=4, verbose=0),
        twin.evaluate(x, y, batch_size=4, verbose=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        model.predict(x, batch_size=4, verbose=0),
        twin.predict(x, batch_size=4, verbose=0),
        rtol=1e-5,
    )


def test_O1_the_micro_step_is_compiled_and_the_window_is_not():
    with graphs.traced() as traced:
        train(
            toy.strategy_of(1), jit_compile=True, gradient_accumulation_steps=2
        )
    must_compile = {
        bool(function.attr["_XlaMustCompile"].b)
        for graph in traced
        for function in graph.as_graph_def().library.function
        if "_XlaMustCompile" in function.attr
    }
    assert must_compile == {True}
    whole = max(traced, key=lambda graph: len(graphs.operations(graph)))
    own = {node.op for node in whole.as_graph_def().node}
    assert own & {"While", "StatelessWhile"}  # The loop is outside of it.


@pytest.mark.parametrize("replicas", [2, 4])
def test_O1_several_cpu_replicas_are_refused_at_compile(replicas):
    """With the devices in the message, and before anything is trained."""
    with pytest.raises(ValueError, match="`jit_compile` must be False") as e:
        toy.toy(replicas, jit_compile=True, gradient_accumulation_steps=2)
    assert "CPU:1" in str(e.value)
    assert "one worker process per CPU replica" in str(e.value)


def test_O1_several_cpu_replicas_choose_no_xla_by_themselves():
    model = toy.toy(2)
    assert not model.jit_compile
    toy.fit(model, toy.batches([1, 2]))
    assert toy.weight_of(model) == -1.5
