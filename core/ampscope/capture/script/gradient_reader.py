"""Reads an optimizer's gradients at an attempt: sums of all, details of some, taints of the bad."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.script.gradient_facts import GradientFacts, gradient_facts
from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.observations import ParameterGradient

DETAILED_ATTEMPTS = 4  # first attempts of which every parameter's gradient is kept
FINITE_DETAILED = 2  # first attempts with finite gradients, wherever a search for a scale ends
MAX_BAD_DETAILED = 12  # and attempts with non-finite gradients


class GradientReader:
    """Results: :attr:`records`, one a parameter; :attr:`taints`, bad op -> gradients."""

    def __init__(self, taint_of: Callable[[Tensor | None], int | None]) -> None:
        self.records: list[ParameterGradient] = []
        self.taints: dict[int, int] = {}
        self.names: dict[int, str] = {}  # id of a parameter -> dotted name
        self._taint_of = taint_of
        self._bad_detailed = self._finite_detailed = 0

    def read(
        self, optimizer: Optimizer, optimizer_name: str, factor: float, attempt: int
    ) -> GradientFacts:
        """Facts about all gradients, divided by ``factor``, the scale that they still carry."""
        facts = gradient_facts(parameters_of(optimizer), factor)
        detailed = attempt < DETAILED_ATTEMPTS
        if facts.nonfinite and self._bad_detailed < MAX_BAD_DETAILED:
            detailed, self._bad_detailed = True, self._bad_detailed + 1
        if not facts.nonfinite and self._finite_detailed < FINITE_DETAILED:
            detailed, self._finite_detailed = True, self._finite_detailed + 1
        for order, (parameter, part) in enumerate(facts.parts):
            taint = self._taint_of(parameter.grad)
            if part.nonfinite and taint is not None and taint >= 0:
                self.taints[taint] = self.taints.get(taint, 0) + 1
            if detailed:
                self.records.append(
                    ParameterGradient(
                        attempt=attempt,
                        optimizer=optimizer_name,
                        name=self.names.get(id(parameter), f"parameter{order}"),
                        order=order,
                        total=part.total,
                        zero=part.zero,
                        nonfinite=part.nonfinite,
                        norm=part.norm,
                    )
                )
        return facts
