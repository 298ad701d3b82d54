"""The runs of one diagnosis: which to make next, and what those made so far say."""

from __future__ import annotations

import time
from collections.abc import Callable

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnose import Finding
from ampscope.experiments.fp32_set import smallest_fp32_set
from ampscope.experiments.script_runs import ScriptRun, ScriptRuns
from ampscope.rules.verdict import Fix
from ampscope.verdicts.cure import is_cured
from ampscope.verdicts.report import problem
from ampscope.verdicts.trials import (
    SEARCHED,
    USE_BF16,
    Trial,
    is_everything,
    modules_with_parameters,
    trial_of,
)

MAX_FIX_RUNS = 4
MAX_SEARCH_RUNS = 14
MAX_SEARCH_S = 60.0  # no further run is started then; the smallest set seen to cure counts
EVERYWHERE = 0.5  # of the modules with parameters

Say = Callable[[str], None]


class Plan:
    """The runs made so far and what they say."""

    def __init__(self, runs: ScriptRuns, say: Say) -> None:
        self.runs = runs
        self.say = say
        self.done: dict[str, ScriptRun] = {}
        self.views: dict[str, RunView] = {}
        self.trials: list[Trial] = []

    @property
    def evidence(self) -> Evidence:
        """What the runs so far have shown, under the policy that they were made with."""
        machine = self.done["as_is"].info.machine
        return Evidence(self.views, machine.policy if machine else "native")

    def first_two(self, show: Say | None) -> None:
        """The script as it is and its fp32 control, side by side."""
        self.say("as it is, and in fp32")
        first = self.runs.start("as_is")
        second = self.runs.start("fp32", parent=first)
        self._keep("as_is", self.runs.wait(first, show))
        self._keep("fp32", self.runs.wait(second))
        # Two runs at a time can want one thing, such as the port of torch.distributed.
        if _collided(self.views["as_is"]) or self._shared(first):
            self._keep("as_is", self.runs.run("as_is"))
        if _collided(self.views["fp32"]) or self._shared(second):
            self._keep("fp32", self.runs.run("fp32", self.done["as_is"].info.id))

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
            self.say(control)
            parent = self.done["as_is"].info.id
            self._keep(control, self.runs.run(control, parent))
        return self.views[control]

    def problem(self) -> str:
        """Why there is nothing to judge; "" when there is."""
        return problem(self.done["as_is"].info, self.views["as_is"], self.views.get("fp32"))

    def wants_frozen_scale(self) -> bool:
        """Every step was skipped at whatever scale, with a finite loss: is 1 borne?"""
        run = self.views["as_is"]
        none_taken = len(run.skips) == len(run.attempts)
        finite = not run.bad_loss_attempts
        return run.has_scaler and bool(run.skips) and none_taken and finite

    def try_fixes(self, finding: Finding) -> None:
        """Run the finding's interventions until one cures, or removes the pattern where an effect
        cannot be measured: further runs could not be told apart either. Where one module in fp32 is
        not enough, the smallest set of modules is looked for before single lines are tried."""
        may_search = finding.cause in SEARCHED
        known = [c for c in finding.verdict.fix.controls if self.runs.can_apply(c)]
        for control in known[:MAX_FIX_RUNS]:
            if may_search and finding.verdict.module and control.startswith("fp32_lines"):
                may_search = False
                if self._search(finding):
                    return
            if self._try(finding, control, finding.verdict.fix):
                return
        if may_search and self._search(finding):
            return
        if finding.cause in SEARCHED and all(t.control != "bf16" for t in self.trials):
            self._try(finding, "bf16", USE_BF16)

    def _try(self, finding: Finding, control: str, fix: Fix) -> bool:
        extra = f"fp32;{control}" if fix.kind == "lower_lr" else ""
        view = self.control(control)
        cured = is_cured(finding, self.evidence, view, self.control(extra) if extra else None)
        self._tried(control, fix, cured=cured)
        return cured is not False

    def _search(self, finding: Finding) -> bool:
        deadline = time.monotonic() + MAX_SEARCH_S
        seen: dict[str, bool | None] = {}

        def cures(paths: tuple[str, ...]) -> bool:
            if time.monotonic() > deadline:
                return False
            control = "fp32_modules:" + ",".join(paths)
            seen[control] = is_cured(finding, self.evidence, self.control(control), None)
            return seen[control] is not False

        names = modules_with_parameters(self.views["as_is"])
        if self._is_everywhere(names) and self._try(finding, "bf16", USE_BF16):
            return True
        found = smallest_fp32_set(names, cures, MAX_SEARCH_RUNS)
        if found:
            control = "fp32_modules:" + ",".join(found)
            # Every module in fp32 is fp32 training: bf16 does better, where it is healthy.
            tried = any(t.control == "bf16" for t in self.trials)
            is_all = is_everything(control, self.views["as_is"]) and not tried
            if is_all and self._try(finding, "bf16", USE_BF16):
                return True
            self._tried(control, finding.verdict.fix, cured=seen[control])
        return bool(found)

    def _is_everywhere(self, names: list[str]) -> bool:
        """Whether most modules with parameters overflow by themselves: the smallest set of modules
        in fp32 would be nearly all of them."""
        as_is = self.views["as_is"]
        bad = {
            b.module
            for b in as_is.bad_ops
            if b.kind == "nonfinite" and b.phase == "forward" and b.fp32_finite
        }
        return len(names) > 1 and len(bad & set(names)) > EVERYWHERE * len(names)

    def _tried(self, control: str, fix: Fix, *, cured: bool | None) -> None:
        views = self.views[control], self.views["as_is"]
        self.trials.append(trial_of(control, fix, *views, cured=cured))

    def _keep(self, control: str, run: ScriptRun) -> None:
        self.done[control] = run
        self.views[control] = RunView(control, run.info.id, run.observations)


def _collided(view: RunView) -> bool:
    text = view.outcome.error_text
    return any(word in text for word in ("EADDRINUSE", "ddress already in use"))
