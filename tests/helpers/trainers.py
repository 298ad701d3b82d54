"""What the callbacks' tests share: a store, a finished run's records, and that nothing is left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ampscope.records import ModuleRecord, Role, RunInfo, StepRecord
from ampscope.store.reader import Reader

PLAIN_BACKWARD = torch.autograd.backward
PLAIN_SCALE = torch.amp.GradScaler.scale


def recorded(store: Path) -> tuple[RunInfo, list[StepRecord]]:
    """The one run of a store and its steps."""
    with Reader(store) as reader:
        (info,) = reader.runs()
        return info, reader.steps(info.id)


def modules(store: Path) -> list[ModuleRecord]:
    with Reader(store) as reader:
        return reader.modules(reader.runs()[0].id)


def gradient_scales(store: Path) -> list[float]:
    """The loss scale in every frame of weight gradients."""
    with Reader(store) as reader:
        (info,) = reader.runs()
        return [frame.scale for frame in reader.frames(info.id, Role.WEIGHT_GRAD)]


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_nothing_left() -> None:
    """torch's functions are its own again, and no global hook does anything."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer

    from ampscope.capture.global_hooks import Dispatcher

    assert torch.autograd.backward is PLAIN_BACKWARD
    assert torch.amp.GradScaler.scale is PLAIN_SCALE
    for module, names in (
        (optimizer, ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
        (modules, ("_global_forward_hooks", "_global_forward_pre_hooks")),
    ):
        for hook in (hook for name in names for hook in getattr(module, name).values()):
            assert isinstance(hook, Dispatcher), "ours stay in torch's tables"
            assert not hook.subscribers, "and do nothing"
