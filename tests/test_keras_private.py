"""Each private name of Keras and TensorFlow still means what it meant.

One test or more for every function of `tfaccum/keras_private.py`. When a new
release of Keras fails here, that function has to change, and nothing else.
"""

import pickle
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import keras_private


def mirrored():
    return toy.strategy_of(2)


def on_replicas(strategy, function):
    """What the function returns on each replica, in graph mode."""

    @tf.function
    def run():
        return strategy.run(function)

    return [
        value.numpy() for value in strategy.experimental_local_results(run())
    ]


# --- Losses ---------------------------------------------------------------


def every_kind_of_loss(model):
    """Of compiled losses, `add_loss` and regularizers: the gradient's loss."""
    x = tf.constant([[1.0], [3.0]])
    return model.compute_loss(x, x, model(x, training=True))


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x))
        return x


def model_with_every_kind_of_loss(strategy):
    with strategy.scope():
        inputs = keras.Input((1,))
        x = AddsLoss()(inputs)
        outputs = toy.scalar(1.0, kernel_regularizer=keras.regularizers.L2(7))(
            x
        )
        model = keras.Model(inputs, outputs)
        model.compile("sgd", loss=lambda y, y_pred: 10 * y_pred[..., 0])
    return model


def test_plain_mean_losses():
    """Keras divides every loss by the number of replicas; not inside."""
    strategy = mirrored()
    model = model_with_every_kind_of_loss(strategy)
    total = 10 * 2 + 2 + 7

    def inside():
        with keras_private.plain_mean_losses():
            return every_kind_of_loss(model)

    divided = on_replicas(strategy, lambda: every_kind_of_loss(model))
    assert divided == [total / 2] * 2, "Keras no longer divides by replicas"
    assert on_replicas(strategy, inside) == [total] * 2
    assert on_replicas(strategy, lambda: every_kind_of_loss(model)) == divided


def test_plain_mean_losses_hold_for_one_thread():
    strategy = mirrored()
    model = model_with_every_kind_of_loss(strategy)
    found = []
    with keras_private.plain_mean_losses():
        thread = threading.Thread(
            target=lambda: found.extend(
                on_replicas(strategy, lambda: every_kind_of_loss(model))
            )
        )
        thread.start()
        thread.join()
    assert found == [29 / 2] * 2


def test_plain_mean_losses_end_with_an_exception():
    strategy = mirrored()
    model = model_with_every_kind_of_loss(strategy)
    with pytest.raises(KeyError), keras_private.plain_mean_losses():
        raise KeyError
    found = on_replicas(strategy, lambda: every_kind_of_loss(model))
    assert found == [29 / 2] * 2


ROWS, LENGTH = 4, 3


class SquaredError(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)


def scalar_loss(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


def recorded(loss, *, mask=False, weights=False, fixed=True):
    """(loss, divisors, what numpy says is summed, mask, weights)."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, LENGTH, 2)).astype("float32")
    if mask:
        x[1, 1:] = x[3, :2] = 0.0
    y = rng.normal(size=(ROWS, LENGTH, 2)).astype("float32")
    sample_weight = None
    if weights:
        sample_weight = rng.uniform(1, 2, (ROWS, LENGTH)).astype("float32")
    inputs = keras.Input((LENGTH if fixed else None, 2))
    outputs = keras.layers.Masking()(inputs) if mask else inputs
    model = tfaccum.Model(inputs, keras.layers.Activation("linear")(outputs))
    model.compile("sgd", loss=loss)

    def run(x, y, sample_weight=None):
        y_pred = model(x)
        with keras_private.plain_mean_losses():
            value = model.compute_loss(x, y, y_pred, sample_weight)
            divisors = keras_private.take_divisors()
            assert keras_private.take_divisors() == []
        found.extend(divisors)
        return value, [d.value for d in divisors if d.value is not None]

    found = []
    length = LENGTH if fixed else None
    specs = [tf.TensorSpec([None, length, 2])] * 2
    if weights:
        specs.append(tf.TensorSpec([None, length]))
    function = tf.function(run, input_signature=specs)
    value, values = function(x, y, *[sample_weight] * weights)
    errors = np.mean(np.square(x - y), -1)
    valid = np.any(x != 0, -1) if mask else np.ones_like(errors)
    weight = sample_weight if weights else np.ones_like(errors)
    kinds = [d.kind for d in found]
    return value.numpy(), kinds, values, errors, valid, weight


CASES = [
    # reduction, mask, weights, length is fixed -> kind, divisor
    ("sum_over_batch_size", False, False, True, "examples", None),
    ("sum_over_batch_size", False, True, True, "examples", None),
    ("sum_over_batch_size", False, True, False, "elements", "size"),
    ("sum_over_batch_size", True, False, True, "mask", "valid"),
    ("sum_over_batch_size", True, True, True, "mask", "valid"),
    ("mean", True, True, False, "mask", "valid"),
    ("mean_with_sample_weight", False, True, True, "weights", "weight"),
    ("mean_with_sample_weight", True, True, True, "weights", "valid_weight"),
    ("mean_with_sample_weight", True, False, True, "weights", "valid"),
    ("mean_with_sample_weight", False, False, True, "examples", None),
    ("sum", False, True, True, "sum", None),
    ("sum", True, True, True, "sum", None),
]


@pytest.mark.parametrize("reduction,mask,weights,fixed,kind,divisor", CASES)
def test_recorded_divisors(reduction, mask, weights, fixed, kind, divisor):
    """The sum that numpy makes, over the divisor, is what Keras returns."""
    value, kinds, values, errors, valid, weight = recorded(
        SquaredError(reduction=reduction),
        mask=mask,
        weights=weights,
        fixed=fixed,
    )
    assert kinds == [kind]
    total = np.sum(errors * valid * weight)
    divisors = {
        "size": ROWS * LENGTH,
        "valid": np.sum(valid),
        "weight": np.sum(weight),
        "valid_weight": np.sum(valid * weight),
    }
    if kind == "sum":
        assert values == []
        assert value == pytest.approx(total, rel=1e-6)
    elif kind == "examples":
        assert values == []
        # Per row there is the same number of elements.
        assert value == pytest.approx(total / (ROWS * LENGTH), rel=1e-6)
    else:
        (found,) = values
        assert float(found) == pytest.approx(divisors[divisor], rel=1e-6)
        assert value == pytest.approx(total / float(found), rel=1e-6)


def test_recorded_divisors_of_a_loss_that_took_its_mean():
    value, kinds, values, errors, _, _ = recorded(scalar_loss)
    assert (kinds, values) == (["examples"], [])
    assert value == pytest.approx(np.mean(errors), rel=1e-6)


def test_recorded_divisors_of_several_outputs():
    """One mask is one divisor; two masks are two."""
    inputs = keras.Input((LENGTH, 1))
    one = keras.layers.Masking(1.0)(inputs)
    two = keras.layers.Masking(2.0)(inputs)
    same = [keras.layers.Activation("linear")(one) for _ in range(2)]
    other = keras.layers.Activation("linear")(two)
    x = tf.constant([[[1.0], [2.0], [2.0]]])
    for outputs, is_one in ((same, True), ([same[0], other], False)):
        model = tfaccum.Model(inputs, outputs)
        model.compile("sgd", loss=["mse", "mse"])
        with keras_private.plain_mean_losses():
            model.compute_loss(x, [x, x], model(x))
            first, second = keras_private.take_divisors()
        assert (first.kind, second.kind) == ("mask", "mask")
        assert first.equals(second) == is_one


def test_nothing_is_recorded_outside_of_a_step():
    model = toy.toy()
    x = tf.constant([[1.0]])
    model.compute_loss(x, x, model(x))
    assert keras_private.take_divisors() == []
    with keras_private.plain_mean_losses():
        keras.losses.MeanSquaredError()(x, x)  # Not by `compute_loss`.
        assert keras_private.take_divisors() == []


# --- Models ---------------------------------------------------------------


def test_functional_model():
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    assert type(model) is keras_private.FunctionalModel

    class Other(keras.Model):
        pass

    assert not isinstance(Other(), keras_private.FunctionalModel)


def test_has_functional_arguments():
    found = keras_private.has_functional_arguments
    inputs = keras.Input((1,))
    assert found((inputs, inputs), {})
    assert found((inputs,), {"outputs": inputs})
    assert found((), {"inputs": inputs, "outputs": inputs, "name": "m"})
    assert not found((), {})
    assert not found((), {"name": "m"})


class Named(keras.Model):
    pass


def test_pickle_as():
    made = type("Named", (Named,), {"__module__": Named.__module__})
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(made())
    keras_private.pickle_as(made, Named)
    unpickle, _ = made().__reduce__()
    assert pickle.loads(pickle.dumps(unpickle)).__self__ is Named


def test_forward():
    class Without(keras.Model):
        def call(self, x):
            return x + 1

    class With(keras.Model):
        def call(self, x, training=False):
            return x + (10 if training else 1)

    x = tf.zeros([1])
    assert keras_private.forward(Without(), x, training=True) == 1
    assert keras_private.forward(With(), x, training=True) == 10
    assert keras_private.forward(With(), x, training=False) == 1


def test_compute_loss():
    class Without(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return y_pred

    class With(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return y_pred + (10 if training else 1)

    def loss(model, training):
        model.compile("sgd")
        return keras_private.compute_loss(model, 0, 0, 5, None, training)

    assert loss(Without(), True) == 5
    assert (loss(With(), True), loss(With(), False)) == (15, 6)


def test_symbolic_build():
    """Variables of layers, metrics and optimizer; without any data."""
    with mirrored().scope():
        model = keras.Sequential(
            [keras.layers.Dense(3), keras.layers.BatchNormalization()]
        )
        model.compile("adam", "mse", metrics=["mae"])
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 3]))
    with model.distribute_strategy.scope():
        keras_private.symbolic_build(model, spec)
    assert [tuple(w.shape) for w in model.trainable_variables] == [
        (2, 3),
        (3,),
        (3,),
        (3,),
    ]
    assert model.optimizer.built
    assert len(model.metrics_variables) == 4  # Of loss and mae.


@pytest.mark.parametrize("replicas,eager", [(1, False), (1, True), (2, False)])
def test_weigh_output_losses(replicas, eager):
    """Batches of 2 and 1 rows: a mean of their means would be another.

    Nor is it divided by the number of replicas.
    """
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((1,))
        outputs = {name: toy.scalar(1.0, name=name)(inputs) for name in "ab"}
        model = tfaccum.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.0),
            loss={"a": toy.product, "b": toy.product},
            run_eagerly=eager,
        )
    x = np.float32([[1], [3], [8]])
    logs = model.fit(
        x, {"a": x, "b": x}, batch_size=2, shuffle=False, verbose=0
    ).history
    assert logs["a_loss"] == logs["b_loss"] == [4]
    assert logs["loss"] == [8]


def test_loss_tracker():
    model = toy.toy(start=2.0)
    model.evaluate(toy.batches([1, 5]), verbose=0)
    tracker = keras_private.loss_tracker(model)
    assert tracker.name == "loss"
    assert any(metric is tracker for metric in model.metrics)
    assert (float(tracker.total), float(tracker.count)) == (12, 2)


def test_untracked_loss():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tracker = keras_private.loss_tracker(model)
    for _ in range(2):
        with keras_private.untracked_loss(model):
            tracker.update_state(8.0)
        tracker.update_state(3.0, sample_weight=2.0)
    assert (tracker.result(), tracker.count) == (3, 4)


def test_all_layers():
    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.layers.Dense(1)])
            self.many = [keras.layers.BatchNormalization()]

        def call(self, x):
            return self.inner(self.many[0](x))

    model = Outer()
    found = keras_private.all_layers(model)
    assert any(layer is model for layer in found)
    assert any(layer is model.inner for layer in found)
    assert any(layer is model.inner.layers[0] for layer in found)
    assert any(layer is model.many[0] for layer in found)


def test_layer_state():
    """Moving statistics; not frozen weights, seeds or what is integer."""
    inputs = keras.Input((2,))
    norm = keras.layers.BatchNormalization()
    frozen_norm = keras.layers.BatchNormalization(trainable=False)
    frozen = keras.layers.Dense(2, trainable=False)
    late = keras.layers.Dense(2)
    x = keras.Sequential([norm, frozen, keras.layers.Dropout(0.5)])(inputs)
    model = keras.Model(inputs, late(frozen_norm(x)))
    late.trainable = False
    found = keras_private.layer_state(model)
    assert [id(v) for v in found] == [
        id(norm.moving_mean),
        id(norm.moving_variance),
    ]
    for norm_layer in (norm, frozen_norm):
        norm_layer.trainable = not norm_layer.trainable
    assert {id(v) for v in keras_private.layer_state(model)} == {
        id(frozen_norm.moving_mean),
        id(frozen_norm.moving_variance),
    }


def test_layer_state_of_a_layer_that_is_used_twice():
    inputs = keras.Input((2,))
    norm = keras.layers.BatchNormalization()
    model = keras.Model(inputs, norm(norm(inputs)))
    assert len(keras_private.layer_state(model)) == 2


def test_batch_moments():
    """Over all axes but one, and of what is not masked."""
    x = np.arange(12, dtype="float32").reshape(2, 3, 2)
    mask = np.array([[True, False, True], [False, True, False]])
    norm = keras.layers.BatchNormalization()
    norm.build(x.shape)
    for found, rows in (
        (keras_private.batch_moments(norm, x, None), x.reshape(6, 2)),
        (keras_private.batch_moments(norm, x, mask), x[mask]),
    ):
        np.testing.assert_allclose(
            found, [rows.mean(0), rows.var(0)], rtol=1e-6
        )


def test_only_regularizes():
    inputs = keras.Input((1,))
    dense = toy.scalar(kernel_regularizer=keras.regularizers.L2(1.0))
    assert keras_private.only_regularizes(keras.Model(inputs, dense(inputs)))
    model = keras.Model(inputs, AddsLoss()(dense(inputs)))
    model(tf.ones([1, 1]))
    assert len(model.losses) == 2
    assert not keras_private.only_regularizes(model)


def test_should_evaluate():
    model = toy.toy()

    def epochs(frequency):
        return [
            epoch
            for epoch in range(6)
            if keras_private.should_evaluate(model, epoch, frequency)
        ]

    assert epochs(1) == [0, 1, 2, 3, 4, 5]
    assert epochs(3) == [2, 5]
    assert epochs([1, 4]) == [0, 3]  # Epochs as the user counts them.


def test_flatten_metrics():
    model = toy.toy(metrics=["mae", "mse"])
    keras_private.symbolic_build(
        model, (tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1]))
    )
    logs = {"mse": 3.0, "mae": 2.0, "loss": 1.0}
    assert keras_private.flatten_metrics(model, logs) == [1, 2, 3]
    assert keras_private.flatten_metrics(toy.toy(), {"loss": 1.0}) == 1


def test_initial_epoch(tmp_path):
    """`BackupAndRestore` sets it, and `fit` goes on from there."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyError

    model = toy.toy()
    assert keras_private.initial_epoch(model) is None
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyError):
        toy.fit(model, toy.batches([1]), epochs=4, callbacks=[backup, Stop()])
    again = toy.toy()
    seen = toy.fit(again, toy.batches([1]), epochs=4, callbacks=[backup])
    assert keras_private.initial_epoch(again) == 2
    assert seen.iterations == [3, 4]
    assert toy.weight_of(again) == -4


# --- Optimizers -----------------------------------------------------------


def test_reduced_gradients_only():
    """Two replicas apply 1 each: plain Keras makes 2 of it."""
    moved = {}
    for inside in (False, True):
        strategy = mirrored()
        with strategy.scope():
            variable = keras.Variable([0.0])
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def apply(optimizer=optimizer, variable=variable):
            optimizer.apply([tf.ones([1])], [variable])

        @tf.function
        def run(strategy=strategy, apply=apply):
            strategy.run(apply)

        if inside:
            with keras_private.reduced_gradients_only(optimizer):
                run()
        else:
            run()
        copies = strategy.experimental_local_results(variable.value)
        moved[inside] = [copy.numpy().item() for copy in copies]
        (count,) = {
            copy.numpy().item()
            for copy in strategy.experimental_local_results(
                optimizer.iterations.value
            )
        }
        assert count == 1
    assert moved == {False: [-2, -2], True: [-1, -1]}


def test_reduced_gradients_only_leaves_scale_and_average_to_the_window():
    optimizer = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=0.5, loss_scale_factor=8.0
    )
    variable = keras.Variable([0.0])
    optimizer.build([variable])
    with keras_private.reduced_gradients_only(optimizer):
        optimizer.apply([tf.ones([1])], [variable])
    assert variable.numpy() == [-1]  # Not -1 / 8.
    ((one, average),) = keras_private.moving_averages(optimizer)
    assert one is variable
    assert average.numpy() == [0]


@pytest.mark.parametrize("own_switch", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_reduced_gradients_only_leaves_no_trace(fails, own_switch):
    optimizer = keras.optimizers.Adam(
        use_ema=True, loss_scale_factor=4.0, clipnorm=1.0
    )
    if own_switch:  # Someone else has replaced the method before.
        optimizer._all_reduce_sum_gradients = lambda pairs: pairs
    before = dict(optimizer.__dict__)
    if fails:
        with (
            pytest.raises(KeyError),
            keras_private.reduced_gradients_only(optimizer),
        ):
            raise KeyError
    else:
        with keras_private.reduced_gradients_only(optimizer):
            assert optimizer.__dict__ != before
    assert optimizer.__dict__.keys() == before.keys()
    for name, value in before.items():
        assert optimizer.__dict__[name] is value, name


def test_moving_averages():
    optimizer = keras.optimizers.SGD(use_ema=True)
    variables = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
    optimizer.build(variables)
    pairs = keras_private.moving_averages(optimizer)
    assert [variable for variable, _ in pairs] == variables
    assert [tuple(average.shape) for _, average in pairs] == [(1,), (2,)]
    assert all(
        any(average is v for v in optimizer.variables) for _, average in pairs
    )


def test_config_for_a_copy():
    def rate():
        return 0.5

    for given in (rate, keras.optimizers.schedules.CosineDecay(0.5, 10), 0.5):
        optimizer = keras.optimizers.SGD(given, momentum=0.25)
        config = keras_private.config_for_a_copy(optimizer)
        assert (config["learning_rate"], config["momentum"]) == (given, 0.25)
        copy = keras.optimizers.SGD.from_config(config)
        assert (
            float(copy.learning_rate) == float(optimizer.learning_rate) == (0.5)
        )


def test_adam_moments():
    """After one step (1 - beta) times the gradient, and its square."""
    variables = [keras.Variable([0.0, 0.0]), keras.Variable(0.0)]
    optimizer = keras.optimizers.Adam(beta_1=0.75, beta_2=0.5)
    optimizer.build(variables)
    optimizer.apply([tf.constant([2.0, 4.0]), tf.constant(8.0)])
    found = [
        [moment.numpy().tolist() for moment in moments]
        for moments in (
            keras_private.adam_moments(optimizer, v) for v in variables
        )
    ]
    assert found == [[[0.5, 1.0], [2.0, 8.0]], [2.0, 32.0]]


# --- Data -----------------------------------------------------------------


def test_data_adapter():
    x = np.arange(5.0)[:, np.newaxis]
    adapter = keras_private.data_adapter(
        x=x,
        y=x,
        sample_weight=None,
        batch_size=2,
        steps_per_epoch=None,
        shuffle=False,
        class_weight={0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0},
    )
    assert adapter.num_batches == 3
    assert "Array" in type(adapter).__name__  # What `shuffle` is looked up by.
    adapter.on_epoch_begin()
    found = [
        (x.numpy().ravel().tolist(), weight.numpy().ravel().tolist())
        for x, _, weight in adapter.get_tf_dataset()
    ]
    adapter.on_epoch_end()
    assert found == [([0, 1], [1, 2]), ([2, 3], [3, 4]), ([4], [5])]


def test_train_validation_split():
    x, y = np.arange(5), np.arange(5) * 10
    train, validation = keras_private.train_validation_split((x, y, None), 0.4)
    assert [part if part is None else part.tolist() for part in train] == [
        [0, 1, 2],
        [0, 10, 20],
        None,
    ]
    assert [part if part is None else part.tolist() for part in validation] == [
        [3, 4],
        [30, 40],
        None,
    ]


def test_class_weight_to_sample_weight():
    weights = {0: 0.5, 1: 2.0, 2: 7.0}
    for y in ([2, 0, 1], np.eye(3)[[2, 0, 1]]):
        found = keras_private.class_weight_to_sample_weight(
            np.array(y), weights
        )
        np.testing.assert_array_equal(found, [7, 0.5, 2])


def test_concat_outputs():
    one, two = tf.zeros([2, 3]), tf.ones([1, 3])
    found = keras_private.concat_outputs([one, two])
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, [[0] * 3, [0] * 3, [1] * 3])
    ragged = keras_private.concat_outputs([one, tf.ones([1, 4])])
    assert ragged.to_list() == [[0] * 3, [0] * 3, [1] * 4]


def test_empty_optional():
    spec = tf.OptionalSpec(tf.TensorSpec([None, 2], tf.float32))
    empty = keras_private.empty_optional(spec)
    assert not empty.has_value()
    # A dataset may go on with it where there were values.
    value = tf.experimental.Optional.from_value(tf.zeros([1, 2]))
    assert spec.is_compatible_with(empty) and spec.is_compatible_with(value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda data: data.prefetch(1), True),
        (lambda data: data.prefetch(tf.data.AUTOTUNE), True),
        (lambda data: data.prefetch(1).with_options(tf.data.Options()), True),
        (lambda data: data, False),
        (lambda data: data.with_options(tf.data.Options()), False),
        (lambda data: data.prefetch(1).map(lambda x: x + 1), False),
    ],
)
def test_is_prefetched(make, expected):
    dataset = make(tf.data.Dataset.range(3))
    assert keras_private.is_prefetched(dataset) is expected


def test_global_seed():
    keras.utils.set_random_seed(7)
    assert keras_private.global_seed() == 7
    keras.backend.clear_session(free_memory=False)
    assert keras_private.global_seed() is None


# --- Distribution ---------------------------------------------------------


def test_per_replica():
    strategy = mirrored()

    @tf.function
    def run():
        values = keras_private.per_replica([tf.constant(1), tf.constant(5)])
        return strategy.run(lambda value: value + 1, args=(values,))

    results = strategy.experimental_local_results(run())
    assert [int(value) for value in results] == [2, 6]


def test_separate_collective_keys():
    """Strategies of 2, 4 and 2 devices, in one process, each trains."""
    for replicas in (2, 4, 2):
        model = toy.toy(replicas)
        toy.fit(model, toy.batches([1, 2, 3, 6]))
        assert toy.weight_of(model) == -3


def test_local_cpus():
    """A worker without a cluster counts its devices as any other does."""
    with keras_private.local_cpus(3):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 3
    assert tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def test_bytes_per_pack():
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=1234
    )
    several = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=options
    )
    assert keras_private.bytes_per_pack(several) == 1234
    plain = tf.distribute.MultiWorkerMirroredStrategy()
    assert keras_private.bytes_per_pack(plain) == 0
    assert keras_private.bytes_per_pack(tf.distribute.get_strategy()) == 0
