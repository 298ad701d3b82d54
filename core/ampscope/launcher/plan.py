"""Plan the runs of a diagnosis, and stop when the evidence suffices.

    as_is and fp32           ->  rules  ->  as_is again, where they do not begin alike
                             ->  a frozen scale, where every step was skipped
                             ->  compiled, where the script compiles; where eager code trains and
                                 compiled code computes otherwise, the layers of the compiler
                             ->  fp32, moved a little, where chance may explain what is wrong
                             ->  sites of half precision lifted, where something is wrong and no
                                 cause was found; then bf16
                             ->  the finding's fixes, best first, until one cures
                             ->  the smallest set of modules in fp32, where neither one module nor
                                 the finding's line is enough
                             ->  bf16 and the next finding's fixes, where none of the first one's
                                 cures, or only one that the next, its neighbour, shares
                             ->  sites of half precision lifted, where no fix cures

Once a cause is known, or something is wrong, the verdict so far is handed on after each run, so
that whatever ends the diagnosis leaves it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ampscope import extensions
from ampscope.analysis.compiled_runs import (
    layer,
    next_arm,
)
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.healing import heals, trains
from ampscope.analysis.lifting import can_be_lifted, candidates, lift
from ampscope.analysis.repeatability import wants_repeat
from ampscope.analysis.root_op import root_op
from ampscope.analysis.run_view import RunView, is_broken
from ampscope.analysis.scale_facts import static_scale
from ampscope.analysis.symptoms import Symptom
from ampscope.control import BASELINE, COMPILED, NUDGED, REPEAT, SCALE_1, Control
from ampscope.diagnosis import result
from ampscope.diagnosis.compiled import diagnosis_with_compiled_run, wants_compiled
from ampscope.diagnosis.cure import by_trials, comes_too_late, is_ambiguous, is_cured
from ampscope.diagnosis.findings import Diagnosis, Finding, casts_left_out
from ampscope.diagnosis.load import stored
from ampscope.diagnosis.result import DiagnosisResult, Trial
from ampscope.launcher.children import NOT_STARTED, SIGKILLED, HeldTraceback
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns, remove_left_jobs
from ampscope.launcher.smallest_set import smallest_set
from ampscope.launcher.uncompiled_search import UncompiledSearch
from ampscope.pythons import TORCH
from ampscope.records import AUTO, HALF_FROM, JUDGED_RANK, LIGHT, RunSpec, State
from ampscope.rules.verdict import Fix
from ampscope.runner.private_files import WAITS
from ampscope.store.writer import keep_conclusion

MAX_FIX_RUNS = 4
MAX_TRIED = 2  # findings whose fixes are run
MAX_NEXT_RUNS = 2  # of the second one's
MAX_NEIGHBOUR_S = 10.0  # of a run: a neighbour of a finding that is cured is tried in short ones
MAX_LINES = 3  # that are computed in fp32 together
MAX_SEARCH_RUNS = 14
MAX_LIFTS = 6  # runs with sites lifted
LIFT_COST = 1.5  # seconds of one, in seconds of the baseline
MAX_SEARCH_S = 60.0  # a search's runs are stopped then; the smallest set seen to cure counts
EVERYWHERE = 0.5  # of the modules with parameters
_JUDGED_BY_LOSSES = ("fp32", REPEAT, NUDGED)

Say = Callable[[str], None]
Hear = Callable[[DiagnosisResult], None]


def _silent(_: object) -> None:
    pass


def run_diagnosis(
    spec: RunSpec, store: Path, say: Say = _silent, show: Say | None = None,
    verify: bool = True, on: str = "", hear: Hear = _silent, in_place: bool = False,
) -> DiagnosisResult:  # fmt: skip
    """Diagnose the script of ``spec``; ``say`` gets progress, ``show`` the script's own output.
    ``on`` names an engine whose jobs the runs are, of an extension; "": this machine.
    ``in_place`` lets the script write the user's own files.
    ``hear`` gets the verdict as soon as something is wrong or a cause is known, and again whenever
    another run has ended: whatever ends the diagnosis before its time, the last of these is stored
    and stands."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        # The traceback of a first run without a device would look like the end of the diagnosis.
        held = HeldTraceback(show) if show is not None and spec.policy == AUTO else None
        try:
            plan = _begun(stack, spec, store, say, held or show, on, in_place)
            if plan.done[BASELINE].lacks_device:
                say(
                    f"the script again, on a simulated CUDA device ({spec.rehearsed}): it asks for "
                    "CUDA, and this machine has none"
                )
                if held is not None:
                    held.drop()
                spec = replace(spec, policy="cuda")
                if on:
                    stack.close()
                    plan = _begun(stack, spec, store, say, show, on, in_place)
                else:
                    plan = DiagnosisPlan(plan.runs.begin_again(spec), say)
                    plan.run_baselines(show)
        finally:
            if held is not None:
                held.release()
        diagnosis = plan.diagnosis()
        if plan.problem() and not diagnosis.findings:
            return _report(plan, diagnosis, started)
        if verify:
            _hand_on(plan, diagnosis, started, hear)
        if not diagnosis.findings and plan.wants_repeat():
            plan.control(REPEAT)
            diagnosis = plan.diagnosis()
        if plan.wants_frozen_scale():
            plan.control(SCALE_1)
            diagnosis = plan.diagnosis()
        # Compiled code is watched from its first step on: there is nothing to compare it with.
        if wants_compiled(diagnosis, plan.evidence) and not spec.skip_to:
            plan.control(COMPILED)
            while not diagnosis.symptoms and (arm := next_arm(plan.views)):
                plan.control(arm)
            is_searched = verify and not diagnosis.symptoms
            diagnosis = plan.diagnosis()
            if is_searched:
                _hand_on(plan, diagnosis, started, hear)
                UncompiledSearch(plan.views, plan.control, plan.control_until).run()
                diagnosis = plan.diagnosis()
        if verify:
            _hand_on(plan, diagnosis, started, hear)
        if plan.wants_nudged(diagnosis):
            plan.control(NUDGED)
            diagnosis = plan.diagnosis()
        if diagnosis.symptoms and not diagnosis.findings and plan.lift_sites():
            diagnosis = plan.diagnosis()
            if verify:
                _hand_on(plan, diagnosis, started, hear)
        if diagnosis.symptoms and not diagnosis.findings and plan.wants_bf16():
            plan.control("bf16")
            diagnosis = plan.diagnosis()
            if verify:
                _hand_on(plan, diagnosis, started, hear)
        if verify and diagnosis.findings:
            plan.prefetch(plan.known(diagnosis.findings[0])[:MAX_FIX_RUNS])
            plan.try_fixes(diagnosis.findings[0])
            diagnosis = plan.ranked_by_trials(diagnosis)
            if plan.own_fixes_fail(diagnosis.findings[0]):
                is_site = plan.lift_sites()
                # Some rules take back a cause whose fix was run in vain.
                diagnosis = by_trials(plan.diagnosis(), plan.evidence)
                if not diagnosis.findings:
                    plan.trials.clear()
                elif is_site:
                    plan.try_fixes(diagnosis.findings[0])
        return _report(plan, diagnosis, started)


def _begun(
    stack: contextlib.ExitStack, spec: RunSpec, store: Path, say: Say, show: Say | None, on: str,
    in_place: bool,
) -> DiagnosisPlan:  # fmt: skip
    """A plan whose first two runs have ended."""
    remove_left_jobs(store)
    first = replace(spec, control=BASELINE)
    runs: ScriptRuns = (
        extensions.load(extensions.job_engines()[on])(first, store, on)
        if on
        else ScriptRuns(first, store, private=True, in_place=in_place)
    )
    plan = DiagnosisPlan(stack.enter_context(runs), say, are_jobs=bool(on))
    plan.run_baselines(show)
    return plan


def _hand_on(plan: DiagnosisPlan, diagnosis: Diagnosis, started: float, hear: Hear) -> None:
    """From here on the verdict so far is stored and heard after each run."""
    if diagnosis.findings:
        plan.count_fixes(diagnosis.findings)
    if diagnosis.findings or diagnosis.symptoms or plan.wants_frozen_scale():
        plan.on_change = lambda: hear(_report(plan, diagnosis, started, is_last=False))
        plan.on_change()


def _report(
    plan: DiagnosisPlan, diagnosis: Diagnosis, started: float, *, is_last: bool = True
) -> DiagnosisResult:
    infos = {name: run.info for name, run in plan.done.items()}
    elapsed_s, output = time.monotonic() - started, plan.done[BASELINE].output
    found = result.report_of(diagnosis, plan.views, infos, tuple(plan.trials), elapsed_s, output)
    if plan.runs.in_place:
        note = "The script ran on the files themselves (--in-place), and what it wrote stays."
        found = replace(found, notes=(*found.notes, note))
    elif plan.views[BASELINE].outcome.is_kept_apart:
        found = replace(found, notes=(*found.notes, result.KEPT_APART))
    if note := plan.runs.files_note():
        found = replace(found, notes=(*found.notes, note))
    if not is_last:
        counts = (plan.ended_fixes, plan.most_fixes) if diagnosis.findings else None
        note = result.partial_note(counts)
        found = replace(found, notes=(*found.notes, note))
    keep_conclusion(plan.runs.store, infos[BASELINE].id, stored(found))
    return found


class DiagnosisPlan:
    """The runs made so far and what they say."""

    def __init__(self, runs: ScriptRuns, say: Say, *, are_jobs: bool = False) -> None:
        """``are_jobs``: each run may be another machine's, and is seen when it has ended."""
        self.runs = runs
        self._are_jobs = are_jobs
        self.say = say
        self.on_change: Callable[[], None] = lambda: None  # once the verdict so far is known
        self.most_fixes = 0
        self.begun_fixes = 0
        self.ended_fixes = 0
        self.done: dict[str, ScriptRun] = {}
        self.views: dict[str, RunView] = {}
        self.trials: list[Trial] = []
        self._prefetched: dict[str, str] = {}  # control -> run that is not asked for yet

    @property
    def evidence(self) -> Evidence:
        """What the runs so far have shown, under the policy that they were made with."""
        first = self.done[BASELINE].info
        policy = first.machine.policy if first.machine else "native"
        emulates_bf16 = bool(result.gpu_that_emulates_bf16(first))
        return Evidence(self.views, policy, emulates_bf16=emulates_bf16)

    def diagnosis(self) -> Diagnosis:
        """What the rules say of the runs so far."""
        return diagnosis_with_compiled_run(self.evidence)

    def run_baselines(self, show: Say | None) -> None:
        """The baseline run and its fp32 control, one after the other: how much of the control has
        to be seen depends on the baseline. Together where each may be another machine's, and in
        frameworks that take long to load, unless they share a GPU, which has memory for one run,
        and in compute mode EXCLUSIVE_PROCESS takes no second process, or name the port at which
        their processes meet: those of two runs would meet each other there. So would two runs on
        the same files."""
        spec = self.runs.spec
        is_local = spec.framework == TORCH and not self._are_jobs
        if is_local or self.runs.share_a_gpu() or names_a_port(spec) or self.runs.in_place:
            self.say("baseline")
            self._keep(BASELINE, self.runs.wait(self.runs.start(BASELINE), show, self.say))
            if self._is_kept_apart(BASELINE):
                self._keep(BASELINE, self.runs.run(BASELINE, say=self.say))
            # A user who stops the baseline wants no further run.
            if not (self.done[BASELINE].lacks_device or self._was_stopped(BASELINE)):
                self._judge_one_rank()
                self._hand_on_half()
                self.control("fp32")
                if self._is_kept_apart("fp32") or self._needs_ops("fp32"):
                    self._keep("fp32", self.runs.run("fp32", self.done[BASELINE].info.id, self.say))
            return
        self.say("baseline and fp32")
        first = self.runs.start(BASELINE)
        second = self.runs.start("fp32", parent=first)
        self._keep(BASELINE, self.runs.wait(first, show, self.say))
        if self.done[BASELINE].lacks_device:
            return
        self._keep("fp32", self.runs.wait(second, say=self.say))
        if self._is_disturbed(BASELINE, first):
            self._keep(BASELINE, self.runs.run(BASELINE, say=self.say))
        if self._is_disturbed("fp32", second):
            self._keep("fp32", self.runs.run("fp32", self.done[BASELINE].info.id, self.say))
        self._judge_one_rank()
        self._hand_on_half()

    def _hand_on_half(self) -> None:
        """Later runs count their steps from where half precision takes part in the baseline: a
        control that takes it away cannot know by itself."""
        if first := self.views[BASELINE].outcome.half_from:
            settings = (*self.runs.spec.settings, (HALF_FROM, str(first)))
            self.runs.spec = replace(self.runs.spec, settings=settings)

    def _is_disturbed(self, control: str, run_id: str) -> bool:
        """Whether one of two runs at a time may have failed because of the other: it lacked what
        the other had taken, or stopped before it wrote what both share."""
        if _lacked(self.done[control], self.views[control]):
            self.say(f"{control} again, alone: there was not enough for two runs at a time")
            return True
        if self._is_kept_apart(control):
            return True
        if self.runs.compared:  # and put back before the next run begins
            waits = self.done[control].info.message == WAITS
            if waits:
                self.say(f"{control}, once more: runs are made one at a time here")
            return waits
        return self._shared(run_id)

    def _is_kept_apart(self, control: str) -> bool:
        """Whether a run's overlay may have kept it from moving a file; others have none then."""
        if not self.views[control].outcome.is_kept_apart or not self.runs.leave_overlay():
            return False
        self.say(f"{control} again, in a copy: an overlay keeps apart what the script moves")
        return True

    def _judge_one_rank(self) -> None:
        """Controls are compared by the rank that the baseline is judged by, which is known when
        that has ended: an fp32 control beside it may have taken another rank's observations."""
        judged = self.views[BASELINE].outcome
        if judged.ranks < 2:
            return
        settings = (*self.runs.spec.settings, (JUDGED_RANK, str(judged.rank)))
        self.runs.spec = replace(self.runs.spec, settings=settings)
        other = self.views["fp32"].outcome if "fp32" in self.views else judged
        if other.ranks > 1 and other.rank != judged.rank:
            self.say(f"fp32 again: rank {judged.rank} is the one to judge")
            self._keep("fp32", self.runs.run("fp32", self.done[BASELINE].info.id, self.say))

    def _shared(self, run_id: str) -> bool:
        """Whether another run changed what both share while this one ran: what it read there may be
        the other's, and it was stopped before it wrote there itself."""
        holder = self.runs.first_to_share()
        if holder in ("", run_id):
            return False
        self.say("again, alone: the script changes what its runs cannot have copies of")
        return True

    def control(self, control: str) -> RunView:
        """Run a control once."""
        if control not in self.views:
            self._say_run(control)
            started = self._prefetched.pop(control, "") or self._start(control)
            self._keep(control, self.runs.wait(started, say=self.say))
        return self.views[control]

    def _start(self, control: str, limit_s: float = math.inf) -> str:
        """Start a control."""
        light = None
        if self._says_enough_without_ops(control):
            outcome = self.views[BASELINE].outcome
            # It is faster than the baseline, beyond whose last step there is nothing to compare.
            light = outcome.steps if outcome.ended in ("steps", "time") else 0
        parent = self.done[BASELINE].info.id
        return self.runs.start(control, parent, limit_s=limit_s, light=light)

    def _says_enough_without_ops(self, control: str) -> bool:
        """Whether the ops of a control tell nothing: of numbers that are not finite, of an error,
        of a loss that is scaled by hand, or of a cause that no symptom shows to be gone."""
        run = self.views[BASELINE]
        raised = run.outcome.ended in ("exception", "killed") or run.outcome.errors_caught
        if is_broken(run) or raised or static_scale(run) is not None:
            return False
        if self.runs.spec.framework != TORCH or Control(control).is_compiled:
            return False
        return control in _JUDGED_BY_LOSSES or bool(self.evidence.symptoms)

    def _needs_ops(self, control: str) -> bool:
        """Whether a run whose ops were not seen broke all the same."""
        is_light = any(name == LIGHT for name, _ in self.done[control].info.spec.settings)
        if not is_light or not is_broken(self.views[control]):
            return False
        self.say(f"{control} again: which of its ops is the first without a finite result")
        return True

    def control_until(self, deadline: float, control: str) -> RunView | None:
        """Run a control once, until ``deadline`` of the monotonic clock at most. None of a run that
        this cut short: fewer steps than the others made would show fewer symptoms."""
        left = deadline - time.monotonic()
        if control in self.views or left >= self.runs.spec.time_limit_s:
            return self.control(control)
        if left <= 0:
            return None
        self._say_run(control)
        run = self.runs.wait(self._start(control, left), say=self.say)
        if RunView(control, run.info.id, run.observations).outcome.ended in ("time", "killed"):
            self.done[control] = run  # the report lists it
            return None
        self._keep(control, run)
        return self.views[control]

    def prefetch(self, controls: Iterable[str]) -> None:
        """Start runs that will most likely be wanted, where each is another machine's."""
        if self._are_jobs and not self.runs.share_a_gpu():
            for control in controls:
                if control not in self.views and control not in self._prefetched:
                    self._prefetched[control] = self._start(control)

    def problem(self) -> str:
        """Why there is nothing to judge; "" when there is."""
        return result.problem(
            self.done[BASELINE].info, self.views[BASELINE], self.views.get("fp32")
        )

    def wants_repeat(self) -> bool:
        """Whether the unchanged script has to run twice, before what differs at the beginning of
        its fp32 control can be laid to chance or to half precision."""
        fp32 = self.views.get("fp32")
        if fp32 is None or not self.runs.can_apply(REPEAT):
            return False
        return wants_repeat(self.views[BASELINE], fp32)

    def wants_nudged(self, diagnosis: Diagnosis) -> bool:
        """Whether all that is wrong may be what the least change leads to. Of results alone even a
        cause that was found may say no more than that."""
        seen = {*diagnosis.symptoms}
        by_chance = seen and seen <= {Symptom.BEHIND, Symptom.RESULTS}
        is_open = not diagnosis.findings or seen == {Symptom.RESULTS}
        return bool(by_chance) and is_open and self.runs.can_apply(NUDGED)

    def wants_bf16(self) -> bool:
        """Whether a run in bf16 would be another one than the baseline."""
        return not self.evidence.already_in_bf16

    def wants_frozen_scale(self) -> bool:
        """Every step was skipped at whatever scale, or the scale fell below 1, with a finite loss:
        are gradients finite at 1?"""
        run = self.views[BASELINE]
        if not run.has_scaler or not run.skips or run.bad_loss_steps:
            return False
        return len(run.skips) == len(run.steps) or min(run.scales) < 1

    def lift_sites(self) -> bool:
        """Look for the sites of half precision whose rounding does the harm, where the fp32 control
        has none; whether some were found."""
        if not can_be_lifted(self.evidence) or not self.runs.can_apply(lift(["train.py:1"])):
            return False
        took = self.views[BASELINE].outcome.elapsed_s
        deadline = time.monotonic() + max(MAX_SEARCH_S, MAX_LIFTS * LIFT_COST * took)

        def heal(names: tuple[str, ...]) -> bool:
            view = self.control_until(deadline, lift(names))
            if view is None or view.outcome.is_out_of_memory:
                return False  # which says nothing of the sites
            return heals(view, self.evidence) is not False

        only_results = {*self.evidence.symptoms} == {Symptom.RESULTS}
        first_two = self.views[BASELINE], self.views["fp32"]
        names = candidates(*first_two, only_results=only_results)
        return smallest_set(names, heal, MAX_LIFTS, likely_first=True) is not None

    def try_fixes(self, finding: Finding) -> None:
        """Run the finding's interventions until one cures, or removes the pattern where an effect
        cannot be measured: further runs could not be distinguished either. Where neither one module
        in fp32 nor the finding's own line is enough, the smallest set of modules is looked for
        before several lines are tried."""
        may_search = finding.rule.searches_modules
        for control in self.known(finding)[:MAX_FIX_RUNS]:
            with self._fix():
                if self._run_trial(finding, control, finding.verdict.fix):
                    return
            if may_search and finding.verdict.module and Control(control).values("fp32_lines"):
                may_search = False
                if self._search(finding):
                    return
            if self._run_more_lines(finding, control):
                return
        if may_search and self._search(finding):
            return
        if finding.rule.searches_modules:
            self._try_bf16(finding)

    def own_fixes_fail(self, finding: Finding) -> bool:
        """Whether fixes were run and none cures, but for bf16, which cures whatever leaves fp16's
        range: that says nothing for a cause that does not propose it. Where no fix can be run,
        nothing speaks against the cause."""
        proposes = "bf16" in finding.verdict.fix.controls
        own = [t for t in self.trials if t.control != "bf16" or proposes]
        return bool(own) and all(t.cured is False for t in own)

    def count_fixes(self, findings: Sequence[Finding]) -> None:
        """Begin with the fixes of ``findings``: how many will be run at most. The search for a set
        of modules is one; a fix that takes in further lines remains one."""
        first, others = findings[0], findings[1:MAX_TRIED]
        known = self.known(first)[:MAX_FIX_RUNS]
        self.most_fixes = len(known)
        if first.rule.searches_modules:
            tries_bf16 = not self.evidence.emulates_bf16 and self.wants_bf16()
            self.most_fixes += 1 + ("bf16" not in known and tries_bf16)
            casts = casts_left_out(self.evidence)
            self.most_fixes += casts is not None and casts.controls[0] not in known
        self.most_fixes += sum(len(self.known(other)[:MAX_NEXT_RUNS]) for other in others)

    def known(self, finding: Finding) -> list[str]:
        """The fixes that the rule proposes, the script's framework has, and which may cure."""
        return [
            control
            for control in finding.verdict.fix.controls
            if self.runs.can_apply(control) and not comes_too_late(finding, control, self.evidence)
        ]

    @contextlib.contextmanager
    def _fix(self) -> Iterator[None]:
        """Around the runs with one fix."""
        self.begun_fixes += 1
        yield
        self.ended_fixes = self.begun_fixes
        self.on_change()

    def _say_run(self, control: str) -> None:
        if self.begun_fixes > self.ended_fixes:
            self.say(f"trying fixes, {self.begun_fixes} of at most {self.most_fixes}: {control}")
        else:
            self.say(control)

    def ranked_by_trials(self, diagnosis: Diagnosis) -> Diagnosis:
        """The findings in the order that the trials give them: where no fix of the first one cures,
        or only one that a neighbour shares, those of the next are run."""
        first = diagnosis.findings[0]
        controls = first.verdict.fix.controls
        none_can = bool(controls) and all(
            comes_too_late(first, control, self.evidence) for control in controls
        )
        if not self.trials and not none_can:
            return diagnosis
        is_of_compilers = not diagnosis.symptoms and layer(self.views) is not None
        others_are_open = any(is_ambiguous(first, f, self.evidence) for f in diagnosis.findings[1:])
        has_others = len(diagnosis.findings) > 1
        none_cures = has_others and not any(t.cured for t in self.trials)
        if not is_of_compilers and (others_are_open or none_cures) and self.wants_bf16():
            self.control("bf16")  # it may cure another finding
        in_vain = all(t.cured is False for t in self.trials)
        is_quick = self.views[BASELINE].outcome.elapsed_s <= MAX_NEIGHBOUR_S
        for finding in diagnosis.findings[1:MAX_TRIED]:
            is_asked = is_quick and is_ambiguous(first, finding, self.evidence)
            if not (in_vain or is_asked):
                continue
            for control in self.known(finding)[:MAX_NEXT_RUNS]:
                with self._fix():
                    cures = self._run_trial(finding, control, finding.verdict.fix)
                if cures:
                    return by_trials(diagnosis, self.evidence)
        return by_trials(diagnosis, self.evidence)

    def _run_trial(self, finding: Finding, control: str, fix: Fix) -> bool:
        extra = Control(control).in_fp32 if fix.kind == "lower_lr" else ""
        view = self.control(control)
        if view.outcome.is_out_of_memory or self._was_stopped(control):
            return False  # that says nothing of the fix
        is_asked = bool(extra) and trains(view)  # in fp32, where it trains as the script does it
        cured = is_cured(finding, self.evidence, view, self.control(extra) if is_asked else None)
        self._tried(control, fix, cured=cured)
        return cured is not False

    def _try_bf16(self, finding: Finding) -> bool:
        """Run it without the casts that the script writes itself, if there are some; then in bf16,
        where the GPU has bf16. Each once."""
        for fix in filter(None, (casts_left_out(self.evidence), result.USE_BF16)):
            (control,) = fix.controls
            lacks = control == "bf16" and (self.evidence.emulates_bf16 or not self.wants_bf16())
            if lacks or any(t.control == control for t in self.trials):
                continue
            with self._fix():
                if self._run_trial(finding, control, fix):
                    return True
        return False

    def _was_stopped(self, control: str) -> bool:
        """Whether a user stopped the run, from the dashboard for example."""
        return self.done[control].info.state is State.CANCELLED

    def _run_more_lines(self, finding: Finding, control: str) -> bool:
        """Several lines may overflow, each by itself. Where one of them in fp32 does not cure, that
        run's own root is the next one."""
        lines = Control(control).values("fp32_lines")
        while 0 < len(lines) < MAX_LINES:
            root = root_op(self.views[control])
            if root is None or root.op.line in ("", *lines):
                return False
            lines = (*lines, root.op.line)
            control = Control.of(fp32_lines=lines)
            if self._run_trial(finding, control, finding.verdict.fix):
                return True
        return False

    def _search(self, finding: Finding) -> bool:
        deadline = time.monotonic() + MAX_SEARCH_S

        def cures(paths: tuple[str, ...]) -> bool:
            control = Control.of(fp32_modules=paths)
            view = self.control_until(deadline, control)
            if view is None or view.outcome.is_out_of_memory or self._was_stopped(control):
                return False  # which says nothing of the set
            cured = is_cured(finding, self.evidence, view, None)
            if all(t.control != control for t in self.trials):  # the rule's own was tried before
                self._tried(control, finding.verdict.fix, cured=cured)
            return cured is not False

        names = result.modules_with_parameters(self.views[BASELINE])
        if self._is_everywhere(names) and self._try_bf16(finding):
            return True
        with self._fix():
            found = smallest_set(names, cures, MAX_SEARCH_RUNS)
        # Every module in fp32 is fp32 training: bf16 does better, where it is healthy.
        if found and result.is_everything(Control.of(fp32_modules=found), self.views[BASELINE]):
            self._try_bf16(finding)
        return bool(found)

    def _is_everywhere(self, names: list[str]) -> bool:
        """Whether most modules with parameters overflow by themselves: the smallest set of modules
        in fp32 would be nearly all of them."""
        baseline = self.views[BASELINE]
        bad = {
            b.module
            for b in baseline.bad_ops
            if b.kind == "nonfinite" and b.phase == "forward" and b.fp32_finite
        }
        return len(names) > 1 and len(bad & set(names)) > EVERYWHERE * len(names)

    def _tried(self, control: str, fix: Fix, *, cured: bool | None) -> None:
        views = self.views[control], self.views[BASELINE]
        self.trials.append(result.trial_of(control, fix, *views, cured=cured))

    def _keep(self, control: str, run: ScriptRun) -> None:
        self.done[control] = run
        self.views[control] = RunView(control, run.info.id, run.observations)
        self.on_change()


_PORT = re.compile(r"MASTER_PORT|--?master[-_]port|tcp://")


def names_a_port(spec: RunSpec) -> bool:
    """Whether the environment, the arguments or the script's own text set the port at which the
    processes of a training meet."""
    if "MASTER_PORT" in os.environ or any(map(_PORT.match, spec.args)):
        return True
    try:
        files = [a for a in (spec.workload, *spec.args) if a.endswith(".py") and Path(a).is_file()]
        return any(_PORT.search(Path(f).read_text(errors="replace")) for f in files)
    except (OSError, ValueError):  # no name of a file
        return False


# What a run says that lacks what another has: the port of torch.distributed; a GPU in compute mode
# EXCLUSIVE_PROCESS (cudaErrorDevicesUnavailable); memory for a handle of cuBLAS or cuDNN.
_LACKS = (
    "EADDRINUSE", "ddress already in use", "busy or unavailable", "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
)  # fmt: skip


def _lacked(run: ScriptRun, view: RunView) -> bool:
    """Whether a run ended for want of memory, of a port or of the device."""
    outcome = view.outcome
    if outcome.ended == "killed":  # by the system, where all memory is taken
        return run.info.message.startswith((SIGKILLED, NOT_STARTED))
    return outcome.is_out_of_memory or any(word in outcome.error_text for word in _LACKS)
