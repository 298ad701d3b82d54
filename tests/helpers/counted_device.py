"""A fake CUDA device that counts: what would launch a kernel, copy to the host, or make it wait.

Inside :class:`CountedDevice` every tensor says that it is on ``cuda:0``, and is in the CPU's
memory. Ops are counted below autograd and autocast, where a real device would launch them: views
and fresh memory are free; an op on numbers that are on the host is free too. One call of a
``_foreach_`` op counts as one, as the driver's own splitting depends on the sizes.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
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
        self.step = 0  # of the training; set by it
        self._host = WeakIdKeyDictionary()
        self._patches = pytest.MonkeyPatch()
        self._is_inside = False

    def take(self) -> tuple[Counter[str], Counter[str], int]:
        """Launches, waits and copies since the last call."""
        found = self.launches, self.waits, self.copies
        self.launches, self.waits, self.copies = Counter(), Counter(), 0
        return found

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
                    self.waits[name] += 1
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
        patch(torch.cuda, "current_stream", lambda *args: None)
        patch(torch.cuda, "synchronize", lambda *args: self.waits.update(["synchronize"]))
        patch(torch.cuda, "get_rng_state", lambda *args: torch.get_rng_state())
        for name in ("max_memory_allocated", "memory_allocated"):
            patch(torch.cuda, name, lambda *args: 1 << 40)
        for name, module in list(sys.modules.items()):  # where this mode could not look
            if name.startswith("ampscope.") and hasattr(module, "no_dispatch"):
                patch(module, "no_dispatch", contextlib.nullcontext)
        return super().__enter__()  # type: ignore[no-any-return]  # torch leaves it untyped

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.undo()

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
            self.waits[name] += 1
        elif name not in FREE and not func.is_view and name != "aten._unsafe_view":
            self.launches[name] += 1
        return result

    def _to_host(self, tensor: Tensor, *, waits: bool) -> Tensor:
        if self.is_on_host(tensor):
            return tensor
        if waits:
            self.waits["copy"] += 1
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


class _Event:
    """Asked a step later, it has happened; asked in the same step, the host waits."""

    def __init__(self, device: CountedDevice) -> None:
        self._device = device
        self._step = -1

    def record(self, *args: object) -> None:
        self._step = self._device.step

    def synchronize(self) -> None:
        if self._step == self._device.step:
            self._device.waits["event"] += 1
