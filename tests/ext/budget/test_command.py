"""``ampscope budget``: a base commit, exit status, JUnit, SARIF, and the action's own steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner, Result

from ampscope.cli.main import main
from tests.helpers.sarif_schema import check_log

ROOT = Path(__file__).resolve().parents[3]
BASE = """import torch
from torch import nn

torch.manual_seed(0)
model, head = nn.Linear(64, 64), nn.Linear(64, 4)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
for step in range(12):
    x = torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(x)
        y = head(hidden)
    optimizer.zero_grad()
    y.float().square().mean().backward()
    optimizer.step()
"""
HEAD = BASE.replace(
    "        y = head(hidden)\n",
    "        with torch.autocast('cpu', enabled=False):\n            y = head(hidden.float())\n",
)
LIMITS = """[tool.ampscope.budget]
lost_gradients = 0.01
new_fp32_islands = 0
step_time_ratio = 50
"""


def git(folder: Path, *command: str) -> None:
    own = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose branch ``base`` trains in bf16, and whose head has an fp32 island."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", ".")
    (folder / "pyproject.toml").write_text(LIMITS)
    (folder / "train.py").write_text(BASE)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    git(folder, "branch", "base")
    (folder / "train.py").write_text(HEAD)
    git(folder, "commit", "-qam", "head")
    return folder


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["budget", *map(str, args)])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("train.py",), "--base"),
        (("--base", "nowhere", "train.py"), "There is no commit nowhere"),
        (("--base", "--all", "train.py"), "There is no commit --all"),
        (("--base", "base", "gone.py"), "There is no file"),
        (("--base", "base", "."), ". is a folder. Name the script in it.\n"),
        (("--steps", "0", "--base", "base", "train.py"), "must be positive"),
        (("--config", "gone.toml", "train.py"), "Cannot read gone.toml"),
        (("--base", "base", "large.py"), "too large for a script"),
    ],
)
def test_bad_input(
    repository: Path, args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    with (repository / "large.py").open("wb") as file:
        file.truncate(100 * 2**20)  # sparse
    done = run(*args)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.timeout(900)
def test_the_action_s_steps(repository: Path, tmp_path: Path) -> None:
    """Every ``run:`` block but the installation, in bash, with the inputs' defaults put in."""
    action = yaml.safe_load((ROOT / ".github/actions/budget/action.yml").read_text())
    inputs = {name: str(given.get("default", "")) for name, given in action["inputs"].items()}
    inputs |= {"script": "train.py", "base": "base", "steps": "8"}
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "ampscope"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ampscope.cli.main "$@"\n')
    command.chmod(0o755)
    blocks = [step for step in action["runs"]["steps"] if "pip install" not in step["run"]]
    assert len(blocks) == 1
    given = {
        name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")]
        for name, value in blocks[0]["env"].items()
    }
    environment = {
        **os.environ, **given, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(tmp_path / "outputs"), "AMPSCOPE_STORE": str(tmp_path / "runs.db"),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", blocks[0]["run"]], cwd=repository, env=environment,
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "lost_gradients: kept" in done.stdout
    assert "new_fp32_islands: EXCEEDED. 1 " in done.stdout
    assert "step_time_ratio: kept" in done.stdout
    assert (tmp_path / "outputs").read_text() == "status=1\n"
    suite = ElementTree.parse(repository / "ampscope-budget.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    log = json.loads((repository / "ampscope-budget.sarif").read_text())
    check_log(log)
    (result,) = log["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py"
    assert place["region"]["startLine"] == 12
