"""Which versions of TensorFlow and Keras are supported.

Older ones lack what the law needs: losses that say what they divide by,
activity regularizers that are means over examples, and metrics that are summed
when read. Imports only the standard library.
"""

import importlib.metadata
import os

OLDEST = {"tensorflow": (2, 16), "keras": (3, 14)}


def check() -> None:
    """Refuses versions and backends that cannot work.

    Raises:
        ImportError: names what was found and what to install.
    """
    for package, oldest in OLDEST.items():
        found = installed(package)
        if found is not None and _numbers(found) < oldest:
            wanted = ".".join(map(str, oldest))
            raise ImportError(
                f"tfaccum needs {package} {wanted} or newer. Received: "
                f"{package} {found}. Install it with: pip install "
                f"'{package}>={wanted}'"
            )
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise ImportError(
            "tfaccum needs Keras on TensorFlow. Received: "
            f"KERAS_BACKEND={backend!r}. Unset it, or set it to 'tensorflow'."
        )


def installed(package: str) -> str | None:
    """The version of a package; builds such as tensorflow-cpu count too."""
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 16) of "2.16.1"."""
    parts = version.split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
