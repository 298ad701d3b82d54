"""``ampscope dashboard``: start Streamlit on the pages of this checkout or of the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import click

import ampscope
from ampscope.cli.options import store_option
from ampscope.errors import AmpscopeError


@click.command()
@click.option("--port", default=8501, show_default=True)
@click.option("--host", default="localhost", show_default=True, help="Address to bind to.")
@click.option(
    "--workloads",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose workload files the New probe page may run.",
)
@click.option("--headless", is_flag=True, help="Do not open a browser.")
@store_option
def dashboard(port: int, host: str, workloads: Path | None, headless: bool, store: Path) -> None:
    """Open the dashboard in a browser."""
    main = main_file()
    environment = {**os.environ, "AMPSCOPE_STORE": str(store.absolute())}
    if workloads is not None:
        environment["AMPSCOPE_WORKLOADS"] = str(workloads.resolve())
    command = [sys.executable, "-m", "streamlit", "run", str(main)]
    command += ["--server.port", str(port), "--server.address", host]
    # Without the second, Streamlit's first start asks for an e-mail address and waits.
    command += ["--server.headless", str(headless).lower(), "--server.showEmailPrompt", "false"]
    try:
        sys.exit(subprocess.call(command, env=environment, cwd=main.parent.parent))
    except KeyboardInterrupt:
        sys.exit(0)


def main_file() -> Path:
    """``app/main.py``: inside the wheel, else at the top of the checkout."""
    package = Path(str(resources.files(ampscope)))
    for folder in (package / "_dashboard", package.parent.parent):
        if (folder / "app" / "main.py").is_file():
            return folder / "app" / "main.py"
    raise AmpscopeError("The dashboard's files are missing. Install ampscope again.")
