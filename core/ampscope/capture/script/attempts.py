"""Instrument: every attempted optimizer step, taken or skipped, with what it found and did.

Through a scaler an attempt begins at ``scaler.step``; when the optimizer's own step does not
follow, it was skipped. A step that the script calls itself is an attempt too, marked by its empty
scaler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils.hooks import RemovableHandle

from ampscope.capture.script.attempt_record import Clips, Ending, Loss, attempt_record
from ampscope.capture.script.carried_scale import CarriedScale
from ampscope.capture.script.gradient_changes import GradientChanges
from ampscope.capture.script.gradient_facts import GradientFacts, gradient_facts
from ampscope.capture.script.gradient_reader import GradientReader
from ampscope.capture.script.numbering import Numbering
from ampscope.capture.script.optimizer_facts import has_closure, lr_of, parameters_of
from ampscope.capture.script.weight_motion import WeightMotion
from ampscope.capture.script.write_lines import WriteLines
from ampscope.observations import Attempt, ParameterGradient


class StepInstruments(Protocol):
    """Looks at the parameters around each step; the first ``gradients_complete`` of one counts."""

    def gradients_complete(self, optimizer: Optimizer) -> None: ...

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


class Attempts:
    """Collects :class:`Attempt` records through torch's global optimizer hooks."""

    def __init__(self, taint_of: Callable[[Tensor | None], int | None], writes: WriteLines) -> None:
        self.records: list[Attempt] = []
        self.loss_taints: dict[int, int] = {}  # bad op -> attempts whose loss descends from it
        self.count = 0
        self.scale_of: Callable[[Any], float] = lambda scaler: float(scaler.get_scale())
        self.on_direct_step: Callable[[str, float], None] = lambda name, lr: None
        self.on_attempt_end: Callable[[int], None] = lambda count: None
        self.on_optimizer: Callable[[bool], None] = lambda inside: None
        self.instruments: StepInstruments | None = None  # who looks at each step besides
        self._numbers = Numbering("optimizer")
        self.optimizers: list[Optimizer] = self._numbers.known
        self.optimizer_name = self._numbers.name_of
        self.carried = CarriedScale()
        self.clips = Clips()
        self.changes = GradientChanges(writes)
        self._reader = GradientReader(taint_of)
        self._motion = WeightMotion()
        self._scaler: tuple[Any, str] | None = None
        self._stepped = False
        self._loss = Loss()
        self._by_hand = False
        self._hand_norms: dict[str, float | None] = {}  # by optimizer, at the end of backward
        self._facts: GradientFacts | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Attempts:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def gradients(self) -> list[ParameterGradient]:
        """Every parameter's gradient at the attempts of which the details are kept."""
        return self._reader.records

    @property
    def gradient_taints(self) -> dict[int, int]:
        """Bad op -> gradients that descend from it."""
        return self._reader.taints

    @property
    def names(self) -> dict[int, str]:
        """Id of a parameter -> dotted name, filled in by the owner."""
        return self._reader.names

    def before_backward(
        self, loss: float, dtype: str, taint: int | None, *, scaled: bool, by_hand: bool = False
    ) -> None:
        """The script is about to call backward on this loss; ``by_hand``: it multiplied the loss
        by a scale of its own."""
        self.carried.pending = scaled
        self._by_hand = by_hand
        self._hand_norms.clear()
        self.changes.before_backward()
        self._loss = Loss(loss, dtype, self._loss.backwards + 1)
        if taint is not None and taint >= 0:
            self.loss_taints[taint] = self.loss_taints.get(taint, 0) + 1

    def after_backward(self) -> None:
        """The backward that was announced last has ended."""
        if self.carried.pending:
            self.changes.after_backward(self.optimizers)
        if self._by_hand:
            with no_dispatch():
                for optimizer in self.optimizers:
                    parameters = parameters_of(optimizer)
                    if not any(map(_has_hooks, parameters)):
                        norm = gradient_facts(parameters, 1.0).norm
                        self._hand_norms[self.optimizer_name(optimizer)] = norm

    def before_unscale(self, optimizer: Optimizer, scaler: Any, *, by_user: bool) -> None:
        """``scaler.unscale_(optimizer)`` is about to run."""
        # Inside scaler.step the scaler may be a stand-in of an intervention's; update names its own
        stepping = scaler if self._scaler is None else self._scaler[0]
        self._look_for_changes(optimizer, stepping)
        self._gradients_complete(optimizer)
        self.carried.unscaled(optimizer, stepping, by_user=by_user)

    def carries_scale(self, parameters: list[Tensor]) -> bool:
        """Whether gradients of these parameters were scaled and not unscaled yet."""
        return self.carried.carries(parameters, self.optimizers)

    @contextlib.contextmanager
    def through_scaler(self, optimizer: Optimizer, scaler: Any, name: str) -> Iterator[None]:
        """Around ``scaler.step``: one attempt, skipped unless the optimizer's step runs inside."""
        self._scaler, self._stepped = (scaler, name), False
        scale = self.scale_of(scaler)
        self._look_for_changes(optimizer, scaler)
        self._gradients_complete(optimizer)
        self._facts = self._read(optimizer, 1.0 if self.carried.is_unscaled(optimizer) else scale)
        by_user = self.carried.is_unscaled_by_user(optimizer)
        try:
            yield
        finally:
            self._scaler = None
            if not self._stepped:
                self._finish(optimizer, Ending(name, scale, skipped=True, unscaled=by_user))

    def _gradients_complete(self, optimizer: Optimizer) -> None:
        if self.instruments is not None:
            self.instruments.gradients_complete(optimizer)

    def _look_for_changes(self, optimizer: Optimizer, scaler: Any) -> None:
        name = self.optimizer_name(optimizer)
        self.changes.before_unscale(optimizer, name, lambda: self.scale_of(scaler), self.count)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer(not has_closure(args, kwargs))
        self.optimizer_name(optimizer)
        self._stepped = True
        if not has_closure(args, kwargs):  # a closure's gradients come inside the step
            self._gradients_complete(optimizer)
        if self.instruments is not None:
            self.instruments.before_step(optimizer)
        with no_dispatch():
            self._motion.start(parameters_of(optimizer))
        if self._scaler is None and not has_closure(args, kwargs):
            self._facts = self._read(optimizer, 1.0)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer(False)
        self._gradients_complete(optimizer)
        if self.instruments is not None:
            self.instruments.after_step(optimizer)
        with no_dispatch():
            moved, norm, expected = self._motion.take(parameters_of(optimizer))
        if self._scaler is None:
            if has_closure(args, kwargs) or self._facts is None:
                self._facts = self._read(optimizer, 1.0)
            self.on_direct_step(self.optimizer_name(optimizer), lr_of(optimizer))
            self._finish(optimizer, Ending(moved_share=moved, update_norm=norm, expected=expected))
            return
        scaler, name = self._scaler
        # A fused optimizer is always called; GradScaler hands it found_inf, and it does nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        by_user = self.carried.is_unscaled_by_user(optimizer)
        self._finish(
            optimizer,
            Ending(name, self.scale_of(scaler), skipped, by_user, moved, norm, expected),
        )

    def _read(self, optimizer: Optimizer, factor: float) -> GradientFacts:
        with no_dispatch():  # what ampscope computes is none of the script's ops
            return self._reader.read(optimizer, self.optimizer_name(optimizer), factor, self.count)

    def _finish(self, optimizer: Optimizer, ending: Ending) -> None:
        facts = self._facts or self._read(optimizer, 1.0)
        name = self.optimizer_name(optimizer)
        with no_dispatch():
            unclipped = self.clips.take(parameters_of(optimizer))
            record = attempt_record(
                self.count, optimizer, name, self._loss, facts, ending, unclipped,
                self._hand_norms.get(name),
            )  # fmt: skip
        self.records.append(record)
        self._facts = None
        self._loss = replace(self._loss, backwards=0)
        self.count += 1
        self.on_attempt_end(self.count)


def _has_hooks(parameter: Tensor) -> bool:
    """Hooks of the script may change this parameter's gradient within backward."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [h for kind in kinds for h in (getattr(parameter, kind, None) or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of a partial
    return any(not str(getattr(f, "__module__", "")).startswith("ampscope.") for f in functions)
