"""What rows of a file say of each other: what stands once, and what must be there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ampscope.exponents import RAW_LEN
from ampscope.records import Curve, Histogram, Product, Result
from ampscope.store.importing.refusal import Refusal, quoted
from ampscope.store.importing.tables import Contents

_ID = re.compile(r"[0-9a-f]{12}\Z")


def check(run: Contents) -> None:
    """Raises Refusal for the first row that does not fit the others."""
    if not _ID.match(run.info.id):
        why = f"{quoted(run.info.id)} is not 12 hexadecimal digits"
        raise Refusal("value", why).inside("id").inside("run")
    _once("step", ((s.step,) for s in run.steps), "step")
    _once("module", ((m.index,) for m in run.modules), "module")
    _once(
        "op",
        ((n, o.module, o.phase, o.op, o.inputs, o.outputs) for n, o in run.ops),
        "op in the same set, module, phase and dtypes",
    )
    _once("shadow", ((s.step, s.role, s.module) for s in run.shadows), "step, role and module")
    _once("nonfinite", ((n.step, n.order) for n in run.nonfinite), "step and order")
    _once("telemetry", ((s.device, s.at) for s in run.samples), "device and time")
    modules = {m.index for m in run.modules}
    _known("op", (o.module for _, o in run.ops), "module", modules)
    _known("shadow", (s.module for s in run.shadows), "module", modules)
    _known("histogram", (row.module for row, _ in run.histograms), "module", modules)
    for place, result in enumerate(run.results):
        try:
            _check_result(result)
        except Refusal as refusal:
            raise refusal.inside(place).inside("result") from None
    sets = {number for number, _ in run.ops}
    _known("step", (s.op_set for s in run.steps), "op_set", sets)


def _check_result(result: Result) -> None:
    """Lists of one result that belong together, value by value."""
    if isinstance(result, Product):
        for nth, operand in enumerate(result.operands):
            if len(operand.shape) != len(operand.stride):
                why = f"{len(operand.stride)} distances were given for {len(operand.shape)} sizes"
                raise Refusal("reference", why).inside("stride").inside(nth).inside("operands")
    elif isinstance(result, Curve) and len(result.x) != len(result.y):
        why = f"{len(result.y):,} values were given for {len(result.x):,} of x"
        raise Refusal("reference", why).inside("y")
    elif isinstance(result, Histogram) and len(result.row) != RAW_LEN:
        why = f"{len(result.row):,} counts were given; a histogram has {RAW_LEN}"
        raise Refusal("reference", why).inside("row")


def _once(table: str, keys: Iterable[tuple[object, ...]], what: str) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for place, key in enumerate(keys):
        if key in seen:
            why = f"{table}[{seen[key]}] has the same {what}"
            raise Refusal("duplicate", why).inside(place).inside(table)
        seen[key] = place


def _known(table: str, numbers: Iterable[int | None], name: str, known: set[int]) -> None:
    for place, number in enumerate(numbers):
        if number is not None and number not in known:
            why = f"there is no {name} {number}"
            raise Refusal("reference", why).inside(name).inside(place).inside(table)
