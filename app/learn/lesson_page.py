"""The one shape of all lessons, and what they share: charts, sources, words explained on hover,
large type, look-ups in results. The overview of all lessons too. What each teaches lies in its own
file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Final

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.lessons.catalog import LESSONS, LessonInfo, every_spec, lesson_spec
from ampscope.records import Curve, Reading, Result, StepTimes
from app import chart, links
from app.learn import lesson_runs
from app.learn.lesson_runs import Answer
from app.text import escape, percent

# The one shape of a lesson's page.
#
#     what will be seen -> predict -> controls -> measurement, chart, what it shows -> your own code
#     -> where to read on -> the next lesson
#
# Nothing is measured or shown before the reader has predicted or asked to be shown.


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice that needs a measurement of its own: its label, and words for its values, short
    enough to stand side by side on a phone. ``help`` says what they leave out."""

    label: str
    values: Mapping[str, str]
    help: str | None = None


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a lesson brings; ``app/learn/`` has one a file.

    ``answer`` judges the prediction by the measured results, ``draw`` shows them: chart, controls
    that need no new measurement, and sentences computed from the numbers.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    answer: Callable[[Sequence[Result]], Answer]
    draw: Callable[[Sequence[Result]], None]
    sources: tuple[Source, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    terms: tuple[str, ...] = ()
    code_note: str = ""
    after: Callable[[], None] = _nothing  # what follows the chart

    @property
    def info(self) -> LessonInfo:
        """Number, title, sentence."""
        return LESSONS[self.id]


def show(lesson: Lesson) -> None:
    """Draw the whole page."""
    begin(lesson)
    guess = lesson_runs.ask(lesson.info.number, lesson.question, lesson.choices)
    results = None
    if guess is not None:
        verdict = st.container()  # right below the prediction: on a small screen it would be missed
        asked = _settings(lesson)
        number = lesson.info.number
        results = lesson_runs.results(
            lesson_spec(lesson.id, **asked),
            is_asked=lesson_runs.is_clicked(number),
            ask=partial(lesson_runs.click, number),
        )
        if results is not None:
            with verdict:
                lesson_runs.judge(guess, lesson.choices, lesson.answer(results))
            st.fragment(lesson.draw)(results)  # what it draws, its controls change alone
    if guess is None or results is not None:
        lesson_runs.expect(every_spec(lesson.id))
    if results is not None:
        lesson.after()
    end(lesson, lesson.id)


def begin(lesson: Lesson) -> None:
    """Title, what will be seen, words."""
    offer()
    info = lesson.info
    st.title(f"{info.number} {info.title}", anchor=False)
    chart.sentence(info.sentence)
    if lesson.terms:
        with st.container(horizontal=True, gap="small"):
            st.caption("Words:", width="content")
            for term in lesson.terms:
                st.caption(escape(term), width="content", help=TERMS[term])


def end(lesson: Lesson, code: str) -> None:
    """Your own code (the examples ``code`` of code.toml), where to read on, the next lesson."""
    st.subheader("In your own code", anchor=False)
    shown = examples()[code]
    for tab, text in zip(st.tabs(list(shown)), shown.values(), strict=True):
        with tab:
            st.code(text.strip("\n"), language="python", wrap_lines=True)
    if lesson.code_note:
        st.caption(escape(lesson.code_note))
    st.subheader("Where to read on", anchor=False)
    st.markdown("\n".join(f"- [{escape(one.title)}]({one.url})" for one in lesson.sources))
    _neighbours(lesson.info.number)


@cache
def examples() -> Mapping[str, Mapping[str, str]]:
    """Lines for a reader's own training, by lesson or mistake, then by framework."""
    found: dict[str, dict[str, str]] = tomllib.loads(
        Path(__file__).with_name("code.toml").read_text(encoding="utf-8")
    )
    return found


def _settings(lesson: Lesson) -> dict[str, str]:
    asked: dict[str, str] = {}
    if not lesson.settings:
        return asked
    with st.container(horizontal=True, gap="large"):
        for name, setting in lesson.settings.items():
            asked[name] = links.pick(
                setting.label,
                f"{name}{lesson.info.number}",
                lesson.info.settings[name],
                format_func=lambda value, words=setting.values: words[value],  # type: ignore[misc]
                help=setting.help,
            )
    return asked


def _neighbours(number: int) -> None:
    st.divider()
    with st.container(horizontal=True, horizontal_alignment="distribute"):
        for other, arrow in ((number - 1, "arrow_back"), (number + 1, "arrow_forward")):
            entry = links.LESSON_ENTRIES.get(other, links.LEARN)
            st.page_link(
                entry.file,
                label=entry.title if other in links.LESSON_ENTRIES else "All lessons",
                icon=f":material/{arrow}:",
                query_params=kept(),
            )


# A lesson's chart: large where asked for, with words and numbers for those who cannot see it.


def show_chart(figure: go.Figure, name: str, table: pd.DataFrame, text: str, alt: str = "") -> None:
    """``text`` stands above the chart and describes it to those who cannot see it, unless ``alt``
    does; ``table`` holds every number of the figure."""
    chart.see(text)
    alt = alt or text
    if is_on():
        figure = go.Figure(figure)  # kept ones are shown to every user
        enlarge(figure)
    chart.show(figure, name, lambda: table, key=name, alt=alt)
    with chart.details("This chart in words and numbers"):
        st.text(alt)
        st.dataframe(table, hide_index=True, key=f"{name}-table")


# Primary sources that lessons refer to, each once.


class Source(Enum):
    """Title and address."""

    def __init__(self, title: str, url: str) -> None:
        self.title, self.url = title, url

    PAPER = (
        "Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740)",
        "https://arxiv.org/abs/1710.03740",
    )
    TORCH_AMP = (
        "PyTorch: Automatic Mixed Precision package",
        "https://docs.pytorch.org/docs/stable/amp.html",
    )
    TORCH_EXAMPLES = (
        "PyTorch: Automatic Mixed Precision examples",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    )
    TORCH_NUMERICS = (
        "PyTorch: Numerical accuracy",
        "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
    )
    NVIDIA = (
        "NVIDIA: Train With Mixed Precision",
        "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html",
    )
    NVIDIA_SHAPES = (
        "NVIDIA: Matrix Multiplication Background",
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
    )
    PADDLE = (
        "PaddlePaddle: Automatic Mixed Precision Training",
        "https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html",
    )
    KERAS = (
        "Keras: Mixed precision policy API",
        "https://keras.io/api/mixed_precision/",
    )
    IEEE_754 = (
        "IEEE 754-2019, Standard for Floating-Point Arithmetic",
        "https://standards.ieee.org/ieee/754/6210/",
    )
    OCP_FP8 = (
        "OCP 8-bit Floating Point Specification (OFP8), 2023",
        "https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1",
    )
    BFLOAT16 = (
        "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322)",
        "https://arxiv.org/abs/1905.12322",
    )
    ADAM = (
        "PyTorch: torch.optim.Adam",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html",
    )
    BATCH_NORM = (
        "Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167)",
        "https://arxiv.org/abs/1502.03167",
    )
    HIGHAM = (
        "Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14, 1993",
        "https://doi.org/10.1137/0914050",
    )


# Words of the lessons, explained on hover. A word is used only where it is offered here.


TERMS: Final[Mapping[str, str]] = {
    "exponent": "The power of two that a number is multiplied by: 12 is 1.5 × 2^3.",
    "mantissa": "The digits of a number: 12 is 1.5 × 2^3, and 0.5 is stored as its mantissa.",
    "spacing": "The distance from a number to the next one that the format has.",
    "subnormal": "A number below the smallest normal one: it has fewer digits the smaller it is.",
    "underflow": "A number is too small for the format, and becomes zero or subnormal.",
    "overflow": "A number is too large for the format, and becomes infinite.",
    "lost": "Zero in half precision, and not zero in fp32: below the format's range, or cancelled.",
    "gradient": "How much the loss changes with a number; backward computes it for every weight.",
    "loss scale": "A factor on the loss: backward multiplies every gradient by it. The optimizer "
    "divides it out again.",
    "scaler": "The object that keeps the loss scale, undoes it and skips bad steps: GradScaler.",
    "skipped step": "A step whose gradients held Inf or NaN: the weights are left as they were.",
    "autocast": "A region in which the framework chooses the precision of every op by lists.",
    "half precision": "A format of 16 bits: fp16 or bf16.",
    "master weights": "The weights in fp32, which the optimizer changes; half copies are computed "
    "with.",
    "NaN": "Not a number: the result of Inf - Inf, 0 × Inf or 0 / 0.",
    "Inf": "Infinity: what a number too large for its format becomes.",
    "eps": "A small number that an optimizer or a norm adds before it divides.",
    "Tensor Core": "A unit of NVIDIA GPUs that multiplies half matrices and adds up in fp32.",
    "activation": "What a layer puts out in the forward pass and keeps for the backward pass.",
    "throughput": "Training samples per second.",
}


# Large type for a lecture hall: a switch in the sidebar of every lesson, ``?type=large``.
#
# Streamlit sizes everything in rem, so the root's font size enlarges texts, widgets and spaces
# alike. Charts are drawn by Plotly in pixels and are enlarged by themselves.


LARGE = "large"
FACTOR = 1.5  # 16 px become 24: readable at ten times the screen's height
STYLE = "<style>html { font-size: 24px !important; }</style>"
_NAME = "type"
_PLOTLY_SIZE = 12  # where a figure says nothing


def offer() -> None:
    """The switch, and its effect."""
    key = links.widget_key(_NAME, is_on())
    st.sidebar.toggle("Large type", is_on(), key=key, on_change=_remember, args=(key,),
                      help="For the last row.")  # fmt: skip
    if is_on():
        st.html(STYLE)


def is_on() -> bool:
    """Whether the address, or the session's last choice, asks for it."""
    return links.wanted(_NAME) == LARGE


def kept() -> dict[str, str]:
    """What a link to another lesson carries on."""
    return {_NAME: LARGE} if is_on() else {}


def enlarge(figure: go.Figure) -> None:
    """Fonts, lines, markers, margins and height of ``figure``, in place."""
    figure.update_layout(
        font_size=_larger(figure.layout.font.size),
        legend_font_size=_larger(figure.layout.legend.font.size),
        hoverlabel_font_size=_larger(None),
        height=int((figure.layout.height or 400) * 1.2),
    )
    margin = figure.layout.margin
    figure.update_layout(
        margin={s: (margin[s] or 40) * FACTOR for s in ("t", "b", "l", "r")},
        annotations=[_with_font(a) for a in figure.layout.annotations],
    )
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        axis.tickfont.size = _larger(axis.tickfont.size)
        axis.title.font.size = _larger(axis.title.font.size)
    for trace in figure.data:
        if trace.type == "scatter" and trace.line.width:
            trace.line.width *= FACTOR
        if trace.type == "scatter" and isinstance(trace.marker.size, int | float):
            trace.marker.size *= FACTOR


def _larger(size: float | None) -> float:
    return (size or _PLOTLY_SIZE) * FACTOR


def _with_font(annotation: go.layout.Annotation) -> go.layout.Annotation:
    annotation.font.size = _larger(annotation.font.size)
    if annotation.yshift:
        annotation.yshift *= FACTOR
    return annotation


def _remember(key: str) -> None:
    links.keep(_NAME, LARGE if st.session_state[key] else None)


# The Learn page: a newcomer's path, and every lesson in one line.


# Numbers, what they do to gradients, what happens without care, and its diagnosis.
PATH = (1, 3, 6)


def show_overview() -> None:
    """The whole page."""
    offer()
    st.title("Learn", anchor=False)
    chart.sentence("Predict, then measure: every number in a lesson was measured on this machine.")
    chart.see("A lesson takes about five minutes, and its measurement a few seconds.")
    st.subheader("New here?", anchor=False)
    with st.container(horizontal=True, gap="medium"):
        for number in PATH:
            _link(number)
    st.caption("The third ends with the diagnosis of its own failure.")
    st.page_link(
        links.ZOO.file, label="More failures to diagnose: the Zoo", icon=links.ZOO.icon,
    )  # fmt: skip
    st.subheader("All lessons", anchor=False)
    for number in links.LESSON_ENTRIES:
        with st.container(border=True, gap="xxsmall"):
            _link(number)
            st.markdown(escape(_info(number).sentence))


def _link(number: int) -> None:
    entry = links.LESSON_ENTRIES[number]
    st.page_link(
        entry.file, label=entry.title, icon=entry.icon, query_params=kept(),
        width="content",
    )  # fmt: skip


def _info(number: int) -> LessonInfo:
    return next(one for one in LESSONS.values() if one.number == number)


# Look-ups in a lesson's results by name and series. A missing one is a fault of the lesson:
# LookupError.


def reading(results: Sequence[Result], name: str, series: str) -> float:
    """The number of that name and series."""
    for one in results:
        if isinstance(one, Reading) and (one.name, one.series) == (name, series):
            return one.value
    raise LookupError(f"no reading {name!r} of {series!r}")


def curve(results: Sequence[Result], name: str, series: str) -> Curve:
    """The curve of that name and series."""
    for one in results:
        if isinstance(one, Curve) and (one.name, one.series) == (name, series):
            return one
    raise LookupError(f"no curve {name!r} of {series!r}")


def curves(results: Sequence[Result], name: str) -> list[Curve]:
    """Every series of that name, in the order in which they were measured."""
    return [one for one in results if isinstance(one, Curve) and one.name == name]


def curves_table(found: Sequence[Curve], x_name: str) -> pd.DataFrame:
    """A column a curve, over the x that they share."""
    return pd.DataFrame({x_name: list(found[0].x)} | {c.series: list(c.y) for c in found})


# Times that were measured while something else ran are said to be such.


WIDE = 0.5  # quartiles of an undisturbed step lie within 5 to 30 % of its median on two cores


def warn(results: Sequence[Result]) -> None:
    """A line where the quartiles of a step lie far apart."""
    spread = max((r.step.spread for r in results if isinstance(r, StepTimes)), default=0.0)
    if spread > WIDE:
        st.warning(
            escape(
                f"Something else ran on this machine meanwhile: the times of a step spread by "
                f"{percent(spread)} of their median. Measure again when it is idle."
            ),
            icon=":material/group:",
        )
