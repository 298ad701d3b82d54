"""Half precision at one place harms, in a way that no other cause describes.

What it detects
    The fp32 control trains, the script does not, and it does as well once the numbers of one site
    (or of the smallest set of sites that was found) are fp32: an explicit cast, a table, a
    constant, a checkpoint, an accumulator, an op under autocast. What the site rounds is said with
    counts where it was seen: numbers that became zero or infinite, whole numbers that fell onto one
    another.

Why it matters
    Rounding harms without a NaN: merged class ids, flushed moments, sums that stand still. Nothing
    warns, and the training ends with a worse model.

Blind spots
    What is rounded outside torch, in NumPy for example, is not lifted; nor is a file that an
    earlier program wrote in half.

Remedy
    Keep the numbers of that site in fp32, whole numbers as integers.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.lifting import LIFTS, few_are_left, lifted, lost, sites_of, smallest_lift
from ampscope.analysis.line_view import source_line
from ampscope.control import BASELINE, Control
from ampscope.number_words import plural
from ampscope.observations import HalfSite
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, passed

LOADER = "torch.utils.data.DataLoader"  # the op of a site whose numbers other processes make
_WORDS = {
    "fp32_params": "the parameters",
    "fp32_state": "the optimizer's state",
}


def check(evidence: Evidence) -> Verdict:
    """Found where a run with some sites lifted, and nothing else changed, trains."""
    control = smallest_lift(evidence)
    if control is None:
        return passed("No site of half precision was seen to harm by itself.")
    names = lifted(control)
    sites = sites_of(evidence.baseline, control)
    first = sites[0] if sites else None
    lines = [name for name in names if name not in LIFTS]
    line = first.line if first is not None and first.line in lines else next(iter(lines), "")
    where = ", ".join(_WORDS.get(name, name) for name in names)
    what = "" if first is None else _rounds(first)
    reason = (
        f"Half precision at {where} harms{': ' + what if what else ''}. With "
        f"{'that' if len(names) == 1 else 'these'} alone in fp32, and all other rounding as it "
        "was, what is wrong with the script is gone."
    )
    is_modules = Control(control).first.name == "fp32_modules"
    return Verdict(
        Status.FOUND,
        reason,
        module=names[0] if is_modules else None,
        op=first.op if first is not None else None,
        step=first.step if first is not None else None,
        line="" if is_modules else line,
        code="" if is_modules else source_line(evidence.baseline, line),
        evidence=_measured(first) if first is not None else (),
        fix=_fix(control, names, first),
    )


def _rounds(site: HalfSite) -> str:
    """What the site does to its numbers, in words."""
    role = site.role or "numbers"
    left = site.distinct - site.merged
    if site.op == LOADER:
        return f"{role} come from the workers of its loader in {site.dtype}"
    merges = (
        f"it rounds {role} to {site.dtype}, and of {site.distinct:,} different ones {left:,} "
        "are left"
    )
    if site.whole and site.merged:
        return merges
    if site.zeroed:
        return (
            f"it rounds {role} to {site.dtype}, and {site.zeroed:,} of {site.elements:,} become "
            "zero"
        )
    if site.infinite:
        return f"{role} are beyond the range of {site.dtype}: {site.infinite:,} become infinite"
    return merges if few_are_left(site) else f"it rounds {role} to {site.dtype}"


def _measured(site: HalfSite) -> tuple[Measurement, ...]:
    merged = site.merged if site.whole or few_are_left(site) else 0
    found = [Measurement(f"{plural(site.calls, 'call')}, elements looked at", site.elements)]
    for name, value in (
        ("became zero", site.zeroed), ("became infinite", site.infinite),
        ("fell onto another", merged),
    ):  # fmt: skip
        if value:
            found.append(Measurement(name, value, 0, BASELINE, site.step))
    if site.error is not None:
        found.append(Measurement("relative rounding error", site.error, None, BASELINE, site.step))
    return tuple(found) if lost(site) or site.error is not None else ()


def _fix(control: str, names: tuple[str, ...], site: HalfSite | None) -> Fix:
    where = ", ".join(names)
    if "fp32_params" in names:
        kind = "fp32_params"
        text = "Keep the parameters in fp32 and let autocast choose the compute precision."
    elif "fp32_state" in names:
        kind, text = "fp32_optimizer_state", "Keep the optimizer's state in fp32."
    elif Control(control).first.name == "fp32_modules":
        kind, text = "fp32_module", f"Keep {where} in fp32."
    elif site is not None and site.op == LOADER:
        kind = "drop_cast"
        text = f"Keep fp32 in the dataset, or in the function that makes the batches of {where}."
    elif site is None or site.kind == "autocast":
        kind, text = "rewrite_op", f"Compute {where} in fp32."
    elif site.whole:
        kind, text = "drop_cast", f"Keep whole numbers as integers at {where}."
    else:
        kind, text = "drop_cast", f"Leave out the rounding to half at {where}."
    return Fix(kind, text, controls=(control,))


RULE = Rule(
    code="AMP036",
    id="harmful_rounding",
    title="Rounding to half at one place harms",
    definition="The script trains as its fp32 control does once one site of it is kept in fp32.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=90,
    is_of_site=True,
    is_measured=True,
)
