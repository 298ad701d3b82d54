"""Instrument: every attempted optimizer step, taken or skipped, with what it found and did.

Through a scaler an attempt begins at ``scaler.step``; when the optimizer's own step does not
follow, it was skipped. A step that the script calls itself is an attempt too, marked by its empty
scaler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ampscope.capture.gradient_facts import GradientFacts, gradient_facts, state_facts
from ampscope.formats import dtype_name
from ampscope.observations import Attempt, ParameterGradient

DETAILED_ATTEMPTS = 4  # first attempts of which every parameter's gradient is kept
MAX_BAD_DETAILED = 12  # and attempts with non-finite gradients
MAX_MOVED_NUMEL = 30_000_000  # weights compared before and after a step: 120 MB of fp32 copies


class Attempts:
    """Collects :class:`Attempt` records through torch's global optimizer hooks."""

    def __init__(self, taint_of: Callable[[Tensor | None], int | None]) -> None:
        self.records: list[Attempt] = []
        self.gradients: list[ParameterGradient] = []
        self.loss_taints: dict[int, int] = {}  # bad op -> attempts whose loss descends from it
        self.gradient_taints: dict[int, int] = {}
        self.count = 0
        self.scale_of: Callable[[Any], float] = lambda scaler: float(scaler.get_scale())
        self.on_direct_step: Callable[[str, float], None] = lambda name, lr: None
        self.on_attempt_end: Callable[[int], None] = lambda count: None
        self.optimizers: list[Optimizer] = []
        self.names: dict[int, str] = {}  # id of a parameter -> dotted name, filled in by the owner
        self.on_optimizer: Callable[[bool], None] = lambda inside: None
        self._taint_of = taint_of
        self._unscaled: set[int] = set()
        self._user_unscaled: set[int] = set()
        self._scaler: tuple[Any, str] | None = None
        self._stepped = False
        self.scaled_pending = False  # the last backward's gradients carry a scale
        self._backwards = 0
        self._loss: float | None = None
        self._loss_dtype = ""
        self._before: list[Tensor] | None = None
        self._facts: GradientFacts | None = None
        self._bad_detailed = 0
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

    def optimizer_name(self, optimizer: Optimizer) -> str:
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return f"optimizer{number}"
        self.optimizers.append(optimizer)
        return f"optimizer{len(self.optimizers) - 1}"

    def before_backward(self, loss: float, dtype: str, taint: int | None, *, scaled: bool) -> None:
        self._backwards += 1
        self.scaled_pending = scaled
        self._loss, self._loss_dtype = loss, dtype
        if taint is not None and taint >= 0:
            self.loss_taints[taint] = self.loss_taints.get(taint, 0) + 1

    def before_unscale(self, optimizer: Optimizer, scaler: Any, *, nested: bool) -> None:
        self._unscaled.add(id(optimizer))
        if not nested:
            self._user_unscaled.add(id(optimizer))

    def after_update(self, scaler: Any) -> None:
        self._unscaled.clear()
        self._user_unscaled.clear()

    def carries_scale(self, parameters: list[Tensor]) -> bool:
        """Whether gradients of these parameters were scaled and not unscaled yet."""
        if not self.scaled_pending:
            return False
        ids = {id(p) for p in parameters}
        owners = [o for o in self.optimizers if any(id(p) in ids for p in _parameters(o))]
        return not owners or any(id(o) not in self._unscaled for o in owners)

    @contextlib.contextmanager
    def through_scaler(self, optimizer: Optimizer, scaler: Any, name: str) -> Iterator[None]:
        """Around ``scaler.step``: one attempt, skipped unless the optimizer's step runs inside."""
        self._scaler, self._stepped = (scaler, name), False
        scale = self.scale_of(scaler)
        unscaled = id(optimizer) in self._user_unscaled
        factor = 1.0 if id(optimizer) in self._unscaled else scale
        self._facts = self._read(optimizer, factor)
        skipped_fused = False
        try:
            yield
            skipped_fused = bool(getattr(optimizer, "found_inf", None))
        finally:
            self._scaler = None
            if not self._stepped:
                self._finish(optimizer, scaler_name=name, scale=scale, skipped=True,
                             unscaled=unscaled, moved=0.0, norm=0.0)  # fmt: skip
            elif skipped_fused:
                self._mark_last_skipped()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer(not _has_closure(args, kwargs))
        self.optimizer_name(optimizer)
        self._stepped = True
        self._before = self._copy_weights(optimizer)
        if self._scaler is None and not _has_closure(args, kwargs):
            self._facts = self._read(optimizer, 1.0)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer(False)
        moved, norm = self._moved(optimizer)
        if self._scaler is None:
            if _has_closure(args, kwargs) or self._facts is None:
                self._facts = self._read(optimizer, 1.0)
            self.on_direct_step(self.optimizer_name(optimizer), _lr(optimizer))
            self._finish(optimizer, scaler_name="", scale=1.0, skipped=False,
                         unscaled=False, moved=moved, norm=norm)  # fmt: skip
            return
        scaler, name = self._scaler
        unscaled = id(optimizer) in self._user_unscaled
        self._finish(optimizer, scaler_name=name, scale=self.scale_of(scaler), skipped=False,
                     unscaled=unscaled, moved=moved, norm=norm)  # fmt: skip

    def _read(self, optimizer: Optimizer, factor: float) -> GradientFacts:
        facts = gradient_facts(_parameters(optimizer), factor)
        detailed = self.count < DETAILED_ATTEMPTS
        if facts.nonfinite and self._bad_detailed < MAX_BAD_DETAILED:
            detailed, self._bad_detailed = True, self._bad_detailed + 1
        for order, (parameter, part) in enumerate(facts.parts):
            taint = self._taint_of(parameter.grad)
            if part.nonfinite and taint is not None and taint >= 0:
                self.gradient_taints[taint] = self.gradient_taints.get(taint, 0) + 1
            if detailed:
                self.gradients.append(
                    ParameterGradient(
                        attempt=self.count,
                        optimizer=self.optimizer_name(optimizer),
                        name=self.names.get(id(parameter), f"parameter{order}"),
                        order=order,
                        total=part.total,
                        zero=part.zero,
                        nonfinite=part.nonfinite,
                        norm=part.norm,
                    )
                )
        return facts

    def _finish(
        self, optimizer: Optimizer, *, scaler_name: str, scale: float, skipped: bool,
        unscaled: bool, moved: float | None, norm: float | None,
    ) -> None:  # fmt: skip
        facts = self._facts or self._read(optimizer, 1.0)
        parameters = _parameters(optimizer)
        state = state_facts(optimizer)
        self.records.append(
            Attempt(
                attempt=self.count,
                optimizer=self.optimizer_name(optimizer),
                scaler=scaler_name,
                loss=self._loss,
                loss_dtype=self._loss_dtype,
                scale=scale,
                skipped=skipped,
                unscaled_before=unscaled,
                backwards=self._backwards,
                grad_total=facts.total,
                grad_zero=facts.zero,
                grad_nonfinite=facts.nonfinite,
                grad_max=facts.largest,
                grad_norm=facts.norm,
                lr=_lr(optimizer),
                moved_share=moved,
                update_norm=norm,
                weight_nonfinite=sum(int((~torch.isfinite(p)).sum()) for p in parameters),
                grad_dtypes=_dtypes([p.grad for p in parameters if p.grad is not None]),
                weight_dtypes=_dtypes(parameters),
                state_dtypes=state.dtypes,
                state_nonfinite=state.nonfinite,
                state_zero_share=state.zero_share,
                eps=optimizer.param_groups[0].get("eps"),
            )
        )
        self._facts = self._before = None
        self._backwards = 0
        self.count += 1
        self.on_attempt_end(self.count)

    def _mark_last_skipped(self) -> None:
        import dataclasses

        self.records[-1] = dataclasses.replace(self.records[-1], skipped=True)

    def _copy_weights(self, optimizer: Optimizer) -> list[Tensor] | None:
        parameters = _parameters(optimizer)
        if sum(p.numel() for p in parameters) > MAX_MOVED_NUMEL:
            return None
        return [p.detach().clone() for p in parameters]

    def _moved(self, optimizer: Optimizer) -> tuple[float | None, float | None]:
        if self._before is None:
            return None, None
        pairs = list(zip(_parameters(optimizer), self._before, strict=True))
        total = sum(p.numel() for p, _ in pairs)
        moved = sum(int(torch.ne(p.detach(), b).sum()) for p, b in pairs)
        square = sum(float((p.detach().double() - b.double()).square().sum()) for p, b in pairs)
        return (moved / total if total else None), math.sqrt(square) if square == square else square


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _lr(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0].get("lr", math.nan))


def _has_closure(args: Any, kwargs: Any) -> bool:
    # The hook's args hold the optimizer itself first.
    return any(callable(a) and not isinstance(a, Optimizer) for a in args) or callable(
        kwargs.get("closure")
    )


def _dtypes(tensors: list[Tensor]) -> str:
    return "+".join(sorted({dtype_name(t.dtype) for t in tensors}))
