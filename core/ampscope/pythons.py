"""Which framework a script trains with, and which Python has it: the one that an environment
variable names, the environment that `ampscope frameworks install` made, or the one that runs
ampscope; for PyTorch also one that the operator of a dashboard names.

A child started with it finds the package `ampscope` through PYTHONPATH, so the framework's
environment needs NumPy and nothing of torch's. The folder named there holds a link to the package
and nothing else: an installed package lies in site-packages, where its own NumPy would come first.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ampscope
from ampscope import extensions
from ampscope.errors import BadInput
from ampscope.extensions import Framework

ANSWER_S = 120.0  # TensorFlow's first import, cold, on a slow disk
PACKAGE = Path(ampscope.__file__).resolve().parent
TORCH = "torch"  # in RunSpec.framework and Machine.framework
MAX_FILES = 200  # of the script's own neighbours that its imports lead to
_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def framework_of(script: Path) -> str:
    """ "torch", "keras" or "paddle", read from the imports of its text; nothing is run. "torch"
    also for a script that imports none of them.

    A script that imports torch is PyTorch's, whatever else it imports: Keras runs on torch too, and
    its own text then says so. What is imported only where it is there (``try: import torch``,
    ``except ImportError``), as helpers that seed every framework do, counts where no other import
    decides."""
    script = script.resolve()
    for with_tried in (False, True):
        if name := _named(_modules(script, with_tried)):
            return name
    return TORCH


def _named(modules: set[str]) -> str:
    if "torch" in modules:
        return TORCH
    return next((f.name for f in extensions.frameworks().values() if modules & set(f.modules)), "")


def _modules(script: Path, with_tried: bool) -> set[str]:
    """Top-level names that the script imports, and the files of its folder that it leads to."""
    found: set[str] = set()
    seen: set[Path] = set()
    waiting = [script]
    while waiting and len(seen) < MAX_FILES:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for folder, dotted in _imports(file, with_tried):
            parts = dotted.split(".")
            if folder is None:
                found.add(parts[0])
            # The script's folder is first on the path of imports when it runs.
            waiting += _files(folder or script.parent, parts)
    return found


def _imports(file: Path, with_tried: bool) -> Iterator[tuple[Path | None, str]]:
    """(folder that a relative import starts from, dotted name) of what ``file`` imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in _nodes(tree, with_tried):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[min(node.level, len(file.parents)) - 1] if node.level else None
            before = f"{node.module}." if node.module else ""
            yield from ((folder, before + alias.name) for alias in node.names)


def _nodes(tree: ast.AST, with_tried: bool) -> Iterator[ast.AST]:
    """All below ``tree``; without what is imported only where it is there."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.Try) and not with_tried and any(map(_catches, node.handlers)):
            waiting += node.finalbody
        else:
            waiting += ast.iter_child_nodes(node)


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a failed import would end there."""
    if handler.type is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in _CAUGHT for n in ast.walk(handler.type))


def _files(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Where the text of ``a``, ``a.b`` and ``a.b.c`` may lie; a package needs no __init__.py."""
    for part in parts:
        yield folder / f"{part}.py"
        folder = folder / part
        yield folder / "__init__.py"


def framework(name: str) -> Framework:
    """The framework of that name. Raises BadInput for another."""
    known = extensions.frameworks()
    if name not in known:
        raise BadInput(f"There is no framework {name!r}. Use {', '.join((TORCH, *known))}.")
    return known[name]


def check_control(name: str, control: str) -> None:
    """Raises BadInput where the framework does not have the control or intervention."""
    if name != TORCH:
        extensions.load(f"{framework(name).package}.checks:check_control")(control)


@dataclass(frozen=True, slots=True)
class FoundPython:
    """A Python that may have the framework, and why it was chosen."""

    executable: str
    reason: str  # "AMPSCOPE_KERAS_PYTHON", "ampscope frameworks install", "this Python"


def environments_folder() -> Path:
    """Where `ampscope frameworks install` makes its environments."""
    named = os.environ.get("AMPSCOPE_FRAMEWORKS")
    return Path(named) if named else Path.home() / ".local" / "share" / "ampscope" / "frameworks"


def environment_python(framework: Framework) -> Path:
    """The Python of the environment that `install` makes (it need not exist)."""
    scripts = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return environments_folder() / framework.name / scripts


def find_python(framework: Framework) -> FoundPython | None:
    """The first that is there; None when no Python is known to have the framework."""
    named = os.environ.get(framework.variable)
    if named:
        return FoundPython(_located(named), framework.variable)
    made = environment_python(framework)
    if made.is_file():
        return FoundPython(str(made), "ampscope frameworks install")
    if importlib.util.find_spec(framework.probe_module) is not None:
        return FoundPython(sys.executable, "this Python")
    return None


def _located(named: str) -> str:
    """The path of a Python that is named as in a shell; a name that is not found is returned
    unchanged. Links are not resolved: their target does not know the virtual environment."""
    found = shutil.which(os.path.expanduser(named))
    return os.path.abspath(found) if found else named


def why_missing(name: str) -> str:
    """Why no Python can be started for a framework, in one sentence; "" where one can."""
    try:
        python_for(name)
    except BadInput as error:
        return str(error)
    return ""


def python_for(name: str) -> str:
    """The Python for a framework. Raises BadInput with what to do when there is none."""
    wanted = framework(name)
    found = find_python(wanted)
    if found is None:
        raise BadInput(
            f"{wanted.title} is not installed. Run `ampscope frameworks install {name}`, or let "
            f"{wanted.variable} name a Python that has it."
        )
    if not Path(found.executable).is_file():
        raise BadInput(f"{found.reason} names {found.executable}, and there is no such file.")
    return found.executable


def import_folder() -> Path:
    """A folder from which this package can be imported, and nothing else. It is kept: a child
    imports late, and may outlive the process that started it."""
    name = hashlib.sha256(os.fsencode(PACKAGE)).hexdigest()[:12]  # one for each installation
    try:
        return _linked(environments_folder() / f"import-{name}")
    except OSError:  # a home that cannot be written
        return _temporary()


@functools.cache
def _temporary() -> Path:
    return _linked(Path(tempfile.mkdtemp(prefix="ampscope-import-")))


def _linked(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / PACKAGE.name
    try:
        link.symlink_to(PACKAGE, target_is_directory=True)
    except FileExistsError:
        if link.resolve() != PACKAGE:
            raise
    return folder


def with_package(base: dict[str, str]) -> dict[str, str]:
    """The environment ``base`` with this package first on the path of a child's imports."""
    before = base.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(import_folder()), before)))
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **base, "PYTHONPATH": path}


def run_in(
    executable: str, *arguments: str, timeout_s: float = ANSWER_S, **variables: str
) -> tuple[int, str, str]:
    """(status, output, errors) of that Python with ``variables`` in its environment; status -1000
    when it did not end in time or could not be started."""
    try:
        done = subprocess.run(
            [executable, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=with_package({**os.environ, **variables}),
        )
    except subprocess.TimeoutExpired:
        return -1000, "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return -1000, "", error.strerror or str(error)
    return done.returncode, done.stdout, done.stderr


def last_line(text: str) -> str:
    """What an error ended with."""
    return text.strip().rpartition("\n")[2]


_NAME = re.compile(r"\w[\w.+ -]{0,39}")
_LACKS = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d, and ampscope needs 3.11" % sys.version_info[:2])
import importlib.util
try:
    import ampscope.cli.diagnose
    import ampscope.cli.main
except ImportError as error:
    sys.exit("it lacks what ampscope needs (%s)" % error)
if importlib.util.find_spec("torch") is None:
    sys.exit("it lacks torch")
"""


@dataclass(frozen=True, slots=True)
class NamedPython:
    """A Python that the operator of a dashboard names, for scripts that need an environment of
    their own. A browser chooses one by its name and never names a path."""

    name: str
    executable: str


def named_python(text: str) -> NamedPython:
    """``NAME=PATH``, where the path is that of a Python or of its virtual environment.

    Raises BadInput for another form, and where there is no such Python.
    """
    name, equals, path = text.partition("=")
    if not (equals and path and _NAME.fullmatch(name)):
        raise BadInput(
            f"--python {text!r} is not NAME=PATH, such as nightly=/opt/nightly/bin/python. A name "
            "has at most 40 letters, digits, spaces and . + - _."
        )
    inside = Path(path).expanduser() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    executable = _located(str(inside) if inside.is_file() else path)
    if not (os.path.isfile(executable) and os.access(executable, os.X_OK)):
        raise BadInput(f"--python {name}: {path} is neither a Python nor a virtual environment.")
    return NamedPython(name, executable)


def check_diagnoses(python: NamedPython) -> None:
    """Raises BadInput, with what is missing, for a Python that can diagnose no script of PyTorch.

    It uses the dashboard's own ampscope, which it finds through PYTHONPATH.
    """
    status, _, err = run_in(python.executable, "-P", "-c", _LACKS)
    if status != 0:
        is_old = "unknown option -P" in err.lower()
        why = "it is older than Python 3.11" if is_old else last_line(err)
        raise BadInput(
            f"--python {python.name}: {python.executable} cannot diagnose: "
            f"{why or f'it ended with status {status}'}. Install ampscope there, or leave it out."
        )
