"""Scripts that ask for AMP on CUDA, on a machine that has none.

``torch.cuda.amp.autocast()``, ``torch.autocast("cuda")`` and ``GradScaler()`` then switch
themselves off with a warning: the script is an fp32 run, and what AMP does to it stays unseen.
Under the policy ``rehearsal`` they are redirected to the CPU, with CUDA's default dtype; under any
other the request is only noted, so that the run can say what it was.

A script that takes the device that is there, ``torch.autocast(device.type)``, names the CPU here
and CUDA on a GPU. Without a dtype the CPU's autocast is bf16 and CUDA's fp16, so a rehearsal gives
it CUDA's. Where the script names the CPU itself, bf16 stays, and a note says so.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from ampscope.patches import Patches
from ampscope.runner.controls import HalfRequests
from ampscope.source_lines import SourceLines, line_name


class CudaRequests:
    """What was asked of CUDA, and where first."""

    def __init__(self, lines: SourceLines, redirect: bool, requests: HalfRequests) -> None:
        self.redirect = redirect
        self._requests = requests
        self._lines = lines
        self._asked: dict[str, str] = {}  # "autocast" -> "train.py:12"
        self._choice = DeviceChoice()
        self._scaled = False  # an enabled scaler was made
        self._default = torch.float16  # CUDA's; what the script set instead
        self._chosen = ""  # the first region on a device that was chosen by what is there
        self._kept: dict[str, str] = {}  # regions that stay in bf16: line -> why

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note and, under a rehearsal, redirect; nothing where there is a CUDA device."""
        if torch.cuda.is_available():
            yield
            return
        with Patches() as patches:
            patches.wrap(torch.amp.autocast_mode.autocast, "__init__", self._autocast)
            patches.wrap(torch.amp.GradScaler, "__init__", self._scaler)
            if self.redirect:
                for name in ("is_autocast_enabled", "set_autocast_enabled"):
                    patches.wrap(torch, name, _on_cpu)
                patches.wrap(torch, "get_autocast_dtype", self._get_dtype)
                patches.wrap(torch, "set_autocast_dtype", self._set_dtype)
                patches.replace(torch, "get_autocast_gpu_dtype", _cuda_dtype)
                patches.replace(torch, "set_autocast_gpu_dtype", _set_cuda_dtype)
                for owner in (torch.amp, torch.amp.autocast_mode):
                    for name in ("custom_fwd", "custom_bwd"):
                        patches.wrap(owner, name, _device_type_cpu)
            yield

    def note(self, *, ran_half: bool) -> str:
        """One sentence; "" when nothing was asked of CUDA. ``ran_half``: something else of the
        script computed in half precision."""
        told = (self._note_on_cuda(ran_half=ran_half), *self._notes_on_choice())
        return " ".join(filter(None, told))

    def _note_on_cuda(self, *, ran_half: bool) -> str:
        if not self._asked:
            return ""
        what = " and ".join(sorted(self._asked))
        where = next(iter(self._asked.values()))
        at = f" (first at {where})" if where else ""
        if self.redirect:
            return (
                f"The script asks for {what} on CUDA{at}; this machine has none, so they were "
                "redirected to the CPU, which rehearses CUDA's rules."
            )
        off = (
            "torch switched these off; what ran in half precision did so without them"
            if ran_half
            else "torch switched AMP off and this was an fp32 run"
        )
        return (
            f"The script asks for {what} on CUDA{at}; this machine has none, so {off}: "
            "--policy cuda rehearses it on the CPU."
        )

    def _notes_on_choice(self) -> list[str]:
        """Of the regions that name the CPU here: which of them were rehearsed, which were not."""
        notes = []
        if self._chosen:
            notes.append(
                f"The device of autocast (first at {self._chosen}) was chosen by what is available"
                " and no dtype was given, so it was rehearsed in CUDA's default, "
                f"{str(self._default).removeprefix('torch.')}."
            )
        for line, why in self._kept.items():
            notes.append(
                f"autocast at {line} stayed in bfloat16, the CPU's default: {why}. "
                "CUDA's default is float16."
            )
        return notes

    def _follows(self, what: str) -> bool:
        """Whether the user's call that is under way names a device that was chosen by what is
        available, so that CUDA's default dtype is meant; False is noted where it is a region's."""
        frame = self._lines.frame()
        if frame is None:
            return False
        for file in self._requests.files_that_asked:
            self._choice.look_into(file)
        call = self._choice.call_at(frame)
        line = line_name((frame.f_code.co_filename, frame.f_lineno))
        why = ""
        if call is None or not self._choice.chooses(device_argument(call)):
            why = "its device was not seen to follow from what is available"
        elif self._choice.scales and not self._scaled:
            why = "no GradScaler is enabled on this machine, though the script has one"
        if what == "autocast":
            if not why:
                self._chosen = self._chosen or line
            else:
                self._kept.setdefault(line, why)
        return not why

    def _ask(self, what: str) -> None:
        line = line_name(self._lines.where())
        self._asked.setdefault(what, line)
        if not self.redirect:
            self._requests.add("cuda_missing", what, line)

    def _autocast(
        self, original: Any, region: Any, device_type: str, *args: Any, **kwargs: Any
    ) -> None:
        enabled = args[1] if len(args) > 1 else kwargs.get("enabled", True)
        if device_type == "cuda":
            if enabled:
                self._ask("autocast")
            if self.redirect:
                device_type = "cpu"
                args, kwargs = self._with_cuda_dtype(args, kwargs)
        elif device_type == "cpu" and self.redirect and enabled:
            dtype = args[0] if args else kwargs.get("dtype")
            if dtype is None and self._follows("autocast"):
                args, kwargs = self._with_cuda_dtype(args, kwargs)
        original(region, device_type, *args, **kwargs)

    def _scaler(
        self, original: Any, scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any
    ) -> None:
        enabled = args[4] if len(args) > 4 else kwargs.get("enabled", True)
        on_cuda = str(device).partition(":")[0] == "cuda"
        self._scaled |= bool(enabled) and (self.redirect or not on_cuda)
        if on_cuda:
            if enabled:
                self._ask("GradScaler")
            device = "cpu" if self.redirect else device
        original(scaler, device, *args, **kwargs)

    def _with_cuda_dtype(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Without a dtype, autocast takes the device's own: fp16 on CUDA, bf16 on a CPU."""
        if args:
            return (self._dtype() if args[0] is None else args[0], *args[1:]), kwargs
        return args, {**kwargs, "dtype": kwargs.get("dtype") or self._dtype()}

    def _dtype(self) -> torch.dtype:
        """What a region on CUDA without a dtype takes: the region's around it, or the default."""
        is_inside = torch.is_autocast_enabled("cpu")
        return torch.get_autocast_dtype("cpu") if is_inside else self._default

    def _get_dtype(self, original: Any, device_type: str) -> Any:
        own = self._lines.is_user(sys._getframe(2).f_code)  # the wrapper's caller
        on_cuda = device_type == "cuda"
        if not on_cuda and device_type == "cpu" and own:
            on_cuda = self._follows("get_autocast_dtype")
        if on_cuda:
            is_inside = torch.is_autocast_enabled("cpu")
            return original("cpu") if is_inside else self._default
        return original(device_type)

    def _set_dtype(self, original: Any, device_type: str, dtype: torch.dtype) -> None:
        own = device_type == "cpu" and self._lines.is_user(sys._getframe(2).f_code)
        on_cuda = device_type == "cuda" and not torch.is_autocast_enabled("cpu")
        if on_cuda or (own and self._follows("set_autocast_dtype")):
            self._default = dtype
        original("cpu" if device_type == "cuda" else device_type, dtype)


def _on_cpu(original: Any, *args: Any) -> Any:
    """``is_autocast_enabled("cuda")`` and the like ask and set the CPU's state.

    The two oldest spellings, ``is_autocast_enabled()`` and ``set_autocast_enabled(flag)``, mean
    CUDA as well.
    """
    if not args or isinstance(args[0], bool):
        args = ("cuda", *args)
    return original("cpu" if args[0] == "cuda" else args[0], *args[1:])


def _cuda_dtype(original: Any) -> Any:
    return lambda: torch.get_autocast_dtype("cuda")


def _set_cuda_dtype(original: Any) -> Any:
    return lambda dtype: torch.set_autocast_dtype("cuda", dtype)


def _device_type_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("device_type") == "cuda":
        kwargs["device_type"] = "cpu"
    return original(*args, **kwargs)


# Whether a value in a script follows from the devices that are there, read off its source.
#
#     use_cuda = torch.cuda.is_available()
#     device = torch.device("cuda" if use_cuda else "cpu")
#     with torch.autocast(device.type): ...      # follows: with CUDA this would be another device
#     with torch.autocast("cpu"): ...            # does not: the script names the CPU itself
#
# Names are followed through assignments, branches, returns, arguments and command-line defaults of
# the files that were looked into; a name counts wherever it stands. Nothing is run.


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
