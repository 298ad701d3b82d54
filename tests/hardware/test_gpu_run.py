"""benchmarks/gpu/run without a GPU: each part's commands are ones that start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ampscope.cli.main import main as ampscope

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_run_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return module(BENCHMARKS / "gpu" / "measure.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(BENCHMARKS / "gpu" / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_parts_are_listed_and_take_35_minutes(measure: ModuleType) -> None:
    lines = [line.split() for line in run().stdout.splitlines()[1:]]
    assert [name for name, _ in lines] == list(measure.PARTS)
    assert lines[-1][0] == "compiled"  # which "all" leaves out
    assert sum(int(seconds) for _, seconds in lines[:-1]) <= 35 * 60
    assert all(int(seconds) < 600 for _, seconds in lines)
    assert run("nonsense").returncode == 2


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "real"])
@pytest.mark.parametrize(
    "part",
    [
        "tests",
        "rehearsed",
        "kernel",
        "overhead",
        "ceilings",
        "cores",
        "batch",
        "telemetry",
        "zoo",
        "compiled",
    ],
)
def test_every_command_starts(
    part: str, dry: bool, measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def call(self: Any, *command: object, **surroundings: str) -> dict[str, Any]:
        called.append(list(map(str, command)))
        self.printed = "{}"
        return {"status": 0}

    monkeypatch.setattr(measure.Part, "call", call)
    measure.PARTS[part](measure.Part(part, tmp_path / "part.json", 600.0, dry))
    assert called
    for command in called:
        starts(command, measure, tmp_path, monkeypatch)


def starts(
    command: list[str], measure: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments are understood; nothing is run."""
    if command[:3] == list(measure.AMPSCOPE):
        context = ampscope.make_context("ampscope", command[3:])
        name, found, rest = ampscope.resolve_command(context, command[3:])
        assert found is not None
        given = found.make_context(name, rest, parent=context).params
        assert Path(given["store"]).name in command[5]  # none of it went to a script
        assert not given.get("args")
    elif command[1:3] == ["-m", "pytest"]:
        files = [ROOT / argument for argument in command if argument.endswith(".py")]
        assert files
        assert all(file.exists() for file in files)
    elif command[1:3] == ["-m", "benchmarks.compiled.score"]:
        benchmark = module(BENCHMARKS / "compiled" / "score.py")
        asked: list[Path] = []
        monkeypatch.setattr(benchmark, "add", lambda out, row: None)
        monkeypatch.setattr(
            benchmark, "measured", lambda kind, *_, **__: asked.append(benchmark.SCRIPTS / kind)
        )
        monkeypatch.setattr(
            benchmark, "variation", lambda name: asked.append(benchmark.VARIATIONS / name)
        )
        monkeypatch.setattr(sys, "argv", command[2:])
        benchmark.main()
        assert len(asked) == 1
        assert asked[0].with_suffix(".py").exists()
    elif command[0] == sys.executable:
        script = next(i for i, word in enumerate(command) if word.startswith(str(BENCHMARKS))
                      and not word.endswith("measure.py"))  # fmt: skip
        benchmark = module(Path(command[script]))
        for name in ("measure", "measure_cuda"):
            monkeypatch.setattr(benchmark, name, lambda *_: [], raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one that is not there")
        monkeypatch.setattr(sys, "argv", command[script:])
        benchmark.main()
    else:
        assert command[0] == "nvidia-smi"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_part_says_what_to_do(tmp_path: Path) -> None:
    script = BENCHMARKS / "gpu" / "measure.py"
    command = [sys.executable, script, "zoo", "--out", tmp_path / "zoo.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--dry needs none" in ended.stderr
