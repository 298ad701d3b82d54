"""A class as ``ampscope dashboard --classroom`` starts it: its secret and its links.

The teacher's token goes to the server in its environment: the command line of a process is seen by
every user of a machine, its environment by its owner alone. Whoever sets it beforehand has the same
link after a restart.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ampscope.errors import BadInput

TOKEN = "AMPSCOPE_CLASSROOM_TOKEN"  # the variable's name, as in app/options.py
TEACHERS = "AMPSCOPE_CLASSROOM_TEACHERS"
LINK = "AMPSCOPE_CLASSROOM_LINK"  # for students, as it was printed
DASHBOARD_TOKEN = "AMPSCOPE_TOKEN"  # of a dashboard without a class
PUBLIC_URL = "AMPSCOPE_PUBLIC_URL"  # the address at which browsers find the dashboard
# After every run of a page Streamlit collects garbage of all generations, which takes 90 ms with
# pandas and plotly loaded, six times what moving a lesson's slider takes otherwise. Python's own
# collector does it when there is need (benchmarks/results/classroom_load.json has the memory).
_STREAMLIT = ("--runner.postScriptGC", "false")
_SECRETS = Path(".streamlit") / "secrets.toml"
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")  # stands in a link as it is
MIN_TOKEN = 16  # characters of a token that an operator brings along; one made here has 43


def environment(
    given: Mapping[str, str], *, sign_in: bool, teachers: Sequence[str]
) -> dict[str, str]:
    """What the server needs to know. Raises BadInput for a class that has no teacher."""
    if sign_in != bool(teachers):
        raise BadInput(
            "Signing in takes both: --sign-in, and --teacher with the address of each teacher."
        )
    if sign_in:
        return {TEACHERS: ",".join(teachers), TOKEN: ""}
    return {TOKEN: token(given, TOKEN), TEACHERS: ""}


def token(given: Mapping[str, str], name: str) -> str:
    """The one that the operator set as ``name``, or a new one. Raises BadInput for a short one."""
    found = given.get(name) or secrets.token_urlsafe(32)
    if len(found) < MIN_TOKEN or not _TOKEN.fullmatch(found):
        raise BadInput(f"{name} must have at least {MIN_TOKEN} letters, digits, - or _.")
    return found


def streamlit_options(folder: Path, *, sign_in: bool) -> list[str]:
    """Options of Streamlit's server. Raises BadInput when nobody could sign in."""
    if not sign_in:
        return [*_STREAMLIT]
    places = [folder / _SECRETS, Path.home() / _SECRETS]
    found = [str(place) for place in places if place.is_file() and _has_auth(place)]
    if not found:
        raise BadInput(
            f"Signing in takes a section [auth] in {places[0]} or {places[1]}; docs/classroom.md "
            "has an example."
        )
    if importlib.util.find_spec("authlib") is None:
        raise BadInput('Signing in takes Authlib: pip install "streamlit[auth]"')
    return [*_STREAMLIT, "--secrets.files", found[0]]


def _has_auth(path: Path) -> bool:
    try:
        return "auth" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}.") from error


def clear(environment: dict[str, str]) -> None:
    """A dashboard without a class is none because of what was exported earlier."""
    for name in (TOKEN, TEACHERS, LINK, DASHBOARD_TOKEN):
        environment.pop(name, None)


def announce(environment: Mapping[str, str]) -> None:
    """Print the links."""
    base = environment[LINK].rstrip("/")
    click.echo(f"For students:  {base}/")
    if environment.get(TEACHERS):
        click.echo("The teacher opens the same link, and signs in.")
        return
    click.echo(f"For you alone: {base}/teacher/{environment[TOKEN]}")
    click.echo("Open yours before you share a screen: it makes that browser the teacher's.")
    click.echo(
        "If students cannot open theirs, name the machine as they do: --public-url http://NAME:PORT"
    )
