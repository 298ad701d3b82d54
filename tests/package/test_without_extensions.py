"""The engine without its extensions: the folders are deleted, and its own tests still pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope import extensions

ROOT = Path(__file__).resolve().parents[2]
DELETED = ("core/ampscope/ext", "app/ext", "tests/ext")
COPIED = ("app", "core", "pages", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")
# What reads the door (ampscope/extensions.py) is tested in these; the others never pass it.
AT_THE_DOOR = ("app", "cli", "launcher", "report", "workloads", "zoo")
# These are about the repository as a whole, and about its wheel; Chromium's tests take long.
WHOLE = ("--ignore=tests/package", "--ignore=tests/browser")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without its extensions."""
    copy = tmp_path_factory.mktemp("engine")
    unwanted = shutil.ignore_patterns("__pycache__", "unseen", "results")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, copy / name)
    for name in DELETED:
        shutil.rmtree(copy / name)
    return copy


def run(engine: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "AMPSCOPE_"))
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=engine, check=False,
        env={**environment, "PYTHONPATH": str(engine / "core")},
    )  # fmt: skip


def test_the_commands_of_the_engine_are_left(engine: Path) -> None:
    done = run(engine, "-c", "from ampscope.cli.main import COMMANDS; print(*COMMANDS)")
    left = set(done.stdout.split())
    assert {"diagnose", "probe", "runs", "dashboard"} <= left, done.stderr
    assert not {"preflight", "diff", "mcp", "frameworks", "check", "compare"} & left


@pytest.mark.parametrize("deleted", sorted(extensions.all_extensions()))
def test_each_extension_may_be_left_out(deleted: str) -> None:
    """The command line's help imports every command of those that are left."""
    code = (
        "import sys\n"
        f"sys.modules['ampscope.ext.{deleted}'] = None\n"
        "from ampscope import extensions\n"
        "import pkgutil\n"
        "listed = pkgutil.iter_modules\n"
        f"pkgutil.iter_modules = lambda path: [m for m in listed(path) if m.name != {deleted!r}]\n"
        "from ampscope.cli.main import main\n"
        f"assert {deleted!r} not in extensions.all_extensions()\n"
        "main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "diagnose" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        [f"tests/{folder}" for folder in AT_THE_DOOR],
        pytest.param(["tests"], marks=pytest.mark.thorough),
    ],
    ids=["at the door", "all"],
)
def test_its_quick_tests_pass(engine: Path, chosen: list[str]) -> None:
    done = run(engine, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *WHOLE, *chosen)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-1_000:]
    assert " error" not in done.stdout[-300:]
