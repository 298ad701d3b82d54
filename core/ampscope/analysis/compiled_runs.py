"""Does compiled code compute what eager code does? Runs with torch.compile on, held against the
eager one.

All runs of a diagnosis start from the same weights and see the same batches, so their first steps
can be compared number by number. Half precision's own rounding is the measure: how far the eager
run is from its fp32 control. Compiled code that rounds elsewhere is about as far away; ten times as
far is another computation.

What compiles takes code through three layers, and each can be had without the next one::

    compiled                        as the script asks: Dynamo, AOTAutograd, inductor
    compiled;eager_random           the same, with eager code's random numbers
    compiled;backend:aot_eager      Dynamo and AOTAutograd; torch's own kernels run the graph
    compiled;backend:eager          Dynamo alone
    compiled;eager_casts            all three, rounding wherever eager code rounds
    compiled;uncompiled:head        all three, but for the module ``head``

:func:`next_arm` names the run that is wanted next, :func:`layer` the layer that is to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.control import COMPILED, Control
from ampscope.numerics.formats import FORMATS
from ampscope.observations import COMPILED_FRAMES, Attempt

EAGER_RANDOM = Control(f"{COMPILED};eager_random")
AOT_EAGER = Control(f"{COMPILED};backend:aot_eager")
GRAPH_ALONE = Control(f"{COMPILED};backend:eager")
EAGER_CASTS = Control(f"{COMPILED};eager_casts")
FIRST = 5  # steps that are compared number by number; later ones amplify any difference
TIMES = 10.0  # the distance that half precision's own rounding explains
# Of the numbers' size, in roundings of the format: less than this is no distance of its own.
ROUNDINGS = 0.25
# What a run that is watched from outside compiled code does not show.
UNSEEN = frozenset(
    {Symptom.EVALUATION, Symptom.BUFFERS, Symptom.FROZEN, Symptom.CAUGHT, Symptom.DROPPED}
)
_Read = Callable[[Attempt], tuple[float, ...]]


class Layer(StrEnum):
    """Where compiled code leaves eager code."""

    CAPTURE = "graph capture (Dynamo)"
    GRAPH = "the graph's transformation (AOTAutograd)"
    CASTS = "casts that the compiler left out"
    KERNEL = "the generated kernels"


@dataclass(frozen=True, slots=True)
class Apart:
    """The first number in which a compiled run leaves the eager one; ``allowed`` is the distance
    that rounding explains. Without numbers ``what`` is a symptom that the eager run does not have.
    """

    what: str
    step: int | None
    compiled: float | None = None
    eager: float | None = None
    fp32: float | None = None
    allowed: float | None = None

    @property
    def words(self) -> str:
        """As the rest of a sentence."""
        if self.compiled is None or self.eager is None:
            return self.what
        exact = "" if self.fp32 is None else f", and fp32 {self.fp32:.6g}"
        return (
            f"at step {self.step} {self.what} is {self.compiled:.6g}, where eager code gives "
            f"{self.eager:.6g}{exact}"
        )


def apart(runs: Mapping[str, RunView], control: str) -> Apart | None:
    """What sets the compiled run under ``control`` apart from the eager one beyond rounding; None
    where nothing does. Both ``as_is`` and ``control`` must be among ``runs``."""
    run, eager, fp32 = runs[control], runs["as_is"], runs.get("fp32")
    for what, read in (("the loss", _loss), ("the gradient norm", _norm)):
        if found := _numbers_apart(what, read, run, eager, fp32):
            return found
    if run.weights_broken and not eager.weights_broken:
        return Apart("weights are not finite", run.first_bad_attempt)
    for symptom in sorted(symptoms(run, fp32) - symptoms(eager, fp32) - UNSEEN):
        return Apart(str(symptom), run.first_bad_attempt)
    return None


def unjudged(runs: Mapping[str, RunView], control: str, least: int) -> str:
    """Why the compiled run under ``control`` says nothing; "" where it does. ``least``: optimizer
    steps that are enough."""
    run, eager = runs[control], runs["as_is"]
    outcome = run.outcome
    if run.has_exception and not eager.has_exception:
        text = outcome.error_text.partition("\n")[0][:200].rstrip(" .")
        return f"it raised {outcome.error_type}" + (f": {text}" if text else "")
    if outcome.ended == "killed":
        return "it was stopped at a limit"
    frames = run.use(COMPILED_FRAMES)
    if frames is None or not frames.count:
        return "torch.compile compiled nothing here"
    if len(run.attempts) < min(least, len(eager.attempts)):
        return "too few of its optimizer steps were recorded"
    return ""


def next_arm(runs: Mapping[str, RunView]) -> Control | None:
    """The control to run next so that the layer can be told; None when it is known, or when the
    compiled run computes what eager code does."""
    if COMPILED not in runs or apart(runs, COMPILED) is None:
        return None
    if EAGER_RANDOM not in runs:
        return EAGER_RANDOM
    if unjudged(runs, EAGER_RANDOM, 1) or apart(runs, EAGER_RANDOM) is None:
        return None
    if AOT_EAGER not in runs:
        return AOT_EAGER
    if unjudged(runs, AOT_EAGER, 1):
        return None
    following = EAGER_CASTS if apart(runs, AOT_EAGER) is None else GRAPH_ALONE
    return None if following in runs else following


def layer(runs: Mapping[str, RunView]) -> Layer | None:
    """The layer that is to blame; None where compiled code computes what eager code does, or where
    a run that would tell is missing or says nothing."""
    wanted = (COMPILED, EAGER_RANDOM, AOT_EAGER)
    if any(name not in runs or unjudged(runs, name, 1) for name in wanted):
        return None
    if apart(runs, COMPILED) is None or apart(runs, EAGER_RANDOM) is None:
        return None
    last = EAGER_CASTS if apart(runs, AOT_EAGER) is None else GRAPH_ALONE
    if last not in runs or unjudged(runs, last, 1):
        return None
    if last == EAGER_CASTS:
        return Layer.CASTS if apart(runs, EAGER_CASTS) is None else Layer.KERNEL
    return Layer.GRAPH if apart(runs, GRAPH_ALONE) is None else Layer.CAPTURE


def left_out(runs: Mapping[str, RunView]) -> Control | None:
    """The smallest set of modules that was left uncompiled and brought eager code's numbers back,
    as the control that did it; None without one."""
    tried = [Control(name) for name in runs if Control(name).values("uncompiled")]
    good = [c for c in tried if runs[c].attempts and apart(runs, c) is None]
    return min(good, key=lambda c: len(c.values("uncompiled")), default=None)


def _loss(attempt: Attempt) -> tuple[float, ...]:
    return () if attempt.loss is None else (attempt.loss,)


def _norm(attempt: Attempt) -> tuple[float, ...]:
    """Before the script clipped it, and after: which one a compiled run sees depends on where the
    script unscales."""
    return tuple(n for n in (attempt.unclipped_norm, attempt.grad_norm) if n is not None)


def _numbers_apart(
    what: str, read: _Read, run: RunView, eager: RunView, fp32: RunView | None
) -> Apart | None:
    exact = [] if fp32 is None else [read(a) for a in fp32.attempts]
    rows = [
        (mine.attempt, own, others, exact[n] if n < len(exact) else ())
        for n, (mine, its) in enumerate(zip(run.attempts, eager.attempts, strict=False))
        if (own := read(mine)) and (others := read(its))
    ]
    for step, own, others, _ in rows:
        if not math.isfinite(own[0]) and all(map(math.isfinite, others)):
            return Apart(what, step, own[0], others[0])
    rows = [row for row in rows[:FIRST] if math.isfinite(row[1][0])]
    size = max((abs(x) for _, _, others, _ in rows for x in others if math.isfinite(x)), default=0)
    rounding = max((_distance(o, e) for _, _, o, e in rows if e), default=0.0)
    allowed = TIMES * max(rounding, ROUNDINGS * _epsilon(eager) * size)
    for step, own, others, its_exact in rows:
        if _distance(own, others) > allowed:
            reference = its_exact[0] if its_exact else None
            return Apart(what, step, own[0], others[0], reference, allowed)
    return None


def _distance(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The least between any of both; none where one is not finite."""
    pairs = [abs(a - b) for a in first for b in second]
    return min((d for d in pairs if math.isfinite(d)), default=0.0)


def _epsilon(eager: RunView) -> float:
    """Rounding of the coarsest format in which the run computed."""
    used = [FORMATS[name] for name in eager.outcome.flop_dtypes if name in ("fp16", "bf16")]
    return max((f.epsilon for f in used), default=FORMATS["fp16"].epsilon)
