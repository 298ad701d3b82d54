"""torch.cuda and torch.accelerator as a script meets them on a simulated device.

Inside :func:`answering` each public function of ``torch.cuda`` and ``torch.accelerator`` answers,
or raises :class:`CannotRehearseError` with a sentence. Few functions get an answer of their own
here: the ones that ask the driver. The others are torch's own code on top of these, so a rule such
as ``is_bf16_supported`` is the rule of the torch that is installed.

Memory figures are 0, because the tensors are in the CPU's memory.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.utils._device
from torch import Tensor

from ampscope.ext.rehearsal.cuda_streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    reset_streams,
    set_stream,
)
from ampscope.ext.rehearsal.current_device import (
    ChosenDevice,
    DeviceOf,
    asked_by_torch,
    current_device,
    device_count,
    get_device_index,
    index_of,
    set_device,
)
from ampscope.patches import Patches
from ampscope.policy.device_profiles import DeviceProfile

_KIB: Final = 2**10
# Versions that go with CUDA 12.8 in torch's own builds.
_CUDA: Final = "12.8"
_CUDNN: Final = 91002
_NCCL: Final = (2, 27, 3)


class CannotRehearseError(RuntimeError):
    """The script uses something of CUDA that cannot be simulated on a CPU."""


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
            reset_streams()
            yield


def _wrap(patches: Patches, **wrappers: Callable[..., Any]) -> None:
    """Wrap functions of ``torch.cuda`` by their names, wherever scripts find them."""
    for name, wrapper in wrappers.items():
        for module in _homes(name):
            patches.wrap(module, name, wrapper)


def _replace(patches: Patches, **values: Any) -> None:
    """The same for classes."""
    for name, value in values.items():
        for module in _homes(name):
            patches.replace(module, name, _instead(value))


def _homes(name: str) -> Iterator[Any]:
    for module in (
        torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs, torch.cuda.streams,
    ):  # fmt: skip
        if hasattr(module, name):
            yield module


def _answering(answer: Any) -> Callable[..., Any]:
    return _called(lambda *_, **__: answer)


def _called(instead: Callable[..., Any]) -> Callable[..., Any]:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if asked_by_torch() else instead(*args, **kwargs)

    return call


def _always(instead: Callable[..., Any]) -> Callable[..., Any]:
    """For torch's inner code too. A wrapper, because torch._dynamo tells functions apart by
    identity."""
    return lambda original, *args, **kwargs: instead(*args, **kwargs)


def _instead(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _ignored(*args: object, **kwargs: object) -> None:
    """Accepted; there is nothing to do on a CPU."""


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


# Not known of most devices; nothing of a rehearsal follows from them.
_UNKNOWN: Final = (
    "L2_cache_size", "clock_rate", "memory_clock_rate", "memory_bus_width", "pci_bus_id",
    "pci_device_id", "pci_domain_id",
)  # fmt: skip


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
        **dict.fromkeys(_UNKNOWN, 0),
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
        # Of NVML. The device is idle.
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
    _wrap(patches, **{name: _answering(answer) for name, answer in answers.items()})
    _wrap(
        patches,
        device_count=_called(device_count),
        current_device=_called(current_device),
        set_device=_called(set_device),
        _get_device_index=_called(get_device_index),
    )
    _replace(patches, device=ChosenDevice, device_of=DeviceOf)
    patches.replace(torch.version, "cuda", _instead(_CUDA))
    patches.wrap(torch, "get_device_module", _module)
    for name in ("start", "stop"):
        patches.wrap(torch.cuda.profiler, name, _answering(None))
    for name in ("range_push", "range_pop", "range_start"):
        patches.wrap(torch.cuda.nvtx, name, _always(lambda *_, **__: 0))
    for name in ("mark", "range_end"):
        patches.wrap(torch.cuda.nvtx, name, _always(_ignored))


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
    """Everything is 0, with the keys of a real device."""
    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        fractions[index_of(device)] = fraction

    def get_fraction(device: Any = None) -> float:
        return fractions.get(index_of(device), 1.0)

    def processes(device: Any = None) -> str:
        return f"GPU:{index_of(device)}\nno processes are running"

    for name in (
        "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated",
        "reset_max_memory_cached", "reset_accumulated_memory_stats",
        "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats",
        "_record_memory_history", "caching_allocator_enable",
    ):  # fmt: skip
        _wrap(patches, **{name: _answering(None)})
    _wrap(
        patches,
        mem_get_info=_answering((profile.memory_bytes, profile.memory_bytes)),
        get_allocator_backend=_answering("native"),
        memory_stats_as_nested_dict=_called(lambda device=None: _nothing_allocated()),
        host_memory_stats_as_nested_dict=_called(_nothing_pinned),
        memory_snapshot=_called(lambda *_, **__: []),
        _snapshot=_called(lambda *_, **__: {"segments": [], "device_traces": [[]]}),
        list_gpu_processes=_called(processes),
        set_per_process_memory_fraction=_called(set_fraction),
        get_per_process_memory_fraction=_called(get_fraction),
        caching_allocator_disabled=_always(lambda *_, **__: contextlib.nullcontext()),
        use_mem_pool=_always(lambda *_, **__: contextlib.nullcontext()),
    )
    _replace(patches, MemPool=MemPool)


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


def _patch_state(patches: Patches) -> None:
    """Random numbers are those of the CPU."""
    modes = {"default": 0, "warn": 1, "error": 2}
    debug = [0]

    def set_debug(mode: int | str) -> None:
        if mode not in (*modes, *modes.values()):
            raise RuntimeError(
                "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
            )
        debug[0] = modes[mode] if isinstance(mode, str) else mode

    _wrap(
        patches,
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), _answering(None)),
        initial_seed=_called(torch.initial_seed),
        set_sync_debug_mode=_called(set_debug),
        get_sync_debug_mode=_called(lambda: debug[0]),
        get_rng_state=_always(lambda *_, **__: torch.get_rng_state()),
        set_rng_state=_always(_ignored),
        get_rng_state_all=_always(lambda: [torch.get_rng_state() for _ in range(device_count())]),
        set_rng_state_all=_always(_ignored),
    )
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


def _patch_streams(patches: Patches) -> None:
    _replace(
        patches,
        Stream=Stream,
        Event=Event,
        ExternalStream=ExternalStream,
        StreamContext=StreamContext,
    )
    _wrap(
        patches,
        stream=_always(StreamContext),
        set_stream=_always(set_stream),
        current_stream=_always(current_stream),
        default_stream=_always(default_stream),
        get_stream_from_external=_always(ExternalStream),
    )
    patches.replace(torch, "Stream", _of_either(Stream))
    patches.replace(torch, "Event", _of_either(Event))


def _of_either(kind: type[Any]) -> Callable[[Any], Any]:
    """``torch.Stream`` and ``torch.Event``: ours, unless another device is asked for."""

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


def _patch_accelerator(patches: Patches) -> None:
    asked = torch.accelerator
    for name, call in (
        ("is_available", lambda: True),
        ("current_accelerator", lambda check_available=False: torch.device("cuda")),
        ("device_count", device_count),
        ("synchronize", _ignored),
        ("set_stream", set_stream),
        ("current_stream", current_stream),
        ("current_device_index", current_device),
        ("current_device_idx", current_device),
        ("set_device_index", set_device),
        ("set_device_idx", set_device),
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


def _patch_refused(patches: Patches) -> None:
    """What cannot be simulated, each in one sentence."""
    _replace(patches, CUDAGraph=NoGraph, graph=NoGraph)  # annotations name them: classes
    _wrap(patches, make_graphed_callables=_always(_no_graphs))
    if hasattr(torch.accelerator, "Graph"):
        patches.replace(torch.accelerator, "Graph", _instead(NoGraph))
    for name in ("caching_allocator_alloc", "caching_allocator_delete", "change_current_allocator"):
        _wrap(patches, **{name: _refusing(f"torch.cuda.{name}")})
    for name in ("CUDAPluggableAllocator", "GreenContext"):
        made = type(name, (_Refused,), {"__doc__": "What a CPU has not."})
        _replace(patches, **{name: made})
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
