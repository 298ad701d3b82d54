"""GradScaler on a CPU, where Paddle switches it off: the real one, made as if on a GPU.

The constructor asks which device is expected and disables itself on a CPU. While it asks, it is
told that there is a GPU; everything after that is Paddle's own code. Settings change what the
constructor is given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.amp import grad_scaler

from ampscope.frameworks.paddle.patching import replaced
from ampscope.frameworks.settings import Settings

_Scaler: Any = paddle.amp.AmpScaler
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

    def __init__(self, settings: Settings, *, on_cpu: bool) -> None:
        self.settings = settings
        self.on_cpu = on_cpu
        self.forced = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Scalers made in here."""
        made = _Scaler.__init__

        @functools.wraps(made)
        def make(scaler: Any, *args: Any, **kwargs: Any) -> None:
            changed = self._changed({**dict(zip(_NAMES, args, strict=False)), **kwargs})
            if self.on_cpu and changed.get("enable", True):
                self.forced += 1
                with replaced([(grad_scaler, "_dygraph_tracer", _Tracer)]):
                    made(scaler, **changed)
            else:
                made(scaler, **changed)

        with replaced([(_Scaler, "__init__", make)]):
            yield

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
