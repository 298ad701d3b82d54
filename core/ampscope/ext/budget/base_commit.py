"""The script that a budget compares with: the same one in another folder, or at another commit."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ampscope.errors import BadInput


@contextlib.contextmanager
def at_base(script: Path, base: str) -> Iterator[Path]:
    """The unchanged script at the base. A commit's files are unpacked into a folder that is removed
    again; the repository is only read. Raises BadInput with what is missing."""
    top = _git(script.parent, "rev-parse", "--show-toplevel")
    root = Path(top.strip()) if top is not None else None
    inside = script.resolve().relative_to(root.resolve()) if root is not None else Path(script.name)
    if os.path.isdir(base):
        found = Path(base).absolute() / inside
        if not os.path.isfile(found):
            raise BadInput(f"There is no {inside} in {base}.")
        yield found
        return
    if root is None:
        raise BadInput(f"{base} is no folder, and {script} is in no git repository.")
    commit = _git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"
    )
    if commit is None:
        raise BadInput(f"There is no commit {base} in {root}: fetch it, or name another base.")
    packed = subprocess.run(
        ["git", "-C", str(root), "archive", "--format=tar", commit.strip()],
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        raise BadInput(f"git cannot read the files of {base}: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="ampscope-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            # Python before 3.11.4 has no filters; there the attribute does nothing.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder)
        found = Path(folder, inside)
        if not found.is_file():
            raise BadInput(f"There is no {inside} at {base}: name a base that has the script.")
        yield found


def _git(folder: Path, *command: str) -> str | None:
    """What git prints; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BadInput(f"Cannot start git: {error.strerror}.") from error
    return done.stdout if done.returncode == 0 else None
