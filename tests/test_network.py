"""What travels over a network, counted; and the cost model, by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cost_model, namespaces, network, network_report
from benchmarks.cost_model import Costs

SCRIPT = Path(network.__file__)
# What each worker sends beside the numbers themselves: the headers of packets
# of 9,000 bytes, confirmations of what it receives, and gRPC's own words.
OVERHEAD = 0.03
COSTS = Costs(micro_step=0.01, latency=0.001, update=0.002)


# --- The cost model --------------------------------------------------------


def test_bytes_of_the_ring_by_hand():
    # Two workers exchange halves twice; four send a quarter six times.
    assert cost_model.ring_bytes(2, 1000) == 4000
    assert cost_model.ring_bytes(4, 1000) == 6000
    assert cost_model.ring_bytes(4, 1000, bytes_per_value=2) == 3000
    assert cost_model.ring_bytes(1, 1000) == 0
    assert [cost_model.ring_steps(w) for w in (1, 2, 4)] == [0, 2, 6]


def test_seconds_of_an_update_by_hand():
    link = {"workers": 4, "num_bytes": 6e6, "mbit": 200}
    # 4 * 10 ms + 48 Mbit / 200 Mbit/s + 6 * 1 ms + 2 ms.
    seconds = cost_model.update_seconds(COSTS, k=4, **link)
    assert seconds == pytest.approx(0.04 + 0.24 + 0.006 + 0.002)
    assert cost_model.efficiency(COSTS, k=4, **link) == pytest.approx(
        0.042 / 0.288
    )
    alone = {"workers": 1, "num_bytes": 0, "mbit": 200}
    assert cost_model.efficiency(COSTS, k=4, **alone) == 1


def test_predictions_by_hand():
    found = cost_model.predictions(latency=20e-6)
    assert len(found) == 2 * 3 * 4 * 4
    (row,) = network_report.chosen(
        found, model="ResNet-50", workers=8, gbit=25, K=1
    )
    # 107.8 ms of work; 179.2 MB at 25 Gbit/s are 57.3 ms; 14 steps 0.28 ms.
    assert row["efficiency"] == pytest.approx(107.8 / 165.4, abs=1e-3)
    halved = cost_model.predictions(latency=20e-6, bytes_per_value=2)
    for wide, narrow in zip(found, halved, strict=True):
        assert wide["efficiency"] < narrow["efficiency"] < 1


def update_row(workers, k, wire_dtype, mbit, parameters=1_000_000, **more):
    """A row as it would be measured if the cost model were the truth."""
    num_bytes = cost_model.ring_bytes(
        workers, parameters, cost_model.WIRE_BYTES[wire_dtype]
    )
    is_tiny = parameters < network_report.SMALL
    seconds = cost_model.update_seconds(
        Costs(0, COSTS.latency, 0.001) if is_tiny else COSTS,
        k=k,
        workers=workers,
        num_bytes=0 if is_tiny or mbit is None else num_bytes,
        mbit=mbit or 1,
    )
    return {
        **network.about_here(),
        "what": "update",
        "workers": workers,
        "K": k,
        "wire_dtype": wire_dtype,
        "mbit": mbit,
        "mtu": namespaces.JUMBO,
        "parameters": parameters,
        "bytes_expected": round(num_bytes),
        "bytes_sent_per_worker_per_update": round(1.01 * num_bytes),
        "bytes_ratio": 1.01,
        "bytes_ratio_without_headers": 1.0,
        "seconds_per_update": seconds,
        "seconds_least_and_most": [0.9 * seconds, 1.1 * seconds],
        "examples_per_second": 8 * workers * k / seconds,
        **more,
    }


@pytest.fixture(scope="module")
def rows():
    """What a run of everything would measure; times as the model says."""
    return [
        update_row(workers, k, wire, mbit)
        for workers in (4, 2)
        for mbit in (200, None)
        for wire in cost_model.WIRE_BYTES
        for k in (1, 2, 4, 8, 16)
    ] + [update_row(workers, 1, None, 200, parameters=90) for workers in (4, 2)]


def test_costs_are_found_in_what_was_measured(rows):
    found = network_report.costs_of(rows, workers=4)
    assert found.micro_step == pytest.approx(COSTS.micro_step)
    assert found.latency == pytest.approx(COSTS.latency)
    assert found.update == pytest.approx(COSTS.update)


def test_the_fit_says_how_far_off_it_is(rows):
    found = network_report.fit_rows(rows)
    assert len(found) == 15
    for row in found:
        assert row["full_error"] == pytest.approx(0, abs=1e-9)
        assert row["simple_error"] == pytest.approx(-0.002 / row["measured"])
    (eight,) = network_report.chosen(found, K=8, wire_dtype=None)
    # 8 * (10 + 248) ms beside 80 + 248 ms.
    assert eight["gain"] == pytest.approx(8 * 0.258 / 0.328)


def test_lines_of_json_are_read_back_and_plotted(rows, tmp_path):
    file, picture = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run("--from", file, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "| 4 | 9000 | bfloat16 | 3,000,000 | 3,030,000 | 3,030,000 | 3,030,000 "
        "| 1.0100 | 1.0000 |"
    ) in done.stdout
    assert "| ResNet-50 | 25 | 1 | 65.2% |" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def run(*arguments, **options):
    """Runs the benchmark as a person would."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


# --- A real network --------------------------------------------------------


def test_without_the_means_it_ends_with_one_line():
    done = run(env={**os.environ, "PATH": ""})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "A network of namespaces needs Linux with `ip` of iproute2. Received: "
        "no such command.\n"
    )


@pytest.fixture(scope="module")
def permitted():
    """Skips where network namespaces cannot be made."""
    if reason := namespaces.obstacle():
        pytest.skip(reason)


def traces(pid):
    """What the program of this process id has in the system by its name."""
    prefix = f"tfa{pid}"
    found = [
        name for name in namespaces.namespaces() if name.startswith(prefix)
    ]
    links = Path("/sys/class/net")
    found += [link.name for link in links.iterdir() if prefix in link.name]
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace")
        except OSError:  # It has ended.
            continue
        if "network_worker" in command and prefix in command:
            found.append(command)
    return found


@pytest.fixture(scope="module")
def measured(permitted):
    """Two workers, by (K, wire_dtype)."""
    cases = [(1, None), (4, None), (1, "bfloat16")]
    found = network.measure(
        [network.case(200_000, k, wire, mbit=200) for k, wire in cases],
        workers=2,
        rounds=1,
        updates=3,
        timeout=120,
    )
    assert traces(os.getpid()) == []
    *updates, path = found
    assert path["what"] == "path" and path["round_trip_seconds"] > 0
    return dict(zip(cases, updates, strict=True))


def test_bytes_are_those_of_one_ring(measured):
    for (_, wire_dtype), row in measured.items():
        numbers = 2 * (2 - 1) / 2 * row["parameters"]
        expected = numbers * (2 if wire_dtype else 4)
        assert row["bytes_expected"] == expected
        sent = row["bytes_sent_per_worker_per_update"]
        assert expected < sent < (1 + OVERHEAD) * expected


def test_bytes_do_not_grow_with_the_micro_steps(measured):
    one, four = measured[1, None], measured[4, None]
    name = "bytes_sent_per_worker_per_update"
    assert four[name] == pytest.approx(one[name], rel=5e-3)


def test_half_the_bytes_travel_in_bfloat16(measured):
    one, half = measured[1, None], measured[1, "bfloat16"]
    name = "bytes_sent_per_worker_per_update"
    assert half[name] == pytest.approx(one[name] / 2, rel=OVERHEAD)


def test_a_row_says_where_it_was_measured(measured):
    row = measured[4, None]
    assert json.loads(json.dumps(row)) == row
    assert (row["workers"], row["K"], row["mbit"]) == (2, 4, 200)
    assert row["updates"] == 3
    least, most = row["seconds_least_and_most"]
    assert 0 < least <= row["seconds_per_update"] <= most
    assert row["cpu_seconds_per_worker_per_update"] > 0
    assert row["examples_per_second"] == pytest.approx(
        16 * 2 * 4 / row["seconds_per_update"]
    )
    assert row["commit"] and row["hardware"] and row["tensorflow"]


def test_a_worker_that_fails_is_shown_and_nothing_is_left(permitted):
    wrong = network.case(1000, 1, "float8", mbit=200)
    with pytest.raises(RuntimeError, match="(?s)worker .*wire_dtype='float8'"):
        network.measure([wrong], workers=2, timeout=60)
    assert traces(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(permitted, number, tmp_path):
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 60
        while not any("worker" in name for name in traces(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        left = traces(process.pid)
        for name in set(left) & set(namespaces.namespaces()):
            subprocess.run(["ip", "netns", "delete", name], check=True)
    assert (code, left) == (128 + number, [])
