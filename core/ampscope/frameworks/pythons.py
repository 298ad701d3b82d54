"""Which Python has a framework: the one that an environment variable names, the environment that
`ampscope frameworks install` made, or the one that runs ampscope.

A child started with it finds the package `ampscope` through PYTHONPATH, so the framework's
environment needs NumPy and nothing of torch's. The folder named there holds a link to the package
and nothing else: an installed package lies in site-packages, where its own NumPy would come first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ampscope
from ampscope.errors import BadInput
from ampscope.frameworks.names import FRAMEWORKS, Framework

ANSWER_S = 120.0  # TensorFlow's first import, cold, on a slow disk
PACKAGE = Path(ampscope.__file__).resolve().parent


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
    """The path of a Python that is named as in a shell; a name that leads nowhere as it is. Links
    stay: what they lead to knows nothing of the virtual environment."""
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
    framework = FRAMEWORKS[name]
    found = find_python(framework)
    if found is None:
        raise BadInput(
            f"{framework.title} is not installed. Run `ampscope frameworks install {name}`, or let "
            f"{framework.variable} name a Python that has it."
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
    return {
        **base,
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": base.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def run_in(executable: str, code: str, timeout_s: float = ANSWER_S) -> tuple[int, str, str]:
    """(status, output, errors) of a short program under that Python; status -1000 when it did not
    end in time or could not be started."""
    try:
        done = subprocess.run(
            [executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=with_package(dict(os.environ)),
        )
    except subprocess.TimeoutExpired:
        return -1000, "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return -1000, "", error.strerror or str(error)
    return done.returncode, done.stdout, done.stderr
