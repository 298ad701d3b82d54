"""Which op of a script would run in which dtype on a GPU: predicted from an fp32 run on this CPU.

    ampscope frameworks plan train.py

The script runs in fp32 until its first optimizer step, inside ``auto_cast`` where it opens that
itself, else as if it opened it around everything. Beside the plan stands what
``paddle.amp.debugging`` counted in the same pass. What an fp32 run on a CPU cannot show: ops that
have no half kernel on a GPU, and fused kernels that only a GPU build takes (attention).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle

from ampscope.ext.frameworks.paddle.emulation import NAMES, TARGETS, Emulation, Tensor, inputs_of
from ampscope.ext.frameworks.paddle.layer_paths import LayerPaths
from ampscope.ext.frameworks.paddle.layers import LayerWatch
from ampscope.ext.frameworks.paddle.op_names import FIRST_INPUT_ONLY
from ampscope.ext.frameworks.paddle.regions import (
    AUTO_CAST,
    DTYPE_NAMES,
    AutoCastRegion,
    OpenRegion,
    dtype_of_op,
)
from ampscope.ext.frameworks.paddle.steps import StepWatch
from ampscope.ext.frameworks.paddle.values import floating_tensors
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.patches import Patches
from ampscope.records import Cadence
from ampscope.runner.script_text import execute, folder_of

LEVELS = ("O1", "O2")


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """Calls of one op in one layer. ``lists`` and ``dtypes`` by level; a list is "" outside
    auto_cast."""

    module: str
    op: str
    lists: dict[str, str]
    dtypes: dict[str, str]
    count: int


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """Of one script, up to its first optimizer step."""

    half: str
    ops: tuple[PlannedOp, ...]
    differences: tuple[PlanDifference, ...]  # from Paddle's own statistics of the same pass

    @property
    def as_json(self) -> str:
        """For other programs."""
        return json.dumps({"paddle": str(paddle.__version__), **dataclasses.asdict(self)}, indent=1)

    @property
    def as_text(self) -> str:
        """A table, and the differences."""
        rows: list[tuple[str, ...]] = [("layer", "op", *LEVELS, "calls")]
        for op in self.ops:
            cells = (f"{op.dtypes[level]} ({op.lists[level] or 'outside'})" for level in LEVELS)
            rows.append((op.module or "(model)", op.op, *cells, str(op.count)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        said = [d.sentence for d in self.differences]
        return "\n".join([*lines, "", *(said or ["Paddle's own statistics count the same ops."])])


class _FirstStep(SystemExit):
    """Ends the script."""


class _Stop:
    """Stops where the first step begins."""

    def step_begins(self) -> None:
        raise _FirstStep

    def step_ended(self) -> None:
        """Never called."""


def planned(train: Callable[[], None], half: str = "fp16") -> DtypePlan:
    """Run ``train`` in fp32 up to its first optimizer step."""
    recorder, paths = FrameworkRecorder(Cadence(0, 0, 0)), LayerPaths()
    layers = LayerWatch(recorder, paths, lambda run: run())
    ops = PlannedOps(half, lambda: layers.path if paths.roots else None, lambda: list(paths.roots))
    steps = StepWatch(recorder, paths, listener=_Stop())

    def uncounted(backward: Any, *args: Any, **kwargs: Any) -> Any:
        with paused():
            return backward(*args, **kwargs)

    with Patches() as patches, ops.active():
        patches.wrap(paddle.Tensor, "backward", uncounted)
        steps.put_on(patches)
        layers.put_on(patches)
        with collected() as statistics, contextlib.suppress(_FirstStep):
            train()
    found = tuple(
        PlannedOp(
            module,
            op,
            dict(zip(LEVELS, lists, strict=True)),
            dict(zip(LEVELS, dtypes, strict=True)),
            count,
        )
        for (module, op, lists, dtypes), count in ops.plan.items()
    )
    return DtypePlan(half, found, tuple(differences(on_a_cpu(ops.seen), statistics)))


def main() -> None:
    """Print the plan of a script."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--half", choices=("fp16", "bf16"), default="fp16")
    given = parser.parse_args()
    sys.argv = [given.script, *given.args]
    sys.path.insert(0, folder_of(given.script))
    paddle.set_device("cpu")
    with contextlib.redirect_stdout(sys.stderr):  # the script's own output
        plan = planned(lambda: execute(given.script), given.half)
    print(plan.as_json if given.json else plan.as_text)


class PlannedOps(Emulation):
    """Ops of an fp32 run that carry, tensor by tensor, what they would be under O1 and under O2.

    The same replacement of ops as in :mod:`emulation`, but nothing is rounded: a tensor that would
    be half under a level gets a mark of that level, and the next op decides by it. ``layer`` gives
    the dotted path of the layer that is running, or None before any has run; ``roots`` the root
    models.
    """

    def __init__(
        self, half: str, layer: Callable[[], str | None], roots: Callable[[], list[Any]]
    ) -> None:
        super().__init__(OpenRegion("fp32"))
        # By layer, op, and of each level its list and dtype.
        self.plan: Counter[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = Counter()
        self.seen: Counter[tuple[str, int]] = Counter()  # every op, with its inputs' number
        self._half, self._layer, self._roots = half, layer, roots
        self._own_regions = False  # the script opens some: outside them nothing is cast
        self._decorated: set[int] = set()
        self._known_roots = 0

    def run(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """Run in fp32; note what it would be."""
        found = inputs_of(args, kwargs)
        result = function(*args, **kwargs)
        if not found:
            return result
        self.seen[op, len(found)] += 1
        self._learn_parameters()
        lists, targets = [], []
        for level in LEVELS:
            region = self._region(level)
            target = dtype_of_op(region, op, [self._dtype(t, level) for t in found])
            lists.append("" if region is None else region.word(op))
            targets.append(target)
            outputs = floating_tensors(result)
            for tensor in outputs[:1] if op in FIRST_INPUT_ONLY else outputs:
                if target != "fp32" and tensor.dtype == paddle.float32:
                    setattr(tensor, _mark(level), target)
        layer = self._layer()
        if layer is not None:
            self.plan[layer, op, tuple(lists), tuple(targets)] += 1
        return result

    def run_in_place(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """The first argument keeps its marks."""
        found = inputs_of(args, kwargs)
        if found:
            self.seen[op, len(found)] += 1
        return function(*args, **kwargs)

    def cast(self, function: Callable[..., Any], tensor: Any, dtype: Any) -> Any:
        """A cast to half is a mark; one to fp32 leaves none."""
        target = TARGETS.get(dtype)
        if target is None:
            return function(tensor, dtype)
        result = function(tensor, paddle.float32)
        for level in LEVELS:
            setattr(result, _mark(level), target)
        return result

    def _region(self, level: str) -> AutoCastRegion | None:
        """The script's own region at this level; one around everything where it opens none."""
        state = AUTO_CAST._g_amp_state_
        self._own_regions |= state is not None
        if self._own_regions and (state is None or not state["enable"]):
            return None
        white = state["custom_white_list"] if state else None
        black = state["custom_black_list"] if state else None
        names = AUTO_CAST._update_list(white, black, level, DTYPE_NAMES[self._half])
        return AutoCastRegion(self._half, level, frozenset(names[0]), frozenset(names[1]))

    def _dtype(self, tensor: Tensor, level: str) -> str:
        mark = getattr(tensor, _mark(level), None)
        if mark is None and level == "O2" and id(tensor) in self._decorated:
            mark = self._half
        return mark or NAMES[tensor.dtype]

    def _learn_parameters(self) -> None:
        """Those that ``decorate(level="O2")`` would cast, of every model that has been called."""
        roots = self._roots()
        if len(roots) == self._known_roots:
            return
        self._known_roots = len(roots)
        for layer in (part for root in roots for part in root.sublayers(include_self=True)):
            if not AUTO_CAST.need_keep_fp32(layer, DTYPE_NAMES[self._half]):
                self._decorated |= {id(p) for p in layer._parameters.values() if p is not None}


def _mark(level: str) -> str:
    return f"_ampscope_{level}"


_FLAG = "FLAGS_low_precision_op_list"
_COLUMNS = ("fp16", "bf16", "fp32", "other")
# Ops without a floating-point input make numbers or look at shapes. AMP has no say in them, and
# ampscope does not count them.
NOT_COUNTED = frozenset((
    "assign_value", "empty", "eye", "fill_any_like", "fill_constant", "full_", "gaussian_inplace",
    "gaussian_random", "linspace", "one_hot_v2", "randint", "randperm", "range", "range_v2", "size",
    "shape", "tril_indices", "triu_indices", "truncated_gaussian_random", "uniform_random",
    "uniform_inplace", "equal", "not_equal", "greater_equal", "greater_than", "less_equal",
    "less_than", "isfinite_v2", "isinf_v2", "isnan_v2", "cast", "share_data", "assign_out_",
))  # fmt: skip


Statistics = dict[str, dict[str, int]]  # calls by op and column: fp16, bf16, fp32, other


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """An op that was counted differently."""

    op: str
    seen: int  # by ampscope
    counted: int  # by Paddle

    @property
    def sentence(self) -> str:
        """For a person."""
        return f"{self.op}: ampscope saw {self.seen}, Paddle counted {self.counted}."


@contextmanager
def collected() -> Iterator[Statistics]:
    """Paddle's own operator statistics (``paddle.amp.debugging``) of the block, filled at its end.
    Paddle counts in C++ what each op's inputs are; on a CPU always as fp32."""
    statistics: Statistics = {}
    paddle.base.core.clear_low_precision_op_list()
    paddle.set_flags({_FLAG: 1})
    try:
        yield statistics
    finally:
        found = paddle.base.core.get_low_precision_op_list()
        paddle.set_flags({_FLAG: 0})
        for op, value in found.items():  # {"conv2d": "0,0,1,0"}
            numbers = value.split(",") if isinstance(value, str) else value
            statistics[op] = dict(zip(_COLUMNS, map(int, numbers), strict=True))


@contextmanager
def paused() -> Iterator[None]:
    """Not counted: a backward pass, in which some ops (``scale``) run as forward ops again."""
    paddle.set_flags({_FLAG: 0})
    try:
        yield
    finally:
        paddle.set_flags({_FLAG: 1})


def differences(seen: Mapping[str, int], statistics: Statistics) -> list[PlanDifference]:
    """Ops on whose floating-point calls the two do not agree: one of them has missed some. ``seen``
    has Paddle's names of a CPU build, see :func:`on_a_cpu`."""
    halves = _COLUMNS[:3]
    counted = {op: sum(by[column] for column in halves) for op, by in statistics.items()}
    names = {op for op in (*seen, *counted) if op not in NOT_COUNTED}
    return [
        PlanDifference(op, seen.get(op, 0), counted.get(op, 0))
        for op in sorted(names)
        if seen.get(op, 0) != counted.get(op, 0)
    ]


def on_a_cpu(ops: Mapping[tuple[str, int], int]) -> Counter[str]:
    """Calls by (op, floating-point inputs) in the names of a CPU build, which computes a linear
    layer as a matmul and a sum."""
    found: Counter[str] = Counter()
    for (op, inputs), count in ops.items():
        if op == "linear_v2":
            found["matmul_v2"] += count
            if inputs > 2:
                found["elementwise_add"] += count
        else:
            found[op] += count
    return found


if __name__ == "__main__":
    main()
