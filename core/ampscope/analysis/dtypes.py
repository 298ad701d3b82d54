"""Which dtype each module's weights, activations and gradients have, and how a tree of them folds.

Frames know the dtype in which values really flowed; ops know in which dtype a module computed:

    encoder.0.linear   weights fp32 · activation fp16 · gradient fp16 · weight gradient fp32
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.arithmetic import computes
from ampscope.formats import FORMATS
from ampscope.records import Frame, ModuleRecord, OpRecord, Role

HALF_BITS = 16  # fp16 and bf16; the fp8 formats are narrower still


@dataclass(frozen=True, slots=True)
class ModuleDtypes:
    """One module: dtypes by what they hold, and what its own ops did in the chosen phases.

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
        return depth_of(self.path)


def depth_of(path: str) -> int:
    """0 for the root, 1 for its children."""
    return 0 if not path else path.count(".") + 1


def is_half(dtype: str) -> bool:
    """True for the floating-point formats of at most 16 bits."""
    fmt = FORMATS.get(dtype)
    return fmt is not None and 1 + fmt.exponent_bits + fmt.mantissa_bits <= HALF_BITS


def split(dtypes: str) -> tuple[str, ...]:
    """``"fp16,fp16,fp32"`` or ``"fp16+fp32"`` -> distinct names, sorted."""
    return tuple(sorted({d for d in dtypes.replace("+", ",").split(",") if d}))


def compute_dtype(inputs: str) -> str:
    """The dtype an op computed in: that of its floating-point inputs, ``"mixed"`` when they differ,
    ``""`` when it has none."""
    floats = [d for d in split(inputs) if d in FORMATS]
    return "" if not floats else floats[0] if len(floats) == 1 else "mixed"


def dtypes_by_module(
    modules: Sequence[ModuleRecord], ops: Iterable[OpRecord], frames: Mapping[Role, Frame]
) -> list[ModuleDtypes]:
    """One row a module, in the order of ``modules``. Filter ``ops`` by phase beforehand."""
    held = {role: _held(frame) for role, frame in frames.items()}
    own: dict[int, list[OpRecord]] = defaultdict(list)
    for op in ops:
        own[op.module].append(op)
    return [_row(record, own[record.index], held) for record in modules]


def fold(rows: Sequence[ModuleDtypes], max_depth: int) -> list[ModuleDtypes]:
    """Rows down to ``max_depth``; what lies deeper is merged into its ancestor at that depth."""
    kept: dict[str, ModuleDtypes] = {}
    deeper: dict[str, list[ModuleDtypes]] = defaultdict(list)
    for row in rows:
        if row.depth <= max_depth:
            kept[row.path] = row
        else:
            deeper[".".join(row.path.split(".")[:max_depth])].append(row)
    return [_merge(row, deeper.get(path, ())) for path, row in kept.items()]


def parameters_by_dtype(modules: Sequence[ModuleRecord]) -> list[tuple[str, int]]:
    """(dtype, number of parameters), most first. Shared parameters count once, with their owner;
    a module with several dtypes is listed under both names joined by ``+``."""
    counts: dict[str, int] = defaultdict(int)
    for record in modules:
        if record.parameter_count and not record.shared_with:
            counts["+".join(split(record.weight_dtypes)) or "?"] += record.parameter_count
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _held(frame: Frame) -> dict[int, tuple[str, ...]]:
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


def _merge(row: ModuleDtypes, below: Sequence[ModuleDtypes]) -> ModuleDtypes:
    if not below:
        return row
    parts = (row, *below)

    def union(name: str) -> tuple[str, ...]:
        return tuple(sorted({dtype for part in parts for dtype in getattr(part, name)}))

    return replace(
        row,
        parameter_count=sum(p.parameter_count for p in parts),
        weights=union("weights"),
        activations=union("activations"),
        grad_outputs=union("grad_outputs"),
        weight_grads=union("weight_grads"),
        computed_in=union("computed_in"),
        op_count=sum(p.op_count for p in parts),
        cast_count=sum(p.cast_count for p in parts),
        flops=sum(p.flops for p in parts),
        half_flops=sum(p.half_flops for p in parts),
        folded=len(below),
    )
