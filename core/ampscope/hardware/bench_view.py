"""One bench read as a whole: ceilings, copies, alignment, what holds the device back, and a
sentence that answers "what does half precision give here?".

    view = bench_view(run, rates, samples, report)
    view.sentence       "bf16 products run at 2.1 times the rate of fp32 here (…), fp16 at …"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.hardware import alignment_costs
from ampscope.hardware.alignment_costs import Cost
from ampscope.hardware.capability import tensor_cores
from ampscope.hardware.ceilings import (
    LABELS,
    Ceiling,
    Chip,
    ceilings,
    copy_rate,
    low_everywhere,
)
from ampscope.hardware.disturbances import held_down, shared
from ampscope.hardware.inventory import HardwareReport
from ampscope.hardware.vendor_figures import VendorFigures, vendor_figures
from ampscope.records import Machine, Rate, Result, RunInfo, Sample

HALVES = ("bf16", "fp16")
MIG = " MIG "  # in the name of a slice: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


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
            f"{name} products run {_against(reached[name] / fp32)} ({rate_words(reached[name])})"
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
        """What a crooked size costs."""
        return alignment_costs.sentence(self.costs)

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
    chip = chip_of(run.machine, report)
    found = tuple(ceilings(rates, chip, samples))
    copy = copy_rate(rates)
    bytes_s = copy.bytes_s if copy else None
    share = bytes_s / chip.vendor.bytes_s if bytes_s and chip.vendor else None
    costs = tuple(alignment_costs.costs(rates))
    return BenchView(
        found,
        copy,
        share,
        costs,
        chip.vendor,
        held_down(samples),
        shared(samples),
        low_everywhere(found),
        unread(run.machine),
    )


def unread(machine: Machine | None) -> str:
    """What ampscope cannot know of the device of a run."""
    if machine is None or machine.device == "cpu":
        return ""
    if is_rocm(machine):
        return " It runs under ROCm, where ampscope reads no clocks."
    if MIG in machine.device_name:
        return " It is a MIG slice; NVIDIA's figures are those of a whole GPU."
    return ""


def is_rocm(machine: Machine) -> bool:
    """torch calls AMD's GPUs "cuda" too; its version tells ("2.13.0+rocm7.0")."""
    return "rocm" in machine.torch


def chip_of(machine: Machine | None, report: HardwareReport | None) -> Chip:
    """What the tables say of the device of a run."""
    if machine is None:
        return Chip()
    name = machine.device_name
    if machine.device == "cpu":
        model = report.cpu.model if report else None
        flags = report.cpu.flags if report and model and name.startswith(model) else None
        return Chip(cpu_flags=flags, is_cpu=True)
    if is_rocm(machine):  # of an architecture with a number that says nothing of Tensor Cores
        return Chip(vendor_figures(name))
    return Chip(vendor_figures(name), tensor_cores(machine.capability, name))


def rate_words(flops_s: float | None) -> str:
    """``312 TFLOP/s``, ``94.5 GFLOP/s``"""
    if flops_s is None:
        return "not measured"
    scale, unit = (1e12, "T") if flops_s >= 1e12 else (1e9, "G")
    return (
        f"{flops_s / scale:.3g} {unit}FLOP/s"
        if flops_s < 1e15
        else f"{flops_s / 1e12:,.0f} TFLOP/s"
    )


def bytes_words(bytes_s: float | None) -> str:
    """``2,650 GB/s``"""
    if bytes_s is None:
        return "not measured"
    return f"{bytes_s / 1e9:,.0f} GB/s" if bytes_s >= 1e11 else f"{bytes_s / 1e9:.3g} GB/s"


def _against(ratio: float) -> str:
    """Of a rate against fp32's."""
    if 0.95 < ratio < 1.05:
        return "as fast as fp32's"
    if ratio > 1:
        return f"{ratio:.2g} times as fast as fp32's"
    return f"{1 / ratio:.2g} times slower than fp32's"
