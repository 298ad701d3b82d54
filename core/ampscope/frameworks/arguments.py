"""``--store FILE --run ID`` of a child, without click: a framework's environment may lack it."""

from __future__ import annotations

import argparse
from pathlib import Path


def store_and_run() -> tuple[Path, str]:
    """Read from the command line."""
    found = _parsed()
    return found.store, found.run


def view_folder() -> Path | None:
    """``--view FOLDER``: where a script's private view of its files is made; None without one."""
    found: Path | None = _parsed().view
    return found


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--view", type=Path)
    return parser.parse_args()
