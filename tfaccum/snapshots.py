"""Directories of arrays on disk that are complete, or not there.

    update-00000120-epoch-0002-batch-000048/
        manifest.json                   facts; size and SHA-256 of each file
        checkpoint                      as tf.train.CheckpointManager writes
        arrays-1.index                  them: tf.train.latest_checkpoint finds,
        arrays-1.data-00000-of-00001    and tf.train.load_checkpoint reads them

A manager writes its files one after the other. So each snapshot is a folder
with a manager of its own: written under another name, flushed to the disk and
then renamed. Nothing in it is code.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfaccum.files import flush

FORMAT = 1

_NAME = re.compile(r"update-\d{8,}-epoch-\d{4,}-batch-\d{6,}")
_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_MANIFEST = "manifest.json"
_ARRAYS = "arrays"
# How TensorFlow writes the name of an entry of a dict.
_SLASH = ".S"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class DamagedError(Exception):
    """A snapshot cannot be read as it was written; the message says why."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A complete snapshot on disk.

    Attributes:
        path: its directory.
        facts: what was written with it, plain JSON values.
    """

    path: Path
    facts: dict[str, Any]

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name."""
        newest = tf.train.latest_checkpoint(str(self.path))
        reader = tf.train.load_checkpoint(newest)
        found = {}
        for key in reader.get_variable_to_shape_map():
            name = key.removeprefix(f"{_ARRAYS}/").removesuffix(_VALUE)
            if name != key and key.startswith(_ARRAYS):
                found[name.replace(_SLASH, "/")] = reader.get_tensor(key)
        return found


class Snapshots:
    """The snapshots of one directory, which is made when it is missing.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: str | os.PathLike):
        self._directory = Path(directory)

    def paths(self) -> list[Path]:
        """All that look complete, the newest last."""
        if not self._directory.is_dir():
            return []
        return sorted(
            path
            for path in self._directory.iterdir()
            if _NAME.fullmatch(path.name)
        )

    def write(
        self,
        arrays: Mapping[str, np.ndarray],
        facts: Mapping[str, Any],
        *,
        update: int,
        epoch: int,
        batch: int,
    ) -> Path:
        """Writes one snapshot; it appears when it is complete.

        Raises:
            OSError: if the disk is full, for instance. Then nothing appears.
        """
        name = f"update-{update:08d}-epoch-{epoch:04d}-batch-{batch:06d}"
        final = self._directory / name
        partial = self._directory / (name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _save(partial, arrays)
            files = {path.name: _described(path) for path in partial.iterdir()}
            manifest = {"format": FORMAT, "files": files, "facts": facts}
            text = json.dumps(manifest, indent=1)
            (partial / _MANIFEST).write_text(text)
            for path in partial.iterdir():
                flush(path)
            flush(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)  # The same, or damaged.
        partial.rename(final)
        flush(self._directory)
        return final

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        """The newest good snapshot, and why newer ones are not good."""
        complaints: list[str] = []
        for path in reversed(self.paths()):
            try:
                return self.read(path), complaints
            except DamagedError as error:
                complaints.append(f"{path}: {error}")
        return None, complaints

    def read(self, path: str | os.PathLike) -> Snapshot:
        """One snapshot, after its files have been checked.

        Raises:
            DamagedError: if a file is missing, or is not as it was written.
        """
        path = Path(path)
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise DamagedError(
                    f"format {manifest['format']} is not {FORMAT}; it was "
                    "written by another version of tfaccum"
                )
            for name, described in manifest["files"].items():
                if _described(path / name) != described:
                    raise DamagedError(f"{name} is not as it was written")
            return Snapshot(path, manifest["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{type(error).__name__}: {error}") from error

    def set_aside(self, newer_than: Path | None) -> None:
        """Renames damaged ones, so that they count no more.

        Args:
            newer_than: the newest good one; None: there is none.
        """
        for path in self.paths():
            if newer_than is None or path > newer_than:
                aside = path.with_name(path.name + _DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def keep(self, number: int, also: Path | None = None) -> None:
        """Removes all but the newest ones and `also`."""
        for path in self.paths()[:-number]:
            if path != also:
                self._remove(path)

    def remove_partial(self) -> None:
        """Removes what a process that was killed has left."""
        for path in self._leftovers():
            shutil.rmtree(path, ignore_errors=True)

    def _leftovers(self) -> Iterator[Path]:
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name.endswith(_PARTIAL):
                    yield path

    def _remove(self, path: Path) -> None:
        """Makes a snapshot incomplete at once, then removes its files."""
        partial = path.with_name(path.name + _PARTIAL)
        path.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def _save(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    try:
        with tf.device("CPU:0"):
            held = {name: tf.Variable(array) for name, array in arrays.items()}
            tf.train.CheckpointManager(
                tf.train.Checkpoint(**{_ARRAYS: held}),
                str(folder),
                max_to_keep=None,
                checkpoint_name=_ARRAYS,
            ).save()
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def _described(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
