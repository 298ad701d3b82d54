"""The patch is code that a person pastes: it is pasted here, and it must cure."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.analysis.precision_use import PrecisionUse
from ampscope.analysis.symptoms import Symptom
from ampscope.diagnosis.findings import Diagnosis, Finding, diagnose
from ampscope.diagnosis.result import DiagnosisResult, Trial
from ampscope.observations import LineUse, SourceText
from ampscope.records import RunInfo, RunSpec, State, StepTotals
from ampscope.rules.verdict import Fix, Status, Verdict, island, island_patch
from ampscope.runner import script_ending
from ampscope.source_lines import SourceLines
from ampscope.story import fix_words
from ampscope.story.fix_words import ControlRun
from ampscope.story.verdict_words import in_fp32, no_fault, when_undetermined
from tests.helpers.evidence_making import bad_op, evidence, run
from tests.helpers.evidence_of_runs import loss_too_large


class Block(nn.Module):
    """65,536 in fp16 is infinite; the second argument is a keyword, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 4, bias=False)
        nn.init.constant_(self.wide.weight, 32.0)

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        out: Tensor = self.wide(x) * gate
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ones((), dtype=torch.float16)
        out: Tensor = self.first(x, gate=gate) + self.second(x, gate=gate)
        return out


def loss_of(model: Model) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(torch.full((2, 64), 32.0)).float().sum()


@pytest.mark.parametrize("paths", [("first.wide", "second.wide"), ("first", "second")])
def test_the_pasted_patch_cures(paths: tuple[str, ...]) -> None:
    model = Model()
    assert torch.isinf(loss_of(model))
    exec(island_patch(*paths), {"model": model})
    assert loss_of(model).item() == 2 * 2 * 4 * 64 * 32.0 * 32.0
    loss_of(model).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_a_patch_for_one_of_two_leaves_the_other_alone() -> None:
    model = Model()
    exec(island_patch("first"), {"model": model})
    assert torch.isinf(loss_of(model))


def test_without_a_module_it_is_a_form_for_an_expression() -> None:
    assert "enabled=False" in island_patch("")
    assert "get_submodule" not in island_patch("")


def test_a_patch_is_of_the_control_that_cured() -> None:
    rule = island(bad_op("aten.mm", module="first", line="train.py:6"), "fp32_module", "Keep it.")
    verdict = Verdict(
        Status.FOUND, "why", module="first", line="train.py:6", code="a @ b", fix=rule
    )
    finding = Finding("activation_overflow", verdict, ())
    modules = Trial("fp32_modules:first,second", "fp32_module", True, None)
    lines = Trial("fp32_lines:train.py:6", "rewrite_op", True, None)
    assert "['first', 'second']" in fix_words.patch(finding, modules)
    assert "# train.py:6: write each call" in fix_words.patch(finding, lines)
    assert "get_submodule" not in fix_words.patch(finding, lines)
    assert "['first']" in fix_words.patch(finding, None)


def _run(control: str, message: str = "") -> RunInfo:
    spec = RunSpec("train.py", kind="script", control=control)
    ended = (State.FINISHED, 1.0, 1.0, 2.0, None, None, None, message, "", 0, None)
    return RunInfo(control, spec, *ended)


ASSERTED = "The script raised AssertionError at train.py:9 before its first step: assert y.dtype"
IN_BF16 = PrecisionUse((("bf16", 10),), 3, steps=30, compared=0, is_recorded=True)


def _report(found: tuple[Finding, ...], trials: tuple[Trial, ...] = ()) -> DiagnosisResult:
    word = "fault" if found else "no_fault"
    failed = [t.control for t in trials]
    return DiagnosisResult(
        "train.py",
        Diagnosis(word, found, (), (), "native"),
        {name: _run(name, ASSERTED) for name in ("fp32", *failed)} | {"as_is": _run("as_is")},
        trials,
        1.0,
        control_symptoms={"fp32": (str(Symptom.EXCEPTION),), "bf16": ()},
        judged_steps=30,
        precision=IN_BF16,
    )


def test_a_control_that_raised_says_what_and_where() -> None:
    said = no_fault(_report(()))
    assert "train.py:9" in said
    assert "assert y.dtype" in said
    assert "too few" not in said
    lines = fix_words.run_lines(_report(()))
    assert lines[0] == "Run unchanged: healthy."
    assert "AssertionError at train.py:9" in lines[1]
    assert in_fp32(_report(())) == "raised"
    assert "no half precision" not in when_undetermined(_report(()))


def test_the_list_of_runs_contradicts_no_verdict_and_no_script_in_bf16() -> None:
    finding = Finding("clip_before_unscale", Verdict(Status.FOUND, "why"), ())
    unchanged, _, bf16 = fix_words.run_lines(_report((finding,)))
    assert "healthy" not in unchanged
    assert bf16 != "Run in bf16: healthy."
    report = _report((finding,))
    names = {word: name for name, word in fix_words.compared(report)}
    for word, said in (("as_is", unchanged), ("bf16", bf16)):
        run = ControlRun(names[word], _run(word), [], StepTotals(0, 0, 0, 0))
        name, seen, *_ = fix_words.control_row(report, run)
        assert said.startswith(f"Run {name}: ")
        assert said == f"Run {name}: {'healthy' if seen == 'nothing' else seen}."


def test_the_patch_for_bf16_is_of_the_cast_where_the_line_casts_by_hand() -> None:
    code = "y = linear(x.half(), w.to(torch.float16))"
    verdict = Verdict(Status.FOUND, "why", line="train.py:6", code=code, fix=Fix("add_scaler", ""))
    cured = Trial("bf16", "use_bf16", True, None)
    patch = fix_words.patch(Finding("loss_magnitude_overflow", verdict, ()), cured)
    assert "y = linear(x.bfloat16(), w.to(torch.bfloat16))" in patch
    assert "autocast" not in patch


def test_where_casts_are_the_scripts_own_the_line_without_them_is_run_and_printed() -> None:
    code = "y = net(x.half()).float()"
    seen = (
        SourceText("train.py", (code,)),
        LineUse("train.py:1", "_to_copy", ("fp32",), "fp16", calls=2),
    )
    usual = loss_too_large()
    for autocast, told in (("", "net(x).float()  # in place of train.py:1"), ("fp16", "autocast(")):
        made, ops = usual.baseline.steps, usual.baseline.bad_ops
        own = run(made, *ops, *seen, uses_autocast=autocast)
        (finding,) = diagnose(evidence(own, usual.fp32)).findings
        assert finding.cause == "loss_magnitude_overflow"
        (control,) = finding.verdict.fix.controls
        assert control == ("bf16" if autocast else "fp32_lines:train.py:1")
        cured = Trial(control, "use_bf16" if autocast else "drop_cast", True, None)
        assert told in fix_words.patch(finding, cured)
        assert ("bf16" in finding.verdict.fix.text) is bool(autocast)


def test_a_line_in_fp32_is_printed_without_its_own_casts() -> None:
    code = "y = linear(x.half(), w.to(torch.float16))"
    verdict = Verdict(Status.FOUND, "why", line="train.py:6", code=code, fix=Fix("fp32_module", ""))
    lines = Trial("fp32_lines:train.py:6", "rewrite_op", True, None)
    patch = fix_words.patch(Finding("activation_overflow", verdict, ()), lines)
    assert "    y = linear(as_fp32(x), as_fp32(w))" in patch


def test_one_error_of_several_fixes_is_said_once() -> None:
    trials = tuple(Trial(f"lr:0.{n}", "lower_lr", False, None) for n in range(1, 6))
    said = fix_words.each_run(_report((), trials))
    assert said.count("AssertionError") == 1
    assert all(t.control in said for t in trials)


def test_an_assertion_without_words_is_kept_with_its_line() -> None:
    def fails() -> None:
        assert len([]) > 1

    with pytest.raises(AssertionError) as caught:
        fails()
    caught.value.args = ()  # as Python raises it without pytest
    kept = script_ending.raised(caught.value, SourceLines(str(Path(__file__).parent)))
    assert kept.facts["error_text"] == "assert len([]) > 1"


# Each overflows fp16 where it is computed in it: 300 * 300 = 90,000, and 64 of them.
HALF_LINES = {
    "scores = q @ k.transpose(-2, -1) / tau": 64 * 90_000 / 8,
    "scores = torch.einsum('ij,kj->ik', batch['q'], k) / self.tau": 64 * 90_000 / 8,
    "scores = (q * k[:, :]).sum(dim=dim)": 64 * 90_000,
    "scores = wide.pow(2).sum(dim)": 64 * 90_000,  # a script's own name is none of the patch's
    "scores = (q * k).sum(dim, dtype=q.dtype)": 64 * 90_000,  # a dtype is what overflows here
    "scores = (q * k).sum(dim, dtype=torch.float16)": 64 * 90_000,
    "scores = q.float().mul(k).to(q.dtype).sum(dim)": 64 * 90_000,
    "scores = torch.cat([q, wide], dim).pow(2).sum(dim)": 128 * 90_000,
    "scores = torch.stack(batch['pair']).pow(2).sum((0, 2))": 128 * 90_000,
    "return F.normalize(q.square() + q, dim=dim).sum(dim) * tau": 64.0,  # 64 equal ones: 8
}


@pytest.mark.parametrize("code", HALF_LINES)
def test_a_line_in_fp32_is_code_that_cures_where_it_is_pasted(code: str) -> None:
    verdict = Verdict(Status.FOUND, "why", line="train.py:6", code=code)
    lines = Trial("fp32_lines:train.py:6", "rewrite_op", True, None)
    patch = fix_words.patch(Finding("elementwise_overflow", verdict, ()), lines)
    helpers, found, statement = patch.partition("# in place of train.py:6\n")
    assert found
    half = torch.full((2, 64), 300.0, dtype=torch.float16)
    names: dict[str, Any] = {
        "q": half,
        "k": half,
        "wide": half,
        "batch": {"q": half, "pair": (half, half)},
    }
    names |= {"tau": 8, "dim": -1, "F": nn.functional}
    for written, is_fixed in ((code, False), (statement, True)):
        body = "".join(f"        {line}\n" for line in written.splitlines())
        named = f"def f(self):\n    with torch.autocast('cpu', torch.float16):\n{body}"
        scope = names | {"torch": torch}
        exec(helpers + named + ("        return scores\n" if "scores" in code else ""), scope)
        got = scope["f"](Namespace(tau=8))
        assert bool(torch.isfinite(got).all()) is is_fixed or "normalize" in code
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, torch.full_like(got, HALF_LINES[code]))


@pytest.mark.parametrize("code", ["x = f(", "total += a * b", "y = x.mul_(3)", "for a in b:", ""])
def test_a_line_that_is_no_whole_statement_gets_the_call_to_write(code: str) -> None:
    verdict = Verdict(Status.FOUND, "why", line="train.py:6", code=code)
    lines = Trial("fp32_lines:train.py:6", "rewrite_op", True, None)
    scope: dict[str, Any] = {}
    exec(fix_words.patch(Finding("elementwise_overflow", verdict, ()), lines), scope)
    half = torch.full((2,), 300.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        got = scope["in_fp32"](torch.mul, half, other=half)
    assert got.tolist() == [90_000.0, 90_000.0]


def test_what_is_said_fits_the_patch() -> None:
    """The rule's patch makes fp32 weights; the run that worked kept fp32 masters."""
    fix = Fix(
        "fp32_params", "Keep the weights in fp32.", "model = model.float()\n", ("fp32_state",)
    )
    finding = Finding("small_update_lost", Verdict(Status.FOUND, fix=fix))
    cured = Trial("fp32_state", "fp32_optimizer_state", True, 1.0)
    said = fix_words.sentence(finding, cured)
    assert said == "Keep the weights in fp32. It was run with fp32 master weights."
    assert fix_words.patch(finding, cured) == fix.patch
