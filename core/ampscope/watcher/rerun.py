"""Run one kept forward and backward again, without a trace in the model that runs it.

The forward runs on aliases of the parameters, so neither an optimizer nor
DistributedDataParallel's hooks notice; buffers are copies; random states and the training mode
are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.tensors import all_finite, floating_tensors, is_dtensor
from ampscope.capture.user_objects import buffers, instead, modules, parameters
from ampscope.errors import BadInput
from ampscope.watcher.flight import Forward, Randomness
from ampscope.watcher.packed_values import first_not_kept


class Rerun:
    """One forward and the model, or part of a model, that ran it.

    Raises BadInput when the model is sharded, or takes something that a capsule cannot hold.
    """

    def __init__(self, model: nn.Module, forward: Forward, scale: float) -> None:
        if any(is_dtensor(parameter) for _, parameter in parameters(model)):
            raise BadInput(
                "The model is sharded: its forward needs every rank, and one rank's capsule cannot "
                "be run again."
            )
        if missing := first_not_kept((forward.args, forward.kwargs)):
            raise BadInput(f"The model takes a {missing}, which a capsule cannot hold.")
        self.model, self.forward, self.scale = model, forward, scale
        tensors = [t for _, t in (*parameters(model), *buffers(model))]
        wanted = torch.device(forward.autocast.device)  # where it ran; a part may have no parameter
        usable = wanted.type != "cuda" or torch.cuda.is_available()
        self.device = tensors[0].device if tensors else wanted if usable else torch.device("cpu")

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Training mode and generators as they were; put back on exit."""
        modes = [(module, module.training) for _, module in modules(self.model)]
        devices = [self.device] if self.device.type == "cuda" else []
        if self.model.training != self.forward.training:
            self.model.train(self.forward.training)
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            for module, training in modes:
                module.training = training

    def reference_loss(self, shadow_model: nn.Module) -> Tensor:
        """A scalar loss over the fp32 ``shadow_model``'s outputs. Its gradients at these outputs
        are those of the real step, without the loss scale."""
        with torch.no_grad():
            for name, buffer in buffers(shadow_model):
                if name in self.forward.buffers:
                    buffer.copy_(self.forward.buffers[name])
        restore(self.forward.randomness, self.device)
        args, kwargs = self._arguments(torch.float32)
        outputs = floating_tensors(shadow_model(*args, **kwargs))
        terms = [
            (output.float() * (gradient.float() / self.scale)).sum()
            for output, gradient in self._pairs(outputs)
        ]
        if not terms:  # nothing came back: a backward of zeros
            terms = [output.sum() * 0.0 for output in outputs if output.requires_grad]
        return torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True)

    def as_it_was(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and the parameters' gradients, computed as in the real step. Without a gradient
        at an output there is no backward and the second list is empty."""
        forward, device = self.forward, self.device
        aliases = {
            id(parameter): parameter.detach().requires_grad_(parameter.requires_grad)
            for _, parameter in parameters(self.model)
        }
        copies = {
            id(buffer): forward.buffers.get(name, buffer).to(device).clone()
            for name, buffer in buffers(self.model)
        }
        args, kwargs = self._arguments()
        restore(forward.randomness, device)
        dtype = forward.autocast.dtype
        with (
            instead(self.model, aliases | copies),
            torch.enable_grad(),
            torch.autocast(device.type, dtype, enabled=dtype is not None),
        ):
            output = self.model(*args, **kwargs)
        outputs = floating_tensors(output)
        if pairs := self._pairs(outputs):
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return outputs, [a.grad for a in aliases.values() if a.grad is not None]

    def bad_sources(self, most: int = 3) -> list[str]:
        """Which inputs, parameters and buffers hold NaN or infinity, in words."""
        inputs = floating_tensors((self.forward.args, self.forward.kwargs))
        held = dict(buffers(self.model)) | self.forward.buffers
        tensors = [
            *((f"input {i}", t) for i, t in enumerate(inputs)),
            *((f"parameter {n!r}", p) for n, p in parameters(self.model)),
            *((f"buffer {n!r}", b) for n, b in held.items() if b.is_floating_point()),
        ]
        bad = [name for name, tensor in tensors if not all_finite(tensor)]
        more = [f"{len(bad) - most} more"] if len(bad) > most else []
        return [*bad[:most], *more]

    def _pairs(self, outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Outputs with the gradients that came back to them."""
        return [
            (outputs[place], gradient.to(self.device))
            for place, gradient in self.forward.gradients.items()
            if place < len(outputs) and outputs[place].requires_grad
        ]

    def _arguments(self, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        forward = self.forward
        return moved(forward.args, self.device, dtype), moved(forward.kwargs, self.device, dtype)


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Arguments on ``device``, their floating-point tensors in ``dtype``; always copies."""
    if isinstance(value, Tensor):
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(device, wanted, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: moved(part, device, dtype) for key, part in value.items()}
    if isinstance(value, list):
        return [moved(part, device, dtype) for part in value]
    if isinstance(value, tuple):
        return tuple(moved(part, device, dtype) for part in value)
    return device if isinstance(value, torch.device) else value


def restore(randomness: Randomness, device: torch.device) -> None:
    """Put torch's generators where they were before the call."""
    torch.set_rng_state(randomness.cpu)
    if device.type == "cuda" and randomness.cuda is not None:
        torch.cuda.set_rng_state(randomness.cuda, device)
