"""What is installed: the lock agrees with the requirements; one index alone serves a package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"([a-z0-9-]+)==([0-9][0-9A-Za-z.+]*) --hash=sha256:[0-9a-f]{64}")


def pinned(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def test_the_lock_has_what_the_requirements_pin() -> None:
    locked = {}
    for line in pinned("requirements.lock"):
        found = LINE.fullmatch(line)
        assert found is not None, line
        assert found[1] not in locked
        locked[found[1]] = found[2]
    wanted = dict(line.split("==") for line in pinned("requirements.txt"))
    torch = wanted.pop("torch")  # its wheel depends on the machine
    assert "torch" not in locked
    assert wanted.items() <= locked.items()
    assert f"pip install torch=={torch}\n" in (ROOT / "requirements.lock").read_text()


def test_the_lock_has_what_streamlit_serves_with() -> None:
    names = {line.partition("==")[0] for line in pinned("requirements.lock")}
    assert {"starlette", "uvicorn", "websockets", "h11", "anyio", "jinja2"} <= names


def test_no_two_indexes_serve_one_package() -> None:
    """With --extra-index-url whoever registers a name on either index is installed."""
    for path in ("Dockerfile", "README.md", ".ci/run", ".ci/lock", ".ci/frameworks"):
        assert "--extra-index-url" not in (ROOT / path).read_text(), path
    docker = (ROOT / "Dockerfile").read_text()
    assert "--require-hashes" in docker
    assert "!requirements.lock" in (ROOT / ".dockerignore").read_text()


def test_the_image_and_the_actions_are_named_by_what_cannot_be_moved() -> None:
    docker = (ROOT / "Dockerfile").read_text()
    images = re.findall(r"^FROM (\S+)", docker, re.MULTILINE)
    assert images
    assert all(re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", image) for image in images)
    for path in (ROOT / ".github").rglob("*.yml"):
        for used in re.findall(r"uses:\s*(\S+)", path.read_text()):
            assert used.startswith("./") or re.fullmatch(r"\S+@[0-9a-f]{40}", used), (path, used)


def test_what_builds_the_package_is_pinned() -> None:
    one = re.compile(r"([a-z-]+)==([0-9.]+) --hash=sha256:[0-9a-f]{64}")
    matches = [one.fullmatch(line) for line in pinned(".ci/requirements-build.txt")]
    built = {found[1]: found[2] for found in matches if found is not None}
    assert len(built) == len(pinned(".ci/requirements-build.txt"))
    wanted = f"hatchling=={built['hatchling']}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["requires"] == [wanted]
    assert any(line.startswith(wanted) for line in pinned("requirements-dev.txt"))
    locked = [line for line in pinned("requirements.lock") if line.startswith("packaging==")]
    assert locked == [f"packaging=={built['packaging']} {locked[0].split()[1]}"]
    docker = (ROOT / "Dockerfile").read_text()
    assert "--require-hashes --no-deps -r requirements-build.txt" in docker
    assert "--no-build-isolation --no-deps ." in docker
    assert "!.ci/requirements-build.txt" in (ROOT / ".dockerignore").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_an_audit_that_could_not_look_up_is_no_pass(tmp_path: Path) -> None:
    """Where pip-audit cannot be installed."""
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "audit")], env={**os.environ, "PYTHON": "false"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("NOT AUDITED: ")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize(("index", "has_compiler"), [("cpu", False), ("cu130", True)])
def test_the_image_for_cuda_has_a_compiler(tmp_path: Path, index: str, has_compiler: bool) -> None:
    """Without one Triton compiles no kernel, and exponents are counted 10 to 50 times slower."""
    steps = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    (step,) = [line.removeprefix("RUN ") for line in steps if "apt-get" in line]
    for name in ("apt-get", "rm"):  # nothing else is on the path
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": str(tmp_path),
        "TORCH_INDEX": f"https://download.pytorch.org/whl/{index}",
    }
    said = subprocess.run(
        ["/bin/sh", "-c", step], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert bool(re.search("apt-get install .*gcc.*libc6-dev", said)) == has_compiler
    assert bool(said) == has_compiler
