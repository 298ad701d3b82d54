"""What this machine reaches: products of every dtype, copies, and what a crooked size costs.

The rates of one kind are taken in turns (:mod:`.interleaving`), on random data, each as the median
of many with its quartiles. A run with the argument ``quick`` takes a third of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ampscope.measure.alignment import AlignmentEffort, aligned_convolutions, aligned_products
from ampscope.measure.copies import copies
from ampscope.measure.products import product, refusal
from ampscope.measure.square_products import Effort, square_products
from ampscope.records import Rate, RunSpec
from ampscope.store.writer import RunWriter

QUICK = "quick"
WARM_UP_S = 1.0  # an idle GPU takes a few tenths of a second to raise its clocks
WARM_UP_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything of one run."""

    products: Effort
    copy_s: float
    alignment: AlignmentEffort


# On 2 cores of an AMD EPYC the whole takes about 30 s, and 10 s when it is quick.
CPU_SIZES, CUDA_SIZES = (256, 512, 1024, 2048), (512, 1024, 2048, 4096, 8192)
ALIGNED = {"cpu": (256, 512), "cuda": (1024, 2048, 4096)}
PLANS = {
    ("cpu", False): Plan(Effort(CPU_SIZES, 2.5, 3.0), 2.0, AlignmentEffort(ALIGNED["cpu"], 8.0)),
    ("cpu", True): Plan(Effort(CPU_SIZES[:3], 1.0, 0.5), 0.8, AlignmentEffort((256,), 3.0)),
    ("cuda", False): Plan(
        Effort(CUDA_SIZES, 4.0, 3.0), 2.0, AlignmentEffort(ALIGNED["cuda"], 16.0)
    ),
    ("cuda", True): Plan(
        Effort(CUDA_SIZES[1:4], 1.0, 0.5), 0.8, AlignmentEffort(ALIGNED["cuda"][:2], 4.0)
    ),
}


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Measure and write; one sentence on what could not be measured. Raises Cancelled."""
    plan = PLANS[device.type, QUICK in spec.args]
    products = torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # set at import
    flags = products.fp32_precision, convolutions.fp32_precision
    try:
        with torch.no_grad():
            warm_up(device)
            rates = square_products(plan.products, device, writer, is_cancelled)
            copies(device, plan.copy_s, writer, is_cancelled)
            aligned_products(plan.alignment, rates, device, writer, is_cancelled)
            aligned_convolutions(plan.alignment, device, writer, is_cancelled)
    finally:
        products.fp32_precision, convolutions.fp32_precision = flags
    return absence(rates)


def absence(rates: Sequence[Rate]) -> str:
    """Which dtypes were measured at no size, and why."""
    measured = {rate.dtype for rate in rates if rate.timing is not None}
    notes = {rate.dtype: rate.note for rate in rates if rate.dtype not in measured}
    return " ".join(f"Not measured: {dtype}. {note}" for dtype, note in notes.items())


def warm_up(device: torch.device) -> None:
    """Keep a GPU busy until its clocks are up; a CPU's first calls do that."""
    if device.type != "cuda" or refusal("fp16", device):
        return
    call = product("fp16", (WARM_UP_SIZE,) * 3, device)
    ends = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < ends:
        call()
        torch.cuda.synchronize(device)
