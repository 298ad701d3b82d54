"""Environments of their own for Keras and Paddle: made, and looked at.

`install` makes a virtual environment with the framework, NumPy and numba; ampscope itself is
found through PYTHONPATH. `check` imports the framework there, so that a crash takes no more with
it than that process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ampscope.errors import AmpscopeError
from ampscope.ext.frameworks import FRAMEWORKS
from ampscope.extensions import Framework
from ampscope.pythons import environment_python, find_python, last_line, run_in

EXTRA = ("numba>=0.61",)  # counts exponents a hundred times as fast as NumPy does
_ASK = """
import json, importlib, warnings
warnings.simplefilter("ignore")
found = {{}}
for name in {names!r}:
    try:
        found[name] = importlib.import_module(name).__version__
    except Exception as error:
        found[name] = "!" + type(error).__name__ + ": " + str(error)[:200]
print("ampscope:" + json.dumps(found))
"""
_ASKED = {"keras": ("tensorflow", "keras", "numpy"), "paddle": ("paddle", "numpy")}


@dataclass(frozen=True, slots=True)
class Check:
    """What was found of one framework."""

    framework: Framework
    works: bool
    sentence: str
    python: str = ""


def check(name: str) -> Check:
    """Import the framework in its Python, and say in one sentence what came of it."""
    framework = FRAMEWORKS[name]
    found = find_python(framework)
    if found is None:
        return Check(
            framework,
            False,
            f"{framework.title} is not installed. Run: ampscope frameworks install {name}",
        )
    where = f"{found.executable} ({found.reason})"
    status, out, err = run_in(found.executable, "-c", _ASK.format(names=_ASKED[name]))
    if status != 0:
        return Check(framework, False, f"{framework.title}: {_death(status, err)} in {where}.")
    versions = _answer(out)
    broken = {n: v for n, v in versions.items() if v.startswith("!")}
    if broken or not versions:
        said = "; ".join(f"{n}: {v[1:]}" for n, v in broken.items()) or "no answer"
        return Check(framework, False, f"{framework.title} cannot be imported by {where}: {said}.")
    if problem := _unfit(framework, versions):
        return Check(framework, False, f"{problem} It was found in {where}.", found.executable)
    said = ", ".join(f"{n} {v}" for n, v in versions.items())
    return Check(framework, True, f"{framework.title} works: {said}; {where}.", found.executable)


def install(name: str, say: Callable[[str], None]) -> Check:
    """Make the environment, or bring it up to date. Raises AmpscopeError when pip fails."""
    framework = FRAMEWORKS[name]
    python = environment_python(framework)
    if not python.is_file():
        say(f"Making {python.parent.parent}")
        _call([sys.executable, "-m", "venv", str(python.parent.parent)], "a virtual environment")
    wanted = [*framework.requirements, *EXTRA]
    say(f"Installing {', '.join(wanted)}")
    _call([str(python), "-m", "pip", "install", "--quiet", *wanted], framework.title)
    return check(name)


def _call(command: list[str], what: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = last_line(done.stderr)[:300] or f"status {done.returncode}"
        raise AmpscopeError(f"Could not install {what}: {said}")


def _death(status: int, err: str) -> str:
    if status == -1000:
        return last_line(err) or "it did not start"
    if status < 0:
        return f"importing it crashed the process ({signal.Signals(-status).name})"
    return last_line(err)[:200] or f"it ended with status {status}"


def _answer(out: str) -> dict[str, str]:
    for line in out.splitlines():
        if line.startswith("ampscope:"):
            return {str(k): str(v) for k, v in json.loads(line.removeprefix("ampscope:")).items()}
    return {}


def _unfit(framework: Framework, versions: dict[str, str]) -> str:
    """A version that is known not to work, in one sentence."""
    numpy = tuple(int(part) for part in versions.get("numpy", "0.0").split(".")[:2])
    if framework.name == "paddle" and numpy >= (2, 4):
        return (
            f"Paddle with NumPy {versions['numpy']} fails at a scaler's first overflow "
            '(TypeError): pip install "numpy<2.4".'
        )
    major = versions.get("keras", "3").partition(".")[0]
    if framework.name == "keras" and major != "3":
        return f"Keras {versions['keras']} is not Keras 3, which the adapter watches."
    return ""
