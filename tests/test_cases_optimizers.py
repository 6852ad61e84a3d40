"""Cases N: several optimizers in one step, each with its own window."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tests.toy import strategy_of, value_of
from tfaccum import boost, callbacks


class Two(tfaccum.Model):
    """Generator g and discriminator d, two scalars.

    Each loss depends on both, but trains only its own:

        loss of d = mean(d * x + 100 * g * x), weight: examples
        loss of g = mean(g * z + 1000 * d * z) over z >= 0, weight: how many
    """

    def __init__(self, optimizers):
        super().__init__()
        self.d = self.add_weight(shape=(), initializer="zeros", name="d")
        self.g = self.add_weight(shape=(), initializer="zeros", name="g")
        self.d_optimizer, self.g_optimizer = optimizers

    def train_step(self, data):
        x, z = data
        keep = tf.cast(z >= 0, z.dtype)
        count = tf.reduce_sum(keep)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.d * x + 100 * self.g * x)
        self.accumulate(
            tape,
            loss,
            weight=tf.shape(x)[0],
            optimizer=self.d_optimizer,
            variables=[self.d],
        )
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(keep * (self.g * z + 1000 * self.d * z))
            g_loss = tf.math.divide_no_nan(total, count)
        self.accumulate(
            tape,
            g_loss,
            weight=count,
            optimizer=self.g_optimizer,
            variables=[self.g],
        )
        return {"g_loss": g_loss}


def sgd_and_momentum():
    return (
        keras.optimizers.SGD(1.0),
        keras.optimizers.SGD(0.5, momentum=0.5),
    )


def two(replicas=1, optimizers=sgd_and_momentum, **arguments):
    with strategy_of(replicas).scope():
        model = Two(optimizers())
        model.compile(optimizer=model.d_optimizer, **arguments)
    return model


class Both(keras.callbacks.Callback):
    """Keeps both scalars and both counts after each update."""

    def __init__(self):
        super().__init__()
        self.d, self.g, self.counts, self.norms = [], [], [], []

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        self.d.append(value_of(model, model.d).item())
        self.g.append(value_of(model, model.g).item())
        self.counts.append(
            tuple(
                value_of(model, optimizer.iterations).item()
                for optimizer in (model.d_optimizer, model.g_optimizer)
            )
        )
        self.norms += [u.gradient_norm for u in model.last_updates]


def dataset(xs, zs):
    def generate():
        for x, z in zip(xs, zs, strict=True):
            yield np.array(x, np.float32), np.array(z, np.float32)

    spec = tf.TensorSpec([None], tf.float32)
    return tf.data.Dataset.from_generator(
        generate, output_signature=(spec, spec)
    )


def by_hand(windows):
    """d and g after each update, from (all x, all z) of its window."""
    d = g = velocity = 0.0
    result = []
    for x, z in windows:
        d -= np.mean(x)
        valid = [value for value in z if value >= 0]
        if valid:
            velocity = 0.5 * velocity - 0.5 * np.mean(valid)
            g += velocity
        result.append((d, g))
    return [list(values) for values in zip(*result, strict=True)]


# Eight micro-batches; -1 among the z does not count.
XS = [[1, 2], [3, 6], [4, 4], [1, 1], [0, 2], [5, 5], [2, 2], [7, 1]]
ZS = [[2, -1], [1, 3], [8, 8], [-1, -1], [1, -1], [-1, 6], [2, 4], [5, 5]]
# A short micro-batch in the middle and one more at the end.
RAGGED_XS = [*XS[:3], [9], *XS[4:], [3]]
RAGGED_ZS = [*ZS[:3], [4], *ZS[4:], [1]]


def in_windows(xs, zs, steps):
    return [
        (sum(xs[start : start + steps], []), sum(zs[start : start + steps], []))
        for start in range(0, len(xs), steps)
    ]


@pytest.mark.parametrize(
    "replicas, eager", [(1, False), (1, True), (2, False), (2, True)]
)
def test_N1_each_optimizer_has_its_own_window(replicas, eager):
    model = two(replicas, gradient_accumulation_steps=2, run_eagerly=eager)
    seen = Both()
    model.fit(dataset(XS, ZS), verbose=0, callbacks=[seen])
    d, g = by_hand(in_windows(XS, ZS, 2))
    assert seen.d == pytest.approx(d, abs=1e-5)
    assert seen.g == pytest.approx(g, abs=1e-5)
    assert seen.counts == [(n, n) for n in (1, 2, 3, 4)]
    # What is logged is the first one's: the mean of x alone.
    assert seen.norms == pytest.approx([3, 2.5, 3, 3], abs=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_N1_ragged_windows_and_epochs(replicas):
    model = two(replicas, gradient_accumulation_steps=2)
    seen = Both()
    model.fit(
        dataset(RAGGED_XS, RAGGED_ZS), epochs=2, verbose=0, callbacks=[seen]
    )
    d, g = by_hand(in_windows(RAGGED_XS, RAGGED_ZS, 2) * 2)
    assert len(d) == 10
    assert seen.d == pytest.approx(d, abs=1e-4)
    assert seen.g == pytest.approx(g, abs=1e-4)
    assert seen.counts == [(n, n) for n in range(1, 11)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_N1_batches_that_are_cut(replicas):
    windows = in_windows(RAGGED_XS, RAGGED_ZS, 3)
    model = two(replicas, micro_batch_size=2)
    seen = Both()
    model.fit(dataset(*zip(*windows, strict=True)), verbose=0, callbacks=[seen])
    d, g = by_hand(windows)
    assert seen.d == pytest.approx(d, abs=1e-5)
    assert seen.g == pytest.approx(g, abs=1e-5)
    assert seen.counts == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_N1_only_one_of_them_has_weight(replicas):
    """A window without any z moves d alone, and no momentum of g."""
    xs, zs = XS[:4], [ZS[0], ZS[1], [-1, -1], [-1, -1]]
    model = two(replicas, gradient_accumulation_steps=2)
    seen = Both()
    model.fit(dataset(xs, zs), verbose=0, callbacks=[seen])
    d, g = by_hand(in_windows(xs, zs, 2))
    assert seen.d == pytest.approx(d, abs=1e-6)
    assert seen.g == pytest.approx(g, abs=1e-6)
    assert seen.g[0] == seen.g[1]
    assert seen.counts == [(1, 1), (2, 1)]


def test_N1_adam_and_clipping_of_each_alone():
    """Against each scalar trained alone, by Keras, in one batch."""

    def optimizers():
        return (
            keras.optimizers.Adam(0.1, global_clipnorm=1.0),
            keras.optimizers.AdamW(0.2, weight_decay=0.1, clipvalue=2.0),
        )

    model = two(optimizers=optimizers, gradient_accumulation_steps=2)
    seen = Both()
    model.fit(dataset(XS, ZS), verbose=0, callbacks=[seen])
    windows = in_windows(XS, ZS, 2)
    gradients = [
        [np.mean(x) for x, _ in windows],
        [np.mean([value for value in z if value >= 0]) for _, z in windows],
    ]
    for optimizer, means, got in zip(
        optimizers(), gradients, (seen.d, seen.g), strict=True
    ):
        alone = keras.Variable(0.0)
        expected = []
        for mean in means:
            optimizer.apply([tf.constant(mean, tf.float32)], [alone])
            expected.append(float(alone.numpy()))
        assert got == pytest.approx(expected, abs=1e-6)


class Twice(Two):
    """Hands over to one optimizer twice in one micro-step."""

    def train_step(self, data):
        super().train_step(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.d * data[0])
        self.accumulate(tape, loss, 1, variables=[self.d])
        return {}


def test_N1_nothing_is_counted_twice():
    model = Twice(sgd_and_momentum())
    model.compile(optimizer=model.d_optimizer, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="once per optimizer"):
        model.fit(dataset(XS, ZS), verbose=0)
    assert model.d.numpy() == model.g.numpy() == 0


# --- An optimizer that `compile` was not given -----------------------------


class Own(tfaccum.Model):
    """T, trained by `self.own`; the compiled optimizer makes no update."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0], training=True))
        self.accumulate(tape, loss, tf.shape(data[0])[0], optimizer=self.own)
        return {}


def own(replicas=1, **arguments):
    model = toy.toy(replicas, model_class=Own, **arguments)
    with model.distribute_strategy.scope():
        model.own = keras.optimizers.SGD(1.0, momentum=0.5)
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_N1_its_updates_move_the_schedule(replicas):
    """Eight batches: windows of 1, 1, 3 and 3."""
    model = own(replicas, gradient_accumulation_steps=[(0, 1), (2, 3)])
    seen = toy.fit(model, toy.batches(*[[1, 2]] * 8))
    assert seen.of_updates("examples") == [2, 2, 6, 6]
    assert model.num_updates == 4


def test_N1_its_updates_move_the_freeze():
    """One weight in each of two blocks: groups 0, 0, 1, and again."""
    model = own(
        layers=lambda: [toy.scalar(1.0, f"w{i}") for i in range(6)],
        gradient_freeze=boost.GradientFreeze(
            groups=2, freeze_type=0, full_step_fraction=0.7
        ),
    )
    seen = toy.fit(model, toy.batches(*[[0.01]] * 6))
    weights = [[1.0] * 6, *seen.weights]
    moved = [
        [w != before for w, before in zip(*pair, strict=True)]
        for pair in itertools.pairwise(weights)
    ]
    everything, second = [True] * 6, [False] * 3 + [True] * 3
    assert moved == [everything, everything, second] * 2


def test_N1_a_run_of_its_goes_on(tmp_path):
    def run(*callbacks):
        model = own(gradient_accumulation_steps=[(0, 1), (2, 2)])
        xs = [[1], [2], [3], [4], [5], [6]]
        seen = toy.fit(model, toy.batches(*xs), callbacks=list(callbacks))
        return seen.weights

    # Gradients 1, 2, 3.5 and 5.5, with momentum 0.5.
    expected = [[-1], [-3.5], [-8.25], [-16.125]]
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(toy.Stopped):
        run(saver, toy.StopAfter(3))
    assert run(tfaccum.Checkpoint(tmp_path)) == expected[3:]


@pytest.mark.parametrize("eager", [False, True])
def test_N1_it_is_made_under_the_strategy_of_the_model(eager):
    model = own(2, run_eagerly=eager)
    model.own = keras.optimizers.SGD(1.0)
    with pytest.raises(ValueError, match="=(sgd|SGD).* made under no"):
        toy.fit(model, toy.batches([1, 2]))


def test_N1_a_callback_begins_with_its_updates():
    class Made(callbacks.UpdateCallback):
        def on_train_batch_end(self, batch, logs=None):
            made.extend(update.update for update in self.made_updates())

    made, model = [], own()
    for xs in ([[1], [2]], [[np.inf], [3]]):
        toy.fit(model, toy.batches(*xs), callbacks=[Made()])
    assert made == [1, 2, 3]
