"""What the Layers page knows about one run: modules, the ops of one step, dtypes of that step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ampscope.analysis.dtypes import ModuleDtypes, dtypes_by_module
from ampscope.policy.autocast_lists import CPU_LISTS, LISTED_OP_OF_KERNEL, list_of
from ampscope.records import Frame, Machine, ModuleRecord, OpRecord, Role, RunInfo, StepRecord
from app import states, store

ALL_PHASES = "all"
PHASES = (ALL_PHASES, "forward", "backward", "step")
_DTYPE_ROLES = (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class OpSet:
    """Steps that ran the same ops, as one choice of the page."""

    id: int
    steps: tuple[int, ...]

    @property
    def label(self) -> str:
        """``steps 0 to 49`` or ``step 4, 9 to 12 and 31 more``: how a person names them."""
        runs = [_span(list(part)) for part in _consecutive(self.steps)]
        shown = ", ".join(runs[:3])
        more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
        return f"step{'' if len(self.steps) == 1 else 's'} {shown}{more}"


@dataclass(frozen=True, slots=True)
class Layers:
    """One run's modules and ops in the chosen phases; ``all_ops`` is every phase's."""

    modules: tuple[ModuleRecord, ...]
    all_ops: tuple[OpRecord, ...]
    ops: tuple[OpRecord, ...]
    rows: tuple[ModuleDtypes, ...]
    step: int | None  # whose histograms gave the dtypes of values, None when there are none


def op_sets(steps: Sequence[StepRecord]) -> list[OpSet]:
    """Distinct op sets, the one of most steps first; empty when nothing was traced."""
    found: dict[int, list[int]] = {}
    for step in steps:
        if step.op_set is not None:
            found.setdefault(step.op_set, []).append(step.step)
    sets = [OpSet(id_, tuple(numbers)) for id_, numbers in found.items()]
    return sorted(sets, key=lambda s: -len(s.steps))


def read(run: RunInfo, chosen: OpSet | None, phase: str) -> Layers:
    """Everything the page shows, from the ops of ``chosen`` and the frames nearest to it."""
    modules = store.modules(run)
    every: list[OpRecord] = []
    with states.part():
        every = store.ops(run, chosen.id) if chosen else []
    ops = [op for op in every if phase in (ALL_PHASES, op.phase)]
    step, frames = _frames(run, chosen.steps[-1] if chosen else None)
    rows = dtypes_by_module(modules, ops, frames)
    return Layers(tuple(modules), tuple(every), tuple(ops), tuple(rows), step)


def list_lookup(machine: Machine | None) -> Callable[[str], str | None]:
    """Which autocast list an op is in, under the rules that the run followed."""
    return _cpu_list_of if machine is not None and machine.policy == "native" else list_of


def _frames(run: RunInfo, step: int | None) -> tuple[int | None, dict[Role, Frame]]:
    """Frames of the roles that carry dtypes, at the last recorded step up to ``step``."""
    used, frames = None, {}
    for role in _DTYPE_ROLES:
        with states.part():
            recorded = store.frame_steps(run, role)
            if not recorded:
                continue
            at = max((s for s in recorded if step is None or s <= step), default=recorded[0])
            frame = store.frame(run, role, at)
            if frame is not None:
                used, frames[role] = at, frame
    return used, frames


def _cpu_list_of(op: str) -> str | None:
    name = op.removeprefix("aten.")
    listed = LISTED_OP_OF_KERNEL.get(name, name).partition(".")[0]
    return next(
        (key for key, ops in CPU_LISTS.items() if any(o.partition(".")[0] == listed for o in ops)),
        None,
    )


def _consecutive(steps: Sequence[int]) -> list[list[int]]:
    groups = groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    return [[step for _, step in group] for _, group in groups]


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
