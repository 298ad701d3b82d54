"""Tables of the Frameworks page: what each run was, and where layers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ampscope.analysis.framework_differences import HIGHEST, LOWEST, LayerDifference, LayerSeen
from ampscope.records import Machine, RunInfo
from ampscope.report.words.run import rules
from app import store
from app.text import number, power_of_two

TITLES = {"torch": "PyTorch", "keras": "Keras", "paddle": "Paddle"}


def facts(runs: Sequence[RunInfo]) -> pd.DataFrame:
    """What each run was: half precision real or emulated, scaler real or forced, scale, skips."""
    rows = {}
    for run in runs:
        steps, machine = store.steps(run), run.machine
        scale = steps[0].scale
        scaler = "none" if scale is None else "real"
        rows[TITLES[run.spec.framework]] = {
            "software": machine.software if machine else "unknown",
            "half precision": _arithmetic(machine) if machine else "unknown",
            "rules": rules(machine),
            "loss scaler": (machine.scaler if machine else "") or scaler,
            "first loss scale": "none" if scale is None else power_of_two(scale),
            "skipped steps": f"{store.totals(run).skipped} of {store.totals(run).steps}",
            "first loss": number(steps[0].loss),
            "last loss": number(steps[-1].loss),
        }
    return pd.DataFrame(rows)


def _arithmetic(machine: Machine) -> str:
    if machine.framework == "torch" and machine.policy == "rehearsal":
        return "half in, fp32 sum, half out"
    if machine.arithmetic == "emulated":
        return "emulated: fp32 numbers rounded to half"
    return "real, by this device's kernels"


def bins_table(shown: Mapping[str, LayerSeen]) -> pd.DataFrame:
    """Counts by power of two, a column each framework."""
    names = [*(str(e) for e in range(LOWEST, HIGHEST + 1)), "zero", "not finite"]
    frame = pd.DataFrame({"exponent": names, **{n: s.counts for n, s in shown.items()}})
    return frame[frame[list(shown)].sum(axis=1) > 0]


def differences_table(
    first: RunInfo, others: Sequence[RunInfo], found: Mapping[str, list[LayerDifference]]
) -> pd.DataFrame:
    """All layers that both have, the most different first."""
    rows = [
        {
            "layer": d.path,
            "framework": TITLES[run.spec.framework],
            f"dtype in {TITLES[first.spec.framework]}": d.first.dtype,
            "dtype there": d.second.dtype,
            "in another power of two": f"{100 * d.moved:.2f} %",
            "why": d.why,
        }
        for run in others
        for d in sorted(found[run.id], key=lambda d: -d.moved)
    ]
    return pd.DataFrame(rows)
