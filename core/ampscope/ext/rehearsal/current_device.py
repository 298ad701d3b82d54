"""Who asks ``torch.cuda``, and which device is current in that thread of a script.

Who asks decides: a script and its libraries are told of the device, torch's inner code and ampscope
are told the truth.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType
from typing import Any, Final

import torch

from ampscope.patches import Patches

# What counts as the script's own question when it is asked on the script's behalf.
_PASS_ON: Final = (
    "torch.cuda.", "torch.accelerator.",
    *(f"{__package__}.{name}." for name in ("cuda_answers", "cuda_streams", "current_device")),
)  # fmt: skip
_chosen = threading.local()  # this thread's torch.cuda.set_device


def asked_by_torch() -> bool:
    """Whether the wrapped call comes from ampscope or from torch itself, and not from the script or
    one of its libraries. Other wrappers of the same function may lie in between. What
    ``torch.cuda`` asks itself is asked by its caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = f"{name_of(frame)}."
        if name == f"{Patches.__module__}.":
            frame = frame.f_back
            outer = frame.f_back if frame is not None else None
            if outer is not None and name_of(outer) == Patches.__module__:
                frame = outer
            continue
        if not name.startswith(_PASS_ON):
            return name.startswith(("ampscope.", "torch."))
        frame = frame.f_back
    return False


def name_of(frame: FrameType) -> str:
    """The module whose code the frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def device_named(asked: Any) -> torch.device:
    """The device that a script names by a word, a number or a device, with its index."""
    if isinstance(asked, torch.device):
        found = asked
    elif isinstance(asked, int):
        found = torch.device("cuda", asked)
    else:
        found = torch.device(asked)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", current_device())
    return found


def index_of(device: Any) -> int:
    """Of a device that is given as in :func:`device_named`; None is the current one."""
    return current_device() if device is None else device_named(device).index or 0


def device_count() -> int:
    """Devices of this machine: one for each rank that a launcher has started here."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def current_device() -> int:
    """The index that this thread has chosen, 0 until then."""
    found: int = getattr(_chosen, "index", 0)
    return found


def set_device(device: Any = None) -> None:
    """A negative index changes nothing, as in torch. Any other is there: ranks that the script
    starts by itself choose theirs, and only the script knows how many they are."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _chosen.index = index


class ChosenDevice(contextlib.ContextDecorator):
    """``torch.cuda.device``: another current device inside. None is the one that is current."""

    def __init__(self, device: Any = None) -> None:
        self._device = device
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(current_device())
        if self._device is not None:
            set_device(self._device)

    def __exit__(self, *error: object) -> None:
        _chosen.index = self._before.pop()


class DeviceOf(ChosenDevice):
    """``torch.cuda.device_of``: the device of a tensor; one on the CPU changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device())  # -1 on the CPU


def get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """torch's own helper ``_get_device_index``, which libraries use."""
    if device is None and not optional:
        raise ValueError(
            "Expected a torch.device with a specified index or an integer, but got:None"
        )
    place = device_named("cuda" if device is None else device)
    if place.type != "cuda" and not (allow_cpu and place.type == "cpu"):
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return -1 if place.type == "cpu" else place.index or 0
