"""``--store FILE --run ID`` of a child, without click: a framework's environment may lack it."""

from __future__ import annotations

import argparse
from pathlib import Path


def store_and_run() -> tuple[Path, str]:
    """Read from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", required=True)
    found = parser.parse_args()
    return found.store, found.run
