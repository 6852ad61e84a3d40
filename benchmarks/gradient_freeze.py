"""Time of one update against the part of the model that is frozen.

    python -m benchmarks.gradient_freeze [--model=transformer]

One model four times, each staying in one group of `GradientFreeze(groups=4)`,
in turn: a whole `fit` over the same dataset in memory, after one that traced.

Prints one JSON line per model: for each group which part of the parameters is
frozen, milliseconds per update, wall and CPU (median, least and most of
`--rounds`), and their ratio to those of group 0, round by round. The forward
pass stays whole, so that about a third is the least that a ratio can be.
"""

import argparse
import functools
import json

import tensorflow as tf

import benchmarks
import tfaccum
from benchmarks.models import CASES
from tfaccum import boost

GROUPS, STEPS = 4, 4
MODELS = ("transformer", "cnn")  # Those with four blocks.


class Always(boost.GradientFreeze):
    """One group in every update."""

    def __init__(self, group):
        super().__init__(groups=GROUPS)
        self._group = group

    def group_at(self, update):
        """The one group."""
        return self._group


def frozen_part(model, group):
    """The part of the trainable parameters that a group freezes."""
    frozen = model.gradient_freeze.frozen(model, group)
    return round(_count(frozen) / _count(model.trainable_variables), 3)


def _count(variables):
    return sum(tf.TensorShape(v.shape).num_elements() for v in variables)


def measure(name, rounds, updates=None):
    """One model: its groups in turn."""
    case = CASES[name]
    updates = updates or case.updates
    micro = case.micro_batch
    rows = tf.data.Dataset.from_tensor_slices(
        case.data(micro * STEPS * updates)
    )
    data = rows.batch(micro).cache().prefetch(2 * STEPS)
    models = [
        case.compiled(
            tfaccum.Model,
            gradient_accumulation_steps=STEPS,
            gradient_freeze=Always(group),
        )
        for group in range(GROUPS)
    ]
    fits = [functools.partial(m.fit, data, verbose=0) for m in models]
    for fit in fits:
        fit()
    seconds = benchmarks.in_turn(
        {
            str(group): functools.partial(benchmarks.timed, fit)
            for group, fit in enumerate(fits)
        },
        rounds,
    )
    wall, cpu = (
        [[pair[kind] for pair in pairs] for pairs in seconds.values()]
        for kind in (0, 1)
    )
    return {
        "what": "gradient_freeze",
        "model": name,
        "micro_batch": micro,
        "steps": STEPS,
        "updates": updates,
        "rounds": rounds,
        "groups": [
            {
                "frozen": frozen_part(model, group),
                "ms": _per_update(wall[group], updates),
                "cpu_ms": _per_update(cpu[group], updates),
                "of_group_0": benchmarks.against(wall[group], wall[0])["ratio"],
                "cpu_of_group_0": benchmarks.against(cpu[group], cpu[0])[
                    "ratio"
                ],
            }
            for group, model in enumerate(models)
        ],
        **benchmarks.where(),
    }


def _per_update(seconds, updates):
    return benchmarks.spread([1e3 * s / updates for s in seconds], 1)


def main():
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int)
    asked = parser.parse_args()
    for name in asked.model or MODELS:
        row = measure(name, asked.rounds, asked.updates)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
