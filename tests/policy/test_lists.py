"""The autocast lists against torch itself: its header, its dispatcher, and traces of real ops."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.policy.autocast_lists import (
    CPU_LISTS,
    CUDA_LISTS,
    LISTED_OP_OF_KERNEL,
    TORCH_VERSION,
    list_of,
)
from benchmarks.remake_autocast_lists import differences, installed_header, parse_header

of_the_data = pytest.mark.skipif(
    torch.__version__.split("+")[0] != TORCH_VERSION,
    reason=f"the data are of torch {TORCH_VERSION}; remake_autocast_lists.py compares another one",
)


def registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


@of_the_data
def test_lists_are_those_of_torchs_header():
    assert differences(parse_header(installed_header().read_text()), CUDA_LISTS) == []


@of_the_data
def test_cuda_lists_name_every_op_that_the_dispatcher_casts_on_cuda():
    # _cudnn_rnn is registered by cuDNN's own file, which only a CUDA build compiles
    listed = set().union(*CUDA_LISTS.values())
    assert registered("AutocastCUDA") | {"_cudnn_rnn"} == listed


@of_the_data
def test_cpu_lists_name_every_op_that_the_dispatcher_casts_on_a_cpu():
    assert registered("AutocastCPU") == set().union(*CPU_LISTS.values())


@pytest.mark.parametrize("lists", [CUDA_LISTS, CPU_LISTS], ids=["cuda", "cpu"])
def test_no_op_stands_in_two_lists(lists):
    assert sum(map(len, lists.values())) == len(set().union(*lists.values()))


def test_header_is_parsed_with_and_without_overloads():
    header = """
#define AT_FORALL_LOWER_PRECISION_FP(_) \\
  _(mm)
#define AT_FORALL_FP32(_) \\
  _(exp)                  \\
  _(pow, Tensor_Scalar)
#define AT_FORALL_FP32_SET_OPT_DTYPE(_) \\
  _(softmax, int)
#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(_) \\
  _(ADD_NS(norm),                                   \\
    "norm.Scalar",                                  \\
    Tensor(const Tensor&, const Scalar&),           \\
    fp32_append_dtype)
#define AT_FORALL_PROMOTE(_) \\
  _(dot)

#define UNRELATED(_) _(cat)
"""
    assert parse_header(header) == {
        "lower_precision_fp": {"mm"},
        "fp32": {"exp", "pow.Tensor_Scalar"},
        "fp32_set_opt_dtype": {"softmax.int"},
        "fp32_append_dtype": {"norm.Scalar"},
        "promote": {"dot"},
    }


def test_header_without_a_macro_is_refused():
    with pytest.raises(ValueError, match="AT_FORALL_LOWER_PRECISION_FP"):
        parse_header("#define SOMETHING_ELSE(_) _(mm)")


def test_differences_name_the_side_that_has_the_op():
    header = {"promote": frozenset({"dot", "kron"})}
    data = {"promote": frozenset({"dot", "vdot"})}
    assert differences(header, data) == [
        "promote: kron is in the header only",
        "promote: vdot is in the data only",
    ]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("softmax", "fp32_set_opt_dtype"),
        ("softmax.int", "fp32_set_opt_dtype"),
        ("aten.softmax.int", "fp32_set_opt_dtype"),
        ("aten::softmax.int", "fp32_set_opt_dtype"),
        ("aten._softmax.default", "fp32_set_opt_dtype"),
        ("softmax.int_out", None),
        ("aten.exp.default", "fp32"),
        ("aten.exp.out", None),
        ("aten.exp_.default", None),
        ("aten.pow.Tensor_Scalar", "fp32"),
        ("aten.sum.default", "fp32_set_opt_dtype"),
        ("aten.norm.Scalar", "fp32_append_dtype"),
        ("norm", "fp32_append_dtype"),
        ("aten.addmm.default", "lower_precision_fp"),
        ("aten.addcmul.default", "promote"),
        ("binary_cross_entropy", "banned"),
        ("aten.native_batch_norm.default", None),
        ("aten.mul.Tensor", None),
        ("relu", None),
    ],
)
def test_list_of(op, expected):
    assert list_of(op) == expected


class KernelNames(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def labels(x):
    return torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.long)


@pytest.mark.parametrize(
    ("kernel", "call", "shape"),
    [
        ("_softmax", lambda x: x.softmax(1), (4, 4)),
        ("_log_softmax", lambda x: x.log_softmax(1), (4, 4)),
        ("native_group_norm", lambda x: F.group_norm(x, 2), (2, 4, 3)),
        ("nll_loss_forward", lambda x: F.nll_loss(x, labels(x)), (4, 4)),
        ("nll_loss2d_forward", lambda x: F.nll_loss(x, labels(x)), (2, 4, 3, 3)),
        (
            "multilabel_margin_loss_forward",
            lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 4, dtype=torch.long)),
            (4, 4),
        ),
        ("_cdist_forward", lambda x: torch.cdist(x, x), (4, 4)),
        ("_pdist_forward", F.pdist, (4, 4)),
        ("_prelu_kernel", lambda x: F.prelu(x, torch.ones(1)), (4, 4)),
        ("_trilinear", lambda x: F.bilinear(x, x, torch.ones(2, 4, 4)), (4, 4)),
        ("grid_sampler_2d", lambda x: torch.grid_sampler(x, x.mT, 0, 0, False), (1, 2, 2, 2)),
        (
            "grid_sampler_3d",
            lambda x: torch.grid_sampler(x, torch.zeros(1, 2, 2, 2, 3), 0, 0, False),
            (1, 2, 2, 2, 2),
        ),
        ("linalg_cross", lambda x: torch.cross(x, x, dim=0), (3, 4)),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            lambda x: F.scaled_dot_product_attention(x, x, x),
            (1, 2, 4, 8),
        ),
    ],
)
def test_trace_shows_the_kernel_of_a_listed_op(kernel, call, shape):
    assert kernel in LISTED_OP_OF_KERNEL
    with KernelNames() as trace:
        call(torch.rand(shape))
    assert kernel in trace.seen


@pytest.mark.parametrize("module", ["autocast_lists", "op_lists"])
def test_data_is_read_without_torch(module):
    check = f"import ampscope.policy.{module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
