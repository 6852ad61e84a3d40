"""The start of a run: time to the first update, traces, nodes of the graph.

    python -m benchmarks.start [--rounds=7]

For K = 2 and K = 64, in turn, a new model of twenty small layers each time:
seconds from the call of `fit` to the end of its first update. Counted: how
often which function was traced, and the nodes of the window's graph with all
functions in it. Then what a call costs, once everything is traced: a `fit` of
one update, and `train_on_batch` and its like, beside those of Keras. Prints one
JSON line for each.
"""

import argparse
import collections
import functools
import gc
import json

import keras
import tensorflow as tf

import benchmarks
import tfaccum
from benchmarks.models import DEEP, rows_of

STEPS = (2, 64)
STEPS_OF_CALLS = 8
# In each that is timed.
CALLS = 20


class Traced(tfaccum.Model):
    """Counts how often its step is traced: no function of that is kept."""

    traces = 0

    def train_step(self, data):
        """As the library's."""
        self.traces += 1
        return super().train_step(data)


def traces(model):
    """How often its step, and what else of the library lives, was traced."""
    found = collections.Counter({"train_step": model.traces})
    for function in gc.get_objects():
        if hasattr(type(function), "experimental_get_tracing_count"):
            traced = function.python_function
            if (traced.__module__ or "").startswith("tfaccum."):
                count = function.experimental_get_tracing_count()
                found[traced.__qualname__] += count
    return dict(found)


def nodes():
    """Nodes of the largest graph that lives, with all functions in it."""
    return max(
        len(graph.node) + sum(len(f.node_def) for f in graph.library.function)
        for graph in (
            concrete.graph.as_graph_def()
            for concrete in gc.get_objects()
            if isinstance(concrete, tf.types.experimental.ConcreteFunction)
        )
    )


class Counts:
    """What `first_update` has counted, for one K."""

    def __init__(self):
        self.traces, self.nodes = [], []

    def add(self, model):
        """Counts what lives now."""
        self.traces.append(traces(model))
        self.nodes.append(nodes())


def first_update(steps, counts):
    """Seconds from the call of `fit` to the end of the first update."""
    gc.collect()
    keras.backend.clear_session()
    model = DEEP.compiled(
        Traced, gradient_accumulation_steps=steps, jit_compile=False
    )
    rows = steps * DEEP.micro_batch
    fit = functools.partial(
        model.fit, *DEEP.data(rows), batch_size=DEEP.micro_batch, verbose=0
    )
    seconds = benchmarks.timed(fit)
    counts.add(model)
    return seconds


def starts(rounds):
    """Time to the first update for each K, and what is counted."""
    counts = {steps: Counts() for steps in STEPS}
    first_update(STEPS[0], Counts())  # The first trace of a process is slow.
    found = benchmarks.in_turn(
        {
            steps: functools.partial(first_update, steps, counts[steps])
            for steps in STEPS
        },
        rounds,
    )
    few, many = ([wall for wall, _ in found[steps]] for steps in STEPS)
    cpu = [[cpu for _, cpu in found[steps]] for steps in STEPS]
    return {
        "what": "first_update",
        "steps": STEPS,
        "rounds": rounds,
        "seconds": [benchmarks.spread(few), benchmarks.spread(many)],
        **benchmarks.against(many, few, 1.1),
        "cpu_ratio": benchmarks.against(cpu[1], cpu[0])["ratio"],
        "traces": [counts[steps].traces[-1] for steps in STEPS],
        "nodes": [counts[steps].nodes[-1] for steps in STEPS],
    }


def calls(rounds):
    """What one more call takes when everything has been traced."""
    rows = STEPS_OF_CALLS * DEEP.micro_batch
    x, y = DEEP.data(rows)
    whole, cut = (
        rows_of((x, y)).batch(size) for size in (rows, DEEP.micro_batch)
    )
    contenders = {
        "window": (
            DEEP.compiled(
                tfaccum.Model, gradient_accumulation_steps=STEPS_OF_CALLS
            ),
            cut,
        ),
        "cut": (
            DEEP.compiled(tfaccum.Model, micro_batch_size=DEEP.micro_batch),
            whole,
        ),
        "big_batch": (DEEP.compiled(keras.Model), whole),
    }
    found = {}
    for who, (model, data) in contenders.items():
        for method, arguments in {
            "fit": (data,),
            "train_on_batch": (x, y),
            "test_on_batch": (x, y),
            "predict_on_batch": (x,),
        }.items():
            call = functools.partial(getattr(model, method), *arguments)
            if method == "fit":
                call = functools.partial(call, verbose=0)
            found[who, method] = _several(call)
    runs = {
        which: functools.partial(benchmarks.timed, action)
        for which, action in found.items()
    }
    for run in runs.values():
        run()
    seconds = benchmarks.in_turn(runs, rounds)
    ms, cpu_ms = (
        {
            which: benchmarks.spread([1e3 * each[i] / CALLS for each in pairs])
            for which, pairs in seconds.items()
        }
        for i in (0, 1)
    )
    return {
        "what": "calls",
        "rows": rows,
        "steps": STEPS_OF_CALLS,
        "rounds": rounds,
        "calls": [
            {"who": who, "method": method}
            | {"ms": ms[who, method], "cpu_ms": cpu_ms[who, method]}
            for who, method in found
        ],
    }


def _several(call):
    """What makes one call so often that it can be timed."""

    def action():
        for _ in range(CALLS):
            call()

    return action


def main():
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for measure in (starts, calls):
        row = measure(rounds) | benchmarks.where()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
