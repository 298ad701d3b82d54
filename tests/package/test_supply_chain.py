"""What is installed: the lock agrees with the requirements; one index alone serves a package."""

from __future__ import annotations

import re
import subprocess
import sys
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
