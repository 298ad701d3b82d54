"""What each part measures on a CUDA device, and the bounds that make a figure believable.

    python benchmarks/gpu/measure.py price --seconds 45 --out price.json
    python benchmarks/gpu/measure.py price --out price.json --dry    # without a GPU

`run.py` beside this file starts the parts; README.md has the schema of what they write. A part is a
list of entries, each written as soon as it is there, and of figures. ``--dry`` runs the smallest
form of each on the CPU, or on the device that a rehearsal stands in for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
ZOO = ROOT / "core" / "ampscope" / "zoo"
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]
AMPSCOPE = (sys.executable, "-m", "ampscope.cli.main")
NEEDS_A_GPU = "needs a GPU"
KEPT_OUTPUT = 1_500  # characters of what a command printed last
WRITING_S = 1.5  # what is left of a part's time when its commands are ended

Entry = dict[str, Any]


# What makes a figure believable, for the cards whose data sheet is known.


@dataclass(frozen=True, slots=True)
class Bound:
    """``figures`` of ``parts`` (patterns of `fnmatch`) lie within; where they do not, ``below`` or
    ``above`` says what that means. ``doubts``: patterns of figures that then are in doubt as well,
    ``{}`` being the figure's name without its last word. ``card`` "" holds for every card."""

    parts: str
    figures: str
    low: float | None
    high: float | None
    below: str = "less than this card can be expected to reach"
    above: str = "more than this card can do"
    card: str = ""
    doubts: tuple[str, ...] = ()


_TFLOPS = "shared with another process, or held down"
_NO_FAST_PATH = "no faster path for this dtype was taken"
BOUNDS = (
    Bound("ceilings", "copy", 2.6, 3.3, "the memory is shared or held down",
          "beyond the memory's peak: a cache, or the wrong number of bytes", "h100"),
    Bound("ceilings", "copy", 4.0, 4.7, "the memory is shared or held down",
          "beyond the memory's peak: a cache, or the wrong number of bytes", "h200"),
    *(bound for card in ("h100", "h200") for bound in (
        Bound("ceilings", "bf16", 600, 830, _TFLOPS, "beyond the peak of random data", card),
        Bound("ceilings", "fp16", 600, 830, _TFLOPS, "beyond the peak of random data", card),
        Bound("ceilings", "tf32", 300, 480, _TFLOPS, "beyond the peak", card),
        Bound("ceilings", "fp32", 40, 62, _TFLOPS, "beyond the peak of fp32: TF32 was on", card),
        Bound("ceilings", "fp64", 40, 66, _TFLOPS, "beyond the peak of fp64", card),
        Bound("ceilings", "e4m3", 900, 1600, _NO_FAST_PATH, "beyond the peak", card),
        Bound("ceilings", "int8", 700, 1600, _NO_FAST_PATH, "beyond the peak", card),
        Bound("compare", "fp32 over bf16", 2.5, 8, "bound by launches, not by arithmetic",
              "fp32 is not what it says", card),
        Bound("compare", "tf32 over bf16", 1.1, 2, "bound by launches, or TF32 was not off",
              "TF32 was not on", card),
        Bound("compare", "* watts", 200, 700, "the counter lags, or the device idled",
              "the counter lags", card),
        Bound("compare", "samples mean watts", 100, 735, "the device idled",
              "beyond the power limit", card),
        Bound("compare", "samples peak sm_mhz", 300, 1980, "the clocks were held down",
              "beyond the highest clock", card),
        Bound("overhead", "gpt:small bare_ms", 4, 12, "fewer launches than this model has",
              "the host was busy", card),
        Bound("kernel", "* share", 0.03, 0.9, "slower than plain torch",
              "beyond the copy: a cache", card),
    )),
    Bound("ceilings", "fp16 over bf16", 0.9, 1.1, "fp16 and bf16 have one rate",
          "fp16 and bf16 have one rate", doubts=("fp16", "bf16")),
    Bound("ceilings", "tf32 over fp32", 2, None, "the switch of TF32 had no effect",
          doubts=("tf32", "fp32")),
    Bound("ceilings", "e4m3 over bf16", 1, None, _NO_FAST_PATH),
    Bound("ceilings", "int8 over bf16", 1, None, _NO_FAST_PATH),
    Bound("compare", "fp16 over bf16", 0.9, 1.1, "fp16 and bf16 have one rate",
          "fp16 and bf16 have one rate"),
    Bound("compare", "as it comes fp32 over bf16", 0.7, 1.1, "casts cost more than launches can",
          "not bound by launches: another batch"),
    Bound("compare", "memory bf16 over fp32", 0.55, 0.85, "the batches differ",
          "copies of casts were kept"),
    Bound("compare", "samples watts over counter", 0.85, 1.15, "the energy counter lags",
          "the energy counter lags", doubts=("* watts", "* joules")),
    Bound("compare", "loss bf16 against fp32", None, 0.01, above="another batch, or other weights"),
    *(bound for part in ("overhead", "compiled-overhead") for bound in (
        Bound(part, "* spread", None, 0.08, above="the machine was not quiet", doubts=("{} *",)),
        *(Bound(part, f"* {watch}", 0.98, 3.5, "faster than without: noise",
                "a wait or a compilation is in it")
          for watch in ("asleep", "default", "tenth", "everything")),
        Bound(part, "telemetry", 0.98, 1.5, "faster than without: noise", "another load"),
    )),
    Bound("price", "* bf16 asleep waits", None, 0, above="a wait that the training has not"),
    Bound("price", "* fp16* asleep waits", None, 1, above="a wait that the training has not"),
    Bound("rehearsed", "* ops_that_differ", None, 0, above="other ops than rehearsed"),
    Bound("rehearsed", "* share_in_another_bin", None, 1e-2,
          above="another rounding, or TF32 was on"),
    Bound("*cores", "* bf16 used", 0.95, 1, "unknown kernels, or none of Tensor Cores"),
    Bound("*cores", "* fp16 used", 0.95, 1, "unknown kernels, or none of Tensor Cores"),
    Bound("*cores", "* tf32 used", 0.9, 1, "unknown kernels, or none of Tensor Cores"),
    Bound("*cores", "* fp32 used", None, 0, above="TF32 was on"),
    Bound("*cores", "* unknown", None, 0.2, above="kernels with names that are not known",
          doubts=("{} used",)),
    Bound("look", "modules_failed", None, 0, above="modules that do not load"),
    Bound("look", "first_step elements_in_another_bin", None, 0, above="the counter is wrong"),
    Bound("look", "own_memory beyond_allocator_gb", 0.4, 0.8, "no context is counted",
          "memory of others is counted"),
    Bound("look", "nvml watts", 20, 735, "a counter that stands still", "beyond the power limit"),
)  # fmt: skip


def card_of(name: str) -> str:
    """The key of a card's bounds; "" where it has none."""
    return next((kind for kind in ("h100", "h200") if kind in name.lower()), "")


def judged(
    part: str, values: Mapping[str, tuple[float | None, str]], card: str
) -> dict[str, Entry]:
    """Figures by name, of (value, unit), with the bounds that they lie within or not."""
    figures = {
        name: {"value": value, "unit": unit, "low": None, "high": None,
               "believable": value is not None, "reason": "not measured" if value is None else ""}
        for name, (value, unit) in values.items()
    }  # fmt: skip
    for bound in BOUNDS:
        if not fnmatch.fnmatchcase(part, bound.parts) or bound.card not in ("", card):
            continue
        for name in fnmatch.filter(values, bound.figures):
            figure, value = figures[name], values[name][0]
            figure |= {"low": bound.low, "high": bound.high}
            if value is None:
                continue
            is_low = bound.low is not None and not value >= bound.low
            is_high = bound.high is not None and not value <= bound.high
            if not (is_low or is_high):
                continue
            reason = bound.below if is_low else bound.above
            figure |= {"believable": False, "reason": reason}
            for pattern in bound.doubts:
                for other in fnmatch.filter(values, pattern.format(name.rpartition(" ")[0])):
                    if figures[other]["believable"]:
                        figures[other] |= {"believable": False, "reason": f"{name}: {reason}"}
    return figures


class Part:
    """The document of one part: entries and figures by name, written whenever one is added."""

    def __init__(
        self, name: str, out: Path, seconds: float, dry: bool, shared: Path | None = None
    ) -> None:
        from contest import setting

        self.name, self.dry, self.out = name, dry, out
        self.shared = shared  # what parts leave for one another
        self.printed = ""  # by the last command
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._seconds = seconds
        self._values: dict[str, tuple[float | None, str]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="m-"))
        self.store = self.folder / "runs.db"
        found = setting()
        self.card = card_of(str(found["gpu"] or ""))
        card = card_now() if found["gpu"] else {}
        self.document: Entry = {"part": name, "dry": dry, "card": card, "setting": found,
                                "figures": {}, "entries": {}}  # fmt: skip
        self._write()

    def add(self, name: str, entry: Entry) -> None:
        """Write one more entry; says it, too."""
        with self._lock:  # threads add, too
            self.document["entries"][name] = {"status": 0, **entry}
            self._write()
        brief = {k: v for k, v in entry.items() if not isinstance(v, dict | list)}
        print(name, json.dumps(brief, default=str)[:300], flush=True)

    def figure(self, name: str, value: float | None, unit: str = "") -> None:
        """Write one more figure."""
        with self._lock:
            self._values[name] = (None if value is None else float(value), unit)
            self._write()

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def left_s(self) -> float:
        """Seconds until the part's time is over."""
        return self._seconds - WRITING_S - (time.monotonic() - self._started)

    def _write(self) -> None:
        figures = judged(self.name, self._values, self.card)
        if self.dry:
            figures = {name: figure | {"believable": False, "reason": "a dry run"}
                       for name, figure in figures.items()}  # fmt: skip
        self.document["figures"] = figures
        self.document["elapsed_s"] = round(time.monotonic() - self._started, 1)
        whole = self.out.with_suffix(".part")
        whole.write_text(json.dumps(self.document, indent=1, default=str) + "\n")
        whole.replace(self.out)

    def call(self, *command: str | Path, **surroundings: str) -> Entry:
        """Run a command within the part's time; how it ended, and its last lines if it failed."""
        started = time.monotonic()
        path = f"{ROOT / 'core'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environment = {**os.environ, "PYTHONPATH": path, **surroundings}
        # Into files: what a command has started keeps a pipe open beyond the command's end.
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complained:
            try:
                status = subprocess.run(
                    list(map(str, command)), stdout=printed, stderr=complained, env=environment,
                    timeout=max(1.0, self.left_s()), cwd=ROOT, stdin=subprocess.DEVNULL,
                    check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = 124
            except OSError as error:
                status = 127
                complained.write(str(error).encode())
            output, said = (_text(stream) for stream in (printed, complained))
        entry: Entry = {
            "command": " ".join(Path(c).name if Path(c).is_absolute() else str(c) for c in command),
            "status": status,
            "seconds": round(time.monotonic() - started, 1),
        }
        self.printed = output
        if status:
            entry["output"] = (output + said)[-KEPT_OUTPUT:]
        return entry

    def ampscope(
        self, command: str, *arguments: str | Path, store: Path | None = None, **surroundings: str
    ) -> Entry:
        """A command of ampscope on this part's store."""
        # Options come first: what follows a script's name is the script's own.
        whole = (*AMPSCOPE, command, "--store", store or self.store, *arguments)
        return self.call(*whole, **surroundings)

    def found(self, name: str) -> Any:
        """What a command left as JSON in the part's folder, or None."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def stand_in(script: str, *arguments: str) -> None:
    """Run a benchmark with a CUDA device that is stood in for."""
    from ampscope.ext.rehearsal.simulated_device import simulated_cuda
    from ampscope.policy.device_profiles import PROFILES

    sys.argv = [script, *arguments]
    with simulated_cuda(PROFILES["h100"]):
        runpy.run_path(script, run_name="__main__")


# 1. The card, the modules, the counter, one step that is watched, the energy counter.

OPTIONAL = {"keras", "lightning", "mcp", "paddle", "plotly", "ray", "streamlit", "submitit",
            "tensorflow", "transformers", "uvicorn"}  # fmt: skip
IMPORTING = """
import importlib, json, pkgutil, sys
import ampscope
failed, absent = {}, {}
for module in pkgutil.walk_packages(ampscope.__path__, "ampscope."):
    if module.name.endswith("__main__") or module.name.startswith("ampscope.zoo.scripts"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        absent[module.name] = error.name or str(error)
    except BaseException as error:
        failed[module.name] = f"{type(error).__name__}: {error}"
print(json.dumps({"failed": failed, "absent": absent, "loaded": len(sys.modules)}))
"""


def look(part: Part) -> None:
    part.add("card", dict(part.document["card"]))
    if not part.dry:
        part.add("nvidia-smi", part.call("nvidia-smi") | {"printed": part.printed[-4_000:]})
    with ThreadPoolExecutor(1) as pool:  # a process beside: importing everything takes ten seconds
        modules = pool.submit(load_modules, part)
        for name, measure in (("counter", counter_compiled), ("first step", first_step),
                              ("energy", energy_twice)):  # fmt: skip
            with _reported(part, name):
                part.add(name, measure(part))
        part.add("modules", modules.result())


def load_modules(part: Part) -> Entry:
    """Import every module of ampscope; which fail, but for those of optional packages."""
    entry = part.call(sys.executable, "-c", IMPORTING) | {"command": "import every module"}
    if entry["status"]:
        return entry
    found = json.loads(part.printed.splitlines()[-1])
    found["failed"] |= {name: f"needs {package}" for name, package in found["absent"].items()
                        if package.partition(".")[0] not in OPTIONAL}  # fmt: skip
    part.figure("modules_failed", len(found["failed"]))
    return entry | found


def card_now() -> Entry:
    """The card that torch takes, and the driver."""
    import torch

    from ampscope.hardware.gpu import read_gpus

    survey, properties = read_gpus(), torch.cuda.get_device_properties(0)
    return {
        "name": properties.name, "uuid": f"GPU-{properties.uuid}", "driver": survey.driver,
        "cuda": survey.cuda_driver, "kind": card_of(properties.name),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }  # fmt: skip


def counter_compiled(part: Part) -> Entry:
    """Seconds until the counter of this device is ready, from a cold cache of compiled kernels."""
    import torch

    from ampscope.capture import exponent_count

    started = time.perf_counter()
    counter = exponent_count.DeviceCounter(torch.device(part.device))
    counter.add(torch.zeros(8, device=part.device), 0)
    counter.collect().rows()
    seconds = time.perf_counter() - started
    part.figure("compile", round(seconds, 2), "s")
    entry: Entry = {"compile_s": round(seconds, 2), "numba": "imported"}
    try:
        import numba  # noqa: F401  # may refuse the installed NumPy: a CPU's counter is then slow
    except Exception as error:
        entry["numba"] = f"{type(error).__name__}: {error}"
    if not part.dry:
        reason = exponent_count.triton_problem(counter.device)
        entry |= {"triton": not reason, "reason": reason, "status": int(bool(reason))}
    return entry


def first_step(part: Part) -> Entry:
    """One fp16 step with a watch: the histogram of each linear layer's output against NumPy's."""
    import numpy as np
    import torch

    import ampscope
    from ampscope.records import Role
    from ampscope.store.reader import Reader
    from tests.helpers.exponent_oracle import row_of

    torch.manual_seed(0)
    device = torch.device(part.device)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    seen: dict[str, Any] = {}
    for name in ("0", "2"):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: seen.update({name: output.detach().cpu().numpy()})
        )
    with ampscope.watch(model, optimizer, scaler, every=1, store=part.store):
        with torch.autocast(device.type, dtype=torch.float16):
            loss = model(torch.randn(32, 64, device=device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with Reader(part.store) as reader:
        run = reader.runs()[0]
        places = {module.path: module.index for module in reader.modules(run.id)}
        frame = reader.frame(run.id, Role.ACTIVATION, 0)
    moved, elements = 0, 0
    for name, values in seen.items():
        expected = row_of(values.astype(np.float64).ravel().tolist())
        found = None if frame is None else frame.row_of(places[name])
        moved += int(expected.sum() if found is None else np.abs(found - expected).sum())
        elements += values.size
    part.figure("first_step elements_in_another_bin", moved)
    return {"status": int(moved > 0), "elements": elements, "elements_in_another_bin": moved,
            "dtypes": sorted({str(v.dtype) for v in seen.values()})}  # fmt: skip


def energy_twice(part: Part) -> Entry:
    """NVML by the card's UUID: its energy counter twice, one second apart; and the memory that it
    says this process has, beside what torch's allocator has reserved."""
    if part.dry:
        return {"note": f"NVML {NEEDS_A_GPU}"}
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(part.document["card"]["uuid"].encode())
    first = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    started = time.monotonic()
    time.sleep(1.0)
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - first) / 1e3
    part.figure("nvml watts", round(joules / (time.monotonic() - started), 1), "W")
    processes = {p.pid: p.usedGpuMemory for p in
                 pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}  # fmt: skip
    own, reserved = processes.get(os.getpid()), torch.cuda.memory_reserved()
    if own is not None:  # a container has process numbers of its own
        part.figure("own_memory beyond_allocator_gb", round((own - reserved) / 1e9, 2), "GB")
    return {"joules": joules, "own_memory_bytes": own, "reserved_bytes": reserved,
            "processes": len(processes)}  # fmt: skip


# 2. Tests that carry the marker gpu; and, on the CPUs beside it, tests that need no device.


def tests(part: Part) -> None:
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    workers = "0" if part.dry else "4"
    run_tests(part, "marked gpu", "-m", "gpu", "--slow", "-n", workers, *files)


def host_tests(part: Part) -> None:
    folders = [
        f"tests/{name}" for name in ("capture", "ext/rehearsal", "policy", "watcher", "runner")
    ]
    if part.dry:
        folders = ["tests/numerics/test_formats.py"]
    chosen = ("-m", "not gpu and not slow and not browser")
    run_tests(part, "without a device", *chosen, "-n", "0" if part.dry else "6", *folders)


def run_tests(part: Part, name: str, *chosen: str) -> None:
    report = part.folder / "tests.xml"
    entry = part.call(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}",
        "--override-ini", "filterwarnings=default", *chosen,
    )  # fmt: skip
    if report.exists():
        entry |= test_counts(report)
        for count in ("passed", "failed", "skipped"):
            part.figure(count, entry[count])
    part.add(name, entry)


def test_counts(report: Path) -> Entry:
    """How many passed, failed and were skipped, and why."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    ended: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}}
    for case in cases:
        for child in case:
            kind = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(child.tag)
            if kind:
                text = f"{child.get('message') or ''}\n{child.text or ''}"
                ended[kind][f"{case.get('classname')}::{case.get('name')}"] = text[-1_500:]
    counts = {kind: len(found) for kind, found in ended.items()}
    passed = len(cases) - sum(counts.values())
    return {"tests": len(cases), "passed": passed, **counts, "failures": ended["failed"],
            "skips": sorted(set(ended["skipped"].values()))}  # fmt: skip


# 3. Faulty scripts, all at once; and a healthy one that takes 60 % of the memory.

CASES = ("C01", "C30", "C66", "C72")
MORE_CASES = ("C55", "C15", "C10", "C61")
LARGE = """
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 64 << 20
held = torch.empty(int(0.6 * total), dtype=torch.uint8, device=device)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(device)
inputs, targets = torch.randn(32, 64, device=device), torch.randn(32, 8, device=device)
for step in range(10):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def diagnose(part: Part) -> None:
    """Each is a process with a store and a temporary folder of its own, so that none waits."""
    script = part.folder / "large.py"
    script.write_text(LARGE)
    cases = CASES[-1:] if part.dry else CASES
    answers = tomllib.loads((ZOO / "answers.toml").read_text())
    with ThreadPoolExecutor(len(cases) + 1) as pool:
        large = pool.submit(diagnosed, part, "large", script, "--steps", "10", "--no-verify")
        for case, running in [
            (c, pool.submit(diagnosed, part, c, zoo_script(answers[c]))) for c in cases
        ]:
            judge_case(part, case, answers[case], running.result())
        add_large(part, large.result())


def zoo(part: Part) -> None:
    cases = MORE_CASES[-1:] if part.dry else MORE_CASES
    answers = tomllib.loads((ZOO / "answers.toml").read_text())
    with ThreadPoolExecutor(len(cases)) as pool:
        for case, running in [
            (c, pool.submit(diagnosed, part, c, zoo_script(answers[c]))) for c in cases
        ]:
            judge_case(part, case, answers[case], running.result())


def zoo_script(answer: Entry) -> Path:
    return ZOO / "scripts" / f"{answer['script']}.py"


def diagnosed(part: Part, name: str, script: Path, *options: str) -> Entry:
    """What a diagnosis of the script says, and its runs in the order that they were started."""
    folder = part.folder / name
    folder.mkdir()
    out, store = folder / "result.json", folder / "runs.db"
    entry = part.ampscope(
        "diagnose", "--json", out, "--quiet", *options, script, store=store, TMPDIR=str(folder)
    )
    found = part.found(f"{name}/result.json")
    if found is None:
        return entry | {"status": entry["status"] or 1}
    # Status 1 is "fault found"; what could not be run or judged has no verdict.
    entry["status"] = 0 if found["verdict"] in ("fault", "no_fault") else 2
    entry.pop("output", None)
    entry |= {key: found[key] for key in ("verdict", "reason", "notes", "symptoms", "tried")}
    entry["seconds"] = found["elapsed_s"]
    entry["runs"] = _runs(store, found["runs"])
    first = (found["findings"] or [{}])[0]
    fix = first.get("fix") or {}
    entry |= {"cause": first.get("cause"), "module": first.get("module"), "op": first.get("op"),
              "line": first.get("line"), "fix": fix.get("kind"), "verified": fix.get("verified"),
              "verification": fix.get("verification")}  # fmt: skip
    return entry


def _runs(store: Path, names: Mapping[str, str]) -> list[Entry]:
    from ampscope.store.reader import Reader

    with Reader(store) as reader:
        runs = [(control, reader.run(run)) for control, run in names.items()]
    return [
        {"control": control, "steps": run.steps_done, "started": run.started, "ended": run.ended,
         "state": str(run.state), "message": run.message,
         "device": run.machine.device if run.machine else None}
        for control, run in sorted(runs, key=lambda pair: pair[1].started or 0.0)
    ]  # fmt: skip


def judge_case(part: Part, case: str, answer: Entry, entry: Entry) -> None:
    right = entry.get("cause") in (answer["cause"], *answer.get("accept", ()))
    part.add(case, entry | {"expected": answer["cause"], "right": right})
    part.figure(f"{case} right", right)
    part.figure(f"{case} verified", bool(entry.get("verified")))
    if "runs" not in entry:
        return
    part.figure(f"{case} seconds", entry["seconds"], "s")
    part.figure(f"{case} runs", len(entry["runs"]))
    unchanged = next((run for run in entry["runs"] if run["control"] == "as_is"), None)
    if unchanged and unchanged["started"] and unchanged["ended"]:
        lasted_s = unchanged["ended"] - unchanged["started"]
        part.figure(f"{case} steps_per_s", round(unchanged["steps"] / lasted_s, 1), "1/s")


def add_large(part: Part, entry: Entry) -> None:
    part.add("large", entry)
    runs = {run["control"]: run for run in entry.get("runs", ())}
    first, second = runs.get("as_is"), runs.get("fp32")
    apart = None
    if first and second and all(run["started"] and run["ended"] for run in (first, second)):
        apart = first["ended"] <= second["started"] or second["ended"] <= first["started"]
    part.figure("large one_after_the_other", apart)
    words = json.dumps([run["message"] for run in runs.values()] + [entry.get("reason")])
    part.figure("large out_of_memory", "out of memory" in words.lower() if runs else None)


# 4. The same runs on the device and rehearsed on its CPU: ops, dtypes and casts; histograms.

TRAININGS = (("gpt", "small", "fp16"), ("gpt", "small", "bf16"), ("resnet", "small", "fp16"),
             ("rnn", "small", "fp16"))  # fmt: skip
SCRIPTS = ("c07_attention_logits", "c15_rms_norm")
Command = tuple[str, ...]


def both_sides(dry: bool) -> dict[str, tuple[Command, Command]]:
    """By name the command for the device and that of its rehearsal."""
    found: dict[str, tuple[Command, Command]] = {}
    for workload, size, precision in (("mlp", "tiny", "fp16"),) if dry else TRAININGS:
        probe = ("probe", workload, "--size", size, "--precision", precision, "--steps", "3",
                 "--shadow-every", "0")  # fmt: skip
        rehearsal = (*probe, "--device", "cpu", "--policy", "cuda")
        real = (*probe, "--device", "cuda")
        found[f"{workload} {size} {precision}"] = (rehearsal if dry else real, rehearsal)
    for name in SCRIPTS[:1] if dry else SCRIPTS:
        script, run = str(ZOO / "scripts" / f"{name}.py"), ("run", "--steps", "4" if dry else "20")
        rehearsal = (*run, "--policy", "cuda", script)
        found[name] = (rehearsal if dry else (*run, script), rehearsal)
    return found


def host_rehearsals(part: Part) -> None:
    """All rehearsals at once, each on two threads; run beside `rehearsed`, which waits for them."""
    sides = both_sides(part.dry)
    with ThreadPoolExecutor(2 if part.dry else len(sides)) as pool:
        running = [
            pool.submit(one_side, part, name, command, _rehearsal_of(part, name))
            for name, (_, command) in sides.items()
        ]
    for side in running:
        side.result()


def rehearsed(part: Part) -> None:
    sides = both_sides(part.dry)
    own = {name: part.folder / f"{_file_name(name)}.db" for name in sides}
    with ThreadPoolExecutor(2 if part.dry else 3) as pool:
        running = {
            name: pool.submit(one_side, part, name, command, own[name])
            for name, (command, _) in sides.items()
        }
        for name, side in running.items():
            entry, ended = side.result(), _rehearsal_of(part, name).with_suffix(".json")
            while not ended.exists() and part.left_s() > 1:
                time.sleep(0.1)
            both: Entry = {"device": entry, "status": entry["status"]}
            if not ended.exists():
                part.add(name, both | {"status": 1, "note": "its rehearsal took too long"})
                continue
            both["rehearsed"] = json.loads(ended.read_text())
            both["status"] = both["status"] or both["rehearsed"]["status"]
            if all(path.exists() for path in (own[name], _rehearsal_of(part, name))):
                both |= differences(own[name], _rehearsal_of(part, name))
                part.figure(f"{name} ops_that_differ", both["ops_that_differ"])
                shares = [role["share_in_another_bin_first_step"] or 0.0
                          for role in both["histograms"].values()]  # fmt: skip
                part.figure(f"{name} share_in_another_bin", max(shares, default=None), "share")
            if part.dry:
                both["note"] = f"two rehearsals were compared: the device's side {NEEDS_A_GPU}"
            part.add(name, both)


def one_side(part: Part, name: str, command: Command, store: Path) -> Entry:
    """A run with a temporary folder of its own, so that it does not wait for the CPU's lock."""
    folder = tempfile.mkdtemp(dir=part.folder)
    entry = part.ampscope(*command, store=store, TMPDIR=folder, OMP_NUM_THREADS="2")
    if part.name == "host-rehearsals":
        part.add(name, entry)
        _write_whole(store.with_suffix(".json"), entry)
    return entry


def _rehearsal_of(part: Part, name: str) -> Path:
    return (part.shared or part.folder) / f"{_file_name(name)}-rehearsed.db"


def _file_name(name: str) -> str:
    return name.replace(" ", "-")


def _write_whole(path: Path, entry: Entry) -> None:
    whole = path.with_suffix(".whole")
    whole.write_text(json.dumps(entry, default=str))
    whole.replace(path)


def differences(first: Path, second: Path) -> Entry:
    """Between the last runs of two stores: ops by (module, phase, op, dtypes) and counts, the
    optimizer's apart, for it steps many tensors in one op on CUDA; and of each histogram's
    elements, the share that lies in another bin."""
    from ampscope.records import Role
    from ampscope.store.reader import Reader

    with Reader(first) as one, Reader(second) as other:
        sides = [(reader, reader.runs()[0]) for reader in (one, other)]
        machines = [run.machine.policy if run.machine else "" for _, run in sides]
        losses = [[step.loss for step in reader.steps(run.id)] for reader, run in sides]
        ops = [_ops(reader, run.id) for reader, run in sides]
        only = [a - b for a, b in (ops, ops[::-1])]
        own = [{k: n for k, n in found.items() if k[1] != "step"} for found in only]
        roles = {}
        for role in Role:
            a, b = ({f.step: f for f in reader.frames(run.id, role)} for reader, run in sides)
            if a or b:
                roles[role.value] = _moved(a, b)
    return {
        "policies": machines, "losses": losses, "ops": sum(ops[0].values()),
        "ops_only_on_device": sorted(map(str, own[0].items()))[:40],
        "ops_only_rehearsed": sorted(map(str, own[1].items()))[:40],
        "ops_that_differ": sum(map(len, own)),
        "ops_of_the_optimizer_that_differ": sum(map(len, only)) - sum(map(len, own)),
        "histograms": roles,
    }  # fmt: skip


# The same arithmetic under another name, or in one op instead of two. CUDA's softmax takes fp16 and
# gives fp32 (`half_to_float` of `aten::_softmax`); a CPU's casts first.
CUDNN = {"aten.cudnn_batch_norm": "aten.native_batch_norm",
         "aten.cudnn_batch_norm_backward": "aten.native_batch_norm_backward"}  # fmt: skip
ALIKE = {
    ("aten._softmax", "fp16", "fp32"): [
        ("aten._to_copy", "fp16", "fp32"), ("aten._softmax", "fp32", "fp32"),
    ],
    ("aten._softmax_backward_data", "fp32,fp32", "fp16"): [
        ("aten._softmax_backward_data", "fp32,fp32", "fp32"), ("aten._to_copy", "fp32", "fp16"),
    ],
}  # fmt: skip


def _ops(reader: Any, run: str) -> Counter[tuple[object, ...]]:
    """Ops of the first traced step by what they are, in the form of `ALIKE`. Copies that change no
    dtype, between devices or layouts, are none of AMP's."""
    traced = next((s.op_set for s in reader.steps(run) if s.op_set is not None), None)
    if traced is None:
        return Counter()
    names = {m.index: m.path for m in reader.modules(run)}
    found: Counter[tuple[object, ...]] = Counter()
    for op in reader.ops(run, traced):
        place = (names.get(op.module, op.module), op.phase)
        if op.op == "aten._to_copy" and op.inputs == op.outputs:
            continue
        for form in ALIKE.get((op.op, op.inputs, op.outputs), [(op.op, op.inputs, op.outputs)]):
            name, inputs, outputs = form
            name = CUDNN.get(name, name)
            found[*place, name, inputs, outputs, name == "aten._to_copy"] += op.count
    return found


def _moved(device: dict[int, Any], paper: dict[int, Any]) -> Entry:
    """Elements that lie in another bin, of the first step and of all: later steps start from
    weights that differ in their last bits already."""
    import numpy as np

    shares: dict[int, float] = {}
    other_rows, totals = 0, 0
    for step in sorted(device.keys() & paper.keys()):
        a, b = device[step], paper[step]
        rows = [dict(zip(zip(f.modules, f.dtypes, strict=True), f.rows, strict=True))
                for f in (a, b)]  # fmt: skip
        other_rows += len(rows[0].keys() ^ rows[1].keys())
        pairs = [(rows[0][key], rows[1][key]) for key in rows[0].keys() & rows[1].keys()]
        moved = sum(int(np.abs(x.astype(np.int64) - y).sum()) for x, y in pairs) / 2
        total = sum(int(x.sum()) for x, _ in pairs)
        totals += total
        shares[step] = moved / max(total, 1)
    first = next(iter(shares.values()), None)
    return {"steps": len(shares), "elements": totals, "rows_on_one_side": other_rows,
            "share_in_another_bin_first_step": first,
            "share_in_another_bin_worst_step": max(shares.values(), default=None)}  # fmt: skip


# 5. What a watched step adds: launches, and waits of the host for the device.

WARM_STEPS, COUNTED_STEPS, TIMED_STEPS = 8, 5, 20  # the default schedule records steps 10 and 20
WATCHES: dict[str, int | None] = {"asleep": 0, "default": None, "everything": 1}
MODES = ("bf16", "fp16+scaler", "fp16+fused")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
CALLS = (*LAUNCHES, "cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize",
         "cudaEventSynchronize", "cudaDeviceSynchronize")  # fmt: skip


def gpt_medium_256(seed: int) -> Any:
    """A workload that fills a card: 32,768 tokens a step, some 20 ms in bf16 on an H100."""
    from ampscope.measure.training_steps import resized
    from ampscope.workloads.load import load
    from ampscope.workloads.protocol import iterate

    workload = load("gpt", size="medium", seed=seed)
    return dataclasses.replace(workload, batches=lambda: resized(iterate(workload), 256))


@dataclass
class Steps:
    """A training as its user writes it, on the device of the part."""

    part: Part
    model_name: str
    mode: str

    def __post_init__(self) -> None:
        import torch

        from ampscope.records import RunSpec
        from ampscope.runner.probe import prepare
        from ampscope.workloads.protocol import iterate

        workload, size = self.model_name.split(":")[:2]
        if self.model_name == "gpt:medium:256":
            workload = f"{__file__}:{gpt_medium_256.__name__}"
        precision = self.mode.partition("+")[0]
        self.training = prepare(RunSpec(workload, size=size, precision=precision),
                                torch.device(self.part.device))  # fmt: skip
        self.model, self.optimizer = self.training.model, self.training.optimizer
        if self.mode.endswith("fused"):
            rate = self.optimizer.param_groups[0]["lr"]
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        self.scaler = torch.amp.GradScaler(self.part.device, enabled=precision == "fp16")
        self._batches = iterate(self.training.workload)

    def __call__(self) -> Any:
        batch = self.training.real_batch(next(self._batches))
        self.optimizer.zero_grad()
        with self.training.autocast():
            loss = self.training.workload.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @contextlib.contextmanager
    def watched(self, every: int | None) -> Iterator[None]:
        import ampscope

        with ampscope.watch(
            self.model, self.optimizer, self.scaler, every=every, store=self.part.store
        ):
            yield


def price(part: Part) -> None:
    os.environ["AMPSCOPE_TELEMETRY"] = "0"  # its readings are priced apart
    asked = [("gpt:small", mode) for mode in MODES] + [("gpt:medium:256", "bf16")]
    for model, mode in [("mlp:tiny", MODES[-1])] if part.dry else asked:
        if part.left_s() < 12:
            part.add(f"{model} {mode}", {"status": 1, "note": "no time was left"})
            continue
        price_of(part, model, mode)


def graphs(part: Part) -> None:
    """A part of its own: a capture that fails may leave the process without a device that
    answers."""
    for kind in ("full-step-capture", "reduce-overhead"):
        with _reported(part, kind):
            survives(part, kind)


def price_of(part: Part, model: str, mode: str) -> None:
    with _reported(part, f"{model} {mode}"):
        steps = Steps(part, model, mode)
        rows = {"bare": counted(part, steps)}
        for name, every in WATCHES.items():
            with steps.watched(every):
                rows[name] = counted(part, steps)
        bare = rows["bare"]
        for name, row in rows.items():
            part.add(f"{model} {mode} {name}", row)
            for key in ("waits", "launches"):
                added = row[key] - (bare[key] if name != "bare" else 0)
                part.figure(f"{model} {mode} {name} {key}", added / COUNTED_STEPS, "a step")
            part.figure(f"{model} {mode} {name} host_ms", row["host_ms"], "ms")


@contextlib.contextmanager
def _reported(part: Part, name: str) -> Iterator[None]:
    """What fails is written, and what comes after it goes on."""
    try:
        yield
    except Exception as error:
        part.add(name, {"status": 1, "output": f"{type(error).__name__}: {error}"[-KEPT_OUTPUT:]})


def counted(part: Part, step: Steps) -> Entry:
    """Launches, copies and waits in five steps after some that warm up, and the host's time until
    one of twenty others is queued, their median; what torch itself calls a synchronizing operation
    is counted by its own debug mode, with the line that asked for it."""
    import warnings

    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([] if part.dry else [ProfilerActivity.CUDA])
    for _ in range(WARM_STEPS):
        step()
    with profile(activities=activities) as profiler:
        for _ in range(COUNTED_STEPS):
            step()
    host_s = []
    for _ in range(TIMED_STEPS):
        _wait(part)
        started = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - started)
    _wait(part)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if not part.dry:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(COUNTED_STEPS):
                step()
        finally:
            if not part.dry:
                torch.cuda.set_sync_debug_mode("default")
    lines = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in said
                    if "synchroniz" in str(w.message))  # fmt: skip
    events = Counter(event.name for event in profiler.events() or ())
    return {"steps": COUNTED_STEPS, "host_ms": round(statistics.median(host_s) * 1e3, 3),
            "launches": sum(events[name] for name in LAUNCHES),
            "calls": {name: events[name] for name in CALLS if events[name]},
            "waits": sum(lines.values()), "waits_by_line": dict(lines)}  # fmt: skip


def _wait(part: Part) -> None:
    import torch

    if not part.dry:
        torch.cuda.synchronize()


def survives(part: Part, kind: str) -> None:
    """Whether a training by CUDA graphs goes on under a watch, and ends with the same bits."""
    import torch

    bare = by_graphs(part, kind, watched=False)
    try:
        seen = by_graphs(part, kind, watched=True)
    except Exception:
        part.figure(f"{kind} survived", 0)
        part.figure(f"{kind} alike", None)
        raise
    alike = all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    part.figure(f"{kind} survived", 1)
    part.figure(f"{kind} alike", alike)
    part.add(kind, {"survived": True, "alike": alike})


def by_graphs(part: Part, kind: str, *, watched: bool) -> list[Any]:
    """Weights after some steps of a small model in bf16, by CUDA graphs. Dry, without graphs."""
    import torch

    import ampscope

    torch.manual_seed(0)
    device = torch.device(part.device)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model.to(device)
    rate = torch.tensor(1e-3, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=not part.dry)
    inputs = torch.randn(32, 64, device=device)
    taps = kind == "reduce-overhead" and not part.dry
    watch: Any = contextlib.nullcontext()
    if watched:
        watch = ampscope.watch(model, optimizer, every=1, store=part.store, taps=taps)
    forward: Any = model
    if kind == "reduce-overhead":
        mode = {"backend": "eager"} if part.dry else {"mode": kind}
        forward = torch.compile(model, **mode)

    def step() -> None:
        optimizer.zero_grad(set_to_none=kind == "reduce-overhead")
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = forward(inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    with watch:
        if kind == "reduce-overhead" or part.dry:
            for _ in range(8):
                step()
        else:
            captured(step)
    torch._dynamo.reset()
    return [parameter.detach().clone() for parameter in model.parameters()]


def captured(step: Callable[[], None]) -> None:
    """Warm up on a stream of its own, capture one whole step, replay it, as torch's notes on CUDA
    graphs do."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()


# 6. What a watch adds to a step.

OVERHEAD = "gpt:medium:256,gpt:small,resnet:medium:2048,resnet:small"


def overhead(part: Part) -> None:
    models, rounds = ("mlp:tiny:48", "1") if part.dry else (OVERHEAD, "3")
    measure_overhead(part, "watch", "--alone", "--models", models, "--rounds", rounds)
    if part.left_s() > 20:
        small, rounds = ("mlp:tiny", "1") if part.dry else ("gpt:small", "5")
        measure_overhead(part, "telemetry", "--what", "telemetry", "--alone", "--models", small,
                         "--rounds", rounds)  # fmt: skip


def compiled_overhead(part: Part) -> None:
    models, rounds = ("mlp:tiny", "1") if part.dry else ("gpt:small", "5")
    measure_overhead(part, "compiled", "--alone", "--compiled", "--models", models, "--rounds",
                     rounds)  # fmt: skip


def measure_overhead(part: Part, name: str, *options: str) -> None:
    out = part.folder / f"{name}.json"
    script = BENCHMARKS / "overhead.py"
    entry = part.call(sys.executable, script, "--device", part.device, *options, "--out", out)
    entry |= {"found": (found := part.found(out.name)), "printed": part.printed[-KEPT_OUTPUT:]}
    part.add(name, entry)
    short = {"watch, schedule asleep": "asleep", "watch, default schedule": "default",
             "watch, histograms at every tenth step": "tenth",
             "watch, everything at every step": "everything"}  # fmt: skip
    for measured in (found or {}).get("models", ()):
        model, spread = measured["model"], 0.0
        for contestant, line in measured["contestants"].items():
            if contestant == "bare step":
                part.figure(f"{model} bare_ms", line["ms"][1], "ms")
            elif contestant == "telemetry alone":
                part.figure("telemetry", line["ratio"][1], "ratio")
            elif contestant in short:
                low, middle, high = line["ratio"]
                spread = max(spread, (high - low) / middle)
                part.figure(f"{model} {short[contestant]}", middle, "ratio")
        if name != "telemetry":
            part.figure(f"{model} spread", round(spread, 4), "share")


# 7. to 9.: ampscope's own measurements.


def ceilings(part: Part) -> None:
    quick = ("--quick",) if part.dry else ()
    entry = part.ampscope("hardware", "--bench", *quick, "--device", part.device, "--json")
    with contextlib.suppress(ValueError):
        entry["found"] = json.loads(part.printed)
    part.add("matmul ceilings beside the vendor's table", entry)
    bench = entry.get("found", {}).get("bench", {})
    if bench.get("copy_bytes_s"):
        part.figure("copy", bench["copy_bytes_s"] / 1e12, "TB/s")
    reached = {c["dtype"]: c["flops_s"] / 1e12 for c in bench.get("ceilings", ()) if c["flops_s"]}
    for dtype, rate in reached.items():
        part.figure(dtype, rate, "TOP/s" if dtype == "int8" else "TFLOP/s")
    for pair in (("fp16", "bf16"), ("tf32", "fp32"), ("e4m3", "bf16"), ("int8", "bf16")):
        if all(dtype in reached for dtype in pair):
            part.figure(" over ".join(pair), reached[pair[0]] / reached[pair[1]], "ratio")


QUERY = "name,power.draw,clocks.sm,clocks.mem,temperature.gpu,memory.used,utilization.gpu"


def compare(part: Part) -> None:
    if part.dry:
        measure_compare(part, "filled", "mlp", "--size", "tiny", "--precision", "fp32,bf16",
                        "--batch", "48", "--seeds", "1", "--steps", "4",
                        "--time-limit", "8")  # fmt: skip
        add_samples(part)
        return
    smi: Entry = {"status": 1, "note": "the comparison ended before it was asked"}

    def ask() -> None:
        query = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        smi.update({"status": done.returncode, "printed": done.stdout[-1_000:], "note": ""})

    asking = threading.Timer(15.0, ask)  # while the comparison runs
    asking.start()
    measure_compare(part, "filled", "gpt", "--size", "medium", "--batch", "256", "--precision",
                    "fp32,tf32,bf16,fp16", "--seeds", "2", "--steps", "20",
                    "--time-limit", "45")  # fmt: skip
    asking.cancel()
    add_samples(part)
    part.add("nvidia-smi", smi)
    if part.left_s() > 20:
        limit = str(int(part.left_s() - 14))
        measure_compare(part, "as it comes", "gpt", "--size", "medium", "--precision", "fp32,bf16",
                        "--seeds", "1", "--steps", "10", "--time-limit", limit)  # fmt: skip


def measure_compare(part: Part, name: str, *arguments: str) -> None:
    out = part.folder / f"{name}.json"
    entry = part.ampscope(
        "compare", *arguments, "--device", part.device, "--json", out, AMPSCOPE_TELEMETRY="1"
    )
    found = part.found(out.name)
    part.add(name, entry | {"found": found})
    by_name = {one["precision"]: one for one in (found or {}).get("precisions", ())}
    before = "as it comes " if name == "as it comes" else ""
    step_s = {p: one["times"]["step"]["median_s"] for p, one in by_name.items() if one["times"]}
    for over in ("fp32", "tf32", "fp16") if not before else ("fp32",):
        if over in step_s and "bf16" in step_s:
            part.figure(f"{before}{over} over bf16", step_s[over] / step_s["bf16"], "ratio")
    if before:
        return
    peaks = {p: _peak(one["memory"]) for p, one in by_name.items() if one["memory"]}
    for precision, one in by_name.items():
        if precision in step_s:
            part.figure(f"{precision} step_ms", step_s[precision] * 1e3, "ms")
        if precision in peaks:
            part.figure(f"{precision} peak_mib", peaks[precision] / 2**20, "MiB")
        if (energy := one["energy"]) and energy["steps"]:
            joules = energy["joules"] / energy["steps"]
            part.figure(f"{precision} joules", joules, "J")
            part.figure(f"{precision} watts", joules / step_s[precision], "W")
    if peaks.keys() >= {"fp32", "bf16"}:
        part.figure("memory bf16 over fp32", peaks["bf16"] / peaks["fp32"], "ratio")
    losses = {p: one["curves"][0]["losses"][0] for p, one in by_name.items() if one["curves"]}
    if losses.keys() >= {"fp32", "bf16"}:
        share = abs(losses["bf16"] - losses["fp32"]) / abs(losses["fp32"])
        part.figure("loss bf16 against fp32", share, "share")


def _peak(memory: Entry) -> float:
    """The device's own peak, else the sum of what was found."""
    kinds = ("weights", "gradients", "optimizer_state", "activations", "cast_copies",
             "temporaries", "inputs")  # fmt: skip
    return float(memory["device_peak"] or sum(memory[kind] for kind in kinds))


def add_samples(part: Part) -> None:
    """What was read beside the comparison, and what never; power while the device worked."""
    from ampscope.records import Sample
    from ampscope.store.reader import Reader

    if not part.store.exists():
        return
    with Reader(part.store) as reader:
        samples = reader.samples(reader.runs()[0].id)
    fields = [f.name for f in dataclasses.fields(Sample) if f.name not in ("device", "at")]
    read = {
        field: [min(values), max(values)]
        for field in fields
        if (values := [v for s in samples if (v := getattr(s, field)) is not None])
    }
    never = [field for field in fields if field not in read]
    part.add("samples", {"samples": len(samples), "read": read, "never_read": never})
    busy = [s for s in samples if s.power_w and (s.busy_percent or 0) > 90]
    if busy and samples[0].device != "cpu":
        powers = [s.power_w or 0.0 for s in busy]
        part.figure("samples mean watts", sum(powers) / len(powers), "W")
        part.figure("samples peak sm_mhz", max(s.clock_mhz or 0.0 for s in busy), "MHz")
        counter = [(s.at, s.energy_j) for s in samples if s.energy_j is not None]
        lasted_s = counter[-1][0] - counter[0][0] if counter else 0.0
        if lasted_s > 1:
            mean = sum(s.power_w or 0.0 for s in samples) / len(samples)
            watts = (counter[-1][1] - counter[0][1]) / lasted_s
            part.figure("samples watts over counter", mean / watts, "ratio")


def cores(part: Part) -> None:
    which = ("mlp:tiny", "fp32") if part.dry else ("gpt:medium:256", "bf16")
    measure_cores(part, *which)


def more_cores(part: Part) -> None:
    steps = (("resnet:small", "fp16"), ("gpt:medium:256", "tf32"), ("gpt:medium:256", "fp32"))
    for model, precision in (("mlp:tiny", "bf16"),) if part.dry else steps:
        measure_cores(part, model, precision)


def measure_cores(part: Part, model: str, precision: str) -> None:
    name = f"{model} {precision}"
    if part.left_s() < 5:
        part.add(name, {"status": 1, "note": "no time was left"})
        return
    workload, size = model.split(":")[:2]
    if model == "gpt:medium:256":
        workload = f"{__file__}:{gpt_medium_256.__name__}"
    out = part.folder / f"{name}.json"
    entry = part.ampscope(
        "tensor-cores", workload, "--size", size, "--precision", precision,
        "--device", part.device, "--json", out,
    )  # fmt: skip
    found = part.found(out.name)
    part.add(name, entry | {"found": found})
    if found and (flops := found["flops"]) and sum(flops.values()):
        for verdict in ("used", "unknown"):
            part.figure(f"{name} {verdict}", flops[verdict] / sum(flops.values()), "share")


# What `again` alone runs.


def kernel(part: Part) -> None:
    small = ("--rounds", "1", "--largest", "4096") if part.dry else ("--rounds", "3")
    inside = (__file__, "stand-in") if part.dry else ()
    script, out = BENCHMARKS / "exponent_kernel.py", part.folder / "kernel.json"
    chosen = ("--dtypes", "bfloat16,float32", "--kinds", "gaussian,gradient")
    entry = part.call(sys.executable, *inside, script, "--cuda", *small, *chosen, "--output", out)
    found = part.found("kernel.json")
    part.add("exponent kernel", entry | {"found": found})
    for line in (found or {}).get("results", ()):
        if line["tensors"] == "one tensor":
            for variant, share in line["share_by_variant"].items():
                part.figure(f"{line['dtype']} {line['kind']} {variant} share", share,
                            "share of the copy")  # fmt: skip


def batch(part: Part) -> None:
    searches = [("gpt", "medium", ()), ("resnet", "small", ("--power-of-two",))]
    if part.dry:
        searches = [("mlp", "tiny", ("--memory-limit", "64", "--power-of-two"))]
    for place, (workload, size, more) in enumerate(searches):
        name = f"{workload}:{size}"
        seconds = part.left_s() / (len(searches) - place)
        out = part.folder / f"{workload}.json"
        entry = part.ampscope(
            "batch-size", workload, "--size", size, "--precision",
            "fp32" if part.dry else "fp32,bf16", "--device", part.device,
            "--time-limit", str(int(max(10.0, seconds - 10))), *more, "--json", out,
        )  # fmt: skip
        found = part.found(out.name)
        part.add(name, entry | {"found": found})
        for one in (found or {}).get("precisions", ()):
            part.figure(f"{name} {one['precision']} largest", one["largest"]["samples"], "samples")


def compiled(part: Part) -> None:
    """The scripts of ``benchmarks/compiled``, faulty and healthy in turn, then some ways to use
    torch.compile that are healthy."""
    kinds = sorted(p.stem for p in (BENCHMARKS / "compiled/scripts").glob("*.py"))
    scripts = [(k, form) for k in kinds if k != "nets" for form in ("faulty", "healthy")]
    ways = ["fullgraph_bf16", "amp_with_scaler", "dynamic_batch", "max_autotune", "channels_last"]
    asked = [("--only", kind, "--forms", form) for kind, form in scripts]
    asked += [("--variations", "--only", way) for way in ways]
    if part.dry:
        asked = [("--only", "stale_buffer", "--forms", "healthy")]
    for words in asked:
        name = " ".join(word for word in words if not word.startswith("--"))
        if part.left_s() < 30:
            part.add(name, {"note": "no time was left"})
            continue
        rows = part.folder / f"{name.replace(' ', '_')}.json"
        command = (sys.executable, "-m", "benchmarks.compiled.score", *words, "--out", rows)
        entry = part.call(*command)
        if found := part.found(rows.name):
            (row,) = found["rows"]
            entry |= {key: row.get(key) for key in ("verdict", "cause", "named", "module", "op")}
            entry["row"] = row
        else:
            entry["status"] = entry["status"] or 1
        if part.dry:
            entry["note"] = f"the CPU's compiled code: the device's {NEEDS_A_GPU}"
        part.add(name, entry)


PARTS: dict[str, Callable[[Part], None]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        look, tests, diagnose, rehearsed, price, graphs, overhead, ceilings, compare, cores, kernel,
        compiled_overhead, more_cores, zoo, batch, compiled, host_tests, host_rehearsals,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shared", type=Path, help="folder of what parts leave for one another")
    parser.add_argument("--dry", action="store_true", help="without a GPU: that the part works")
    asked = parser.parse_args()
    from run import become_subreaper

    become_subreaper()  # orphans of this part stay below it for as long as it runs
    import torch

    if not asked.dry and not asked.part.startswith("host-") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry needs none")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    part = Part(asked.part, asked.out, asked.seconds, asked.dry, asked.shared)
    PARTS[asked.part](part)
    failed = [name for name, entry in part.document["entries"].items() if entry.get("status")]
    print(asked.part, f"failed: {', '.join(failed)}" if failed else "complete", flush=True)
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stand-in"]:
        stand_in(*sys.argv[2:])
    else:
        sys.exit(main())
