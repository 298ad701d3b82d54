"""Figures that are built once for all browsers that ask for the same one.

    @cached_figure
    def lines(curves: Sequence[Line], *, x_title: str) -> go.Figure: …

    lines(curves, x_title="step")          # built once for these curves; no caller may change it
    lines.fresh(curves, x_title="step")    # the caller's own, to add to

Building a figure and turning it into plain data is three quarters of what a lesson's page costs
the server, and of sixty students who move a slider most come to a place where another one has
been.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, ParamSpec

import plotly.graph_objects as go

P = ParamSpec("P")
MAX_FIGURES = 128  # of about 0.3 MB each


class cached_figure(Generic[P]):  # noqa: N801  # a decorator
    """Arguments are compared by content (their pickled bytes), so lists and arrays will do."""

    def __init__(self, build: Callable[P, go.Figure]) -> None:
        self.fresh = build
        self._figures: OrderedDict[bytes, CachedFigure] = OrderedDict()
        self._lock = threading.Lock()
        functools.update_wrapper(self, build)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> go.Figure:
        key = hashlib.blake2b(pickle.dumps((args, kwargs)), digest_size=16).digest()
        with self._lock:
            figure = self._figures.pop(key, None)
            if figure is not None:
                self._figures[key] = figure  # the newest again
                return figure
        figure = CachedFigure(self.fresh(*args, **kwargs))
        with self._lock:
            self._figures[key] = figure
            if len(self._figures) > MAX_FIGURES:
                self._figures.popitem(last=False)
        return figure


class CachedFigure(go.Figure):  # type: ignore[misc]  # plotly has no types
    """A figure whose plain data is computed once. It must not change after it was drawn."""

    @functools.cached_property
    def plain(self) -> dict[str, Any]:
        """What plotly.js gets."""
        data: dict[str, Any] = super().to_dict()
        return data

    def to_dict(self) -> dict[str, Any]:
        """Shared by all who draw it."""
        return self.plain
