"""A capsule: what one failing step needs to be run again, elsewhere and later.

It holds, for each forward of the step, the inputs, the gradients at the model's
output, random states and the buffers as they were; the norms of the last steps' gradients; and the
weights, where they fit. `contents` says it in words.

    capsule = collected(about, forwards, parameters, past, limits)   # copies, made at once
    capsule_file.save(capsule, path)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.tensors import opened, plain
from ampscope.watcher.forwards import Forward, Past
from ampscope.watcher.trees import Tensors, packed, unpacked

SHARDED = "sharded"  # why a capsule has no weights


@dataclass(frozen=True, slots=True)
class CapsuleLimits:
    """How much a run may keep: the first capsules and the newest one."""

    count: int = 3  # of one run and rank; 0 keeps none
    mib: float = 256.0  # of one capsule
    weights: bool = True  # keep the weights too, where they fit


@dataclass(frozen=True, slots=True)
class About:
    """What a capsule is of."""

    run: str
    step: int
    rank: int
    where: str  # the first sign: loss, output gradient, backward
    reason: str  # the same as a sentence
    scale: float
    policy: str  # whose autocast rules: cuda, native
    torch: str
    has_weights: bool = False
    left_out: tuple[str, ...] = ()  # what did not fit or cannot be kept


@dataclass(frozen=True, slots=True)
class Capsule:
    """A step that can be run again."""

    about: About
    forwards: tuple[Forward, ...]
    weights: Mapping[str, Tensor]  # by dotted name, the model's in front with several
    checks: Mapping[str, float]  # a sum over each parameter: tells other weights apart
    past: tuple[Past, ...]
    parameters: tuple[str, ...]  # the names of the norms in `past`

    @property
    def is_of_a_part(self) -> bool:
        """Each rank held a part of the weights: nothing in it tells them from others."""
        return f"the weights ({SHARDED})" in self.about.left_out

    @property
    def contents(self) -> str:
        """One line on what is in it."""
        gradients = sum(len(f.gradients) for f in self.forwards)
        parts = [
            f"{len(self.forwards)} forward call(s) with inputs, random state and buffers",
            f"{gradients} gradient(s) at outputs",
            *([f"norms of the last {len(self.past)} steps"] if self.past else []),
            f"{len(self.weights)} weights" if self.weights else "no weights",
        ]
        left = f"; left out: {', '.join(self.about.left_out)}" if self.about.left_out else ""
        return ", ".join(parts) + left


def collected(
    about: About,
    forwards: Sequence[Forward],
    parameters: Mapping[str, Tensor],
    past: Sequence[Past],
    limits: CapsuleLimits,
    *,
    without_weights: str = "",
) -> Capsule:
    """A capsule of copies in the host's memory, made at once: the training goes on afterwards.

    What does not fit is left out in this order: the weights, then the earlier forwards.
    ``without_weights`` is a reason why ``parameters`` are not what the step ran with.
    """
    left_out = list(about.left_out)
    kept, room = [], limits.mib * 2**20
    for forward in reversed(forwards):
        if not forward.is_intact:
            left_out.append(f"a call of {forward.model} whose inputs were overwritten")
            continue
        size = _bytes((forward.args, forward.kwargs, forward.gradients, forward.buffers))
        if size > room:
            left_out.append(f"a call of {forward.model} ({size / 2**20:.0f} MiB)")
            continue
        room -= size
        left_out += [f"{what} of {forward.model}" for what in forward.missing]
        kept.append(_copy(forward))
    weights: Tensors = {}
    if not without_weights:
        weights = {n: v for n, t in parameters.items() if (v := opened(t)) is not None}
        if len(weights) < len(parameters):
            weights, without_weights = {}, "some parameters cannot be read"
    has_weights = limits.weights and 0 < sum(map(_bytes, weights.values())) <= room
    if not has_weights:
        left_out.append(f"the weights ({without_weights or 'too large, or not wanted'})")
    return Capsule(
        dataclasses.replace(about, has_weights=has_weights, left_out=tuple(left_out)),
        tuple(reversed(kept)),
        {n: t.detach().cpu().clone() for n, t in weights.items()} if has_weights else {},
        {name: check(tensor) for name, tensor in weights.items()},
        tuple(past),
        tuple(parameters),
    )


def check(tensor: Tensor) -> float:
    """A sum that tells one set of weights from another."""
    return float(plain(tensor).detach().sum(dtype=torch.float64))


def _copy(forward: Forward) -> Forward:
    """In the host's memory, on its own."""
    return dataclasses.replace(
        forward,
        args=_copied(forward.args),
        kwargs=_copied(forward.kwargs),
        buffers=_copied(forward.buffers),
        gradients=_copied(forward.gradients),
        versions=[],
    )


def _copied(value: Any) -> Any:
    tensors: Tensors = {}
    tree = packed(value, "", tensors)
    return unpacked(tree, {name: t.detach().cpu().clone() for name, t in tensors.items()})


def _bytes(value: object) -> int:
    tensors: Tensors = {}
    packed(value, "", tensors)
    return sum(t.numel() * t.element_size() for t in tensors.values())
