"""Instrument: the fp32 shadow, the only way to distinguish a lost gradient from one that was zero.

At a sampled step a copy of the model in fp32 runs the same weights, batch and random state first.
Then the real step runs, and each activation, grad_output and weight gradient is compared with the
shadow's. The copy has its own buffers, its gradients never touch a ``.grad``, and the random states
are put back: the real step is bit-identical with the shadow on or off. That holds for state
inside the module and for torch's, NumPy's and Python's global generators. State elsewhere (a
counter or a generator of the loss function's own, a cache, a file) is changed once more by the
shadow's run.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ampscope.capture.comparisons import Comparisons
from ampscope.capture.failures import Failures, OwnTime
from ampscope.capture.global_hooks import FORWARD, Subscription
from ampscope.capture.model_map import ModelMap
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import floating_tensors, in_backward, unreadable, version
from ampscope.capture.user_objects import modules, parameters
from ampscope.policy.precision import tf32_switches
from ampscope.records import Role, ShadowRecord

# Module, whether checkpointing repeats its forward, and how many outputs it had before.
_Key = tuple[int, bool, int]
_SEEN = "_ampscope_shadow"  # attribute on an output tensor: the step and version that were seen


class Shadow:
    """One sampled step: :meth:`run_shadow`, then the real step inside the context."""

    def __init__(
        self,
        names: ModelMap,
        step: int,
        scale: float,
        computes_in: torch.dtype | None = None,
        time: OwnTime | None = None,
    ) -> None:
        self._time = time or OwnTime(Failures())
        self.failures = self._time.failures or Failures()
        self._names = names
        self._step = step
        self._scale = scale  # the loss scale of the real step
        self._comparisons = Comparisons(step, computes_in)
        self._outputs: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._calls: dict[tuple[int, bool], int] = {}
        self._handle: Subscription | None = None

    def run_shadow(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Forward and backward of an fp32 copy; ``loss`` maps a model to a scalar tensor.

        TF32 is off: a reference with 10 bits of mantissa is no better than fp16.
        """
        with (
            random_state_kept(self._names.model),
            _gradients_kept(self._names),
            tf32_switches(False),
        ):
            shadow_model = copy.deepcopy(self._names.model).float()
            hooks = [
                module.register_forward_hook(partial(self._keep, index))
                for index, (_, module) in enumerate(modules(shadow_model))
            ]
            loss(shadow_model).float().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for hook in hooks:
                hook.remove()
        self._weights = {n: p.grad for n, p in parameters(shadow_model) if p.grad is not None}
        self._calls.clear()

    def __enter__(self) -> Shadow:
        self._handle = FORWARD.subscribe(self._compare_output)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def compare_weights(self) -> None:
        """Compare the weight gradients; call after backward and before ``unscale_``."""
        for parameter in self._names.parameters:
            gradient = parameter.tensor.grad
            reference = self._weights.pop(parameter.name, None)
            if gradient is not None and reference is not None:
                self._compare(parameter.owner, Role.WEIGHT_GRAD, gradient, reference, self._scale)

    def take(self) -> list[ShadowRecord]:
        """One record per module and role; frees what was kept."""
        self._outputs.clear()
        self._gradients.clear()
        self._weights.clear()
        return self._comparisons.records()

    def _unseen(self, output: object) -> list[Tensor]:
        """The tensors of a module's output that no inner module put out before."""
        found = []
        for tensor in floating_tensors(output):
            mark = (self._step, version(tensor))
            if tensor.__dict__.get(_SEEN) != mark:
                found.append(tensor)
                if not tensor.is_leaf:  # a parameter would keep the mark for good
                    tensor.__dict__[_SEEN] = mark
        return found

    def _next_key(self, index: int) -> _Key:
        is_repeated = in_backward()
        nth = self._calls.get((index, is_repeated), 0)
        self._calls[index, is_repeated] = nth + 1
        return index, is_repeated, nth

    def _keep(self, index: int, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in self._unseen(output):
            key = self._next_key(index)
            self._outputs[key] = tensor.detach().clone()  # a later in-place op would change it
            if tensor.requires_grad:
                tensor.register_hook(partial(self._keep_gradient, key))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _keep_gradient(self, key: _Key, gradient: Tensor | None) -> None:
        if gradient is not None and not unreadable(gradient):
            self._gradients[key] = gradient.detach().clone()

    def _compare_output(self, module: nn.Module, inputs: object, output: object) -> None:
        index = self._names.index(module)
        if index is not None:
            with self.failures.contained("the comparison of some outputs with fp32"):
                self._compare_outputs(index, output)

    def _compare_outputs(self, index: int, output: object) -> None:
        for tensor in self._unseen(output):
            key = self._next_key(index)
            reference = self._outputs.pop(key, None)
            if reference is not None and not key[1]:  # a repeated forward was compared before
                self._compare(index, Role.ACTIVATION, tensor, reference, 1.0)
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._compare_gradient, key))  # type: ignore[no-untyped-call]  # as above

    def _compare_gradient(self, key: _Key, gradient: Tensor | None) -> None:
        reference = self._gradients.pop(key, None)
        if reference is not None and gradient is not None:
            self._compare(key[0], Role.GRAD_OUTPUT, gradient, reference, self._scale)

    def _compare(
        self, module: int, role: Role, half: Tensor, reference: Tensor, scale: float
    ) -> None:
        # Autocast may be on: this is called in the middle of a forward pass.
        autocast_off = torch.autocast(half.device.type, enabled=False)
        with (
            self._time.spent(f"the comparison of some tensors with fp32 ({role.value})"),
            torch.no_grad(),
            autocast_off,
            own_ops(),
        ):
            if not unreadable(half) and not unreadable(reference):
                self._comparisons.add(module, role, half.detach(), reference, scale)


@contextlib.contextmanager
def _gradients_kept(names: ModelMap) -> Iterator[None]:
    """The model has no gradients inside, so that the shadow model is copied without them; on exit
    they are restored. A loss may use the model itself besides the one that it is given."""
    kept = [(parameter.tensor, parameter.tensor.grad) for parameter in names.parameters]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient


def remembered(model: nn.Module) -> Callable[[], None]:
    """The generators' states of this moment: what is returned puts them back, once or again."""
    devices = sorted({p.device.index for _, p in parameters(model) if p.is_cuda})
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in cuda:
            torch.cuda.set_rng_state(state, device)

    return put_back


@contextlib.contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """What is drawn inside is drawn again outside."""
    put_back = remembered(model)
    try:
        yield
    finally:
        put_back()
