"""What ``ampscope diff`` found, in sentences and rows and as JSON, contract version 1.

Everything is bounded: of a long ledger the first rows are shown, and how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ampscope.ext.diff.run_diff import (
    Difference,
    DifferentSetting,
    LedgerRow,
    LossGap,
    NoiseLevel,
    OpDifference,
    RunDiff,
    ledger_summary,
)
from ampscope.number_words import cut, plural
from ampscope.observations import DtypeEntry
from ampscope.record_json import dumps
from ampscope.story.document import visible

SCHEMA = 1
MOST_ROWS = 40  # of the ledger and of the settings, in text
MOST_JSON_ROWS = 2_000
MOST_SETTINGS = 3  # in the sentence; the table has them all
NAME_LENGTH = 60
_PLACES = {
    "start": "the weights before the first step",
    "input": "what the model is given",
    "activation": "the output",
    "loss": "the loss",
    "gradient": "the gradient",
    "buffer": "a buffer",
    "weight": "the weights after the optimizer's step",
    "state": "the optimizer's state",
}


def sentences(found: RunDiff) -> list[str]:
    """The verdict first, then what it rests on."""
    said = [_verdict(found)]
    if found.settings and found.verdict == "different":
        said.append(_set_differently(found.settings))
    if found.first is not None and found.verdict == "different":
        said += [*_first(found.first), *_beyond(found)]
    if not found.steps and found.verdict == "unknown":
        return [visible(text) for text in said]  # no step to compare: the reason says all
    said.append(_noise(found.noise))
    if found.blind_from is not None:
        said.append(f"From step {found.blind_from:,} on noise hides any difference.")
    if found.loss is not None:
        said.append(loss_sentence(found.loss))
    for name, modules in (("A", found.only_first), ("B", found.only_second)):
        if modules:
            listed = ", ".join(cut(m) for m in modules[:5])
            more = f" and {len(modules) - 5:,} more" if len(modules) > 5 else ""
            said.append(f"Only {name} has {plural(len(modules), 'module')}: {listed}{more}.")
    return [visible(text) for text in said]


def _verdict(found: RunDiff) -> str:
    steps = f"{plural(found.steps, 'step')} and {found.tensors:,} tensors compared"
    if found.verdict == "same":
        what = "the same bit for bit" if not found.noise.largest else "the same within noise"
        if found.first is None and found.beyond_rounding is None and found.noise.repeats < 2:
            what = "the same"
        return f"A and B are {what}: {steps}."
    if found.verdict == "unknown":
        return f"Could not tell. {found.reason}"
    if found.first is None:
        return f"A and B are different. {found.reason}"
    where = module_words(found.first.module)
    return (
        f"A and B are different from step {found.first.step:,} on. "
        f"The first difference is in {where}: "
        f"{_PLACES[found.first.role]}{_of(found.first)} differs by {size(found.first)}."
    )


def _set_differently(settings: Sequence[DifferentSetting]) -> str:
    """``Set differently: optimizer0 eps 1e-08 in A and 1e-06 in B.``"""
    listed = [
        f"{cut(s.name)} {cut(s.first) or 'none'} in A and {cut(s.second) or 'none'} in B"
        for s in settings[:MOST_SETTINGS]
    ]
    left = len(settings) - len(listed)
    more = f"; and {left:,} more" if left else ""
    return f"Set differently: {'; '.join(listed)}{more}."


def module_words(module: str) -> str:
    """``encoder.0``, in a sentence; the model itself has no name."""
    return cut(module, NAME_LENGTH) if module else "the model or the script itself"


def _of(found: Difference) -> str:
    if found.role in ("loss", "input"):
        return ""
    if found.name == found.module or not found.name:
        return ""
    return f" of {cut(found.name, NAME_LENGTH)}"


def size(found: Difference) -> str:
    """``4.9e-04 (0.5 roundings of bf16)``."""
    if math.isinf(found.distance):
        return "values that are finite in one run alone, or by its size"
    text = f"{found.distance:.1e} of its norm"
    if found.roundings is None:
        return text
    coarser = _coarser(found)
    return f"{text}, {found.roundings:.2g} times the rounding of {coarser}"


def _coarser(found: Difference) -> str:
    order = ("e5m2", "e4m3", "bf16", "fp16", "tf32", "fp32", "fp64")
    known = [d for d in order if d in found.dtypes]
    return known[0] if known else found.dtypes[0]


def _first(found: Difference) -> list[str]:
    said = []
    if found.op is not None:
        said.append(op_sentence(found.op))
    if found.dtypes[0] != found.dtypes[1]:
        said.append(f"It is {found.dtypes[0]} in A and {found.dtypes[1]} in B.")
    if found.role in ("weight", "state"):
        said.append("The gradients of this step are the same: the optimizer does something else.")
    if found.other_name != found.name:
        said.append(f"In B it is called {cut(found.other_name, NAME_LENGTH)}.")
    return said


def op_sentence(found: OpDifference) -> str:
    """Which op it begins with."""
    kind = "backward op" if found.backward else "op"
    at = f" at {found.line}" if found.line else ""
    beside = f" at {found.other_line}" if found.other_line else ""
    if found.distance is not None:
        same = found.op == found.other and found.line == found.other_line
        other = "" if same else f", in B {found.other}{beside}"
        text = f"It begins with the {kind} {found.op}{at}{other}."
        return text if found.before is None else f"{text} {_before(found.before)}"
    if not found.op:
        return f"It begins with the {kind} {found.other}{beside}, which only B makes."
    if not found.other:
        return f"It begins with the {kind} {found.op}{at}, which only A makes."
    return f"It begins where A makes the {kind} {found.op}{at} and B {found.other}{beside}."


def _before(found: OpDifference) -> str:
    name, op, line = ("A", found.op, found.line)
    if not op:
        name, op, line = "B", found.other, found.other_line
    beside = f", where B makes {found.other}" if found.op and found.other else ""
    only = "" if beside else "only "
    at = f" at {line}" if line else ""
    return f"Before it {only}{name} makes the op {op}{at}{beside}."


def _beyond(found: RunDiff) -> list[str]:
    beyond = found.beyond_rounding
    if beyond is None:
        return ["Rounding to the formats in use explains all of it: no difference is larger."]
    if beyond == found.first:
        return []
    return [
        f"The first that rounding does not explain is at step {beyond.step:,} in "
        f"{module_words(beyond.module)}: {_PLACES[beyond.role]}{_of(beyond)} differs by "
        f"{size(beyond)}."
    ]


def _noise(noise: NoiseLevel) -> str:
    if noise.repeats < 2:
        return "A was not repeated: its noise is not known, and any difference counts."
    if not noise.largest:
        return f"{noise.repeats} runs of A are the same bit for bit, so that any difference counts."
    where = f", first at step {noise.first_step:,}" if noise.first_step is not None else ""
    name = f" in {cut(noise.first_name)}" if noise.first_name else ""
    return f"{noise.repeats} runs of A differ by up to {noise.largest:.1e}{where}{name}."


def loss_sentence(found: LossGap) -> str:
    """How far the losses lie apart, and whether another seed does as much."""
    over = (
        f"Over the last {plural(found.steps, 'common step')}" if found.steps > 1 else "At the end"
    )
    text = f"{over} the loss is {found.first:.6g} in A and {found.second:.6g} in B"
    if found.between_seeds is None:
        return f"{text}."
    apart = abs(found.second - found.first)
    than = "more than" if apart > found.between_seeds else "no more than"
    return (
        f"{text}, {apart:.2g} apart: {than} the {found.between_seeds:.2g} between "
        f"{found.seeds + 1} seeds of A."
    )


def ledger_rows(rows: Sequence[LedgerRow]) -> list[tuple[str, str, str, str]]:
    """(kind, name, in A, in B), each side with what set it."""
    return [(r.kind, visible(r.name), entry_words(r.first), entry_words(r.second)) for r in rows]


def entry_words(entry: DtypeEntry | None) -> str:
    """``bf16: autocast (bf16), train.py:22``."""
    if entry is None:
        return "none"
    by = ", ".join(filter(None, (entry.why, entry.line)))
    return visible(f"{entry.dtype}: {by}" if by else entry.dtype)


def ledger_sentence(rows: Sequence[LedgerRow]) -> str:
    """How many tensors have another dtype, by kind."""
    if not rows:
        return "Every parameter, buffer, activation and optimizer state has the same dtype in both."
    parts = [
        f"{n:,} {kind}{'s' if n > 1 else ''} {first or 'none'} → {second or 'none'}"
        for kind, first, second, n in ledger_summary(rows)[:8]
    ]
    return f"Other dtypes: {', '.join(parts)}."


def document(
    found: RunDiff,
    names: tuple[str, str],
    ids: tuple[Sequence[str], Sequence[str]],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything as plain values."""
    parts = asdict(found)
    for name in ("ledger", "settings", "only_first", "only_second"):
        rows = parts.pop(name)
        parts[name] = list(rows[:MOST_JSON_ROWS])
        parts[f"{name}_count"] = len(rows)
    return {
        "schema": SCHEMA,
        "a": {"name": names[0], "runs": list(ids[0])},
        "b": {"name": names[1], "runs": list(ids[1])},
        "sentences": sentences(found),
        "notes": list(notes),
        **parts,
    }


def unknown_document(reason: str) -> dict[str, Any]:
    """Where nothing could be compared."""
    return {"schema": SCHEMA, "verdict": "unknown", "reason": reason, "first": None}


def to_json(parts: dict[str, Any]) -> str:
    """The document, indented; non-finite numbers are the texts nan, inf and -inf."""
    return dumps(parts, indent=2)
