"""Instrument: finds the ops whose finite inputs gave a non-finite output, forward and backward.

Each op below autocast is looked at once, by a dispatch mode. What it finds is kept as marks on the
tensors (:mod:`op_marks`) and as records (:mod:`bad_ops`); :meth:`OpWatch.taint_of` the loss or of a
gradient then names the root.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.failures import Failures
from ampscope.capture.script import op_facts, op_marks
from ampscope.capture.script.bad_ops import BadOps
from ampscope.capture.script.coarse_ops import CoarseOps
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_call import OpCall, overwrites, targets
from ampscope.capture.script.op_marks import FOREIGN, INTENDED, MAKER, Maker, Taints
from ampscope.capture.script.op_origins import Origins
from ampscope.capture.script.op_uses import Uses
from ampscope.capture.script.reads import ITEM, Reads
from ampscope.capture.script.source_lines import SourceLines
from ampscope.capture.script.write_lines import WriteLines
from ampscope.capture.tensors import HALF
from ampscope.formats import dtype_name
from ampscope.observations import BadOp
from ampscope.policy import gaps

# Results that are log-probabilities of what may be impossible, for the backward pass alone: -inf
# there is no failure.
_WORKSPACE = {
    "_ctc_loss": (1,),
    "_cudnn_ctc_loss": (1,),
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_flash_attention": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1,),
}


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
        self.failures = Failures()
        self.gap_ops: set[tuple[str, str]] = set()  # op, dtype: see policy.gaps
        self._known_ops: set[tuple[int, torch.dtype]] = set()
        self.uses = Uses()
        self.taints = Taints()
        self._read: dict[str, int] = {}  # "nan", "inf", "-inf" that Python got -> bad op
        self.writes = WriteLines(lines)
        self._attempt = 0
        self._origins = Origins(paths, lines)
        paths.on_change = self._origins.module_changes
        self._bad = BadOps(self._origins)
        self._coarse = CoarseOps(self._bad, lines)
        self.reads = Reads(self._bad, lines, self.taint_of)
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
        """Id of the bad op that made ``tensor`` non-finite; :data:`op_marks.FOREIGN` where that
        came with the data. None of finite tensors, and of what was written on purpose."""
        taint = None if tensor is None else self.taints.of(tensor)
        if tensor is None or taint is None or taint == INTENDED:
            return None
        with no_dispatch():
            return None if op_facts.all_finite(tensor) else taint

    def new_attempt(self, attempt: int) -> None:
        """Optimizer step number ``attempt`` begins."""
        self._attempt = self._bad.attempt = attempt
        self._origins.new_attempt()
        self._read.clear()

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

    def subclasses(self, name: str, types: Sequence[type]) -> None:
        """Op ``name`` was given tensors with a dispatch of their own."""
        self.uses.subclasses(name, types, self._attempt, lambda: self._origins.names(None))

    def after(self, call: OpCall, out: Any) -> None:
        """Look at one op that has just run."""
        self.seen_ops += 1
        self._note_gap(call)
        maker = self._maker(call)
        if call.node is None and torch.is_grad_enabled():
            self._origins.remember()
        results = op_facts.tensors(out, None)
        for tensor in results:
            tensor.__dict__[MAKER] = maker
        self.reads.compared(call.tensors, results)
        if self.writes.active and call.node is None and not self.in_optimizer:
            self.writes.note(call, results)
        if call.name in op_marks.PASSES_ON:
            return
        for part, outputs in call.parts(results):
            for position, tensor in enumerate(outputs):
                if tensor.numel() and _may_be_bad(tensor) and not tensor.is_sparse:
                    self._look(part, tensor, maker, position)
        self.uses.note(
            call.func, call.args, call.tensors, out, self.autocast, self._attempt,
            lambda: self._origins.names(call.node),
        )  # fmt: skip

    def prior_taints(self, func: Any, args: Any, kwargs: Any) -> dict[int, int]:
        """Of the tensors that ``func`` is about to change and that are not finite: id -> taint."""
        if overwrites(func):
            return {}
        found = {}
        for tensor in targets(func, args, kwargs):
            taint = self.taints.of(tensor)
            if taint is None and op_marks.maker_of(tensor) is not None:
                continue  # a watched op made it, and it was finite
            if not _may_be_bad(tensor) or tensor.is_sparse:
                continue
            if not op_facts.all_finite(tensor):
                found[id(tensor)] = self._foreign(tensor) if taint is None else taint
        return found

    def note_read(self, tensor: Tensor, value: Any) -> None:
        """A number leaves for Python: ``scale = amax.item()``."""
        if isinstance(value, float) and not math.isfinite(value):
            taint = self.taints.of(tensor)
            if taint is not None and taint >= 0:
                self._read[str(value)] = taint

    def _note_gap(self, call: OpCall) -> None:
        """Keep an op that a CPU computes otherwise than CUDA."""
        dtypes = {tensor.dtype for tensor in call.tensors if tensor.is_floating_point()}
        for dtype in dtypes:
            key = (id(call.func), dtype)
            if key not in self._known_ops:
                self._known_ops.add(key)
                named = (f"aten.{call.name}", dtype_name(dtype))
                if gaps.concerned(*named):
                    self.gap_ops.add(named)

    def _maker(self, call: OpCall) -> Maker:
        parents = [m for t in call.tensors if (m := op_marks.maker_of(t)) is not None]
        watchers = self._bad.note_consumer(call.name, parents)
        maker = Maker(call.name, parents, watchers, op_marks.constant(call.args))
        maker.parameter = op_marks.is_still_parameter(call.name, call.tensors)
        maker.learned = call.node is not None or any(map(op_marks.is_learned, call.tensors))
        return maker

    def _look(self, call: OpCall, out: Tensor, maker: Maker, position: int) -> None:
        if not op_facts.all_finite(out):
            self._not_finite(call, out, maker, position)
            return
        self.taints.clear(out)
        if out.dtype in HALF:
            self._coarse.note(call, out, self.autocast, in_optimizer=self.in_optimizer)

    def _not_finite(self, call: OpCall, out: Tensor, maker: Maker, position: int) -> None:
        inputs = [t for t in call.tensors if t is not out]
        bad = [t for t in inputs if _may_be_bad(t) and not op_facts.all_finite(t)]
        if not bad and position in _WORKSPACE.get(call.name, ()):
            self.taints.mark(out, INTENDED)
            return
        constants = op_facts.nonfinite_scalars(call.args, call.kwargs)
        taint = self._inherited(call, out, bad, constants, position)
        if taint is not None and taint >= 0:
            # NaN out of Inf (Inf - Inf, 0 * Inf) is a new kind of trouble with an old root.
            self.taints.mark(out, taint)
            return
        if taint is not None:
            self._note_source(call, inputs)
        if taint is not None and not _is_new_nan(call, bad, constants, out, taint):
            self.taints.mark(out, taint)
            return
        bad_id = self._bad.remember("nonfinite", call, inputs, out, self.autocast)
        self.taints.mark(out, FOREIGN if bad_id is None else bad_id)
        if bad_id is not None:
            maker.watchers = (*maker.watchers, bad_id)

    def _inherited(
        self, call: OpCall, out: Tensor, bad: list[Tensor], constants: list[float], position: int
    ) -> int | None:
        """Taint that ``out`` gets from what went in; None when all of that was finite."""
        taints = [(t, self._taint_or_foreign(t)) for t in bad]
        if id(out) in call.prior:  # what an in-place op was given is gone
            taints.append((out, call.prior[id(out)]))
        roots = [(t, taint) for t, taint in taints if taint >= 0]
        others = [taint for _, taint in taints if taint < 0]
        for constant in constants:
            read = self._read.get(str(constant))
            if read is not None and not roots:
                return read
            others.append(INTENDED)
        if not roots:
            return max(others, default=None)
        # A mask may cover the very places at which the overflow lay.
        if INTENDED not in others or FOREIGN in others:
            return roots[0][1]
        tensors = [t for t, _ in roots]
        is_root = op_facts.is_from(
            tensors, call.func, call.args, call.kwargs, call.before, out, position
        )
        return roots[0][1] if is_root else INTENDED

    def _taint_or_foreign(self, tensor: Tensor) -> int:
        taint = self.taints.of(tensor)
        return self._foreign(tensor) if taint is None else taint

    def _foreign(self, tensor: Tensor) -> int:
        """What a tensor with non-finite values and without a mark brought: a mask has -inf only."""
        return INTENDED if op_facts.is_minus_inf_only(tensor) else FOREIGN

    def _note_source(self, call: OpCall, inputs: list[Tensor]) -> None:
        """A tensor that no watched op made brought a non-finite value: data or a parameter."""
        for tensor in inputs:
            fresh = op_marks.maker_of(tensor) is None and tensor.is_floating_point()
            if call.node is None and fresh and not op_facts.all_finite(tensor):
                fact = "nan_operand" if op_facts.has_nan(tensor) else "inf_operand"
                self.uses.add(fact, call.name, self._attempt, lambda: self._origins.names(None))


def _may_be_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_new_nan(
    call: OpCall, bad: list[Tensor], constants: list[float], out: Tensor, taint: int
) -> bool:
    """NaN out of infinities that no bad op had made, such as a softmax over a row of -inf."""
    if not op_facts.has_nan(out) or any(map(math.isnan, constants)):
        return False
    dim = call.args[1] if len(call.args) > 1 else None
    if "softmax" in call.name and bad and isinstance(dim, int):
        return op_facts.has_empty_row(bad[0], dim) or not op_facts.has_nan(bad[0])
    if id(out) in call.prior and call.before is None:
        return taint == INTENDED
    before = [] if call.before is None else [call.before]
    fresh = taint == INTENDED or all(op_marks.maker_of(t) is None for t in bad)
    return fresh and not any(map(op_facts.has_nan, (*bad, *before)))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Runs each op and shows it to the watch."""

    supports_higher_order_operators = True  # torch.cond and flex_attention run as without

    def __init__(self, watch: OpWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        watch = self.watch
        if not isinstance(func, torch._ops.OpOverload):
            return func(*self._watching_inside(args), **kwargs)
        is_traced = torch._C._get_tracing_state() is not None  # looks would become its ops
        if is_traced or not watch.enabled:
            return func(*args, **kwargs)
        if func is ITEM:  # also when the budget is used up: a script may read its loss at any step
            value = func(*args, **kwargs)
            with watch.failures.contained("some ops"):
                watch.reads.read(args[0], value)
                watch.note_read(args[0], value)
            if watch.on_op is not None and watch.seen_ops < watch.budget:
                watch.on_op(func, args, kwargs, value)
            return value
        if watch.seen_ops >= watch.budget:
            return func(*args, **kwargs)
        if types:
            watch.subclasses(func._opname, types)
        prior: dict[int, int] = {}
        before = None
        with watch.failures.contained("some ops"):  # a look must never end the script's own op
            prior = watch.prior_taints(func, args, kwargs)
            before = op_facts.remember_target(func, args, is_bad=bool(prior))
        out = func(*args, **kwargs)
        with watch.failures.contained("some ops"):
            node = torch._C._current_autograd_node()
            tensors = op_facts.tensors(args, kwargs)
            if watch.on_op is not None:
                watch.on_op(func, args, kwargs, out)
            watch.after(OpCall(func, args, kwargs, tensors, node, before, prior), out)
        return out

    def _watching_inside(self, args: tuple[Any, ...]) -> list[Any]:
        """The functions that a higher-order operator calls, such as the branches of torch.cond,
        with their ops watched."""

        def watched(function: Any) -> Any:
            @functools.wraps(function)
            def inside(*given: Any, **named: Any) -> Any:
                with self:
                    return function(*given, **named)

            return inside

        is_function = (callable(a) and not isinstance(a, Tensor | nn.Module) for a in args)
        return [watched(a) if wanted else a for a, wanted in zip(args, is_function, strict=True)]
