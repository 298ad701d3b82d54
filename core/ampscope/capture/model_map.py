"""Names for modules and parameters: which number and path a live ``nn.Module`` has in the run.

>>> names = ModelMap(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
>>> names.index(names.model[1]), names.records()[2].path
(2, '1')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ampscope.numerics.formats import dtype_name
from ampscope.records import ModuleRecord


class Numbers(Protocol):
    """What instruments ask about modules and parameters."""

    def index(self, module: nn.Module) -> int | None: ...

    def owner(self, parameter: Tensor) -> int | None: ...


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter, its dotted name, and the number of the module that owns it."""

    owner: int
    name: str
    tensor: nn.Parameter


class ModelMap:
    """Numbers the modules of one model in the order of ``named_modules``.

    Modules and parameters are those of the moment at which the map is made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._named = list(model.named_modules())
        self._index = {id(module): i for i, (_, module) in enumerate(self._named)}
        paths = {path: i for i, (path, _) in enumerate(self._named)}
        # A parameter that several modules share belongs to the first of them, as here.
        self.parameters = tuple(
            NamedParameter(paths[name.rpartition(".")[0]], name, parameter)
            for name, parameter in model.named_parameters()
        )
        self._owners = {id(p.tensor): p.owner for p in self.parameters}

    def index(self, module: nn.Module) -> int | None:
        """The module's number, or None when it is not part of the model."""
        return self._index.get(id(module))

    def owner(self, parameter: Tensor) -> int | None:
        """The number of the module that owns ``parameter``, or None when no module does."""
        return self._owners.get(id(parameter))

    def records(self) -> list[ModuleRecord]:
        """One record a module."""
        first_owner: dict[int, str] = {}
        records = []
        for index, (path, module) in enumerate(self._named):
            own = list(module.parameters(recurse=False))
            shared = next((first_owner[id(p)] for p in own if id(p) in first_owner), "")
            for parameter in own:
                first_owner.setdefault(id(parameter), path)
            records.append(
                ModuleRecord(
                    index=index,
                    path=path,
                    type=type(module).__name__,
                    weight_dtypes="+".join(sorted({dtype_name(p.dtype) for p in own})),
                    parameter_count=sum(p.numel() for p in own),
                    is_leaf=not any(True for _ in module.children()),
                    shared_with=shared,
                )
            )
        return records
