"""One product of a step alone, its fp32 control, its padded sizes, and the ceilings of the device.

All on random data of the same shapes, dtypes and strides, under autograd's no_grad.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch

from ampscope.hardware.eligibility import padded_sizes
from ampscope.measure.product_calls import ProductCall
from ampscope.measure.products import flops, moved_bytes, product
from ampscope.measure.step_products import Found
from ampscope.measure.timing import timed
from ampscope.policy.precision import tf32_switches
from ampscope.records import Dimension, Padded, Place, Product, Rate, Timing

BUDGET_S = 0.15  # of one timing: 5 calls at least, 200 at most
LEAST_CALLS = 5
# A ceiling is the best of growing square products; it stops growing when a call takes so long.
CEILING_SIZES = (256, 512, 1024, 2048, 4096, 8192)
CEILING_CALL_S = 0.25
COPY_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}  # fp32, far beyond any cache
_HAVE_CONTROL = ("fp16", "bf16", "tf32")


def measured(
    found: Found, names: Mapping[int, str], kernels: tuple[str, ...], device: torch.device
) -> Product:
    """Everything about one product. What cannot be run alone has a note."""
    call, note = found.call, ""
    timing = control = None
    padded: tuple[Padded, ...] = ()
    try:
        timing = _timed(call, device, found.dtype)
        if found.dtype in _HAVE_CONTROL:
            with contextlib.suppress(RuntimeError):  # flash attention takes no fp32
                control = _timed(call.in_fp32(), device, "fp32")
        padded = _padded(found, device)
    except Exception as error:  # a user's op may need what shapes alone do not tell
        first = str(error).strip().splitlines() or [""]
        note = f"It could not be run alone: {type(error).__name__}: {first[0][:200]}"
    return Product(
        op=call.op,
        part=call.part,
        dtype=found.dtype,
        operands=call.operands(),
        dimensions=tuple(Dimension(n, s) for n, s in call.dimensions().items()),
        flops=found.flops,
        moved_bytes=found.moved_bytes,
        places=tuple(Place(names[i], phase, n) for (i, phase), n in sorted(found.places.items())),
        kernels=kernels,
        measured_at=time.time(),
        timing=timing,
        control=control,
        padded=padded,
        note=note,
    )


def ceiling(dtype: str, device: torch.device) -> Rate | None:
    """The best rate of a large square product; None where torch has none in ``dtype``."""
    best: Rate | None = None
    for size in CEILING_SIZES:
        shape = (size, size, size)
        try:
            with torch.no_grad(), _switches(device, dtype):
                timing = timed(product(dtype, shape, device), device, budget_s=BUDGET_S)
        except (RuntimeError, KeyError):  # no such product, or no memory for a larger one
            break
        rate = Rate(
            series="ceiling",
            op="matmul",
            dtype=dtype,
            shape=shape,
            flops=flops(shape),
            moved_bytes=moved_bytes(dtype, shape),
            timing=timing,
            measured_at=time.time(),
        )
        if best is None or (rate.flops_s or 0) > (best.flops_s or 0):
            best = rate
        if timing.median_s > CEILING_CALL_S:
            break
    return best


def copy_ceiling(device: torch.device) -> Rate:
    """A large copy: each element read once and written once."""
    elements = COPY_ELEMENTS[device.type]
    source = torch.zeros(elements, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the pages of a CPU's memory are made at the first write
    timing = timed(lambda: target.copy_(source), device, budget_s=BUDGET_S)
    moved = 2 * elements * source.dtype.itemsize
    return Rate("copy", "copy", "fp32", (elements,), 0, moved, timing, time.time())


def _padded(found: Found, device: torch.device) -> tuple[Padded, ...]:
    """With every dimension that misses enlarged: once to the next multiple, once to that of 64."""
    call = found.call
    if not call.can_be_padded():
        return ()
    before = call.dimensions()
    tries = []
    for sizes in padded_sizes(found.dtype, before):
        grown = 1.0
        for name, size in sizes.items():
            grown *= size / before[name]
        changes = tuple((before[name], size) for name, size in sizes.items())
        timing = _timed(call.padded(sizes), device, found.dtype)
        tries.append(Padded(changes, round(found.flops * grown), timing))
    return tuple(tries)


def _timed(call: ProductCall, device: torch.device, dtype: str) -> Timing:
    with torch.no_grad(), _switches(device, dtype):
        return timed(call.made(device), device, budget_s=BUDGET_S, least=LEAST_CALLS)


@contextlib.contextmanager
def _switches(device: torch.device, dtype: str) -> Iterator[None]:
    """TF32 as the product had it; whatever the process had set is set again."""
    if device.type != "cuda":
        yield
        return
    with tf32_switches(dtype == "tf32"):
        yield
