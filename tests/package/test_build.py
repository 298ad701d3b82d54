"""What is built: the sdist passes its own tests, and the wheel holds no tool of development."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What reads files of the repository that are neither code nor documents.
OWN_TESTS = ("tests/package/test_supply_chain.py", "tests/package/test_docs.py",
             "tests/ext/budget/test_command.py", "tests/ext/preflight/test_command.py")  # fmt: skip
OF_DEVELOPMENT = {"tests", "benchmarks", "docs", "examples", ".ci", ".github", "Dockerfile"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    from hatchling.builders.sdist import SdistBuilder

    folder = tmp_path_factory.mktemp("sdist")
    (built,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(built) as archive:
        # Python before 3.11.4 has no filters; there the attribute does nothing.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / Path(built).name.removesuffix(".tar.gz")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_what_the_repository_holds(sdist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("what belongs to the repository is git's to say")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    there = {name for name in listed if (ROOT / name).is_file()}
    assert files(sdist) == there | {"PKG-INFO"}


def test_its_own_tests_pass_from_the_sdist(sdist: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(sdist / "core")}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *OWN_TESTS],
        cwd=sdist, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_wheel_has_the_package_and_the_dashboard_alone(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"ampscope", next(top for top in tops if top.endswith(".dist-info"))}
    assert {name.split("/")[1] for name in names} & OF_DEVELOPMENT == set()
    assert {name.split("/")[2] for name in names if "/_dashboard/" in name} == {"app", "pages"}
    assert "ampscope/store/schema.sql" in names
    assert not [name for name in names if name.endswith(".pyc") or "test_" in name]
    packaged = {name for name in names if name.startswith("ampscope/_dashboard/")}
    held = {
        f"ampscope/_dashboard/{path.relative_to(ROOT)}"
        for part in ("app", "pages")
        for path in (ROOT / part).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packaged == held
