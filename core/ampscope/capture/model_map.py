"""Names for modules and parameters: which number and path a live ``nn.Module`` has in the run.

>>> names = ModelMap(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
>>> names.index(names.model[1]), names.records()[2].path
(2, '1')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampscope.capture.user_objects import children, modules, own_parameters, parameters
from ampscope.numerics.formats import dtype_name
from ampscope.records import ModuleRecord


class ModuleNumbers(Protocol):
    """What instruments ask about modules and parameters."""

    def index(self, module: nn.Module) -> int | None: ...

    def owner(self, parameter: Tensor) -> int | None: ...


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter, its dotted name, and the number of the module that owns it."""

    owner: int
    name: str
    tensor: nn.Parameter
    model: str = ""  # of several, the name of the one that holds it
    is_counted: bool = True  # by this process, of those that hold it


class ModuleIndex:
    """Numbers the modules and the parameters of models, in the order in which they are added.

    Modules and parameters are those of the moment at which their model is added. What several
    models hold belongs to the first of them.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.parameters: list[NamedParameter] = []
        self._records: list[ModuleRecord] = []
        self._index: dict[int, int] = {}  # id of a module -> its number
        self._positions: dict[int, int] = {}  # id of a parameter -> its place in the list

    def add(
        self,
        model: nn.Module,
        prefix: str = "",
        name: str = "",
        is_counted: Callable[[Tensor], bool] | None = None,
    ) -> None:
        """Number what ``model`` holds; ``prefix`` stands before its paths, ``name`` is its own."""
        numbers: dict[str, int] = {}  # by path
        first_owner: dict[int, str] = {}
        for path, module in modules(model):
            number = numbers[path] = len(self.modules)
            self._index.setdefault(id(module), number)
            self.modules.append(module)
            own = [parameter for _, parameter in own_parameters(module)]
            shared = next((first_owner[id(p)] for p in own if id(p) in first_owner), "")
            for parameter in own:
                first_owner.setdefault(id(parameter), path)
            self._records.append(
                ModuleRecord(
                    index=number,
                    path=_joined(prefix, path),
                    type=type(module).__name__,
                    weight_dtypes="+".join(sorted({dtype_name(p.dtype) for p in own})),
                    parameter_count=sum(p.numel() for p in own if not is_lazy(p)),
                    is_leaf=not children(module),
                    shared_with=shared,
                )
            )
        # A parameter that several modules share belongs to the first of them, as above.
        for path, tensor in parameters(model):
            if id(tensor) not in self._positions:
                self._positions[id(tensor)] = len(self.parameters)
                owner = numbers[path.rpartition(".")[0]]
                counted = is_counted is None or is_counted(tensor)
                named = NamedParameter(owner, _joined(prefix, path), tensor, name, counted)
                self.parameters.append(named)

    def index(self, module: nn.Module) -> int | None:
        """The module's number, or None when no model holds it."""
        return self._index.get(id(module))

    def position(self, parameter: Tensor) -> int | None:
        """The parameter's place in :attr:`parameters`, or None when no model holds it."""
        return self._positions.get(id(parameter))

    def owner(self, parameter: Tensor) -> int | None:
        """The number of the module that owns ``parameter``, or None when no module does."""
        position = self.position(parameter)
        return None if position is None else self.parameters[position].owner

    def records(self) -> list[ModuleRecord]:
        """One record per module."""
        return self._records


class ModelMap(ModuleIndex):
    """The index of one model, its modules in the order of ``named_modules``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add(model)


def _joined(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))
