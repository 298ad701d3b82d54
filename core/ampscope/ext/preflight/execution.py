"""Abstract execution of one function of a script: every branch both ways, loops twice, functions
and methods of the same file where they are called.

Which name holds what, which test went how, and which paths have become alike is decided here; what
a scaler's or an optimizer's call means is said by a subclass (:mod:`.protocol`). What is unknown
stays unknown: a parameter, a scaler handed to code that is not here.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from ampscope.ext.preflight.path_state import (
    Constant,
    Flow,
    Optimizer,
    PathState,
    Plain,
    Same,
    Scaled,
    Scaler,
    Test,
    Value,
)
from ampscope.ext.preflight.roles import Function, Roles, is_off
from ampscope.ext.preflight.source import SourceFile, children, dotted, keyword, look

MOST_STATES = 400  # of a function; one with more paths than that is left alone
FEW_STATES = 4  # not worth a look at what is dead
MOST_WORK = 40_000  # statements times states of a function, what it calls included
DEEPEST = 5  # calls entered within calls
CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")


class TooManyPathsError(Exception):
    """A function with more paths than are followed."""


class _Alive(NamedTuple):
    """What the code that is still to run mentions, prepared for questions."""

    blocks: list[frozenset[str]]  # by block that is being executed
    names: frozenset[str]  # all of them
    endings: tuple[str, ...]  # those of a parameter's attributes: ".x"
    known: dict[str, bool]  # key -> whether it is mentioned, as far as it was asked


class Execution(ABC):
    """Executes one function, or the top level of a file, and what it calls, on abstract values. A
    subclass says what a call means for scalers and gradients.

    Throughout, a *frame* names one entered call ("" is the entry), and a *key* is the identity of a
    name within it (:meth:`key`).
    """

    def __init__(self, source: SourceFile, roles: Roles, entry: Function | ast.Module) -> None:
        self.source, self.roles, self.entry = source, roles, entry
        self.owner = source.owner(entry) if not isinstance(entry, ast.Module) else None

        # Where the execution is.
        self.context: tuple[int, ...] = ()  # calls entered and passes through loops, by line
        self.depth: list[Function] = []  # the functions that are entered, innermost last
        self.frames: dict[str, Function | None] = {}  # frame -> its function; None: top level
        self.work = 0  # statements times states so far
        self.live: list[frozenset[str]] = []  # what the code that is still to run mentions
        self.counting = False  # within the test of a branch that acts on gradients
        self._chosen: dict[ast.IfExp, bool] = {}  # which way the one being evaluated goes

        # What the execution has learned, of all paths.
        self.remainder_tests: set[str] = set()  # texts of tests with a remainder
        self.asked: dict[str, tuple[str, ...]] = {}  # identities that a condition's key names
        self._holders: set[str] = set()  # names of which a part was given a value
        self._alive = _Alive([], frozenset(), (), {})  # of `live` when names were last forgotten

        # Facts of the text, each found once: they are the same on every path.
        self._relevant: dict[ast.AST, bool] = {}  # see `is_relevant`
        self._acting: dict[ast.AST, bool] = {}  # see `acts`
        self._deciding: dict[ast.AST, bool] = {}  # statements: see `_decides`
        self._with_event: dict[ast.expr, bool] = {}  # expressions: see `_event_within`
        self._locals: dict[Function, set[str]] = {}  # a function's own names
        self._templates: dict[ast.expr, list[tuple[str, str, str]]] = {}  # see `_template`
        self._mentions: dict[ast.AST, frozenset[str]] = {}  # names, with those of what is entered
        self._own: dict[ast.AST, tuple[set[str], set[ast.AST]]] = {}  # names, and what is entered
        self._suffixes: dict[int, list[frozenset[str]]] = {}  # block, by id of its first statement
        self._tested: dict[Test, frozenset[str]] = {}  # keys that a stored condition names

    def run(self) -> None:
        """Follow every path from the entry.

        Raises:
            TooManyPathsError: there are more than are followed.
        """
        state = PathState()
        self.frames[""] = None if isinstance(self.entry, ast.Module) else self.entry
        if not isinstance(self.entry, ast.Module):
            for name in _parameters(self.entry):
                state.names[f":{name}"] = None
            self.depth.append(self.entry)
        self.block(self.entry.body, [state], "")

    @abstractmethod
    def event(self, node: ast.Call, state: PathState, frame: str) -> None:
        """A call, on one path, that enters no function of this file."""

    @abstractmethod
    def forget(self, state: PathState) -> None:
        """Nothing is known any more about gradients and scalers."""

    @abstractmethod
    def zeroed(self, state: PathState) -> None:
        """The gradients were set to zero or to None."""

    @abstractmethod
    def gradients_edited(self, state: PathState) -> None:
        """The file has changed gradients by itself."""

    def is_relevant(self, node: ast.AST) -> bool:
        """Whether a scaler or optimizer is used in it, or a gradient made or clipped."""
        known = self._relevant.get(node)
        if known is None:
            known = self._relevant[node] = any(self._event(n) for n in walk_here(node))
        return known

    def acts(self, node: ast.AST) -> bool:
        """Whether it makes, clears, edits or applies gradients, itself or in what it enters."""
        known = self._acting.get(node)
        if known is None:
            self._acting[node] = False  # for a function that calls itself
            known = self._acting[node] = any(self._act(n) for n in walk_here(node))
        return known

    def _act(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        if isinstance(node, ast.Continue | ast.Break | ast.Return | ast.Raise):
            return True
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, dotted(node.func.value)
            if method in ("backward", "zero_grad", "unscale_"):
                return True
            if method in ("step", "update", "scale") and (
                owner in self.roles.scalers or owner in self.roles.optimizers
            ):
                return True
        if dotted(node.func).rpartition(".")[2] in CLIPS:
            return True
        callee = self._callee(node)
        return callee is not None and self.acts(callee)

    def any_relevant(self, statements: list[ast.stmt]) -> bool:
        return any(self.is_relevant(s) for s in statements)

    def _event(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        if not isinstance(node, ast.Call):
            return False
        name = dotted(node.func)
        if name.rpartition(".")[2] in CLIPS or self.roles.is_scaler_maker(node):
            return True
        if isinstance(node.func, ast.Attribute):
            owner = dotted(node.func.value)
            if node.func.attr in ("backward", "zero_grad", "unscale_"):
                return True
            if owner in self.roles.scalers or (
                node.func.attr == "step" and owner in self.roles.optimizers
            ):
                return True
        callee = self._callee(node)
        if callee is not None:
            if callee in self._relevant:
                return self._relevant[callee]
            self._relevant[callee] = False  # for a function that calls itself
            self._relevant[callee] = found = any(self._event(n) for n in walk_here(callee))
            return found
        given = [dotted(a) for a in (*node.args, *(k.value for k in node.keywords))]
        return any(a in self.roles.scalers for a in given) or self._reaches_self(node, given)

    def _reaches_self(self, node: ast.Call, given: list[str]) -> bool:
        """Whether a call enters code that is not here with an object that holds the scaler."""
        if not self._self_has_scaler:
            return False
        own, function = dotted(node.func), node.func
        if "self" in given:
            return True
        if own.startswith("self.") and own.count(".") == 1:
            return own.partition(".")[2] not in self._attributes
        inner = function.value if isinstance(function, ast.Attribute) else None
        return isinstance(inner, ast.Call) and dotted(inner.func) == "super"

    @cached_property
    def _attributes(self) -> set[str]:
        """What the class sets on itself: ``self.model(x)`` is a call of such an attribute."""
        if self.owner is None:
            return set()
        return {
            n.attr
            for n in ast.walk(self.owner)
            if isinstance(n, ast.Attribute)
            and isinstance(n.ctx, ast.Store)
            and dotted(n.value) == "self"
        }

    def _callee(self, call: ast.Call) -> Function | None:
        """The function of this file that a call enters."""
        name = dotted(call.func)
        if name in self.roles.functions:
            return self.roles.functions[name]
        first, _, rest = name.partition(".")
        if first == "self" and rest and "." not in rest:
            inside = self.depth[-1] if self.depth else None
            owner = self.source.owner(inside) if inside is not None else self.owner
            owner = self.owner or owner
            if owner is not None:
                return self.roles.methods[owner.name].get(rest)
        return None

    # ---- names

    def key(self, name: str, frame: str) -> str:
        """The identity of a name: its frame, or the file's top level, or the object itself."""
        first = _root(name)
        if first == "self":
            return name
        function = self.frames.get(frame)
        if function is None:
            return f"{frame}:{name}"
        if first in self._local_names(function):
            return f"{frame}:{name}"
        return f":{name}" if self.entry is self.source.tree else f"^:{name}"

    def _local_names(self, function: Function) -> set[str]:
        known = self._locals.get(function)
        if known is None:
            known = set(_parameters(function))
            outer: set[str] = set()
            for n in walk_here(function):
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                    known.add(n.id)
                elif isinstance(n, ast.Global | ast.Nonlocal):
                    outer |= set(n.names)
            self._locals[function] = known = known - outer
        return known

    def look_up(self, node: ast.expr, state: PathState, frame: str) -> Value:
        """What an expression names, without evaluating calls."""
        name = dotted(node)
        if not name:
            return None
        key = self.identity(name, state, frame)
        value = state.names.get(key)
        if value is not None:
            return value
        if key not in state.names:  # part of something known, as losses["total"]
            base = self.key(_root(name), frame)
            if isinstance(state.names.get(base), Plain):
                return Plain()
        if name in self.roles.scalers:
            return Scaler(key, *self._made(name))
        if name in self.roles.optimizers:
            return Optimizer(key)
        return None

    def identity(self, name: str, state: PathState, frame: str) -> str:
        """The key that a name stands for, through the calls that it was handed on by."""
        key = self.key(name, frame)
        for _ in range(8):
            value = state.names.get(key)
            if not isinstance(value, Same):
                break
            key = value.key
        return key

    def _made(self, name: str) -> tuple[bool, str]:
        """Whether a scaler that was made elsewhere in the file is switched on."""
        makers = [
            call
            for call in self.roles.calls
            if self.roles.is_scaler_maker(call)
            and name in [dotted(t) for t in getattr(self.source.statement(call), "targets", [])]
        ]
        return not makers or not all(map(is_off, makers)), ""

    # ---- statements

    def block(self, statements: Iterable[ast.stmt], states: list[PathState], frame: str) -> Flow:
        flow = Flow(states, [], [], [])
        statements = list(statements)
        for statement, after in zip(statements, self._after(statements), strict=True):
            if not flow.next:
                break
            self.live.append(after)
            found = self.statement(statement, flow.next, frame)
            flow = Flow(
                self.merged(found.next),
                flow.breaks + found.breaks,
                flow.continues + found.continues,
                flow.returns + found.returns,
            )
            self.live.pop()
        return flow

    def _after(self, statements: list[ast.stmt]) -> list[frozenset[str]]:
        """For each statement of a block what those behind it mention."""
        if not statements:
            return []
        known = self._suffixes.get(id(statements[0]))
        if known is None:
            known = [frozenset()]
            for statement in reversed(statements[1:]):
                known.append(known[-1] | self.mentions(statement))
            known = self._suffixes[id(statements[0])] = known[::-1]
        return known

    def mentions(self, node: ast.AST) -> frozenset[str]:
        """Names and attributes in a statement and in the functions that it enters; of those of a
        parameter's attributes also ".x", because the parameter stands for another name."""
        known = self._mentions.get(node)
        if known is None:
            found: set[str] = set()
            entered: set[ast.AST] = set()
            waiting = [node]
            while waiting:
                names, callees = self._own_mentions(waiting.pop())
                found |= names
                waiting += [callee for callee in callees if callee not in entered]
                entered |= callees
            known = self._mentions[node] = frozenset(found)
        return known

    def _own_mentions(self, node: ast.AST) -> tuple[set[str], set[ast.AST]]:
        """What a statement or function itself mentions, and the functions that it calls."""
        known = self._own.get(node)
        if known is not None:
            return known
        found: set[str] = set()
        callees: set[ast.AST] = set()
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        parameters = set(_parameters(node)) if inside else set()  # type: ignore[arg-type]
        for n in walk_here(node):
            if isinstance(n, ast.Name):
                found.add(n.id)
            elif isinstance(n, ast.Attribute | ast.Subscript) and (name := dotted(n)):
                found.add(name)
                if (root := _root(name)) in parameters:
                    found.add(name[len(root) :])
            elif isinstance(n, ast.Call) and (callee := self._callee(n)) is not None:
                callees.add(callee)
        self._own[node] = found, callees
        return found, callees

    def forget_dead(self, states: list[PathState]) -> None:
        """Drop names and facts that no code to come can ask for, so that paths which differ in
        nothing else become one."""
        if self._alive.blocks != self.live:
            live = frozenset().union(*self.live)
            endings = tuple(m for m in live if m[0] in ".[")
            self._alive = _Alive(list(self.live), live, endings, {})
        _, live, endings, judged = self._alive

        def mentioned(key: str) -> bool:
            known = judged.get(key)
            if known is None:
                name = key.rpartition(":")[2]
                known = judged[key] = _root(name) in live and (
                    name in live
                    or name.endswith(endings)
                    or any(m.startswith((f"{name}.", f"{name}[")) for m in live)
                )
            return known

        alike: dict[object, tuple[set[str], set[str]]] = {}  # many paths differ in facts alone
        for state in states:
            names = frozenset(state.names.items())
            if names not in alike:
                alike[names] = self._asked_for(state, mentioned)
            kept, tests = alike[names]
            if len(kept) < len(state.names):
                state.names = {k: v for k, v in state.names.items() if k in kept}
            for fact in list(state.facts):
                if fact not in tests and not all(
                    key in kept or mentioned(key) for key in self.asked[fact]
                ):
                    del state.facts[fact]

    def _asked_for(
        self, state: PathState, mentioned: Callable[[str], bool]
    ) -> tuple[set[str], set[str]]:
        """The names of a state that code to come mentions, with those that their values stand for;
        and the tests that scalers among them depend on."""
        waiting = [key for key in state.names if mentioned(key)]
        kept, tests = set(waiting), set()
        while waiting:
            value = state.names.get(waiting.pop())
            more: Iterable[str] = ()
            if isinstance(value, Same):
                more = (value.key,)
            elif isinstance(value, Test):
                more = self._named_in(value)
            elif isinstance(value, Scaler):
                tests.add(value.test)
            new = [key for key in more if key not in kept]
            waiting += new
            kept |= set(new)
        return kept, tests

    def _named_in(self, test: Test) -> frozenset[str]:
        known = self._tested.get(test)
        if known is None:
            known = self._tested[test] = frozenset(
                self.key(d, test.frame) for n in ast.walk(test.node) if (d := dotted(n))
            )
        return known

    def merged(self, states: list[PathState]) -> list[PathState]:
        if len(states) < 2:
            return states
        if len(self.remainder_tests) > 1:  # which of them went how is not told apart
            for state in states:
                state.remainders = ()
        if len(states) > FEW_STATES:
            self.forget_dead(states)
        found = {state.key(): state for state in states}
        if len(found) > MOST_STATES:
            raise TooManyPathsError
        return list(found.values())

    def statement(self, node: ast.stmt, states: list[PathState], frame: str) -> Flow:
        self.work += len(states)
        if self.work > MOST_WORK:
            raise TooManyPathsError
        if isinstance(node, ast.If):
            return self.branch(node.test, node.body, node.orelse, states, frame)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return self.loop(node, states, frame)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.evaluate(item.context_expr, states, frame)
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, None, states, frame)
            return self.block(node.body, states, frame)
        if isinstance(node, ast.Try):
            return self.attempt(node, states, frame)
        if isinstance(node, ast.Return):
            if node.value is not None:
                self.evaluate(node.value, states, frame)
            return Flow([], [], [], states)
        if isinstance(node, ast.Raise):
            return Flow([], [], [], [])
        if isinstance(node, ast.Break):
            return Flow([], states, [], [])
        if isinstance(node, ast.Continue):
            return Flow([], [], states, [])
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return self.assignment(node, states, frame)
        if isinstance(node, ast.AugAssign):
            return self.accumulation(node, states, frame)
        if isinstance(node, ast.Expr):
            self.evaluate(node.value, states, frame)
            if _ends(node.value):
                return Flow([], [], [], [])
            return Flow(states, [], [], [])
        if isinstance(node, ast.Match):
            return self.match(node, states, frame)
        if isinstance(node, ast.Assert):
            self.evaluate(node.test, states, frame)
            held = [s for s in states if self.assume(node.test, True, s, frame)]
            return Flow(held, [], [], [])
        return Flow(states, [], [], [])

    def match(self, node: ast.Match, states: list[PathState], frame: str) -> Flow:
        if not self.is_relevant(node):
            return Flow(states, [], [], [])
        flow = Flow(list(states), [], [], [])
        for case in node.cases:
            found = self.block(case.body, [s.copy() for s in states], frame)
            flow = Flow(*(a + b for a, b in zip(flow, found, strict=True)))
        return flow

    def attempt(self, node: ast.Try, states: list[PathState], frame: str) -> Flow:
        before = [s.copy() for s in states] if node.handlers else []
        self.live.append(self.mentions(node))
        done = self.block(node.body, states, frame)
        self.live.pop()
        self.live.append(self.mentions(node))
        flow = self.block(node.orelse, done.next, frame)
        self.live.pop()
        flow = Flow(
            flow.next,
            done.breaks + flow.breaks,
            done.continues + flow.continues,
            done.returns + flow.returns,
        )
        for handler in node.handlers:
            caught = [s.copy() for s in before]
            if self.any_relevant(node.body):
                for state in caught:  # it may have come from anywhere in the body
                    self.forget(state)
            self.live.append(self.mentions(node))
            found = self.block(handler.body, caught, frame)
            self.live.pop()
            flow = Flow(*(a + b for a, b in zip(flow, found, strict=True)))
        if self.any_relevant(node.finalbody):
            parts = [self.block(node.finalbody, part, frame).next for part in flow]
            flow = Flow(*parts)
        return flow

    def branch(
        self,
        test: ast.expr,
        body: list[ast.stmt],
        otherwise: list[ast.stmt],
        states: list[PathState],
        frame: str,
    ) -> Flow:
        self.evaluate(test, states, frame)
        inside = [*body, *otherwise]
        if not self.any_relevant(inside) and not any(map(self._decides, inside)):
            for name in {n for s in inside for n in _stored(s)}:
                for state in states:
                    self.replaced(name, state, frame)
            return Flow(states, [], [], [])
        flow = Flow([], [], [], [])
        for outcome, block in ((True, body), (False, otherwise)):
            taken = []
            self.counting = any(map(self.acts, inside))
            for state in states:
                copied = state.copy()
                if self.assume(test, outcome, copied, frame):
                    taken.append(copied)
            self.counting = False
            if taken:
                found = self.block(block, taken, frame)
                flow = Flow(*(a + b for a, b in zip(flow, found, strict=True)))
        return flow

    def _decides(self, statement: ast.stmt) -> bool:
        """Whether it leaves a block early, or gives a scaler its value."""
        known = self._deciding.get(statement)
        if known is None:
            known = self._deciding[statement] = self._leaves_or_makes(statement)
        return known

    def _leaves_or_makes(self, statement: ast.stmt) -> bool:
        for n in walk_here(statement):
            if isinstance(n, ast.Return | ast.Break | ast.Continue | ast.Raise):
                return True
            if (
                isinstance(n, ast.Name | ast.Attribute)
                and isinstance(n.ctx, ast.Store)
                and dotted(n) in self.roles.scalers | self.roles.optimizers
            ):
                return True
            if isinstance(n, ast.Expr) and _ends(n.value):
                return True
        return False

    def loop(
        self, node: ast.For | ast.AsyncFor | ast.While, states: list[PathState], frame: str
    ) -> Flow:
        if not isinstance(node, ast.While):
            self.evaluate(node.iter, states, frame)
        else:
            self.evaluate(node.test, states, frame)
        stored = _stored(node)
        if not self.any_relevant(node.body):
            for name in stored:
                for state in states:
                    self.replaced(name, state, frame)
            return self._leave(node, Flow(states, [], [], []), [], frame)
        outer, left, returns = self.context, [], []
        current = states
        skipped = [s.copy() for s in states]
        for turn in (1, 2):
            self.context = (*outer, node.lineno * 4 + turn)
            for state in current:
                state.history = ()
                if turn == 2:
                    state.remainders = state.remainders[-4:]
                for name in stored:
                    self.drop_facts(self.key(name, frame), state)
                if not isinstance(node, ast.While):
                    self.assign(node.target, None, [state], frame)
                    targets = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
                    for name in self.roles.optimizers | self.roles.scalers:
                        if _root(name) in targets:  # also wrapped.optimizer of each wrapped
                            key = self.key(name, frame)
                            made = Optimizer if name in self.roles.optimizers else Scaler
                            state.names[key] = made(f"{key}@{self.context}")
            if turn == 1:
                self.live.append(self.mentions(node))
            flow = self.block(node.body, current, frame)
            left += flow.breaks
            returns += flow.returns
            current = self.merged([s.copy() for s in flow.next + flow.continues])
            if turn == 1:
                self.live.pop()
            if not current:
                break
        self.context = outer
        if current or left:  # a loop that never runs has no say in what follows one that does
            skipped = []
        for state in skipped:
            self.forget(state)
        done = Flow(self.merged(current + skipped), [], [], returns)
        return self._leave(node, done, left, frame)

    def _leave(
        self,
        node: ast.For | ast.AsyncFor | ast.While,
        flow: Flow,
        left: list[PathState],
        frame: str,
    ) -> Flow:
        after = self.block(node.orelse, flow.next, frame) if node.orelse else flow
        for state in after.next + left:
            state.history = ()
        found = self.merged(after.next + left)
        return Flow(found, after.breaks, after.continues, flow.returns)

    def assignment(
        self, node: ast.Assign | ast.AnnAssign, states: list[PathState], frame: str
    ) -> Flow:
        value = node.value
        if value is None:
            return Flow(states, [], [], [])
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(value, ast.IfExp) and (
            self._event_within(value)
            or any(dotted(t) in self.roles.scalers | self.roles.optimizers for t in targets)
        ):
            self.evaluate(value.test, states, frame)
            found: list[PathState] = []
            for outcome, part in ((True, value.body), (False, value.orelse)):
                taken = []
                for state in states:
                    copied = state.copy()
                    if self.assume(value.test, outcome, copied, frame):
                        taken.append(copied)
                self.evaluate(part, taken, frame)
                for target in targets:
                    self.assign(target, part, taken, frame)
                found += taken
            return Flow(found, [], [], [])
        self.evaluate(value, states, frame)
        for target in targets:
            if is_gradient(target):
                for state in states:
                    if isinstance(value, ast.Constant) and value.value is None:
                        self.zeroed(state)
                    else:
                        self.gradients_edited(state)
            else:
                self.assign(target, value, states, frame)
        return Flow(states, [], [], [])

    def accumulation(self, node: ast.AugAssign, states: list[PathState], frame: str) -> Flow:
        self.evaluate(node.value, states, frame)
        for state in states:
            if is_gradient(node.target):
                self.gradients_edited(state)
                continue
            before = self.look_up(node.target, state, frame)
            after = self.value(node.value, state, frame)
            kept: Value = before if isinstance(before, Plain) else None
            scaled = (v for v in (before, after) if isinstance(v, Scaled))
            self.bind(node.target, next(scaled, kept), state, frame)
        return Flow(states, [], [], [])

    def _event_within(self, node: ast.expr) -> bool:
        known = self._with_event.get(node)
        if known is None:
            known = self._with_event[node] = any(self._event(n) for n in ast.walk(node))
        return known

    def assign(
        self, target: ast.expr, value: ast.expr | None, states: list[PathState], frame: str
    ) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
                parts = list(value.elts)
            made_here = isinstance(value, ast.Call) and not self._hands_over(value)
            for element, part in zip(target.elts, parts, strict=True):
                if part is None and made_here:
                    for state in states:
                        self.bind(element, Plain(), state, frame)
                else:
                    self.assign(element, part, states, frame)
            return
        for state in states:
            found = self.value(value, state, frame) if value is not None else None
            self.bind(target, found, state, frame)

    def bind(self, target: ast.expr, value: Value, state: PathState, frame: str) -> None:
        name = dotted(target)
        if isinstance(target, ast.Starred):
            name = dotted(target.value)
        if not name:
            return
        key = self.key(name, frame)
        self._holders |= {key[: found.start()] for found in re.finditer(r"[.\[]", key)}
        self.drop(key, state)
        if isinstance(value, Plain) and name in self.roles.scalers | self.roles.optimizers:
            return  # made by code that is not here; its use says what it is
        if value is None and name in self.roles.optimizers:
            value = Optimizer(f"{key}@{self.context}")  # in each pass of a loop another one
        state.names[key] = value

    def replaced(self, name: str, state: PathState, frame: str) -> None:
        """A name may have been given another value."""
        key = self.key(name, frame)
        self.drop(key, state)
        if name in self.roles.optimizers:  # in each pass of a loop another one
            state.names[key] = Optimizer(f"{key}@{self.context}")

    def drop(self, key: str, state: PathState) -> None:
        """Forget what a name held."""
        self.drop_facts(key, state)
        state.names.pop(key, None)
        if key in self._holders:
            for part in [k for k in state.names if k.startswith((key + ".", key + "["))]:
                del state.names[part]

    def drop_facts(self, key: str, state: PathState) -> None:
        if not state.facts:
            return
        mention = f"‹{key}"
        for fact in [f for f in state.facts if mention in f]:
            rest = fact.split(mention)[1:]
            if any(not (r[:1].isalnum() or r[:1] == "_") for r in rest):
                del state.facts[fact]

    # ---- conditions

    def test_key(self, node: ast.expr, state: PathState, frame: str) -> str:
        """A condition's text with every name replaced by its identity."""
        parts = self._templates.get(node)
        if parts is None:
            parts = self._templates[node] = self._template(node)
        first, *others = parts
        text, keys = [first[2]], []
        for name, attributes, following in others:
            key = self.identity(name, state, frame)
            keys.append(key + attributes)
            text.append(f"‹{key}{following}")
        found = "".join(text)
        if found not in self.asked:
            self.asked[found] = tuple(keys)
        return found

    def _template(self, node: ast.expr) -> list[tuple[str, str, str]]:
        """A condition's text without spaces, cut before each name: the name, the attributes that
        follow it, all that follows it."""
        names = sorted(
            (n for n in ast.walk(node) if isinstance(n, ast.Name)),
            key=lambda n: (n.lineno, n.col_offset),
        )
        begin, end = self.source.start(node), self.source.end(node)
        if not names:  # ``if True:``
            return [("", "", re.sub(r"\s+", "", self.source.text[begin:end]))]
        starts = [self.source.start(name) for name in names]
        parts = [("", "", self.source.text[begin : starts[0]])]
        for name, start, following in zip(names, starts, [*starts[1:], end], strict=True):
            top: ast.AST = name
            while isinstance(up := self.source.parent(top), ast.Attribute) and up.value is top:
                top = up
                if top is node:
                    break
            closing = "›" if top is name else ""
            text = self.source.text[start + len(name.id) : following]
            parts.append((name.id, dotted(top)[len(name.id) :], closing + text))
        return [(name, attributes, re.sub(r"\s+", "", text)) for name, attributes, text in parts]

    def truth(self, node: ast.expr, state: PathState, frame: str) -> bool | None:
        """Whether a condition is known."""
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, state, frame)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(v, state, frame) for v in node.values]
            if isinstance(node.op, ast.And):
                return False if False in parts else (True if all(parts) else None)
            return True if True in parts else (False if parts.count(False) == len(parts) else None)
        positive, sign = _positive(node)
        if positive is not node or not sign:
            inner = self.truth(positive, state, frame)
            return None if inner is None else inner == sign
        value = self.look_up(node, state, frame)
        if isinstance(value, Constant):
            return bool(value.value)
        if isinstance(value, Test):
            inner = self.truth(value.node, state, value.frame)
            if inner is not None:
                return inner
        known = state.facts.get(self.test_key(node, state, frame))
        if known is None and isinstance(value, Scaler) and dotted(node) != value.test:
            return None
        return known

    def assume(self, node: ast.expr, outcome: bool, state: PathState, frame: str) -> bool:
        """Take a branch; False where what is known forbids it."""
        known = self.truth(node, state, frame)
        if known is not None and known != outcome:
            return False
        if known is None:
            self._note_remainder(node, node, outcome, state, frame)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.assume(node.operand, not outcome, state, frame)
        if isinstance(node, ast.BoolOp):
            every = isinstance(node.op, ast.And)
            if outcome == every:  # all parts are known
                return all(self.assume(v, outcome, state, frame) for v in node.values)
            unknown = [v for v in node.values if self.truth(v, state, frame) is None]
            if len(unknown) == 1:
                return self.assume(unknown[0], outcome, state, frame)
            state.facts[self.test_key(node, state, frame)] = outcome
            return True
        positive, sign = _positive(node)
        if positive is not node or not sign:
            return self.assume(positive, outcome == sign, state, frame)
        value = self.look_up(node, state, frame)
        if isinstance(value, Test):
            self._note_remainder(value.node, node, outcome, state, frame)
            self.assume(value.node, outcome, state, value.frame)
        if not any(isinstance(n, ast.Call) for n in ast.walk(node)):
            state.facts[self.test_key(node, state, frame)] = outcome
        return True

    def _note_remainder(
        self, test: ast.expr, name: ast.expr, outcome: bool, state: PathState, frame: str
    ) -> None:
        """Which way a test with a remainder went, that stands there as ``name``."""
        if self.counting and any(isinstance(n, ast.Mod) for n in ast.walk(test)):
            key = self.test_key(name, state, frame)
            self.remainder_tests.add(key)
            state.remainders = (*state.remainders, (f"{key}{self.context}", outcome))

    # ---- expressions

    def value(self, node: ast.expr | None, state: PathState, frame: str) -> Value:
        """What an expression gives; its calls were executed before."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            if node.value is None or isinstance(node.value, bool):
                return Constant(node.value)
            return Plain()
        if isinstance(node, ast.Call):
            return self.call_value(node, state, frame)
        if isinstance(node, ast.IfExp):
            goes = self._chosen.get(node, self.truth(node.test, state, frame))
            if goes is not None:
                return self.value(node.body if goes else node.orelse, state, frame)
        if dotted(node):
            found = self.look_up(node, state, frame)
            if found is None and isinstance(node, ast.Name):
                return Same(self.key(node.id, frame))
            return found
        if isinstance(node, ast.Compare | ast.BoolOp) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            return Test(node, frame)
        operands = (n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr))
        parts = [self.value(n, state, frame) for n in operands]
        scaled = next((p for p in parts if isinstance(p, Scaled)), None)
        if scaled is not None:
            return scaled
        arithmetic = isinstance(node, ast.BinOp | ast.UnaryOp | ast.Subscript)
        if arithmetic and all(isinstance(p, Plain | Constant) for p in parts):
            return Plain()
        if isinstance(node, ast.BinOp) and any(isinstance(p, Plain) for p in parts):
            return Plain() if not self._mentions_scaler(node, state, frame) else None
        return None

    def _mentions_scaler(self, node: ast.AST, state: PathState, frame: str) -> bool:
        return any(
            "scale" in n.attr or isinstance(self.look_up(n, state, frame), Scaler)
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute)
        ) or any("scale" in n.id for n in ast.walk(node) if isinstance(n, ast.Name))

    def call_value(self, node: ast.Call, state: PathState, frame: str) -> Value:
        place = f"made at {node.lineno}:{node.col_offset}{self.context}"
        if self.roles.is_scaler_maker(node):
            return Scaler(place, *self._switch_of(node, state, frame))
        if self.roles.is_optimizer_maker(node):
            return Optimizer(place)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, state, frame)
            if isinstance(owner, Scaler):
                if node.func.attr == "scale" and node.args:
                    on = owner.enabled and state.facts.get(owner.test, True)
                    return Scaled(owner) if on else Plain()
                return None
            if isinstance(owner, Scaled):
                return owner
        given = [*node.args, *(k.value for k in node.keywords)]
        values = [self.value(a, state, frame) for a in given]
        scaled = next((v for v in values if isinstance(v, Scaled)), None)
        if scaled is not None:
            return scaled
        if any(isinstance(v, Scaler) for v in values):
            return None
        callee = self._callee(node)
        if callee is not None:
            return None if self.is_relevant(callee) else Plain()
        name = dotted(node.func)
        if name.startswith("self.") and self._self_has_scaler:
            called = name.removeprefix("self.")
            is_part = called in self._attributes and "scal" not in called.lower()
            return Plain() if is_part else None  # self.model(x), where the class has set model
        return Plain()

    def _switch_of(self, maker: ast.Call, state: PathState, frame: str) -> tuple[bool, str]:
        """Whether a scaler that is made here may be on, and the key of the test that says so."""
        switch = keyword(maker, "enabled")
        if switch is None:
            return True, ""
        is_constant = isinstance(switch, ast.Constant)
        is_on = self.truth(switch, state, frame) is not False
        return is_on, "" if is_constant else self.test_key(switch, state, frame)

    def _hands_over(self, call: ast.Call) -> bool:
        given = [*call.args, *(k.value for k in call.keywords)]
        if any(dotted(a) in self.roles.scalers for a in given):
            return True
        callee = self._callee(call)
        if callee is not None:
            return self.is_relevant(callee)
        return dotted(call.func).startswith("self.") and self._self_has_scaler

    @cached_property
    def _self_has_scaler(self) -> bool:
        return any(name.startswith("self.") for name in self.roles.scalers)

    def evaluate(self, node: ast.expr, states: list[PathState], frame: str) -> None:
        """Execute the calls of an expression, arguments before the call. Conditional expressions
        that matter go both ways, as branches do."""
        if not self.is_relevant(node):
            return
        choice = self._choice(node, states, frame)
        if choice is not None:
            found = []
            for outcome, part in ((True, choice.body), (False, choice.orelse)):
                self.counting = self.acts(part)
                taken = [s.copy() for s in states]
                taken = [s for s in taken if self.assume(choice.test, outcome, s, frame)]
                self.counting = False
                self._chosen[choice] = outcome
                self.evaluate(node, taken, frame)
                del self._chosen[choice]
                found += taken
            states[:] = found
            return
        for call in self._calls_in_order(node):
            self.call(call, states, frame)

    def _choice(self, node: ast.expr, states: list[PathState], frame: str) -> ast.IfExp | None:
        """The first conditional expression within it that is still open, and of which a side acts
        or is a loss that carries a scale."""
        for n in self._evaluated(node):
            if not isinstance(n, ast.IfExp) or n in self._chosen:
                continue
            sides = (n.body, n.orelse)
            if any(map(self._event_within, sides)) or any(
                isinstance(self.value(side, state, frame), Scaled)
                for side in sides
                for state in states
            ):
                return n
        return None

    def _evaluated(self, node: ast.AST) -> Iterator[ast.AST]:
        """What is evaluated of an expression, outer parts first, without sides not taken."""
        if isinstance(node, ast.Lambda | ast.FunctionDef | ast.ClassDef):
            return
        yield node
        for part in self._parts(node):
            yield from self._evaluated(part)

    def _parts(self, node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.IfExp) and node in self._chosen:
            return [node.test, node.body if self._chosen[node] else node.orelse]
        return list(children(node))

    def _calls_in_order(self, node: ast.AST) -> Iterator[ast.Call]:
        if isinstance(node, ast.Lambda | ast.FunctionDef | ast.ClassDef):
            return
        for part in self._parts(node):
            yield from self._calls_in_order(part)
        if isinstance(node, ast.Call):
            yield node

    # ---- calls

    def call(self, node: ast.Call, states: list[PathState], frame: str) -> None:
        callee = self._callee(node)
        if callee is not None:
            if self.is_relevant(callee) and callee not in self.depth:
                self.enter(callee, node, states, frame)
                return
            if callee in self.depth:
                for state in states:
                    self.forget(state)
            return
        for state in states:
            self.event(node, state, frame)

    def enter(self, callee: Function, node: ast.Call, states: list[PathState], frame: str) -> None:
        """Execute a function of this file in place of the call."""
        if len(self.depth) >= DEEPEST:
            for state in states:
                self.forget(state)
            return
        inner = f"{frame}/{node.lineno}.{node.col_offset}"
        self.frames[inner] = callee
        names = _parameters(callee)
        if isinstance(node.func, ast.Attribute) and names[:1] == ["self"]:
            names = names[1:]
        given: dict[str, ast.expr] = {}
        for name, value_given in zip(names, node.args, strict=False):
            if isinstance(value_given, ast.Starred):
                break
            given[name] = value_given
        given |= {k.arg: k.value for k in node.keywords if k.arg}
        defaults = _defaults(callee)
        for state in states:
            for name in _parameters(callee):
                if name == "self":
                    continue
                value: Value = None
                if name in given:
                    if dotted(given[name]):
                        value = Same(self.identity(dotted(given[name]), state, frame))
                    else:
                        value = self.value(given[name], state, frame)
                elif isinstance(default := defaults.get(name), ast.Constant) and (
                    default.value is None or isinstance(default.value, bool)
                ):
                    value = Constant(default.value)
                state.names[f"{inner}:{name}"] = value
        outer = self.context
        self.context = (*outer, node.lineno * 4)
        self.live.append(self.mentions(self.source.statement(node)))
        self.depth.append(callee)
        flow = self.block(callee.body, states, inner)
        self.depth.pop()
        self.context = outer
        ended = flow.next + flow.returns
        for state in ended:
            prefix = f"{inner}:"
            for key in [k for k in state.names if k.startswith(prefix)]:
                del state.names[key]
            mention = f"‹{inner}"
            for fact in [f for f in state.facts if mention in f]:
                del state.facts[fact]
        states[:] = self.merged(ended)
        self.live.pop()


def walk_here(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is within it, without functions and classes defined there."""
    waiting: list[ast.AST] = [node]
    first = True
    while waiting:
        at = waiting.pop()
        if not first and isinstance(
            at, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            continue
        first = False
        look()
        yield at
        waiting += children(at)


def _parameters(function: Function) -> list[str]:
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    return [p.arg for p in named + [p for p in (a.vararg, a.kwarg) if p]]


def _defaults(function: Function) -> dict[str, ast.expr]:
    a = function.args
    named = [*a.posonlyargs, *a.args]
    found: dict[str, ast.expr] = {}
    if a.defaults:
        found = {p.arg: d for p, d in zip(named[-len(a.defaults) :], a.defaults, strict=True)}
    found |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    return found


def _positive(node: ast.expr) -> tuple[ast.expr, bool]:
    """``x is not None``, ``x is None`` and the like as the truth of ``x``, with its sign."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        right = node.comparators[0]
        if isinstance(right, ast.Constant) and (right.value is None or right.value is True):
            if isinstance(node.ops[0], ast.IsNot | ast.NotEq):
                return node.left, right.value is None
            if isinstance(node.ops[0], ast.Is | ast.Eq):
                return node.left, right.value is not None
    return node, True


def is_gradient(node: ast.expr) -> bool:
    """``p.grad`` or ``p.grad.data``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "grad" or (node.attr == "data" and is_gradient(node.value))
    return False


def _ends(node: ast.expr) -> bool:
    """A call that ends the process."""
    return isinstance(node, ast.Call) and dotted(node.func) in (
        "exit",
        "quit",
        "sys.exit",
        "os._exit",
        "pdb.set_trace",
    )


def _root(name: str) -> str:
    """The first name of a dotted one."""
    return re.split(r"[.\[]", name, maxsplit=1)[0]


def _stored(node: ast.AST) -> list[str]:
    """Names and attributes that are assigned within it."""
    return sorted(
        {
            dotted(n)
            for n in walk_here(node)
            if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        - {""}
    )
