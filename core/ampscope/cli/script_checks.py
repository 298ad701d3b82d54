"""Refuse what is no Python script, or no limit, before a process is started for it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.policy.list_changes import WORD, parse


def checked_limits(steps: int, time_limit_s: float, memory_limit_mib: int) -> None:
    """Raises BadInput for limits under which nothing can run."""
    if steps < 1 or not (math.isfinite(time_limit_s) and time_limit_s > 0) or memory_limit_mib < 0:
        raise BadInput("Steps and the time limit must be positive, the memory limit 0 or more.")


def checked_script(script: str) -> str:
    """The script's absolute path. Raises BadInput with what is wrong with it."""
    path = Path(script)
    if not path.exists():
        raise BadInput(f"There is no file {script}.")
    if path.is_dir():
        raise BadInput(f"{script} is a folder. Name the script in it, or use -m for a package.")
    if not path.is_file():
        raise BadInput(f"{script} is not a file.")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"Cannot read {script}: {error.strerror}.") from error
    if b"\0" in text:
        raise BadInput(f"{script} is not Python: it is a binary file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own run shows them
            compile(text, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        at = f" at line {error.lineno}" if error.lineno else ""
        raise BadInput(f"{script} is not Python: {error.msg}{at}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{script} is not Python that can be compiled: {error}.") from error
    return str(path.absolute())


_PLAIN = ("as_is", "fp32", "bf16", "add_scaler", "unscale_first", "fp32_params", "fp32_state",
          "separate_scalers")  # fmt: skip
_NUMBERS = {"scale": float, "init_scale": float, "growth_interval": int, "lr": float, "eps": float}
_PLACES = ("fp32_modules", "fp32_lines")
INTERVENTIONS = ", ".join([*_PLAIN, *(f"{n}:NUMBER" for n in _NUMBERS), "fp32_modules:PATH,…",
                           "fp32_lines:FILE:LINE,…", "op_lists:OP=LIST,…"])  # fmt: skip


def checked_fix(control: str) -> str:
    """The interventions, joined with ``;``. Raises BadInput for one that is none."""
    for word in control.split(";"):
        name, _, value = word.partition(":")
        if name in _NUMBERS:
            _checked_number(name, value)
        elif name == WORD:
            parse(value)
        elif name in _PLACES:
            if not all(value.split(",")):
                raise BadInput(f"{name} needs a value, such as {_EXAMPLES[name]}.")
        elif word not in _PLAIN:
            raise BadInput(f"There is no intervention {word!r}. Use one of: {INTERVENTIONS}.")
    return control


_EXAMPLES = {"fp32_modules": "fp32_modules:encoder.0,head", "fp32_lines": "fp32_lines:train.py:41"}


def _checked_number(name: str, text: str) -> None:
    try:
        number = _NUMBERS[name](text)
    except ValueError:
        number = 0
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"{name} needs a positive number, such as {name}:1024; not {text!r}.")
