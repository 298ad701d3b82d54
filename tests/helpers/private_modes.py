"""The ways of having private files that this machine allows, and what a folder holds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ampscope.files import make_deletable
from ampscope.runner.overlay import overlaid
from ampscope.runner.private_copy import ALL_WRITES, landlock_version
from ampscope.runner.private_files import COMPARED, COPY, OVERLAY


def why_no_overlay() -> str:
    """ "" where this machine allows overlays. Tried in a process of its own."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "root"
        root.mkdir()
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            said = ""
            try:
                overlaid([str(root)], [], Path(made) / "runs.db", Path(made) / "view")
            except BaseException as error:
                said = str(error) or type(error).__name__
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = answer.read()
        os.waitpid(pid, 0)
        make_deletable(Path(made))
    return said


WHY_NOT = why_no_overlay()
MODES = [
    pytest.param(OVERLAY, marks=pytest.mark.skipif(bool(WHY_NOT), reason=f"overlay: {WHY_NOT}")),
    pytest.param(
        COPY, marks=pytest.mark.skipif(landlock_version() < ALL_WRITES, reason="no Landlock")
    ),
    COMPARED,
]


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything there is below ``folder``: kind, contents, mode, time of change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        contents = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        )
        found[str(path)] = (contents, facts.st_mode, facts.st_mtime_ns, facts.st_ino)
    found["."] = (folder.stat().st_mtime_ns,)
    return found
