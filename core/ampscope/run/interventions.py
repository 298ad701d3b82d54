"""Interventions on the loss scale, the optimizer and epsilons, applied to a script from outside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ampscope.capture.patches import Patches

HALF = (torch.float16, torch.bfloat16)
ADDED_SCALE = 65536.0  # GradScaler's own initial scale


@contextlib.contextmanager
def frozen_scale(scale: float) -> Iterator[None]:
    """Every scaler keeps ``scale``; steps with non-finite gradients are still skipped."""

    def hold(scaler: Any) -> None:
        if scaler.is_enabled() and scaler._scale is not None:
            scaler._scale.fill_(scale)

    with _after_init(scale), _patched(torch.amp.GradScaler, ("update", "load_state_dict"), hold):
        yield


@contextlib.contextmanager
def initial_scale(scale: float) -> Iterator[None]:
    """Every scaler starts at ``scale`` and adapts from there."""
    with _after_init(scale):
        yield


@contextlib.contextmanager
def growth_interval(steps: int) -> Iterator[None]:
    """Every scaler grows after this many finite steps, and backs off by half."""

    def set_interval(scaler: Any) -> None:
        scaler._growth_interval, scaler._growth_factor, scaler._backoff_factor = steps, 2.0, 0.5

    with _patched(torch.amp.GradScaler, ("__init__",), set_interval, only_enabled=True):
        yield


@contextlib.contextmanager
def add_scaler() -> Iterator[None]:
    """Scale every loss, unscale before every clip and step, leave out steps that are not finite."""
    patches, state = Patches(), {"scale": ADDED_SCALE}
    scaled: set[int] = set()  # ids of optimizers whose gradients carry the scale
    optimizers: list[Optimizer] = []

    def backward(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(root: Tensor, *args: Any, **kwargs: Any) -> Any:
            scaled.update(id(o) for o in optimizers)
            state["pending"] = 1.0
            return original(root * state["scale"], *args, **kwargs)

        return wrapper

    def unscale(parameters: list[Tensor]) -> bool:
        finite = True
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(state["scale"])
                finite &= bool(torch.isfinite(p.grad).all())
        return finite

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not state.pop("pending", 0.0):
            return
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        if unscale(parameters):
            return
        state["scale"] /= 2
        for p in parameters:
            p.grad = None  # optimizers leave parameters without a gradient alone

    def clip(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if state.pop("pending", 0.0):
                unscale(tensors)
            return original(tensors, *args, **kwargs)

        return wrapper

    patches.replace(torch.Tensor, "backward", backward)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.replace(owner, name, clip)
    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
        patches.undo()


@contextlib.contextmanager
def unscale_first() -> Iterator[None]:
    """``scaler.unscale_(optimizer)`` before every clip of gradients that still carry the scale."""
    patches = Patches()
    scalers: list[Any] = []
    optimizers: list[Optimizer] = []

    def remember(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            if all(s is not scaler for s in scalers):
                scalers.append(scaler)
            return original(scaler, outputs)

        return wrapper

    def created(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            optimizers.append(optimizer)

        return wrapper

    def clip(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            ids = {id(p) for p in tensors}
            for scaler in filter(lambda s: s.is_enabled(), scalers):
                for optimizer in optimizers:
                    own = any(id(p) in ids for g in optimizer.param_groups for p in g["params"])
                    with contextlib.suppress(RuntimeError):  # unscaled already, or no gradients yet
                        if own:
                            scaler.unscale_(optimizer)
            return original(tensors, *args, **kwargs)

        return wrapper

    patches.replace(torch.amp.GradScaler, "scale", remember)
    patches.replace(Optimizer, "__init__", created)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.replace(owner, name, clip)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def fp32_state() -> Iterator[None]:
    """Half parameters are stepped as fp32 masters with fp32 state, then rounded back."""
    masters: dict[int, Tensor] = {}

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in _half_parameters(optimizer):
            master = masters.setdefault(id(p), p.detach().float())
            gradient = p.grad
            p.grad = None
            p.data = master
            p.grad = None if gradient is None else gradient.float()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in masters:
                    masters[id(p)] = p.data
                    dtype = _dtype_of[id(p)]
                    p.grad = None
                    p.data = p.data.to(dtype)

    _dtype_of: dict[int, torch.dtype] = {}

    def _half_parameters(optimizer: Optimizer) -> list[Tensor]:
        found = [p for g in optimizer.param_groups for p in g["params"] if p.dtype in HALF]
        for p in found:
            _dtype_of.setdefault(id(p), p.dtype)
        return found

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def scaled_lr(factor: float) -> Iterator[None]:
    """Every step uses ``factor`` times its learning rate; schedulers see their own value."""
    kept: dict[int, list[Any]] = {}

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, kept.pop(id(optimizer)), strict=True):
            group["lr"] = lr

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def separate_scalers() -> Iterator[None]:
    """Each loss between two updates gets a scaler of its own, with the settings of the shared one.

    The n-th ``scale`` after an ``update`` uses the n-th scaler, and so do the ``unscale_`` and
    ``step`` calls that follow it: that is how losses and optimizers alternate in a loop.
    """
    patches = Patches()
    own: dict[int, list[Any]] = {}
    turn: dict[int, int] = {}
    scaler_class = torch.amp.GradScaler
    new = scaler_class.__init__
    inside = [False]

    def part(scaler: Any) -> Any:
        parts = own.setdefault(id(scaler), [])
        at = max(turn.get(id(scaler), 0) - 1, 0)
        while len(parts) <= at:
            fresh = scaler_class.__new__(scaler_class)
            new(
                fresh,
                scaler._device,
                init_scale=scaler._init_scale,
                growth_factor=scaler._growth_factor,
                backoff_factor=scaler._backoff_factor,
                growth_interval=scaler._growth_interval,
            )
            parts.append(fresh)
        return parts[at]

    def routed(advance: bool) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if inside[0] or not scaler.is_enabled():
                    return original(scaler, *args, **kwargs)
                if advance:
                    turn[id(scaler)] = turn.get(id(scaler), 0) + 1
                inside[0] = True
                try:
                    return original(part(scaler), *args, **kwargs)
                finally:
                    inside[0] = False

            return wrapper

        return make

    def update(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if inside[0] or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            inside[0] = True
            try:
                for fresh in own.get(id(scaler), []):
                    if any(s["found_inf_per_device"] for s in fresh._per_optimizer_states.values()):
                        original(fresh)
            finally:
                inside[0] = False
                turn[id(scaler)] = 0
            return None

        return wrapper

    patches.replace(scaler_class, "scale", routed(True))
    for name in ("unscale_", "step", "get_scale"):
        patches.replace(scaler_class, name, routed(False))
    patches.replace(scaler_class, "update", update)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _after_init(scale: float) -> Iterator[None]:
    def set_initial(scaler: Any) -> None:
        scaler._init_scale = scale

    with _patched(torch.amp.GradScaler, ("__init__",), set_initial, only_enabled=True):
        yield


@contextlib.contextmanager
def _patched(
    owner: Any, names: tuple[str, ...], after: Callable[[Any], None], *, only_enabled: bool = False
) -> Iterator[None]:
    """Call ``after(self)`` behind each of the methods."""
    patches = Patches()

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(target: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(target, *args, **kwargs)
            if not only_enabled or target.is_enabled():
                after(target)
            return result

        return wrapper

    for name in names:
        patches.replace(owner, name, make)
    try:
        yield
    finally:
        patches.undo()
