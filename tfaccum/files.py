"""Files that are old or new, and never half."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives another path to write to; the file appears when that is done.

    It then survives a power cut, its name too. What a process that was killed
    leaves behind ends in ".partial".

    Raises:
        OSError: if the disk is full, for instance.
    """
    partial = path.with_name(path.name + ".partial")
    yield partial
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Makes what was written to a file or directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
