"""Lesson 12: speed. Matmuls by size, misaligned sizes, and two models, on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ampscope.number_words import rate_words
from ampscope.records import Rate, Reading, Result, StepTimes
from ampscope.story.palette import DTYPES
from app import chart
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import SYMBOLS, Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson
from app.ext.lessons.lesson_runs import warn
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import duration, percent

DASHES = {"fp32": "solid", "tf32": "solid", "bf16": "dash", "fp16": "dot"}
GAINS = 1.1  # times as fast, and more: beyond the spread of a step


def answer(results: Sequence[Result]) -> Answer:
    """By the step of the tiny MLP in bf16, compared with fp32."""
    gain = _gain(results, "mlp")
    choice = 0 if gain >= GAINS else 1 if gain > 1 / GAINS else 2
    gpt = _gain(results, "gpt")
    return Answer(
        choice,
        f"A step of the tiny MLP is {gain:.2f} times as fast in bf16 as in fp32; a step of the "
        f"small GPT {gpt:.2f} times.",
    )


def draw(results: Sequence[Result]) -> None:
    """Rates over size, then words on the rest."""
    rates = [r for r in results if isinstance(r, Rate) and r.series == "square" and r.flops_s]
    chart.key_figures(_figures(results))
    names = [name for name in DASHES if any(r.dtype == name for r in rates)]
    curves = [
        Trace(name, [r.shape[0] for r in rates if r.dtype == name],
             [r.flops_s or 0 for r in rates if r.dtype == name], DTYPES[name], SYMBOLS[name],
             DASHES[name])
        for name in names
    ]  # fmt: skip
    figure = lines(curves, x_title="size of the matmul (m = n = k)",
                   y_title="operations per second", x_log=True, y_log=True)  # fmt: skip
    sizes = sorted({r.shape[0] for r in rates})
    figure.update_xaxes(tickvals=sizes, ticktext=[f"{n:,}" for n in sizes])
    figure.update_yaxes(exponentformat="SI", dtick=1)
    lesson_page.show_chart(figure, "lesson-speed", table(results), matmul_words(results))
    chart.see(misaligned_words(results))
    chart.see(step_words(results))
    warn(results)


def matmul_words(results: Sequence[Result]) -> str:
    """bf16 compared with fp32, at the smallest and the largest size; what was too slow."""
    rates = {(r.dtype, r.shape[0]): r.flops_s for r in results
             if isinstance(r, Rate) and r.series == "square" and r.flops_s}  # fmt: skip
    sizes = sorted(n for dtype, n in rates if dtype == "bf16" and ("fp32", n) in rates)
    parts = [f"{rates['bf16', n] / rates['fp32', n]:.2f} times the speed at size {n:,}"
             for n in dict.fromkeys((sizes[0], sizes[-1]) if sizes else ())]  # fmt: skip
    text = (
        f"A matmul in bf16, compared with fp32: {', '.join(parts)}."
        if parts
        else "No size could be multiplied in both bf16 and fp32 here."
    )
    first: dict[str, Reading] = {}
    for one in results:
        if isinstance(one, Reading) and one.name == "too slow here":
            first.setdefault(one.series, one)
    for dtype, slow in first.items():
        text += (
            f" {dtype} was left out from {slow.text} on: one matmul took "
            f"{duration(slow.value)}, as on a device that has no instructions for it."
        )
    return text


def misaligned_words(results: Sequence[Result]) -> str:
    """What a size that is no multiple of 8 costs here."""
    rates = [r for r in results if isinstance(r, Rate) and r.series == "misaligned" and r.flops_s]
    if len(rates) < 2:
        return "Sizes that are no multiple of 8 were left out: bf16 takes too long here."
    straight = rates[0].flops_s or 1
    parts = [f"{percent((r.flops_s or 0) / straight)} at {r.shape[0]:,}" for r in rates[1:]]
    return (
        f"Multiples of 8: bf16 reaches {rate_words(straight)} at {rates[0].shape[0]:,}, and "
        f"{' and '.join(parts)} of that. On Tensor Cores a misaligned size can cost more."
    )


def step_words(results: Sequence[Result]) -> str:
    """Both models in both precisions."""
    parts = []
    for one in (r for r in results if isinstance(r, StepTimes)):
        timing = one.step
        parts.append(f"{one.precision} {timing.median_s * 1e3:.2f} ms "
                     f"({timing.low_s * 1e3:.2f} to {timing.high_s * 1e3:.2f})")  # fmt: skip
    return f"A training step, median and quartiles: {', '.join(parts)}. Casts cost time as well."


def table(results: Sequence[Result]) -> pd.DataFrame:
    """Every matmul."""
    rates = [r for r in results if isinstance(r, Rate) and r.timing is not None]
    return pd.DataFrame(
        {
            "series": [r.series for r in rates],
            "dtype": [r.dtype for r in rates],
            "size": [r.shape[0] for r in rates],
            "operations per second": [r.flops_s for r in rates],
            "median (s)": [r.timing.median_s for r in rates if r.timing],
        }
    )


def _figures(results: Sequence[Result]) -> list[KeyFigure]:
    best = max((r for r in results if isinstance(r, Rate) and r.flops_s),
               key=lambda r: r.flops_s or 0)  # fmt: skip
    return [
        KeyFigure("Best matmul", rate_words(best.flops_s or 0), f"{best.dtype}, {best.shape[0]:,}"),
        KeyFigure("Tiny MLP in bf16", f"{_gain(results, 'mlp'):.2f}×", "Against fp32, per step."),
        KeyFigure("Small GPT in bf16", f"{_gain(results, 'gpt'):.2f}×", "Against fp32, per step."),
    ]


def _gain(results: Sequence[Result], model: str) -> float:
    times = {r.precision: r.step.median_s for r in results if isinstance(r, StepTimes)}
    return times[f"{model} fp32"] / times[f"{model} bf16"]


CODE = {
    "PyTorch": """
torch.backends.cuda.matmul.allow_tf32 = True    # fp32 matmuls on Tensor Cores
layer = nn.Linear(1024, 4096)                   # sizes in multiples of 8 (fp16, bf16)
embedding = nn.Embedding(50304, 1024)           # 50257 rounded up to a multiple of 64
""",
    "Paddle": """
layer = paddle.nn.Linear(1024, 4096)            # multiples of 8
embedding = paddle.nn.Embedding(50304, 1024)
with paddle.amp.auto_cast(dtype="bfloat16"):
    outputs = layer(inputs)
""",
    "Keras": """
keras.mixed_precision.set_global_policy("mixed_bfloat16")
layer = keras.layers.Dense(4096)                # multiples of 8
embedding = keras.layers.Embedding(50304, 1024)
""",
}
LESSON = MeasuredLesson(
    id="speed",
    question="A tiny MLP trains under bf16 autocast instead of in fp32. How fast is a step here?",
    choices=("Faster", "About as fast", "Slower"),
    answer=answer,
    draw=draw,
    terms=("Tensor Core", "half precision", "autocast", "throughput"),
    code=CODE,
    sources=(Source.NVIDIA_SHAPES, Source.NVIDIA, Source.TORCH_AMP, Source.PADDLE),
)
