"""Instrument: the fp32 shadow, the only way to tell a lost gradient from one that was zero.

At a sampled step a copy of the model in fp32 runs the same weights, batch and random state first.
Then the real step runs, and each activation, grad_output and weight gradient is compared with the
shadow's. The copy has its own buffers, and the random state is put back: the real step is
bit-identical with the shadow on or off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from ampscope.capture.model_map import ModelMap
from ampscope.capture.tensors import floating_tensors
from ampscope.formats import FORMATS
from ampscope.records import Role, ShadowRecord

_Key = tuple[int, int]  # module, how many outputs it had put out before
_SEEN = "_ampscope_shadow"


class Shadow:
    """One sampled step: :meth:`run_twin`, then the real step inside the context."""

    def __init__(self, names: ModelMap, step: int, half: str) -> None:
        self.names = names
        self.step = step
        self.scale = 1.0  # the loss scale of the real step; set before its backward
        self.records: list[ShadowRecord] = []
        self._min_normal = FORMATS[half].min_normal
        self._outputs: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        self._weights: list[Tensor | None] = []
        self._calls: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []

    def run_twin(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Forward and backward of an fp32 copy; ``loss`` maps a model to a scalar tensor."""
        devices = [p.device for p in self.names.model.parameters() if p.is_cuda]
        with torch.random.fork_rng(devices={d.index for d in devices}):
            twin = copy.deepcopy(self.names.model).float()
            twin.zero_grad(set_to_none=True)
            hooks = [
                module.register_forward_hook(partial(self._keep, index))
                for index, module in enumerate(twin.modules())
            ]
            value = loss(twin)
            value.float().backward()
            for hook in hooks:
                hook.remove()
        by_name = dict(twin.named_parameters())
        self._weights = [by_name[name].grad for _, name, _ in self.names.parameters()]
        self._calls.clear()

    def __enter__(self) -> Shadow:
        self._handles = [register_module_forward_hook(self._compare_output)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def compare_weights(self) -> None:
        """Compare the weight gradients; call after backward and before ``unscale_``."""
        for (module, _, parameter), reference in zip(
            self.names.parameters(), self._weights, strict=True
        ):
            if parameter.grad is not None and reference is not None:
                self._record(module, Role.WEIGHT_GRAD, parameter.grad, reference, self.scale)

    def merged(self) -> list[ShadowRecord]:
        """One record a module and role: counts add, the error is the largest part's."""
        merged: dict[tuple[int, Role], ShadowRecord] = {}
        for record in self.records:
            key = (record.module, record.role)
            merged[key] = _add(merged[key], record) if key in merged else record
        return list(merged.values())

    def _next_key(self, index: int) -> _Key:
        nth = self._calls.get(index, 0)
        self._calls[index] = nth + 1
        return index, nth

    def _keep(self, index: int, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in floating_tensors(output):
            if hasattr(tensor, _SEEN):
                continue
            setattr(tensor, _SEEN, True)
            key = self._next_key(index)
            self._outputs[key] = tensor.detach().clone()  # a later in-place op would change it
            if tensor.requires_grad:
                tensor.register_hook(partial(self._keep_gradient, key))

    def _keep_gradient(self, key: _Key, gradient: Tensor) -> None:
        self._gradients[key] = gradient.detach()

    def _compare_output(self, module: nn.Module, inputs: object, output: object) -> None:
        index = self.names.index(module)
        if index is None:
            return
        for tensor in floating_tensors(output):
            if hasattr(tensor, _SEEN):
                continue
            setattr(tensor, _SEEN, True)
            key = self._next_key(index)
            reference = self._outputs.pop(key, None)
            if reference is not None and reference.shape == tensor.shape:
                self._record(index, Role.ACTIVATION, tensor.detach(), reference, 1.0)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._compare_gradient, key))

    def _compare_gradient(self, key: _Key, gradient: Tensor) -> None:
        reference = self._gradients.pop(key, None)
        if reference is not None and reference.shape == gradient.shape:
            self._record(key[0], Role.GRAD_OUTPUT, gradient, reference, self.scale)

    def _record(
        self, module: int, role: Role, half: Tensor, reference: Tensor, scale: float
    ) -> None:
        with torch.no_grad():
            zero, reference_zero = half == 0, reference == 0  # -0 equals 0
            subnormal = (half.abs() < self._min_normal) & ~zero
            value = half.float() / scale
            norm = torch.linalg.vector_norm(reference)
            error = torch.linalg.vector_norm(value - reference)
            dot = torch.linalg.vecdot(value.flatten(), reference.flatten())
            length = torch.linalg.vector_norm(value) * norm
            numbers = torch.stack((norm, error, dot, length, reference.abs().max())).tolist()
            counts = torch.stack(
                ((zero & ~reference_zero).sum(), subnormal.sum(), (zero & reference_zero).sum())
            ).tolist()
        norm_f, error_f, dot_f, length_f, largest = numbers
        self.records.append(
            ShadowRecord(
                step=self.step,
                module=module,
                role=role,
                total=half.numel(),
                lost=int(counts[0]),
                subnormal=int(counts[1]),
                zero_before=int(counts[2]),
                relative_error=error_f / norm_f if norm_f else None,
                cosine=dot_f / length_f if length_f else None,
                max_abs_fp32=largest,
            )
        )


def _add(first: ShadowRecord, second: ShadowRecord) -> ShadowRecord:
    worse = max(first, second, key=lambda r: _badness(r.relative_error))
    return ShadowRecord(
        step=first.step,
        module=first.module,
        role=first.role,
        total=first.total + second.total,
        lost=first.lost + second.lost,
        subnormal=first.subnormal + second.subnormal,
        zero_before=first.zero_before + second.zero_before,
        relative_error=worse.relative_error,
        cosine=worse.cosine,
        max_abs_fp32=max(first.max_abs_fp32 or 0.0, second.max_abs_fp32 or 0.0),
    )


def _badness(error: float | None) -> float:
    if error is None:
        return -1.0
    return float("inf") if error != error else error
