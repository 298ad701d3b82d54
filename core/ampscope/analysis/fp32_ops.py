"""Which modules stayed in fp32 in a half-precision run, and why: the autocast list of each op.

Autocast decides in the forward pass, op by op; the backward of an op follows its forward. So only
forward ops are judged. An op that computed in fp32 has one of these reasons:

    fp32_list     its list asks for fp32 (exp, log, losses, norms)
    promoted      its list takes the widest dtype among its inputs
    not_cast      its list asks for half, yet it ran in fp32: autocast was off there
    follows       it stands in no list and runs in the dtype of its inputs, which were fp32
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ampscope.analysis.arithmetic import computes
from ampscope.analysis.dtypes import compute_dtype, is_half
from ampscope.records import OpRecord

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
