"""Interventions: one change each, applied to a script from outside and taken back on exit.

A scaler where there is none; every scaler's scale and how it adapts; every optimizer's step; a
scaler for each loss; half copies of weights that follow them; ``unscale_`` before a clip; gradients
that are cleared after each step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ampscope.capture.global_hooks import OPTIMIZER_POST, OPTIMIZER_PRE
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.stale_copies import copied_weights
from ampscope.capture.tensors import HALF
from ampscope.capture.training_events import StepEvents, StepListener
from ampscope.capture.user_objects import groups_of, parameters_of
from ampscope.patches import Patches, within

INITIAL_SCALE = 65536.0  # GradScaler's own


@contextlib.contextmanager
def add_scaler() -> Iterator[None]:
    """Loss scaling for a script that has none: every loss is scaled, gradients are unscaled before
    a clip or a step, whichever comes first, and a step with gradients that are not finite is left
    out and halves the scale."""
    added = _AddedScaler()
    stepping = OPTIMIZER_PRE.subscribe(added.before_step)
    with Patches() as patches, stepping, around_clips(added.unscale):
        patches.wrap(torch.Tensor, "backward", added.backward)
        yield


class _AddedScaler:
    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self._carried = 0.0  # the scale of the last backward; 0 before the first
        self._is_inside = False
        self._unscaled: dict[int, Tensor] = {}  # parameters unscaled since a backward reached them

    def backward(self, original: Any, root: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Of the scaled loss; gradients that it writes to are scaled again. Under a torch function
        mode (a default device, a rehearsed one) ``Tensor.backward`` comes by twice per call."""
        if self._is_inside:
            return original(root, *args, **kwargs)
        before = {key: _written(p) for key, p in self._unscaled.items()}
        self._carried = self.scale
        self._is_inside = True
        try:
            result = original(root * self.scale, *args, **kwargs)
        finally:
            self._is_inside = False
        for key, written in before.items():
            if _written(self._unscaled[key]) != written:
                del self._unscaled[key]
        return result

    def unscale(self, parameters: list[Tensor]) -> None:
        """Divide gradients that still carry the scale by it."""
        for p in parameters:
            if self._carried and p.grad is not None and id(p) not in self._unscaled:
                p.grad.div_(self._carried)
                self._unscaled[id(p)] = p

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Unscale, and leave the step out when a gradient is not finite."""
        if not self._carried:
            return
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        self.unscale(parameters)
        if all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
            return
        self.scale = min(self.scale, self._carried / 2)  # once, however many optimizers step
        for p in parameters:
            p.grad = None  # optimizers leave parameters without a gradient alone


def _written(parameter: Tensor) -> tuple[int, int]:
    """Changes whenever the parameter's gradient is replaced or written to."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


@contextlib.contextmanager
def around_clips(before: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """``before`` gets the parameters whose gradients clip_grad_norm_ or clip_grad_value_ are about
    to clip."""

    def clip(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before(tensors)
        return original(tensors, *args, **kwargs)

    with Patches() as patches:
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                patches.wrap(owner, name, clip)
        yield


@contextlib.contextmanager
def frozen_scale(scale: float) -> Iterator[None]:
    """Every scaler keeps ``scale``; steps with non-finite gradients are still skipped."""

    def hold(scaler: Any) -> None:
        scaler._init_scale = scale  # a checkpoint that is loaded early replaces it
        if scaler._scale is not None:
            scaler._scale.fill_(scale)

    with _after(("__init__", "update", "load_state_dict"), hold):
        yield


@contextlib.contextmanager
def initial_scale(scale: float) -> Iterator[None]:
    """Every scaler starts at ``scale`` and adapts from there."""

    def start(scaler: Any) -> None:
        scaler._init_scale = scale

    with _after(("__init__",), start):
        yield


@contextlib.contextmanager
def growth_interval(steps: int) -> Iterator[None]:
    """Every scaler grows after this many finite steps, and backs off by half."""

    def set_interval(scaler: Any) -> None:
        scaler._growth_interval, scaler._growth_factor, scaler._backoff_factor = steps, 2.0, 0.5

    with _after(("__init__", "load_state_dict"), set_interval):
        yield


@contextlib.contextmanager
def _after(methods: tuple[str, ...], then: Callable[[Any], None]) -> Iterator[None]:
    """Call ``then(scaler)`` behind each of these methods of an enabled scaler."""

    def call(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            then(scaler)
        return result

    with Patches() as patches:
        for name in methods:
            patches.wrap(torch.amp.GradScaler, name, call)
        yield


@contextlib.contextmanager
def fp32_state() -> Iterator[None]:
    """Half parameters are stepped as fp32 masters with fp32 state, then rounded back."""
    masters: dict[int, Tensor] = {}
    kept: dict[int, tuple[torch.dtype, Tensor | None]] = {}  # dtype and gradient during the step

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in parameters_of(optimizer):
            if p.dtype not in HALF:
                continue
            master = masters.get(id(p))
            if master is None or not torch.equal(master.to(p.dtype), p.detach()):
                master = p.detach().float()  # first sight, or the script itself wrote to it
            gradient = p.grad
            kept[id(p)] = p.dtype, gradient
            p.grad = None
            p.data = master
            p.grad = None if gradient is None else gradient.float()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in parameters_of(optimizer):
            if id(p) in kept:
                masters[id(p)] = p.data
                dtype, gradient = kept.pop(id(p))
                p.grad = None
                p.data = p.data.to(dtype)
                p.grad = gradient

    with OPTIMIZER_PRE.subscribe(before), OPTIMIZER_POST.subscribe(after):
        yield


@contextlib.contextmanager
def scaled_lr(factor: float) -> Iterator[None]:
    """Every step uses ``factor`` times its learning rate; schedulers see their own value."""
    kept: dict[int, list[Any]] = {}

    def restore(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = kept.pop(id(optimizer), None)
        for group, lr in zip(groups_of(optimizer), rates or (), strict=rates is not None):
            group["lr"] = lr

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        restore(optimizer, args, kwargs)  # the last step raised before its end
        kept[id(optimizer)] = [group["lr"] for group in groups_of(optimizer)]
        for group in groups_of(optimizer):
            if group["lr"] is not None:  # an Adafactor that chooses its own
                group["lr"] = group["lr"] * factor

    with OPTIMIZER_PRE.subscribe(before), OPTIMIZER_POST.subscribe(restore):
        yield


@contextlib.contextmanager
def separate_scalers() -> Iterator[None]:
    """In a loop whose losses share a scaler each loss between two updates gets one of its own, with
    the settings of the shared one.

    The n-th ``scale`` after an ``update`` uses the n-th scaler, and so do the ``unscale_`` and
    ``step`` calls that follow it: that is how losses and optimizers alternate in a loop.
    """
    shared, scaler = _Shared(), torch.amp.GradScaler
    with Patches() as patches:
        patches.wrap(scaler, "scale", shared.scale)
        for name in ("unscale_", "step", "get_scale"):
            patches.wrap(scaler, name, shared.routed)
        patches.wrap(scaler, "update", shared.update)
        yield


class _Shared:
    """The parts that stand for each of the script's scalers."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Any]] = {}
        self._turn: dict[int, int] = {}  # how many losses were scaled since the last update
        self._inside = False  # a part's own calls are not routed again
        self._new = torch.amp.GradScaler.__init__

    def scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """The next part scales."""
        if not self._inside and scaler.is_enabled():
            self._turn[id(scaler)] = self._turn.get(id(scaler), 0) + 1
        return self.routed(original, scaler, *args, **kwargs)

    def routed(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """The call goes to the part that scaled last."""
        if self._inside or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        with self._entered():
            return original(self._part(scaler), *args, **kwargs)

    def update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Every part that saw gradients since the last update adapts."""
        if self._inside or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        self._turn[id(scaler)] = 0
        with self._entered():
            for part in self._parts.get(id(scaler), []):
                states = part._per_optimizer_states.values()
                if any(state["found_inf_per_device"] for state in states):
                    original(part)
        return None

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _part(self, scaler: Any) -> Any:
        parts = self._parts.setdefault(id(scaler), [])
        at = max(self._turn.get(id(scaler), 0) - 1, 0)
        while len(parts) <= at:
            fresh = torch.amp.GradScaler.__new__(torch.amp.GradScaler)
            self._new(
                fresh,
                scaler._device,
                init_scale=scaler._init_scale,
                growth_factor=scaler._growth_factor,
                backoff_factor=scaler._backoff_factor,
                growth_interval=scaler._growth_interval,
            )
            parts.append(fresh)
        return parts[at]


@contextlib.contextmanager
def fresh_casts() -> Iterator[None]:
    """Autocast casts a weight each time that an op takes it. Half copies of weights that the script
    keeps, and those of a half model whose gradients step the weights, are written anew after each
    optimizer step."""
    kept, paths = _KeptCopies(), ModulePaths()

    def enter(original: Any, region: Any) -> Any:
        region._cache_enabled = False
        return original(region)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kept.add(copied_weights(optimizer, paths.models()))

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kept.refresh()

    stepping = OPTIMIZER_PRE.subscribe(before), OPTIMIZER_POST.subscribe(stepped)
    with Patches() as patches, stepping[0], stepping[1], paths, kept:
        patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", enter)
        yield


class _KeptCopies(TorchFunctionMode):
    """Half tensors that were made of fp32 weights, while both are alive: those that the script's
    own calls cast, and those that are told."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = []  # copy, weight

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if within(func) in _CASTS and isinstance(made, Tensor) and made.dtype in HALF:
            weight = args[0]
            if weight.dtype is torch.float32 and weight.is_leaf and weight.requires_grad:
                self.add([(made, weight)])
        return made

    def add(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copies and their weights, which may be known."""
        known = {id(copy()) for copy, _ in self._pairs}
        new = (pair for pair in pairs if id(pair[0]) not in known)
        self._pairs += [(weakref.ref(copy), weakref.ref(weight)) for copy, weight in new]

    def refresh(self) -> None:
        """Write the copies anew. Backward passes that took them are over."""
        alive = [(copy, weight) for copy, weight in self._pairs if copy() is not None]
        self._pairs = alive
        for held, source in alive:
            copy, weight = held(), source()
            if copy is not None and weight is not None:
                copy.data.copy_(weight.data)


_CASTS = frozenset({Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as})


@contextlib.contextmanager
def unscale_first() -> Iterator[None]:
    """``scaler.unscale_(optimizer)`` comes before every clip of gradients that are scaled."""
    watched = _Protocol()
    with Patches() as patches, StepEvents(watched), around_clips(watched.unscale):
        patches.wrap(Optimizer, "__init__", watched.created)
        yield


class _Protocol(StepListener):
    """Which scaler unscales which optimizer: the one that steps it, or the last that scaled."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._stepped_by: dict[int, Any] = {}  # id of an optimizer -> its scaler
        self._last: Any = None

    def scaled(self, scaler: Any, loss: Any, result: Any) -> None:
        self._last = scaler

    def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
        self._stepped_by[id(optimizer)] = scaler

    def created(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(optimizer)

    def unscale(self, parameters: list[Tensor]) -> None:
        """Unscale the optimizers that own some of ``parameters``; of two that own the same one the
        newer, which has taken the other's place."""
        wanted = {id(p) for p in parameters}
        for optimizer in reversed(self._optimizers):
            scaler = self._stepped_by.get(id(optimizer), self._last)
            own = wanted & {id(p) for p in parameters_of(optimizer)}
            wanted -= own
            if own and scaler is not None:
                with contextlib.suppress(RuntimeError):  # unscaled already, or no gradients yet
                    scaler.unscale_(optimizer)


@contextlib.contextmanager
def cleared_gradients() -> Iterator[None]:
    """The first backward pass after an optimizer's step, taken or skipped, finds its gradients at
    zero, in the same memory: the script may hold that."""
    clearing = _Clearing()
    with Patches() as patches, StepEvents(clearing):
        patches.wrap(torch.autograd, "backward", clearing.backward)
        yield


class _Clearing(StepListener):
    """The optimizers that have stepped since the last backward pass."""

    def __init__(self) -> None:
        self._stepped: dict[int, Optimizer] = {}

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        self._stepped[id(optimizer)] = optimizer

    def after_scaler_step(
        self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        self._stepped[id(optimizer)] = optimizer

    @torch.no_grad()
    def _clear(self) -> None:
        for optimizer in self._stepped.values():
            for p in parameters_of(optimizer):
                if p.grad is not None:
                    p.grad.detach().zero_()
        self._stepped.clear()

    def backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Of any loss. ``Tensor.backward`` comes by here as well."""
        self._clear()
        return original(*args, **kwargs)
