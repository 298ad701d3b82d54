"""The one door between the engine and its extensions.

An extension is a package below ``ampscope.ext``. Its ``__init__.py`` holds one :class:`Extension`,
which names what it adds; the command line, the dashboard and the launcher read that, and load a
part of it when it is asked for. The engine imports no extension (the contract "fence"), and works
without any: a folder that is deleted takes its commands, options and pages with it.

Everything that is named here is written "module:object", as entry points are:

    >>> commands()["preflight"]
    'ampscope.ext.preflight.cli:preflight'
    >>> load(commands()["preflight"])
    <Command preflight>
"""

from __future__ import annotations

import functools
import importlib
import operator
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "ampscope.ext"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the dashboard: ``pages/NAME.py``, which imports what it shows from ``app.ext``, or
    what ``draw`` names."""

    name: str
    title: str
    icon: str  # of Material Symbols
    within: str  # the section whose pages lead to it
    in_sidebar: bool = False
    of_run: bool = False  # it shows a run: the pages of a run with steps lead to it
    draw: str = ""  # a function that draws it, without a file in pages/
    for_teacher: bool = False  # in the sidebar of a class's teacher alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework beside PyTorch: what it is called, how it is found and installed. ``package`` has
    what runs it: the processes ``child`` (a probe) and ``server`` (the runs of a script), and in
    ``checks`` what can be asked of it."""

    name: str  # the word of options and records
    title: str
    modules: tuple[str, ...]  # top-level imports by which a script is known
    probe_module: str  # what a Python must be able to import
    requirements: tuple[str, ...]  # for pip
    variable: str  # environment variable that names a Python
    package: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of measurement: what a run does that records no training. :mod:`ampscope.measurements`
    describes the engine's own in the same way."""

    name: str  # RunSpec.kind, one of records.MEASUREMENT_KINDS
    # Of (spec, device, writer, is_cancelled), in a child process: one sentence on what could not be
    # measured, or nothing.
    measure: str
    title: str = ""  # of a run that has no label; {what} is its workload and size
    titled: str = ""  # instead of that, a function of the spec
    check: str = ""  # of the spec, before a child is started, without torch; raises BadInput
    page: str = ""  # the name of the page that shows its runs
    told: str  # of (run, results): the title of its report, and what was measured as blocks
    gaps: str = ""  # of (run, results): what its report does not show, and why, as pairs
    least_precisions: int = 0  # of a kind that measures several; 0 for one alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What one extension adds to the engine."""

    docs: str  # its page of documentation
    needs: tuple[str, ...] = ()  # other extensions, without which it is not there either
    commands: Mapping[str, str] = field(default_factory=dict)  # of `ampscope`, to click commands
    pages: tuple[Page, ...] | str = ()  # or what makes them, where that takes time
    home_door: str = ""  # draws a way in on Home: of whether nothing is recorded yet
    class_scripts: str = ""  # a folder (Path) whose scripts every member of a class may see
    # What `diagnose` writes its result as, by the option's name: functions of a DiagnosisResult to
    # the file's text.
    documents: Mapping[str, str] = field(default_factory=dict)
    # Where `diagnose --on` runs: subclasses of launcher.script_runs.ScriptRuns, of (spec, store,
    # engine).
    job_engines: Mapping[str, str] = field(default_factory=dict)
    frameworks: tuple[Framework, ...] = ()
    workloads: Mapping[str, str] = field(default_factory=dict)  # functions of (name, seed)
    kinds: tuple[Kind, ...] = ()
    # Makes a script find a CUDA device: from a DeviceProfile a context manager of a SimulatedDevice
    # (both in policy.device_profiles).
    simulated_device: str = ""
    codes: str = (
        ""  # what `explain` knows beside the causes: a mapping of name to causes.StableCode
    )


@functools.cache
def all_extensions() -> dict[str, Extension]:
    """Folder below ``ampscope.ext`` -> its extension; empty where the folder is not there."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return {}
    found = {
        one.name: importlib.import_module(f"{PACKAGE}.{one.name}").EXTENSION
        for one in pkgutil.iter_modules(package.__path__)
    }
    return {name: one for name, one in found.items() if found.keys() >= set(one.needs)}


def commands() -> dict[str, str]:
    """Command -> its click command."""
    return _merged(one.commands for one in all_extensions().values())


def documents() -> dict[str, str]:
    """Option of `diagnose` -> function of a DiagnosisResult."""
    return _merged(one.documents for one in all_extensions().values())


def job_engines() -> dict[str, str]:
    """Word of `diagnose --on` -> class of runs."""
    return _merged(one.job_engines for one in all_extensions().values())


def workloads() -> dict[str, str]:
    """Name of a workload -> function of (name, seed) to a Workload."""
    return _merged(one.workloads for one in all_extensions().values())


def frameworks() -> dict[str, Framework]:
    """By name; PyTorch is the engine's own."""
    return {each.name: each for one in all_extensions().values() for each in one.frameworks}


def kinds() -> dict[str, Kind]:
    """Of measurements, by name; the engine has some of its own."""
    return {each.name: each for one in all_extensions().values() for each in one.kinds}


def simulated_device() -> str:
    """What makes a script find a CUDA device; "" where nothing does."""
    found = (one.simulated_device for one in all_extensions().values())
    return next(filter(None, found), "")


def pages() -> tuple[Page, ...]:
    """Of all extensions."""
    every = [one.pages for one in all_extensions().values()]
    return tuple(page for own in every for page in (load(own)() if isinstance(own, str) else own))


def home_doors() -> list[str]:
    """What draws a way in on Home."""
    return [one.home_door for one in all_extensions().values() if one.home_door]


@functools.cache
def class_scripts() -> frozenset[Path]:
    """Folders of scripts that every member of a class may see."""
    every = [one.class_scripts for one in all_extensions().values()]
    return frozenset(load(where) for where in every if where)


def codes() -> dict[str, Any]:
    """Name -> :class:`ampscope.causes.StableCode`."""
    return {
        name: code
        for one in all_extensions().values()
        if one.codes
        for name, code in load(one.codes).items()
    }


def load(where: str) -> Any:
    """The object that "module:object" names, or "module:object.attribute"; imports its module."""
    module, _, name = where.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def _merged(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {word: where for table in tables for word, where in table.items()}
