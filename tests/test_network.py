"""What travels over a network, counted; and the cost model, by hand."""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import cost_model, namespaces, network, network_report
from benchmarks.cost_model import Costs

SCRIPT = Path(network.__file__)
# What each worker sends beside the numbers themselves: the headers of packets
# of 9,000 bytes, confirmations of what it receives, and gRPC's own words.
OVERHEAD = 0.03
# Seconds from one worker to another, in the tests of real networks.
DELAY = 0.02
CLONE_NEWNET = 0x40000000
COSTS = Costs(micro_step=0.01, latency=0.001, update=0.002)


# --- The cost model --------------------------------------------------------


def test_bytes_of_the_ring_by_hand():
    # Two workers exchange halves twice; four send a quarter six times.
    assert cost_model.ring_bytes(2, 1000) == 4000
    assert cost_model.ring_bytes(4, 1000) == 6000
    assert cost_model.ring_bytes(4, 1000, bytes_per_value=2) == 3000
    assert cost_model.ring_bytes(1, 1000) == 0
    assert [cost_model.ring_steps(w) for w in (1, 2, 4)] == [0, 2, 6]
    assert [cost_model.trips(w) for w in (1, 2, 4)] == [0, 5, 9]


def test_seconds_of_an_update_by_hand():
    link = {"workers": 4, "num_bytes": 6e6, "mbit": 200}
    # 4 * 10 ms + 48 Mbit / 200 Mbit/s + 6 * 1 ms + 2 ms.
    seconds = cost_model.update_seconds(COSTS, k=4, **link)
    assert seconds == pytest.approx(0.04 + 0.24 + 0.006 + 0.002)
    assert cost_model.efficiency(COSTS, k=4, **link) == pytest.approx(
        0.042 / 0.288
    )
    far = {**link, "delay": 0.01, "reductions": 2}
    # Two reductions wait for 6 + 3 messages each.
    assert cost_model.update_seconds(COSTS, k=4, **far) == pytest.approx(
        seconds + 2 * 9 * 0.01
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


def update_row(
    workers, k, wire_dtype, mbit, parameters=1_000_000, delay=None, **more
):
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
        delay=delay or 0,
        reductions=cost_model.REDUCTIONS[wire_dtype],
    )
    return {
        **network.about_here(),
        "what": "update",
        "workers": workers,
        "K": k,
        "wire_dtype": wire_dtype,
        "mbit": mbit,
        "mtu": namespaces.JUMBO,
        "delay": delay,
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
    wires = tuple(cost_model.WIRE_BYTES)
    found = [
        update_row(workers, k, wire, mbit)
        for workers in (4, 2)
        for mbit in (200, None)
        for wire in wires
        for k in (1, 2, 4, 8, 16)
    ] + [update_row(workers, 1, None, 200, parameters=90) for workers in (4, 2)]
    for delay in (0, 0.01):
        found += [
            update_row(4, k, wire, 200, delay=delay)
            for wire in wires
            for k in (1, 16)
        ] + [
            update_row(workers, 1, wire, None, parameters=90, delay=delay)
            for workers in (4, 2)
            for wire in wires
        ]
    return found


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


def test_the_fit_knows_the_delay(rows):
    assert network_report.delays_of(rows) == [0, 0.01]
    for delay in (0, 0.01):
        found = network_report.fit_rows(rows, delay=delay)
        assert len(found) == 6
        for row in found:
            assert row["full_error"] == pytest.approx(0, abs=1e-9)


def test_messages_that_are_waited_for_are_counted_by_time(rows):
    found = {
        (row["workers"], row["wire_dtype"]): (row["expected"], row["measured"])
        for row in network_report.trips_rows(rows)
    }
    assert found == {
        # The least times of these rows are 0.9 of what the model says.
        (workers, wire): (number, pytest.approx(0.9 * number))
        for workers, numbers in ((2, (5, 10, 15)), (4, (9, 18, 27)))
        for wire, number in zip(cost_model.WIRE_BYTES, numbers, strict=True)
    }


def test_lines_of_json_are_read_back_and_plotted(rows, tmp_path):
    file, picture = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run("--from", file, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "| 4 | 9000 | bfloat16 | 3,000,000 | 3,030,000 | 3,030,000 | 3,030,000 "
        "| 1.0100 | 1.0000 |"
    ) in done.stdout
    assert "| 4 | float16 | 3 | 27 | 24.3 |" in done.stdout
    # 10 + 240 + 6 + 2 ms, and 9 times 10 ms.
    assert "| 10 ms | float32 | 1 | 0.348 | 0.313 to 0.383 |" in done.stdout
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
    ours = re.compile(rf"tfa{pid}[a-z]")
    found = [name for name in namespaces.namespaces() if ours.match(name)]
    links = Path("/sys/class/net")
    found += [link.name for link in links.iterdir() if ours.search(link.name)]
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace")
        except OSError:  # It has ended.
            continue
        if ours.search(command):
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


@pytest.mark.slow
def test_packs_and_deeper_networks(permitted):
    case = network.case(20_000, 2, None, None, layers=8, micro_batch=4)
    row, _ = network.measure(
        [case], workers=2, bytes_per_pack=8000, rounds=1, updates=2
    )
    # Eight layers of 49 units, and ten outputs.
    assert row["parameters"] == 8 * 49 * 50 + 10 * 50 == 20_100
    assert (row["bytes_per_pack"], row["layers"]) == (8000, 8)
    assert row["examples_per_second"] == pytest.approx(
        4 * 2 * 2 / row["seconds_per_update"]
    )
    sent = row["bytes_sent_per_worker_per_update"]
    assert 4 * 20_100 < sent < 1.5 * 4 * 20_100


def test_a_worker_that_fails_is_shown_and_nothing_is_left(permitted):
    wrong = network.case(1000, 1, "float8", mbit=200)
    with pytest.raises(RuntimeError, match="(?s)worker .*wire_dtype='float8'"):
        network.measure([wrong], workers=2, delay=0.001, timeout=60)
    assert traces(os.getpid()) == []


@contextlib.contextmanager
def removed_in_the_end(process):
    """Kills a process; removes the namespaces that it has left."""
    try:
        yield
    finally:
        process.kill()
        process.wait()
        left = set(traces(process.pid)) & set(namespaces.namespaces())
        for name in left:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(permitted, number, tmp_path):
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdout=output, stderr=output
        )
    with removed_in_the_end(process):
        deadline = time.monotonic() + 60
        while not any("worker" in name for name in traces(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(timeout=60)
        assert (code, traces(process.pid)) == (128 + number, [])


# Starts what a benchmark starts, and waits.
MAKER = """
import sys, time
from benchmarks import namespaces
with namespaces.Network(2, delay=0.01) as network:
    wait = "import time; time.sleep(60)"
    network.start(0, [sys.executable, "-c", wait, network.ends(0)[0][0]])
    print("made", flush=True)
    time.sleep(60)
"""


def test_a_kill_leaves_nothing_behind(permitted):
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        cwd=SCRIPT.parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process.stdout, removed_in_the_end(process):
        assert process.stdout.readline() == "made\n"
        # Namespaces: two and the switch. Processes: the relay, the one that
        # waits, and the one that is to remove the namespaces.
        assert len(traces(process.pid)) == 3 + 3
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while left := traces(process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


# --- A delay ---------------------------------------------------------------


@pytest.fixture
def delayed():
    """Two workers, far from each other, with links of 100 Mbit/s."""
    if reason := namespaces.obstacle(delay=0):
        pytest.skip(reason)
    with namespaces.Network(2, delay=DELAY) as network:
        for index in range(2):
            namespaces.limit(network.ends(index), 100)
        yield network
    assert traces(os.getpid()) == []


def sockets(network, kind):
    """One for each worker, in its namespace and with its address."""
    with contextlib.ExitStack() as stack:
        found = []
        for index, host in enumerate(network.hosts):
            with inside(network.ends(index)[0][0]):
                found.append(socket.socket(socket.AF_INET, kind))
            stack.enter_context(found[-1])
            found[-1].settimeout(20)
            found[-1].bind((host, 2222))
        stack.pop_all()
    return found


@contextlib.contextmanager
def inside(name):
    """What this thread opens belongs to a network namespace."""
    with (
        open("/proc/thread-self/ns/net") as here,
        open(f"/run/netns/{name}") as there,
    ):
        enter(there)
        try:
            yield
        finally:
            enter(here)


def enter(namespace):
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def sent_bytes(end):
    where, device = end
    command = ["ip", "-n", where, "-s", "-j", "link", "show", device]
    (found,) = json.loads(subprocess.check_output(command))
    return found["stats64"]["tx"]["bytes"]


def test_a_round_trip_takes_twice_the_delay(delayed):
    first, second = sockets(delayed, socket.SOCK_DGRAM)
    with first, second:
        first.connect(second.getsockname())
        second.connect(first.getsockname())
        seconds = []
        for number in range(20):
            began = time.monotonic()
            first.send(b"%d" % number)
            second.send(second.recv(100))
            assert first.recv(100) == b"%d" % number
            seconds.append(time.monotonic() - began)
    assert 2 * DELAY <= min(seconds) < 3 * DELAY


def test_packets_arrive_in_order(delayed):
    first, second = sockets(delayed, socket.SOCK_DGRAM)
    with first, second:
        first.connect(second.getsockname())
        # Finds out where the other is.
        first.send(b"begin")
        assert second.recv(100) == b"begin"
        began = time.monotonic()
        for number in range(100):
            first.send(b"%d" % number)
        found = [second.recv(100) for _ in range(100)]
        seconds = time.monotonic() - began
    assert found == [b"%d" % number for number in range(100)]
    # All are on their way at the same time.
    assert DELAY <= seconds < 10 * DELAY


def test_a_transfer_arrives_whole_and_no_faster_than_the_limit(delayed):
    data = random.Random(1).randbytes(4_000_000)
    device = delayed.ends(1)[0]
    server, client = sockets(delayed, socket.SOCK_STREAM)
    with server, client:
        server.listen()
        client.connect(server.getsockname())
        connection, _ = server.accept()
        before = sent_bytes(device)
        began = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        with connection, connection.makefile("rb") as received:
            found = received.read(len(data))
            seconds = time.monotonic() - began
        sender.join()
    assert found == data
    assert 0.95 * 8 * len(data) / 100e6 + DELAY < seconds < 20
    sent = sent_bytes(device) - before
    assert len(data) < sent < (1 + OVERHEAD) * len(data)


def test_a_relay_that_cannot_begin_is_told(permitted, monkeypatch):
    monkeypatch.setattr(namespaces, "RELAY", Path("nowhere.py"))
    with pytest.raises(namespaces.NetworkError, match="code 2 of nowhere.py"):
        with namespaces.Network(1, delay=DELAY):
            pass
    assert traces(os.getpid()) == []
