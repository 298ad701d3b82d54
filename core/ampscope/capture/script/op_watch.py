"""Instrument: finds the ops whose finite inputs gave a non-finite output, forward and backward.

Each op below autocast is looked at once, by a dispatch mode. What it finds is kept as marks on the
tensors (:mod:`op_marks`) and as records (:mod:`bad_ops`); :meth:`OpWatch.taint_of` the loss or of a
gradient then names the root.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.script import op_facts, op_marks
from ampscope.capture.script.bad_ops import BadOps
from ampscope.capture.script.coarse_ops import CoarseOps
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_call import OpCall
from ampscope.capture.script.op_marks import FOREIGN, MAKER, TAINT, Maker
from ampscope.capture.script.op_origins import Origins
from ampscope.capture.script.op_uses import Uses
from ampscope.capture.script.source_lines import SourceLines
from ampscope.capture.script.write_lines import WriteLines
from ampscope.capture.tensors import HALF
from ampscope.observations import BadOp


class OpWatch:
    """Watches while entered. Results: :meth:`records`, :attr:`uses`, :meth:`taint_of` a tensor."""

    def __init__(self, paths: ModulePaths, lines: SourceLines, budget: int) -> None:
        self.lines = lines
        self.budget = budget  # ops to look at before it goes to sleep
        self.seen_ops = 0
        self.enabled = True
        self.in_optimizer = False
        self.on_op: Callable[[Any, Any, Any, Any], None] | None = None  # (func, args, kwargs, out)
        self.autocast = ""  # dtype of the autocast region that is open, "" outside
        self.uses = Uses()
        self.writes = WriteLines(lines)
        self._attempt = 0
        self._origins = Origins(paths, lines)
        paths.on_change = self._origins.module_changes
        self._bad = BadOps(self._origins)
        self._coarse = CoarseOps(self._bad, lines)
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

    @property
    def functions(self) -> list[str]:
        """The user's autograd.Functions that run now, innermost last."""
        return self._origins.functions

    def set_in_optimizer(self, inside: bool) -> None:
        """Ops of an optimizer's own step are not sums of the script's."""
        self.in_optimizer = inside

    def taint_of(self, tensor: Tensor | None) -> int | None:
        """Id of the bad op that made ``tensor`` non-finite."""
        return None if tensor is None else getattr(tensor, TAINT, None)

    def new_attempt(self, attempt: int) -> None:
        """Optimizer step number ``attempt`` begins."""
        self._attempt = self._bad.attempt = attempt
        self._origins.new_attempt()

    def records(self) -> list[BadOp]:
        """All bad ops with the consumers that were seen."""
        return self._bad.records()

    def function_applied(self) -> None:
        """A user's autograd.Function has run, and its node was made just before."""
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
            self._origins.remember()

    def note_function(self, name: str, decorated: bool) -> None:
        """A user's autograd.Function is about to run under autocast."""
        self.uses.custom_function(name, decorated, self._attempt, lambda: self._origins.names(None))

    def after(self, call: OpCall, out: Any) -> None:
        """Look at one op that has just run."""
        self.seen_ops += 1
        maker = self._maker(call)
        if call.node is None and torch.is_grad_enabled():
            self._origins.remember()
        outputs = op_facts.tensors(out, None)
        for tensor in outputs:
            tensor.__dict__[MAKER] = maker
        if self.writes.active and call.node is None and not self.in_optimizer:
            self.writes.note(call, outputs)
        if call.name in op_marks.PASSES_ON:
            op_marks.inherit_taint(call.tensors, outputs)
            return
        for tensor in outputs:
            if tensor.is_floating_point() and tensor.numel() and not tensor.is_sparse:
                self._look(call, tensor, maker)
        self.uses.note(
            call.func, call.args, call.tensors, out, self.autocast, self._attempt,
            lambda: self._origins.names(call.node),
        )  # fmt: skip

    def _maker(self, call: OpCall) -> Maker:
        parents = [m for t in call.tensors if (m := op_marks.maker_of(t)) is not None]
        watchers = self._bad.note_consumer(call.name, parents)
        maker = Maker(call.name, parents, watchers, op_marks.constant(call.args))
        maker.parameter = op_marks.is_still_parameter(call.name, call.tensors)
        return maker

    def _look(self, call: OpCall, out: Tensor, maker: Maker) -> None:
        if not op_facts.all_finite(out):
            self._not_finite(call, out, maker)
            return
        out.__dict__.pop(TAINT, None)
        if out.dtype in HALF:
            self._coarse.note(call, out, self.autocast, in_optimizer=self.in_optimizer)

    def _not_finite(self, call: OpCall, out: Tensor, maker: Maker) -> None:
        taint = op_marks.first_taint(call.tensors)
        inputs = [t for t in call.tensors if t is not out]
        clean = all(op_facts.all_finite(t) for t in inputs if t.is_floating_point())
        # What an in-place op was given is gone; its mark says that it was not finite before.
        clean = clean and TAINT not in out.__dict__
        if op_facts.has_nonfinite_scalar(call.args, call.kwargs):
            return  # a constant -inf was written on purpose: a mask
        if taint is not None and not clean:
            # NaN out of Inf (Inf - Inf, 0 * Inf) is a new kind of trouble with an old root.
            out.__dict__[TAINT] = taint
            return
        if not clean:
            out.__dict__.setdefault(TAINT, FOREIGN)
            self._note_source(call, inputs)
            if not _is_new_nan(call, inputs, out):
                return
        bad_id = self._bad.remember("nonfinite", call, inputs, out, self.autocast)
        if bad_id is not None:
            out.__dict__[TAINT] = bad_id
            maker.watchers = (*maker.watchers, bad_id)

    def _note_source(self, call: OpCall, inputs: list[Tensor]) -> None:
        """A tensor that no watched op made brought a non-finite value: data or a parameter."""
        for tensor in inputs:
            fresh = op_marks.maker_of(tensor) is None and tensor.is_floating_point()
            if call.node is None and fresh and not op_facts.all_finite(tensor):
                fact = "nan_operand" if op_facts.has_nan(tensor) else "inf_operand"
                self.uses.add(fact, call.name, self._attempt, lambda: self._origins.names(None))


def _is_new_nan(call: OpCall, inputs: list[Tensor], out: Tensor) -> bool:
    """NaN out of untainted infinities, such as a softmax over a row that is all -inf."""
    if not op_facts.has_nan(out):
        return False
    return "softmax" in call.name or not any(map(op_facts.has_nan, inputs))


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
        is_traced = torch._C._get_tracing_state() is not None  # looks would become its ops
        if is_traced or not watch.enabled or watch.seen_ops >= watch.budget:
            return func(*args, **kwargs)
        before = op_facts.remember_target(func, args)
        out = func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        tensors = op_facts.tensors(args, kwargs)
        if watch.on_op is not None:
            watch.on_op(func, args, kwargs, out)
        watch.after(OpCall(func, args, kwargs, tensors, node, before), out)
        return out
