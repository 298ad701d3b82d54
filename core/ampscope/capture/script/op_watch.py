"""Instrument: finds the ops whose finite inputs gave a non-finite output, forward and backward.

Each op below autocast is looked at once, by a dispatch mode. What it finds is kept as marks on the
tensors (:mod:`ampscope.capture.script.op_taint`) and as records
(:class:`~ampscope.capture.script.bad_ops.BadOps`); :meth:`OpWatch.taint_of` the loss or of a
gradient then names the root. Ops that stay finite and are wrong are found as well.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.failures import Failures
from ampscope.capture.global_hooks import (
    a_step_runs,
)
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script import cancellation, op_exact, op_facts, op_taint, running_sums
from ampscope.capture.script.bad_ops import BadOps, Origins
from ampscope.capture.script.gradient_changes import WriteLines
from ampscope.capture.script.mode_sleep import ModeSleep
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.nonfinite_reads import COMPARED_MARK, ITEM, OWN_CODE, NonFiniteReads
from ampscope.capture.script.op_facts import OpCall, overwrites, targets
from ampscope.capture.script.op_taint import FOREIGN, INTENDED, Provenance
from ampscope.capture.script.op_uses import CONCERNING, OpUses
from ampscope.capture.script.stale_copies import ModelCopies, Region, StaleCopies, WeightCopy
from ampscope.capture.tensors import HALF, PLAIN, all_finite, are_finite, in_backward, is_capturing
from ampscope.capture.training_events import StepListener
from ampscope.number_words import plural
from ampscope.numerics.formats import dtype_name
from ampscope.observations import INACCURATE_ERROR, BadOp
from ampscope.policy import op_lists
from ampscope.source_lines import SourceLines

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
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# Results come from other processes: a value that is not finite was made there, or by their sum.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
_CASTS_INSIDE = torch.ops.aten._sparse_addmm.default
_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
IN_FULL = 8  # forward passes of one module in an evaluation
RUNNING_SUMS = frozenset({*running_sums.IN_PLACE, "add", "sub"})


# Numbers that no rounding to half has touched, if nothing follows them; ops of which there is more
# to tell; and the marks of what is followed.
_QUIET = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool})
_NEVER_QUIET = frozenset({"_to_copy", *CONCERNING})
_FOLLOWED = frozenset({op_taint.EXACT, op_taint.MADE, COMPARED_MARK})


class _Given(NamedTuple):
    """What goes into a quiet op."""

    tensors: list[Tensor]
    parents: list[Provenance]


class OpWatch(StepListener):
    """Watches while entered. Results: :meth:`records`, :attr:`uses`, :meth:`taint_of` a tensor."""

    def __init__(
        self,
        paths: ModulePaths,
        lines: SourceLines,
        budget: int,
        on_op: Callable[[Any, Any, Any, Any], None] | None = None,
        prepares: int | None = None,
        on_half: Callable[[], None] | None = None,
    ) -> None:
        """``on_op`` is shown each op as well: (func, args, kwargs, out). ``prepares``: ops before
        a training begins that are looked at, None for all; the watch sleeps through the others.
        ``on_half`` is called once, when half precision first takes part."""
        self.lines = lines
        self.budget = budget  # ops to look at
        self._allowed = budget
        self._sleeps_at = prepares  # so many ops seen, unless a training has begun; None: never
        self._on_half = on_half
        self.trains = False  # a training has begun
        self.seen_ops = 0
        self.captured_ops = 0  # that a CUDA graph took up, to replay them unseen
        self.enabled = True
        self.evaluations = Evaluations()
        self._in_optimizer = False
        self.on_op = on_op
        self.autocast = ""  # dtype of the autocast region that is open, "" outside
        self.autocast_keys: Any = None  # of the devices for which autocast is on; None outside
        self.failures = Failures()
        self.gap_ops: set[tuple[str, str]] = set()  # op, dtype: see policy.op_lists
        self._known_ops: set[tuple[int, torch.dtype]] = set()
        self.region: Region | None = None  # the outermost autocast region that is open
        self.uses = OpUses()
        self.copies = StaleCopies()
        self.model_copies = ModelCopies()
        self._models = paths.models
        self.taints = op_taint.Taints()
        self._read: dict[str, int] = {}  # "nan", "inf", "-inf" that Python got -> bad op
        self.writes = WriteLines(lines)
        self._step = 0
        self._origins = Origins(paths, lines)
        self._bad = BadOps(self._origins)
        self._sums = running_sums.RunningSums()
        self._cancellations = cancellation.Cancellations()
        self.reads = NonFiniteReads(self._bad, lines, self.taint_of)
        self._mode = _Mode(self)
        self._sleep = ModeSleep(self._mode)
        self._slept_at = -1  # ops seen before it slept last
        self._missed_forward = False
        self._has_left = False  # for good, until it is asked to come back

    def __enter__(self) -> OpWatch:
        self._origins.__enter__()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's is untyped
        return self

    def __exit__(self, *error: object) -> None:
        self._sleep.close()
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        self._origins.__exit__(*error)

    @property
    def is_asleep(self) -> bool:
        """Whether ops pass by unseen, at the speed that they have without the watch."""
        return self._sleep.is_asleep

    def training_begins(self, *, has_begun: bool = False) -> None:
        """A training begins: a forward pass, or gradients are cleared. ``has_begun``: it is seen
        only at a backward pass or a step, behind the forward pass. Only the first call counts; the
        budget of ops starts here."""
        if not self.trains:
            self.trains = True
            self._missed_forward = has_begun and self.is_asleep
            self.budget = self.seen_ops + self._allowed
            self._wake()

    def half_begins(self) -> None:
        """Half precision takes part from here on, or would without a control: all before was no
        part of the budget. Only the first call counts."""
        if self._on_half is not None:
            on_half, self._on_half = self._on_half, None
            self.budget = self.seen_ops + self._allowed
            on_half()
        self._wake()

    def rest(self, *, until_half: bool) -> None:
        """Let ops pass by unseen until a call asks for half precision; False: see them again. From
        outside any op."""
        if not until_half:
            self._wake()
        elif not self.is_asleep:
            self._sleep.leave()

    def leave(self) -> None:
        """Look at no further op. From outside any op."""
        self.enabled, self._has_left = False, True
        if not self.is_asleep:
            self._sleep.leave()

    def come_back(self) -> None:
        """Look at ops again, after :meth:`leave`. From outside any op."""
        self.enabled, self._has_left = True, False
        self._sleep.wake()

    def _wake(self) -> None:
        self._sleeps_at = None
        if not self._has_left:
            self._sleep.wake()

    def fall_asleep_if_due(self) -> None:
        """Called inside an op, which has been looked at."""
        if self._sleeps_at is not None and self.seen_ops >= self._sleeps_at:
            self._slept_at = self.seen_ops
            self._sleeps_at = 2 * self.seen_ops  # should it be kept awake now
            self._sleep.ask(_calling(self.lines))

    @property
    def functions(self) -> list[str]:
        """The user's autograd.Functions that run now, innermost last."""
        return self._origins.functions

    @property
    def in_optimizer(self) -> bool:
        """Whether an optimizer's own step runs, whose ops are not sums of the script's."""
        # Nothing is heard of the end of a step that raised.
        self._in_optimizer = self._in_optimizer and a_step_runs()
        return self._in_optimizer

    def before_step(self, optimizer: Any, scaler: Any, *, has_closure: bool) -> None:
        self.evaluations.end()
        self._in_optimizer = not has_closure
        self.model_copies.before_step(optimizer, self._models, self._step)
        self.training_begins(has_begun=True)

    def scaled(self, scaler: Any, loss: Any, result: Any) -> None:
        self.half_begins()

    def after_step(self, optimizer: Any, scaler: Any) -> None:
        self._in_optimizer = False

    def taint_of(self, tensor: Tensor | None) -> int | None:
        """Id of the bad op that made ``tensor`` non-finite; :data:`op_taint.FOREIGN` where that
        came with the data. None of finite tensors, and of what was written on purpose."""
        taint = None if tensor is None else self.taints.of(tensor)
        if tensor is None or taint is None or taint == INTENDED:
            return None
        with own_ops():
            return None if all_finite(tensor) else taint

    def place(self) -> tuple[str, int]:
        """(file, line) of the user's code that the op that runs belongs to; ("", 0) for none."""
        return self._origins.of(torch._C._current_autograd_node()).place

    def made_at(self, node: Any) -> str:
        """The line ("train.py:41") of the forward op whose autograd node is ``node``."""
        return self._origins.names(node)[1]

    def names(self) -> tuple[str, str]:
        """(dotted module, "train.py:41") that the op that runs belongs to."""
        return self._origins.names(torch._C._current_autograd_node())

    def new_step(self, step: int) -> None:
        """Optimizer step number ``step`` begins."""
        self._step = self._bad.step = step
        self._origins.new_step()
        self._cancellations.new_step(step)
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
        self.uses.custom_function(name, decorated, self._step, lambda: self._origins.names(None))

    def subclasses(self, name: str, types: Sequence[type]) -> None:
        """Op ``name`` was given tensors with a dispatch of their own."""
        self.uses.subclasses(name, types, self._step, lambda: self._origins.names(None))

    def after(self, call: OpCall, out: Any) -> None:
        """Look at one op that has just run."""
        self.seen_ops += 1
        self._note_gap(call)
        results = op_facts.tensors(out, None)
        provenance = self._provenance(call, results)
        if call.node is None and torch.is_grad_enabled():
            self._origins.remember()
        if self._on_half is not None and any(t.dtype in HALF for t in results):
            self.half_begins()
        for tensor in results:
            tensor.__dict__[op_taint.PROVENANCE] = provenance
            tensor.__dict__.pop(op_taint.EXACT, None)  # of what an op in place has changed
        if call.node is None and self._cancellations.looks and not self.in_optimizer:
            self._note_cancellation(call, out)
        if call.node is not None:
            self._bad.gradient_through(call.node)
        self.reads.compared(call.tensors, results)
        if self.writes.active and call.node is None and not self.in_optimizer:
            self.writes.note(call, results)
        if call.node is not None:
            self._note_replaced(call, results)
        if call.name in op_taint.PASSES_ON:
            for tensor in results[:1]:
                op_exact.follow(call, tensor)
            return
        looked_at = [
            (part, tensor, position)
            for part, outputs in call.parts(results)
            for position, tensor in enumerate(outputs)
            if tensor.numel() and _may_be_bad(tensor) and not tensor.is_sparse
        ]
        finite = are_finite([tensor for _, tensor, _ in looked_at])
        for (part, tensor, position), is_finite in zip(looked_at, finite, strict=True):
            self._look(part, tensor, provenance, position, is_finite=is_finite)
        self.uses.note(
            call.func, call.args, call.tensors, out, self.autocast, self._step,
            lambda: self._origins.names(call.node),
        )  # fmt: skip

    def glance(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether there is no more to see in an op of one more evaluation: all numbers that it gave
        are finite, and nothing that is followed went in. Its results are marked then as
        :meth:`after` marks them."""
        results = out if type(out) in (list, tuple) else (out,)
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        given += [t for a in args if type(a) in (list, tuple) for t in a if isinstance(t, Tensor)]
        parents = []
        for tensor in given:
            marks = tensor.__dict__
            if op_taint.EXACT in marks or COMPARED_MARK in marks:
                return False
            if (parent := marks.get(op_taint.PROVENANCE)) is not None:
                if parent.watchers:
                    return False
                parents.append(parent)
        is_view = func._opname in op_taint.PASSES_ON
        for tensor in results:
            if type(tensor) is not Tensor or tensor.dtype is torch.bool or tensor.is_sparse:
                return False
            if tensor.dtype in HALF and self._on_half is not None:
                return False
            if not is_view and tensor.numel() and not all_finite(tensor):
                return False
        self._passed(func, args, results, _Given(given, parents))
        return True

    def _passed(self, func: Any, args: Any, results: Sequence[Tensor], given: _Given) -> None:
        """Mark the results of an op that no bad op leads to, as :meth:`after` would."""
        node = torch._C._current_autograd_node()
        if node is not None:
            self._bad.gradient_through(node)
        elif torch.is_grad_enabled():
            self._origins.remember()
        provenance = op_taint.without_watchers(func._opname, given.parents, args, given.tensors)
        provenance.learned = provenance.learned or node is not None
        for tensor in results:
            marks = tensor.__dict__
            marks[op_taint.PROVENANCE] = provenance
            marks.pop(op_taint.EXACT, None)
            marks.pop(COMPARED_MARK, None)

    def quiet(self, func: Any, args: Any, kwargs: Any) -> _Given | None:
        """What went into an op of which nothing can be told but whether its results are finite:
        numbers in fp32 or whole numbers, none of which is followed. None for any other op."""
        if self.writes.active or func._opname in _NEVER_QUIET:
            return None
        given: list[Tensor] = []
        parents: list[Provenance] = []
        for part in (*args, *kwargs.values()) if kwargs else args:
            for tensor in part if type(part) in (list, tuple) else (part,):
                if not isinstance(tensor, Tensor):
                    continue
                if type(tensor) not in PLAIN or tensor.dtype not in _QUIET:
                    return None
                marks = tensor.__dict__
                if not _FOLLOWED.isdisjoint(marks):
                    return None
                if (id(func), tensor.dtype) not in self._known_ops and tensor.is_floating_point():
                    return None
                if (parent := marks.get(op_taint.PROVENANCE)) is not None:
                    if parent.watchers or parent.copied is not None:
                        return None
                    parents.append(parent)
                if self.taints and self.taints.of(tensor) is not None:
                    return None
                given.append(tensor)
        return _Given(given, parents)

    def stays_quiet(self, given: _Given, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether all numbers of a quiet op's results are finite. These are marked then as
        :meth:`after` marks them."""
        results = out if type(out) in (list, tuple) else () if out is None else (out,)
        for tensor in results:
            if type(tensor) not in PLAIN or tensor.dtype not in _QUIET or tensor.is_sparse:
                return False
        if func._opname not in op_taint.PASSES_ON:
            known = {id(tensor) for tensor in results}
            outs = [*results, *(t for t in targets(func, args, kwargs) if id(t) not in known)]
            outs = [t for t in outs if t.is_floating_point() and t.numel()]
            if any(t.is_sparse for t in outs) or not all(are_finite(outs)):
                return False
            for tensor in outs:
                self.taints.clear(tensor)
        self.seen_ops += 1
        self._passed(func, args, results, given)
        return True

    def captured(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A CUDA graph records an op. There are no numbers yet, and a
        look would end the recording. Each replay writes numbers into the results unseen."""
        self.captured_ops += 1
        if torch._C._current_autograd_node() is None and torch.is_grad_enabled():
            self._origins.remember()
        mark = Provenance(func._opname, [], (), None)
        mark.learned = True  # no constant, for all that is known
        for tensor in (*op_facts.tensors(out, None), *targets(func, args, kwargs)):
            op_taint.unmark(tensor)
            tensor.__dict__[op_taint.PROVENANCE] = mark

    @property
    def sleep_note(self) -> str:
        """What of the training was missed; "" where it was watched from its first op."""
        if not self._missed_forward:
            return ""
        return (
            "The ops of the first forward pass are not recorded: no module with trainable "
            "parameters was called before the first backward pass or step."
        )

    @property
    def graph_note(self) -> str:
        """How much of the script ran in CUDA graphs; "" without any."""
        if not self.captured_ops:
            return ""
        ops = plural(self.captured_ops, "op")
        return f"{ops} ran inside a CUDA graph: not seen, neither as it was recorded nor replayed."

    def prior_taints(self, func: Any, args: Any, kwargs: Any) -> dict[int, int]:
        """Of the tensors that ``func`` is about to change and that are not finite: id -> taint."""
        if overwrites(func):
            return {}
        unknown = []
        for tensor in targets(func, args, kwargs):
            taint = self.taints.of(tensor)
            is_made_here = op_taint.provenance_of(tensor) is not None
            if taint is None and is_made_here and not self.captured_ops and self._slept_at < 0:
                continue  # a watched op made it, and it was finite
            if _may_be_bad(tensor) and not tensor.is_sparse:
                unknown.append((tensor, taint))
        finite = are_finite([tensor for tensor, _ in unknown])
        return {
            id(tensor): self._foreign(tensor) if taint is None else taint
            for (tensor, taint), is_finite in zip(unknown, finite, strict=True)
            if not is_finite
        }

    def note_read(self, tensor: Tensor, value: Any) -> None:
        """A number leaves for Python: ``scale = amax.item()``."""
        if isinstance(value, float) and not math.isfinite(value):
            taint = self.taints.of(tensor)
            if taint is not None and taint >= 0:
                self._read[str(value)] = taint

    def _note_gap(self, call: OpCall) -> None:
        """Keep an op that a CPU computes otherwise than CUDA."""
        for tensor in call.tensors:
            dtype = tensor.dtype
            key = (id(call.func), dtype)
            if key not in self._known_ops and dtype.is_floating_point:
                self._known_ops.add(key)
                named = (f"aten.{call.name}", dtype_name(dtype))
                if op_lists.concerned(*named):
                    self.gap_ops.add(named)

    def _provenance(self, call: OpCall, results: list[Tensor]) -> Provenance:
        parents = [m for t in call.tensors if (m := op_taint.provenance_of(t)) is not None]
        watchers = self._bad.note_consumer(call.name, parents)
        provenance = Provenance(call.name, parents, watchers, op_taint.constant(call.args))
        provenance.parameter = op_taint.is_still_parameter(call.name, call.tensors)
        provenance.learned = call.node is not None or any(map(op_taint.is_learned, call.tensors))
        if call.node is None and not self.in_optimizer:
            provenance.copied = self._copied(call, parents, results)
        return provenance

    def _copied(
        self, call: OpCall, parents: list[Provenance], results: list[Tensor]
    ) -> WeightCopy | None:
        """The half copy of a weight that ``call`` makes or gives a view of. An op that takes one
        is a use of it."""
        if call.name == "_to_copy" and call.tensors and results:
            line = functools.partial(self._line_of, call)
            return self.copies.made(call.tensors[0], results[0], self.region, line)
        held = [p.copied for p in parents if p.copied is not None]
        if call.name in op_taint.PASSES_ON:
            return held[0] if held else None
        for copy in held:
            module = functools.partial(self._module_of, call)
            self.copies.used(copy, f"aten.{call.name}", self._step, self.region, module)
        return None

    def _module_of(self, call: OpCall) -> str:
        return self._origins.names(call.node)[0]

    def _line_of(self, call: OpCall) -> str:
        return self._origins.names(call.node)[1]

    def _note_replaced(self, call: OpCall, results: list[Tensor]) -> None:
        """An op of a backward pass: does a hook of the script's make finite numbers of others
        there? A custom Function's own backward computes the gradient."""
        if call.name in op_taint.PASSES_ON or isinstance(call.node, BackwardCFunction):
            return
        for part, outputs in call.parts(results):
            marked = [(t, taint) for t in part.tensors if (taint := self._made_in_backward(t)) >= 0]
            for out in outputs if marked else ():
                found = [taint for t, taint in marked if t.shape == out.shape]
                is_finite = bool(found) and out.is_floating_point() and all_finite(out)
                if is_finite and self.lines.runs_a_hook():
                    self.writes.replaced(found[0])

    def _made_in_backward(self, tensor: Tensor) -> int:
        """The bad op of a backward pass behind the memory of ``tensor``; -1 without one."""
        taint = self.taints.of(tensor)
        record = None if taint is None or taint < 0 else self._bad.record(taint)
        return record.id if record is not None and record.phase == "backward" else -1

    def _look(
        self, call: OpCall, out: Tensor, provenance: Provenance, position: int, *, is_finite: bool
    ) -> None:
        if not is_finite:
            self._not_finite(call, out, provenance, position)
            return
        self.taints.clear(out)
        own_error = self._note_inaccurate(call, out) if out.dtype in HALF else 0.0
        if call.node is None and position == 0:
            self._note_lost(call, out, provenance, own_error)

    def _note_lost(
        self, call: OpCall, out: Tensor, provenance: Provenance, own_error: float
    ) -> None:
        """A finite result: is it another than fp32's because of what went before? ``own_error`` is
        what a sum has lost by its own rounding."""
        found = op_exact.overflow_lost(call, out)
        if found is not None:
            if torch.is_grad_enabled():
                matters = any(t.requires_grad for t in call.tensors)
            else:
                matters = any(map(op_taint.is_learned, call.tensors))
            if found[1] > INACCURATE_ERROR and matters:
                self._bad.note_lost(*found, f"aten.{call.name}")
            return
        place = functools.partial(self._origins.names, None)
        if not provenance.learned and not any(map(op_taint.is_parameter, call.tensors)):
            op_exact.follow_constant(call, out, self._step, place, own_error)
        elif (lost := op_exact.constant_lost(call)) is not None:
            name, where = "half_constant", lost.place
            if lost.is_statistics:
                name, where = "half_statistics", place()
            self.uses.add(
                name, call.name, self._step, lambda: where, lost.error, op_exact.CONSTANT_LOST
            )

    def _note_inaccurate(self, call: OpCall, out: Tensor) -> float:
        """A finite half-precision result: is it wrong all the same? The relative error that the
        op's own rounding, and that of the running sum it goes on with, have made.

        stall   a sum equals its first term although the second is not zero
        drift   the rounding errors of a running sum, added up
        coarse  a result far from the fp32 result of the same inputs
        """
        drift = 0.0 if self.in_optimizer else self._note_sum(call, out)
        if op_facts.is_accumulation(call.func):
            error = op_facts.fp32_error(call.func, call.args, call.kwargs, out)
            if error is not None and error > INACCURATE_ERROR:
                bad_id = self._bad.remember("coarse", call, call.tensors, out, self.autocast, error)
                self._bad.note_consumers_of(out, bad_id)
            return max(drift, error or 0.0)
        return drift

    def _note_cancellation(self, call: OpCall, out: Any) -> None:
        """cancelled: the terms of a sum agree so closely that their rounding is what is left."""
        if isinstance(out, Tensor) and any(map(op_taint.is_learned, call.tensors)):
            lost = self._cancellations.lost(call, out, self.lines.where)
            if lost is not None:
                self._bad.note_cancelled(call, out, self.autocast, lost)
        self._cancellations.keep(call, out, self.lines.where)

    def _note_sum(self, call: OpCall, out: Tensor) -> float:
        """The relative error of a running sum so far."""
        stagnated = op_facts.stagnated_share(call.func, call.args, out, call.before)
        if stagnated is not None and running_sums.adds_to_what_lives_on(call.name, call.args):
            self._bad.remember("stall", call, call.tensors, out, self.autocast, stagnated)
        first = call.before if call.before is not None else (call.args[0] if call.args else None)
        if call.node is not None or not isinstance(first, Tensor) or call.name not in RUNNING_SUMS:
            return 0.0
        drift = None
        if running_sums.adds_to_what_lives_on(call.name, call.args):
            line = self.lines.where()
            drift = self._sums.drift(line, call.func, call.args, call.kwargs, first, out)
            if drift is not None and drift > INACCURATE_ERROR:
                bad_id = self._bad.remember("drift", call, call.tensors, out, self.autocast, drift)
                self._bad.note_consumers_of(out, bad_id)
        return drift or 0.0

    def _not_finite(self, call: OpCall, out: Tensor, provenance: Provenance, position: int) -> None:
        inputs = [t for t in call.tensors if t is not out]
        bad = [t for t in inputs if _may_be_bad(t) and not all_finite(t)]
        if not bad and position in _WORKSPACE.get(call.name, ()):
            self.taints.mark(out, INTENDED)
            return
        constants = op_facts.nonfinite_scalars(call.args, call.kwargs)
        taint = self._inherited(call, out, bad, constants, position)
        if taint is not None and taint >= 0:
            # NaN out of Inf (Inf - Inf, 0 * Inf) is a new kind of trouble with an old root.
            self.taints.mark(out, taint)
            if position == 0:
                op_exact.follow(call, out)
            return
        if call.func.namespace in _COLLECTIVES:
            self.taints.mark(out, FOREIGN)
            return
        if taint is not None:
            self._note_source(call, inputs)
        if taint is not None and not _is_new_nan(call, bad, constants, out, taint):
            self.taints.mark(out, taint)
            return
        bad_id = self._bad.remember("nonfinite", call, inputs, out, self.autocast)
        self.taints.mark(out, FOREIGN if bad_id is None else bad_id)
        if bad_id is not None:
            provenance.watchers = (*provenance.watchers, bad_id)
            if position == 0 and self._bad.is_rare(bad_id):
                op_exact.begin(call, out, bad_id, lambda: ("", ""))

    def _inherited(
        self, call: OpCall, out: Tensor, bad: list[Tensor], constants: list[float], position: int
    ) -> int | None:
        """Taint that ``out`` gets from what went in, of several bad ops that of the one seen first;
        None when all of that was finite."""
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
        root = min(taint for _, taint in roots)
        # A mask may cover the very places at which the overflow lay.
        if INTENDED not in others or FOREIGN in others:
            return root
        tensors = [t for t, _ in roots]
        is_root = op_facts.is_from(
            tensors, call.func, call.args, call.kwargs, call.before, out, position
        )
        return root if is_root else INTENDED

    def _taint_or_foreign(self, tensor: Tensor) -> int:
        taint = self.taints.of(tensor)
        return self._foreign(tensor) if taint is None else taint

    def _foreign(self, tensor: Tensor) -> int:
        """What a tensor with non-finite values and without a mark brought: a mask has -inf only.
        A replayed CUDA graph may have written them."""
        if self.captured_ops:
            return FOREIGN
        return INTENDED if op_facts.is_minus_inf_only(tensor) else FOREIGN

    def _note_source(self, call: OpCall, inputs: list[Tensor]) -> None:
        """A tensor that no watched op made brought a non-finite value: data or a parameter."""
        if self.captured_ops:
            return
        for tensor in inputs:
            fresh = op_taint.provenance_of(tensor) is None and tensor.is_floating_point()
            if call.node is None and fresh and not all_finite(tensor):
                fact = "nan_operand" if op_facts.has_nan(tensor) else "inf_operand"
                self.uses.add(fact, call.name, self._step, lambda: self._origins.names(None))


def _calling(lines: SourceLines) -> FrameType | None:
    """The frame that called the op: the user's own, or a library's. What torch runs in Python may
    count on the modes that it has found."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_between = frame.f_code.co_filename.startswith((OWN_CODE, _TORCH))
        if not is_between or lines.is_user(frame.f_code):
            return frame
        frame = frame.f_back
    return None


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
    fresh = taint == INTENDED or all(op_taint.provenance_of(t) is None for t in bad)
    return fresh and not any(map(op_facts.has_nan, (*bad, *before)))


def autocast_keys() -> Any:
    """Dispatch keys of the devices for which autocast is on here; None where it is for none. Within
    a dispatch mode torch says that it is off."""
    keys = [key for kind, key in _AUTOCAST.items() if torch.is_autocast_enabled(kind)]
    sets = [torch._C.DispatchKeySet(key) for key in keys]
    return functools.reduce(lambda a, b: a | b, sets) if sets else None


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on: Any) -> Any:
    """The op as it runs without a mode. Below a dispatch mode autocast is off; the kernel of
    torch.sparse.mm counts on autocast for the op that it calls inside. ``on``: see
    :func:`autocast_keys`."""
    if func is not _CASTS_INSIDE or on is None:
        return func(*args, **kwargs)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - on
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return func(*args, **kwargs)


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
            return _run(func, args, kwargs, watch.autocast_keys)
        if func is ITEM:  # also when the budget is used up: a script may read its loss at any step
            value = func(*args, **kwargs)
            with torch._C.DisableTorchFunction(), watch.failures.noted("some ops"):
                watch.reads.read(args[0], value)
                watch.note_read(args[0], value)
            if watch.on_op is not None and watch.seen_ops < watch.budget:
                watch.on_op(func, args, kwargs, value)
            return value
        if watch.seen_ops >= watch.budget:
            return _run(func, args, kwargs, watch.autocast_keys)
        if is_capturing():
            out = _run(func, args, kwargs, watch.autocast_keys)
            with torch._C.DisableTorchFunction(), watch.failures.noted("some ops"):
                watch.captured(func, args, kwargs, out)
                if watch.on_op is not None:
                    watch.on_op(func, args, kwargs, out)
            return out
        if types:
            watch.subclasses(func._opname, types)
        elif (
            watch.evaluations.are_known
            and not watch.functions
            and watch.evaluations.holds(func, args)
        ):
            return self._glanced(func, args, kwargs)
        prior: dict[int, int] = {}
        before = quiet = None
        # A look must never end the script's own op, nor ask its modes and classes anything.
        with torch._C.DisableTorchFunction(), watch.failures.noted("some ops"):
            prior = watch.prior_taints(func, args, kwargs)
            quiet = None if prior else watch.quiet(func, args, kwargs)
            if quiet is None:
                before = op_facts.remember_target(func, args, is_bad=bool(prior))
        out = _run(func, args, kwargs, watch.autocast_keys)
        with torch._C.DisableTorchFunction(), watch.failures.noted("some ops"):
            if watch.on_op is not None:
                watch.on_op(func, args, kwargs, out)
            if quiet is None or not watch.stays_quiet(quiet, func, args, kwargs, out):
                node = torch._C._current_autograd_node()
                tensors = op_facts.tensors(args, kwargs)
                watch.after(OpCall(func, args, kwargs, tensors, node, before, prior), out)
            watch.fall_asleep_if_due()
        return out

    def _glanced(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The result of an op of one more evaluation, which is looked at in full where there is
        more to see in it."""
        watch = self.watch
        out = _run(func, args, kwargs, watch.autocast_keys)
        with torch._C.DisableTorchFunction(), watch.failures.noted("some ops"):
            if not watch.glance(func, args, kwargs, out):
                tensors = op_facts.tensors(args, kwargs)
                watch.after(OpCall(func, args, kwargs, tensors, None, None, {}), out)
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


class Evaluations:
    """Counts the calls of outermost modules without gradients since the last one with gradients,
    or optimizer step.

    An evaluation is hundreds of such forward passes, one after the other. The first ones of a
    module, and what is computed between them, are recorded as any other op is; of the rest only
    ops that give a non-finite number. A teacher, a discriminator's input or a metric within a
    training step is called a few times between two forward passes with gradients, or two steps,
    and so never comes so far.
    """

    def __init__(self) -> None:
        self.are_known = False  # as many calls of the module as are recorded in full have ended
        self._is_inside = False
        self._calls: dict[int, int] = {}  # by the id of the module

    def enter(self, module: nn.Module) -> None:
        """An outermost module is called."""
        if torch.is_grad_enabled():
            self.end()
            return
        calls = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        self.are_known, self._is_inside = calls > IN_FULL, True

    def leave(self) -> None:
        """The call has ended."""
        self._is_inside = False

    def end(self) -> None:
        """A training goes on: what is called from here on is recorded in full again."""
        self.are_known = False
        self._calls.clear()

    def holds(self, func: Any, args: Any) -> bool:
        """Whether an op that runs now is of one more evaluation. What is written in place lives
        on."""
        if not self._is_inside or func._schema.is_mutable or in_backward():
            return False
        if torch.is_grad_enabled():  # autocast casts weights with gradients on, to keep the copies
            return func._opname == "_to_copy" and type(args[0]) is nn.Parameter
        return True
