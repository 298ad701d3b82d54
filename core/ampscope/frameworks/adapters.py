"""What every adapter offers, and how the right one is loaded: the first import of its framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, cast

from ampscope.errors import AmpscopeError
from ampscope.frameworks.names import framework
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings
from ampscope.records import Machine, RunSpec


class Adapter(Protocol):
    """One framework."""

    def machine(self, spec: RunSpec) -> Machine:
        """Where and with what a run of ``spec`` takes place."""

    def probe(self, spec: RunSpec, recorder: Recorder, is_cancelled: Callable[[], bool]) -> str:
        """Train a shared network (``networks.py``); a sentence on what is not recorded, or ""."""

    def watching(self, recorder: Recorder, settings: Settings) -> AbstractContextManager[list[str]]:
        """Watch whatever trains inside the block, changed by ``settings``. The list fills with
        sentences on what could not be seen or done. Everything is undone on exit."""

    def seed(self, seed: int) -> None:
        """Seed the framework, NumPy and ``random``."""


def load(name: str) -> Adapter:
    """The adapter; imports its framework. Raises AmpscopeError when that fails."""
    chosen = framework(name)
    try:
        module = importlib.import_module(f"ampscope.frameworks.{name}.adapter")
    except ImportError as error:
        raise AmpscopeError(
            f"{chosen.title} cannot be imported here: {error}. Run `ampscope frameworks check`."
        ) from error
    return cast(Adapter, module.ADAPTER)
