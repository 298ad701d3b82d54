"""Dotted paths of modules in a script that nobody announced: who registered whom.

torch calls a global hook whenever a module is registered in another. Climbing these links from a
module that runs gives the path in its outermost model, also when the script calls submodules one by
one. Copies made by ``deepcopy`` register nothing; they are named when their root first runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.utils.hooks import RemovableHandle

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")


class ModulePaths:
    """Keeps the stack of running modules and the names of all modules that ever ran."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.on_change: Callable[[], None] = lambda: None  # the stack is about to change
        self.roots: list[weakref.ref[nn.Module]] = []
        self._parent: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModulePaths:
        self._handles = [
            register_module_module_registration_hook(self._registered),
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self.stack.clear()

    def current(self) -> nn.Module | None:
        """Innermost running module."""
        return self.stack[-1] if self.stack else None

    def path(self, module: nn.Module | None) -> str:
        """Dotted path below the outermost model; "" for a model itself."""
        if module is None:
            return ""
        parts: list[str] = []
        link = self._parent.get(module)
        while link is not None:
            parent = link[0]()
            if parent is None:
                break
            if type(parent).__name__ not in _WRAPPERS:
                parts.append(link[1])
            link = self._parent.get(parent)
        return ".".join(reversed(parts))

    def root_of(self, module: nn.Module) -> nn.Module:
        """The outermost model that holds ``module``."""
        link = self._parent.get(module)
        while link is not None and (parent := link[0]()) is not None:
            module, link = parent, self._parent.get(parent)
        return module

    def models(self) -> list[nn.Module]:
        """Outermost models that ran and are still alive, in the order of their first run."""
        return [model for ref in self.roots if (model := ref()) is not None]

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parent[child] = (weakref.ref(parent), name)

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in self._known:
            self.discover(self.root_of(module))
        self.on_change()
        self.stack.append(module)

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self.stack and self.stack[-1] is module:
            self.on_change()
            self.stack.pop()

    def discover(self, root: nn.Module) -> None:
        """Name everything below ``root``; again at no cost when it is known."""
        if root in self._known:
            return
        for parent in root.modules():
            self._known.add(parent)
            for name, child in parent.named_children():
                if child not in self._parent:
                    self._parent[child] = (weakref.ref(parent), name)
        if all(ref() is not root for ref in self.roots):
            self.roots.append(weakref.ref(root))
