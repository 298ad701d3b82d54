"""Instrument: finds the ops whose finite inputs gave a non-finite output, forward and backward.

Each op below autocast is looked at once. Every tensor carries two marks, as attributes: the op that
made it (so that the path from a sigmoid to a logarithm, or from a product to a softmax, is known)
and, when it is not finite, the bad op that it descends from. When the loss or a gradient is not
finite, its mark names the root.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from itertools import zip_longest
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # bound in C++
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture import op_facts
from ampscope.capture.module_paths import ModulePaths
from ampscope.capture.op_uses import Uses
from ampscope.capture.running_sums import IN_PLACE, RunningSums
from ampscope.capture.source_lines import SourceLines, line_name, line_text
from ampscope.formats import dtype_name
from ampscope.observations import BadOp

HALF = (torch.float16, torch.bfloat16)
MAKER, TAINT = "_ampscope_maker", "_ampscope_taint"
CHAIN = 14  # ops looked back and forward: a masked softmax attention takes up to 10
MAX_BAD = 400
_WEIGHT_ARITHMETIC = frozenset({"mul", "add", "sub", "div", "lerp", "neg"})
DRIFTING = frozenset({*IN_PLACE, "add", "sub"})
_SKIP = {
    "detach", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "reshape", "alias",
    "unsqueeze", "squeeze", "slice", "select", "as_strided", "empty", "empty_like", "split",
    "_local_scalar_dense", "is_nonzero", "unbind", "empty_strided", "new_empty", "lift_fresh",
}  # fmt: skip


class _Maker:
    """The op that made a tensor, and the names of the ops before it, nearest first.

    Names are flattened and bounded: a linked graph of ops would keep a whole training run alive.
    """

    __slots__ = ("names", "parameter", "scalar", "watchers")

    def __init__(
        self, name: str, parents: list[_Maker], watchers: tuple[int, ...], scalar: float | None
    ) -> None:
        chains = [parent.names for parent in parents[:3]]
        mixed = [n for group in zip_longest(*chains) for n in group if n is not None]
        self.names: tuple[str, ...] = (name, *mixed[: CHAIN - 1])
        self.watchers = watchers  # bad ops whose consumers are still being collected
        self.parameter = False  # a view or cast of a parameter
        self.scalar = scalar  # the Python constant that the op took, if any


class OpWatch:
    """Watches while entered. Results: :attr:`bad` by id, and :meth:`taint_of` a tensor."""

    def __init__(self, paths: ModulePaths, lines: SourceLines, budget: int) -> None:
        self.paths = paths
        self.lines = lines
        self.budget = budget  # ops to look at before it goes to sleep
        self.seen_ops = 0
        self.attempt = 0
        self.phase = "forward"
        self.enabled = True
        self.in_optimizer = False
        self.compare_fp32 = True  # also recompute half ops in fp32 and record coarse results
        self.bad: dict[int, BadOp] = {}
        self.uses = Uses()
        self.sums = RunningSums()
        self.autocast = ""  # dtype of the autocast region that is open, "" outside
        self.functions: list[str] = []  # user autograd.Functions that run now
        self._first: dict[tuple[object, ...], int] = {}
        self._consumers: dict[int, list[str]] = {}
        self._origin_numbers: list[int] = []
        self._origins: deque[tuple[nn.Module | None, tuple[str, int], str]] = deque()
        self._mode: _Mode | None = None

    def __enter__(self) -> OpWatch:
        self._mode = _Mode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's is untyped
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, where)  # type: ignore[no-untyped-call]  # likewise

    def set_in_optimizer(self, inside: bool) -> None:
        """Ops of an optimizer's own step are not sums of the script's."""
        self.in_optimizer = inside

    def taint_of(self, tensor: Tensor | None) -> int | None:
        """Id of the bad op that made ``tensor`` non-finite."""
        return None if tensor is None else getattr(tensor, TAINT, None)

    def new_attempt(self, attempt: int) -> None:
        """Optimizer step number ``attempt`` begins: forget which node belongs to which line."""
        self.attempt = attempt
        if len(self._origin_numbers) > 50_000:
            self._origin_numbers, self._origins = [], deque()

    def records(self) -> list[BadOp]:
        """All bad ops with the consumers that were seen."""
        return [
            dataclasses.replace(bad, consumers=tuple(self._consumers.get(bad.id, ())))
            for bad in self.bad.values()
        ]

    def after(self, func: Any, args: Any, kwargs: Any, out: Any, before: Any) -> None:
        """Look at one op that has just run."""
        self.seen_ops += 1
        name = func._opname
        node = torch._C._current_autograd_node()
        tensors = op_facts.tensors(args, kwargs)
        parents = [m for t in tensors if (m := getattr(t, MAKER, None)) is not None]
        watchers = self._tell_watchers(name, parents)
        maker = _Maker(name, parents, watchers, _constant(args))
        passes = name in _SKIP or name == "_to_copy"
        # Without gradients, arithmetic on weights is an average of weights or an update by hand.
        passes = passes or (name in _WEIGHT_ARITHMETIC and not torch.is_grad_enabled())
        maker.parameter = passes and any(map(is_parameter, tensors))
        if node is None and torch.is_grad_enabled():
            self._note_origin()
        outputs = op_facts.tensors(out, None)
        for tensor in outputs:
            tensor.__dict__[MAKER] = maker
        if name in _SKIP:
            self._inherit(tensors, outputs)
            return
        for tensor in outputs:
            if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_sparse:
                continue
            if not op_facts.all_finite(tensor):
                self._not_finite(func, args, kwargs, tensors, tensor, node, maker)
            else:
                tensor.__dict__.pop(TAINT, None)
                if tensor.dtype in HALF:
                    self._finite_half(func, args, kwargs, tensors, tensor, node, maker, before)
        self.uses.note(
            func, args, tensors, out, self.autocast, self.attempt, lambda: self._named_place(node)
        )

    def note_function(self, name: str, decorated: bool) -> None:
        """A user's autograd.Function is about to run under autocast."""
        self.uses.custom_function(name, decorated, self.attempt, lambda: self._named_place(None))

    def _named_place(self, node: Any) -> tuple[str, str]:
        module, place, _ = self.place(node)
        return self.paths.path(module), line_name(place)

    def place(self, node: Any) -> tuple[nn.Module | None, tuple[str, int], str]:
        """(module, source line, enclosing user Function) of the op that runs now."""
        if node is None:
            return self.paths.current(), self.lines.where(), (self.functions or [""])[-1]
        at = bisect.bisect_right(self._origin_numbers, node._sequence_nr()) - 1
        if at < 0 or self.paths.stack:
            return self.paths.current(), self.lines.where(), ""
        return self._origins[at]

    def _note_origin(self) -> None:
        number = _get_sequence_nr() - 1  # the node of this op was made just before it ran
        origin = (self.paths.current(), self.lines.where(), (self.functions or [""])[-1])
        if self._origin_numbers and self._origin_numbers[-1] >= number:
            return
        self._origin_numbers.append(number)
        self._origins.append(origin)

    def _tell_watchers(self, name: str, parents: list[_Maker]) -> tuple[int, ...]:
        watchers: tuple[int, ...] = ()
        for parent in parents:
            for bad in parent.watchers:
                chain = self._consumers.setdefault(bad, [])
                if len(chain) < CHAIN:
                    chain.append(name)
                    watchers += (bad,)
        return watchers[:4]

    def _inherit(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        taint = next((t.__dict__[TAINT] for t in inputs if TAINT in t.__dict__), None)
        for tensor in outputs:
            if taint is not None:
                tensor.__dict__[TAINT] = taint
            else:
                tensor.__dict__.pop(TAINT, None)

    def _not_finite(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Tensor, node: Any,
        maker: _Maker,
    ) -> None:  # fmt: skip
        taint = next((t.__dict__[TAINT] for t in tensors if TAINT in t.__dict__), None)
        inputs = [t for t in tensors if t is not out]
        clean = all(op_facts.all_finite(t) for t in inputs if t.is_floating_point())
        # What an in-place op was given is gone; its mark says that it was not finite before.
        clean = clean and TAINT not in out.__dict__
        if op_facts.has_nonfinite_scalar(args, kwargs):
            return  # a constant -inf was written on purpose: a mask
        if taint is not None and not clean:
            # NaN out of Inf (Inf - Inf, 0 * Inf) is a new kind of trouble with an old root.
            out.__dict__[TAINT] = taint
            return
        if not clean:
            out.__dict__.setdefault(TAINT, -1)  # came with the data or from an intended -inf
            self._note_source(func, inputs, node)
            kind = "softmax" in func._opname and op_facts.has_nan(out)
            if not kind and not (op_facts.has_nan(out) and not any(map(op_facts.has_nan, inputs))):
                return
        bad_id = self._remember("nonfinite", func, args, kwargs, inputs, out, node)
        if bad_id is not None:
            out.__dict__[TAINT] = bad_id
            maker.watchers = (*maker.watchers, bad_id)

    def _note_source(self, func: Any, inputs: list[Tensor], node: Any) -> None:
        """A tensor that no watched op made brought a non-finite value: data or a parameter."""
        for tensor in inputs:
            fresh = not hasattr(tensor, MAKER) and tensor.is_floating_point()
            if node is None and fresh and not op_facts.all_finite(tensor):
                kind = "nan_operand" if op_facts.has_nan(tensor) else "inf_operand"
                self.uses.add(kind, func._opname, self.attempt, lambda: self._named_place(None))

    def _finite_half(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Tensor, node: Any,
        maker: _Maker, before: Any,
    ) -> None:  # fmt: skip
        stalled = None if self.in_optimizer else op_facts.stalled_share(func, args, out, before)
        if stalled is not None and _is_running(func._opname, args):
            self._remember("stall", func, args, kwargs, tensors, out, node, error=stalled)
        first = before if before is not None else (args[0] if args else None)
        running = node is None and not self.in_optimizer
        if (
            running
            and isinstance(first, Tensor)
            and func._opname in DRIFTING
            and _is_running(func._opname, args)
        ):
            line = self.lines.where()
            drift = self.sums.drift(line, func, args, kwargs, first, out)
            if drift is not None and drift > op_facts.COARSE:
                self._remember("drift", func, args, kwargs, tensors, out, node, error=drift)
        if self.compare_fp32 and op_facts.is_accumulation(func):
            error = op_facts.fp32_error(func, args, kwargs, out)
            if error is not None and error > op_facts.COARSE:
                self._remember("coarse", func, args, kwargs, tensors, out, node, error=error)

    def _remember(
        self, kind: str, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], out: Tensor,
        node: Any, error: float | None = None,
    ) -> int | None:  # fmt: skip
        module, place, function = self.place(node)
        key = (kind, func, id(module), place, node is None)
        known = self._first.get(key)
        if known is not None:
            bad = self.bad[known]
            self.bad[known] = dataclasses.replace(
                bad,
                count=bad.count + 1,
                last_attempt=self.attempt,
                error=bad.error if error is None else max(error, bad.error or 0.0),
            )
            return known
        if len(self.bad) >= MAX_BAD:
            return None
        bad_id = self._first[key] = len(self.bad)
        fp32 = op_facts.in_fp32(func, args, kwargs) if kind == "nonfinite" else None
        self.bad[bad_id] = BadOp(
            id=bad_id,
            kind=kind,
            attempt=self.attempt,
            phase=self.phase if node is None else "backward",
            op=f"{func.namespace}.{func._opname}",
            node="" if node is None else node.name(),
            module=self.paths.path(module),
            module_type="" if module is None else type(module).__name__,
            line=line_name(place),
            code=line_text(place),
            dtype=dtype_name(out.dtype),
            inputs=tuple(op_facts.operand(t, _producers(t), is_parameter(t)) for t in inputs[:4]),
            scalars=op_facts.scalars(args, kwargs),
            **op_facts.special_counts(out),
            total=out.numel(),
            fp32_max=op_facts.max_abs(fp32),
            fp32_finite=None if fp32 is None else op_facts.all_finite(fp32),
            autocast=bool(self.autocast),
            last_attempt=self.attempt,
            error=error,
            function=function,
            grad_enabled=torch.is_grad_enabled(),
            tracked=any(t.requires_grad for t in inputs),
        )
        return bad_id


def unmark(tensor: Tensor) -> None:
    """Take the marks off."""
    tensor.__dict__.pop(MAKER, None)
    tensor.__dict__.pop(TAINT, None)


def is_parameter(tensor: Tensor) -> bool:
    """A parameter, or a view or cast of one."""
    return isinstance(tensor, nn.Parameter) or getattr(
        getattr(tensor, MAKER, None), "parameter", False
    )


def root_of_loss(loss: Tensor) -> str:
    """How the root of a backward pass was made, "mul 65536" for a loss times a constant."""
    maker = getattr(loss, MAKER, None)
    if maker is None:
        return ""
    return maker.names[0] if maker.scalar is None else f"{maker.names[0]} {maker.scalar:g}"


def _is_running(name: str, args: Any) -> bool:
    """Whether the op adds to something that lives on: an in-place sum, a sum of its own result,
    or a copy of a freshly computed average. A residual addition is none of these."""
    if name in IN_PLACE or name == "lerp_":
        return not torch.is_grad_enabled() or not args[0].requires_grad
    made = _producers(args[1])[:1] if name == "copy_" else _producers(args[0])[:3]
    if name == "copy_":
        return made in (("add",), ("lerp",), ("sub",)) or _producers(args[1])[:2] == (
            "_to_copy", "add",
        )  # fmt: skip
    return name in made or (not torch.is_grad_enabled() and made[:1] == ("mul",))


def _constant(args: Any) -> float | None:
    for part in args[1:] if isinstance(args, tuple) else ():
        if isinstance(part, int | float) and not isinstance(part, bool):
            return float(part)
        if isinstance(part, Tensor) and part.dim() == 0 and not hasattr(part, MAKER):
            return float(part) if part.is_floating_point() else None
    return None


def _producers(tensor: Tensor) -> tuple[str, ...]:
    """Names of the ops that led to ``tensor``, nearest first."""
    maker = getattr(tensor, MAKER, None)
    return () if maker is None else maker.names


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Runs each op and shows it to the watch."""

    def __init__(self, watch: OpWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        watch = self.watch
        if not watch.enabled or watch.seen_ops >= watch.budget:
            return func(*args, **kwargs)
        before = op_facts.remember_target(func, args)
        out = func(*args, **kwargs)
        watch.after(func, args, kwargs, out, before)
        return out
