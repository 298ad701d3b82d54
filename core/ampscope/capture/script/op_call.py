"""One call of an op below autocast, as the instruments pass it around."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ampscope.capture.tensors import has_own_memory

# Of these in-place ops nothing is left that the target held before.
_OVERWRITING = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "set_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip
# torch's schemas of batch normalisation do not say that they update these.
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class OpCall:
    """What the dispatcher was given. ``tensors`` are all tensors among the arguments."""

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
        listwise = self.name.startswith(("_foreach_", "_fused_"))
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
def overwrites(func: Any) -> bool:
    """Whether nothing is left of what the targets of ``func`` held before."""
    is_out = any(a.is_out for a in func._schema.arguments)
    return is_out or func._opname in _OVERWRITING


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (n, a.name)
        for n, a in arguments
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in _STATISTICS
    )
