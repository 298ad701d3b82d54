"""What half precision lost although every number stayed finite, seen where it begins to matter.

An overflow that is gone again: ``h / inf`` is 0, and no NaN shows. A constant that rounding has
taken away: ``1 - 2e-4`` is 1 in fp16. Neither is wrong by itself; a mask may discard the infinity,
a sum may not notice the constant. So the values that fp32 would have had travel with the tensor, as
an attribute like its provenance, up to the op that tells:

overflow    from the op that made infinity out of finite inputs to the op that is finite again. A
            mask that discards it, or a clamp, gives there what it gives in fp32.
constant    from the half-precision ops that made it out of no parameter to the op in which it meets
            what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.script import op_facts
from ampscope.capture.script.op_facts import OpCall
from ampscope.capture.script.op_taint import EXACT
from ampscope.capture.tensors import HALF, all_finite
from ampscope.observations import INACCURATE_ERROR

CONSTANT = -1  # in place of a bad op's id
MAX_VALUES = 1 << 24  # of a tensor whose fp32 values are kept
ATTEMPTS = 3  # at which constants are followed: they are the same at each
OVERFLOWS = 16  # of one op; its later ones are only counted
MOST = 0.5  # of a sum's error is its own rounding's, and not its terms'
CONSTANT_LOST = 0.25  # of the result's norm; rounding alone costs a thousandth
_ON_PURPOSE = ("nan_to_num", "nan_to_num_")  # a script with these knows of its infinities


class Exact(NamedTuple):
    """What a tensor would hold; ``source`` is the id of a bad op, or :data:`CONSTANT`."""

    source: int
    values: Tensor
    place: tuple[str, str]  # (module, line) where it began
    by_a_sum: bool = False  # most of the error is that of a sum in half precision


Place = Callable[[], tuple[str, str]]


def begin(call: OpCall, out: Tensor, source: int, place: Place) -> None:
    """``out`` is where fp32 and half precision part."""
    if out.dtype in HALF and call.node is None and out.numel() <= MAX_VALUES:
        _keep(out, source, _result(call, {}), place)


def follow(call: OpCall, out: Tensor, own_error: float = 0.0) -> bool:
    """Carry the fp32 values of what went in on to ``out``; whether there were any. ``own_error``:
    relative error that a sum has made by its own rounding."""
    known = _known(call)
    if known and call.node is None and out.numel() <= MAX_VALUES:
        first = next(iter(known.values()))
        exact = _result(call, known)
        by_a_sum = any(e.by_a_sum for e in known.values()) or _is_of_the_sum(out, exact, own_error)
        _keep(out, first.source, exact, lambda: first.place, by_a_sum)
    return bool(known)


def _is_of_the_sum(out: Tensor, exact: Tensor | None, own_error: float) -> bool:
    """Whether the roundings of a sum, which are ``own_error`` of ``out``, make most of its distance
    to ``exact``; the rest came in with its terms."""
    if own_error <= INACCURATE_ERROR or exact is None:
        return False
    error, length = _error(out, exact), float(torch.linalg.vector_norm(exact.float()))
    own = own_error * float(torch.linalg.vector_norm(out.float()))
    return error is not None and own >= MOST * error * length


def follow_constant(
    call: OpCall, out: Tensor, step: int, place: Place, own_error: float = 0.0
) -> None:
    """``out`` is finite, and neither a parameter nor a gradient went into it."""
    if step < ATTEMPTS and not follow(call, out, own_error):
        begin(call, out, CONSTANT, place)


def overflow_lost(call: OpCall, out: Tensor) -> tuple[int, float] | None:
    """(bad op, relative 2-norm error) of a finite ``out`` into which its infinity went."""
    known = {key: exact for key, exact in _known(call).items() if exact.source != CONSTANT}
    if not known or call.node is not None or call.name in _ON_PURPOSE:
        return None
    exact = _result(call, known)
    error = None if exact is None else _error(out, exact.to(out.dtype))
    return None if error is None else (next(iter(known.values())).source, error)


class Lost(NamedTuple):
    """What an op makes of a value that half precision has taken away before."""

    error: float  # relative, in 2-norms
    place: tuple[str, str]  # (module, line) where the value was rounded first
    is_statistics: bool  # running statistics that grew out of the format since


def constant_lost(call: OpCall) -> Lost | None:
    """What ``call``, which takes what the model has computed, makes of a constant; None below
    :data:`CONSTANT_LOST`, and of a sum that lost its terms as it grew: that is no matter of how a
    value was rounded before its use."""
    known = {key: exact for key, exact in _known(call).items() if exact.source == CONSTANT}
    if not known:
        return None
    if op_facts.updates_statistics(call):
        updated = {id(t) for t in op_facts.statistics(call)} & known.keys()
        if updated:
            _result(call, known)  # brings the kept statistics up to date; this call reads none
            known = {key: exact for key, exact in known.items() if key not in updated}
    errors = {id(t): _error(t, known[id(t)].values) for t in call.tensors if id(t) in known}
    worst = max(errors, key=lambda key: errors[key] or 0.0, default=None)
    if worst is None or (errors[worst] or 0.0) <= INACCURATE_ERROR or known[worst].by_a_sum:
        return None
    exact, own = _result(call, known), _result(call, {})
    error = None if exact is None or own is None else _error(own, exact)
    if error is None or error <= CONSTANT_LOST:
        return None
    outgrown = any(id(t) == worst and not all_finite(t) for t in op_facts.statistics(call))
    return Lost(error, known[worst].place, outgrown)


def _known(call: OpCall) -> dict[int, Exact]:
    found = ((id(t), t.__dict__.get(EXACT)) for t in call.tensors)
    return {key: exact for key, exact in found if exact is not None}


def _result(call: OpCall, known: dict[int, Exact]) -> Tensor | None:
    """What ``call`` gives in fp32, with ``known`` in place of what is not finite, or a constant.
    A random op would draw other numbers."""
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    instead = {}
    for tensor in call.tensors:
        if exact := known.get(id(tensor)):
            kept = exact.values
            if exact.source != CONSTANT:  # the memory may have been written to since
                kept = torch.where(torch.isfinite(tensor), tensor.to(kept.dtype), kept)
            instead[id(tensor)] = kept
    return op_facts.in_fp32(call.func, call.args, call.kwargs, instead)


def _keep(
    out: Tensor, source: int, values: Tensor | None, place: Place, by_a_sum: bool = False
) -> None:
    fits = values is not None and values.shape == out.shape and values.is_floating_point()
    if values is not None and fits and all_finite(values):
        out.__dict__[EXACT] = Exact(source, values, place(), by_a_sum)


def _error(out: Tensor, exact: Tensor) -> float | None:
    """Relative 2-norm distance; None where ``exact`` is zero, not finite, or of another shape."""
    if out.shape != exact.shape or not all_finite(exact):
        return None
    exact = exact.float()
    length = float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(out.float() - exact)) / length if length else None
