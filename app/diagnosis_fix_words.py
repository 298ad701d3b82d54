"""The fix in words and as a patch: what a run has shown to work, else what the rule advises."""

from __future__ import annotations

from ampscope.causes import FIX_KINDS
from ampscope.diagnose import Finding
from ampscope.experiments.cure import Trial
from ampscope.experiments.diagnosis import Report
from ampscope.rules.wording import island_patch
from app.diagnosis_terms import control

MODULES_IN_FP32 = """def in_fp32(forward):
    def wrapped(*args, **kwargs):
        with torch.autocast(device_type, enabled=False):
            args = [a.float() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
            return forward(*args, **kwargs)

    return wrapped


for name in {names}:
    module = model.get_submodule(name)
    module.forward = in_fp32(module.forward)
"""


def best(report: Report) -> Trial | None:
    """Of the fixes that worked, the one that the rule prefers; of sets of modules the smallest."""
    if not report.diagnosis.findings:
        return None
    wanted = report.diagnosis.findings[0].verdict.fix.controls

    def place(trial: Trial) -> tuple[int, int]:
        known = trial.control in wanted
        return wanted.index(trial.control) if known else len(wanted), trial.control.count(",")

    return min((t for t in report.trials if t.cured), key=place, default=None)


def sentence(finding: Finding, cured: Trial | None) -> str:
    """What to change, in one sentence; of two that say the same, the rule's own."""
    fix = finding.verdict.fix
    word, _, names = cured.control.partition(":") if cured is not None else ("", "", "")
    if word == "fp32_lines":
        return f"Compute {names.replace(',', ', ')} in fp32."
    if word == "fp32_modules" and names != finding.verdict.module:
        return f"Keep {names.replace(',', ', ')} in fp32."
    if cured is None or cured.kind == fix.kind:
        return fix.text or FIX_KINDS[fix.kind]
    if word == "fp32_modules":
        return f"Keep {names} in fp32."
    return FIX_KINDS[cured.kind]


def seen(report: Report) -> str:
    """What the runs with a fix showed."""
    cured = best(report)
    if cured is not None:
        price = f", at {cured.price:.2f} times the time a step" if cured.price else ""
        run = f"the script was run {control(cured.control)}"
        return f"Verified: {run}, and the symptom was gone{price}."
    tried = "; ".join(control(t.control) for t in report.trials)
    return f"No fix was seen to work. Tried: {tried}."


def patch(finding: Finding, cured: Trial | None) -> str:
    """Code to paste: for the modules that were seen to matter, else as the rule wrote it."""
    fix = finding.verdict.fix
    word, _, names = cured.control.partition(":") if cured is not None else ("", "", "")
    if word == "lr":
        return f'for group in optimizer.param_groups:\n    group["lr"] *= {names}\n'
    if word == "fp32_modules" and names != finding.verdict.module:
        return MODULES_IN_FP32.format(names=names.split(","))
    if word == "fp32_modules" and fix.kind != "fp32_module":
        return island_patch(names)
    if word == "bf16" and fix.kind != "use_bf16":
        return "with torch.autocast(device_type, dtype=torch.bfloat16):\n    ...  # no GradScaler\n"
    return fix.patch


def candidates(report: Report) -> list[str]:
    """Controls to run again: the one that worked first, then what the rule names."""
    cured = best(report)
    words = [cured.control] if cured is not None else []
    return list(dict.fromkeys([*words, *report.diagnosis.findings[0].verdict.fix.controls]))
