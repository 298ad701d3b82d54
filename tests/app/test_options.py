"""What the operator decides at the start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ampscope.errors import BadInput
from app import options


def test_the_command_line_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_STORE", str(tmp_path / "env.db"))
    environment = {"AMPSCOPE_WORKLOADS": str(tmp_path)}
    from_environment = options.parse([], environment)
    assert from_environment == options.Options(tmp_path / "env.db", tmp_path.resolve())
    other = tmp_path / "mine"
    other.mkdir()
    arguments = ["--store", str(tmp_path / "cli.db"), "--workloads", str(other)]
    given = options.parse(arguments, environment)
    assert given == options.Options(tmp_path / "cli.db", other.resolve())


def test_without_a_folder_none_is_offered() -> None:
    assert options.parse([], {}).workloads is None


@pytest.mark.parametrize("arguments", [["--stor", "x"], ["extra"], ["--store"]])
def test_an_unknown_option_is_refused_in_a_sentence(arguments: list[str]) -> None:
    with pytest.raises(BadInput, match="--scripts DIR and --python NAME=PATH"):
        options.parse(arguments, {})


@pytest.mark.parametrize("name", ["--workloads", "--scripts"])
def test_a_folder_must_be_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} .* is not a folder"):
        options.parse([name, str(tmp_path / "none")], {})


def test_the_folder_of_scripts_is_named_either_way(tmp_path: Path) -> None:
    named = {"AMPSCOPE_SCRIPTS": str(tmp_path)}
    assert options.parse([], named).scripts == tmp_path.resolve()
    assert options.parse(["--scripts", str(tmp_path)], {}).scripts == tmp_path.resolve()


def test_pythons_are_named_either_way_and_once(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.symlink_to(sys.executable)
    both = f"a={sys.executable}{os.pathsep}b 2={environment}"
    found = options.parse([], {"AMPSCOPE_PYTHONS": both}).pythons
    assert [(p.name, p.executable) for p in found] == [("a", sys.executable), ("b 2", str(python))]
    (one,) = options.parse(["--python", f"c={python}"], {"AMPSCOPE_PYTHONS": both}).pythons
    assert one.name == "c"
    with pytest.raises(BadInput, match="names c twice"):
        options.parse(["--python", f"c={python}", "--python", f"c={sys.executable}"], {})


@pytest.mark.parametrize(
    "text", ["python3", "=python3", "a=", "a/b=python3", "x" * 41 + "=python3"]
)
def test_a_python_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not NAME=PATH"):
        options.parse(["--python", text], {})


def test_a_python_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    for path in ("/none/python", str(tmp_path), str(tmp_path / "text")):
        with pytest.raises(BadInput, match="neither a Python nor a virtual environment"):
            options.parse(["--python", f"a={path}"], {})


def test_arguments_of_another_program_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-q"])
    options.current()
    monkeypatch.setattr("sys.argv", ["/x/app/main.py", "--nonsense"])
    with pytest.raises(BadInput):
        options.current()
