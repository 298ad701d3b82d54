"""Which Tensor Cores a GPU has, and which dtypes they accelerate, by CUDA compute capability.

    >>> tensor_cores("7.5", "Tesla T4").dtypes
    ('fp16', 'int8', 'int4')
    >>> tensor_cores("7.5", "NVIDIA GeForce GTX 1660 Ti").presence
    <Presence.ABSENT: 'absent'>

The capability alone does not decide: TU116 and TU117 report 7.5 like every other Turing chip and
have no Tensor Cores, so at 7.5 the device's name decides. A capability that is not in the table is
unknown; nothing is extrapolated from its neighbours.

What a device has decides whether a matmul fits Tensor Cores (:func:`on_gpu`, :func:`on_cpu`); that
they were used is read off the names of its kernels (:func:`sign_of_names`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.hardware.cpu import ARM_FLAGS, MATMUL_FLAGS, half_flags
from ampscope.records import Dimension

CUDA_GUIDE = (
    "NVIDIA CUDA Programming Guide 13, section 5.1, table 'Input Data Types Supported by Tensor "
    "Core Acceleration per Compute Capability', "
    "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html"
)
VOLTA_PAPER = (
    "NVIDIA Tesla V100 GPU Architecture, WP-08608-001: 'first generation', fp16 matmuls with fp16 "
    "or fp32 sums; before Volta there are none"
)
XAVIER_PTX = "NVIDIA PTX ISA, wmma.mma: fp16 from sm_70, .s8 and .u8 from sm_72"
TURING_PAPER = (
    "NVIDIA Turing GPU Architecture, WP-09183-001: Tensor Cores in TU102, TU104 and TU106; "
    "TU116 and TU117 have none (TechPowerUp GPU database; github.com/pytorch/pytorch/issues/58123)"
)

# Names within the table -> names for people. Keys are those of ampscope.numerics.formats where it
# has them.
DTYPE_LABELS: dict[str, str] = {
    "fp64": "fp64",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "e4m3": "fp8 e4m3",
    "e5m2": "fp8 e5m2",
    "e3m2": "fp6 e3m2",
    "e2m3": "fp6 e2m3",
    "e2m1": "fp4 e2m1",
    "int8": "int8",
    "int4": "int4",
}
FP8 = ("e4m3", "e5m2")
_FP6_FP4 = ("e3m2", "e2m3", "e2m1")
_HALVES = ("tf32", "bf16", "fp16")


class Presence(StrEnum):
    """Whether a device has Tensor Cores."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """One row of the table; ``capability`` is "8.6", or "12.x" for a whole major version."""

    capability: str
    architecture: str
    generation: int  # of the Tensor Cores
    dtypes: tuple[str, ...]  # of the inputs; keys of DTYPE_LABELS
    source: str


@dataclass(frozen=True, slots=True)
class TensorCoreInfo:
    """What the table says about one device; ``note`` is a sentence where something is special."""

    capability: str
    presence: Presence
    architecture: str = ""
    generation: int | None = None
    dtypes: tuple[str, ...] = ()
    source: str = ""
    note: str = ""

    def accelerates(self, dtype: str) -> bool | None:
        """Whether Tensor Cores take inputs of ``dtype``; None when it is unknown."""
        return None if self.presence is Presence.UNKNOWN else dtype in self.dtypes


CAPABILITIES: tuple[CapabilityRow, ...] = (
    CapabilityRow("7.0", "Volta", 1, ("fp16",), VOLTA_PAPER),
    CapabilityRow("7.2", "Volta (Xavier)", 1, ("fp16", "int8"), XAVIER_PTX),
    CapabilityRow("7.5", "Turing", 2, ("fp16", "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.0", "Ampere", 3, ("fp64", *_HALVES, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.6", "Ampere", 3, (*_HALVES, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.7", "Ampere (Orin)", 3, (*_HALVES, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.9", "Ada Lovelace", 4, (*_HALVES, *FP8, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("9.0", "Hopper", 4, ("fp64", *_HALVES, *FP8, "int8"), CUDA_GUIDE),
    CapabilityRow("10.0", "Blackwell", 5, ("fp64", *_HALVES, *FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
    CapabilityRow("10.3", "Blackwell Ultra", 5, (*_HALVES, *FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
    CapabilityRow("11.0", "Blackwell (Thor)", 5, (*_HALVES, *FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
    CapabilityRow("12.x", "Blackwell (RTX)", 5, (*_HALVES, *FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
)
_ROWS = {row.capability: row for row in CAPABILITIES}
_BF16_FIRST = (8, 0)

# Turing by name. Every GTX of capability 7.5 lacks Tensor Cores (the GTX 1650 that is cut from a
# TU106 has them switched off); of the others, these are TU117, and the CMP 30HX is TU116.
_TURING_WITHOUT = re.compile(
    r"\bGTX\b|\bMX\s?(450|550)\b|\bT(400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)
_TURING_WITH = re.compile(r"\bRTX\b|\bT(4|4G|10|40)\b")


def parse_capability(capability: str | None) -> tuple[int, int] | None:
    """``"8.6"`` -> (8, 6); None for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)", capability or "")
    return None if match is None else (int(match[1]), int(match[2]))


def tensor_cores(capability: str | None, device_name: str) -> TensorCoreInfo:
    """What the table says about a device; ``device_name`` as NVML or torch spells it."""
    number = parse_capability(capability)
    if number is None or capability is None:
        note = "The driver did not say which compute capability this device has."
        return TensorCoreInfo(capability or "", Presence.UNKNOWN, note=note)
    if number < (7, 0):
        note = "Tensor Cores came with compute capability 7.0."
        return TensorCoreInfo(capability, Presence.ABSENT, source=VOLTA_PAPER, note=note)
    row = _ROWS.get(capability) or _ROWS.get(f"{number[0]}.x")
    if row is None:
        note = f"Compute capability {capability} is not in ampscope's table."
        return TensorCoreInfo(capability, Presence.UNKNOWN, note=note)
    if number == (7, 5) and not _TURING_WITH.search(device_name):
        return _turing_without(row, device_name)
    return TensorCoreInfo(
        capability, Presence.PRESENT, row.architecture, row.generation, row.dtypes, row.source
    )


def _turing_without(row: CapabilityRow, device_name: str) -> TensorCoreInfo:
    """A Turing device whose name does not promise Tensor Cores."""
    if _TURING_WITHOUT.search(device_name):
        presence = Presence.ABSENT
        note = "TU116 and TU117 chips report 7.5 and have fp16 units in place of Tensor Cores."
    else:
        presence = Presence.UNKNOWN
        note = f"Some chips of capability 7.5 have no Tensor Cores; '{device_name}' may be one."
    return TensorCoreInfo(
        row.capability, presence, row.architecture, source=TURING_PAPER, note=note
    )


def emulates_bf16(capability: str | None) -> bool:
    """Whether a GPU of this compute capability lacks bf16 instructions, which came with 8.0: what
    is asked in bf16 is computed in fp32 there, and rounded. False where it is unknown."""
    number = parse_capability(capability)
    return number is not None and number < _BF16_FIRST


# Elements in 16 bytes, and 2 for fp64: Table 1 of the guide that :func:`on_gpu` names.
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
FP8_DIMENSIONS = ("n", "k")  # what torch._scaled_mm checks; m may be anything


@dataclass(frozen=True, slots=True)
class Eligibility:
    """A fit and, in one sentence, why."""

    fit: Fit
    reason: str


class Fit(StrEnum):
    """How a matmul fits."""

    ELIGIBLE = "eligible"
    REDUCED = "eligible, at reduced efficiency"
    NOT = "not eligible"
    UNKNOWN = "unknown"


def on_gpu(
    capability: str, name: str, dtype: str, dimensions: Sequence[Dimension], layout: str = ""
) -> Eligibility:
    """Whether a GPU's Tensor Cores can compute a matmul, and if not, why: what the tables say, no
    measurement. ``layout`` is as :func:`layout_note` takes it.

    NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), "Tensor Core
    Requirements": before cuBLAS 11.0 and cuDNN 7.6.3 dimensions had to be multiples of 16 bytes (8
    elements of fp16, 4 of TF32, 16 of int8); since then Tensor Cores can always be used, "but most
    efficient" with such multiples. Every torch that ampscope runs on has newer libraries, so a
    dimension that misses makes a matmul slower, and never unfit. fp8 is the exception: cuBLASLt
    takes it in multiples of 16 bytes alone (cuBLAS documentation, "cublasLtMatmul", fp8
    requirements), which torch checks for n and k.
    """
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
    """Whether a CPU has instructions that multiply in ``dtype`` (AVX512-BF16, AMX), which take
    Tensor Cores' place. No rule about dimensions is published for them."""
    if dtype not in MATMUL_FLAGS:
        return Eligibility(
            Fit.NOT, f"{DTYPE_LABELS.get(dtype, dtype)} runs in the CPU's ordinary vector units."
        )
    found = half_flags(flags, dtype)
    if found is None:
        return Eligibility(Fit.UNKNOWN, "This CPU's instructions cannot be read.")
    if found:
        return Eligibility(Fit.ELIGIBLE, f"This CPU multiplies {dtype} with {found[0]}.")
    is_arm = any(flag in ARM_FLAGS.values() for flag in flags or ())
    here = [f for f in MATMUL_FLAGS[dtype] if (f in ARM_FLAGS.values()) == is_arm]
    lacks = f"{'neither' if len(here) > 1 else 'no'} {' nor '.join(here)}"
    return Eligibility(Fit.NOT, f"This CPU multiplies no {dtype}: it has {lacks}.")


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


def _next(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Sign(StrEnum):
    """What the name of a kernel says about Tensor Cores; on a CPU, what oneDNN's name of an
    implementation says about the CPU's instructions for half matmuls.

        >>> kernel_sign("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn")
        <Sign.USED: 'used'>
        >>> kernel_sign("some_kernel_of_next_year")
        <Sign.NOTHING: 'nothing'>

    Such lists rot: torch's own list knew no 3-d convolution of Hopper's
    (github.com/pytorch/kineto/issues/1041), and another missed TF32
    (github.com/openxla/xprof/issues/1704). So a name that is in no list says nothing, and never
    "not used". Nor does a part of a name that both kinds share: xmma kernels end in "tensor16x8x16"
    or in "ffma".
    """

    USED = "used"
    NOT_USED = "not used"
    NOTHING = "nothing"


def sign_of_names(names: Iterable[str], device: str, dtype: str) -> Sign:
    """Of all kernels of one matmul: one that uses them is enough, since others prepare and add up;
    then one that is known not to."""
    if device == "cuda":
        signs = {kernel_sign(name) for name in names}
    elif device == "cpu" and dtype in ("bf16", "fp16"):
        signs = {implementation_sign(name) for name in names}
    else:
        return Sign.NOTHING
    return next((s for s in (Sign.USED, Sign.NOT_USED) if s in signs), Sign.NOTHING)


# Looked for first. Plain fp32 units: cuBLAS's sgemm (with the size of its tile behind it), cuDNN's
# scudnn, CUTLASS's simt kernels, and xmma kernels of fused multiply-adds.
_WITHOUT = re.compile(
    r"_ffma\b|_ffma_|_simt_|"
    r"(?:maxwell|pascal|volta|turing|ampere)_(?:sgemm|scudnn)_|"
    r"implicit_convolve_sgemm"
)
# The shape of the instruction (m8n8k4, m16n8k8, m16n8k16 …) after the letter of the sum's dtype,
# before what is computed; CUTLASS's operator class; Hopper's and Blackwell's instructions; xmma's
# instruction at the end; cuBLAS 12's nvjet for half and fp8 inputs; the half flash attention of
# torch, which is written in mma instructions alone.
_WITH = re.compile(
    r"[shicd](?:884|1684|1688|8816|16816|8832|16832)[a-z0-9]*(?:gemm|cudnn|fprop|dgrad|wgrad)|"
    r"tensorop|hmma|imma|wgmma|gmma|tcgen05|"
    r"_tensor(?:8x8x4|16x8x4|16x8x8|16x8x16|8x8x16|16x8x32)|"
    r"sm(?:90|100|103)_xmma_\w*?(?:bf16bf16|f16f16|tf32)|"
    r"\bnvjet_(?:sm\d+_)?(?:tst|tss|hsh|hss|qq)|"
    r"pytorch_flash::flash_(?:fwd|bwd)|"
    r"fmha_cutlass[FB]_(?:f16|bf16)_"
)
# oneDNN names an implementation after the newest instruction set that it is compiled for
# (src/cpu/x64/cpu_isa_traits.hpp: avx10_1_512 includes avx512_core_fp16).
_CPU_WITH = re.compile(r"amx|avx512_core_(?:bf16|fp16)\b|avx10_\d")
_CPU_WITHOUT = re.compile(
    r":(?:sse41|avx|avx2|avx2_vnni|avx512_core|avx512_core_vnni|any)$|^\w+ ref\b"
)


def kernel_sign(name: str) -> Sign:
    """Of a CUDA kernel, as torch.profiler spells it."""
    if _WITHOUT.search(name):
        return Sign.NOT_USED
    return Sign.USED if _WITH.search(name) else Sign.NOTHING


def implementation_sign(name: str) -> Sign:
    """Of an implementation of oneDNN's ("matmul brg_matmul:avx512_core_bf16"), for half operands:
    fp32 ones use no half instruction, whatever the implementation could do."""
    if _CPU_WITH.search(name):
        return Sign.USED
    return Sign.NOT_USED if _CPU_WITHOUT.search(name) else Sign.NOTHING
