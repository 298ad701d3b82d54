"""What is known at one point of one path through a function: abstract values and the state of each
scaler."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Scaler:
    name: str  # identity: the place that made it, or the name it came in by
    enabled: bool = True
    test: str = ""  # key of the condition under which it is enabled


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: str


@dataclass(frozen=True, slots=True)
class Scaled:
    """A loss times the scale of a scaler."""

    scaler: Scaler


@dataclass(frozen=True, slots=True)
class Constant:
    value: bool | None


@dataclass(frozen=True, slots=True)
class Plain:
    """Computed here, from nothing that was scaled."""


@dataclass(frozen=True, slots=True)
class Same:
    """Another name of what ``key`` names."""

    key: str


class Test(NamedTuple):
    """The result of a condition, to be looked into where it is tested."""

    node: ast.expr
    frame: str


Value: TypeAlias = Scaler | Optimizer | Scaled | Constant | Plain | Same | Test | None
Pending: TypeAlias = Literal["none", "scaled", "unscaled", "unknown"]


@dataclass(slots=True)
class PathState:
    """What is known at one point of one path."""

    names: dict[str, Value] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)
    stage: dict[tuple[str, str], str] = field(default_factory=dict)  # ready, unscaled, stepped
    base: dict[str, str] = field(default_factory=dict)  # of optimizers that stage does not name
    unscaled: dict[tuple[str, str], int] = field(default_factory=dict)  # the last call
    recorded: dict[str, bool | None] = field(default_factory=dict)  # an inf check since update
    pending: dict[str, Pending] = field(default_factory=dict)
    plain: tuple[int, ...] = ()  # backward calls without a scale since the last step
    unknown_backward: bool = False
    history: tuple[tuple[str, str, int], ...] = ()  # scaler, optimizer or "update", node
    remainders: tuple[tuple[str, bool], ...] = ()  # how tests with a remainder went

    def copy(self) -> PathState:
        return PathState(
            dict(self.names), dict(self.facts), dict(self.stage), dict(self.base),
            dict(self.unscaled), dict(self.recorded), dict(self.pending), self.plain,
            self.unknown_backward, self.history, self.remainders,
        )  # fmt: skip

    def key(self) -> object:
        return (
            frozenset(self.names.items()), frozenset(self.facts.items()),
            frozenset(self.stage.items()), frozenset(self.base.items()),
            frozenset(self.recorded.items()), frozenset(self.pending.items()),
            self.plain, self.unknown_backward, self.history, self.remainders,
        )  # fmt: skip


class Flow(NamedTuple):
    """States by how they leave a block."""

    next: list[PathState]
    breaks: list[PathState]
    continues: list[PathState]
    returns: list[PathState]
