"""A table or position index was built in half precision.

What it detects
    A range in half with repeated values; sines of half arguments whose rounding alone exceeds a
    quarter radian; a half buffer that differs from the fp32 control's by more than a twentieth
    of its spread.

Why it matters
    fp16 counts to 2,048 and bf16 to 256: later positions coincide, and no training repairs
    that.

Blind spots
    Tables that are rebuilt inside compiled code are not seen.

Remedy
    Build and keep tables in fp32; cast the result of the lookup, not its arguments.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.half_tables import owner_of_only_table
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, passed

COARSE_SPREAD = 0.05  # one rounding to bf16 is at most 0.4 % of a value


def check(evidence: Evidence) -> Verdict:
    """Found at any step: such constants have no dynamics."""
    run = evidence.as_is
    for name in ("half_range", "half_phase"):
        use = run.use(name)
        if use is not None:
            return _found(
                use.module or owner_of_only_table(run),
                use.op,
                use.line,
                use.attempt,
                _words(name),
                (
                    Measurement(
                        "distinct values" if name == "half_range" else "error in radians",
                        use.value or 0.0,
                        use.other,
                        "as_is",
                        use.attempt,
                    ),
                ),
            )
    tables = (
        {}
        if evidence.fp32 is None
        else {s.name: s for s in evidence.fp32.scans if s.moment == "start" and s.kind == "buffer"}
    )
    for scan in run.scans:
        reference = tables.get(scan.name)
        if (
            scan.moment != "start"
            or scan.kind != "buffer"
            or reference is None
            or scan.dtype == "fp32"
        ):
            continue
        error = _distance(scan.sample, reference.sample)
        if error is not None and error > COARSE_SPREAD:
            module = scan.name.rpartition(".")[0]
            words = f"Buffer {scan.name} was built in {scan.dtype} and differs from its fp32 values"
            return _found(
                module,
                "",
                "",
                0,
                words,
                (Measurement("largest difference over spread", error, COARSE_SPREAD, "as_is", 0),),
            )
    return passed("No table was built in half precision.")


def _words(name: str) -> str:
    if name == "half_range":
        return "A range in half precision has repeated values"
    return "The argument of a sine or cosine is too large for half precision"


def _distance(values: tuple[float, ...], reference: tuple[float, ...]) -> float | None:
    if len(values) != len(reference) or not values:
        return None
    spread = max(reference) - min(reference)
    return (
        max(abs(a - b) for a, b in zip(values, reference, strict=True)) / spread if spread else None
    )


def _found(
    module: str, op: str, line: str, step: int, words: str, evidence: tuple[Measurement, ...]
) -> Verdict:
    fix = Fix(
        "rewrite_op",
        "Build the table in fp32 and keep it there.",
        "positions = torch.arange(length, dtype=torch.float32)\n",
        (
            *((f"fp32_lines:{line}",) if line else ()),
            *((f"fp32_modules:{module}",) if module else ()),
        ),
    )
    where = f" (line {line})" if line else ""
    return Verdict(
        Status.FOUND,
        f"{words}{where}.",
        module=module or None,
        op=f"aten.{op}" if op else None,
        phase="forward",
        step=step,
        line=line,
        evidence=evidence,
        fix=fix,
    )


RULE = Rule("low_precision_constants", check, ("as_is", "fp32"), 35)
