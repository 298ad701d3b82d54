"""Instrument: what the script itself did to gradients between backward and the step.

Scaled gradients are copied at the end of a backward and compared at the first ``unscale_`` of
their optimizer, the script's own or the one inside ``scaler.step``. Clipping without torch's
functions shows here and nowhere else. Gradients that are not finite are followed scaled or not:
the script may replace them (:class:`ReplacedGradients`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.op_facts import OpCall
from ampscope.capture.tensors import HALF, are_finite, fetch, has_own_memory
from ampscope.capture.user_objects import parameters_of
from ampscope.observations import REPLACED, GradientChange
from ampscope.source_lines import SourceLines, line_name

MAX_CHANGES = 64  # enough to see a limit that stays while the norm moves
MAX_NUMEL = 30_000_000  # gradients copied: 120 MB in fp32
MAX_REPLACED = 2_000
TOLERANCE = 1e-4  # relative; fp32 rounds at 6e-8, and a factor is often computed in fp32 too
HALF_TOLERANCE = 8e-3  # two roundings to bf16, 2^-8 each

Pair = tuple[Tensor, Tensor]  # a gradient before and after
_Bad = tuple[Tensor, float, int | None]  # a parameter, the norm of what is finite, its bad op
_Mark = tuple[weakref.ref[Tensor], int] | None  # which gradient a parameter holds, its version


class GradientChanges:
    """Collects :class:`GradientChange` records; ``writes`` says which line wrote a tensor."""

    def __init__(self, writes: WriteLines) -> None:
        self.records: list[GradientChange] = []
        self._writes = writes
        self._copies: dict[int, Tensor] = {}  # id of a parameter -> its gradient after backward

    def before_backward(self) -> None:
        """A backward is about to add to the gradients: what was copied is out of date."""
        self._copies.clear()
        self._writes.stop()

    def taken(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A backward of a scaled loss has ended: parameters and their gradients."""
        parameters = {id(p): (p, gradient) for p, gradient in pairs}
        small = sum(p.numel() for p, _ in parameters.values()) <= MAX_NUMEL
        if not small or len(self.records) >= MAX_CHANGES:
            return
        with own_ops():
            for key, (_, gradient) in parameters.items():
                if _is_comparable(gradient):
                    self._copies[key] = gradient.detach().clone()
        self._writes.start()

    def before_unscale(
        self, optimizer: Optimizer, name: str, scale_of: Callable[[], float], step: int
    ) -> None:
        """Compare the optimizer's gradients, once a backward."""
        own = [(p, self._copies.pop(id(p), None)) for p in parameters_of(optimizer)]
        if not self._copies:
            self._writes.stop()
        with own_ops():
            changed = _changed(
                [
                    (copy, p.grad.detach())
                    for p, copy in own
                    if copy is not None and p.grad is not None
                ]
            )
            # An overflowed gradient says nothing about a factor.
            if not changed or not all(are_finite([g for pair in changed for g in pair])):
                return
            tolerance = max(HALF_TOLERANCE if b.dtype in HALF else TOLERANCE for b, _ in changed)
            norms = [_norm(after) for _, after in changed]
            largest = max(float(after.abs().max()) for _, after in changed)
            kind = _kind(changed, largest, tolerance)
            norm_before = math.hypot(*(_norm(before) for before, _ in changed))
        self.records.append(
            GradientChange(
                step=step,
                optimizer=name,
                scale=scale_of(),
                kind=kind,
                changed=len(changed),
                norm_before=norm_before,
                norm_after=math.hypot(*norms),
                max_after=largest,
                each_norm=norms[0] if max(norms) - min(norms) <= tolerance * max(norms) else None,
                line=self._writes.line_of([after for _, after in changed]),
            )
        )


def _changed(pairs: Sequence[Pair]) -> list[Pair]:
    """Those that changed, and were not merely emptied for the next step."""
    alike = [(b, a) for b, a in pairs if _is_comparable(a) and b.shape == a.shape]
    flags = fetch([torch.ne(b, a).any() & a.any() for b, a in alike])
    return [pair for pair, flag in zip(alike, flags, strict=True) if flag]


def _kind(pairs: Sequence[Pair], largest: float, tolerance: float) -> str:
    """How ``pairs``, all different, finite and not zero after, were changed: by one factor, by a
    factor each, by a clamp, or otherwise."""
    factors = [_factor(before, after, tolerance) for before, after in pairs]
    known = [f for f in factors if f is not None]
    if len(known) == len(pairs):
        same = max(known) - min(known) <= tolerance * max(map(abs, known))
        return "factor" if same else "factors"
    if all(_is_clamped(before, after, largest, tolerance) for before, after in pairs):
        return "clamp"
    return "other"


def _factor(before: Tensor, after: Tensor, tolerance: float) -> float | None:
    """The number that ``before`` was multiplied by; None when there is no such number."""
    b, a = before.double(), after.double()
    square = float((b * b).sum())
    if not square:
        return None
    factor = float((a * b).sum()) / square
    residual = float(torch.linalg.vector_norm(a - factor * b))
    return factor if residual <= tolerance * float(torch.linalg.vector_norm(a)) else None


def _is_clamped(before: Tensor, after: Tensor, limit: float, tolerance: float) -> bool:
    expected = before.double().clamp(-limit, limit)
    return bool((after.double() - expected).abs().max() <= tolerance * limit)


class ReplacedGradients:
    """Gradients that were not finite as backward or ``torch.autograd.grad`` computed them, and that
    the script made finite: by ``nan_to_num``, a clip of values, a mask, or by a hook within
    backward. Neither the optimizer nor a scaler sees them.

    Collects records of the kind :data:`REPLACED`, and in :attr:`taints` how often a bad op's values
    were replaced. ``taint_of`` is the bad op that a gradient descends from.
    """

    def __init__(self, writes: WriteLines, taint_of: Callable[[Tensor | None], int | None]) -> None:
        self.records: list[GradientChange] = []
        self.taints: dict[int, int] = {}
        self._writes = writes
        self._taint_of = taint_of
        self._bad: dict[int, _Bad] = {}  # id of a parameter
        # The same of gradients that the script asked for, and what the parameter held then.
        self._taken: dict[int, tuple[_Bad, _Mark]] = {}
        self._notes_lines = False

    def before_backward(self) -> bool:
        """What is not finite still will be seen again; what was emptied belongs to a batch that
        the script has left out. True where something that is not finite is there still, to which
        the backward pass adds."""
        self._take_set()
        with own_ops():
            kept = [(key, p.grad) for key, (p, _, _) in self._bad.items() if p.grad is not None]
            finite = are_finite([gradient for _, gradient in kept])
            filled = fetch([gradient.any() for _, gradient in kept])
        pairs = zip(kept, finite, filled, strict=True)
        left = {key for (key, _), is_finite, any_left in pairs if is_finite and any_left}
        self._bad = {key: found for key, found in self._bad.items() if key in left}
        return not all(finite)

    def after_backward(self, optimizers: list[Optimizer]) -> None:
        """A backward has ended."""
        parameters = {id(p): p for o in optimizers for p in parameters_of(o)}.values()
        with own_ops():
            held = [
                (p, p.grad) for p in parameters if p.grad is not None and _is_comparable(p.grad)
            ]
            finite = are_finite([gradient for _, gradient in held])
            for (parameter, gradient), is_finite in zip(held, finite, strict=True):
                if not is_finite:
                    self._bad[id(parameter)] = self._found(parameter, gradient)
        self._note_lines(finite)

    def taken(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The script took gradients by itself: parameters and their gradients. They are the
        training's where the script sets them as ``grad`` afterwards."""
        self._take_set()
        with own_ops():
            held = [(p, g) for p, g in pairs if _is_comparable(g)]
            finite = are_finite([gradient for _, gradient in held])
            for (parameter, gradient), is_finite in zip(held, finite, strict=True):
                if not is_finite:
                    found = self._found(parameter, gradient)
                    self._taken[id(parameter)] = found, _mark(parameter.grad)
        self._note_lines(finite)

    def _take_set(self) -> None:
        """Of what the script took, what it has set since; the rest was for something else."""
        for key, (found, mark) in self._taken.items():
            gradient = found[0].grad
            if gradient is not None and not _is_still(mark, gradient):
                self._bad[key] = found
        self._taken.clear()

    def _found(self, parameter: Tensor, gradient: Tensor) -> _Bad:
        norm = _norm(torch.nan_to_num(gradient, 0.0, 0.0, 0.0))
        return parameter, norm, self._taint_of(gradient)

    def _note_lines(self, finite: list[bool]) -> None:
        if not all(finite) and not self._writes.active:
            self._notes_lines = True
            self._writes.start()

    def emptied(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of these parameters were cleared: no step takes them. What was asked for
        may be set still."""
        for parameter in parameters:
            self._bad.pop(id(parameter), None)
            if asked := self._taken.get(id(parameter)):
                self._taken[id(parameter)] = asked[0], _mark(parameter.grad)

    def before_step(
        self, optimizer: Optimizer, name: str, scale_of: Callable[[], float], step: int
    ) -> None:
        """The optimizer, or the scaler for it, takes its gradients now."""
        self._take_set()
        own = [found for p in parameters_of(optimizer) if (found := self._bad.pop(id(p), None))]
        in_hooks = self._writes.take_replaced()
        if self._notes_lines and not self._bad:
            self._notes_lines = False
            self._writes.stop()
        if not (own or in_hooks) or len(self.records) >= MAX_REPLACED:
            return
        with own_ops():
            left = [(p.grad, norm, taint) for p, norm, taint in own]
            finite = are_finite([g for g, _, _ in left if g is not None])
            if not all(finite):
                return
            after = [gradient for gradient, _, _ in left if gradient is not None]
            line = self._writes.line_of(after) or next(iter(in_hooks.values()), "")
            for taint in {*(t for _, _, t in left), *in_hooks}:
                if taint is not None and taint >= 0:
                    self.taints[taint] = self.taints.get(taint, 0) + 1
            self.records.append(
                GradientChange(
                    step=step,
                    optimizer=name,
                    scale=scale_of(),
                    kind=REPLACED,
                    changed=len(own) or len(in_hooks),
                    norm_before=math.hypot(*(norm for _, norm, _ in left)),
                    norm_after=math.hypot(*(_norm(gradient) for gradient in after)),
                    max_after=max((float(g.abs().max()) for g in after if g.numel()), default=0.0),
                    each_norm=None,
                    line=line,
                )
            )


def _mark(gradient: Tensor | None) -> _Mark:
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


def _is_still(mark: _Mark, gradient: Tensor | None) -> bool:
    """Whether the gradient is the one that was marked, and was not written to since."""
    if mark is None or gradient is None:
        return mark is None and gradient is None
    return mark[0]() is gradient and mark[1] == gradient._version


def _is_comparable(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and has_own_memory(gradient)


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.double()))


class WriteLines:
    """Which line of the script last wrote a tensor, while that matters: between backward and step.
    Keeps a line by storage address, for the ops noted since :meth:`start`."""

    def __init__(self, lines: SourceLines) -> None:
        self.active = False
        self._lines = lines
        self._written: dict[int, str] = {}
        self._replaced: dict[int, str] = {}  # bad op -> line of the hook that replaced its values

    def start(self) -> None:
        """Begin anew."""
        self._written.clear()
        self.active = True

    def stop(self) -> None:
        """Note no more; what was noted stays until the next start."""
        self.active = False

    def note(self, call: OpCall, outputs: list[Tensor]) -> None:
        """An op has just run. An in-place op on a list of tensors returns nothing."""
        in_place = call.name.endswith("_") and not outputs
        line = line_name(self._lines.where())
        for tensor in call.tensors if in_place else outputs:
            if tensor.layout is torch.strided and has_own_memory(tensor):
                self._written[tensor.data_ptr()] = line

    def line_of(self, tensors: Iterable[Tensor]) -> str:
        """The line that wrote the first of ``tensors`` that was noted; "" when none was."""
        found = (self._written.get(t.data_ptr()) for t in tensors)
        return next((line for line in found if line is not None), "")

    def replaced(self, taint: int) -> None:
        """A hook in backward has made finite values of those that descend from a bad op."""
        self._replaced.setdefault(taint, line_name(self._lines.where()))

    def take_replaced(self) -> dict[int, str]:
        """Of the hooks since the last call: bad op -> line."""
        found, self._replaced = self._replaced, {}
        return found
