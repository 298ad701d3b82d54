"""Scripts that ask for AMP on CUDA, on a machine that has none.

``torch.cuda.amp.autocast()``, ``torch.autocast("cuda")`` and ``GradScaler()`` then switch
themselves off with a warning: the script is an fp32 run, and what AMP does to it stays unseen.
Under the policy ``rehearsal`` they are redirected to the CPU, with CUDA's default dtype; under any
other the request is only noted, so that the run can say what it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampscope.capture.script.patches import Patches
from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.run.half_requests import HalfRequests

Wrap = Callable[[Any], Any]


class CudaRequests:
    """What was asked of CUDA, and where first."""

    def __init__(self, lines: SourceLines, redirect: bool, requests: HalfRequests) -> None:
        self.redirect = redirect
        self._requests = requests
        self._lines = lines
        self._asked: dict[str, str] = {}  # "autocast" -> "train.py:12"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note and, under a rehearsal, redirect; nothing where there is a CUDA device."""
        if torch.cuda.is_available():
            yield
            return
        patches = Patches()
        patches.replace(torch.amp.autocast_mode.autocast, "__init__", self._autocast)
        patches.replace(torch.amp.GradScaler, "__init__", self._scaler)
        if self.redirect:
            for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled",
                         "set_autocast_dtype"):  # fmt: skip
                patches.replace(torch, name, _on_cpu(name))
            patches.replace(torch, "get_autocast_gpu_dtype", _cpu_dtype)
            for owner in (torch.amp, torch.amp.autocast_mode):
                for name in ("custom_fwd", "custom_bwd"):
                    patches.replace(owner, name, _device_type_cpu)
        try:
            yield
        finally:
            patches.undo()

    def note(self, *, ran_half: bool) -> str:
        """One sentence; "" when nothing was asked of CUDA. ``ran_half``: something else of the
        script computed in half precision."""
        if not self._asked:
            return ""
        what = " and ".join(sorted(self._asked))
        where = next(iter(self._asked.values()))
        at = f" (first at {where})" if where else ""
        if self.redirect:
            return (
                f"The script asks for {what} on CUDA{at}; this machine has none, so they were "
                "redirected to the CPU, which rehearses CUDA's rules."
            )
        off = (
            "torch switched these off; what ran in half precision did so without them"
            if ran_half
            else "torch switched AMP off and this was an fp32 run"
        )
        return (
            f"The script asks for {what} on CUDA{at}; this machine has none, so {off}: "
            "--policy cuda rehearses it on the CPU."
        )

    def _ask(self, what: str) -> None:
        line = line_name(self._lines.where())
        self._asked.setdefault(what, line)
        if not self.redirect:
            self._requests.add("cuda_missing", what, line)

    def _autocast(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(region: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda":
                if args[1] if len(args) > 1 else kwargs.get("enabled", True):
                    self._ask("autocast")
                if self.redirect:
                    device_type = "cpu"
                    args, kwargs = _with_cuda_dtype(args, kwargs)
            original(region, device_type, *args, **kwargs)

        return wrapper

    def _scaler(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            if str(device).partition(":")[0] == "cuda":
                if args[4] if len(args) > 4 else kwargs.get("enabled", True):
                    self._ask("GradScaler")
                device = "cpu" if self.redirect else device
            original(scaler, device, *args, **kwargs)

        return wrapper


def _with_cuda_dtype(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Without a dtype, autocast takes the device's own: fp16 on CUDA, bf16 on a CPU."""
    if args:
        return (torch.float16 if args[0] is None else args[0], *args[1:]), kwargs
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float16}


def _on_cpu(name: str) -> Wrap:
    """``is_autocast_enabled("cuda")`` and the like ask and set the CPU's state.

    The two oldest spellings, ``is_autocast_enabled()`` and ``set_autocast_enabled(flag)``, mean
    CUDA as well.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any) -> Any:
            if not args or isinstance(args[0], bool):
                args = ("cuda", *args)
            return original("cpu" if args[0] == "cuda" else args[0], *args[1:])

        return wrapper

    return make


def _cpu_dtype(original: Any) -> Any:
    return lambda: torch.get_autocast_dtype("cpu")


def _device_type_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == "cuda":
            kwargs["device_type"] = "cpu"
        return original(*args, **kwargs)

    return wrapper
