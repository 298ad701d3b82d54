"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ampscope.privacy import PARTS, VARIABLE
from ampscope.store.db import default_path
from ampscope.workloads.catalog import BUILTIN


def _leave_out(context: click.Context, option: click.Parameter, parts: tuple[str, ...]) -> None:
    """Children inherit it with the environment."""
    if parts:
        before = os.environ.get(VARIABLE, "")
        os.environ[VARIABLE] = ",".join(filter(None, (before, *parts)))


leave_out_option = click.option(
    "--leave-out",
    multiple=True,
    type=click.Choice(PARTS),
    callback=_leave_out,
    expose_value=False,
    help="Do not record the script's arguments, the machine's name, paths, lines of source.",
)
store_option = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=default_path,
    show_default="AMPSCOPE_STORE, else ~/.local/share/ampscope/runs.db",
    help="The SQLite file that holds the runs.",
)


# A workload as it was typed, made independent of the folder in which it was typed.


def absolute(workload: str) -> str:
    """A user's file is found again whatever the child's working directory is."""
    path, colon, function = workload.partition(":")
    if workload in BUILTIN or not path.endswith(".py"):
        return workload
    return f"{Path(path).expanduser().absolute()}{colon}{function}"
