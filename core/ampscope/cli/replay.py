"""``ampscope replay``: run a failing step of a watched training again and name the first bad op."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from ampscope.experiments.children import child_environment, started


@click.command()
@click.argument("capsule", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="file.py:build, a function that returns the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(capsule: Path, model: str, as_json: bool) -> None:
    """Run a CAPSULE's forward and backward again, beside fp32, and name the first bad op.

    Exit status 1 when something was not finite, 0 when all was finite, 2 when it could not be run.
    """
    command = [*started("ampscope.watcher.replay_child"), str(capsule)]
    command += ["--model", model, *(["--json"] if as_json else [])]
    # In a session of its own: a signal to this command ends it once, from here.
    done = subprocess.run(command, env=child_environment(), check=False, start_new_session=True)
    sys.exit(done.returncode)
