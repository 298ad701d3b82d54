"""Whether a product can use Tensor Cores, and if not, why: what the tables say, no measurement.

NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), "Tensor Core Requirements":
before cuBLAS 11.0 and cuDNN 7.6.3 dimensions had to be multiples of 16 bytes (8 elements of fp16,
4 of TF32, 16 of int8); since then Tensor Cores can always be used, "but most efficient" with such
multiples. Every torch that ampscope runs on has newer libraries, so a dimension that misses makes
a product slower, and never unfit. fp8 is the exception: cuBLASLt takes it in multiples of 16 bytes
alone (cuBLAS documentation, "cublasLtMatmul", fp8 requirements), which torch checks for n and k.

On a CPU the instructions for half products (AVX512-BF16, AMX) take Tensor Cores' place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.hardware.capability import DTYPE_LABELS, Presence, tensor_cores
from ampscope.hardware.cpu import ARM_FLAGS, PRODUCT_FLAGS, half_flags
from ampscope.records import Dimension

# Elements in 16 bytes, and the same guide's 2 for fp64; its Table 1.
MULTIPLES: Mapping[str, int] = {
    "fp16": 8,
    "bf16": 8,
    "tf32": 4,
    "fp64": 2,
    "int8": 16,
    "e4m3": 16,
    "e5m2": 16,
}
LARGE_MULTIPLE = 64  # the guide: on A100 multiples of 128 bytes are best; 64 elements of half
LARGE_FROM = 512  # a small dimension would be padded by too large a share


FP8 = ("e4m3", "e5m2")
FP8_DIMENSIONS = ("n", "k")  # what torch._scaled_mm checks; m may be anything


class Fit(StrEnum):
    """How a product fits."""

    ELIGIBLE = "eligible"
    REDUCED = "eligible, at reduced efficiency"
    NOT = "not eligible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Eligibility:
    """A fit and, in one sentence, why."""

    fit: Fit
    reason: str


def misses(dtype: str, dimensions: Iterable[Dimension]) -> tuple[Dimension, ...]:
    """Dimensions that are no multiple of 16 bytes; none for a dtype without such a rule."""
    multiple = MULTIPLES.get(dtype)
    return tuple(d for d in dimensions if multiple and d.size % multiple)


def padded_sizes(dtype: str, dimensions: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes to try instead of those that miss: the next multiples, then, where one of them is
    large, multiples of 64. Nothing where nothing misses.

    >>> list(padded_sizes("bf16", {"m": 1024, "n": 50257, "k": 768}))
    [{'n': 50264}, {'n': 50304}]
    """
    missed = misses(dtype, [Dimension(name, size) for name, size in dimensions.items()])
    if not missed:
        return
    small = {d.name: _next(d.size, MULTIPLES[dtype]) for d in missed}
    yield small
    large = {
        d.name: _next(d.size, LARGE_MULTIPLE) if d.size >= LARGE_FROM else small[d.name]
        for d in missed
    }
    if large != small:
        yield large


def on_gpu(
    capability: str, name: str, dtype: str, dimensions: Sequence[Dimension], layout: str = ""
) -> Eligibility:
    """Whether a GPU's Tensor Cores can compute it; ``layout`` as :func:`layout_note` takes it."""
    info = tensor_cores(capability, name)
    if info.presence is Presence.UNKNOWN:
        return Eligibility(Fit.UNKNOWN, info.note)
    if info.presence is Presence.ABSENT:
        return Eligibility(Fit.NOT, f"This GPU has no Tensor Cores. {info.note}".strip())
    if dtype == "fp32":
        if info.accelerates("tf32"):
            return Eligibility(
                Fit.NOT, "It is computed in fp32 with TF32 switched off; TF32 would make it fit."
            )
        return Eligibility(Fit.NOT, f"The Tensor Cores of capability {capability} take no fp32.")
    if not info.accelerates(dtype):
        label = DTYPE_LABELS.get(dtype, dtype)
        return Eligibility(Fit.NOT, f"The Tensor Cores of capability {capability} take no {label}.")
    missed = misses(dtype, dimensions)
    refused = [d for d in missed if dtype in FP8 and d.name in FP8_DIMENSIONS]
    if refused:
        listed = ", ".join(f"{d.name} = {d.size:,}" for d in refused)
        return Eligibility(
            Fit.NOT,
            f"{listed}: fp8 matmuls take multiples of {MULTIPLES[dtype]} alone in n and k, and "
            "torch._scaled_mm raises an error for others.",
        )
    if missed:
        listed = ", ".join(f"{d.name} = {d.size:,}" for d in missed)
        of = f"no {'multiple' if len(missed) == 1 else 'multiples'} of {MULTIPLES[dtype]}"
        return Eligibility(
            Fit.REDUCED,
            f"{listed}: {of}. Where such a dimension is contiguous in memory, loads are narrower "
            "than 16 bytes; any other leaves its last tile partly empty.",
        )
    return Eligibility(Fit.ELIGIBLE, layout_note(layout) or "Its dtype and every dimension fit.")


def layout_note(layout: str) -> str:
    """cuDNN's half convolutions on Tensor Cores are written for NHWC; an NCHW tensor is transposed
    before and after (NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts")."""
    if layout != "NCHW":
        return ""
    return "Its dtype and dimensions fit; channels_last would spare cuDNN the transposition."


def on_cpu(flags: tuple[str, ...] | None, dtype: str) -> Eligibility:
    """Whether a CPU has instructions that multiply in ``dtype``. No rule about dimensions is
    published for them."""
    if dtype not in PRODUCT_FLAGS:
        return Eligibility(
            Fit.NOT, f"{DTYPE_LABELS.get(dtype, dtype)} runs in the CPU's ordinary vector units."
        )
    found = half_flags(flags, dtype)
    if found is None:
        return Eligibility(Fit.UNKNOWN, "This CPU's instructions cannot be read.")
    if found:
        return Eligibility(Fit.ELIGIBLE, f"This CPU multiplies {dtype} with {found[0]}.")
    is_arm = any(flag in ARM_FLAGS.values() for flag in flags or ())
    here = [f for f in PRODUCT_FLAGS[dtype] if (f in ARM_FLAGS.values()) == is_arm]
    lacks = f"{'neither' if len(here) > 1 else 'no'} {' nor '.join(here)}"
    return Eligibility(Fit.NOT, f"This CPU multiplies no {dtype}: it has {lacks}.")


def _next(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
