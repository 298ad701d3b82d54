"""A capsule's step as a training script: what ``ampscope diagnose --capsule`` runs under controls.

    python -m ampscope.watcher.captured_step CAPSULE --model file.py:build

The model gets the capsule's weights, and each kept forward runs with its own inputs, buffers and
random state, under the autocast region that was open. A capsule does not hold the loss function: in
its place stands a sum whose gradients at the model's outputs are the kept ones. One backward for
each forward, one optimizer step of length zero: the controls, the op watch and the rules then see
the step as that of any script.

What a training has and one step has not is told by three kinds of :class:`OpUse`:
``captured_step`` (``op``: the first sign, ``value``: the step, ``other``: the loss scale),
``captured_note`` (``op``: a sentence), and ``captured_forward`` where the gradients that came back
were not finite.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ampscope.capture.tensors import all_finite, floating_tensors
from ampscope.capture.user_objects import buffers, parameters
from ampscope.observations import CAPTURED_FORWARD, CAPTURED_NOTE, CAPTURED_STEP, OpUse
from ampscope.runner.script_recorder import STATED
from ampscope.watcher.capsule import Capsule, load
from ampscope.watcher.flight import Forward, StepSummary
from ampscope.watcher.replay_child import prepare
from ampscope.watcher.rerun import moved, restore
from ampscope.workloads.load import load_models

PROBE = 2.0**-10  # small enough that the model's backward does not overflow because of it
_FORWARD_ALONE = (
    "The gradients at the model's output were not finite, so those that a fixed step would get are "
    "not known: its forward is judged, its backward is not."
)
GREW = 10.0  # a parameter whose gradient norm rose by less is not worth naming


def main() -> None:
    """Run the step once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capsule", type=Path)
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    # A file is read as it is, whatever the run's control does to dtypes and devices.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        capsule = load(given.capsule)
    models = load_models(given.model)
    notes = [prepare(capsule, models), _history(capsule.past, capsule.parameters)]
    about = capsule.about
    _add(CAPTURED_STEP, about.where, value=float(about.step), other=about.scale)
    for note in filter(None, notes):
        _add(CAPTURED_NOTE, note)
    _train(capsule, models)


def _add(name: str, text: str, value: float | None = None, other: float | None = None) -> None:
    use = OpUse(name, text, "", "", 0, value, other)
    if use not in STATED:  # each forward may say the same
        STATED.append(use)


def _train(capsule: Capsule, models: Mapping[str, nn.Module]) -> None:
    """All kept forwards with their backwards, and one optimizer step that moves nothing."""
    trained = [p for m in models.values() for _, p in parameters(m) if p.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    optimizer = torch.optim.SGD(trained, lr=0.0)
    scale = capsule.about.scale
    # A GradScaler refuses gradients in fp16: a training with such weights scales by hand.
    by_hand = scale == 1 or any(p.dtype is torch.float16 for p in trained)
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, enabled=not by_hand)
    for forward in capsule.forwards:
        loss = _loss(capsule, models, forward, device)
        if loss.requires_grad:
            scaler.scale(loss * scale if by_hand and scale != 1 else loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    scaler.step(optimizer)
    scaler.update()


def _loss(
    capsule: Capsule, models: Mapping[str, nn.Module], forward: Forward, device: torch.device
) -> Tensor:
    """A scalar whose gradients at the forward's outputs are those that the capsule kept.

    Gradients that are not finite say nothing of the loss: outputs that have such get a small
    weight, :data:`PROBE` / sqrt(elements), so that what they descend from is seen.
    """
    model = models[forward.model] if forward.model in models else next(iter(models.values()))
    part = model.get_submodule(forward.module)
    part.train(forward.training)
    with torch.no_grad():
        for name, buffer in buffers(part):
            if name in forward.buffers:
                buffer.copy_(forward.buffers[name])
    # `moved` names each tensor's dtype: a control that trains in another one replaces it there.
    args, kwargs = moved(forward.args, device), moved(forward.kwargs, device)
    try:
        restore(forward.randomness, device)
    except RuntimeError:  # a rehearsed device has no generator of CUDA's
        _add(CAPTURED_NOTE, "Random numbers differ: this device cannot draw those of the step.")
    autocast = forward.autocast.dtype
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        output = part(*args, **kwargs)
    if not forward.gradients or not all(map(all_finite, forward.gradients.values())):
        _add(CAPTURED_FORWARD, "")
        _add(CAPTURED_NOTE, _FORWARD_ALONE)
    terms = [
        _term(tensor, forward.gradients.get(place), capsule.about.scale)
        for place, tensor in enumerate(floating_tensors(output))
        if tensor.requires_grad and _counts(forward, place)
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _counts(forward: Forward, place: int) -> bool:
    """Whether the loss took this output. Of a step without backward none is known: all count."""
    return not forward.gradients or place in forward.gradients


def _term(output: Tensor, gradient: Tensor | None, scale: float) -> Tensor:
    if gradient is None or not all_finite(gradient):
        return output.float().sum() * (PROBE / (scale * math.sqrt(max(1, output.numel()))))
    weight = gradient.to(output.device).float() / scale
    # An output may be infinite where the loss does not look, behind a mask: 0 * inf is NaN.
    return torch.where(weight != 0, output.float() * weight, 0.0).sum()


def _history(past: tuple[StepSummary, ...], parameters: tuple[str, ...]) -> str:
    """What the numbers of the steps before say; "" without any."""
    if not past:
        return ""
    losses = [p.loss for p in past if p.loss is not None]
    scales = [p.scale for p in past if p.scale is not None]
    parts = [
        f"The flight recorder holds the numbers of steps {past[0].step:,} to {past[-1].step:,}"
    ]
    if losses:
        parts.append(f"their loss went from {losses[0]:.4g} to {losses[-1]:.4g}")
    if scales:
        parts.append(f"the loss scale from {scales[0]:,.6g} to {scales[-1]:,.6g}")
    grown = max(_growth(past, parameters), default=None)
    if grown is not None and grown[0] >= GREW:
        parts.append(f"the gradient of {grown[1]} grew most, {grown[0]:,.3g} times")
    elif grown is not None:
        parts.append(f"no parameter's gradient grew {GREW:g} times")
    return "; ".join(parts) + "."


def _growth(
    past: tuple[StepSummary, ...], parameters: tuple[str, ...]
) -> Iterator[tuple[float, str]]:
    """How much each parameter's gradient norm grew, the last finite one over the first above 0."""
    norms = np.array([p.norms for p in past])
    for name, column in zip(parameters, norms.T, strict=False):
        seen = [float(n) for n in itertools.compress(column, np.isfinite(column) & (column > 0))]
        if len(seen) > 1:
            yield seen[-1] / seen[0], name


if __name__ == "__main__":
    main()
