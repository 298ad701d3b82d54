"""The table of bad steps on the Loss scale page: all of a short run, the newest of a long one."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.skip_causes import SkipEvidence, skip_causes
from ampscope.analysis.skips import BadStep, bad_steps
from ampscope.analysis.training import is_bad
from ampscope.observations import Attempt
from ampscope.records import RunInfo
from ampscope.store.reader import Reader
from ampscope.store.series import bad_gradients, first_nonfinite
from app import store
from app.loss_scale.scale_data import Trajectory

MOST = 100  # rows of a long run's table; the parameters of each are read for themselves


@dataclass(frozen=True, slots=True)
class BadSteps:
    """The rows of the table, and of how many bad steps in the shown part they are the newest (at
    least so many: where thousands are bad, not each of them is shown)."""

    shown: list[BadStep]
    whole: int


def read(run: RunInfo, found: Trajectory) -> BadSteps:
    """In order of steps."""
    if found.totals.steps <= store.POINTS:
        every = bad_steps(found.steps, _all_firsts(run), optimizers(run), _evidence(run, 0))
        return BadSteps(every, len(every))
    bad = [step for step in found.steps if is_bad(step)]
    known = _evidence(run, bad[-MOST:][0].step if bad else 0)
    causes = skip_causes(found.steps, optimizers(run), known)
    firsts = _firsts(run, tuple(step.step for step in bad[-MOST:]))
    rows = [
        BadStep(s.step, s.scale, s.skipped, *firsts.get(s.step, (0, "")), causes.get(s.step))
        for s in bad[-MOST:]
    ]
    return BadSteps(rows, len(bad) if found.is_part else max(len(bad), found.totals.bad))


@store.of_run
def optimizers(reader: Reader, run_id: str) -> dict[int, str]:
    """Whose each step is, in a script's run; nothing of any other."""
    seen = reader.observations(run_id)
    return {o.attempt: o.optimizer for o in seen if isinstance(o, Attempt)}


@store.of_run
def _all_firsts(reader: Reader, run_id: str) -> dict[int, tuple[int, str]]:
    return first_nonfinite(reader, run_id)


@store.of_run
def _evidence(reader: Reader, run_id: str, first_step: int) -> dict[int, SkipEvidence]:
    found = bad_gradients(reader, run_id, first_step)
    return {step: SkipEvidence(*counts) for step, counts in found.items()}


@store.of_run
def _firsts(reader: Reader, run_id: str, steps: tuple[int, ...]) -> dict[int, tuple[int, str]]:
    """Of these steps: parameters with NaN or Inf, and the first in backward order."""
    found = {step: reader.nonfinite(run_id, step) for step in steps}
    return {step: (len(r), r[0].parameter) for step, r in found.items() if r}
