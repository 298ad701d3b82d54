"""Tensor Core arithmetic against exact references: fp64, and sums small enough to do by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.policy.rehearsal import cuda_autocast_lists
from ampscope.policy.tensor_core import TensorCoreMode, has_bf16_instructions

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
native = pytest.mark.skipif(not has_bf16_instructions(), reason="this CPU has no bf16")


def emulated(call, *args):
    with TensorCoreMode(native_bf16=False):
        return call(*args)


def causal_attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


LAYERS = [
    (F.linear, [(6, 32), (16, 32), (16,)]),
    (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    (causal_attention, [(1, 2, 8, 16)] * 3),
]


def half(dtype, *shape):
    return torch.randn(shape).to(dtype)


@pytest.fixture(autouse=True)
def _seeded_on_one_thread():
    # these tensors are tiny: two threads only wait for each other, for seconds on a busy machine
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("dtype", "native_bf16"), [(FP16, True), (BF16, False), pytest.param(BF16, True, marks=native)]
)
@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (torch.mm, [(33, 512), (512, 17)]),
        (torch.addmm, [(17,), (33, 512), (512, 17)]),
        (torch.bmm, [(3, 8, 64), (3, 64, 9)]),
        (torch.baddbmm, [(3, 8, 9), (3, 8, 64), (3, 64, 9)]),
        (torch.mv, [(33, 512), (512,)]),
        (F.linear, [(5, 7, 64), (32, 64), (32,)]),
        (F.conv2d, [(2, 8, 9, 9), (16, 8, 3, 3)]),
        (F.conv_transpose2d, [(2, 8, 5, 5), (8, 4, 3, 3)]),
        (F.scaled_dot_product_attention, [(2, 2, 16, 32)] * 3),
    ],
)
def test_result_is_the_exact_one_rounded_once(call, shapes, dtype, native_bf16):
    args = [half(dtype, *shape) for shape in shapes]
    with TensorCoreMode(native_bf16=native_bf16):
        result = call(*args)
    exact = call(*[arg.double() for arg in args])
    assert result.dtype is dtype
    # half a unit in the last place is the rounding; the rest is fp32's own error where terms cancel
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 2e-6 * max(shapes[0][-1], 9 * 8) ** 0.5
    if dtype is BF16 and native_bf16 and call is F.scaled_dot_product_attention:
        bound = bound + torch.finfo(dtype).eps  # the native kernel rounds the probabilities to bf16
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_long_sums_do_not_stagnate(dtype):
    ones = torch.ones(1, 8192, dtype=dtype)
    # an fp16 accumulator stops at 2048, a bf16 one at 256
    assert emulated(torch.mm, ones, ones.T).item() == 8192
    assert emulated(F.conv1d, ones[None], ones[None]).item() == 8192


def test_bias_is_added_before_rounding_by_addmm_and_after_it_by_convolution():
    ones, one = torch.ones(1, 2049, dtype=FP16), torch.ones(1, dtype=FP16)
    # 2049 + 1 = 2050 is an fp16 number; 2049 alone rounds to 2048, and 2048 + 1 too
    assert emulated(torch.addmm, one, ones, ones.T).item() == 2050
    assert emulated(F.conv1d, ones[None], ones[None], one).item() == 2048


def test_result_beyond_65504_is_inf():
    x = torch.full((4, 4), 200.0, dtype=FP16)
    assert torch.isinf(emulated(torch.mm, x, x)).all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        *LAYERS,
        (lambda x: F.avg_pool3d(x, 2), [(1, 2, 4, 4, 4)]),
        (lambda x: F.interpolate(x, (3, 3), mode="bilinear", antialias=True), [(1, 2, 6, 6)]),
        (lambda x: F.interpolate(x, (3, 3), mode="bicubic", antialias=True), [(1, 2, 6, 6)]),
        (lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.long)), [(4, 4)]),
        (lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 4, dtype=torch.long)), [(4, 4)]),
    ],
)
def test_gradients_are_half_and_close_to_exact(call, shapes, dtype):
    args = [half(dtype, *shape).requires_grad_() for shape in shapes]
    exact_args = [arg.detach().double().requires_grad_() for arg in args]
    with TensorCoreMode(native_bf16=False):
        output = call(*args)
        upstream = half(dtype, *output.shape)
        grads = torch.autograd.grad(output, args, upstream)
    exact_grads = torch.autograd.grad(call(*exact_args), exact_args, upstream.double())
    for grad, exact in zip(grads, exact_grads, strict=True):
        assert grad.dtype is dtype
        tolerance = 4 * torch.finfo(dtype).eps * exact.abs().max().item()
        torch.testing.assert_close(grad.double(), exact, atol=tolerance, rtol=0)


TENSOR_CORE_OPS = {"addmm", "mm", "bmm", "convolution", "convolution_backward"}


class Seen(TorchDispatchMode):
    """Dtypes of the first argument of matmuls, convolutions and attention, by op."""

    def __init__(self):
        super().__init__()
        self.ops = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in TENSOR_CORE_OPS or "attention" in name:
            self.ops[name] = args[0].dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("call", "shapes"), [*LAYERS, (torch.bmm, [(2, 4, 4)] * 2)])
def test_trace_inside_sees_half_and_the_kernels_below_are_fp32(call, shapes):
    args = [half(FP16, *shape).requires_grad_() for shape in shapes]
    with Seen() as below, TensorCoreMode(), Seen() as inside:
        call(*args).sum().backward()
    assert set(inside.ops.values()) == {FP16}
    assert below.ops == dict.fromkeys(inside.ops, FP32)


def test_native_bf16_is_left_to_the_cpu():
    x = half(BF16, 4, 4)
    with Seen() as below, TensorCoreMode(native_bf16=True):
        x @ x
        pooled = F.avg_pool3d(half(BF16, 1, 1, 2, 2, 2), 2)
    assert below.ops == {"mm": BF16}
    assert pooled.dtype is BF16  # no CPU kernel, so this one is computed in fp32 all the same


def test_emulated_bf16_keeps_subnormals():
    tiny = torch.full((32, 32), 2.0**-128, dtype=BF16)
    identity = torch.eye(32, dtype=BF16)
    assert torch.equal(emulated(torch.mm, tiny, identity), tiny)


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_wider_types_are_untouched(dtype):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 5)).to(dtype)
    x = torch.randn(2, 2, 6, 6, dtype=dtype)
    assert torch.equal(emulated(model, x), model(x))


@pytest.mark.parametrize("call", [torch.mm, torch.dot, F.linear])
def test_mixed_dtypes_raise_as_ever(call):
    x = torch.ones(4) if call is torch.dot else torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"same dtype|expected"):
        emulated(call, x.half(), x)


def test_op_that_cuda_lacks_too_still_raises():
    with pytest.raises((RuntimeError, NotImplementedError), match="Half"):
        emulated(torch.cdist, torch.ones(4, 4, dtype=FP16), torch.ones(4, 4, dtype=FP16))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_rnn_trains_under_the_whole_rehearsal(kind):
    model = nn.ModuleDict({"rnn": kind(8, 16), "head": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(3, 8, 8)
    target = x.mean((0, 2))
    losses = []
    with cuda_autocast_lists(), TensorCoreMode():
        for _ in range(20):
            with torch.autocast("cpu", FP16):
                output = model["head"](model["rnn"](x)[0][-1])
                loss = F.mse_loss(output[:, 0], target)
            assert (output.dtype, loss.dtype) == (FP16, FP32)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
