"""Names for modules and parameters: which number and path a live ``nn.Module`` has in the run.

    names = ModelMap(model)
    names.index(model.blocks[0])      # 2
    names.records()[2].path           # "blocks.0"
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ampscope.formats import dtype_name
from ampscope.records import ModuleRecord


class ModelMap:
    """Numbers the modules of one model in the order of ``named_modules``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = list(model.named_modules())
        self._index = {id(module): i for i, (_, module) in enumerate(named)}
        self._named = named
        self._parameters = list(model.named_parameters())

    def index(self, module: nn.Module) -> int | None:
        """The module's number, or None when it is not part of the model."""
        return self._index.get(id(module))

    def modules(self) -> Iterator[tuple[int, nn.Module]]:
        yield from enumerate(module for _, module in self._named)

    def parameters(self) -> list[tuple[int, str, Tensor]]:
        """(owning module's number, dotted name, parameter); a shared one belongs to its first."""
        owners: list[tuple[int, str, Tensor]] = []
        for name, parameter in self._parameters:
            path = name.rpartition(".")[0]
            owner = self._index[id(self.model.get_submodule(path))]
            owners.append((owner, name, parameter))
        return owners

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
