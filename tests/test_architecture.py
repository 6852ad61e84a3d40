"""Rules that hold over the whole library, read from its source.

Every check is a function from source text to a list of faults, so that the
tests at the end of this file can show each one a fault that it must find.
"""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "tfaccum"

# Imports point one way: a room imports from its own row or from one above.
# Inside a row, no two rooms may import each other.
LAYERS = (
    ("batching", "files", "schedule", "versions"),
    ("cluster", "rendezvous", "strategy"),
    (
        "adama",
        "adasum",
        "agreement",
        "fingerprints",
        "accumulator",
        "reduction",
        "loss_scale",
        "group_loss_scale",
        "update",
        "exponents",
        "sparse",
    ),
    (
        "feeding",
        "micro_batches",
        "micro_step",
        "arrays",
        "layers",
        "replay",
    ),
    ("window", "run"),
    ("auto_micro_batch",),
    ("functions",),
    ("evaluation",),
    ("loop",),
    ("model",),
    (
        "data",
        "datasets",
        "checkpoint",
        "snapshots",
        "state",
        "callbacks",
        "gradient_report",
        "boost",
    ),
    ("train", "launch"),
)
RANKS = {room: rank for rank, row in enumerate(LAYERS) for room in row}
TOP = len(LAYERS) - 1
# Imported by any room, imports no room, and alone touches private names.
PRIVATE_ROOM = "keras_private"
# Rooms that need nothing but Python.
STANDARD_LIBRARY_ONLY = {
    "batching",
    "cluster",
    "files",
    "rendezvous",
    "schedule",
    "versions",
}
# Never imported by the library.
OUTSIDE = {"experiments", "benchmarks", "tests"}
# Modules that are private to Keras and TensorFlow.
PRIVATE_MODULES = ("keras.src", "tensorflow.python")
# Files with errors that do not show what was received. It may only shrink.
ERRORS_WITHOUT_RECEIVED: set[str] = set()
FORBIDDEN_WORDS = re.compile(
    r"(?<![a-z])(mini_steps?|gradient_steps?|towers?|effective[ _-]batch)",
    re.IGNORECASE,
)


def library():
    """Returns the source of every file of the library, by module name."""
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        sources[".".join(parts)] = path.read_text()
    return sources


def is_package(module):
    """Whether a module of the library is a folder."""
    return (ROOT / module.replace(".", "/")).is_dir()


def room_of(module):
    """Returns the room of a module: the part after "tfaccum."."""
    return module.partition(".")[2].partition(".")[0]


def imports(source, module, package=False):
    """Lists what a module imports, at any depth: pairs of line and name.

    `from a import b` counts as "a.b", whether b is a module or not.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if package else node.level
                parents = module.split(".")[: -up or None]
                base = ".".join([*parents, base]).rstrip(".")
            found += [
                (node.lineno, f"{base}.{alias.name}") for alias in node.names
            ]
    return found


def import_faults(source, module, package=False):
    """Lists the imports of one module that point the wrong way."""
    room = room_of(module)
    faults = []
    if room and room not in RANKS and room != PRIVATE_ROOM:
        faults.append(f"{module}: {room} has no place in LAYERS")
    for line, name in imports(source, module, package):
        top = name.partition(".")[0]
        where = f"{module}:{line}: imports {name}"
        if top in OUTSIDE:
            faults.append(f"{where}, which is outside the library")
        if room in STANDARD_LIBRARY_ONLY and (
            top not in sys.stdlib_module_names
            and not (top == PACKAGE and room_of(name) in STANDARD_LIBRARY_ONLY)
        ):
            faults.append(f"{where}, which is not the standard library")
        if top == PACKAGE and room:
            faults += [f"{where}, {why}" for why in _wrong_way(room, name)]
    return faults


def _wrong_way(room, name):
    """Says what is wrong when `room` imports `name` of this library."""
    other = room_of(name)
    if room == PRIVATE_ROOM:
        yield "but imports nothing of the library"
    elif other in (room, PRIVATE_ROOM):
        return
    elif other not in RANKS:
        if RANKS.get(room) != TOP:
            yield "a name of the whole package: import it from its room"
    elif RANKS[other] > RANKS.get(room, TOP):
        yield "which is above it"


def import_cycle(sources):
    """Returns modules that import each other in a circle, or nothing."""
    graph = {
        module: {
            known
            for _, name in imports(source, module, is_package(module))
            for known in (name, name.rpartition(".")[0])
            if known in sources and known not in (module, PACKAGE)
        }
        for module, source in sources.items()
    }
    done = set()

    def visit(module, path):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module]):
            circle = visit(other, [*path, module])
            if circle:
                return circle
        done.add(module)
        return []

    for module in sorted(graph):
        circle = visit(module, [])
        if circle:
            return circle
    return []


def is_private(name):
    """Whether a name has one leading underscore, and is not a dunder."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_faults(source, module):
    """Lists where a module reaches behind another package's underscore."""
    faults = []
    for line, name in imports(source, module):
        if f"{name}.".startswith(tuple(f"{m}." for m in PRIVATE_MODULES)):
            faults.append(f"{module}:{line}: imports {name}")
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and (
                node.value.id in ("self", "cls")
            )
            name = None if own else node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            called = getattr(node.func, "id", None)
            value = getattr(node.args[1], "value", None)
            if called in ("getattr", "setattr", "hasattr", "delattr"):
                name = value if isinstance(value, str) else None
        if name and is_private(name):
            faults.append(f"{module}:{node.lineno}: reaches for {name}")
    return faults


def foreign_self_faults(sources):
    """Lists private attributes of `self` that the library never defines.

    A class that inherits from Keras reads `self._x` of Keras just as easily
    as its own.
    """
    defined = set()
    reads = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                elif getattr(node.value, "id", None) in ("self", "cls"):
                    reads.append((node.attr, f"{module}:{node.lineno}"))
    return [
        f"{where}: reads self.{name}, which tfaccum does not define"
        for name, where in reads
        if is_private(name) and name not in defined
    ]


def assert_faults(source, module):
    """Lists `assert` statements."""
    return [
        f"{module}:{node.lineno}: assert"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
    ]


def error_faults(source, module):
    """Lists ValueErrors and TypeErrors whose text shows no received value.

    A message that is not written at the `raise` cannot be judged and passes,
    and so does an error that the same function catches.
    """
    faults = []
    tree = ast.parse(source)
    caught = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.Try) and block.handlers
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        call = isinstance(node.exc, ast.Call)
        kind = node.exc.func if call else node.exc
        name = kind.id if isinstance(kind, ast.Name) else ""
        if name not in ("ValueError", "TypeError"):
            continue
        if not call and node in caught:
            continue
        texts = [
            part.value
            for argument in (node.exc.args if call else [])
            for part in ast.walk(argument)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if (texts or not call or not node.exc.args) and not any(
            "Received" in text for text in texts
        ):
            faults.append(f"{module}:{node.lineno}: {name} without Received")
    return faults


def docstring_faults(source, module):
    """Lists public names without a docstring: module, classes, functions."""
    tree = ast.parse(source)
    faults = []
    if not ast.get_docstring(tree):
        faults.append(f"{module}:1: module without a docstring")
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

    def visit(parent, prefix):
        for node in parent.body:
            if not isinstance(node, kinds) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and not _is_setter(node):
                faults.append(
                    f"{module}:{node.lineno}: {prefix}{node.name} without a "
                    "docstring"
                )
            if isinstance(node, ast.ClassDef):
                visit(node, f"{prefix}{node.name}.")

    visit(tree, "")
    return faults


def _is_setter(node):
    """Whether a function is the setter of a property, or an overload."""
    return any(
        getattr(decorator, "attr", getattr(decorator, "id", ""))
        in ("setter", "deleter", "overload")
        for decorator in node.decorator_list
    )


def word_faults(text, name):
    """Lists words that the project has another word for."""
    return [
        f"{name}:{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in FORBIDDEN_WORDS.finditer(line)
    ]


def over_library(check):
    """Gathers the faults of one check over all modules."""
    return [
        fault
        for module, source in library().items()
        for fault in check(source, module)
    ]


def lines(faults):
    """Writes faults one to a line, below pytest's own."""
    return "\n".join(["", *faults])


# --- The library -----------------------------------------------------------


def test_imports_point_one_way():
    faults = over_library(
        lambda source, module: import_faults(source, module, is_package(module))
    )
    assert not faults, lines(faults)


def test_no_module_imports_itself_in_a_circle():
    assert import_cycle(library()) == []


def test_private_names_are_touched_in_one_file_only():
    faults = [
        fault
        for module, source in library().items()
        if room_of(module) != PRIVATE_ROOM
        for fault in private_faults(source, module)
    ]
    assert not faults, lines(faults)


def test_no_private_attribute_is_inherited():
    faults = foreign_self_faults(library())
    assert not faults, lines(faults)


def test_no_assert_in_the_library():
    faults = over_library(assert_faults)
    assert not faults, lines(faults)


def test_no_file_is_called_utils():
    assert list((ROOT / PACKAGE).rglob("util*.py")) == []


def test_errors_say_what_was_received():
    faults = over_library(error_faults)
    files = {fault.partition(":")[0] for fault in faults}
    # Equal, not contained: a file that has been mended leaves the list.
    assert files == ERRORS_WITHOUT_RECEIVED, lines(faults)


def test_public_names_have_docstrings():
    faults = over_library(docstring_faults)
    assert not faults, lines(faults)


def test_names_of_the_package_are_there_and_documented():
    package = importlib.import_module(PACKAGE)
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.ismodule(value) or callable(value):
            assert inspect.getdoc(value), name


def test_one_word_per_idea():
    folders = (PACKAGE, "docs", "experiments", "benchmarks")
    paths = list(ROOT.glob("*.md"))
    for folder in folders:
        for suffix in ("py", "md"):
            paths += (ROOT / folder).rglob(f"*.{suffix}")
    faults = []
    for path in sorted(paths):
        faults += word_faults(path.read_text(), path.relative_to(ROOT))
    assert not faults, lines(faults)


# --- The checks find what they are for -------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tfaccum.strategy", "from tfaccum import model"),
        ("tfaccum.strategy", "from tfaccum.model import Model"),
        ("tfaccum.strategy", "import tfaccum.model"),
        ("tfaccum.strategy", "def f():\n    from tfaccum import train"),
        ("tfaccum.strategy", "from . import model"),
        ("tfaccum.strategy", "from .model import Model"),
        ("tfaccum.boost.freeze", "from ..train import main"),
        ("tfaccum.model", "from tfaccum import Model"),
        ("tfaccum.model", "import tfaccum"),
        ("tfaccum.keras_private", "from tfaccum import batching"),
        ("tfaccum.batching", "import numpy as np"),
        ("tfaccum.rendezvous", "from tfaccum import keras_private"),
        ("tfaccum.model", "import experiments.digits_cnn"),
        ("tfaccum.nowhere", ""),
    ],
)
def test_an_import_the_wrong_way_is_found(module, source):
    assert len(import_faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tfaccum.model", "from tfaccum import batching, keras_private"),
        ("tfaccum.model", "from tfaccum.window import Window"),
        ("tfaccum.model", "from .window import Window"),
        ("tfaccum.model", "import keras\nimport numpy"),
        ("tfaccum.accumulator", "from tfaccum import reduction"),
        ("tfaccum.datasets.digits", "from tfaccum.datasets import source"),
        ("tfaccum.train", "import tfaccum"),
        ("tfaccum.batching", "import dataclasses\nimport collections.abc"),
        ("tfaccum.rendezvous", "from tfaccum.cluster import Cluster"),
        ("tfaccum", "from tfaccum.model import Model"),
    ],
)
def test_an_import_the_right_way_is_no_fault(module, source):
    assert import_faults(source, module) == []


def test_relative_imports_of_a_package_start_in_it():
    source = "from . import freeze\nfrom .. import model"
    assert imports(source, "tfaccum.boost", package=True) == [
        (1, "tfaccum.boost.freeze"),
        (2, "tfaccum.model"),
    ]


def test_a_circle_is_found():
    sources = {
        "tfaccum.a": "from tfaccum import b",
        "tfaccum.b": "import tfaccum.c",
        "tfaccum.c": "def f():\n    from tfaccum.a import x",
    }
    assert import_cycle(sources) == ["tfaccum.a", "tfaccum.b", "tfaccum.c"]
    sources["tfaccum.c"] = ""
    assert import_cycle(sources) == []


@pytest.mark.parametrize(
    "source",
    [
        "from keras.src import losses",
        "from keras import src",
        "import keras.src.losses.loss",
        "from tensorflow.python.distribute import values",
        "variable._value",
        "self.optimizer._apply()",
        "super()._build()",
        "getattr(model, '_losses')",
        "setattr(model, '_losses', 1)",
    ],
)
def test_a_private_name_is_found(source):
    assert len(private_faults(source, "m")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import keras\nimport tensorflow as tf",
        "self._sums = cls._sums",
        "model.__dict__",
        "_helper(1)",
        "getattr(model, 'name')",
    ],
)
def test_a_public_name_is_no_fault(source):
    assert private_faults(source, "m") == []


def test_an_inherited_private_attribute_is_found():
    good = "class A:\n  _z = 1\n  def _y(self):\n    self._x = self._z"
    bad = "class B:\n  def f(self):\n    return self._x, self._y, self._loss"
    assert foreign_self_faults({"good": good, "bad": bad}) == [
        "bad:3: reads self._loss, which tfaccum does not define"
    ]


def test_an_assert_is_found():
    assert assert_faults("def f(x):\n    assert x", "m") == ["m:2: assert"]
    assert assert_faults("check(x)", "m") == []


@pytest.mark.parametrize(
    ("source", "is_fault"),
    [
        ("raise ValueError", True),
        ("raise ValueError()", True),
        ("try:\n  f()\nexcept ValueError:\n  raise ValueError", True),
        ("try:\n  raise ValueError\nexcept ValueError:\n  f()", False),
        ("raise TypeError('wrong')", True),
        ("raise ValueError(f'wrong {x}')", True),
        ("raise ValueError('wrong ' + x)", True),
        ("raise ValueError(f'wrong. Received: x={x}')", False),
        ("raise ValueError('wrong. ' f'Received: x={x}')", False),
        ("raise ValueError(message(x))", False),
        ("raise RuntimeError('wrong')", False),
        ("raise", False),
    ],
)
def test_an_error_without_the_value_is_found(source, is_fault):
    assert bool(error_faults(source, "m")) == is_fault


def test_a_missing_docstring_is_found():
    source = (
        "class A:\n  def f(self): pass\n  def _g(self): pass\n"
        "  @f.setter\n  def f(self, x): pass\n"
        "def h():\n  def inner(): pass\n"
        "def _i(): pass\n"
    )
    assert [
        fault.split(": ")[1] for fault in docstring_faults(source, "m")
    ] == [
        "module without a docstring",
        "A without a docstring",
        "A.f without a docstring",
        "h without a docstring",
    ]
    documented = '"""M."""\nclass A:\n  """A."""\n  def f(self):\n    """F."""'
    assert docstring_faults(documented, "m") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the mini_step", 1),
        ("gradient_step=3", 1),
        ("gradient_accumulation_steps=3", 0),
        ("loss of a Tower, two towers", 2),
        ("the effective batch size", 1),
        ("effective-batch", 1),
        ("a micro-step of the window", 0),
    ],
)
def test_a_word_with_another_word_for_it_is_found(text, words):
    assert len(word_faults(text, "m")) == words


def test_layers_name_each_room_once():
    assert len(RANKS) == sum(map(len, LAYERS))
    assert not set(RANKS) & {PRIVATE_ROOM, *OUTSIDE}
