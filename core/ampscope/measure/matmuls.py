"""Matmuls of every dtype on random data, each as a call without arguments.

    call = matmul("bf16", (1024, 1024, 1024), device)      # (m, n, k)
    call()

Random numbers, not zeros: a GPU that multiplies zeros draws less power and clocks higher, so a
rate on zeros is one that no training reaches. Sums are kept as training keeps them (fp32 for the
half and fp8 dtypes, int32 for int8). On CUDA the fp8 matmul uses the fast accumulation that
forward passes use; without it Hopper's rate is lower.

A matmul of a training is made again without its data (:class:`MatmulCall`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampscope.numerics.formats import dtype_name
from ampscope.records import Operand, Rate, Timing

Shape = tuple[int, int, int]  # m, n, k
Call = Callable[[], object]

# Name as in ampscope.numerics.formats -> dtype of the operands, from wide to narrow; "tf32" is fp32
# tensors
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
# Of what the matmul is written in, where that is not the dtype of the operands.
RESULTS: dict[str, torch.dtype] = {"int8": torch.int32, "e4m3": torch.bfloat16}
TF32_FROM = (8, 0)  # CUDA Programming Guide, Tensor Core table
FP8_FROM = (8, 9)  # the same table; torch._scaled_mm refuses anything before it


def matmul(
    dtype: str, shape: Shape, device: torch.device, matrices: Matrices | None = None
) -> Call:
    """The matmul of an (m, k) and a (k, n) matrix, both random, into a matrix that is reused.

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
    """fp32 matmuls set their own flag: other calls come between two of them."""

    def call() -> None:
        torch.backends.cuda.matmul.fp32_precision = precision
        torch.mm(left, right, out=out)

    return call


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


def random_tensor(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers, or for integers all values of int8 alike."""
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, size, dtype=dtype, device=device)
    if dtype.itemsize == 1:  # torch draws no fp8
        return torch.randn(size, dtype=torch.bfloat16, device=device).to(dtype)
    return torch.randn(size, dtype=dtype, device=device)


def refusal(dtype: str, device: torch.device) -> str:
    """Why there is no matmul in ``dtype`` on this device, or nothing. What only torch can tell is
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


def matmul_rate(
    series: str, dtype: str, shape: tuple[int, int, int], timing: Timing | None, note: str = ""
) -> Rate:
    """The record of one matmul."""
    return Rate(
        series=series,
        op="matmul",
        dtype=dtype,
        shape=shape,
        flops=flops(shape),
        moved_bytes=moved_bytes(dtype, shape),
        timing=timing,
        measured_at=time.time(),
        note=note,
    )


def flops(shape: Shape) -> int:
    """A multiplication and an addition for each of m n k."""
    m, n, k = shape
    return 2 * m * n * k


def moved_bytes(dtype: str, shape: Shape) -> int:
    """Both operands read once, the result written once."""
    m, n, k = shape
    width = OPERANDS[dtype].itemsize
    return width * (m * k + k * n) + RESULTS.get(dtype, OPERANDS[dtype]).itemsize * m * n


WEIGHT_GRADIENT, INPUT_GRADIENT = "weight gradient", "input gradient"
_MASK = 10  # position of convolution_backward's output_mask, _BIAS of its bias_sizes
_BIAS = 3
_HALF = (torch.float16, torch.bfloat16)

# Where each dimension stands: (argument, axis), the first of them gives its size. An addend that
# is broadcast lacks the axis, or has another size there.
_Axes = Mapping[str, tuple[tuple[int, int], ...]]
_MATMUL: _Axes = {"m": ((0, -2),), "n": ((1, -1),), "k": ((0, -1), (1, -2))}
_WITH_ADDEND: _Axes = {"m": ((1, -2), (0, -2)), "n": ((2, -1), (0, -1)), "k": ((1, -1), (2, -2))}
_MATRIX: dict[str, _Axes] = {
    "mm": _MATMUL,
    "bmm": _MATMUL,
    "_scaled_mm": _MATMUL,
    "addmm": _WITH_ADDEND,
    "baddbmm": _WITH_ADDEND,
}
_IN, _OUT = "input channels", "output channels"


@dataclass(frozen=True, slots=True)
class MatmulCall:
    """An op and its arguments without their data: enough to make it again on random numbers, in
    another dtype, or with a dimension enlarged. Equal calls are equal and hash alike.

        call = MatmulCall.of(torch.ops.aten.mm.default, (a, b), {})
        call.dimensions()                      # {"m": 1024, "n": 50257, "k": 768}
        call.padded({"n": 50304}).run(device)  # the matmul of random matrices of that size
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]  # as the op's schema says, a TensorArgument in place of each tensor
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MatmulCall:
        """The call that was made with these arguments."""
        named = tuple((name, _described(value)) for name, value in sorted(kwargs.items()))
        return cls(func, tuple(map(_described, args)), named)

    @property
    def op(self) -> str:
        """ "aten.addmm" """
        return str(self.func).rpartition(".")[0]

    @property
    def name(self) -> str:
        """ "addmm" """
        return self.op.rpartition(".")[2]

    @property
    def part(self) -> str:
        """Which of its two matmuls a convolution's backward computes; else empty."""
        if self.name != "convolution_backward":
            return ""
        return INPUT_GRADIENT if self.args[_MASK][0] else WEIGHT_GRADIENT

    @property
    def groups(self) -> int:
        """Of a convolution; 1 for everything else."""
        place = {"convolution": 8, "convolution_backward": 9}.get(self.name)
        return 1 if place is None else int(self.args[place])

    def tensors(self) -> Iterator[TensorArgument]:
        """Its tensors of numbers, in order."""
        for value in (*self.args, *(value for _, value in self.kwargs)):
            if isinstance(value, TensorArgument) and value.dtype.is_floating_point:
                yield value

    def operands(self) -> tuple[Operand, ...]:
        """As they are recorded."""
        return tuple(Operand(t.shape, t.stride, dtype_name(t.dtype)) for t in self.tensors())

    def dimensions(self) -> dict[str, int]:
        """The sizes that decide how it fits; of a grouped convolution those of one group."""
        if self.groups > 1:
            weight = self.args[1 if self.name == "convolution" else 2].shape
            sizes = (weight[1], weight[0] // self.groups)
            order = (_OUT, _IN) if self._is_transposed else (_IN, _OUT)
            return dict(zip(order, sizes, strict=True))
        if "attention" in self.name:
            return {"head size": next(self.tensors()).shape[-1]}
        return {
            name: self.args[places[0][0]].shape[places[0][1]]
            for name, places in self._axes().items()
        }

    def padded(self, sizes: Mapping[str, int]) -> MatmulCall:
        """With those dimensions enlarged. Only for what :meth:`can_be_padded`."""
        args, before = list(self.args), self.dimensions()
        for name, size in sizes.items():
            for place, axis in self._axes()[name]:
                tensor = args[place]
                if isinstance(tensor, TensorArgument) and tensor.has(axis, before[name]):
                    args[place] = tensor.resized(axis, size)
        if self.name == "convolution_backward" and args[_BIAS] is not None and _OUT in sizes:
            args[_BIAS] = (sizes[_OUT],)
        return replace(self, args=tuple(args))

    def can_be_padded(self) -> bool:
        """Grouped convolutions and attention have no one size to enlarge."""
        return self.groups == 1 and bool(self._axes())

    def in_fp32(self) -> MatmulCall:
        """Half tensors replaced by fp32 ones of the same shapes and strides."""

        def wide(value: Any) -> Any:
            is_half = isinstance(value, TensorArgument) and value.dtype in _HALF
            return replace(value, dtype=torch.float32) if is_half else value

        named = tuple((name, wide(value)) for name, value in self.kwargs)
        return replace(self, args=tuple(map(wide, self.args)), kwargs=named)

    def made(self, device: torch.device) -> Callable[[], object]:
        """The call on random data, ready to be made again and again."""

        def real(value: Any) -> Any:
            return value.made(device) if isinstance(value, TensorArgument) else value

        args, kwargs = tuple(map(real, self.args)), {k: real(v) for k, v in self.kwargs}
        return lambda: self.func(*args, **kwargs)

    @property
    def _is_transposed(self) -> bool:
        return bool(self.args[6 if self.name == "convolution" else 7])

    def _axes(self) -> _Axes:
        if self.name not in ("convolution", "convolution_backward"):
            return _MATRIX.get(self.name, {})
        data, weight = (0, 1) if self.name == "convolution" else (1, 2)
        out = 2 if self.name == "convolution" else 0  # the bias, or the gradient of the output
        first, second = (1, 0) if self._is_transposed else (0, 1)
        of_out = 1 if self.name == "convolution_backward" else 0
        return {_IN: ((data, 1), (weight, second)), _OUT: ((weight, first), (out, of_out))}


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device) -> Tensor:
        """Random numbers of that shape, dtype and strides (zeros for integers, which are seeds and
        offsets); elements that shared memory share it again."""
        pairs = zip(self.shape, self.stride, strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in pairs)
        if self.dtype.is_floating_point:
            storage = random_tensor((length,), self.dtype, device)
        else:
            storage = torch.zeros((length,), dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.stride)

    @property
    def elements(self) -> int:
        """Those that exist in memory: an expanded axis is one."""
        pairs = zip(self.shape, self.stride, strict=True)
        return math.prod(size for size, stride in pairs if stride != 0)

    def has(self, axis: int, size: int) -> bool:
        """Whether that axis is there and of that size: an addend that is broadcast lacks it."""
        rank = len(self.shape)
        return -rank <= axis < rank and self.shape[axis] == size

    def resized(self, axis: int, size: int) -> TensorArgument:
        """Dense, with its axes in the same order in memory."""
        shape = list(self.shape)
        shape[axis] = size
        stride, step = list(self.stride), 1
        for i in sorted(range(len(shape)), key=lambda i: (self.stride[i], self.shape[i])):
            if self.stride[i] != 0:
                stride[i], step = step, step * shape[i]
        return replace(self, shape=tuple(shape), stride=tuple(stride))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorArgument(tuple(value.shape), tuple(value.stride()), value.dtype)
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value
