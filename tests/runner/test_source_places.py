"""Where an op is: the script's own line by its path in the project, and the library's line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ampscope
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import BadOp
from ampscope.source_lines import SourceLines
from tests.helpers.script_runner import Runner, spec

NET = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.exp(x * 20)
"""
TRAIN = """
import sys
sys.path[:0] = [FOLDERS]
import torch
from NAMES import Net
w = torch.nn.Parameter(torch.ones(4))
o = torch.optim.SGD([w], 1e-3)
net = Net()
for i in range(2):
    o.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = net(w.half()).sum()
    loss.backward()
    o.step()
"""


def _bad(folder: Path, script: Path) -> BadOp:
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        found = Runner(runs)(script).run.observations
    return next(b for b in found if isinstance(b, BadOp) and b.kind == "nonfinite")


@pytest.mark.parametrize("marker", ["pyproject.toml", ""])
def test_a_file_is_named_by_its_path_in_the_project(tmp_path: Path, marker: str) -> None:
    scripts, models = tmp_path / "repo/scripts", tmp_path / "repo/src/models"
    scripts.mkdir(parents=True)
    models.mkdir(parents=True)
    (models / "net.py").write_text(NET)
    if marker:
        (tmp_path / "repo" / marker).touch()
    train = TRAIN.replace("FOLDERS", repr(str(tmp_path / "repo/src"))).replace(
        "NAMES", "models.net"
    )
    (scripts / "train.py").write_text(train)
    bad = _bad(tmp_path, scripts / "train.py")
    assert bad.line == ("src/models/net.py:5" if marker else "net.py:5")
    assert bad.library == ""


def test_a_librarys_line_and_the_scripts_own_that_led_there(tmp_path: Path) -> None:
    library = tmp_path / "lib/site-packages/somelib/models"
    library.mkdir(parents=True)
    (library / "net.py").write_text(NET)
    train = TRAIN.replace("FOLDERS", repr(str(tmp_path / "lib/site-packages")))
    (tmp_path / "train.py").write_text(train.replace("NAMES", "somelib.models.net"))
    bad = _bad(tmp_path, tmp_path / "train.py")
    assert bad.library == "somelib/models/net.py:5"
    assert (bad.line, bad.code) == ("train.py:12", "loss = net(w.half()).sum()")


def test_an_environment_in_the_projects_folder_is_not_the_users(tmp_path: Path) -> None:
    packages = tmp_path / ".venv/lib/python3.11/site-packages"
    lines = SourceLines(str(tmp_path))
    assert not lines.is_user(compile("0", str(packages / "timm/layers.py"), "exec"))
    assert lines.is_user(compile("0", str(tmp_path / "models/net.py"), "exec"))


def test_a_checkout_of_ampscope_below_the_scripts_folder_is_not_the_users(tmp_path: Path) -> None:
    package = Path(ampscope.__file__).resolve().parent
    around = SourceLines(str(package.parents[1]))  # as a script beside the checkout has it
    assert not around.is_user(compile("0", str(package / "capture/tensors.py"), "exec"))
    inside = SourceLines(str(package / "zoo/scripts"))
    assert inside.is_user(compile("0", str(package / "zoo/scripts/any.py"), "exec"))


def test_a_line_by_its_path_is_computed_in_fp32(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/net.py").write_text(NET)
    train = TRAIN.replace("FOLDERS", repr(str(tmp_path / "src"))).replace("NAMES", "net")
    (tmp_path / "train.py").write_text(train)
    done = subprocess.run(
        [sys.executable, "-m", "ampscope.cli.main", "run", "--store", str(tmp_path / "r.db"),
         "--fix", "fp32_lines:src/net.py:5", str(tmp_path / "train.py")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Nothing ran at" not in done.stdout + done.stderr
