"""A script's own text with, beside each line, the dtypes it computed in and what began there.

From the observations of one run alone: the texts that it kept, what its lines did in the first
steps, ops that gave NaN or infinity, and steps that were left out because of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp, HalfSite, Kernel, LineUse

CASTS = frozenset({"_to_copy", "copy_"})
# These hand numbers on as they are: a line that only does so computes in no dtype.
_PASSING = CASTS | {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze",
    "squeeze", "select", "slice", "as_strided", "detach", "alias", "clone", "empty", "empty_like",
    "split", "unbind", "lift_fresh",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LineView:
    """One line of a file; counts are of the first steps."""

    number: int
    text: str
    forward: str  # "fp16", "fp32 → fp16": dtypes of what its ops took and made, "" without ops
    backward: str
    casts: str  # "fp32 → fp16 × 6", several parted by commas
    cast_calls: int
    cast: int  # elements other than zero that its casts to a narrower dtype took
    lost: int  # of these, the ones that became zero
    notes: tuple[str, ...]  # what began here, the first step first
    kernels: tuple[int, ...] = ()  # of compiled code, of several ops, that compute this line
    unrounded: tuple[str, ...] = ()  # "kernel 4: aten.mul to bf16": results handed on unrounded
    sites: tuple[str, ...] = ()  # what it makes half and what that loses, from the first line on

    @property
    def is_told(self) -> bool:
        """Whether anything stands beside the text."""
        told = self.forward or self.backward or self.casts or self.notes or self.kernels
        return bool(told or self.sites)


@dataclass(frozen=True, slots=True)
class File:
    """A file with all of its lines."""

    name: str
    lines: tuple[LineView, ...]

    @property
    def told(self) -> int:
        """Lines that ran or that something began in."""
        return sum(line.is_told for line in self.lines)


def files(run: RunView, kernels: Sequence[Kernel] = ()) -> list[File]:
    """The files of which the run kept the text, those with most to tell first. ``kernels`` are
    those of the same script's compiled run."""
    uses = defaultdict[tuple[str, int], list[LineUse]](list)
    for use in run.line_uses:
        uses[place(use.line)].append(use)
    notes = _notes(run)
    sites = defaultdict[tuple[str, int], list[str]](list)
    for site in run.sites:
        sites[place(site.line)].append(site_words(site))
    fused = [kernel for kernel in kernels if len(kernel.ops) > 1]
    found = [
        File(
            source.file,
            tuple(
                replace(
                    _line(number, text, uses[source.file, number], notes[source.file, number]),
                    sites=tuple(sites[source.file, number]),
                    **_compiled(f"{source.file}:{number}", fused),
                )
                for number, text in enumerate(source.lines, start=1)
            ),
        )
        for source in run.sources
        if source.lines
    ]
    return sorted(found, key=lambda file: -file.told)


def site_words(site: HalfSite) -> str:
    """ "moments become fp16 by Tensor.half, 6 times; of 4,096 elements 4,000 changed, 12 became
    zero"."""
    what = site.role or "numbers"
    named = f" of {', '.join(site.names)}" if site.names else ""
    text = f"{what}{named} become {site.dtype} by {site.op}"
    text += f", {site.calls:,} times" if site.calls > 1 else ""
    if not site.elements:
        return text
    lost = [
        f"{count:,} {how}"
        for count, how in (
            (site.changed, "changed"),
            (site.zeroed, "became zero"),
            (site.infinite, "became infinite"),
        )
        if count
    ]
    text += f"; of {site.elements:,} elements {', '.join(lost) or 'none changed'}"
    if site.merged:
        text += f"; of {site.distinct:,} distinct numbers {site.merged:,} fell onto others"
    return text


def _line(number: int, text: str, uses: Sequence[LineUse], notes: Sequence[str]) -> LineView:
    casts: dict[str, int] = defaultdict(int)
    for use in uses:
        if use.op in CASTS and not use.backward and use.takes and use.takes[-1] != use.makes:
            casts[f"{use.takes[-1]} → {use.makes}"] += use.calls
    return LineView(
        number,
        text,
        _dtypes([use for use in uses if not use.backward]),
        _dtypes([use for use in uses if use.backward]),
        ", ".join(f"{what} × {calls:,}" for what, calls in casts.items()),
        sum(casts.values()),
        sum(use.cast for use in uses),
        sum(use.lost for use in uses),
        tuple(notes),
    )


def _dtypes(uses: Sequence[LineUse]) -> str:
    """Of the ops that compute."""
    computing = [use for use in uses if use.op not in _PASSING]
    takes = sorted({dtype for use in computing for dtype in use.takes})
    makes = sorted({use.makes for use in computing if use.makes})
    if takes == makes or not takes or not makes:
        return "+".join(takes or makes)
    return f"{'+'.join(takes)} → {'+'.join(makes)}"


def _compiled(line: str, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The fields of a LineView that tell of kernels."""
    here = [kernel for kernel in kernels if line in kernel.lines]
    unrounded = (
        f"kernel {kernel.number:,}: {what.removesuffix(f', {line}')}"
        for kernel in here
        for what in kernel.unrounded
        if what.endswith(f", {line}")
    )
    return {
        "kernels": tuple(kernel.number for kernel in here),
        "unrounded": tuple(dict.fromkeys(unrounded)),
    }


def _notes(run: RunView) -> defaultdict[tuple[str, int], list[str]]:
    found = defaultdict[tuple[str, int], list[str]](list)
    bad = [op for op in run.bad_ops if op.kind == "nonfinite"]
    skips = _skips(run, bad)
    for op in sorted(bad, key=lambda op: (op.step, op.id)):
        gave = "NaN" if op.nan else "infinity"
        text = f"Step {op.step:,}: {op.op.removeprefix('aten.')} gave {gave} in {op.dtype}"
        text += f" ({op.phase})" if op.phase != "forward" else ""
        text += f", in {op.module}" if op.module else ""
        if op.count > 1:
            text += f", {op.count:,} times"
        if op.id == min(one.id for one in bad):
            text = f"{text}: the first bad op"
        found[place(op.line)].append(f"{text}.")
        if skips[op.id]:
            many = f"{skips[op.id]:,} skipped step{'s' if skips[op.id] > 1 else ''}"
            found[place(op.line)].append(f"{many} began here.")
    outcome = run.outcome
    if outcome.error_type:
        found[place(outcome.error_line)].append(f"{outcome.error_type}: {outcome.error_text}")
    return found


def _skips(run: RunView, bad: Sequence[BadOp]) -> defaultdict[int, int]:
    """Skipped steps by the first bad op of theirs whose result reached a gradient."""
    found = defaultdict[int, int](int)
    reached = [op for op in bad if op.reached_gradient or op.reached_loss]
    reaching = sorted(reached, key=lambda op: op.id)
    for step in run.steps:
        if step.skipped:
            here = [op for op in reaching if op.step <= step.step <= op.last_step]
            if here:
                found[here[0].id] += 1
    return found


def source_line(run: RunView, line: str) -> str:
    """The text of "train.py:41" as the run kept it, without its indentation; "" of others."""
    file, number = place(line)
    texts = {source.file: source.lines for source in run.sources}
    return next(iter(texts.get(file, ())[number - 1 : number]), "").strip() if number else ""


def place(line: str) -> tuple[str, int]:
    """("train.py", 41) of "train.py:41"; ("", 0) of what names no line."""
    name, _, number = line.rpartition(":")
    return (name, int(number)) if name and number.isascii() and number.isdigit() else ("", 0)
