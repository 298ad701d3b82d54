"""A CUDA device for scripts that ask for one, on a machine that has none.

Much training code enters its AMP branch only where CUDA is. Inside :func:`stand_in` such a script
finds a device: ``torch.cuda.is_available()`` is true, ``.cuda()``, ``.to("cuda")`` and
``device="cuda"`` work, and ``tensor.device`` answers ``cuda:0`` for what was put there and for what
was computed from it. The numbers are computed on the CPU. Autocast and GradScaler are redirected
elsewhere (:mod:`ampscope.runner.script_device`), CUDA's lists and the arithmetic of its Tensor
Cores by :mod:`.rehearsal` and :mod:`.tensor_core`.

How it works: a TorchFunctionMode sees each public torch function and each attribute of a tensor
that Python asks for, in the threads that the script starts, too. There is one device, or one for
each rank that a launcher has started on this machine. A tensor on the device carries a mark in its
``__dict__``, which results inherit; it is left out of pickles. ampscope's own code and torch's
inner code are told the truth by ``torch.cuda``.

What cannot be rehearsed raises :class:`CannotRehearseError` with a sentence: CUDA graphs, and ops
in half that CUDA has and a CPU has not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Final, Self

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope.patches import Patches
from ampscope.policy.device_profiles import DeviceProfile

_MARK: Final = "_ampscope_device"
_GIB: Final = 2**30
_chosen = threading.local()  # this thread's torch.cuda.set_device
# What a CPU raises of ops in half that CUDA has: FFTs, rrelu. Of other such ops see `tensor_core`.
_ON_CUDA_ALONE: Final = (
    "Unsupported dtype Half", "MKL FFT doesn't support tensors of type: Half",
    "rrelu_with_noise_out_cpu",
)  # fmt: skip


class CannotRehearseError(RuntimeError):
    """The script uses something of CUDA that a CPU cannot stand in for."""


@contextlib.contextmanager
def stand_in(profile: DeviceProfile) -> Iterator[StandInDevice | None]:
    """A script finds one CUDA device inside; after it torch is as before. Does nothing, and yields
    None, where there is a real one."""
    if torch.cuda.is_available():
        yield None
        return
    mode = StandInDevice()
    with Patches() as patches:
        _patch_cuda(patches, profile)
        _patch_tensors(patches, mode)
        with mode, ChosenDevice(0):
            yield mode


def device_of(tensor: Tensor) -> torch.device | None:
    """The device that the tensor was put on; None for one that is on the CPU for the script too."""
    found: torch.device | None = getattr(tensor, "__dict__", {}).get(_MARK)
    return found


class StandInDevice(TorchFunctionMode):
    """Redirects what asks for CUDA to the CPU, and remembers which tensors are there."""

    def __init__(self) -> None:
        super().__init__()
        self.was_used = False  # something was put on the device
        self._own = threading.local()

    @property
    def default(self) -> torch.device | None:
        """This thread's, of ``torch.set_default_device("cuda")``."""
        found: torch.device | None = getattr(self._own, "default", None)
        return found

    @default.setter
    def default(self, device: torch.device | None) -> None:
        self._own.default = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function with its device redirected; the result is where the script expects it."""
        asked = kwargs.get("device")
        target = _device(asked) if asked is not None else None
        if target is not None and target.type == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        if any(type(a) is torch.device and a.type == "cuda" for a in args):
            target = next(a for a in args if type(a) is torch.device)
            args = tuple(torch.device("cpu") if type(a) is torch.device else a for a in args)
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        if target is None:
            target = _common(args) or _common(tuple(kwargs.values()))
            if target is None and self.default is not None and func in _factories():
                target = self.default
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if any(text in str(error) for text in _ON_CUDA_ALONE):
                name = getattr(func, "__name__", func)
                raise CannotRehearseError(
                    f"{name} in half precision cannot be rehearsed on a CPU, which has it in fp32 "
                    "alone: give it fp32 numbers, or run the script on a GPU."
                ) from error
            raise
        if target is not None and target.type == "cuda":
            self.was_used = True
            _mark(result, target, args[0] if args else None)
        return result


def _asked_by_torch() -> bool:
    """Whether the wrapped call comes from ampscope or from torch itself, and not from the script or
    one of its libraries. Other wrappers of the same function may lie in between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _name_of(frame) == Patches.__module__:
        frame = frame.f_back
        outer = frame.f_back if frame is not None else None
        if outer is not None and _name_of(outer) == Patches.__module__:
            frame = outer
    return frame is not None and f"{_name_of(frame)}.".startswith(("ampscope.", "torch."))


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _device(asked: Any) -> torch.device:
    if isinstance(asked, torch.device):
        found = asked
    elif isinstance(asked, int):
        found = torch.device("cuda", asked)
    else:
        found = torch.device(asked)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", _current())
    return found


def _count() -> int:
    """Devices of this machine: one for each rank that a launcher has started here."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _current() -> int:
    found: int = getattr(_chosen, "index", 0)
    return found


def _choose(device: Any = None) -> None:
    """``set_device``: a negative index changes nothing, as in torch. Any other is there: ranks that
    the script starts by itself choose theirs, and only the script knows how many they are."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _chosen.index = index


class ChosenDevice(contextlib.ContextDecorator):
    """``torch.cuda.device``: another current device inside. None is the one that is current."""

    def __init__(self, device: Any = None) -> None:
        self._device = device
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(_current())
        if self._device is not None:
            _choose(self._device)

    def __exit__(self, *error: object) -> None:
        _chosen.index = self._before.pop()


def _common(values: tuple[Any, ...]) -> torch.device | None:
    """The device of the first tensor that is on one."""
    for value in values:
        if isinstance(value, Tensor):
            found = device_of(value)
        elif isinstance(value, list | tuple):
            found = _common(tuple(value))
        else:
            continue
        if found is not None:
            return found
    return None


def _mark(result: Any, device: torch.device | None, first: Any = None) -> None:
    """Put what a function returned on ``device``; an in-place function returns its first argument,
    which stays where it is."""
    if isinstance(result, Tensor):
        if result is first:
            return
        if device is None:
            result.__dict__.pop(_MARK, None)
        else:
            result.__dict__[_MARK] = device
    elif isinstance(result, list | tuple):
        for one in result:
            _mark(one, device)


def _moved(mode: StandInDevice, tensor: Tensor, device: torch.device, **kwargs: Any) -> Tensor:
    """``tensor.to`` another device makes a copy; to its own it does what is left to do."""
    target = device if device.type == "cuda" else None
    mode.was_used |= target is not None
    if device_of(tensor) == target:
        result: Tensor = torch.Tensor.to(tensor, **kwargs) if kwargs else tensor
    else:
        result = torch.Tensor.to(tensor, **{**kwargs, "copy": True, "device": "cpu"})
    if result is not tensor:
        _mark(result, target)
    return result


# Functions and attributes of tensors that need more than their device redirected.


def _to(mode: StandInDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    named = kwargs
    names = ("non_blocking", "copy")  # may stand last, without their names
    while rest and isinstance(rest[-1], bool):
        bools = sum(isinstance(value, bool) for value in rest)
        named = {names[bools - 1]: rest.pop(), **named}
    other = rest[0] if rest else named.get("other")
    copies = {"copy": True} if named.get("copy") else {}
    if isinstance(other, Tensor):
        target = device_of(other) or torch.device("cpu")
        return _moved(mode, tensor, target, dtype=other.dtype, **copies)
    known = {k: v for k, v in named.items() if k != "copy"}
    device, dtype, _, memory_format = _parse_to(mode, torch._C._nn._parse_to, tuple(rest), known)
    if device is None:
        return mode.call(func, args, kwargs)
    left = {"dtype": dtype, "memory_format": memory_format}
    left = {name: value for name, value in left.items() if value is not None} | copies
    return _moved(mode, tensor, _device(device), **left)


def _parse_to(mode: StandInDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the arguments of ``to`` mean, for tensors and modules: the device stays the one asked
    for, and a number, which torch takes for the accelerator that it has, is a CUDA device."""

    def named(asked: Any) -> Any:
        is_device = isinstance(asked, torch.device | int) and not isinstance(asked, bool)
        return str(_device(asked)) if is_device else asked

    return func(*map(named, args[:1]), *args[1:], **{k: named(v) for k, v in kwargs.items()})


def _cuda(mode: StandInDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = args[1] if len(args) > 1 else kwargs.get("device")
    return _moved(mode, args[0], _device("cuda" if asked is None else asked))


def _cpu(mode: StandInDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _moved(mode, args[0], torch.device("cpu"))


def _get_device(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> Any:
    found = None if _asked_by_ampscope() else device_of(args[0])
    return func(*args, **kwargs) if found is None else found


def _is_cuda(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> bool:
    return device_of(args[0]) is not None and not _asked_by_ampscope()


def _is_cpu(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> bool:
    return device_of(args[0]) is None or _asked_by_ampscope()


def _index(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> int:
    found = device_of(args[0])
    return -1 if found is None else found.index or 0


def _asked_by_ampscope() -> bool:
    """Whether an instrument asks; other modes of ampscope pass on what a script asks."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and _name_of(frame).startswith("ampscope.")


def _set_data(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> Any:
    func(*args, **kwargs)
    _mark(args[0], device_of(args[1]))


def _itself(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _type(mode: StandInDevice, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], str) and args[1].startswith("torch.cuda."):
        result = func(args[0], "torch." + args[1].removeprefix("torch.cuda."))
        _mark(result, _device("cuda"), args[0])
        return result
    return mode.call(func, args, kwargs)


_Special = Callable[[StandInDevice, Any, Any, Any], Any]
_SPECIAL: Final[dict[Any, _Special]] = {
    torch.device: lambda mode, func, args, kwargs: func(*args, **kwargs),
    Tensor.to: _to,
    torch._C._nn._parse_to: _parse_to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.type: _type,
    Tensor.pin_memory: _itself,
    Tensor.is_pinned: lambda *_: False,
    Tensor.get_device: _index,
    Tensor.device.__get__: _get_device,
    Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _is_cpu,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}


def _factories() -> Any:
    from torch.utils import _device  # its list is made when it is first asked for

    return _device._device_constructors()


# torch.cuda as a script meets it. Each answer is the stand-in's for the script and its libraries.


def _patch_cuda(patches: Patches, profile: DeviceProfile) -> None:
    facts = SimpleNamespace(
        name=profile.name,
        major=profile.capability[0],
        minor=profile.capability[1],
        total_memory=profile.memory_gib * _GIB,
        multi_processor_count=profile.multiprocessors,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        gcnArchName="",
    )
    has_bf16 = profile.capability >= (8, 0)
    architecture = f"sm_{profile.capability[0]}{profile.capability[1]}"
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "get_device_name": profile.name,
        "get_device_capability": profile.capability,
        "get_device_properties": facts,
        "get_arch_list": [architecture],
        "is_bf16_supported": has_bf16,
        "mem_get_info": (facts.total_memory, facts.total_memory),
        "memory_summary": "",
        "memory_stats": {},
        "utilization": 0,
        "can_device_access_peer": False,
        "is_current_stream_capturing": False,
    }
    for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "memory_cached", "max_memory_cached",
    ):  # fmt: skip
        answers[name] = 0
    for name in (
        "init", "synchronize", "empty_cache", "ipc_collect", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "reset_peak_memory_stats",
        "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction", "set_stream", "set_sync_debug_mode",
    ):  # fmt: skip
        answers[name] = None
    for name, answer in answers.items():
        if hasattr(torch.cuda, name):
            patches.wrap(torch.cuda, name, _answering(answer))
    for owner, name, made in (
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda *_, **__: None),
        (torch.cuda, "get_rng_state_all", lambda *_, **__: [torch.get_rng_state()]),
        (torch.cuda, "set_rng_state_all", lambda *_, **__: None),
        (torch.cuda, "current_stream", lambda *_, **__: Stream()),
        (torch.cuda, "default_stream", lambda *_, **__: Stream()),
        (torch.cuda, "stream", lambda *_, **__: contextlib.nullcontext()),
        (torch.cuda, "device", ChosenDevice),
        (torch.cuda.nvtx, "range_push", lambda *_, **__: 0),
        (torch.cuda.nvtx, "range_pop", lambda *_, **__: 0),
        (torch.cuda.nvtx, "mark", lambda *_, **__: None),
    ):
        patches.replace(owner, name, _instead(made))
    # Wrapped, for torch._dynamo looks at what it wraps.
    patches.wrap(torch.nn.attention, "sdpa_kernel", lambda *_, **__: contextlib.nullcontext())
    for name in ("enable_flash_sdp", "enable_math_sdp", "enable_mem_efficient_sdp"):
        patches.wrap(torch.backends.cuda, name, _answering(None))
    for name in ("Stream", "Event"):
        patches.replace(torch.cuda, name, _instead(globals()[name]))
    for name in ("CUDAGraph", "graph"):  # classes stay classes: annotations name them
        patches.replace(torch.cuda, name, _instead(NoGraph))
    patches.replace(torch.cuda, "make_graphed_callables", _instead(_no_graphs))
    answers = {
        "is_available": True,
        "synchronize": None,
        "current_accelerator": torch.device("cuda"),
    }
    for name, answer in answers.items():
        patches.wrap(torch.accelerator, name, _answering(answer))
    for owner, name, call in (
        (torch.cuda, "device_count", _count),
        (torch.accelerator, "device_count", _count),
        (torch.cuda, "current_device", _current),
        (torch.accelerator, "current_device_index", _current),
        (torch.cuda, "set_device", _choose),
        (torch.accelerator, "set_device_index", _choose),
    ):
        patches.wrap(owner, name, _called(call))
    patches.replace(torch.version, "cuda", _instead("12.8"))


def _answering(answer: Any) -> Callable[..., Any]:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _asked_by_torch() else answer

    return call


def _called(instead: Callable[..., Any]) -> Callable[..., Any]:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _asked_by_torch() else instead(*args, **kwargs)

    return call


def _instead(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _no_graphs(*args: object, **kwargs: object) -> None:
    raise CannotRehearseError(
        "CUDA graphs cannot be rehearsed on a CPU: run the script without them, or on a GPU."
    )


class NoGraph:
    """``torch.cuda.CUDAGraph`` and ``torch.cuda.graph``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _no_graphs()


class Stream:
    """Everything on a CPU happens in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was switched."""

    def query(self) -> bool:
        """Everything has been done."""
        return True

    def synchronize(self, *args: object) -> None:
        """There is nothing to wait for."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        made = event or Event()
        made.record()
        return made


class Event:
    """Takes the time of the processor."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.at = 0.0

    def record(self, *args: object) -> None:
        """Take the present time as the time of this event."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events."""
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        """Whether the event has happened: always, as a CPU works in order."""
        return True

    def synchronize(self, *args: object) -> None:
        """There is nothing to wait for."""

    wait = synchronize


# What makes or moves tensors, and is no function of torch that the mode sees.


def _patch_tensors(patches: Patches, mode: StandInDevice) -> None:
    def parameter(original: Any, kind: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = original(kind, data, *args, **kwargs)
        if isinstance(data, Tensor):
            _mark(made, device_of(data), data)
        return made

    def functions(original: Any) -> Any:
        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.__func__(kind, *args, **kwargs)
            device = _common(args)
            if device is not None:
                _mark(result, device)
            return result

        return classmethod(apply)

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        place = args[1] if len(args) > 1 else kwargs.get("map_location")
        if isinstance(place, dict):
            place = next((v for v in place.values()), None)
        on_cuda = isinstance(place, str | torch.device) and _device(place).type == "cuda"
        loaded = original(args[0], **{**kwargs, "map_location": "cpu"})
        if on_cuda:
            _mark_all(loaded, _device("cuda"))
        return loaded

    def loader(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.pin_memory = False

    def enters(original: Any, context: Any) -> None:
        mode.default = _device(context.device) if context.device.type == "cuda" else None
        if mode.default is None:
            original(context)

    def leaves(original: Any, context: Any, *error: Any) -> None:
        mode.default = None
        if context.device.type != "cuda":
            original(context, *error)

    def state(original: Any, tensor: Any) -> Any:
        found = original(tensor)
        if isinstance(found, dict) and _MARK in found:
            found = {k: v for k, v in found.items() if k != _MARK}
        return found

    def group(original: Any, *args: Any, **kwargs: Any) -> Any:
        names = [a.replace("nccl", "gloo") if isinstance(a, str) else a for a in args[:1]]
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = kwargs["backend"].replace("nccl", "gloo")
        if "device_id" in kwargs:
            kwargs.pop("device_id")
        return original(*names, *args[1:], **kwargs)

    def parallel(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")}
        original(self, module, *args[2:], **kwargs)

    def run_backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:  # hooks and functions of the script run inside
            return original(*args, **kwargs)

    def start(original: Any, thread: threading.Thread) -> None:
        run = thread.run

        def run_inside() -> None:
            del thread.run  # it holds the thread itself
            with mode:  # a mode belongs to the thread that entered it
                run()

        thread.run = run_inside  # type: ignore[method-assign]  # also of a class with its own run
        original(thread)

    patches.wrap(threading.Thread, "start", start)
    patches.wrap(torch.autograd, "_engine_run_backward", run_backward)
    patches.wrap(nn.Parameter, "__new__", parameter)
    patches.wrap(nn.Buffer, "__new__", parameter)
    patches.replace(torch.autograd.Function, "apply", functions)
    patches.wrap(torch, "load", load)
    patches.wrap(torch.utils.data.DataLoader, "__init__", loader)
    patches.wrap(torch.utils._device.DeviceContext, "__enter__", enters)
    patches.wrap(torch.utils._device.DeviceContext, "__exit__", leaves)
    patches.wrap(torch._utils, "_get_obj_state", state)
    patches.replace(torch, "Generator", _generator)
    # Its C++ parser takes no other class for a stream, before any mode is asked.
    patches.replace(Tensor, "record_stream", _instead(lambda tensor, stream: None))
    if torch.distributed.is_available():
        patches.wrap(torch.distributed, "init_process_group", group)
        patches.wrap(nn.parallel.DistributedDataParallel, "__init__", parallel)


def _mark_all(value: Any, device: torch.device) -> None:
    """Every tensor in what was loaded."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            _mark_all(one, device)
    else:
        _mark(value, device)


def _generator(original: Any) -> Any:
    class Generator(original):  # type: ignore[misc]  # torch's own class
        """Draws on the CPU, whichever device is asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return original.__new__(original, "cpu")

    return Generator
