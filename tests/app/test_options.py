"""What the operator decides at the start."""

from __future__ import annotations

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
    with pytest.raises(BadInput, match="--store FILE, --workloads DIR and --scripts DIR"):
        options.parse(arguments, {})


@pytest.mark.parametrize("name", ["--workloads", "--scripts"])
def test_a_folder_must_be_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} .* is not a folder"):
        options.parse([name, str(tmp_path / "none")], {})


def test_the_folder_of_scripts_is_named_either_way(tmp_path: Path) -> None:
    named = {"AMPSCOPE_SCRIPTS": str(tmp_path)}
    assert options.parse([], named).scripts == tmp_path.resolve()
    assert options.parse(["--scripts", str(tmp_path)], {}).scripts == tmp_path.resolve()


def test_arguments_of_another_program_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-q"])
    options.current()
    monkeypatch.setattr("sys.argv", ["/x/app/main.py", "--nonsense"])
    with pytest.raises(BadInput):
        options.current()
