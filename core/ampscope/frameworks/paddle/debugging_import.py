"""Paddle's own operator statistics (``paddle.amp.debugging``) beside the ops that ampscope saw.

    with collected() as statistics:
        model(x)
    differences(seen, statistics)   # [] where both saw the same

Paddle counts in C++ what each op's inputs are; ampscope counts calls of Python functions. An op
that one of them misses shows as a difference. On a CPU Paddle always counts fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import paddle

_FLAG = "FLAGS_low_precision_op_list"
_COLUMNS = ("fp16", "bf16", "fp32", "other")
# Ops without a floating-point input make numbers or look at shapes. AMP has no say in them, and
# ampscope does not count them.
NOT_COUNTED = frozenset((
    "assign_value", "empty", "eye", "fill_any_like", "fill_constant", "full_", "gaussian_inplace",
    "gaussian_random", "linspace", "one_hot_v2", "randint", "randperm", "range", "range_v2", "size",
    "shape", "tril_indices", "triu_indices", "truncated_gaussian_random", "uniform_random",
    "uniform_inplace", "equal", "not_equal", "greater_equal", "greater_than", "less_equal",
    "less_than", "isfinite_v2", "isinf_v2", "isnan_v2", "cast", "share_data", "assign_out_",
))  # fmt: skip


@dataclass(slots=True)
class Statistics:
    """Calls by op and column: fp16, bf16, fp32, other."""

    calls: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """An op that was counted differently."""

    op: str
    seen: int  # by ampscope
    counted: int  # by Paddle

    @property
    def sentence(self) -> str:
        """For a person."""
        return f"{self.op}: ampscope saw {self.seen}, Paddle counted {self.counted}."


@contextmanager
def collected() -> Iterator[Statistics]:
    """What Paddle counts inside the block; filled at its end."""
    statistics = Statistics()
    paddle.base.core.clear_low_precision_op_list()
    paddle.set_flags({_FLAG: 1})
    try:
        yield statistics
    finally:
        found = paddle.base.core.get_low_precision_op_list()
        paddle.set_flags({_FLAG: 0})
        statistics.calls.update(read(found))


@contextmanager
def paused() -> Iterator[None]:
    """Not counted: a backward pass, in which some ops (``scale``) run as forward ops again."""
    paddle.set_flags({_FLAG: 0})
    try:
        yield
    finally:
        paddle.set_flags({_FLAG: 1})


def read(found: Mapping[str, str | list[int]]) -> dict[str, dict[str, int]]:
    """{"conv2d": "0,0,1,0"} as Paddle gives it."""
    calls = {}
    for op, value in found.items():
        numbers = value.split(",") if isinstance(value, str) else value
        calls[op] = dict(zip(_COLUMNS, map(int, numbers), strict=True))
    return calls


def differences(seen: Mapping[str, int], statistics: Statistics) -> list[Difference]:
    """Ops on whose floating-point calls the two do not agree. ``seen`` has Paddle's names of a CPU
    build, see :func:`on_a_cpu`."""
    halves = _COLUMNS[:3]
    counted = {op: sum(by[column] for column in halves) for op, by in statistics.calls.items()}
    names = {op for op in (*seen, *counted) if op not in NOT_COUNTED}
    return [
        Difference(op, seen.get(op, 0), counted.get(op, 0))
        for op in sorted(names)
        if seen.get(op, 0) != counted.get(op, 0)
    ]


def on_a_cpu(ops: Mapping[tuple[str, int], int]) -> Counter[str]:
    """Calls by (op, floating-point inputs) in the names of a CPU build, which computes a linear
    layer as a product and a sum."""
    found: Counter[str] = Counter()
    for (op, inputs), count in ops.items():
        if op == "linear_v2":
            found["matmul_v2"] += count
            if inputs > 2:
                found["elementwise_add"] += count
        else:
            found[op] += count
    return found
