"""Whether a value in a script follows from the devices that are there, read off its source.

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    with torch.autocast(device.type): ...      # follows: with CUDA this would be another device
    with torch.autocast("cpu"): ...            # does not: the script names the CPU itself

Names are followed through assignments, branches, returns, arguments and command-line defaults of
the files that were looked into; a name counts wherever it stands. Nothing is run.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType

# What asks for devices, of torch.cuda and torch.accelerator.
_ASKED = frozenset({"is_available", "device_count", "current_accelerator"})
_OWNERS = frozenset({"cuda", "accelerator"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class DeviceChoice:
    """Names of the user's files whose values follow from the devices that are there."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module | None] = {}
        self._calls: dict[tuple[CodeType, int], ast.Call | None] = {}
        self._answers: set[str] = set()  # names that hold what was answered: use_cuda
        self._devices: set[str] = set()  # names that hold what was chosen by it: device, model
        self.scales = False  # a GradScaler is made somewhere in these files

    def look_into(self, file: str) -> None:
        """Follow the names of one more file; one that cannot be read or parsed has none."""
        if file in self._trees:
            return
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError, RecursionError):
            self._trees[file] = None
            return
        self._trees[file] = tree
        before = -1
        while before != len(self._answers) + len(self._devices):
            before = len(self._answers) + len(self._devices)
            for known in self._trees.values():
                if known is not None:
                    self._follow(known)
        self.scales |= any(
            isinstance(node, ast.Call) and _name(node.func) == "GradScaler"
            for node in ast.walk(tree)
        )

    def call_at(self, frame: FrameType) -> ast.Call | None:
        """The call that ``frame`` is in; None where its source cannot be read."""
        self.look_into(frame.f_code.co_filename)
        tree = self._trees[frame.f_code.co_filename]
        if tree is None:
            return None
        instruction = (frame.f_code, frame.f_lasti)
        if instruction not in self._calls:
            self._calls[instruction] = self._find(tree, frame)
        return self._calls[instruction]

    @staticmethod
    def _find(tree: ast.Module, frame: FrameType) -> ast.Call | None:
        place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                at = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                if at == place:
                    return node
        return None

    def chooses(self, value: ast.AST) -> bool:
        """Whether an expression's device was chosen by the devices that are there."""
        for node in ast.walk(value):
            if _name(node) in self._devices or _asks(node) == "current_accelerator":
                return True
            match node:
                case ast.IfExp(test=test) if self._answers_in(test) and _says_device(node):
                    return True
                case ast.BoolOp() if self._answers_in(node) and _says_device(node):
                    return True
                case ast.Subscript(slice=index) if self._answers_in(index) and _says_device(node):
                    return True
        return False

    def _answers_in(self, value: ast.AST) -> bool:
        return any(_asks(node) or _name(node) in self._answers for node in ast.walk(value))

    def _follow(self, tree: ast.Module) -> None:
        """One pass over a file: names that follow from names that are known to."""
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets, value=value):
                    self._assign(value, *targets)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(value, target)
                case ast.NamedExpr(target=target, value=value):
                    self._assign(value, target)
                case ast.If(test=test) if self._answers_in(test):
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Assign) and _says_device(inner.value):
                            self._add(self._devices, *inner.targets)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._returns(node)
                case ast.Call():
                    self._handed_on(node, tree)

    def _assign(self, value: ast.expr, *targets: ast.expr) -> None:
        if self.chooses(value):
            self._add(self._devices, *targets)
        elif self._answers_in(value):
            self._add(self._answers, *targets)

    def _returns(self, function: _Function) -> None:
        """A function whose result follows is one more such name."""
        branches = [
            node for node in ast.walk(function)
            if isinstance(node, ast.If) and self._answers_in(node.test)
        ]  # fmt: skip
        by_branch = any(_says_device(v) for branch in branches for v in _returned(branch))
        if by_branch or any(self.chooses(value) for value in _returned(function)):
            self._devices.add(function.name)
        elif any(self._answers_in(value) for value in _returned(function)):
            self._answers.add(function.name)

    def _handed_on(self, call: ast.Call, tree: ast.Module) -> None:
        """Arguments that follow: the parameters that take them, and options of a command line."""
        called = _name(call.func)
        for known, follows in ((self._devices, self.chooses), (self._answers, self._answers_in)):
            given = [n for n, value in enumerate(call.args) if follows(value)]
            by_name = {k.arg for k in call.keywords if k.arg and follows(k.value)}
            if called == "add_argument" and by_name:
                texts = (v.value for v in call.args if isinstance(v, ast.Constant))
                known |= {t.lstrip("-").replace("-", "_") for t in texts if isinstance(t, str)}
            elif given or by_name:
                for function in _functions(tree, called):
                    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
                    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
                    known |= {names[n] for n in given if n < len(names)}
                    known |= by_name & {*names, *(a.arg for a in function.args.kwonlyargs)}

    def _add(self, known: set[str], *targets: ast.expr) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self._add(known, *target.elts)
            elif name := _name(target):
                known.add(name)


def device_argument(call: ast.Call) -> ast.expr:
    """The expression that gives a call its device: the argument, or, where that was bound before
    (``functools.partial``), what is called."""
    named = [k.value for k in call.keywords if k.arg == "device_type"]
    return named[0] if named else call.args[0] if call.args else call.func


def _asks(node: ast.AST) -> str:
    """ "is_available" of ``torch.cuda.is_available()``; "" of what asks for no device."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return name if name in _ASKED and _name(owner) in _OWNERS else ""
    return ""


def _name(node: ast.AST) -> str:
    """``device`` of ``device``, ``self.device`` and ``args.device``; "" of anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _functions(tree: ast.Module, name: str) -> Iterator[_Function]:
    """The functions of that name, and the constructor of a class of that name."""
    for node in ast.walk(tree):
        if isinstance(node, _Function) and node.name == name:
            yield node
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield from (m for m in node.body if isinstance(m, _Function) and m.name == "__init__")


def _returned(node: ast.AST) -> Iterator[ast.expr]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return) and inner.value is not None:
            yield inner.value


def _says_device(value: ast.AST) -> bool:
    """Whether an expression holds the name of a device as a text."""
    texts = (n.value for n in ast.walk(value) if isinstance(n, ast.Constant))
    return any(isinstance(t, str) and t.partition(":")[0] in ("cuda", "cpu") for t in texts)
