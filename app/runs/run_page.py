"""What every page about one run begins with: the run picker, the header with what the run is, its
report and its pages, the run's state, and the ranks of a distributed training.

    run = run_page.open_run("Gradients")     # stops here when there is nothing to show
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import streamlit as st

from ampscope import extensions
from ampscope.analysis.ranks import grouped, is_rank
from ampscope.control import BASELINE, Control
from ampscope.errors import BadInput
from ampscope.measurements import KINDS
from ampscope.records import RunInfo
from ampscope.render.html import to_html
from ampscope.render.markdown import to_markdown, to_notebook
from ampscope.store.reader import Reader
from ampscope.story import verdict_words
from ampscope.story.build import document, of_reports
from ampscope.story.run_words import file_name, rules
from app import chart, links, options, permissions, run_rows, states, store
from app.permissions import ClassRole
from app.runs import actions, diagnoses
from app.text import ago, code, cut, escape, percent, plural, power_of_two

# The browser's clock starts anew when a page has been drawn. The writer flushes every 0.5 s, and a
# step is to be on the screen within 2 s (benchmarks/results/live_pages.json).
FOLLOW_EVERY_S = 0.6
NAME_LENGTH = 44  # name and badge fit on one line at 800 px
ALL = "all"
NOTEBOOK = "application/x-ipynb+json"


def open_run(title: str) -> RunInfo:
    """Title, run picker, header and state; returns the run, which has at least one step.

    Ends the page when the store is empty or the run has recorded nothing yet.
    """
    st.title(title, anchor=False)
    runs = store.trainings()
    if not runs:
        states.empty_store()
        st.stop()
    run = _picked(runs)
    header(run)
    states.explain(run)
    ranks = ranks_of(run)
    if any(r.state.is_active for r in ranks):
        _follow(run.id, _versions(ranks))
    if not any(r.steps_done for r in ranks):
        st.stop()
    return run


def _picked(runs: list[RunInfo]) -> RunInfo:
    """The run that the URL names, else the last one chosen, else the newest."""
    together = {ranks[0].id: ranks for ranks in grouped(runs)}
    by_id = {id_: ranks[0] for id_, ranks in together.items()}
    asked = st.query_params.get("run")
    if asked and asked not in by_id:  # further back, or another rank than the first
        older = _looked_up(asked, newest=runs[0])
        by_id[older.id] = older
        links.keep("run", older.id)
    run_id = links.select(
        "Run",
        "run",
        list(by_id),
        format_func=lambda id_: label(by_id[id_], together.get(id_, ())),
        help="Type to search. The address of this page names the run.",
        place=st.sidebar,
    )
    return by_id[run_id]


def label(run: RunInfo, ranks: tuple[RunInfo, ...] = ()) -> str:
    """One line of the run picker; ``ranks`` where it stands for all of a training."""
    when = time.strftime("%d %b %H:%M:%S", time.localtime(run.created))
    rank = f" · rank {run.spec.rank}" if is_rank(run) else ""
    rank = f" · {world_words(ranks)}" if len(ranks) > 1 else rank
    return f"{cut(name_of(run), NAME_LENGTH)}{rank} · {run.state} · {when}"


def _looked_up(asked: str, newest: RunInfo) -> RunInfo:
    """A run further back than the list, or by the beginning of its id. Ends the page when there is
    none: another run must not be taken for the one that an address names."""
    try:
        return store.run(asked)
    except BadInput as error:
        states.unreadable(str(error))
        if st.button("Show the newest run"):
            links.keep("run", newest.id)
            st.rerun()
        st.stop()


def header(run: RunInfo) -> None:
    """Which run this is, its state, and under which policy it ran."""
    with st.container(gap="xxsmall"):
        with st.container(horizontal=True, vertical_alignment="center"):
            case = diagnoses.case_of(run) if run.spec.kind == "script" else None
            title_line(run, verdict=None if case is None else case.verdict)
            # The baseline run decides a diagnosis; without its end there is nothing to report.
            if run.steps_done and not (run.spec.kind == "script" and run.state.is_active):
                offer_report(run)
        st.caption(escape(" · ".join(facts(run))))
        if case is not None and case.report is not None:
            st.markdown(escape(verdict_words.verdict(case.report, diagnoses.bare(case.head))))
    offer(run)
    show_tabs(run)


def title_line(
    run: RunInfo,
    others: Sequence[RunInfo] = (),
    verdict: tuple[str, states.BadgeColor] | None = None,
) -> None:
    """Name and state, or the verdict on it; ``others`` are shown as one with it, and their states
    where they differ."""
    name = name_of(run)
    if others and run.spec.label == "":
        what = f"{file_name(run.spec.workload)} {run.spec.size}"
        name = f"{what}, {plural(len(others) + 1, 'precision')}"
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(
            f"**{escape(cut(name, NAME_LENGTH))}**",
            width="content",
            help=code(name) if len(name) > NAME_LENGTH else None,
        )
        if verdict is not None:
            st.badge(verdict[0], color=verdict[1])
            return
        for state in dict.fromkeys(r.state for r in (run, *others)):
            st.badge(state, color=states.BADGE_COLORS[state])


def name_of(run: RunInfo) -> str:
    """The label, else what it was; of a script's control with how it was run."""
    if run.spec.kind == "script" and run.spec.control not in ("", BASELINE):
        return f"{run.spec.label or file_name(run.spec.workload)} {Control(run.spec.control).words}"
    return run.spec.label or described(run)


def described(run: RunInfo) -> str:
    """``gpt tiny fp16``; ``train.py in fp32``."""
    spec = run.spec
    if spec.kind == "watch":
        return f"{file_name(run.spec.workload) or 'notebook'}, watched"
    if not spec.is_training:
        if (kind := KINDS.get(spec.kind)) is None:  # of an extension that is not there
            return run.title
        if kind.titled:
            return str(extensions.load(kind.titled)(spec))
        what = f"{file_name(run.spec.workload)} {spec.size}"
        return kind.title.format(what=what, precision=spec.precision)
    if spec.kind != "probe":  # a script brings its own size and precision
        return f"{file_name(run.spec.workload)} {Control(spec.control).words}"
    return f"{file_name(run.spec.workload)} {spec.size} {spec.mode}"


def facts(run: RunInfo) -> list[str]:
    """The header line's parts."""
    spec = run.spec
    ranks = ranks_of(run)
    parts = [world_words(ranks)] if is_rank(run) else []
    parts += [described(run)] if spec.label and described(run) != name_of(run) else []
    if run.machine is not None and run.machine.framework != "torch":
        parts.append(run.machine.software)
    parts += [policy_of(run), plural(max(r.steps_done for r in ranks), "step")]
    if spec.kind == "probe":
        parts.append(f"seed {spec.seed}")
    if spec.loss_factor != 1:
        parts.append(f"loss × {power_of_two(spec.loss_factor)}")
    if spec.imported:
        parts.append(f"imported from {spec.imported}")
    if run.overhead_share is not None:
        parts.append(f"instruments took {percent(run.overhead_share)} of the time")
    return [*parts, ago(run.created)]


def policy_of(run: RunInfo) -> str:
    """``CUDA (A100) rehearsed on a CPU (AMD EPYC)``"""
    name = run.machine.device_name if run.machine else ""
    return f"{rules(run)} ({name})" if name else rules(run)


def offer_report(run: RunInfo) -> None:
    """Files of ``run`` to take home, each made when a user asks for it; of a script's run, of its
    whole diagnosis."""
    if not _may_take(run):
        return
    with st.popover("Report", icon=":material/description:", type="tertiary"):
        st.caption("Verdict, evidence, charts, fix, machine, and what is missing; nothing is run.")
        _button(run, "HTML, one file", "html", "text/html", _html)
        _button(run, "Markdown, for an issue", "md", "text/markdown", _markdown)
        if permissions.is_trusted():  # it names the store's path, and reads all of the store
            _button(run, "Notebook that loads the run", "ipynb", NOTEBOOK, _notebook)


def _button(
    run: RunInfo, label: str, suffix: str, mime: str, made: Callable[[Reader, str], str]
) -> None:
    def content() -> bytes:
        permissions.require(_may_take(run), "this report")  # it may have been kept back since
        with Reader(store.path()) as reader:
            return made(reader, run.id).encode()

    name = f"ampscope-{run.id}.{suffix}"
    chart.file(label, content, name, mime, key=f"report-{suffix}-{run.id}")


def _may_take(run: RunInfo) -> bool:
    """Whether all that the report would show is open to the user who asks."""
    group = run.spec.group if run.spec.kind == "script" else ""
    runs = (run_rows.group(store.path(), group) if group else ()) or (run,)
    return len(permissions.visible(runs)) == len(runs)


def _html(reader: Reader, run_id: str) -> str:
    return to_html(document(reader, [run_id], folders=permissions.is_trusted()))


def _markdown(reader: Reader, run_id: str) -> str:
    return to_markdown(document(reader, [run_id], folders=permissions.is_trusted()))


def _notebook(reader: Reader, run_id: str) -> str:
    made = document(reader, [run_id])
    return to_notebook(made, of_reports(reader, [run_id]), Path(store.path().name))


def offer(run: RunInfo) -> None:
    """The teacher's switch that shows the run to the class, or not. Lessons are shown to every
    user and have none."""
    if permissions.role() is not ClassRole.TEACHER or run.spec.kind == "lesson":
        return
    key = f"shared-{run.id}"
    st.session_state[key] = run.id in run_rows.shared(options.current().store)

    def switch() -> None:
        actions.share(run, wanted=bool(st.session_state[key]))

    st.toggle("Shown to the class", key=key, on_change=switch)


def show_tabs(run: RunInfo) -> None:
    """The pages of this run that have something to show of it."""
    with st.container(horizontal=True, gap="small", key="run-tabs"):
        for entry in pages_of(run):
            links.link(entry, run=run.id)


def pages_of(run: RunInfo) -> list[links.Entry]:
    """The answer first."""
    stored = _stored(run)
    wanted = (
        (run.spec.kind == "script", links.DIAGNOSIS),
        (run.spec.kind == "script", links.SOURCE),
        (run.spec.kind == "watch", links.TRAINING),
        ("frame" in stored, links.GRADIENTS),
        (run.steps_done > 0, links.LOSS_SCALE),
        ("module" in stored or _has_kernels(run), links.LAYERS),
        ("telemetry" in stored, links.TELEMETRY),
        *(
            (run.steps_done > 0 and page.of_run, links.EXTENSION_ENTRIES[name])
            for name, page in links.EXTENSION_PAGES.items()
        ),
    )
    return [entry for there, entry in wanted if there]


def _has_kernels(run: RunInfo) -> bool:
    is_compiled = run.spec.kind == "script" and Control(run.spec.control).is_compiled
    return is_compiled and bool(diagnoses.observed(run).kernels)


@store.of_run
def _stored(reader: Reader, run_id: str) -> tuple[str, ...]:
    """Of what the store holds something of the run."""
    return reader.held(run_id)


@st.fragment(run_every=FOLLOW_EVERY_S)
def _follow(run_id: str, versions: tuple[str, ...]) -> None:
    """Draw the page anew when the run, or another rank of its training, has recorded more: rows of
    runs are read again when the store's file has changed."""
    try:
        recorded = _versions(ranks_of(store.run(run_id)))
    except BadInput:  # deleted, or kept from the class meanwhile: the page says so
        recorded = None
    if recorded != versions:
        st.rerun(scope="app")


def _versions(ranks: tuple[RunInfo, ...]) -> tuple[str, ...]:
    return tuple(store.version(r) for r in ranks)


def ranks_of(run: RunInfo) -> tuple[RunInfo, ...]:
    """All ranks of the run's training by rank; of any other run itself alone."""
    if not is_rank(run):
        return (run,)
    found = grouped(store.group(run.spec.group))
    return next((ranks for ranks in found if any(r.id == run.id for r in ranks)), (run,))


def world_words(ranks: Sequence[RunInfo]) -> str:
    """``4 ranks``; ``3 of 4 ranks`` where some are not in this store."""
    world = ranks[0].spec.world
    return plural(world, "rank") if len(ranks) == world else f"{len(ranks)} of {world} ranks"


def pick(run: RunInfo, *, may_merge: bool) -> tuple[RunInfo, ...]:
    """The ranks to look at, all of them or one, bound to the URL's ``rank``; where only one can be
    shown, to ``one_rank``: to have looked at one there does not take the sum away elsewhere."""
    ranks = ranks_of(run)
    if len(ranks) == 1:
        return ranks
    named = {str(r.spec.rank): r for r in ranks}
    options = [ALL, *named] if may_merge else list(named)
    is_first = run.id == ranks[0].id
    chosen = links.pick(
        "Rank",
        "rank" if may_merge else "one_rank",
        options,
        default=options[0] if is_first else str(run.spec.rank),
        format_func=lambda o: "all merged" if o == ALL else o,
    )
    return ranks if chosen == ALL else (named[chosen],)
