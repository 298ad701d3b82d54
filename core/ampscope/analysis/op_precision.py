"""In which precision one step's recorded ops computed: by module, and of the whole step.

Four questions of a page: which dtypes each module holds and computes in
(:func:`dtypes_by_module`), which ops stayed in fp32 and why (:func:`fp32_ops`), where dtypes are
converted (:func:`cast_sites`), and how many FLOPs ran in which dtype (:func:`flop_share`).

    encoder.0.linear   weights fp32 · activation fp16 · gradient fp16 · weight gradient fp32
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampscope.numerics.formats import FORMATS
from ampscope.records import Frame, ModuleRecord, OpRecord, Role

HALF_BITS = 16  # fp16 and bf16; the fp8 formats are narrower still
SCALER_PREFIX = "_amp_"  # GradScaler's own kernels: no part of the model
# Ops that only name, shape, allocate or copy memory: they compute nothing, whatever their dtype.
# The views are those of torch's own list (pytorch.org/docs/stable/tensor_view.html).
NO_ARITHMETIC = frozenset(
    [
        "_reshape_alias", "_reshape_copy", "_to_copy", "_unsafe_view", "alias",
        "as_strided", "chunk", "clone", "contiguous", "copy_", "detach", "diagonal",
        "empty", "empty_like", "expand", "expand_as", "fill_", "full", "full_like",
        "lift_fresh", "movedim", "narrow", "new_empty", "new_empty_strided", "new_zeros",
        "ones", "ones_like", "permute", "reshape", "select", "slice", "split",
        "split_with_sizes", "squeeze", "swapaxes", "t", "transpose", "unbind", "unfold",
        "unsqueeze", "view", "view_as", "zero_", "zeros", "zeros_like",
    ]
)  # fmt: skip
# The lists of torch's autocast (policy/autocast_lists), by what they do to an op.
_REASON_OF_LIST = {
    "fp32": "fp32_list",
    "fp32_set_opt_dtype": "fp32_list",
    "fp32_append_dtype": "fp32_list",
    "promote": "promoted",
    "lower_precision_fp": "not_cast",
}


@dataclass(frozen=True, slots=True)
class ModuleDtypes:
    """One module: dtypes by what they hold, and what its own ops did in the chosen phases.

    Frames know the dtype in which values really flowed; ops know in which dtype a module computed.
    An empty tuple means that nothing of the kind was recorded. ``folded`` counts the modules below
    that were merged into this row.
    """

    module: int
    path: str
    type: str
    parameter_count: int
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    grad_outputs: tuple[str, ...]
    weight_grads: tuple[str, ...]
    computed_in: tuple[str, ...]
    op_count: int
    cast_count: int
    flops: int
    half_flops: int
    folded: int = 0

    @property
    def depth(self) -> int:
        """0 for the root, 1 for its children."""
        return 0 if not self.path else self.path.count(".") + 1


def dtypes_by_module(
    modules: Sequence[ModuleRecord], ops: Iterable[OpRecord], frames: Mapping[Role, Frame]
) -> list[ModuleDtypes]:
    """One row per module, in the order of ``modules``. Filter ``ops`` by phase beforehand."""
    held = {role: recorded_dtypes(frame) for role, frame in frames.items()}
    own: dict[int, list[OpRecord]] = defaultdict(list)
    for op in ops:
        own[op.module].append(op)
    return [_row(record, own[record.index], held) for record in modules]


def recorded_dtypes(frame: Frame) -> dict[int, tuple[str, ...]]:
    """Module -> dtypes of its rows."""
    found: dict[int, set[str]] = defaultdict(set)
    for module, dtype in zip(frame.modules, frame.dtypes, strict=True):
        found[module].add(dtype)
    return {module: tuple(sorted(dtypes)) for module, dtypes in found.items()}


def _row(
    record: ModuleRecord,
    ops: Sequence[OpRecord],
    held: Mapping[Role, Mapping[int, tuple[str, ...]]],
) -> ModuleDtypes:
    def dtypes_of(role: Role) -> tuple[str, ...]:
        return held.get(role, {}).get(record.index, ())

    computing = [op for op in ops if computes(op)]
    # The optimizer computes in the weights' dtype; that says nothing on the layer, so it counts
    # only where nothing else is asked about.
    layer = [op for op in computing if op.phase != "step"] or computing
    computed = {compute_dtype(op.inputs) for op in layer} - {""}
    return ModuleDtypes(
        module=record.index,
        path=record.path,
        type=record.type,
        parameter_count=record.parameter_count,
        weights=split(record.weight_dtypes),
        activations=dtypes_of(Role.ACTIVATION),
        grad_outputs=dtypes_of(Role.GRAD_OUTPUT),
        weight_grads=dtypes_of(Role.WEIGHT_GRAD),
        computed_in=tuple(sorted(computed)),
        op_count=sum(op.count for op in ops if not op.is_cast),
        cast_count=sum(op.count for op in ops if op.is_cast),
        flops=sum(op.flops for op in ops),
        half_flops=sum(op.flops for op in ops if is_half(compute_dtype(op.inputs))),
    )


def fold(rows: Sequence[ModuleDtypes], max_depth: int) -> list[ModuleDtypes]:
    """Rows down to ``max_depth``; what lies deeper is merged into its ancestor at that depth."""
    kept: dict[str, ModuleDtypes] = {}
    deeper: dict[str, list[ModuleDtypes]] = defaultdict(list)
    for row in rows:
        if row.depth <= max_depth:
            kept[row.path] = row
        else:
            deeper[".".join(row.path.split(".")[:max_depth])].append(row)
    return [_merged(row, deeper[path]) if path in deeper else row for path, row in kept.items()]


def _merged(row: ModuleDtypes, below: Sequence[ModuleDtypes]) -> ModuleDtypes:
    parts = (row, *below)
    merged: dict[str, Any] = {}
    for name in ("parameter_count", "op_count", "cast_count", "flops", "half_flops"):
        merged[name] = sum(getattr(p, name) for p in parts)
    for name in ("weights", "activations", "grad_outputs", "weight_grads", "computed_in"):
        merged[name] = tuple(sorted({dtype for p in parts for dtype in getattr(p, name)}))
    return replace(row, folded=len(below), **merged)


def parameters_by_dtype(modules: Sequence[ModuleRecord]) -> list[tuple[str, int]]:
    """(dtype, number of parameters), most first. Shared parameters count once, with their owner;
    a module with several dtypes is listed under both names joined by ``+``."""
    counts: dict[str, int] = defaultdict(int)
    for record in modules:
        if record.parameter_count and not record.shared_with:
            counts["+".join(split(record.weight_dtypes)) or "?"] += record.parameter_count
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@dataclass(frozen=True, slots=True)
class ModulesByPrecision:
    """Modules with forward ops of their own, by the dtypes in which these ops computed."""

    fp32: tuple[int, ...]
    half: tuple[int, ...]
    both: tuple[int, ...]

    @property
    def total(self) -> int:
        """Modules that computed anything."""
        return len(self.fp32) + len(self.half) + len(self.both)


def modules_by_precision(ops: Iterable[OpRecord]) -> ModulesByPrecision:
    """Sort the modules that computed anything in the forward pass."""
    seen: dict[int, set[bool]] = defaultdict(set)
    for op in ops:
        if op.phase == "forward" and computes(op) and (dtype := compute_dtype(op.inputs)):
            seen[op.module].update({True, False} if dtype == "mixed" else {is_half(dtype)})

    def having(*kinds: bool) -> tuple[int, ...]:
        return tuple(sorted(m for m, found in seen.items() if found == set(kinds)))

    return ModulesByPrecision(fp32=having(False), half=having(True), both=having(True, False))


@dataclass(frozen=True, slots=True)
class Fp32Op:
    """One op that computed in fp32 in the forward pass, over all modules that ran it.

    Autocast decides in the forward pass, op by op; the backward of an op follows its forward. So
    only forward ops are judged. ``reason`` is one of these:

        fp32_list     its list asks for fp32 (exp, log, losses, norms)
        promoted      its list takes the widest dtype among its inputs
        not_cast      its list asks for half, yet it ran in fp32: autocast was off there
        follows       it stands in no list and runs in the dtype of its inputs, which were fp32
    """

    op: str
    autocast_list: str | None
    reason: str
    count: int
    modules: tuple[int, ...]


def fp32_ops(ops: Iterable[OpRecord], list_of: Callable[[str], str | None]) -> list[Fp32Op]:
    """Forward ops that computed in fp32, most calls first. ``list_of`` names an op's list."""
    own: dict[str, list[OpRecord]] = defaultdict(list)
    for op in ops:
        is_wide = compute_dtype(op.inputs) in ("fp32", "fp64", "mixed")
        if op.phase == "forward" and computes(op) and is_wide:
            own[op.op].append(op)
    found = []
    for name, calls in own.items():
        reason = _REASON_OF_LIST.get(list_of(name) or "", "follows")
        modules = tuple(sorted({op.module for op in calls}))
        found.append(Fp32Op(name, list_of(name), reason, sum(op.count for op in calls), modules))
    return sorted(found, key=lambda f: (-f.count, f.op))


@dataclass(frozen=True, slots=True)
class CastSite:
    """Casts of one kind in one module and phase of one step. Every cast reads and writes a whole
    tensor, so a model that casts back and forth pays in bandwidth what it saves in arithmetic."""

    module: int
    phase: str
    source: str
    target: str
    count: int


def cast_sites(ops: Iterable[OpRecord]) -> list[CastSite]:
    """Most casts first, then by module."""
    counts: dict[tuple[int, str, str, str], int] = defaultdict(int)
    for op in ops:
        if op.is_cast:
            counts[op.module, op.phase, op.inputs or "?", op.outputs or "?"] += op.count
    sites = [CastSite(*key, count) for key, count in counts.items()]
    return sorted(sites, key=lambda s: (-s.count, s.module, s.phase, s.source, s.target))


def cast_kinds(sites: Iterable[CastSite]) -> list[tuple[str, str, int]]:
    """(from, to, count) over all modules, most first."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for site in sites:
        counts[site.source, site.target] += site.count
    return sorted(((*key, n) for key, n in counts.items()), key=lambda kind: (-kind[2], kind[:2]))


@dataclass(frozen=True, slots=True)
class FlopShare:
    """FLOPs by dtype, most first; of one module, of a step or of a run.

    Only ops that have a FLOP formula count (matmuls, convolutions, attention): they are what
    Tensor Cores speed up. An op belongs to the dtype of its floating-point inputs.
    """

    by_dtype: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """FLOPs in every dtype."""
        return sum(n for _, n in self.by_dtype)

    @property
    def half(self) -> int:
        """FLOPs in fp16, bf16 and narrower formats."""
        return sum(n for dtype, n in self.by_dtype if is_half(dtype))

    @property
    def half_share(self) -> float | None:
        """0 … 1, or None when nothing with a FLOP formula ran."""
        return self.half / self.total if self.total else None


def flop_share(ops: Iterable[OpRecord]) -> FlopShare:
    """FLOPs of all ``ops``."""
    counts: dict[str, int] = defaultdict(int)
    for op in ops:
        if op.flops:
            counts[compute_dtype(op.inputs) or "other"] += op.flops
    return FlopShare(tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def flops_by_module(ops: Iterable[OpRecord]) -> list[tuple[int, FlopShare]]:
    """(module, its share), the modules with most FLOPs first; modules without any are left out."""
    own: dict[int, list[OpRecord]] = defaultdict(list)
    for op in ops:
        if op.flops:
            own[op.module].append(op)
    shares = [(module, flop_share(found)) for module, found in own.items()]
    return sorted(shares, key=lambda item: (-item[1].total, item[0]))


def computes(op: OpRecord) -> bool:
    """True for an op that does arithmetic of the model. A trace below autograd is full of views: of
    the 461 forward calls that the tiny GPT makes in fp32 under fp16 autocast, 420 are `view` and
    `detach`. Their dtype says nothing on precision."""
    name = op.op.rpartition(".")[2]
    return not (op.is_cast or name.startswith(SCALER_PREFIX) or name in NO_ARITHMETIC)


def compute_dtype(inputs: str) -> str:
    """The dtype an op computed in: that of its floating-point inputs, ``"mixed"`` when they differ,
    ``""`` when it has none."""
    floats = [d for d in split(inputs) if d in FORMATS]
    return "" if not floats else floats[0] if len(floats) == 1 else "mixed"


def is_half(dtype: str) -> bool:
    """True for the floating-point formats of at most 16 bits."""
    fmt = FORMATS.get(dtype)
    return fmt is not None and 1 + fmt.exponent_bits + fmt.mantissa_bits <= HALF_BITS


def split(dtypes: str) -> tuple[str, ...]:
    """``"fp16,fp16,fp32"`` or ``"fp16+fp32"`` -> distinct names, sorted."""
    return tuple(sorted({d for d in dtypes.replace("+", ",").split(",") if d}))
