"""Which optimizers belong to the watched models, and what they hold; whether any step is seen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import readable
from ampscope.capture.user_objects import IdMap, IdSet, groups_of, parameters, parameters_of
from ampscope.watcher.models import WatchedModels

_gradient = operator.attrgetter("grad")
SUCCESSOR = (
    "An optimizer that watch() was not given steps parameters of one that watch() was given: it is "
    "taken for the successor, and its steps are recorded."
)
UNSEEN = (
    "An optimizer steps {} parameters that the watched models did not have when watch() was "
    "called: they are not seen, and gradient norms are without them. Call watch() again where the "
    "model's parameters were made anew."
)


UNSEEN_BACKWARDS = 4  # a first step by hand, before any training, is none
UNSEEN_STEPS = (
    "The weights change and no optimizer step is seen: the step is compiled (torch.compile of "
    "optimizer.step, or of a whole training step) or done by hand. No step is recorded, and no "
    "alarm can ring. Call optimizer.step() outside of what torch.compile compiles."
)


@dataclass(frozen=True, slots=True)
class _Held:
    """What an optimizer steps, as of its last step."""

    parameters: list[Tensor]  # all of them
    positions: list[int]  # of those of watched models
    ours: list[Tensor]  # at these positions
    models: set[str]
    unknown: int  # parameters of no watched model


class WatchedOptimizers:
    """Those that were ``given``; with none given, all that hold a watched parameter.

    An optimizer that steps parameters of a given one takes its place (a training that begins a new
    phase, or that loads a checkpoint, makes a new one), and is theirs too. ``say`` gets a sentence
    for what changed, and whether steps or numbers are lost by it.
    """

    def __init__(
        self,
        models: WatchedModels,
        given: Sequence[Optimizer],
        say: Callable[[str, bool], None],
    ) -> None:
        self._models = models
        self._say = say
        self._given = {id(p) for optimizer in given for p in parameters_of(optimizer)}
        # Whether it is one, and its parameter groups when that was found out.
        self._known: IdMap[Optimizer, tuple[bool, int]] = IdMap()
        for optimizer in given:
            self._known[optimizer] = True, len(groups_of(optimizer))
        self._unseen: IdMap[Optimizer, int] = IdMap()
        self._held: IdMap[Optimizer, _Held] = IdMap()
        self._together: set[tuple[str, ...]] = set()  # models whose optimizers step in backward
        self._stepped: IdSet[Optimizer] = IdSet()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether its steps are steps of this run."""
        is_ours, groups = self._known.get(optimizer) or (False, -1)
        if is_ours or groups == (now := len(groups_of(optimizer))):
            return is_ours
        own = parameters_of(optimizer)
        if self._given:
            is_ours = any(id(p) in self._given for p in own)
        else:
            is_ours = any(self._models.position(p) is not None for p in own)
        self._known[optimizer] = is_ours, now
        if is_ours and self._given:
            self._say(SUCCESSOR, False)
        elif not is_ours and (count := self._anew(own)):
            self._known[optimizer] = True, now  # its steps are counted
            self._unseen[optimizer] = count
            self._say(UNSEEN.format(count), True)
            return True
        return is_ours

    def _anew(self, own: Sequence[Tensor]) -> int:
        """How many of these the watched models hold now, and did not when they were given."""
        roots = self._models.roots
        now = {id(p) for root in roots for _, p in parameters(root.plain)}
        return sum(id(p) in now and self._models.position(p) is None for p in own)

    def gradients(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Position of a parameter -> its gradient, where it has one."""
        own = parameters_of(optimizer)
        held = self._held.get(optimizer)
        if (
            held is None
            or len(held.parameters) != len(own)
            or not all(map(operator.is_, held.parameters, own))
        ):
            held = self._found(own)
            self._held[optimizer] = held
        unknown = held.unknown
        gradients = map(_gradient, held.ours)
        found = {i: g for i, g in zip(held.positions, gradients, strict=True) if g is not None}
        if unknown > (self._unseen.get(optimizer) or 0):  # once for each that came
            self._unseen[optimizer] = unknown
            self._say(UNSEEN.format(unknown), False)
        return found

    def with_gradients(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """The watched parameters that it steps and that have a gradient now."""
        held = self._held.get(optimizer)
        return (p for p in ([] if held is None else held.ours) if p.grad is not None)

    def models(self, optimizer: Optimizer) -> set[str]:
        """The models whose parameters it steps, as of its last :meth:`gradients`."""
        held = self._held.get(optimizer)
        return set() if held is None else held.models

    def _found(self, parameters: list[Tensor]) -> _Held:
        places = [(self._models.position(p), p) for p in parameters]
        ours = {i: p for i, p in places if i is not None}  # one that stands twice, once
        unknown = sum(i is None for i, _ in places)
        models = {self._models.parameters[i].model for i in ours}
        return _Held(parameters, list(ours), list(ours.values()), models, unknown)

    def stepped(self, optimizers: Sequence[Optimizer]) -> int:
        """Note that these ``optimizers`` have made one step together; nearly always it is one.
        Returns a number that stands for this set of optimizers."""
        if len(optimizers) == 1:
            self._stepped.add(optimizers[0])
            return id(optimizers[0])
        key = tuple(sorted(set().union(*map(self.models, optimizers))))
        self._together.add(key)
        return hash(key)

    def round_of(self, step: int) -> int:
        """A round is a step of each optimizer."""
        return step // max(1, len(self._stepped) + len(self._together))


class UnseenSteps:
    """What torch.compile traces calls no hook: weights that change while no step was ever seen are
    stepped where nothing is seen of it."""

    def __init__(self, trained: Sequence[Tensor], say: Callable[[str], None]) -> None:
        """``say`` gets a sentence, once."""
        self.is_known = False  # a step has begun, or it was said that none is seen
        self._say = say
        self._smallest = min(trained, key=Tensor.numel, default=None)
        self._first: Tensor | None = None  # a copy of it as it was at the first backward
        self._backwards = 0  # so far, without a step

    def look(self, *, last: bool = False) -> None:
        """Before a backward, in ever longer intervals; ``last``: at the end of the training."""
        count = self._backwards = self._backwards + 1
        is_due = last or not count & (count - 1)  # the first, second, fourth, eighth …
        if self._smallest is None or self.is_known or not is_due:
            return
        with torch.no_grad(), own_ops():
            now = readable(self._smallest)
            if now is None:
                return
            if self._first is None or (count == 2 and not last):  # after what was loaded meanwhile
                self._first = now.clone()
            elif (last or count >= UNSEEN_BACKWARDS) and not torch.equal(now, self._first):
                self.is_known = True
                self._say(UNSEEN_STEPS)
