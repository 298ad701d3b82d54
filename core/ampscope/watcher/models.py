"""Numbers and names for the modules and parameters of all models that one `watch` was given.

Wrappers are looked through: DistributedDataParallel, DataParallel and torch.compile's. The first
model's paths are plain; with several, each path begins with the model's name.

A parameter that several ranks hold is counted by one of them, so that the histograms of all ranks
add up: under DistributedDataParallel by rank 0, of a DTensor by the ranks that stand at place 0 of
every dimension along which it is replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ampscope.capture.model_map import ModuleIndex
from ampscope.capture.tensors import is_dtensor, unreadable
from ampscope.capture.user_objects import children, parameters
from ampscope.errors import BadInput


@dataclass(frozen=True, slots=True)
class Root:
    """One watched model: ``called`` is what runs, ``plain`` what holds the modules."""

    name: str
    called: nn.Module
    plain: nn.Module
    is_compiled: bool
    is_replicated: bool  # DistributedDataParallel: every rank holds the same parameters


class WatchedModels(ModuleIndex):
    """The index of several models, in a rank of many."""

    def __init__(self, models: Mapping[str, nn.Module], rank: int = 0) -> None:
        super().__init__()
        self.roots = tuple(_root(name, model) for name, model in models.items())
        self._rank = rank
        for root in self.roots:
            _check(root)
            prefix = root.name if len(self.roots) > 1 else ""
            self.add(root.plain, prefix, root.name, partial(self._counts, root))

    def _counts(self, root: Root, tensor: Tensor) -> bool:
        return self._rank == 0 if root.is_replicated else _stands_first(tensor)

    def called(self, root: Root) -> None:
        """``root`` is about to run. A model that was given without the DistributedDataParallel
        around it is found to be replicated here."""
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if not self._rank or root.is_replicated or getattr(wrapper, "module", None) is None:
            return
        if wrapper.module is root.called:  # type: ignore[union-attr]  # it has one
            self.parameters[:] = [
                dataclasses.replace(p, is_counted=False) if p.model == root.name else p
                for p in self.parameters
            ]

    def left_alone(self) -> dict[str, list[str]]:
        """Names of the parameters that cannot be read, by reason."""
        found: dict[str, list[str]] = {}
        for parameter in self.parameters:
            if reason := unreadable(parameter.tensor):
                found.setdefault(reason, []).append(parameter.name)
        return found

    @property
    def is_sharded(self) -> bool:
        """Some parameter is a DTensor, of which this rank holds a part."""
        return any(is_dtensor(parameter.tensor) for parameter in self.parameters)


def plain_module(model: object) -> object:
    """The model itself, without the wrappers that run it."""
    return _layers(model)[-1]


def _root(name: str, model: nn.Module) -> Root:
    *wrappers, plain = _layers(model)
    compiled = [w for w in wrappers if not isinstance(w, DistributedDataParallel | DataParallel)]
    compiles_itself = getattr(plain, "_compiled_call_impl", None) is not None  # Module.compile()
    called = compiled[-1] if compiled else model if compiles_itself else plain
    replicated = any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
    return Root(name, called, plain, bool(compiled) or compiles_itself, replicated)


def _layers(model: Any) -> list[Any]:
    """The wrappers of a model, outermost first, then the model."""
    if not isinstance(model, nn.Module):
        return [model]
    is_parallel = isinstance(model, DistributedDataParallel | DataParallel)
    inner = dict(children(model)).get("module" if is_parallel else "_orig_mod")  # torch.compile's
    return [model, *([] if inner is None else _layers(inner))]


def _check(root: Root) -> None:
    for name, parameter in parameters(root.plain):
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise BadInput(
                f"Parameter {name!r} has no shape yet (a lazy module). Run the model once before "
                "watch()."
            )


def _stands_first(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold this very part of the tensor."""
    if not is_dtensor(tensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]  # of a DTensor
    placements = tensor.placements  # type: ignore[attr-defined]  # as above
    return coordinate is not None and all(
        place == 0 or not placement.is_replicate()
        for place, placement in zip(coordinate, placements, strict=True)
    )
