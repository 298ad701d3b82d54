"""What the name of a kernel says about Tensor Cores; on a CPU, what oneDNN's name of an
implementation says about the CPU's instructions for half products.

    >>> kernel_sign("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn")
    <Sign.USED: 'used'>
    >>> kernel_sign("some_kernel_of_next_year")
    <Sign.NOTHING: 'nothing'>

Such lists rot: torch's own list knew no 3-d convolution of Hopper's
(github.com/pytorch/kineto/issues/1041), and another missed TF32 (github.com/openxla/xprof/issues/
1704). So a name that is in no list says nothing, and never "not used". Nor does a part of a name
that both kinds share: xmma kernels end in "tensor16x8x16" or in "ffma".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum


class Sign(StrEnum):
    """What one sign says."""

    USED = "used"
    NOT_USED = "not used"
    NOTHING = "nothing"


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


def sign_of_names(names: Iterable[str], device: str, dtype: str) -> Sign:
    """Of all kernels of one product: one that uses them is enough, since others prepare and add up;
    then one that is known not to."""
    if device == "cuda":
        signs = {kernel_sign(name) for name in names}
    elif device == "cpu" and dtype in ("bf16", "fp16"):
        signs = {implementation_sign(name) for name in names}
    else:
        return Sign.NOTHING
    return next((s for s in (Sign.USED, Sign.NOT_USED) if s in signs), Sign.NOTHING)
