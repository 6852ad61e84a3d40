"""Micro-batches that all have the same weight are added up without it.

Expected values are computed by hand: the update is the mean over the window.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy


def equal(*xs, weights=None):
    """Batches that all have the same number of rows, known beforehand."""
    parts = [np.float32(xs)[..., np.newaxis], np.zeros([len(xs), len(xs[0])])]
    if weights is not None:
        parts.append(np.float32(weights))
    return tf.data.Dataset.from_tensor_slices(tuple(parts))


DATA = (1, 2, 6), (4, -3, -1), (7, 5, 3)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"steps_per_execution": 4},
        {"jit_compile": True},
        {"run_eagerly": True},
    ],
)
def test_the_update_is_the_mean(how):
    model = toy.toy(gradient_accumulation_steps=2, **how)
    seen = toy.fit(model, equal(*DATA))
    assert toy.weight_of(model) == pytest.approx(-9 / 6 - 15 / 3)
    assert seen.of_updates("weight") == [6, 3]
    assert seen.of_updates("examples") == [6, 3]
    assert seen.of_updates("loss") == pytest.approx([0, -1.5 * 5])
    assert seen.of_updates("gradient_norm") == pytest.approx([1.5, 5])
    (loss,) = seen.logs["loss"]
    assert loss == pytest.approx((0 * 6 - 1.5 * 5 * 3) / 9)


@pytest.mark.parametrize(
    ("reduction", "divisor"),
    [("sum_over_batch_size", 6), ("mean_with_sample_weight", 7), ("sum", 1)],
)
def test_with_sample_weights(reduction, divisor):
    weights = (1, 0, 2), (0.5, 3, 0.5)
    model = toy.toy(
        loss=toy.Product(reduction=reduction), gradient_accumulation_steps=2
    )
    model.fit(equal(*DATA[:2], weights=weights), verbose=0)
    assert toy.weight_of(model) == pytest.approx(-(13 + 2 - 9 - 0.5) / divisor)


@pytest.mark.parametrize(
    ("weight", "gradient"), [(2.5, (3 + 0) / 2), (0, 0), (None, 3 + 0)]
)
def test_a_weight_that_the_step_gives(weight, gradient):
    class Own(tfaccum.Model):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x))
            self.accumulate(tape, loss, weight=weight)
            return {}

    model = toy.toy(model_class=Own, gradient_accumulation_steps=2)
    model.fit(equal(*DATA[:2]), verbose=0)
    assert toy.weight_of(model) == pytest.approx(-gradient)
    expected = 2 if weight is None else 2 * weight
    assert model.last_updates[-1].weight == expected


def test_narrow_gradients_are_added_up_in_float32():
    """In float16 2048 + 1 is 2048."""
    model = toy.toy(
        layers=lambda: [toy.scalar(dtype="float16")],
        gradient_accumulation_steps=3,
    )
    model.fit(equal([2048], [1], [1]), verbose=0)
    assert toy.weight_of(model) == -np.float16(2050 / 3)


class TwoGroups:
    """Other windows after some update, in which all variables train too."""

    def __init__(self, change):
        self._change = change

    def group_at(self, update):
        return int(update < self._change)

    def frozen(self, model, group):
        return []


def test_each_number_of_rows_has_its_own_weight():
    """A step that was traced for other rows since knows its own weight."""
    model = toy.toy(
        gradient_accumulation_steps=2, gradient_freeze=TwoGroups(change=2)
    )
    of_two, of_three = equal((1, 2), (4, -3)), equal(*DATA[:2])
    weights = []
    for data in (of_two, of_three, of_two, of_three):
        model.fit(data, verbose=0)
        weights.append(toy.weight_of(model))
    assert weights == pytest.approx([-1, -2.5, -3.5, -5])


def gradients_are_multiplied(model):
    """Whether the micro-step that was traced last weighs what it finds."""
    graph = model.train_window._micro_step.graph.as_graph_def()
    nodes = [
        *graph.node,
        *(n for f in graph.library.function for n in f.node_def),
    ]
    return any(node.op == "MulNoNan" for node in nodes)


@pytest.mark.parametrize("jit", [False, True])
def test_nothing_is_multiplied(jit):
    model = toy.toy(gradient_accumulation_steps=2, jit_compile=jit)
    for data, expected in (
        (equal(*DATA), False),
        (toy.batches(*DATA), True),
        (equal(*DATA), False),
    ):
        model.fit(data, verbose=0)
        assert gradients_are_multiplied(model) is expected


@pytest.mark.parametrize("steps", [1, 2])
def test_a_compiled_step_returns_nothing_that_is_known(steps):
    """XLA would copy constants at each call."""
    model = toy.toy(
        layers=lambda: [keras.layers.Dense(2)],
        gradient_accumulation_steps=steps,
        jit_compile=True,
    )
    model.fit(equal(*DATA), verbose=0)
    graph = model.train_window._micro_step.graph
    (call,) = (
        operation
        for operation in graph.get_operations()
        if operation.type == "StatefulPartitionedCall"
    )
    # Of kernel, bias and loss.
    assert sorted(out.shape.as_list() for out in call.outputs) == [
        [],
        [1, 2],
        [2],
    ]
