"""Which CUDA kernels ran for which product, from torch.profiler.

Each product runs in a range of its own. The profiler links a kernel to the op that launched it, so
the kernels of a product are those of the ops inside its range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # bound in C++
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "ampscope-product-"
_NO_KERNEL = ("Mem", _RANGE)  # copies, fills, and the range itself on the device's time line


class KernelProfile:
    """While entered, kernels are recorded; :attr:`kernels` afterwards."""

    source = "torch.profiler"

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[str, ...]] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def __enter__(self) -> KernelProfile:
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, where)  # type: ignore[no-untyped-call]  # as above
        if error is None:
            events = self._profile.events()  # type: ignore[no-untyped-call]  # as above
            self.kernels = kernels_by_product(events or ())

    def mark(self, number: int) -> AbstractContextManager[object]:
        """Kernels that are launched inside belong to product ``number``."""
        return record_function(f"{_RANGE}{number}")


def kernels_by_product(events: Any) -> dict[int, tuple[str, ...]]:
    """Product's number -> names of its kernels, each once. ``events`` are FunctionEvents."""
    found: dict[int, dict[str, None]] = {}
    for event in events:
        if event.name.startswith(_RANGE) and event.device_type == DeviceType.CPU:
            number = int(event.name.removeprefix(_RANGE))
            found.setdefault(number, {}).update(dict.fromkeys(_names(event)))
    return {number: tuple(names) for number, names in found.items()}


def _names(event: Any) -> Iterator[str]:
    for kernel in event.kernels:
        if not kernel.name.startswith(_NO_KERNEL):
            yield kernel.name
    for child in event.cpu_children:
        yield from _names(child)
