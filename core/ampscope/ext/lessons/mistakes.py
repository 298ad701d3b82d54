"""Lesson 13: eight scripts with one mistake each. They lie in ``scripts/`` beside their fixed
counterparts and are diagnosed, not measured; so is lesson 6's training in fp16. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampscope.ext.lessons.catalog import LessonInfo

INFO = LessonInfo(
    id="mistakes",
    number=13,
    title="Eight common mistakes",
    icon="bug_report",
    sentence="Eight scripts, each with one mistake, and what a diagnosis says of them.",
    is_measured=False,
)
STEPS = 300  # as the zoo's diagnoses
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake; its script is ``scripts/ID.py``, the fixed one ``scripts/ID_fixed.py``."""

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
    return SCRIPTS / name
