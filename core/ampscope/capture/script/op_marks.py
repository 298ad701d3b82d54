"""Marks on tensors: which op made a tensor, and which bad op its non-finite values descend from.

Both are plain attributes of the tensor, so they travel with it through the user's code and die with
it. The path from a sigmoid to a logarithm, or from a product to a softmax, is read off the first;
when the loss or a gradient is not finite, the second names the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.script.running_sums import IN_PLACE
from ampscope.capture.tensors import holds_numbers

MAKER, TAINT = "_ampscope_maker", "_ampscope_taint"
FOREIGN = -1  # the taint of what came with the data, a parameter, or an intended -inf
CHAIN = 14  # ops looked back and forward: a masked softmax attention takes up to 10
PASSES_ON = frozenset({
    "detach", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "reshape", "alias",
    "unsqueeze", "squeeze", "slice", "select", "as_strided", "empty", "empty_like", "split",
    "_local_scalar_dense", "is_nonzero", "unbind", "empty_strided", "new_empty", "lift_fresh",
})  # fmt: skip
_WEIGHT_ARITHMETIC = frozenset({"mul", "add", "sub", "div", "lerp", "neg"})
_AVERAGES = (("add",), ("lerp",), ("sub",))  # what a copied average was made by


class Maker:
    """The op that made a tensor, and the names of the ops before it, nearest first.

    Names are flattened and bounded: a linked graph of ops would keep a whole training run alive.
    """

    __slots__ = ("names", "parameter", "scalar", "watchers")

    def __init__(
        self, name: str, parents: list[Maker], watchers: tuple[int, ...], scalar: float | None
    ) -> None:
        chains = [parent.names for parent in parents[:3]]
        mixed = [n for group in zip_longest(*chains) for n in group if n is not None]
        self.names: tuple[str, ...] = (name, *mixed[: CHAIN - 1])
        self.watchers = watchers  # bad ops whose consumers are still being collected
        self.parameter = False  # a view or cast of a parameter
        self.scalar = scalar  # the Python constant that the op took, if any


def maker_of(tensor: Tensor) -> Maker | None:
    """The mark of the op that made ``tensor``; None for what no watched op made."""
    found: Maker | None = getattr(tensor, MAKER, None)
    return found


def producers(tensor: Tensor) -> tuple[str, ...]:
    """Names of the ops that led to ``tensor``, nearest first."""
    maker = maker_of(tensor)
    return () if maker is None else maker.names


def first_taint(tensors: Sequence[Tensor]) -> int | None:
    """The bad op that the first marked one of ``tensors`` descends from."""
    return next((t.__dict__[TAINT] for t in tensors if TAINT in t.__dict__), None)


def inherit_taint(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Outputs of an op that only passes values on are as tainted as its inputs."""
    taint = first_taint(inputs)
    for tensor in outputs:
        if taint is not None:
            tensor.__dict__[TAINT] = taint
        else:
            tensor.__dict__.pop(TAINT, None)


def unmark(tensor: Tensor) -> None:
    """Take the marks off."""
    tensor.__dict__.pop(MAKER, None)
    tensor.__dict__.pop(TAINT, None)


def is_parameter(tensor: Tensor) -> bool:
    """A parameter, or a view or cast of one."""
    maker = maker_of(tensor)
    return isinstance(tensor, nn.Parameter) or (maker is not None and maker.parameter)


def is_still_parameter(name: str, inputs: Sequence[Tensor]) -> bool:
    """Whether op ``name`` makes a view, cast, average or update by hand of a parameter."""
    passes = name in PASSES_ON or name == "_to_copy"
    # Without gradients, arithmetic on weights is an average of weights or an update by hand.
    passes = passes or (name in _WEIGHT_ARITHMETIC and not torch.is_grad_enabled())
    return passes and any(map(is_parameter, inputs))


def root_of_loss(loss: Tensor) -> str:
    """How the root of a backward pass was made, "mul 65536" for a loss times a constant."""
    maker = maker_of(loss)
    if maker is None:
        return ""
    return maker.names[0] if maker.scalar is None else f"{maker.names[0]} {maker.scalar:g}"


def constant(args: Any) -> float | None:
    """The first constant among an op's arguments after its first: a number, or a 0-d tensor that
    no watched op made."""
    for part in args[1:] if isinstance(args, tuple) else ():
        if isinstance(part, int | float) and not isinstance(part, bool):
            return float(part)
        if isinstance(part, Tensor) and part.dim() == 0 and not hasattr(part, MAKER):
            return part.item() if part.is_floating_point() and holds_numbers(part) else None
    return None


def adds_to_what_lives_on(name: str, args: Any) -> bool:
    """Whether the op is a term of a running sum: an in-place sum, a sum of its own result, or a
    copy of a freshly computed average. A residual addition is none of these."""
    if name in IN_PLACE or name == "lerp_":
        return not torch.is_grad_enabled() or not args[0].requires_grad
    if name == "copy_":
        source = producers(args[1])
        return source[:1] in _AVERAGES or source[:2] == ("_to_copy", "add")
    made = producers(args[0])[:3]
    return name in made or (not torch.is_grad_enabled() and made[:1] == ("mul",))
