"""Run the rules over the evidence, contain their failures, nest consequences, rank.

>>> diagnose(evidence).verdict
'fault'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.hand_casts import hand_casts
from ampscope.analysis.lifting import lifted, smallest_lift
from ampscope.analysis.root_op import root_op
from ampscope.analysis.symptoms import Symptom
from ampscope.control import Control
from ampscope.rules.catalog import all_rules, by_cause
from ampscope.rules.framework_patches import in_words_of
from ampscope.rules.verdict import (
    Fix,
    Rule,
    Status,
    Verdict,
    not_applicable,
    passed,
    place,
    replaced_words,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A root cause with the causes that are its consequences."""

    cause: str
    verdict: Verdict
    consequences: tuple[Finding, ...] = ()

    @property
    def rule(self) -> Rule:
        """What is known of the cause."""
        return by_cause()[self.cause]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known about one script. ``verdict`` is fault, no_fault or inconclusive."""

    verdict: str
    findings: tuple[Finding, ...]
    answers: tuple[tuple[Rule, Verdict], ...]
    symptoms: tuple[str, ...]
    policy: str
    notes: tuple[str, ...] = ()  # of what the verdict leaves out, in whole sentences
    undecided: str = ""  # why nothing is decided, where a finding was set aside for it
    latent: tuple[Finding, ...] = ()  # numbers that are being lost, without harm so far


def diagnose(evidence: Evidence) -> Diagnosis:
    """All rules' answers, and the findings ranked with the root cause first."""
    answers = tuple((rule, _contained(rule, evidence)) for rule in all_rules())
    if evidence.symptoms and not any(v.status is Status.FOUND for _, v in answers):
        answers = tuple((rule, _at_last(rule, verdict, evidence)) for rule, verdict in answers)
    found = [(rule, verdict) for rule, verdict in answers if verdict.status is Status.FOUND]
    found = _by_site(sorted(found, key=lambda pair: pair[0].order), evidence)
    answers = tuple(_told(answer, found) for answer in answers)
    findings = _with_replaced(_nested(found), evidence)
    findings = tuple(_without_casts(finding, evidence) for finding in findings)
    symptoms = tuple(sorted(evidence.symptoms))
    no_bill = "" if findings or symptoms else _without_a_control(evidence)
    word = "fault" if findings else "inconclusive" if symptoms or no_bill else "no_fault"
    latent = tuple(Finding(r.id, v) for r, v in answers if v.status is Status.LATENT)
    return Diagnosis(
        word, findings, answers, symptoms, evidence.policy, undecided=no_bill, latent=latent
    )


_DEAD = (Symptom.WEIGHTS, Symptom.LOSS, Symptom.DIVERGED)


def _without_a_control(evidence: Evidence) -> str:
    """Why a run without a symptom gets no clean bill: its fp32 control does not train, so that
    there is nothing to compare with. "" beside a control that does, and without one."""
    dead = [symptom for symptom in _DEAD if symptom in evidence.fp32_symptoms]
    if not dead or evidence.fp32 is None:
        return ""
    step, root = evidence.fp32.first_bad_step, root_op(evidence.fp32)
    since = f" from step {step:,} on" if step is not None else ""
    text = f"Undetermined: the fp32 control does not train{since} ({dead[0]}), so there is nothing "
    text += "healthy to compare the script with. Half precision is not the cause of that."
    if root is not None:
        op = root.op
        text += f" There {op.op} gives the first value that is not finite ({place(op)})."
    return text


_Answer = tuple[Rule, Verdict]


def _by_site(found: list[_Answer], evidence: Evidence) -> list[_Answer]:
    """Where lifting sites has shown which of them does the harm, causes whose evidence fits that
    site come first, and name it. Where none does, the site is the cause, and the others stand
    behind it."""
    control = smallest_lift(evidence)
    if control is None:
        return found
    site = [pair for pair in found if pair[0].is_of_site]
    named = [pair for pair in found if not pair[0].is_of_site]
    fitting = [pair for pair in named if _fits(pair[1], control)]
    if not fitting and Control(control).first.name == "fp32_modules":
        fitting = [pair for pair in named if pair[0].searches_modules]  # whose search found these
    return [*(fitting or site), *(pair for pair in named if pair not in fitting)]


def _fits(verdict: Verdict, control: str) -> bool:
    names = {*lifted(control)}
    if {verdict.line, verdict.module} & names:
        return True
    return any({*lifted(own)} & names for own in verdict.fix.controls)


def _told(answer: _Answer, first: Sequence[_Answer]) -> _Answer:
    """A lifted site that a cause names is that cause's, and no answer of its own."""
    rule, verdict = answer
    if not rule.is_of_site or verdict.status is not Status.FOUND or answer in first:
        return answer
    return rule, passed(f"What harms at that site is named: {first[0][0].title}.")


def _with_replaced(findings: tuple[Finding, ...], evidence: Evidence) -> tuple[Finding, ...]:
    """The first finding, where it is of gradients, says that the script replaced them."""
    said = replaced_words(evidence.baseline)
    if not said or not findings or findings[0].verdict.phase != "backward":
        return findings
    verdict = findings[0].verdict
    verdict = dataclasses.replace(verdict, reason=f"{verdict.reason} {said}")
    return (dataclasses.replace(findings[0], verdict=verdict), *findings[1:])


def casts_left_out(evidence: Evidence) -> Fix | None:
    """In place of a run in bf16: the script without its own casts to half precision. No autocast
    owns them, so there is nothing to switch to bf16. None where there are no such casts."""
    casts = hand_casts(evidence.baseline)
    if not casts:
        return None
    at = ", ".join(cast.line for cast in casts)
    dtypes = " and ".join(dict.fromkeys(cast.dtype for cast in casts))
    return Fix(
        "drop_cast",
        f"Leave out the cast to {dtypes} at {at}: the script makes it, not autocast.",
        "".join(f"{cast.without}  # in place of {cast.line}\n" for cast in casts),
        (Control.of(fp32_lines=tuple(cast.line for cast in casts)),),
    )


def _without_casts(finding: Finding, evidence: Evidence) -> Finding:
    """The finding, with :func:`casts_left_out` where its rule proposes bf16."""
    fix = finding.verdict.fix
    instead = casts_left_out(evidence) if "bf16" in fix.controls else None
    if instead is None:
        return finding
    if fix.controls == ("bf16",):
        text = f"{instead.text[:1].lower()}{instead.text[1:]}"
        text = instead.text if fix.kind == "use_bf16" else f"{fix.text} Or {text}"
        fix = dataclasses.replace(instead, text=text)
    else:
        (lifted,) = instead.controls
        controls = tuple(lifted if control == "bf16" else control for control in fix.controls)
        fix = dataclasses.replace(fix, controls=controls)
    return dataclasses.replace(finding, verdict=dataclasses.replace(finding.verdict, fix=fix))


def _at_last(rule: Rule, verdict: Verdict, evidence: Evidence) -> Verdict:
    """The answer where symptoms are left that no rule explains."""
    if rule.last_resort is None or verdict.status is Status.NOT_APPLICABLE:
        return verdict
    return _contained(dataclasses.replace(rule, check=rule.last_resort), evidence)


def _contained(rule: Rule, evidence: Evidence) -> Verdict:
    """A rule that fails is an answer of its own, never the end of the diagnosis."""
    if rule.needs_ops and evidence.framework != "torch":
        return not_applicable(
            "It is judged from single ops and calls, which are recorded of PyTorch alone."
        )
    missing = [need for need in rule.needs if need not in evidence.runs]
    if missing:
        return Verdict(Status.INCONCLUSIVE, f"The control {missing[0]} was not run.")
    try:
        verdict = rule.check(evidence)
        if evidence.emulates_bf16 or evidence.already_in_bf16:
            verdict = _drop_bf16(verdict)
        return in_words_of(evidence.framework, verdict)
    except Exception as error:
        return Verdict(Status.ERRORED, f"{type(error).__name__}: {error}")


def _drop_bf16(verdict: Verdict) -> Verdict:
    kept = tuple(control for control in verdict.fix.controls if control != "bf16")
    return dataclasses.replace(verdict, fix=dataclasses.replace(verdict.fix, controls=kept))


def _nested(found: list[tuple[Rule, Verdict]]) -> tuple[Finding, ...]:
    """Findings that an earlier one explains become its consequences."""
    roots: list[tuple[Rule, Verdict, list[Finding]]] = []
    for rule, verdict in found:
        owner = next((root for root in roots if _explains(root[0], rule)), None)
        if owner is None:
            roots.append((rule, verdict, []))
        else:
            owner[2].append(Finding(rule.id, verdict))
    return tuple(Finding(rule.id, verdict, tuple(nested)) for rule, verdict, nested in roots)


def _explains(root: Rule, rule: Rule) -> bool:
    return rule.id in root.explains or root.id in rule.explained_by
