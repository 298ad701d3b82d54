"""An undetermined verdict names the first bad op, its place, and a next step that fits the run."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ampscope.diagnosis.load import load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.observations import (
    READ_LOSS,
    UNSTEPPED,
    BadOp,
    Call,
    HalfSite,
    LineUse,
    OptimizerStep,
    OpUse,
    ParameterGradient,
    Scan,
)
from ampscope.records import Machine
from ampscope.render.contract import to_json
from ampscope.render.markdown import to_markdown
from ampscope.render.terminal import print_sections
from ampscope.store.export import to_json as to_export
from ampscope.store.importing import import_file
from ampscope.store.reader import Reader
from ampscope.story.build import document
from ampscope.story.diagnosis import summary
from tests.helpers import script_stores
from tests.helpers.script_stores import (
    FALLING,
    bad_op,
    healthy_run,
    long_search,
    no_fault,
    one_step,
    run,
    seen,
)

FLAT: list[OptimizerStep] = [one_step(i, 1.5 - 0.001 * i) for i in range(12)]
# NaN came to the loss at step 4, from an op of a kind that no rule knows.
UNKNOWN: BadOp = replace(
    bad_op(), op="aten.log", step=4, count=8, fp32_max=None, fp32_finite=None, dtype="fp32"
)
BAD = [
    one_step(i, x if i < 4 else float("nan"), grad_nonfinite=0 if i < 4 else 9)
    for i, x in enumerate(FALLING)
]


def diagnosed(
    path: Path, *observations: object, fp32: bool = True, **outcome: object
) -> DiagnosisResult:
    made = [o for o in observations if isinstance(o, OptimizerStep)]
    others = [o for o in observations if not isinstance(o, OptimizerStep)]
    head = run(path, "as_is", seen(made, *others, **outcome))  # type: ignore[arg-type]  # by hand
    if fp32:
        healthy_run(path, "fp32")
    with Reader(path) as reader:
        return load_diagnosis(reader, head)


def printed(report: DiagnosisResult) -> str:
    out = io.StringIO()
    print_sections(summary(report), Console(file=out, width=10_000))
    return out.getvalue()


def test_the_first_bad_op_its_module_line_and_step_are_named(tmp_path: Path) -> None:
    report = diagnosed(tmp_path / "r.db", *BAD, UNKNOWN)
    assert report.diagnosis.verdict == "inconclusive", report.diagnosis.findings
    said = (
        "Where to look first: aten.log gave the first non-finite value out of finite inputs "
        "(in module encoder.2.ffn.wo, forward, at train.py:18, step 4)."
    ).replace("encoder.2.ffn.wo", UNKNOWN.module)
    assert said in report.undecided
    text = printed(report)
    assert said in text
    assert "h = self.wo(x)" in text
    lead = json.loads(to_json(report))["lead"]
    assert (lead["op"], lead["module"], lead["line"], lead["step"]) == (
        "aten.log", UNKNOWN.module, "train.py:18", 4,
    )  # fmt: skip
    with Reader(tmp_path / "r.db") as reader:
        told = to_markdown(document(reader, [report.runs["as_is"].id])).replace("\\", "")
    assert "Where to look first: aten.log" in told


def test_advice_fits_how_the_script_ended(tmp_path: Path) -> None:
    ended = printed(diagnosed(tmp_path / "a.db", *BAD, UNKNOWN))
    assert "more steps" not in ended
    assert f"`ampscope run --fix fp32_modules:{UNKNOWN.module}`" in ended
    stopped = printed(diagnosed(tmp_path / "b.db", *BAD, UNKNOWN, ended="steps"))
    assert "Diagnose it again over more steps" in stopped
    raised = {"ended": "exception", "error_type": "RuntimeError", "error_line": "train.py:9"}
    error = printed(diagnosed(tmp_path / "c.db", *FLAT, error_text="odd", **raised))
    assert "the script's error is RuntimeError (at train.py:9" in error
    assert "Fix the script's own error at train.py:9 first" in error


@pytest.mark.parametrize(
    ("observations", "said"),
    [
        (BAD, "the loss is not finite there for the first time (step 4)"),
        (FLAT, "in fp32 (step "),
        (
            [*(replace(a, loss=1.0) for a in BAD),
             ParameterGradient(4, "optimizer0", "a.weight", 0, 9, 0, 9, None)],
            "the gradient of a.weight is not finite there for the first time (in module a,",
        ),
    ],
)  # fmt: skip
def test_without_an_op_the_first_bad_step_is_named(
    observations: list[object], said: str, tmp_path: Path
) -> None:
    report = diagnosed(tmp_path / "r.db", *observations)
    assert report.diagnosis.verdict == "inconclusive", report.diagnosis.findings
    assert said in report.undecided


def test_a_bad_step_that_was_never_made_is_named(tmp_path: Path) -> None:
    """The script looks at its loss, finds NaN and leaves the loop: no optimizer step has the
    number of that loss. Nor has one where the steps of an imported run were cut."""
    guarded = Call(900, 4, "read", subject=READ_LOSS, value=float("nan"), note="-1")
    report = diagnosed(tmp_path / "r.db", *BAD[:4], guarded)
    assert "the loss is not finite there for the first time (step 4)" in report.undecided


def test_evidence_that_was_cut_is_reported(tmp_path: Path) -> None:
    """Every kind of observation left out in turn, and every second one, from runs of all kinds."""
    makers = (script_stores.overflow, no_fault, long_search, script_stores.undetermined,
              script_stores.innocent, script_stores.raised)  # fmt: skip
    for make in makers:
        store, out = tmp_path / f"{make.__name__}.db", tmp_path / "good.json"
        make(store)
        with Reader(store) as reader:
            to_export(reader, reader.runs(), out)
        good = json.loads(out.read_text())
        seen_kinds = {o["record"] for body in good["runs"] for o in body["observation"]}
        for kind in (*sorted(seen_kinds), ""):
            for body in (cut := copy.deepcopy(good))["runs"]:
                kept = [o for o in body["observation"] if o["record"] != kind]
                body["observation"] = kept if kind else kept[::2]
            out.write_text(json.dumps(cut))
            imported = import_file(out, tmp_path / "into.db")
            with Reader(tmp_path / "into.db") as reader:
                assert to_markdown(document(reader, [run.run_id for run in imported]))


@pytest.mark.parametrize(
    ("capability", "advice"),
    [("8.6", "use bf16."), ("7.5", "run the ops whose values leave it in fp32.")],
)
def test_bf16_is_no_advice_where_the_gpu_emulates_it(
    capability: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Machine("cuda:0", "A GPU", "cuda", capability)
    monkeypatch.setattr(script_stores, "MACHINE", there)
    healthy_run(tmp_path / "r.db", "bf16")
    said = printed(diagnosed(tmp_path / "r.db", *FLAT))
    assert f"so the range of fp16 is the likely trouble: {advice}" in said
    assert ("A GPU (compute capability 7.5) has no bf16" in said) is (capability == "7.5")


@pytest.mark.parametrize("capability", ["8.6", "7.5"])
def test_a_healthy_run_in_bf16_is_read_back_as_a_fix_where_the_gpu_has_it(
    capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Machine("cuda:0", "A GPU", "cuda", capability)
    monkeypatch.setattr(script_stores, "MACHINE", there)
    head = script_stores.overflow(tmp_path / "r.db", fixed=False)
    healthy_run(tmp_path / "r.db", "bf16")
    with Reader(tmp_path / "r.db") as reader:
        report = load_diagnosis(reader, head, again=True)
    cured = [t.control for t in report.trials if t.cured]
    assert cured == (["bf16"] if capability == "8.6" else [])


def test_that_fp32_fails_too_is_the_advice(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    broken = Scan("end", "buffer", "s", "fp32", 4, 4, 0, None)
    run(path, "fp32", seen(FLAT, broken))
    report = diagnosed(path, *FLAT, broken, fp32=False)
    assert "The fp32 control fails too" in printed(report)


def test_undetermined_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampscope.cli.diagnose import Output

    show: Callable[[DiagnosisResult], None] = Output(None).show
    show(diagnosed(tmp_path / "r.db", *BAD, UNKNOWN))
    said = capsys.readouterr()
    assert (said.out + said.err).count("Undetermined") == 1


def test_a_finding_needs_no_lead(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    with Reader(path) as reader:
        report = load_diagnosis(reader, head)
    assert report.lead is None
    assert json.loads(to_json(report))["lead"] is None


def test_a_control_without_memory_is_no_failing_control(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    error = {"ended": "exception", "error_type": "RuntimeError"}
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"
    run(path, "fp32", seen(FLAT[:6], error_text=text, **error))
    report = diagnosed(path, *BAD, UNKNOWN, fp32=False)
    said = printed(report)
    assert "fp32: it ran out of memory" in said
    assert "the script raised" not in said
    assert "fails too" not in said


def test_other_random_numbers_in_bf16_are_no_lack_of_a_seed(tmp_path: Path) -> None:
    """torch draws other numbers in bf16 than in fp32: what is drawn behind them differs."""

    def starts(dtype: str, std: float) -> list[Scan]:
        first = Scan("start", "parameter", "a.weight", dtype, 64, 0, 0, 0.5, std=0.1)
        return [first, replace(first, name="b.weight", dtype="fp32", std=std)]

    for name, dtype, told in (
        ("a", "bf16", "drawn in another dtype"),
        ("b", "fp32", "not begin alike"),
    ):
        path = tmp_path / f"{name}.db"
        run(path, "fp32", seen(FLAT, *starts("fp32", 0.3)))
        report = diagnosed(path, *FLAT, *starts(dtype, 0.2), fp32=False)
        assert told in " ".join(report.notes)


def test_fp16_without_a_scaler_is_noted_and_no_fault(tmp_path: Path) -> None:
    made = [one_step(i, x, scaler="", scale=1.0) for i, x in enumerate(FALLING)]
    facts = {"flop_dtypes": ("fp16",), "flop_counts": (9,), "traced_ops": 9}
    calls = [o for o in seen(made, **facts) if getattr(o, "name", "") not in ("scale",)]
    path = tmp_path / "r.db"
    head = run(path, "as_is", calls)
    healthy_run(path, "fp32")
    report = judged(path, head)
    assert report.diagnosis.verdict == "no_fault"
    assert "trains in fp16 without a GradScaler" in " ".join(report.notes)


@pytest.mark.parametrize(
    ("kind", "op", "is_said"),
    [
        ("loaded", "torch.from_numpy", True), ("loaded", "torch.as_tensor", True),
        ("loaded", "torch.load", False), ("cast", "Tensor.half", False),
        ("made", "torch.tensor", False),
    ],
)  # fmt: skip
def test_what_an_array_had_lost_before_torch_was_not_judged(
    kind: str, op: str, is_said: bool, tmp_path: Path
) -> None:
    path = tmp_path / "r.db"
    site = HalfSite(kind, "train.py:10", op, "fp16", "data", prepares=True, calls=1)
    report = diagnosed(path, *(one_step(i, x) for i, x in enumerate(FALLING)), site)
    assert report.diagnosis.verdict == "no_fault"
    assert any("train.py:10" in n and "not judged" in n for n in report.notes) is is_said


def test_a_frozen_part_in_fp16_does_not_train_in_it(tmp_path: Path) -> None:
    made = [one_step(i, x, scaler="", scale=1.0) for i, x in enumerate(FALLING)]
    facts = {"flop_dtypes": ("fp32", "fp16"), "flop_counts": (9, 9), "traced_ops": 9}
    calls = [o for o in seen(made, **facts) if getattr(o, "name", "") not in ("scale",)]
    reference = LineUse("dpo.py:9", "addmm", ("fp16",), "fp16", calls=2)
    policy = LineUse("dpo.py:8", "mm", ("fp32",), "fp32", backward=True, calls=2)
    for name, backward, is_said in (("frozen", False, False), ("trained", True, True)):
        path = tmp_path / f"{name}.db"
        own = (policy, replace(reference, backward=backward))
        head = run(path, "as_is", [*calls[:-1], *own, calls[-1]])
        healthy_run(path, "fp32")
        said = " ".join(judged(path, head).notes)
        assert ("trains in fp16 without a GradScaler" in said) is is_said


@pytest.mark.parametrize("count", [0, 1, 6])
def test_parameters_that_no_optimizer_steps_are_named_and_no_fault(
    count: int, tmp_path: Path
) -> None:
    names = [f"head.{n}.weight" for n in range(count)]
    facts = [OpUse(UNSTEPPED, "", name, "", 1) for name in names]
    made = seen([one_step(i, x) for i, x in enumerate(FALLING)])
    path = tmp_path / "r.db"
    head = run(path, "as_is", [*made[:-1], *facts, made[-1]])
    healthy_run(path, "fp32")
    report = judged(path, head)
    notes = [note for note in report.notes if "no optimizer" in note]
    assert report.diagnosis.verdict == "no_fault"
    assert len(notes) == min(count, 1)
    for place, name in enumerate(names):
        assert (name in notes[0]) is (place < 4)
    assert count < 5 or "and 2 more" in notes[0]


def judged(store: Path, head: str) -> DiagnosisResult:
    with Reader(store) as reader:
        return load_diagnosis(reader, head)


def test_a_long_search_for_the_scale_is_noted_and_no_fault(tmp_path: Path) -> None:
    report = judged(tmp_path / "r.db", long_search(tmp_path / "r.db"))
    assert (report.diagnosis.verdict, report.diagnosis.symptoms) == ("no_fault", ())
    said = (
        "The scaler skipped the first 16 of 24 optimizer steps while it searched for a loss scale, "
        "from 2^36 down to 2^20. That is no fault, but nothing was learned in these steps. Start "
        "the scaler with a lower scale: init_scale=65536."
    )
    assert said in report.notes
    assert said in printed(report)
    assert said in json.loads(to_json(report))["notes"]


def test_a_short_search_for_the_scale_is_not_noted(tmp_path: Path) -> None:
    report = judged(tmp_path / "r.db", no_fault(tmp_path / "r.db", search=3))
    assert report.diagnosis.verdict == "no_fault"
    assert "init_scale" not in " ".join(report.notes)


def test_a_search_that_leaves_too_few_steps_is_named_as_what_to_change(tmp_path: Path) -> None:
    """16 skips of 24 steps, and the eight others learn slowly: more steps have to be compared."""
    lost = {"skipped": True, "grad_nonfinite": 10, "moved_share": 0.0}
    losses = [1.5 - 0.05 * i for i in range(24)]
    made = [one_step(i, losses[0], scale=2.0 ** (36 - i), **lost) for i in range(16)]
    made += [one_step(16 + i, losses[i], scale=2.0**12) for i in range(8)]
    path = tmp_path / "r.db"
    run(path, "fp32", seen([one_step(i, x) for i, x in enumerate(losses)]))
    report = diagnosed(path, *made, fp32=False)
    assert (report.diagnosis.verdict, report.diagnosis.symptoms) == (
        "inconclusive",
        ("the loss falls less than in fp32",),
    )
    assert "Start the scaler with a lower scale: init_scale=4096." in " ".join(report.notes)
    assert "Lower the scaler's initial scale" in printed(report)


@pytest.mark.parametrize("outcome", [{}, {"ended": "steps"}])
def test_a_colon_has_its_command_behind_it(outcome: dict[str, str], tmp_path: Path) -> None:
    """Advice to diagnose a script again names the command, or ends without a colon."""
    path = tmp_path / "r.db"
    report = diagnosed(path, *BAD, UNKNOWN, **outcome)
    (head,) = [r for r in report.runs.values() if r.spec.control == "as_is"]
    said = printed(report).replace("│", " ").splitlines()
    advice = next(n for n, text in enumerate(said) if "What to do:" in text)
    assert said[advice].rstrip().endswith(":") is bool(outcome)
    if outcome:
        words = said[advice + 1].split()
        assert words[:3] == ["ampscope", "diagnose", "--steps"]
        assert int(words[3]) > report.judged_steps
        assert words[-1] == head.spec.workload
    imported = replace(head, spec=replace(head.spec, imported=True))
    text = printed(replace(report, runs={**report.runs, "as_is": imported}))
    assert "ampscope diagnose" not in text
    assert "again over more steps:" not in text


def test_bf16_is_no_advice_for_a_script_in_bf16(tmp_path: Path) -> None:
    healthy_run(tmp_path / "r.db", "bf16")
    facts: dict[str, object] = {"uses_autocast": "bf16", "flop_dtypes": ("bf16",)}
    report = diagnosed(tmp_path / "r.db", *FLAT, **facts, flop_counts=(100,))
    assert report.diagnosis.verdict == "inconclusive"
    assert "use bf16" not in printed(report)
