"""GradScaler on a CPU, where Paddle switches it off: the real one, made as if on a GPU.

The constructor asks which device is expected and disables itself on a CPU. While it asks, it is
told that there is a GPU; everything after that is Paddle's own code. Settings change what the
constructor is given.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.amp import grad_scaler

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.patches import Patches

_NAMES = (
    "enable", "init_loss_scaling", "incr_ratio", "decr_ratio", "incr_every_n_steps",
    "decr_every_n_nan_or_inf", "use_dynamic_loss_scaling",
)  # fmt: skip


class _Place:
    def is_gpu_place(self) -> bool:
        return True


class _Tracer:
    _expected_place = _Place()


class Scalers:
    """Makes scalers as ``settings`` say; ``forced`` counts those that Paddle would have switched
    off."""

    def __init__(self, settings: ControlSettings, *, on_cpu: bool) -> None:
        self.settings = settings
        self.on_cpu = on_cpu
        self.forced = 0

    def put_on(self, patches: Patches) -> None:
        """Change the scalers that are made from now on."""
        patches.wrap(paddle.amp.AmpScaler, "__init__", self._make)

    def _make(self, original: Any, scaler: Any, /, *args: Any, **kwargs: Any) -> None:
        changed = self._changed({**dict(zip(_NAMES, args, strict=False)), **kwargs})
        with Patches() as patches:
            if self.on_cpu and changed.get("enable", True):
                self.forced += 1
                patches.replace(grad_scaler, "_dygraph_tracer", lambda _: _Tracer)
            original(scaler, **changed)

    def _changed(self, given: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments after the settings."""
        settings = self.settings
        if settings.precision:  # neither fp32 nor bf16 needs one
            return {**given, "enable": False}
        if settings.scale is not None:
            given |= {"init_loss_scaling": settings.scale, "use_dynamic_loss_scaling": False}
        if settings.init_scale is not None:
            given["init_loss_scaling"] = settings.init_scale
        if settings.growth_interval is not None:
            given["incr_every_n_steps"] = settings.growth_interval
        return given
