"""Tables and a plot of what `benchmarks/network.py` has measured."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import cost_model, namespaces

# Models with fewer parameters are there to measure latency.
SMALL = 1000
# For which bytes are shown.
COUNTED_K = (1, 4, 16)


def chosen(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict]:
    """The rows with these values."""
    return [
        row
        for row in rows
        if all(row.get(name) == value for name, value in wanted.items())
    ]


def costs_of(rows: Sequence[dict[str, Any]], workers: int) -> cost_model.Costs:
    """What the cost model needs, from rows in which bandwidth plays no role.

    * micro-step: the slope over K, without a limit;
    * latency: by how much an update of a tiny model takes longer with more
      workers, per step of the ring;
    * update: what an update takes beside both, without a limit.
    """
    updates = chosen(
        rows,
        what="update",
        wire_dtype=None,
        mtu=namespaces.JUMBO,
        delay=None,
    )
    micro_step, rest = cost_model.line(
        [
            (row["K"], row["seconds_per_update"])
            for row in chosen(updates, workers=workers, mbit=None)
        ]
    )
    latency, _ = cost_model.line(
        [
            (cost_model.ring_steps(row["workers"]), row["seconds_per_update"])
            for row in updates
            if row["parameters"] < SMALL and row["K"] == 1
        ]
    )
    return cost_model.Costs(
        micro_step=micro_step,
        latency=max(0.0, latency),
        update=rest - latency * cost_model.ring_steps(workers),
    )


def fit_rows(
    rows: Sequence[dict[str, Any]],
    workers: int = 4,
    delay: float | None = None,
) -> list[dict]:
    """Measured beside predicted seconds, for the rows with a limit.

    `simple` is the cost model of three terms; `full` counts the work of an
    update too. Both have the delay of the network, where it has one.
    """
    costs = costs_of(rows, workers)
    simple = dataclasses.replace(costs, update=0.0)
    limited = [
        row
        for row in chosen(
            rows,
            what="update",
            workers=workers,
            mtu=namespaces.JUMBO,
            delay=delay,
        )
        if row["mbit"] is not None and row["parameters"] > SMALL
    ]
    found = []
    for row in limited:
        network = {
            "k": row["K"],
            "workers": workers,
            "num_bytes": row["bytes_expected"],
            "mbit": row["mbit"],
            "delay": delay or 0.0,
            "reductions": cost_model.REDUCTIONS[row["wire_dtype"]],
        }
        measured = row["seconds_per_update"]
        predictions = {
            "simple": cost_model.update_seconds(simple, **network),
            "full": cost_model.update_seconds(costs, **network),
        }
        found.append(
            {
                "delay": delay,
                "K": row["K"],
                "wire_dtype": row["wire_dtype"],
                "measured": measured,
                "least_and_most": row["seconds_least_and_most"],
                **predictions,
                **{
                    f"{name}_error": seconds / measured - 1
                    for name, seconds in predictions.items()
                },
                "examples_per_second": row["examples_per_second"],
            }
        )
    for row in found:
        first = chosen(found, K=1, wire_dtype=row["wire_dtype"])[0]
        row["gain"] = row["examples_per_second"] / first["examples_per_second"]
    return found


def delays_of(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The delays that were measured."""
    found = [row.get("delay") for row in chosen(rows, what="update")]
    return sorted({delay for delay in found if delay is not None})


def trips_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times its delay the network adds to an update.

    It is the slope of the time of a tiny model's update over the delay. The
    least times are taken, as what else the machine does only adds to them.
    """
    points: dict[tuple, list[tuple[float, float]]] = {}
    for row in chosen(rows, what="update", mbit=None, K=1):
        if row.get("delay") is not None and row["parameters"] < SMALL:
            points.setdefault((row["workers"], row["wire_dtype"]), []).append(
                (row["delay"], row["seconds_least_and_most"][0])
            )
    return [
        {
            "workers": workers,
            "wire_dtype": wire,
            "measured": cost_model.line(of_delay)[0],
            "expected": cost_model.REDUCTIONS[wire] * cost_model.trips(workers),
        }
        for (workers, wire), of_delay in sorted(
            points.items(), key=lambda item: item[0][0]
        )
        if len(of_delay) > 1
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def bytes_table(rows: Sequence[dict[str, Any]]) -> str:
    """What was sent with each K, and the most of it over the ring's bytes."""
    found: dict[tuple, dict[int, dict[str, Any]]] = {}
    for row in chosen(rows, what="update", delay=None):
        if row["mbit"] is not None and row["parameters"] > SMALL:
            name = row["workers"], row["mtu"], row["wire_dtype"] or "float32"
            found.setdefault(name, {})[row["K"]] = row
    return table(
        ["workers", "MTU", "on the wire", "bytes of the ring"]
        + [f"K = {k}" for k in COUNTED_K]
        + ["most / ring", "without headers"],
        [
            [
                *name,
                f"{of_k[1]['bytes_expected']:,}",
                *(
                    f"{of_k[k]['bytes_sent_per_worker_per_update']:,}"
                    for k in COUNTED_K
                ),
                f"{max(r['bytes_ratio'] for r in of_k.values()):.4f}",
                f"{max(map(_without_headers, of_k.values())):.4f}",
            ]
            for name, of_k in found.items()
        ],
    )


def _without_headers(row: dict[str, Any]) -> float:
    return row["bytes_ratio_without_headers"]


def fit_table(rows: Sequence[dict[str, Any]]) -> str:
    """Measured beside predicted times, and the gain over K = 1."""
    return table(
        ["on the wire", "K", "seconds", "least to most"]
        + ["three terms", "error", "four terms", "error"]
        + ["examples/s", "times K = 1"],
        [
            [
                row["wire_dtype"] or "float32",
                row["K"],
                f"{row['measured']:.3f}",
                "{:.3f} to {:.3f}".format(*row["least_and_most"]),
                f"{row['simple']:.3f}",
                f"{row['simple_error']:+.1%}",
                f"{row['full']:.3f}",
                f"{row['full_error']:+.1%}",
                f"{row['examples_per_second']:.0f}",
                f"{row['gain']:.1f}",
            ]
            for row in fit_rows(rows)
        ],
    )


def trips_table(rows: Sequence[dict[str, Any]]) -> str:
    """Messages that an update waits for, counted by time."""
    return table(
        ["workers", "on the wire", "reductions", "trips, at most", "measured"],
        [
            [
                row["workers"],
                row["wire_dtype"] or "float32",
                cost_model.REDUCTIONS[row["wire_dtype"]],
                row["expected"],
                f"{row['measured']:.1f}",
            ]
            for row in trips_rows(rows)
        ],
    )


def delay_table(rows: Sequence[dict[str, Any]]) -> str:
    """Measured beside predicted times, for each delay."""
    return table(
        ["delay", "on the wire", "K", "seconds", "least to most"]
        + ["four terms and delay", "error", "examples/s", "times K = 1"],
        [
            [
                f"{1e3 * delay:g} ms",
                row["wire_dtype"] or "float32",
                row["K"],
                f"{row['measured']:.3f}",
                "{:.3f} to {:.3f}".format(*row["least_and_most"]),
                f"{row['full']:.3f}",
                f"{row['full_error']:+.1%}",
                f"{row['examples_per_second']:.0f}",
                f"{row['gain']:.1f}",
            ]
            for delay in delays_of(rows)
            for row in fit_rows(rows, delay=delay)
        ],
    )


def predictions_table(rows: Sequence[dict[str, Any]]) -> str:
    """One row for each model, bandwidth and K; one column for each W."""
    return table(
        [
            "model",
            "Gbit/s",
            "K",
            *(f"W = {w}" for w in cost_model.PREDICTED_WORKERS),
        ],
        [
            [
                workload.name,
                gbit,
                k,
                *(
                    f"{row['efficiency']:.1%}"
                    for row in chosen(rows, model=workload.name, gbit=gbit, K=k)
                ),
            ]
            for workload in cost_model.WORKLOADS
            for gbit in cost_model.PREDICTED_GBIT
            for k in cost_model.PREDICTED_K
        ],
    )


def report(rows: Sequence[dict[str, Any]], latency: float) -> str:
    """All tables, and what the cost model was given."""
    parts = []
    if updates := chosen(rows, what="update"):
        costs = costs_of(rows, workers=4)
        first = updates[0]
        parts += [
            f"commit {first['commit']}, {first['hardware']}, TensorFlow "
            f"{first['tensorflow']}, Keras {first['keras']}",
            *(
                f"path: {row['workers']} workers, limit {row['mbit']} Mbit/s, "
                f"MTU {row['mtu']}, delay {_delay_text(row)}: "
                f"{row['payload_mbit']:.0f} Mbit/s of payload, round trip "
                f"{1e6 * row['round_trip_seconds']:.0f} us"
                for row in chosen(rows, what="path")
            ),
            f"cost model: micro-step {1e3 * costs.micro_step:.2f} ms, latency "
            f"{1e3 * costs.latency:.2f} ms per step of the ring, work of an "
            f"update {1e3 * costs.update:.1f} ms",
            bytes_table(rows),
            fit_table(rows),
            trips_table(rows),
            delay_table(rows),
        ]
    parts.append(predictions_table(cost_model.predictions(latency)))
    return "\n\n".join(parts)


def _delay_text(row: dict[str, Any]) -> str:
    delay = row.get("delay")
    return "none" if delay is None else f"{1e3 * delay:g} ms"


def plot(rows: Sequence[dict[str, Any]], latency: float, path: str) -> None:
    """Measured times beside the cost model's, and its predictions."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = ["K"] * 3 + ["delay"] * 3
    predicted = [gbit for gbit in cost_model.PREDICTED_GBIT for _ in "12"]
    figure, axes = plt.subplot_mosaic([measured, predicted], figsize=(13, 8))
    if rows:
        _plot_fit(axes["K"], fit_rows(rows))
        _plot_delays(axes["delay"], rows)
    foreseen = cost_model.predictions(latency)
    for gbit in cost_model.PREDICTED_GBIT:
        axis = axes[gbit]
        for number, k in enumerate(cost_model.PREDICTED_K):
            for workload, style in zip(
                cost_model.WORKLOADS, ("-", "--"), strict=True
            ):
                line = chosen(foreseen, model=workload.name, gbit=gbit, K=k)
                axis.plot(
                    [row["workers"] for row in line],
                    [100 * row["efficiency"] for row in line],
                    style,
                    color=f"C{number}",
                    label=f"{workload.name}, K = {k}",
                )
        axis.set(
            title=f"predicted, {gbit} Gbit/s",
            xlabel="workers",
            ylabel="efficiency in %",
            ylim=(0, 102),
        )
        axis.set_xscale("log", base=2)
    axis.legend(fontsize=7, loc="lower left")
    for axis in axes.values():
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _plot_fit(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    for number, wire in enumerate(cost_model.WIRE_BYTES):
        points = chosen(rows, wire_dtype=wire)
        steps = [row["K"] for row in points]
        _plot_measured(
            axis,
            steps,
            points,
            fmt="o",
            color=f"C{number}",
            label=wire or "float32",
        )
        for name, style in (("simple", ":"), ("full", "-")):
            axis.plot(
                steps, [row[name] for row in points], style, color=f"C{number}"
            )
    axis.set(
        title="measured, and cost model (dotted: three terms)",
        xlabel="K",
        ylabel="seconds per update",
        xticks=steps,
    )
    axis.set_ylim(bottom=0)
    axis.legend()


def _plot_delays(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    delays = delays_of(rows)
    found = [row for delay in delays for row in fit_rows(rows, delay=delay)]
    for number, wire in enumerate(cost_model.WIRE_BYTES):
        for k, marker, style in ((1, "o", "-"), (16, "^", "--")):
            points = chosen(found, wire_dtype=wire, K=k)
            ms = [1e3 * row["delay"] for row in points]
            _plot_measured(
                axis,
                ms,
                points,
                fmt=marker,
                color=f"C{number}",
                label=f"{wire or 'float32'}, K = {k}",
            )
            full = [row["full"] for row in points]
            axis.plot(ms, full, style, color=f"C{number}")
    axis.set(
        title="measured, and cost model, over the delay",
        xlabel="milliseconds from worker to worker",
        ylabel="seconds per update",
    )
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)


def _plot_measured(
    axis: Any, places: Sequence[float], rows: Sequence[dict], **look: Any
) -> None:
    """Medians, with the least and the most."""
    seconds = [row["measured"] for row in rows]
    bounds = [row["least_and_most"] for row in rows]
    pairs = list(zip(seconds, bounds, strict=True))
    below = [median - least for median, (least, _) in pairs]
    above = [most - median for median, (_, most) in pairs]
    axis.errorbar(places, seconds, [below, above], capsize=2, **look)
