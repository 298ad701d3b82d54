"""Wrappers of GradScaler's methods: created, scale, unscale_, step, update, its state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from ampscope.capture.script import op_facts
from ampscope.capture.script.attempts import Attempts
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.numbering import Numbering
from ampscope.capture.script.patches import Patches
from ampscope.capture.script.scaled_graph import mark_scaled

# Scalers that the script enabled and a control disabled. A constant by which such a script
# multiplies its loss is a weight, as it is in the run with the scaler, and no loss scale.
held_off: WeakSet[Any] = WeakSet()


class ScalerCalls:
    """Logs the calls of every enabled scaler; scalers are numbered as they are first seen."""

    def __init__(self, calls: Calls, attempts: Attempts) -> None:
        self._numbers = Numbering("scaler")
        self.scalers = self._numbers.known
        self.name_of = self._numbers.name_of
        self._calls = calls
        self._attempts = attempts

    def wrap(self, patches: Patches) -> None:
        """Put the wrappers on; ``patches`` takes them off."""
        scaler = torch.amp.GradScaler
        patches.replace(scaler, "__init__", self._new)
        patches.replace(scaler, "scale", self._scale)
        patches.replace(scaler, "unscale_", self._unscale)
        patches.replace(scaler, "step", self._step)
        patches.replace(scaler, "update", self._update)
        patches.replace(scaler, "get_scale", self._simple("get_scale"))
        patches.replace(scaler, "state_dict", self._simple("scaler_state_dict"))
        patches.replace(scaler, "load_state_dict", self._simple("scaler_load_state_dict"))

    def scale_of(self, scaler: Any) -> float:
        """The scaler's scale, read without leaving a trace in the log."""
        return float(self._calls.inside(scaler.get_scale))

    def scale_named(self, name: str) -> float:
        """Scale of the scaler called ``name``; 1 when there is none."""
        scaler = self._numbers.named(name)
        return 1.0 if scaler is None else self.scale_of(scaler)

    @property
    def any_enabled(self) -> bool:
        """Whether the script scales losses by a scaler at all, or would without the control."""
        return any(scaler.is_enabled() or scaler in held_off for scaler in self.scalers)

    def of_factor(self, factor: float) -> str:
        """Name of an enabled scaler whose scale is ``factor``, as in
        ``(loss * scaler.get_scale()).backward()``; "" when none is, or the scale is 1."""
        if factor == 1.0:
            return ""
        return next(
            (
                self.name_of(scaler)
                for scaler in self.scalers
                if scaler.is_enabled() and math.isclose(self.scale_of(scaler), factor, rel_tol=1e-5)
            ),
            "",
        )

    def _new(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            enabled = scaler.is_enabled()
            value = self.scale_of(scaler) if enabled else None
            name = self.name_of(scaler)
            self._calls.add("scaler_new", subject=name, value=value, enabled=enabled)

        return wrapper

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = self._calls.inside(original, scaler, outputs)
            if not scaler.is_enabled():
                return scaled
            name = self.name_of(scaler)
            for tensor in op_facts.tensors(scaled, None):
                mark_scaled(tensor, name)
            self._calls.add("scale", subject=name, value=self.scale_of(scaler), scaled=True)
            return scaled

        return wrapper

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any) -> Any:
            if scaler.is_enabled():
                name = self._attempts.optimizer_name(optimizer)
                self._calls.add("unscale_", subject=self.name_of(scaler), note=name)
                by_user = not self._calls.is_nested
                self._attempts.before_unscale(optimizer, scaler, by_user=by_user)
            return self._calls.inside(original, scaler, optimizer)

        return wrapper

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            name, note = self.name_of(scaler), self._attempts.optimizer_name(optimizer)
            self._calls.add("scaler_step", subject=name, note=note)
            with self._attempts.through_scaler(optimizer, scaler, name):
                return self._calls.inside(original, scaler, optimizer, *args, **kwargs)

        return wrapper

    def _update(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = self._calls.inside(original, scaler, *args, **kwargs)
            if scaler.is_enabled():
                name = self.name_of(scaler)
                self._calls.add("update", subject=name, value=self.scale_of(scaler))
                self._attempts.carried.updated(scaler)
            return result

        return wrapper

    def _simple(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                result = self._calls.inside(original, scaler, *args, **kwargs)
                if name != "get_scale" or not self._calls.is_nested:
                    self._calls.add(name, subject=self.name_of(scaler))
                return result

            return wrapper

        return make
