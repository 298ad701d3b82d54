"""A table or position index was built in half precision.

What it detects
    A range in half with repeated values; sines of half arguments whose rounding alone exceeds a
    quarter radian; a half buffer that differs from the fp32 control's by more than a twentieth
    of its spread; a constant from half-precision ops whose rounding changes more than a quarter of
    what the model makes of it.

Why it matters
    fp16 counts to 2,048 and bf16 to 256: later positions coincide, and no training repairs
    that.

Blind spots
    Tables that are rebuilt inside compiled code are not seen, nor are buffers of models that run
    first after the first optimizer step: those may be copies of what was trained.

Remedy
    Build and keep tables in fp32; cast the result of the lookup, not its arguments.
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.half_tensors import INACCURATE_SPREAD, inaccurate_table, owner_of_only_table
from ampscope.control import BASELINE
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    island_patch,
    passed,
)

RANGE = "half_range"
MERGED = "Numbers that a cast makes half fall onto one another"
CASTS = ("_to_copy", "copy_")  # ops of a use that makes half of any numbers, and of no table alone
LEARNED = "half_learned_phase"  # of a sine as an activation: there is no table
# What the recorder noted of an op's use: the sentence, and the name of the value.
USES = {
    RANGE: ("A range in half precision has repeated values", "distinct values"),
    "half_phase": (
        "The argument of a sine or cosine is too large for half precision",
        "error in radians",
    ),
    LEARNED: (
        "The model computes the argument of a sine or cosine, and it is too large for half"
        " precision",
        "error in radians",
    ),
    "half_constant": (
        "A constant that was computed or stored in half precision has lost what the model takes "
        "from it",
        "relative error of what is made of it",
    ),
}


def check(evidence: Evidence) -> Verdict:
    """Found at any step: such constants have no dynamics."""
    run = evidence.baseline
    for name, (words, value) in USES.items():
        use = run.use(name)
        if use is not None:
            seen = Measurement(value, use.value or 0.0, use.other, BASELINE, use.step)
            module = use.module or owner_of_only_table(run)
            if name == RANGE and use.op in CASTS:
                return _cast(_found(MERGED, seen, module, f"aten.{use.op}", use.line))
            found = _found(words, seen, module, f"aten.{use.op}", use.line)
            return _in_fp32(found, module) if name == LEARNED else found
    table = None if evidence.fp32 is None else inaccurate_table(run, evidence.fp32)
    if table is None:
        return passed("No table was built in half precision.")
    name, dtype = table.scan.name, table.scan.dtype
    return _found(
        f"Buffer {name} was built in {dtype} and differs from its fp32 values",
        Measurement("largest difference over spread", table.error, INACCURATE_SPREAD, BASELINE, 0),
        name.rpartition(".")[0],
    )


def _found(words: str, value: Measurement, module: str, op: str = "", line: str = "") -> Verdict:
    where = f" (line {line})" if line else ""
    places = (("fp32_lines", line), ("fp32_modules", module))
    return Verdict(
        Status.FOUND,
        f"{words}{where}.",
        module=module or None,
        op=op or None,
        phase="forward",
        step=value.step,
        line=line,
        evidence=(value,),
        fix=Fix(
            "rewrite_op",
            "Build the table in fp32 and keep it there.",
            "positions = torch.arange(length, dtype=torch.float32)\n",
            tuple(f"{control}:{place}" for control, place in places if place),
        ),
    )


def _cast(found: Verdict) -> Verdict:
    text = "Leave out the cast to half, or take away what is common to all numbers first."
    return replace(found, fix=replace(found.fix, text=text, patch=""))


def _in_fp32(found: Verdict, module: str) -> Verdict:
    text = "Compute the argument in fp32: the layer before the sine as well as the sine."
    fix = replace(found.fix, text=text, patch=island_patch(module))
    return replace(found, fix=fix)


RULE = Rule(
    code="AMP026",
    id="low_precision_constants",
    title="Constants were built in half precision",
    definition="A table, position index or schedule was computed or stored in half precision.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=35,
)
