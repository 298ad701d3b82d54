"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

from ampscope.store.db import default_path

store_option = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=default_path,
    show_default="AMPSCOPE_STORE, else ~/.local/share/ampscope/runs.db",
    help="The SQLite file that holds the runs.",
)
