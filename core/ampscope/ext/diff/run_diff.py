"""Where one run first computes other numbers than another, and what may explain it.

Both runs left digests of their tensors (:class:`ampscope.observations.Digests`), and one of them
was repeated. What repeats of the same run differ by is noise; the first tensor, in the order in
which a step computes, that differs by more is the first difference::

    start (weights)  input  activation  loss  gradient  buffer  weight  state

A distance is relative: the 2-norm of the difference over the larger 2-norm. It does not depend on
dtypes: an activation in fp16 is held against the same module's in fp32, and its distance is then
about a rounding of fp16. Ops are aligned by module and name with the casts left out.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np

from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_ZERO
from ampscope.observations import (
    Digests,
    DtypeEntry,
    Observation,
    OptimizerStep,
    Outcome,
    Surroundings,
)
from ampscope.records import Frame, ModuleRecord, Role

ROLES = ("start", "input", "activation", "loss", "gradient", "buffer", "weight", "state")
_BEFORE_OPS = frozenset({"start", "input"})
NOISE_FACTOR = 8.0  # times the largest distance of repeats so far; they are few
BLIND = 0.5  # from here on noise is as large as the numbers
UNREPEATED = 0.01  # distance of repeats in what no op computed yet: weights at the start, inputs
ROUNDINGS = 64.0  # of the coarsest format so far: what rounding explains over a few steps
SMALLEST = 1e-17  # a distance that only the bits show
SAME_NORM = 1e-3  # relative
TAIL = 0.2  # the last fifth of the losses says where a run ended
MOST_OPS = 6_000
_CASTS = frozenset({"_to_copy", "copy_", "clone"})
_ROLES_OF_FRAMES = {
    Role.ACTIVATION: "activation",
    Role.WEIGHT_GRAD: "gradient",
    Role.WEIGHT: "weight",
}
_Key = tuple[str, int]  # name, and how often it came before in this step


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What is known of one tensor at one step; ``sketch`` is linear in its elements."""

    dtype: str
    total: int
    checksum: str
    norm: float
    nonfinite: int
    sketch: np.ndarray
    op: str = ""
    line: str = ""
    counts: bool = False  # the sketch is a histogram: its distance is a share of the elements


@dataclass(frozen=True, slots=True)
class TensorValues:
    """One run's tensors by step and role, in order."""

    rows: dict[tuple[int, str], dict[_Key, Held]]
    steps: tuple[int, ...]
    losses: tuple[float | None, ...]
    ledger: tuple[DtypeEntry, ...] = ()
    around: dict[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    def row(self, step: int, role: str) -> dict[_Key, Held]:
        """Empty where nothing was recorded."""
        return self.rows.get((step, role), {})


@dataclass(frozen=True, slots=True)
class OpDifference:
    """The first op that gave something else, or that only one of the runs made."""

    op: str  # of A, "" where only B has it
    other: str
    module: str
    line: str
    other_line: str
    backward: bool
    distance: float | None
    before: OpDifference | None = None  # one run alone makes it, earlier in the same module


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that both runs have and that differs by more than ``allowed``."""

    step: int
    role: str
    name: str
    other_name: str
    module: str
    dtypes: tuple[str, str]
    distance: float  # relative; infinite where one is not finite and the other is
    allowed: float
    roundings: float | None  # the distance in roundings of the coarser of both formats
    op: OpDifference | None = None


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A tensor whose dtype is not the same in both runs; None: this run has no such tensor."""

    kind: str
    name: str
    first: DtypeEntry | None
    second: DtypeEntry | None


@dataclass(frozen=True, slots=True)
class DifferentSetting:
    """Something around the runs that is not the same; "" where it is not set."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class LossGap:
    """The mean loss over the last fifth of the common steps, and how far runs with other seeds lie
    apart there."""

    steps: int
    first: float
    second: float
    first_step: int | None  # at which the losses are not the same number
    between_seeds: float | None  # largest less smallest; None without such runs
    seeds: int = 0


@dataclass(frozen=True, slots=True)
class NoiseLevel:
    """How far repeats of the same run lie apart."""

    repeats: int
    largest: float  # 0: they are the same bit for bit
    first_step: int | None = None
    first_name: str = ""


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Two runs against each other. ``verdict``: same, different, unknown (``reason`` says why)."""

    verdict: str
    reason: str
    first: Difference | None
    beyond_rounding: Difference | None
    noise: NoiseLevel
    steps: int  # of both
    tensors: int  # that were compared
    blind_from: int | None  # step from which noise hides everything
    ledger: tuple[LedgerRow, ...]
    settings: tuple[DifferentSetting, ...]
    loss: LossGap | None
    only_first: tuple[str, ...]  # modules
    only_second: tuple[str, ...]


def values_of(observations: Sequence[Observation]) -> TensorValues:
    """What a run's observations hold for a comparison."""
    rows: dict[tuple[int, str], dict[_Key, Held]] = {}
    steps = [o for o in observations if isinstance(o, OptimizerStep)]
    for record in observations:
        if isinstance(record, Digests):
            row = rows.setdefault((record.step, record.role), {})
            for key, held in _entries(record):
                row[key] = held
    for step in steps:
        if step.loss is not None:
            rows[step.step, "loss"] = {("loss", 0): _number(step.loss)}
    around = [o for o in observations if isinstance(o, Surroundings)]
    outcomes = [o for o in observations if isinstance(o, Outcome)]
    return TensorValues(
        rows,
        tuple(a.step for a in steps),
        tuple(a.loss for a in steps),
        tuple(o for o in observations if isinstance(o, DtypeEntry)),
        dict(zip(around[-1].names, around[-1].values, strict=False)) if around else {},
        outcomes[-1] if outcomes else None,
    )


def with_histograms(
    values: TensorValues, modules: Sequence[ModuleRecord], frames: Sequence[Frame]
) -> TensorValues:
    """The values of a run without digests: its exponent histograms, one row a module, stand in."""
    paths = {m.index: m.path for m in modules}
    rows = dict(values.rows)
    for frame in frames:
        role = _ROLES_OF_FRAMES.get(frame.role)
        if role is None or frame.scale != 1:  # bins of two loss scales are not the same numbers
            continue
        row = rows.setdefault((frame.step, role), {})
        for index, dtype, counts in zip(frame.modules, frame.dtypes, frame.rows, strict=True):
            total, bad = int(counts.sum()), int(counts[NAN : NEG_INF + 1].sum())
            text = f"{hash(counts.tobytes()) & (2**64 - 1):016x}"
            key = paths.get(index, str(index)), 0
            sketch = counts.astype(float)
            row[key] = Held(dtype, total, text, float(total), bad, sketch, counts=True)
    return replace(values, rows=rows)


def _entries(record: Digests) -> Iterator[tuple[_Key, Held]]:
    seen: Counter[str] = Counter()
    columns = (record.dtypes, record.totals, record.checksums, record.norms, record.nonfinite)
    count = len(record.names)
    ops = record.ops if len(record.ops) == count else ("",) * count
    lines = record.lines if len(record.lines) == count else ("",) * count
    places = zip(record.names, *columns, record.sketches, ops, lines, strict=False)
    for name, dtype, total, checksum, norm, bad, sketch, op, line in places:
        key = name, seen[name]
        seen[name] += 1
        text = f"{checksum} {record.scale:g}" if record.scale != 1 else checksum
        yield key, Held(dtype, total, text, norm, bad, _unpacked(sketch), op, line)


def _unpacked(sketch: str) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(sketch, validate=True), "<f8")
    except (ValueError, binascii.Error):  # of an imported run
        return np.zeros(0)


def _number(value: float) -> Held:
    finite = math.isfinite(value)
    sketch = np.array([value if finite else 0.0])
    return Held("number", 1, repr(value), abs(float(sketch[0])), int(not finite), sketch)


def distance(one: Held, other: Held) -> float:
    """Relative; 0 for the same numbers, infinite where another number of elements is not finite or
    the sizes differ."""
    if one.dtype == other.dtype and one.checksum == other.checksum:
        return 0.0
    if one.nonfinite != other.nonfinite or len(one.sketch) != len(other.sketch):
        return math.inf
    if one.counts:
        return _share_moved(one, other)
    if one.total != other.total:
        return math.inf
    largest = max(one.norm, other.norm)
    apart = float(np.linalg.norm(one.sketch - other.sketch))
    found = apart / largest if largest else 0.0
    if not math.isfinite(found):
        return math.inf
    if one.dtype != other.dtype:
        return found if found > 1e-12 else 0.0  # the sums' own rounding
    return max(found, SMALLEST)


def _share_moved(one: Held, other: Held) -> float:
    """Of two histograms: the share of elements that lie in another bin."""
    if one.total != other.total:
        return math.inf
    apart = one.sketch - other.sketch
    apart[POS_ZERO] += apart[NEG_ZERO]  # the same number
    apart[NEG_ZERO] = 0
    return float(np.abs(apart).sum()) / 2 / max(one.total, 1)


def paired(first: dict[_Key, Held], second: dict[_Key, Held]) -> list[tuple[_Key, _Key]]:
    """The tensors that both rows have, in the order of the first: by name; what is left over, as
    after a module was renamed, by its place, where number and sizes agree."""
    both = [(key, key) for key in first if key in second]
    left = [key for key in first if key not in second]
    right = [key for key in second if key not in first]
    sizes = [first[key].total for key in left], [second[key].total for key in right]
    if left and sizes[0] == sizes[1]:
        renamed = dict(zip(left, right, strict=True))
        return [(key, renamed.get(key, key)) for key in first]
    return both


class Noise:
    """How far repeats of one run lie apart, by role and step: a step of the optimizer enlarges what
    was a last bit in the activations before it."""

    def __init__(self, repeats: Sequence[TensorValues]) -> None:
        self._by_role: dict[str, dict[int, float]] = {role: {} for role in ROLES}
        self.first_name = ""
        self.starts_alike = True  # what no op computed yet is the same in all repeats
        for one, other in combinations(repeats, 2):
            self._compare(one, other)
        noisy = [(step, d) for row in self._by_role.values() for step, d in row.items() if d > 0]
        first = min((step for step, _ in noisy), default=None)
        largest = max((d for _, d in noisy), default=0.0)
        self.level = NoiseLevel(len(repeats), largest, first, self.first_name)

    def _compare(self, one: TensorValues, other: TensorValues) -> None:
        for step in sorted(set(one.steps) & set(other.steps)):
            for role in ROLES:
                row, beside = one.row(step, role), other.row(step, role)
                for key, its in paired(row, beside):
                    found = distance(row[key], beside[its])
                    if found > 0 and not self.first_name:
                        self.first_name = key[0]
                    if role in _BEFORE_OPS and step == 0 and found > UNREPEATED:
                        self.starts_alike = False
                    known = self._by_role[role]
                    known[step] = max(known.get(step, 0.0), found)

    def floor(self, step: int, role: str) -> float:
        """The largest distance of this role up to this step; before the first that is noisy, as
        large as there: where noise begins is chance. Activations' noise reaches all that is made
        from them, also a loss that a few repeats happen to round alike."""
        roles = {role} if role in _BEFORE_OPS else {role, "activation"}
        return max(self._largest(one, step) for one in roles)

    def _largest(self, role: str, step: int) -> float:
        known = self._by_role[role]
        first = min((at for at, found in known.items() if found > 0), default=None)
        if first is None:
            return 0.0
        return max(found for at, found in known.items() if at <= max(step, first))


def compared(
    first: Sequence[TensorValues],
    second: Sequence[TensorValues],
    *,
    seeds: Sequence[TensorValues] = (),
    tolerance: float = 0.0,
    allow_rounding: bool = False,
) -> RunDiff:
    """Repeats of A against the runs of B; a difference counts where each run of B differs from
    each repeat of A by more than ``tolerance`` and the noise. ``seeds`` are runs of A with other
    seeds. ``allow_rounding``: what rounding to the formats in use explains is no difference."""
    noise = Noise(first)
    found = _search(first, second, noise, tolerance)
    wanted = found.beyond if allow_rounding else found.first
    one, other = first[0], second[0]
    modules = _modules(one), _modules(other)
    result = RunDiff(
        verdict="same",
        reason="",
        first=wanted,
        beyond_rounding=found.beyond,
        noise=noise.level,
        steps=len(set(one.steps) & set(other.steps)),
        tensors=found.tensors,
        blind_from=found.blind_from,
        ledger=tuple(ledger_rows(one, other)),
        settings=tuple(_settings(one, other)),
        loss=_loss(one, other, seeds),
        only_first=tuple(m for m in modules[0] if m not in set(modules[1])),
        only_second=tuple(m for m in modules[1] if m not in set(modules[0])),
    )
    verdict, reason = _verdict(result, one, other, noise)
    return replace(result, verdict=verdict, reason=reason)


def _verdict(
    found: RunDiff, one: TensorValues, other: TensorValues, noise: Noise
) -> tuple[str, str]:
    failed = _failure("A", one) or _failure("B", other)
    if failed:
        return "unknown", failed
    if not noise.starts_alike:
        what = "a weight or an input differs between its repeats before any op has run"
        return "unknown", f"A does not repeat itself: {what}. Set its seeds."
    if found.first is not None:
        return "different", ""
    if not found.steps:
        return "unknown", "The runs have no optimizer step in common."
    if not found.tensors:
        return "unknown", "The runs have no tensor of the same name and size in common."
    if found.blind_from is not None and found.blind_from == min(one.steps, default=0):
        return "unknown", "Noise between repeats of A is as large as the numbers from the start on."
    if len(one.steps) != len(other.steps) and _ended(one) and _ended(other):
        counts = f"A makes {len(one.steps)} optimizer steps, B {len(other.steps)}"
        return "different", f"{counts}; those of both are the same."
    parts = [m for m in (*found.only_first, *found.only_second) if m in _with_weights(one, other)]
    if parts:
        return "unknown", (
            f"Only one of the runs has {parts[0]}, with weights of its own; what both have is the "
            "same within noise."
        )
    return "same", ""


def _failure(name: str, run: TensorValues) -> str:
    outcome = run.outcome
    if outcome is None:
        return "" if run.steps else f"{name} recorded no optimizer step."
    if outcome.ended == "exception":
        where = f" at {outcome.error_line}" if outcome.error_line else ""
        return f"{name} failed: {outcome.error_type}{where}: {outcome.error_text[:200]}"
    if outcome.ended == "exit" and outcome.exit_code:
        return f"{name} failed: it exited with status {outcome.exit_code}."
    if outcome.ended == "killed":
        return f"{name} was killed, or ran into its time limit."
    if not run.steps:
        return f"{name} made no optimizer step."
    return ""


def _ended(run: TensorValues) -> bool:
    return run.outcome is not None and run.outcome.ended in ("returned", "exit")


@dataclass(slots=True)
class _Found:
    first: Difference | None = None
    beyond: Difference | None = None
    tensors: int = 0
    blind_from: int | None = None


def _search(
    first: Sequence[TensorValues], second: Sequence[TensorValues], noise: Noise, tolerance: float
) -> _Found:
    one, other = first[0], second[0]
    found = _Found()
    coarsest = 0.0
    for step in sorted(set(one.steps) & set(other.steps)):
        if NOISE_FACTOR * noise.floor(step, _telling(one, step)) >= BLIND:
            found.blind_from = step
            break
        for role in ROLES:
            allowed = max(NOISE_FACTOR * noise.floor(step, role), tolerance)
            rows = [run.row(step, role) for run in first], [run.row(step, role) for run in second]
            for key, its in paired(rows[0][0], rows[1][0]):
                found.tensors += 1
                held = rows[0][0][key], rows[1][0][its]
                coarsest = max(coarsest, *(_epsilon(h.dtype) for h in held))
                apart = min(
                    distance(a[key], b[its])
                    for a in rows[0]
                    if key in a
                    for b in rows[1]
                    if its in b
                )
                if apart <= allowed:
                    continue
                made = _difference(step, role, key, its, held, apart, allowed)
                if found.first is None:
                    found.first = _with_op(made, one, other, allowed)
                if found.beyond is None and apart > ROUNDINGS * coarsest:
                    found.beyond = _with_op(made, one, other, max(allowed, ROUNDINGS * coarsest))
            if found.beyond is not None:
                return found
    return found


def first_output(
    one: TensorValues, other: TensorValues, last_step: int, allowed: float
) -> Difference | None:
    """The first module, up to a step, whose output differs by more than ``allowed``, where outputs
    were read inside compiled code. What is read there is a module's last tensor, not what it
    returns: one of another size, or with the same numbers in another order, says nothing."""
    for step in sorted(set(one.steps) & set(other.steps)):
        row, beside = one.row(step, "activation"), other.row(step, "activation")
        for key, held in row.items() if step <= last_step else ():
            its = beside.get(key)
            if its is None or its.total != held.total:
                continue
            apart = distance(held, its)
            same_norm = abs(held.norm - its.norm) <= SAME_NORM * max(held.norm, its.norm)
            if apart > allowed and not (apart > BLIND and same_norm):
                return _difference(step, "activation", key, key, (held, its), apart, allowed)
    return None


def _telling(run: TensorValues, step: int) -> str:
    """The role whose noise says whether anything can still be told."""
    return next((r for r in ("activation", "gradient") if run.row(step, r)), "loss")


def _difference(
    step: int,
    role: str,
    key: _Key,
    its: _Key,
    held: tuple[Held, Held],
    apart: float,
    allowed: float,
) -> Difference:
    formats = [e for h in held if (e := _epsilon(h.dtype))]
    return Difference(
        step=step,
        role=role,
        name=key[0],
        other_name=its[0],
        module=_module_of(role, key[0]),
        dtypes=(held[0].dtype, held[1].dtype),
        distance=apart,
        allowed=allowed,
        roundings=apart / max(formats) if formats and math.isfinite(apart) else None,
    )


def _module_of(role: str, name: str) -> str:
    """The module of an activation is its name, that of a parameter what stands before its own."""
    if role in ("activation", "loss", "input"):
        return "" if role != "activation" else name
    return name.partition(": ")[0].rpartition(".")[0]


def _epsilon(dtype: str) -> float:
    known = FORMATS.get(dtype.partition(" ")[0])
    return 0.0 if known is None else known.epsilon


def _with_op(
    made: Difference, one: TensorValues, other: TensorValues, allowed: float
) -> Difference:
    """With the op that the difference begins with, where ops of this step were recorded."""
    if made.role in ("activation", "loss", "buffer"):
        op = first_op(one.row(made.step, "op"), other.row(made.step, "op"), allowed)
    elif made.role == "gradient":
        rows = one.row(made.step, "backward_op"), other.row(made.step, "backward_op")
        op = first_op(*rows, allowed, backward=True)
    else:
        return made
    if op is None:
        return made
    inside = made.role in ("activation", "gradient") and op.module
    return replace(made, op=op, module=op.module if inside else made.module)


def first_op(
    first: dict[_Key, Held], second: dict[_Key, Held], allowed: float, *, backward: bool = False
) -> OpDifference | None:
    """The first op, in the order in which they ran, whose result differs by more than ``allowed``;
    or the ops that only one run made, where the difference begins right behind them."""
    ours, theirs = _computing(first), _computing(second)
    if not ours or not theirs:
        return None
    matcher = SequenceMatcher(
        None, [(k[0], _name(h)) for k, h in ours], [(k[0], _name(h)) for k, h in theirs], False
    )
    structural: OpDifference | None = None  # right before the op that is looked at
    earliest: OpDifference | None = None
    latest: dict[str, OpDifference] = {}  # by module
    for tag, start, end, begin, stop in matcher.get_opcodes():
        if tag != "equal":
            pair = ours[start] if start < end else None, theirs[begin] if begin < stop else None
            structural = _op_difference(*pair, None, backward)
            earliest = earliest or structural
            latest[structural.module] = structural
            continue
        for one, other in zip(ours[start:end], theirs[begin:stop], strict=True):
            apart = distance(one[1], other[1])
            if apart > allowed:
                found = _op_difference(one, other, apart, backward)
                return structural or replace(found, before=latest.get(found.module))
            structural = None
    return structural or earliest


def _computing(row: dict[_Key, Held]) -> list[tuple[_Key, Held]]:
    kept = [(key, held) for key, held in row.items() if _name(held) not in _CASTS]
    return kept[:MOST_OPS]


def _name(held: Held) -> str:
    return held.op.partition("(")[0]


def _op_difference(
    one: tuple[_Key, Held] | None,
    other: tuple[_Key, Held] | None,
    apart: float | None,
    backward: bool,
) -> OpDifference:
    (key, held), (its, beside) = one or (("", 0), None), other or (("", 0), None)
    return OpDifference(
        op="" if held is None else held.op,
        other="" if beside is None else beside.op,
        module=key[0] or its[0],
        line="" if held is None else held.line,
        other_line="" if beside is None else beside.line,
        backward=backward,
        distance=apart,
    )


def ledger_rows(one: TensorValues, other: TensorValues) -> list[LedgerRow]:
    """Tensors whose last dtype is not the same in both runs, or that only one has."""
    sides = [{(e.kind, e.name): e for e in run.ledger} for run in (one, other)]
    if not all(sides):
        return []
    keys = dict.fromkeys((*sides[0], *sides[1]))
    rows = [LedgerRow(*key, sides[0].get(key), sides[1].get(key)) for key in keys]
    return [r for r in rows if _dtype(r.first) != _dtype(r.second)]


def _dtype(entry: DtypeEntry | None) -> str:
    return "" if entry is None else entry.dtype


def _settings(one: TensorValues, other: TensorValues) -> list[DifferentSetting]:
    names = dict.fromkeys((*one.around, *other.around))
    found = [DifferentSetting(n, one.around.get(n, ""), other.around.get(n, "")) for n in names]
    return [s for s in found if s.first != s.second]


def _modules(run: TensorValues) -> list[str]:
    rows = [row for (_, role), row in run.rows.items() if role == "activation"]
    return list(dict.fromkeys(name for row in rows for name, _ in row))


def _with_weights(*runs: TensorValues) -> set[str]:
    return {e.name.rpartition(".")[0] for run in runs for e in run.ledger if e.kind == "parameter"}


def _loss(one: TensorValues, other: TensorValues, seeds: Sequence[TensorValues]) -> LossGap | None:
    ours, theirs = (dict(zip(run.steps, run.losses, strict=True)) for run in (one, other))
    pairs = [
        (step, a, b)
        for step in sorted(ours.keys() & theirs.keys())
        if (a := ours[step]) is not None and (b := theirs[step]) is not None
    ]
    finite = [(s, a, b) for s, a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if not finite:
        return None
    last = finite[-max(1, int(TAIL * len(finite))) :]
    steps = [step for step, _, _ in last]
    by_seed: list[float] = []
    for run in seeds:
        known = dict(zip(run.steps, run.losses, strict=True))
        numbers = [x for s in steps if (x := known.get(s)) is not None and math.isfinite(x)]
        if numbers:
            by_seed.append(_mean(numbers))
    first = _mean([a for _, a, _ in last])
    spread = max((first, *by_seed)) - min((first, *by_seed)) if by_seed else None
    unequal = (step for step, a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b)))
    second = _mean([b for _, _, b in last])
    return LossGap(len(last), first, second, next(unequal, None), spread, len(by_seed))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def ledger_summary(rows: Sequence[LedgerRow]) -> list[tuple[str, str, str, int]]:
    """(kind, dtype in A, dtype in B, how many), most first."""
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for row in rows:
        counts[row.kind, _dtype(row.first), _dtype(row.second)] += 1
    return [(*key, n) for key, n in sorted(counts.items(), key=lambda item: -item[1])]
