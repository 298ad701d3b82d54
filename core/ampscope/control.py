"""What is changed in a run of a script, as a text that is stored with the run: ``Control``.

A control is a list of parts, joined with ``;``. A part is a name, or a name with a value::

    as_is  compiled  fp32  bf16  scale:1024 (frozen)  init_scale:1024  growth_interval:2000
    add_scaler  unscale_first  lr:0.1  eps:1e-4  fp32_params  fp32_state  separate_scalers
    fresh_casts  cleared_grads
    fp32_modules:encoder.0,head  fp32_lines:train.py:41  op_lists:softmax=half

    >>> tried = Control("bf16;fp32_modules:encoder.0,head")
    >>> [part.name for part in tried.parts]
    ['bf16', 'fp32_modules']
    >>> tried.values("fp32_modules")
    ('encoder.0', 'head')
    >>> tried.words
    'in bf16 and with encoder.0, head in fp32'
    >>> Control.of("fp32", lr=0.1)
    'fp32;lr:0.1'

``compiled`` is the unchanged script with torch.compile left on, watched from outside compiled code;
behind it may stand ``backend:aot_eager``, ``eager_casts``, ``eager_random``, ``taps``,
``uncompiled:head`` and ``unfused:aten.gelu``, which change how it is compiled
(:mod:`ampscope.analysis.compiled_runs`).
What a control does to torch is in :mod:`ampscope.runner.controls` and
:mod:`ampscope.runner.interventions`, what it does to Keras and Paddle in
:mod:`ampscope.ext.frameworks.adapters`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ampscope.errors import BadInput
from ampscope.number_words import power_of_two

BASELINE = "as_is"  # the script, unchanged
REPEAT = "repeat"  # unchanged once more, beside the baseline
COMPILED = "compiled"
TAPS = "taps"
LISTS = ("half", "fp32", "widest", "as it comes")  # autocast's, in the words of `policy.op_lists`


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a name means: ``words`` fit behind "run", {} stands for the value. ``takes`` is the
    value in the command line's help, "" of a name without one. ``fix`` is the kind of fix
    (``rules.verdict.FIX_KINDS``) that a run under it tries, "" where the rule says it."""

    words: str
    takes: str = ""
    fix: str = ""
    is_whole: bool = False  # of a number
    is_compiled: bool = False  # of a run that a diagnosis alone makes, with torch.compile on


_NUMBER, _MODULES, _LINES, _OPS = "NUMBER", "PATH,…", "FILE:LINE,…", "OP=LIST,…"
_BACKEND = "NAME"  # of torch.compile
_PACKETS = "OP,…"
_EXAMPLES: Final = {_MODULES: "encoder.0,head", _LINES: "train.py:41"}
KINDS: Final[Mapping[str, _Kind]] = {
    BASELINE: _Kind("unchanged"),
    REPEAT: _Kind("unchanged, once more"),
    COMPILED: _Kind("with torch.compile on", is_compiled=True),
    "backend": _Kind("through the backend {}", _BACKEND, "change_backend", is_compiled=True),
    "eager_casts": _Kind("rounding where eager code does", fix="emulate_casts", is_compiled=True),
    "eager_random": _Kind("with eager code's random numbers", is_compiled=True),
    TAPS: _Kind("with taps inside compiled code", is_compiled=True),
    "uncompiled": _Kind("with {} left uncompiled", _MODULES, "no_compile", is_compiled=True),
    "unfused": _Kind("with {} kept out of fusion", _PACKETS, "keep_unfused", is_compiled=True),
    "fp32": _Kind("in fp32"),
    "nudged": _Kind("with its first rounded input moved a little"),
    "bf16": _Kind("in bf16", fix="use_bf16"),
    "add_scaler": _Kind("with a GradScaler added", fix="add_scaler"),
    "unscale_first": _Kind("with unscale_ before the clip", fix="move_unscale"),
    "fp32_params": _Kind("with its parameters in fp32", fix="fp32_params"),
    "fp32_state": _Kind("with the optimizer's state in fp32", fix="fp32_optimizer_state"),
    "separate_scalers": _Kind("with a scaler for each loss", fix="separate_scalers"),
    "fresh_casts": _Kind("with half copies of weights made anew", fix="refresh_copies"),
    "cleared_grads": _Kind("with gradients cleared after every step"),
    "scale": _Kind("at a loss scale frozen at {}", _NUMBER),
    "init_scale": _Kind("with an initial loss scale of {}", _NUMBER, "change_scale"),
    "growth_interval": _Kind("with a growth interval of {}", _NUMBER, is_whole=True),
    "lr": _Kind("at {} times its learning rate", _NUMBER, "lower_lr"),
    "eps": _Kind("with an epsilon of {}", _NUMBER, "raise_eps"),
    "fp32_modules": _Kind("with {} in fp32", _MODULES, "fp32_module"),
    "fp32_lines": _Kind("with line {} in fp32", _LINES, "rewrite_op"),
    "op_lists": _Kind("with {}", _OPS),
}
INTERVENTIONS: Final = ", ".join(  # that a user may ask for
    f"{name}:{kind.takes}" if kind.takes else name
    for name, kind in KINDS.items()
    if not kind.is_compiled
)


_Value = float | str | tuple[str, ...] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ControlPart:
    """One change, ``name`` or ``name:value``; ``text`` is how it was written."""

    text: str

    @property
    def name(self) -> str:
        """What stands before the first colon."""
        return self.text.partition(":")[0]

    @property
    def value(self) -> str:
        """What stands behind the first colon; "" without one."""
        return self.text.partition(":")[2]

    @property
    def values(self) -> tuple[str, ...]:
        """The value, cut at its commas."""
        return tuple(self.value.split(","))

    @property
    def words(self) -> str:
        """``with encoder.0 in fp32``; of an unknown name what was written."""
        kind = KINDS.get(self.name)
        if kind is None:
            return f"under {self.text}"
        value = self.value.replace("=", " in ") if kind.takes == _OPS else self.value
        if self.name in ("scale", "init_scale"):
            value = _power(value)
        return kind.words.format(value.replace(",", ", "))

    def unknown(self) -> BadInput:
        """The error for a part whose name there is not."""
        return BadInput(f"There is no intervention {self.text!r}. Use one of: {INTERVENTIONS}.")

    def check(self) -> None:
        """Raises BadInput for a name that there is not, and for a value that it cannot have."""
        kind, name, value = KINDS.get(self.name), self.name, self.value
        if kind is None or kind.is_compiled or (not kind.takes and self.text != name):
            raise self.unknown()
        if kind.takes == _NUMBER and not _is_positive(value, whole=kind.is_whole):
            raise BadInput(f"{name} needs a positive number, such as {name}:1024; not {value!r}.")
        if kind.takes in _EXAMPLES and not all(self.values):
            raise BadInput(f"{name} needs a value, such as {name}:{_EXAMPLES[kind.takes]}.")
        if kind.takes == _OPS:
            list_changes(value)


class Control(str):
    """A control: its text, which a run's spec stores byte for byte, and what the text says.

    Any text can be one, also that of another version or of an imported run; :meth:`check` raises
    BadInput for one that is none.
    """

    __slots__ = ()

    @classmethod
    def of(cls, *names: str, **valued: _Value) -> Control:
        """Put together from names without a value and names with one: a number, places (module
        paths or lines), or for ``op_lists`` a map of op to list."""
        return cls(";".join([*names, *(f"{name}:{_written(v)}" for name, v in valued.items())]))

    @property
    def parts(self) -> tuple[ControlPart, ...]:
        """What it is made of, in order; empty parts are left out."""
        return tuple(ControlPart(text) for text in self.split(";") if text)

    @property
    def names(self) -> frozenset[str]:
        """The names of its parts."""
        return frozenset(part.name for part in self.parts)

    @property
    def first(self) -> ControlPart:
        """The first part, which names the control; of an empty control an empty one."""
        return next(iter(self.parts), ControlPart(""))

    @property
    def words(self) -> str:
        """``with encoder.0 in fp32`` for ``fp32_modules:encoder.0``; fits behind "run"."""
        return " and ".join(part.words for part in self.parts) or KINDS[BASELINE].words

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is left on in a run under it."""
        return self.first.name == COMPILED

    @property
    def fix_kind(self) -> str:
        """Which kind of fix its first part is, of a compiled run the next one; "" where only the
        rule that wants it knows."""
        changes = self.parts[1:2] if self.is_compiled else self.parts[:1]
        return next((KINDS[part.name].fix for part in changes if part.name in KINDS), "")

    @property
    def list_changes(self) -> Mapping[str, str]:
        """Op -> list of autocast, as ``op_lists`` changes them; empty without it. Raises BadInput
        for changes that are none."""
        found = next((part.value for part in self.parts if part.name == "op_lists"), None)
        return {} if found is None else list_changes(found)

    @property
    def in_fp32(self) -> Control:
        """This control with every op in fp32 as well."""
        return Control(f"fp32;{self}")

    def values(self, name: str) -> tuple[str, ...]:
        """The values of the first part with that name; none without one."""
        return next((part.values for part in self.parts if part.name == name), ())

    def check(self) -> None:
        """Raises BadInput for the first part that a user cannot ask for, also for an empty one."""
        for text in self.split(";"):
            ControlPart(text).check()


NUDGED: Final = Control("fp32;nudged")  # how far the least change carries a training
SCALE_1: Final = Control("scale:1")  # frozen there: are gradients finite at all?

_OP = re.compile(r"[A-Za-z_]\w*")
_SPELLED = {"as_it_comes": "as it comes"}


def list_changes(text: str) -> Mapping[str, str]:
    """Op -> list of ``softmax=half,mm=fp32``. Raises BadInput for a list that there is not, a name
    that is none, and an op that is named twice."""
    changes: dict[str, str] = {}
    for part in text.split(","):
        op, equals, name = part.strip().partition("=")
        name = _SPELLED.get(name, name)
        if not equals or not _OP.fullmatch(op) or name not in LISTS:
            raise BadInput(
                f"{part.strip()!r} changes no list. Write OP=LIST, for example softmax=half; lists "
                "are half, fp32, widest and as_it_comes."
            )
        if op in changes:
            raise BadInput(f"{op} is put on two lists. Name each op once.")
        changes[op] = name
    return changes


def _written(value: _Value) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{op}={name.replace(' ', '_')}" for op, name in value.items())
    if isinstance(value, tuple):
        return ",".join(value)
    return value if isinstance(value, str) else f"{value:g}"


def _is_positive(text: str, *, whole: bool) -> bool:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return False
    return math.isfinite(number) and number > 0


def _power(text: str) -> str:
    try:
        return power_of_two(float(text))
    except ValueError:
        return text
