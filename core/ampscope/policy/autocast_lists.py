"""Which ops autocast casts, and how: CUDA's lists, and the CPU's own, as data.

Under `torch.autocast("cuda")` an op that stands in a list has its inputs cast before it runs, and
so before autograd records it; every other op runs in the dtype that its inputs happen to have.

    lower_precision_fp   inputs to fp16 or bf16 (matmul, conv, linear: the Tensor Core ops)
    fp32                 inputs to fp32 (exp, log, losses, norms: the ops that overflow)
    fp32_set_opt_dtype   sets the op's own `dtype=` argument to fp32 unless the caller set it
    fp32_append_dtype    calls the overload that takes a dtype, with fp32
    promote              all inputs to the widest dtype among them
    banned               raises, because the op is unsafe in fp16

Names are `op` or `op.overload`; `out=` and in-place forms stand in no list and are not cast.

Sources: CUDA's lists from `torch/include/ATen/autocast_mode.h` of the wheel (compared
with the torch at hand by `benchmarks/remake_autocast_lists.py`); the ops in NOT_IN_HEADER and the
CPU's lists from pytorch `aten/src/ATen/autocast_mode.cpp` (macros KERNEL_CUDA and KERNEL_CPU),
`_cudnn_rnn` from `aten/src/ATen/cudnn/AutocastRNN.cpp`. A torch without CUDA registers all of them
but `_cudnn_rnn`, so a test checks the names against the dispatcher too.

The modes that put autocast into effect, or do without it, are data here too (:class:`Precision`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from ampscope.errors import BadInput

TORCH_VERSION: Final = "2.13.0"


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


CUDA_LISTS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "lower_precision_fp": _ops("""
            _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
            conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr
            matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
            linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
            rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
            scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose _cudnn_rnn
        """),
        "fp32": _ops("""
            acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
            pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
            rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
            cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
            hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
            margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
            multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
            upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
            _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
            upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
            upsample_bicubic2d _upsample_bicubic2d_aa
        """),
        "fp32_set_opt_dtype": _ops("""
            prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
            linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
        """),
        "fp32_append_dtype": _ops("norm.Scalar norm.ScalarOpt_dim"),
        "promote": _ops("""
            addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
            scatter_add
        """),
        "banned": _ops("binary_cross_entropy"),
    }
)

NOT_IN_HEADER: Final = _ops(
    "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn binary_cross_entropy"
)

# What CUDA raises for binary_cross_entropy, word for word.
BANNED_MESSAGE: Final = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using"
    " torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)

CPU_LISTS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "lower_precision_fp": _ops("""
            conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm
            linalg_vecdot baddbmm addmm _addmm_activation addbmm linear _convolution.deprecated
            matmul conv_tbc mkldnn_rnn_layer conv_transpose1d conv_transpose2d.input
            conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention
        """),
        "fp32": _ops("""
            _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
            avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
            cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss
            ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2
            fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
            fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d
            geqrf grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss huber_loss
            inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond
            linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
            linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
            linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
            linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals
            linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d
            max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss
            multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d
            orgqr ormqr pinverse poisson_nll_loss polar prod prod.dim_int qr quantile
            quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d
            replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center
            svd trace triangular_solve triplet_margin_loss view_as_complex
        """),
        "promote": _ops("cat index_copy stack"),
    }
)

# A trace taken below autocast shows the kernel that a listed op ended in, not the op itself.
LISTED_OP_OF_KERNEL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "_softmax": "softmax.int",
        "_log_softmax": "log_softmax.int",
        "native_group_norm": "group_norm",
        "_fused_rms_norm": "rms_norm",
        "nll_loss_forward": "nll_loss",
        "nll_loss2d_forward": "nll_loss2d",
        "multilabel_margin_loss_forward": "multilabel_margin_loss",
        "_cdist_forward": "cdist",
        "_pdist_forward": "pdist",
        "_prelu_kernel": "prelu",
        "_trilinear": "bilinear",
        "grid_sampler_2d": "grid_sampler",
        "grid_sampler_3d": "grid_sampler",
        "linalg_cross": "cross",
        "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
        "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
        "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    }
)


def _list_of_name() -> dict[str, str]:
    """List by full name, and by bare name where every overload that stands in a list shares it."""
    found = {op: name for name, ops in CUDA_LISTS.items() for op in ops}
    for op, name in list(found.items()):
        found.setdefault(op.partition(".")[0], name)
    return found


_LIST_OF_NAME: Final = _list_of_name()


def list_of(op: str) -> str | None:
    """The CUDA list that an aten op belongs to, or None where autocast leaves it alone.

    Takes `softmax`, `softmax.int`, `aten.softmax.int`, `aten::softmax.int`, and the kernel names of
    a trace, such as `aten._softmax.default`. A name without an overload stands for any overload;
    one with an overload must match it (`softmax.int` is cast, `softmax.int_out` is not).
    """
    name = op.removeprefix("aten::").removeprefix("aten.")
    if name.endswith(".default"):
        # `sum` in a list is the default overload, which a trace writes `aten.sum.default`
        exact = name.removesuffix(".default")
        listed = LISTED_OP_OF_KERNEL.get(exact, exact)
        return next((name for name, ops in CUDA_LISTS.items() if listed in ops), None)
    return _LIST_OF_NAME.get(LISTED_OP_OF_KERNEL.get(name, name))


HalfDtype: TypeAlias = Literal["float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Precision:
    """One precision mode that a run can be made in, which the CLI and the pages read without torch.

        fp32            everything in fp32, on CUDA without TF32
        tf32            fp32 storage, CUDA's matmuls and convolutions in TF32
        fp16            fp16 autocast and a GradScaler (what most people mean by AMP)
        fp16-noscaler   fp16 autocast, no scaler: small gradients are lost
        bf16            bf16 autocast; its exponent range is fp32's, so it needs no scaler
        fp16-pure       `model.half()`: weights, gradients and optimizer state in fp16
        bf16-pure       the same in bf16

    `autocast_dtype` and `model_dtype` are names of torch dtypes; None is "not used".

    `tf32` says what CUDA's fp32 matmuls and convolutions may do: True TF32, False exact fp32,
    None whatever the process has set.
    """

    name: str
    autocast_dtype: HalfDtype | None
    model_dtype: HalfDtype | None
    scaler: bool
    tf32: bool | None
    summary: str


_MODES: Final = (
    Precision("fp32", None, None, False, False, "everything in fp32"),
    Precision("tf32", None, None, False, True, "fp32, with matmuls in TF32 (CUDA only)"),
    Precision("fp16", "float16", None, True, None, "fp16 autocast with a GradScaler"),
    Precision("fp16-noscaler", "float16", None, False, None, "fp16 autocast without a GradScaler"),
    Precision("bf16", "bfloat16", None, False, None, "bf16 autocast"),
    Precision("fp16-pure", None, "float16", False, None, "the whole model in fp16"),
    Precision("bf16-pure", None, "bfloat16", False, None, "the whole model in bf16"),
)

PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType({mode.name: mode for mode in _MODES})


def resolve(name: str, device_type: str) -> Precision:
    """The mode of that name on that kind of device ("cpu", "cuda").

    Raises BadInput for a name that is not a mode, and for tf32 off CUDA.
    """
    precision = PRECISIONS.get(name)
    if precision is None:
        raise BadInput(f"There is no precision {name!r}. Choose one of: {', '.join(PRECISIONS)}.")
    if precision.tf32 and device_type != "cuda":
        raise BadInput(
            f"Precision tf32 needs a CUDA device, and this run is on {device_type!r}: TF32 is a"
            " mode of NVIDIA Tensor Cores (compute capability 8.0 or newer). Choose fp32 instead."
        )
    return precision
