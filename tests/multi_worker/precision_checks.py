"""The cases E as two workers see them; each function returns plain values.

Of every batch worker 0 has the first row or rows, worker 1 the rest.
`tests/test_multi_worker_precision.py` says what has to come out.
"""

import keras

from tests import precision, toy
from tests.precision import GOOD, INF, NAN

FLOAT16 = "mixed_float16"


def run(strategy, windows, policy=FLOAT16, steps=2, **arguments):
    """Trains T; what was seen has to be the same on both workers.

    All but "culprits": each worker names its own bad replica.
    """
    with precision.policy(policy):
        model = toy.toy(
            strategy=strategy, gradient_accumulation_steps=steps, **arguments
        )
    seen = precision.train(model, windows)
    fields = ("update", "skipped", "learning_rate", "loss_scale")
    return {
        "optimizer": type(model.optimizer).__name__,
        "bits": [
            [value.tobytes().hex() for value in state.values()]
            for state in seen.states
        ],
        "moved": [len(moved) for moved in seen.changes()],
        "final": [value.item() for value in seen.states[-1].values()],
        "weights": seen.weights(),
        "scales": seen.scales,
        "counters": seen.counters,
        # As text, since NaN is not even equal to itself.
        "losses": [str(u.loss) for u in seen.updates],
        "norms": [str(u.gradient_norm) for u in seen.updates],
        "epoch_loss": seen.logs["loss"],
        "culprits": [u.nonfinite_replica for u in seen.updates],
        **{
            name: [getattr(update, name) for update in seen.updates]
            for name in fields
        },
    }


# Both windows have other means on worker 0 (0.5, 0.375) and worker 1.
TWO_WINDOWS = (
    [[0.25, 0.5], [0.75, 1]],
    [[0.5, 0], [0.25, 0.25]],
)


def optimizers(strategy):
    """Adam in each way to have a loss scale, and a fixed scale."""

    def wrapped():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))

    def fixed():
        return keras.optimizers.SGD(1.0, loss_scale_factor=1024.0)

    def adam():
        return keras.optimizers.Adam(0.5)

    return {
        name: run(strategy, TWO_WINDOWS, policy, optimizer=optimizer)
        for name, policy, optimizer in (
            ("wrapped", "float32", wrapped),
            ("unwrapped", "float32", adam),
            ("by_policy", FLOAT16, adam),
            ("fixed", "float32", fixed),
        )
    }


def own_step(strategy):
    """Workers with 2 and 1 rows, 1 and 1, 2 and 1, 1 and none."""
    windows = [
        [[0.1, 0.7, 0.3], [-0.2, 0.6]],
        [[0.9, 0.4, 0.5], [0.55]],
    ]
    return {
        policy: run(strategy, windows, policy, model_class=precision.OwnStep)
        for policy in ("float32", FLOAT16)
    }


def schedule(strategy):
    """lr(t) = t + 1; inf on worker 1 alone, in two windows of five."""
    bad = [GOOD, [0.25, INF]]
    windows = [
        [[0.25, 0.5], [0.25, 0.5]],
        bad,
        bad,
        [[0.5, 0.75], [0.25, 0.5]],
        [[0.25, 0], [0.25, 0.5]],
    ]

    def sgd():
        return keras.optimizers.SGD(precision.OneMoreEachTime())

    return {"skips": run(strategy, windows, optimizer=sgd)}


def losses(strategy):
    """From w = 1; the last case has inf on worker 1 in its first window."""
    batches = [GOOD, [1.5, 0.25]]
    return {
        "1": run(strategy, [batches], steps=1, start=1.0),
        "2": run(strategy, [batches], steps=2, start=1.0),
        "skipped": run(strategy, [[GOOD, [0.25, INF]], batches], start=1.0),
    }


def bad_values(strategy):
    """float16: inf on worker 1 in the first, middle and last micro-step."""
    return {
        str(steps): run(
            strategy,
            precision.bad_windows(steps, INF),
            steps=steps,
            optimizer=precision.momentum_and_average,
        )
        for steps in (1, 4)
    }


def bad_values_in_float32(strategy):
    """AdamW, no loss scale: two windows of four are bad on one worker."""

    def adamw():
        return keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True)

    found = {}
    for name, worker, value in (("nan_on_0", 0, NAN), ("inf_on_1", 1, INF)):
        bad = [[1.0, 2.0], [3.0, 4.0]]
        bad[1][worker] = value
        windows = [[[1, 2], [3, 4]], bad, bad, [[2, 1], [1, 0]]]
        found[name] = run(strategy, windows, "float32", optimizer=adamw)
    return found


def between_two_logs(strategy):
    """Three windows in one call; NaN on worker 1 in the second."""
    windows = [[GOOD, GOOD], [[0.25, NAN], GOOD], [GOOD, GOOD]]
    return {
        policy: run(strategy, windows, policy, steps_per_execution=3)
        for policy in ("float32", FLOAT16)
    }
