"""torch.cuda and torch.accelerator as a script meets them on a device that is stood in for.

Inside :func:`answering` each public function of ``torch.cuda`` and ``torch.accelerator`` answers,
or raises :class:`CannotRehearseError` with a sentence. Few functions get an answer of their own
here: the ones that ask the driver. The others are torch's own code on top of these, so a rule such
as ``is_bf16_supported`` is the rule of the torch that is installed.

Who asks decides: a script and its libraries are told of the stand-in, torch's inner code and
ampscope are told the truth. Memory figures are 0, because the tensors are in the CPU's memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Final, NoReturn, Self

import torch
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.utils._device
from torch import Tensor

from ampscope.patches import Patches
from ampscope.policy.device_profiles import DeviceProfile

_GIB: Final = 2**30
_KIB: Final = 2**10
# Versions that go with CUDA 12.8 in torch's own builds.
_CUDA: Final = "12.8"
_CUDNN: Final = 91002
_NCCL: Final = (2, 27, 3)
# What counts as the script's own question when it is asked on the script's behalf.
_PASS_ON: Final = ("torch.cuda.", "torch.accelerator.", f"{__name__}.")
_chosen = threading.local()  # this thread's torch.cuda.set_device, and its streams


class CannotRehearseError(RuntimeError):
    """The script uses something of CUDA that a CPU cannot stand in for."""


def cannot(what: str, instead: str = "run the script without it") -> NoReturn:
    """Raise :class:`CannotRehearseError`: one sentence that names the call and what to do."""
    raise CannotRehearseError(f"{what} cannot be rehearsed on a CPU: {instead}, or on a GPU.")


@contextlib.contextmanager
def answering(profile: DeviceProfile) -> Iterator[None]:
    """``torch.cuda`` and ``torch.accelerator`` answer for the device of ``profile`` inside."""
    with Patches() as patches:
        _patch_facts(patches, profile)
        _patch_memory(patches, profile)
        _patch_state(patches)
        _patch_streams(patches)
        _patch_accelerator(patches)
        _patch_backends(patches, profile)
        _patch_refused(patches)
        with ChosenDevice(0):
            _chosen.streams = {}
            yield


# Who asks.


def asked_by_torch() -> bool:
    """Whether the wrapped call comes from ampscope or from torch itself, and not from the script or
    one of its libraries. Other wrappers of the same function may lie in between. What
    ``torch.cuda`` asks itself is asked by its caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = f"{name_of(frame)}."
        if name == f"{Patches.__module__}.":
            frame = frame.f_back
            outer = frame.f_back if frame is not None else None
            if outer is not None and name_of(outer) == Patches.__module__:
                frame = outer
            continue
        if not name.startswith(_PASS_ON):
            return name.startswith(("ampscope.", "torch."))
        frame = frame.f_back
    return False


def name_of(frame: FrameType) -> str:
    """The module whose code the frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def _answering(answer: Any) -> Callable[..., Any]:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if asked_by_torch() else answer

    return call


def _called(instead: Callable[..., Any]) -> Callable[..., Any]:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if asked_by_torch() else instead(*args, **kwargs)

    return call


def _instead(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _always(instead: Callable[..., Any]) -> Callable[..., Any]:
    """For torch's inner code too. A wrapper, because torch._dynamo tells functions apart by
    identity."""
    return lambda original, *args, **kwargs: instead(*args, **kwargs)


def _ignored(*args: object, **kwargs: object) -> None:
    """Accepted; there is nothing to do on a CPU."""


# Which device is current.


def device_named(asked: Any) -> torch.device:
    """The device that a script names by a word, a number or a device, with its index."""
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


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """torch's own helper, which libraries use."""
    if device is None and not optional:
        raise ValueError(
            "Expected a torch.device with a specified index or an integer, but got:None"
        )
    place = device_named("cuda" if device is None else device)
    if place.type != "cuda" and not (allow_cpu and place.type == "cpu"):
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return -1 if place.type == "cpu" else place.index or 0


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


class DeviceOf(ChosenDevice):
    """``torch.cuda.device_of``: the device of a tensor; one on the CPU changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device())  # -1 on the CPU


# What the device is.

# Kilobytes of shared memory of a multiprocessor, of which one block may use all but 1 from 8.0 on;
# threads of a multiprocessor. CUDA Programming Guide 13, section 5.1, "Technical Specifications
# per Compute Capability".
_SHARED_KIB: Final = {
    (6, 0): 64, (6, 1): 96, (7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100,
    (8, 7): 164, (8, 9): 100, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228,
    (12, 0): 100, (12, 1): 100,
}  # fmt: skip
_THREADS: Final = {
    (7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (11, 0): 1536, (12, 0): 1536,
    (12, 1): 1536,
}  # fmt: skip


def _properties(profile: DeviceProfile) -> SimpleNamespace:
    capability = profile.capability
    shared = _SHARED_KIB.get(capability, 64)
    before_ampere = shared if capability >= (7, 0) else 48
    a_block = shared - 1 if capability >= (8, 0) else before_ampere
    return SimpleNamespace(
        name=profile.name,
        major=capability[0],
        minor=capability[1],
        total_memory=profile.memory_bytes,
        multi_processor_count=profile.multiprocessors,
        is_integrated=0,
        is_multi_gpu_board=0,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=_THREADS.get(capability, 2048),
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * _KIB,
        shared_memory_per_block_optin=a_block * _KIB,
        shared_memory_per_multiprocessor=shared * _KIB,
        # Not known of most devices; nothing of a rehearsal follows from them.
        L2_cache_size=0,
        clock_rate=0,
        memory_clock_rate=0,
        memory_bus_width=0,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        uuid=uuid.UUID(int=0),
        gcnArchName="",
    )


def _patch_facts(patches: Patches, profile: DeviceProfile) -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "get_device_name": profile.name,
        "get_device_capability": profile.capability,
        "get_device_properties": _properties(profile),
        "get_arch_list": ["sm_{}{}".format(*profile.capability)],
        "_check_bf16_tensor_supported": True,  # it keeps its answers
        "can_device_access_peer": False,
        "is_current_stream_capturing": False,
        "init": None,
        "ipc_collect": None,
        "check_error": None,  # no call fails
        "synchronize": None,
        # Of NVML. The stand-in is idle.
        "utilization": 0,
        "memory_usage": 0,
        "device_memory_used": 0,
        "temperature": 0,
        "power_draw": 0,
        "clock_rate": 0,
        "current_blas_handle": 0,
        "current_solver_handle": 0,
        "graph_pool_handle": (0, 0),
        "cudart": CudaRuntime(profile),
    }
    _answer(patches, answers)
    _call(patches, {"device_count": _count, "current_device": _current, "set_device": _choose})
    for module in _homes("_get_device_index"):
        patches.wrap(module, "_get_device_index", _called(_get_device_index))
    patches.replace(torch.cuda, "device", _instead(ChosenDevice))
    patches.replace(torch.cuda, "device_of", _instead(DeviceOf))
    patches.replace(torch.version, "cuda", _instead(_CUDA))
    patches.wrap(torch, "get_device_module", _module)
    for name in ("start", "stop"):
        patches.wrap(torch.cuda.profiler, name, _answering(None))
    for name in ("range_push", "range_pop", "range_start"):
        patches.wrap(torch.cuda.nvtx, name, _always(lambda *_, **__: 0))
    for name in ("mark", "range_end"):
        patches.wrap(torch.cuda.nvtx, name, _always(_ignored))


def _homes(name: str) -> Iterator[Any]:
    """The modules of torch.cuda under which scripts find a function."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs):
        if hasattr(module, name):
            yield module


def _answer(patches: Patches, answers: dict[str, Any]) -> None:
    for name, answer in answers.items():
        for module in _homes(name):
            patches.wrap(module, name, _answering(answer))


def _call(patches: Patches, calls: dict[str, Callable[..., Any]]) -> None:
    for name, call in calls.items():
        for module in _homes(name):
            patches.wrap(module, name, _called(call))


def _module(original: Any, device: Any = None) -> Any:
    return torch.cuda if device is None and not asked_by_torch() else original(device)


class CudaRuntime:
    """``torch.cuda.cudart()``: what a profiler or a memory report asks of the runtime."""

    class cudaError:  # noqa: N801  # CUDA's name
        """Status of a call."""

        success = 0

    def __init__(self, profile: DeviceProfile) -> None:
        self._memory_bytes = profile.memory_bytes

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:  # noqa: N802  # CUDA's name
        """Free bytes and all bytes."""
        return self._memory_bytes, self._memory_bytes

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802  # CUDA's name
        """What a status means."""
        return "no error" if status == 0 else "unknown error"

    def __getattr__(self, name: str) -> Any:
        if name in ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister",
                    "cudaHostUnregister"):  # fmt: skip
            return lambda *args: 0
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: cannot(f"torch.cuda.cudart().{name}")


# Memory: everything is 0, with the keys of a real device.


def _nothing_allocated() -> dict[str, Any]:
    """What ``torch._C._cuda_memoryStats`` gives on a device that holds nothing yet."""
    figures = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    pools = {pool: dict(figures) for pool in ("all", "large_pool", "small_pool")}
    blocks = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
        "active_bytes", "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    counters = (
        "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
        "num_device_free", "num_oom_rejections",
    )  # fmt: skip
    return {
        **{name: {pool: dict(values) for pool, values in pools.items()} for name in blocks},
        **dict.fromkeys(counters, 0),
        "max_split_size": -1,
        "oversize_allocations": dict(figures),
        "oversize_segments": dict(figures),
    }


def _nothing_pinned() -> dict[str, Any]:
    """What ``torch._C._cuda_hostMemoryStats`` gives before the first pinned tensor."""
    figures = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    times = dict.fromkeys(("total", "max", "min", "count", "avg"), 0)
    blocks = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
    return {
        **{name: dict(figures) for name in blocks},
        **{name: dict(times) for name in ("host_alloc_time", "host_free_time")},
        **dict.fromkeys(("num_host_alloc", "num_host_free"), 0),
    }


def _patch_memory(patches: Patches, profile: DeviceProfile) -> None:
    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        fractions[_index(device)] = fraction

    def processes(device: Any = None) -> str:
        return f"GPU:{_index(device)}\nno processes are running"

    answers: dict[str, Any] = {
        "mem_get_info": (profile.memory_bytes, profile.memory_bytes),
        "get_allocator_backend": "native",
    }
    for name in (
        "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated",
        "reset_max_memory_cached", "reset_accumulated_memory_stats",
        "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats",
        "_record_memory_history", "caching_allocator_enable",
    ):  # fmt: skip
        answers[name] = None
    _answer(patches, answers)
    _call(
        patches,
        {
            "memory_stats_as_nested_dict": lambda device=None: _nothing_allocated(),
            "host_memory_stats_as_nested_dict": _nothing_pinned,
            "memory_snapshot": lambda *_, **__: [],
            "_snapshot": lambda *_, **__: {"segments": [], "device_traces": [[]]},
            "list_gpu_processes": processes,
            "set_per_process_memory_fraction": set_fraction,
            "get_per_process_memory_fraction": lambda device=None: fractions.get(
                _index(device), 1.0
            ),
        },
    )
    for name in ("caching_allocator_disabled", "use_mem_pool"):
        for module in _homes(name):
            patches.wrap(module, name, _always(lambda *_, **__: contextlib.nullcontext()))
    for module in _homes("MemPool"):
        patches.replace(module, "MemPool", _instead(MemPool))


def _index(device: Any) -> int:
    return _current() if device is None else device_named(device).index or 0


class MemPool:
    """``torch.cuda.MemPool``: nothing is allocated from it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.id = (0, 1)

    def use_count(self) -> int:
        """Users of the pool: its owner."""
        return 1

    def snapshot(self) -> list[Any]:
        """Its segments."""
        return []


# Random numbers are those of the CPU.


def _patch_state(patches: Patches) -> None:
    modes = {"default": 0, "warn": 1, "error": 2}
    debug = [0]

    def set_debug(mode: int | str) -> None:
        if mode not in (*modes, *modes.values()):
            raise RuntimeError(
                "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
            )
        debug[0] = modes[mode] if isinstance(mode, str) else mode

    def state(*_: object, **__: object) -> Tensor:
        return torch.get_rng_state()

    _answer(patches, dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all")))
    _call(
        patches,
        {
            "initial_seed": torch.initial_seed,
            "set_sync_debug_mode": set_debug,
            "get_sync_debug_mode": lambda: debug[0],
        },
    )
    for name, made in (
        ("get_rng_state", state),
        ("set_rng_state", _ignored),
        ("get_rng_state_all", lambda: [torch.get_rng_state() for _ in range(_count())]),
        ("set_rng_state_all", _ignored),
    ):
        for module in _homes(name):
            patches.wrap(module, name, _always(made))
    patches.replace(torch.cuda, "default_generators", _instead((torch.default_generator,)))
    for name in ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor",
                 "CharTensor", "ShortTensor", "IntTensor", "LongTensor", "BoolTensor"):  # fmt: skip
        patches.replace(torch.cuda, name, _instead(_OldTensorType(name, (), {})))


class _OldTensorType(type):
    """``torch.cuda.FloatTensor`` and its like: a type that makes tensors on the device."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch, cls.__name__)(*args, **kwargs).cuda()

    def __instancecheck__(cls, value: Any) -> bool:
        on_cpu = getattr(torch, cls.__name__)
        # `is_cuda` tells ampscope the truth.
        is_there = isinstance(value, Tensor) and value.get_device() >= 0
        return is_there and value.dtype is on_cpu.dtype

    @property
    def dtype(cls) -> torch.dtype:
        found: torch.dtype = getattr(torch, cls.__name__).dtype
        return found

    @property
    def is_cuda(cls) -> bool:
        return True


def old_type_name(asked: Any) -> str:
    """``"torch.cuda.FloatTensor"`` for the type or its name; "" for all else."""
    if isinstance(asked, _OldTensorType):
        return f"torch.cuda.{asked.__name__}"
    return asked if isinstance(asked, str) and asked.startswith("torch.cuda.") else ""


# Streams and events: everything on a CPU happens in order.

_numbers = itertools.count(1)


class Stream:
    """``torch.cuda.Stream``, and ``torch.Stream`` of the device."""

    def __init__(
        self, device: Any = None, priority: int = 0, *args: object, number: int | None = None,
        **kwargs: object,
    ) -> None:  # fmt: skip
        self.device = device_named("cuda" if device is None else device)
        self.device_index = self.device.index or 0
        self.device_type = 1  # c10::DeviceType::CUDA
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_numbers) if number is None else number
        self._around: list[Any] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __enter__(self) -> Self:
        self._around.append(StreamContext(self))
        self._around[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._around.pop().__exit__(*error)

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


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: a stream of another library."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: object) -> None:
        super().__init__(device, number=stream_ptr)


class StreamContext(contextlib.ContextDecorator):
    """``torch.cuda.stream``: another current stream inside, on that stream's device."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[dict[int, Stream], int]] = []

    def __enter__(self) -> None:
        self._before.append((_streams(), _current()))
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        _chosen.streams, _chosen.index = self._before.pop()


def _streams() -> dict[int, Stream]:
    """This thread's current stream of each device that has another than the default."""
    found: dict[int, Stream] = getattr(_chosen, "streams", {})
    return found


def set_stream(stream: Stream) -> None:
    """``torch.cuda.set_stream``: it also makes the stream's device the current one."""
    _chosen.streams = {**_streams(), stream.device_index: stream}
    _choose(stream.device)


def current_stream(device: Any = None) -> Stream:
    """``torch.cuda.current_stream``."""
    return _streams().get(_index(device)) or default_stream(device)


def default_stream(device: Any = None) -> Stream:
    """``torch.cuda.default_stream``."""
    return Stream(torch.device("cuda", _index(device)), number=0)


class Event:
    """Takes the time of the processor."""

    def __init__(self, device: Any = None, *args: object, **kwargs: object) -> None:
        is_device = device is not None and not isinstance(device, bool)
        self.device = device_named(device if is_device else "cuda")
        self.at = 0.0

    def record(self, *args: object) -> None:
        """It happens now."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events."""
        return 1e3 * (end.at - self.at)

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self, *args: object) -> None:
        """There is nothing to wait for."""

    wait = synchronize


def _patch_streams(patches: Patches) -> None:
    for name, made in (
        ("Stream", Stream),
        ("Event", Event),
        ("ExternalStream", ExternalStream),
        ("StreamContext", StreamContext),
    ):
        patches.replace(torch.cuda, name, _instead(made))
        if hasattr(torch.cuda.streams, name):
            patches.replace(torch.cuda.streams, name, _instead(made))
    for name, call in (
        ("stream", StreamContext),
        ("set_stream", set_stream),
        ("current_stream", current_stream),
        ("default_stream", default_stream),
        ("get_stream_from_external", ExternalStream),
    ):
        if hasattr(torch.cuda, name):
            patches.wrap(torch.cuda, name, _always(call))
    patches.replace(torch, "Stream", _of_either(Stream))
    patches.replace(torch, "Event", _of_either(Event))


def _of_either(kind: type[Any]) -> Callable[[Any], Any]:
    """``torch.Stream`` and ``torch.Event``: the stand-in's, unless another device is asked for."""

    def make(original: Any) -> Any:
        class OfEither(type):
            def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
                if device is None or isinstance(device, bool) or "cuda" in str(device):
                    return kind(device, *args, **kwargs)
                return original(device, *args, **kwargs)

            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, kind | original)

        return OfEither(original.__name__, (), {})

    return make


# torch.accelerator.


def _patch_accelerator(patches: Patches) -> None:
    asked = torch.accelerator
    for name, call in (
        ("is_available", lambda: True),
        ("current_accelerator", lambda check_available=False: torch.device("cuda")),
        ("device_count", _count),
        ("synchronize", _ignored),
        ("set_stream", set_stream),
        ("current_stream", current_stream),
        ("current_device_index", _current),
        ("current_device_idx", _current),
        ("set_device_index", _choose),
        ("set_device_idx", _choose),
        ("get_device_capability", lambda device=None: {"supported_dtypes": _dtypes()}),
        ("empty_cache", _ignored),
        ("empty_host_cache", _ignored),
        ("get_memory_info", torch.cuda.mem_get_info),
        ("memory_stats", torch.cuda.memory_stats),
        ("memory_allocated", torch.cuda.memory_allocated),
        ("max_memory_allocated", torch.cuda.max_memory_allocated),
        ("memory_reserved", torch.cuda.memory_reserved),
        ("max_memory_reserved", torch.cuda.max_memory_reserved),
        ("reset_accumulated_memory_stats", _ignored),
        ("reset_peak_memory_stats", _ignored),
    ):
        for module in (asked, getattr(asked, "memory", None)):
            if module is not None and hasattr(module, name):
                patches.wrap(module, name, _called(call))
    if hasattr(asked, "device_index"):  # torch 2.8
        patches.replace(asked, "device_index", _instead(ChosenDevice))


def _dtypes() -> set[torch.dtype]:
    """What tensors on CUDA can be of."""
    names = (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )  # fmt: skip
    return {getattr(torch, name) for name in names if hasattr(torch, name)}


# Flags of the backends.


def _patch_backends(patches: Patches, profile: DeviceProfile) -> None:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    patches.wrap(cudnn, "is_available", _answering(True))
    patches.wrap(cudnn, "version", _answering(_CUDNN))
    # torch's own recurrent layers would warn that this build of torch has no cuDNN.
    patches.wrap(
        cudnn, "is_acceptable",
        lambda original, tensor: not asked_by_torch() and tensor.get_device() >= 0,
    )  # fmt: skip
    patches.wrap(cuda, "is_built", _answering(True))
    if hasattr(cuda, "is_flash_attention_available"):
        patches.wrap(cuda, "is_flash_attention_available", _answering(True))
    # A CPU has kernels of its own; with these flags off it would find none.
    for kind in ("flash", "math", "mem_efficient", "cudnn"):
        if hasattr(cuda, f"enable_{kind}_sdp"):
            _patch_flag(patches, cuda, kind)
    # Wrapped, for torch._dynamo looks at what it wraps.
    patches.wrap(torch.nn.attention, "sdpa_kernel", lambda *_, **__: contextlib.nullcontext())
    patches.wrap(torch.cuda.nccl, "version", _answering(_NCCL))
    patches.wrap(torch.cuda.nccl, "is_available", _answering(True))
    if torch.distributed.is_available():
        patches.wrap(torch.distributed, "is_nccl_available", _answering(True))


def _patch_flag(patches: Patches, owner: Any, kind: str) -> None:
    enabled = [True]

    def enable(is_on: bool) -> None:
        enabled[0] = bool(is_on)

    patches.wrap(owner, f"enable_{kind}_sdp", _called(enable))
    patches.wrap(owner, f"{kind}_sdp_enabled", _called(lambda: enabled[0]))


# What a CPU cannot stand in for, each in one sentence.


def _patch_refused(patches: Patches) -> None:
    for name in ("CUDAGraph", "graph"):  # classes stay classes: annotations name them
        for module in _homes(name):
            patches.replace(module, name, _instead(NoGraph))
    for module in _homes("make_graphed_callables"):
        patches.wrap(module, "make_graphed_callables", _always(_no_graphs))
    if hasattr(torch.accelerator, "Graph"):
        patches.replace(torch.accelerator, "Graph", _instead(NoGraph))
    for name in ("caching_allocator_alloc", "caching_allocator_delete", "change_current_allocator"):
        for module in _homes(name):
            patches.wrap(module, name, _refusing(f"torch.cuda.{name}"))
    for name in ("CUDAPluggableAllocator", "GreenContext"):
        made = type(name, (_Refused,), {"__doc__": "What a CPU has not."})
        for module in _homes(name):
            patches.replace(module, name, _instead(made))
    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"):
        patches.wrap(
            torch.cuda.nccl, name,
            _refusing(f"torch.cuda.nccl.{name}", "use torch.distributed instead"),
        )  # fmt: skip
    if torch.distributed.is_available():
        import torch.nn.modules._functions as of_modules

        patches.replace(of_modules.SyncBatchNorm, "forward", _no_sync_batch_norm)
        patches.wrap(
            torch.distributed, "_make_nccl_premul_sum",
            _refusing("ReduceOp.PREMUL_SUM, which NCCL alone has,", "scale the tensors instead"),
        )  # fmt: skip
    import torch.nn.parallel.comm as between_devices  # scatter and gather of one process

    for name in ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced",
                 "scatter", "gather"):  # fmt: skip
        patches.wrap(
            between_devices, name,
            _refusing(f"torch.cuda.comm.{name}", "use DistributedDataParallel instead"),
        )  # fmt: skip


def _refusing(*sentence: str) -> Callable[..., Any]:
    return lambda original, *args, **kwargs: cannot(*sentence)


def _no_sync_batch_norm(original: Any) -> Any:
    def forward(*args: object, **kwargs: object) -> NoReturn:
        cannot("torch.nn.SyncBatchNorm in several ranks", "keep BatchNorm in this run")

    return staticmethod(forward)


def _no_graphs(*args: object, **kwargs: object) -> None:
    raise CannotRehearseError(
        "CUDA graphs cannot be rehearsed on a CPU: run the script without them, or on a GPU."
    )


class NoGraph:
    """``torch.cuda.CUDAGraph`` and ``torch.cuda.graph``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _no_graphs()


class _Refused:
    def __init__(self, *args: object, **kwargs: object) -> None:
        cannot(f"torch.cuda.{type(self).__name__}")
