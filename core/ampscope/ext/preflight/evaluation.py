"""Models that are trained inside autocast and evaluated outside: their metrics are of another
arithmetic than the training."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampscope.ext.preflight.finding import SourceFinding
from ampscope.ext.preflight.script import WRAPPERS, Script, call_chain
from ampscope.ext.preflight.source import dotted, method_of, receiver_of

_RENAMING = {*WRAPPERS, "compile"}  # a model by another name


def check(script: Script) -> Iterator[SourceFinding]:
    """PRE004: in each function that evaluates outside autocast, the first call of a model that is
    trained inside."""
    inside = [call for call in script.roles.calls if _runs_in_autocast(script, call)]
    trained, classes = _trained(script, inside)
    called = {dotted(call.func).rpartition(".")[2] for call in script.roles.calls}
    called_inside = {dotted(call.func).rpartition(".")[2] for call in inside}
    for function in script.source.nodes:
        if not isinstance(function, ast.FunctionDef) or function.name in called_inside:
            continue
        if function.name not in called and script.source.parent(function) not in classes:
            continue
        nodes = list(script.scope(function))
        if _may_be_precise(script, function, nodes):
            continue
        evaluated = _evaluated(script, nodes, trained)
        for n in nodes:
            if (
                isinstance(n, ast.Call)
                and (name := dotted(n.func)) in evaluated
                and any(isinstance(up, ast.For | ast.While) for up in script.source.above(n))
            ):
                yield SourceFinding.at(
                    script.source, n, "evaluation_outside_autocast",
                    f"{evaluated[name]} is trained inside autocast and evaluated here outside.",
                )  # fmt: skip
                break


def _runs_in_autocast(script: Script, call: ast.Call) -> bool:
    """Whether a call is written in a region that is on, or that some value of a name makes one."""
    region = script.region_of(call)
    if region is not None:
        return region.on
    for up in script.source.above(call):
        if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        for item in up.items if isinstance(up, ast.With | ast.AsyncWith) else ():
            held = item.context_expr
            if isinstance(held, ast.Call) and script.may_be_autocast(held.func):
                return True
    return False


def _trained(script: Script, inside: list[ast.Call]) -> tuple[set[str], set[ast.AST]]:
    """What is called inside autocast in functions that run backward, also by the name that a
    wrapper was given; and the classes that call it anywhere."""
    source = script.source
    models = {
        dotted(call.func)
        for call in inside
        if any(method_of(n) == "backward" for n in script.scope(source.function(call)))
    }
    classes: set[ast.AST] = {
        up
        for call in script.roles.calls
        if dotted(call.func) in models
        for up in source.above(call)
        if isinstance(up, ast.ClassDef)
    }
    renamed = [pair for node in source.nodes for pair in _renamed(node, _RENAMING)]
    return models | {inner for name, inner in renamed if name in models}, classes


def _renamed(node: ast.AST, by: set[str]) -> Iterator[tuple[str, str]]:
    """``b, a`` of ``b = Wrapper(a, …)`` and of ``b = copy.deepcopy(a).eval()``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    calls = list(call_chain(node.value))
    inner = calls[-1] if calls else None
    if inner is not None and inner.args and dotted(inner.func).rpartition(".")[2] in by:
        yield dotted(node.targets[0]), dotted(inner.args[0])


def _may_be_precise(script: Script, function: ast.FunctionDef, nodes: list[ast.AST]) -> bool:
    """Whether a function trains, casts, or has a context that is or may be autocast."""
    if "autocast" in script.source.segment(function):
        return True
    for n in nodes:
        if isinstance(n, ast.Call) and script.region(n) is not None:
            return True
        if (
            isinstance(n, ast.Attribute)
            and n.attr in ("backward", "float")
            and not isinstance(n.value, ast.Compare)  # (a == b).float() casts no precision
        ):
            return True
        for item in n.items if isinstance(n, ast.With | ast.AsyncWith) else ():
            context = item.context_expr
            held = context.func if isinstance(context, ast.Call) else context
            root = dotted(held).partition(".")[0]
            if root in script.parameters | {"self"} or script.may_be_autocast(held):
                return True
    return False


def _evaluated(script: Script, nodes: list[ast.AST], trained: set[str]) -> dict[str, str]:
    """Names on which a function calls ``eval``, each with the trained model that it holds."""
    evals = {receiver_of(n) for n in nodes if method_of(n) == "eval"}
    for name, element in {pair for n in nodes for pair in _elements(script, n)}:
        own = [e for e in evals if e == name or e.startswith(f"{name}.")]
        evals |= {element + e[len(name) :] for e in own}
    evaluated = {name: name for name in trained & evals}
    if "" in evals:  # copy.deepcopy(model).eval()
        copied = [pair for n in nodes for pair in _renamed(n, {"deepcopy"})]
        evaluated |= {name: inner for name, inner in copied if inner in trained}
    return evaluated


def _elements(script: Script, node: ast.AST) -> Iterator[tuple[str, str]]:
    """``entry, self.a`` and ``entry, self.b`` of ``for entry in (self.a, self.b)``, also of a list
    by a name that the file assigns once."""
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
        return
    values = script.assigned.get(dotted(node.iter), [])
    row = values[0] if len(values) == 1 else node.iter
    for element in row.elts if isinstance(row, ast.Tuple | ast.List) else ():
        if dotted(element):
            yield node.target.id, dotted(element)
