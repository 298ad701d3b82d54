"""The dotted path of every layer, from the root model: the outermost layer that was called.

The first root with parameters is "" and its layers have the paths that ``named_sublayers`` gives;
other roots (a loss, a second model) begin with their class's name.
"""

from __future__ import annotations

from typing import Any

from ampscope.ext.frameworks.paddle.rounding import dtype_name
from ampscope.ext.frameworks.paddle.values import NAMES
from ampscope.records import ModuleRecord


class LayerPaths:
    """Paths by layer, and of parameters and buffers by dotted name."""

    def __init__(self) -> None:
        self.roots: list[Any] = []
        self._paths: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._has_model = False

    def of(self, layer: Any) -> str | None:
        """The path; None for a layer that no known root holds."""
        return self._paths.get(id(layer))

    def add_root(self, layer: Any) -> list[ModuleRecord]:
        """Name ``layer`` and all below it; their records."""
        self.roots.append(layer)  # keeps it alive, so that no other takes over its id
        prefix = self._prefix(layer)
        records = []
        for path, part in [("", layer), *layer.named_sublayers()]:
            whole = ".".join(filter(None, (prefix, path)))
            if id(part) not in self._paths:
                self._paths[id(part)] = whole
                records.append(_record(whole, part))
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        dotted = ".".join(filter(None, (whole, name)))
                        self._parameters.setdefault(id(parameter), dotted)
        return records

    def name_of(self, parameter: Any) -> str:
        """The dotted name, or Paddle's own ("linear_0.w_0") of a parameter outside all roots."""
        return self._parameters.get(id(parameter), str(parameter.name))

    def compiled(self) -> list[str]:
        """Paths of layers that ``paddle.jit.to_static`` has compiled."""
        parts = [part for root in self.roots for part in root.sublayers(include_self=True)]
        kinds = [(part, type(getattr(part, "forward", None)).__name__) for part in parts]
        return [self._paths.get(id(part), "") for part, kind in kinds if "StaticFunction" in kind]

    def buffers(self) -> dict[str, Any]:
        """All buffers of all roots by dotted name."""
        found = {}
        for root in self.roots:
            prefix = self._paths[id(root)]
            for name, buffer in root.named_buffers():
                found[".".join(filter(None, (prefix, name)))] = buffer
        return found

    def parameters(self) -> dict[str, Any]:
        """All parameters of all roots by dotted name."""
        found = {}
        for root in self.roots:
            for parameter in root.parameters():
                found[self.name_of(parameter)] = parameter
        return found

    def _prefix(self, layer: Any) -> str:
        if not self._has_model and layer.parameters():
            self._has_model = True
            return ""
        kind, taken = type(layer).__name__, set(self._paths.values())
        number, prefix = 1, kind
        while prefix in taken:
            number += 1
            prefix = f"{kind}{number}"
        return prefix


def _record(path: str, layer: Any) -> ModuleRecord:
    own = [p for p in layer._parameters.values() if p is not None]
    return ModuleRecord(
        0,
        path,
        type(layer).__name__,
        weight_dtypes="+".join(sorted({dtype_name(p, NAMES) for p in own} - {""})),
        parameter_count=sum(int(p.size) for p in own),
        is_leaf=not layer._sub_layers,
    )
