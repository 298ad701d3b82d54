"""CUDA's autocast on a CPU, op by op, against CUDA's own autocast kernels.

The oracle needs no GPU: inside FakeTensorMode a tensor says that it lies on CUDA, so torch's own
C++ autocast kernels for CUDA run on it and decide the casts; only the arithmetic is left out. Each
op is run there and, as a rehearsal, on a real CPU tensor. Result dtypes, and the casts in the
trace, must be the same.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampscope.policy.autocast_lists import CUDA_LISTS
from ampscope.policy.rehearsal import cuda_autocast_lists

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SQUARE = (4, 4)
IMAGE = (1, 2, 4, 4)


def labels(x):
    return torch.zeros(4, dtype=torch.long, device=x.device)


def ones(x):
    return torch.ones(SQUARE, device=x.device)


# Name of the op in the lists (or of one in no list): a call, and the shapes of its arguments.
LISTED = {
    "acos": (torch.acos, [SQUARE]),
    "cosh": (torch.cosh, [SQUARE]),
    "erfinv": (torch.erfinv, [SQUARE]),
    "exp": (torch.exp, [SQUARE]),
    "log": (torch.log, [SQUARE]),
    "log2": (torch.log2, [SQUARE]),
    "log1p": (torch.log1p, [SQUARE]),
    "reciprocal": (torch.reciprocal, [SQUARE]),
    "rsqrt": (torch.rsqrt, [SQUARE]),
    "sinh": (torch.sinh, [SQUARE]),
    "prod": (torch.prod, [SQUARE]),
    "sum": (torch.sum, [SQUARE]),
    "addcdiv": (torch.addcdiv, [SQUARE] * 3),
    "addcmul": (torch.addcmul, [SQUARE] * 3),
    "atan2": (torch.atan2, [SQUARE] * 2),
    "addmm": (torch.addmm, [SQUARE] * 3),
    "matmul": (torch.matmul, [SQUARE] * 2),
    "mm": (torch.mm, [SQUARE] * 2),
    "dist": (torch.dist, [SQUARE] * 2),
    "cdist": (torch.cdist, [SQUARE] * 2),
    "dot": (torch.dot, [(4,)] * 2),
    "mv": (torch.mv, [SQUARE, (4,)]),
    "addmv": (torch.addmv, [(4,), SQUARE, (4,)]),
    "bmm": (torch.bmm, [(2, 4, 4)] * 2),
    "baddbmm": (torch.baddbmm, [(2, 4, 4)] * 3),
    "addbmm": (torch.addbmm, [SQUARE, (2, 4, 4), (2, 4, 4)]),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, [SQUARE] * 4),
    "cosine_similarity": (F.cosine_similarity, [SQUARE] * 2),
    "poisson_nll_loss": (F.poisson_nll_loss, [SQUARE] * 2),
    "l1_loss": (F.l1_loss, [SQUARE] * 2),
    "smooth_l1_loss": (F.smooth_l1_loss, [SQUARE] * 2),
    "mse_loss": (F.mse_loss, [SQUARE] * 2),
    "binary_cross_entropy": (F.binary_cross_entropy, [SQUARE] * 2),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, [SQUARE] * 2),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [SQUARE] * 2),
    "softmax.int": (lambda x: x.softmax(1), [SQUARE]),
    "log_softmax.int": (lambda x: x.log_softmax(1), [SQUARE]),
    "pow.Tensor_Scalar": (lambda x: x.pow(2), [SQUARE]),
    "pow.Tensor_Tensor": (torch.pow, [SQUARE] * 2),
    "pow.Scalar": (lambda x: torch.pow(2.0, x), [SQUARE]),
    "softplus": (F.softplus, [SQUARE]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [SQUARE, (4,), (4,)]),
    "native_layer_norm": (
        lambda x, w: torch.native_layer_norm(x, (4,), w, w, 1e-5),
        [SQUARE, (4,)],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [SQUARE, (4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "nll_loss": (lambda x: F.nll_loss(x, labels(x)), [SQUARE]),
    "hinge_embedding_loss": (lambda x: F.hinge_embedding_loss(x, ones(x)), [SQUARE]),
    "margin_ranking_loss": (lambda x, y: F.margin_ranking_loss(x, y, ones(x)), [SQUARE] * 2),
    "triplet_margin_loss": (F.triplet_margin_loss, [SQUARE] * 3),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, ones(x)), [SQUARE]),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, labels(x)), [SQUARE]),
    "pdist": (F.pdist, [SQUARE]),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), [SQUARE]),
    "logsumexp": (lambda x: x.logsumexp(1), [SQUARE]),
    "upsample_nearest2d": (lambda x: F.interpolate(x, scale_factor=2), [IMAGE]),
    "upsample_bilinear2d": (lambda x: F.interpolate(x, (8, 8), mode="bilinear"), [IMAGE]),
    "prod.dim_int": (lambda x: x.prod(1), [SQUARE]),
    "cumsum": (lambda x: x.cumsum(0), [SQUARE]),
    "cumprod": (lambda x: x.cumprod(0), [SQUARE]),
    "linalg_vector_norm": (torch.linalg.vector_norm, [SQUARE]),
    "linalg_matrix_norm": (torch.linalg.matrix_norm, [SQUARE]),
    "sum.dim_IntList": (lambda x: x.sum(1), [SQUARE]),
    "norm.Scalar": (lambda x: torch.ops.aten.norm.Scalar(x), [SQUARE]),
    "norm.ScalarOpt_dim": (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]), [SQUARE]),
    "bilinear": (F.bilinear, [SQUARE, SQUARE, (3, 4, 4)]),
    "cross": (lambda x, y: torch.cross(x, y, dim=0), [(3, 4)] * 2),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), [SQUARE] * 2),
    "scatter_add": (lambda x, y: x.scatter_add(0, labels(x).expand(4, 4), y), [SQUARE] * 2),
    "linear": (F.linear, [SQUARE, SQUARE, (4,)]),
    "conv2d": (F.conv2d, [IMAGE, (3, 2, 3, 3), (3,)]),
    "conv3d": (F.conv3d, [(1, 2, 4, 4, 4), (3, 2, 3, 3, 3)]),
    "conv_transpose2d.input": (F.conv_transpose2d, [IMAGE, (2, 3, 3, 3)]),
    "prelu": (F.prelu, [SQUARE, (1,)]),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), [SQUARE] * 2),
    "linalg_vecdot": (torch.linalg.vecdot, [SQUARE] * 2),
    "linalg_multi_dot": (lambda *xs: torch.linalg.multi_dot(xs), [SQUARE] * 3),
}
# In no list of CUDA's; the second group stands in the CPU's own.
UNLISTED = {
    "sigmoid": (torch.sigmoid, [SQUARE]),
    "tanh": (torch.tanh, [SQUARE]),
    "sqrt": (torch.sqrt, [SQUARE]),
    "mean": (torch.mean, [SQUARE]),
    "mul": (torch.mul, [SQUARE] * 2),
    "add": (torch.add, [SQUARE] * 2),
    "softmax with a dtype": (lambda x: x.softmax(1, dtype=FP64), [SQUARE]),
    "sum with a dtype": (lambda x: x.sum(dtype=FP64), [SQUARE]),
    "exp_": (lambda x: x.clone().exp_(), [SQUARE]),
    "exp.out": (lambda x: torch.exp(x, out=torch.empty_like(x)), [SQUARE]),
    "gelu": (F.gelu, [SQUARE]),
    "cat": (lambda x, y: torch.cat([x, y]), [SQUARE] * 2),
    "stack": (lambda x, y: torch.stack([x, y]), [SQUARE] * 2),
    "trace": (torch.trace, [SQUARE]),
    "quantile": (lambda x: torch.quantile(x, 0.5), [SQUARE]),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), [(1, 2, 4, 4, 4)]),
    "reflection_pad1d": (lambda x: F.pad(x, (1, 1), mode="reflect"), [(1, 2, 4)]),
    "conv2d.padding": (lambda x, w: F.conv2d(x, w, padding="same"), [IMAGE, (3, 2, 3, 3)]),
    "cross_entropy_loss": (lambda x: F.cross_entropy(x, labels(x), label_smoothing=0.1), [SQUARE]),
}
PATTERNS = {  # autocast's dtype, then the dtypes of the arguments, repeated
    "fp16": (FP16, [FP16]),
    "fp32": (FP16, [FP32]),
    "fp16 beside fp32": (FP16, [FP16, FP32]),
    "fp32 beside fp16": (FP16, [FP32, FP16]),
    "fp64": (FP16, [FP64]),
    "fp32 beside bf16 under bf16": (BF16, [FP32, BF16]),
    "fp16 under bf16": (BF16, [FP16]),
}
# CUDA's softmax reads half and writes fp32 in one kernel, where a CPU casts first. CUDA's rms_norm,
# which autocast leaves alone before torch 2.13, is one kernel as well.
CAST_INSIDE_ON_CUDA = {"softmax.int", "log_softmax.int", "cross_entropy_loss"}
if "aten::rms_norm" not in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
    CAST_INSIDE_ON_CUDA.add("rms_norm")


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen[args[0].dtype, result.dtype] += 1
        return result


def run(device, call, shapes, autocast_dtype, dtypes):
    """Dtypes of the results (or the RuntimeError's first line), and the casts that were made."""
    torch.manual_seed(0)
    args = [
        (torch.rand(shape, device=device) / 2 + 0.25).to(dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]
    # torch.autocast("cuda") switches itself off without a GPU; the switches below do not
    torch.set_autocast_dtype(device, autocast_dtype)
    torch.set_autocast_enabled(device, True)
    try:
        with Casts() as casts:
            result = call(*args)
    except RuntimeError as error:
        return str(error).partition("\n")[0], casts.seen
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()
    return [leaf.dtype for leaf in tree_leaves(result)], casts.seen


# Where autocast leaves rms_norm alone, torch warns that its dtypes differ.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("op", [*LISTED, *UNLISTED])
def test_rehearsal_casts_as_cuda_does(op):
    call, shapes = (LISTED | UNLISTED)[op]
    with cuda_autocast_lists():
        for pattern, (autocast_dtype, dtypes) in PATTERNS.items():
            with FakeTensorMode():
                cuda, cuda_casts = run("cuda", call, shapes, autocast_dtype, dtypes)
            rehearsal, rehearsal_casts = run("cpu", call, shapes, autocast_dtype, dtypes)
            if op == "trace" and "not implemented" in rehearsal:
                pytest.skip("torch has no trace of halves on a CPU before 2.13")
            assert rehearsal == cuda, pattern
            if op not in CAST_INSIDE_ON_CUDA:
                assert rehearsal_casts == cuda_casts, pattern


def test_table_covers_the_lists():
    listed = set().union(*CUDA_LISTS.values())
    assert listed >= LISTED.keys()
    assert len(LISTED) >= 0.6 * len(listed)
    assert not UNLISTED.keys() & listed
