"""What training loops do to their gradients between backward and step: clips, and all else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Change = Callable[[list[Tensor], float], None]  # gradients of the parameters, the scale


def norm_of(gradients: list[Tensor]) -> Tensor:
    return torch.sqrt(sum((g.pow(2).sum() for g in gradients), torch.zeros(())))


def clip_in_place(gradients: list[Tensor], scale: float) -> None:
    factor = 1.0 / float(norm_of(gradients))
    for g in gradients:
        g.mul_(min(1.0, factor))  # the clip


def clip_data(gradients: list[Tensor], scale: float) -> None:
    factor = (0.5 / (norm_of(gradients) + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.data.mul_(factor)


def clip_foreach(gradients: list[Tensor], scale: float) -> None:
    torch._foreach_mul_(gradients, 5.0 / float(norm_of(gradients)))


def clip_each(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        if float(g.norm()) > 2.0:
            g.div_(g.norm() / 2.0)


def clamp(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        g.clamp_(-0.1, 0.1)


def clip_by_largest(gradients: list[Tensor], scale: float) -> None:
    largest = max(float(g.abs().max()) for g in gradients)
    for g in gradients:
        g.mul_(3.0 / largest)


CLIPS = (clip_in_place, clip_data, clip_foreach, clip_each, clamp, clip_by_largest)


def nothing(gradients: list[Tensor], scale: float) -> None:
    pass


def average_over_workers(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        g.div_(4)


def unscale_by_hand(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        g.div_(scale)


def mask(gradients: list[Tensor], scale: float) -> None:
    gradients[0][:2].zero_()


def freeze(gradients: list[Tensor], scale: float) -> None:
    gradients[0].zero_()
    gradients[1].zero_()


def decay(gradients: list[Tensor], scale: float) -> None:
    for n, g in enumerate(gradients):
        g.add_(torch.full_like(g, 0.01 * scale * (1 + n)))


def noise(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        g.add_(torch.randn_like(g) * 0.01 * scale)


def centre(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        if g.dim() > 1:
            g.sub_(g.mean(dim=1, keepdim=True))


def slower_head(gradients: list[Tensor], scale: float) -> None:
    gradients[-1].mul_(0.1)
    gradients[-2].mul_(0.1)


def clip_at_the_scaled_limit(gradients: list[Tensor], scale: float) -> None:
    norm = float(norm_of(gradients))
    for g in gradients:
        g.mul_(min(1.0, 0.1 * scale / norm))


def clamp_at_the_scaled_limit(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        g.clamp_(-0.05 * scale, 0.05 * scale)


def repair(gradients: list[Tensor], scale: float) -> None:
    for g in gradients:
        torch.nan_to_num_(g)


INNOCENT = (nothing, average_over_workers, unscale_by_hand, mask, freeze, decay, noise, centre,
            slower_head, clip_at_the_scaled_limit, clamp_at_the_scaled_limit, repair)  # fmt: skip
