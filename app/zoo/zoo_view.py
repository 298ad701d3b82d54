"""The Zoo page's list: every case with its source, its faulty script and its healthy twin."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.errors import AmpscopeError
from ampscope.zoo.score import STEPS, script_path
from app import chart, layout, links, permissions, sitemap
from app.diagnosis import diagnosis_jobs
from app.runs import run_page
from app.text import cut, escape
from app.zoo import zoo_data, zoo_words
from app.zoo.zoo_data import Result, Row, Stage, title

_FIND = "widget:zoo-find"


def overview(rows: Sequence[Row], healthy: Sequence[Result]) -> None:
    """The sentence and the key figures."""
    layout.sentence(zoo_words.answer(rows))
    layout.key_figures(zoo_words.figures(rows, healthy))
    layout.see(
        "Each case rebuilds a failure that somebody reported in public, as a script of its own. "
        "Its healthy twin differs in the fault alone, and must raise no alarm. A diagnosis takes "
        "about half a minute."
    )


def cases(rows: Sequence[Row]) -> None:
    """The list, and a box that searches it."""
    wanted = _find()
    shown = [r for r in rows if wanted in _searched(r)]
    if not shown:
        st.markdown("No case has that in its name, its cause or its source.")
    for row in shown:
        _case(row)
    chart.download(lambda: table(rows), "zoo", key="zoo")


def healthy(results: Sequence[Result]) -> None:
    """Scripts that only look suspicious."""
    if not results:
        return
    with layout.details(f"Further healthy scripts ({len(results)})"):
        for result in results:
            _script(result.script, result, zoo_words.healthy_result(result))


def follow(rows: Sequence[Row], healthy: Sequence[Result]) -> None:
    """Draw the page anew while something is being diagnosed."""
    all_results = [*(r.faulty for r in rows), *(r.twin for r in rows if r.twin), *healthy]
    if any(r.stage is Stage.RUNNING for r in all_results):
        st.fragment(_look_again, run_every=run_page.FOLLOW_EVERY_S)([r.stage for r in all_results])


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """What the list shows, for download."""
    return pd.DataFrame(
        {
            "case": [r.answer.id for r in rows],
            "source": [r.answer.source_url for r in rows],
            "script": [r.answer.script for r in rows],
            "expected": [r.answer.cause for r in rows],
            "found": [r.faulty.found or str(r.faulty.stage) for r in rows],
            "module_expected": [r.answer.module for r in rows],
            "module_found": [r.faulty.module for r in rows],
            "fix_seen_to_work": [r.faulty.cured for r in rows],
            "twin": [r.answer.twin for r in rows],
            "twin_found": [(r.twin.found or str(r.twin.stage)) if r.twin else "" for r in rows],
        }
    )


def _case(row: Row) -> None:
    with st.container(border=True, gap="xsmall"):
        st.markdown(f"**{escape(row.answer.id)} · {escape(title(row.answer.cause))}**")
        with st.container(horizontal=True, vertical_alignment="center"):
            source = escape(cut(row.answer.source, 60))
            if row.answer.source_url:
                st.page_link(row.answer.source_url, label=source, icon=":material/open_in_new:")
            else:
                st.markdown(source, width="content")
            st.caption(escape(row.answer.note))
        left, right = st.columns(2)
        with left:
            _script("With the fault", row.faulty, zoo_words.faulty_result(row))
        with right:
            if row.twin is None:
                st.caption("This case is healthy itself and has no twin.")
            else:
                _script("Healthy twin", row.twin, zoo_words.healthy_result(row.twin))


def _script(name: str, result: Result, text: str) -> None:
    st.markdown(f"**{escape(name)}.** {escape(text)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        _button(result)
        if result.head is not None:
            st.page_link(
                sitemap.DIAGNOSIS.file,
                label="Open the diagnosis",
                icon=sitemap.DIAGNOSIS.icon,
                query_params={"run": result.head.id},
            )


def _button(result: Result) -> None:
    if not permissions.is_trusted():
        return
    busy = diagnosis_jobs.busy_with()
    again = result.head is not None
    clicked = st.button(
        "Diagnose again" if again else "Diagnose",
        key=f"zoo-{result.script}",
        disabled=bool(busy) or result.stage is Stage.RUNNING,
        help=escape(result.script) + ("; one diagnosis at a time" if busy else ""),
    )
    if clicked:
        try:
            diagnosis_jobs.start_diagnosis(
                script_path(result.script), zoo_data.policy_of(result.script), STEPS
            )
        except AmpscopeError as error:
            st.error(escape(str(error)))
        else:
            st.rerun()


def _find() -> str:
    if _FIND not in st.session_state:
        st.session_state[_FIND] = links.wanted("case")
    text = st.text_input("Find", key=_FIND, placeholder="A case, a cause, a project").strip()
    links.keep("case", text or None)
    return text.lower()


def _searched(row: Row) -> str:
    answer = row.answer
    words = (
        answer.id,
        answer.cause,
        title(answer.cause),
        answer.source,
        answer.script,
        answer.note,
    )
    return " ".join(words).lower()


def _look_again(stages: list[Stage]) -> None:
    now = zoo_data.rows()
    results = [*(r.faulty for r in now), *(r.twin for r in now if r.twin), *zoo_data.healthy()]
    if [r.stage for r in results] != stages:
        st.rerun(scope="app")
