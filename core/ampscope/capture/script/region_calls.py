"""Wrappers of what an op runs in: autocast regions and the user's own autograd.Functions."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ampscope.capture.script.calls import Calls
from ampscope.capture.script.function_calls import wrap_functions
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.patches import Patches
from ampscope.formats import dtype_name


class RegionCalls:
    """Logs autocast regions, each once per dtype and line, and tells the watch where it is."""

    def __init__(self, calls: Calls, watch: OpWatch) -> None:
        self._calls = calls
        self._watch = watch
        self._open: list[str] = []  # dtypes of the open regions, "" for one that is switched off
        self._seen: set[tuple[str, str]] = set()

    def wrap(self, patches: Patches) -> None:
        """Put the wrappers on; ``patches`` takes them off."""
        patches.replace(torch.amp.autocast_mode.autocast, "__enter__", self._enter)
        patches.replace(torch.amp.autocast_mode.autocast, "__exit__", self._exit)
        wrap_functions(self._watch, patches)

    def _enter(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(region: Any) -> Any:
            enabled = bool(region._enabled)
            dtype = dtype_name(region.fast_dtype) if enabled else ""
            self._open.append(dtype)
            self._watch.autocast = dtype
            line = self._calls.line()
            if (dtype, line) not in self._seen:
                self._seen.add((dtype, line))
                note = str(region.device)
                self._calls.add("autocast", dtype=dtype, enabled=enabled, note=note)
            return original(region)

        return wrapper

    def _exit(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(region: Any, *args: Any) -> Any:
            if self._open:
                self._open.pop()
            self._watch.autocast = self._open[-1] if self._open else ""
            return original(region, *args)

        return wrapper
