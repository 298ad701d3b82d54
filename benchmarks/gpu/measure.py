"""One part of what only a CUDA device can answer, as JSON; `run` beside this file has the order.

    python benchmarks/gpu/measure.py rehearsed --seconds 240 --out rehearsed.json
    python benchmarks/gpu/measure.py rehearsed --out rehearsed.json --dry    # without a GPU

A part is a list of entries, each written as soon as it is there: a command of ampscope or a
benchmark with what it found, or what is measured here. ``--dry`` runs the smallest form of each on
the CPU, or on the device that a rehearsal stands in for, and says "needs a GPU" of what cannot be
exercised without one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
AMPSCOPE = (sys.executable, "-m", "ampscope.cli.main")
NEEDS_A_GPU = "needs a GPU"
KEPT_OUTPUT = 4_000  # characters of what a command printed last

Entry = dict[str, Any]


class Part:
    """The document of one part: entries by name, written whenever one is added."""

    def __init__(self, name: str, out: Path, seconds: float, dry: bool) -> None:
        from contest import setting

        self.dry, self.out = dry, out
        self._started = time.monotonic()
        self._seconds = seconds
        self.folder = Path(tempfile.mkdtemp(prefix=f"ampscope-gpu-{name}-"))
        self.store = self.folder / "runs.db"
        self.document: Entry = {"part": name, "dry": dry, "setting": setting(), "entries": {}}
        self._write()

    def add(self, name: str, entry: Entry) -> None:
        """Write one more entry; says it, too."""
        self.document["entries"][name] = entry
        self._write()
        brief = {k: v for k, v in entry.items() if not isinstance(v, dict | list)}
        print(name, json.dumps(brief)[:300], flush=True)

    def left_s(self) -> float:
        """Seconds until the part's time is over."""
        return self._seconds - (time.monotonic() - self._started)

    def _write(self) -> None:
        self.document["elapsed_s"] = round(time.monotonic() - self._started, 1)
        whole = self.out.with_suffix(".part")
        whole.write_text(json.dumps(self.document, indent=1, default=str) + "\n")
        whole.replace(self.out)

    def call(self, *command: str | Path, **surroundings: str) -> Entry:
        """Run a command within the part's time; how it ended, and its last lines if it failed."""
        started = time.monotonic()
        path = f"{ROOT / 'core'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environment = {**os.environ, "PYTHONPATH": path, **surroundings}
        try:
            done = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, env=environment,
                timeout=max(5.0, self.left_s()), cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            status, output = done.returncode, done.stdout
            said = done.stderr
        except subprocess.TimeoutExpired as error:
            status = 124
            output, said = (_text(stream) for stream in (error.stdout, error.stderr))
        except OSError as error:
            status, output, said = 127, "", str(error)
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


def _text(stream: str | bytes | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


def stand_in(script: str, *arguments: str) -> None:
    """Run a benchmark with a CUDA device that is stood in for."""
    from ampscope.policy.device_profiles import PROFILES
    from ampscope.policy.stand_in_device import stand_in as standing_in

    sys.argv = [script, *arguments]
    with standing_in(PROFILES["h100"]):
        runpy.run_path(script, run_name="__main__")


# 1. Tests that carry the marker gpu.


def tests(part: Part) -> None:
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    report = part.folder / "tests.xml"
    entry = part.call(
        sys.executable, "-m", "pytest", "-m", "gpu", "-n0", "--slow", "-p", "no:cacheprovider",
        f"--junitxml={report}", "--override-ini", "filterwarnings=default", *files,
    )  # fmt: skip
    if report.exists():
        entry |= test_counts(report)
    if part.dry:
        entry["note"] = NEEDS_A_GPU
    part.add("tests marked gpu", entry)


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


# 2. The same runs on the device and rehearsed on its CPU: ops, dtypes and casts; histograms.

TRAININGS = (
    ("gpt", "small", "fp16"), ("gpt", "small", "bf16"), ("resnet", "small", "fp16"),
    ("resnet", "small", "bf16"), ("lenet", "small", "fp16"), ("mlp", "small", "fp16-pure"),
    ("rnn", "small", "fp16"), ("gpt", "tiny", "fp16-noscaler"),
)  # fmt: skip
SCRIPTS = ("c01_t5_ffn", "c15_rms_norm", "c07_attention_logits", "h07_clip_and_schedule")


def rehearsed(part: Part) -> None:
    trainings, scripts = TRAININGS, SCRIPTS
    if part.dry:
        trainings, scripts = (("mlp", "tiny", "fp16"),), SCRIPTS[:1]
    for workload, size, precision in trainings:
        arguments = ("probe", workload, "--size", size, "--precision", precision, "--steps", "3",
                     "--shadow-every", "0")  # fmt: skip
        real = () if part.dry else ("--device", "cuda")
        both_sides(part, f"{workload} {size} {precision}", (*arguments, *real),
                   (*arguments, "--device", "cpu", "--policy", "cuda"))  # fmt: skip
    for name in scripts:
        script = str(ROOT / "core/ampscope/zoo/scripts" / f"{name}.py")
        command = ("run", "--steps", "20")
        real = ("--policy", "cuda") if part.dry else ()
        both_sides(part, name, (*command, *real, script), (*command, "--policy", "cuda", script))


def both_sides(
    part: Part, name: str, on_device: tuple[str, ...], on_paper: tuple[str, ...]
) -> None:
    """Add how a run on the device and its rehearsal differ."""
    if part.left_s() < 10:
        part.add(name, {"note": "no time was left"})
        return
    safe = name.replace(" ", "-")
    stores = [part.folder / f"{safe}-{side}.db" for side in ("device", "rehearsed")]
    entry: Entry = {"device": part.ampscope(*on_device, store=stores[0])}
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # a rehearsal is what happens without a device
    entry["rehearsed"] = part.ampscope(*on_paper, store=stores[1], **hidden)
    entry["status"] = entry["device"]["status"] or entry["rehearsed"]["status"]
    if all(store.exists() for store in stores):
        entry |= differences(*stores)
    else:
        entry["status"] = 1
    if part.dry:
        entry["note"] = f"two rehearsals were compared: the device's side {NEEDS_A_GPU}"
    part.add(name, entry)


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


def _ops(reader: Any, run: str) -> Counter[tuple[object, ...]]:
    """Ops of the first traced step by what they are. Copies between devices are none of AMP's."""
    traced = next((s.op_set for s in reader.steps(run) if s.op_set is not None), None)
    if traced is None:
        return Counter()
    names = {m.index: m.path for m in reader.modules(run)}
    found: Counter[tuple[object, ...]] = Counter()
    for op in reader.ops(run, traced):
        key = (names.get(op.module, op.module), op.phase, op.op, op.inputs, op.outputs, op.is_cast)
        found[key] += op.count
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


# 3. and 4. What is measured by benchmarks of their own.


def kernel(part: Part) -> None:
    small = ("--rounds", "1", "--largest", "4096") if part.dry else ("--rounds", "9")
    inside = (__file__, "stand-in") if part.dry else ()
    script, out = BENCHMARKS / "exponent_kernel.py", part.folder / "kernel.json"
    entry = part.call(sys.executable, *inside, script, "--cuda", *small, "--output", out)
    part.add("exponent kernel", entry | {"found": part.found("kernel.json")})


def overhead(part: Part) -> None:
    models = ("mlp:tiny",) if part.dry else ("gpt:small", "resnet:small", "gpt:medium")
    for compiled in (False, True):
        for model in models:
            name = f"{model} compiled" if compiled else f"{model} eager"
            if part.left_s() < 30:
                part.add(name, {"note": "no time was left"})
                continue
            out = part.folder / f"{name}.json"
            # Other tools cannot be taken on and off a compiled model without compiling it anew.
            alone = ("--alone",) if compiled or part.dry else ()
            mode = ("--compiled",) if compiled else ()
            entry = part.call(
                sys.executable, BENCHMARKS / "overhead.py", "--device",
                "cpu" if part.dry else "cuda", "--models", model, "--out", out, *alone, *mode,
                "--rounds", "1" if part.dry else "9",
            )  # fmt: skip
            part.add(name, entry | {"found": part.found(out.name)})


# 5. to 7. and 9.: ampscope's own measurements.


def ceilings(part: Part) -> None:
    device = "cpu" if part.dry else "cuda"
    quick = ("--quick",) if part.dry else ()
    entry = part.ampscope("hardware", "--bench", *quick, "--device", device, "--json")
    with contextlib.suppress(ValueError):
        entry["found"] = json.loads(part.printed)
    part.add("matmul ceilings beside the vendor's table", entry)


def cores(part: Part) -> None:
    steps = [
        (model, precision)
        for model in (("gpt", "medium"), ("resnet", "small"))
        for precision in ("fp16", "bf16", "fp32", "tf32")
    ]
    if part.dry:
        steps = [(("mlp", "tiny"), "fp32")]
    for (workload, size), precision in steps:
        name = f"{workload} {size} {precision}"
        if part.left_s() < 10:
            part.add(name, {"note": "no time was left"})
            continue
        out = part.folder / f"{name}.json"
        entry = part.ampscope(
            "tensor-cores", workload, "--size", size, "--precision", precision,
            "--device", "cpu" if part.dry else "cuda", "--json", out,
        )  # fmt: skip
        part.add(name, entry | {"found": part.found(out.name)})


def batch(part: Part) -> None:
    searches = [("gpt", "medium", ()), ("resnet", "small", ("--power-of-two",))]
    if part.dry:
        searches = [("mlp", "tiny", ("--memory-limit", "64", "--power-of-two"))]
    for place, (workload, size, more) in enumerate(searches):
        name = f"{workload} {size}"
        seconds = part.left_s() / (len(searches) - place)
        out = part.folder / f"{name}.json"
        entry = part.ampscope(
            "batch-size", workload, "--size", size, "--precision",
            "fp32" if part.dry else "fp32,bf16", "--device", "cpu" if part.dry else "cuda",
            "--time-limit", str(int(max(10.0, seconds - 10))), *more, "--json", out,
        )  # fmt: skip
        part.add(name, entry | {"found": part.found(out.name)})


CASES = ("C01", "C30", "C55", "C66", "C15", "C10", "C72", "C61", "C04", "C74")


def zoo(part: Part) -> None:
    for case in CASES[:1] if part.dry else CASES:
        if part.left_s() < 15:
            part.add(case, {"note": "no time was left"})
            continue
        entry = part.ampscope("zoo", case, "--no-twins", "--json", part.folder / f"{case}.json")
        part.add(case, entry | {"found": part.found(f"{case}.json")})


# Does a diagnosis find what only the device's compiled code does wrong?


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


# 8. What NVML says beside a run, against nvidia-smi.

QUERY = "name,power.draw,clocks.sm,clocks.mem,temperature.gpu,memory.used,utilization.gpu"


def telemetry(part: Part) -> None:
    from ampscope.records import Sample
    from ampscope.store.reader import Reader

    device = "cpu" if part.dry else "cuda"
    steps, size = ("20", "tiny") if part.dry else ("200", "medium")
    entry = part.ampscope(
        "probe", "gpt", "--size", size, "--steps", steps, "--precision", "bf16",
        "--policy", "native", "--device", device, "--histogram-every", "0", "--trace-every", "0",
        "--shadow-every", "0", AMPSCOPE_TELEMETRY="1",
    )  # fmt: skip
    if part.store.exists():
        with Reader(part.store) as reader:
            samples = reader.samples(reader.runs()[0].id)
        fields = [f.name for f in dataclasses.fields(Sample) if f.name not in ("device", "at")]
        entry["samples"] = len(samples)
        entry["read"] = {
            field: [min(values, key=str), max(values, key=str)]
            for field in fields
            if (values := [v for s in samples if (v := getattr(s, field)) is not None])
        }
        entry["never_read"] = [field for field in fields if field not in entry["read"]]
    if part.dry:
        entry["note"] = f"the CPU was read: NVML {NEEDS_A_GPU}"
    part.add("beside a training", entry)
    hardware = part.ampscope("hardware", "--json")
    with contextlib.suppress(ValueError):
        hardware["found"] = json.loads(part.printed)
    part.add("hardware", hardware)
    if not part.dry:
        smi = part.call("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")
        part.add("nvidia-smi", smi | {"printed": part.printed})


# 10. What a watched step adds: launches, and waits of the host for the device.


def norms(part: Part) -> None:
    for precision in ("bf16", "fp16"):  # fp16 has a GradScaler, which waits by itself
        for name, every in (("bare", None), ("asleep", 0), ("everything", 1)):
            part.add(f"gpt {precision}, {name}", step_on_device(part, precision, every))


def step_on_device(part: Part, precision: str, every: int | None) -> Entry:
    """Launches, copies and waits in five steps after some that warm up; what torch itself calls
    a synchronizing operation is counted by its own debug mode."""
    import warnings

    import torch
    from torch.profiler import ProfilerActivity, profile

    import ampscope
    from ampscope.records import RunSpec
    from ampscope.runner.probe import prepare
    from ampscope.runner.training import training_step
    from ampscope.workloads.protocol import iterate

    steps = 5
    device = torch.device("cpu" if part.dry else "cuda")
    size = "tiny" if part.dry else "small"
    training = prepare(RunSpec("gpt", size=size, precision=precision), device)
    batches = iterate(training.workload)
    activities = [ProfilerActivity.CPU] + ([] if part.dry else [ProfilerActivity.CUDA])
    watch: Any = contextlib.nullcontext()
    if every is not None:
        watch = ampscope.watch(training.model, training.optimizer, training.scaler, every=every,
                               store=part.store)  # fmt: skip

    def step() -> None:
        training_step(training, training.real_batch(next(batches)))

    with watch:
        for _ in range(3):
            step()
        with profile(activities=activities) as profiler:
            for _ in range(steps):
                step()
        waits = Counter[str]()
        if not part.dry:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    for _ in range(steps):
                        step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits.update(f"{Path(w.filename).name}:{w.lineno}" for w in said
                         if "synchroniz" in str(w.message))  # fmt: skip
    counted = Counter(event.name for event in profiler.events() or ())
    names = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx",
             "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaEventSynchronize",
             "cudaDeviceSynchronize")  # fmt: skip
    entry: Entry = {"steps": steps, "calls": {n: counted[n] for n in names},
                    "waits": sum(waits.values()), "waits_by_line": dict(waits)}  # fmt: skip
    return entry | ({"note": f"launches and waits: {NEEDS_A_GPU}"} if part.dry else {})


PARTS: dict[str, Callable[[Part], None]] = {
    f.__name__: f
    for f in (
        tests,
        rehearsed,
        kernel,
        overhead,
        ceilings,
        cores,
        batch,
        telemetry,
        zoo,
        norms,
        compiled,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="without a GPU: that the part works")
    asked = parser.parse_args()
    import torch

    if not asked.dry and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry needs none")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    part = Part(asked.part, asked.out, asked.seconds, asked.dry)
    PARTS[asked.part](part)
    failed = [name for name, entry in part.document["entries"].items() if entry.get("status")]
    print(asked.out, f"failed: {', '.join(failed)}" if failed else "complete", flush=True)
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stand-in"]:
        stand_in(*sys.argv[2:])
    else:
        sys.exit(main())
