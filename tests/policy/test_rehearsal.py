"""What a CPU rehearsal of CUDA's autocast does beside the casts: range, caching, undoing, RNNs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.policy.autocast_lists import BANNED_MESSAGE
from ampscope.policy.rehearsal import cuda_autocast_lists

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def fp16():
    with cuda_autocast_lists(), torch.autocast("cpu", FP16):
        yield


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


# Every result is beyond 65504, so that a computation in fp16 would give inf.
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.exp(torch.tensor([12.0], dtype=FP16)), 162754.79),
        (lambda: torch.pow(torch.tensor([300.0], dtype=FP16), 2), 90000.0),
        (lambda: torch.sum(torch.full([4096], 64.0, dtype=FP16)), 262144.0),
        (lambda: torch.prod(torch.full([2], 300.0, dtype=FP16)), 90000.0),
        (lambda: torch.cumsum(torch.full([2], 6e4, dtype=FP16), 0)[1], 120000.0),
        (lambda: torch.full([4], 6e4, dtype=FP16).norm(), 120000.0),
        (lambda: torch.full([4], 6e4, dtype=FP16).norm(dim=0), 120000.0),
        (lambda: torch.ops.aten.norm.Scalar(torch.full([4], 6e4, dtype=FP16)), 120000.0),
        (lambda: torch.linalg.vector_norm(torch.full([4], 6e4, dtype=FP16)), 120000.0),
        (lambda: torch.cosh(torch.tensor([12.0], dtype=FP16)), 81377.4),
        (lambda: torch.reciprocal(torch.tensor([2.0**-17], dtype=FP16)), 131072.0),
        (lambda: F.mse_loss(torch.full([4], 3e2, dtype=FP16), torch.zeros(4)), 90000.0),
    ],
)
def test_listed_op_is_computed_in_fp32(fp16, call, expected):
    result = call()
    assert result.dtype is FP32
    assert result.item() == pytest.approx(expected, rel=1e-3)


def test_an_op_that_this_torch_does_not_cast_on_cuda_is_not_cast_in_a_rehearsal(monkeypatch):
    """Of one release's lists another's dispatcher may hold fewer: rms_norm came with torch 2.13."""
    asked = torch._C._dispatch_get_registrations_for_dispatch_key

    def of_an_older_release(key):
        gone = {"aten::rms_norm", "aten::exp"} if key == "AutocastCUDA" else set()
        return [name for name in asked(key) if name not in gone]

    monkeypatch.setattr(
        torch._C, "_dispatch_get_registrations_for_dispatch_key", of_an_older_release
    )
    x = torch.ones(4, 4, dtype=FP16)
    with cuda_autocast_lists(), torch.autocast("cpu", FP16):
        assert F.rms_norm(x, (4,)).dtype is FP16
        assert torch.exp(x).dtype is FP16
        assert torch.log(x).dtype is FP32


def test_half_ops_overflow_as_on_cuda(fp16):
    big = torch.full((4, 4), 300.0)
    assert torch.isinf(big @ big).all()
    assert torch.isinf(torch.einsum("ij,jk->ik", big, big)).all()
    assert torch.isinf(big.half() * big.half()).all()


def test_without_autocast_nothing_is_cast():
    x = torch.ones(4, dtype=FP16)
    with cuda_autocast_lists():
        assert torch.exp(x).dtype is FP16
        assert F.binary_cross_entropy(x, x).dtype is FP16


def test_autocast_disabled_inside_is_respected(fp16):
    x = torch.ones(4, 4)
    with torch.autocast("cpu", enabled=False):
        assert torch.einsum("ij,jk->ik", x, x).dtype is FP32
        assert torch.exp(x.half()).dtype is FP16
    assert torch.einsum("ij,jk->ik", x, x).dtype is FP16


def dispatcher_state():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return {name: torch._C._dispatch_dump(name) for name in {*names, "aten::exp"}}


def test_exit_puts_the_dispatcher_back():
    before = dispatcher_state()
    with cuda_autocast_lists():
        assert dispatcher_state() != before
    assert dispatcher_state() == before
    assert torch.clear_autocast_cache is torch._C.clear_autocast_cache


def test_exit_by_an_exception_puts_the_dispatcher_back():
    before = dispatcher_state()
    with pytest.raises(ZeroDivisionError), cuda_autocast_lists():
        raise ZeroDivisionError
    assert dispatcher_state() == before


def test_nested_rehearsals_end_with_the_outer_one():
    x = torch.ones(4, dtype=FP16)
    with torch.autocast("cpu", FP16):
        with cuda_autocast_lists():
            with cuda_autocast_lists():
                assert torch.exp(x).dtype is FP32
            assert torch.exp(x).dtype is FP32
        assert torch.exp(x).dtype is FP16


def test_banned_op_raises_cudas_words(fp16):
    x = torch.full([4], 0.5)
    with pytest.raises(RuntimeError) as raised:
        nn.BCELoss()(x, x)
    assert str(raised.value) == BANNED_MESSAGE


def test_autocast_survives_an_op_that_raises(fp16):
    with pytest.raises(RuntimeError):
        torch.einsum("ij,jk->ik", torch.ones(2, 3), torch.ones(2, 3))
    assert torch.is_autocast_enabled("cpu")
    assert torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2)).dtype is FP16


@pytest.mark.parametrize(("cache_enabled", "casts"), [(True, 1), (False, 2)])
def test_weight_used_twice_is_cast_once_if_the_cache_is_on(cache_enabled, casts):
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4, dtype=FP16)
    autocast = torch.autocast("cpu", FP16, cache_enabled=cache_enabled)
    with cuda_autocast_lists(), autocast, Casts() as seen:
        first = torch.einsum("ij,jk->ik", x, weight)
        second = torch.einsum("ij,jk->ik", x, weight)
    assert seen.count == casts
    (first + second).sum().backward()
    assert weight.grad.dtype is FP32
    assert torch.equal(weight.grad, torch.full((4, 4), 8.0))


def test_only_leaves_that_need_a_gradient_are_cached(fp16):
    x = torch.ones(4, 4, dtype=FP16)
    for not_cached in (torch.ones(4, 4), nn.Parameter(torch.ones(4, 4)) * 2):
        with Casts() as seen:
            torch.einsum("ij,jk->ik", x, not_cached)
            torch.einsum("ij,jk->ik", x, not_cached)
        assert seen.count == 2


# einsum is cast by a kernel of the rehearsal, linear by torch's own; each has its cache
@pytest.mark.parametrize("call", [F.linear, partial(torch.einsum, "ij,kj->ik")])
def test_updated_weight_is_cast_anew_in_the_next_region(call):
    weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    with cuda_autocast_lists():
        for step in range(3):
            with torch.autocast("cpu", FP16):
                assert call(x, weight).item() == 1 + step
            with torch.no_grad():
                weight.add_(1)


def test_explicit_clearing_forgets_cast_weights(fp16):
    weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    torch.einsum("ij,jk->ik", x, weight)
    weight.data.fill_(3)
    assert torch.einsum("ij,jk->ik", x, weight).item() == 1  # the cache does not watch the weight
    torch.clear_autocast_cache()
    assert torch.einsum("ij,jk->ik", x, weight).item() == 3


def test_promote_refuses_the_other_half_as_cuda_does(fp16):
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.dot(torch.ones(2, dtype=BF16), torch.ones(2, dtype=FP16))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_rnn_runs_in_fp16_and_trains(kind, dtype):
    rnn, x = kind(4, 3, num_layers=2, bidirectional=True), torch.randn(5, 2, 4)
    with cuda_autocast_lists(), torch.autocast("cpu", dtype):
        y, _ = rnn(x)
    assert y.dtype is FP16  # cuDNN's wrapper casts to fp16 whatever autocast's dtype is
    torch.testing.assert_close(y.float(), rnn(x)[0], atol=2e-3, rtol=0)
    y.float().sum().backward()
    assert all(p.grad.dtype is FP32 and p.grad.isfinite().all() for p in rnn.parameters())


def test_packed_sequence_runs_in_fp16(fp16):
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
    assert nn.LSTM(4, 3)(packed)[0].data.dtype is FP16
