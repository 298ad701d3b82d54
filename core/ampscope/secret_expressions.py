"""Which texts of a parsed program are secrets: those whose target, parameter, keyword, annotation
or neighbour has the name of one (:mod:`ampscope.secret_names`). Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ampscope.secret_names import NAME, is_bare, is_called_secret, is_secret, is_token_id

_READS = {"get", "getenv", "pop", "setdefault", "getattr", "environ_get"}  # (name, default)
_OPENS = {"open", "Path", "input", "getpass", "prompt", "ask"}  # their texts say where, or ask
_CONVERTS = _READS | {
    "str", "bytes", "b64decode", "fromhex", "unhexlify", "SecretStr", "field", "Field",
}  # fmt: skip
_ENTERS = {"login", "relogin", "authenticate"}
_DEFAULTS = {"default", "value", "const", "fallback", "initial"}
_CALLS = {
    "name",
    "key",
    "dest",
    "option",
    "field",
    "envvar",
    "header",
}  # say what a thing is called


def secret_expressions(tree: ast.AST, values: bool) -> Iterator[ast.expr]:
    """The constants and f-strings in a program that are secrets by a name beside them. ``values``:
    of an object that is written out, numbers and names behind the name of a secret as well."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _assigned(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value) if _kinds(node.annotation):
                names = [*_kinds(node.annotation), *_names(node.target)]
                yield from _told(names, value, deep=True)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
                | ast.AugAssign(target=target, value=value)
            ):
                yield from _assigned(target, value)
            case ast.For(target=target, iter=given) | ast.comprehension(target=target, iter=given):
                items = given.elts if isinstance(given, ast.Tuple | ast.List) else []
                of_each = [(target, given)]
                if isinstance(target, ast.Tuple):
                    of_each = [
                        pair for item in items if isinstance(item, ast.Tuple | ast.List)
                        for pair in zip(target.elts, item.elts, strict=False)
                    ]  # fmt: skip
                for one, value in of_each:
                    yield from _told(_sure_names(one), value)
            case ast.BoolOp(op=ast.Or(), values=parts):
                names = [name for part in parts for name in _read(part)]
                for part in parts:
                    yield from _told(names, part, deep=False)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                # "a" if password else "b" is a choice; x if password else "b" has a default.
                if is_text(body) != is_text(orelse):
                    for part in (body, orelse):
                        yield from _told(_read(test), part, deep=False)
            case ast.keyword(arg=str(name)):
                yield from _told([name], node.value)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    names = [] if key is None else _names(key, texts=True)
                    yield from _told(names, value, deep=False, leaf=values)
                keys = [_said(key) if key is not None else "" for key in node.keys]
                yield from _by_role(list(zip(keys, node.values, strict=True)), [])
            case ast.arguments():
                yield from _parameters(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if is_secret(node.name) and not is_bare(node.name):
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Return) and inner.value is not None:
                            yield from _told([node.name], inner.value)
            case ast.Call():
                yield from _called(node)
            case ast.Compare():
                yield from _compared(node)
            case ast.Tuple() | ast.List():
                yield from _beside(node)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield from _told(_names(target), value)
        return
    is_paired = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
    if is_paired and not any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):  # type: ignore[attr-defined]
        for one, other in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
            yield from _assigned(one, other)
        return
    for part in target.elts:
        yield from _told(_sure_names(part), value)


def _parameters(given: ast.arguments) -> Iterator[ast.expr]:
    positional = [*given.posonlyargs, *given.args]
    pairs = [
        *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    for parameter, default in pairs:
        kinds = [] if parameter.annotation is None else _kinds(parameter.annotation)
        if default is not None:
            yield from _told([*kinds, parameter.arg], default, deep=bool(kinds) or None)


def _called(node: ast.Call) -> Iterator[ast.expr]:
    """``set_password("X")``, ``login("X")``; ``getenv("TOKEN", "X")``,
    ``add_argument("--token", default="X")``."""
    name = (_names(node.func) or [""])[0]
    if name in _ENTERS or (is_secret(name) and not is_bare(name)):
        caller = "password" if name in _ENTERS else name
        for keyword in node.keywords if name in _ENTERS else ():
            if keyword.arg is not None and is_secret(keyword.arg):
                yield from _constants(keyword.value)
        for part in (*node.args, *(k.value for k in node.keywords if k.arg is None)):
            if not any(map(is_secret, _names(part, texts=True))):
                yield from _told([caller], part, deep=False)
    named: list[str] = []
    for part in node.args:
        names = [n for n in _names(part, texts=True) if is_secret(n) and n != "key"]
        if not _is_option(part):
            yield from _told(named, part, deep=False)
        named += names if isinstance(part, ast.Constant) else []
    first, *others = node.args or [node]
    if isinstance(first, ast.expr) and others and all(map(_is_option, others)):
        yield from _told(named, first, deep=False)  # typer.Option("X", "--password")
    given: list[tuple[str, ast.expr]] = []
    for keyword in node.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            parts = zip(keyword.value.keys, keyword.value.values, strict=True)
            given += [(_said(key), value) for key, value in parts if key is not None]
        elif keyword.arg is not None:
            given.append((keyword.arg, keyword.value))
    yield from _by_role(given, named)


def _is_option(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("-")


def _by_role(given: Sequence[tuple[str, ast.expr]], named: Sequence[str]) -> Iterator[ast.expr]:
    """``key="TOKEN", default="X"``: the default of what another part names."""
    names = [n for role, part in given if role in _CALLS for n in _names(part, texts=True)]
    names = [name for name in names if name != "key"]
    for role, part in given:
        if role in _DEFAULTS:
            yield from _told([*named, *names], part, deep=True)


def _compared(node: ast.Compare) -> Iterator[ast.expr]:
    """``args.password == "X"``; in loops over words and tables ``key`` and ``token`` are none."""
    sides = [node.left, *node.comparators]
    names = [name for side in sides for name in _sure_names(side)]
    for side in sides:
        if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set | ast.JoinedStr):
            yield from _told(names, side, deep=False)


def _beside(node: ast.Tuple | ast.List) -> Iterator[ast.expr]:
    """``("password", "X")``, ``["--token", "X"]``."""
    for one, other in pairwise(node.elts):
        for name in _names(one, texts=True) if isinstance(one, ast.Constant) else ():
            pair = len(node.elts) == 2 and not is_bare(name)
            if pair or name.startswith("--"):
                yield from _told([name], other, deep=False)


def _told(
    names: Sequence[str], value: ast.expr, *, deep: bool | None = None, leaf: bool = False
) -> Iterator[ast.expr]:
    """The texts in ``value`` that one of ``names`` calls secrets. ``deep`` as :func:`_constants`
    takes it, None: unless all names are bare. ``leaf``: a number or a name, too."""
    names = [name for name in names if is_secret(name)]
    if not names:
        return
    inside = not all(map(is_bare, names)) if deep is None else deep
    for node in [value] if leaf and _is_leaf(value) else _constants(value, inside):
        said = _said(node)
        if any(is_called_secret(name, said) and not is_token_id(name, said) for name in names):
            yield node


def _is_leaf(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str | bytes | bool | None)
    return not isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.JoinedStr)


def _constants(node: ast.AST, deep: bool = False) -> Iterator[ast.expr]:
    """The texts that the value of an expression is made of. ``deep``: also the arguments of calls
    of any function."""
    match node:
        case ast.Constant(value=str() | bytes()) | ast.JoinedStr():
            yield node
        case ast.Call():
            name = _names(node.func)[:1] or [""]
            if isinstance(node.func, ast.Attribute):
                yield from _constants(node.func.value, deep)
            if name[0] in _OPENS or not (deep or name[0] in _CONVERTS):
                return
            first = 0 if name[0] not in _READS else 2 if name[0] == "getattr" else 1
            for part in (*node.args[first:], *(k.value for k in node.keywords)):
                is_name = isinstance(part, ast.Constant) and str(part.value).isupper()
                if not (is_name and any(map(is_secret, _names(part, texts=True)))):
                    yield from _constants(part, deep)
        case ast.Subscript() | ast.Attribute():
            yield from _constants(node.value, deep)
        case ast.IfExp():
            yield from _constants(node.body, deep)
            yield from _constants(node.orelse, deep)
        case ast.Dict():
            for value in node.values:
                yield from _constants(value, deep)
        case ast.Lambda():
            yield from _constants(node.body, deep)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            yield from _constants(node.elt, deep)
        case (
            ast.BoolOp() | ast.BinOp() | ast.Tuple() | ast.List() | ast.Set() | ast.Starred()
            | ast.Await() | ast.NamedExpr()
        ):  # fmt: skip
            for child in ast.iter_child_nodes(node):
                yield from _constants(child, deep)


def private_keys(tree: ast.AST) -> Iterator[ast.expr]:
    """All texts of an expression that puts a private key together, line by line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.BinOp | ast.List | ast.Tuple):
            texts = list(_constants(node))
            if any("-----BEGIN" in _said(text) for text in texts):
                yield from texts


def _said(node: ast.expr) -> str:
    """The text of a constant; of an f-string its own parts."""
    match node:
        case ast.Constant(value=bytes(raw)):
            return raw.decode("latin-1")
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_said(part) for part in parts if isinstance(part, ast.Constant))
    return ast.unparse(node)


def _sure_names(node: ast.AST) -> list[str]:
    """Without ``key`` and ``token``, which in loops and comparisons are of words and tables."""
    return [name for name in _names(node) if not is_bare(name)]


def _kinds(annotation: ast.expr) -> list[str]:
    """``SecretStr``, ``Optional["Password"]``: the names of secrets in an annotation."""
    names = [name for part in ast.walk(annotation) for name in _names(part, texts=True)]
    return [name for name in names if is_secret(name) and not is_bare(name)]


def _read(node: ast.expr) -> list[str]:
    """What the value of an expression is called where it comes from: ``args.token``,
    ``config["token"]``, ``os.getenv("TOKEN")``, ``get_token()``."""
    match node:
        case ast.Call(func=func, args=args):
            names = _names(func)[:1]
            if names and names[0] in _READS:
                texts = [part for part in args[:2] if isinstance(part, ast.Constant)]
                return [name for part in texts for name in _names(part, texts=True)]
            return names + (_read(func.value) if isinstance(func, ast.Attribute) else [])
        case (
            ast.UnaryOp(operand=operand) | ast.Await(value=operand)
            | ast.Compare(left=operand, ops=[ast.Is() | ast.IsNot()])
        ):  # fmt: skip
            return _read(operand)
    return [name for name in _names(node) if name != "key"]


def _names(node: ast.AST, *, texts: bool = False) -> list[str]:
    """What ``node`` is called: ``token``, ``self.token``, ``d["token"]``; with ``texts`` a quoted
    text that is a name, too."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.Subscript():
            return [*_names(node.slice, texts=True), *_names(node.value)]
        case ast.Starred():
            return _names(node.value)
        case ast.Constant(value=str(text)) if texts and NAME.fullmatch(text):
            return [text]
        case ast.Constant(value=bytes(raw)) if texts:
            return _names(ast.Constant(raw.decode("latin-1")), texts=True)
    return []


def is_text(node: ast.expr) -> bool:
    """Whether it is a quoted text, with or without values in it."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr)
