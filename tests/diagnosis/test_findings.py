"""How the rules' answers become one diagnosis: contained, nested, ranked, and honest."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.symptoms import Symptom
from ampscope.diagnosis import findings as module
from ampscope.diagnosis.findings import Diagnosis, diagnose
from ampscope.rules.catalog import NAMES, all_rules
from ampscope.rules.verdict import Rule, Status, Verdict, passed
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    NAN,
    OVERFLOWED,
    STEPS,
    answers,
    causes,
    evidence,
    fp32_run,
    run,
    steps,
)
from tests.helpers.evidence_of_ops import ACTIVATION, fails_forward
from tests.helpers.evidence_of_runs import diverging

FOUND = Verdict(Status.FOUND, "seen")


def made_up(
    name: str,
    check: Callable[[Evidence], Verdict],
    needs: tuple[str, ...],
    order: int,
    explains: tuple[str, ...] = (),
) -> Rule:
    """A rule that no catalog has."""
    return Rule(
        code="AMP999", id=name, title=name, definition="", check=check, needs=needs, order=order,
        explains=explains,
    )  # fmt: skip


def rule(name: str, order: int, verdict: Verdict = FOUND, explains: tuple[str, ...] = ()) -> Rule:
    """A rule that always gives the same answer."""
    return made_up(name, lambda evidence: verdict, ("as_is",), order, explains)


def failing(evidence: Evidence) -> Verdict:
    raise KeyError("no such tensor")


def under(monkeypatch: pytest.MonkeyPatch, *rules: Rule, made: Evidence | None = None) -> Diagnosis:
    """The diagnosis of a healthy run, or of ``made``, under these rules alone."""
    monkeypatch.setattr(module, "all_rules", lambda: rules)
    return diagnose(made or evidence(run(steps())))


def test_a_rule_that_raises_is_errored_and_the_others_still_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = made_up("broken", failing, ("as_is",), 1)
    diagnosis = under(monkeypatch, broken, rule("sound", 2), rule("calm", 3, passed("fine")))
    said = {r.id: v for r, v in diagnosis.answers}
    assert [said[n].status for n in ("broken", "sound", "calm")] == [
        Status.ERRORED, Status.FOUND, Status.PASSED,
    ]  # fmt: skip
    assert said["broken"].reason == "KeyError: 'no such tensor'"
    assert causes(diagnosis) == ["sound"]


def test_an_errored_rule_alone_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = under(monkeypatch, made_up("broken", failing, ("as_is",), 1))
    assert (diagnosis.verdict, diagnosis.findings) == ("no_fault", ())


@pytest.mark.parametrize("name", NAMES)
def test_any_rule_may_break_without_spoiling_another_finding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [dataclasses.replace(r, check=failing) if r.id == name else r for r in all_rules()]
    made = fails_forward(ACTIVATION)
    diagnosis = under(monkeypatch, *rules, made=made)
    said = {r.id: v.status for r, v in diagnosis.answers}
    assert said[name] is Status.ERRORED
    assert list(said.values()).count(Status.ERRORED) == 1
    assert causes(diagnosis) == ([] if name == "activation_overflow" else ["activation_overflow"])


def test_the_smaller_order_ranks_first_whatever_the_order_of_the_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosis = under(monkeypatch, rule("late", 70), rule("early", 10), rule("middle", 40))
    assert causes(diagnosis) == ["early", "middle", "late"]


def test_a_consequence_is_nested_under_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = rule("cause", 10, explains=("effect",))
    diagnosis = under(monkeypatch, rule("effect", 20), cause, rule("other", 30))
    assert causes(diagnosis) == ["cause", "other"]
    assert [c.cause for c in diagnosis.findings[0].consequences] == ["effect"]
    assert diagnosis.findings[1].consequences == ()


def test_what_a_cause_would_explain_stands_alone_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = rule("cause", 10, passed("not here"), explains=("effect",))
    assert causes(under(monkeypatch, absent, rule("effect", 20))) == ["effect"]


def test_a_rule_that_needs_a_control_is_not_asked_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks = made_up("asks", failing, ("as_is", "scale:1"), 10)
    diagnosis = under(monkeypatch, asks)
    verdict = diagnosis.answers[0][1]
    assert verdict.status is Status.INCONCLUSIVE
    assert "scale:1" in verdict.reason


def test_a_healthy_run_has_no_finding() -> None:
    diagnosis = diagnose(evidence(run(steps())))
    assert (diagnosis.verdict, diagnosis.findings, diagnosis.symptoms) == ("no_fault", (), ())
    assert {v.status for _, v in diagnosis.answers} == {Status.PASSED, Status.NOT_APPLICABLE}
    assert [r.id for r, _ in diagnosis.answers] == list(NAMES)


def test_harm_without_a_cause_is_inconclusive_and_names_the_symptom() -> None:
    diagnosis = diagnose(evidence(run(steps(FLAT))))
    assert (diagnosis.verdict, diagnosis.findings) == ("inconclusive", ())
    assert diagnosis.symptoms == (Symptom.BEHIND.value,)


def test_without_the_control_each_rule_that_needs_it_says_so() -> None:
    said = answers(evidence(run(steps((NAN,) * STEPS, **OVERFLOWED)), fp32=None))
    needing = {r.id for r in all_rules() if "fp32" in r.needs}
    assert needing == {n for n, v in said.items() if v.status is Status.INCONCLUSIVE}
    assert all(said[name].reason == "The control fp32 was not run." for name in needing)


def test_divergence_keeps_its_consequences_with_it() -> None:
    # The overflow of half precision follows from the growth that fp32 shows as well.
    usual = diverging()
    assert usual.fp32 is not None
    late = dataclasses.replace(ACTIVATION, step=4)
    broken = steps((1.0, 10.0, 100.0, 1e3, *(NAN,) * 26))
    made = evidence(run([dataclasses.replace(a, skipped=a.step > 3) for a in broken], late),
                    usual.fp32)  # fmt: skip
    diagnosis = diagnose(made)
    assert causes(diagnosis)[0] == "not_amp_divergence"
    assert "activation_overflow" not in causes(diagnosis)


def test_the_policy_under_which_it_was_judged_is_kept() -> None:
    runs = {"as_is": run(steps()), "fp32": fp32_run(steps(FALLING))}
    assert diagnose(Evidence(runs, "rehearsal")).policy == "rehearsal"


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_named_after_its_file_and_explains_causes_that_rank_later(name: str) -> None:
    own: Rule = importlib.import_module(f"ampscope.rules.{name}").RULE
    order = {r.id: r.order for r in all_rules()}
    assert own.id == name
    assert own.needs[0] == "as_is"
    # A finding can be nested only under one that is ranked before it.
    assert {*own.explains, *own.explained_by} <= set(NAMES)
    assert not [c for c in own.explains if order[c] < own.order]
    assert not [c for c in own.explained_by if order[c] > own.order]


ENGINE = Path(ampscope.__file__).parent
# The same word for something else: a fact that ops record.
NO_CAUSES = {("capture/script/op_uses.py", "fully_masked_row")}


def causes_named(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(file, cause) where a module names a cause or its code, but a rule its own and those that it
    explains, or that explain it."""
    words = {r.id: r.id for r in all_rules()} | {r.code: r.id for r in all_rules()}
    room, _, own = path.removesuffix(".py").rpartition("/")
    allowed: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        relates = isinstance(node, ast.keyword) and node.arg in ("explains", "explained_by")
        if room == "rules" and own in NAMES and relates:
            allowed |= set(ast.walk(node))
        if isinstance(node, ast.Constant) and node not in allowed and node.value in words:
            cause = words[node.value]
            if (room, own) not in (("rules", cause), ("rules", "catalog")):
                yield path, cause


def test_no_module_but_its_rule_names_a_cause() -> None:
    files = {file.relative_to(ENGINE): file.read_text() for file in ENGINE.rglob("*.py")}
    engine = {p: t for p, t in files.items() if p.parts[0] != "ext" and "scripts" not in p.parts}
    named = {pair for path, text in engine.items() for pair in causes_named(path.as_posix(), text)}
    assert named == NO_CAUSES


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("diagnosis/cure.py", 'MEASURED = {"gradient_underflow", "small_update_lost"}'),
        ("diagnosis/result.py", 'if finding.cause == "gradient_underflow": pass'),
        ("report/words.py", '{"AMP012": ""}'),
        ("rules/small_update_lost.py", 'NEAR = ("gradient_underflow",)'),
    ],
)
def test_a_cause_that_is_named_elsewhere_is_seen(path: str, text: str) -> None:
    assert (path, "gradient_underflow") in set(causes_named(path, text))


def test_a_rule_names_itself_and_its_consequences() -> None:
    text = 'RULE = Rule(code="AMP012", id="gradient_underflow", explains=("small_update_lost",))'
    assert not set(causes_named("rules/gradient_underflow.py", text))
