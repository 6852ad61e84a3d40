"""One worker: its process, and how it is started and ended."""

import contextlib
import ctypes
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfaccum.cluster import EXIT_PREEMPTED, Cluster
from tfaccum.train.options import UsageError

_PR_SET_PDEATHSIG = 1


class Worker:
    """A process that cannot outlive the launcher.

    Attributes:
        index: Which of the workers it is, from 0.
        stdout: Where its standard output is read: a file descriptor.
        stderr: Where its standard error is.
        code: Its exit code, -n if signal n ended it; None while it runs.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        environment: Mapping[str, str],
        terminal: int | None,
    ):
        """Starts the process.

        Args:
            cluster: The workers, and which of them this is.
            command: Program and arguments.
            environment: What its environment has beside the launcher's.
            terminal: A terminal like which its standard output should be, or
                None.

        Raises:
            UsageError: If the program cannot be started.
        """
        self.index = cluster.index
        self.code: int | None = None
        self.stdout, inner = (
            os.pipe() if terminal is None else _terminal_like(terminal)
        )
        self.stderr, inner_error = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=inner,
                stderr=inner_error,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **environment,
                    "TF_CONFIG": cluster.tf_config(),
                },
                # Its own group, so that its children get signals too.
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()),
            )
        except OSError as error:
            raise UsageError(
                "the command of a worker must be one that can be started. "
                f"Received: {command[0]!r} ({error.strerror}). A script needs "
                "a first line with #! and its interpreter, or the interpreter "
                "before it, such as python."
            ) from error
        finally:
            os.close(inner)
            os.close(inner_error)

    def has_ended(self) -> bool:
        """Whether it has; what it started itself then ends too."""
        if self.code is None:
            self.code = self._process.poll()
            if self.code is not None:
                self._signal(signal.SIGKILL)
        return self.code is not None

    def kill(self, number: int) -> None:
        """Sends a signal to it and to what it has started."""
        if self.code is None:
            self._signal(number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> str:
        """How it ended, for messages."""
        code = self.code or 0
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        if code == EXIT_PREEMPTED:
            return f"was preempted (exit code {code})"
        return f"failed with exit code {code}"


@contextlib.contextmanager
def free_ports(number: int) -> Iterator[tuple[str, ...]]:
    """Addresses on 127.0.0.1 that nobody else is given meanwhile.

    The ports stay bound here, not listening, which lets the workers listen on
    them and keeps the kernel from giving them to another process.
    """
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(number):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield tuple(addresses)


def _terminal_like(file: int) -> tuple[int, int]:
    """A pair of ends of a terminal as wide as a given one.

    Bytes pass unchanged, so that carriage returns and backspaces of a progress
    bar reach the real terminal.
    """
    outer, inner = pty.openpty()
    attributes = termios.tcgetattr(inner)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(inner, termios.TCSANOW, attributes)
    size = fcntl.ioctl(file, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(inner, termios.TIOCSWINSZ, size)
    return outer, inner


def _end_with_parent(parent: int) -> Callable[[], None]:
    """What a child does first, so that it cannot outlive the launcher.

    Linux alone has this; elsewhere only an orderly end of the launcher ends
    its workers.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        # A shell starts what runs in the background deaf to Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

    return prepare
