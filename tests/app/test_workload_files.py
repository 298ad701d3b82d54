"""A browser reaches Python files below the operator's folder and nothing else."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from ampscope.errors import BadInput
from app.runs import workload_choice


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "__pycache__").mkdir()
    (root / ".hidden").mkdir()
    for name in ("a.py", "deep/b.py", "deep/er/c.py", ".secret.py", "__pycache__/d.py"):
        (root / name).write_text("")
    (root / ".hidden" / "e.py").write_text("")
    (root / "notes.txt").write_text("")
    (tmp_path / "outside.py").write_text("")
    (tmp_path / "mine-too").mkdir()
    (tmp_path / "mine-too" / "sibling.py").write_text("")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "inside.py").symlink_to(root / "a.py")
    (root / "loop.py").symlink_to(root / "loop.py")
    (root / "linked").symlink_to(tmp_path / "mine-too")
    return root


def test_lists_what_may_be_chosen(folder: Path) -> None:
    expected = {"a.py", "deep/b.py", "deep/er/c.py", "inside.py"}
    assert set(workload_choice.listed(folder).files) == expected
    assert workload_choice.listed(None).files == ()


def test_everything_listed_can_be_chosen(folder: Path) -> None:
    for name in workload_choice.listed(folder).files:
        path, _, entry = workload_choice.chosen(folder, name).rpartition(":")
        assert Path(path).is_file()
        assert Path(path).is_relative_to(folder.resolve())
        assert entry == "build"


@pytest.mark.parametrize(
    "name",
    [
        "../outside.py",
        "deep/../../outside.py",
        "link.py",
        "linked/sibling.py",
        "../mine-too/sibling.py",
        "loop.py",
        "notes.txt",
        "deep",
        "",
        "missing.py",
        "a.py\0",
        "x" * 5000 + ".py",
    ],
)
def test_everything_else_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(BadInput, match="workloads folder"):
        workload_choice.chosen(folder, name)


def test_an_absolute_path_outside_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput):
        workload_choice.chosen(folder, str(folder.parent / "outside.py"))


@pytest.mark.parametrize("entry", ["", "os.system", "a b", "build()", "build:x", "../x"])
def test_the_function_is_a_name(folder: Path, entry: str) -> None:
    with pytest.raises(BadInput, match="name of a function"):
        workload_choice.chosen(folder, "a.py", entry)


def test_without_a_folder_nothing_can_be_chosen() -> None:
    with pytest.raises(BadInput, match="--workloads DIR"):
        workload_choice.chosen(None, "a.py")


def _write(path: Path, changed: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    os.utime(path, (changed, changed))


def test_the_newest_comes_first_however_deep_and_among_however_many(tmp_path: Path) -> None:
    for number in range(600):
        _write(tmp_path / f"a{number:03}.py", 1_000.0 + number)
    newest = "src/team/project/train/experiments/z_new.py"
    _write(tmp_path / newest, 9_000.0)
    listing = workload_choice.listed(tmp_path)
    assert listing.files[:2] == (newest, "a599.py")
    assert len(listing.files) == 601
    assert listing.unread == 0


def test_what_is_installed_below_a_project_is_left_out(tmp_path: Path) -> None:
    for name in (
        ".git/hooks/a.py",
        "node_modules/b.py",
        "venv/c.py",
        "old/lib/site-packages/d.py",
        "pkg/__pycache__/e.py",
        "mine/f.py",
        "environment/bin/g.py",
        "mine.py",
    ):
        _write(tmp_path / name)
    (tmp_path / "environment" / "pyvenv.cfg").write_text("")
    assert workload_choice.listed(tmp_path).files == ("mine.py", "mine/f.py")


def test_a_walk_that_takes_too_long_says_what_it_did_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        _write(tmp_path / f"d{number}" / "deeper" / "b.py")
    _write(tmp_path / "a.py")
    clock = itertools.count()
    monkeypatch.setattr(workload_choice.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(workload_choice, "WALK_S", 2.5)
    listing = workload_choice.listed(tmp_path)
    assert listing.files == ("a.py",)
    assert listing.unread == 5  # d1 to d4 and d0/deeper


def test_a_file_that_is_new_is_listed_at_once(tmp_path: Path) -> None:
    _write(tmp_path / "a.py", 1.0)
    listing = workload_choice.listed(tmp_path)
    workload_choice._listings[tmp_path] = (time.monotonic() - 0.02, 0.001, listing)
    _write(tmp_path / "b.py", 2.0)
    assert workload_choice.listed(tmp_path).files == ("b.py", "a.py")
