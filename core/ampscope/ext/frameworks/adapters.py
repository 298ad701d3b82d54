"""What every adapter offers and is asked for (the command line of a child, its GPU, controls as
settings), and how the right one is loaded: the first import of its framework.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from ampscope.control import BASELINE, Control, ControlPart
from ampscope.errors import AmpscopeError, BadInput
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.pythons import framework
from ampscope.records import Machine, RunSpec


class Adapter(Protocol):
    """One framework: its module ``adapter``."""

    def machine(self, spec: RunSpec) -> Machine:
        """Where and with what a run of ``spec`` takes place."""

    def probe(
        self, spec: RunSpec, recorder: FrameworkRecorder, is_cancelled: Callable[[], bool]
    ) -> str:
        """Train a shared network (``networks.py``); a sentence on what is not recorded, or ""."""

    def watching(
        self, recorder: FrameworkRecorder, settings: ControlSettings
    ) -> AbstractContextManager[list[str]]:
        """Watch whatever trains inside the block, changed by ``settings``. The list fills with
        sentences on what could not be seen or done. Everything is undone on exit."""

    def seed(self, seed: int) -> None:
        """Seed the framework, NumPy and ``random``."""


def load(name: str) -> Adapter:
    """The adapter; imports its framework. Raises AmpscopeError when that fails."""
    chosen = framework(name)
    try:
        module = importlib.import_module(f"{chosen.package}.{name}.adapter")
    except ImportError as error:
        raise AmpscopeError(
            f"{chosen.title} cannot be imported here: {error}. Run `ampscope frameworks check`."
        ) from error
    return cast(Adapter, module)


@dataclass(frozen=True, slots=True)
class ChildOptions:
    """``--store FILE --run ID --view FOLDER`` of a child."""

    store: Path
    run: str
    view: Path | None  # where a script's private view of its files is made


def child_options() -> ChildOptions:
    """Read from ``sys.argv``, without click, which a framework's environment may lack."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--view", type=Path)
    return ChildOptions(**vars(parser.parse_args()))


def wanted_gpu(device: str, count: int, framework: str) -> int | None:
    """Number of the GPU that "cuda" or "cuda:N" means, of ``count`` that ``framework`` sees; None
    for "auto" and "cpu". Raises BadInput for one that is not there."""
    if not device.startswith("cuda"):
        return None
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        gpus = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        raise BadInput(f"There is no device {device!r}: {framework} here sees {gpus}.")
    return number


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What is changed in a run; the defaults change nothing."""

    precision: str = ""  # fp32 | bf16: in place of the script's own half precision
    scale: float | None = None  # a constant loss scale
    init_scale: float | None = None
    growth_interval: int | None = None
    lr_factor: float = 1.0
    eps: float | None = None
    fp32_modules: tuple[str, ...] = ()  # dotted paths of layers that compute in fp32
    add_scaler: bool = False  # a dynamic scaler with the framework's defaults where there is none


_PLAIN: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "add_scaler": {"add_scaler": True},
}

_NUMBERS: dict[str, tuple[str, type]] = {
    "scale": ("scale", float),
    "init_scale": ("init_scale", float),
    "growth_interval": ("growth_interval", int),
    "lr": ("lr_factor", float),
    "eps": ("eps", float),
}


def parse(control: str) -> ControlSettings:
    """Settings of a control, whose words are those of :class:`ampscope.control.Control`.

    >>> parse("init_scale:1024;growth_interval:2000").init_scale
    1024.0

    Raises BadInput for a value that is not a number, and for what changes calls that only torch's
    scripts make: a diagnosis then says that this fix was not run.
    """
    changed: dict[str, Any] = {}
    for part in Control(control).parts:
        if part.text == BASELINE:
            continue
        if part.text in _PLAIN:
            changed |= _PLAIN[part.text]
        elif part.name in _NUMBERS:
            field, kind = _NUMBERS[part.name]
            changed[field] = _number(part, kind)
        elif part.name == "fp32_modules":
            changed["fp32_modules"] = part.values
        else:
            raise BadInput(f"The intervention {part.text!r} exists for PyTorch alone.")
    return ControlSettings(**changed)


def _number(part: ControlPart, kind: type) -> Any:
    try:
        return kind(float(part.value))
    except (ValueError, OverflowError) as error:  # int(inf)
        raise BadInput(f"{part.text!r} needs a number after the colon.") from error
