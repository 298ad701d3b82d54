"""One bench read as a whole: ceilings, copies, alignment, what holds the device back, and a
sentence that answers "what does half precision give here?".

    view = bench_view(run, rates, samples, report)
    view.sentence       "bf16 matmuls run at 2.1 times the rate of fp32 here (…), fp16 at …"
    bench_json(run, rates, view)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from ampscope.analysis.ceilings import (
    LABELS,
    Ceiling,
    Chip,
    VendorFigures,
    ceilings,
    copy_rate,
    held_down,
    low_everywhere,
    shared,
    vendor_figures,
)
from ampscope.hardware.capability import tensor_cores
from ampscope.hardware.describe import HardwareReport
from ampscope.number_words import rate_words
from ampscope.records import Machine, Rate, Result, RunInfo, Sample

HALVES = ("bf16", "fp16")
MIG = " MIG "  # in the name of a slice: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
STEP = 8  # a size is aligned when it is a multiple of this
DIMENSIONS = {"align_m": "M", "align_n": "N", "align_k": "K", "align_channels": "channels"}
_AXIS = {"align_m": 0, "align_n": 1, "align_k": 2, "align_channels": 1}
LEAST_COST = 1.10  # spread of one time on a busy machine is about ten percent


@dataclass(frozen=True, slots=True)
class BenchView:
    """Everything that a page or a table says about one bench."""

    ceilings: tuple[Ceiling, ...]
    copy: Rate | None
    copy_share: float | None  # of the vendor's memory bandwidth
    costs: tuple[Cost, ...]
    vendor: VendorFigures | None
    held: str  # what held the clocks down, one sentence or nothing
    shared: str  # who else used the device, likewise
    is_low_everywhere: bool
    unread: str = ""  # why nothing is known of the device beside what was measured

    @property
    def sentence(self) -> str:
        """What half precision gives here, against fp32 at its best size; empty without fp32."""
        reached = {c.dtype: c.flops_s for c in self.ceilings if c.flops_s is not None}
        fp32 = reached.get("fp32")
        halves = [name for name in HALVES if name in reached]
        if not fp32 or not halves:
            return ""
        parts = [
            f"{name} matmuls run {_against(reached[name] / fp32)} ({rate_words(reached[name])})"
            for name in halves
        ]
        tf32 = f", {rate_words(reached['tf32'])} with TF32" if "tf32" in reached else ""
        return f"Here {' and '.join(parts)}; fp32 reaches {rate_words(fp32)}{tf32}."

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong, a sentence each."""
        behind = [
            f"{LABELS[c.dtype]} reaches under half of what the other dtypes "
            f"suggest ({rate_words(c.flops_s)} of {rate_words(c.expected_flops_s)}). {c.reason}"
            for c in self.ceilings
            if c.reason
        ]
        low = (
            f"All dtypes stay under half of the vendor's figures. {self.held or 'Why is unknown.'}"
            if self.is_low_everywhere
            else self.held
        )
        return tuple(text for text in (self.shared, low, *behind) if text)

    @property
    def alignment_sentence(self) -> str:
        """What a misaligned size costs."""
        return sentence(self.costs)

    @property
    def vendor_sentence(self) -> str:
        """Where the vendor's figures come from, or that there are none."""
        if self.vendor is None:
            return f"The vendor's figures for this device are unknown to ampscope.{self.unread}"
        return f"The vendor's figures are dense peak rates: {self.vendor.source}."


def bench_view(
    run: RunInfo,
    results: Sequence[Result],
    samples: Sequence[Sample] = (),
    report: HardwareReport | None = None,
) -> BenchView:
    """``report`` is this machine's: its CPU flags count when the bench was made on its CPU."""
    rates = [result for result in results if isinstance(result, Rate)]
    chip = _chip(run.machine, report)
    found = tuple(ceilings(rates, chip, samples))
    copy = copy_rate(rates)
    bytes_s = copy.bytes_s if copy else None
    return BenchView(
        ceilings=found,
        copy=copy,
        copy_share=bytes_s / chip.vendor.bytes_s if bytes_s and chip.vendor else None,
        costs=tuple(costs_of(rates)),
        vendor=chip.vendor,
        held=held_down(samples),
        shared=shared(samples),
        is_low_everywhere=low_everywhere(found),
        unread=_unread(run.machine),
    )


def _chip(machine: Machine | None, report: HardwareReport | None) -> Chip:
    """What the tables say of the device of a run."""
    if machine is None:
        return Chip()
    name = machine.device_name
    if machine.device == "cpu":
        model = report.cpu.model if report else None
        flags = report.cpu.flags if report and model and name.startswith(model) else None
        return Chip(cpu_flags=flags, is_cpu=True)
    if _is_rocm(machine):  # of an architecture with a number that says nothing of Tensor Cores
        return Chip(vendor_figures(name))
    return Chip(vendor_figures(name), tensor_cores(machine.capability, name))


def _unread(machine: Machine | None) -> str:
    """What ampscope cannot know of the device of a run."""
    if machine is None or machine.device == "cpu":
        return ""
    if _is_rocm(machine):
        return " It runs under ROCm, where ampscope reads no clocks."
    if MIG in machine.device_name:
        return " It is a MIG slice; NVIDIA's figures are those of a whole GPU."
    return ""


def _is_rocm(machine: Machine) -> bool:
    """torch calls AMD's GPUs "cuda" too; its version tells ("2.13.0+rocm7.0")."""
    return "rocm" in machine.torch


def _against(ratio: float) -> str:
    """Of a rate against fp32's."""
    if 0.95 < ratio < 1.05:
        return "as fast as fp32's"
    if ratio > 1:
        return f"{ratio:.2g} times as fast as fp32's"
    return f"{1 / ratio:.2g} times slower than fp32's"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a misaligned size costs: the time of one multiplication at 8n + 1, 2 or 4 over that at
    8n, of one dimension in one dtype (and layout), beside the middle of the sizes that were
    measured. Times are divided by the number of multiplications: 68 channels make more of them
    than 64."""

    series: str
    dtype: str
    layout: str
    size: int  # the multiple of 8 in the middle
    offset: int
    ratio: float  # of the times of one multiplication, at this size
    low: float  # smallest and largest over the sizes
    high: float
    is_apart: bool  # the quartiles of both times

    @property
    def counts(self) -> bool:
        """Whether it is more than noise: ten percent, and the quartiles of the times are apart."""
        return self.is_apart and self.ratio >= LEAST_COST

    @property
    def sentence(self) -> str:
        """``K = 4097 costs 2.3 times the time that K = 4096 costs, … (fp16; 2.20 to 2.40 …).``"""
        where = f"{self.dtype}{', ' + self.layout if self.layout else ''}"
        misaligned = _named(self, self.size + self.offset)
        return (
            f"{misaligned[0].upper()}{misaligned[1:]} costs {self.ratio:.2g} times the time that "
            f"{_named(self, self.size)} costs, for each multiplication ({where}; {self.low:.2f} to "
            f"{self.high:.2f} at all sizes tried)."
        )


def costs_of(rates: Sequence[Rate]) -> list[Cost]:
    """Every offset of every series, dtype and layout that was measured."""
    groups: dict[tuple[str, str, str], dict[int, Rate]] = defaultdict(dict)
    for rate in rates:
        if rate.series in DIMENSIONS and rate.timing is not None:
            key = (rate.series, rate.dtype, rate.layout)
            groups[key][position(rate)] = rate
    return [cost for key, at in groups.items() for cost in _costs_of(key, at)]


def _costs_of(key: tuple[str, str, str], at: dict[int, Rate]) -> list[Cost]:
    even = sorted(size for size in at if size % STEP == 0)
    found = []
    for offset in sorted({size % STEP for size in at} - {0}):
        sizes = [size for size in even if size + offset in at]
        pairs = [(_each(at[size]), _each(at[size + offset])) for size in sizes]
        if not pairs:
            continue
        ratios = [misaligned[1] / straight[1] for straight, misaligned in pairs]
        middle = (len(sizes) - 1) // 2
        found.append(
            Cost(
                *key,
                size=sizes[middle],
                offset=offset,
                ratio=ratios[middle],
                low=min(ratios),
                high=max(ratios),
                is_apart=pairs[middle][1][0] > pairs[middle][0][2],
            )
        )
    return found


def position(rate: Rate) -> int:
    """The varied dimension's value."""
    return rate.shape[_AXIS[rate.series]]


def _each(rate: Rate) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the time of one multiplication."""
    timing = rate.timing
    assert timing is not None  # rates without one were left out
    return timing.low_s / rate.flops, timing.median_s / rate.flops, timing.high_s / rate.flops


def sentence(found: Sequence[Cost]) -> str:
    """What the measurement shows, or that it shows nothing; empty where there is none."""
    if not found:
        return ""
    dearest = worst(found)
    if dearest is not None:
        return dearest.sentence
    top = max(found, key=lambda c: c.ratio)
    return (
        "No misaligned size costs ten percent or more beyond the noise here; the dearest, "
        f"{_named(top, top.size + top.offset)} in {top.dtype}, takes "
        f"{top.ratio:.2f} times the time of {top.size} for each multiplication"
        f"{', which their quartiles do not tell apart' if top.ratio >= LEAST_COST else ''}."
    )


def worst(found: Sequence[Cost]) -> Cost | None:
    """The dearest one that is more than noise: of the halves, for which alignment matters most, or
    of fp32 where the halves have none."""
    real = [c for c in found if c.counts]
    halves = [c for c in real if c.dtype != "fp32"]
    return max(halves or real, key=lambda c: c.ratio, default=None)


def _named(cost: Cost, size: int) -> str:
    """``K = 4097``, ``a convolution of 65 channels``"""
    if cost.series == "align_channels":
        return f"a convolution of {size} channels"
    return f"{DIMENSIONS[cost.series]} = {size}"


def bench_json(run: RunInfo, results: Sequence[Result], view: BenchView) -> dict[str, object]:
    """One bench for programs: every figure with its spread, date, device and versions, and the
    vendor's figure with its source. What was not measured is None."""
    machine = run.machine
    began = run.started or run.created
    return {
        "run": run.id,
        "date": _date(began),
        "elapsed_s": run.ended - began if run.ended else None,
        "device": machine.device if machine else "",
        "device_name": machine.device_name if machine else "",
        "capability": machine.capability if machine else "",
        "torch": machine.torch if machine else "",
        "python": machine.python if machine else "",
        "platform": machine.platform if machine else "",
        "is_quick": "quick" in run.spec.args,
        "message": run.message,
        "sentence": view.sentence,
        "warnings": list(view.warnings),
        "alignment": view.alignment_sentence,
        "vendor_source": view.vendor.source if view.vendor else None,
        "copy_bytes_s": view.copy.bytes_s if view.copy else None,
        "copy_vendor_bytes_s": view.vendor.bytes_s if view.vendor else None,
        "copy_vendor_share": view.copy_share,
        "ceilings": [_ceiling_json(c) for c in view.ceilings],
        "rates": [_rate_json(r) for r in results if isinstance(r, Rate)],
    }


def _ceiling_json(found: Ceiling) -> dict[str, object]:
    best = found.best
    return {
        "dtype": found.dtype,
        "flops_s": found.flops_s,
        "spread": best.timing.spread if best and best.timing else None,
        "shape": list(best.shape) if best else [],
        "vendor_flops_s": found.vendor_flops_s,
        "vendor_share": found.share,
        "expected_flops_s": found.expected_flops_s,
        "is_behind": bool(found.reason),
        "reason": found.reason,
        "note": found.note,
    }


def _rate_json(rate: Rate) -> dict[str, object]:
    return {
        "series": rate.series,
        "op": rate.op,
        "dtype": rate.dtype,
        "shape": list(rate.shape),
        "layout": rate.layout,
        "flops_s": rate.flops_s,
        "bytes_s": rate.bytes_s,
        "timing": asdict(rate.timing) | {"spread": rate.timing.spread} if rate.timing else None,
        "measured_at": _date(rate.measured_at),
        "note": rate.note,
    }


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
