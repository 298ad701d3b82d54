"""Settings that change a training: learning rate, epsilon, layers in fp32, scalers.

Precision on a CPU is changed by :class:`.regions.OpenRegion` and
:class:`.decorated.HalfParameters`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle.amp import grad_scaler

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.paddle.emulation import Emulation
from ampscope.ext.frameworks.paddle.regions import AUTO_CAST, DTYPE_NAMES, OpenRegion
from ampscope.ext.frameworks.paddle.values import subclasses
from ampscope.patches import Patches

_Optimizer: Any = paddle.optimizer.Optimizer


class AppliedSettings:
    """``put_on`` while a script trains; ``around`` for the calls of layers."""

    def __init__(
        self, settings: ControlSettings, region: OpenRegion, emulation: Emulation | None
    ) -> None:
        self.settings = settings
        self._region = region
        self._emulation = emulation
        self._scaler: Any = None
        self._met: set[str] = set()
        self._depth = 0

    def put_on(self, patches: Patches) -> None:
        """Apply them; optimizers and layers are as before afterwards, their numbers are not."""
        settings = self.settings
        if settings.lr_factor != 1.0:
            patches.wrap(_Optimizer, "get_lr", self._rate)
            patches.wrap(_Optimizer, "_create_param_lr", self._scaled_rate)
        if settings.eps is not None or settings.add_scaler:
            for kind in subclasses(_Optimizer):
                if "step" in vars(kind):
                    patches.wrap(kind, "step", self._step)
        if settings.add_scaler:
            patches.wrap(paddle.Tensor, "backward", self._backward)

    def notes(self) -> list[str]:
        """What could not be applied, after the training."""
        missing = [p for p in self.settings.fp32_modules if p not in self._met]
        if not missing:
            return []
        return [f"No layer is called {', '.join(missing)}; it was not kept in fp32."]

    def around(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` in fp32 where the settings name the layer or one that holds it."""
        named = [m for m in self.settings.fp32_modules if path == m or path.startswith(f"{m}.")]
        if not named:
            return call
        self._met.update(named)
        return functools.partial(self.in_fp32, call)

    def in_fp32(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Every op inside runs in fp32, whatever region is open."""
        if self._emulation is not None:
            self._emulation.fp32_depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._emulation.fp32_depth -= 1
        region = self._region.now()
        if region is None:
            return call(*args, **kwargs)
        # Level OD runs in half what is on the white list and nothing else; with an empty one every
        # op casts its inputs, half parameters among them, to fp32.
        none = {"level": "OD", "custom_black_list": region.white, "dtype": DTYPE_NAMES[region.half]}
        with paddle.amp.auto_cast(**none):
            return call(*args, **kwargs)

    def _rate(self, original: Any, optimizer: Any) -> float:
        return float(original(optimizer)) * self.settings.lr_factor

    def _scaled_rate(self, original: Any, optimizer: Any, pair: Any) -> Any:
        return original(optimizer, pair) * self.settings.lr_factor

    def _step(self, original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.settings.eps is not None and hasattr(optimizer, "_epsilon"):
            optimizer._epsilon = self.settings.eps
        if self._scaler is None or self._depth:
            return original(optimizer, *args, **kwargs)
        self._depth += 1
        try:
            self._scaler.step(optimizer)
            return self._scaler.update()
        finally:
            self._depth -= 1

    def _backward(self, original: Any, loss: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._scaler is None and AUTO_CAST.amp_global_state().amp_dtype == "float16":
            self._scaler = paddle.amp.GradScaler()
        if self._scaler is not None:
            return original(self._scaler.scale(loss), *args, **kwargs)
        return original(loss, *args, **kwargs)


def change_precision(patches: Patches, half: str) -> None:
    """On CUDA, where Paddle's own auto_cast works: every region and ``decorate`` in ``half``; for
    "fp32" regions are off and ``decorate`` does nothing; "" changes nothing."""
    if not half:
        return

    def guard(original: Any, enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        names = ("custom_white_list", "custom_black_list", "level", "dtype", "use_promote")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if half == "fp32":
            return original(enable=False, **given)
        return original(enable=enable, **{**given, "dtype": DTYPE_NAMES[half]})

    def decorate(
        original: Any, models: Any, optimizers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if half == "fp32":
            return models if optimizers is None else (models, optimizers)
        names = ("level", "dtype", "master_weight", "save_dtype", "master_grad", "excluded_layers")
        given = {**dict(zip(names, args, strict=False)), **kwargs, "dtype": DTYPE_NAMES[half]}
        return original(models, optimizers, **given)

    for owner in (AUTO_CAST, paddle.amp):
        patches.wrap(owner, "amp_guard", guard)
        patches.wrap(owner, "amp_decorate", decorate)


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
    off.

    GradScaler's constructor asks which device is expected and disables itself on a CPU. While it
    asks, it is told that there is a GPU; everything after that is Paddle's own code.
    """

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
