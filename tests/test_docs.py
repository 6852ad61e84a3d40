"""The documentation is executed.

Every block of Python in README.md, BUILD.md and docs/ runs, in order, in one
process and one namespace per file, in an empty folder. A block below the
comment `<!-- no-run: reason -->` is only compiled. In blocks of shell, each
command of this project has to exist, with each of its flags; a command behind
`--` too.
"""

import configparser
import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "BUILD.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
)
TIMEOUT = 240
PYTHON = {"python", "py"}
SHELL = {"sh", "bash", "shell", "console"}
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[^`]*)$")
_NO_RUN = re.compile(r"^\s*<!--\s*no-run:\s*(?P<reason>\S.*?)\s*-->\s*$")
_SEPARATORS = {"&&", "||", ";", "|", "&"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a document.

    Attributes:
        language: The first word behind the fence, in lower case.
        line: Line of its first line of content, from 1.
        text: Its content, without the indentation of the fence.
        no_run: Why it is not run, or None.
    """

    language: str
    line: int
    text: str
    no_run: str | None = None


def blocks(text):
    """Lists the fenced blocks of a Markdown document."""
    found = []
    fence = None
    reason = None
    for number, line in enumerate(text.splitlines(), start=1):
        match = _FENCE.match(line)
        if fence is None:
            if match:
                fence, start, content = match, number + 1, []
            elif line.strip():
                comment = _NO_RUN.match(line)
                reason = comment and comment["reason"]
        elif line.strip() == fence["ticks"]:
            language = (fence["language"].split() or [""])[0].lower()
            body = "".join(f"{part}\n" for part in content)
            found.append(Block(language, start, body, reason))
            fence = reason = None
        else:
            indent = len(fence["indent"])
            content.append(line[indent:] if line[:indent].isspace() else line)
    if fence is not None:
        raise ValueError(
            "A block must end with the fence that began it. Received: a block "
            f"from line {start} to the end."
        )
    return found


def program(name, text):
    """Returns a program that runs the Python blocks of a document in turn.

    Lines keep their numbers, so that a traceback points into the document.
    """
    steps = [
        "import pathlib, sys",
        "namespace = {'__name__': '__main__'}",
        f"name = {str(ROOT / name)!r}",
    ]
    for block in blocks(text):
        if block.language not in PYTHON:
            continue
        source = "\n" * (block.line - 1) + block.text
        steps.append(f"code = compile({source!r}, name, 'exec')")
        if block.no_run is None:
            steps.append("exec(code, namespace)")
    return "\n".join(steps) + "\n"


def run_document(name, text, folder):
    """Runs the Python blocks of one document in an empty folder."""
    script = folder / "blocks.py"
    script.write_text(program(name, text))
    work = folder / "work"
    work.mkdir()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=work,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def commands(text):
    """Lists the commands in the shell blocks: pairs of line and words.

    In a console block only lines that begin with "$ " are commands.
    """
    found = []
    for block in blocks(text):
        if block.language not in SHELL:
            continue
        line, pending = block.line, ""
        for number, part in enumerate(block.text.splitlines(), block.line):
            if not pending:
                line = number
                if block.language == "console":
                    if not part.startswith("$ "):
                        continue
                    part = part[2:]
            pending += part
            if pending.endswith("\\"):
                pending = pending[:-1] + " "
                continue
            found += [(line, words) for words in _split(pending)]
            pending = ""
    return found


def _split(line):
    """Splits a line of shell into its simple commands, as lists of words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    simple = [[]]
    for word in lexer:
        if word in _SEPARATORS:
            simple.append([])
        elif simple[-1] or not re.match(r"[A-Za-z_]\w*=", word):
            simple[-1].append(word)
    return [words for words in simple if words]


def command_faults(words):
    """Says what does not exist of a command that is this project's own."""
    if "--" in words[1:]:
        place = words.index("--")
        inner = words[place + 1 :]
        return command_faults(words[:place]) + (inner and command_faults(inner))
    name, arguments = Path(words[0]).name, words[1:]
    if name == "make":
        return [
            f"make has no target {target}"
            for target in arguments
            if not target.startswith("-")
            and "=" not in target
            and target not in make_targets()
        ]
    if re.match(r"tfaccum\b", name):
        module = entry_points().get(name)
        if module is None:
            return [f"there is no command {name}"]
        return flag_faults(module, arguments)
    if re.match(r"python[\d.]*$", name) and arguments:
        if arguments[0] == "-m" and arguments[1:2]:
            module = arguments[1]
            if module.split(".")[0] != "tfaccum":
                return []
            if not module_file(module).exists():
                return [f"there is no module {module}"]
            return flag_faults(module, arguments[2:])
        script = Path(arguments[0])
        if script.suffix == ".py" and not (ROOT / script).exists():
            return [f"there is no file {script}"]
    return []


def flag_faults(module, arguments):
    """Lists the flags among the arguments that a module does not define."""
    names = [
        re.match(r"--?(\w+)", argument)[1]
        for argument in arguments
        if re.match(r"--?[A-Za-z]", argument)
    ]
    if not names or not module_file(module).exists():
        return []
    return [
        f"{module} has no flag --{name}"
        for name in names
        if name not in flags(module)
    ]


def module_file(module):
    """Returns the file of a module; of a package, that of its command."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def flags(module):
    """Returns the names of the flags of a module, read from its help."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--helpshort"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    found = flags_in_help(done.stdout)
    assert found, f"{module} --helpshort shows no flag:\n{done.stderr}"
    return found | {"help", "helpshort"}


def flags_in_help(text):
    """Reads the names of the flags out of a command's help."""
    found = set()
    pattern = r"^ {2}--(\[no\])?(\w+)(?=[=\s])"
    for negated, name in re.findall(pattern, text, re.MULTILINE):
        found |= {name, f"no{name}"} if negated else {name}
    return found


@functools.cache
def entry_points():
    """Returns the commands that the package installs, with their modules."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    text = parser["options.entry_points"]["console_scripts"]
    pairs = [line.split("=") for line in text.split("\n") if line.strip()]
    return {
        name.strip(): target.strip().partition(":")[0] for name, target in pairs
    }


@functools.cache
def make_targets():
    """Returns the targets of the Makefile."""
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


# --- The documents ---------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_run(name, tmp_path):
    text = (ROOT / name).read_text()
    if not any(block.language in PYTHON for block in blocks(text)):
        return
    done = run_document(name, text, tmp_path)
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_shell_blocks_name_commands_that_exist(name):
    faults = [
        f"{name}:{line}: {fault}"
        for line, words in commands((ROOT / name).read_text())
        for fault in command_faults(words)
    ]
    assert not faults, "\n".join(["", *faults])


# --- The reader of documents -----------------------------------------------

DOCUMENT = """\
Text with ```` ``` ```` inside.

```python
x = 1
```

<!-- no-run: needs two machines -->

```python
x = 2
```

1. In a list:

   ```py
   if x:
       y = x + 1
   ```

```sh
make test && FOO=1 tfaccum-train --experiment=a.py \\
    --epochs 3  # a remark
```

```console
$ make demo | tail -3
make nothing
```

~~~
"""


def test_blocks_are_found_with_language_line_and_reason():
    assert blocks(DOCUMENT) == [
        Block("python", 4, "x = 1\n"),
        Block("python", 10, "x = 2\n", "needs two machines"),
        Block("py", 16, "if x:\n    y = x + 1\n"),
        Block(
            "sh",
            21,
            "make test && FOO=1 tfaccum-train --experiment=a.py \\\n"
            "    --epochs 3  # a remark\n",
        ),
        Block("console", 26, "$ make demo | tail -3\nmake nothing\n"),
    ]


def test_a_block_without_end_is_an_error():
    with pytest.raises(ValueError, match="from line 2"):
        blocks("```python\nx = 1\n")


def test_commands_are_read_from_shell_blocks():
    assert commands(DOCUMENT) == [
        (21, ["make", "test"]),
        (21, ["tfaccum-train", "--experiment=a.py", "--epochs", "3"]),
        (26, ["make", "demo"]),
        (26, ["tail", "-3"]),
    ]


def test_blocks_share_a_namespace_and_a_no_run_block_is_not_run(tmp_path):
    text = DOCUMENT + "```python\nprint(x, y, __import__('os').listdir())\n```"
    done = run_document("README.md", text, tmp_path)
    assert (done.stdout, done.stderr) == ("1 2 []\n", "")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nx = 1\n\nraise KeyError\n```", "line 4, in <module>"),
        ("<!-- no-run: a -->\n```python\nx = = 1\n```", "SyntaxError"),
    ],
)
def test_a_block_that_fails_fails_with_its_line(tmp_path, text, error):
    done = run_document("README.md", text, tmp_path)
    assert done.returncode == 1 and error in done.stderr


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("make tset", "make has no target tset"),
        ("tfaccum-tarin --epochs=1", "there is no command tfaccum-tarin"),
        ("python -m tfaccum.nowhere", "there is no module tfaccum.nowhere"),
        (
            "tfaccum-train --epochs=1 --epoch=1",
            "tfaccum.train has no flag --epoch",
        ),
        (
            "tfaccum-launch --worker=2 -- tfaccum-train --epochs=1",
            "tfaccum.launch has no flag --worker",
        ),
        (
            "tfaccum-launch --workers=2 -- tfaccum-train --epoch=1",
            "tfaccum.train has no flag --epoch",
        ),
        (
            "python experiments/nowhere.py",
            "there is no file experiments/nowhere.py",
        ),
    ],
)
def test_a_command_that_does_not_exist_is_found(line, fault):
    assert command_faults(line.split()) == [fault]


@pytest.mark.parametrize(
    "line",
    [
        "make test PYTHON=python3.11",
        "make -j1 test",
        ".venv/bin/tfaccum-train",
        "python -m pytest -k A1",
        "python3.11 -m venv .venv",
        "git clone somewhere",
    ],
)
def test_a_command_that_exists_is_no_fault(line):
    assert command_faults(line.split()) == []


def test_flags_are_read_from_the_help():
    text = (
        "usage: tfaccum-x [flags]\n  --[no]jit                 compile\n"
        "  --verbosity=N             how much, see\n"
        "                            --epochs: it is\n"
        "  --precision=float32|mixed\n"
    )
    assert flags_in_help(text) == {"jit", "nojit", "verbosity", "precision"}


def test_the_flags_of_both_commands_are_found():
    assert {"epochs", "nojit", "worker_hosts"} <= flags("tfaccum.train")
    assert {"workers", "grace"} <= flags("tfaccum.launch")


def test_a_flag_that_does_not_exist_is_found(monkeypatch):
    known = {"epochs", "jit", "nojit"}
    monkeypatch.setattr(sys.modules[__name__], "flags", lambda module: known)
    arguments = ["--epoch=3", "--epochs", "3", "-5", "--nojit"]
    assert flag_faults("tfaccum.batching", arguments) == [
        "tfaccum.batching has no flag --epoch"
    ]
