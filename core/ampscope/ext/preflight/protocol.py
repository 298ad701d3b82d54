"""GradScaler's protocol, followed along every path through a function.

Each function that calls a scaler is executed on abstract values: which name holds which scaler or
optimizer, which gradients still carry a loss scale, what the scaler's state machine has seen.
Branches are followed both ways, the same test twice the same way; loops run twice; functions and
methods of the same file are entered where they are called. What is unknown (a parameter, a scaler
handed to code that is not here) counts as right.

A place is reported when it is wrong on every path that reaches it with a scaled loss. Tests with a
remainder (``(i + 1) % 4 == 0``) are known to go both ways, so there one side is enough.

What GradScaler does: https://docs.pytorch.org/docs/stable/notes/amp_examples.html and
torch/amp/grad_scaler.py.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from ampscope.ext.preflight.execution import (
    CLIPS,
    Execution,
    TooManyPathsError,
    is_gradient,
    walk_here,
)
from ampscope.ext.preflight.finding import SourceFinding
from ampscope.ext.preflight.misuse import Misuse, finding_of
from ampscope.ext.preflight.path_state import Optimizer, PathState, Plain, Scaled, Scaler, Value
from ampscope.ext.preflight.roles import Function, Roles, is_off
from ampscope.ext.preflight.source import SourceFile, argument, dotted, keyword, number

_EDITS = ("div_", "mul_", "copy_", "fill_", "zero_", "add_", "sub_", "data", "nan_to_num_")


def check(source: SourceFile, roles: Roles) -> Iterator[SourceFinding]:
    """AMP015 to AMP019 of a file: each misuse once, in the order of the text."""
    misuses = _misuses(source, roles)
    raising = {
        source.function(m.node) for m in misuses if m.kind in ("unscaled_twice", "stepped_twice")
    }
    for m in misuses:
        if m.kind == "scaled_onto_unscaled" and source.function(m.node) in raising:
            continue  # one and the same mistake, which raises before it can mix anything
        yield finding_of(m, source, roles)


def _misuses(source: SourceFile, roles: Roles) -> list[Misuse]:
    if not roles.scalers:
        return []
    found: dict[tuple[str, ast.AST], Misuse] = {}
    entries: list[Function | ast.Module] = [source.tree]
    entries += [n for n in source.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for entry in entries:
        protocol = _Protocol(source, roles, entry)
        if not protocol.is_relevant(entry):
            continue
        try:
            for m in protocol.misuses():
                found.setdefault((m.kind, m.node), m)
        except (TooManyPathsError, RecursionError):
            continue
    kinds = {m.kind for m in found.values()}
    for m in _never_called(roles):
        if m.kind != "never_scaled" or "unscaled_backward" not in kinds:  # the same at its line
            found.setdefault((m.kind, m.node), m)
    return sorted(found.values(), key=lambda m: (m.node.lineno, m.node.col_offset, m.kind))


def _never_called(roles: Roles) -> Iterator[Misuse]:
    """A scaler that the file makes, keeps to itself and steps, and never updates, or whose scale no
    loss is multiplied by although backward runs beside the step."""
    off = {
        dotted(target)
        for call in roles.calls
        if roles.is_scaler_maker(call) and is_off(call)
        for target in getattr(roles.source.statement(call), "targets", [])
    }
    for name in sorted(roles.made_scalers - off):
        names = roles.kept_as(name)
        called = {
            method: [call for owner, call in roles.by_method[method] if owner in names]
            for method in ("step", "update", "scale", "get_scale")
        }
        steps = [call for call in called["step"] if call.args]
        if not steps:
            continue
        owner = dotted(steps[0].func).rpartition(".")[0]
        words = (owner, dotted(steps[0].args[0]))
        if not called["update"]:
            yield Misuse("never_updated", steps[0], *words)
        function = roles.source.function
        beside = any(function(b) is function(steps[0]) for _, b in roles.by_method["backward"])
        only = len(roles.optimizers) <= 1  # backward may be of a part that is not scaled
        if beside and only and not called["scale"] and not called["get_scale"]:
            yield Misuse("never_scaled", steps[0], *words)


class _Protocol(Execution):
    """Judges what each path does with scalers and gradients."""

    def __init__(self, source: SourceFile, roles: Roles, entry: Function | ast.Module) -> None:
        super().__init__(source, roles, entry)
        # (kind, call, context) -> how remainders went -> [paths on which it is wrong, right]
        self._outcomes: dict[tuple[str, int, tuple[int, ...]], dict[object, list[int]]] = {}
        self._wrong: dict[tuple[str, int], Misuse] = {}  # (kind, call) -> what some path does wrong
        self._certain: set[tuple[str, int]] = set()  # (kind, call) that one wrong path makes wrong
        self._assigned: dict[ast.AST, dict[str, list[ast.expr]]] = {}  # by function: name -> values

    def misuses(self) -> Iterator[Misuse]:
        """What the entry and the functions that it calls do wrong.

        Raises:
            TooManyPathsError: there are more paths than are followed.
        """
        self.run()
        one_test = len(self.remainder_tests) <= 1
        for (kind, node, _), groups in self._outcomes.items():
            if (kind, node) in self._certain:
                wrong = True
            elif one_test:
                wrong = any(bad and not right for bad, right in groups.values())
            else:
                bad = sum(g[0] for g in groups.values())
                wrong = bad > 0 and not sum(g[1] for g in groups.values())
            if wrong:
                yield self._wrong[(kind, node)]

    def on(self, scaler: Scaler, state: PathState) -> bool:
        return scaler.enabled and state.facts.get(scaler.test, True)

    def note(
        self,
        kind: str,
        node: ast.Call,
        wrong: bool,
        state: PathState,
        scaler: str = "",
        optimizer: str = "",
        exact: bool = True,
    ) -> None:
        """One path's judgement of one place."""
        context = self.context if exact else ()
        groups = self._outcomes.setdefault((kind, id(node), context), {})
        counts = groups.setdefault(frozenset(state.remainders), [0, 0])
        counts[0 if wrong else 1] += 1
        if wrong:
            self._wrong.setdefault((kind, id(node)), Misuse(kind, node, scaler, optimizer))

    def event(self, node: ast.Call, state: PathState, frame: str) -> None:
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute):
            method, receiver = node.func.attr, node.func.value
            owner = self.value(receiver, state, frame)
            if isinstance(owner, Scaler):
                self.scaler_call(method, node, owner, state, frame)
                return
            if method == "backward" and not last.startswith("manual"):
                if dotted(receiver) in ("torch.autograd", "autograd") and node.args:
                    owner = self.value(node.args[0], state, frame)
                elif node.args and isinstance(
                    given := self.value(node.args[0], state, frame), Scaled
                ):
                    owner = given  # output.backward(scaler.scale(gradient))
                self.backward(node, owner, state)
                return
            if method == "zero_grad":
                self.zeroed(state)
                return
            if method == "step" and isinstance(owner, Optimizer):
                self.direct_step(node, owner, state, frame)
                return
            if is_gradient(receiver):
                if method in ("clamp_", "clip_"):
                    self.clip(node, state)
                elif method in _EDITS:
                    self.gradients_edited(state)
                return
        if last.startswith("_foreach_") and last.endswith("_"):
            self.gradients_edited(state)  # a list of tensors, most likely of gradients
            return
        if last in CLIPS and not self._is_wrapped_clip(node):
            if not self._by_the_scale(node, frame) and not _only_measures(node):
                self.clip(node, state)
            return
        self.unknown_call(node, state, frame)

    def _is_wrapped_clip(self, node: ast.Call) -> bool:
        """Of a trainer (accelerator.clip_grad_norm_), which unscales by itself."""
        full = self.source.full_name(node.func)
        return "." in full and not full.startswith(("torch.", "nn.", "utils.", "torch_utils."))

    def _by_the_scale(self, node: ast.Call, frame: str) -> bool:
        """Whether the threshold is computed from the scale."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        function = self.frames.get(frame)
        scope: ast.AST = function if function is not None else self.entry
        if scope not in self._assigned:
            found: dict[str, list[ast.expr]] = defaultdict(list)
            self._assigned[scope] = found
            for n in walk_here(scope):
                if isinstance(n, ast.Assign):
                    for target in n.targets:
                        found[dotted(target)].append(n.value)
        assigned = [value for name in names for value in self._assigned[scope].get(name, ())]
        return any(
            isinstance(n, ast.Attribute) and n.attr in ("get_scale", "_scale", "loss_scale")
            for part in (node, *assigned)
            for n in ast.walk(part)
        )

    def unknown_call(self, node: ast.Call, state: PathState, frame: str) -> None:
        """Code that is not here may do anything with a scaler that it is handed."""
        given = [*node.args, *(k.value for k in node.keywords)]
        handed = any(isinstance(self.value(a, state, frame), Scaler) for a in given)
        if handed or self._reaches_self(node, [dotted(a) for a in given]):
            self.forget(state)

    def forget(self, state: PathState) -> None:
        """Nothing is known any more about gradients and scalers."""
        state.stage.clear()
        for scaler in set(state.base) | set(state.pending) | set(state.recorded):
            state.base[scaler] = "unknown"
            state.recorded[scaler] = None
            state.pending[scaler] = "unknown"
        state.plain, state.unknown_backward, state.history = (), True, ()

    # ---- events

    def scaler_call(
        self, method: str, node: ast.Call, scaler: Scaler, state: PathState, frame: str
    ) -> None:
        assert isinstance(node.func, ast.Attribute)
        test = self.test_key(node.func.value, state, frame)
        if method in ("scale", "step", "unscale_", "update"):
            state.facts.setdefault(test, True)  # None has no such method
        if not self.on(scaler, state):
            if method == "step":
                state.plain = ()
            return
        s = scaler.name
        owner = dotted(node.func.value)
        if method == "scale" and node.args and isinstance(node.args[0], ast.Name):
            # What is to be scaled carries no scale yet, wherever it came from.
            key = self.identity(node.args[0].id, state, frame)
            if state.names.get(key) is None:
                state.names[key] = Plain()
        if s not in state.base:
            new = s.startswith("made at")
            state.base[s] = "ready" if new else "unknown"
            state.recorded[s] = False if new else None
            state.pending.setdefault(s, "none")
        target = node.args[0] if node.args else keyword(node, "optimizer")
        if method in ("step", "unscale_") and target is not None:
            found = self.value(target, state, frame)
            written = dotted(target)
            optimizer = found.name if isinstance(found, Optimizer) else ""
            if method == "step":
                self.scaler_step(node, s, optimizer, owner, written, state)
            else:
                self.unscale(node, s, optimizer, owner, written, state)
        elif method == "update":
            self.update(node, s, owner, state)

    def stage_of(self, s: str, optimizer: str, state: PathState) -> str:
        if not optimizer:
            return "unknown"
        return state.stage.get((s, optimizer), state.base.get(s, "unknown"))

    def unscale(
        self, node: ast.Call, s: str, optimizer: str, owner: str, written: str, state: PathState
    ) -> None:
        stage = self.stage_of(s, optimizer, state)
        first = state.unscaled.get((s, optimizer)) if stage == "unscaled" else None
        self.note("unscaled_twice", node, stage == "unscaled", state, owner, written)
        if first is not None and self._follows(node, self.roles.by_id[first]):
            self._certain.add(("unscaled_twice", id(node)))
        self.note("unscaled_after_step", node, stage == "stepped", state, owner, written)
        if optimizer:
            state.stage[(s, optimizer)] = "unscaled"
            state.unscaled[(s, optimizer)] = id(node)
        else:
            state.base[s] = "unknown"
            state.stage = {k: v for k, v in state.stage.items() if k[0] != s}
        state.recorded[s] = True
        if state.pending[s] == "scaled":
            state.pending[s] = "unscaled"

    def _follows(self, second: ast.Call, first: ast.Call) -> bool:
        """Whether the second call runs wherever the first one did: it stands further down in a
        block that holds the first, and nothing between them steps, updates or leaves the block."""
        statement = self.source.statement(second)
        if not isinstance(statement, ast.Expr) or second is first:
            return False
        block = self.source.block(statement)
        above = {id(n) for n in (first, *self.source.above(first))}
        until = block.index(statement)
        start = next((n for n, s in enumerate(block[:until]) if id(s) in above), None)
        if start is None:
            return False
        for between in (n for s in block[start:until] for n in ast.walk(s)):
            if getattr(between, "lineno", 0) < first.lineno:
                continue
            if isinstance(between, ast.Continue | ast.Break | ast.Return | ast.Raise):
                return False
            method = between.func if isinstance(between, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr in ("step", "update"):
                return False
        return True

    def scaler_step(
        self, node: ast.Call, s: str, optimizer: str, owner: str, written: str, state: PathState
    ) -> None:
        stage = self.stage_of(s, optimizer, state)
        self.note("stepped_twice", node, stage == "stepped", state, owner, written)
        only = len(self.roles.optimizers) == 1
        if state.plain:
            mixed = state.pending[s] in ("scaled", "unscaled")
            wrong = not state.unknown_backward and state.pending[s] != "unknown"
            for at in state.plain:
                call = self.roles.by_id[at]
                self.note(
                    "unscaled_backward", call, wrong and (only or not mixed), state, owner, written
                )
        if optimizer:
            state.stage[(s, optimizer)] = "stepped"
        else:
            state.base[s] = "unknown"
            state.stage = {k: v for k, v in state.stage.items() if k[0] != s}
        state.recorded[s] = True
        state.pending[s] = "none"
        state.plain, state.unknown_backward = (), False
        state.history = (*state.history, (s, written, id(node)))[-8:]

    def update(self, node: ast.Call, s: str, owner: str, state: PathState) -> None:
        if not node.args and not node.keywords:
            recorded, pending = state.recorded[s], state.pending[s]
            waiting = pending == "scaled" and recorded is not True
            self.note("update_without_step", node, recorded is False or waiting, state, owner, "")
        names = [h for h in state.history if h[0] == s]
        steps = [h[1] for h in names if h[1] != "update"]
        if len(set(filter(None, steps))) > 1 and steps:
            updates = [h for h in names if h[1] == "update"]
            between = updates and names.index(updates[0]) > 0
            if between and names[-1][1] != "update":
                first = self.roles.by_id[updates[0][2]]
                before = {h[1] for h in names[: names.index(updates[0])]}
                wrong = bool({names[-1][1]} - before)
                self.note("update_between", first, wrong, state, owner, names[-1][1], False)
        state.history = (*state.history, (s, "update", id(node)))[-8:]
        state.stage = {k: v for k, v in state.stage.items() if k[0] != s}
        state.base[s] = "ready"
        state.recorded[s] = False
        if state.pending[s] == "scaled":
            state.pending[s] = "unknown"

    def backward(self, node: ast.Call, value: Value, state: PathState) -> None:
        if isinstance(value, Scaled):
            s = value.scaler.name
            written = _scaler_of(node)
            state.base.setdefault(s, "ready" if s.startswith("made at") else "unknown")
            state.recorded.setdefault(s, False if s.startswith("made at") else None)
            single = len(self.roles.optimizers_of(written)) <= 1 and len(self.roles.optimizers) == 1
            mixed = state.pending.get(s) == "unscaled" and single
            self.note("scaled_onto_unscaled", node, mixed, state, written, "")
            state.pending[s] = "unknown" if self.roles.has_gradient_hooks else "scaled"
        elif isinstance(value, Plain):
            if id(node) not in state.plain:
                state.plain = (*state.plain, id(node))[-4:]
        else:
            state.unknown_backward = True

    def clip(self, node: ast.Call, state: PathState) -> None:
        for pending in state.pending.values():
            if pending == "none":
                continue
            written = next(iter(sorted(self.roles.scalers)), "")
            optimizers = sorted(self.roles.optimizers)
            self.note(
                "clip_before_unscale",
                node,
                pending == "scaled",
                state,
                written,
                optimizers[0] if len(optimizers) == 1 else "",
            )

    def direct_step(
        self, node: ast.Call, optimizer: Optimizer, state: PathState, frame: str
    ) -> None:
        written = dotted(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        for s, pending in state.pending.items():
            calm = not state.plain and not state.unknown_backward
            stepped = state.stage.get((s, optimizer.name)) == "stepped"
            if pending == "scaled":
                self.note("optimizer_stepped", node, calm, state, "", written)
            elif stepped and pending == "none":
                self.note("optimizer_stepped_too", node, calm, state, "", written)
            elif pending != "none" or state.plain or state.unknown_backward:
                self.note("optimizer_stepped", node, False, state, "", written)
                self.note("optimizer_stepped_too", node, False, state, "", written)
            state.pending[s] = "none"
        state.plain, state.unknown_backward = (), False

    def zeroed(self, state: PathState) -> None:
        for s, pending in state.pending.items():
            if pending != "unknown":
                state.pending[s] = "none"
        state.plain, state.unknown_backward = (), False

    def gradients_edited(self, state: PathState) -> None:
        for s, pending in state.pending.items():
            if pending != "none":
                state.pending[s] = "unknown"


def _only_measures(node: ast.Call) -> bool:
    """A clip at a limit that no gradient reaches, for the norm that it returns."""
    limit = argument(node, 1, "max_norm") or keyword(node, "clip_value")
    value = number(limit)
    return (value is not None and value >= 1e6) or dotted(limit) in (
        "math.inf",
        "torch.inf",
        "np.inf",
        "numpy.inf",
        "inf",
    )


def _scaler_of(node: ast.Call) -> str:
    """The scaler of ``scaler.scale(loss).backward()``, as written."""
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "scale":
            return dotted(n.func.value)
    return ""
