"""What two workers are made to do with a gradient freeze; and the same alone.

`tests/boost/test_gradient_freeze.py` says what has to come out.
"""

import keras
import numpy as np

from tests import toy
from tfaccum import boost
from tfaccum import strategy as strategies

# Groups of the updates: 0, 0, 1, 2, and again.
FREEZE = {"groups": 3, "freeze_type": 0, "full_step_fraction": 0.5}
# Nine scalars, three blocks of three; the model multiplies all of them.
START = np.array([1.1, 0.9, 1.2, 0.8, 1.05, 0.95, 1.15, 0.85, 1.3])
RATE, MOMENTUM, DECAY = 0.02, 0.9, 0.5
# One list for each dataset batch.
XS = [[1, 2], [3], [4, 6], [5, -2], [7, 8], [2, 1], [2], [1, 1], [3, 4],
      [0.5], [1, 2], [-1, 4], [2, 2], [3, 1]]  # fmt: skip


def model_of(replicas=1, seed=0, **how):
    """The nine scalars, with momentum and weight decay."""
    return toy.toy(
        replicas,
        layers=lambda: [toy.scalar(s, f"w{i}") for i, s in enumerate(START)],
        **{
            "optimizer": lambda: keras.optimizers.SGD(
                RATE, momentum=MOMENTUM, weight_decay=DECAY
            ),
            "gradient_freeze": boost.GradientFreeze(**FREEZE, seed=seed),
            **how,
        },
    )


def updates(strategy):
    """The weights after five updates, the last window ragged."""
    model = model_of(strategy=strategy, gradient_accumulation_steps=3)
    toy.fit(model, toy.batches(*XS))
    return toy.weights_of(model)


def another_seed(strategy):
    """What is said where worker 1 has another one."""
    worker, _ = strategies.worker_index(strategy)
    try:
        toy.fit(model_of(strategy=strategy, seed=worker), toy.batches(*XS))
    except ValueError as error:
        return str(error)
    return "accepted"
