"""What is looked at around one optimizer step: gradients before it, weights before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.optimizer_state import parameters_of
from ampscope.frameworks.paddle.rounding import MARK
from ampscope.frameworks.paddle.values import copy, is_floating, view
from ampscope.frameworks.tensors import Values


@dataclass(frozen=True, slots=True)
class Look:
    """Of one attempt, by dotted name."""

    parameters: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    gradients: dict[str, Values] = field(default_factory=dict)
    before: dict[str, Values] = field(default_factory=dict)

    def after(self) -> dict[str, Values]:
        """The weights now, in place."""
        return {self.names[id(p)]: view(p, getattr(p, MARK, "")) for p in self.parameters}


def look(optimizer: Any, paths: LayerPaths, *, master_grad: bool) -> Look:
    """Before the step. Gradients and weights are copied: the step overwrites both."""
    parameters = parameters_of(optimizer)
    names = {id(p): paths.name_of(p) for p in parameters}
    gradients = {}
    for parameter in parameters:
        gradient = parameter._grad_ivar()
        if gradient is not None and is_floating(gradient) and gradient.is_dense():
            label = "" if master_grad else getattr(parameter, MARK, "")
            gradients[names[id(parameter)]] = copy(gradient, label)
    before = {names[id(p)]: copy(p, getattr(p, MARK, "")) for p in parameters}
    return Look(parameters, names, gradients, before)
