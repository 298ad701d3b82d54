"""Tensor Core arithmetic on a CPU: half in, fp32 accumulate, half out.

A CPU's own fp16 kernels are correct but one to two orders of magnitude slower than fp32 (a
512x256x256 matmul took 21 ms against 0.4 ms in fp32, oneDNN without AVX512-FP16), and a few half
ops that CUDA has do not exist on a CPU. Inside `TensorCoreMode` such an op is computed by the fp32
kernel on the half inputs and its result rounded to half once, which is what a Tensor Core does:

    with TensorCoreMode():
        loss = model(batch)         # half mm, addmm, convolution, attention: fp32 inside
        loss.backward()             # and their backward ops

Where the rounding falls: cublasLt adds addmm's bias before the rounding; a cuDNN convolution's bias
is added to the rounded output (`output.add_(reshape_bias(...))` in pytorch `Convolution.cpp`), so
a convolution with a bias rounds twice.

bf16 runs natively where the CPU has bf16 instructions: fp32 accumulation and one rounding too, and
up to twice as fast as fp32 (matmuls up to K = 8192 gave the exact result rounded once in at least
99.95 % of elements; fp32-and-round in 99.97 %). But these instructions take bf16 subnormals (below
2^-126) for zero, which a Tensor Core does not, and a convolution's bias is added before the
rounding; `native_bf16=False` emulates.

Where many values are added into one place, the two devices differ as well, and not always in the
same direction (aten/src/ATen/native/cuda of torch 2.x against the CPU's kernels):

    op                                    CUDA                                  a CPU's own kernel
    embedding and EmbeddingBag backward   fp32 partial sums, one rounding       half, value by value
    index_put_ accumulate, at most 32     fp32, one rounding                    half
      elements a row (a gather by tensor)
    index_put_ accumulate, longer rows    half, value by value                  half
    coalesce of a sparse gradient         fp32, one rounding                    half
    index_add, scatter_add                half: atomicAdd                       fp32 in some forms

Each runs here as CUDA has it. (An embedding's backward of at most 3,072 rows is summed in fp32 by
32 rows on CUDA, and the sums are added in half: here it is fp32 throughout.)

What stays different from a GPU: the order of summation; attention's probabilities, which a GPU
rounds to half before it multiplies them with V; random numbers; and ops written with `out=` or in
place (`addmm_`), which are left to the CPU's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# An op's arguments and results are what its schema says, so they are Any here.
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
Kernel: TypeAlias = Callable[[Any, Arguments, Keywords], Any]

_aten = torch.ops.aten


def _rounded(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The op in fp32, every result rounded to the dtype of the first argument."""
    result = func(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})
    dtype = args[0].dtype
    if isinstance(result, Tensor):
        return result.to(dtype)
    return tuple(None if part is None else part.to(dtype) for part in result)


def _convolution(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """As `_rounded`, with the bias added to the rounded output, as the cuDNN path does."""
    x, weight, bias, *geometry = args
    output = _rounded(func, (x, weight, None, *geometry), kwargs)
    if bias is not None:
        output.add_(bias.view(-1, *[1] * (weight.dim() - 2)))
    return output


def _attention(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """As `_rounded` for the output; the logsumexp for backward is fp32 on CUDA as well."""
    output, logsumexp = func(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})
    return output.to(args[0].dtype), logsumexp


def _wide(arg: Any) -> Any:
    if isinstance(arg, Tensor) and arg.dtype in _HALF:
        return arg.float()
    return arg


def _put(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """index_put with accumulation: a CUDA warp adds the values of a short row in fp32, and rounds
    after each value of a longer one."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    target, indices, values = given["self"], given["indices"], given["values"]
    row = 1
    for place, size in enumerate(target.shape):
        if place >= len(indices) or indices[place] is None:
            row *= size
    if not given.get("accumulate") or row > _WARP:
        return func(*args, **kwargs)
    wide = target.float().index_put(indices, values.float(), accumulate=True)
    return _into(func, target, wide)


def _into(func: Any, target: Tensor, wide: Tensor) -> Tensor:
    """The result in half: written to ``target`` by an op in place, else a tensor of its own."""
    if func._schema.name.endswith("_"):
        return target.copy_(wide)
    return wide.to(target.dtype)


def _atomic_index_add(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """index_add by atomicAdd: rounded to half after each value."""
    target, dim, index, source = args[:4]
    alpha = kwargs.get("alpha", args[4] if len(args) > 4 else 1)
    result = target if func._schema.name.endswith("_") else target.clone()
    if target.dim() and alpha == 1:
        # The CPU's index_put in half adds value by value.
        result.movedim(dim, 0).index_put_((index,), source.movedim(dim, 0), accumulate=True)
        return result
    return func(*args, **kwargs)


def _atomic_scatter_add(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """scatter_add by atomicAdd: rounded to half after each value."""
    target, dim, index, source = args[:4]
    if not target.dim() or not index.numel():
        return func(*args, **kwargs)
    places = list(torch.meshgrid(*map(torch.arange, index.shape), indexing="ij"))
    values = source[tuple(slice(n) for n in index.shape)]
    places[dim] = index
    result = target if func._schema.name.endswith("_") else target.clone()
    return result.index_put_(tuple(places), values, accumulate=True)


_WARP: Final = 32
_HALF: Final = frozenset({torch.float16, torch.bfloat16})


def _table(
    ops: str, kernel: Kernel, leading: int | None = None
) -> dict[Any, tuple[Kernel, int | None]]:
    """An entry for the default overload of each of these aten ops."""
    return {getattr(_aten, op).default: (kernel, leading) for op in ops.split()}


# Kernel by op, and how many leading arguments must share one half dtype (None: all of them).
# Attention's backward takes an fp32 logsumexp after grad_output, query, key, value and output.
_KERNELS: Final = {
    **_table(
        "mm addmm _addmm_activation bmm baddbmm addbmm mv addmv dot vdot convolution_backward",
        _rounded,
    ),
    **_table("convolution", _convolution),
    **_table("_scaled_dot_product_flash_attention_for_cpu", _attention, 3),
    **_table("_scaled_dot_product_flash_attention_for_cpu_backward", _rounded, 5),
}

# Sums into one place, as CUDA rounds them; for bf16 as well, whatever instructions the CPU has.
_SUMS: Final = {
    **_table(
        "embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward _coalesce",
        _rounded,
        1,
    ),
    **_table("index_put index_put_ _index_put_impl_", _put, 1),
    **_table("index_add index_add_", _atomic_index_add, 1),
    **_table("scatter_add scatter_add_", _atomic_scatter_add, 1),
}

# Ops with half kernels on CUDA and none on a CPU: those of torch's OpInfo database whose
# `dtypesIfCUDA` has half and whose `dtypes` has not, where running them failed. Left out because
# they fail on CUDA too: cdist, pdist, ctc_loss, linalg.*. Left out all the same: rrelu, which
# writes to an argument, and FFTs, which are complex: the stand-in device computes those.
_NO_HALF_KERNEL: Final = _table(
    """
    avg_pool3d avg_pool3d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward multi_margin_loss
    multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward
    """,
    _rounded,
)


class TensorCoreMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own hook is untyped
    """Run half matmuls, convolutions and attention in fp32 kernels, rounding the result to half.

    `native_bf16`: leave bf16 to the CPU's own instructions; None does so where the CPU has them.
    An op given mixed dtypes is not touched, so that it raises its error as it would on CUDA.
    """

    supports_higher_order_operators = True

    def __init__(self, native_bf16: bool | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.native_bf16 = has_bf16_instructions() if native_bf16 is None else native_bf16
        self._fp16 = _KERNELS | _NO_HALF_KERNEL | _SUMS
        self._bf16 = _NO_HALF_KERNEL | _SUMS if self.native_bf16 else self._fp16

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        # Most ops are not in the table: one lookup, then on. fp16's table holds bf16's.
        if func in self._fp16:
            dtype = args[0].dtype
            table = self._fp16 if dtype is torch.float16 else self._bf16
            if dtype in _HALF and func in table:
                kernel, leading = table[func]
                if _share_dtype(args[:leading], dtype):
                    return kernel(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _share_dtype(args: Arguments, dtype: torch.dtype) -> bool:
    return all(
        arg.dtype is dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()
    )
