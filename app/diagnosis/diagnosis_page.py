"""What the Diagnosis page begins with: which script, its runs so far, and what state they are in.

The address may name any run of a diagnosis (`?run=…`): the page shows the diagnosis that it belongs
to, and the measurements of that very run.
"""

from __future__ import annotations

import shlex
import time

import streamlit as st

from ampscope.errors import AmpscopeError, BadInput
from ampscope.records import RunInfo
from ampscope.report.words.controls import control
from ampscope.report.words.run import file_name
from app import links, permissions, sitemap, states, store
from app.diagnosis import diagnosis_data, diagnosis_jobs
from app.diagnosis.diagnosis_data import Case
from app.runs import report_buttons, run_page, share_switch
from app.text import ago, cut, escape, plural

_PICKER = "widget:diagnosis"


def opened() -> Case:
    """Title, picker, header and state; ends the page when there is no diagnosis at all."""
    st.title("Diagnosis", anchor=False)
    runs = diagnosis_data.runs()
    if not runs:
        _nothing_yet()
        st.stop()
    case = diagnosis_data.opened(_picked(diagnosis_data.heads(runs)), runs)
    header(case)
    state(case)
    return case


def header(case: Case) -> None:
    """Which script this is, and how it was run."""
    with st.container(horizontal=True, vertical_alignment="center"):
        run_page.title_line(case.head)
        if case.report is not None:
            report_buttons.draw(case.head)
    share_switch.offer(case.head)
    spec = case.head.spec
    is_shown = bool(spec.args) and permissions.is_trusted()
    arguments = [f"arguments {shlex.join(spec.args)}"] if is_shown else []
    facts = [
        cut(spec.workload, 80) if permissions.is_trusted() else file_name(spec.workload),
        *arguments,
        run_page.policy_of(case.head.machine),
        plural(len(case.runs), "run"),
        plural(case.head.steps_done, "optimizer step"),
        ago(case.head.created),
        *([f"imported from {spec.imported}"] if spec.imported else []),
    ]
    st.caption(escape(" · ".join(facts)))
    if case.report is not None and case.report.notes:
        st.caption(escape(" ".join(case.report.notes)))


def state(case: Case) -> None:
    """Runs under way, and why a job could not do its work."""
    problem = diagnosis_jobs.problem(case.script)
    if problem:
        st.error(f"**The last attempt ended early.** {escape(problem)}")
    if not case.is_moving:
        return
    active = [r for r in case.runs if r.state.is_active]
    names = ", ".join(control(r.spec.control) for r in active)
    now = f"the script runs {names}" if active else "the next run is about to start"
    ended = len(case.runs) - len(active)
    so_far = f"{plural(ended, 'run')} {'has' if ended == 1 else 'have'} ended"
    st.info(f"**Under way:** {escape(now)}. {so_far}. This page follows it.")
    if diagnosis_jobs.is_stopping(case.script):
        st.caption("It is being stopped, which takes up to ten seconds.")
    elif _may_stop(case, active) and st.button("Stop", key="dx-stop"):
        diagnosis_jobs.stop(case.script, case.runs)
        st.rerun()
    _follow(case.head, diagnosis_data.version(case))


def _may_stop(case: Case, active: list[RunInfo]) -> bool:
    is_running = bool(active) or diagnosis_jobs.is_running(case.script)
    return is_running and permissions.is_trusted()


def command(run: RunInfo, extra: str = "") -> str:
    """The command that diagnoses this script again."""
    spec = run.spec
    policy = " --policy cuda" if spec.policy == "cuda" else ""
    words = shlex.join([*spec.workload.split(" ", 1), *spec.args])
    if not spec.workload.startswith("-m "):
        words = shlex.join([spec.workload, *spec.args])
    return f"ampscope diagnose{policy}{extra} {words}"


def _picked(heads: list[RunInfo]) -> RunInfo:
    """The diagnosis that the address names, else the last one chosen, else the newest."""
    by_id = {run.id: run for run in heads}
    named = _named(heads)
    if named is None:
        named = heads[0]
        links.keep("run", named.id)
    st.session_state[_PICKER] = named.id
    st.sidebar.selectbox(
        "Diagnosis",
        list(by_id),
        key=_PICKER,
        format_func=lambda id_: _label(by_id[id_]),
        help="Type to search. The address of this page names the run.",
        on_change=_chosen,
    )
    return named


def _named(heads: list[RunInfo]) -> RunInfo | None:
    """The head of the group of the run that the address names; None when it names no script's."""
    asked = links.wanted("run")
    if not asked:
        return None
    try:
        run = store.run(asked)
    except BadInput as error:
        st.warning(f"{escape(str(error))}\n\nThe newest diagnosis is shown instead.")
        return None
    if run.spec.kind != "script":
        if st.query_params.get("run") == asked:
            st.caption("The chosen run is a probe. The newest diagnosis of a script is shown.")
        return None
    same = (
        h for h in heads if h.id == run.id or (run.spec.group and h.spec.group == run.spec.group)
    )
    return next(same, None)


def _chosen() -> None:
    links.keep("run", st.session_state[_PICKER])
    links.keep("step", None)


def _label(run: RunInfo) -> str:
    when = time.strftime("%d %b %H:%M:%S", time.localtime(run.created))
    return f"{cut(run_page.name_of(run), 40)} · {when}"


def _nothing_yet() -> None:
    if not permissions.is_trusted():
        states.nothing_recorded(
            "No diagnosis is shown to this class yet.", "The teacher shares it."
        )
        return
    st.info("**No script has been diagnosed yet.** In a terminal, where your script runs:")
    st.code(f"ampscope diagnose --store {shlex.quote(str(store.path()))} train.py", language="bash")
    st.markdown("Or try one of the real failures that come with ampscope:")
    st.page_link(sitemap.ZOO.file, label="Zoo", icon=sitemap.ZOO.icon)


@st.fragment(run_every=run_page.FOLLOW_EVERY_S)
def _follow(head: RunInfo, version: str) -> None:
    """Draw the page anew when a run was added or has ended."""
    try:
        case = diagnosis_data.opened(store.run(head.id), diagnosis_data.runs())
    except AmpscopeError as error:  # deleted meanwhile
        states.unreadable(str(error))
        return
    if diagnosis_data.version(case) != version:
        st.rerun(scope="app")
