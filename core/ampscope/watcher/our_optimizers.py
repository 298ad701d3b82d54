"""Which optimizers belong to the watched models, and what they hold."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.watcher.models import WatchedModels


class OurOptimizers:
    """Those that were ``given``; with none given, all that hold a watched parameter."""

    def __init__(self, models: WatchedModels, given: list[Optimizer]) -> None:
        self._models = models
        self._only_given = bool(given)
        self._known = weakref.WeakKeyDictionary(dict.fromkeys(given, True))
        self._noted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether its steps are steps of this run."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = not self._only_given and bool(self.models(optimizer))
        return known

    def gradients(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Position of a parameter -> its gradient, where it has one."""
        found = ((self._models.position(p), p.grad) for p in parameters_of(optimizer))
        return {position: g for position, g in found if position is not None and g is not None}

    def note(self, optimizer: Optimizer) -> str:
        """One sentence, once, when it steps parameters that no watched model had."""
        if optimizer in self._noted:
            return ""
        self._noted.add(optimizer)
        unknown = sum(self._models.position(p) is None for p in parameters_of(optimizer))
        if not unknown:
            return ""
        return (
            f"An optimizer steps {unknown} parameters that the watched models did not have when "
            "watch() was called: they are not seen, and gradient norms are without them."
        )

    def models(self, optimizer: Optimizer) -> set[str]:
        """The models whose parameters it steps."""
        places = (self._models.position(p) for p in parameters_of(optimizer))
        return {self._models.parameters[i].root for i in places if i is not None}

    def stepped(self, optimizer: Optimizer) -> None:
        """It has made an attempt."""
        self._stepped.add(optimizer)

    def round_of(self, step: int) -> int:
        """A round is a step of each optimizer."""
        return step // max(1, len(self._stepped))
