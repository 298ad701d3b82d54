"""Memory of a step by what it is for, against sums by hand and what autograd itself saves.

Batches of another size, too: what is repeated, and what has no batch dimension.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.errors import BadInput
from ampscope.measure.live_bytes import LiveBytes
from ampscope.measure.training_steps import batch_size, memory_split, resized
from ampscope.runner.training import ObservedScaler, ProbeTraining
from ampscope.workloads.protocol import Workload

WIDTH, ROWS = 64, 32


class Chain(nn.Module):
    """Sigmoids save their output, ROWS x WIDTH numbers each; nothing else is kept."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(self.length):
            x = torch.sigmoid(x)
        return x


def training(
    model: nn.Module, batch: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
) -> ProbeTraining:
    workload = Workload(
        model=model,
        batches=[batch],
        loss=lambda m, b: m(b).sum(),
        optimizer=lambda params: optimizer(params, lr=0.1),  # type: ignore[call-arg]  # every one
    )
    device = torch.device("cpu")
    return ProbeTraining(
        workload, model, workload.optimizer(model.parameters()),
        ObservedScaler("cpu", enabled=False),
        lambda: torch.autocast("cpu", enabled=False), device, "fp32", lambda b: b, lambda b: b,
    )  # fmt: skip


def saved_bytes(run: Callable[[], Tensor], known: set[int]) -> int:
    """Bytes of distinct storages that autograd saves, those in ``known`` left out."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run()
    del loss
    return sum(seen.values())


@pytest.mark.parametrize("length", [4, 7])
def test_activations_of_a_chain_are_counted_to_the_byte(length: int) -> None:
    model, batch = Chain(length), torch.randn(ROWS, WIDTH)
    split = memory_split(training(model, batch), batch, "fp32", ROWS)
    one = ROWS * WIDTH * 4
    assert split.weights == WIDTH * 4
    assert split.inputs == one
    # Every sigmoid keeps its output; the product before the first frees its own when it returns,
    # so at the peak one more than is saved can be alive.
    assert length * one <= split.activations <= (length + 2) * one
    assert split.cast_copies == split.optimizer_state == 0


def test_activations_after_a_forward_pass_are_what_autograd_saves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    batch = torch.randn(ROWS * 8, WIDTH)
    known = {t.untyped_storage().data_ptr() for t in (batch, *model.parameters())}
    saved = saved_bytes(lambda: model(batch).sum(), known)
    assert saved == 11 * ROWS * 8 * WIDTH * 4  # every input but the first
    with LiveBytes(model, torch.optim.SGD(model.parameters()), batch) as live:
        loss = model(batch).sum()
        assert live.now["activations"] == saved + loss.nbytes


def test_adam_keeps_two_numbers_a_weight_from_the_second_step_on() -> None:
    model, batch = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    adam = training(model, batch, torch.optim.Adam)
    memory_split(adam, batch, "fp32", ROWS)
    split = memory_split(adam, batch, "fp32", ROWS)
    weights = WIDTH * WIDTH + WIDTH
    assert split.weights == weights * 4
    assert split.optimizer_state == 2 * weights * 4 + 2 * 4  # and a step number a parameter


def test_gradients_are_told_from_other_temporaries() -> None:
    model, batch = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LiveBytes(model, optimizer, batch) as live:
        model(batch).sum().backward()
        assert live.now["gradients"] == (WIDTH * WIDTH + WIDTH) * 4
    assert live.peak == sum(live.at_peak.values())


def test_autocast_copies_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    batch = torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    with LiveBytes(model, optimizer, batch) as live:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
            # A bf16 copy of every weight and of the input; the products are bf16 already.
            assert live.now["cast_copies"] == 6 * WIDTH * WIDTH * 2 + ROWS * WIDTH * 2
        assert live.now["activations"] == 6 * ROWS * WIDTH * 2
    assert out.dtype is torch.bfloat16


def test_nothing_stays_behind() -> None:
    model, batch = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LiveBytes(model, optimizer, batch) as live:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert sum(live.now[k] for k in ("activations", "cast_copies", "gradients")) == 0
    assert not model.weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # torch's own
    assert not optimizer._optimizer_step_pre_hooks


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("samples", [1, 3, 5, 12])
def test_a_batch_gets_another_size_and_keeps_its_form(samples: int) -> None:
    rows = torch.arange(5)
    batch = Pair({"image": torch.randn(5, 2), "label": rows}, [rows.float(), "name", 3])
    made = next(resized(iter([batch]), samples))
    assert isinstance(made, Pair)
    assert made.x["label"].tolist() == [i % 5 for i in range(samples)]
    assert made.y[0].shape == (samples,)
    assert made.y[1:] == ["name", 3]
    assert batch_size(made) == samples


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(4, 2), torch.ones(7)), "begin with different numbers"),
        ({"text": "no tensor"}, "no tensor with a dimension"),
        (torch.tensor(1.0), "no tensor with a dimension"),
        (torch.ones(0, 3), "holds no sample"),
        (nn.utils.rnn.pack_sequence([torch.ones(3, 2)]), "PackedSequence"),
    ],
)
def test_a_batch_without_a_batch_dimension_is_named(batch: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        batch_size(batch, "mine.py")
