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
import os
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.errors import BadInput
from ampscope.ext.checkpoints import counting
from ampscope.ext.checkpoints.files import (
    MOST_NAMED,
    Checkpoint,
    StoredTensor,
    TorchFiles,
    opened,
    pieces,
)
from ampscope.files import TemporaryFolder
from ampscope.number_words import plural

PIECE = 1 << 21  # bytes: with its copy from the page cache it stays in most L2 and L3 caches
THREADS = 2
# Times that a file is read: once, again where fp16 would overflow, and with the tensor that it is
# compared with. Tensors that overlap, or are named again and again, could ask for any number.
MOST_TIMES = 8
DEFAULT_EPSILON = 1e-8  # of torch's Adam and AdamW
# (1 - beta1) / sqrt(1 - beta2) bounds Adam's update in units of lr: 3.2 with 0.9 and 0.999.
MOST_UPDATE = 10.0
MOST_PARTS = 32  # of a tensor's name that are compared with another's
_EMA = re.compile(r"(?:^|[._-])ema(?:[._-]|$)|^averaged?[._-]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """What the numbers of one tensor are. Of integers everything but ``elements`` is 0."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    size: int  # bytes
    nan: int = 0
    inf: int = 0  # of both signs
    zero: int = 0
    subnormal: int = 0  # in its own format
    negative: int = 0
    fp16_overflow: int = 0  # finite, and infinite in fp16
    fp16_zero: int = 0  # not zero, and zero in fp16
    fp16_subnormal: int = 0
    overflowing_rows: int = 0  # output channels with such an element


_COUNTED = [f.name for f in fields(TensorCounts)]


@dataclass(frozen=True, slots=True)
class Average:
    """An average of weights beside the weight that it is one of."""

    name: str
    weight: str
    relative_distance: float | None  # 2-norm of the difference over that of the weight
    equal_share: float


@dataclass(frozen=True, slots=True)
class Finding:
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
    findings: list[Finding] = field(default_factory=list)
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
        with _Reader() as reader:
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


class _Reader:
    """Reads tensors piece by piece, with a buffer for each thread: memory does not grow with the
    file, and a file that gets shorter meanwhile is an error and no signal."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._room = 0  # bytes that may still be read
        self._overflowing: dict[tuple[object, ...], int] = {}
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)

    def counts(self, tensors: Sequence[StoredTensor]) -> list[TensorCounts]:
        """Of each of these; tensors that share their memory are read once."""
        places = {_place(t): t for t in tensors if _format(t.dtype) in counting.FLOATS}
        jobs: list[tuple[StoredTensor, int, int]] = []
        for tensor in places.values():
            self._open(tensor.file)
            jobs += [(tensor, *piece) for piece in pieces(tensor, PIECE)]
        found = {place: np.zeros(counting.LENGTH, np.uint64) for place in places}
        lock = threading.Lock()
        at = iter(jobs)

        def work() -> None:
            while True:
                with lock:
                    job = next(at, None)
                if job is None:
                    return
                tensor, offset, size = job
                part = np.zeros(counting.LENGTH, np.uint64)
                limits = _LIMITS[_format(tensor.dtype)]
                counting.count(self._read(tensor, offset, size), limits, part)
                total = found[_place(tensor)]
                with lock:
                    total[: counting.LARGEST] += part[: counting.LARGEST]

        for future in [self._pool.submit(work) for _ in range(THREADS)]:
            future.result()
        return [self._counted(t, found.get(_place(t))) for t in tensors]

    def _counted(self, t: StoredTensor, found: NDArray[np.uint64] | None) -> TensorCounts:
        plain = TensorCounts(t.label, t.kind, t.dtype, t.shape, t.count, t.size)
        if found is None:
            return plain
        n = [int(x) for x in found]
        if t.dtype in counting.PARTS:  # fp16 and subnormals are asked of real weights alone
            infinite = n[counting.POS_INF] + n[counting.NEG_INF]
            return replace(plain, nan=n[counting.NAN], inf=infinite)
        return replace(
            plain,
            nan=n[counting.NAN],
            inf=n[counting.POS_INF] + n[counting.NEG_INF],
            zero=n[counting.ZERO],
            subnormal=n[counting.SUBNORMAL],
            negative=n[counting.NEGATIVE],
            fp16_overflow=n[counting.FP16_INF],
            fp16_zero=n[counting.FP16_ZERO],
            fp16_subnormal=n[counting.FP16_SUBNORMAL],
            overflowing_rows=self._rows(t) if n[counting.FP16_INF] else 0,
        )

    def _rows(self, tensor: StoredTensor) -> int:
        """Rows of the first dimension. A second look, only at tensors with such an element."""
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        what = (*_place(tensor), rows)
        if what not in self._overflowing:
            self._overflowing[what] = self._count_rows(tensor, rows)
        return self._overflowing[what]

    def _count_rows(self, tensor: StoredTensor, rows: int) -> int:
        width = tensor.size // rows
        together, item = max(1, PIECE // width), tensor.size // tensor.count
        limits, found = _LIMITS[tensor.dtype], 0
        if width > PIECE:  # a row of many pieces
            for row in range(rows):
                start = tensor.offset + row * width
                for at in range(0, width, PIECE):
                    bits = self._read(tensor, start + at, min(PIECE, width - at))
                    if counting.overflowing_rows(bits[None, :], limits):
                        found += 1
                        break
            return found
        for first in range(0, rows, together):
            count = min(together, rows - first)
            bits = self._read(tensor, tensor.offset + first * width, count * width)
            found += counting.overflowing_rows(bits.reshape(count, width // item), limits)
        return found

    def pairs(self, one: StoredTensor, other: StoredTensor) -> Iterable[tuple[Any, Any]]:
        """Both as fp32, in equal parts; they have the same shape."""
        elements = PIECE // 8
        sizes = [t.size // max(1, t.count) for t in (one, other)]
        for start in range(0, one.count, elements):
            length = min(elements, one.count - start)
            parts = []
            for tensor, size in zip((one, other), sizes, strict=True):
                self._open(tensor.file)
                bits = self._read(tensor, tensor.offset + start * size, length * size)
                parts.append(np.array(counting.as_fp32(bits, tensor.dtype)))
            yield parts[0], parts[1]

    def _open(self, path: Path) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._room += MOST_TIMES * os.fstat(self._files[path]).st_size

    def _read(self, tensor: StoredTensor, offset: int, size: int) -> NDArray[Any]:
        """Bits as unsigned integers, in this thread's buffer: valid until its next read."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(PIECE + 8, np.uint8)
        self._room -= size
        if self._room < 0:
            raise BadInput(
                f"{tensor.file} is damaged: its tensors overlap, and claim many times its size."
            )
        view: memoryview = buffer[:size].data
        done = 0
        while done < size:
            got = os.preadv(self._files[tensor.file], [view[done:]], offset + done)
            if not got:
                raise BadInput(f"{tensor.file} became shorter while it was read: check it again.")
            done += got
        kind = counting.FLOATS[_format(tensor.dtype)][1]
        return buffer[:size].view(kind)


_LIMITS = {dtype: counting.bits_of(dtype) for dtype in counting.FLOATS}


def _format(dtype: str) -> str:
    """Of the numbers that a tensor is read as."""
    return counting.PARTS.get(dtype, dtype)


def _place(tensor: StoredTensor) -> tuple[Path, int, int, str]:
    return tensor.file, tensor.offset, tensor.size, tensor.dtype


# What is wrong with what was counted.


def _judge(result: CheckResult, loaded_as: str) -> None:
    over: list[TensorCounts] = []
    for t in result.tensors:
        place = f"{t.name} ({t.kind}, {_words(t.dtype)}, {_shape(t.shape)})"
        for code, word, count in (("nan", "NaN", t.nan), ("inf", "infinite", t.inf)):
            if count:
                share = f"{count:,} of {t.elements:,} elements"
                if t.dtype in counting.PARTS:
                    share = f"{count:,} of {2 * t.elements:,} real and imaginary parts"
                text = f"{place}: {share} are {word}."
                result.findings.append(Finding(code, t.name, text, count))
        if t.fp16_overflow and t.kind != "optimizer":
            over.append(t)
    for t in over:
        rows = f"{t.overflowing_rows:,} of {_rows(t):,} output channels"
        text = f"{t.name} ({t.kind}, {_words(t.dtype)}): fp16 makes {rows} overflow."
        if loaded_as == "fp16":
            result.findings.append(Finding("fp16_overflow", t.name, text, t.fp16_overflow))
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


# Averages of weights. They are named by convention: a part of the name is "ema".


def _compare_averages(
    result: CheckResult, tensors: Sequence[StoredTensor], reader: _Reader
) -> None:
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
            result.findings.append(Finding("ema_poisoned", tensor.label, text, 1))


_End = tuple[str, str, tuple[int, ...]]


def _ends(tensor: StoredTensor, name: str) -> list[_End]:
    """All ends of ``name``, the longest first and without dots (an average's name often has none),
    with what else must be the same of an average and its weight."""
    parts = name.split(".")[-MOST_PARTS:]
    return [(tensor.part, "".join(parts[n:]), tensor.shape) for n in range(len(parts))]


def _behind_ema(name: str) -> str:
    found = _EMA.search(name)
    return name[found.end() :] if found else ""


# Adam's moments, by the names that torch gives them in an optimizer's state.


def _check_moments(
    result: CheckResult, checkpoint: Checkpoint, tensors: Sequence[StoredTensor], reader: _Reader
) -> None:
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
            result.findings.append(Finding("negative_moment", name, text, found.negative))
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
            result.findings.append(Finding("frozen_moment", name, text, tensor.count))


def _check_vanished(
    result: CheckResult,
    first: StoredTensor,
    second: StoredTensor,
    epsilon: float | None,
    reader: _Reader,
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
        result.findings.append(Finding("vanished_moment", second.label, text, large))
    elif gone:
        result.notes.append(
            f"{second.label}: {gone:,} of {second.count:,} second moments are zero where the first "
            "is not; eps bounds their updates."
        )
