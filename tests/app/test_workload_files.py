"""A browser reaches Python files below the operator's folder and nothing else."""

from __future__ import annotations

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
    assert workload_choice.listed(folder) == ["a.py", "deep/b.py", "deep/er/c.py", "inside.py"]
    assert workload_choice.listed(None) == []


def test_everything_listed_can_be_chosen(folder: Path) -> None:
    for name in workload_choice.listed(folder):
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


def test_the_list_is_bounded(tmp_path: Path) -> None:
    for number in range(workload_choice.MAX_FILES + 20):
        (tmp_path / f"w{number}.py").write_text("")
    assert len(workload_choice.listed(tmp_path)) == workload_choice.MAX_FILES
