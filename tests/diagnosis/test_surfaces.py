"""What is told of a diagnosis, in a report and in a terminal, says what its JSON says, field by
field; so do the page, which draws the same blocks between its forms, the notebook, the card on
Home, and what the store keeps. That each form writes out what is told is tested by itself
(tests/report/test_renderers.py). All cases of the zoo are ``thorough``: they take half an hour on
two cores.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ampscope.causes import CAUSES
from ampscope.control import Control
from ampscope.diagnosis.load import judge_again, load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.number_words import cut, value
from ampscope.observations import Scan
from ampscope.render.contract import document
from ampscope.render.markdown import to_notebook
from ampscope.store.reader import Reader
from ampscope.story.build import document as report_of
from ampscope.story.build import of_reports
from ampscope.story.diagnosis import summary
from ampscope.zoo.answers import ANSWERS, HEALTHY, script_path
from ampscope.zoo.score import STEPS, TIME_LIMIT_S
from app.home import ANSWER_LENGTH
from app.runs import diagnoses
from tests.helpers import script_stores
from tests.helpers.documents import texts
from tests.helpers.script_diagnoses import diagnosed

Open = Callable[..., Any]
POLICIES = {script: a.policy for a in ANSWERS for script in (a.script, a.twin) if script}
STATES = {True: "verified", False: "none worked", None: "not measurable"}
BADGES = {"fault": "fault", "no_fault": "no fault", "inconclusive": "undetermined"}


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose last run ended a moment ago counts as moving; these have ended."""
    monkeypatch.setattr(diagnoses, "BETWEEN_RUNS_S", -1.0)
    monkeypatch.setattr(diagnoses, "_jobs", {})


def unfixed(store: Path) -> str:
    """A fault of which no fix was run."""
    return script_stores.overflow(store, fixed=False)


def uncured(store: Path) -> str:
    """A fault whose every fix was run, and cured nothing."""
    head = script_stores.overflow(store, fixed=False)
    broken = [script_stores.broken(n) for n in range(script_stores.STEPS)]
    start = Scan("start", "parameter", f"{script_stores.MODULE}.weight", "fp32", 8192, 0, 0, 0.5)
    control = f"fp32_modules:{script_stores.MODULE}"
    seen = script_stores.seen(broken, script_stores.bad_op(), start)
    script_stores.run(store, control, seen)
    return head


def compiled(store: Path) -> str:
    """Of code that torch.compile made."""
    return script_stores.compiled_fault(store)["as_is"]


MADE = {make.__name__: make for make in (unfixed, uncured, compiled)}
KINDS = ("overflow", "no_fault", "long_search", "undetermined", "innocent", "raised", "lost", *MADE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_surface_says_what_the_json_says(
    store_path: Path, open_page: Open, kind: str
) -> None:
    head = (MADE.get(kind) or getattr(script_stores, kind))(store_path)
    assert not list(disagreements(store_path, head, open_page))
    if kind == "lost":  # whose baseline has no end
        return
    judge_again(store_path, head)  # what is stored says the same
    assert not list(disagreements(store_path, head, open_page))


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", [*POLICIES, *HEALTHY])
def test_every_surface_says_it_of_every_case(
    store_path: Path, open_page: Open, script: str
) -> None:
    policy = "cuda" if POLICIES.get(script) == "cuda" else "native"
    report = diagnosed(
        script_path(script), store_path, policy=policy, steps=STEPS, time_limit_s=TIME_LIMIT_S
    )
    head = report.runs["as_is"].id
    assert not list(disagreements(store_path, head, open_page, report))


def disagreements(
    store: Path, head: str, open_page: Open, live: DiagnosisResult | None = None
) -> Iterator[str]:
    """What a surface does not say. Terminal and JSON have the result that is ``live``, where there
    is one; all others read the store, whose only diagnosis ``head`` is."""
    with Reader(store) as reader:
        loaded = load_diagnosis(reader, head)
        live = live or loaded
        told = report_of(reader, [head], as_recorded=True)
        notebook = to_notebook(told, of_reports(reader, [head]), store)
    facts, kept = document(live), document(loaded)
    yield from (
        f"the stored JSON has another {name}" for name in _KEPT if facts[name] != kept[name]
    )
    fields = dict(_fields(facts))
    page = open_page("diagnosis", run=head)
    assert not page.exception
    surfaces = {
        "terminal": "\n".join(texts(tuple(summary(live)))),
        "report": "\n".join(texts(told)),
        "page": _shown(page),
        "notebook": _executed(json.loads(notebook)),
        "Home": _shown(home := open_page("home")),
    }
    for surface, text in surfaces.items():
        squeezed = _squeezed(text)
        for verdict, opening in _OPENINGS.items():
            is_said = _squeezed(opening) in squeezed
            if is_said != (verdict == facts["verdict"] and not live.could_not_run):
                yield f"{surface} {'says' if is_said else 'lacks'} “{opening}”: {facts['verdict']}"
        short = surface in ("notebook", "Home")
        for field, expected in fields.items():
            if short and field not in _OF_A_CARD:
                continue
            wanted = cut(expected, ANSWER_LENGTH) if surface == "Home" else expected
            if _squeezed(wanted) not in squeezed:
                yield f"{surface} lacks {field}: {wanted}"
    badge = "could not run" if live.could_not_run else BADGES[facts["verdict"]]
    badge = "latent" if badge == "no fault" and facts["latent"] else badge
    if f"-badge[{badge}]" not in _shown(home):
        yield f"Home has another badge than {badge}"
    if facts["findings"]:
        found = facts["findings"][0]
        state = STATES[found["fix"]["verified"]] if facts["tried"] else "not tried"
        figures = {m.label: m.value for m in page.metric}
        place = found["module"] or found["line"] or "the whole script"
        step = "no step" if found["step"] is None else f"step {found['step']:,}"
        assert figures["First seen at"] == step
        where = _squeezed(figures["Where"]).split("…")  # a long name is cut in the middle
        assert all(part in _squeezed(place) for part in where), figures
        if figures["Fix"] != state or f"**Fix ({state})." not in _shown(home):
            yield f"page or Home has another state of the fix than {state}: {figures['Fix']}"


# Fields that a card on Home and the notebook's cells show, too.
_OF_A_CARD = ("cause", "place", "fix", "no fault", "reason")
# Of the JSON; the time that a diagnosis took is measured anew where nothing was stored.
_KEPT = (
    "verdict", "reason", "scope", "lead", "precision", "findings", "latent", "symptoms", "controls",
    "tried", "runs", "notes",
)  # fmt: skip
# What the answer of each verdict begins with on every surface, and no other answer does.
_OPENINGS = {"fault": "Root cause:", "no_fault": "No fault", "inconclusive": "Undetermined:"}


def _fields(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of the JSON that a person reads, as the text that a surface shows."""
    for place, note in enumerate(facts["notes"]):
        yield f"note {place}", note
    if facts["precision"] is not None:
        yield "precision", facts["precision"]["headline"]
    if facts["reason"]:
        short = f"Undetermined: {'; '.join(facts['symptoms'])}."  # the page's first sentence
        yield "reason", facts["reason"].removeprefix(short)
    if facts["verdict"] == "no_fault" and facts["scope"]["sentence"]:
        yield "no fault", facts["scope"]["sentence"]
    for place, symptom in enumerate(facts["symptoms"]):
        if facts["verdict"] != "no_fault" and facts["precision"] is not None:  # it was judged
            yield f"symptom {place}", symptom
    for kind in ("findings", "latent"):
        for place, found in enumerate(facts[kind]):
            name = "" if (kind, place) == ("findings", 0) else f" of {kind} {place}"
            yield f"cause{name}", CAUSES[found["cause"]].titled
            yield f"explanation{name}", found["explanation"]
            yield f"fix{name}", found["fix"]["text"]
    for found in facts["findings"][:1]:
        if place := found["module"] or found["line"]:
            yield "place", place
        for name in ("module", "op", "line"):
            if found[name]:
                yield name, found[name]
        if found["fix"]["patch"]:
            yield "patch", found["fix"]["patch"]
        if found["fix"]["verification"]:
            yield "verification", found["fix"]["verification"]
        for place, measured in enumerate(found["evidence"]):
            yield f"evidence {place}", measured["name"]
            yield f"value of evidence {place}", value(measured["value"])
    for place, trial in enumerate(facts["tried"]):
        yield f"trial {place}", Control(trial["control"]).words
        yield f"outcome of trial {place}", _OUTCOMES[trial["cured"]]


_OUTCOMES = {True: "cured", False: "not cured", None: "pattern removed; effect not measurable"}


def _squeezed(text: str) -> str:
    """Without what a surface escapes, breaks or frames with."""
    return re.sub(r"[\s\\\u2060│╭╮╰╯─┼]", "", text)


def _shown(page: Any) -> str:
    """All that the page writes: texts, code, key figures, tables, titles of what folds."""
    kinds = ("title", "subheader", "markdown", "caption", "info", "success", "warning", "error")
    parts = [e.value for kind in (*kinds, "code") for e in page.get(kind)]
    parts += [e.label for e in page.expander]
    parts += [f"{m.label} {m.value} {m.help}" for m in page.metric]
    parts += [table.value.reset_index().to_csv(sep=" ", quotechar=" ") for table in page.table]
    return "\n".join(parts)


def _executed(notebook: dict[str, Any]) -> str:
    """The notebook's words, and what its cells print."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                exec(compile(source, cell["id"], "exec"), namespace)
            else:
                print(source)
    return told.getvalue()
