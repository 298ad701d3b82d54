"""Lesson 11: memory. What a step holds at its peak, part by part, in three precisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from ampscope.records import MemorySplit, Result
from app import chart
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.figures.memory import PARTS, memory_bars
from app.text import percent, size

FP32, AMP, PURE = "fp32", "fp16", "fp16-pure"
HALVED = 0.55  # of fp32's peak and below
LITTLE = 0.9


def answer(results: Sequence[Result]) -> Answer:
    """By the peak under autocast as a share of fp32's."""
    full, amp = _split(results, FP32), _split(results, AMP)
    share = amp.peak / full.peak
    choice = 0 if share <= HALVED else 1 if share < LITTLE else 2
    return Answer(
        choice,
        f"Under autocast the peak is {size(amp.peak)}, {percent(share)} of the "
        f"{size(full.peak)} in fp32.",
    )


def draw(results: Sequence[Result]) -> None:
    """Bars, and what each part does."""
    splits = [r for r in results if isinstance(r, MemorySplit)]
    chart.key_figures([KeyFigure(_name(s.precision), size(s.peak)) for s in splits])
    figure = memory_bars([replace(s, precision=_name(s.precision)) for s in splits])
    lesson_page.show_chart(figure, "lesson-memory", table(splits), part_words(results))
    chart.see(pure_words(results))


def part_words(results: Sequence[Result]) -> str:
    """What autocast halves, what it keeps and what it adds."""
    full, amp = _split(results, FP32), _split(results, AMP)
    kept = amp.weights + amp.optimizer_state
    return (
        f"fp32 {size(full.peak)}, autocast {size(amp.peak)}. Activations went from "
        f"{size(full.activations)} to {size(amp.activations)}; weights and the optimizer's state "
        f"stay fp32 ({size(kept)}), and half copies of weights and inputs came on top "
        f"({size(amp.cast_copies)}). What autocast runs in fp32 keeps fp32 activations."
    )


def pure_words(results: Sequence[Result]) -> str:
    """What everything in fp16 would save."""
    full, pure = _split(results, FP32), _split(results, PURE)
    return (
        f"With everything in fp16 the peak is {size(pure.peak)}, {percent(pure.peak / full.peak)} "
        "of fp32's: memory is bought with what lesson 6 shows."
    )


def table(splits: Sequence[MemorySplit]) -> pd.DataFrame:
    """Bytes a part."""
    return pd.DataFrame(
        {"part": [words for _, words, _ in PARTS]}
        | {_name(s.precision): [getattr(s, field) for field, _, _ in PARTS] for s in splits}
    )


def _split(results: Sequence[Result], precision: str) -> MemorySplit:
    found = (r for r in results if isinstance(r, MemorySplit) and r.precision == precision)
    return next(found)


def _name(precision: str) -> str:
    return {FP32: "fp32", AMP: "fp16 autocast", PURE: "all in fp16"}[precision]


CODE = {
    "PyTorch": """
torch.cuda.reset_peak_memory_stats()
train_step()
print(torch.cuda.max_memory_allocated() / 2**20, "MiB")

from torch.utils.checkpoint import checkpoint               # fewer activations, more time
hidden = checkpoint(block, hidden, use_reentrant=False)
""",
    "Paddle": """
train_step()
print(paddle.device.cuda.max_memory_allocated() / 2**20, "MiB")
hidden = paddle.distributed.fleet.utils.recompute(block, hidden)
""",
    "Keras": """
train_step()
print(tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20, "MiB")
with keras.RematScope(mode="full"):                         # fewer activations, more time
    block = keras.layers.Dense(1024)                        # built in here: computed anew
""",
}
LESSON = MeasuredLesson(
    id="memory",
    question="fp16 autocast is switched on. What becomes of the memory at a step's peak?",
    choices=("It halves", "It falls, to more than half", "It hardly changes, or grows"),
    answer=answer,
    draw=draw,
    settings={
        "model": Setting("Model", {"gpt": "GPT", "lenet": "LeNet"}),
        "batch": Setting("Batch", {"8": "8", "32": "32", "64": "64"}),
    },
    terms=("activation", "autocast", "master weights", "half precision"),
    code=CODE,
    sources=(Source.PAPER, Source.NVIDIA, Source.TORCH_AMP, Source.PADDLE),
)
