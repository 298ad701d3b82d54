"""The lessons as data: what the dashboard lists and what a spec may ask for. Imports no torch.

    >>> lesson_spec("underflow", model="gpt").settings[0]
    ('model', 'gpt')

A lesson's settings have few values each, so that equal questions meet in one measurement and a
browser can ask for nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ampscope import __version__
from ampscope.errors import BadInput
from ampscope.records import RunSpec

VERSION = "version"  # the setting that names what made a measurement
TIME_LIMIT_S = 60.0  # twelve times what a lesson may take on two cores


@dataclass(frozen=True, slots=True)
class LessonInfo:
    """One lesson. ``settings`` has the allowed values by name, each one's default first.

    Lessons on numbers run on the CPU by CUDA's rules everywhere: the same numbers on every desk,
    and no wait for a GPU. Lessons on speed run on what the machine has, by its own rules.
    """

    id: str
    number: int
    title: str
    sentence: str  # what will be seen
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_speed: bool = False
    is_measured: bool = True  # by a run of its own; else by diagnoses
    revision: int = (
        1  # counted up when the measurement changes, so that older results are not shown
    )


_ORDER: Final = (
    LessonInfo(
        "numbers", 1, "Numbers",
        "Every format is a sign, an exponent and a mantissa; flip their bits and see what is left "
        "of a number.",
    ),
    LessonInfo(
        "gradients", 2, "Where gradients live",
        "The gradients of a real model spread over dozens of powers of two, and most are tiny.",
        {"model": ("gpt", "lenet", "resnet")},
    ),
    LessonInfo(
        "underflow", 3, "Underflow and loss scaling",
        "In fp16 small gradients become zero; multiplying the loss moves all of them up at once.",
        {"model": ("gpt", "lenet"), "loss": ("small", "usual")},
    ),
    LessonInfo(
        "scaler", 4, "The dynamic scaler",
        "The scaler finds its scale by trying: the first skipped steps are how it searches.",
        {"loss": ("sum", "mean")},
    ),
    LessonInfo(
        "ops", 5, "Which op in which precision",
        "Autocast decides op by op: matmuls in half, and what adds up or exponentiates in fp32.",
        {"model": ("gpt", "resnet")},
    ),
    LessonInfo(
        "half", 6, "Why model.half() fails",
        "The LeNet of many tutorials, trained as they write it and as it should be.",
        {"optimizer": ("adam", "sgd")},
        revision=3,
    ),
    LessonInfo(
        "master", 7, "Master weights",
        "A step that is small beside its weight is rounded away: w + Δ == w.",
        revision=2,
    ),
    LessonInfo(
        "bf16", 8, "bf16 or fp16",
        "Sixteen bits buy range or precision: the same model in both, with and without a scaler.",
        {"loss": ("usual", "small")},
        revision=2,
    ),
    LessonInfo(
        "inf_to_nan", 9, "How one Inf becomes NaN",
        "One overflow, followed op by op from the forward pass into the weights.",
        {"scaler": ("without", "with"), "batch": ("one", "every")},
    ),
    LessonInfo(
        "accumulate", 10, "Accumulate in fp32",
        "A running sum in half precision stops growing long before it is done.",
        {"term": ("1", "0.1", "0.01")},
    ),
    LessonInfo(
        "memory", 11, "Memory",
        "Where the memory of a training step goes, and which part of it half precision halves.",
        {"model": ("gpt", "lenet"), "batch": ("8", "32", "64")},
    ),
    LessonInfo(
        "speed", 12, "Speed",
        "Half precision is faster where the hardware has instructions for it, and shapes that fit.",
        is_speed=True,
    ),
    LessonInfo(
        "mistakes", 13, "Eight common mistakes",
        "Eight scripts, each with one mistake, and what a diagnosis says of them.",
        is_measured=False,
    ),
    LessonInfo(
        "cost", 14, "What it costs",
        "Energy and money for a whole training, from the throughput measured here.",
        {"model": ("gpt", "lenet", "mlp")}, is_speed=True,
    ),
)  # fmt: skip
LESSONS: Final[Mapping[str, LessonInfo]] = MappingProxyType({one.id: one for one in _ORDER})


def lesson_spec(lesson: str, **asked: str) -> RunSpec:
    """The spec of a lesson's measurement, with every setting that was not asked for at its default.

    Raises BadInput for what is no lesson, no setting of it or no value of a setting.
    """
    info = _known(lesson)
    for name, value in asked.items():
        if value not in info.settings.get(name, ()):
            raise BadInput(f"Lesson {lesson!r} has no setting {name}={value}.")
    settings = [(name, asked.get(name, values[0])) for name, values in info.settings.items()]
    return RunSpec(
        workload=lesson,
        kind="lesson",
        steps=1,
        device="auto" if info.is_speed else "cpu",
        policy="native" if info.is_speed else "auto",
        time_limit_s=TIME_LIMIT_S,
        settings=(*settings, (VERSION, f"{__version__}.{info.revision}")),
    )


def every_spec(lesson: str) -> Iterator[RunSpec]:
    """A lesson's measurement in each of its settings, the default first."""
    info = _known(lesson)
    for values in itertools.product(*info.settings.values()) if info.is_measured else ():
        yield lesson_spec(lesson, **dict(zip(info.settings, values, strict=True)))


def lesson_title(spec: RunSpec) -> str:
    """``lesson 3, Underflow and loss scaling (model gpt, loss small)``"""
    info = LESSONS.get(spec.workload)
    name = f"lesson {info.number}, {info.title}" if info else f"lesson {spec.workload}"
    settings = [f"{name} {value}" for name, value in spec.settings if name != VERSION]
    return name + (f" ({', '.join(settings)})" if settings else "")


def checked_lesson(spec: RunSpec) -> None:
    """Refuse a spec that :func:`lesson_spec` would not make. Raises BadInput."""
    asked = {name: value for name, value in spec.settings if name != VERSION}
    wanted = lesson_spec(spec.workload, **asked).settings
    if wanted != spec.settings:
        raise BadInput(f"Lesson {spec.workload!r} takes the settings {dict(wanted)}.")


def _known(lesson: str) -> LessonInfo:
    info = LESSONS.get(lesson)
    if info is None or not info.is_measured:
        names = ", ".join(one.id for one in _ORDER if one.is_measured)
        raise BadInput(f"There is no lesson {lesson!r} to measure. There are: {names}.")
    return info


# Scripts that lessons diagnose: lesson 13's eight mistakes with their fixed counterparts, and
# lesson 6's training in fp16. No torch.


STEPS = 300  # as the zoo's diagnoses


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake; its script is ``mistakes/ID.py``, the fixed one ``mistakes/ID_fixed.py``."""

    id: str
    title: str
    sentence: str
    policy: str = "native"  # under whose autocast rules the fault shows: native or cuda


MISTAKES = (
    Mistake("cast_by_hand", "Casting by hand", "model.half(), and a GradScaler beside it."),
    Mistake("no_scaler", "No scaler", "fp16 autocast whose gradients are tiny."),
    Mistake(
        "clip_before_unscale",
        "Clipping before unscale_",
        "The norm that is clipped still carries the loss scale.",
    ),
    Mistake(
        "unscale_each_micro_batch",
        "unscale_ in every micro-batch",
        "Gradients are accumulated, and unscaled after each part.",
    ),
    Mistake(
        "scaler_state_not_saved",
        "Scaler state not saved",
        "A checkpoint holds model and optimizer, and not the scaler.",
    ),
    Mistake(
        "amp_in_evaluation",
        "AMP in evaluation",
        "The score is added up in half precision.",
    ),
    Mistake("bce_loss", "BCELoss", "A sigmoid, then BCELoss, under CUDA's autocast rules.", "cuda"),
    Mistake("scaler_for_bf16", "A scaler for bf16", "bf16 autocast with a GradScaler."),
)
HALF_LENET = Mistake(
    "half_lenet",
    "model.half()",
    "This lesson's training as a script of its own, which knows nothing of ampscope.",
)
BY_ID = {mistake.id: mistake for mistake in (*MISTAKES, HALF_LENET)}


def script_path(mistake: str, *, is_fixed: bool = False) -> Path:
    """The script's file."""
    name = f"{mistake}_fixed.py" if is_fixed else f"{mistake}.py"
    return Path(str(resources.files("ampscope.lessons"))) / "mistakes" / name
