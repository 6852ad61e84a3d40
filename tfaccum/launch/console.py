"""What the workers write, on its way to their logs and to the console."""

import collections
import dataclasses
import os
import selectors
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tfaccum.launch.worker import Worker

TAIL_LINES = 20

_COLORS = (36, 33, 35, 32, 34, 31)  # Cyan, yellow, magenta, green, blue, red.


class _Log:
    """The log of one worker, and the last lines of it."""

    def __init__(self, path: Path, title: str):
        self._file = open(path, "ab")
        self._file.write(f"--- {title}\n".encode())
        self.tail: collections.deque[bytes] = collections.deque(
            maxlen=TAIL_LINES
        )

    def write(self, line: bytes) -> None:
        """Writes a line. Of a progress bar what was drawn last is kept."""
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        self.tail.append(line)
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclasses.dataclass
class _Stream:
    """One output of a worker.

    Attributes:
        raw: Whether its bytes go to standard output as they come.
        shown: Whether its lines go to standard error.
        rest: The part of its last line that is there.
    """

    file: int
    worker: int
    raw: bool
    shown: bool
    rest: bytes = b""


class Console:
    """Passes on what the workers write.

    Standard output is that of worker 0, byte by byte, so that its progress
    bar moves. Standard error has lines of all workers.
    """

    def __init__(self, log_dir: Path):
        self._log_dir = log_dir
        self._out: BinaryIO = sys.stdout.buffer
        self._err: BinaryIO = sys.stderr.buffer
        self._color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._bar_is_open = False
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, _Log] = {}
        # Where standard output goes, if it is a terminal.
        self.terminal = sys.stdout.fileno() if sys.stdout.isatty() else None

    def add(self, worker: Worker, start: int) -> None:
        """Listens to a worker; `start` counts from 1, for its log."""
        index = worker.index
        self._logs[index] = _Log(
            self.log_path(index), f"worker {index}, start {start}"
        )
        for stream in (
            _Stream(worker.stdout, index, raw=index == 0, shown=False),
            _Stream(worker.stderr, index, raw=False, shown=True),
        ):
            self._selector.register(stream.file, selectors.EVENT_READ, stream)

    def log_path(self, index: int) -> Path:
        """The log of a worker."""
        return self._log_dir / f"worker-{index}.log"

    def tail(self, index: int) -> Sequence[bytes]:
        """The last lines of a worker."""
        return self._logs[index].tail

    def is_done(self) -> bool:
        """Whether all outputs have ended."""
        return not self._selector.get_map()

    def pump(self, seconds: float) -> None:
        """Passes on what there is, and waits at most so long for it."""
        for key, _ in self._selector.select(seconds):
            stream = key.data
            try:
                data = os.read(stream.file, 65_536)
            except OSError:  # A terminal whose other end is closed.
                data = b""
            if data:
                self._take(stream, data)
            else:
                self._end(stream)

    def _take(self, stream: _Stream, data: bytes) -> None:
        if stream.raw:
            self._out.write(data)
            self._out.flush()
            self._bar_is_open = not data.endswith(b"\n")
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        for line in lines:
            self._line(stream, line)
        # An open progress bar is drawn over and over.
        drawn_over = stream.rest.rfind(b"\r", 0, -1)
        stream.rest = stream.rest[max(drawn_over, 0) :]

    def _line(self, stream: _Stream, line: bytes) -> None:
        self._logs[stream.worker].write(line)
        if stream.shown:
            prefix = f"[worker {stream.worker}]"
            if self._color:
                color = _COLORS[stream.worker % len(_COLORS)]
                prefix = f"\x1b[{color}m{prefix}\x1b[0m"
            self.show(prefix, line)

    def _end(self, stream: _Stream) -> None:
        if stream.rest:
            self._line(stream, stream.rest)
        self._selector.unregister(stream.file)
        os.close(stream.file)

    def show(self, prefix: str, line: bytes) -> None:
        """Writes a line to standard error, below an open progress bar."""
        if self._bar_is_open and self.terminal is not None:
            self._out.write(b"\n")
            self._out.flush()
            self._bar_is_open = False
        self._err.write(prefix.encode() + b" " + line + b"\n")
        self._err.flush()

    def say(self, text: str) -> None:
        """Writes a line of the launcher itself."""
        self.show("tfaccum-launch:", text.encode())

    def close(self) -> None:
        """Ends the outputs and logs of a group of workers."""
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        for log in self._logs.values():
            log.close()
