"""A class as ``ampscope dashboard --classroom`` starts it: its secret and its links.

The teacher's token goes to the server in its environment: the command line of a process is seen by
every user of a machine, its environment by its owner alone. Whoever sets it beforehand has the same
link after a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import click

from ampscope.errors import BadInput

TOKEN = "AMPSCOPE_CLASSROOM_TOKEN"  # the variable's name, as in app/options.py
TEACHERS = "AMPSCOPE_CLASSROOM_TEACHERS"
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
    token = given.get(TOKEN) or secrets.token_urlsafe(32)
    if len(token) < MIN_TOKEN or not token.replace("-", "").replace("_", "").isalnum():
        raise BadInput(f"{TOKEN} must have at least {MIN_TOKEN} letters, digits, - or _.")
    return {TOKEN: token, TEACHERS: ""}


def clear(environment: dict[str, str]) -> None:
    """A dashboard without a class is none because of what was exported earlier."""
    for name in (TOKEN, TEACHERS):
        environment.pop(name, None)


def announce(environment: Mapping[str, str], url: str) -> None:
    """Print the links."""
    base = url.rstrip("/")
    click.echo(f"For students:  {base}/")
    if environment.get(TEACHERS):
        click.echo("The teacher opens the same link, and signs in.")
        return
    click.echo(f"For you alone: {base}/teacher/{environment[TOKEN]}")
    click.echo("Open yours before you share a screen: it makes that browser the teacher's.")
