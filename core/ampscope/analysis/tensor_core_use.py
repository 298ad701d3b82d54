"""Which matmuls of a recorded step use Tensor Cores, which could, and what padding would gain.

    use = core_use(results, machine)
    answer(use)         "3 of 9 matmuls and convolutions, 91.2 % of the FLOPs, run on Tensor Cores…"

A matmul uses them, does not, or it is unknown. Two independent signs say so: the names of its
kernels, and the rate that it reaches alone against its control, the same shapes in fp32 without
TF32 (:func:`rate_sign`). What it could use stands in tables (:mod:`ampscope.hardware.capability`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ampscope.hardware.capability import Eligibility, Fit, Sign, on_cpu, on_gpu, sign_of_names
from ampscope.hardware.cpu import MATMUL_FLAGS
from ampscope.record_json import dumps
from ampscope.records import (
    Machine,
    Matmul,
    Operand,
    Place,
    Rate,
    Result,
    RunInfo,
    StepMatmuls,
    Timing,
)

CONCLUSIVE_GAIN = 1.3  # of the dtype's largest matmul over fp32's; below it no rate is conclusive
# A matmul must be half as far above its control, on a log scale, as the largest one is; twice as
# fast is always enough, because plain units compute half inputs with fp32 sums at fp32's rate.
USED_FROM_MOST = 2.0
SLOWER = 1.5  # times as long as in fp32, by the nearer quartiles
NOT_USED_BELOW = 1.15  # quartiles of equal work on a busy machine lie up to 10 % apart
WAITS_FOR_MEMORY = 0.5  # share of its time that a copy of its bytes would take
COMPUTES = 0.5  # share of fp32's ceiling from which arithmetic is what limits a control
WORTH = 1.05  # what padding gains less than this is within the spread of timings
VERSION = 1  # of the JSON
NO_TABLE = "ampscope has no table of what this device's matrix units take."
ON_A_CPU = (
    "A CPU has no Tensor Cores. Its instructions that multiply half numbers (AVX512-BF16, AMX) "
    "take their place here; fp32 matmuls never use them."
)


class CoreVerdict(StrEnum):
    """Of one matmul."""

    USED = "used"
    NOT_USED = "not used"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reached in the same run: FLOP/s by dtype, bytes/s of a copy."""

    flops_s: Mapping[str, float] = field(default_factory=dict)
    bytes_s: float | None = None

    def gain(self, dtype: str) -> float | None:
        """The largest matmul in ``dtype`` over that in fp32."""
        of, base = self.flops_s.get(dtype), self.flops_s.get("fp32")
        return of / base if of and base else None


@dataclass(frozen=True, slots=True)
class RateSign:
    """What the rate says, in one sentence why, and how many times as fast as the control it is."""

    sign: Sign
    reason: str
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class MatmulUse:
    """One matmul, judged."""

    matmul: Matmul
    eligibility: Eligibility
    names: Sign
    rate: RateSign
    verdict: CoreVerdict

    @property
    def step_flops(self) -> int:
        """Of all its calls."""
        return self.matmul.flops * self.matmul.count


@dataclass(frozen=True, slots=True)
class CoreUse:
    """A step: all of its matmuls that have been measured so far, most FLOPs first."""

    step: StepMatmuls
    uses: tuple[MatmulUse, ...]
    ceilings: Ceilings
    rates: tuple[Rate, ...]  # the ceilings as they were measured

    def calls(self, of: CoreVerdict | None = None) -> int:
        """Matmuls per step with that verdict; None: measured at all."""
        return sum(u.matmul.count for u in self.uses if of in (None, u.verdict))

    def flops(self, of: CoreVerdict) -> int:
        """Their FLOPs per step."""
        return sum(u.step_flops for u in self.uses if u.verdict == of)

    def share(self, of: CoreVerdict) -> float:
        """Of the step's FLOPs, 0 … 1."""
        return self.flops(of) / self.step.flops if self.step.flops else 0.0

    def layers(self) -> list[tuple[MatmulUse, Place]]:
        """One entry for each layer and phase, in the order of modules' names."""
        entries = [(use, place) for use in self.uses for place in use.matmul.places]
        return sorted(entries, key=lambda e: (e[1].module, e[1].phase != "forward"))


def core_use(results: Sequence[Result], machine: Machine | None) -> CoreUse | None:
    """None before the step has been recorded."""
    step = next((r for r in results if isinstance(r, StepMatmuls)), None)
    if step is None:
        return None
    rates = tuple(r for r in results if isinstance(r, Rate))
    ceilings = Ceilings(
        {r.dtype: r.flops_s for r in rates if r.series == "ceiling" and r.flops_s},
        next((r.bytes_s for r in rates if r.series == "copy"), None),
    )
    name = machine.device_name if machine else ""
    matmuls = (r for r in results if isinstance(r, Matmul))
    judged = [_judged(matmul, step, name, ceilings) for matmul in matmuls]
    uses = tuple(sorted(judged, key=lambda use: -use.step_flops))
    return CoreUse(step, uses, ceilings, rates)


def _judged(matmul: Matmul, step: StepMatmuls, name: str, ceilings: Ceilings) -> MatmulUse:
    if step.device == "cpu":
        fit = on_cpu(step.cpu_flags, matmul.dtype)
    elif step.device != "cuda":
        fit = Eligibility(Fit.UNKNOWN, NO_TABLE)
    else:
        kind = layout(matmul.operands[0]) if "conv" in matmul.op and matmul.operands else ""
        tensors = "NCHW" if kind and kind != "channels_last" else ""
        fit = on_gpu(step.capability, name, matmul.dtype, matmul.dimensions, tensors)
    names = sign_of_names(matmul.kernels, step.device, matmul.dtype)
    rate = rate_sign(matmul, ceilings)
    return MatmulUse(matmul, fit, names, rate, verdict(names, rate.sign))


def verdict(names: Sign, rate: Sign) -> CoreVerdict:
    """Unknown where the two disagree and where neither speaks; else what was said."""
    said = {names, rate} - {Sign.NOTHING}
    if said == {Sign.USED}:
        return CoreVerdict.USED
    return CoreVerdict.NOT_USED if said == {Sign.NOT_USED} else CoreVerdict.UNKNOWN


def rate_sign(matmul: Matmul, ceilings: Ceilings) -> RateSign:
    """From the matmul's own timing, its control's and the ceilings. The rate speaks only where
    nothing else explains it:

    - the device's largest matmul in that dtype must itself be faster than fp32's, else a rate tells
      nothing (consumer GPUs compute TF32 no faster than fp32);
    - half the bytes make a matmul that waits for memory up to twice as fast, with no Tensor Core;
    - a matmul that its launch or its memory holds up is not faster even when it uses them.
    """
    if matmul.dtype == "fp32":
        return RateSign(Sign.NOT_USED, "It is computed in plain fp32, as controls are.")
    timing, control = matmul.timing, matmul.control
    if timing is None or control is None:
        return RateSign(Sign.NOTHING, "It has no timing beside a control.")
    speedup = control.median_s / timing.median_s
    if timing.low_s > SLOWER * control.high_s:
        text = f"Its fp32 control is {1 / speedup:.2g}× as fast: whatever it uses does not help."
        return RateSign(Sign.NOT_USED, text, speedup)
    gain = ceilings.gain(matmul.dtype)
    if gain is None:
        return RateSign(Sign.NOTHING, "The ceilings were not measured.", speedup)
    if gain < 1 / CONCLUSIVE_GAIN:
        text = f"No {matmul.dtype} matmul is fast here: the largest reaches {gain:.2g}× fp32."
        return RateSign(Sign.NOT_USED, text, speedup)
    if gain < CONCLUSIVE_GAIN:
        text = f"The largest {matmul.dtype} matmul is only {gain:.2g}× as fast as fp32's."
        return RateSign(Sign.NOTHING, text, speedup)
    return _compared(matmul, timing, control, ceilings, gain)


def _compared(
    matmul: Matmul, timing: Timing, control: Timing, ceilings: Ceilings, gain: float
) -> RateSign:
    """The quartiles that lie nearer to each other decide, not the medians."""
    speedup = control.median_s / timing.median_s
    width = 1 if matmul.dtype == "tf32" else 2  # bytes of fp32 over those of the dtype
    # Whether moving its bytes alone would take a good part of the control's time.
    copied_s = matmul.moved_bytes * width / ceilings.bytes_s if ceilings.bytes_s else 0.0
    explained = width if copied_s >= WAITS_FOR_MEMORY * control.median_s else 1
    needed = explained * min(math.sqrt(gain), USED_FROM_MOST)
    if control.low_s / timing.high_s >= needed:
        text = f"{speedup:.2g}× its fp32 control; {needed:.2g}× is conclusive."
        return RateSign(Sign.USED, text, speedup)
    base = ceilings.flops_s["fp32"]
    computes = matmul.flops / control.median_s >= COMPUTES * base
    if computes and control.high_s / timing.low_s <= NOT_USED_BELOW:
        text = f"No faster than its fp32 control ({speedup:.2g}×)."
        return RateSign(Sign.NOT_USED, text, speedup)
    why = "memory" if explained > 1 else "launch or memory" if not computes else "neither clearly"
    text = f"{speedup:.2g}× the fp32 baseline: inconclusive ({why})."
    return RateSign(Sign.NOTHING, text, speedup)


def layout(operand: Operand) -> str:
    """How an operand lies in memory: contiguous | channels_last | transposed | expanded | strided

    >>> layout(Operand((256, 1024), (1, 256), "bf16"))
    'transposed'
    """
    axes = [i for i, size in enumerate(operand.shape) if size > 1]
    if any(operand.stride[i] == 0 for i in axes):
        return "expanded"
    if _is_dense(operand, axes):
        return "contiguous"
    rank = len(operand.shape)
    if rank in (4, 5) and _is_dense(operand, [i for i in (0, *range(2, rank), 1) if i in axes]):
        return "channels_last"
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    if rank >= 2 and _is_dense(operand, [i for i in swapped if i in axes]):
        return "transposed"
    return "strided"


def _is_dense(operand: Operand, order: Sequence[int]) -> bool:
    """Whether the axes lie in that order, the last one fastest, without gaps."""
    step = 1
    for axis in reversed(order):
        if operand.stride[axis] != step:
            return False
        step *= operand.shape[axis]
    return True


def shapes(operands: Sequence[Operand]) -> str:
    """``1024×256 · 256×96 transposed``; contiguous is not said."""
    parts = []
    for operand in operands:
        kind = layout(operand)
        size = "×".join(map(str, operand.shape)) or "scalar"
        parts.append(size if kind == "contiguous" else f"{size} {kind}")
    return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class PaddingGain:
    """One change of one layer; seconds per step, over all matmuls of the layer that it touches."""

    module: str
    changes: tuple[tuple[int, int], ...]  # (size, padded size), in rising order
    matmuls: int  # calls per step
    seconds: float
    padded_s: float
    low: float  # gain with the quartiles that lie nearer, and
    high: float  # with those that lie further apart

    @property
    def gain(self) -> float:
        """Times as fast with padding; below 1 it costs."""
        return self.seconds / self.padded_s

    @property
    def is_worth_it(self) -> bool:
        """More than the spread of its timings."""
        return self.low > WORTH


def padding_gains(matmuls: Sequence[Matmul]) -> list[PaddingGain]:
    """Of each change of a layer, most time saved first: the time of the layer's matmuls that miss
    by a dimension, and of the same matmuls with that dimension enlarged, both measured. Its forward
    and backward matmuls share the dimension (a Linear's output is n, then k, then m or n again), so
    a change of it is looked for in all of them."""
    found: dict[tuple[str, tuple[tuple[int, int], ...]], list[tuple[int, Timing, Timing]]]
    found = defaultdict(list)
    for matmul in matmuls:
        for padded in matmul.padded:
            for place in matmul.places:
                if matmul.timing is not None:
                    key = (place.module, tuple(sorted(set(padded.changes))))
                    found[key].append((place.count, matmul.timing, padded.timing))
    gains = [_gain(module, changes, timings) for (module, changes), timings in found.items()]
    return sorted(gains, key=lambda g: g.padded_s - g.seconds)


def _gain(
    module: str,
    changes: tuple[tuple[int, int], ...],
    timings: Sequence[tuple[int, Timing, Timing]],
) -> PaddingGain:
    def total(of: int, field: str) -> float:
        return float(sum(entry[0] * getattr(entry[of], field) for entry in timings))

    return PaddingGain(
        module=module,
        changes=changes,
        matmuls=sum(count for count, _, _ in timings),
        seconds=total(1, "median_s"),
        padded_s=total(2, "median_s"),
        low=total(1, "low_s") / total(2, "high_s"),
        high=total(1, "high_s") / total(2, "low_s"),
    )


def best_gain(matmuls: Sequence[Matmul]) -> PaddingGain | None:
    """The one that saves most time beyond doubt; None where nothing does."""
    return next((gain for gain in padding_gains(matmuls) if gain.is_worth_it), None)


def answer(use: CoreUse) -> str:
    """What the page says first: how many matmuls, what share of the FLOPs, and what to do."""
    parts = [_used(use)]
    unknown, measured = use.calls(CoreVerdict.UNKNOWN), use.calls()
    if unknown:
        parts.append(f"of {unknown:,} it is unknown")
    if measured < use.step.calls:
        parts.append(f"{use.step.calls - measured:,} are not measured yet")
    gain = best_gain([u.matmul for u in use.uses])
    if gain is not None:
        parts.append(padding_words(gain))
    why = "" if use.calls(CoreVerdict.USED) else why_not(use)
    return f"{'; '.join(parts)}. {why}".strip()


def _used(use: CoreUse) -> str:
    used, calls = use.calls(CoreVerdict.USED), use.step.calls
    plain = "matmul or convolution" if calls == 1 else "matmuls and convolutions"
    if not used:
        runs = "is known to run" if use.calls(CoreVerdict.UNKNOWN) else "runs"
        return f"None of {calls:,} {plain} {runs} on {units(use)}"
    share = 100 * use.share(CoreVerdict.USED)
    number = f"{share:.0f}" if share > 99.95 or share < 0.1 else f"{share:.1f}"
    return f"{used:,} of {calls:,} {plain}, {number} % of the FLOPs, run on {units(use)}"


def units(use: CoreUse) -> str:
    """What takes the place of Tensor Cores on this device."""
    if use.step.device != "cpu":
        return "Tensor Cores"
    flags = [flag for names in MATMUL_FLAGS.values() for flag in names]
    has = [flag for flag in flags if flag in (use.step.cpu_flags or ())]
    return f"this CPU's half-precision instructions{f' ({has[0]})' if has else ''}"


def padding_words(gain: PaddingGain) -> str:
    """ "head misses by one dimension: padding 50257 to 50304 gains 1.8×, measured" """
    many = "one dimension" if len(gain.changes) == 1 else f"{len(gain.changes)} dimensions"
    changed = " and ".join(f"{size} to {padded}" for size, padded in gain.changes)
    times = f"{gain.gain:.1f}×" if gain.gain >= 1.15 else f"{gain.gain:.2f}×"
    layer = gain.module or "the model"
    return f"{layer} misses by {many}: padding {changed} gains {times}, measured"


def why_not(use: CoreUse) -> str:
    """Of the matmuls that do not use them, the reason with most FLOPs; empty where all do."""
    reasons: dict[str, int] = {}
    for one in use.uses:
        if one.verdict is not CoreVerdict.USED and one.eligibility.fit in (Fit.NOT, Fit.UNKNOWN):
            reason = one.eligibility.reason
            reasons[reason] = reasons.get(reason, 0) + one.step_flops
    return max(reasons, key=lambda reason: reasons[reason]) if reasons else ""


def signs_words(one: MatmulUse) -> str:
    """Why the verdict is what it is."""
    names = {
        "used": "its kernel's name says used",
        "not used": "its kernel's name says not used",
        "nothing": "its kernel's name says nothing" if one.matmul.kernels else "no name was seen",
    }[one.names]
    return f"{names}; {one.rate.reason}"


def cores_json(info: RunInfo, use: CoreUse) -> str:
    """What was recorded of the matmuls, and what was made of it: one object for programs; numbers
    as measured, times in seconds."""
    machine = dataclasses.asdict(info.machine) if info.machine else None
    return dumps(
        {
            "schema": VERSION,
            "run": info.id,
            "started": info.started,
            "spec": {k: getattr(info.spec, k) for k in ("workload", "size", "precision", "seed")},
            "machine": machine,
            "sentence": answer(use),
            "step": dataclasses.asdict(use.step),
            "calls": {v.value: use.calls(v) for v in CoreVerdict},
            "flops": {v.value: use.flops(v) for v in CoreVerdict},
            "ceilings": [dataclasses.asdict(rate) for rate in use.rates],
            "products": [_matmul_json(one) for one in use.uses],
            "padding": [_padding_json(g) for g in padding_gains([u.matmul for u in use.uses])],
        },
        indent=2,
    )


def _matmul_json(one: MatmulUse) -> dict[str, object]:
    return {
        **dataclasses.asdict(one.matmul),
        "intensity": one.matmul.intensity,
        "flops_s": one.matmul.flops_s,
        "eligible": one.eligibility.fit.value,
        "eligible_reason": one.eligibility.reason,
        "sign_of_names": one.names.value,
        "sign_of_rate": one.rate.sign.value,
        "speedup": one.rate.speedup,
        "verdict": one.verdict.value,
        "verdict_reason": signs_words(one),
    }


def _padding_json(gain: PaddingGain) -> dict[str, object]:
    found = dataclasses.asdict(gain)
    calls = found.pop("matmuls")
    return {**found, "products": calls, "gain": gain.gain}
