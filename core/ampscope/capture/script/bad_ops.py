"""The bad ops that a watch has found, each once per place, and where each was called.

An op's place is its module, source line and user Function. In the backward pass no user frame is on
the stack: autograd numbers its nodes in the order in which forward made them, so the number of the
node that runs now leads back to the forward op's place.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # bound in C++

from ampscope.capture.global_hooks import (
    FORWARD_ALWAYS,
    FORWARD_PRE,
    Subscription,
)
from ampscope.capture.script import cancellation, op_exact, op_facts, op_taint
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_facts import OpCall
from ampscope.capture.script.op_taint import Provenance
from ampscope.capture.tensors import all_finite, in_backward
from ampscope.numerics.formats import dtype_name
from ampscope.observations import BadOp
from ampscope.source_lines import SourceLines, line_name, line_text

NOWHERE = ("", 0)  # no line is known
MAX_NODES = 50_000  # remembered nodes; a few steps of a large model
MAX_BAD = 400
_LEAVES = 1 << 63  # the nodes of parameters have the largest number there is
MAX_WATCHERS = 4  # bad ops whose consumers one tensor leads to


class Origin(NamedTuple):
    """Where one op was called."""

    module: nn.Module | None
    place: tuple[str, int]  # file and line of the user's own code
    function: str  # the user's autograd.Function around it, "" outside
    library: tuple[str, int] = NOWHERE  # file and line of the library that the place led to


class Origins:
    """Remembers, for every autograd node made while entered, where its forward op was called."""

    def __init__(self, paths: ModulePaths, lines: SourceLines) -> None:
        self.paths = paths
        self.lines = lines
        self.functions: list[str] = []  # user autograd.Functions that run now
        self._numbers: list[int] = []
        self._origins: list[Origin] = []
        self._handles: list[Subscription] = []

    def __enter__(self) -> Origins:
        # After ``paths``, which has entered the module or left it when these are called.
        self._handles = [
            FORWARD_PRE.subscribe(self._module_entered),
            FORWARD_ALWAYS.subscribe(self._module_left),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def here(self) -> Origin:
        """Where the program stands now."""
        place, library = self.lines.places()
        return Origin(self.paths.current(), place, (self.functions or [""])[-1], library)

    def remember(self) -> None:
        """A forward op has just run; its node was made just before it."""
        number = _get_sequence_nr() - 1
        if not self._numbers or self._numbers[-1] < number:
            self._numbers.append(number)
            self._origins.append(self.here())

    def _module_entered(self, module: nn.Module, inputs: object) -> None:
        self._module_ran(self.paths.stack[-2] if len(self.paths.stack) > 1 else None)

    def _module_left(self, module: nn.Module, inputs: object, output: object) -> None:
        self._module_ran(module)

    def _module_ran(self, module: nn.Module | None) -> None:
        """Nodes that no watched op made (those of functions in C++ or Python) belong to the module
        that ran until now."""
        if not torch.is_grad_enabled() or in_backward():
            return
        number = _get_sequence_nr() - 1
        first = self._numbers[-1] + 1 if self._numbers else number
        if first <= number:
            self._numbers.append(first)
            self._origins.append(Origin(module, NOWHERE, ""))

    def of(self, node: Any) -> Origin:
        """Where the op that runs now belongs; ``node`` is autograd's current node, None forward."""
        if node is None:
            return self.here()
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        if at < 0 or self.paths.stack:
            return Origin(self.paths.current(), self.lines.where(), "")
        return self._origins[at]

    def names(self, node: Any) -> tuple[str, str]:
        """(dotted module, "train.py:41") of the forward op that made ``node``."""
        origin = self.of(node)
        return self.paths.path(origin.module), line_name(origin.place)

    def new_step(self) -> None:
        """An optimizer step begins: forget the nodes when there are too many."""
        if len(self._numbers) > MAX_NODES:
            self._numbers, self._origins = [], []


class BadOps:
    """Collects :class:`BadOp` records; an id is the order in which a bad op was first seen."""

    def __init__(self, origins: Origins) -> None:
        self.step = 0
        self._origins = origins
        self._found: dict[int, BadOp] = {}
        self._first: dict[tuple[object, ...], int] = {}
        self._consumers: dict[int, list[str]] = {}
        self._lost: dict[int, tuple[int, float, str]] = {}  # by the number of an autograd node
        self._cancelled: dict[int, int] = {}  # likewise

    def records(self) -> list[BadOp]:
        """All bad ops with the consumers that were seen."""
        return [
            dataclasses.replace(bad, consumers=tuple(self._consumers.get(bad.id, ())))
            for bad in self._found.values()
        ]

    def record(self, bad_id: int) -> BadOp | None:
        """The bad op with that id so far, without its consumers."""
        return self._found.get(bad_id)

    def is_rare(self, bad_id: int) -> bool:
        """Whether the bad op has come a few times so far."""
        return self._found[bad_id].count <= op_exact.OVERFLOWS

    def note_lost(self, bad_id: int, error: float, op: str) -> None:
        """Op ``op``, which has just run, is finite where it took the infinity of a bad op. With
        gradients, backward decides whether it mattered. Under no_grad it is recorded at once, if a
        module computed it."""
        line = line_name(self._origins.here().place)
        place = f"{op}, {line}" if line else op
        if torch.is_grad_enabled():
            self._lost[_get_sequence_nr() - 1] = bad_id, error, place
        elif (bad := self._found[bad_id]).module_type and not bad.grad_enabled:
            self._lose(bad_id, error, place, returns=False)

    def note_cancelled(
        self, call: OpCall, out: Tensor, autocast: str, lost: cancellation.Cancelled
    ) -> None:
        """The difference ``out`` has lost what its terms were rounded off. Backward decides whether
        the loss depends on it."""
        bad_id = self.remember("cancelled", call, call.tensors, out, autocast, lost.error)
        if bad_id is None:
            return
        bad = self._found[bad_id]
        if bad.share is None or lost.share > bad.share:
            chain = tuple(map(line_name, lost.places))
            self._found[bad_id] = dataclasses.replace(
                bad, share=lost.share, fp32_max=lost.largest, chain=chain
            )
        self.note_consumers_of(out, bad_id)
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
            # The node of a sum runs no op where it only hands the gradient on to its terms.
            terms = [number for t in call.tensors for number in _nodes_behind(t)]
            self._cancelled |= dict.fromkeys([_get_sequence_nr() - 1, *terms], bad_id)

    def note_consumers_of(self, out: Tensor, bad_id: int | None) -> None:
        """Ops that take ``out``, its newest result, are the bad op's consumers, up to
        :data:`op_taint.CHAIN`."""
        provenance = op_taint.provenance_of(out)
        if bad_id is not None and self._found[bad_id].kind != "cancelled":
            self._consumers.pop(bad_id, None)  # a running sum is taken by its own next addition
        if provenance is not None and bad_id is not None and bad_id not in provenance.watchers:
            provenance.watchers = (*provenance.watchers, bad_id)

    def gradient_through(self, node: Any) -> None:
        """Backward runs ``node``: what its forward op lost is lost to the loss."""
        cancelled = self._cancelled.pop(node._sequence_nr(), None) if self._cancelled else None
        if cancelled is not None:
            self._found[cancelled] = dataclasses.replace(
                self._found[cancelled], reached_gradient=True
            )
        found = self._lost.pop(node._sequence_nr(), None) if self._lost else None
        if found is None:
            return
        self._lose(*found, returns=True)

    def _lose(self, bad_id: int, error: float, place: str, *, returns: bool) -> None:
        """``returns``: a gradient came back. It replaces what was seen under no_grad."""
        bad = self._found[bad_id]
        before = 0.0 if returns and not bad.grad_enabled else bad.lost or 0.0
        if error > before:
            self._found[bad_id] = dataclasses.replace(
                bad, lost=error, lost_at=place, grad_enabled=bad.grad_enabled or returns
            )

    def note_consumer(self, name: str, parents: list[Provenance]) -> tuple[int, ...]:
        """Op ``name`` takes what ``parents`` made; returns the bad ops that still want to know."""
        watchers: tuple[int, ...] = ()
        for parent in parents:
            for bad in parent.watchers:
                chain = self._consumers.setdefault(bad, [])
                if len(chain) < op_taint.CHAIN:
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
            last_step=self.step,
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
            step=self.step,
            phase="forward" if node is None else "backward",
            op=f"{call.func.namespace}.{call.name}",
            node="" if node is None else node.name(),
            module=self._origins.paths.path(module),
            module_type="" if module is None else type(module).__name__,
            line=line_name(origin.place),
            code=line_text(origin.place),
            library=line_name(origin.library),
            dtype=dtype_name(out.dtype),
            inputs=tuple(
                op_facts.operand(t, op_taint.producers(t), op_taint.is_parameter(t))
                for t in inputs[:4]
            ),
            scalars=op_facts.scalars(call.args, call.kwargs),
            **op_facts.special_counts(out),
            total=out.numel(),
            fp32_max=op_facts.max_abs(fp32),
            fp32_finite=None if fp32 is None else all_finite(fp32),
            autocast=bool(autocast),
            last_step=self.step,
            error=error,
            function=origin.function,
            grad_enabled=torch.is_grad_enabled(),
            tracked=any(map(op_taint.is_learned, inputs)),
            index=op_facts.first_bad_index(out) if wanted else (),
        )


def _nodes_behind(tensor: Tensor) -> Iterator[int]:
    """Numbers of the autograd nodes that led to ``tensor``, nearest first, up to one that computes
    its gradient."""
    node = tensor.grad_fn
    while node is not None and (number := node._sequence_nr()) < _LEAVES:
        yield number
        if not node.name().startswith(("AddBackward", "SubBackward", "RsubBackward")):
            return
        node = next((n for n, _ in node.next_functions if n is not None), None)
