"""Settings that change a training: learning rate, epsilon, layers in fp32, an added scaler.

Precision is the region's and the decorated parameters' (:mod:`regions`, :mod:`half_parameters`),
the scaler's numbers are :mod:`scalers`'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from ampscope.frameworks.paddle.emulation import Emulation
from ampscope.frameworks.paddle.patching import Replacement, replaced, subclasses
from ampscope.frameworks.paddle.regions import AUTO_CAST, DTYPES, OpenRegion
from ampscope.frameworks.settings import Settings

_Optimizer: Any = paddle.optimizer.Optimizer


class AppliedSettings:
    """``active`` while a script trains; ``around`` for the calls of layers."""

    def __init__(self, settings: Settings, region: OpenRegion, emulation: Emulation | None) -> None:
        self.settings = settings
        self.notes: list[str] = []
        self._region = region
        self._emulation = emulation
        self._scaler: Any = None
        self._met: set[str] = set()
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Apply them; optimizers and layers are as before afterwards, their numbers are not."""
        with replaced(list(self._replacements())):
            yield
        missing = [p for p in self.settings.fp32_modules if p not in self._met]
        if missing:
            self.notes.append(f"No layer is called {', '.join(missing)}; it was not kept in fp32.")

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
        none = {"level": "OD", "custom_black_list": region.white, "dtype": DTYPES[region.half]}
        with paddle.amp.auto_cast(**none):
            return call(*args, **kwargs)

    def _replacements(self) -> Iterator[Replacement]:
        settings = self.settings
        if settings.lr_factor != 1.0:
            yield _Optimizer, "get_lr", self._rate(_Optimizer.get_lr)
            create = _Optimizer._create_param_lr

            @functools.wraps(create)
            def scaled(optimizer: Any, pair: Any) -> Any:
                return create(optimizer, pair) * settings.lr_factor

            yield _Optimizer, "_create_param_lr", scaled
        if settings.eps is not None or settings.add_scaler:
            for kind in subclasses(_Optimizer):
                if "step" in vars(kind):
                    yield kind, "step", self._step(vars(kind)["step"])
        if settings.add_scaler:
            yield paddle.Tensor, "backward", self._backward(paddle.Tensor.backward)

    def _rate(self, original: Any) -> Any:
        @functools.wraps(original)
        def rate(optimizer: Any) -> float:
            return float(original(optimizer)) * self.settings.lr_factor

        return rate

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
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

        return step

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if self._scaler is None and AUTO_CAST.amp_global_state().amp_dtype == "float16":
                self._scaler = paddle.amp.GradScaler()
            if self._scaler is not None:
                return original(self._scaler.scale(loss), *args, **kwargs)
            return original(loss, *args, **kwargs)

        return backward


@contextmanager
def changed_regions(half: str) -> Iterator[None]:
    """On CUDA, where Paddle's own auto_cast works: every region in ``half``, or off for "fp32".

    A decorated model (O2) keeps the dtype that decorate gave it; :func:`decorating` changes that.
    """
    original = AUTO_CAST.amp_guard
    if not half:
        yield
        return

    @functools.wraps(original)
    def guard(enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        names = ("custom_white_list", "custom_black_list", "level", "dtype", "use_promote")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if half == "fp32":
            return original(enable=False, **given)
        return original(enable=enable, **{**given, "dtype": DTYPES[half]})

    with replaced([(AUTO_CAST, "amp_guard", guard), (paddle.amp, "amp_guard", guard)]):
        yield


@contextmanager
def changed_decorating(half: str) -> Iterator[None]:
    """On CUDA: ``decorate`` in ``half``; for "fp32" it does nothing."""
    original = AUTO_CAST.amp_decorate
    if not half:
        yield
        return

    @functools.wraps(original)
    def decorate(models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
        if half == "fp32":
            return models if optimizers is None else (models, optimizers)
        names = ("level", "dtype", "master_weight", "save_dtype", "master_grad", "excluded_layers")
        given = {**dict(zip(names, args, strict=False)), **kwargs, "dtype": DTYPES[half]}
        return original(models, optimizers, **given)

    with replaced([(AUTO_CAST, "amp_decorate", decorate), (paddle.amp, "amp_decorate", decorate)]):
        yield
