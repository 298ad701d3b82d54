"""Reports of lessons: every lesson that is measured has its numbers in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.ext.lessons.catalog import LESSONS
from ampscope.records import (
    RESULT_KINDS,
    Call,
    Curve,
    EnergyUse,
    Histogram,
    MemorySplit,
    NonFiniteCounts,
    Rate,
    Reading,
    Result,
    StepTimes,
    UnderflowCounts,
)
from ampscope.render.html import to_html
from ampscope.render.markdown import JOINER, to_markdown
from ampscope.store.reader import Reader
from ampscope.story.build import document
from ampscope.story.palette import DTYPES, MEASURE
from ampscope.story.shared import looks
from tests.helpers import made_comparisons
from tests.helpers.lesson_runs import keep, measured

MEASURED = [name for name, info in LESSONS.items() if info.is_measured]


def seconds(value: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1, "s")):
        if value * factor < 1000 or unit == "s":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def numbers_of(result: Result) -> list[str]:
    """What a reader must find of it, formatted here and not by the package."""
    match result:
        case MemorySplit():
            parts = (result.weights, result.activations, result.peak)
            return [f"{p / 2**20:,.1f} MiB" if p >= 2**20 else f"{p / 2**10:,.1f} KiB"
                    for p in parts]  # fmt: skip
        case StepTimes():
            return [seconds(result.step.median_s)]
        case Rate():
            assert result.timing is not None
            return [seconds(result.timing.median_s), "×".join(map(str, result.shape))]
        case EnergyUse():
            return [f"{result.joules:.4g} J"]
        case Reading():
            value = result.value
            special = {"inf": "Inf", "-inf": "-Inf", "nan": "NaN"}
            return [special.get(str(value), f"{value:.4g}")]
        case UnderflowCounts():
            return [f"{result.lost:,}", f"{result.total:,}"]
        case NonFiniteCounts():
            return [f"{result.total:,}", result.place]
        case Call():
            return [result.op, f"{result.count:,}"]
        case Histogram():
            return [f"{max(result.row):,} of {sum(result.row):,}"]
        case Curve():
            return [result.series]
    raise AssertionError(type(result))


def forms(store: Path, run: str) -> tuple[str, str]:
    with Reader(store) as reader:
        made = document(reader, [run])
    return to_html(made), to_markdown(made)


@pytest.mark.parametrize("lesson", MEASURED)
def test_every_result_of_a_lesson_is_in_its_report(tmp_path: Path, lesson: str) -> None:
    results = measured(lesson)
    assert results
    html, markdown = forms(tmp_path / "a.db", keep(tmp_path / "a.db", lesson, results))
    for result in results:
        for said in numbers_of(result):
            assert said.replace("'", "&#x27;").replace(">", "&gt;") in html, result
    for one in results:
        if isinstance(one, Curve):  # a table has its first finite value, drawn or not
            first = next(y for y in one.y if y - y == 0)
            assert f"{first:.4g}" in markdown.replace("\\", "").replace(JOINER, ""), one.name
    assert "What is missing" in html


def test_no_type_of_result_is_left_out(tmp_path: Path) -> None:
    """One of each that other measurements make, in a lesson: an untrusted file may hold
    that."""
    others = [*made_comparisons.compared(), *made_comparisons.searched()]
    kinds = {type(r).__name__ for r in others}
    assert kinds & {k.__name__ for k in RESULT_KINDS} == kinds
    html, _ = forms(tmp_path / "a.db", keep(tmp_path / "a.db", "memory", tuple(others)))
    for kind in kinds - {"StepTimes", "MemorySplit"}:  # these two have titles of their own
        assert f"{kind}, " in html


def test_histograms_that_are_not_drawn_are_named(tmp_path: Path) -> None:
    row = tuple(range(284))
    found = tuple(Histogram(f"weights {n}", "fp16", "fp16", row) for n in range(9))
    for count, said in ((9, "3 histograms"), (7, "1 histogram"), (6, None)):
        store = tmp_path / f"{count}.db"
        html, _ = forms(store, keep(store, "gradients", found[:count]))
        assert html.count('<figure class="bars">') == min(count, 6)
        assert ("The first 6 are drawn." in html) == (said is not None)
        assert said is None or f"<td>{said}</td>" in html


def test_energy_that_could_not_be_read_is_said(tmp_path: Path) -> None:
    times = tuple(r for r in made_comparisons.compared() if isinstance(r, StepTimes))
    html, _ = forms(tmp_path / "a.db", keep(tmp_path / "a.db", "cost", times))
    assert "No counter of energy could be read" in html
    read = (*times, EnergyUse("fp32", 12.5, 50, 8, "RAPL, package 0", 1.0))
    html, _ = forms(tmp_path / "b.db", keep(tmp_path / "b.db", "cost", read))
    assert "No counter of energy could be read" not in html
    assert "12.5 J" in html
    assert "0.25 J" in html  # a step


def test_curves_of_a_dtype_have_its_colour_wherever_they_stand() -> None:
    names = ["model.half()", "fp16", "fp32", "bf16 with fp32 master weights", "fp16-noscaler"]
    made = dict(zip(names, looks(names), strict=True))
    assert made["fp16"][0] == made["fp16-noscaler"][0] == DTYPES["fp16"]
    assert made["fp32"][0] == DTYPES["fp32"]
    assert made["bf16 with fp32 master weights"][0] == DTYPES["bf16"]
    assert made["model.half()"] == (MEASURE, "")
    assert made["fp16"] != made["fp16-noscaler"]  # by its dash


def test_a_rate_that_took_too_long_is_said_to_be_missing(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    slow: list[Result] = [Reading("too slow here", "fp16", 0.4, "512")]
    run = made_comparisons.stored(store, "lesson", slow)
    with Reader(store) as reader:
        text = to_markdown(document(reader, [run]))
    assert "1 rate, of fp16" in text
    assert "took too long" in text
