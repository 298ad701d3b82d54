"""Layers whose finite inputs gave a non-finite output: the evidence for "a layer overflowed".

A layer is looked at as one op. Whether its value reached the loss is read off the step: the first
bad layer of a step whose loss is not finite is where that began, because layers run in order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ampscope.frameworks.steps import LayerCall
from ampscope.frameworks.tensors import Values
from ampscope.observations import BadOp, Operand


class BadLayers:
    """Bad layers by path; a layer that is bad again counts up."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], BadOp] = {}
        self._first: tuple[str, str] | None = None  # of the step that is under way

    def met(self, call: LayerCall, step: int) -> None:
        """A call with a non-finite output."""
        if any(_nonfinite(values) for values in call.inputs):
            return  # it only hands on what came in
        key = call.path, call.op
        if self._first is None and call.is_training:
            self._first = key
        known = self._known.get(key)
        if known is None:
            self._known[key] = _bad_op(len(self._known), call.closer() or call, step)
        else:
            self._known[key] = replace(known, count=known.count + 1, last_attempt=step)

    def reached_loss(self, step: int) -> None:
        """The loss of this step is not finite."""
        self._mark(reached_loss=True)

    def reached_gradient(self, step: int) -> None:
        """The loss is finite and a gradient is not."""
        self._mark(reached_gradient=True)

    def next_step(self) -> None:
        """The step is over."""
        self._first = None

    def records(self) -> list[BadOp]:
        """All of them, in the order in which they were met."""
        return list(self._known.values())

    def _mark(self, **reached: bool) -> None:
        if self._first is not None:
            self._known[self._first] = replace(self._known[self._first], **reached)  # type: ignore[arg-type]  # two flags


def _bad_op(number: int, call: LayerCall, step: int) -> BadOp:
    out = np.concatenate([values.floats() for values in call.outputs])
    reference = call.in_fp32()
    fp32 = None if reference is None else reference.floats()
    finite = None if fp32 is None else bool(np.isfinite(fp32).all())
    largest = None
    if fp32 is not None and fp32.size and np.isfinite(fp32).any():
        largest = float(np.abs(fp32[np.isfinite(fp32)]).max())
    return BadOp(
        id=number,
        kind="nonfinite",
        attempt=step,
        phase="forward",
        op=call.op if "." in call.op else f"layer.{call.op}",
        node="",
        module=call.path,
        module_type=call.type,
        line=call.line,
        code="",
        dtype=call.compute_dtype,
        inputs=tuple(_operand(values) for values in call.inputs),
        scalars=(),
        nan=int(np.isnan(out).sum()),
        pos_inf=int(np.isposinf(out).sum()),
        neg_inf=int(np.isneginf(out).sum()),
        total=int(out.size),
        fp32_max=largest,
        fp32_finite=finite,
        autocast=call.compute_dtype in ("fp16", "bf16"),
        last_attempt=step,
    )


def _operand(values: Values) -> Operand:
    floats = np.abs(values.floats())
    kept = floats[np.isfinite(floats)]
    nonzero = kept[kept > 0]
    return Operand(
        values.name,
        (values.size,),
        float(kept.max()) if kept.size else None,
        float(nonzero.min()) if nonzero.size else None,
        int((floats == 0).sum()),
        _nonfinite(values),
    )


def _nonfinite(values: Values) -> int:
    return int(values.size - np.isfinite(values.floats()).sum())
