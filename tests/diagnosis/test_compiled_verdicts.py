"""A script that compiles is accused of what its compiled code does, not of what eager code would.

The long tests compile for real; the short ones judge a compiled run that was made by hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.compiled_runs import (
    DECOMPOSED,
    Layer,
    apart,
    arms,
    layer,
    left_out,
    next_arm,
    parting,
    suspect_ops,
    suspects,
    unjudged,
)
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import Control
from ampscope.diagnosis.compiled import diagnosis_with_compiled_run, wants_compiled
from ampscope.diagnosis.load import load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.launcher.plan import DiagnosisPlan, run_diagnosis
from ampscope.launcher.uncompiled_search import UncompiledSearch
from ampscope.observations import COMPILED_FRAMES, COMPILED_NOTE, OpUse, Scan, Tap
from ampscope.records import RunSpec
from ampscope.store.reader import Reader
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    HEALTHY_FP32,
    NAN,
    STEPS,
    bad_op,
    causes,
    run,
    steps,
    tensor,
)
from tests.helpers.evidence_of_runs import clip_before_unscale
from tests.helpers.inductor import needs_compiler

ACTIVATION = bad_op("aten.addmm", tensor(400.0), tensor(2.0), tensor(600.0), fp32_max=2e5)
EAGER = run(steps((NAN,) * STEPS), ACTIVATION, notes=(COMPILED_NOTE,))
FRAMES = OpUse(COMPILED_FRAMES, "", "", "", 0, count=2)


def with_compiled(compiled: RunView, policy: str = "native") -> Evidence:
    """The eager run overflows; fp32 trains."""
    return Evidence({"as_is": EAGER, "fp32": HEALTHY_FP32, "compiled": compiled}, policy)


def test_a_script_that_compiles_runs_compiled_before_it_is_accused() -> None:
    made = Evidence({"as_is": EAGER, "fp32": HEALTHY_FP32}, "native")
    assert causes(diagnosis_with_compiled_run(made)) == ["activation_overflow"]
    assert wants_compiled(diagnosis_with_compiled_run(made), made)
    eager = run(steps((NAN,) * STEPS), ACTIVATION)
    made = Evidence({"as_is": eager, "fp32": HEALTHY_FP32}, "native")
    assert not wants_compiled(diagnosis_with_compiled_run(made), made)


def test_what_trains_compiled_is_no_fault_and_a_note() -> None:
    found = diagnosis_with_compiled_run(with_compiled(run(steps(), FRAMES)))
    assert (found.verdict, found.findings, found.symptoms) == ("no_fault", (), ())
    assert found.notes[0].startswith("The script would fail in eager mode: aten.addmm")


@pytest.mark.parametrize(
    "compiled",
    [
        run(steps((NAN,) * STEPS), FRAMES),
        run(steps([*FALLING[:20], NAN, *FALLING[21:]]), FRAMES),  # one bad step
        run(steps(FLAT), FRAMES),  # it does not learn
        run(steps(weight_nonfinite=3), FRAMES),
    ],
)
def test_what_fails_compiled_too_is_accused(compiled: RunView) -> None:
    found = diagnosis_with_compiled_run(with_compiled(compiled))
    assert causes(found) == ["activation_overflow"]
    assert found.notes


@pytest.mark.parametrize(
    ("ended", "why"), [("time", "--time-limit raises it"), ("returned", "are needed")]
)
def test_a_compiled_run_of_few_steps_says_what_ended_it(ended: str, why: str) -> None:
    short = run(steps(FALLING[:3]), FRAMES, ended=ended)
    said = unjudged({"as_is": run(steps()), "compiled": short}, "compiled", STEPS)
    assert "it made 3 optimizer steps" in said
    assert why in said


SLIGHTLY = [loss * 1.0003 for loss in FALLING]  # as far as half precision's own rounding goes
OFF = [loss * 1.3 for loss in FALLING]


def clean(**compiled: RunView) -> Evidence:
    """The eager run trains; its compiled runs by name, without the common head."""
    named = {f"compiled;{n}" if n else "compiled": view for n, view in compiled.items()}
    eager = run(steps(), notes=(COMPILED_NOTE,))
    return Evidence({"as_is": eager, "fp32": HEALTHY_FP32, **named}, "native")


def test_what_trains_in_eager_mode_runs_compiled_before_it_is_acquitted() -> None:
    assert wants_compiled(diagnosis_with_compiled_run(clean()), clean())
    rehearsed = Evidence(clean().runs, "rehearsal")
    assert not wants_compiled(diagnosis_with_compiled_run(rehearsed), rehearsed)


@pytest.mark.parametrize("losses", [FALLING, SLIGHTLY])
def test_compiled_code_as_near_as_rounding_is_acquitted_with_a_note(losses: list[float]) -> None:
    made = clean(**{"": run(steps(losses), FRAMES)})
    assert next_arm(made.runs) is None
    found = diagnosis_with_compiled_run(made)
    assert (found.verdict, found.findings) == ("no_fault", ())
    assert "as near to eager code's" in found.notes[0]


GOOD, WRONG = run(steps(), FRAMES), run(steps(OFF), FRAMES)


def drawn(losses: Sequence[float], sums: Sequence[float]) -> RunView:
    """A run whose compiled code draws random numbers that add up to ``sums``, step by step."""
    return run(
        steps(losses), FRAMES, *(tap(n, "draw", "drop", total=s) for n, s in enumerate(sums))
    )


def tap(step: int, role: str, module: str, total: float = 1.0, nonfinite: int = 0) -> Tap:
    line = "train.py:9"
    return Tap(step, 0, module, role, module, "aten.mul", line, "bf16", 1.0, total, nonfinite)


CHANGING, HELD = [50.0, 51.5, 48.0, 52.0, 49.5, 50.5], [50.0] * 6


def with_draws(compiled_draws: list[float]) -> Evidence:
    """Compiled code is off, and as eager code with eager code's random numbers."""
    return clean(
        **{
            "": WRONG,
            "backend:aot_eager": GOOD,
            "backend:aot_eager;taps": drawn(FALLING, CHANGING),
            "eager_random": GOOD,
            "taps": drawn(OFF, compiled_draws),
        }
    )


def test_other_random_numbers_are_no_fault() -> None:
    made = with_draws([51.0, 49.0, 50.5, 48.5, 52.5, 50.0])
    assert next_arm(made.runs) is None
    found = diagnosis_with_compiled_run(made)
    assert found.verdict == "no_fault"
    assert "random numbers" in found.notes[0]


def test_random_numbers_that_repeat_are_the_compilers_fault() -> None:
    found = diagnosis_with_compiled_run(with_draws(HELD)).findings[0]
    assert (found.cause, found.verdict.module) == ("compiler_kernel", "drop")
    assert "the same at every step" in found.verdict.reason


def test_the_first_tensor_that_differs_is_what_is_left_out_first() -> None:
    """Outputs of modules come before those of what holds them; the gradient is the later one's."""
    order = [("activation", "up"), ("activation", "net.act"), ("activation", "net")]
    eager = run(steps(), FRAMES, *(tap(0, *place) for place in order))
    totals = [1.0, 1.4, 2.0]
    taps = [tap(0, *place, total=t) for place, t in zip(order, totals, strict=True)]
    arms = {"": WRONG, "backend:aot_eager": GOOD, "backend:aot_eager;taps": eager}
    made = clean(**arms, eager_casts=WRONG, taps=run(steps(OFF), FRAMES, *taps))
    assert next_arm(made.runs) == DECOMPOSED
    assert suspects(made.runs) == ["net.act", "net"]
    cured = clean(
        **arms,
        eager_casts=WRONG,
        taps=run(steps(OFF), FRAMES, *taps),
        **{"uncompiled:net.act": GOOD},
    )
    found = diagnosis_with_compiled_run(cured).findings[0]
    assert (found.cause, found.verdict.module, found.verdict.op) == (
        "compiler_kernel", "net.act", "aten.mul",
    )  # fmt: skip
    assert "train.py:9" in found.verdict.reason


def test_taps_within_rounding_and_infinities_that_eager_code_has_are_no_parting() -> None:
    eager = run(steps(), FRAMES, tap(0, "activation", "mask", nonfinite=3))
    near = tap(0, "activation", "mask", total=1.001, nonfinite=3)
    arms = {"": WRONG, "backend:aot_eager": GOOD, "backend:aot_eager;taps": eager}
    assert parting(clean(**arms, taps=run(steps(OFF), FRAMES, near)).runs) is None
    alone = tap(0, "reduction", "mask", nonfinite=1)
    assert parting(clean(**arms, taps=run(steps(OFF), FRAMES, near, alone)).runs) is None


def test_what_taps_bring_back_vanishes_when_it_is_observed() -> None:
    eager = run(steps(), FRAMES, tap(0, "activation", "up"))
    arms = {"": WRONG, "backend:aot_eager": GOOD, "backend:aot_eager;taps": eager}
    made = clean(**arms, eager_casts=WRONG, taps=GOOD)
    assert layer(made.runs) is Layer.OBSERVED
    assert causes(diagnosis_with_compiled_run(made)) == ["vanishes_when_observed"]


def test_arms_run_in_turn_until_the_layer_is_known() -> None:
    """Op by op, the same with taps, with eager code's random numbers, with emulated casts, with
    taps: and no more."""
    good, asked = {"compiled;backend:aot_eager", "compiled;backend:aot_eager;taps", DECOMPOSED}, []
    runs = dict(clean(**{"": run(steps(OFF), FRAMES)}).runs)
    while arm := next_arm(runs):
        asked.append(str(arm))
        runs[arm] = run(steps(FALLING if arm in good else OFF), FRAMES, control=arm)
    assert asked == [
        "compiled;backend:aot_eager", "compiled;backend:aot_eager;taps", "compiled;eager_random",
        "compiled;eager_casts", "compiled;taps", DECOMPOSED,
    ]  # fmt: skip
    assert layer(runs) is Layer.KERNEL
    assert causes(diagnosis_with_compiled_run(Evidence(runs, "native"))) == ["compiler_kernel"]
    decomposed = {**runs, DECOMPOSED: WRONG}
    assert layer(decomposed) is Layer.DECOMPOSITION
    found = diagnosis_with_compiled_run(Evidence(decomposed, "native")).findings[0]
    assert found.cause == "compiler_kernel"
    assert "aot_eager_decomp_partition" in found.verdict.reason


def test_an_op_that_torchs_own_kernel_cures_is_kept_out_of_fusion() -> None:
    """The op is that of the graph before decomposition, in the module that the taps point at."""
    eager = [tap(0, "activation", "act"), replace(tap(0, "saved", "act"), op="aten.tanh")]
    eager[0] = replace(eager[0], op="aten.gelu")
    arms = {
        "": WRONG,
        "backend:aot_eager": GOOD,
        "backend:aot_eager;taps": run(steps(), FRAMES, *eager),
        "eager_casts": WRONG,
        "taps": run(steps(OFF), FRAMES, tap(0, "activation", "act", total=1.4)),
    }
    assert suspect_ops(clean(**arms).runs) == ["aten.gelu", "aten.tanh", "aten.mul"]
    assert suspect_ops(clean(**{**arms, "taps": arms["backend:aot_eager;taps"]}).runs) == []
    cured = clean(**arms, **{"unfused:aten.gelu": GOOD, "unfused:aten.tanh": WRONG})
    finding = diagnosis_with_compiled_run(cured).findings[0]
    assert (finding.cause, finding.verdict.op) == ("compiler_kernel", "aten.gelu")
    assert finding.verdict.fix.controls == ("compiled;unfused:aten.gelu",)
    compile(finding.verdict.fix.patch, "patch", "exec")
    in_vain = diagnosis_with_compiled_run(clean(**arms, **{"unfused:aten.gelu": WRONG})).findings[0]
    assert in_vain.verdict.op is None
    assert in_vain.verdict.fix.kind == "change_backend"


def test_a_clip_to_the_same_limit_does_not_hide_what_rounding_does_to_a_norm() -> None:
    """Eager code and its fp32 control see a norm before and after the clip, compiled code one."""
    eager = run(steps(unclipped_norm=1.24168, grad_norm=1.0), notes=(COMPILED_NOTE,))
    fp32 = run(steps(unclipped_norm=1.23891, grad_norm=1.0))
    compiled = run(steps(unclipped_norm=None, grad_norm=1.2389), FRAMES)
    made = Evidence({"as_is": eager, "fp32": fp32, "compiled": compiled}, "native")
    assert next_arm(made.runs) is None
    assert diagnosis_with_compiled_run(made).verdict == "no_fault"
    far = run(steps(unclipped_norm=None, grad_norm=1.4), FRAMES)
    assert apart({**made.runs, "compiled": far}, "compiled") is not None


def test_what_taps_do_to_the_loss_is_measured_where_both_runs_are_there() -> None:
    moved = run(steps([FALLING[0] * 1.0002, *FALLING[1:]]), FRAMES)
    made = clean(**{"": GOOD, "taps": moved, "backend:aot_eager;taps": moved})
    shown = {arm.control: arm for arm in arms(made.runs)}
    assert shown["compiled;taps"].by_taps == pytest.approx(2e-4)
    assert "at most 2.0e-04 of it" in shown["compiled;taps"].words
    assert shown["compiled;backend:aot_eager;taps"].by_taps is None  # its own pair was not run
    same = arms(clean(**{"": GOOD, "taps": GOOD}).runs)[-1]
    assert same.words.endswith("they do not move it in its first steps")


NEARLY = run(steps([loss * 1.0012 for loss in FALLING]), FRAMES)  # five times rounding


def test_a_distance_that_rounding_may_explain_is_held_against_runs_that_round_as_eager_code() -> (
    None
):
    """What agrees once casts are emulated is rounding; no finding, and one compilation more."""
    first = clean(**{"": NEARLY})
    assert next_arm(first.runs) == "compiled;backend:aot_eager"
    arms = {"": NEARLY, "backend:aot_eager": GOOD}
    arms["backend:aot_eager;taps"] = run(steps(), FRAMES, tap(0, "activation", "up"))
    second = clean(**arms)
    assert next_arm(second.runs) == "compiled;eager_casts"
    third = clean(**arms, eager_casts=GOOD)
    assert next_arm(third.runs) is None
    # Where it draws random numbers, they may be what differs, with emulated casts too.
    arms["backend:aot_eager;taps"] = drawn(FALLING, CHANGING)
    drawing = clean(**arms, eager_casts=NEARLY, taps=drawn(OFF, CHANGING))
    assert next_arm(clean(**arms).runs) == "compiled;taps"
    for made in (first, second, third, drawing):
        found = diagnosis_with_compiled_run(made)
        assert (found.verdict, found.findings, found.undecided) == ("no_fault", (), "")


def test_a_small_distance_is_a_fault_where_nothing_rounds_otherwise() -> None:
    made = clean(**{"": NEARLY, "backend:aot_eager": NEARLY, "backend:eager": NEARLY})
    assert next_arm(made.runs) is None
    assert causes(diagnosis_with_compiled_run(made)) == ["graph_semantics"]
    made = clean(
        **{"": NEARLY, "backend:aot_eager": GOOD},
        **{"backend:aot_eager;taps": run(steps(), FRAMES, tap(0, "activation", "up"))},
        eager_casts=NEARLY,
        taps=NEARLY,
    )
    assert next_arm(made.runs) == DECOMPOSED
    assert causes(diagnosis_with_compiled_run(made)) == ["compiler_kernel"]
    vanished = {**made.runs, "compiled;taps": GOOD}
    assert diagnosis_with_compiled_run(Evidence(vanished, "native")).verdict == "no_fault"


def test_a_layer_that_the_runs_do_not_tell_is_undetermined() -> None:
    raised = run([], ended="exception", error_type="BackendCompilerFailed", error_text="no")
    off = run(steps(OFF), FRAMES)
    found = diagnosis_with_compiled_run(
        clean(**{"": off, "eager_random": off, "backend:aot_eager": raised})
    )
    assert found.verdict == "inconclusive"
    assert not found.findings
    assert "do not tell which layer" in found.undecided


def test_a_nan_that_only_compiled_code_has_is_its_fault_however_late() -> None:
    late = run(steps([*FALLING[:15], NAN, *FALLING[16:]]), FRAMES)
    found = apart(clean(**{"": late}).runs, "compiled")
    assert found is not None
    assert (found.step, found.what) == (15, "the loss")


def test_the_module_is_the_one_that_was_left_uncompiled_alone() -> None:
    off, good = run(steps(OFF), FRAMES), run(steps(), FRAMES)
    arms = {"": off, "eager_random": off, "eager_casts": off, "backend:aot_eager": good}
    tried = {"uncompiled:body,head": good, "uncompiled:body": off, "uncompiled:head": good}
    found = diagnosis_with_compiled_run(clean(**arms, **tried)).findings[0]
    assert (found.cause, found.verdict.module) == ("compiler_kernel", "head")
    assert found.verdict.fix.controls == ("compiled;uncompiled:head",)


def test_a_part_without_parameters_is_looked_for_inside_the_module_that_cures() -> None:
    """The search knows modules by their parameters; taps name the others."""
    scans = [Scan("start", "parameter", f"{p}.weight", "fp32", 8, 0, 0, 0.5) for p in ("b.up", "c")]
    arms = {"": WRONG, "backend:aot_eager": WRONG, "backend:eager": GOOD}
    views = dict(clean(**arms).runs)
    views["as_is"] = run(steps(), *scans, notes=(COMPILED_NOTE,))
    taps = [tap(0, "activation", module) for module in ("b.up", "b.act", "b")]

    class Plan(DiagnosisPlan):
        def __init__(self) -> None:
            self.views, self.asked = views, list[str]()

        def control(self, control: str) -> RunView:
            self.asked.append(control)
            left = Control(control).values("uncompiled")
            cured = {"b", "b.act"} & set(left)
            self.views[control] = run(steps(FALLING if cured else OFF), FRAMES, *taps)
            return self.views[control]

        def control_until(self, deadline: float, control: str) -> RunView:
            return self.control(control)

    plan = Plan()
    UncompiledSearch(plan.views, plan.control, plan.control_until).run()
    assert plan.asked[-1] == "compiled;backend:aot_eager;uncompiled:b.act"
    finding = diagnosis_with_compiled_run(Evidence(views, "native")).findings[0]
    assert (finding.cause, finding.verdict.module) == ("graph_semantics", "b.act")


def test_where_nothing_rounds_otherwise_a_module_that_cures_by_half_is_not_the_one() -> None:
    arms = {"": WRONG, "backend:aot_eager": WRONG, "backend:eager": GOOD}
    tried = {"backend:aot_eager;uncompiled:a": NEARLY, "backend:aot_eager;uncompiled:a,b": GOOD}
    assert left_out(clean(**arms, **tried).runs) == "compiled;uncompiled:a,b"


def test_a_run_that_raised_is_no_set_that_cures() -> None:
    off = run(steps(OFF), FRAMES)
    raised = run([], ended="exception", error_type="Unsupported", error_text="no")
    assert left_out(clean(**{"": off, "uncompiled:head": raised}).runs) is None


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (
            run([], ended="exception", error_type="InvalidCxxCompiler", error_text="No working"),
            "it raised InvalidCxxCompiler: No working",
        ),
        (run([], ended="exception", error_type="KeyError", error_text=""), "it raised KeyError"),
        (run(steps()), "compiled nothing"),
        (run(steps()[:2], FRAMES), "at least 5 are needed"),
        (run(steps()[:2], FRAMES, ended="killed"), "stopped at a limit"),
    ],
)
def test_what_could_not_be_compiled_is_undecided(compiled: RunView, words: str) -> None:
    found = diagnosis_with_compiled_run(with_compiled(compiled))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    assert "aten.addmm" in found.undecided
    assert "not judged" in found.undecided
    assert words in found.undecided


def test_a_gpus_compiled_code_cannot_be_rehearsed() -> None:
    found = diagnosis_with_compiled_run(with_compiled(run(steps(), FRAMES), "rehearsal"))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    found = diagnosis_with_compiled_run(
        with_compiled(run(steps((NAN,) * STEPS), FRAMES), "rehearsal")
    )
    assert causes(found) == ["activation_overflow"]


def test_an_order_of_calls_is_the_same_compiled() -> None:
    usual = clip_before_unscale()
    made = Evidence({**usual.runs, "compiled": run(steps(), FRAMES)}, "native")
    assert causes(diagnosis_with_compiled_run(made)) == ["clip_before_unscale"]


def test_data_that_are_bad_before_any_model_are_so_compiled() -> None:
    divided = bad_op(
        "aten.div", tensor(0.0), tensor(0.0, zeros=9), nan=9, pos_inf=0, dtype="fp32", module="",
        module_type="", tracked=False,
    )  # fmt: skip
    eager = run(steps((NAN,) * STEPS), divided, notes=(COMPILED_NOTE,))
    runs = {"as_is": eager, "fp32": run(steps((NAN,) * STEPS), divided)}
    made = Evidence({**runs, "compiled": run(steps((NAN,) * STEPS))}, "rehearsal")
    assert not wants_compiled(
        diagnosis_with_compiled_run(Evidence(runs, "rehearsal")), Evidence(runs, "rehearsal")
    )
    assert causes(diagnosis_with_compiled_run(made)) == ["bad_input_data"]


OVERFLOWS = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
with torch.no_grad():
    net[0].weight.mul_(2000)
    net[2].weight.fill_(3000)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(64, 16), torch.randint(0, 5, (64,))
model = torch.compile(net)
for step in range(8):
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def diagnosed(script: Path, store: Path) -> DiagnosisResult:
    spec = RunSpec(kind="script", workload=str(script), group="one", steps=60, time_limit_s=240.0)
    report = run_diagnosis(spec, store, verify=False)
    with Reader(store) as reader:
        again = load_diagnosis(reader, report.runs["as_is"].id)
    assert causes(again.diagnosis) == causes(report.diagnosis)
    assert (again.undecided, again.notes) == (report.undecided, report.notes)
    return report


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("name", ["compiled_fused_norm", "compiled_step_bf16"])
def test_a_healthy_compiled_script_is_not_accused(name: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "healthy" / f"{name}.py"
    report = diagnosed(script, tmp_path / "runs.db")
    assert report.diagnosis.verdict == "no_fault", report.undecided
    assert "would fail in eager mode" in report.notes[0]
    assert COMPILED_NOTE not in report.notes
    assert len(report.runs["compiled"].id) > 0


@pytest.mark.thorough
@needs_compiler
def test_an_overflow_that_compiled_code_has_too_is_named(tmp_path: Path) -> None:
    script = tmp_path / "overflows.py"
    script.write_text(OVERFLOWS)
    report = diagnosed(script, tmp_path / "runs.db")
    assert causes(report.diagnosis) == ["activation_overflow"]
    assert "with torch.compile on the script fails too" in report.notes[0]


@pytest.mark.thorough
def test_without_a_compiler_nothing_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    source = Path(__file__).parents[1] / "healthy" / "compiled_fused_norm.py"
    script = shutil.copy(source, tmp_path / "script.py")
    report = diagnosed(Path(script), tmp_path / "runs.db")
    assert report.diagnosis.verdict == "inconclusive"
    assert "compiled code was not judged" in report.undecided
