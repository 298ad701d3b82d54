"""A training script as its source describes it: autocast regions, dtypes, what each name holds.

A dtype counts only where the file writes it. One that comes from an argument, a configuration or
another file is unknown, and unknown reports nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from ampscope.ext.preflight.roles import Function, Roles
from ampscope.ext.preflight.source import SourceFile, argument, children, dotted, keyword

Dtype: TypeAlias = Literal["fp16", "bf16", "fp32", ""]  # "" is unknown

_DTYPES: dict[str, Dtype] = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float": "fp32",
}  # fmt: skip
_AUTOCASTS = {
    "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast",
    "torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast", "torch.cpu.amp.autocast",
}  # fmt: skip
_LIBRARIES = (  # they scale the loss, or manage precision, out of sight
    "accelerate", "apex", "colossalai", "deepspeed", "fastai", "ignite", "lightning", "mmcv",
    "mmengine", "pytorch_lightning", "lightning_fabric", "torch_xla", "horovod", "fairscale",
    "composer", "catalyst", "bitsandbytes", "torchao", "unsloth", "peft",
)  # fmt: skip
WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")  # ShardedGradScaler takes fp16


@dataclass(frozen=True, slots=True)
class AutocastRegion:
    """One use of autocast as a context or decorator."""

    node: ast.Call
    dtype: Dtype
    on: bool  # False where enabled=False is written


class Script:
    """One file: its source, the roles of its names, and the precision that it writes."""

    def __init__(self, source: SourceFile, roles: Roles) -> None:
        self.source, self.roles = source, roles

    # ---- regions of autocast

    @cached_property
    def regions(self) -> list[AutocastRegion]:
        return [r for c in self.roles.calls if (r := self.region(c)) is not None]

    def region(self, node: ast.AST) -> AutocastRegion | None:
        """An autocast call as a region, also by a name that is assigned once."""
        if isinstance(node, ast.Name):
            values = self.assigned.get(node.id, [])
            found = [self.region(v) for v in values if isinstance(v, ast.Call)]
            return found[0] if len(values) == 1 and found else None
        if not isinstance(node, ast.Call):
            return None
        full = self.source.full_name(node.func)
        if full not in _AUTOCASTS:
            return None
        old = ".amp.autocast" in full and full.split(".")[1] in ("cuda", "cpu")
        given = argument(node, 1, "dtype")
        switch = argument(node, 0, "enabled") if old else argument(node, 2, "enabled")
        device: object = full.split(".")[1] if old else None
        if not old:
            first = argument(node, 0, "device_type")
            device = first.value if isinstance(first, ast.Constant) else None
        dtype: Dtype = self.dtype(given)
        if given is None and "set_autocast" not in self.source.text:
            dtype = {"cuda": "fp16", "cpu": "bf16"}.get(str(device), "")  # type: ignore[assignment]
        off = isinstance(switch, ast.Constant) and switch.value is False
        return AutocastRegion(node, dtype, not off)

    def region_of(self, node: ast.AST) -> AutocastRegion | None:
        """The innermost region that a node is written in, within its function."""
        at = node
        for up in self.source.above(node):
            contexts: list[ast.expr] = []
            if isinstance(up, ast.With | ast.AsyncWith) and at in up.body:
                contexts = [item.context_expr for item in reversed(up.items)]
            elif isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
                contexts = up.decorator_list
            for context in contexts:
                if (found := self.region(context)) is not None:
                    return found
            if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
                return None
            at = up
        return None

    def may_be_autocast(self, node: ast.expr | None, depth: int = 4) -> bool:
        """Whether a class or function is autocast's, or a name that somewhere in the file is given
        it: assigned, or handed to a parameter of that name."""
        if node is None or not depth:
            return False
        if isinstance(node, ast.IfExp):
            return any(self.may_be_autocast(part, depth - 1) for part in (node.body, node.orelse))
        if isinstance(node, ast.Call):  # functools.partial(autocast, …)
            is_partial = self.source.full_name(node.func) == "functools.partial" and node.args
            return bool(is_partial) and self.may_be_autocast(node.args[0], depth - 1)
        if self.source.full_name(node) in _AUTOCASTS:
            return True
        if not isinstance(node, ast.Name):
            return False
        handed = [v for c in self.roles.calls if (v := keyword(c, node.id)) is not None]
        given = [*self.assigned.get(node.id, []), *handed]
        return any(self.may_be_autocast(value, depth - 1) for value in given)

    # ---- what names hold

    def dtype(self, node: ast.expr | None, depth: int = 0) -> Dtype:
        """The dtype that an expression names, through names that are assigned once."""
        if node is None or depth > 4:
            return ""
        full = self.source.full_name(node)
        if full in _DTYPES:
            return _DTYPES[full]
        if isinstance(node, ast.IfExp):
            one = self.dtype(node.body, depth + 1)
            return one if one == self.dtype(node.orelse, depth + 1) else ""
        if isinstance(node, ast.Name):
            values = self.assigned.get(node.id, [])
            if len(values) == 1 and node.id not in self.parameters:
                return self.dtype(values[0], depth + 1)
        return ""

    @cached_property
    def parameters(self) -> set[str]:
        """Names of the parameters of the file's functions."""
        return {n.arg for n in self.source.nodes if isinstance(n, ast.arg)}

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr | None]]:
        """What each dotted name is assigned in the file; None where it cannot be told."""
        found: dict[str, list[ast.expr | None]] = defaultdict(list)
        for node in self.source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if dotted(target):
                        found[dotted(target)].append(node.value)
                    elif isinstance(target, ast.Tuple | ast.List):
                        parts: list[ast.expr | None] = [None] * len(target.elts)
                        if isinstance(node.value, ast.Tuple | ast.List):
                            values = node.value.elts
                            parts = list(values) if len(values) == len(parts) else parts
                        for element, part in zip(target.elts, parts, strict=True):
                            found[dotted(element)].append(part)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                value = None if isinstance(node, ast.AugAssign) else node.value
                found[dotted(node.target)].append(value)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                for n in ast.walk(node.target):
                    found[dotted(n)].append(None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                found[dotted(node.optional_vars)].append(None)
        return found

    def class_of(self, name: str) -> str:
        """The class that a dotted name is an instance of, by its assignments; "" if unknown."""
        made = {
            self.source.full_name(maker_of(v).func).rpartition(".")[2] if v is not None else ""
            for v in self.assigned.get(name, [])
            if not (isinstance(v, ast.Call) and dotted(v.func).startswith(f"{name}."))
        }
        return made.pop() if len(made) == 1 else ""

    def classes_within(self, name: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        """Classes of this file that an instance of ``name`` is built from, itself included."""
        if name not in self.roles.classes or name in seen:
            return seen
        seen |= {name}
        for n in ast.walk(self.roles.classes[name]):
            if isinstance(n, ast.Call):
                seen = self.classes_within(dotted(n.func), seen)
        return seen

    @cached_property
    def models(self) -> set[str]:
        """Names whose parameters are optimized, also by a function that they are handed to."""
        found = {owner for owner, _ in self.roles.by_method["parameters"]} - {""}
        handed = {
            dotted(value)
            for call in self.roles.calls
            for name, value in self.handed(call)
            if name in found
        }
        return found | (handed - {""})

    def handed(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Parameter and argument of a call of one of the file's functions; nothing of others."""
        function = self.roles.functions.get(dotted(call.func))
        if function is None:
            return
        own = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        yield from zip(own, call.args, strict=False)
        yield from ((k.arg, k.value) for k in call.keywords if k.arg)

    @cached_property
    def uses_a_library(self) -> bool:
        """Whether precision may be managed by code that is not here."""
        return any(n.lstrip(".").split(".")[0] in _LIBRARIES for n in self.source.imports.values())

    # ---- where a node stands

    def scope(self, function: Function | None) -> Iterator[ast.AST]:
        """The nodes of a function, or of the top level, without what is defined within it."""
        waiting = list(children(function if function is not None else self.source.tree))
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            yield node
            waiting += children(node)

    def branches(self, node: ast.AST) -> list[tuple[ast.AST, str]]:
        """The branches of its function that a node stands in, outermost first."""
        found: list[tuple[ast.AST, str]] = []
        at = node
        for up in self.source.above(node):
            if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
                break
            if isinstance(up, ast.If | ast.Try | ast.Match | ast.IfExp):
                body = [up.body] if isinstance(up, ast.IfExp) else getattr(up, "body", [])
                found.append((up, "body" if at in body else "else"))
            at = up
        return found[::-1]


def call_chain(node: ast.expr) -> Iterator[ast.Call]:
    """The calls of ``Net(3).half().cuda()``, the last one first."""
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func


def maker_of(node: ast.expr) -> ast.Call:
    """``Net(3)`` of ``Net(3).to(device)``; a call of nothing where it is no call."""
    while isinstance(node, ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if not isinstance(inner, ast.Call):
            return node
        node = inner
    return ast.Call(ast.Constant(None), [], [])
