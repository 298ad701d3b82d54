"""Sentences of the Layers page, computed from the run."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.casts import CastSite, cast_kinds
from ampscope.analysis.dtypes import is_half
from ampscope.analysis.flops import FlopShare
from ampscope.analysis.fp32_ops import Fp32Op, ModulesByPrecision
from app.text import count, cut, percent, plural, share

REASONS = {
    "fp32_list": "autocast's fp32 list: it overflows or loses accuracy in half",
    "promoted": "autocast's promote list: it takes the widest dtype of its inputs",
    "not_cast": "autocast would run it in half, but autocast was off there",
    "follows": "in no list: it follows its inputs, and they were fp32",
}
# The same lists in a run that did not use autocast at all.
REASONS_WITHOUT_AUTOCAST = {
    "fp32_list": "no autocast in this run; with it, the fp32 list keeps this op in fp32",
    "promoted": "no autocast in this run; with it, the promote list decides by its inputs",
    "not_cast": "no autocast in this run; with it, this op runs in half",
    "follows": "in no list: it follows its inputs, and they were fp32",
}
HALF_MODES = ("fp16", "bf16")
WITHOUT_AUTOCAST = ("fp32", "tf32", "pure")  # beginnings of precision modes


def answer(flops: FlopShare, kinds: ModulesByPrecision, cast_count: int, is_half_run: bool) -> str:
    """The page's sentence."""
    if kinds.total == 0 and flops.total == 0:
        return "No op of these phases was traced, so only stored dtypes are known."
    if kinds.half == kinds.both == () and flops.half == 0:
        where = "although half precision was asked for" if is_half_run else "as asked"
        return f"Everything ran in fp32, {where}: {plural(cast_count, 'cast')} a step."
    parts = []
    if flops.half_share is not None:
        halves = "+".join(d for d, _ in flops.by_dtype if is_half(d)) or "half"
        parts.append(f"{percent(flops.half_share)} of the FLOPs ran in {halves}")
    if kinds.total:
        parts.append(_stayed(kinds))
    parts.append(f"{plural(cast_count, 'cast')} a step")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def flops_seen(shares: Sequence[tuple[str, FlopShare]], shown: int) -> str:
    """Above the chart of FLOPs."""
    total = sum(s.total for _, s in shares)
    if not shares:
        return "No op with a FLOP formula (matrix product, convolution, attention) ran."
    name, largest = shares[0]
    wide = [(n, s) for n, s in shares if s.total > s.half]
    most = percent(largest.total / total)
    text = f"{cut(name)} does most: {most} of {total / 1e6:,.1f} million operations."
    if wide and len(wide) < len(shares):
        slow = sum(s.total - s.half for _, s in wide)
        text += f" Not in half: {percent(slow / total)}, most of it in {cut(wide[0][0])}."
    if len(shares) > shown:
        text += f" The {shown} largest of {len(shares)} modules are shown."
    return text


def tree_seen(shown: int, whole: int, text: str, *, opens: bool) -> str:
    """Above the table of modules; ``opens``: the section below it shows the chosen one."""
    click = " Click a row to open it below." if opens else ""
    if text:
        return f"{share(shown, whole)} modules hold “{text}” in their path or type."
    if shown == whole:
        return f"All {plural(whole, 'module')}.{click}"
    return (
        f"{share(shown, whole)} modules are unfolded; what lies deeper is added up in the last row "
        f"above it.{click}"
    )


def casts_seen(sites: Sequence[CastSite], names: dict[int, str]) -> str:
    """Above the table of casts."""
    if not sites:
        return "No cast: every op got its inputs in the dtype that it ran in."
    kinds = cast_kinds(sites)
    total = sum(s.count for s in sites)
    listed = ", ".join(f"{n:,} from {a} to {b}" for a, b, n in kinds[:3])
    where = cut(names.get(sites[0].module, "outside the model"))
    return (
        f"{plural(total, 'cast')} a step: {listed}. Most in one place: {count(sites[0].count)} in "
        f"{where} ({sites[0].phase})."
    )


def fp32_seen(found: Sequence[Fp32Op], precision: str) -> str:
    """Above the table of ops that computed in fp32."""
    if not found:
        return "No forward op computed in fp32."
    calls = sum(f.count for f in found)
    listed = sum(f.count for f in found if f.reason == "fp32_list")
    skipped = sum(f.count for f in found if f.reason == "not_cast")
    if precision.startswith(WITHOUT_AUTOCAST):
        return (
            f"{plural(calls, 'forward call')} in fp32, in a run without autocast; with it "
            f"{share(skipped, calls)} of them would run in half."
        )
    text = (
        f"{plural(calls, 'forward call')} in fp32: {share(listed, calls)}, because an autocast "
        "list asks for it."
    )
    if skipped:
        text += f" {plural(skipped, 'call')} would have run in half had autocast been on there."
    return text


def reasons(precision: str) -> dict[str, str]:
    """What to call each reason in a run of this precision mode."""
    return REASONS_WITHOUT_AUTOCAST if precision.startswith(WITHOUT_AUTOCAST) else REASONS


def is_half_precision(precision: str) -> bool:
    """True for the modes that ask for half."""
    return any(mode in precision for mode in HALF_MODES)


def _stayed(kinds: ModulesByPrecision) -> str:
    modules = plural(kinds.total, "computing module")
    text = f"{len(kinds.fp32):,} of {modules} stayed in fp32"
    return text + (f", {len(kinds.both):,} did both" if kinds.both else "")
