"""The group of commands: each is imported when it is asked for, under its own name."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ampscope.cli.main import COMMANDS, main


def test_every_command_is_listed_under_its_own_name() -> None:
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    assert {name: command.name for name, command in found.items() if command} == {
        name: name for name in COMMANDS
    }


def test_a_command_imports_its_own_module_alone() -> None:
    """Asked in a fresh process: other tests have imported the rest here."""
    code = "import sys; from ampscope.cli.main import COMMANDS, main; main(['explain', 'AMP001'])"
    code = f"import atexit, sys; atexit.register(lambda: print('numba' in sys.modules))\n{code}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines()[-1] == "False", found.stderr


@pytest.mark.parametrize("word", ["diagnos", "hardwrae"])
def test_an_unknown_command_is_named_with_what_is_like_it(word: str) -> None:
    done = CliRunner().invoke(main, [word])
    assert done.exit_code == 2
    assert f"No such command '{word}'" in done.output
    assert "Did you mean" in done.output


@pytest.mark.parametrize(
    "words",
    [["probe", "{}.py:build"], ["compare", "{}.py"], ["mcp", "--scripts", "{}"],
     ["diagnose", "{}.py"], ["run", "{}.py"], ["check", "{}"], ["preflight", "{}.py"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_path_that_cannot_be_looked_at_is_one_sentence(words: list[str]) -> None:
    """A name that is too long fails as a folder does that may not be entered, also for root."""
    if words[0] not in COMMANDS:
        pytest.skip("the extension is not there")
    done = CliRunner().invoke(main, [word.format("x" * 300) for word in words])
    assert done.exit_code == 2, done.output
    assert done.output.startswith("ampscope: Cannot ")
    assert "File name too long" in done.output
    assert done.output.count("\n") == 1
