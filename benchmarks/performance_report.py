"""Writes what benchmarks have printed into docs/performance.md, with a plot.

    python -m benchmarks.performance_report runs/*.jsonl

Each table stands between two comments, `<!-- NAME -->` and `<!-- end of NAME
-->`; what is between them is replaced, and stays where nothing was measured.
"""

import argparse
import json
import re
from pathlib import Path

from benchmarks.models import CASES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.png"
GPU = "python -m benchmarks.gpu"
# What is changed one at a time, and the flag that does it.
SWEPT = {
    "micro_batch": "--micro_batch=EXAMPLES",
    "steps": "--steps=K",
    "any_rows": "--any_rows",
}

WHO = {
    "window": "tfaccum, K = 8",
    "window_16": "the same, 16 windows in a call",
    "cut": "tfaccum, `micro_batch_size`",
    "big_batch": "Keras, one big batch",
    "keras": "Keras' own accumulation",
    "keras_8": "the same, 8 steps in a call",
    "keras_128": "the same, 128 steps in a call",
    "loop": "`tf.function` by hand",
    "loop_16": "the same, 16 windows in a call",
    "torch": "PyTorch",
}
OTHERS = WHO | {
    "keras_at_its_best": "Keras' own, both at their best",
    "loop_at_its_best": "`tf.function` by hand, both at their best",
}


def table(header, rows):
    """Lines of Markdown; a cell with " | " in it is two cells."""
    first, *others = (
        f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)
    )
    return [first, "| --- " * (first.count("|") - 1) + "|", *others]


def in_words(value):
    """A flag as yes or no; anything else as it is."""
    return ("yes" if value else "no") if isinstance(value, bool) else value


def spread(values, digits=2):
    """Median, and least to most."""
    median, least, most = (f"{value:,.{digits}f}" for value in values)
    return f"{median} ({least} to {most})"


def verdict(row):
    """The target, and whether it was met."""
    if row["target"] is None:
        return ""
    return f"≤ {row['target']:.2f}: {'met' if row['met'] else '**missed**'}"


def source(command, row):
    """Where figures come from."""
    return [
        "",
        f"`{command}`, commit {row['commit']}, {row['hardware']}; TensorFlow "
        f"{row['tensorflow']}, Keras {row['keras']}.",
    ]


def step_time(rows, what="step_time"):
    """Tables of all models: time, CPU time, ratios."""
    rows = [row for row in rows if row["what"] == what]
    for jit in (False, True):
        of_kind = [r for r in rows if r["jit"] == jit and r["is_usual"]]
        if not of_kind:
            continue
        first = of_kind[0]
        how = "With `jit_compile=True`" if jit else "Without XLA"
        yield f"{how}: milliseconds per update, and of all processors."
        yield ""
        yield from table(
            ["", *(f"{row['model']} | CPU" for row in of_kind)],
            [
                [
                    WHO[who],
                    *(
                        f"{spread(row['ms'][who], 1)} | "
                        f"{row['cpu_ms'][who][0]:,.1f}"
                        if who in row["ms"]
                        else " | "
                        for row in of_kind
                    ),
                ]
                for who in WHO
                if any(who in row["ms"] for row in of_kind)
            ],
        )
        yield ""
        yield "Ratios, round by round; less than 1: the first is faster."
        yield ""
        yield from table(
            ["model", "who", "against", "time", "CPU time", "target"],
            [
                [
                    row["model"],
                    who,
                    against,
                    spread(each["ratio"]),
                    spread(each["cpu_ratio"]),
                    verdict(each),
                ]
                for row in of_kind
                for who, against, each in [
                    *(
                        ("tfaccum", OTHERS[each["against"]], each)
                        for each in row["comparisons"]
                    ),
                    (WHO["loop"], WHO["big_batch"], row["by_hand"]),
                ]
            ],
        )
        command = _command(of_kind) if what == "step_time" else GPU
        yield from source(command, first)
        yield ""
        yield _sizes(of_kind)
        yield ""
    yield from _by_micro_batch(_not_compiled(rows, "micro_batch"))
    yield from _against_keras(
        _not_compiled(rows, "steps"),
        "steps",
        "Microseconds per micro-step, all at their best, as K grows.",
        "K",
    )
    yield from _against_keras(
        _not_compiled(rows, "any_rows"),
        "any_rows",
        "The same for K = 8, where batches may have any number of rows.",
        "any number of rows",
    )


def _command(rows):
    """What prints these rows, with its models where they are not all."""
    models = [row["model"] for row in rows]
    flags = ["--jit"] * rows[0]["jit"]
    if set(models) != set(CASES):
        flags += [f"--model={model}" for model in models]
    return " ".join(["python -m benchmarks.step_time", *flags])


def _not_compiled(rows, by):
    """Rows without XLA of models with several that differ in this only."""

    def others(row):
        return [row[key] for key in SWEPT if key != by]

    usual = {row["model"]: others(row) for row in rows if row["is_usual"]}
    found = [
        r for r in rows if not r["jit"] and others(r) == usual.get(r["model"])
    ]
    models = [row["model"] for row in found]
    return [row for row in found if models.count(row["model"]) > 1]


def _against_keras(rows, by, title, what):
    """Microseconds per micro-step of the window and Keras, and their ratio."""

    def cells(row):
        compared = {each["against"]: each for each in row["comparisons"]}
        best = compared["keras_at_its_best"]
        for who in (best["of"], best["which"]):
            yield spread([1e3 * ms / row["steps"] for ms in row["ms"][who]], 0)
        yield from (spread(best["ratio"]), spread(best["cpu_ratio"]))

    header = [what, "tfaccum", "Keras' own", "ratio", "of CPU time"]
    return _sweep(rows, by, title, header, cells)


def _by_micro_batch(rows):
    """What cutting costs, as the pieces grow."""

    def cells(row):
        yield spread(row["ms"]["big_batch"], 1)
        for who in ("window", "loop"):
            yield spread(row["against_big_batch"][who])

    return _sweep(
        rows,
        "micro_batch",
        "One big batch, and the same cut into 8, as the micro-batch grows.",
        [
            "micro-batch",
            "big batch, ms",
            "CPU time: tfaccum against it",
            "`tf.function` by hand against it",
        ],
        cells,
    )


def _sweep(rows, by, title, header, cells):
    """A table with a line for each value of a flag; nothing without rows."""
    if not rows:
        return
    yield title
    yield ""
    yield from table(
        ["model", *header],
        [
            [row["model"], in_words(row[by]), *cells(row)]
            for row in sorted(rows, key=lambda r: (r["model"], r[by]))
        ],
    )
    command = f"python -m benchmarks.step_time --model=MODEL {SWEPT[by]}"
    yield from source(command, rows[0])
    yield ""


def _sizes(rows):
    """What was trained, in words."""
    sizes = "; ".join(
        f"{row['model']} {row['parameters']:,} parameters, micro-batches of "
        f"{row['micro_batch']}, {row['updates']} updates in a `fit`"
        for row in rows
    )
    first = rows[0]
    threads = f", {first['threads']} threads" if first["threads"] else ""
    torch = first["torch"].get("torch")
    torch = torch or f"was left out ({first['torch']['skipped']})"
    return f"{first['rounds']} rounds{threads}; {sizes}. PyTorch {torch}."


def memory(rows):
    """Peaks, sums counted, and what many updates leave."""
    found = {row["what"]: row for row in rows}
    if "memory_of_a_batch" not in found:
        return
    batch, by_steps, malloc, optimizers, sums, after = (
        found[f"memory_{name}"]
        for name in (
            "of_a_batch",
            "by_steps",
            "of_malloc",
            "of_optimizers",
            "of_sums",
            "after_updates",
        )
    )
    few, many = by_steps["steps"]
    yield from table(
        ["megabytes above the idle process", "", "", "ratio", "target"],
        [
            [
                f"{batch['rows']} examples, uncut and cut into "
                f"{batch['pieces']}",
                spread(batch["uncut_mb"], 0),
                spread(batch["cut_mb"], 0),
                spread(batch["ratio"]),
                verdict(batch),
            ],
            [
                f"windows of {by_steps['rows']} examples, K = {few} and "
                f"K = {many}",
                *(spread(values, 0) for values in by_steps["mb"]),
                spread(by_steps["ratio"]),
                verdict(by_steps),
            ],
            [
                "many parameters, Adam and AdamA, above the process without "
                "the model",
                spread(optimizers["adam_mb"], 0),
                spread(optimizers["adama_mb"], 0),
                spread(optimizers["ratio"]),
                verdict(optimizers),
            ],
        ],
    )
    yield ""
    yield (
        f"{malloc['batches']} batches of {malloc['rows']} examples, with "
        "Eigen's kernels: megabytes above the idle process."
    )
    yield ""
    who = {
        "one_update": f"tfaccum, K = {malloc['batches']}",
        "updates": "tfaccum, K = 1",
        "keras": "Keras",
    }
    yield from table(
        ["", "glibc's malloc, left alone", "with `MALLOC_MMAP_THRESHOLD_`"],
        [
            [who[case["who"]]]
            + [spread(case[key], 0) for key in ("alone_mb", "told_mb")]
            for case in malloc["cases"]
        ],
    )
    yield from ("", "The sums of one replica, counted:", "")
    yield from table(
        ["optimizer", "K", "`accumulator_dtype`", "parameters"]
        + ["bytes", "expected"],
        [
            [
                case["optimizer"],
                case["steps"],
                case["accumulator_dtype"] or "None",
                f"{case['parameters']:,}",
                f"{case['bytes']:,}",
                f"{case['expected_bytes']:,}",
            ]
            for case in sums["cases"]
        ],
    )
    yield from ("", "What many updates leave behind:", "")
    yield from table(
        ["updates", "resident MB", "tensors, variables, datasets", "traces"],
        [
            [f"{each['updates']:,}", each["mb"], each["objects"]]
            + [each["traces"]]
            for each in after["after"]
        ],
    )
    yield from source("python -m benchmarks.memory", batch)


def start(rows):
    """Time to the first update, and what each later call costs."""
    found = {row["what"]: row for row in rows}
    if "first_update" not in found:
        return
    first, calls = found["first_update"], found["calls"]
    yield from table(
        ["K", "seconds to the first update", "nodes", "traces"],
        [
            [
                steps,
                spread(first["seconds"][i]),
                f"{first['nodes'][i]:,}",
                sum(first["traces"][i].values()),
            ]
            for i, steps in enumerate(first["steps"])
        ],
    )
    yield ""
    yield (
        f"Ratio {spread(first['ratio'])}, of CPU time "
        f"{spread(first['cpu_ratio'])}; {verdict(first)}."
    )
    yield ""
    yield (
        f"Milliseconds of one more call for {calls['rows']} examples, once "
        "everything is traced; of a `fit`, with one update."
    )
    yield ""
    by_method = {}
    for call in calls["calls"]:
        by_method.setdefault(call["method"], {})[call["who"]] = call["ms"]
    yield from table(
        ["call", *(WHO[who] for who in by_method["fit"])],
        [
            [f"`{method}`", *map(spread, of_all.values())]
            for method, of_all in by_method.items()
        ],
    )
    yield from source("python -m benchmarks.start", first)


def window_profile(rows):
    """Where the time of a window goes."""
    rows = [row for row in rows if row["what"] == "window_profile"]
    if not rows:
        return
    yield from table(
        ["part", *(f"{row['model']}, ms | operations" for row in rows)],
        [
            [
                part,
                *(
                    f"{spread(row['parts_ms'][part])} | "
                    f"{row['operations'].get(part, '')}"
                    for row in rows
                ),
            ]
            for part in rows[0]["parts_ms"]
        ]
        + [["all", *(f"{spread(row['ms'])} | " for row in rows)]],
    )
    yield ""
    yield ". ".join(_shares(row) for row in rows) + "."
    command = "python -m benchmarks.window_profile --plot=docs/profile.png"
    yield from source(command, rows[0])


def _shares(row):
    """A window in percent, in words."""
    medians = {part: each[0] for part, each in row["parts_ms"].items()}
    total = sum(medians.values())
    shares = (
        f"{100 * value / total:.1f} % {part}" for part, value in medians.items()
    )
    return f"A window of the {row['model']} is {', '.join(shares)}"


def gpu(rows):
    """Speed, memory and replicas, or that there is no GPU."""
    found = {row["what"]: row for row in rows}
    if "gpu" in found:
        yield f"Not measured: {found['gpu']['skipped']}."
    yield from step_time(rows, "gpu_step_time")
    if "gpu_memory" in found:
        row = found["gpu_memory"]
        yield (
            f"{row['rows']} examples take {spread(row['uncut_mb'], 0)} MB "
            f"uncut and {spread(row['cut_mb'], 0)} MB cut into "
            f"{row['pieces']}; ratio {spread(row['ratio'])}, {verdict(row)}."
        )
    if "gpu_limit" in found:
        row = found["gpu_limit"]
        words = {True: "fits", False: "does not fit"}
        yield (
            f"Into {row['memory_mb']:,} MB, an update of {row['rows']:,} "
            f"examples {words[row['uncut_fits']]} uncut and "
            f"{words[row['cut_fits']]} in pieces of {row['micro_batch']}."
        )
    replicas = [row for row in rows if row["what"] == "gpu_replicas"]
    if replicas:
        yield ""
        yield from table(
            ["model", "GPUs", "milliseconds per update"],
            [
                [row["model"], row["replicas"], spread(row["ms"], 1)]
                for row in replicas
            ],
        )
        yield from source(GPU, replicas[0])


def input_wait(rows):
    """The part of the time in which data were waited for."""
    rows = [row for row in rows if row["what"] == "input_wait"]
    if not rows:
        return
    parts = ("first_windows", "other_windows", "with_data_at_hand")
    yield from table(
        [
            "experiment",
            "replicas",
            "seconds of an epoch",
            "waited where epochs begin",
            "in all other windows",
            "there, with data at hand",
        ],
        [
            [
                row["experiment"],
                row["replicas"],
                spread(row["epoch_seconds"]),
                *(f"{100 * row[part]:.1f} %" for part in parts),
            ]
            for row in rows
        ],
    )
    yield from source("python -m benchmarks.input_wait --data_dir=DIR", rows[0])


SECTIONS = (step_time, memory, start, window_profile, input_wait, gpu)


def written(page, rows):
    """The page with the tables of these rows."""
    for section in SECTIONS:
        text = "\n".join(section(rows)).strip()
        if not text:
            continue
        begin, end = (
            f"<!-- {before}{section.__name__} -->" for before in ("", "end of ")
        )
        if begin not in page or end not in page:
            raise ValueError(
                f"The page must have {begin} and {end}. Received: neither or "
                "one of them."
            )
        page = re.sub(
            f"{begin}.*?{end}",
            lambda _, new=f"{begin}\n\n{text}\n\n{end}": new,
            page,
            flags=re.DOTALL,
        )
    return page


def plot(rows, path):
    """Time beside that of the window, and memory uncut and cut."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {row["what"]: row for row in rows}
    speed = [
        r
        for r in rows
        if r["what"] == "step_time" and r["is_usual"] and not r["jit"]
    ]
    if not speed or "memory_of_a_batch" not in found:
        return
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 5), width_ratios=(3, 1), layout="constrained"
    )
    width = 0.8 / len(WHO)
    for i, (who, label) in enumerate(WHO.items()):
        bars = [
            (place + i * width, row["ms"][who][0] / row["ms"]["window"][0])
            for place, row in enumerate(speed)
            if who in row["ms"]
        ]
        if bars:
            label = label.replace("`", "")
            left.bar(*zip(*bars, strict=True), width, label=label)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xticks(
        [place + 0.4 for place in range(len(speed))],
        [row["model"] for row in speed],
    )
    left.set(title="time of an update; tfaccum = 1", yscale="log")
    figure.legend(
        *left.get_legend_handles_labels(),
        fontsize="small",
        ncols=4,
        loc="outside lower center",
    )
    batch = found["memory_of_a_batch"]
    right.bar(
        ["uncut", f"cut into {batch['pieces']}"],
        [batch["uncut_mb"][0], batch["cut_mb"][0]],
        color=["C3", "C0"],
    )
    right.set(title=f"MB for {batch['rows']} examples")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main():
    """Reads lines of JSON; writes page and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--plot", type=Path, default=PLOT)
    asked = parser.parse_args()
    rows = [
        json.loads(line)
        for file in asked.files
        for line in file.read_text().splitlines()
    ]
    asked.page.write_text(written(asked.page.read_text(), rows))
    plot(rows, asked.plot)


if __name__ == "__main__":
    main()
