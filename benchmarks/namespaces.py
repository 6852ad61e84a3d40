"""A network of Linux namespaces with links of limited bandwidth.

Each worker has a namespace of its own. It is joined to a bridge in one more
namespace by a pair of virtual Ethernet devices, each of which sends at most so
many Mbit/s (the kernel's token bucket filter). All names begin with "tfa" and
the process id; nothing is made in the root namespace.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

JUMBO = 9000
PR_SET_PDEATHSIG = 1


class NetworkError(RuntimeError):
    """The network cannot be made here; the text says why."""


class Network:
    """A namespace for each worker, and links between them.

    A context manager: on leaving, whatever the reason, it ends the processes
    that were started in it and removes everything that it made.

    Args:
        workers: >= 1 and <= 250.
        mtu: the largest packet without its Ethernet header.
    """

    def __init__(self, workers: int, mtu: int = JUMBO):
        self._prefix = f"tfa{os.getpid()}"
        self._switch = f"{self._prefix}s"
        self._names = [f"{self._prefix}n{i}" for i in range(workers)]
        self._mtu = mtu
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
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[index], *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            **arguments,
        )
        self._processes.append(process)
        return process

    def _make(self) -> None:
        switch = self._switch
        bridge = f"{self._prefix}b"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        for index, (name, host) in enumerate(
            zip(self._names, self.hosts, strict=True)
        ):
            (_, inner), (_, outer) = ends = self.ends(index)
            _run("ip", "netns", "add", name)
            _run(
                *("ip", "link", "add", inner, "netns", name, "type", "veth"),
                *("peer", "name", outer, "netns", switch),
            )
            for where, device in ends:
                # One packet of the kernel is one packet of the network, so
                # that its counters are those of a real one.
                _run(
                    *("ip", "-n", where, "link", "set", device),
                    *("mtu", str(self._mtu), "gso_max_segs", "1", "up"),
                )
            _run("ip", "-n", switch, "link", "set", outer, "master", bridge)
            _run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", inner)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(
                *("ip", "netns", "exec", name, "sh", "-c"),
                "echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
            )
        _run("ip", "-n", switch, "link", "set", bridge, "up")

    def _remove(self) -> None:
        with _undisturbed():
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            # Devices and bridge go with their namespaces.
            problems = []
            for name in namespaces():
                if name in (self._switch, *self._names):
                    try:
                        _run("ip", "netns", "delete", name)
                    except NetworkError as error:
                        problems.append(str(error))
            if problems:
                raise NetworkError("\n".join(problems))


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


def obstacle() -> str:
    """Why a network cannot be made here; "" if it can."""
    try:
        with Network(1) as network:
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
