"""Controls and interventions: the same script in another precision, at another scale, with a fix.

A control is a word, so that it can be stored with the run and repeated:

    as_is  compiled  fp32  bf16  scale:1024 (frozen)  init_scale:1024  growth_interval:2000
    add_scaler  unscale_first  lr:0.1  eps:1e-4  fp32_params  fp32_state  separate_scalers
    fp32_modules:encoder.0,head  fp32_lines:train.py:41  op_lists:softmax=half

``compiled`` is the script as it is with torch.compile left on, watched from outside compiled code.
They work through torch functions and public methods only, and are undone on exit. Several are
joined with ``;``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from ampscope.errors import BadInput
from ampscope.policy.custom_lists import custom_lists
from ampscope.policy.list_changes import parse
from ampscope.run import fp32_islands, precision_controls
from ampscope.run.interventions.added_scaler import add_scaler
from ampscope.run.interventions.loss_scale import frozen_scale, growth_interval, initial_scale
from ampscope.run.interventions.optimizer_steps import fp32_state, scaled_lr
from ampscope.run.interventions.separate_scalers import separate_scalers
from ampscope.run.interventions.unscaled_clips import unscale_first

COMPILED = "compiled"


@contextlib.contextmanager
def _changed_lists(text: str) -> Iterator[None]:
    """Some ops on another list, under autocast on either device."""
    changes = parse(text)
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(custom_lists(changes, device_type))
        yield


_PLAIN: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fp32": precision_controls.everything_fp32,
    "bf16": precision_controls.half_as_bf16,
    "add_scaler": add_scaler,
    "unscale_first": unscale_first,
    "fp32_params": precision_controls.parameters_fp32,
    "fp32_state": fp32_state,
    "separate_scalers": separate_scalers,
}
_VALUED: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "scale": lambda text: frozen_scale(float(text)),
    "init_scale": lambda text: initial_scale(float(text)),
    "growth_interval": lambda text: growth_interval(int(text)),
    "lr": lambda text: scaled_lr(float(text)),
    "eps": lambda text: fp32_islands.larger_eps(float(text)),
    "op_lists": _changed_lists,
}
_PLACES = ("fp32_modules", "fp32_lines")


@contextlib.contextmanager
def applied(control: str, own_folder: str = "") -> Iterator[list[set[str]]]:
    """Run the body under ``control``; ``own_folder`` holds the script. Gives the sets of modules
    and lines that are to be in fp32 and were not met yet.

    Raises BadInput for a word that is not a control.
    """
    missing: list[set[str]] = []
    with contextlib.ExitStack() as stack:
        for word in filter(None, control.split(";")):
            name, _, value = word.partition(":")
            if name in ("as_is", COMPILED):
                continue
            if name in _PLAIN:
                stack.enter_context(_PLAIN[name]())
            elif name == "fp32_lines":
                lines = fp32_islands.fp32_lines(value.split(","), own_folder)
                missing.append(stack.enter_context(lines))
            elif name == "fp32_modules":
                missing.append(stack.enter_context(fp32_islands.fp32_modules(value.split(","))))
            elif name in _VALUED:
                stack.enter_context(_VALUED[name](value))
            else:
                known = ", ".join([*_PLAIN, *(f"{n}:VALUE" for n in (*_VALUED, *_PLACES))])
                raise BadInput(f"There is no control called {word!r}. Use one of: {known}.")
        yield missing
