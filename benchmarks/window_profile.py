"""Where the time of a window goes, read from TensorFlow's own profiler.

    python -m benchmarks.window_profile --plot=docs/profile.png

A few windows of each model are profiled, once TensorFlow has seen which of
their operations are cheap; cheap ones leave no trace after that. So operations
are counted in a profile of the first windows, where all of them do. Each
moment of a window is given to one part, the first of `PARTS` that is at work.
Prints one JSON line per model: milliseconds of a window by part, of the window
that took the median time; and operations of a window by part.
"""

import argparse
import collections
import dataclasses
import functools
import json
import re
import statistics
import tempfile
from pathlib import Path

import keras
import tensorflow as tf

import benchmarks
import tfaccum
from benchmarks import step_time
from benchmarks.models import CASES

WINDOW = "window of the benchmark"
# In the order in which a moment is given away.
PARTS = {
    "forward and backward": "kernels of the model, its loss and gradients",
    "update": "kernels of the optimizer",
    "window": "kernels that weigh, add up, judge and log",
    "input": "tf.data, while no kernel runs",
    "Python": "before and behind the call of the graph",
    "between": "inside the graph while none of these works: scheduling",
}
COLOURS = dict(
    zip(
        PARTS,
        ["#4c72b0", "#55a868", "#c44e52", "#ccb974", "#8172b3", "#d0d0d0"],
        strict=True,
    )
)
_OPERATION = re.compile(r"[\w./-]+:[A-Z_]\w*")
# Where the graph begins and ends in the thread of Python.
_GRAPH = "KernelAndDeviceFunc::Run"


def events(folder):
    """(thread, name, begin, end) of all that was profiled, in milliseconds.

    The profiler writes its own format; TensorFlow has no public reader for it.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = Path(folder).rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                name = plane.event_metadata[event.metadata_id].name
                yield line.name, name, begin, begin + event.duration_ps / 1e9


def unnumbered(name):
    """A name without the numbers that make it the only one of its kind."""
    return re.sub(r"(_\d+)+$", "", name)


def part_of(thread, name, layers, optimizer):
    """The part that an event belongs to; None: it tells nothing.

    Args:
        thread: in which it was.
        name: of the event; of an operation "scopes/name:Type".
        layers: names of the model and its layers, without their numbers.
        optimizer: the optimizer's name.
    """
    is_operation = _OPERATION.fullmatch(name)
    if name.startswith("Iterator::") or (
        is_operation and thread.startswith("tf_data")
    ):
        return "input"
    if not is_operation:
        return None
    scopes = [unnumbered(s) for s in name.rpartition(":")[0].split("/")]
    if {"gradient_tape", "compile_loss", *layers} & set(scopes):
        return "forward and backward"
    return "update" if optimizer in scopes else "window"


def partition(marked, begin, end):
    """Milliseconds by part between two times; they add up to the whole.

    Args:
        marked: (part, begin, end) of what was at work, in any order.
        begin: of the window.
        end: of the window.
    """
    order = list(PARTS)
    changes = []
    for part, start, stop in marked:
        start, stop = max(start, begin), min(stop, end)
        if start < stop:
            changes += [(start, part, 1), (stop, part, -1)]
    found = dict.fromkeys(PARTS, 0.0)
    at_work = collections.Counter()
    now = begin
    for time, part, change in [*sorted(changes), (end, order[-1], 0)]:
        first = next((p for p in order if at_work[p]), order[-1])
        found[first] += time - now
        now = time
        at_work[part] += change
    return found


class Profiler(keras.callbacks.Callback):
    """Profiles some windows of a `fit`.

    Args:
        ranges: (first update, updates) of each profile.

    Attributes:
        found: the events of each profile.
    """

    def __init__(self, ranges):
        super().__init__()
        self._ranges = ranges
        self._update = 0
        self.found = []

    def on_train_batch_begin(self, batch, logs=None):
        """Begins a profile, and marks the window in it."""
        if any(self._update == first for first, _ in self._ranges):
            self._folder = tempfile.TemporaryDirectory()
            tf.profiler.experimental.start(self._folder.name)
        self._mark = tf.profiler.experimental.Trace(WINDOW)
        self._mark.__enter__()

    def on_train_batch_end(self, batch, logs=None):
        """Ends the window, and a profile behind its last one."""
        self._mark.__exit__(None, None, None)
        self._update += 1
        if any(self._update == sum(both) for both in self._ranges):
            tf.profiler.experimental.stop()
            with self._folder as folder:
                self.found.append(list(events(folder)))


@dataclasses.dataclass
class Profiled:
    """One window: its events by thread, and the part of each.

    Attributes:
        begin: in milliseconds, like all times.
        end: of the window.
        marked: (part, begin, end, thread, whether it is an operation).
    """

    begin: float
    end: float
    marked: list

    @property
    def length(self):
        """Of the window."""
        return self.end - self.begin

    def shares(self):
        """Milliseconds by part."""
        return partition(
            [(part, b, e) for part, b, e, *_ in self.marked],
            self.begin,
            self.end,
        )

    def operations(self):
        """How many there are, by part."""
        return collections.Counter(
            part for part, *_, is_operation in self.marked if is_operation
        )


def windows_of(found, part):
    """Each window of a profile."""
    for thread, name, begin, end in found:
        if name != WINDOW:
            continue
        graph = next(
            (b, e)
            for _, other, b, e in found
            if other == _GRAPH and begin <= b and e <= end
        )
        marked = [
            ("Python", begin, graph[0], thread, False),
            ("Python", graph[1], end, thread, False),
        ]
        for where, other, b, e in found:
            if b < end and e > begin and (kind := part(where, other)):
                is_operation = not other.startswith("Iterator::")
                marked.append((kind, b, e, where, is_operation))
        yield Profiled(begin, end, marked)


def profile(name, windows, warm):
    """The first windows of one model, and as many after `warm` updates."""
    case, steps = CASES[name], step_time.STEPS
    model = case.compiled(
        tfaccum.Model, gradient_accumulation_steps=steps, jit_compile=False
    )
    part = functools.partial(
        part_of,
        layers={unnumbered(each.name) for each in (model, *model.layers)},
        optimizer=unnumbered(model.optimizer.name),
    )
    profiler = Profiler([(1, windows), (warm, windows)])
    micro = tf.data.Dataset.from_tensors(case.data(case.micro_batch))
    model.fit(
        micro.cache().repeat(steps * (warm + windows)).prefetch(2),
        verbose=0,
        callbacks=[profiler],
    )
    return [list(windows_of(found, part)) for found in profiler.found]


def row(name, first, later):
    """What is printed of one model, and the window that is drawn."""
    # The other one of two in the middle would do as well.
    window = sorted(later, key=lambda each: each.length)[len(later) // 2]
    counts = [each.operations() for each in first]
    return {
        "what": "window_profile",
        "model": name,
        "steps": step_time.STEPS,
        "windows": len(later),
        "ms": benchmarks.spread([each.length for each in later]),
        "parts_ms": {
            part: benchmarks.spread([each.shares()[part] for each in later])
            for part in PARTS
        },
        "operations": {
            part: statistics.median(count[part] for count in counts)
            for part in PARTS
            if any(count[part] for count in counts)
        },
        **benchmarks.where(),
    }, window


def draw(path, rows, windows):
    """One window of the first model, and the parts of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4), width_ratios=(3, 2), layout="constrained"
    )
    window = windows[0]
    threads = sorted({thread for *_, thread, _ in window.marked})
    for part, begin, end, thread, _ in window.marked:
        left.broken_barh(
            [(begin - window.begin, end - begin)],
            (threads.index(thread) - 0.4, 0.8),
            color=COLOURS[part],
        )
    left.set_yticks(
        range(len(threads)), [thread.split("/")[0] for thread in threads]
    )
    left.set(
        xlim=(0, window.length),
        xlabel="milliseconds",
        title=f"one window of the {rows[0]['model']}, by thread",
    )
    models = [row["model"] for row in rows]
    behind = [0.0] * len(rows)
    for part in PARTS:
        shares = [
            100
            * row["parts_ms"][part][0]
            / sum(values[0] for values in row["parts_ms"].values())
            for row in rows
        ]
        right.barh(models, shares, left=behind, color=COLOURS[part], label=part)
        behind = [a + b for a, b in zip(behind, shares, strict=True)]
    right.set(xlim=(0, 100), xlabel="% of the time", title="by part")
    figure.legend(
        *right.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(PARTS),
        frameon=False,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main():
    """Profiles, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CASES, action="append")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--warm", type=int, default=120, help="updates")
    parser.add_argument("--plot", help="file for the picture")
    asked = parser.parse_args()
    step_time.use_threads(2)
    rows, windows = [], []
    for name in asked.model or ("mlp", "transformer"):
        # Where kernels are long, few updates tell cheap from dear.
        warm = asked.warm if name == "mlp" else min(asked.warm, 16)
        found, window = row(name, *profile(name, asked.windows, warm))
        print(json.dumps(found), flush=True)
        rows.append(found)
        windows.append(window)
    if asked.plot:
        draw(asked.plot, rows, windows)


if __name__ == "__main__":
    main()
