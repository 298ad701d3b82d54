"""The frame round every page (title, navigation, a last net for errors), and the states of a store
and of a run, each with one sentence and what to do next.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

import streamlit as st

from ampscope.control import Control
from ampscope.errors import AmpscopeError, StoreBusy
from ampscope.records import RunInfo, State
from ampscope.story.palette import MEASURE, NONFINITE, OUTLINE
from ampscope.story.run_words import why_no_histograms
from app import links, permissions
from app.links import ENTRIES, NEW_PROBE, Entry
from app.permissions import ClassRole
from app.text import escape, plural

BadgeColor: TypeAlias = Literal["gray", "blue", "green", "red", "orange"]
BADGE_COLORS: Mapping[State, BadgeColor] = {
    State.QUEUED: "gray",
    State.RUNNING: "blue",
    State.FINISHED: "green",
    State.FAILED: "red",
    State.CANCELLED: "gray",
    State.LOST: "orange",
}
TRY_AGAIN_S = 2.0
TRACEBACK_PX = 400  # the rest is scrolled to
_TRIED = "store-was-busy"
logger = logging.getLogger("ampscope.dashboard")
ENDED = {  # as in "This run was lost."
    State.FAILED: "failed",
    State.CANCELLED: "was cancelled",
    State.LOST: "was lost",
}
_NEXT = {
    State.FAILED: "Fix the problem above, then restart the run.",
    State.CANCELLED: "It can be started again.",
    State.LOST: "Start it again; if memory ran out, with a smaller size or a memory limit.",
}
_NEXT_WATCHED = {
    State.FAILED: "The chart below ends at the last step that was recorded.",
    State.CANCELLED: "The training itself was asked to stop.",
    State.LOST: "If its process was killed, memory may have run out: see the system's log.",
}
LOGO = Path(__file__).with_name("logo.svg")
# Streamlit writes what is chosen in the theme's primary colour, which carries white text elsewhere
# and so is too dark to be read as text on a dark page. Border and line show the choice as well.
# A table's own button for CSV is not drawn: the browser writes that file, with the cells as they
# are, and a spreadsheet would take a text of a run that begins with "=" for a formula. What is
# downloaded elsewhere is escaped (app.text.for_csv).
_EDGES = "".join(
    f'[class*="st-key-dx-chain-{edge}"] '
    f"{{ border-left: 5px solid {color}; padding: 0.4rem 0.8rem; }}\n"
    for edge, color in (("plain", OUTLINE), ("nonfinite", NONFINITE), ("root", MEASURE))
)
STYLE = """<style>
button[aria-label^="Download as CSV"] { display: none; }
[data-testid="stButtonGroup"] [data-selected="true"],
[role="tab"][aria-selected="true"] { color: inherit !important; }
/* Streamlit's captions have a contrast of 4.2, words of its code 2.8 and more; WCAG's AA is 4.5. */
[data-testid="stCaptionContainer"] { color: inherit; opacity: 0.78; }
[data-testid="stCaptionContainer"] code, .stCode .token { color: inherit !important; }
[data-testid="stSliderThumbValue"] { color: inherit !important; }
/* The boxes of a diagnosis' chain. */
@EDGES@/* A chart that needs more room than a phone has is moved sideways, as a table is. */
[class*="st-key-wide-"] { overflow-x: auto; }
[class*="st-key-wide-"] > [data-testid="stElementContainer"] { min-width: 640px; }
@media (max-width: 640px) {
  .stCode code { font-size: 11px; }
  [data-testid="stMetricValue"] { font-size: 1.4rem; }
  [data-testid="stButtonGroup"] > div { flex-wrap: wrap; }
  [class*="st-key-wide-"]::before {
    content: "Move the chart sideways to see all of it."; position: sticky; left: 0;
    font-size: 0.875rem; opacity: 0.78;
  }
}
input[role="combobox"] { min-width: 24px; min-height: 24px; }
[data-testid="stSidebarNavLink"]:focus-visible, [data-testid="stPageLink-NavLink"]:focus-visible {
  outline: 2px solid currentColor; outline-offset: -2px;
}
</style>""".replace("@EDGES@", _EDGES)
KEYS = f"<script>{Path(__file__).with_name('keys.js').read_text()}</script>"


def show() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="ampscope", page_icon=str(LOGO), layout="wide")
    st.logo(str(LOGO), size="large")
    st.html(STYLE)
    st.html(KEYS, unsafe_allow_javascript=True)
    try:
        who = permissions.role()
    except AmpscopeError as error:  # the operator's options
        unreadable(str(error))
        return
    sections: dict[str, list[st.Page]] = {}
    for entry in ENTRIES:
        sections.setdefault(entry.section, []).append(entry.page(is_hidden=_is_hidden(entry, who)))
    page = st.navigation(sections, expanded=True)
    if who is ClassRole.GUEST:  # its address is known to the browser, its content is not drawn
        permissions.show_sign_in()
        return
    permissions.offer_sign_out()
    try:
        page.run()
    except StoreBusy as error:
        busy(str(error))
    except AmpscopeError as error:
        unreadable(str(error))
    except Exception:
        logger.exception("The page %s failed", page.title)
        broken(page.title)


def _is_hidden(entry: Entry, who: ClassRole) -> bool:
    """What is of no use to this person is not in the navigation; its address still answers."""
    if who is ClassRole.GUEST or not entry.in_sidebar:
        return True
    if entry.for_teacher:
        return who is not ClassRole.TEACHER
    return entry is NEW_PROBE and who not in permissions.TRUSTED


def unreadable(sentence: str) -> None:
    """The store, an option or an address cannot be used; ``sentence`` says why and what to do."""
    st.error(escape(sentence))


def busy(sentence: str) -> None:
    """Another program holds the store. The page tries again by itself."""
    unreadable(sentence)
    st.caption(f"This page tries again every {TRY_AGAIN_S:g} s.")
    _try_again()


@st.fragment(run_every=TRY_AGAIN_S)
def _try_again() -> None:
    """The first time is the page itself; each later one draws it anew."""
    if st.session_state.get(_TRIED) is True:
        st.session_state[_TRIED] = False
        st.rerun(scope="app")
    st.session_state[_TRIED] = True


def broken(page: str) -> None:
    """A fault of ampscope's own; the traceback is in the terminal, never on the page."""
    st.error(
        f"**The page {escape(page)} could not be drawn.** The recorded runs are untouched. "
        "The terminal that runs the dashboard shows the reason."
    )


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """A part of a page: what the store holds of it may be damaged, which one sentence says in its
    place. The other parts are drawn."""
    try:
        yield
    except StoreBusy:
        raise  # of the store as a whole
    except AmpscopeError as error:
        unreadable(str(error))
    except Exception:
        logger.exception("A part of the page failed")
        st.error(
            "**This part of the page could not be drawn.** The terminal that runs the dashboard "
            "shows the reason."
        )


def empty_store() -> None:
    """Nothing recorded yet."""
    if not permissions.is_trusted():
        nothing_recorded("No run is shown to this class yet.", "The teacher shares it.")
        return
    st.info(
        "**No run has been recorded yet.** Start the demo on Home, diagnose a script of yours, or "
        "record a probe."
    )
    with st.container(horizontal=True):
        st.page_link(links.HOME.file, label="Home")
        st.page_link(links.DIAGNOSIS.file, label="Diagnosis")
        st.page_link(links.NEW_PROBE.file, label="New probe")


def nothing_recorded(what: str, next_step: str) -> None:
    """The run is fine but holds no such fact, for example no shadow. Both texts are the page's."""
    st.info(f"**{escape(what)}** {escape(next_step)}")


def no_step_of(run: RunInfo) -> NoReturn:
    """Other ranks have recorded steps and this one has none. Ends the page."""
    nothing_recorded(f"Rank {run.spec.rank} has recorded no step.", "Choose another rank above.")
    st.stop()


def no_histograms(run: RunInfo) -> None:
    """The run holds no histogram: why, and how to get some."""
    nothing_recorded("This run holds no histograms.", why_no_histograms(run))


def no_ops(run: RunInfo) -> None:
    """What to do instead."""
    if run.spec.framework != "torch":
        nothing_recorded(
            "Single ops are recorded of PyTorch alone.",
            "Of this framework's layers the dtypes of weights, outputs and gradients are.",
        )
        return
    nothing_recorded(
        "This watched training was not traced op by op: that is done on demand.",
        "In the training, run.record_next(reference=True) traces the next step. The ops of a "
        "failing step are in its capsule (ampscope replay).",
    )


def not_of_a_control(run: RunInfo) -> bool:
    """Say of a script's control where the histograms are; False for any other run."""
    if run.spec.kind != "script" or not run.spec.parent:
        return False
    if Control(run.spec.control).is_compiled:
        nothing_recorded(
            "No kernel was compiled in this run: its code came out of inductor's cache, or another "
            "backend ran it.",
            "To see kernels, diagnose with the cache off: "
            "`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 ampscope diagnose …`",
        )
    else:
        nothing_recorded(
            "This run is a control: its losses and failing ops were watched, nothing more.",
            "Histograms and ops are recorded in the baseline run.",
        )
    st.page_link(links.DIAGNOSIS.file, label="Diagnosis", query_params={"run": run.id})
    return True


def explain(run: RunInfo) -> None:
    """Say what state the run is in when that is not plainly finished."""
    is_watched = run.spec.kind == "watch"
    if is_watched and run.state.is_active:
        _watched(run)
    elif run.state is State.QUEUED:
        st.info(f"**This probe waits, place {run.place} in the queue.** It starts by itself.")
    elif run.state is State.RUNNING and run.steps_done == 0:
        st.info("**This probe has started.** Its first step has not come yet.")
    elif run.state is State.RUNNING:
        done, asked = run.steps_done, run.spec.steps
        st.info(f"**Running: {done:,} of {plural(asked, 'step')}.** This page follows it.")
    elif run.state is not State.FINISHED:
        _ended_early(run)


def _watched(run: RunInfo) -> None:
    """The number of steps of a watched training is not known in advance."""
    if run.steps_done == 0:
        st.info("**This training is watched.** Its first step has not come yet.")
    else:
        so_far = plural(run.steps_done, "step")
        st.info(f"**Running: {so_far} so far.** This page follows it.")


def _ended_early(run: RunInfo) -> None:
    next_step = (_NEXT_WATCHED if run.spec.kind == "watch" else _NEXT)[run.state]
    ended = f"**This run {ENDED[run.state]}.** {_reason(run)}"
    _with_traceback(run, f"{ended}  \n{_kept(run)} {next_step}")
    if run.spec.kind == "probe" and permissions.is_trusted():
        again = {"again": run.id}
        st.page_link(links.NEW_PROBE.file, label="Start it again", query_params=again)


def _kept(run: RunInfo) -> str:
    if run.state is State.LOST:  # its message has said it
        return ""
    if run.steps_done == 0:
        return "No step was recorded."
    are_kept = "is kept" if run.steps_done == 1 else "are kept"
    return f"{plural(run.steps_done, 'step')} {are_kept}."


def measurement_ended(run: RunInfo) -> None:
    """Say why a measurement has no result."""
    _with_traceback(run, f"**This measurement {ENDED[run.state]}.** {_reason(run)}")


def _with_traceback(run: RunInfo, text: str) -> None:
    box = st.error if run.state is State.FAILED else st.warning
    box(text)
    if run.traceback:
        with st.expander("The run's own traceback"):
            st.code(run.traceback, language=None, wrap_lines=True, height=TRACEBACK_PX)


def _reason(run: RunInfo) -> str:
    return escape(run.message or "No reason was recorded.")
