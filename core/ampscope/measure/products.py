"""Matrix products of every dtype on random data, each as a call without arguments.

    call = product("bf16", (1024, 1024, 1024), device)      # (m, n, k)
    call()

Random numbers, not zeros: a GPU that multiplies zeros draws less power and clocks higher, so a
rate on zeros is one that no training reaches. Sums are kept as training keeps them (fp32 for the
half and fp8 dtypes, int32 for int8). On CUDA the fp8 product uses the fast accumulation that
forward passes use; without it Hopper's rate is lower.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Shape = tuple[int, int, int]  # m, n, k
Call = Callable[[], object]

# Name as in ampscope.formats -> dtype of the operands, from wide to narrow; "tf32" is fp32 tensors
# with TF32 switched on.
OPERANDS: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
}
# Of what the product is written in, where that is not the dtype of the operands.
RESULTS: dict[str, torch.dtype] = {"int8": torch.int32, "e4m3": torch.bfloat16}
TF32_FROM = (8, 0)  # CUDA Programming Guide, Tensor Core table
FP8_FROM = (8, 9)  # the same table; torch._scaled_mm refuses anything before it


def refusal(dtype: str, device: torch.device) -> str:
    """Why there is no product in ``dtype`` on this device, or nothing. What only torch can tell is
    told by the first call."""
    if device.type != "cuda":
        return "TF32 is a mode of NVIDIA's Tensor Cores." if dtype == "tf32" else ""
    if torch.version.hip is not None:  # AMD's numbers are no compute capabilities
        return ""
    needed = {"tf32": TF32_FROM, "e4m3": FP8_FROM}.get(dtype)
    major, minor = torch.cuda.get_device_capability(device)
    if needed is None or (major, minor) >= needed:
        return ""
    return f"It needs compute capability {needed[0]}.{needed[1]}; this is {major}.{minor}."


class Matrices:
    """Random matrices cut from the same memory, for many sizes that are used one after the other:
    36 sizes near 4096 in three dtypes would need 14 GB of their own. The largest comes first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, role: str, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous matrix; ``role`` keeps operands and result apart."""
        count = size[0] * size[1]
        flat = self._flat.get((role, dtype))
        if flat is None or flat.numel() < count:
            flat = self._flat[role, dtype] = random_tensor((count,), dtype, self.device)
        return flat[:count].view(size)


def product(
    dtype: str, shape: Shape, device: torch.device, matrices: Matrices | None = None
) -> Call:
    """The product of an (m, k) and a (k, n) matrix, both random, into a matrix that is reused.

    Raises RuntimeError (out of memory included) where torch cannot make the operands."""
    m, n, k = shape
    take = (matrices or Matrices(device)).take
    left = take("left", (m, k), OPERANDS[dtype])
    out = take("out", (m, n), RESULTS.get(dtype, OPERANDS[dtype]))
    if dtype in ("int8", "e4m3"):
        # The right operand lies column by column, as a Linear layer's transposed weight does;
        # cuBLASLt has no other 8-bit kernels for fp8.
        right = take("right", (n, k), OPERANDS[dtype]).t()
        if dtype == "int8":
            return lambda: torch._int_mm(left, right, out=out)
        one = torch.ones((), device=device)
        fast = device.type == "cuda"
        return lambda: torch._scaled_mm(
            left, right, one, one, out_dtype=out.dtype, use_fast_accum=fast, out=out
        )
    right = take("right", (k, n), OPERANDS[dtype])
    if device.type == "cuda" and OPERANDS[dtype] is torch.float32:
        return _with_flag("tf32" if dtype == "tf32" else "ieee", left, right, out)
    return lambda: torch.mm(left, right, out=out)


def _with_flag(precision: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Call:
    """fp32 products set their own flag: other calls come between two of them."""

    def call() -> None:
        torch.backends.cuda.matmul.fp32_precision = precision
        torch.mm(left, right, out=out)

    return call


def random_tensor(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers, or for integers all values of int8 alike."""
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, size, dtype=dtype, device=device)
    if dtype.itemsize == 1:  # torch draws no fp8
        return torch.randn(size, dtype=torch.bfloat16, device=device).to(dtype)
    return torch.randn(size, dtype=dtype, device=device)


def flops(shape: Shape) -> int:
    """A multiplication and an addition for each of m n k."""
    m, n, k = shape
    return 2 * m * n * k


def moved_bytes(dtype: str, shape: Shape) -> int:
    """Both operands read once, the result written once."""
    m, n, k = shape
    width = OPERANDS[dtype].itemsize
    return width * (m * k + k * n) + RESULTS.get(dtype, OPERANDS[dtype]).itemsize * m * n
