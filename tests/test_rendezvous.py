"""Workers meet, or all end with the same error: real sockets on 127.0.0.1."""

import concurrent.futures
import contextlib
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests import workers
from tfaccum import rendezvous
from tfaccum.cluster import Cluster

ROOT = Path(__file__).parents[1]


@pytest.fixture
def addresses():
    """Makes addresses on ports that were free just now."""
    return lambda number: tuple(workers.free_addresses(number))


def meet(clusters, facts=None, timeout=20, delays=None):
    """Lets workers meet, each in a thread; returns their errors, and times."""

    def one(number):
        time.sleep((delays or {}).get(number, 0))
        began = time.monotonic()
        error = None
        try:
            rendezvous.meet(
                clusters[number], (facts or {}).get(number), timeout
            )
        except rendezvous.StartError as caught:
            error = str(caught)
        return error, time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(one, range(len(clusters))))


def all_of(addresses, indices=None):
    indices = range(len(addresses)) if indices is None else indices
    return [Cluster(addresses, index, "a test") for index in indices]


def the_error(results):
    """The one error with which all have ended."""
    errors = {error for error, _ in results}
    assert len(errors) == 1, errors
    return errors.pop()


def free(address):
    """Whether a server may listen on a port, as TensorFlow's will."""
    host, port = address.split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, int(port)))
        sock.listen()
    return True


# --- All is well ------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 5])
def test_workers_meet_and_leave_their_ports(number, addresses):
    found = addresses(number)
    # The first comes last.
    results = meet(all_of(found), delays={0: 0.5})
    assert the_error(results) is None
    assert max(seconds for _, seconds in results) < 10
    assert all(map(free, found))


def test_workers_meet_again_on_the_same_ports(addresses):
    found = addresses(2)
    for _ in range(3):
        assert the_error(meet(all_of(found))) is None


def test_a_worker_that_restarts_meanwhile_is_no_second_one(addresses):
    found = addresses(3)
    hello = {
        "protocol": "tfaccum-start-1",
        "index": 1,
        "process": "an earlier one",
        "patience": 60,
        "problem": "",
        "facts": {},
    }

    def ends_at_once():
        time.sleep(0.5)
        host, port = found[0].split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(json.dumps(hello).encode() + b"\n")

    thread = threading.Thread(target=ends_at_once)
    thread.start()
    results = meet(all_of(found), delays={1: 1.5})
    thread.join()
    assert the_error(results) is None


def test_own_facts_name_versions_and_code():
    facts = rendezvous.own_facts()
    assert facts["version of TensorFlow"].startswith("2.")
    assert facts["version of Keras"].startswith("3.")
    assert len(facts["code of tfaccum"]) == 12
    assert facts == rendezvous.own_facts()


# --- Somebody is not there --------------------------------------------------


def test_M2_an_absent_worker_is_named_by_all_in_time(addresses):
    found = addresses(4)
    results = meet(all_of(found, [0, 2]), timeout=2)
    error = the_error(results)
    assert f"worker 1 ({found[1]}), worker 3 ({found[3]})" in error
    assert "All 4 workers must be there. Received: after 2 s nothing" in error
    assert max(seconds for _, seconds in results) < 2 + 5
    assert all(map(free, found))


def test_M2_an_absent_worker_0_is_named(addresses):
    found = addresses(3)
    results = meet(all_of(found, [1, 2]), timeout=2)
    assert f"must reach worker 0 ({found[0]}) within 2 s" in the_error(results)
    assert max(seconds for _, seconds in results) < 2 + 5


def test_M2_nobody_waits_longer_than_the_first_that_came(addresses):
    found = addresses(3)
    # Worker 1 has waited for 2 of its 3 seconds when worker 0 comes.
    results = meet(all_of(found, [0, 1]), timeout=3, delays={0: 2})
    assert f"nothing from worker 2 ({found[2]})" in the_error(results)
    (_, first), (_, second) = results
    assert first < 2 and second < 3 + 2


def test_M2_one_process_alone_ends(addresses):
    """As a process, with nothing but the standard library."""
    found = addresses(2)
    program = f"""
        import sys
        import types
        package = types.ModuleType("tfaccum")
        package.__path__ = [{str(ROOT / "tfaccum")!r}]
        sys.modules["tfaccum"] = package
        from tfaccum import cluster, rendezvous
        try:
            rendezvous.meet(cluster.Cluster({found}, 0, "a test"), timeout=1)
        except rendezvous.StartError as error:
            print(error)
        assert not {{"tensorflow", "keras", "numpy"}} & set(sys.modules)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"after 1 s nothing from worker 1 ({found[1]})" in done.stdout


def test_a_host_without_a_name_is_told(addresses):
    there = Cluster(("no-such-host.invalid:2222", "b:1"), 0, "a test")
    results = meet([there], timeout=1)
    assert "reach worker 0 (no-such-host.invalid:2222)" in the_error(results)
    # The port of this test; worker 1 of a real cluster waits too.
    assert "within 1 s. Received: " in the_error(results)


# --- They do not agree ------------------------------------------------------


def test_a_flag_that_differs_is_named_with_both_values(addresses):
    found = addresses(3)
    facts = {
        0: {"seed": "1", "--epochs": "3"},
        1: {"seed": "1", "--epochs": "4"},
        2: {"seed": "1", "--epochs": "3", "--jit": "True"},
    }
    results = meet(all_of(found), facts)
    error = the_error(results)
    assert (
        "The workers must agree on `--epochs`. Received: '3' on worker 0, 2; "
        "'4' on worker 1."
    ) in error
    assert "`--jit`. Received: nothing on worker 0, 1; 'True' on" in error
    assert "seed" not in error
    assert max(seconds for _, seconds in results) < 10


def test_lists_that_differ_are_found(addresses):
    a, b, c = addresses(3)
    results = meet(
        [Cluster((a, b), 0, "a test"), Cluster((a, b, c), 1, "a test")]
    )
    error = the_error(results)
    assert f"agree on `workers`. Received: '{a}, {b}' on worker 0" in error
    assert f"'{a}, {b}, {c}' on worker 1" in error


def test_code_that_differs_is_found_by_those_who_come_soon(
    addresses, monkeypatch
):
    found = addresses(3)
    monkeypatch.setattr(rendezvous, "FAULT_WAIT", 2)
    facts = {number: {"code of tfaccum": str(number)} for number in (0, 1)}
    results = meet(all_of(found, [0, 1]), facts, timeout=60)
    assert "agree on `code of tfaccum`" in the_error(results)
    assert max(seconds for _, seconds in results) < 10


def test_one_index_twice_is_refused_with_both_processes(addresses, monkeypatch):
    found = addresses(3)
    monkeypatch.setattr(rendezvous, "FAULT_WAIT", 4)
    program = f"""
        from tfaccum import cluster, rendezvous
        there = cluster.Cluster({found}, 1, "a test")
        # Its own host, in this test.
        rendezvous._take_port = lambda address: __import__("socket").socket()
        try:
            rendezvous.meet(there, timeout=30)
        except rendezvous.StartError as error:
            print(error)
        """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        others = [
            pool.submit(
                subprocess.run,
                [
                    sys.executable,
                    "-c",
                    textwrap.dedent(program),
                    "tfaccum.train",
                ],
                capture_output=True,
                text=True,
                timeout=60,
                cwd=ROOT,
            )
            for _ in range(2)
        ]
        ours = the_error(meet(all_of(found, [0]), timeout=30))
        theirs = {other.result().stdout.strip() for other in others}
    assert theirs == {ours}
    host = socket.gethostname()
    assert "must have an index of its own. Received: index 1 from" in ours
    assert ours.count(f" on {host}") == 2 and " and process " in ours


def test_M3_two_workers_0_are_refused(addresses, monkeypatch):
    """As on two machines: each can listen, but only one has the address."""
    found = addresses(2)
    first, second = all_of(found, [0, 0])
    take = rendezvous._take_port
    taken = []

    def take_on_its_host(address):
        """The second one's port is that of another host."""
        taken.append(address)
        return take(address if len(taken) == 1 else "127.0.0.1:0")

    monkeypatch.setattr(rendezvous, "_take_port", take_on_its_host)
    results = meet([first, second], timeout=4, delays={1: 0.5})
    assert "Received: index 0 from" in the_error(results)


# --- A port that is taken ---------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_a_taken_port_is_named(index, addresses, monkeypatch):
    found = addresses(2)
    monkeypatch.setattr(rendezvous, "PORT_WAIT", 0.5)
    host, port = found[index].split(":")
    with socket.create_server((host, int(port))):
        results = meet(all_of(found), timeout=3)
    text = f"The port of worker {index} ({found[index]}) must be free"
    assert text in results[index][0]
    assert "Address already in use" in results[index][0]
    if index == 1:
        assert the_error(results)
        assert max(seconds for _, seconds in results) < 3
    else:
        assert f"must reach worker 0 ({found[0]})" in results[1][0]


# --- Strangers --------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + bytes(range(256)) + b"\n",
        b"[" * 100_000 + b"\n",
        b'{"protocol": "tfaccum-start-1"}\n',
        b'{"protocol": "tfaccum-start-1", "index": 1e999, "process": 1, '
        b'"patience": 1, "problem": "", "facts": {}}\n',
        b"x" * (rendezvous.MAX_MESSAGE + 10),
    ],
)
def test_a_stranger_changes_nothing(said, addresses):
    found = addresses(2)
    host, port = found[0].split(":")
    stop = threading.Event()

    def strange():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                with socket.create_connection((host, int(port))) as sock:
                    sock.sendall(said)
                    sock.settimeout(0.2)
                    sock.recv(10)
            time.sleep(0.05)

    thread = threading.Thread(target=strange)
    thread.start()
    try:
        results = meet(all_of(found), delays={1: 1})
    finally:
        stop.set()
        thread.join()
    assert the_error(results) is None


def test_a_stranger_in_the_place_of_worker_0_is_told_apart(addresses):
    found = addresses(2)
    host, port = found[0].split(":")
    with socket.create_server((host, int(port))) as server:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"220 mail.example.com\r\n")

        threading.Thread(target=greet, daemon=True).start()
        results = meet(all_of(found, [1]), timeout=1)
    assert "what answers there is not a worker" in the_error(results)
