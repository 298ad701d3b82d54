"""The products of a step, each with what the tables say it could use and what the signs say it
does; and what padding a dimension gains, measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.core_verdict import Ceilings, RateSign, Verdict, rate_sign, verdict
from ampscope.analysis.product_layout import layout
from ampscope.hardware.eligibility import Eligibility, Fit, on_cpu, on_gpu
from ampscope.hardware.kernel_signs import Sign, sign_of_names
from ampscope.records import Machine, Place, Product, Rate, Result, StepProducts

NO_TABLE = "ampscope has no table of what this device's matrix units take."


@dataclass(frozen=True, slots=True)
class ProductUse:
    """One product, judged."""

    product: Product
    eligibility: Eligibility
    names: Sign
    rate: RateSign
    verdict: Verdict

    @property
    def step_flops(self) -> int:
        """Of all its calls."""
        return self.product.flops * self.product.count


@dataclass(frozen=True, slots=True)
class CoreUse:
    """A step: all of its products that have been measured so far, most FLOPs first."""

    step: StepProducts
    uses: tuple[ProductUse, ...]
    ceilings: Ceilings
    rates: tuple[Rate, ...]  # the ceilings as they were measured

    def calls(self, of: Verdict | None = None) -> int:
        """Products a step with that verdict; None: measured at all."""
        return sum(u.product.count for u in self.uses if of in (None, u.verdict))

    def flops(self, of: Verdict) -> int:
        """Their FLOPs a step."""
        return sum(u.step_flops for u in self.uses if u.verdict == of)

    def share(self, of: Verdict) -> float:
        """Of the step's FLOPs, 0 … 1."""
        return self.flops(of) / self.step.flops if self.step.flops else 0.0

    def layers(self) -> list[tuple[ProductUse, Place]]:
        """One entry for each layer and phase, in the order of modules' names."""
        entries = [(use, place) for use in self.uses for place in use.product.places]
        return sorted(entries, key=lambda e: (e[1].module, e[1].phase != "forward"))


def core_use(results: Sequence[Result], machine: Machine | None) -> CoreUse | None:
    """None before the step has been recorded."""
    step = next((r for r in results if isinstance(r, StepProducts)), None)
    if step is None:
        return None
    rates = tuple(r for r in results if isinstance(r, Rate))
    ceilings = Ceilings(
        {r.dtype: r.flops_s for r in rates if r.series == "ceiling" and r.flops_s},
        next((r.bytes_s for r in rates if r.series == "copy"), None),
    )
    name = machine.device_name if machine else ""
    products = (r for r in results if isinstance(r, Product))
    uses = tuple(_judged(product, step, name, ceilings) for product in products)
    ordered = sorted(uses, key=lambda use: -use.step_flops)
    return CoreUse(step, tuple(ordered), ceilings, rates)


def _judged(product: Product, step: StepProducts, name: str, ceilings: Ceilings) -> ProductUse:
    if step.device == "cpu":
        fit = on_cpu(step.cpu_flags, product.dtype)
    elif step.device != "cuda":
        fit = Eligibility(Fit.UNKNOWN, NO_TABLE)
    else:
        kind = layout(product.operands[0]) if "conv" in product.op and product.operands else ""
        tensors = "NCHW" if kind and kind != "channels_last" else ""
        fit = on_gpu(step.capability, name, product.dtype, product.dimensions, tensors)
    names = sign_of_names(product.kernels, step.device, product.dtype)
    rate = rate_sign(product, ceilings)
    return ProductUse(product, fit, names, rate, verdict(names, rate.sign))
