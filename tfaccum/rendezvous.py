"""The workers of a cluster meet before TensorFlow starts its servers.

    worker 0: listens on its own port; hears from each worker who it is and
              what it is about to train; tells all of them the verdict
    each one: goes on, or ends with the same error as all the others

TensorFlow itself waits for absent workers without naming them, and starts
workers that differ, which then hang or diverge. Imports only the standard
library.

Messages are lines of JSON of limited length. Every wait has a limit; what
does not speak this protocol is ignored.
"""

import collections
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import platform
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfaccum import versions
from tfaccum.cluster import Cluster, host_and_port

# How long the workers wait for each other, in seconds.
TIMEOUT = 120.0
# More than that, for the verdict to arrive.
GRACE = 3.0
# Once something is wrong, how long others may still come to hear it.
FAULT_WAIT = 10.0
# How long a port may still belong to a process that is just ending.
PORT_WAIT = 3.0
# How long to listen on once all are there: a second process of some index
# tries at least this often.
SETTLE = 0.5
# How long a stranger may stay connected without saying anything.
STRANGER_WAIT = 10.0
# The longest message, in bytes: thousands of addresses and flags.
MAX_MESSAGE = 1 << 20

_PROTOCOL = "tfaccum-start-1"


class StartError(RuntimeError):
    """The workers of a cluster cannot start together; the text says why."""


def meet(
    cluster: Cluster,
    facts: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Waits until all workers are there and agree.

    Afterwards the ports are free for TensorFlow. On every worker this ends
    within `timeout` and a few seconds, well or with an error.

    Args:
        cluster: The workers.
        facts: What must be the same on all of them besides `own_facts`: name
            and value, both for messages.
        timeout: How long to wait for the others, in seconds.

    Raises:
        StartError: If a worker is not there in time; names all that are not.
        StartError: If the workers do not agree; names in what.
        StartError: If two processes have the same index.
        StartError: If a worker's port is taken on its host.
    """
    deadline = time.monotonic() + timeout
    hello: dict[str, Any] = {
        "protocol": _PROTOCOL,
        "index": cluster.index,
        "process": f"process {os.getpid()} on {socket.gethostname()}",
        "facts": {
            "workers": ", ".join(cluster.addresses),
            **own_facts(),
            **(facts or {}),
        },
        "problem": "",
    }
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(_take_port(cluster.address))
        except OSError as error:
            hello["problem"] = (
                f"The port of {cluster.name(cluster.index)} must be free on "
                f"its host. Received: {error.strerror}. Choose another port, "
                "or end what listens there."
            )
            if cluster.index == 0:
                # Perhaps a second worker 0 of this cluster: let it know.
                deadline = min(deadline, time.monotonic() + PORT_WAIT)
        else:
            if cluster.index == 0:
                listener = _Listener(cluster, own, hello, deadline)
                listener.start()
                stack.callback(listener.join, GRACE)
        try:
            verdict = _ask(cluster, hello, deadline)
        except _NoAnswerError as error:
            verdict = hello["problem"] or _no_answer(cluster, timeout, error)
    if verdict:
        raise StartError(verdict)


def own_facts() -> dict[str, str]:
    """Versions, and a hash of the code of this package."""
    folder = Path(__file__).parent
    code = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode())
        code.update(path.read_bytes())
    return {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of TensorFlow": versions.installed("tensorflow") or "none",
        "version of Keras": versions.installed("keras") or "none",
        "code of tfaccum": code.hexdigest()[:12],
    }


def _take_port(address: str) -> socket.socket:
    """Binds the port of a worker on all interfaces, as TensorFlow will."""
    _, port = host_and_port(address)
    both = socket.has_dualstack_ipv6()
    deadline = time.monotonic() + PORT_WAIT
    while True:
        try:
            return _bound(port, socket.AF_INET6 if both else socket.AF_INET)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and both:
                both = False  # IPv6 is switched off.
            elif time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _bound(port: int, family: socket.AddressFamily) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier run that linger do no harm.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


# --- The side of every worker ----------------------------------------------


class _NoAnswerError(Exception):
    """Worker 0 did not give a verdict."""


def _ask(cluster: Cluster, hello: dict[str, Any], deadline: float) -> str:
    """Reports to worker 0 until it answers; returns its verdict, "" for go."""
    pause = 0.05
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection(
                host_and_port(cluster.addresses[0]),
                timeout=min(5, max(left, 1)),
            ) as connection:
                connection.sendall(_line({**hello, "patience": left}))
                answer = _parse(_read_line(connection, deadline + GRACE))
                return str(answer["verdict"])
        except (OSError, ValueError, KeyError) as error:
            if time.monotonic() + pause > deadline:
                raise _NoAnswerError(_describe(error)) from error
        time.sleep(pause)
        pause = min(2 * pause, SETTLE / 2)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error) or "it does not answer"
    return "what answers there is not a worker of tfaccum that is starting"


def _no_answer(cluster: Cluster, timeout: float, error: Exception) -> str:
    return (
        f"Every worker must reach {cluster.name(0)} within {timeout:g} s. "
        f"Received: {error}. Start worker 0 there, or look at why it ended; "
        "if it waits, look at the network and at a firewall between the hosts."
    )


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        more = connection.recv(4096)
        data += more
        if not more or len(data) > MAX_MESSAGE:
            raise ValueError(f"a line must end. Received: {data[:80]!r}")
    return data


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    """A message of this protocol."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get("protocol") != _PROTOCOL:
        raise ValueError(f"no message of a worker. Received: {line[:80]!r}")
    return message


# --- The side of worker 0 --------------------------------------------------


@dataclasses.dataclass
class _Guest:
    """Whoever has connected, and what it has said so far."""

    connection: socket.socket
    leaves_at: float
    received: bytes = b""
    hello: Mapping[str, Any] | None = None


class _Listener(threading.Thread):
    """Hears all workers, worker 0 itself included, and tells the verdict."""

    def __init__(
        self,
        cluster: Cluster,
        own: socket.socket,
        hello: Mapping[str, Any],
        deadline: float,
    ):
        super().__init__(name="rendezvous", daemon=True)
        self._cluster = cluster
        self._own = own
        self._facts = hello["facts"]
        self._began = time.monotonic()
        self._deadline = deadline
        self._guests: list[_Guest] = []
        self._problems: list[str] = []
        self._own.listen(128)
        self._own.setblocking(False)

    def run(self) -> None:
        """Hears the workers, frees the port and answers."""
        try:
            self._hear()
        finally:
            self._own.close()
            answer = {"protocol": _PROTOCOL, "verdict": self._verdict()}
            for guest in self._guests:
                with contextlib.suppress(OSError), guest.connection:
                    if guest.hello is not None:
                        guest.connection.settimeout(1.0)
                        guest.connection.sendall(_line(answer))
                        guest.connection.shutdown(socket.SHUT_WR)

    def _hear(self) -> None:
        """Until all are there, or it is too late."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._own, selectors.EVENT_READ)
            settled = None
            while (now := time.monotonic()) < self._deadline:
                if self._missing():
                    settled = None
                elif settled is None:
                    settled = now + SETTLE
                elif now >= settled:
                    return
                for key, _ in selector.select(0.1):
                    if key.data is None:
                        self._welcome(selector)
                    elif not self._listen_to(key.data):
                        self._see_off(key.data, selector)
                for guest in list(self._guests):
                    if guest.hello is None and guest.leaves_at < now:
                        self._see_off(guest, selector)

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._own.accept()
            connection.setblocking(False)
            guest = _Guest(connection, time.monotonic() + STRANGER_WAIT)
            self._guests.append(guest)
            selector.register(connection, selectors.EVENT_READ, guest)

    def _see_off(self, guest: _Guest, selector: selectors.BaseSelector) -> None:
        """Forgets a stranger, or a worker that has ended."""
        selector.unregister(guest.connection)
        guest.connection.close()
        self._guests.remove(guest)

    def _listen_to(self, guest: _Guest) -> bool:
        """Takes in what a guest says; False if it should go."""
        try:
            more = guest.connection.recv(65_536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        guest.received += more
        if not more or len(guest.received) > MAX_MESSAGE:
            return False
        if guest.hello is None and guest.received.endswith(b"\n"):
            try:
                guest.hello = _parse_hello(guest.received)
            except Exception:  # Whatever a stranger may think of.
                return False
            self._take_note(guest.hello)
        return True

    def _take_note(self, hello: Mapping[str, Any]) -> None:
        """Waits no longer than that worker does, nor long after a fault."""
        now = time.monotonic()
        self._deadline = min(self._deadline, now + hello["patience"])
        if hello["problem"]:
            self._problems.append(hello["problem"])
        if hello["problem"] or hello["facts"] != self._facts or self._twice():
            self._deadline = min(self._deadline, now + FAULT_WAIT)

    def _present(self) -> dict[int, list[Mapping[str, Any]]]:
        """What each worker said, by its index."""
        found = collections.defaultdict(list)
        for guest in self._guests:
            if guest.hello is not None:
                found[guest.hello["index"]].append(guest.hello)
        return found

    def _missing(self) -> list[int]:
        present = self._present()
        return [
            index
            for index in range(self._cluster.num_workers)
            if index not in present
        ]

    def _twice(self) -> list[int]:
        return [i for i, hellos in self._present().items() if len(hellos) > 1]

    def _verdict(self) -> str:
        """What is wrong, or "" if nothing is."""
        texts = list(dict.fromkeys(self._problems))
        present = self._present()
        for index in self._twice():
            who = " and ".join(hello["process"] for hello in present[index])
            texts.append(
                "Each worker must have an index of its own. Received: index "
                f"{index} from {who}. Give every process its own."
            )
        hellos = [hello for same in present.values() for hello in same]
        texts += _differences(hellos)
        missing = self._missing()
        if missing and not texts:
            waited = time.monotonic() - self._began
            names = ", ".join(map(self._cluster.name, missing))
            texts.append(
                f"All {self._cluster.num_workers} workers must be there. "
                f"Received: after {waited:.0f} s nothing from {names}. Start "
                "the same command there with its own index, or look at why it "
                "ended; if it only needs longer, raise the start timeout."
            )
        return " ".join(texts)


def _parse_hello(line: bytes) -> Mapping[str, Any]:
    """What a worker says of itself, of the right types."""
    said = _parse(line)
    return {
        "index": int(said["index"]),
        "process": str(said["process"]),
        "patience": float(said["patience"]),
        "problem": str(said["problem"]),
        "facts": {str(k): str(v) for k, v in dict(said["facts"]).items()},
    }


def _differences(hellos: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One sentence for each fact on which workers differ."""
    for name in dict.fromkeys(name for h in hellos for name in h["facts"]):
        values = collections.defaultdict(list)
        for hello in sorted(hellos, key=lambda hello: hello["index"]):
            values[hello["facts"].get(name)].append(str(hello["index"]))
        if len(values) > 1:
            found = "; ".join(
                f"{_shortened(value)} on worker {', '.join(workers)}"
                for value, workers in values.items()
            )
            yield (
                f"The workers must agree on `{name}`. Received: {found}. "
                "Start all with the same command and the same code."
            )


def _shortened(value: str | None) -> str:
    if value is None:
        return "nothing"
    return repr(value if len(value) <= 300 else f"{value[:300]}...")
