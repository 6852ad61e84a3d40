"""The datasets that come with the package and need no network.

Each is an ordinary TFDS builder in a module of its own. Importing the module
registers the builder, so that `tfds.load` finds it by name too.
"""

import importlib

BUNDLED = {"digits": "tfaccum.datasets.digits"}


def register(name: str) -> bool:
    """Registers the bundled builder that `name` asks for, if there is one.

    Args:
        name: A TFDS name, with or without version or configuration, for
            instance `"digits"` or `"digits:1.0.0"`.

    Returns:
        True when `name` is a dataset of this package, which TFDS then knows
        and can prepare without a network.
    """
    module = BUNDLED.get(name.split(":")[0].split("/")[0])
    if module is None:
        return False
    importlib.import_module(module)
    return True
