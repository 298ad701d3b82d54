"""Wrappers of what fills, empties and clips gradients: backward, grad, zero_grad, clip_grad_*."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ampscope.capture.script import op_facts
from ampscope.capture.script.attempts import Attempts
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.op_marks import root_of_loss
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.patches import Patches
from ampscope.capture.script.scaled_graph import scaled_by
from ampscope.capture.script.scaler_calls import ScalerCalls
from ampscope.capture.tensors import readable
from ampscope.formats import dtype_name
from ampscope.observations import MIN_HAND_SCALE


class GradientCalls:
    """Logs these calls, and says of each whether the gradients carried a loss scale."""

    def __init__(
        self, calls: Calls, scalers: ScalerCalls, attempts: Attempts, watch: OpWatch
    ) -> None:
        self._calls = calls
        self._scalers = scalers
        self._attempts = attempts
        self._watch = watch
        self._hand_scaled: set[str] = set()  # lines of backward passes

    def wrap(self, patches: Patches) -> None:
        """Put the wrappers on; ``patches`` takes them off."""
        patches.replace(torch.Tensor, "backward", self._backward)
        patches.replace(torch.autograd, "backward", self._backward)
        patches.replace(torch.autograd, "grad", self._grad)
        patches.replace(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        patches.replace(torch.nn.Module, "zero_grad", self._zero_grad)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                patches.replace(owner, name, self._clip)

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._calls.is_nested:
                return self._calls.inside(original, *args, **kwargs)
            roots = args[0] if args else kwargs.get("tensors")
            create_graph = bool(kwargs.get("create_graph"))
            for root in op_facts.tensors(roots, None):
                self._note_backward(root, create_graph=create_graph)
            try:
                result = self._calls.inside(original, *args, **kwargs)
            except Exception as error:
                self._calls.on_raised(error)
                raise
            self._attempts.after_backward()
            return result

        return wrapper

    def _note_backward(self, root: Tensor, *, create_graph: bool) -> None:
        note = root_of_loss(root)
        scaler = scaled_by(root) or self._scalers.of_factor(_factor(note))
        with no_dispatch():
            numbers = readable(root)
            value = math.nan
            if numbers is not None and numbers.numel():
                value = float(numbers.float().sum())
        value /= self._scalers.scale_named(scaler) or 1.0
        factor = 1.0 if self._scalers.any_enabled else self._hand_scale(note)
        value /= factor
        self._calls.add(
            "backward",
            subject=scaler,
            value=value,
            scaled=bool(scaler),
            create_graph=create_graph,
            dtype=dtype_name(root.dtype),
            note=note,
        )
        self._watch.reads.backward()
        taint = self._watch.taint_of(root)
        self._attempts.before_backward(
            value, dtype_name(root.dtype), taint, scaled=bool(scaler), by_hand=factor != 1.0
        )

    def _hand_scale(self, note: str) -> float:
        """The factor of a loss that is scaled by hand, such as ``loss * 2 ** lg_loss_scale``; 1 of
        any other. Below :data:`MIN_HAND_SCALE` it counts at a line where it was above before."""
        name, _, text = note.partition(" ")
        factor = float(text) if text and name in ("mul", "mul_") else 1.0
        line = self._calls.line()
        if factor >= MIN_HAND_SCALE:
            self._hand_scaled.add(line)
        return factor if line in self._hand_scaled and factor > 0 else 1.0

    def _grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._calls.is_nested:
                scaled = any(scaled_by(root) for root in op_facts.tensors(outputs, None))
                create_graph = bool(kwargs.get("create_graph"))
                self._calls.add("grad", scaled=scaled, create_graph=create_graph)
            return self._calls.inside(original, outputs, *args, **kwargs)

        return wrapper

    def _zero_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._calls.is_nested:
                is_optimizer = isinstance(owner, torch.optim.Optimizer)
                name = self._attempts.optimizer_name(owner) if is_optimizer else "model"
                self._calls.add("zero_grad", subject=name)
            return self._calls.inside(original, owner, *args, **kwargs)

        return wrapper

    def _clip(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            scaled = self._attempts.carries_scale(tensors)
            norm = self._calls.inside(original, tensors, *args, **kwargs)
            value = float(norm) if isinstance(norm, Tensor) else None
            limits = [*args, kwargs.get("max_norm"), kwargs.get("clip_value")]
            limit = next((x for x in limits if x is not None), 0.0)
            self._calls.add("clip", value=value, scaled=scaled, note=f"{float(limit):g}")
            norm_type = kwargs.get("norm_type", args[1] if len(args) > 1 else 2.0)
            if value is not None and not scaled and float(norm_type) == 2.0:
                self._attempts.clips.add(tensors, value, float(limit))
            return norm

        return wrapper


def _factor(note: str) -> float:
    """The constant that a loss was multiplied by; 1 when by none."""
    name, _, constant = note.partition(" ")
    return float(constant) if constant and name in ("mul", "mul_") else 1.0
