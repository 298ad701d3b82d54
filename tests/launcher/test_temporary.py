"""Temporary folders of processes that were killed are removed by the next command; others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ampscope import masks
from ampscope.files import TemporaryFolder, make_deletable, remove_leftovers
from ampscope.privacy import leave, taken
from ampscope.records import RunSpec
from tests.helpers.child_runs import command_line, run_command

MAKES = """
import sys, time
from pathlib import Path
from ampscope.files import TemporaryFolder
folder = TemporaryFolder()
Path(folder.name, "out").write_text("what the script printed")
print(folder.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, in this process and its children."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def dead() -> int:
    """A process number that belongs to no process."""
    return next(n for n in range(4_000_000, 4_100_000) if not Path(f"/proc/{n}").exists())


def folder_of(pid: int, place: Path, age_s: float = 3600.0) -> Path:
    folder = place / f"ampscope-{pid}-12-abcdefgh"
    (folder / "closed").mkdir(parents=True)
    (folder / "closed").chmod(0)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_output_of_a_killed_process_goes_with_the_next_command(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", MAKES], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        left = Path(made.stdout.readline().strip())
        run_command("runs", "list", "--store", place / "none.db")
        assert (left / "out").exists()  # its process lives
        made.send_signal(signal.SIGKILL)
    assert left.exists()
    run_command("runs", "list", "--store", place / "none.db")
    assert not left.exists()


def test_output_of_a_killed_diagnosis_goes(place: Path) -> None:
    script = place / "train.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    command = command_line("diagnose", "--store", place / "runs.db", script)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not list(place.glob("ampscope-*-*-*/*.out")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert list(place.glob("ampscope-*-*-*"))
    run_command("runs", "list", "--store", place / "runs.db")
    assert not list(place.glob("ampscope-*-*-*"))


def test_only_own_folders_of_ended_processes_are_removed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, young = folder_of(dead(), place), folder_of(dead() + 1, place, age_s=0.0)
    file = place / f"ampscope-{dead()}-12-abcdefghi"
    file.write_text("no folder")
    aim = tmp_path / "aim"
    aim.mkdir()
    link = place / f"ampscope-{dead()}-12-link"
    link.symlink_to(aim)
    named = place / "ampscope-results"
    named.mkdir()
    with TemporaryFolder() as living:
        remove_leftovers()
        assert not left.exists()
        assert all(path.exists() for path in (young, file, aim, link, named, Path(living)))
        # The same folder, seen from a container where its process has no number.
        elsewhere = Path(living).with_name(f"ampscope-{dead()}-12-elsewhere")
        Path(living).rename(elsewhere)
        remove_leftovers()
        assert elsewhere.exists()
        elsewhere.rename(living)
    assert not Path(living).exists()
    other = folder_of(dead(), place)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    remove_leftovers()
    assert other.exists()


def test_what_a_killed_command_left_for_a_run_goes(place: Path) -> None:
    leave("abc", RunSpec("train.py", kind="script", args=("--token", "Hq7TAILv2")))
    folder = place / f"ampscope-{os.getuid()}"
    (living,) = folder.glob("given-abc-*.json")
    left = folder / f"given-abd-{dead()}-12.json"
    young, lock = folder / f"given-abe-{dead()}-12.json", folder / "cpu.lock"
    for path in (left, young, lock):
        path.write_text("{}")
    for path in (living, left, lock):
        os.utime(path, (time.time() - 120,) * 2)
    remove_leftovers()
    assert not left.exists()
    assert all(path.exists() for path in (living, young, lock))
    assert taken("abc", RunSpec("train.py", kind="script")).args == ("--token", "Hq7TAILv2")
    assert not living.exists()
    masks._hidden.clear()
    masks.masked_text.cache_clear()


def test_what_a_link_leads_to_keeps_its_permissions(tmp_path: Path) -> None:
    aim, folder = tmp_path / "aim", tmp_path / "folder"
    aim.mkdir()
    aim.chmod(0o755)
    (folder / "inner").mkdir(parents=True)
    (folder / "inner").chmod(0)
    (folder / "link").symlink_to(aim)
    make_deletable(folder)
    assert aim.stat().st_mode & 0o777 == 0o755
    assert (folder / "inner").stat().st_mode & 0o700 == 0o700
