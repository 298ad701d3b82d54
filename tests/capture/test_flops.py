"""FLOPs of ops that torch does not count, or counts wrongly, against counts made by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace

MACS = 2  # FLOPs of one multiplication and addition


def flops(model: nn.Module, x: Tensor) -> dict[str, int]:
    """By phase, of one step."""
    trace = OpTrace(ModelMap(model))
    with trace:
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    found = {"forward": 0, "backward": 0}
    for record in trace.take()[1]:
        found[record.phase] += record.flops
    assert trace.failures.note == ""
    return found


def convolution_by_hand(model: nn.Conv2d | nn.ConvTranspose2d, x: Tensor) -> int:
    """Every pair of an input and an output element that a tap of the filter joins, padding
    included: counted channel by channel and position by position."""
    out = model(x)
    is_transposed = isinstance(model, nn.ConvTranspose2d)
    moving = x if is_transposed else out  # whose positions the filter is laid on
    inside, outside = x.shape[1] // model.groups, out.shape[1] // model.groups
    pairs = 0
    for _sample, _y, _x in itertools.product(range(len(x)), *map(range, moving.shape[2:])):
        for _group in range(model.groups):
            pairs += inside * outside * model.kernel_size[0] * model.kernel_size[1]
    return MACS * pairs


CONVOLUTIONS = {
    "plain": nn.Conv2d(6, 10, 3, padding=1),
    "strided, dilated": nn.Conv2d(6, 10, 3, stride=2, dilation=2),
    "two groups": nn.Conv2d(6, 10, 3, groups=2, padding=1),
    "depthwise": nn.Conv2d(6, 6, 3, groups=6, padding=1),
    "depthwise, two each": nn.Conv2d(6, 12, (1, 3), groups=6),
    "transposed": nn.ConvTranspose2d(6, 10, 3, stride=2),
    "transposed, groups": nn.ConvTranspose2d(6, 10, 3, stride=2, groups=2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_backward_of_a_convolution_is_twice_its_forward(name: str) -> None:
    model = CONVOLUTIONS[name]
    x = torch.randn(2, 6, 9, 8, requires_grad=True)
    expected = convolution_by_hand(model, x)
    assert flops(model, x) == {"forward": expected, "backward": 2 * expected}
    # Data have no gradient: only the weight's is computed.
    assert flops(model, x.detach())["backward"] == expected


def test_depthwise_figures() -> None:
    """32 channels, 32 by 32, 3 by 3: 589,824 in the forward pass, where torch's formula gives
    19,464,192 for the backward pass."""
    model = nn.Conv2d(32, 32, 3, groups=32, padding=1)
    found = flops(model, torch.randn(1, 32, 32, 32, requires_grad=True))
    assert found == {"forward": 589_824, "backward": 1_179_648}


def recurrent_by_hand(gates: int, x: int, hidden: int, tokens: int, layers: int, ways: int) -> int:
    """Each token of each layer and direction meets both matrices of each gate."""
    total, width = 0, x
    for _layer in range(layers):
        total += ways * tokens * gates * hidden * (width + hidden)
        width = hidden * ways
    return MACS * total


RECURRENT = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3), "rnn": (nn.RNN, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # oneDNN's kernel, and cells
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, ways: int, dtype: torch.dtype) -> None:
    kind, gates = RECURRENT[name]
    model = kind(5, 7, num_layers=2, bidirectional=ways == 2).to(dtype)
    x = torch.randn(3, 4, 5, dtype=dtype, requires_grad=True)
    expected = recurrent_by_hand(gates, 5, 7, 12, 2, ways)
    found = flops(model, x)
    assert found["forward"] == expected
    # The initial state has no gradient, so the first token's part of it may be left out.
    first = MACS * 2 * ways * 4 * gates * 7 * 7
    assert 2 * expected - 2 * first <= found["backward"] <= 2 * expected


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_cells_count_their_matmuls_once(name: str) -> None:
    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[name](5, 7)
    gates = RECURRENT[name][1]
    assert flops(cell, torch.randn(4, 5))["forward"] == MACS * 4 * gates * 7 * (5 + 7)


def test_cudnn_ops_by_their_arguments() -> None:
    """They need a GPU to run; their formulas read shapes alone."""
    trace = OpTrace(ModelMap(nn.Identity()))
    x = torch.empty(3, 4, 5, device="meta")
    weights = [torch.empty(28, n, device="meta") for n in (5, 7)]
    weights += [torch.empty(28, device="meta") for _ in range(2)]
    expected = recurrent_by_hand(4, 5, 7, 12, 1, 1)
    aten = torch.ops.aten
    empty = torch.empty(0, device="meta")
    forward = (x, weights, 4, None, empty, None, 2, 7, 0, 1, False, 0.0, True, False, [], None)
    trace.record(aten._cudnn_rnn.default, forward, {}, (x,))
    backward = (x, weights, 4, empty, empty, None, x, x, None, None, 2, 7, 0, 1, False, 0.0, True,
                False, [], None, empty, [True, True, True, True])  # fmt: skip
    trace.record(aten._cudnn_rnn_backward.default, backward, {}, (x,))
    trace.record(aten.lstm.input, (x, [empty, empty], weights, True, 1, 0.0, True, False, False),
                 {}, (x,))  # fmt: skip
    counted = {record.op: record.flops for record in trace.take()[1]}
    assert counted == {
        "aten._cudnn_rnn": expected,
        "aten._cudnn_rnn_backward": 2 * expected,
        "aten.lstm": expected,
    }
