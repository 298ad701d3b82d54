"""The page Diagnosis: forms, buttons and what is live; what is said is drawn from the blocks of
:mod:`ampscope.story.diagnosis`.

The address may name any run of a diagnosis (`?run=…`): the page shows the diagnosis that it belongs
to, and the measurements of that very run.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Iterable, Sequence

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.analysis import compiled_runs
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.causes import CAUSES
from ampscope.control import BASELINE, COMPILED, Control
from ampscope.diagnosis.cure import comes_too_late
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.load import judge_again, rules_version
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.errors import AmpscopeError, BadInput
from ampscope.launcher.script_runs import folder_of
from ampscope.number_words import value
from ampscope.observations import BadOp, Observation, Operand, Scan
from ampscope.records import RunInfo, State
from ampscope.rules import catalog
from ampscope.rules.verdict import Rule, Status, Verdict
from ampscope.story import diagnosis as story
from ampscope.story import document as doc
from ampscope.story import fix_words
from ampscope.story import verdict_words as words
from ampscope.story.run_words import file_name, script_command
from app import chart, links, options, permissions, render, states, store, telemetry
from app.runs import diagnoses, run_page, workload_choice
from app.runs.diagnoses import DiagnosisCase
from app.text import ago, code, cut, duration, escape, plural

_STARTED = "diagnosis-started"  # session key: the script that this browser has started
_CHANGED = "judged-again"  # session key: what that has changed
_RULE_OF = "rule-of"  # session key: the run whose page the rule was chosen on


def open_case() -> DiagnosisCase:
    """Title, picker, header and state; ends the page when there is no diagnosis at all."""
    st.title("Diagnosis", anchor=False)
    runs = diagnoses.recorded_runs()
    offer_script(is_open=not runs)
    _wait_for_started(diagnoses.group_heads(runs))
    if not runs:
        _nothing_yet()
        st.stop()
    case = diagnoses.read_case(_picked(diagnoses.group_heads(runs)), runs)
    show_header(case)
    show_state(case)
    return case


STEPS, LIMIT_S = 200, 120  # as `ampscope diagnose` has them
DAY_S = 24 * 3600
_POLICIES = {
    "auto": "as on this machine; with a rehearsed CUDA device where the script needs one",
    "native": "as on this machine",
    "cuda": "under CUDA's rules, rehearsed on a CPU",
}


def offer_script(*, is_open: bool) -> None:
    """Diagnose a script below the operator's folder: the browser names one of the listed files, its
    arguments and limits, and no code."""
    if not permissions.is_trusted():
        return
    folder = options.current().scripts
    files = workload_choice.listed(folder).files
    with st.expander("Diagnose a script", expanded=is_open, icon=":material/play_arrow:"):
        telemetry.warn_of_unused_gpu()
        if folder is None or not files:
            none = "It holds no Python file. " if folder else ""
            st.markdown(
                f"{none}To choose scripts here, start the dashboard with the folder they are in:"
            )
            store_of = shlex.quote(str(store.path()))
            command = f"ampscope dashboard --scripts DIR --store {store_of}"
            st.code(command, language="bash", wrap_lines=True)
            return
        script = workload_choice.pick_file("Script", folder, "dx-script-file")
        with st.form("dx-script", border=False):
            words = st.text_input(
                "Arguments", key="dx-script-args", help="Split as a shell would; none is run."
            )
            left, right = st.columns(2)
            steps = left.number_input(
                "Optimizer steps at most", 1, 1_000_000, STEPS, key="dx-script-steps"
            )
            limit_s = right.number_input(
                "Time limit of each run, s", 1, DAY_S, LIMIT_S, key="dx-script-limit"
            )
            policy = st.selectbox(
                "Rules", list(_POLICIES), format_func=_POLICIES.__getitem__, key="dx-script-policy"
            )
            python = diagnoses.pick_python("", "dx-script-python")
            busy = diagnoses.busy_with()
            clicked = st.form_submit_button(
                "Diagnose", type="primary", disabled=bool(busy), key="dx-script-start"
            )
        st.caption(
            escape(f"{cut(file_name(busy), 60)} is being diagnosed; one at a time.")
            if busy
            else "It runs several times, each with a private view of the files that it writes."
        )
        if clicked:
            _start_script(script, words, int(steps), policy, float(limit_s), python)


def _start_script(
    script: str, words: str, steps: int, policy: str, limit_s: float, python: str
) -> None:
    try:
        path = workload_choice.python_file(options.current().scripts, script, "scripts")
        args = shlex.split(words)
        diagnoses.start_diagnosis(path, policy, steps, args, limit_s, python)
    except AmpscopeError as error:
        st.error(escape(str(error)))
    except ValueError as error:  # a quotation without an end
        st.error(escape(f"These arguments cannot be split: {error}."))
    else:
        st.session_state[_STARTED] = (str(path), time.time())
        st.rerun()


def _wait_for_started(heads: Sequence[RunInfo]) -> None:
    """Show the diagnosis that this browser has started, as soon as its first run is in the store;
    until then the page ends here."""
    script, since = st.session_state.get(_STARTED, ("", 0.0))
    if not script:
        return
    ours = (h for h in heads if h.spec.workload == script and h.created >= since)
    if head := next(ours, None):
        links.keep("run", head.id)
    elif diagnoses.job_is_running(script):
        _starting(script)
        st.stop()
    elif problem := diagnoses.job_problem(script):
        st.error(f"**{escape(file_name(script))} could not be run.** {escape(problem)}")
    del st.session_state[_STARTED]


@st.fragment(run_every=run_page.FOLLOW_EVERY_S)
def _starting(script: str) -> None:
    st.info(f"**{escape(file_name(script))} is being started.** Its runs will be shown here.")
    begun = any(run.spec.workload == script and run.state.is_active for run in store.runs(20))
    if begun or not diagnoses.job_is_running(script):
        st.rerun(scope="app")


def show_header(case: DiagnosisCase) -> None:
    """Which script this is, and how it was run."""
    with st.container(horizontal=True, vertical_alignment="center"):
        run_page.title_line(case.head, verdict=case.verdict)
        if case.report is not None:
            run_page.offer_report(case.head)
    run_page.offer(case.head)
    run_page.show_tabs(case.head)
    spec = case.head.spec
    is_shown = bool(spec.args) and permissions.is_trusted()
    arguments = [f"arguments {shlex.join(spec.args)}"] if is_shown else []
    facts = [
        *([file_name(spec.workload)] if spec.label != file_name(spec.workload) else []),
        *arguments,
        run_page.policy_of(case.head),
        plural(len(case.runs), "run"),
        *([plural(case.head.steps_done, "optimizer step")] if case.report else []),
        ago(case.head.created),
        *([f"imported from {spec.imported}"] if spec.imported else []),
    ]
    st.caption(escape(" · ".join(facts)))
    if changed := st.session_state.pop(_CHANGED, ""):
        st.info(escape(changed))


def _offer_another(case: DiagnosisCase, rules: str) -> None:
    """Other rules than those of today drew the conclusion: to judge its evidence again."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Concluded by the rules of ampscope {escape(rules)}.")
        if permissions.is_trusted() and st.button(
            "Judge again with the rules of today",
            key="dx-again",
            help="Reads what was recorded; nothing is run. The new conclusion takes the place of "
            "this one.",
        ):
            before, after = judge_again(store.path(), case.head.id)
            st.session_state[_CHANGED] = fix_words.change(before, after)
            st.rerun()


def show_state(case: DiagnosisCase) -> None:
    """Runs under way, and why a job could not do its work."""
    problem = diagnoses.job_problem(case.script)
    if problem:
        st.error(f"**The last run ended early.** {escape(problem)}")
    if not case.is_moving:
        return
    active = [r for r in case.runs if r.state.is_active]
    names = " and ".join(Control(r.spec.control).words for r in active)
    now = f"the script runs {names}" if active else "the next run is about to start"
    ended = len(case.runs) - len(active)
    so_far = f"{plural(ended, 'run')} {'has' if ended == 1 else 'have'} ended"
    judged = (
        "The rules judge when the baseline run has ended."
        if case.report is None
        else "What the rules say so far stands below; the runs to come can change it."
    )
    if case.report is not None and case.report.so_far:
        judged = escape(case.report.so_far)
        now = f"fixes are tried; {now}" if case.report.diagnosis.findings else now
    st.info(f"**Under way:** {escape(now)}. {so_far}. {judged} This page follows it.")
    if diagnoses.is_stopping(case.script):
        st.caption("It is being stopped, which takes up to ten seconds.")
    elif _may_stop(case, active) and st.button("Stop", key="dx-stop"):
        diagnoses.stop_runs(case.script, case.runs)
        st.rerun()
    _follow(case.head, diagnoses.data_version(case))


def _may_stop(case: DiagnosisCase, active: list[RunInfo]) -> bool:
    is_running = bool(active) or diagnoses.job_is_running(case.script)
    return is_running and permissions.is_trusted()


def _picked(heads: list[RunInfo]) -> RunInfo:
    """The diagnosis that the address names, else the last one chosen, else the newest."""
    by_id = {run.id: run for run in heads}
    named = _named(heads)
    if named is None:
        named = heads[0]
        links.keep("run", named.id)
    key = links.widget_key("diagnosis", named.id)
    st.sidebar.selectbox(
        "Diagnosis",
        list(by_id),
        list(by_id).index(named.id),
        key=key,
        format_func=lambda id_: _label(by_id[id_]),
        help="Type to search. The address of this page names the run.",
        on_change=_chosen,
        args=(key,),
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
    return diagnoses.head_of(run, heads)


def _chosen(key: str) -> None:
    if links.is_moved("diagnosis", key):
        links.keep("run", st.session_state[key])
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
    st.info("**No script has been diagnosed yet.** Or in a terminal, where your script runs:")
    st.code(
        f"ampscope diagnose --store {shlex.quote(str(store.path()))} train.py",
        language="bash",
        wrap_lines=True,
    )
    st.markdown("Or try one of the real failures that come with ampscope:")
    st.page_link(links.ZOO.file, label="Zoo", icon=links.ZOO.icon)


@st.fragment(run_every=run_page.FOLLOW_EVERY_S)
def _follow(head: RunInfo, version: str) -> None:
    """Draw the page anew when a run was added or has ended."""
    try:
        case = diagnoses.read_case(store.run(head.id), diagnoses.recorded_runs())
    except AmpscopeError as error:  # deleted meanwhile
        states.unreadable(str(error))
        return
    if diagnoses.data_version(case) != version:
        st.rerun(scope="app")
    show_live(case)


def show_live(case: DiagnosisCase) -> None:
    """How far each run is that is under way, and the losses of all of them as they come."""
    active = [run for run in case.runs if run.state.is_active]
    if not active:
        return
    for run in active:
        since_s = max(0.0, time.time() - (run.started or run.created))
        most = f" of at most {run.spec.steps:,}"
        done = f"{plural(run.steps_done, 'step')}{most}, {duration(since_s)} so far"
        st.caption(escape(f"{Control(run.spec.control).words}: {done}{time_left(run, since_s)}"))
    runs = _recorded((Control(r.spec.control).words, r) for r in case.runs)
    if (losses := story.control_losses(runs)) is not None:
        chart.see("The loss of each run so far.")
        render.draw([losses], "dx-live")


def time_left(run: RunInfo, since_s: float) -> str:
    """By the pace of its steps so far; before the first one, and where its limit of time comes
    sooner, that limit, which most runs do not reach."""
    limit_s = run.spec.time_limit_s or math.inf
    if run.steps_done:
        left_s = since_s / run.steps_done * (run.spec.steps - run.steps_done)
        if since_s + left_s < limit_s:
            return f", about {duration(max(left_s, 0.0))} left at this pace"
    return f", stopped after {duration(limit_s)} at the latest" if limit_s < math.inf else ""


def show_verdict(case: DiagnosisCase, report: DiagnosisResult, baseline: RunView) -> bool:
    """The answer, a paragraph, and what to do now. False when there was nothing to judge."""
    chart.sentence(words.verdict(report, baseline))
    is_ours = not case.head.spec.imported  # of an import no file is here to be run
    command = script_command(case.head, words.options(report, baseline)) if is_ours else ""
    render.draw(story.verdict(report, baseline, command), "dx-verdict")
    is_judged = not words.could_not_run(report, baseline)
    for finding in report.diagnosis.findings[: int(is_judged)]:
        if line := finding.verdict.line:
            links.link(links.SOURCE, f"{escape(line)} in the source", run=case.head.id, line=line)
    if report.rules not in ("", rules_version()):
        _offer_another(case, report.rules)
    render.draw(story.error(case.head, baseline), "dx-error")
    return is_judged


def show_chain(report: DiagnosisResult, baseline: RunView) -> None:
    """From root cause to symptom."""
    st.subheader("From the cause to what you see", anchor=False)
    render.draw(story.chain(report, baseline), "dx-chain")


def show_other_findings(report: DiagnosisResult) -> None:
    """Further causes that were found beside the first, and losses without harm so far."""
    also = [(f, "Also found") for f in report.diagnosis.findings[1:]]
    also += [(f, "Latent") for f in report.diagnosis.latent]
    for finding, rank in also:
        fold = doc.Fold(words.heading(finding, rank), story.advice(finding))
        render.draw([fold], "dx-other")


def show_fix(case: DiagnosisCase, report: DiagnosisResult) -> None:
    """Of the root cause: what to change, what runs with it showed, a button that runs it again."""
    finding = report.diagnosis.findings[0]
    st.subheader("The fix", anchor=False)
    render.draw(story.fix(report), "dx-fix")
    is_late = _comes_too_late(case, report, finding)
    _proof(case, report, finding, is_late=is_late)
    if not is_late:
        _run(case, report, finding)
    if report.trials:
        with chart.details("What was tried, and seen"):
            render.table(story.tried(report))
            st.caption("Each of these runs is among the measurements below.")


def _comes_too_late(case: DiagnosisCase, report: DiagnosisResult, finding: Finding) -> bool:
    """Whether no run can try the fix: the loss breaks before the step that would be changed."""
    known = {word: case.run_of(word) for word in (BASELINE, "fp32")}
    views = {
        word: diagnoses.observed(run)
        for word, run in known.items()
        if run is not None and not run.state.is_active
    }
    controls = finding.verdict.fix.controls
    if not controls or BASELINE not in views:
        return False
    evidence = Evidence(views, report.diagnosis.policy)
    return all(comes_too_late(finding, control, evidence) for control in controls)


def _proof(
    case: DiagnosisCase, report: DiagnosisResult, finding: Finding, *, is_late: bool
) -> None:
    if report.trials:
        boxes = {True: st.success, False: st.warning, None: st.info}
        boxes[fix_words.verified(report)](escape(fix_words.seen(report)))
    elif case.head.spec.imported:
        st.info("No run with this fix came with the import.")
    elif case.is_moving:
        st.info("No run with a fix has ended yet.")
    elif finding.verdict.fix.controls and not is_late:
        st.info("This fix has not been tried yet. The button below runs the script with it.")
    else:
        why = (
            "No run with this fix can show anything: the loss is not finite before the first "
            "optimizer step."
            if is_late
            else "ampscope cannot apply this fix to a running script."
        )
        st.info(f"{why} Change the script by hand, then diagnose it again:")
        st.code(script_command(case.head), language="bash", wrap_lines=True)


def _run(case: DiagnosisCase, report: DiagnosisResult, finding: Finding) -> None:
    if case.head.spec.imported:  # its file and arguments come from an untrusted file
        st.caption("This diagnosis was imported. It can be looked at, and is not run from here.")
        return
    words = fix_words.candidates(report)
    if not words or not permissions.offers("running the fix"):
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        python = diagnoses.pick_python(case.script, "dx-fix-python")
        chosen = words[0]
        if len(words) > 1:
            said = {word: Control(word).words for word in words}
            if st.session_state.get("dx-fix-best") != words[0]:  # a run has cured meanwhile
                st.session_state["dx-fix-best"] = st.session_state["dx-fix-word"] = words[0]
            chosen = st.selectbox(
                "Run the script", words, format_func=said.__getitem__, key="dx-fix-word"
            )
        again = any(t.control == chosen for t in report.trials)
        busy = diagnoses.busy_with()
        start = st.button(
            "Run the fix again" if again else "Run the fix",
            key="dx-run-fix",
            icon=":material/replay:" if again else ":material/play_arrow:",
            disabled=bool(busy) or case.is_moving,
        )
    folder = folder_of(case.head.spec)
    text = f"It runs the script {Control(chosen).words}, in its folder {cut(folder.name, 60)}."
    if busy and busy != case.script:
        text = f"{cut(file_name(busy), 60)} is being run; one at a time."
    elif case.is_moving:
        text = "The script is being run. What it shows will stand here when it has ended."
    st.caption(escape(text), help=code(str(folder)))
    _ended_again(case, report, chosen)
    if start:
        try:
            diagnoses.start_controls(case.head, _with_reference(chosen), python)
        except AmpscopeError as error:
            st.error(escape(str(error)))
        else:
            st.toast(escape(f"The script runs {Control(chosen).words}."))
            st.rerun()


def _ended_again(case: DiagnosisCase, report: DiagnosisResult, word: str) -> None:
    """How the fix ended when it was last run again."""
    runs = [run for run in case.runs if run.spec.control == word and not run.state.is_active]
    if len(runs) < 2:
        return
    last = runs[-1]
    trial = next((t for t in report.trials if t.control == word), None)
    when = f"Run again {ago(last.ended or last.created)}, {Control(word).words}"
    if last.state is not State.FINISHED or trial is None:
        ended = f"{states.ENDED.get(last.state, 'ended')}. {last.message}".strip()
        st.warning(escape(f"{when}: it {ended} The run before counts."))
        return
    boxes = {True: st.success, False: st.warning, None: st.info}
    seen = {
        True: "the symptom was gone again",
        False: "the symptom or its cause is still there",
        None: "the cause is found no more; too few steps to compare the loss"
        if trial.is_too_short
        else "the cause is found no more; its effect is not measurable",
    }[trial.cured]
    boxes[trial.cured](escape(f"{when}: {plural(last.steps_done, 'step')}, and {seen}."))


def _with_reference(word: str) -> list[str]:
    """A lower learning rate is judged by fp32 at that rate too."""
    return [word, Control(word).in_fp32] if Control(word).first.name == "lr" else [word]


def show_evidence(case: DiagnosisCase, report: DiagnosisResult) -> None:
    """A row for each measurement behind the verdict, with links to where it was measured."""
    st.subheader("Evidence", anchor=False)
    found = report.diagnosis.findings[0].verdict
    if found.evidence:
        chart.see("Each number with its run and step; the links open the pages that show it.")
    module = {"module": found.module} if found.module else {}

    def pages(place: DeltaGenerator, measured: doc.Measured) -> None:
        run = next((r for r in case.runs if r.id == measured.run_id), None)
        if run is None:
            place.caption("this run was deleted")
            return
        query = {"run": run.id} | ({} if measured.step is None else {"step": str(measured.step)})
        with place.container(horizontal=True, gap="small"):
            st.page_link(links.DIAGNOSIS.file, label="Measurements", query_params=query)
            for entry in run_page.pages_of(run):
                if entry in (links.GRADIENTS, links.LOSS_SCALE, links.LAYERS):
                    st.page_link(entry.file, label=entry.title, query_params=query | module)

    render.draw(story.evidence(report), "dx-evidence", beside=pages)


def show_controls(case: DiagnosisCase, report: DiagnosisResult) -> None:
    """The same script as it is, in fp32, in bf16 and with the fix: a chart, and a row for each."""
    st.subheader("The controls side by side", anchor=False)
    named = [(name, case.run_of(word)) for name, word in fix_words.compared(report)]
    found = _recorded((name, r) for name, r in named if r is not None and not r.state.is_active)
    render.draw(story.controls(report, found), "dx-controls")
    cured = fix_words.chosen(report)
    fixed = case.run_of(cured.control) if cured is not None else None
    beside = links.EXTENSION_ENTRIES.get("two_runs")
    if beside and fixed is not None and fixed.steps_done and case.head.steps_done:
        label = "Unchanged and fixed, side by side"
        links.link(beside, label, run=case.head.id, second=fixed.id)


def _recorded(named: Iterable[tuple[str, RunInfo]]) -> list[fix_words.ControlRun]:
    return [fix_words.ControlRun(n, run, store.steps(run), store.totals(run)) for n, run in named]


def show_compiled(case: DiagnosisCase) -> None:
    """A row for each compiled run, which leaves out a layer of the compiler: what it goes through,
    and whether it computes what eager code does. Nothing for a script that was not run compiled."""
    controls = dict.fromkeys(run.spec.control for run in case.runs)
    wanted = [c for c in controls if c in (BASELINE, "fp32") or Control(c).is_compiled]
    ended = {c: run for c in wanted if (run := case.run_of(c)) and not run.state.is_active}
    if COMPILED not in ended or BASELINE not in ended:
        return
    views = {control: diagnoses.observed(run) for control, run in ended.items()}
    found = compiled_runs.arms(views)
    st.subheader("Compiled code beside eager code", anchor=False)
    healthy = sum(not arm.unjudged and arm.apart is None for arm in found)
    blamed = compiled_runs.layer(views)
    chart.see(
        f"{healthy:,} of {plural(len(found), 'compiled run')} computed what eager code does, up to "
        "rounding." + ("" if blamed is None else f" What differs is made by {blamed}.")
    )
    rows = tuple((arm.control.words, arm.through, arm.words) for arm in found)
    render.table(doc.Table(("Run", "What of the compiler runs", "Beside eager code"), rows))
    if views[COMPILED].kernels:
        links.link(links.LAYERS, "Kernels that were compiled", run=ended[COMPILED].id)


ALL = "all steps"
TABLE_PX, UPRIGHT_PX, FIELD_PX = 320, 700, 150
_KEPT_START, _KEPT_END = "start", "end"  # moments of scans that belong to no one step


def show_measurements(case: DiagnosisCase, step: int | None) -> None:
    """The raw observations that verdicts rest on: a link for each run, then the tables of one,
    folded unless the address names a step.

    The links lead to ``step``, where the verdict stands.
    """
    asked = st.query_params.get("step")
    names = run_names(case.runs)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("All that was recorded of the script, run", width="content")
        for run_id, name in names.items():
            query = {"run": run_id, "step": str(step or 0)}
            st.page_link(links.DIAGNOSIS.file, label=escape(name), query_params=query)
    with st.expander("Measurements", expanded=asked is not None):
        runs = {r.id: r for r in case.runs}
        run_id = links.select(
            "Run",
            "run",
            list(runs),
            default=case.head.id,
            format_func=lambda id_: f"{names[id_]}, {runs[id_].state}",
        )
        run = diagnoses.observed(runs[run_id])
        step = _pick_step(run, asked)
        _tables(run, step)


def run_names(runs: Sequence[RunInfo]) -> dict[str, str]:
    """Run id -> its control in words; a control's second run is called that. What ended for want of
    a CUDA device, and was then run on a rehearsed one, is said to be so."""
    names: dict[str, str] = {}
    for place, run in enumerate(runs):
        spec, name = run.spec, Control(run.spec.control).words
        alike = [r.spec.policy for r in runs[:place] if r.spec.control == spec.control]
        later = [r.spec.policy for r in runs[place:] if r.spec.control == spec.control]
        if any(policy != spec.policy for policy in later):
            name += ", without CUDA"
        names[run.id] = f"{name}, again" if spec.policy in alike else name
    return names


def _pick_step(run: RunView, asked: str | None) -> int | None:
    """The step of the address when the run has it; None for all."""
    steps = [str(a) for a in sorted({a.step for a in run.steps})]
    options = [ALL, *steps]
    shown = asked if asked in steps else ALL
    key = links.widget_key("measured-step", shown)
    st.selectbox("Step", options, options.index(shown), key=key, on_change=_step_chosen,
                 args=(key,), help="Type to search.")  # fmt: skip
    if asked is not None and asked not in steps:
        st.caption("This run did not reach the step that the address names; all steps are shown.")
    return int(asked) if asked is not None and asked in steps else None


def _step_chosen(key: str) -> None:
    chosen = st.session_state[key]
    if links.is_moved("measured-step", key):
        links.keep("step", None if chosen == ALL else chosen)


def _tables(run: RunView, step: int | None) -> None:
    when = "over all steps" if step is None else f"at step {step:,}"
    parts: list[tuple[str, Sequence[Observation]]] = [
        ("Optimizer steps", [a for a in run.steps if step in (None, a.step)]),
        ("Bad ops", [b for b in run.bad_ops if step is None or _was_bad_at(b, step)]),
        ("Calls", [c for c in run.calls if step in (None, c.step)]),
        ("Gradients of parameters", [g for g in run.gradients if step in (None, g.step)]),
        ("Tensors looked at", [s for s in run.scans if step is None or _scanned_at(s, step)]),
        ("Uses of ops", [u for u in run.uses if step in (None, u.step)]),
        ("How it ended", [run.outcome]),
    ]
    counted = [plural(len(rows), name.lower().removesuffix("s")) for name, rows in parts[:3]]
    chart.see(f"Recorded {when}: {', '.join(counted)}.")
    for name, rows in parts:
        if rows:
            _measurement_table(name, rows)


def _measurement_table(name: str, rows: Sequence[Observation]) -> None:
    key = f"dx-{name.lower().replace(' ', '-')}"
    st.markdown(f"**{escape(name)}**")
    table = observation_table(rows)
    shown, most = (transposed(table), UPRIGHT_PX) if len(rows) == 1 else (table, TABLE_PX)
    columns = {"field": st.column_config.TextColumn(width=FIELD_PX)} if shown is not table else None
    chart.table(shown, key, key=key, most_px=most, columns=columns, whole=lambda: table)


def observation_table(rows: Sequence[Observation]) -> pd.DataFrame:
    """A column for each field that any row fills. A column with NaN or Inf becomes text, because a
    table shows them as nothing."""
    fields = [f.name for f in dataclasses.fields(rows[0])]
    columns = {name: [getattr(row, name) for row in rows] for name in fields}
    return pd.DataFrame(
        {
            name.replace("_", " "): _readable(values)
            for name, values in columns.items()
            if any(v not in (None, "", ()) for v in values)
        }
    )


def transposed(table: pd.DataFrame) -> pd.DataFrame:
    """A single row of twenty columns reads better from top to bottom."""
    row = table.iloc[0]
    values = [value(v) if isinstance(v, float) else str(v) for v in row.tolist()]
    return pd.DataFrame({"field": table.columns, "value": values})


def _readable(values: list[object]) -> list[object]:
    if any(isinstance(v, tuple) for v in values):
        return ["; ".join(map(_part, v)) if isinstance(v, tuple) else v for v in values]
    if any(isinstance(v, float) and not math.isfinite(v) for v in values):
        return [value(v) if isinstance(v, float) else "" if v is None else v for v in values]
    return values


def _part(part: object) -> str:
    if isinstance(part, Operand):
        shape = "×".join(map(str, part.shape)) or "scalar"
        text = f"{part.dtype} {shape}, {value(part.min_abs)} to {value(part.max_abs)}"
        extra = [
            f"{n:,} {what}"
            for n, what in ((part.zeros, "zero"), (part.nonfinite, "not finite"))
            if n
        ]
        return ", ".join([text, *extra])
    return value(part) if isinstance(part, float) else str(part)


def _was_bad_at(op: BadOp, step: int) -> bool:
    return op.step <= step <= max(op.step, op.last_step)


def _scanned_at(scan: Scan, step: int) -> bool:
    return scan.step == step or scan.moment in (_KEPT_START, _KEPT_END)


Answer = tuple[Rule, Verdict]


def show_rules(report: DiagnosisResult, run: str) -> None:
    """A folded table for each kind of answer, then any rule's documentation."""
    st.subheader("What every rule answered", anchor=False)
    answers = report.diagnosis.answers
    groups = {s: [a for a in answers if a[1].status is s] for s in story.ANSWERS}
    counted = ", ".join(
        f"{len(groups[s])} {title}" for s, title in story.ANSWERS.items() if groups[s]
    )
    chart.see(f"{len(answers)} rules looked at the evidence: {counted}.")
    for status, title in story.ANSWERS.items():
        if groups[status] and status is not Status.FOUND:
            with chart.details(f"Rules: {title} ({len(groups[status])})"):
                rows = tuple(
                    (CAUSES[rule.id].titled, verdict.reason or "nothing of the kind")
                    for rule, verdict in groups[status]
                )
                render.table(doc.Table(("Cause", "Answer"), rows))
    with chart.details("What a rule looks for"):
        if st.session_state.get(_RULE_OF, run) != run:  # of another diagnosis
            links.keep("rule", None)
        st.session_state[_RULE_OF] = run
        _documentation(answers)


def documentation_sections(documentation: str) -> list[tuple[str, str]]:
    """(heading, text) of a rule's documentation; its first line has an empty heading."""
    first = documentation.strip().partition("\n")[0]
    return [("", first), *catalog.sections(documentation)]


def _documentation(answers: tuple[Answer, ...]) -> None:
    rules = {rule.id: rule for rule, _ in answers}
    found = next((r.id for r, v in answers if v.status is Status.FOUND), None)
    chosen = links.select(
        "Rule",
        "rule",
        list(rules),
        default=found,
        format_func=lambda id_: f"{CAUSES[id_].code} {CAUSES[id_].title} ({id_})",
        help="Type to search.",
    )
    st.markdown(f"*{escape(CAUSES[chosen].definition)}*")
    for heading, text in documentation_sections(rules[chosen].documentation):
        st.markdown(f"**{escape(heading)}**\n\n{escape(text)}" if heading else escape(text))
