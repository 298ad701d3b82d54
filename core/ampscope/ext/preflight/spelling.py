"""Deprecated spellings of autocast and GradScaler, each with its repair.

``torch.cuda.amp`` and ``torch.cpu.amp`` are deprecated since PyTorch 2.4 in favour of
``torch.amp`` with the device as first argument. A file that chooses between both by a try or a
test keeps its choice: nothing is reported there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampscope.ext.preflight.finding import Edit, SourceFinding
from ampscope.ext.preflight.source import SourceFile, dotted

_DEVICES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
_MOVED = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")


def check(source: SourceFile) -> Iterator[SourceFinding]:
    """PRE001: deprecated imports (with their uses) and dotted uses, in no order."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module in _DEVICES and not node.level:
            if not _is_chosen(source, node):
                yield from _import(source, node, _DEVICES[node.module])
        elif isinstance(node, ast.Attribute) and node.attr in _MOVED:
            module = source.full_name(node.value)
            written = dotted(node.value)
            if module in _DEVICES and not _is_chosen(source, node):
                device = _DEVICES[module]
                new = f"torch.amp.{node.attr}"
                whole = written.startswith("torch.")
                edits = _use(source, node, new, device) if whole else None
                yield _finding(source, node, module, node.attr, edits or [])


def _import(source: SourceFile, node: ast.ImportFrom, device: str) -> Iterator[SourceFinding]:
    names = [alias.name for alias in node.names]
    moved = [name for name in names if name in _MOVED]
    if not moved:
        return
    edits: list[Edit] = []
    safe = len(moved) == len(names) and source.alone_on_its_lines(node)
    local = {alias.asname or alias.name: alias.name for alias in node.names}
    for use in source.nodes:
        if isinstance(use, ast.Name) and use.id in local and local[use.id] in _MOVED:
            found = _use(source, use, use.id, device)
            if found is None or isinstance(use.ctx, ast.Store):
                safe = False
                break
            edits += found
    others = [
        n
        for n in source.nodes
        if isinstance(n, ast.ImportFrom | ast.Import) and n is not node
        for a in n.names
        if (a.asname or a.name) in local
    ]
    if safe and not others:
        text = source.segment(node)
        at = source.start(node) + text.index(f"torch.{device}.amp")
        edits.append(Edit(at, at + len(f"torch.{device}.amp"), "torch.amp"))
    else:
        edits = []
    yield _finding(source, node, f"torch.{device}.amp", moved[0], edits)


def _finding(
    source: SourceFile, node: ast.AST, module: str, name: str, edits: list[Edit]
) -> SourceFinding:
    given = "device_type=" if name.startswith("custom") else ""
    new = f'torch.amp.{name}({given}"{_DEVICES[module]}")'
    message = f"{module}.{name} is deprecated; write {new}."
    return SourceFinding.at(source, node, "deprecated_spelling", message, edits)


def _use(source: SourceFile, node: ast.AST, new: str, device: str) -> list[Edit] | None:
    """Edits of one use; None where its arguments cannot be carried over for certain."""
    renamed = Edit(source.start(node), source.end(node), new)
    same = source.segment(node) == new
    up = source.parent(node)
    if not (isinstance(up, ast.Call) and up.func is node):
        return None
    name = new.rpartition(".")[2] if "." in new else source.imports.get(new, new).rpartition(".")[2]
    if any(isinstance(a, ast.Starred) for a in up.args) or any(k.arg is None for k in up.keywords):
        return None
    edits = [] if same else [renamed]
    opening = source.text.index("(", source.end(node)) + 1
    rest = bool(up.args or up.keywords)
    if name.startswith("custom"):
        if up.args:
            return None
        edits.append(Edit(opening, opening, f'device_type="{device}"' + (", " if rest else "")))
    elif name == "autocast" and up.args:
        names = ("enabled", "dtype", "cache_enabled")
        if len(up.args) > len(names):
            return None
        edits.append(Edit(opening, opening, f'"{device}", '))
        for argument, keyword in zip(up.args, names, strict=False):
            at = source.start(argument)
            edits.append(Edit(at, at, f"{keyword}="))
    else:
        edits.append(Edit(opening, opening, f'"{device}"' + (", " if rest else "")))
    return edits


def _is_chosen(source: SourceFile, node: ast.AST) -> bool:
    """Whether it stands where the file decides by version or availability."""
    return any(
        isinstance(up, ast.Try | ast.ExceptHandler)
        or (isinstance(up, ast.If) and _asks_for_version(up.test))
        for up in source.above(node)
    )


def _asks_for_version(test: ast.expr) -> bool:
    words = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(test) if isinstance(n, ast.Name)
    }
    return any("version" in w.lower() or w == "hasattr" for w in words)
