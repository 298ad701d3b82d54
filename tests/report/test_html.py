"""A report as one HTML file: what it says, that it needs nothing else, and that it can be used."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ampscope.analysis.training import FiniteParts
from ampscope.cli.main import main
from ampscope.diagnosis.load import load_diagnosis
from ampscope.errors import BadInput
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Curve, Event, Histogram, Reading, Result, Role
from ampscope.render import contract
from ampscope.render.html import MAX_BYTES, curves, element, to_html
from ampscope.render.terminal import print_sections
from ampscope.store.reader import Reader
from ampscope.story.build import document
from ampscope.story.diagnosis import summary
from ampscope.story.document import Lines, Series
from tests.helpers import (
    made_comparisons,
    made_rates,
    offline_page,
    script_stores,
    stores,
    watched_stores,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def html_of(store: Path, *runs: str) -> str:
    with Reader(store) as reader:
        return to_html(document(reader, runs))


def test_of_a_diagnosis_says_verdict_fix_and_numbers(store: Path) -> None:
    head = script_stores.overflow(store)
    text = html_of(store, head)
    assert (
        "Root cause: An activation overflowed (AMP001), in encoder.2.wo, first at step 0." in text
    )
    assert "verified" in text
    assert "get_submodule" in text  # the patch
    assert "234,280" in text  # what fp32 gives, in the chain
    assert "65,504" in text  # and fp16&#x27;s limit
    assert "Test CPU" in text
    assert "/home/me" not in text  # folders stay at home
    assert len(text.encode()) < MAX_BYTES


def test_the_policy_names_the_hashes_of_what_is_in_the_file(store: Path) -> None:
    text = html_of(store, script_stores.no_fault(store))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = policy[1].replace("&#x27;", "'")
    assert rules.startswith("default-src 'none';")
    assert "unsafe" not in rules
    assert "http" not in rules
    for tag in ("script", "style"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in rules
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b", text)
    assert not re.search(r"\son[a-z]+=|\sstyle=", text)


def test_text_is_never_markup() -> None:
    made = element("td", "<b>&'\"", title="\"'><script>").html
    assert made == '<td title="&quot;&#x27;&gt;&lt;script&gt;">&lt;b&gt;&amp;&#x27;&quot;</td>'
    for tag in ("script", "td onclick=x", "SCRIPT", "style"):
        with pytest.raises(ValueError, match="no element"):
            element(tag)
    for name in ("onclick", "style", "OnLoad"):
        with pytest.raises(ValueError, match="no attribute"):
            element("td", **{name: "x"})
    for address in ("javascript:alert(1)", "https://a\nb", "//evil.example", "data:text/html,x"):
        with pytest.raises(ValueError, match="no address"):
            element("a", href=address)


def test_the_command_writes_it(store: Path, tmp_path: Path) -> None:
    head = script_stores.overflow(store)
    out = tmp_path / "out.html"
    runner = CliRunner()
    done = runner.invoke(main, ["report", head[:11], "--html", str(out), "--store", str(store)])
    assert done.exit_code == 0, done.output
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert runner.invoke(main, ["report", head, "--store", str(store)]).exit_code == 2


@pytest.mark.browser
def test_from_disk_without_a_network(store: Path, tmp_path: Path, chromium: object) -> None:
    head = script_stores.overflow(store)
    out = tmp_path / "report.html"
    out.write_text(html_of(store, head))
    with offline_page.opened(chromium, out) as watched:  # type: ignore[arg-type]  # a Browser
        page = watched.page
        chart = page.locator("figure.lines").first
        svg = chart.locator(":scope > svg")
        svg.scroll_into_view_if_needed()
        box = svg.bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 3
        page.mouse.move(box["x"] + box["width"] / 2, middle)
        said = chart.locator("output").text_content() or ""
        assert re.match(r"Step [56]: ", said)
        assert "in fp32 " in said
        assert "unchanged: NaN" in said
        # Zoom by dragging over the middle third, and back.
        page.mouse.move(box["x"] + box["width"] / 3, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 2 * box["width"] / 3, middle, steps=4)
        page.mouse.up()
        first = float(chart.locator("input").first.input_value())
        assert 2 <= first <= 4
        assert "matrix(1 " not in (chart.locator(".curves").get_attribute("transform") or "")
        chart.get_by_role("button", name="Whole range").click()
        assert float(chart.locator("input").first.input_value()) <= 0
        # A curve can be switched off and on.
        entry = chart.get_by_role("button", name="in fp32", exact=True)
        entry.click()
        assert entry.get_attribute("aria-pressed") == "false"
        assert chart.locator(".curves > g.off").count() == 1
        assert watched.trouble == []


def watched_run(store: Path) -> str:
    writer = watched_stores.begun(store, watched_stores.bad(12, 8))
    writer.add_event(Event(8, "alarm", "scale_collapse", "The scale fell.", value=1.0))
    writer.add_frame(watched_stores.frame(8, Role.GRAD_OUTPUT))
    return watched_stores.ended(writer)


def measured(kind: str, results: list[Result]) -> Callable[[Path], str]:
    return lambda store: made_comparisons.stored(store, kind, results)


LESSON: list[Result] = [
    Reading("lost share", "fp16", 0.25),
    Curve("loss", "fp32", (0.0, 1.0, 2.0), (3.0, 2.0, float("nan"))),
    Curve("error", "bf16", (0.5, 1.5), (1e-3, 1e-2)),
    Histogram("grad_output", "fp16", "fp16", tuple(range(RAW_LEN))),
]
KINDS: dict[str, tuple[Callable[[Path], str], str]] = {
    "no fault": (script_stores.no_fault, "No fault found"),
    "innocent": (script_stores.innocent, "AMP is innocent"),
    "undetermined": (script_stores.undetermined, "Undetermined"),
    "raised": (script_stores.raised, "Could not diagnose"),
    "lost": (script_stores.lost, "Could not diagnose"),
    "probe": (stores.finished, "1 skip in 12 steps, at step 4"),
    "failed probe": (stores.failed, "The loss is not a scalar"),
    "queued probe": (stores.queued, "no step has come yet"),
    "cancelled probe": (stores.cancelled, "Stopped on request"),
    "watched": (watched_run, "Bad since step 8"),
    "compare": (measured("compare", made_comparisons.compared()), "bf16"),
    "batch": (measured("batch", made_comparisons.searched()), "208"),
    "bench": (measured("bench", list(made_rates.ceilings_of({"fp32": 1.0}))), "1 TFLOP/s"),
    "lesson": (measured("lesson", LESSON), "lost share"),
    "nothing measured": (measured("bench", []), "Nothing was measured"),
}


@pytest.mark.browser
@pytest.mark.parametrize("kind", KINDS)
def test_of_every_kind_of_run(tmp_path: Path, chromium: object, kind: str) -> None:
    make, said = KINDS[kind]
    store, out = tmp_path / "runs.db", tmp_path / "report.html"
    out.write_text(html_of(store, make(store)))
    with offline_page.opened(chromium, out) as watched:  # type: ignore[arg-type]  # a Browser
        assert said in (watched.page.locator("article").text_content() or "")
        offline_page.use(watched.page)
        assert watched.trouble == []


def test_of_several_runs_each_once(store: Path) -> None:
    head = script_stores.overflow(store)
    probe = stores.finished(store)
    with Reader(store) as reader:
        control = next(r.id for r in reader.runs() if r.spec.control == "fp32")
        made = document(reader, [head, probe, control])
    assert len(made.parts) == 2
    assert made.parts[0].title.startswith("Root cause")


def test_a_report_that_would_be_too_large_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampscope.render.html.MAX_BYTES", 1000)
    with pytest.raises(BadInput, match=r"more than 5\. Name fewer runs"):
        html_of(store, script_stores.no_fault(store))


def test_numbers_at_the_ends_of_the_doubles_are_drawn() -> None:
    values = (5e-324, 1.7e308, -1.7e308, 0.0, 1.0)
    for base in (0, 2, 10):
        for some in (values, values[:2], values[3:4]):
            points = FiniteParts(tuple(range(len(some))), some, (), (), ())
            drawn = curves(Lines("t", "y", (Series("s", points, "#000000"),), base), "c").html
            assert "nan" not in drawn.lower()
            assert "inf" not in drawn.lower()


@pytest.mark.browser
def test_on_paper(store: Path, tmp_path: Path, chromium: object) -> None:
    out = tmp_path / "report.html"
    out.write_text(html_of(store, script_stores.overflow(store)))
    with offline_page.opened(chromium, out, "dark") as watched:  # type: ignore[arg-type]
        page = watched.page
        colour = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(colour) == "rgb(18, 22, 28)"
        page.emulate_media(media="print")
        assert page.evaluate(colour) == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("details:not([open])").count() == 0
        after = "getComputedStyle(document.querySelector('a[href^=https]'), '::after').content"
        assert "https://docs.pytorch.org" in page.evaluate(after)
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("details:not([open])").count() > 0
        assert watched.trouble == []


def test_a_rehearsed_script_says_so_and_prices_nothing(store: Path) -> None:
    run = script_stores.overflow(store, replace(script_stores.SPEC, rehearsed="t4"))
    html = html_of(store, run)
    assert html.count("CUDA (T4) rehearsed on a CPU") >= 2  # what it is about; the machine
    assert "rehearsed, not CUDA" in html  # in place of time and memory
    assert "times the processor time per step" not in html
    with Reader(store) as reader:
        diagnosis = load_diagnosis(reader, run)
    said = StringIO()
    print_sections(summary(diagnosis), Console(file=said, width=200))
    assert "Judged under CUDA (T4) rehearsed on a CPU" in said.getvalue()
    assert "times the" not in said.getvalue()
    found = contract.document(diagnosis)
    assert found["rules"] == "CUDA (T4) rehearsed on a CPU"
    cost = found["findings"][0]["fix"]["cost"]
    assert cost == {"step_time_ratio": None, "peak_memory_ratio": None}
