"""Which tensors live when a training step needs most memory, on any device, without an allocator's
help.

Every storage that an op below autograd allocates is followed until it is freed, and belongs to the
phase that made it. What was there before the step is named by who owns it: parameters, optimizer,
batch. The sum is exact for tensors; what libraries allocate inside an op (workspaces) is not seen,
so on CUDA the allocator's own peak stands beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampscope.capture.op_place import NO_BACKWARD

WEIGHTS, GRADIENTS, STATE, INPUTS = "weights", "gradients", "optimizer_state", "inputs"
ACTIVATIONS, CASTS, TEMPORARIES = "activations", "cast_copies", "temporaries"
KINDS = (WEIGHTS, GRADIENTS, STATE, INPUTS, ACTIVATIONS, CASTS, TEMPORARIES)


class LiveBytes:
    """Follows storages while entered; :attr:`at_peak` is bytes by kind when the sum was largest."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch: object) -> None:
        self.now = dict.fromkeys(KINDS, 0)
        self.at_peak = dict(self.now)
        self.peak = 0
        self._kinds: dict[int, str] = {}  # address of a storage that lives -> what it is for
        self._references: dict[int, weakref.ref[Any]] = {}
        self._model, self._optimizer = model, optimizer
        self._is_stepping = False
        self._mode = _Follow(self)
        self._handles: list[Any] = []
        self._register((*model.parameters(), *model.buffers()), WEIGHTS)
        self._register((p.grad for p in model.parameters() if p.grad is not None), GRADIENTS)
        self._register(tree_leaves(dict(optimizer.state)), STATE)
        self._register(tree_leaves(batch), INPUTS)

    def __enter__(self) -> LiveBytes:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                add: Any = parameter.register_post_accumulate_grad_hook  # torch leaves it untyped
                self._handles.append(add(self._is_gradient))
        self._handles.append(self._optimizer.register_step_pre_hook(self._steps))
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's is untyped
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        for handle in self._handles:
            handle.remove()

    def made(self, tensor: Tensor, *, is_cast: bool) -> None:
        """An op returned ``tensor``; a storage that is new is followed."""
        is_forward = torch._C._current_graph_task_id() == NO_BACKWARD and not self._is_stepping
        kind = TEMPORARIES if not is_forward else CASTS if is_cast else ACTIVATIONS
        self._follow(tensor, kind)

    def _register(self, values: Iterable[object], kind: str) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._follow(value, kind)

    def _follow(self, tensor: Tensor, kind: str) -> None:
        try:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or a subclass that wraps others
            return
        if key in self._kinds or not size:
            return
        self._kinds[key] = kind
        self._references[key] = weakref.ref(storage, lambda _: self._freed(key, size))
        self._add(kind, size)

    def _freed(self, key: int, size: int) -> None:
        self._references.pop(key, None)
        self._add(self._kinds.pop(key), -size)

    def _add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.now)

    def _steps(self, *_: object) -> None:
        self._is_stepping = True

    def _is_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        storage = parameter.grad.untyped_storage()
        before = self._kinds.get(storage._cdata)
        if before is not None and before != GRADIENTS:
            self._kinds[storage._cdata] = GRADIENTS
            self.now[before] -= storage.nbytes()
            self.now[GRADIENTS] += storage.nbytes()


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Runs each op and hands its results over."""

    supports_higher_order_operators = True

    def __init__(self, owner: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._owner = weakref.proxy(owner)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and args[0].is_floating_point()
        is_cast = is_copy and args[0].dtype != out.dtype
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._owner.made(leaf, is_cast=is_cast)
        return out
