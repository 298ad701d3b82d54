"""Controls and interventions: the same script in another precision, at another scale, with a fix.

What can be asked for is :class:`ampscope.control.Control`; :func:`applied`, at the end, puts it on.
All work through torch functions and public methods only, and are undone on exit. Here are those of
the whole precision and of parts in fp32; :mod:`ampscope.runner.interventions` and
:mod:`ampscope.runner.compile_controls` hold the others.

A TorchFunctionMode sees every call of a public torch function, so a dtype that the script asks for
can be replaced before torch sees it: ``.half()``, ``.to(torch.float16)``, ``dtype=torch.float16``.
Half numbers that are stored (a checkpoint, a NumPy array) are read as they are and cast. Autocast
is switched by its own ``__enter__``, and GradScaler is created disabled: neither fp32 nor bf16
needs one. fp32 means fp32 in CUDA's matmuls and convolutions too, so TF32 is off there.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import get_worker_info

from ampscope.capture.global_hooks import FORWARD_PRE, OPTIMIZER_PRE
from ampscope.capture.script.call_log import held_off
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.numpy_half import float16_looked_up
from ampscope.capture.tensors import AUTOCAST_KINDS, HALF, floating_tensors, version
from ampscope.capture.user_objects import IdMap, IdSet, groups_of, parameters, parameters_of
from ampscope.control import BASELINE, COMPILED, REPEAT, TAPS, Control, list_changes
from ampscope.patches import Patches, within
from ampscope.policy.precision import custom_lists, tf32_switches
from ampscope.runner import interventions
from ampscope.runner.compile_controls import compiled_by, inductor_switch, uncompiled, unfused
from ampscope.runner.nudged import nudged
from ampscope.source_lines import SourceLines, line_name

# Everything that sets what an fp32 matmul or convolution may compute in ends in one of these.
_TF32_SETTERS = (
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_onednn_allow_tf32",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
)
# Their dtype argument says how bits are read, not what is wanted: only the result can be changed.
_REINTERPRETS = frozenset({torch.Tensor.view, torch.asarray})
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_NO_DTYPES = frozenset({Tensor, nn.Parameter, int, float, bool, type(None)})
_LINES = SourceLines()
TINY = 1e-5  # a smaller positive constant next to a tensor is an epsilon; half keeps 6e-8 and up


@contextlib.contextmanager
def everything_fp32() -> Iterator[None]:
    """Autocast off, scalers off, half models and tensors in fp32, and no TF32."""
    with scalers_off(), autocast_as(None), tf32_held(False), _replaced(_Replace(_WIDER)):
        yield


@contextlib.contextmanager
def half_as_bf16() -> Iterator[None]:
    """fp16 becomes bf16 everywhere, scalers off."""
    to_bf16 = _Replace({torch.float16: torch.bfloat16})
    with scalers_off(), autocast_as(torch.bfloat16), _replaced(to_bf16):
        yield


@contextlib.contextmanager
def scalers_off() -> Iterator[None]:
    """Every GradScaler that is made is disabled."""

    def made(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler._enabled:
            held_off.add(scaler)
        scaler._enabled = False

    with Patches() as patches:
        patches.wrap(torch.amp.GradScaler, "__init__", made)
        yield


@contextlib.contextmanager
def autocast_as(dtype: torch.dtype | None) -> Iterator[None]:
    """Every autocast region uses ``dtype``; None switches it off."""

    def entered(original: Any, region: Any) -> Any:
        if dtype is None:
            region._enabled = False
        elif region.fast_dtype is torch.float16:
            region.fast_dtype = dtype
        return original(region)

    with Patches() as patches:
        patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", entered)
        yield


@contextlib.contextmanager
def tf32_held(allowed: bool) -> Iterator[None]:
    """fp32 matmuls and convolutions in TF32 or in exact fp32, also where the script sets torch's
    switches itself: inside, setting them does nothing."""

    def unheard(original: Any) -> Any:
        return lambda *args, **kwargs: None

    setters: Any = torch._C
    with tf32_switches(allowed), Patches() as patches:
        for name in _TF32_SETTERS:
            patches.replace(setters, name, unheard)
        # These properties hold their setter itself, not its name.
        for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
            for name in ("allow_tf32", "fp32_precision"):
                switch = vars(type(backend)).get(name)
                if switch is not None:
                    patches.replace(switch, "setter", unheard)
        yield


@contextlib.contextmanager
def _replaced(mode: _Replace) -> Iterator[None]:
    """``mode``, also where torch asks no mode: the default dtype, tensors out of files, buffers and
    arrays, the classes of half tensors, and what the script does in a backward pass."""

    def default(original: Any, asked: Any) -> None:
        original(mode.swapped(asked) if mode.applies() else asked)

    with mode, float16_looked_up(mode.numpy_type), Patches() as patches:
        for name in ("set_default_dtype", "set_default_tensor_type"):
            patches.wrap(torch, name, default)
        for name in ("from_numpy", "from_dlpack", "frombuffer"):
            patches.wrap(torch, name, mode.as_written)
        patches.wrap(torch._utils, "_rebuild_tensor", mode.as_written)
        for policy in _fsdp_policies():
            patches.wrap(policy, "__init__", mode.asked)
        patches.wrap(torch.autograd, "_engine_run_backward", mode.inside)
        hooks = torch.autograd.graph.saved_tensors_hooks
        patches.wrap(hooks, "__init__", mode.saves)
        for half, target in mode.replace.items() if mode.is_everywhere else ():
            wide = getattr(torch, f"{_NAMES[target]}Tensor")
            patches.replace(torch, f"{_NAMES[half]}Tensor", partial(_instead, wide))
        yield


class _Replace(TorchFunctionMode):
    """Replaces half dtypes in arguments, and in results: numbers that come from a file or an array
    are half without an argument that says so."""

    is_everywhere = True

    def __init__(self, replace: dict[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.replace = replace
        self._methods = {
            within(torch.Tensor.half): replace.get(torch.float16),
            within(torch.Tensor.bfloat16): replace.get(torch.bfloat16),
        }
        # ``x.type("torch.HalfTensor")``, ``x.type(torch.cuda.HalfTensor)``
        self._types = {
            f"torch.{place}{_NAMES[half]}Tensor": f"torch.{place}{_NAMES[target]}Tensor"
            for half, target in replace.items()
            for place in ("", "cuda.")
        }
        self._as_written = 0  # how many calls that must not be changed are under way

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # No helper in between: the stand-in device looks through frames of this name alone for who
        # asks where a tensor is.
        func, kwargs = within(func), kwargs or {}
        if self._as_written:
            return func(*args, **kwargs)
        target = self._methods.get(func)
        if target is not None:
            return args[0].to(target)
        if func not in _REINTERPRETS:
            args = tuple([a if type(a) in _NO_DTYPES else self.swapped(a) for a in args])
            if kwargs:
                kwargs = {k: self.swapped(v) for k, v in kwargs.items()}
        return self.converted(func(*args, **kwargs))

    def applies(self) -> bool:
        """Whether what is done now is to be changed."""
        return True

    def numpy_type(self, half: Any, frame: FrameType) -> Any:
        """What NumPy's float16 is to the code of ``frame``; NumPy has no bf16."""
        wide = self.replace.get(torch.float16) is torch.float32
        return np.float32 if wide and self.changes(frame) else half

    def changes(self, frame: FrameType) -> bool:
        """Whether what code of the user's asks for in ``frame`` is to be changed."""
        return _LINES.is_user(frame.f_code)

    def swapped(self, value: Any) -> Any:
        """``value``, or the dtype (or name of a tensor type) to take in its place."""
        if isinstance(value, torch.dtype):
            return self.replace.get(value, value)
        if isinstance(value, str | type) and self._types:
            name = value if isinstance(value, str) else f"{value.__module__}.{value.__name__}"
            return self._types.get(name, value)
        return value

    def asked(self, original: Any, holder: Any, *args: Any, **kwargs: Any) -> None:
        """Make an object that only holds the dtypes that the script asks for."""
        swapped = self.swapped if self.applies() else _same
        original(holder, *map(swapped, args), **{k: swapped(v) for k, v in kwargs.items()})

    def converted(self, result: Any) -> Any:
        """A tensor in a half dtype that is replaced, cast; anything else as it is."""
        if isinstance(result, Tensor):
            with torch._C.DisableTorchFunction():  # other modes have nothing to say to it
                target = self.replace.get(result.dtype)
            if target is not None:
                return result.to(target)
        return result

    def inside(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of torch's from which code of the script's runs: hooks, the backward of
        its functions, checkpointed modules. torch takes a mode off while it handles a call."""
        if self in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)
        with self:
            return original(*args, **kwargs)

    def saves(self, original: Any, hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        """Make the hooks on saved tensors, which are called from within the op that saves them."""
        inside = partial(partial, self.inside)
        original(hooks, inside(pack_hook), inside(unpack_hook))

    def as_written(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose own torch calls handle stored bits; its result is converted."""
        self._as_written += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._as_written -= 1
        return self.converted(result) if self.applies() else result


def _same(value: Any) -> Any:
    return value


def _instead(other: Any, original: Any) -> Any:
    return other


def _fsdp_policies() -> tuple[type, ...]:
    """What holds the dtypes that FSDP casts to, by calls that no mode sees."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    return MixedPrecision, MixedPrecisionPolicy


@contextlib.contextmanager
def parameters_fp32() -> Iterator[None]:
    """Half models stay in fp32 and compute under autocast in the precision that they asked for.
    Parameters that a script casts one by one are cast back where an optimizer takes them, and at
    the first call of their module; a later cast is not seen."""
    seen: list[torch.dtype] = []
    called_once: IdSet[nn.Module] = IdSet()

    def cast_back(parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if parameter.dtype in HALF and parameter.requires_grad:
                seen.append(parameter.dtype)
                parameter.data = parameter.data.float()
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.float()

    def group_added(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        cast_back(parameters_of(optimizer))

    def half_model(
        dtype: torch.dtype, original: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> nn.Module:
        seen.append(dtype)
        return module

    def moved(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        asked = [a for a in (*args, kwargs.get("dtype")) if a in HALF]
        seen.extend(a for a in asked if isinstance(a, torch.dtype))
        kept = [a for a in args if not (isinstance(a, torch.dtype) and a in HALF)]
        kwargs = {k: v for k, v in kwargs.items() if not (k == "dtype" and v in HALF)}
        return original(module, *kept, **kwargs) if kept or kwargs else module

    def called(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in called_once:
            called_once.add(module)
            cast_back(parameter for _, parameter in parameters(module))
        kind = device_type_of(module, *args, *kwargs.values()) if seen else ""
        if not kind or torch.is_autocast_enabled(kind):
            return original(module, *args, **kwargs)
        with torch.autocast(kind, dtype=seen[-1]):
            return original(module, *args, **kwargs)

    def default(original: Any, asked: torch.dtype) -> None:
        if asked in HALF:
            seen.append(asked)
        original(torch.float32 if asked in HALF else asked)

    with Patches() as patches:
        patches.wrap(torch, "set_default_dtype", default)
        patches.wrap(nn.Module, "half", partial(half_model, torch.float16))
        patches.wrap(nn.Module, "bfloat16", partial(half_model, torch.bfloat16))
        patches.wrap(nn.Module, "to", moved)
        patches.wrap(nn.Module, "__call__", called)
        patches.wrap(Optimizer, "add_param_group", group_added)
        yield


def device_type_of(module: nn.Module, *inputs: object) -> str:
    """The kind of device that a call of ``module`` computes on, as autocast names it: that of its
    first parameter, else of the first floating-point tensor among ``inputs``. "" where there is
    none, or no autocast for it ("meta")."""
    tensors = (one for one in inputs if isinstance(one, Tensor) and one.is_floating_point())
    own = (parameter for _, parameter in parameters(module))
    first = next(itertools.chain(own, tensors), None)
    kind = "" if first is None else first.device.type
    return kind if kind and torch.amp.is_autocast_available(kind) else ""


@contextlib.contextmanager
def fp32_modules(paths: Iterable[str]) -> Iterator[set[str]]:
    """The modules at ``paths`` run with autocast off and their inputs in fp32. Gives the paths that
    did not run yet.

    A module whose parameters are half is widened on its first call, and its output is rounded back,
    so that the rest of a half model still fits to it.
    """
    names, wanted = ModulePaths(), set(paths)
    missing, depth = set(paths), [0]
    was_half: IdMap[nn.Module, torch.dtype] = IdMap()

    def called(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not depth[0] and not names.stack:
            names.discover(names.root_of(module))
        if depth[0] or names.path(module) not in wanted:
            return original(module, *args, **kwargs)
        missing.discard(names.path(module))
        half = next((p.dtype for _, p in parameters(module) if p.dtype in HALF), None)
        if half is not None:
            module.float()
            was_half[module] = half
        half = was_half.get(module)
        depth[0] += 1
        try:
            with _autocast_off():
                output = original(module, *_widen(args), **_widen(kwargs))
        finally:
            depth[0] -= 1
        return output if half is None else _narrow(output, half)

    with Patches() as patches, names:
        patches.wrap(nn.Module, "__call__", called)
        yield missing


@contextlib.contextmanager
def fp32_lines(lines: Iterable[str], own_folder: str) -> Iterator[set[str]]:
    """Lift what these lines of the script round to half: torch calls that they make compute in
    fp32, and what they make or load in half is fp32. Gives the lines that have made none yet."""
    mode = _Fp32Lines(set(lines), own_folder)
    with _replaced(mode), Patches() as patches:
        patches.wrap(Tensor, "register_hook", _hooked)
        yield mode.missing


def _hooked(original: Any, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Autograd refuses a hook that changes the dtype of a gradient."""

    def called(gradient: Tensor) -> Any:
        given = hook(gradient)
        with torch._C.DisableTorchFunction():
            return given.to(gradient.dtype) if isinstance(given, Tensor) else given

    return original(tensor, called)


class _Fp32Lines(_Replace):
    """Elsewhere all stays as it was: where a lifted number meets half ones in an op that takes one
    dtype alone, it is rounded there."""

    is_everywhere = False

    def __init__(self, lines: set[str], own_folder: str) -> None:
        super().__init__(_WIDER)
        self.lines = lines
        self.missing = set(lines)
        self.source = SourceLines(own_folder)

    def changes(self, frame: FrameType) -> bool:
        if get_worker_info() is not None:
            return self._is_asked_for()
        line = line_name((frame.f_code.co_filename, frame.f_lineno))
        if line in self.lines:
            self.missing.discard(line)
        return line in self.lines

    def applies(self) -> bool:
        line = line_name(self.source.where())
        self.missing.discard(line)
        return line in self.lines

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if get_worker_info() is not None:
            if self._is_asked_for():
                return super().__torch_function__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not self.applies() or name in _AS_THEY_ARE:
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                dtype = _one_half(args, kwargs) if "type" in str(error) else None
                if dtype is None:
                    raise
                return func(*_narrow(args, dtype), **_narrow(kwargs, dtype))
        copies: list[_Wide] = []
        wide = _widen(args, copies), _widen(kwargs, copies)
        with _autocast_off():
            made = super().__torch_function__(func, types, *wide)
        any_written = False
        for copy in copies:
            is_written = version(copy.numbers) != copy.version
            if not is_written and name in _WRITES_UNCOUNTED:
                is_written = bool((copy.numbers != copy.of).any())
            if is_written:  # in fp32, and rounded once
                copy.of.copy_(copy.numbers)
                made = copy.of if made is copy.numbers else made
                any_written = True
        if any_written or not copies or within(func) in _CASTS:
            return made
        if _memory(made) & _memory([copy.numbers for copy in copies]):
            return func(*args, **kwargs)  # a view, through which the script may write
        return made

    def _is_asked_for(self) -> bool:
        """In a worker of a loader: whether it works for one of the lines, which holds what they
        take from the loader. Forked, it has their frames below its own."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if line_name((frame.f_code.co_filename, frame.f_lineno)) in self.lines:
                return True
            frame = frame.f_back
        return False


class _Wide(NamedTuple):
    """An fp32 copy of a half tensor, and its version before anything wrote to it."""

    numbers: Tensor
    of: Tensor
    version: int


# What these do, they do to the tensor itself and not to its numbers; ``copy_`` rounds anyway.
_AS_THEY_ARE = frozenset(
    {"__get__", "__set__", "__delete__", "requires_grad_", "detach_", "rename_", "set_", "resize_",
     "share_memory_", "record_stream", "retain_grad", "copy_", "backward", "grad", "register_hook",
     "register_post_accumulate_grad_hook", "data_ptr", "storage", "untyped_storage", "numpy",
     "element_size", "view", "__deepcopy__", "__reduce_ex__"}
)  # fmt: skip
_WRITES_UNCOUNTED = ("batch_norm", "instance_norm")  # running statistics
_CASTS = frozenset(
    map(
        within, (Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.to, Tensor.type, Tensor.type_as)
    )
)


def _memory(value: object) -> set[int]:
    """Which pieces of memory the tensors in ``value`` lie in."""
    strided = (t for t in floating_tensors(value) if t.layout is torch.strided)
    return {t.untyped_storage()._cdata for t in strided}


def _one_half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The half dtype of the tensors among the arguments, where fp32 ones stand beside them."""
    dtypes = {t.dtype for t in floating_tensors((args, tuple(kwargs.values())))}
    half = [dtype for dtype in HALF if dtype in dtypes]
    return half[0] if len(half) == 1 and torch.float32 in dtypes else None


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in AUTOCAST_KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _widen(value: Any, copies: list[_Wide] | None = None) -> Any:
    """``value`` with its half tensors in fp32; these are added to ``copies``."""
    if isinstance(value, torch.dtype):  # of a cast
        return torch.float32 if value in HALF else value
    if isinstance(value, Tensor) and value.dtype in HALF:
        wide = value.float()
        if copies is not None:
            copies.append(_Wide(wide, value, version(wide)))
        return wide
    if isinstance(value, tuple):
        moved = [_widen(v, copies) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [_widen(v, copies) for v in value]
    if isinstance(value, dict):
        return {k: _widen(v, copies) for k, v in value.items()}
    return value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    if isinstance(value, tuple | list):
        moved = [_narrow(v, dtype) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if type(value) is dict:
        return {k: _narrow(v, dtype) for k, v in value.items()}
    return value


@contextlib.contextmanager
def larger_eps(value: float) -> Iterator[None]:
    """Epsilons below ``value`` become ``value``: of norms, of optimizers, and bare constants."""

    def before_forward(module: nn.Module, args: Any) -> None:
        eps = getattr(module, "eps", None)
        if isinstance(eps, float) and 0 < eps < value:
            setattr(module, "eps", value)  # noqa: B010  # no declared attribute of nn.Module

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in groups_of(optimizer):
            if isinstance(group.get("eps"), float):
                group["eps"] = max(group["eps"], value)

    forwards, steps = FORWARD_PRE.subscribe(before_forward), OPTIMIZER_PRE.subscribe(before_step)
    with forwards, steps, _LargerEps(value):
        yield


class _LargerEps(TorchFunctionMode):
    _EPS = ("normalize", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm",
            "cosine_similarity", "pairwise_distance")  # fmt: skip
    _CONSTANT = ("add", "__add__", "__radd__", "add_", "clamp", "clamp_min", "clamp_", "clamp_min_")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in self._EPS:
            if "eps" in kwargs or name in ("normalize", "cosine_similarity"):
                kwargs["eps"] = max(kwargs.get("eps") or 0.0, self.value)
        elif name in self._CONSTANT:
            args = (args[0], *(self._raised(a) for a in args[1:]))
            kwargs = {k: self._raised(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)

    def _raised(self, constant: Any) -> Any:
        return self.value if isinstance(constant, float) and 0 < constant < TINY else constant


@contextlib.contextmanager
def _changed_lists(text: str) -> Iterator[None]:
    """Some ops on another list, under autocast on either device."""
    changes = list_changes(text)
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            stack.enter_context(custom_lists(changes, device_type))
        yield


_PLAIN: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fp32": everything_fp32,
    "nudged": nudged,
    "bf16": half_as_bf16,
    "add_scaler": interventions.add_scaler,
    "unscale_first": interventions.unscale_first,
    "fp32_params": parameters_fp32,
    "fp32_state": interventions.fp32_state,
    "separate_scalers": interventions.separate_scalers,
    "fresh_casts": interventions.fresh_casts,
    "cleared_grads": interventions.cleared_gradients,
    "eager_casts": partial(inductor_switch, "emulate_precision_casts"),
    "eager_random": partial(inductor_switch, "fallback_random"),
}


_VALUED: dict[str, tuple[Callable[[Any], AbstractContextManager[object]], type]] = {
    "scale": (interventions.frozen_scale, float),
    "init_scale": (interventions.initial_scale, float),
    "growth_interval": (interventions.growth_interval, int),
    "lr": (interventions.scaled_lr, float),
    "eps": (larger_eps, float),
    "op_lists": (_changed_lists, str),
    "backend": (compiled_by, str),
    "unfused": (unfused, str),
}


@contextlib.contextmanager
def applied(control: str, own_folder: str = "") -> Iterator[list[set[str]]]:
    """Run the body under ``control``; ``own_folder`` holds the script. Gives the sets of modules
    and lines that are to be in fp32 and were not met yet.

    Raises BadInput for a part that is none.
    """
    missing: list[set[str]] = []
    with contextlib.ExitStack() as stack:
        for part in Control(control).parts:
            if part.name in (BASELINE, REPEAT, COMPILED, TAPS):
                continue  # the recorder's own
            if part.text == "backend:aot_eager" and TAPS in Control(control).names:
                from ampscope.capture.taps import aot_eager  # few runs compile

                stack.enter_context(compiled_by(aot_eager))
                continue
            if part.name in _PLAIN:
                stack.enter_context(_PLAIN[part.name]())
            elif part.name == "fp32_lines":
                missing.append(stack.enter_context(fp32_lines(part.values, own_folder)))
            elif part.name == "fp32_modules":
                missing.append(stack.enter_context(fp32_modules(part.values)))
            elif part.name == "uncompiled":
                missing.append(stack.enter_context(uncompiled(part.values)))
            elif part.name in _VALUED:
                change, kind = _VALUED[part.name]
                stack.enter_context(change(kind(part.value)))
            else:
                raise part.unknown()
        yield missing
