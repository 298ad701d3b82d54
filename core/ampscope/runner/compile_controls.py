"""Controls of compiled code: another backend, switches of inductor, modules or ops left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from ampscope.capture.global_hooks import REGISTERED
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.patches import Patches


@contextlib.contextmanager
def compiled_by(backend: str | Callable[..., Any]) -> Iterator[None]:
    """Whatever ``torch.compile`` is asked for goes through this backend. Modes and options are
    inductor's own: another backend refuses them."""

    def compiled(original: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {k: v for k, v in kwargs.items() if k not in ("mode", "options")}
        return original(*args, **{**kept, "backend": backend})

    with Patches() as patches:
        patches.wrap(torch, "compile", compiled)
        yield


def inductor_switch(setting: str) -> AbstractContextManager[object]:
    """A switch of inductor's on, for all that is compiled inside."""
    import torch._inductor.config as inductor  # few runs compile

    changed: AbstractContextManager[object] = inductor.patch({setting: True})
    return changed


@contextlib.contextmanager
def uncompiled(paths: Iterable[str]) -> Iterator[set[str]]:
    """The modules at ``paths`` run as eager code inside compiled code: the graph breaks around
    each, so a wish for a full graph is not heard. Gives the paths that were not met yet.

    Nothing listens while a graph is captured: paths come from how modules were registered, and are
    looked up when torch.compile is called and when an optimizer is made.
    """
    names, missing = ModulePaths(), set(paths)
    as_eager: Any = torch.compiler.disable

    def leave_out() -> None:
        for module in names.registered():
            if (path := names.path(module)) in missing:
                missing.discard(path)
                module.forward = as_eager(module.forward)

    def compiled(original: Any, *args: Any, **kwargs: Any) -> Any:
        leave_out()
        return original(*args, **{**kwargs, "fullgraph": False})

    def made(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        leave_out()

    with Patches() as patches, REGISTERED.subscribe(names.link):
        patches.wrap(torch, "compile", compiled)
        patches.wrap(Optimizer, "__init__", made)
        yield missing


@contextlib.contextmanager
def unfused(names: str) -> Iterator[None]:
    """Inductor calls torch's own kernels for these ops (``aten.gelu,aten.mul``), and generates no
    code for them: they have neither a decomposition nor a lowering of their own.

    A script may put one in itself, so it is done again as each compilation begins. The caches of
    compiled graphs are off: nothing in their keys tells of this.
    """
    # Few runs compile.
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._dynamo.callback import callback_handler
    from torch._inductor import decomposition, lowering

    make_fallback: Any = lowering.make_fallback  # torch leaves it untyped
    ops = [op for name in names.split(",") for op in _overloads(name)]
    sets = lowering.fallbacks, lowering.needs_realized_inputs
    added = [{op for op in ops if op not in known} for known in sets]
    lowered = {op: lowering.lowerings[op] for op in ops if op in lowering.lowerings}
    taken: dict[Any, Any] = {}

    def take_out(*_: object) -> None:
        merged = decomposition.fast_random_decomps  # made once, of what the script put in by then
        for op in ops:
            if op in decomposition.decompositions:
                taken[op] = decomposition.decompositions.pop(op)
            if merged.cache_info().currsize:
                merged().pop(op, None)
            make_fallback(op, warn=False)

    take_out()  # a script's torch.compiler.reset takes the call below away
    callback_handler.register_start_callback(take_out)
    try:
        with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
            yield
    finally:
        with contextlib.suppress(ValueError):  # torch.compiler.reset has removed it
            callback_handler.remove_start_callback(take_out)
        decomposition.decompositions.update(taken)
        decomposition.fast_random_decomps.cache_clear()
        for known, new in zip(sets, added, strict=True):
            known -= new
        for op in ops:
            lowering.lowerings.pop(op, None)
        lowering.lowerings.update(lowered)


def _overloads(name: str) -> list[Any]:
    """The functional forms of ``aten.gelu``; none of a view, which is no kernel, and of no op."""
    space, _, op = name.partition(".")
    packet: Any = getattr(getattr(torch.ops, space), op, None)
    overloads: list[str] = getattr(packet, "overloads", list)()
    found = (getattr(packet, overload) for overload in overloads)
    return [one for one in found if not one._schema.is_mutable and not one.is_view]
