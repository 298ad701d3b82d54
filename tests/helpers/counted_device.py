"""A fake CUDA device that counts: what would launch a kernel, copy to the host, or make it wait.

Inside :class:`CountedDevice` every tensor says that it is on ``cuda:0``, and is in the CPU's
memory. Ops are counted below autograd and autocast, where a real device would launch them: views
and fresh memory are free; an op on numbers that are on the host is free too. One call of a
``_foreach_`` op counts as one, as the driver's own splitting depends on the sizes. The Triton
kernels are launches that count nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ampscope.capture import own_ops

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
PEAK = 1 << 40  # bytes that were allocated at once
WAITING = {  # ops whose result the host needs: a number, or a size that depends on the numbers
    "aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero",
    "aten.masked_select", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive",
    "aten._coalesce", "aten.item",
}  # fmt: skip
MASKED = {"aten.index", "aten.index_put", "aten.index_put_"}  # wait where a mask is the index
FREE = {  # memory alone
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty",
    "aten.new_empty_strided", "aten.set_", "aten.resize_", "aten.lift_fresh",
}  # fmt: skip


class CountedDevice(TorchDispatchMode):
    """While entered: :attr:`launches` and :attr:`waits` by name, :attr:`copies` to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies = 0  # that the host does not wait for
        self.statistics = 0  # times that the allocator's statistics were asked for
        self.is_capturing = False  # the current stream records a CUDA graph; set by the training
        self.step = 0  # of the training; set by it
        self.recorded = self.reached = 0  # events so far, and those that the host has waited past
        self._host = WeakIdKeyDictionary()
        self._patches = pytest.MonkeyPatch()
        self._is_inside = False

    def take(self) -> tuple[Counter[str], Counter[str], int]:
        """Launches, waits and copies since the last call."""
        found = self.launches, self.waits, self.copies
        self.launches, self.waits, self.copies = Counter(), Counter(), 0
        return found

    def wait(self, name: str) -> None:
        """The host waits for all that was launched."""
        self.waits[name] += 1
        self.reached = self.recorded

    def __enter__(self) -> CountedDevice:
        to, numpy, tolist = Tensor.to, Tensor.numpy, Tensor.tolist

        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            place = kwargs.get("device", args[0] if args else None)
            if not isinstance(place, str | torch.device):
                return to(tensor, *args, **kwargs)
            if torch.device(place).type == "cuda":
                rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
                return to(tensor, *args[1:], **rest) if args[1:] or rest else tensor
            return self._to_host(tensor, waits=not kwargs.get("non_blocking"))

        def waited(original: Any, name: str) -> Any:
            def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not self.is_on_host(tensor):
                    self.wait(name)
                return original(tensor, *args, **kwargs)

            return call

        def made(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Tensor:
                if kwargs.get("device") == CUDA:
                    del kwargs["device"]
                return original(*args, **kwargs)

            return call

        patch = self._patches.setattr
        for factory in ("full", "zeros", "ones", "empty", "tensor"):
            patch(torch, factory, made(getattr(torch, factory)))
        patch(Tensor, "to", moved, raising=False)
        patch(Tensor, "cpu", lambda tensor, *a, **k: self._to_host(tensor, waits=True))
        patch(Tensor, "numpy", waited(numpy, "numpy"))
        patch(Tensor, "tolist", waited(tolist, "tolist"))
        where = property(lambda tensor: HOST if self.is_on_host(tensor) else CUDA)
        patch(Tensor, "device", where, raising=False)
        patch(Tensor, "is_cpu", property(self.is_on_host), raising=False)
        patch(Tensor, "is_cuda", property(lambda t: not self.is_on_host(t)), raising=False)
        patch(torch.cuda, "Event", lambda *args, **kwargs: _Event(self))
        patch(torch.cuda, "current_stream", lambda *args: _Stream(self))
        for name in ("stream", "device"):
            patch(torch.cuda, name, contextlib.nullcontext)
        patch(torch.cuda, "is_initialized", lambda: True)
        patch(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch(Tensor, "record_stream", lambda *args: None)
        patch(Tensor, "pin_memory", lambda tensor, *args: tensor)
        patch(torch.cuda, "synchronize", lambda *args: self.wait("synchronize"))
        patch(torch.cuda, "get_rng_state", lambda *args: torch.get_rng_state())
        for name in ("max_memory_allocated", "memory_allocated"):
            patch(torch.cuda, name, lambda *args: self._asked(PEAK))
        nested = {"allocated_bytes": {"all": {"peak": PEAK, "current": PEAK}}}
        patch(torch.cuda, "memory_stats_as_nested_dict", lambda *args: self._asked(nested))
        patch(torch.cuda, "get_device_properties", lambda *args: types.SimpleNamespace(uuid=""))
        patch(torch.cuda, "get_device_name", lambda *args: "Fake")
        patch(torch.cuda, "get_device_capability", lambda *args: (9, 0))
        self._fake_triton()
        for name in ("switch_off", "switch_on"):  # where this mode could not look
            patch(own_ops._Here, name, lambda here: None)
        return super().__enter__()  # type: ignore[no-any-return]  # torch leaves it untyped

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.undo()

    def _asked(self, answer: Any) -> Any:
        self.statistics += 1
        return answer

    def _fake_triton(self) -> None:
        """Loads the CUDA counter with kernels that are counted as launches."""
        from ampscope import capture
        from ampscope.capture import exponent_count

        def jit(function: Any = None, **options: Any) -> Any:
            return jit if function is None else _Kernel(self, function.__name__)

        patch, name = self._patches, "ampscope.capture.exponent_cuda"
        triton = types.ModuleType("triton")
        language = types.ModuleType("triton.language")
        language.constexpr = lambda value=None: value  # type: ignore[attr-defined]  # made here
        triton.jit, triton.language = jit, language  # type: ignore[attr-defined]  # as above
        with pytest.MonkeyPatch.context() as loading:
            loading.setitem(sys.modules, "triton", triton)
            loading.setitem(sys.modules, "triton.language", language)
            loading.delitem(sys.modules, name, raising=False)
            module = importlib.import_module(name)
            loading.setitem(sys.modules, name, module)
        patch.setitem(sys.modules, name, module)
        patch.setattr(capture, "exponent_cuda", module, raising=False)
        asked = exponent_count.triton_problem

        def problem(device: torch.device) -> str:
            return "" if device.type == "cuda" else asked(device)

        patch.setattr(exponent_count, "triton_problem", problem)
        patch.setattr(exponent_count, "current_handle", lambda index: 0)

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor in self._host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_inside:
            return result
        name = str(func).rpartition(".")[0]
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(t)]
        if given and all(map(self.is_on_host, given)):
            for made in torch.utils._pytree.tree_leaves(result):
                if _is_tensor(made):
                    self._host[made] = True
        elif name in WAITING or (name in MASKED and any(t.dtype is torch.bool for t in given[1:])):
            self.wait(name)
        elif name not in FREE and not func.is_view and name != "aten._unsafe_view":
            self.launches[name] += 1
        return result

    def _to_host(self, tensor: Tensor, *, waits: bool) -> Tensor:
        if self.is_on_host(tensor):
            return tensor
        if waits:
            self.wait("copy")
        else:
            self.copies += 1
        self._is_inside = True
        try:
            copy = tensor.detach().clone()
        finally:
            self._is_inside = False
        self._host[copy] = True
        return copy


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


class _Kernel:
    def __init__(self, device: CountedDevice, name: str) -> None:
        self._device, self._name = device, f"triton.{name}"

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: self._device.launches.update([self._name])


class _Stream:
    """The one stream."""

    cuda_stream = 0

    def __init__(self, device: CountedDevice) -> None:
        self._device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: Any = None) -> _Event:
        event = event or _Event(self._device)
        event.record()
        return event  # type: ignore[no-any-return]  # it is one

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        self._device.wait("stream")


class _Event:
    """Asked a step later, or when the host has waited since, it has happened; else the host
    waits."""

    def __init__(self, device: CountedDevice) -> None:
        self._device = device
        self._step = self._number = -1

    def record(self, *args: object) -> None:
        self._step = self._device.step
        self._device.recorded += 1
        self._number = self._device.recorded

    def query(self) -> bool:
        return self._step != self._device.step or self._number <= self._device.reached

    def synchronize(self) -> None:
        if self._device.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if not self.query():
            self._device.wait("event")


# A small training, on the fake device or on the CPU.

Counts = tuple[Counter[str], Counter[str], int]  # launches, waits, copies to the host


def net() -> nn.Module:
    """Many parameters, and BatchNorm's buffers of two dtypes."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 1),
    )  # fmt: skip


def steps(
    model: nn.Module, watch: Callable[..., object] | None, *,
    optimizer: str = "AdamW", scaled: bool = False, clipped: bool = False, fused: bool = False,
    compiled: bool = False, captured: Container[int] = (), fake: bool = True, count: int = 8,
    bad: Container[int] = (), asked: list[int] | None = None,
    each: Callable[[], object] = lambda: None, lr: float | Tensor = 1e-3,
) -> list[Counts]:  # fmt: skip
    """Trains for ``count`` steps, on the ``fake`` device or on the CPU; counts of each. A compiled
    model is compiled by a first call on the CPU. The steps of ``captured`` are recorded into a CUDA
    graph, and run as they are recorded. The inputs of
    the steps of ``bad`` overflow. ``asked`` gets how often each step asked for the
    allocator's statistics; ``each`` is called before each step."""
    torch.manual_seed(0)
    kinds = {"fused": True} if fused else {}
    own = getattr(torch.optim, optimizer)(model.parameters(), lr=lr, **kinds)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    batches = [torch.randn(4, 1, 8, 8) for _ in range(count)]
    called: Any = model

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return called(batch).float().square().mean()  # type: ignore[no-any-return]  # a tensor

    if compiled:
        torch._dynamo.reset()
        called = torch.compile(model, backend="eager")
        loss_of(batches[0])
    context: Any = contextlib.nullcontext() if watch is None else watch(called, own, scaler)
    found = []
    counted = CountedDevice()
    with context, counted if fake else contextlib.nullcontext(counted) as device:
        for device.step, batch in enumerate(batches):
            each()
            device.is_capturing = device.step in captured
            own.zero_grad()
            loss = loss_of(batch * torch.inf if device.step in bad else batch)
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if clipped:
                if scaler is not None:
                    scaler.unscale_(own)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if scaler is None:
                own.step()
            else:
                scaler.step(own)
                scaler.update()
            found.append(device.take())
            if asked is not None:
                asked.append(device.statistics - sum(asked))
    return found
