"""What can be said about one call of an op below autocast (:class:`OpCall`): its tensors, which it
changes, magnitudes, and what fp32 would have given.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from ampscope.capture.tensors import HALF, has_own_memory, plain
from ampscope.numerics.formats import dtype_name
from ampscope.observations import STAGNATED_SHARE, Operand

_ACCUMULATIONS = (
    "embedding_dense_backward", "index_add", "index_add_", "scatter_add", "scatter_add_", "sum",
    "cumsum", "mean", "index_put_", "_index_put_impl_", "logcumsumexp", "scatter_reduce", "cumprod",
)  # fmt: skip
_RUNNING_SUMS = ("add", "add_", "sub", "sub_")
_IN_PLACE = (
    "add_", "sub_", "lerp_", "copy_", "index_add_", "scatter_add_", "index_put_",
    "_index_put_impl_",
)  # fmt: skip
MAX_KEPT = 1 << 20  # elements of a tensor that is copied before an op changes it
# Of these in-place ops nothing is left that the target held before.
_OVERWRITING = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "set_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip
# torch's schemas of batch normalisation do not say that they update these.
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class OpCall:
    """What the dispatcher was given, as the instruments pass it around. ``tensors`` are all tensors
    among the arguments."""

    func: Any  # torch.ops.aten.addmm.default
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    node: Any  # the autograd node that runs now; None in the forward pass
    before: Tensor | None  # a copy of what the op has changed in place, where one was kept
    prior: dict[int, int]  # id of a changed tensor that was not finite before -> its taint

    @property
    def name(self) -> str:
        """ "addmm", "add_" """
        found: str = self.func._opname
        return found

    def parts(self, results: list[Tensor]) -> Iterator[tuple[OpCall, list[Tensor]]]:
        """(call, outputs), one for each place in the lists of a foreach or fused op, whose tensors
        have nothing to do with their neighbours; of any other op one. Targets that the op does not
        return are outputs as well."""
        count = len(self.args[0]) if self.args and isinstance(self.args[0], list | tuple) else 0
        listwise = self.name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        if not listwise or not count:
            given = {id(tensor) for tensor in results}
            yield self, [*results, *(t for t in written(self) if id(t) not in given)]
            return

        def at(n: int, value: Any) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == count
            return [value[n]] if is_list else value

        for n in range(count):
            args = tuple(at(n, a) for a in self.args)
            kwargs = {k: at(n, v) for k, v in self.kwargs.items()}
            part = replace(self, args=args, kwargs=kwargs, tensors=_tensors(args, kwargs))
            yield part, [results[n]] if len(results) == count else written(part)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    parts = [*args, *kwargs.values()]
    inside = [p for part in parts if isinstance(part, list | tuple) for p in part]
    return [p for p in (*parts, *inside) if isinstance(p, Tensor) and has_own_memory(p)]


def written(call: OpCall) -> list[Tensor]:
    """The tensors among the arguments that the op changes."""
    return targets(call.func, call.args, call.kwargs)


def targets(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that ``func`` changes in place."""
    found: list[Tensor] = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        values = value if isinstance(value, list | tuple) else (value,)
        found.extend(v for v in values if isinstance(v, Tensor) and has_own_memory(v))
    return found


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (n, a.name)
        for n, a in arguments
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in _STATISTICS
    )


@functools.cache
def overwrites(func: Any) -> bool:
    """Whether nothing is left of what the targets of ``func`` held before."""
    is_out = any(a.is_out for a in func._schema.arguments)
    return is_out or func._opname in _OVERWRITING


def statistics(call: OpCall) -> list[Tensor]:
    """The running statistics among the arguments of a batch normalisation; [] for another op."""
    arguments = enumerate(call.func._schema.arguments)
    places = ((n, a.name) for n, a in arguments if a.name in _STATISTICS)
    given = (call.args[n] if n < len(call.args) else call.kwargs.get(name) for n, name in places)
    return [value for value in given if isinstance(value, Tensor)]


def updates_statistics(call: OpCall) -> bool:
    """Whether this batch normalisation trains: it normalises with its batch, and updates its
    running statistics beside that."""
    if call.name.endswith("_with_update"):
        return True
    names = [a.name for a in call.func._schema.arguments]
    place = names.index("training") if "training" in names else len(call.args)
    return bool(call.args[place]) if place < len(call.args) else bool(call.kwargs.get("training"))


def tensors(value: Any, more: Any) -> list[Tensor]:
    """All tensors in an op's arguments or result, one level of lists deep, that hold numbers."""
    found: list[Tensor] = []
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple):
            found.extend(p for p in part if isinstance(p, Tensor))
    if more:
        found.extend(p for p in more.values() if isinstance(p, Tensor))
    return [tensor for tensor in found if is_op_operand(tensor)]


def is_op_operand(tensor: Tensor) -> bool:
    """Plain memory, or a COO tensor: what ops below autograd see once wrappers are taken off."""
    return has_own_memory(tensor) and tensor.layout in (torch.strided, torch.sparse_coo)


def scalars(args: Any, kwargs: Any) -> tuple[float, ...]:
    """Python numbers among the arguments, and 0-dimensional fp32/fp64 tensors' values."""
    parts = (p for p in (*args, *kwargs.values()) if _is_number(p))
    found = [p.item() if isinstance(p, Tensor) else float(p) for p in parts]
    return tuple(found[:6])


def _is_number(part: Any) -> bool:
    if isinstance(part, Tensor):
        return is_op_operand(part) and part.dim() == 0 and part.is_floating_point()
    return isinstance(part, int | float) and not isinstance(part, bool)


def nonfinite_scalars(args: Any, kwargs: Any) -> list[float]:
    """Python constants that are not finite, such as the -inf of a mask."""
    parts = (*args, *kwargs.values())
    inside = (p for part in parts if isinstance(part, list | tuple) for p in part)
    return [p for p in (*parts, *inside) if isinstance(p, float) and not math.isfinite(p)]


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor of any dtype holds a NaN; infinities are none."""
    return tensor.is_floating_point() and bool(torch.isnan(plain(tensor)).any())


def is_minus_inf_only(tensor: Tensor) -> bool:
    """Whether all that is not finite is -inf, as in a mask."""
    values = plain(tensor)
    return not bool((torch.isnan(values) | torch.isposinf(values)).any())


def has_empty_row(tensor: Tensor, dim: int) -> bool:
    """Whether -inf fills a whole row along ``dim``: a softmax of it is NaN."""
    minus = torch.isneginf(tensor)
    return bool((minus.all(dim=dim) if minus.dim() else minus).any())


class SpecialCounts(TypedDict):
    """NaN and infinities of a tensor."""

    nan: int
    pos_inf: int
    neg_inf: int


def special_counts(tensor: Tensor) -> SpecialCounts:
    """How many elements of a floating-point tensor are NaN, +Inf and -Inf."""
    values = plain(tensor)
    return SpecialCounts(
        nan=int(torch.isnan(values).sum()),
        pos_inf=int(torch.isposinf(values).sum()),
        neg_inf=int(torch.isneginf(values).sum()),
    )


def first_bad_index(tensor: Tensor) -> tuple[int, ...]:
    """Index of the first element that is not finite; () where there is none."""
    values = plain(tensor.detach())
    bad = torch.nonzero(~torch.isfinite(values))
    return tuple(bad[0].tolist()) if bad.numel() else ()


def operand(tensor: Tensor, producers: tuple[str, ...], is_parameter: bool) -> Operand:
    """Facts about one input."""
    floating = tensor.is_floating_point() and tensor.numel() > 0
    nonzero, values = None, plain(tensor)
    if floating:
        magnitudes = values.detach().abs().float()
        kept = magnitudes[(magnitudes > 0) & torch.isfinite(magnitudes)]
        nonzero = float(kept.min()) if kept.numel() else None
    return Operand(
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        max_abs=max_abs(tensor),
        min_abs=nonzero,
        zeros=int((values == 0).sum()) if tensor.numel() else 0,
        nonfinite=int((~torch.isfinite(values)).sum()) if floating else 0,
        producers=producers,
        is_parameter=is_parameter,
    )


def max_abs(tensor: Tensor | None) -> float | None:
    """Largest finite magnitude; None without one."""
    if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    magnitudes = plain(tensor).detach().abs()
    finite = magnitudes[torch.isfinite(magnitudes)]
    return float(finite.max()) if finite.numel() else None


def in_fp32(
    func: Any, args: Any, kwargs: Any, instead: Mapping[int, Tensor] | None = None
) -> Tensor | None:
    """The op on the same inputs in fp32, with those of ``instead`` in place of the tensors with
    these ids; None where that cannot be done (in-place, no kernel). What the op changes beside its
    result, such as running statistics, is changed in copies, and in those of ``instead``."""
    if func._opname.endswith("_") or "out" in kwargs:
        return None
    try:
        with torch.no_grad(), _generators_kept(func, args, kwargs):
            changed = {id(t): t.clone() for t in targets(func, args, kwargs)}
            wide = functools.partial(_widened, instead=changed | dict(instead or {}))
            result = func(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    first = result[0] if isinstance(result, list | tuple) and result else result
    return first if isinstance(first, Tensor) else None


def _widened(value: Any, instead: Mapping[int, Tensor]) -> Any:
    if id(value) in instead:
        value = instead[id(value)]
    if isinstance(value, Tensor) and value.dtype in HALF:
        return value.float()
    if isinstance(value, torch.dtype) and value in HALF:
        return torch.float32
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        return type(value)(_widened(v, instead) for v in value)
    return value


@contextlib.contextmanager
def _generators_kept(func: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """A random op that is run again draws what it drew, and leaves the script's numbers alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    devices = {t.device.index for t in tensors(args, kwargs) if t.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


def is_accumulation(func: Any) -> bool:
    """Whether the op adds up many terms at once, so that fp32 may give another result."""
    return func._opname in _ACCUMULATIONS


def fp32_error(func: Any, args: Any, kwargs: Any, out: Tensor) -> float | None:
    """Relative 2-norm distance of ``out`` from the fp32 result of the same inputs."""
    reference = in_fp32(func, args, kwargs)
    if reference is None or reference.shape != out.shape:
        return None
    length = float(torch.linalg.vector_norm(reference))
    if length == 0 or not math.isfinite(length):
        return None
    return float(torch.linalg.vector_norm(out.float() - reference)) / length


def remember_target(func: Any, args: Any, *, is_bad: bool) -> Tensor | None:
    """A copy of what an in-place op is about to change: of half-precision sums, and of a target
    that is not finite."""
    if not args or not isinstance(args[0], Tensor) or not 0 < args[0].numel() <= MAX_KEPT:
        return None
    is_sum = func._opname in _IN_PLACE and args[0].dtype in HALF
    return args[0].clone() if is_bad or is_sum else None


def is_from(
    bad: list[Tensor], func: Any, args: Any, kwargs: Any, before: Tensor | None, out: Tensor,
    position: int,
) -> bool:  # fmt: skip
    """Whether the non-finite values of ``out``, result number ``position``, descend from the
    tensors ``bad``, and not from constants and other inputs alone: with finite numbers in their
    place the op gives other ones. True where that cannot be tried. ``before`` is what an in-place
    op has changed; None of any other op."""
    in_place = any(value is out for value in args)
    if torch.Tag.nondeterministic_seeded in func.tags or (in_place and before is None):
        return True
    given = {id(tensor) for tensor in bad}

    def finite(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            return type(value)(finite(v) for v in value)
        if value is out and before is not None:
            value = before.clone() if id(out) not in given else _zeroed(before)
        elif isinstance(value, Tensor) and id(value) in given:
            return _zeroed(value)
        return value

    try:
        with torch.no_grad():
            named = {k: torch.empty_like(v) if v is out else finite(v) for k, v in kwargs.items()}
            result = func(*map(finite, args), **named)
    except (RuntimeError, TypeError, NotImplementedError):
        return True
    found = tensors(result, None)
    other = found[position] if position < len(found) else None
    return other is None or other.shape != out.shape or not _same_special(other, out)


def _zeroed(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def _same_special(first: Tensor, second: Tensor) -> bool:
    """NaN, +inf and -inf at the same places."""
    a, b = plain(first), plain(second)
    same = (torch.isnan(a) == torch.isnan(b)) & (torch.isposinf(a) == torch.isposinf(b))
    return bool((same & (torch.isneginf(a) == torch.isneginf(b))).all())


def stagnated_share(func: Any, args: Any, out: Tensor, before: Tensor | None) -> float | None:
    """Share of elements that a sum left as they were although the other term was not zero.

    A ``copy_`` or ``lerp_`` into a half tensor is how moving averages are written; it counts when
    the source differs in principle, which the caller knows from how it was made. None when the op
    is no such sum or less than :data:`STAGNATED_SHARE` stood still.
    """
    name = func._opname
    if len(args) < 2 or not isinstance(args[1], Tensor) or args[1].numel() == 0:
        return None
    first = before if before is not None else args[0]
    if name not in _RUNNING_SUMS and (before is None or name not in ("lerp_", "copy_")):
        return None
    if not isinstance(first, Tensor) or first.shape != out.shape or first.dtype != out.dtype:
        return None
    other = args[1]
    if other.dim() > out.dim():
        return None
    moving = (other != 0).expand_as(out)
    total = int(moving.sum())
    if not total:
        return None
    share = int(((out == first) & moving).sum()) / total
    return share if share >= STAGNATED_SHARE else None
