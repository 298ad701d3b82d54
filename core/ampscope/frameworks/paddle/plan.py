"""Which op of a script would run in which dtype on a GPU: predicted from an fp32 run on this CPU.

    python -m ampscope.frameworks.paddle.plan train.py --json

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from ampscope.frameworks.paddle.debugging_import import (
    Difference,
    collected,
    differences,
    on_a_cpu,
    paused,
)
from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.layer_watch import LayerWatch
from ampscope.frameworks.paddle.patching import replaced
from ampscope.frameworks.paddle.planned_ops import LEVELS, PlannedOps
from ampscope.frameworks.paddle.step_watch import StepWatch
from ampscope.frameworks.recorder import Recorder
from ampscope.records import Cadence
from ampscope.run.script_text import execute, folder_of


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
class Plan:
    """Of one script, up to its first optimizer step."""

    half: str
    ops: tuple[PlannedOp, ...]
    differences: tuple[Difference, ...]  # from Paddle's own statistics of the same pass

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


def planned(train: Callable[[], None], half: str = "fp16") -> Plan:
    """Run ``train`` in fp32 up to its first optimizer step."""
    recorder, paths = Recorder(Cadence(0, 0, 0)), LayerPaths()
    layers = LayerWatch(recorder, paths, lambda run: run())
    ops = PlannedOps(half, lambda: layers.path if paths.roots else None, lambda: list(paths.roots))
    steps = StepWatch(recorder, paths, lambda: False)

    def stop() -> None:
        raise _FirstStep

    steps.begins = stop
    backward = paddle.Tensor.backward

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return backward(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced([(paddle.Tensor, "backward", uncounted)]))
        for part in (ops, steps, layers):
            stack.enter_context(part.active())
        statistics = stack.enter_context(collected())
        stack.enter_context(contextlib.suppress(_FirstStep))
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
    return Plan(half, found, tuple(differences(on_a_cpu(ops.seen), statistics)))


def main() -> None:
    """Print the plan of a script."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("script")
    parser.add_argument("args", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--half", choices=("fp16", "bf16"), default="fp16")
    given = parser.parse_args()
    sys.argv = [given.script, *given.args]
    sys.path.insert(0, folder_of(given.script))
    paddle.set_device("cpu")
    with contextlib.redirect_stdout(sys.stderr):  # the script's own output
        plan = planned(lambda: execute(given.script), given.half)
    print(plan.as_json if given.json else plan.as_text)


if __name__ == "__main__":
    main()
