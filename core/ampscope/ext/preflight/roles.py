"""Which names of a file are GradScalers and optimizers, by how they are made and used."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property
from typing import TypeAlias

from ampscope.ext.preflight.source import SourceFile, dotted, keyword

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
OPTIMIZERS = frozenset(
    {
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
        *("Rprop", "ASGD", "LBFGS", "SparseAdam", "Adafactor", "Muon", "Lion", "LAMB", "Lamb"),
        *("FusedAdam", "FusedSGD", "FusedLAMB"),
    }
)


class Roles:
    """Which names of a file are scalers and optimizers, by how they are made and used."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.calls = [n for n in source.nodes if isinstance(n, ast.Call)]
        self.by_method: dict[str, list[tuple[str, ast.Call]]] = defaultdict(list)
        for call in self.calls:
            if isinstance(call.func, ast.Attribute):
                self.by_method[call.func.attr].append((dotted(call.func.value), call))

    @cached_property
    def by_id(self) -> dict[int, ast.Call]:
        return {id(call): call for call in self.calls}

    @cached_property
    def has_gradient_hooks(self) -> bool:
        """Whether hooks of the file may divide gradients by the scale."""
        hooks = ("register_hook", "register_post_accumulate_grad_hook")
        return any(self.by_method[name] for name in hooks)

    def is_scaler_maker(self, call: ast.Call) -> bool:
        """GradScaler of torch or of a library that follows it, not a class of this file."""
        name = dotted(call.func).rpartition(".")[2]
        if name in self.classes:  # unless it stands in for torch's where that is missing
            return self.source.imports.get(name, "").startswith("torch.")
        return name in ("GradScaler", "ShardedGradScaler")

    def is_optimizer_maker(self, call: ast.Call) -> bool:
        name = dotted(call.func)
        last = name.rpartition(".")[2]
        return last in OPTIMIZERS and last not in self.classes

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {n.name: n for n in self.source.nodes if isinstance(n, ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions at the top level."""
        return {
            n.name: n
            for n in self.source.tree.body
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    @cached_property
    def methods(self) -> dict[str, dict[str, Function]]:
        """Methods by class, those of base classes in this file included."""

        def own(owner: ast.ClassDef, seen: tuple[str, ...] = ()) -> dict[str, Function]:
            found: dict[str, Function] = {}
            for base in owner.bases:
                name = dotted(base)
                if name in self.classes and name not in seen:
                    found |= own(self.classes[name], (*seen, owner.name))
            for n in owner.body:
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[n.name] = n
            return found

        return {name: own(owner) for name, owner in self.classes.items()}

    @cached_property
    def not_scalers(self) -> set[str]:
        """Names that hold an object of another class."""
        found = set()
        for node in self.source.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                last = dotted(node.value.func).rpartition(".")[2]
                if last[:1].isupper() and not self.is_scaler_maker(node.value):
                    found |= {dotted(t) for t in node.targets}
        return found - self.made_scalers

    @cached_property
    def made_scalers(self) -> set[str]:
        found = set()
        for call in self.calls:
            if self.is_scaler_maker(call):
                statement = self.source.statement(call)
                if isinstance(statement, ast.Assign):
                    found |= {dotted(t) for t in statement.targets}
                elif isinstance(statement, ast.AnnAssign):
                    found.add(dotted(statement.target))
        return found - {""}

    def kept_as(self, name: str) -> set[str]:
        """The names by which the file calls the methods of a scaler that it makes under ``name``:
        that one, and ``self.scaler`` where it is stored as such. Empty where anything else is done
        with it: then code that is not here may update it, or scale a loss."""
        found = {name}
        for node in self.source.nodes:
            if isinstance(node, ast.Assign) and dotted(node.value) == name:
                found |= {d for t in node.targets if (d := dotted(t)).startswith("self.")}
        return found if all(self._only_called(one, found) for one in found) else set()

    def _only_called(self, name: str, known: set[str]) -> bool:
        """Whether it is only made, tested, called methods of and stored as one of ``known``, and
        by no other owner: ``trainer.scaler`` may be ``self.scaler``."""
        last = name.removeprefix("self")
        for node in self.source.nodes:
            if isinstance(node, ast.arg) and node.arg == name:
                return False  # a caller may have it, too
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            written = dotted(node)
            if last != name and written != name and written.endswith(last):
                return False
            if written == name and not self._is_kept(node, known):
                return False
        return True

    def _is_kept(self, node: ast.Name | ast.Attribute, known: set[str]) -> bool:
        up = self.source.parent(node)
        if isinstance(node.ctx, ast.Store):
            value = getattr(self.source.statement(node), "value", None)
            parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            return all(
                (isinstance(part, ast.Constant) and part.value is None)
                or (isinstance(part, ast.Call) and self.is_scaler_maker(part))
                or (part is not None and dotted(part) in known)
                for part in parts
            )
        if isinstance(up, ast.Assign):
            return {dotted(t) for t in up.targets} <= known
        if isinstance(up, ast.Attribute):
            call = self.source.parent(up)
            return isinstance(call, ast.Call) and call.func is up
        test: ast.AST = node
        while isinstance(up, ast.Compare | ast.UnaryOp | ast.BoolOp):
            test, up = up, self.source.parent(up)
        return isinstance(up, ast.If | ast.While | ast.IfExp | ast.Assert) and up.test is test

    @cached_property
    def scalers(self) -> set[str]:
        """Names used as a GradScaler is: made as one; or unscale_ is called on it, or its scaled
        loss is sent backward, or it is both stepped with an optimizer and updated."""
        used = {owner for owner, _ in self.by_method["unscale_"]}
        for _, call in self.by_method["backward"]:
            assert isinstance(call.func, ast.Attribute)
            inner = call.func.value
            if (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr == "scale"
                and len(inner.args) == 1
            ):
                used.add(dotted(inner.func.value))
        stepped = {owner for owner, call in self.by_method["step"] if call.args}
        updated = {owner for owner, _ in self.by_method["update"]}
        scaled = {owner for owner, _ in self.by_method["scale"]}
        used |= stepped & (updated | scaled)
        return (used | self.made_scalers) - self.not_scalers - {""}

    @cached_property
    def optimizers(self) -> set[str]:
        """Names made by a known optimizer class, or handed to a scaler, or stepped and zeroed, or
        stepped and asked for their ``param_groups``."""
        found = set()
        for call in self.calls:
            if self.is_optimizer_maker(call):
                statement = self.source.statement(call)
                if isinstance(statement, ast.Assign) and statement.value is call:
                    found |= {dotted(t) for t in statement.targets}
        for method in ("step", "unscale_"):
            for owner, call in self.by_method[method]:
                if owner in self.scalers and call.args:
                    found.add(dotted(call.args[0]))
        zeroed = {owner for owner, _ in self.by_method["zero_grad"]}
        grouped = {
            dotted(n.value)
            for n in self.source.nodes
            if isinstance(n, ast.Attribute) and n.attr == "param_groups"
        }
        stepped = {owner for owner, _ in self.by_method["step"]}
        return (found | ((zeroed | grouped) & stepped)) - {""} - self.scalers

    def optimizers_of(self, scaler: str) -> set[str]:
        """What the file steps or unscales with a scaler of this name."""
        return {
            dotted(call.args[0])
            for method in ("step", "unscale_")
            for owner, call in self.by_method[method]
            if owner == scaler and call.args
        }


def is_off(maker: ast.Call) -> bool:
    """Whether ``GradScaler(enabled=False)`` is written."""
    switch = keyword(maker, "enabled")
    return isinstance(switch, ast.Constant) and switch.value is False
