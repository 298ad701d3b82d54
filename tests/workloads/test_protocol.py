"""The workload protocol: what it refuses, how batches are drawn and moved, and the loss factor."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.errors import BadInput
from ampscope.workloads.load import build_builtin, with_loss_factor
from ampscope.workloads.protocol import Workload, iterate, move

Pair = namedtuple("Pair", ["inputs", "targets"])
PARTS: dict[str, Any] = {
    "model": nn.Linear(4, 3),
    "batches": [(torch.ones(2, 4), torch.tensor([0, 2]))],
    "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("model", None, "`model` of the workload must be a torch.nn.Module, but it is None."),
        (
            "model",
            nn.Linear,
            "`model` of the workload must be a torch.nn.Module, but it is of type",
        ),
        ("batches", 3, "`batches` of the workload must be an iterable, or a function that"),
        ("loss", 0.5, "`loss` of the workload must be a function of (model, batch), but it is of"),
        ("optimizer", "adam", "`optimizer` of the workload must be a function of the parameters"),
        ("step", 1, "`step` of the workload must be a function, or None, but it is of type int."),
    ],
)
def test_a_workload_refuses_a_part_of_no_use(part: str, value: object, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        Workload(**{**PARTS, part: value})
    assert str(caught.value).startswith(message)


class MapStyle:
    """A dataset with __getitem__ alone."""

    def __getitem__(self, index: int) -> int:
        return [10, 20][index]


@pytest.mark.parametrize(
    "source", [[10, 20], lambda: iter([10, 20]), lambda: [10, 20], MapStyle(), range(10, 30, 10)]
)
def test_batches_that_can_be_started_again_go_round(source: object) -> None:
    workload = Workload(**{**PARTS, "batches": source})
    assert list(islice(iterate(workload), 5)) == [10, 20, 10, 20, 10]


@pytest.mark.parametrize("as_function", [False, True])
def test_a_generator_ends_with_a_sentence_after_its_last_batch(as_function: bool) -> None:
    generator = (number for number in (1, 2, 3))
    source = (lambda: generator) if as_function else generator
    batches = iterate(Workload(**{**PARTS, "batches": source, "name": "mine"}))
    assert list(islice(batches, 3)) == [1, 2, 3]
    with pytest.raises(BadInput, match=r"^`batches` of mine ended after 3 batches and cannot be"):
        next(batches)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"^`batches` of the workload is empty"),
        (
            lambda: 5,
            r"^`batches` of the workload is a function, and what it returned is of type int",
        ),
    ],
)
def test_no_batch_at_all_is_refused(source: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        next(iterate(Workload(**{**PARTS, "batches": source})))


def test_an_error_inside_the_users_data_keeps_its_type() -> None:
    def broken() -> Any:
        yield 1
        raise TypeError("from the dataset")

    batches = iterate(Workload(**{**PARTS, "batches": broken}))
    next(batches)
    with pytest.raises(TypeError, match="from the dataset"):
        next(batches)


def test_move_follows_containers_and_casts_floats_only() -> None:
    batch = {
        "pair": Pair(torch.ones(2), torch.tensor([1, 2])),
        "list": [torch.ones(1, dtype=torch.float64), (torch.tensor([True]), "text", None, 3)],
        "ordered": OrderedDict(x=torch.ones(1)),
        "default": defaultdict(list, {"y": torch.ones(1)}),
    }
    moved = move(batch, "cpu", torch.float16)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].inputs.dtype == torch.float16
    assert moved["pair"].targets.dtype == torch.int64
    assert moved["list"][0].dtype == torch.float16
    assert moved["list"][1][0].dtype == torch.bool
    assert moved["list"][1][1:] == ("text", None, 3)
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["default"]["y"].dtype == torch.float16
    assert moved["default"]["new"] == []
    assert batch["pair"].inputs.dtype == torch.float32  # the original is left as it was


def test_move_goes_to_the_device_and_keeps_dtypes_by_default() -> None:
    moved = move([torch.ones(2), {"a": torch.tensor([1])}], torch.device("meta"))
    assert moved[0].device.type == moved[1]["a"].device.type == "meta"
    assert moved[0].dtype == torch.float32


def test_move_casts_a_packed_sequence() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = move(packed, "cpu", torch.bfloat16)
    assert moved.data.dtype == torch.bfloat16
    assert moved.batch_sizes.tolist() == [2, 1, 1]


def train(workload: Workload, steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """The first step's gradients, and the weights after the last."""
    optimizer = workload.optimizer(workload.model.parameters())
    first: list[Tensor] = []
    for batch in islice(iterate(workload), steps):
        optimizer.zero_grad()
        workload.loss(workload.model, batch).backward()
        first = first or [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
        optimizer.step()
    return first, [p.detach().clone() for p in workload.model.parameters()]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-2, weight_decay=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-2, weight_decay=0.01),
    ],
)
def test_a_loss_factor_scales_gradients_and_leaves_the_training_as_it_was(optimizer: Any) -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        return Workload(**{**PARTS, "model": nn.Linear(4, 3), "optimizer": optimizer})

    gradients, weights = train(build())
    small_gradients, same_weights = train(with_loss_factor(build(), 2.0**-20))
    for large, small in zip(gradients, small_gradients, strict=True):
        assert torch.equal(large * 2.0**-20, small)
    for plain, factored in zip(weights, same_weights, strict=True):
        torch.testing.assert_close(plain, factored, rtol=1e-6, atol=1e-8)


def test_a_builtin_with_a_power_of_two_trains_bit_for_bit_as_without() -> None:
    _, plain = train(build_builtin("mlp"))
    _, factored = train(build_builtin("mlp", loss_factor=2.0**-16))
    assert all(torch.equal(a, b) for a, b in zip(plain, factored, strict=True))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_loss_factor_must_be_positive(factor: float) -> None:
    with pytest.raises(BadInput, match="The loss factor must be a positive number, but it is"):
        build_builtin("mlp", loss_factor=factor)


def test_a_workload_with_its_own_step_takes_no_loss_factor() -> None:
    def step(*parts: object) -> Tensor:
        raise NotImplementedError

    own = replace(Workload(**PARTS), step=step)
    assert with_loss_factor(own, 1.0) is own
    with pytest.raises(BadInput, match="has its own training step"):
        with_loss_factor(own, 0.5)
