"""A run that is interrupted and goes on ends with the same bits."""

import json
import re
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfaccum
from tests import toy
from tfaccum import checkpoint
from tfaccum.snapshots import Snapshots


class Interrupted(Exception):
    pass


class Count(keras.callbacks.Callback):
    """Counts train calls; `act` is called at one of them."""

    def __init__(self, call=None):
        super().__init__()
        self.call, self.calls = call, 0

    def on_train_batch_end(self, batch, logs=None):
        self.calls += 1
        if self.calls == self.call:
            self.act()

    def act(self):
        raise NotImplementedError


class InterruptAt(Count):
    """Raises when the call has been saved."""

    runs_last = True

    def act(self):
        raise Interrupted


def data(rows=74):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return x, (x @ [1.0, -2.0, 0.5] > 0).astype("int32")


def network(replicas=1, **arguments):
    """Dropout, statistics, slots, an average, a schedule, a loss scale."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("mixed_float16")
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,))
        x = keras.layers.Dense(8, activation="relu")(inputs)
        x = keras.layers.Dropout(0.5, seed=1)(x)
        x = keras.layers.BatchNormalization()(x)
        outputs = keras.layers.Dense(2, activation="softmax", dtype="float32")(
            x
        )
        model = tfaccum.Model(inputs, outputs)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 7, 0.5)
        arguments = {
            "optimizer": keras.optimizers.AdamW(schedule, use_ema=True),
            "gradient_accumulation_steps": 2,
            "loss_scale": tfaccum.LossScale(initial=64.0, growth_interval=3),
            **arguments,
        }
        model.compile(
            loss="sparse_categorical_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.SparseCategoricalCrossentropy(name="ce"),
            ],
            **arguments,
        )
    keras.config.set_dtype_policy("float32")
    return model


class AllStates(keras.callbacks.Callback):
    """Every variable after each train call, by place."""

    def __init__(self):
        super().__init__()
        self.states = {}

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        variables = [*model.variables, *model.optimizer.variables]
        copies = model.distribute_strategy.experimental_local_results
        self.states[self.epoch, batch] = [
            copy.numpy().tobytes()
            for v in variables
            for copy in copies(v.value)
        ] + [logs]

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


def fit(model, callbacks, batch_size=8, epochs=3, shuffle=True, **arguments):
    x, y = data()
    return model.fit(
        x,
        np.eye(2)[y].argmax(1),
        batch_size=batch_size,
        epochs=epochs,
        shuffle=shuffle,
        validation_data=(x[:9], y[:9]),
        callbacks=callbacks,
        **{"verbose": 0, **arguments},
    ).history


def interrupted(tmp_path, build, calls, save_every_updates=1, **arguments):
    """Goes on after each of the calls; returns the last run's history."""
    states = AllStates()
    for call in [*calls, None]:
        saver = tfaccum.Checkpoint(
            tmp_path, save_every_updates=save_every_updates
        )
        callbacks = [states, saver, InterruptAt(call)]
        try:
            return states.states, fit(build(), callbacks, **arguments)
        except Interrupted:
            continue


def assert_same(found, expected):
    states, history = found
    wanted, wanted_history = expected
    assert history == wanted_history
    assert states.keys() >= wanted.keys()
    for place, state in wanted.items():
        assert states[place] == state, place


def assert_same_weights(model, other):
    for mine, wanted in zip(
        model.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, wanted)


def undisturbed(build, **arguments):
    states = AllStates()
    return states.states, fit(build(), [states], **arguments)


@pytest.mark.parametrize("replicas", [1, 2])
def test_I2_I3_every_bit_is_the_same_after_three_interruptions(
    tmp_path, replicas
):
    """10 batches and 5 updates an epoch, the last batch short."""

    def build():
        return network(replicas)

    # In epoch 0 after 3 updates; in epoch 1 after 1, with the epoch's end in
    # between; in epoch 2 after its last update, before its validation.
    assert_same(interrupted(tmp_path, build, [3, 3, 9]), undisturbed(build))


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 3, "steps_per_execution": 2},
        {"gradient_accumulation_steps": 1, "micro_batch_size": 3},
        {"run_eagerly": True},
    ],
)
def test_I2_every_way_to_make_windows(tmp_path, arguments):
    def build():
        return network(**arguments)

    assert_same(interrupted(tmp_path, build, [2, 4]), undisturbed(build))


def test_I2_updates_that_were_not_saved_are_made_again(tmp_path):
    """Saved at updates 4 and, at the end of the epoch, 5."""
    found = interrupted(tmp_path, network, [5, 3], save_every_updates=4)
    assert_same(found, undisturbed(network))


def test_I2_steps_per_epoch_go_on_through_the_data(tmp_path):
    arguments = {"steps_per_epoch": 6, "shuffle": False}
    assert_same(
        interrupted(tmp_path, network, [2, 3, 2], **arguments),
        undisturbed(network, **arguments),
    )


def test_I2_validation_steps_go_on_through_the_data(tmp_path):
    """Four of nine batches each time, in every second epoch."""
    arguments = {
        "validation_steps": 4,
        "validation_batch_size": 1,
        "validation_freq": 2,
        "epochs": 6,
    }
    assert_same(
        interrupted(tmp_path, network, [12, 8], **arguments),
        undisturbed(network, **arguments),
    )


def test_callbacks_remember(tmp_path):
    """A plateau of constant metrics: patience counts over interruptions."""

    def build():
        return toy.toy(gradient_accumulation_steps=2)

    def run(callbacks):
        x = np.zeros([8, 1], np.float32)
        model = build()
        return model.fit(
            x, x, batch_size=2, epochs=12, verbose=0, callbacks=callbacks
        ).history

    def deciding():
        return [
            keras.callbacks.ReduceLROnPlateau("loss", patience=3, cooldown=2),
            keras.callbacks.EarlyStopping("loss", patience=7),
        ]

    expected = run(deciding())
    assert len(expected["loss"]) == 8
    for call in (5, 4, 6, None):  # Two calls an epoch.
        saver = tfaccum.Checkpoint(tmp_path)
        try:
            found = run([*deciding(), saver, InterruptAt(call)])
        except Interrupted:
            continue
    assert found == expected


class StopOnce(Count):
    """Asks to stop, once, at a call of its own life."""

    def act(self):
        self.model.stop_training = True


@pytest.mark.parametrize("call", [3, 5])
def test_a_run_that_a_callback_has_stopped_stays_stopped(tmp_path, call):
    """Killed when that was saved: in an epoch, and at the end of one."""
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(Interrupted):
        fit(network(), [StopOnce(call), saver, InterruptAt(call)])
    model, look = network(), Count()
    history = fit(model, [look, tfaccum.Checkpoint(tmp_path)])
    assert look.calls == 0
    whole = network()
    assert history == fit(whole, [StopOnce(call)])
    assert_same_weights(model, whole)


class Remembers(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(epoch)

    def get_state(self):
        return self.seen

    def set_state(self, state):
        self.seen = state


def test_a_callback_of_ones_own_remembers(tmp_path):
    for call in (7, None):
        mine = Remembers()
        saver = tfaccum.Checkpoint(tmp_path)
        try:
            fit(network(), [mine, saver, InterruptAt(call)])
        except Interrupted:
            assert mine.seen == [0]
    assert mine.seen == [0, 1, 2]


# --- Where it goes on -----------------------------------------------------


def test_I8_three_of_ten_batches_remain_and_the_bar_says_so(tmp_path, capsys):
    build = network
    arguments = {"gradient_accumulation_steps": 1}
    for call in (17, None):
        model = build(**arguments)
        look = Count()
        saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
        try:
            fit(model, [look, saver, InterruptAt(call)], epochs=2, verbose=1)
        except Interrupted:
            capsys.readouterr()
    assert look.calls == 3
    shown = re.findall(r"(\d+)/10", capsys.readouterr().out)
    assert shown[0] == "8" and shown[-1] == "10"


def test_I4_update_500_is_in_epoch_20(tmp_path):
    """100 batches an epoch, K = 4: 25 updates."""
    x = np.zeros([100, 1], np.float32)
    epochs = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    for end in (20, 30):
        model = toy.toy(gradient_accumulation_steps=4, steps_per_execution=25)
        model.fit(
            x,
            x,
            batch_size=1,
            epochs=end,
            verbose=0,
            callbacks=[tfaccum.Checkpoint(tmp_path), Look()],
        )
    assert epochs == list(range(30))
    assert toy.iterations_of(model) == 750


def test_I14_epoch_27_of_30_and_the_right_learning_rate(tmp_path):
    """docs/resuming.md has the commands; the rate falls by update."""
    x = np.zeros([8, 1], np.float32)
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.extend(u.learning_rate for u in self.model.last_updates)

    for epochs in (27, 30):
        model = toy.toy(
            gradient_accumulation_steps=2,
            optimizer=lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.PolynomialDecay(1.0, 60, 0.0)
            ),
        )
        history = model.fit(
            x,
            x,
            batch_size=2,
            epochs=epochs,
            verbose=0,
            callbacks=[Look(), tfaccum.Checkpoint(tmp_path)],
        )
    # Two updates an epoch; the rate is 1 - u / 60.
    np.testing.assert_allclose(rates, 1 - np.arange(60) / 60, atol=1e-6)
    assert history.epoch == list(range(30))


def test_a_finished_run_has_nothing_to_do(tmp_path):
    whole = network()
    first = fit(whole, [tfaccum.Checkpoint(tmp_path)])
    model, look = network(), Count()
    again = fit(model, [look, tfaccum.Checkpoint(tmp_path)])
    assert again == first and not look.calls
    # At the end the moving average has taken the weights' place.
    assert_same_weights(model, whole)


# --- When it is saved -----------------------------------------------------


def saved(tmp_path):
    """(update, epoch, batch) of all checkpoints."""
    found = Snapshots(tmp_path / "checkpoints").paths()
    return [tuple(map(int, re.findall(r"-(\d+)", p.name))) for p in found]


def test_I13_every_four_updates_whatever_a_call_makes(tmp_path):
    """Eight windows a call, of two batches; 30 batches in one epoch."""
    model = toy.toy(gradient_accumulation_steps=2, steps_per_execution=8)
    x = np.ones([30, 1], np.float32)
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=4, keep=9)
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[saver])
    assert saved(tmp_path) == [(4, 0, 8), (8, 0, 16), (12, 0, 24), (15, 1, 0)]
    # The pause was for this run; a call makes eight windows again.
    look = toy.EachUpdate()
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[look])
    assert look.iterations == [23, 30]


def test_the_newest_are_kept_and_the_best(tmp_path):
    """Validation: the second of four epochs is the best."""
    model = toy.toy(start=0.0)
    rates = [1.0, 1.0, -0.5, -0.25]

    class Rates(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = rates[epoch]

    x = np.ones([2, 1], np.float32)
    model.fit(
        x,
        x,
        batch_size=2,
        epochs=4,
        verbose=0,
        validation_data=(x, x),
        callbacks=[
            Rates(),
            tfaccum.Checkpoint(tmp_path, keep=1, save_best="val_loss"),
        ],
    )
    # w is -1, -2, -1.5, -1.25, and the loss is w.
    assert saved(tmp_path) == [(2, 2, 0), (4, 4, 0)]
    note = json.loads((tmp_path / "best.json").read_text())
    assert (note["name"], note["value"]) == ("val_loss", -2.0)
    for which, w in (("best", -2.0), ("newest", -1.25)):
        loaded = tfaccum.load(tmp_path, which)
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), x * w)


def test_a_better_epoch_of_an_earlier_run_stays_the_best(tmp_path):
    x = np.ones([2, 1], np.float32)
    for end, start in ((1, 5.0), (2, 5.0)):
        model = toy.toy(start=start)
        model.fit(
            x,
            x,
            epochs=end,
            verbose=0,
            callbacks=[tfaccum.Checkpoint(tmp_path, save_best=("loss", "max"))],
        )
    note = json.loads((tmp_path / "best.json").read_text())
    assert note["value"] == 5.0


@pytest.mark.parametrize(
    ("mode", "best"), [("min", (4, 0.5)), ("max", (2, 2.0))]
)
def test_nan_is_worse_than_any_number(tmp_path, mode, best):
    """In the first and third epoch; also of a run before."""
    values = [np.nan, 2.0, np.nan, 0.5]

    class Value(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mine"] = values[epoch]

    x = np.ones([2, 1], np.float32)
    for end in (1, 4):
        saver = tfaccum.Checkpoint(tmp_path, save_best=("mine", mode))
        toy.toy().fit(x, x, epochs=end, verbose=0, callbacks=[Value(), saver])
    note = json.loads((tmp_path / "best.json").read_text())
    name = f"update-{best[0]:08}-epoch-{best[0]:04}-batch-000000"
    assert (note["checkpoint"], note["value"]) == (name, best[1])


def test_load_needs_no_class_of_ones_own_and_runs_no_code(tmp_path):
    model = network()
    fit(model, [tfaccum.Checkpoint(tmp_path)], epochs=1)
    loaded = tfaccum.load(tmp_path)
    assert not loaded.compiled
    x, _ = data()
    before_average = Snapshots(tmp_path / "checkpoints").newest()[0].arrays()
    for index, variable in enumerate(loaded.variables):
        value = before_average[f"model/{index}"]
        np.testing.assert_array_equal(
            variable.numpy(), value.reshape(variable.shape)
        )
    assert loaded.predict(x, verbose=0).shape == (74, 2)


def test_load_refuses_code(tmp_path):
    inputs = keras.Input((1,))
    outputs = keras.layers.Lambda(lambda x: x + 1)(toy.scalar()(inputs))
    model = tfaccum.Model(inputs, outputs)
    model.compile("sgd", "mse")
    x = np.ones([2, 1], np.float32)
    model.fit(x, x, verbose=0, callbacks=[tfaccum.Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match="[Ll]ambda"):
        tfaccum.load(tmp_path)


def test_load_says_which_class_it_lacks(tmp_path):
    class Mine(tfaccum.Model):
        pass

    inputs = keras.Input((1,))
    model = Mine(inputs, toy.scalar()(inputs))
    model.compile("sgd", "mse")
    x = np.ones([2, 1], np.float32)
    model.fit(x, x, verbose=0, callbacks=[tfaccum.Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match="Mine.*Register classes of your own"):
        tfaccum.load(tmp_path)


@pytest.mark.parametrize("which", ["oldest", None])
def test_load_says_what_is_wrong(tmp_path, which):
    with pytest.raises(ValueError, match="`which`"):
        tfaccum.load(tmp_path, which)
    with pytest.raises(ValueError, match="without good checkpoint"):
        tfaccum.load(tmp_path)


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_load_says_what_is_wrong_with_the_best(tmp_path, what):
    """The first of two epochs is the best, the second the newest."""
    x = np.ones([2, 1], np.float32)
    model = toy.toy(start=5.0)
    saver = tfaccum.Checkpoint(tmp_path, save_best=("loss", "max"))
    model.fit(x, x, epochs=2, verbose=0, callbacks=[saver])
    best = Snapshots(tmp_path / "checkpoints").paths()[0]
    if what == "damaged":
        (best / "arrays-1.index").write_bytes(b"nothing")
    else:
        shutil.rmtree(best)
    said = re.escape(str(best)) + ".*Use which='newest'"
    with pytest.raises(ValueError, match=said):
        tfaccum.load(tmp_path)
    loaded = tfaccum.load(tmp_path, "newest")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), 3 * x)


# --- What goes wrong ------------------------------------------------------


def test_a_damaged_one_is_passed_over_with_a_message(tmp_path):
    expected = undisturbed(network)
    states = AllStates()
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(Interrupted):
        fit(network(), [states, saver, InterruptAt(4)])
    newest = Snapshots(tmp_path / "checkpoints").paths()[-1]
    (newest / "arrays-1.index").write_bytes(b"nothing")
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.warns(UserWarning, match="is damaged.*update-00000004.*Using"):
        history = fit(network(), [states, saver])
    assert_same((states.states, history), expected)


def test_a_damaged_one_pushes_no_good_one_out(tmp_path):
    """The run that goes on from update 3 is killed before it is past 5."""
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(Interrupted):
        fit(network(), [saver, InterruptAt(5)])
    for path in Snapshots(tmp_path / "checkpoints").paths()[1:]:
        (path / "arrays-1.index").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="is damaged"):
        saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1, keep=1)
        with pytest.raises(Interrupted):
            fit(network(), [saver, InterruptAt(1)])
    found, complaints = Snapshots(tmp_path / "checkpoints").newest()
    assert (found.facts["update"], complaints) == (4, [])
    assert saved(tmp_path) == [(4, 0, 8)]
    aside = sorted((tmp_path / "checkpoints").glob("*.damaged"))
    assert [path.name[:15] for path in aside] == [
        "update-00000004",
        "update-00000005",
    ]


def test_a_run_that_is_refused_sets_nothing_aside(tmp_path):
    fit(network(), [tfaccum.Checkpoint(tmp_path)])
    before = saved(tmp_path)
    newest = Snapshots(tmp_path / "checkpoints").paths()[-1]
    (newest / "arrays-1.index").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="is damaged"):
        with pytest.raises(ValueError, match="'never'"):
            fit(network(), [tfaccum.Checkpoint(tmp_path, resume="never")])
    assert saved(tmp_path) == before


def test_a_write_that_fails_is_raised_at_the_next_update(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Snapshots, "write", fail)
    look = Count()
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=2)
    with pytest.raises(RuntimeError, match="No space left on device"):
        fit(network(), [look, saver])
    assert look.calls <= 4


REFUSED = {
    "optimizer": (
        {"optimizer": keras.optimizers.SGD},
        {},
        "AdamW -> SGD",
    ),
    "global batch": (
        {"gradient_accumulation_steps": 3},
        {},
        "global batch: 16 -> 24",
    ),
    "batch size": ({}, {"batch_size": 5}, "global batch: 16 -> 10"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_changed_run_is_refused_with_a_table_unless_allowed(tmp_path, change):
    compiled, fitted, message = REFUSED[change]
    fit(network(), [tfaccum.Checkpoint(tmp_path)], epochs=1)
    made = {k: v() if callable(v) else v for k, v in compiled.items()}
    with pytest.raises(ValueError, match=message) as error:
        fit(network(**made), [tfaccum.Checkpoint(tmp_path)], **fitted)
    assert "allow_changes=True" in str(error.value)
    saver = tfaccum.Checkpoint(tmp_path, allow_changes=True)
    made = {k: v() if callable(v) else v for k, v in compiled.items()}
    model = network(**made)
    history = fit(model, [saver], epochs=2, **fitted)
    assert len(history["loss"]) == 2
    # Of 74 examples, 16 at a time, or what it was changed to.
    size = {"global batch": 24, "batch size": 10}.get(change, 16)
    assert toy.iterations_of(model) == 5 + -(-74 // size)


def test_a_changed_model_takes_what_fits(tmp_path):
    def build(units, head):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((3,))
        x = keras.layers.Dense(4, name="body")(inputs)
        x = keras.layers.Dense(units, name=head)(x)
        model = tfaccum.Model(inputs, x)
        model.compile(
            keras.optimizers.Adam(0.1, name="adam"),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    x, y = data()
    first = build(2, "head")
    first.fit(x, y, verbose=0, callbacks=[tfaccum.Checkpoint(tmp_path)])
    message = r"float32 \[4, 2\] -> float32 \[4, 3\]"
    with pytest.raises(ValueError, match=message):
        build(3, "head").fit(
            x, y, verbose=0, callbacks=[tfaccum.Checkpoint(tmp_path)]
        )
    other = build(3, "head")
    saver = tfaccum.Checkpoint(tmp_path, allow_changes=True)
    with pytest.warns(UserWarning, match="begin anew: head/kernel, head/bias"):
        other.fit(x, y, verbose=0, callbacks=[saver])  # No epoch is left.
    same, different = other.get_weights(), first.get_weights()
    np.testing.assert_array_equal(same[0], different[0])
    np.testing.assert_array_equal(same[2], build(3, "head").get_weights()[2])
    slots = [
        {v.path: v.numpy() for v in model.optimizer.variables}
        for model in (first, other)
    ]
    name = "adam/body_kernel_momentum"
    np.testing.assert_array_equal(slots[0][name], slots[1][name])
    assert slots[1]["adam/iteration"] == 3


def test_must_and_never(tmp_path):
    with pytest.raises(ValueError, match="must.*no good checkpoint"):
        fit(network(), [tfaccum.Checkpoint(tmp_path, resume="must")])
    fit(network(), [tfaccum.Checkpoint(tmp_path, resume="never")], epochs=1)
    with pytest.raises(ValueError, match="never.*Received: model_dir="):
        fit(network(), [tfaccum.Checkpoint(tmp_path, resume="never")])
    must = tfaccum.Checkpoint(tmp_path, resume="must")
    assert len(fit(network(), [must])["loss"]) == 3


@pytest.mark.parametrize(
    "name,value,kind",
    [
        ("save_every_updates", 0, ValueError),
        ("save_every_updates", 2.5, TypeError),
        ("keep", 0, ValueError),
        ("keep", True, TypeError),
        ("resume", "yes", ValueError),
        ("max_run_seconds", 0, ValueError),
        ("save_best", ("loss", "low"), ValueError),
    ],
)
def test_bad_arguments(tmp_path, name, value, kind):
    with pytest.raises(kind, match=f"`{name}`.*Received"):
        tfaccum.Checkpoint(tmp_path, **{name: value})


def test_best_of_something_that_is_not_logged(tmp_path):
    saver = tfaccum.Checkpoint(tmp_path, save_best="val_f1")
    with pytest.raises(ValueError, match="'val_f1'; the logs have"):
        fit(network(), [saver])


# --- Asked to end ---------------------------------------------------------


class SendTerm(Count):
    def act(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("call", [1, 3, 5])
def test_sigterm_ends_after_the_update_and_goes_on(tmp_path, call):
    """5 is the last of an epoch: validation is left to the next run."""
    states = AllStates()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(tfaccum.Preempted) as end:
        fit(
            network(),
            [states, SendTerm(call), tfaccum.Checkpoint(tmp_path)],
        )
    assert end.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(states.states) == call
    assert saved(tmp_path) == [(call, 0, 2 * call)]
    history = fit(network(), [states, tfaccum.Checkpoint(tmp_path)])
    assert_same((states.states, history), undisturbed(network))


def test_a_deadline_ends_the_run_too(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    class Tick(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            now[0] += 1

    saver = tfaccum.Checkpoint(tmp_path, max_run_seconds=7)
    with pytest.raises(tfaccum.Preempted):
        fit(network(), [Tick(), saver])
    # Five updates in the first epoch, two in the second.
    assert saved(tmp_path)[-1] == (7, 1, 4)


# --- Another shape --------------------------------------------------------


def plain_network(replicas, **arguments):
    """Without what the law makes an exception for."""
    keras.utils.set_random_seed(3)
    with toy.strategy_of(replicas).scope():
        inputs = keras.Input((3,), dtype="float64")
        x = keras.layers.Dense(8, activation="tanh", dtype="float64")(inputs)
        x = keras.layers.Dense(2, activation="softmax", dtype="float64")(x)
        model = tfaccum.Model(inputs, x)
        model.compile(
            keras.optimizers.AdamW(0.05, global_clipnorm=0.1),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **arguments,
        )
    return model


# (replicas, dataset batch, K, micro-batch) of a global batch of 24.
SHAPES = [(2, 8, 3, None), (1, 24, 1, 5), (4, 12, 2, 2), (1, 4, 6, None)]


def test_other_replicas_batches_and_k_change_nothing(tmp_path):
    """2 replicas, then 1, then 4; interrupted in the middle of epochs."""

    def run(shape, callbacks):
        replicas, batch, steps, micro = shape
        model = plain_network(
            replicas, gradient_accumulation_steps=steps, micro_batch_size=micro
        )
        history = fit(
            model, callbacks, batch_size=batch, epochs=4, shuffle=False
        )
        return model.get_weights(), history

    expected, wanted = run(SHAPES[0], [])
    # Four updates an epoch, of 24, 24, 24 and 2 examples.
    for shape, call in zip(SHAPES, (3, 4, 5, None), strict=True):
        saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
        try:
            found, history = run(shape, [saver, InterruptAt(call)])
        except Interrupted:
            continue
    for value, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-6, atol=1e-7)
    for name, values in wanted.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


def test_metrics_of_half_an_epoch_survive_another_number_of_replicas(
    tmp_path,
):
    """Accuracy over the whole epoch is a count, so that it is exact."""
    x = np.float32([[1], [1], [0], [1], [1], [0]])

    def run(replicas, callbacks):
        keras.utils.set_random_seed(1)
        with toy.strategy_of(replicas).scope():
            inputs = keras.Input((1,))
            model = tfaccum.Model(inputs, toy.scalar(1.0)(inputs))
            model.compile(
                keras.optimizers.SGD(0.0),
                "mse",
                metrics=[keras.metrics.BinaryAccuracy(name="right")],
            )
        return model.fit(
            x, x * 0, batch_size=2, shuffle=False, verbose=0,
            callbacks=callbacks,
        ).history["right"]  # fmt: skip

    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(Interrupted):
        run(2, [saver, InterruptAt(2)])
    (found,) = run(4, [tfaccum.Checkpoint(tmp_path)])
    assert found == pytest.approx(2 / 6)


# --- Several optimizers ---------------------------------------------------


class Two(tfaccum.Model):
    """Each weight with an optimizer of its own."""

    def __init__(self, second):
        super().__init__()
        self.first = toy.scalar(name="first")
        self.second = toy.scalar(name="second")
        self.second_optimizer = second

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def train_step(self, batch):
        x, _ = batch
        for layer, optimizer in (
            (self.first, self.optimizer),
            (self.second, self.second_optimizer),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x))
            self.accumulate(
                tape,
                loss,
                tf.shape(x)[0],
                optimizer=optimizer,
                variables=layer.trainable_variables,
            )
        return {}


def test_N1_both_optimizers_are_saved(tmp_path):
    x = np.arange(1, 13, dtype=np.float32)[:, np.newaxis]

    def run(callbacks):
        keras.utils.set_random_seed(1)
        model = Two(keras.optimizers.Adam(0.1))
        model.build((None, 1))
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            gradient_accumulation_steps=2,
        )
        model.fit(
            x,
            x,
            batch_size=2,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return [w.tolist() for w in model.get_weights()]

    expected = run([])
    saver = tfaccum.Checkpoint(tmp_path, save_every_updates=1)
    with pytest.raises(Interrupted):
        run([saver, InterruptAt(4)])
    assert run([tfaccum.Checkpoint(tmp_path)]) == expected
