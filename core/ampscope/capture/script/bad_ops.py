"""The bad ops found so far: once per place, counted when they come again, with consumers."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ampscope.capture.script import op_facts
from ampscope.capture.script.op_call import OpCall
from ampscope.capture.script.op_marks import CHAIN, Maker, is_learned, is_parameter, producers
from ampscope.capture.script.op_origins import Origin, Origins
from ampscope.capture.script.source_lines import line_name, line_text
from ampscope.formats import dtype_name
from ampscope.observations import BadOp

MAX_BAD = 400
MAX_WATCHERS = 4  # bad ops whose consumers one tensor tells of


class BadOps:
    """Collects :class:`BadOp` records; an id is the order in which a bad op was first seen."""

    def __init__(self, origins: Origins) -> None:
        self.attempt = 0
        self._origins = origins
        self._found: dict[int, BadOp] = {}
        self._first: dict[tuple[object, ...], int] = {}
        self._consumers: dict[int, list[str]] = {}

    def records(self) -> list[BadOp]:
        """All bad ops with the consumers that were seen."""
        return [
            dataclasses.replace(bad, consumers=tuple(self._consumers.get(bad.id, ())))
            for bad in self._found.values()
        ]

    def record(self, bad_id: int) -> BadOp | None:
        """The bad op with that id as it is known now, without its consumers."""
        return self._found.get(bad_id)

    def note_consumer(self, name: str, parents: list[Maker]) -> tuple[int, ...]:
        """Op ``name`` takes what ``parents`` made; returns the bad ops that still want to know."""
        watchers: tuple[int, ...] = ()
        for parent in parents:
            for bad in parent.watchers:
                chain = self._consumers.setdefault(bad, [])
                if len(chain) < CHAIN:
                    chain.append(name)
                    watchers += (bad,)
        return watchers[:MAX_WATCHERS]

    def remember(
        self, kind: str, call: OpCall, inputs: list[Tensor], out: Tensor, autocast: str,
        error: float | None = None,
    ) -> int | None:  # fmt: skip
        """Id of the bad op, new or known; None when there are too many."""
        origin = self._origins.of(call.node)
        where = (id(origin.module), origin.place, origin.library)
        key = (kind, call.func, *where, call.node is None)
        known = self._first.get(key)
        if known is not None:
            self._again(known, error)
            return known
        if len(self._found) >= MAX_BAD:
            return None
        bad_id = self._first[key] = len(self._found)
        self._found[bad_id] = self._record(bad_id, kind, call, inputs, out, origin, autocast, error)
        return bad_id

    def _again(self, known: int, error: float | None) -> None:
        bad = self._found[known]
        self._found[known] = dataclasses.replace(
            bad,
            count=bad.count + 1,
            last_attempt=self.attempt,
            error=bad.error if error is None else max(error, bad.error or 0.0),
        )

    def _record(
        self, bad_id: int, kind: str, call: OpCall, inputs: list[Tensor], out: Tensor,
        origin: Origin, autocast: str, error: float | None,
    ) -> BadOp:  # fmt: skip
        module, node = origin.module, call.node
        wanted = kind == "nonfinite"
        fp32 = op_facts.in_fp32(call.func, call.args, call.kwargs) if wanted else None
        return BadOp(
            id=bad_id,
            kind=kind,
            attempt=self.attempt,
            phase="forward" if node is None else "backward",
            op=f"{call.func.namespace}.{call.name}",
            node="" if node is None else node.name(),
            module=self._origins.paths.path(module),
            module_type="" if module is None else type(module).__name__,
            line=line_name(origin.place),
            code=line_text(origin.place),
            library=line_name(origin.library),
            dtype=dtype_name(out.dtype),
            inputs=tuple(op_facts.operand(t, producers(t), is_parameter(t)) for t in inputs[:4]),
            scalars=op_facts.scalars(call.args, call.kwargs),
            **op_facts.special_counts(out),
            total=out.numel(),
            fp32_max=op_facts.max_abs(fp32),
            fp32_finite=None if fp32 is None else op_facts.all_finite(fp32),
            autocast=bool(autocast),
            last_attempt=self.attempt,
            error=error,
            function=origin.function,
            grad_enabled=torch.is_grad_enabled(),
            tracked=any(map(is_learned, inputs)),
            index=op_facts.first_bad_index(out) if wanted else (),
        )
