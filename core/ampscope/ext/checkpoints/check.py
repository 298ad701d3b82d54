"""Whether a checkpoint is poisoned: every number is looked at once, and what is wrong is named.

A *finding* is what no healthy checkpoint has:

    nan, inf           a tensor that holds them
    negative_moment    a second moment of Adam below zero: the update is NaN
    vanished_moment    a second moment of zero beside a first one above ``10 * eps``: the update
                       is larger than any that Adam can make
    frozen_moment      a second moment in half precision whose decay is below half a unit in the
                       last place: it can grow and never shrink
    ema_poisoned       an average of weights that is not finite where its weight is finite
    fp16_overflow      finite weights that fp16 makes infinite; only where the checkpoint is said to
                       be loaded in fp16, otherwise a note

Everything else (dtypes, subnormal numbers, how far averages are from their weights) is reported and
not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ampscope.errors import BadInput
from ampscope.ext.checkpoints import counting
from ampscope.ext.checkpoints.files import (
    MOST_NAMED,
    Checkpoint,
    StoredTensor,
    opened,
)
from ampscope.ext.checkpoints.reader import TensorCounts, TensorReader
from ampscope.ext.checkpoints.torch_files import TorchFiles
from ampscope.files import TemporaryFolder
from ampscope.number_words import plural

DEFAULT_EPSILON = 1e-8  # of torch's Adam and AdamW
# (1 - beta1) / sqrt(1 - beta2) bounds Adam's update in units of lr: 3.2 with 0.9 and 0.999.
MOST_UPDATE = 10.0
MOST_PARTS = 32  # of a tensor's name that are compared with another's
_EMA = re.compile(r"(?:^|[._-])ema(?:[._-]|$)|^averaged?[._-]", re.IGNORECASE)


_COUNTED = [f.name for f in fields(TensorCounts)]


@dataclass(frozen=True, slots=True)
class Average:
    """An average of weights beside the weight that it is one of."""

    name: str
    weight: str
    relative_distance: float | None  # 2-norm of the difference over that of the weight
    equal_share: float


@dataclass(frozen=True, slots=True)
class TensorFinding:
    """What is wrong with one tensor."""

    code: str
    tensor: str
    text: str  # one sentence
    count: int


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """All tensors of one kind and dtype."""

    kind: str
    dtype: str
    tensors: int
    elements: int
    size: int


@dataclass(slots=True)
class CheckResult:
    """What one checkpoint holds."""

    path: Path
    tensors: list[TensorCounts] = field(default_factory=list)
    averages: list[Average] = field(default_factory=list)
    findings: list[TensorFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # of a folder's files, in sentences

    def dtypes(self) -> list[DtypeRow]:
        """The dtype ledger."""
        rows: dict[tuple[str, str], DtypeRow] = {}
        for t in self.tensors:
            row = rows.get((t.kind, t.dtype), DtypeRow(t.kind, t.dtype, 0, 0, 0))
            rows[t.kind, t.dtype] = replace(
                row,
                tensors=row.tensors + 1,
                elements=row.elements + t.elements,
                size=row.size + t.size,
            )
        return sorted(rows.values(), key=lambda row: (row.kind, -row.size))

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "path": str(self.path),
            "findings": [asdict(f) for f in self.findings],
            "notes": self.notes,
            "left_out": self.left_out,
            "unreadable": self.unreadable,
            "dtypes": [asdict(row) for row in self.dtypes()],
            "averages": [asdict(a) for a in self.averages],
            # asdict copies each value deeply; there may be a million tensors
            "tensors": [{name: getattr(t, name) for name in _COUNTED} for t in self.tensors],
        }


def check_checkpoint(
    path: Path, loaded_as: str = "", torch_files: TorchFiles | None = None
) -> CheckResult:
    """Look at every number of a checkpoint.

    Args:
        path: a safetensors file, a file of torch.save, a ``*.index.json``, or a folder of these.
        loaded_as: ``"fp16"`` where it is going to be loaded in fp16; then weights that overflow
            there are findings.
        torch_files: of several checks; without, torch is imported anew for this one, if it is
            needed.

    Raises:
        BadInput: it cannot be read; the message is one sentence.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryFolder()))
        torch_files = torch_files or stack.enter_context(TorchFiles())
        checkpoint = opened(path, scratch, torch_files)
        tensors = [replace(t, kind=_kind(t)) for t in checkpoint.tensors]
        with TensorReader() as reader:
            try:
                counts = reader.counts(tensors)
                if not tensors:
                    raise _nothing(checkpoint)
                result = CheckResult(path, counts)
                result.left_out, result.unreadable = checkpoint.left_out, checkpoint.unreadable
                _judge(result, loaded_as)
                _compare_averages(result, tensors, reader)
                _check_moments(result, checkpoint, tensors, reader)
            except OSError as error:
                raise BadInput(f"Cannot read {path}: {error.strerror or error}.") from error
    return result


def _nothing(checkpoint: Checkpoint) -> BadInput:
    why = [*checkpoint.unreadable, *checkpoint.left_out][:MOST_NAMED]
    return BadInput(" ".join([f"{checkpoint.path} holds no tensor: nothing to look at.", *why]))


def _kind(tensor: StoredTensor) -> str:
    return "ema" if tensor.kind == "model" and _EMA.search(tensor.name) else tensor.kind


def _judge(result: CheckResult, loaded_as: str) -> None:
    """What is wrong with what was counted, and what is worth a note."""
    over: list[TensorCounts] = []
    for t in result.tensors:
        place = f"{t.name} ({t.kind}, {_words(t.dtype)}, {_shape(t.shape)})"
        for code, word, count in (("nan", "NaN", t.nan), ("inf", "infinite", t.inf)):
            if count:
                share = f"{count:,} of {t.elements:,} elements"
                if t.dtype in counting.PARTS:
                    share = f"{count:,} of {2 * t.elements:,} real and imaginary parts"
                text = f"{place}: {share} are {word}."
                result.findings.append(TensorFinding(code, t.name, text, count))
        if t.fp16_overflow and t.kind != "optimizer":
            over.append(t)
    for t in over:
        rows = f"{t.overflowing_rows:,} of {_rows(t):,} output channels"
        text = f"{t.name} ({t.kind}, {_words(t.dtype)}): fp16 makes {rows} overflow."
        if loaded_as == "fp16":
            result.findings.append(TensorFinding("fp16_overflow", t.name, text, t.fp16_overflow))
        else:
            result.notes.append(text)
    for dtype in sorted({t.dtype for t in result.tensors} - counting.LOOKED_AT):
        names = [t.name for t in result.tensors if t.dtype == dtype]
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        result.left_out.append(f"{names[0]}{more}: not looked at, for the format {dtype}.")
    weights = [t for t in result.tensors if t.kind != "optimizer" and t.dtype in counting.FLOATS]
    nonzero = sum(t.elements - t.zero for t in weights)
    if nonzero:
        own = sum(t.subnormal for t in weights)
        small = sum(t.fp16_subnormal for t in weights)
        gone = sum(t.fp16_zero for t in weights)
        result.notes.append(
            f"Of {nonzero:,} non-zero elements of weights {own / nonzero:.3%} are subnormal; "
            f"in fp16 {small / nonzero:.3%} would be, and {gone / nonzero:.3%} would be zero."
        )


def _rows(t: TensorCounts) -> int:
    return t.shape[0] if len(t.shape) > 1 else 1


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _words(dtype: str) -> str:
    known = counting.FLOATS.get(dtype)
    return dtype.lower() if known is None else known[0].name


def _compare_averages(
    result: CheckResult, tensors: Sequence[StoredTensor], reader: TensorReader
) -> None:
    """Each average of weights beside its weight: by convention a part of its name is "ema"."""
    averages = [t for t in tensors if t.kind == "ema" and t.dtype in counting.FLOATS and t.count]
    wanted = {key for t in averages for key in _ends(t, _behind_ema(t.name))}
    weights: dict[_End, StoredTensor | None] = {}  # None where several end so
    for tensor in tensors:
        if tensor.kind == "model" and tensor.dtype in counting.FLOATS:
            for key in wanted.intersection(_ends(tensor, tensor.name)):
                weights[key] = None if key in weights else tensor
    bad = {t.name for t in result.tensors if t.nan or t.inf}
    for tensor in averages:
        ends = [key for key in _ends(tensor, _behind_ema(tensor.name)) if key in weights]
        weight = weights[ends[0]] if ends else None
        if weight is None:
            continue
        sums = np.zeros(3)
        for one, other in reader.pairs(tensor, weight):
            sums += counting.distance(one, other)
        away = math.sqrt(sums[0] / sums[1]) if sums[1] > 0 else None
        result.averages.append(Average(tensor.label, weight.label, away, sums[2] / tensor.count))
        if tensor.label in bad and weight.label not in bad:
            text = (
                f"{tensor.label} is not finite and its weight {weight.label} is: the average "
                "cannot recover. Take it anew from the weights."
            )
            result.findings.append(TensorFinding("ema_poisoned", tensor.label, text, 1))


_End = tuple[str, str, tuple[int, ...]]


def _ends(tensor: StoredTensor, name: str) -> list[_End]:
    """All ends of ``name``, the longest first and without dots (an average's name often has none),
    with what else must be the same of an average and its weight."""
    parts = name.split(".")[-MOST_PARTS:]
    return [(tensor.part, "".join(parts[n:]), tensor.shape) for n in range(len(parts))]


def _behind_ema(name: str) -> str:
    found = _EMA.search(name)
    return name[found.end() :] if found else ""


def _check_moments(
    result: CheckResult,
    checkpoint: Checkpoint,
    tensors: Sequence[StoredTensor],
    reader: TensorReader,
) -> None:
    """Adam's moments, by the names that torch gives them in an optimizer's state."""
    counts = {t.name: t for t in result.tensors}
    by_name = {(t.part, t.name): t for t in tensors}
    groups = {(group.part, prefix): group for group in checkpoint.groups for prefix in group.states}
    for tensor in tensors:
        if not tensor.name.endswith(("exp_avg_sq", "max_exp_avg_sq")):
            continue
        if tensor.dtype not in counting.FLOATS or not tensor.count:
            continue
        found, name = counts[tensor.label], tensor.label
        prefix = tensor.name[: tensor.name.rfind(".") + 1]
        group = groups.get((tensor.part, prefix))
        if found.negative:
            below = plural(found.negative, "second moment")
            text = f"{name}: {below} below zero, whose updates are NaN."
            result.findings.append(TensorFinding("negative_moment", name, text, found.negative))
        first = by_name.get((tensor.part, f"{prefix}exp_avg"))
        if first is not None and first.shape == tensor.shape and first.dtype in counting.FLOATS:
            _check_vanished(result, first, tensor, group.epsilon if group else None, reader)
        fmt = counting.FLOATS[tensor.dtype][0]
        # Numbers of a binade lie 2^-m apart at its lower end and 2^-(m+1) at its upper end,
        # relative to them: a change below half of the latter is rounded away everywhere.
        least = 2.0 ** -(fmt.mantissa_bits + 2)
        if group is not None and group.betas is not None and 0 < 1 - group.betas[1] < least:
            text = (
                f"{name} is kept in {fmt.name}: a decay by {1 - group.betas[1]:.2g} is below half "
                "a unit in the last place, so that the second moment never shrinks. Keep the "
                "optimizer's state in fp32."
            )
            result.findings.append(TensorFinding("frozen_moment", name, text, tensor.count))


def _check_vanished(
    result: CheckResult,
    first: StoredTensor,
    second: StoredTensor,
    epsilon: float | None,
    reader: TensorReader,
) -> None:
    epsilon = DEFAULT_EPSILON if epsilon is None else epsilon
    gone = large = 0
    for one, other in reader.pairs(first, second):
        some, many = counting.moments(one, other, MOST_UPDATE * epsilon)
        gone, large = gone + some, large + many
    if large:
        text = (
            f"{second.label}: {large:,} second moments are zero beside a first moment above "
            f"{MOST_UPDATE * epsilon:.1g}: their next updates are larger than any that Adam can "
            "make. Keep the optimizer's state in fp32."
        )
        result.findings.append(TensorFinding("vanished_moment", second.label, text, large))
    elif gone:
        result.notes.append(
            f"{second.label}: {gone:,} of {second.count:,} second moments are zero where the first "
            "is not; eps bounds their updates."
        )
