"""Names of kernels as people published them, with what is known of each.

Every name stands as its source prints it; what a source cut off ends in dots here too.
"""

from __future__ import annotations

import pytest

from ampscope.hardware.capability import Sign, implementation_sign, kernel_sign, sign_of_names

TORCH = "https://github.com/pytorch/pytorch/issues/"
# (name, where it is from)
USED = (
    # Nsight Compute shows Tensor Core use, and the list of torch's own profiler missed it
    (
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_"
        "warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn",
        "https://github.com/pytorch/kineto/issues/1041",
    ),
    ("volta_fp16_s884cudnn_fp16_256x64_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1", TORCH + "54324"),
    ("turing_fp16_s1688cudnn_fp16_256x128_ldg8_relu_f2f_exp_medium_nhwc_tn_v1", TORCH + "54324"),
    (
        "turing_fp16_s1688cudnn_fp16_256x128_ldg8_relu_filter1x1_stg8_interior_nchw_nn_v1",
        "https://github.com/NVIDIA/apex/issues/530",
    ),
    (
        "volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1",
        "https://github.com/NVIDIA/apex/issues/666",
    ),
    ("ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn", TORCH + "181718"),
    # N = 2055 and 2057, no multiple of 8: slower, and still Tensor Cores
    (
        "cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>",
        TORCH + "181718",
    ),
    (
        "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_nn_align8>",
        TORCH + "181718",
    ),
    (
        "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn",
        "https://github.com/karpathy/nanochat/pull/105",
    ),
    (
        "ampere_fp16_s16816gemm_fp16_64x128_sliced1x2_ldg8_f2...",
        "https://github.com/pytorch/xla/pull/6407",
    ),
    # TF32: BERT in fp32 under Inductor
    (
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_1...",
        "https://github.com/pytorch/xla/pull/6389",
    ),
    (
        "cutlass_tensorop_s1688tf32gemm_256x128_16x3_nn_align4",
        "https://github.com/NVIDIA/cutlass/issues/999",
    ),
    # bf16 on a H200 and a B200
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", TORCH + "161134"),
    ("nvjet_tst_16x64_64x16_4x1_v_bz_TNN", TORCH + "161134"),
    ("nvjet_tst_192x16_64x8_2x2_2cta_h_bz_TNT", "https://github.com/sgl-project/sglang/pull/22353"),
)
NOT_USED = (
    # fp32 without TF32; the list of torch's own profiler takes every "xmma_gemm" for Tensor Cores
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma",
        "https://github.com/pytorch/pytorch/pull/167503",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1",
        "https://github.com/pytorch/pytorch/pull/167503",
    ),
    ("volta_sgemm_64x32_sliced1x4_nn", TORCH + "51382"),
    ("volta_scudnn_128x64_relu_small_nn_v1", TORCH + "13412"),
    (
        "void cudnn::detail::implicit_convolve_sgemm<float, float, int=128, int=6, int=7, int=3, "
        "int=3, int=5, int=1, bool=1, bool=0, bool=1>(int, int, int, float const *, int, float*",
        TORCH + "13412",
    ),
)
NOTHING = (
    # helpers around a matmul, and kernels that no list can know
    ("void splitKreduce_kernel<float, float, float>(cublasSplitKParams<float>, f", TORCH + "51382"),
    ("nchwToNhwcKernel", "https://github.com/NVIDIA/apex/issues/530"),
    ("cudnn::gemm::computeOffsetsKernel", "https://github.com/NVIDIA/apex/issues/530"),
    ("triton_gemm_dot_1", "https://github.com/pytorch/xla/pull/6407"),
    ("batch_norm_transform_input_kernel", "https://github.com/NVIDIA/apex/issues/530"),
    (
        "void at::native::im2col_kernel<float>(long, float const *, long, long, long, long, long)",
        TORCH + "51382",
    ),
)
ONEDNN = "https://github.com/uxlfoundation/oneDNN/issues/"
IMPLEMENTATIONS = (
    ("matmul brg_matmul:avx512_core_bf16", Sign.USED, ONEDNN + "3868"),
    ("matmul brg_matmul:avx10_1_512_amx", Sign.USED, ONEDNN + "3868"),
    ("matmul brg_matmul:avx10_1_512", Sign.USED, ONEDNN + "3868"),
    ("matmul brg:avx512_core_amx", Sign.USED, ONEDNN + "1992"),
    ("matmul brg:avx512_core_amx_fp16", Sign.USED, ONEDNN + "1992"),
    ("inner_product brg_matmul:avx2", Sign.NOT_USED, "oneDNN pull 5089"),
    ("matmul gemm:acl", Sign.NOTHING, ONEDNN + "1442"),
    ("gemm_api ", Sign.NOTHING, ONEDNN + "1442"),
    ("matmul gemm:jit", Sign.NOTHING, "oneDNN pull 4315"),
    ("matmul ref:any", Sign.NOT_USED, "oneDNN, src/cpu/matmul/ref_matmul.hpp"),
    ("convolution jit:avx512_core", Sign.NOT_USED, "oneDNN, src/cpu/x64"),
)


@pytest.mark.parametrize(("name", "source"), USED)
def test_kernels_that_are_known_to_use_them(name: str, source: str) -> None:
    assert kernel_sign(name) is Sign.USED, source


@pytest.mark.parametrize(("name", "source"), NOT_USED)
def test_kernels_that_are_known_not_to(name: str, source: str) -> None:
    assert kernel_sign(name) is Sign.NOT_USED, source


@pytest.mark.parametrize(("name", "source"), NOTHING)
def test_a_name_that_is_in_no_list_says_nothing(name: str, source: str) -> None:
    assert kernel_sign(name) is Sign.NOTHING, source


@pytest.mark.parametrize(("name", "sign", "source"), IMPLEMENTATIONS)
def test_onednns_implementations(name: str, sign: Sign, source: str) -> None:
    assert implementation_sign(name) is sign, source


def test_one_kernel_that_uses_them_is_enough() -> None:
    helpers = [name for name, _ in NOTHING]
    assert sign_of_names(helpers, "cuda", "bf16") is Sign.NOTHING
    assert sign_of_names([*helpers, USED[0][0]], "cuda", "bf16") is Sign.USED
    assert sign_of_names([NOT_USED[0][0], USED[0][0]], "cuda", "bf16") is Sign.USED
    assert sign_of_names([*helpers, NOT_USED[0][0]], "cuda", "fp32") is Sign.NOT_USED
    assert sign_of_names([], "cuda", "bf16") is Sign.NOTHING


def test_a_fp32_matmul_says_nothing_by_its_implementations_name() -> None:
    """oneDNN runs fp32 in an implementation compiled for bf16 too; it multiplies fp32 there."""
    assert sign_of_names(["matmul brg_matmul:avx512_core_bf16"], "cpu", "fp32") is Sign.NOTHING
    assert sign_of_names(["matmul brg_matmul:avx512_core_bf16"], "cpu", "bf16") is Sign.USED


def test_other_vendors_have_no_list() -> None:
    assert sign_of_names(["Cijk_Ailk_Bljk_BBS_BH_MT128x128x16"], "rocm", "bf16") is Sign.NOTHING
