"""What every page about one run begins with: the run picker, the header line, the run's state.

run = run_page.opened("Gradients")     # stops here when there is nothing to show
"""

from __future__ import annotations

import time

import streamlit as st

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.errors import BadInput
from ampscope.lessons.catalog import lesson_title
from ampscope.records import AS_IS, Machine, RunInfo
from ampscope.report.words.controls import control
from ampscope.report.words.run import file_name, rules
from app import links, states, store
from app.runs import report_buttons, share_switch, trainings
from app.text import ago, code, cut, escape, percent, plural, power_of_two

# The browser's clock starts anew when a page has been drawn. The writer flushes every 0.5 s, and a
# step is to be on the screen within 2 s (benchmarks/results/live_pages.json).
FOLLOW_EVERY_S = 0.6
NAME_LENGTH = 44  # name and badge fit on one line at 800 px
_MEASURED = {
    "bench": "What this machine reaches",
    "cores": "Tensor Cores in {what} {precision}",
    "compare": "Precisions compared on {what}",
    "batch": "Largest batch of {what}",
}


def opened(title: str) -> RunInfo:
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
    ranks = trainings.ranks_of(run)
    if any(r.state.is_active for r in ranks):
        _follow(run.id, _versions(ranks))
    if not any(r.steps_done for r in ranks):
        st.stop()
    return run


def header(run: RunInfo) -> None:
    """Which run this is, its state, and under which policy it ran."""
    with st.container(gap="xxsmall"):
        with st.container(horizontal=True, vertical_alignment="center"):
            title_line(run)
            # The run as it is decides a diagnosis; without its end there is nothing to report.
            if run.steps_done and not (run.spec.kind == "script" and run.state.is_active):
                report_buttons.draw(run)
        st.caption(escape(" · ".join(facts(run))))
    share_switch.offer(run)


def title_line(run: RunInfo) -> None:
    """Name and state."""
    name = name_of(run)
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(
            f"**{escape(cut(name, NAME_LENGTH))}**",
            width="content",
            help=code(name) if len(name) > NAME_LENGTH else None,
        )
        st.badge(run.state, color=states.BADGE_COLORS[run.state])


def name_of(run: RunInfo) -> str:
    """The label, else what it was; of a script's control with how it was run."""
    if run.spec.kind == "script" and run.spec.control not in ("", AS_IS):
        return f"{run.spec.label or file_name(run.spec.workload)} {control(run.spec.control)}"
    return run.spec.label or described(run)


def described(run: RunInfo) -> str:
    """``gpt tiny fp16``; ``train.py in fp32``."""
    spec = run.spec
    if spec.kind == "watch":
        return f"{file_name(run.spec.workload) or 'notebook'}, watched"
    if spec.kind == "lesson":
        return lesson_title(spec)
    if not spec.is_training:
        return _MEASURED[spec.kind].format(
            what=f"{file_name(run.spec.workload)} {spec.size}", precision=spec.precision
        )
    if spec.kind != "probe":  # a script brings its own size and precision
        return f"{file_name(run.spec.workload)} {control(spec.control)}"
    return f"{file_name(run.spec.workload)} {spec.size} {spec.mode}"


def facts(run: RunInfo) -> list[str]:
    """The header line's parts."""
    spec = run.spec
    ranks = trainings.ranks_of(run)
    parts = [trainings.world_words(ranks)] if is_rank(run) else []
    parts += [described(run)] if spec.label and described(run) != name_of(run) else []
    if run.machine is not None and run.machine.framework != "torch":
        parts.append(run.machine.software)
    parts += [policy_of(run.machine), plural(max(r.steps_done for r in ranks), "step")]
    if spec.kind == "probe":
        parts.append(f"seed {spec.seed}")
    if spec.loss_factor != 1:
        parts.append(f"loss × {power_of_two(spec.loss_factor)}")
    if spec.imported:
        parts.append(f"imported from {spec.imported}")
    if run.overhead_share is not None:
        parts.append(f"instruments took {percent(run.overhead_share)} of the time")
    return [*parts, ago(run.created)]


def policy_of(machine: Machine | None) -> str:
    """``CUDA's rules, rehearsed on a CPU (AMD EPYC)``"""
    if machine is None:
        return "not started"
    policy = rules(machine)
    return f"{policy} ({machine.device_name})" if machine.device_name else policy


def label(run: RunInfo, ranks: tuple[RunInfo, ...] = ()) -> str:
    """One line of the run picker; ``ranks`` where it stands for all of a training."""
    when = time.strftime("%d %b %H:%M:%S", time.localtime(run.created))
    rank = f" · rank {run.spec.rank}" if is_rank(run) else ""
    rank = f" · {trainings.world_words(ranks)}" if len(ranks) > 1 else rank
    return f"{cut(name_of(run), NAME_LENGTH)}{rank} · {run.state} · {when}"


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


def _versions(ranks: tuple[RunInfo, ...]) -> tuple[str, ...]:
    return tuple(store.version(r) for r in ranks)


@st.fragment(run_every=FOLLOW_EVERY_S)
def _follow(run_id: str, versions: tuple[str, ...]) -> None:
    """Draw the page anew when the run, or another rank of its training, has recorded more."""
    try:
        recorded = _versions(trainings.ranks_of(store.run(run_id)))
    except BadInput:  # deleted, or kept from the class meanwhile: the page says so
        recorded = None
    if recorded != versions:
        st.rerun(scope="app")
