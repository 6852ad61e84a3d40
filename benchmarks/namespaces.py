"""A network of Linux namespaces with links of limited bandwidth and delay.

Each worker has a namespace of its own. It is joined to a switch in one more
namespace by a pair of virtual Ethernet devices, each of which sends at most so
many Mbit/s (the kernel's token bucket filter). The switch is a bridge of the
kernel, or the process of `relay.py` where the links have a delay: not every
kernel has a queueing discipline for that (`netem`). All names begin with "tfa"
and the process id; nothing is made in the root namespace.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

JUMBO = 9000
PR_SET_PDEATHSIG = 1
RELAY = Path(__file__).with_name("relay.py")
# Reads names until nobody can send more, and removes the namespaces.
REMOVER = """
while read name; do names="$names $name"; done
for name in $names; do ip netns delete $name; done
"""


class NetworkError(RuntimeError):
    """The network cannot be made here; the text says why."""


class Network:
    """A namespace for each worker, and links between them.

    A context manager: on leaving, whatever the reason, it ends the processes
    that were started in it and removes everything that it made. Where this
    process is killed, the kernel ends the others, and one that outlives it
    removes the namespaces.

    Args:
        workers: >= 1 and <= 250.
        mtu: the largest packet without its Ethernet header.
        delay: seconds from one worker to another, >= 0; None: no relay.
    """

    def __init__(
        self, workers: int, mtu: int = JUMBO, delay: float | None = None
    ):
        self._prefix = f"tfa{os.getpid()}"
        self._switch = f"{self._prefix}s"
        self._names = [f"{self._prefix}n{i}" for i in range(workers)]
        self._mtu = mtu
        self._delay = delay
        self._remover: subprocess.Popen | None = None
        self._processes: list[subprocess.Popen] = []

    @property
    def hosts(self) -> list[str]:
        """The workers' addresses in this network."""
        return [f"10.0.0.{i + 1}" for i in range(len(self._names))]

    def ends(self, index: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """(namespace, device) of a worker's end of its link, and the other."""
        return (
            (self._names[index], f"{self._prefix}v{index}"),
            (self._switch, f"{self._prefix}p{index}"),
        )

    def __enter__(self) -> "Network":
        """Makes it."""
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Removes it."""
        self._remove()

    def start(
        self, index: int, command: Sequence[str], **arguments: Any
    ) -> subprocess.Popen:
        """Starts a process as a worker, which cannot outlive this one."""
        return self._start(self._names[index], command, **arguments)

    def _start(
        self, where: str, command: Sequence[str], **arguments: Any
    ) -> subprocess.Popen:
        process = subprocess.Popen(
            ["ip", "netns", "exec", where, *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            **arguments,
        )
        self._processes.append(process)
        return process

    def _make(self) -> None:
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", REMOVER, f"{self._prefix}r"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._add(self._switch)
        for index, (name, host) in enumerate(
            zip(self._names, self.hosts, strict=True)
        ):
            (_, inner), (_, outer) = ends = self.ends(index)
            self._add(name)
            _run(
                *("ip", "link", "add", inner, "netns", name, "type", "veth"),
                *("peer", "name", outer, "netns", self._switch),
            )
            for where, device in ends:
                # One packet of the kernel is one packet of the network, so
                # that its counters are those of a real one.
                _run(
                    *("ip", "-n", where, "link", "set", device),
                    *("mtu", str(self._mtu), "gso_max_segs", "1", "up"),
                )
            _run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", inner)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(
                *("ip", "netns", "exec", name, "sh", "-c"),
                "echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
            )
        ports = [self.ends(i)[1][1] for i in range(len(self._names))]
        if self._delay is None:
            self._bridge(ports)
        else:
            self._relay(ports, self._delay)

    def _add(self, name: str) -> None:
        """Adds a namespace; it is known to the remover before it is there."""
        if self._remover and self._remover.stdin:
            print(name, file=self._remover.stdin, flush=True)
        _run("ip", "netns", "add", name)

    def _bridge(self, ports: Sequence[str]) -> None:
        """Makes the kernel carry packets between these devices at once."""
        here = ("ip", "-n", self._switch, "link")
        bridge = f"{self._prefix}b"
        _run(*here, "add", bridge, "type", "bridge")
        for port in ports:
            _run(*here, "set", port, "master", bridge)
        _run(*here, "set", bridge, "up")

    def _relay(self, ports: Sequence[str], delay: float) -> None:
        """Makes a process carry packets between them, so much later."""
        process = self._start(
            self._switch,
            [sys.executable, str(RELAY), f"--seconds={delay}", *ports],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process.stdout as said:
            if said.readline() != "ready\n":
                raise NetworkError(
                    "A network with a delay needs a process that relays. "
                    f"Received: exit code {process.wait()} of {RELAY.name}."
                )

    def _remove(self) -> None:
        with _undisturbed():
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            # Devices and bridge go with their namespaces.
            if self._remover:
                self._remover.communicate()
            left = {self._switch, *self._names} & {*namespaces()}
            if left:
                raise NetworkError(
                    "All namespaces must be removed. Received: "
                    f"{sorted(left)} are left."
                )


def limit(ends: Sequence[Sequence[str]], mbit: float | None) -> None:
    """Limits what both ends of a link send.

    Args:
        ends: as `Network.ends` gives them.
        mbit: per second; None: no limit.
    """
    discipline = (
        ("pfifo", "limit", "10000")
        if mbit is None
        # Drops nothing: connections have fewer bytes on their way.
        else ("tbf", "rate", f"{mbit:g}mbit", "burst", "32kb", "limit", "32mb")
    )
    for where, device in ends:
        _run(
            *("tc", "-n", where, "qdisc", "replace", "dev", device, "root"),
            *discipline,
        )


def namespaces() -> list[str]:
    """The names of all network namespaces that have one."""
    if shutil.which("ip") is None:
        return []
    return [row.split()[0] for row in _run("ip", "netns", "list").splitlines()]


def obstacle(delay: float | None = None) -> str:
    """Why a network with this delay cannot be made here; "" if it can."""
    try:
        with Network(1, delay=delay) as network:
            limit(network.ends(0), 100)
            return ""
    except NetworkError as error:
        return str(error)


def _run(*command: str) -> str:
    """Runs a command of the system; returns what it prints."""
    if shutil.which(command[0]) is None:
        raise NetworkError(
            f"A network of namespaces needs Linux with `{command[0]}` of "
            "iproute2. Received: no such command."
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(
            "A network of namespaces needs Linux and the rights of root. "
            f"Received: `{' '.join(command)}`: {done.stderr.strip()}"
        )
    return done.stdout


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets no signal interrupt a clean-up."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """What a worker's process does first: it ends when its parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
