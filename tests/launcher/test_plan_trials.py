"""Which runs a diagnosis makes at a time, and which fixes it tries in which order: modules in fp32,
bf16, the next finding."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ampscope import extensions
from ampscope.analysis.precision_use import wants_cuda
from ampscope.analysis.run_view import RunView
from ampscope.control import NUDGED, Control
from ampscope.diagnosis.compiled import diagnosis_with_compiled_run
from ampscope.diagnosis.cure import by_trials
from ampscope.diagnosis.findings import Finding, diagnose
from ampscope.diagnosis.result import DiagnosisResult, Trial, report_of
from ampscope.hardware.describe import HardwareReport
from ampscope.hardware.gpu import Accelerator
from ampscope.launcher.children import HeldTraceback, last_words
from ampscope.launcher.plan import DiagnosisPlan, run_diagnosis
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import BadOp, Observation, OpUse, Outcome, Printed
from ampscope.records import HALF_FROM, JUDGED_RANK, Machine, RunInfo, RunSpec, State
from ampscope.rules.verdict import FIX_KINDS, FP32_TRAINING
from ampscope.script_ends import ending
from ampscope.store.reader import Reader
from ampscope.story.fix_words import chosen, each_run, seen
from tests.helpers.evidence_making import (
    BACKWARD,
    DIRECT_STEP,
    FALLING,
    FLAT,
    HEALTHY_FP32,
    OVERFLOWED,
    SCALE,
    STEP,
    UPDATE,
    WITHOUT_SCALER,
    ZERO,
    fp32_run,
    log,
    run,
    scan,
    steps,
)
from tests.helpers.evidence_of_ops import ACTIVATION
from tests.helpers.evidence_of_runs import TABLE
from tests.helpers.hardware_reports import CPU_TORCH, CUDA_TORCH, report
from tests.helpers.nvml_replay import H100

MODULES = ("a", "b", "c", "d")
SCANS = [scan("start", "parameter", f"{name}.weight") for name in MODULES]


class Info:
    """Of a run: as much as the plan reads."""

    id = "run"
    machine: Machine | None = None
    state = State.FINISHED
    message = traceback = ""
    steps_done = 0
    spec = RunSpec("train.py")


class Runs:
    """Stands in for the processes: only all modules in fp32, or bf16, cure."""

    def __init__(self, bad: list[BadOp], bf16_cures: bool, needed: tuple[str, ...]) -> None:
        self.broken: list[Observation] = _observations(run(steps(FLAT, **OVERFLOWED), *bad, *SCANS))
        self.healthy: list[Observation] = _observations(run(steps(), *SCANS))
        self.bf16_cures, self.needed = bf16_cures, needed
        self.made: list[str] = []
        self.in_place = False
        self.compared: list[str] = []
        self.spec = RunSpec("train.py", time_limit_s=100.0)
        self.limits: list[float] = []
        self.ended = "returned"  # how runs after the first two end

    def can_apply(self, control: str) -> bool:
        return True

    def first_to_share(self) -> str:
        return ""  # every run has a copy of all that it writes

    def leave_overlay(self) -> bool:
        return False

    def files_note(self) -> str:
        return ""

    def share_a_gpu(self) -> bool:
        return False

    def start(
        self, control: str, parent: str = "", limit_s: float = 0.0, light: int | None = None
    ) -> str:
        self.limits.append(limit_s)
        return control

    def wait(self, control: str, show: object = None, say: object = None) -> ScriptRun:
        return self.run(control)

    def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
        self.made.append(control)
        name, _, value = control.partition(":")
        cures = name == "bf16" and self.bf16_cures
        cures = cures or (name == "fp32_modules" and set(self.needed) <= set(value.split(",")))
        seen = self.healthy if cures else self.broken
        if name == "fp32":
            seen = _observations(HEALTHY_FP32)
        if name not in ("as_is", "fp32"):
            seen = [replace(o, ended=self.ended) if isinstance(o, Outcome) else o for o in seen]
        return ScriptRun(cast(RunInfo, Info()), tuple(seen), "")


def _observations(view: RunView) -> list[Observation]:
    return [*view.calls, *view.steps, *view.bad_ops, *view.scans, view.outcome]


def _bad(*modules: str) -> list[BadOp]:
    return [
        replace(ACTIVATION, id=n, module=name, line=f"train.py:{n + 1}")
        for n, name in enumerate(modules)
    ]


def _tried(bad: list[BadOp], *, bf16: bool, needed: tuple[str, ...]) -> tuple[DiagnosisPlan, Runs]:
    runs = Runs(bad, bf16, needed)
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    plan.try_fixes(diagnose(plan.evidence).findings[0])
    return plan, runs


def _reported(plan: DiagnosisPlan) -> DiagnosisResult:
    infos = {name: run.info for name, run in plan.done.items()}
    return report_of(
        diagnosis_with_compiled_run(plan.evidence), plan.views, infos, tuple(plan.trials), 1.0
    )


def _advised(plan: DiagnosisPlan) -> tuple[str, str, bool | None]:
    fix = chosen(_reported(plan))
    return ("", "", None) if fix is None else (fix.control, fix.kind, fix.cured)


@pytest.mark.parametrize("needed", [MODULES, ("b", "d"), ("none",)])
@pytest.mark.parametrize("bf16", [True, False])
def test_every_run_that_was_made_is_told_with_what_it_gave(
    needed: tuple[str, ...], bf16: bool
) -> None:
    """Of a search for a set of modules, also those that did not cure, and those that did and are
    larger than need be."""
    plan, runs = _tried(_bad("a"), bf16=bf16, needed=needed)
    fixes = {made for made in runs.made if made not in ("as_is", "fp32")}
    cure = {f for f in fixes if f.startswith("fp32_m") and {*needed} <= {*f[13:].split(",")}}
    cure |= {"bf16"} & fixes if bf16 else set()
    assert {t.control for t in plan.trials} == fixes
    assert len(plan.trials) == len(fixes)
    assert {t.control for t in plan.trials if t.cured} == cure
    told = each_run(_reported(plan)).split("; ")
    for control in fixes:
        (one,) = [said for said in told if _told(control) in said]
        cured = "trains, in fp32 throughout" if control.count(",") == 3 else "cured"
        assert one.endswith(f": {cured}" if control in cure else ": not cured")


def _told(control: str) -> str:
    few = f"({control})"
    return few if control.count(",") < 3 else "with 4 modules in fp32, a to d"


@pytest.mark.parametrize("ended", ["time", "killed"])
def test_a_run_that_says_nothing_of_a_fix_is_told_too(
    ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 7))
    monkeypatch.setattr("ampscope.launcher.plan.time.monotonic", lambda: float(next(now)))
    runs = Runs(_bad("a"), False, ("b", "d"))
    plan = _with_baselines(runs)
    runs.ended = ended
    plan.control_until(20.0, "fp32_modules:b")
    assert "fp32_modules:b" not in plan.views
    told = each_run(_reported(plan))
    assert "(fp32_modules:b): 0 steps, not judged as a fix" in told
    monkeypatch.setattr(Info, "message", "The script ran out of memory.")
    assert "(fp32_modules:b): the script ran out of memory" in each_run(_reported(plan))


def test_a_search_for_sites_is_told_as_one() -> None:
    """Its runs are halves of a bisection: of interest are what cured, and how many there were."""
    plan = _with_baselines(Runs(_bad("a"), False, ("b", "d")))
    for lines in ("train.py:1", "train.py:1,train.py:2", "train.py:3"):
        plan.control(f"fp32_lines:{lines}")
    told = each_run(_reported(plan))
    assert told == "3 more with other sites in fp32: the search for these"
    plan.control("scale:1")
    assert "(scale:1): 0 steps, not judged as a fix; 3 more" in each_run(_reported(plan))


@pytest.mark.parametrize("are_jobs", [False, True])
@pytest.mark.parametrize("first", [0, 30])
def test_later_runs_hear_where_half_precision_begins(first: int, are_jobs: bool) -> None:
    """The fp32 control, too, but of jobs: it begins when the baseline has ended."""

    class Heard(Runs):
        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            heard.append((control, dict(self.spec.settings).get(HALF_FROM)))
            ran = super().run(control, parent)
            seen = (
                replace(o, half_from=first) if isinstance(o, Outcome) else o
                for o in ran.observations
            )
            return replace(ran, observations=tuple(seen))

    heard: list[tuple[str, str | None]] = []
    runs = Heard(_bad("a"), False, ("a",))
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None, are_jobs=are_jobs)
    plan.run_baselines(None)
    plan.control("bf16")
    told = str(first) if first else None
    assert heard == [("as_is", None), ("fp32", None if are_jobs else told), ("bf16", told)]


OUT_OF_MEMORY = Outcome(
    ended="exception",
    error_type="OutOfMemoryError",
    error_text="CUDA out of memory. Tried to allocate 2.00 GiB.",
)
ENDS = {
    "memory of a GPU": (OUT_OF_MEMORY, ""),
    "EXCLUSIVE_PROCESS": (
        Outcome(
            ended="exception",
            error_type="AcceleratorError",
            error_text="CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        ),
        "",
    ),
    "no memory for a handle": (
        Outcome(
            ended="exception",
            error_type="RuntimeError",
            error_text="CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`",
        ),
        "",
    ),
    "memory of a library": (
        Outcome(
            ended="exception",
            error_type="RuntimeError",
            error_text="CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        "",
    ),
    "Paddle": (
        Outcome(
            ended="exception",
            error_type="RuntimeError",
            error_text="Out of memory error on GPU 0. Cannot allocate 2.0GB memory on GPU 0",
        ),
        "",
    ),
    "TensorFlow": (
        Outcome(
            ended="exception",
            error_type="ResourceExhaustedError",
            error_text="OOM when allocating tensor with shape[8192,8192] and type float",
        ),
        "",
    ),
    "the machine's memory": (Outcome(ended="killed"), last_words("-9", "")),
    "too many processes": (Outcome(ended="killed"), last_words("nofork", "")),
}


class OneAtATime(Runs):
    """There is memory, or a device, for one run: of two that are open at a time the one that
    started later fails with ``end``, or both do."""

    def __init__(self, end: str, *, shares: bool, both: bool = False) -> None:
        super().__init__(_bad("a"), False, ("a",))
        self.end, self.message = ENDS[end]
        self.shares, self.both = shares, both
        self.open: list[str] = []
        self.failing: set[str] = set()
        self.most_open = 0

    def share_a_gpu(self) -> bool:
        return self.shares

    def start(
        self, control: str, parent: str = "", limit_s: float = 0.0, light: int | None = None
    ) -> str:
        self.open.append(control)
        self.most_open = max(self.most_open, len(self.open))
        if len(self.open) > 1:
            self.failing.update(self.open if self.both else [control])
        return super().start(control, parent, limit_s)

    def wait(self, control: str, show: object = None, say: object = None) -> ScriptRun:
        self.open.remove(control)
        run = self.run(control)
        if control not in self.failing:
            return run
        self.failing.discard(control)
        info = Info()
        info.state, info.message = State.FAILED, self.message
        return ScriptRun(cast(RunInfo, info), (self.end,), "")


def _with_baselines(runs: Runs, *, are_jobs: bool = False) -> DiagnosisPlan:
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None, are_jobs=are_jobs)
    plan.run_baselines(None)
    return plan


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_failed_beside_another_is_made_again_alone(end: str, both: bool) -> None:
    """Baseline and fp32 control as jobs that were given one GPU, which has memory for one, or takes
    one process: nothing may be said of memory, or of a device that is not there."""
    runs = OneAtATime(end, shares=False, both=both)
    plan = _with_baselines(runs, are_jobs=True)
    assert runs.most_open == 2
    assert plan.problem() == ""
    assert runs.made == ["as_is", "fp32", *(["as_is"] if both else []), "fp32"]
    expected = diagnose(_with_baselines(Runs(_bad("a"), False, ("a",))).evidence)
    assert diagnose(plan.evidence).findings == expected.findings


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_one_run_is_made_after_the_other(end: str, shares: bool) -> None:
    runs = OneAtATime(end, shares=shares)
    plan = _with_baselines(runs, are_jobs=shares)
    plan.prefetch(["bf16", "scale:1"])
    plan.control("bf16")
    assert runs.most_open == 1
    assert runs.made == ["as_is", "fp32", "bf16"]
    assert plan.problem() == ""


ONE_PROCESS = """
import socket, sys, time, torch
device = socket.socket(socket.AF_UNIX)
try:
    device.bind("\\0" + sys.argv[1])  # no file, of which each run would have its own
except OSError:
    raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
o = torch.optim.SGD(m.parameters(), 1e-3)
for i in range(6):
    o.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = m(torch.randn(16, 8)).float().square().mean()
    loss.backward(); o.step()
time.sleep(3)
"""


@pytest.mark.slow
def test_a_device_that_takes_one_process_at_a_time_is_enough(tmp_path: Path) -> None:
    """Real processes: a name that only one of them can take stands for the device."""
    script = tmp_path / "train.py"
    script.write_text(ONE_PROCESS)
    spec = RunSpec(str(script), kind="script", args=(str(tmp_path),), time_limit_s=60.0, group="g")
    said: list[str] = []
    report = run_diagnosis(spec, tmp_path / "runs.db", said.append)
    assert report.could_not_run == ""
    assert report.diagnosis.verdict == "no_fault"
    with Reader(tmp_path / "runs.db") as reader:
        group = reader.group("g")
        ends = [o.error_text for r in group for o in reader.observations(r.id)
                if isinstance(o, Outcome)]  # fmt: skip
    assert not any("busy or unavailable" in text for text in ends)
    assert not any("again, alone" in text for text in said)


def test_a_run_that_is_out_of_memory_alone_says_so() -> None:
    class Small(OneAtATime):
        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            self.made.append(control)
            info = Info()
            info.state, info.message = ending(OUT_OF_MEMORY, self.spec)
            return ScriptRun(cast(RunInfo, info), (OUT_OF_MEMORY,), "")

    for shares, made in ((True, ["as_is", "fp32"]), (False, ["as_is", "fp32"] * 2)):
        runs = Small("memory of a GPU", shares=shares)
        plan = _with_baselines(runs, are_jobs=not shares)
        assert "ran out of memory" in plan.problem()
        assert runs.made == made


class Ranks(OneAtATime):
    """The baseline is judged by rank 3, and a control that is not told so takes rank 0."""

    def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
        run = super().run(control, parent)
        rank = int(dict(self.spec.settings).get(JUDGED_RANK, 3 if control == "as_is" else 0))
        seen = [
            replace(o, ranks=4, rank=rank) if isinstance(o, Outcome) else o
            for o in run.observations
        ]
        return replace(run, observations=tuple(seen))


def test_on_a_gpu_the_control_knows_the_rank_to_judge() -> None:
    runs = Ranks("memory of a GPU", shares=True)
    plan = _with_baselines(runs)
    assert dict(runs.spec.settings) == {JUDGED_RANK: "3"}
    assert runs.made == ["as_is", "fp32"]
    assert plan.views["fp32"].outcome.rank == 3


AMD = (Accelerator("ROCm", "AMD GPU gfx942"),)
ROCM_TORCH = replace(CPU_TORCH, torch="2.13.0+rocm7.0", torch_hip="7.0")


@pytest.mark.parametrize(
    ("machine", "shares", "of_another_framework"),
    [
        (report(H100, software=CUDA_TORCH), True, True),
        (report(H100, software=CPU_TORCH), False, True),
        (report(H100, software=replace(CUDA_TORCH, visible_devices="")), False, True),
        (report(software=CUDA_TORCH), False, False),
        (report(accelerators=AMD, software=ROCM_TORCH), True, False),
        (report(accelerators=AMD, software=CUDA_TORCH), False, False),
    ],
)
def test_whether_runs_share_a_gpu_is_known_without_torch(
    machine: HardwareReport,
    shares: bool,
    of_another_framework: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of a cluster has a GPU of its own; a job of this machine has not."""
    monkeypatch.setattr("ampscope.launcher.script_runs.describe_machine", lambda: machine)
    spec, store = RunSpec("train.py", kind="script"), tmp_path / "runs.db"
    expected = {
        "this machine": (ScriptRuns(spec, store), shares),
        "keras": (ScriptRuns(replace(spec, framework="keras"), store), of_another_framework),
    }
    for engine, where in extensions.job_engines().items():
        jobs = extensions.load(where)(spec, store, engine)
        expected[engine] = (jobs, engine == "local" and shares)
    for name, (runs, answer) in expected.items():
        runs.folder.cleanup()
        assert runs.share_a_gpu() is answer, name


@pytest.mark.parametrize("overflowing", [MODULES, ("a",)])
def test_every_module_in_fp32_gives_way_to_bf16(overflowing: tuple[str, ...]) -> None:
    plan, runs = _tried(_bad(*overflowing), bf16=True, needed=MODULES)
    assert _advised(plan) == ("bf16", "use_bf16", True)
    assert runs.made.count("bf16") == 1


def _machine(capability: str, name: str, policy: str = "cuda") -> Machine:
    return Machine("cpu" if policy != "cuda" else "cuda:0", name, policy, capability)


@pytest.mark.parametrize(
    ("machine", "rehearsed", "is_offered"),
    [
        (_machine("7.5", "Tesla T4"), "", False),
        (_machine("7.0", "Tesla V100-SXM2-16GB"), "", False),
        (_machine("7.5", "NVIDIA GTX of another name"), "", False),
        (_machine("8.0", "NVIDIA A100-SXM4-80GB"), "", True),
        (_machine("13.0", "A GPU of tomorrow"), "", True),
        (_machine("AVX2", "Some CPU", "rehearsal"), "t4", False),
        (_machine("AVX2", "Some CPU", "rehearsal"), "7.0", False),
        (_machine("AVX2", "Some CPU", "rehearsal"), "h100", True),
        (_machine("AVX2", "Some CPU", "rehearsal"), "", True),
        (_machine("AVX2", "Some CPU", "rehearsal"), "no such device", True),
        (_machine("7.5", "Some CPU", "native"), "t4", True),
        (None, "", True),
    ],
)
@pytest.mark.parametrize("overflowing", [MODULES, ("a",)])
def test_bf16_is_a_fix_where_the_gpu_has_it(
    machine: Machine | None,
    rehearsed: str,
    is_offered: bool,
    overflowing: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that emulates bf16 is slower in it than in fp32: it is no fix there, also where a run
    in bf16 was healthy, and the report says why. Nor are all modules in fp32."""
    monkeypatch.setattr(Info, "machine", machine)
    monkeypatch.setattr(Info, "spec", RunSpec("train.py", rehearsed=rehearsed))
    plan, runs = _tried(_bad(*overflowing), bf16=True, needed=MODULES)
    plan.control("bf16")
    assert _advised(plan) == (("bf16", "use_bf16", True) if is_offered else ("", "", None))
    said = seen(_reported(plan))
    assert (FIX_KINDS[FP32_TRAINING] in said) is not is_offered
    assert runs.made.count("bf16") == 1  # as a control, or as a fix
    notes = _reported(plan).notes
    assert any("no bf16 instructions" in note for note in notes) is not is_offered


def test_where_most_modules_overflow_no_set_is_searched() -> None:
    _, runs = _tried(_bad(*MODULES), bf16=True, needed=MODULES)
    assert not [made for made in runs.made if made.count(",")]


def test_every_module_in_fp32_is_no_fix() -> None:
    plan, _ = _tried(_bad(*MODULES), bf16=False, needed=MODULES)
    assert _advised(plan) == ("", "", None)
    assert [t.control for t in plan.trials if t.kind == FP32_TRAINING] == ["fp32_modules:a,b,c,d"]


@pytest.mark.parametrize(
    ("text", "args", "variable", "named"),
    [
        ("import os\nos.environ['MASTER_PORT'] = '12355'", (), "", True),
        ("dist.init_process_group('gloo', init_method='tcp://localhost:1234')", (), "", True),
        ("train()", ("--master_port", "1234"), "", True),
        ("train()", ("--master-port=1234",), "", True),
        ("train()", (), "1234", True),
        ("train()", ("--lr", "1"), "", False),
    ],
)
def test_two_runs_that_meet_at_one_port_are_not_started_at_once(
    text: str, args: tuple[str, ...], variable: str, named: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if variable:
        monkeypatch.setenv("MASTER_PORT", variable)
    script = tmp_path / "train.py"
    script.write_text(text)
    order: list[str] = []

    class Ordered(Runs):
        def start(
            self, control: str, parent: str = "", limit_s: float = 0.0, light: int | None = None
        ) -> str:
            order.append(f"start {control}")
            return control

        def wait(self, control: str, show: object = None, say: object = None) -> ScriptRun:
            order.append(f"wait {control}")
            return self.run(control)

    runs = Ordered(_bad("a"), False, ())
    runs.spec = replace(runs.spec, workload=str(script), args=args)
    _with_baselines(runs, are_jobs=True)
    assert (order.index("wait as_is") < order.index("start fp32")) is named


def test_both_of_two_runs_that_an_overlay_disturbed_are_made_again() -> None:
    """Also where the first of them is compared then; what is said comes from each of them."""

    class Moved(Runs):
        def leave_overlay(self) -> bool:
            return True

        def run(self, control: str, parent: str = "", say: Any = None) -> ScriptRun:
            made = super().run(control, parent)
            if say is None:  # one of the two at a time
                words = os.strerror(errno.EXDEV)
                ended = Outcome(ended="exception", exit_code=1, error_text=words)
                return replace(made, observations=(ended,))
            self.compared = ["/project"]
            say(f"change nothing now: {control}")
            return made

    said: list[str] = []
    runs = Moved(_bad("a"), False, ())
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), said.append, are_jobs=True)
    plan.run_baselines(None)
    assert runs.made == ["as_is", "fp32", "as_is", "fp32"]
    assert [words for words in said if words.startswith("change nothing")] == [
        "change nothing now: as_is",
        "change nothing now: fp32",
    ]


def test_a_small_set_is_still_preferred() -> None:
    plan, _ = _tried(_bad("a"), bf16=True, needed=("b", "d"))
    assert _advised(plan)[0] == "fp32_modules:b,d"


def test_the_next_findings_fix_is_run_where_the_first_ones_do_not_cure() -> None:
    runs = Runs(_bad("a"), False, ("b",))
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    diagnosis = diagnose(plan.evidence)
    root = diagnosis.findings[0]
    in_vain = replace(root.verdict.fix, controls=("scale:8",))
    first = Finding("scaled_gradient_penalty", replace(root.verdict, fix=in_vain))
    works = replace(root.verdict.fix, controls=("fp32_modules:b",))
    second = Finding(root.cause, replace(root.verdict, fix=works))
    both = replace(diagnosis, findings=(first, second))
    plan.try_fixes(first)
    assert plan.ranked_by_trials(both).findings == (second, first)
    assert [(t.control, t.cured) for t in plan.trials] == [
        ("scale:8", False),
        ("fp32_modules:b", True),
    ]


def test_a_fix_that_does_not_fit_into_memory_is_not_one_that_was_tried_in_vain() -> None:
    """A fix in fp32 takes more memory than the script; that it found none says nothing of the
    cause, so no other finding takes the first one's place for it."""

    class Full(Runs):
        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            made = super().run(control, parent)
            return replace(made, observations=(OUT_OF_MEMORY,)) if control == "scale:8" else made

    runs = Full(_bad("a"), False, ("b",))
    plan = _with_baselines(runs)
    diagnosis = diagnose(plan.evidence)
    root = diagnosis.findings[0]
    fixes = [replace(root.verdict.fix, controls=(c,)) for c in ("scale:8", "fp32_modules:b")]
    first = Finding("scaled_gradient_penalty", replace(root.verdict, fix=fixes[0]))
    second = Finding(root.cause, replace(root.verdict, fix=fixes[1]))
    plan.try_fixes(first)
    both = replace(diagnosis, findings=(first, second))
    assert plan.ranked_by_trials(both).findings == (first, second)
    assert "scale:8" in runs.made
    assert plan.trials == []
    plan.control("fp32_modules:b")  # as a reader finds the runs
    assert by_trials(both, plan.evidence).findings == (first, second)


@pytest.mark.parametrize(
    ("asked", "wants"),
    [
        ("cuda_missing", True),  # a GradScaler that stayed off, beside autocast in bf16 on the CPU
        ("cuda_asked", False),  # it took what is there
        ("binary_cross_entropy under autocast", False),
    ],
)
def test_a_device_is_rehearsed_for_what_torch_switched_off(asked: str, wants: bool) -> None:
    trained = run(steps(), OpUse(asked, "GradScaler", "", "train.py:8", 0))
    assert wants_cuda(trained, "") is wants


def test_lines_that_overflow_each_by_itself_are_tried_together() -> None:
    """Each run with lines in fp32 has the next line as its root."""
    lines = ("train.py:1", "train.py:2", "train.py:3")
    bad = [replace(ACTIVATION, id=n, module="", line=line) for n, line in enumerate(lines)]

    class Lines(Runs):
        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            wide = Control(control).values("fp32_lines")
            if not wide:
                return super().run(control, parent)
            self.made.append(control)
            left = [op for op in bad if op.line not in wide]
            seen = (
                self.healthy if not left else _observations(run(steps(FLAT, **OVERFLOWED), *left))
            )
            return ScriptRun(cast(RunInfo, Info()), tuple(seen), "")

    runs = Lines(bad, bf16_cures=False, needed=MODULES)
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    plan.try_fixes(diagnose(plan.evidence).findings[0])
    assert [c for c in runs.made if c.startswith("fp32_lines")] == [
        f"fp32_lines:{','.join(lines[:n])}" for n in (1, 2, 3)
    ]
    assert [t.cured for t in plan.trials] == [False, False, True]


def _neighbours(runs: Runs, second_line: str) -> tuple[DiagnosisPlan, tuple[Finding, Finding]]:
    """Both would be cured by bf16, the first by nothing else, the second by its own module too."""
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    root = diagnose(plan.evidence).findings[0]
    fixes = [
        replace(root.verdict.fix, controls=controls)
        for controls in (("scale:8", "bf16"), ("fp32_modules:b", "bf16"))
    ]
    first = Finding("norm_eps_underflow", replace(root.verdict, fix=fixes[0], module=None))
    second = Finding(root.cause, replace(root.verdict, fix=fixes[1], line=second_line))
    plan.try_fixes(first)
    return plan, (first, second)


@pytest.mark.parametrize(
    ("needed", "where", "is_second"),
    [
        (("b",), "train.py:1", True),  # its own fix alone cures
        (("c",), "train.py:1", False),  # neither's own does: the rules' order stands
        (("b",), "train.py:9", False),  # another place: no neighbour, and nothing is run
    ],
)
def test_of_two_neighbours_the_one_whose_own_fix_cures_stands_first(
    needed: tuple[str, ...], where: str, is_second: bool
) -> None:
    runs = Runs([replace(_bad("a")[0], consumers=())], True, needed)
    plan, (first, second) = _neighbours(runs, where)
    diagnosis = replace(diagnose(plan.evidence), findings=(first, second))
    expected = (second, first) if is_second else (first, second)
    assert plan.ranked_by_trials(diagnosis).findings == expected
    assert ("fp32_modules:b" in runs.made) is (where == "train.py:1")


def test_a_neighbour_is_not_tried_where_runs_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampscope.launcher.plan.MAX_NEIGHBOUR_S", -1.0)
    runs = Runs(_bad("a"), True, ("b",))
    plan, both = _neighbours(runs, "train.py:1")
    assert plan.ranked_by_trials(replace(diagnose(plan.evidence), findings=both)).findings == both
    assert "fp32_modules:b" not in runs.made


def test_a_run_of_a_search_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that this cuts short decides nothing, and is not kept."""
    now = iter(range(0, 10_000, 7))
    monkeypatch.setattr("ampscope.launcher.plan.time.monotonic", lambda: float(next(now)))
    runs = Runs(_bad("a"), False, ("b", "d"))
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    assert plan.control_until(20.0, "fp32_modules:b,d") is not None
    assert runs.limits[-1] == 20.0  # the clock stood at 0
    runs.ended = "time"
    assert plan.control_until(20.0, "fp32_modules:b") is None
    assert runs.limits[-1] == 13.0
    assert "fp32_modules:b" not in plan.views
    made = len(runs.made)
    assert plan.control_until(10.0, "fp32_modules:c") is None  # 14 s: no time is left
    assert len(runs.made) == made


TRACEBACK = "Traceback (most recent call last):\n  File ...\nAssertionError: no CUDA\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("before", ["", "step 1\nTrace\n", "50 %\rTr\n", "[rank0]: \n"])
def test_a_traceback_is_held_back_until_it_is_released(before: str, size: int) -> None:
    shown: list[str] = []
    held = HeldTraceback(shown.append)
    text = before + TRACEBACK
    for place in range(0, len(text), size):
        held(text[place : place + size])
    assert "".join(shown) == before
    held.release()
    held("after")
    assert "".join(shown) == text + "after"


def test_a_dropped_traceback_is_never_shown() -> None:
    shown: list[str] = []
    held = HeldTraceback(shown.append)
    held("begun\n" + TRACEBACK)
    held.drop()
    held.release()
    assert shown == ["begun\n"]


def test_a_script_that_goes_on_after_a_traceback_is_shown_again() -> None:
    shown: list[str] = []
    held = HeldTraceback(shown.append)
    held(TRACEBACK)
    for step in range(10_000):
        held(f"step {step}\n")
    assert "".join(shown).startswith(TRACEBACK)
    assert shown[-1] == "step 9999\n"


def test_a_line_that_may_become_a_traceback_is_shown_once_it_does_not() -> None:
    shown: list[str] = []
    held = HeldTraceback(shown.append)
    held("Trace")
    assert shown == []
    held("d the graph")
    assert "".join(shown) == "Traced the graph"


def test_the_findings_own_line_is_tried_before_a_search_over_modules() -> None:
    """The module alone does not cure, its line does: no set of modules is run."""

    class LineCures(Runs):
        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            if not control.startswith("fp32_lines:"):
                return super().run(control, parent)
            self.made.append(control)
            return ScriptRun(cast(RunInfo, Info()), tuple(self.healthy), "")

    runs = LineCures(_bad("a"), False, ("b", "d"))
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    plan.try_fixes(diagnose(plan.evidence).findings[0])
    assert [(t.control, t.cured) for t in plan.trials] == [
        ("fp32_modules:a", False),
        ("fp32_lines:train.py:1", True),
    ]
    assert runs.made == ["as_is", "fp32", "fp32_modules:a", "fp32_lines:train.py:1"]


def test_fixes_are_counted_and_each_change_of_the_verdict_is_handed_on() -> None:
    """At most: the rule's own, the search for a set of modules, and bf16."""
    runs, said, seen = Runs(_bad("a"), False, ("b", "d")), [], []
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), said.append)
    plan.run_baselines(None)
    findings = diagnose(plan.evidence).findings
    plan.count_fixes(findings)
    plan.on_change = lambda: seen.append((plan.ended_fixes, len(plan.trials)))
    plan.try_fixes(findings[0])
    own = len(findings[0].verdict.fix.controls)
    most = own + 2 - ("bf16" in findings[0].verdict.fix.controls)
    announced = [text.partition(":")[0] for text in said if text.startswith("trying fixes")]
    counted = list(dict.fromkeys(announced))
    assert counted == [f"trying fixes, {n} of at most {most}" for n in range(1, len(counted) + 1)]
    assert len(counted) <= most
    assert seen[0] == (0, 0)
    assert seen[-1][0] == len(counted)


@pytest.mark.parametrize(
    ("control", "needed"), [("fp32_modules:a", ("a",)), ("bf16", ("not there",))]
)
def test_a_fix_whose_run_a_user_stopped_was_not_tried(
    control: str, needed: tuple[str, ...]
) -> None:
    class Stopped(Runs):
        def run(self, made: str, parent: str = "", say: object = None) -> ScriptRun:
            run = super().run(made, parent)
            info = Info()
            info.state = State.CANCELLED if made == control else State.FINISHED
            return replace(run, info=cast(RunInfo, info))

    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, Stopped(_bad("a"), True, needed))), str)
    plan.run_baselines(None)
    plan.try_fixes(diagnose(plan.evidence).findings[0])
    assert control in plan.views
    assert control not in [trial.control for trial in plan.trials]


class Served(Runs):
    """Of a whole diagnosis."""

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    store = Path("runs.db")


def _made(runs: Served, monkeypatch: pytest.MonkeyPatch) -> DiagnosisResult:
    for name, value in (
        ("ScriptRuns", lambda *args, **how: runs),
        ("keep_conclusion", lambda *args: None),
        ("stored", lambda found: ""),
    ):
        monkeypatch.setattr(f"ampscope.launcher.plan.{name}", value)
    return run_diagnosis(runs.spec, runs.store)


def test_bf16_is_not_run_beside_a_fix_that_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule asks for it where a cause is found, and no other finding can take its place."""
    cured = Served(_bad("a"), True, ("a",))
    assert [t.cured for t in _made(cured, monkeypatch).trials] == [True]
    assert cured.made == ["as_is", "fp32", "scale:1", "fp32_modules:a"]
    in_vain = Served(_bad("a"), False, ("none",))
    assert not any(t.cured for t in _made(in_vain, monkeypatch).trials)
    assert in_vain.made.count("bf16") == 1


class Diverging(Served):
    """No precision trains it: the loss is not finite from step ``first`` on."""

    def __init__(self, first: int, lr_that_trains: str = "") -> None:
        super().__init__([], False, ())
        self.first, self.trains = first, lr_that_trains

    def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
        self.made.append(control)
        if self.trains and self.trains in control:
            losses = [*FALLING]
        else:
            losses = [10.0**n if n < self.first else math.nan for n in range(len(FALLING))]
        seen = fp32_run(steps(losses, **WITHOUT_SCALER), ended="returned")
        return ScriptRun(cast(RunInfo, Info()), tuple(_observations(seen)), "")


def test_no_learning_rate_is_tried_where_the_first_forward_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rate is read by the optimizer's step, and there has been none."""
    runs = Diverging(0)
    report = _made(runs, monkeypatch)
    assert report.diagnosis.findings[0].cause == "not_amp_divergence"
    assert report.diagnosis.findings[0].verdict.fix.kind == "lower_lr"
    assert runs.made == ["as_is", "fp32", "bf16"]
    assert report.trials == ()


def test_a_rate_that_fails_in_half_is_not_run_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Diverging(3, "lr:0.01")
    report = _made(runs, monkeypatch)
    assert report.diagnosis.findings[0].cause == "not_amp_divergence"
    assert [t.control for t in report.trials if t.cured is not False] == ["lr:0.01"]
    assert runs.made == ["as_is", "fp32", "lr:0.1", "lr:0.01", "fp32;lr:0.01"]


def test_bf16_is_not_run_where_it_can_cure_no_other_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Diverging(3)
    report = _made(runs, monkeypatch)
    assert [f.cause for f in report.diagnosis.findings] == ["not_amp_divergence"]
    assert runs.made == ["as_is", "fp32", "lr:0.1", "lr:0.01", "lr:0.001"]


@pytest.mark.parametrize("can", [True, False])
def test_a_result_that_is_worse_is_held_against_one_rounding_where_that_can_be_run(
    monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    class Chaotic(Served):
        def can_apply(self, control: str) -> bool:
            return can or Control(control).first.name in ("fp32_modules", "bf16")

        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            self.made.append(control)
            reached = 200.0 if control == "fp32" else 130.0
            said = Printed("reward", (20.0, 60.0, reached), (0, 1, 2))
            view = HEALTHY_FP32 if "fp32" in control else run(steps())
            return ScriptRun(cast(RunInfo, Info()), (*_observations(view), said), "")

    runs = Chaotic([], False, ())
    verdict = _made(runs, monkeypatch).diagnosis.verdict
    assert (verdict, NUDGED in runs.made) == (("no_fault" if can else "inconclusive"), can)


def test_a_cause_whose_fix_cannot_be_run_is_not_looked_for_in_sites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32 no gradient leaves fp16's range, whatever is wrong with the scaler's calls."""

    class Wrong(Served):
        def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
            self.made.append(control)
            calls = log([ZERO, SCALE, BACKWARD, STEP, DIRECT_STEP, UPDATE])
            view = HEALTHY_FP32 if control == "fp32" else run(steps(FLAT), calls=calls)
            return ScriptRun(cast(RunInfo, Info()), (*_observations(view), TABLE), "")

    runs = Wrong([], False, ())
    report = _made(runs, monkeypatch)
    assert report.diagnosis.findings[0].cause == "scaler_bypassed"
    assert not [control for control in runs.made if "fp32_" in control]


@pytest.mark.parametrize(
    ("tried", "fails"),
    [
        ({}, False),  # nothing was run
        ({"eps:0.0001": False}, True),
        ({"eps:0.0001": False, "bf16": True}, True),  # which cures whatever leaves fp16's range
        ({"eps:0.0001": False, "fp32_modules:b": True}, False),
        ({"eps:0.0001": None}, False),
    ],
)
def test_bf16_alone_says_nothing_for_a_cause(tried: dict[str, bool | None], fails: bool) -> None:
    plan = _with_baselines(Runs(_bad("a"), False, ("b",)))
    root = diagnose(plan.evidence).findings[0]
    fix = replace(root.verdict.fix, controls=("eps:0.0001",))
    plan.trials = [Trial(control, "", cured, None) for control, cured in tried.items()]
    assert plan.own_fixes_fail(replace(root, verdict=replace(root.verdict, fix=fix))) is fails
    proposed = replace(root.verdict.fix, controls=("eps:0.0001", "bf16"))
    own = replace(root, verdict=replace(root.verdict, fix=proposed))
    assert plan.own_fixes_fail(own) is (fails and "bf16" not in tried)
