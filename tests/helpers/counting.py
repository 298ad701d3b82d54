"""Histograms counted one element at a time, and what the hooks counted of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import ModelMap
from ampscope.numerics.histogram import Raw
from ampscope.records import Frame, Role
from tests.helpers.exponent_oracle import row_of


def by_hand(tensor: Tensor) -> Raw:
    """One element at a time."""
    return row_of(tensor.detach().double().flatten().tolist())


@contextmanager
def hooked(model: nn.Module) -> Iterator[HistogramHooks]:
    with HistogramHooks(ModelMap(model), Accumulator()) as hooks:
        hooks.start_step(0, active=True)
        yield hooks


def counted(model: nn.Module, run: Callable[[], object]) -> dict[Role, Frame]:
    with hooked(model) as hooks:
        run()
        hooks.end_step()
        return hooks.counts.take(0, 8.0)
