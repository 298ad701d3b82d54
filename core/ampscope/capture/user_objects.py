"""The training's own objects, held by identity and read without running their code.

A module, an optimizer or a tensor's subclass may define ``==``, ``hash``, ``bool``, ``len`` and
attributes as it likes: torchmetrics' modules make a new module of ``==``, and their hash changes
with their state. So nothing here compares, hashes or iterates over them. What is kept about one is
kept under its id, until it is gone (:class:`IdMap`); a module's children, parameters and buffers
are taken from torch's own tables in it; an optimizer, which may be one of torch's or anything with
a ``step``, is looked at attribute by attribute.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class IdMap(Generic[K, V]):
    """What is known of objects that are alive, by identity. One that allows no weak reference is
    kept alive as long as the map."""

    __slots__ = ("__weakref__", "_entries")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Callable[[], K | None], V]] = {}

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[id(key)] = _held(key, self._entries), value

    def get(self, key: object) -> V | None:
        """What is known of ``key``; None where nothing is."""
        found = self._entries.get(id(key))
        return None if found is None else found[1]

    def setdefault(self, key: K, value: V) -> V:
        """What is known of ``key``; ``value`` from now on, where nothing is."""
        found = self._entries.get(id(key))
        if found is not None:
            return found[1]
        self[key] = value
        return value

    def pop(self, key: object) -> V | None:
        """What was known of ``key``, which is forgotten."""
        found = self._entries.pop(id(key), None)
        return None if found is None else found[1]

    def items(self) -> list[tuple[K, V]]:
        """Every object that is alive, with what is known of it, in the order of their arrival."""
        every = [(held(), value) for held, value in list(self._entries.values())]
        return [(key, value) for key, value in every if key is not None]

    def keys(self) -> list[K]:
        """Every object that is alive, in the order of their arrival."""
        return [key for key, _ in self.items()]

    def values(self) -> list[V]:
        """What is known of each object that is alive."""
        return [value for _, value in self.items()]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


class IdSet(IdMap[K, None]):
    """Objects that are alive, by identity."""

    __slots__ = ()

    def add(self, key: K) -> None:
        """``key`` belongs to it from now on."""
        if id(key) not in self._entries:
            self[key] = None

    def discard(self, key: object) -> None:
        """``key`` belongs to it no more."""
        self._entries.pop(id(key), None)

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())


def _held(key: K, entries: dict[int, Any]) -> Callable[[], K | None]:
    """Gives ``key`` while it is alive. Its entry goes with it; another object may get its id."""
    number = id(key)

    def gone(reference: object) -> None:
        found = entries.get(number)
        if found is not None and found[0] is reference:
            del entries[number]

    try:
        return weakref.ref(key, gone)
    except TypeError:  # its class has slots and none for weak references
        return lambda: key


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules registered in ``module``, each under its first name."""
    found = ((n, m) for n, m in _table(module, "_modules") if m is not None)
    return [(name, child) for name, child in _distinct(found)]


def modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """``root`` under "" and all modules below it under their dotted paths, as
    ``named_modules`` gives them: depth first, each once."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        below = [(f"{path}.{name}" if path else name, child) for name, child in children(module)]
        waiting += reversed(below)
    return found


def parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters of ``root`` and below by dotted name, each once."""
    return list(_distinct(_tensors(root, "_parameters")))


def buffers(root: nn.Module) -> list[tuple[str, Tensor]]:
    """All buffers of ``root`` and below by dotted name, each once."""
    return list(_distinct(_tensors(root, "_buffers")))


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters registered in ``module`` itself by name, each once."""
    return list(_distinct((n, p) for n, p in _table(module, "_parameters") if p is not None))


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers registered in ``module`` itself by name, each once."""
    return list(_distinct((n, b) for n, b in _table(module, "_buffers") if b is not None))


@contextlib.contextmanager
def instead(root: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, the parameters and buffers of ``root`` whose ids are in ``others`` are those tensors;
    then they are its own again, whatever happened. torch's ``functional_call`` would hash and
    compare the modules."""
    own: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for _, module in modules(root):
            for table in ("_parameters", "_buffers"):
                held = object.__getattribute__(module, "__dict__").get(table, {})
                own += [(held, n, t) for n, t in held.items() if id(t) in others]
        for held, name, tensor in own:
            held[name] = others[id(tensor)]
        yield
    finally:
        for held, name, tensor in own:
            held[name] = tensor


def _tensors(root: nn.Module, table: str) -> Iterator[tuple[str, Any]]:
    for path, module in modules(root):
        for name, tensor in _table(module, table):
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor


def _table(module: nn.Module, name: str) -> list[tuple[str, Any]]:
    """One of torch's tables in a module. A compiled one of TorchScript holds it in C++; one whose
    ``__init__`` did not call that of nn.Module has none."""
    held = object.__getattribute__(module, "__dict__").get(name)
    if held is None and issubclass(type(module), torch.jit.ScriptModule):
        held = getattr(module, name)
    return [] if held is None else list(held.items())


def _distinct(named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    seen: set[int] = set()
    for name, one in named:
        if id(one) not in seen:
            seen.add(id(one))
            yield name, one


def torch_optimizer(given: Any) -> Optimizer | None:
    """The torch optimizer that ``given`` is or holds: Accelerate's and Lightning's wrappers and
    the scripts' own, such as the Annotated Transformer's, keep it in ``optimizer``. None where
    none is found: facts of another object are not asked for."""
    seen: set[int] = set()
    while id(given) not in seen:
        seen.add(id(given))
        inner = attribute(given, "optimizer")
        if inner is None:
            inner = attribute(given, "_optimizer")
        if issubclass(type(given), Optimizer):  # Accelerate's wrapper is an Optimizer itself
            found: Optimizer = inner if issubclass(type(inner), Optimizer) else given
            return found
        given = inner
    return None


def plain_optimizer(given: Any) -> Any:
    """The torch optimizer that ``given`` is or holds, else ``given`` itself."""
    found = torch_optimizer(given)
    return given if found is None else found


def attribute(thing: object, name: str) -> Any:
    """An attribute that the object itself holds; no code of its class is run."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        held = {}
    if name in held:
        return held[name]
    for kind in type(thing).__mro__:  # a slot
        slot = vars(kind).get(name)
        if slot is not None and type(slot).__name__ == "member_descriptor":
            try:
                return slot.__get__(thing)
            except AttributeError:
                return None
    return None


def groups_of(optimizer: object) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer; none of what has none, or has not made them yet."""
    groups = _held_by(optimizer, "param_groups")
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


def parameters_of(optimizer: object) -> list[Tensor]:
    """All parameters that the optimizer steps, in its own order."""
    held = [group.get("params") for group in groups_of(optimizer)]
    listed = (some for some in held if isinstance(some, list | tuple))
    return [p for some in listed for p in some if isinstance(p, Tensor)]


def state_of(optimizer: object) -> list[tuple[Tensor, dict[str, Any]]]:
    """What an optimizer keeps about its parameters."""
    state = _held_by(optimizer, "state")
    held = list(state.items()) if isinstance(state, dict) else []
    return [(p, s) for p, s in held if isinstance(p, Tensor) and isinstance(s, dict)]


def _held_by(optimizer: object, name: str) -> Any:
    """As :func:`_attribute`; some optimizers of libraries answer by a property."""
    found = attribute(optimizer, name)
    if found is None and issubclass(type(optimizer), Optimizer):
        return getattr(optimizer, name, None)
    return found
