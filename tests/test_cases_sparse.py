"""Cases G: the gradient of an embedding is sparse, and stays exact."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy

ROWS, WIDTH = 1000, 4
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adam_clipped": lambda: keras.optimizers.Adam(
        0.1, global_clipnorm=0.01, weight_decay=0.1
    ),
}

# Micro-batches of 3 and 2 ids with repetitions, in and between them.
IDS = np.array([1, 1, 2, 2, 3, 1, 999, 0])
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(len(IDS), 1)).astype("float32")


def start():
    return keras.initializers.Constant(TABLE)


def with_head(model_class, inputs, vectors, optimizer, **arguments):
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(vectors)
    model = model_class(inputs, outputs)
    model.compile(optimizer(), "mse", **arguments)
    return model


def one_hot_reference(optimizer, batch_size):
    """The same table as a dense layer, plain Keras, one big batch."""
    inputs = keras.Input((ROWS,))
    vectors = keras.layers.Dense(
        WIDTH, use_bias=False, kernel_initializer=start()
    )(inputs)
    model = with_head(keras.Model, inputs, vectors, optimizer)
    model.fit(
        np.eye(ROWS, dtype="float32")[IDS],
        TARGETS,
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return model


def embedding_model(replicas, optimizer, **arguments):
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((), dtype="int32")
        vectors = keras.layers.Embedding(
            ROWS, WIDTH, embeddings_initializer=start()
        )(inputs)
        return with_head(tfaccum.Model, inputs, vectors, optimizer, **arguments)


def assert_same_tables(model, reference):
    for one, other in zip(
        model.trainable_variables + model.optimizer.variables,
        reference.trainable_variables + reference.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_allclose(
            toy.value_of(model, one),
            other.numpy(),
            rtol=1e-5,
            atol=1e-6,
            err_msg=one.path,
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_G1_embedding_equals_dense_one_hot(name, replicas):
    """Windows of 3 + 3 and 2 ids, or 6 in one on one device."""
    model = embedding_model(
        replicas, OPTIMIZERS[name], gradient_accumulation_steps=2
    )
    model.fit(IDS, TARGETS, batch_size=3, epochs=2, shuffle=False, verbose=0)
    assert_same_tables(model, one_hot_reference(OPTIMIZERS[name], 6))


@pytest.mark.parametrize("sparse_sums", [True, False])
def test_G1_the_case_by_hand(sparse_sums):
    """ids [1, 1, 2], then [2, 3]; the loss of an example is sum(table[id])."""
    inputs = keras.Input((), dtype="int32")
    layer = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")
    model = tfaccum.Model(inputs, layer(inputs))
    model.compile(
        keras.optimizers.SGD(1.0),
        loss=lambda y, y_pred: tf.reduce_sum(y_pred, -1),
        gradient_accumulation_steps=2,
        sparse_sums=sparse_sums,
    )
    batches = tf.data.Dataset.from_generator(
        lambda: (([1, 1, 2], [0.0] * 3), ([2, 3], [0.0] * 2)),
        output_signature=(
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None], tf.float32),
        ),
    )
    model.fit(batches, verbose=0)
    expected = np.zeros((ROWS, WIDTH), np.float32)
    expected[1:4] = np.array([[-2 / 5], [-2 / 5], [-1 / 5]])
    np.testing.assert_allclose(layer.embeddings.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("replicas,cut", [(1, 1), (1, 5), (2, None), (2, 2)])
def test_G1_cut_micro_batches_and_two_replicas(replicas, cut):
    """Also where nothing is accumulated, but two replicas are."""
    model = embedding_model(replicas, OPTIMIZERS["adam"], micro_batch_size=cut)
    model.fit(IDS, TARGETS, batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert_same_tables(model, one_hot_reference(OPTIMIZERS["adam"], 5))


def test_G1_one_device_k1_is_keras_to_the_bit():
    """There the slices reach the optimizer as they are.

    Keras' Adam squares each slice by itself, so that an id which is twice in
    a batch is trained otherwise than as one row of a dense gradient.
    """
    models = []
    for model_class in (keras.Model, tfaccum.Model):
        inputs = keras.Input((), dtype="int32")
        vectors = keras.layers.Embedding(
            ROWS, WIDTH, embeddings_initializer=start()
        )(inputs)
        model = with_head(model_class, inputs, vectors, OPTIMIZERS["adam"])
        model.fit(IDS, TARGETS, batch_size=5, shuffle=False, verbose=0)
        models.append(model)
    expected, found = models
    for one, other in zip(
        found.variables + found.optimizer.variables,
        expected.variables + expected.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_G1_run_eagerly():
    model = embedding_model(
        2,
        OPTIMIZERS["adam"],
        gradient_accumulation_steps=2,
        run_eagerly=True,
    )
    model.fit(IDS, TARGETS, batch_size=3, epochs=2, shuffle=False, verbose=0)
    assert_same_tables(model, one_hot_reference(OPTIMIZERS["adam"], 6))


def test_G1_mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    model = embedding_model(
        2,
        lambda: keras.optimizers.LossScaleOptimizer(
            OPTIMIZERS["sgd"](), initial_scale=128
        ),
        gradient_accumulation_steps=2,
    )
    model.fit(IDS, TARGETS, batch_size=3, shuffle=False, verbose=0)
    assert not model.last_updates[0].skipped
    keras.config.set_dtype_policy("float32")
    reference = embedding_model(1, OPTIMIZERS["sgd"])
    reference.fit(IDS, TARGETS, batch_size=6, shuffle=False, verbose=0)
    for one, other in zip(
        model.trainable_variables, reference.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(
            toy.value_of(model, one), other.numpy(), atol=2e-2
        )


def test_G1_inf_in_one_row_skips_the_update():
    """A bad value among slices is seen too."""
    model = embedding_model(
        2, OPTIMIZERS["adam"], gradient_accumulation_steps=2
    )
    targets = TARGETS.copy()
    targets[2] = np.inf
    model.fit(IDS, targets, batch_size=4, shuffle=False, verbose=0)
    assert model.last_updates[0].skipped
    np.testing.assert_array_equal(
        toy.value_of(model, model.trainable_variables[0]), TABLE
    )


class LateTable(keras.layers.Layer):
    """An embedding whose width is that of its other input, when called."""

    def build(self, ids_shape, like_shape):
        self.table = self.add_weight(
            shape=(10, like_shape[-1]), initializer="zeros", name="table"
        )

    def call(self, ids, like):
        # Of a width that is not known while the graph is made.
        width = tf.shape(like)[-1]
        vectors = tf.gather(self.table, ids)
        return tf.reshape(vectors, [-1, tf.shape(ids)[1], width])


class LateModel(tfaccum.Model):
    def __init__(self):
        super().__init__()
        self.embed = LateTable()

    def call(self, inputs):
        ids, like = inputs["ids"], inputs["like"]
        return tf.reduce_sum(self.embed(ids, like) * like[:, tf.newaxis], -1)


@pytest.mark.parametrize("sparse_sums", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_G5_width_and_length_known_only_at_call_time(steps, sparse_sums):
    """Two replicas; ids of shape [None, None], a table built by the call."""
    ids = [[[1, 1, 2], [3, 3, 3], [4, 1, 1]], [[9, 1], [2, 2], [5, 6]]]
    like = np.arange(18, dtype=np.float32).reshape(2, 3, 3) / 10
    dataset = tf.data.Dataset.from_generator(
        lambda: (
            ({"ids": i, "like": v}, np.zeros((3, 1)))
            for i, v in zip(ids, like, strict=True)
        ),
        output_signature=(
            {
                "ids": tf.TensorSpec([None, None], tf.int32),
                "like": tf.TensorSpec([None, 3], tf.float32),
            },
            tf.TensorSpec([None, 1], tf.float32),
        ),
    )
    with toy.strategy_of(2).scope():
        model = LateModel()
        model.compile(
            keras.optimizers.SGD(1.0),
            loss=lambda y, y_pred: tf.reduce_sum(y_pred, -1),
            gradient_accumulation_steps=steps,
            sparse_sums=sparse_sums,
        )
    model.fit(dataset, verbose=0)
    expected = np.zeros((10, 3))
    for batch, values in zip(ids, like, strict=True):
        for row, value in zip(batch, values, strict=True):
            for index in row:
                # The mean over the 3 rows of a batch, or the 6 of a window.
                expected[index] -= value / (3 * steps)
    np.testing.assert_allclose(
        toy.value_of(model, model.trainable_variables[0]),
        expected,
        rtol=1e-5,
    )
