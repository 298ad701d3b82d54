"""Which scaler made the root of a backward pass: a note in the autograd node's own metadata."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SCALED = "ampscope_scaler"  # key in an autograd node's metadata
DEPTH = 24  # nodes looked at above a root


def mark_scaled(tensor: Tensor, scaler: str) -> None:
    """``tensor`` came from that scaler's ``scale``."""
    if tensor.grad_fn is not None:
        _metadata(tensor.grad_fn)[SCALED] = scaler


def scaled_by(root: Tensor, depth: int = DEPTH) -> str:
    """Name of the scaler whose ``scale`` is in the graph just above ``root``; "" when none is.

    A scaled loss is often divided for accumulation or summed with others, so nodes within
    ``depth`` steps count.
    """
    seen, queue = set(), [root.grad_fn]
    while queue and depth:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        depth -= 1
        if SCALED in _metadata(node):
            return str(_metadata(node)[SCALED])
        queue.extend(parent for parent, _ in node.next_functions)
    return ""


def _metadata(node: Any) -> dict[str, object]:
    """An autograd node's own dictionary; torch's stub takes the property for a method."""
    found: dict[str, object] = node.metadata
    return found
