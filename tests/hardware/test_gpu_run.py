"""benchmarks/gpu/run without a GPU: its commands are ones that start, its limits hold, its bounds
find what is not believable."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from ampscope.cli.main import main as ampscope
from ampscope.policy.device_profiles import PROFILES
from ampscope.telemetry import sampler_process

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
GPU = BENCHMARKS / "gpu"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_run_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return module(GPU / "measure.py")


@pytest.fixture
def conductor() -> ModuleType:
    return module(GPU / "run.py")


def run(*arguments: str, **surroundings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **surroundings}
    command = ["bash", str(GPU / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# The parts: which there are, and that what they start can be started.


def test_first_has_nine_parts_in_eight_minutes(measure: ModuleType, conductor: ModuleType) -> None:
    assert {*conductor.PARTS, *conductor.HOST} == set(measure.PARTS)
    assert conductor.FIRST == (
        "look", "tests", "diagnose", "rehearsed", "price", "overhead", "ceilings", "compare",
        "cores",
    )  # fmt: skip
    assert sum(conductor.PARTS[name].seconds for name in conductor.FIRST) <= 475
    assert conductor.CLOCKS_S["first"] == 475
    files = {place.file for place in conductor.PARTS.values()} | {*conductor.HOST.values()}
    assert len(files | {"summary.json", "log.txt"}) <= 7


def test_what_is_asked_for_is_checked() -> None:
    listed = run()
    assert listed.returncode == 0
    assert listed.stdout.count("first") == 9
    assert run("again", "nonsense").returncode == 2
    assert run("again").returncode == 2
    assert run("first", "price").returncode == 2


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "real"])
@pytest.mark.parametrize(
    "part",
    ["tests", "host-tests", "diagnose", "zoo", "rehearsed", "overhead", "compiled-overhead",
     "ceilings", "compare", "cores", "more-cores", "kernel", "batch", "compiled"],
)  # fmt: skip
def test_every_command_starts(
    part: str, dry: bool, measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def call(self: Any, *command: object, **surroundings: str) -> dict[str, Any]:
        called.append(list(map(str, command)))
        self.printed = "{}"
        return {"status": 0}

    monkeypatch.setattr(measure.Part, "call", call)
    if part == "rehearsed":
        made = measure.Part("host-rehearsals", tmp_path / "host.json", 600.0, dry, tmp_path)
        measure.host_rehearsals(made)
    measure.PARTS[part](measure.Part(part, tmp_path / "part.json", 600.0, dry, tmp_path))
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
        files = [ROOT / argument for argument in command if argument.startswith("tests/")]
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
    else:
        assert command[0] == sys.executable
        script = next(i for i, word in enumerate(command) if word.startswith(str(BENCHMARKS))
                      and not word.endswith("measure.py"))  # fmt: skip
        benchmark = module(Path(command[script]))
        for name in ("measure", "measure_cuda"):
            monkeypatch.setattr(benchmark, name, lambda *_: [], raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one that is not there")
        monkeypatch.setattr(sys, "argv", command[script:])
        benchmark.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_part_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, GPU / "measure.py", "zoo", "--out", tmp_path / "zoo.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--dry needs none" in ended.stderr


def test_threads_add_to_a_part(measure: ModuleType, tmp_path: Path) -> None:
    part = measure.Part("zoo", tmp_path / "part.json", 60.0, True)
    with ThreadPoolExecutor(8) as pool:
        added = [pool.submit(part.add, str(number), {"number": number}) for number in range(64)]
    for one in added:
        one.result()
    assert len(json.loads((tmp_path / "part.json").read_text())["entries"]) == 64


def test_figures_of_a_comparison_are_those_of_its_json(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether AMP pays is asked of the card, with energy; no part asked it."""
    found = json.loads((BENCHMARKS / "results" / "compare_gpt_medium_cpu.json").read_text())
    fp32, bf16 = (dict(one) for one in found["precisions"])
    bf16["energy"] = {"joules": 300.0, "steps": 20}
    found["precisions"] = [fp32, bf16]

    def call(self: Any, *command: object, **surroundings: str) -> dict[str, Any]:
        out = command[command.index("--json") + 1]
        assert isinstance(out, Path)
        out.write_text(json.dumps(found))
        return {"status": 0}

    monkeypatch.setattr(measure.Part, "call", call)
    part = measure.Part("compare", tmp_path / "compare.json", 60.0, True)
    measure.compare(part)
    figures = {name: one["value"] for name, one in part.document["figures"].items()}
    assert figures["fp32 over bf16"] == pytest.approx(1.899, abs=0.001)
    assert figures["bf16 joules"] == 15.0
    assert figures["bf16 watts"] == pytest.approx(15.0 / 0.77325, rel=1e-4)
    assert figures["loss bf16 against fp32"] == pytest.approx(0.000138, abs=1e-6)


# Limits: what a part leaves behind ends, and no part ends another.

LEAVES_A_PROCESS = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)  # in a session of its own
subprocess.Popen(["sh", "-c", "sleep 600 & exit"], start_new_session=True).wait()  # an orphan
"""


def conducted(folder: Path, parts: str, *arguments: str, **constants: object) -> dict[str, Any]:
    """`run.py again` on a measure.py made up of ``parts``, a function each; its summary."""
    there = folder / "benchmarks" / "gpu"
    there.mkdir(parents=True)
    text = (GPU / "run.py").read_text()
    for name, value in constants.items():
        text = text.replace(f"\n{name} = ", f"\n{name} = {value!r}  # ", 1)
    (there / "run.py").write_text(text)
    (there / "measure.py").write_text(
        "import json, pathlib, sys, time\n"
        "name, out = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "figure = {'value': 1.0, 'believable': False}\n"
        "def write(**entries):\n"
        "    out.write_text(json.dumps({'figures': {'one': figure}, 'entries': entries}))\n"
        + textwrap.dedent(parts)
    )
    environment = {**os.environ, "OUT": str(folder / "out"), "MARK": folder.name}
    command = [sys.executable, str(there / "run.py"), *arguments]
    subprocess.run(command, env=environment, check=False, capture_output=True, timeout=120)
    summary: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return summary


def marked(mark: str) -> list[psutil.Process]:
    """Processes whose environment has the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_all_that_a_part_started_ends_with_it(tmp_path: Path) -> None:
    """Children with sessions of their own went on with the GPU under the next parts' timings."""
    name = f"mark-{uuid.uuid4().hex}"
    parts = LEAVES_A_PROCESS + "write(entry={})\nif name == 'price': time.sleep(600)"
    summary = conducted(tmp_path / name, parts, "again", "cores", "price", "--limit", "3")
    assert summary["parts"]["cores"]["status"] == "ok"
    assert summary["parts"]["price"]["status"] == "time over"
    assert marked(name) == []


def test_a_dry_part_that_is_cut_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    run("--dry", "again", "diagnose", "--limit", "5", OUT=str(tmp_path), MARK=mark)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parts"]["diagnose"]["status"] == "time over"
    assert marked(mark) == []


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    parts = """
    if name == "price": sys.exit("broken")
    write(good={}, bad={"status": 3})
    """
    summary = conducted(tmp_path, parts, "again", "price", "compare", "cores")
    states = {name: part["status"] for name, part in summary["parts"].items()}
    assert states == {"price": "failed", "compare": "ok", "cores": "ok"}
    assert summary["parts"]["compare"]["failed"] == ["bad"]
    assert summary["parts"]["compare"]["not_believable"] == ["one"]
    kept = json.loads((tmp_path / "out" / "hardware.json").read_text())["parts"]
    assert set(kept) == {"compare", "cores"}
    assert "broken" in (tmp_path / "out" / "log.txt").read_text()


def test_the_summary_says_what_runs(tmp_path: Path) -> None:
    """It is written before and after each part: what kills the call leaves it."""
    parts = """
    summary = json.loads((pathlib.Path(__file__).parents[2] / "out" / "summary.json").read_text())
    write(seen={"states": {n: p["status"] for n, p in summary["parts"].items()}})
    """
    conducted(tmp_path, parts, "again", "compare", "cores")
    kept = json.loads((tmp_path / "out" / "hardware.json").read_text())["parts"]
    seen = {name: part["entries"]["seen"]["states"] for name, part in kept.items()}
    assert seen == {"compare": {"compare": "running"},
                    "cores": {"compare": "ok", "cores": "running"}}  # fmt: skip


def test_no_part_starts_that_has_less_than_half_its_time(tmp_path: Path) -> None:
    clocks = {"first": 425.0, "again": 20.0}
    parts = "write(entry={})"
    summary = conducted(tmp_path, parts, "again", "price", "cores", CLOCKS_S=clocks)
    states = {name: part["status"] for name, part in summary["parts"].items()}
    assert states == {"price": "no time left", "cores": "ok"}


def test_a_file_stays_below_a_megabyte(tmp_path: Path) -> None:
    parts = "write(small={'found': 1}, large={'found': 'x' * 1_500_000})"
    conducted(tmp_path, parts, "again", "cores")
    path = tmp_path / "out" / "hardware.json"
    assert path.stat().st_size < 1_000_000
    entries = json.loads(path.read_text())["parts"]["cores"]["entries"]
    assert entries["small"] == {"found": 1}
    assert "bytes" in entries["large"]["left_out"]


def test_parts_that_are_run_again_replace_their_own_results(tmp_path: Path) -> None:
    conducted(tmp_path, "write(first={})", "again", "compare", "cores")
    shutil.rmtree(tmp_path / "benchmarks")
    conducted(tmp_path, "write(second={})", "again", "cores")
    kept = json.loads((tmp_path / "out" / "hardware.json").read_text())["parts"]
    assert {name: list(part["entries"]) for name, part in kept.items()} == {
        "compare": ["first"],
        "cores": ["second"],
    }


def test_host_work_that_is_asked_for_may_take_its_time(tmp_path: Path) -> None:
    parts = "time.sleep(1)\nwrite(entry={})"
    summary = conducted(tmp_path, parts, "again", "host-tests")
    assert summary["parts"]["host-tests"]["status"] == "ok"


# What makes a figure believable.


def believable(measure: ModuleType, part: str, card: str, **values: float) -> dict[str, bool]:
    figures = measure.judged(
        part, {k.replace("_over_", " over "): (v, "") for k, v in values.items()}, card
    )
    return {name: figure["believable"] for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("card", "copy", "is_believable"),
    [("h100", 3.0, True), ("h100", 4.4, False), ("h100", 1.9, False),
     ("h200", 4.4, True), ("h200", 3.0, False), ("", 0.3, True)],
)  # fmt: skip
def test_a_copy_is_judged_by_its_card(
    measure: ModuleType, card: str, copy: float, is_believable: bool
) -> None:
    assert believable(measure, "ceilings", card, copy=copy) == {"copy": is_believable}


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_rates_are_believed_together(measure: ModuleType, card: str) -> None:
    good = {"bf16": 700.0, "fp16": 720.0, "tf32": 400.0, "fp32": 50.0, "fp64": 60.0,
            "e4m3": 1200.0, "int8": 1100.0, "fp16_over_bf16": 1.03, "tf32_over_fp32": 8.0,
            "e4m3_over_bf16": 1.7, "int8_over_bf16": 1.6}  # fmt: skip
    assert all(believable(measure, "ceilings", card, **good).values())
    leaked = believable(measure, "ceilings", card, **{**good, "fp32": 395.0, "tf32_over_fp32": 1.0})
    assert {name for name, is_true in leaked.items() if not is_true} == {
        "fp32", "tf32", "tf32 over fp32",
    }  # fmt: skip
    zeros = believable(measure, "ceilings", card, **{**good, "fp16": 800.0, "fp16_over_bf16": 1.14})
    assert not zeros["bf16"]


def test_a_reason_says_on_which_side_a_figure_lies(measure: ModuleType) -> None:
    low, high = (
        measure.judged("compare", {"fp32 over bf16": (value, "ratio")}, "h100")["fp32 over bf16"]
        for value in (1.05, 13.0)
    )
    assert "launches" in low["reason"]
    assert "fp32" in high["reason"]
    assert (low["low"], low["high"]) == (2.5, 8)


def test_a_noisy_machine_puts_all_ratios_of_its_model_in_doubt(measure: ModuleType) -> None:
    values = {"gpt:small asleep": (1.02, ""), "gpt:small spread": (0.2, ""),
              "gpt:medium:256 asleep": (1.01, ""), "gpt:medium:256 spread": (0.01, "")}  # fmt: skip
    figures = measure.judged("overhead", values, "h100")
    assert [name for name, one in figures.items() if one["believable"]] == [
        "gpt:medium:256 asleep", "gpt:medium:256 spread",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "name", "good", "bad"),
    [
        ("overhead", "gpt:small default", 1.1, 0.9),
        ("overhead", "gpt:small everything", 2.0, 4.0),
        ("price", "gpt:small bf16 asleep waits", 0.0, 1.0),
        ("price", "gpt:small fp16+scaler asleep waits", 1.0, 2.0),
        ("rehearsed", "gpt small fp16 ops_that_differ", 0.0, 1.0),
        ("rehearsed", "gpt small fp16 share_in_another_bin", 1e-4, 0.02),
        ("cores", "gpt:medium:256 bf16 used", 0.99, 0.5),
        ("more-cores", "gpt:medium:256 fp32 used", 0.0, 0.4),
        ("compare", "memory bf16 over fp32", 0.7, 1.1),
        ("compare", "bf16 watts", 500.0, 900.0),
        ("kernel", "bfloat16 gaussian launch for many share", 0.5, 1.2),
        ("look", "first_step elements_in_another_bin", 0.0, 1.0),
    ],
)
def test_bounds(measure: ModuleType, part: str, name: str, good: float, bad: float) -> None:
    for value, expected in ((good, True), (bad, False), (None, False), (float("nan"), False)):
        figure = measure.judged(part, {name: (value, "")}, "h100")[name]
        assert figure["believable"] is expected
        assert bool(figure["reason"]) is not expected


def test_a_dry_figure_is_never_believable(measure: ModuleType, tmp_path: Path) -> None:
    part = measure.Part("ceilings", tmp_path / "part.json", 60.0, True)
    part.figure("copy", 3.0, "TB/s")
    kept = json.loads((tmp_path / "part.json").read_text())["figures"]["copy"]
    assert (kept["believable"], kept["reason"]) == (False, "a dry run")


# The benchmarks that a part calls.


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module


def test_a_session_takes_as_many_samples_as_it_is_asked_for(
    benchmark_module: Callable[[str], ModuleType],
) -> None:
    """Models too small to fill a card priced the host's work at 1:1."""
    session = benchmark_module("overhead_contestants").Session(
        "mlp", "tiny", torch.device("cpu"), "native", "fp32", 48
    )
    assert len(next(session.batches)[0]) == 48
    session.step()


def test_no_sampler_reads_beside_the_bare_steps(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four watches started four processes that read the machine, beside the bare steps as well."""
    monkeypatch.setenv(sampler_process.WANTED, "1")
    started: list[object] = []
    monkeypatch.setattr(
        sampler_process.subprocess, "Popen", lambda *given, **_: started.append(given)
    )
    session = benchmark_module("overhead_contestants").Session(
        "mlp", "tiny", torch.device("cpu"), "native", "fp32"
    )
    benchmark_module("overhead_watch").watch_contestants(session)
    assert started == []


def test_plain_torch_is_timed_in_few_rounds_on_few_elements(
    monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., Any]
) -> None:
    """It alone would have taken all of the time that the counter's prices have."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    benchmark = module(BENCHMARKS / "exponent_kernel.py")
    monkeypatch.setattr(benchmark, "PLAIN_LARGEST", 16)
    timed: list[tuple[str, int]] = []

    def interleaved(contestants: dict[str, Any], rounds: int, *_: object) -> dict[str, list[float]]:
        timed.extend((name, rounds) for name in contestants)
        if "plain torch" in contestants:
            (tensors,) = contestants["plain torch"].args[1:]
            assert max(tensor.numel() for tensor in tensors) <= 16
        return {name: [1.0] * rounds for name in contestants}

    monkeypatch.setattr(benchmark, "interleaved", interleaved)
    asked = argparse.Namespace(
        rounds=9, largest=64, dtypes=["float32"], kinds=["gaussian", "equal"]
    )
    with stand_in(PROFILES["h100"]):
        lines = benchmark.measure_cuda(asked)
    plain = [rounds for name, rounds in timed if name == "plain torch"]
    assert plain == [3, 3]  # of two shapes, and of gaussian alone
    assert [line["kind"] for line in lines] == ["gaussian", "equal"] * 2
    one = next(line for line in lines if line["tensors"] == "one tensor")
    assert one["ns_per_element"]["plain torch"][1] == pytest.approx(4 * 1e9 / 64)


def test_a_capture_that_a_watch_breaks_is_a_figure_and_ends_no_part(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_graphs(part: Any, kind: str, *, watched: bool) -> list[torch.Tensor]:
        if watched and kind == "full-step-capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        return [torch.ones(1) * (1 + watched)]

    monkeypatch.setattr(measure, "by_graphs", by_graphs)
    monkeypatch.setenv(sampler_process.WANTED, "0")
    part = measure.Part("graphs", tmp_path / "price.json", 60.0, True)
    measure.graphs(part)
    figures = {name: one["value"] for name, one in part.document["figures"].items()}
    assert figures == {
        "full-step-capture survived": 0, "full-step-capture alike": None,
        "reduce-overhead survived": 1, "reduce-overhead alike": 0,
    }  # fmt: skip
    entries = part.document["entries"]
    assert "capturing" in entries["full-step-capture"]["output"]
    assert entries["reduce-overhead"]["status"] == 0
