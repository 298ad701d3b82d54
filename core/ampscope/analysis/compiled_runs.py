"""Does compiled code compute what eager code does? Runs with torch.compile on, held against the
eager one.

All runs of a diagnosis start from the same weights and see the same batches, so their first steps
can be compared number by number. Half precision's own rounding is the measure: how far the eager
run is from its fp32 control. Compiled code that rounds elsewhere is about as far away; ten times as
far is another computation. From three times on it is held against runs that round where eager code
does, which have no such excuse (:func:`is_near`).

What compiles takes code through three layers, and each can be had without the next one::

    compiled                         as the script asks: Dynamo, AOTAutograd, inductor
    compiled;backend:aot_eager       Dynamo and AOTAutograd; torch's own kernels run the graph
    compiled;backend:aot_eager;taps  the same, with taps inside the graphs
    compiled;backend:eager           Dynamo alone
    compiled;eager_random            all three, with eager code's random numbers
    compiled;eager_casts             all three, rounding wherever eager code rounds
    compiled;taps                    all three, with taps inside the graphs
    compiled;backend:aot_eager_decomp_partition;eager_random
                                     as aot_eager, after inductor's decompositions
    compiled;uncompiled:head         all three, but for the module ``head``
    compiled;unfused:aten.gelu       all three, but torch's own kernel computes the op

:func:`next_arm` names the run that is wanted next, :func:`layer` the layer that is to blame,
:func:`arms` lists what each run showed. Taps tell where inside (:func:`parting`), and whether
random numbers repeat (:func:`repeating`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.control import BASELINE, COMPILED, TAPS, Control
from ampscope.number_words import plural
from ampscope.numerics.formats import FORMATS
from ampscope.observations import COMPILED_FRAMES, OptimizerStep, Tap

EAGER_RANDOM = Control(f"{COMPILED};eager_random")
AOT_EAGER = Control(f"{COMPILED};backend:aot_eager")
GRAPH_ALONE = Control(f"{COMPILED};backend:eager")
EAGER_CASTS = Control(f"{COMPILED};eager_casts")
TAPPED = Control(f"{COMPILED};{TAPS}")
AOT_TAPPED = Control(f"{COMPILED};backend:aot_eager;{TAPS}")
# Dropout is decomposed as well, unless eager code's random numbers are asked for.
DECOMPOSED = Control(f"{COMPILED};backend:aot_eager_decomp_partition;eager_random")
FIRST = 5  # steps that are compared number by number; later ones amplify any difference
TIMES = 10.0  # the distance that half precision's own rounding explains
NEAR = 3.0  # and what it explains where a run rounds as eager code does
# Of the numbers' size, in roundings of the format: less than this is no distance of its own.
ROUNDINGS = 0.25
DRAW = "draw"  # the role of random numbers
OF_DECOMPOSITIONS = "decomposed"  # and of what inductor would decompose
SAME_DRAWS = 4  # of a tensor of random numbers, in a row; with the first five of the same sum
# Roundings of a tensor's own format, in the sum of its magnitudes: in a sum of many they nearly
# cancel. A wrong suspect costs one run more: a module is named when leaving it out cured.
INSIDE = 2.0
# What a run that is watched from outside compiled code does not show.
UNSEEN = frozenset(
    {Symptom.EVALUATION, Symptom.BUFFERS, Symptom.FROZEN, Symptom.CAUGHT, Symptom.DROPPED}
)
_Read = Callable[[OptimizerStep], tuple[float, ...]]


class Layer(StrEnum):
    """Where compiled code leaves eager code."""

    CAPTURE = "graph capture (Dynamo)"
    GRAPH = "the graph's transformation (AOTAutograd)"
    CASTS = "casts that the compiler left out"
    DECOMPOSITION = "the compiler's decompositions of ops"
    KERNEL = "the generated kernels"
    RANDOM = "the compiler's random numbers"
    OBSERVED = "the generated kernels, unless they are observed"


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


def departure(runs: Mapping[str, RunView]) -> Apart | None:
    """What sets the compiled run apart from the eager one, where that is no rounding; None where it
    is, and where nothing does."""
    found = apart(runs, COMPILED)
    if found is None or not is_near(runs):
        return found
    return found if layer(runs) not in (None, Layer.CASTS, Layer.OBSERVED) else None


def is_near(runs: Mapping[str, RunView]) -> bool:
    """Whether the compiled run is farther from the eager one than most code that rounds elsewhere,
    and nearer than rounding can explain. Then it is a fault only if the run that rounds where eager
    code does, or torch's own kernels on the same graph, are as far away."""
    if COMPILED not in runs or _apart(runs, COMPILED, TIMES) is not None:
        return False
    return _apart(runs, COMPILED, NEAR) is not None


def apart(runs: Mapping[str, RunView], control: str) -> Apart | None:
    """What sets the compiled run under ``control`` apart from the eager one beyond rounding; None
    where nothing does. Both ``as_is`` and ``control`` must be among ``runs``."""
    return _apart(runs, control, NEAR if is_near(runs) else TIMES)


def _apart(runs: Mapping[str, RunView], control: str, times: float) -> Apart | None:
    run, eager, fp32 = runs[control], runs[BASELINE], runs.get("fp32")
    for what, read in (("the loss", _loss), ("the gradient norm", _norm)):
        if found := _numbers_apart(what, read, run, eager, fp32, times):
            return found
    if run.weights_broken and not eager.weights_broken:
        return Apart("weights are not finite", run.first_bad_step)
    for symptom in sorted(symptoms(run, fp32) - symptoms(eager, fp32) - UNSEEN):
        return Apart(str(symptom), run.first_bad_step)
    return None


def unjudged(runs: Mapping[str, RunView], control: str, least: int) -> str:
    """Why the compiled run under ``control`` says nothing; "" where it does. ``least``: optimizer
    steps that are enough."""
    run, eager = runs[control], runs[BASELINE]
    outcome = run.outcome
    if run.has_exception and not eager.has_exception:
        text = outcome.error_text.partition("\n")[0][:200].rstrip(" .")
        return f"it raised {outcome.error_type}" + (f": {text}" if text else "")
    if outcome.ended == "killed":
        return "it was stopped at a limit"
    needed = min(least, len(eager.steps))
    made = f"it made {plural(len(run.steps), 'optimizer step')}"
    if outcome.ended == "time" and len(run.steps) < needed:
        return f"{made} within the time limit, compilation included; --time-limit raises it"
    frames = run.use(COMPILED_FRAMES)
    if frames is None or not frames.count:
        return "torch.compile compiled nothing here"
    if len(run.steps) < needed:
        return f"{made}, and at least {needed} are needed"
    return ""


# What of the compiler a run goes through, by the parts of its control behind ``compiled``.
_THROUGH = {
    "": "Dynamo, AOTAutograd, inductor: as the script asks",
    "backend:aot_eager": "Dynamo and AOTAutograd; torch's own kernels run the graph",
    "backend:eager": "Dynamo alone",
    "eager_casts": "all three; kernels round wherever eager code rounds",
    "eager_random": "all three; random numbers as eager code draws them",
    TAPS: "all three; tensors inside the graphs are read",
    "backend:aot_eager;taps": "as with aot_eager; tensors inside the graphs are read",
    "backend:aot_eager_decomp_partition;eager_random": "Dynamo, AOTAutograd and inductor's "
    "decompositions; torch's own kernels run the graph",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A compiled run beside the eager one. ``apart`` is None where it computes what eager code
    does; ``unjudged`` says why the run tells nothing, "" where it does."""

    control: Control
    apart: Apart | None
    unjudged: str
    by_taps: float | None = None  # the share of the loss by which taps move it at most

    @property
    def through(self) -> str:
        """What of the compiler the run goes through."""
        rest = ";".join(part.text for part in self.control.parts[1:])
        if self.control.values("unfused"):
            return "all three, but for ops that torch's own kernels compute"
        return _THROUGH.get(rest, "all but the modules that are left uncompiled")

    @property
    def words(self) -> str:
        """What it showed."""
        if self.unjudged:
            return f"not judged: {self.unjudged}"
        said = "as eager code, up to rounding" if self.apart is None else self.apart.words
        if self.by_taps is None:
            return said
        moved = f"move it by at most {self.by_taps:.1e} of it" if self.by_taps else "do not move it"
        return f"{said}; beside the same run without taps, they {moved} in its first steps"


def arms(runs: Mapping[str, RunView]) -> list[Arm]:
    """All compiled runs, as the script asks first, then in the order in which they were made."""
    named = [Control(name) for name in runs if Control(name).is_compiled]
    named.sort(key=lambda control: control != COMPILED)
    return [
        Arm(name, apart(runs, name), unjudged(runs, name, 1), moved_by_taps(runs, name))
        for name in named
    ]


def moved_by_taps(runs: Mapping[str, RunView], control: Control) -> float | None:
    """The largest share of the loss by which taps move it in the first steps: ``control`` beside
    the same without taps; None where one of both is missing, or a loss is not finite."""
    without = ";".join(part.text for part in control.parts if part.name != TAPS)
    if TAPS not in control.names or without not in runs:
        return None
    pairs = list(zip(runs[control].steps, runs[without].steps, strict=False))[:FIRST]
    losses = [(a.loss, b.loss) for a, b in pairs if a.loss is not None and b.loss]
    shares = [abs(a - b) / abs(b) for a, b in losses]
    return max(shares) if shares and all(map(math.isfinite, shares)) else None


def next_arm(runs: Mapping[str, RunView]) -> Control | None:
    """The control to run next so that the layer can be told; None when it is known, or when the
    compiled run computes what eager code does."""
    if COMPILED not in runs or apart(runs, COMPILED) is None:
        return None
    for arm in _wanted(runs):
        if arm not in runs:
            return arm
        if unjudged(runs, arm, 1) and TAPS not in arm.names:
            return None
    return None


def _wanted(runs: Mapping[str, RunView]) -> Iterator[Control]:
    """The arms in turn; each is asked for only when those before it have been judged."""
    yield AOT_EAGER
    if apart(runs, AOT_EAGER) is not None:
        yield GRAPH_ALONE
        return
    yield AOT_TAPPED
    if is_near(runs):
        if not _may_draw(runs[AOT_TAPPED]):
            yield EAGER_CASTS
            if apart(runs, EAGER_CASTS) is None:  # the rounding that was left out explains it
                return
        yield TAPPED
        if layer(runs) is Layer.KERNEL:
            yield DECOMPOSED
        return
    if _may_draw(runs[AOT_TAPPED]):
        yield EAGER_RANDOM
        if apart(runs, EAGER_RANDOM) is None:
            yield TAPPED  # are they random at all?
            return
    yield EAGER_CASTS
    if apart(runs, EAGER_CASTS) is not None:
        yield TAPPED
        if layer(runs) is Layer.KERNEL:
            yield DECOMPOSED


def _may_draw(run: RunView) -> bool:
    """Whether compiled code draws random numbers, as far as its taps tell."""
    return not run.taps or any(tap.role == DRAW for tap in run.taps)


def layer(runs: Mapping[str, RunView]) -> Layer | None:
    """The layer that is to blame; None where compiled code computes what eager code does, or where
    a run that would tell is missing or says nothing."""
    if not _judged(runs, COMPILED) or not _judged(runs, AOT_EAGER) or apart(runs, COMPILED) is None:
        return None
    if apart(runs, AOT_EAGER) is not None:
        if not _judged(runs, GRAPH_ALONE):
            return None
        return Layer.GRAPH if apart(runs, GRAPH_ALONE) is None else Layer.CAPTURE
    if is_near(runs) and (AOT_TAPPED not in runs or _may_draw(runs[AOT_TAPPED])):
        # Emulated casts change no random numbers: those may be what differs.
        return Layer.RANDOM if repeating(runs) else None
    if EAGER_RANDOM in runs or (AOT_TAPPED in runs and _may_draw(runs[AOT_TAPPED])):
        if not _judged(runs, EAGER_RANDOM):
            return None
        if apart(runs, EAGER_RANDOM) is None:
            return Layer.RANDOM if repeating(runs) else None
    if not _judged(runs, EAGER_CASTS):
        return None
    if apart(runs, EAGER_CASTS) is None:
        return Layer.CASTS
    if _judged(runs, TAPPED) and apart(runs, TAPPED) is None:
        return Layer.OBSERVED
    differs = _judged(runs, DECOMPOSED) and apart(runs, DECOMPOSED) is not None
    return Layer.DECOMPOSITION if differs else Layer.KERNEL


def _judged(runs: Mapping[str, RunView], name: str) -> bool:
    return name in runs and not unjudged(runs, name, 1)


def repeating(runs: Mapping[str, RunView]) -> Tap | None:
    """Random numbers that compiled code draws at each step and that are the same each time, while
    the same graph run by torch's own kernels draws others; None without such."""
    if TAPPED not in runs or AOT_TAPPED not in runs:
        return None
    eager = _draws(runs[AOT_TAPPED]).values()
    if not any(len({tap.total for tap in drawn}) > 1 for drawn in eager):
        return None
    for drawn in _draws(runs[TAPPED]).values():
        if len(drawn) > SAME_DRAWS and len({tap.total for tap in drawn}) == 1 and drawn[0].total:
            return drawn[0]
    return None


def _draws(run: RunView) -> dict[tuple[str, str, int], list[Tap]]:
    """What each place drew, step by step; by module, op and number within a step."""
    found: dict[tuple[str, str, int], list[Tap]] = {}
    seen: Counter[tuple[int, str, str]] = Counter()
    for tap in run.taps:
        if tap.role == DRAW:
            number = seen[tap.step, tap.module, tap.op]
            seen[tap.step, tap.module, tap.op] += 1
            found.setdefault((tap.module, tap.op, number), []).append(tap)
    return found


@dataclass(frozen=True, slots=True)
class Parting:
    """The first tensor inside compiled code that is not what the same graph gives when torch's own
    kernels run it; ``eager`` is None where that graph makes no such tensor, and all of its own are
    finite."""

    tap: Tap
    eager: Tap | None

    @property
    def is_nonfinite(self) -> bool:
        """Whether this tensor holds NaN or infinities and its counterpart does not."""
        return self.eager is None or self.tap.nonfinite > self.eager.nonfinite

    @property
    def words(self) -> str:
        """A sentence."""
        tap, other = self.tap, self.eager
        what = {"activation": "the output", "grad_output": "the gradient at the output"}
        line = f", line {tap.line}" if tap.line else ""
        where = f"{what.get(tap.role, 'a result inside')} of {tap.module or 'the model'} "
        where += f"({tap.op}{line})"
        if other is None or self.is_nonfinite:
            return (
                f"Inside compiled code {where} is the first with values that are not finite "
                f"({tap.nonfinite:,} at step {tap.step})."
            )
        return (
            f"Inside compiled code {where} is the first that differs: at step {tap.step} its "
            f"magnitudes add up to {tap.total:.6g}, in torch's own kernels to {other.total:.6g}."
        )


_MATCHED = ("activation", "grad_output", "matmul")  # what both graphs make alike
_Key = tuple[int, str, str, str, int]


def parting(runs: Mapping[str, RunView]) -> Parting | None:
    """Where compiled code leaves the same graph run by torch's own kernels, in the order of
    execution; None where the taps of both agree up to rounding, or say nothing."""
    if TAPPED not in runs or not runs.get(AOT_TAPPED, runs[TAPPED]).taps or AOT_TAPPED not in runs:
        return None
    others = {key: tap for key, tap in _by_place(runs[AOT_TAPPED]) if key}
    graph = runs[AOT_TAPPED].taps
    infinite = {tap.step for tap in graph if tap.nonfinite and tap.role != OF_DECOMPOSITIONS}
    for key, tap in _by_place(runs[TAPPED]):
        other = others.get(key) if key else None
        if other is None:
            if tap.nonfinite and tap.step not in infinite:
                return Parting(tap, None)
            continue
        allowed = INSIDE * _rounding(tap) * max(abs(tap.total), abs(other.total))
        if tap.nonfinite > other.nonfinite or abs(tap.total - other.total) > allowed:
            return Parting(tap, other)
    return None


def _by_place(run: RunView) -> Iterator[tuple[_Key | None, Tap]]:
    """Taps in their order, with what pairs them: step, role, module, op where it is a matmul's,
    and number within that step. Decompositions differ between two graphs: the results of their
    reductions, and what they save, have no pair."""
    seen: Counter[tuple[int, str, str, str]] = Counter()
    for tap in run.taps:
        if tap.role in _MATCHED:
            key = tap.step, tap.role, tap.module, tap.op if tap.role == "matmul" else ""
            yield (*key, seen[key]), tap
            seen[key] += 1
        elif tap.role != DRAW:
            yield None, tap


def _rounding(tap: Tap) -> float:
    return FORMATS[tap.dtype].epsilon if tap.dtype in ("fp16", "bf16") else FORMATS["fp16"].epsilon


def suspects(runs: Mapping[str, RunView]) -> list[str]:
    """Modules to leave uncompiled, likeliest first: the one whose code made the first tensor that
    differs, then those that hold it; none where taps tell nothing."""
    found = parting(runs)
    path = found.tap.maker if found is not None else ""
    return [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)] if path else []


_OP = re.compile(r"[a-z_]\w*\.[a-z_]\w*", re.IGNORECASE)


def suspect_ops(runs: Mapping[str, RunView]) -> list[str]:
    """Ops for torch's own kernels to compute, likeliest first: what makes the first tensor that
    differs, where the graph is not decomposed, and what else its module makes in that line; then
    the op of inductor's graph. None where taps tell nothing."""
    found = parting(runs)
    if found is None:
        return []
    tap, other = found.tap, found.eager
    place = tap.maker, tap.line, tap.role == "grad_output"
    ops = [] if other is None else [other.op]
    ops += [
        t.op for t in runs[AOT_TAPPED].taps
        if t.role != DRAW and (t.maker, t.line, t.role == "grad_output") == place
    ]  # fmt: skip
    return [op for op in dict.fromkeys([*ops, tap.op]) if _OP.fullmatch(op)]


def decomposed_ops(runs: Mapping[str, RunView]) -> list[str]:
    """Ops of the graph as it is before inductor decomposes them, in the order of execution."""
    graph = runs[AOT_TAPPED].taps if AOT_TAPPED in runs else ()
    return [op for op in dict.fromkeys(tap.op for tap in graph) if _OP.fullmatch(op)]


def whole_ops(runs: Mapping[str, RunView], op: str) -> list[Tap]:
    """Where an op stands in that graph, the first in each module."""
    graph = runs[AOT_TAPPED].taps if AOT_TAPPED in runs else ()
    return list({tap.maker: tap for tap in reversed(graph) if tap.op == op}.values())


def kept_out(runs: Mapping[str, RunView]) -> Control | None:
    """The fewest ops that torch's own kernels computed and that brought eager code's numbers back,
    as the control that does it; None without any."""
    tried = [Control(name) for name in runs if Control(name).values("unfused")]
    good = [c.values("unfused") for c in tried if is_back(runs, c)]
    best = min(good, key=len, default=None)
    return None if best is None else Control.of(COMPILED, unfused=best)


def is_back(runs: Mapping[str, RunView], control: str) -> bool:
    """Whether a compiled run under ``control`` gives eager code's numbers. Through a backend that
    runs torch's own kernels it rounds where eager code does, and has to be nearer: else a second
    module with the same fault passes for rounding."""
    run = runs[control]
    if not run.steps or apart(runs, control) is not None:
        return False
    return "backend" not in Control(control).names or _apart(runs, control, NEAR) is None


def left_out(runs: Mapping[str, RunView]) -> Control | None:
    """The smallest set of modules that was left uncompiled and brought eager code's numbers back,
    as the control that did it; None without one."""
    tried = [Control(name) for name in runs if Control(name).values("uncompiled")]
    good = [c for c in tried if is_back(runs, c)]
    best = min(good, key=_size, default=None)
    # Where the graph itself is to blame, the search goes through a backend that compiles nothing.
    return None if best is None else Control.of(COMPILED, uncompiled=best.values("uncompiled"))


def _size(control: Control) -> tuple[int, int]:
    """By which sets of modules are compared: how many, then how far inside the model."""
    paths = control.values("uncompiled")
    return len(paths), -sum(path.count(".") for path in paths)


def _loss(step: OptimizerStep) -> tuple[float, ...]:
    return () if step.loss is None else (step.loss,)


def _norm(step: OptimizerStep) -> tuple[float, ...]:
    """Before the script clipped it, and after: which one a compiled run sees depends on where the
    script unscales."""
    return tuple(n for n in (step.unclipped_norm, step.grad_norm) if n is not None)


def _numbers_apart(
    what: str, read: _Read, run: RunView, eager: RunView, fp32: RunView | None, times: float
) -> Apart | None:
    exact = [] if fp32 is None else [read(a) for a in fp32.steps]
    rows = [
        (mine.step, own, others, exact[n] if n < len(exact) else ())
        for n, (mine, its) in enumerate(zip(run.steps, eager.steps, strict=False))
        if (own := read(mine)) and (others := read(its))
    ]
    for step, own, others, _ in rows:
        if not math.isfinite(own[0]) and all(map(math.isfinite, others)):
            return Apart(what, step, own[0], others[0])
    rows = [row for row in rows[:FIRST] if math.isfinite(row[1][0])]
    size = max((abs(x) for _, _, others, _ in rows for x in others if math.isfinite(x)), default=0)
    rounding = max((_farthest(o, e) for _, _, o, e in rows if e), default=0.0)
    allowed = times * max(rounding, ROUNDINGS * _epsilon(eager) * size)
    for step, own, others, its_exact in rows:
        if _distance(own, others) > allowed:
            reference = its_exact[0] if its_exact else None
            return Apart(what, step, own[0], others[0], reference, allowed)
    return None


def _distance(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The least between any of both; none where one is not finite."""
    pairs = [abs(a - b) for a in first for b in second]
    return min((d for d in pairs if math.isfinite(d)), default=0.0)


def _farthest(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The distance of two runs that were read alike: the largest, for clipped norms are the limit
    in both; none where one is not finite."""
    if len(first) != len(second):
        return _distance(first, second)
    apart = (abs(a - b) for a, b in zip(first, second, strict=True))
    return max((d for d in apart if math.isfinite(d)), default=0.0)


def _epsilon(eager: RunView) -> float:
    """Rounding of the coarsest format in which the run computed."""
    used = [FORMATS[name] for name in eager.outcome.flop_dtypes if name in ("fp16", "bf16")]
    return max((f.epsilon for f in used), default=FORMATS["fp16"].epsilon)
