"""What the operator decided when the dashboard was started. A browser can change none of it.

    streamlit run app/main.py -- --store runs.db --workloads ./mine --scripts ~/train \
        --python nightly=/opt/nightly/bin/python

or the environment variables AMPSCOPE_STORE, AMPSCOPE_WORKLOADS, AMPSCOPE_SCRIPTS and
AMPSCOPE_PYTHONS (joined as PATH is); the command line wins. Tokens and a class (`ampscope dashboard
--classroom`) are set up by the environment alone: a command line is seen by every user of the
machine, and a token must not be.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from ampscope.errors import BadInput
from ampscope.pythons import NamedPython, named_python
from ampscope.store.db import default_path

TOKEN = "AMPSCOPE_CLASSROOM_TOKEN"  # the variable's name
DASHBOARD_TOKEN = "AMPSCOPE_TOKEN"  # of a dashboard without a class
PUBLIC_URL = "AMPSCOPE_PUBLIC_URL"  # the address at which browsers find the dashboard
TEACHERS = "AMPSCOPE_CLASSROOM_TEACHERS"  # addresses, where the class signs in
LINK = "AMPSCOPE_CLASSROOM_LINK"


@dataclass(frozen=True, slots=True)
class Classroom:
    """A teacher and students share this server. The teacher is who has the ``token``, or, where
    the class signs in, who has one of the addresses ``teachers``."""

    token: str = ""
    teachers: frozenset[str] = frozenset()
    link: str = ""  # that students open, as the command printed it

    @property
    def signs_in(self) -> bool:
        """Whether every user must sign in first."""
        return bool(self.teachers)


@dataclass(frozen=True, slots=True)
class Options:
    """Folders whose Python files a browser may choose, None for none: ``workloads`` to probe their
    models, ``scripts`` to diagnose them; ``pythons``, beside the dashboard's own, to do so with."""

    store: Path
    workloads: Path | None = None
    scripts: Path | None = None
    classroom: Classroom | None = None
    pythons: tuple[NamedPython, ...] = ()


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the server."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(
            f"{message}. After `--` come only --store FILE, --workloads DIR, --scripts DIR and "
            "--python NAME=PATH."
        )


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Raises BadInput for an unknown option or a folder that is none."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--workloads", type=Path)
    parser.add_argument("--scripts", type=Path)
    parser.add_argument("--python", action="append", metavar="NAME=PATH")
    given = parser.parse_args(arguments)
    exported = environment.get("AMPSCOPE_PYTHONS", "").split(os.pathsep)
    return Options(
        store=(given.store or default_path()).expanduser().absolute(),
        workloads=_folder("workloads", given.workloads, environment),
        scripts=_folder("scripts", given.scripts, environment),
        classroom=classroom(environment),
        pythons=_pythons(given.python or [text for text in exported if text]),
    )


def _pythons(texts: Sequence[str]) -> tuple[NamedPython, ...]:
    """One for each name. Raises BadInput where two share one."""
    found = tuple(map(named_python, texts))
    names = [python.name for python in found]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"--python names {name} twice. Give each Python a name of its own.")
    return found


def _folder(name: str, given: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The folder that the command line or the environment names."""
    exported = environment.get(f"AMPSCOPE_{name.upper()}")
    folder = given or (Path(exported) if exported else None)
    if folder is not None and not folder.expanduser().is_dir():
        raise BadInput(f"--{name} {folder} is not a folder.")
    return folder and folder.expanduser().resolve()


def current() -> Options:
    """The options of this process. Asked for again and again while a page is drawn."""
    folders = ("AMPSCOPE_WORKLOADS", "AMPSCOPE_SCRIPTS", "AMPSCOPE_PYTHONS")
    names = ("AMPSCOPE_STORE", "XDG_DATA_HOME", *folders, TOKEN, TEACHERS, LINK)
    given = tuple((name, os.environ.get(name, "")) for name in names)
    return _parsed(tuple(_own_arguments(sys.argv)), given)


@lru_cache(maxsize=8)
def _parsed(arguments: tuple[str, ...], given: tuple[tuple[str, str], ...]) -> Options:
    return parse(arguments, dict(given))


def classroom(environment: Mapping[str, str]) -> Classroom | None:
    """None where one person has the dashboard for themselves."""
    teachers = environment.get(TEACHERS, "").split(",")
    addresses = frozenset(a.strip().casefold() for a in teachers if a.strip())
    token = environment.get(TOKEN, "")
    return Classroom(token, addresses, environment.get(LINK, "")) if token or addresses else None


def token(environment: Mapping[str, str]) -> str:
    """What a browser must show to use the dashboard at all; empty where none is asked for, as in a
    class, which students enter without one."""
    return "" if classroom(environment) is not None else environment.get(DASHBOARD_TOKEN, "")


def secret(environment: Mapping[str, str]) -> str:
    """What the operator's or the teacher's browser shows; empty where there is no such thing."""
    room = classroom(environment)
    return room.token if room is not None else token(environment)


def _own_arguments(argv: Sequence[str]) -> Sequence[str]:
    """`streamlit run app/main.py -- …` leaves the script at the front; under a test runner or a
    notebook the arguments are another program's."""
    is_ours = bool(argv) and Path(argv[0]).parts[-2:] == ("app", "main.py")
    return argv[1:] if is_ours else ()
