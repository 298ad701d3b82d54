"""In which precision a script really computed, over how many steps, and where no half came of it.

    flops  fp16 98 %, fp32 2 %      steps  40, of which 40 beside the fp32 control
    reasons, where nothing ran in half: ("cuda_missing", "autocast", "train.py:12")

Whether a script trained otherwise for want of a CUDA device (:func:`wants_cuda`).

The same question for one step's recorded ops, for pages: dtypes by module, which ops stayed in fp32
and why, where casts happen, FLOPs by dtype.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.numerics.formats import FORMATS
from ampscope.records import Frame, ModuleRecord, OpRecord, Role
from ampscope.script_ends import lacks_cuda, may_want_cuda

MIN_COMPARED = 5  # steps; in fewer, a training that stands still looks like one that learns

_FIXED = "fixed_precision"  # of an op that no control can run in another precision
_MOST_NAMED = 3
_REQUESTS = ("cuda_missing", "trainer_fp16", "cuda_asked", "nullcontext")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why no half precision was used, as far as the script shows it. ``kind``: cuda_missing,
    trainer_fp16, autocast_off, autocast_idle, scaler_off, cuda_asked, nullcontext."""

    kind: str
    what: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionUse:
    """Of one script. ``flops`` by dtype, most first: matmuls, convolutions and attention, forward
    and backward, of all steps."""

    flops: tuple[tuple[str, int], ...]
    half_ops: int  # other ops on half-precision numbers
    steps: int  # optimizer steps that were attempted
    compared: int  # of these, the ones that the fp32 control made as well
    is_recorded: bool  # False of other frameworks, and of runs of older versions
    reasons: tuple[Reason, ...] = ()
    not_judged: tuple[str, ...] = ()  # ops that the control computes in the same fp8 or int8
    has_loss: bool = True  # a loss of the training was seen

    @property
    def total(self) -> int:
        """FLOPs in every dtype."""
        return sum(flops for _, flops in self.flops)

    @property
    def half_share(self) -> float | None:
        """Share of the FLOPs in 16 bits or fewer; None when there were none, or none recorded."""
        return FlopShare(self.flops).half_share

    @property
    def no_half(self) -> bool:
        """Nothing computed in half precision; False where that is not known."""
        return self.is_recorded and not self.half_ops and not self.half_share

    @property
    def apart(self) -> str:
        """What a comparison with the control leaves out, as the end of its sentence; "" where it
        leaves out nothing."""
        if not self.has_loss:
            return ", as far as gradients and weights show: its loss was not seen"
        if not self.not_judged:
            return ""
        named = ", ".join(self.not_judged[:_MOST_NAMED])
        more = f" and {rest} more" if (rest := len(self.not_judged) - _MOST_NAMED) > 0 else ""
        return (
            ", apart from the ops that the control computes in the same fp8, int8 or tensor type "
            f"({named}{more}): not judged"
        )

    @property
    def too_few(self) -> bool:
        """Fewer than :data:`MIN_COMPARED` steps stand beside the control."""
        return self.compared < MIN_COMPARED


def precision_use(baseline: RunView, fp32: RunView | None) -> PrecisionUse:
    """Of the baseline run; the control says how many steps can be compared."""
    outcome = baseline.outcome
    steps = len(baseline.steps)
    is_named = bool(outcome.uses_autocast or outcome.uses_half_model)
    seen = bool(outcome.flop_dtypes or outcome.half_ops)
    is_recorded = outcome.framework == "torch" and outcome.traced_ops > 0 and (seen or not is_named)
    return PrecisionUse(
        flops=tuple(zip(outcome.flop_dtypes, outcome.flop_counts, strict=False)),
        half_ops=outcome.half_ops,
        steps=steps,
        compared=0 if fp32 is None else min(steps, len(fp32.steps)),
        is_recorded=is_recorded,
        has_loss=bool(baseline.losses) or any(a.loss is not None for a in baseline.steps),
        reasons=tuple(_reasons(baseline)),
        not_judged=tuple(
            dict.fromkeys(
                f"{use.op} at {use.line}" if use.line else use.op
                for use in baseline.uses
                if use.name == _FIXED
            )
        ),
    )


def _reasons(run: RunView) -> list[Reason]:
    """The surest first, one of a kind."""
    found = [Reason(u.name, u.op, u.line) for u in run.uses if u.name in _REQUESTS]
    missing = {r.line for r in found if r.kind == "cuda_missing"}
    for call in run.calls:
        if call.name == "autocast":
            kind = "autocast_idle" if call.enabled else "autocast_off"
        elif call.name == "scaler_new" and not call.enabled:
            kind = "scaler_off"
        else:
            continue
        if call.line not in missing:  # torch switched that one off itself
            found.append(Reason(kind, "", call.line))
    order = ("cuda_missing", "trainer_fp16", "autocast_off", "autocast_idle", "scaler_off",
             "cuda_asked", "nullcontext")  # fmt: skip
    first = {r.kind: r for r in reversed(found)}
    return [first[kind] for kind in order if kind in first]


# A trainer was asked for fp16 and takes bf16 instead, because it is on a CPU.
_FP16_REFUSED = re.compile(r"(?:fp16|float16|16-mixed)\b.{0,60}not supported on (?:the )?CPU", re.I)


def wants_cuda(run: RunView, said: str) -> bool:
    """Whether the script could not run, ran without the autocast or GradScaler on CUDA that it
    asked for, or computed nothing in half precision, for a CUDA device that is not there. What
    runs in bf16 without the scaler that is meant for fp16 is another training. ``said``: what the
    script printed, and its traceback."""
    if lacks_cuda(run.outcome, said) or run.use("cuda_missing"):
        return True
    if may_want_cuda(run.outcome, said) or _FP16_REFUSED.search(said):
        return True
    if not any(run.use(name) for name in ("cuda_asked", "trainer_fp16")):
        return False
    # Both follow the device: a scaler is left out, and autocast takes bf16, fp16 on CUDA.
    if run.use("cpu_default") or any(c.name == "scaler_new" and not c.enabled for c in run.calls):
        return True
    return not run.steps or (run.control == BASELINE and precision_use(run, None).no_half)


# Which dtype each module's weights, activations and gradients have, and how a tree of them folds.
#
# Frames know the dtype in which values really flowed; ops know in which dtype a module computed:
#
#     encoder.0.linear   weights fp32 · activation fp16 · gradient fp16 · weight gradient fp32


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
    """One row per module, in the order of ``modules``. Filter ``ops`` by phase beforehand."""
    held = {role: recorded_dtypes(frame) for role, frame in frames.items()}
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


_COUNTS = ("parameter_count", "op_count", "cast_count", "flops", "half_flops")
_DTYPES = ("weights", "activations", "grad_outputs", "weight_grads", "computed_in")


def _merge(row: ModuleDtypes, below: Sequence[ModuleDtypes]) -> ModuleDtypes:
    if not below:
        return row
    parts = (row, *below)

    merged: dict[str, Any] = {name: sum(getattr(p, name) for p in parts) for name in _COUNTS}
    for name in _DTYPES:
        merged[name] = tuple(sorted({dtype for p in parts for dtype in getattr(p, name)}))
    return replace(row, folded=len(below), **merged)


# Which recorded ops do arithmetic of the model, and which only name, shape or copy memory.
#
# A trace below autograd is full of views: of the 461 forward calls that the tiny GPT makes in fp32
# under fp16 autocast, 420 are `view` and `detach`. Their dtype says nothing on precision.


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
SCALER_PREFIX = "_amp_"  # GradScaler's own kernels: no part of the model


def computes(op: OpRecord) -> bool:
    """True for an op that does arithmetic of the model."""
    name = op.op.rpartition(".")[2]
    is_scalers = name.startswith(SCALER_PREFIX)
    return not (op.is_cast or is_scalers or name in NO_ARITHMETIC)


# Which modules stayed in fp32 in a half-precision run, and why: the autocast list of each op.
#
# Autocast decides in the forward pass, op by op; the backward of an op follows its forward. So
# only forward ops are judged. An op that computed in fp32 has one of these reasons:
#
#     fp32_list     its list asks for fp32 (exp, log, losses, norms)
#     promoted      its list takes the widest dtype among its inputs
#     not_cast      its list asks for half, yet it ran in fp32: autocast was off there
#     follows       it stands in no list and runs in the dtype of its inputs, which were fp32


# The lists of torch's autocast (policy/autocast_lists), by what they do to an op.
REASON_OF_LIST = {
    "fp32": "fp32_list",
    "fp32_set_opt_dtype": "fp32_list",
    "fp32_append_dtype": "fp32_list",
    "promote": "promoted",
    "lower_precision_fp": "not_cast",
}
WIDE = ("fp32", "fp64", "mixed")


@dataclass(frozen=True, slots=True)
class Fp32Op:
    """One op that computed in fp32 in the forward pass, over all modules that ran it."""

    op: str
    autocast_list: str | None
    reason: str
    count: int
    modules: tuple[int, ...]


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


def fp32_ops(ops: Iterable[OpRecord], list_of: Callable[[str], str | None]) -> list[Fp32Op]:
    """Forward ops that computed in fp32, most calls first. ``list_of`` names an op's list."""
    counts: dict[str, int] = defaultdict(int)
    modules: dict[str, set[int]] = defaultdict(set)
    for op in ops:
        if _is_compute(op) and compute_dtype(op.inputs) in WIDE:
            counts[op.op] += op.count
            modules[op.op].add(op.module)
    found = [
        Fp32Op(name, list_of(name), _reason(list_of(name)), count, tuple(sorted(modules[name])))
        for name, count in counts.items()
    ]
    return sorted(found, key=lambda f: (-f.count, f.op))


def modules_by_precision(ops: Iterable[OpRecord]) -> ModulesByPrecision:
    """Sort the modules that computed anything in the forward pass."""
    seen: dict[int, set[bool]] = defaultdict(set)
    for op in ops:
        if _is_compute(op) and (dtype := compute_dtype(op.inputs)):
            seen[op.module].update({True, False} if dtype == "mixed" else {is_half(dtype)})

    def having(*kinds: bool) -> tuple[int, ...]:
        return tuple(sorted(m for m, found in seen.items() if found == set(kinds)))

    return ModulesByPrecision(fp32=having(False), half=having(True), both=having(True, False))


def _is_compute(op: OpRecord) -> bool:
    return op.phase == "forward" and computes(op)


def _reason(autocast_list: str | None) -> str:
    return REASON_OF_LIST.get(autocast_list or "", "follows")


# Where dtype conversions happen: module, phase, from what to what, how many a step.
#
# Every cast reads and writes a whole tensor, so a model that casts back and forth pays in
# bandwidth what it saves in arithmetic.


@dataclass(frozen=True, slots=True)
class CastSite:
    """Casts of one kind in one module and phase of one step."""

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


# How many of a step's floating-point operations ran in which dtype.
#
# Only ops that have a FLOP formula count (matmuls, convolutions, attention): they are what
# Tensor Cores speed up. An op belongs to the dtype of its floating-point inputs.


@dataclass(frozen=True, slots=True)
class FlopShare:
    """FLOPs by dtype, most first; of one module or of the whole step."""

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
