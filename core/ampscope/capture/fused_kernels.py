"""Which ops inductor put into one kernel, in which dtype it computes them, and which results it
does not round.

Read off inductor's schedule as it is turned into code: nothing is added to a graph, and no numbers
change. Code that comes out of inductor's cache is not scheduled, so nothing is told of it.

A fused kernel computes half-precision ops in fp32 and hands their results on in registers. Eager
code rounds each of them to half; the kernel rounds only what it writes to memory, unless
``emulate_precision_casts`` is on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ampscope.capture.taps import is_backward, line_of, modules_of, op_of
from ampscope.numerics.formats import dtype_name
from ampscope.observations import Kernel
from ampscope.patches import Patches

MOST = 1_000  # kernels of one run
HALF = (torch.float16, torch.bfloat16)
# These hand numbers on as they are.
_LAYOUT = frozenset({
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze",
    "squeeze", "select", "slice", "as_strided", "detach", "alias", "clone", "split", "full",
    "empty", "iota", "tap",
})  # fmt: skip


@contextlib.contextmanager
def noting(kernels: list[Kernel], failed: Callable[[str], None]) -> Iterator[None]:
    """Each kernel that inductor schedules inside is added to ``kernels``, the first thousand.
    Where a schedule cannot be read, ``failed`` is told why, and the compilation goes on."""
    from torch._inductor.scheduler import Scheduler  # few runs compile

    def codegen(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            for node in scheduler.nodes:
                found = None if len(kernels) >= MOST else _kernel(node, len(kernels) + 1)
                if found is not None:
                    kernels.append(found)
        except Exception as error:  # the user's compilation goes on
            failed(f"{type(error).__name__}: {error}")
        return original(scheduler, *args, **kwargs)

    with Patches() as patches:
        patches.wrap(Scheduler, "codegen", codegen)
        yield


def _kernel(node: Any, number: int) -> Kernel | None:
    """What a node of the schedule computes; None of an op of torch's own, and of a mere copy."""
    import torch._inductor.config as inductor  # few runs compile

    if node.is_extern():
        return None
    parts = [part.node for part in node.get_nodes() if getattr(part, "node", None) is not None]
    inside = {origin for part in parts for origin in getattr(part, "origins", ())}
    ops = [op for op in _in_order(inside) if not _is_layout(op)]
    values = [value for op in ops if (value := _value(op)) is not None]
    if not ops or not values:
        return None
    elided = [] if inductor.emulate_precision_casts else [op for op in ops if _elided(op, inside)]
    widest = max((v.dtype for v in values), key=lambda dtype: dtype.itemsize)
    return Kernel(
        number=number,
        phase="backward" if any(map(is_backward, ops)) else "forward",
        ops=tuple(map(op_of, ops)),
        modules=_distinct(next(reversed(modules_of(op)), "") for op in ops),
        lines=_distinct(map(line_of, ops)),
        computed=dtype_name(torch.float32 if widest in HALF else widest),
        writes=_distinct(dtype_name(part.get_dtype()) for part in parts),
        unrounded=tuple(_said(op) for op in elided),
    )


def _in_order(nodes: set[fx.Node]) -> list[fx.Node]:
    """Ops in the order of their graph."""
    graphs = dict.fromkeys(node.graph for node in nodes)
    return [n for g in graphs for n in g.nodes if n in nodes and n.op == "call_function"]


def _is_layout(node: fx.Node) -> bool:
    """Whether it hands numbers on: a view, or one of several results."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is None or str(packet).rpartition(".")[2] in _LAYOUT


def _value(node: fx.Node) -> Tensor | None:
    """The floating-point tensor that a node gives; the first of several."""
    value = node.meta.get("val")
    value = next(iter(value), None) if isinstance(value, tuple | list) else value
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def _elided(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a result in half goes on to another op of the kernel unrounded. What is saved for
    backward is rounded; of a reduction it is not known."""
    value = _value(node)
    if value is None or value.dtype not in HALF or any(u.op == "output" for u in node.users):
        return False
    is_cast = node.target is torch.ops.prims.convert_element_type.default
    if not is_cast and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    return any(_uses(user, inside) for user in node.users)


def _uses(user: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether the kernel computes with what ``user`` is given."""
    if user not in inside:
        return False
    return not _is_layout(user) or any(_uses(further, inside) for further in user.users)


def _said(node: fx.Node) -> str:
    """``aten.mul to bf16, train.py:41``."""
    value, line = _value(node), line_of(node)
    dtype = "" if value is None else f" to {dtype_name(value.dtype)}"
    return f"{op_of(node)}{dtype}" + (f", {line}" if line else "")


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))
