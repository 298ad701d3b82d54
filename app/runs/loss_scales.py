"""What several pages say of a run's loss scales: which of them suit every module, and what explains
skipped steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampscope.analysis.scale_window import ScaleWindow
from ampscope.analysis.skips import SkipEvidence
from ampscope.observations import OptimizerStep
from ampscope.store.reader import Reader
from ampscope.store.series import bad_gradients
from app import store


def window_sentence(
    window: ScaleWindow,
    names: Mapping[int, str],
    format_name: str,
    what: str,
    excluded: Mapping[int, str] | None = None,
) -> str:
    """Which loss scales suit every module at this step, by ``what`` was looked at; ``excluded``:
    the modules that were not, with the dtypes of their gradients."""
    if window.spans:
        text = (
            f"No loss scale keeps the {what} of {_first(window.spans, names)} in {format_name}: "
            "they span more powers of two than it holds."
        )
    elif window.low > window.high:
        text = (
            f"No single loss scale suits every module: {names.get(window.lowest, '?')} needs at "
            f"least 2^{window.low}, {names.get(window.highest, '?')} can take at most "
            f"2^{window.high}."
        )
    else:
        scales = f"loss scales from 2^{window.low} to 2^{window.high} keep"
        if window.low == window.high:
            scales = f"the loss scale 2^{window.low} alone keeps"
        text = (
            f"At this step, {scales} the {what} of every module in {format_name} (at most 0.1 % of "
            "a module too small, nothing too large)."
        )
    if not excluded:
        return text
    dtypes = ", ".join(sorted(set(excluded.values())))
    return f"{text} Excluded, with gradients in {dtypes}: {_first(list(excluded), names)}."


def _first(modules: Sequence[int], names: Mapping[int, str]) -> str:
    more = f" and {len(modules) - 1} more" if modules[1:] else ""
    return names.get(modules[0], "?") + more


@store.of_run
def optimizers(reader: Reader, run_id: str) -> dict[int, str]:
    """Whose each step is, in a script's run; nothing of any other. For
    :func:`ampscope.analysis.skips.skip_causes`, as is :func:`skip_evidence`."""
    seen = reader.observations(run_id)
    return {o.step: o.optimizer for o in seen if isinstance(o, OptimizerStep)}


@store.of_run
def skip_evidence(reader: Reader, run_id: str, first_step: int) -> dict[int, SkipEvidence]:
    """What is known of the bad gradients of the steps from ``first_step`` on."""
    found = bad_gradients(reader, run_id, first_step)
    return {step: SkipEvidence(*counts) for step, counts in found.items()}
