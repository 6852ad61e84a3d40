"""T under a loss scale: what it trains with, and its state after each call.

The cases E are tested on one device, on two replicas and on two workers, with
what is here.
"""

import contextlib

import keras
import tensorflow as tf

import tfaccum
from tests import toy

INF = float("inf")
NAN = float("nan")
START = 2.0**15

# x of a good window times 2**15 has to stay below 65504 in float16.
GOOD = [0.25, 0.5]


@contextlib.contextmanager
def policy(name):
    """What is built inside has this dtype policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def momentum_and_average(rate=1.0):
    return keras.optimizers.SGD(
        rate, momentum=0.5, use_ema=True, ema_momentum=0.5
    )


def state(model):
    """Weights and all optimizer variables but the loss scale's two."""
    scale = model.optimizer
    if isinstance(scale, keras.optimizers.LossScaleOptimizer):
        excluded = [scale.dynamic_scale.path, scale.step_counter.path]
    else:
        excluded = []
    return {
        (i, v.path): toy.value_of(model, v)
        for i, v in enumerate(model.variables + model.optimizer.variables)
        if v.path not in excluded
    }


def changed(before, after):
    """Names of what is not the same to the bit."""
    assert before.keys() == after.keys()
    return [
        name
        for name in before
        if before[name].tobytes() != after[name].tobytes()
    ]


class States(keras.callbacks.Callback):
    """State, loss scale and counter before training and after each call."""

    def __init__(self):
        super().__init__()
        self.states, self.scales, self.counters = [], [], []
        self.updates = []

    def note(self):
        self.states.append(state(self.model))
        optimizer = self.model.optimizer
        for name, values in (
            ("dynamic_scale", self.scales),
            ("step_counter", self.counters),
        ):
            if hasattr(optimizer, name):
                variable = getattr(optimizer, name)
                values.append(toy.value_of(self.model, variable).item())

    def on_train_begin(self, logs=None):
        self.note()

    def on_train_batch_end(self, batch, logs=None):
        self.updates += self.model.last_updates
        self.note()

    def weights(self):
        """The scalar w after each call."""
        return [
            value.item()
            for values in self.states[1:]
            for (_, path), value in values.items()
            if path == "w/kernel"
        ]

    def changes(self):
        """What each call has changed."""
        return [
            changed(before, after)
            for before, after in zip(
                self.states[:-1], self.states[1:], strict=True
            )
        ]


def train(model, windows, **arguments):
    """Trains on lists of windows of batches, one batch after the other."""
    seen = States()
    seen.logs = model.fit(
        toy.batches(*[batch for window in windows for batch in window]),
        callbacks=[seen],
        verbose=0,
        **arguments,
    ).history
    return seen


def bad_windows(steps, bad):
    """Good windows, and between them one bad value in each micro-step.

    In a batch of two rows the second is that of the last replica.
    """
    good = [[GOOD] * steps]
    windows = good[:]
    for place in sorted({0, steps // 2, steps - 1}):
        window = [list(GOOD) for _ in range(steps)]
        window[place][-1] = bad
        windows += [window, *good]
    return windows


def by_hand(skipped):
    """What `bad_windows` give with `momentum_and_average`, window by window.

    Good windows have the mean 0.375; a skipped one halves the scale and does
    nothing else.
    """
    weight = velocity = good = 0
    expected = {"scales": [START], "counters": [0], "weights": []}
    for is_skipped in skipped:
        if not is_skipped:
            velocity = 0.5 * velocity - 0.375
            weight += velocity
        good = 0 if is_skipped else good + 1
        scale = expected["scales"][-1] * (0.5 if is_skipped else 1)
        expected["scales"].append(scale)
        expected["counters"].append(good)
        expected["weights"].append(weight)
    return expected


class OwnStep(tfaccum.Model):
    """Uses nothing of the library but `accumulate`."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True))
        self.accumulate(tape, loss, weight=tf.shape(x)[0])
        return {"loss": loss}


class OneMoreEachTime(keras.optimizers.schedules.LearningRateSchedule):
    """lr(t) = t + 1."""

    def __call__(self, step):
        return tf.cast(step, tf.float32) + 1

    def get_config(self):
        return {}
