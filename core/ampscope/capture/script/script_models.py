"""Numbers for the modules of every model that a script runs, whenever it makes them.

A model is numbered when one of its modules first runs. The first model's paths are plain
(``encoder.0``); those of a later one begin with its class (``Discriminator.net.0``), so that two
models of a script do not share names. A model that only ever runs without gradients (a teacher, a
copy for evaluation) is left out, as is what the others do without them. Nothing here keeps a model
alive that the script drops.
"""

from __future__ import annotations

import dataclasses
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ampscope.capture.model_map import ModelMap
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.records import ModuleRecord


class ScriptModels:
    """As :class:`ModelMap`, for models that come one by one."""

    def __init__(self, paths: ModulePaths) -> None:
        self.is_training = True  # the outermost module that runs was called with gradients
        self._paths = paths
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._positions = WeakTensorKeyDictionary()  # parameter -> place in the two lists below
        self._owners: list[int] = []
        self._names: list[str] = []
        self._arrivals: list[int] = []  # positions, as backward reached them
        self._handles: list[RemovableHandle] = []
        self._records: list[ModuleRecord] = []
        self._taken = 0

    def index(self, module: nn.Module) -> int | None:
        """The module's number. A model that is new is numbered first. None outside training, and
        inside jit.trace, where even a size is a tensor."""
        if not self.is_training or torch._C._get_tracing_state() is not None:
            return None
        number = self._numbers.get(module)
        if number is None:
            self._add(self._paths.root_of(module))
            number = self._numbers.get(module)
        return number

    def owner(self, parameter: Tensor) -> int | None:
        """The number of the module that owns ``parameter``; None when no module that ran does."""
        position = self.position(parameter)
        return None if position is None else self._owners[position]

    def position(self, parameter: Tensor) -> int | None:
        """The parameter's place among all; None when no module that ran owns it."""
        position: int | None = self._positions.get(parameter)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return position

    def owner_at(self, position: int) -> int:
        """The module's number of the parameter at ``position``."""
        return self._owners[position]

    def name_at(self, position: int) -> str:
        """Dotted name of the parameter at ``position``."""
        return self._names[position]

    def take_arrivals(self) -> list[int]:
        """Positions in the order in which backward reached them since the last call."""
        reached = list(dict.fromkeys(self._arrivals))
        self._arrivals.clear()
        return reached

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def take_records(self) -> list[ModuleRecord]:
        """The modules that were numbered since the last call."""
        new = self._records[self._taken :]
        self._taken = len(self._records)
        return new

    def _add(self, root: nn.Module) -> None:
        """Number what is new below ``root``: a model may get further modules later on."""
        names = ModelMap(root)
        known = {record.path for record in self._records}
        prefix = "" if "" not in known else type(root).__name__
        for module, record in zip(root.modules(), names.records(), strict=True):
            if module in self._numbers:
                continue
            number = self._numbers[module] = len(self._records)
            path = _unused(".".join(filter(None, (prefix, record.path))), known)
            known.add(path)
            self._records.append(dataclasses.replace(record, index=number, path=path))
            for name, parameter in module.named_parameters(recurse=False):
                self._add_parameter(parameter, number, f"{path}.{name}" if path else name)

    def _add_parameter(self, parameter: nn.Parameter, owner: int, name: str) -> None:
        if parameter in self._positions:
            return  # shared with a module that came before
        position = self._positions[parameter] = len(self._owners)
        self._owners.append(owner)
        self._names.append(name)
        if parameter.requires_grad:
            arrived = partial(_note, self._arrivals, position)
            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]  # as above


def _note(arrivals: list[int], position: int, parameter: Tensor) -> None:
    arrivals.append(position)


def _unused(path: str, known: set[str]) -> str:
    """``path``, with a number behind it where another model's module has it."""
    if path not in known:
        return path
    return next(p for n in range(2, len(known) + 3) if (p := f"{path} ({n})") not in known)
