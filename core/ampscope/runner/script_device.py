"""Scripts that ask for AMP on CUDA, on a machine that has none.

``torch.cuda.amp.autocast()``, ``torch.autocast("cuda")`` and ``GradScaler()`` then switch
themselves off with a warning: the script is an fp32 run, and what AMP does to it stays unseen.
Under the policy ``rehearsal`` they are redirected to the CPU, with CUDA's default dtype; under any
other the request is only noted, so that the run can say what it was.

Below a simulated device (an extension's) a script that takes the device that is there,
``torch.autocast(device.type)``, names CUDA. Where it names the CPU itself, without a dtype, the
CPU's default bf16 stays, and a note says so. A script that runs compiled has no such device: there
the same region names the CPU, and gets CUDA's default, fp16, if the script asked whether there is a
CUDA device and has no scaler that stayed off for lack of one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampscope.patches import Patches
from ampscope.runner.device import has_cuda
from ampscope.runner.half_requests import HalfRequests
from ampscope.source_lines import SourceLines, line_name


class CudaRequests:
    """What was asked of CUDA, and where first."""

    def __init__(
        self, lines: SourceLines, redirect: bool, requests: HalfRequests, *, stands_in: bool = True,
        on_missing: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """``stands_in``: the script finds a CUDA device, if ``redirect``. ``on_missing`` is called
        when torch is about to switch off what the script asks of CUDA."""
        self._on_missing = on_missing
        self.redirect = redirect
        self._stands_in = stands_in
        self._requests = requests
        self._lines = lines
        self._asked: dict[str, str] = {}  # "autocast" -> "train.py:12"
        self._asks = False  # the user's own code asked whether there is a device
        self._stayed_off = False  # a scaler was made that is not enabled
        self._default = torch.float16  # CUDA's; what the script set instead
        self._kept: dict[str, None] = {}  # lines of regions that stay in bf16

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note and, under a rehearsal, redirect; nothing where there is a CUDA device."""
        if has_cuda():
            yield
            return
        with Patches() as patches:
            patches.wrap(torch.amp.autocast_mode.autocast, "__init__", self._autocast)
            patches.wrap(torch.amp.GradScaler, "__init__", self._scaler)
            if not self._stands_in:
                patches.wrap(torch.cuda, "is_available", self._is_available)
            if self.redirect:
                for name in ("is_autocast_enabled", "set_autocast_enabled"):
                    patches.wrap(torch, name, _on_cpu)
                patches.wrap(torch, "get_autocast_dtype", self._get_dtype)
                patches.wrap(torch, "set_autocast_dtype", self._set_dtype)
                patches.replace(torch, "get_autocast_gpu_dtype", _cuda_dtype)
                patches.replace(torch, "set_autocast_gpu_dtype", _set_cuda_dtype)
                for owner in (torch.amp, torch.amp.autocast_mode):
                    for name in ("custom_fwd", "custom_bwd"):
                        patches.wrap(owner, name, _device_type_cpu)
            yield

    def note(self, *, ran_half: bool) -> str:
        """One sentence; "" when nothing was asked of CUDA. ``ran_half``: something else of the
        script computed in half precision."""
        told = [self._note_on_cuda(ran_half=ran_half)]
        told += [
            f"autocast at {line} names the CPU, so it stayed in bfloat16, the CPU's default. "
            "CUDA's default is float16."
            for line in self._kept
        ]
        return " ".join(filter(None, told))

    @property
    def is_awaited(self) -> bool:
        """Whether the script looked for a CUDA device, and there is none."""
        asked = {use.name for use in self._requests.records()}
        return bool(asked & {"cuda_asked", "trainer_fp16"}) and not self.redirect and not has_cuda()

    @property
    def follows_device(self) -> bool:
        """Whether the script looked for a CUDA device and has another kind of half without it: its
        scaler stayed off, or its autocast takes the default of the device, which is not fp16."""
        facts = {use.name for use in self._requests.records()}
        return self.is_awaited and (self._stayed_off or "cpu_default" in facts)

    def ends_the_run(self) -> None:
        """The run ends for want of a device, and says so to those who may run it again."""
        self._requests.add("cuda_missing", "training", "")

    def _note_on_cuda(self, *, ran_half: bool) -> str:
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

    def _means_cuda(self) -> bool:
        """Whether a region that names the CPU would name CUDA on a machine that has it."""
        return not self._stands_in and self._asks and not self._stayed_off

    def _is_available(self, original: Any) -> Any:
        self._asks |= self._lines.is_user(sys._getframe(2).f_code)  # the wrapper's caller
        return original()

    def _ask(self, what: str) -> None:
        line = line_name(self._lines.where())
        self._asked.setdefault(what, line)
        if not self.redirect:
            self._requests.add("cuda_missing", what, line)
            self._on_missing()

    def _autocast(
        self, original: Any, region: Any, device_type: str, *args: Any, **kwargs: Any
    ) -> None:
        enabled = args[1] if len(args) > 1 else kwargs.get("enabled", True)
        if device_type == "cuda":
            if enabled:
                self._ask("autocast")
            if self.redirect:
                device_type = "cpu"
                args, kwargs = self._with_cuda_dtype(args, kwargs)
        elif device_type == "cpu" and enabled:
            dtype = args[0] if args else kwargs.get("dtype")
            if not self.redirect:
                if dtype is None and (where := self._lines.where())[0]:
                    self._requests.add("cpu_default", "autocast", line_name(where))
            elif dtype is None and self._means_cuda():
                args, kwargs = self._with_cuda_dtype(args, kwargs)
            elif dtype is None and (where := self._lines.where())[0]:
                self._kept[line_name(where)] = None
        original(region, device_type, *args, **kwargs)

    def _scaler(
        self, original: Any, scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any
    ) -> None:
        enabled = args[4] if len(args) > 4 else kwargs.get("enabled", True)
        on_cuda = str(device).partition(":")[0] == "cuda"
        self._stayed_off |= not enabled
        if on_cuda:
            if enabled:
                self._ask("GradScaler")
            device = "cpu" if self.redirect else device
        original(scaler, device, *args, **kwargs)

    def _with_cuda_dtype(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Without a dtype, autocast takes the device's own: fp16 on CUDA, bf16 on a CPU."""
        if args:
            return (self._dtype() if args[0] is None else args[0], *args[1:]), kwargs
        return args, {**kwargs, "dtype": kwargs.get("dtype") or self._dtype()}

    def _dtype(self) -> torch.dtype:
        """What a region on CUDA without a dtype takes: the region's around it, or the default."""
        is_inside = torch.is_autocast_enabled("cpu")
        return torch.get_autocast_dtype("cpu") if is_inside else self._default

    def _get_dtype(self, original: Any, device_type: str) -> Any:
        own = self._lines.is_user(sys._getframe(2).f_code)  # the wrapper's caller
        if device_type == "cuda" or (device_type == "cpu" and own and self._means_cuda()):
            is_inside = torch.is_autocast_enabled("cpu")
            return original("cpu") if is_inside else self._default
        return original(device_type)

    def _set_dtype(self, original: Any, device_type: str, dtype: torch.dtype) -> None:
        own = device_type == "cpu" and self._lines.is_user(sys._getframe(2).f_code)
        on_cuda = device_type == "cuda" and not torch.is_autocast_enabled("cpu")
        if on_cuda or (own and self._means_cuda()):
            self._default = dtype
        original("cpu" if device_type == "cuda" else device_type, dtype)


def _on_cpu(original: Any, *args: Any) -> Any:
    """``is_autocast_enabled("cuda")`` and the like ask and set the CPU's state.

    The two oldest spellings, ``is_autocast_enabled()`` and ``set_autocast_enabled(flag)``, mean
    CUDA as well.
    """
    if not args or isinstance(args[0], bool):
        args = ("cuda", *args)
    return original("cpu" if args[0] == "cuda" else args[0], *args[1:])


def _cuda_dtype(original: Any) -> Any:
    return lambda: torch.get_autocast_dtype("cuda")


def _set_cuda_dtype(original: Any) -> Any:
    return lambda dtype: torch.set_autocast_dtype("cuda", dtype)


def _device_type_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("device_type") == "cuda":
        kwargs["device_type"] = "cpu"
    return original(*args, **kwargs)
