"""Norms and copies of many tensors at once: right numbers, and never memory that is gone."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture import tensor_table
from ampscope.capture.tensor_table import UNKNOWN, Copier, norms
from ampscope.watcher.flight import FlightRecorder
from tests.helpers.watched import recorded

MOST = 1 << 17
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def test_this_torch_can_be_asked() -> None:
    assert tensor_table.works()


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_are_those_of_fp64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(n).to(dtype) for n in (1, 3, 17, 1000, 40_001)]
    tensors += [torch.randn(4, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last)]
    tensors += [torch.randn(7, 5).to(dtype).t(), torch.randn(9, 4).to(dtype)[3:], tensors[0][0]]
    tensors += [torch.full((9,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)]
    tensors += [torch.full((9,), -torch.finfo(dtype).max, dtype=dtype)]
    found, unknown = norms(tensors, MOST)
    assert unknown == 0
    for tensor, norm in zip(tensors, found, strict=True):
        values = tensor.double().numpy().reshape(-1)
        largest = np.abs(values).max()
        if not 1e-150 < largest < 1e150:
            continue  # fp64's extremes: squares leave fp64, as they do in torch
        exact = largest * np.sqrt(np.square(values / largest).sum())
        assert norm == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_norm_is_not_finite_where_a_number_is_not(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(1001, dtype=dtype)
    tensor[777] = bad
    found = norms([torch.ones(3), tensor], MOST)[0]
    assert np.isnan(found[1]) if bad != bad else found[1] == np.inf
    assert found[0] == np.sqrt(3)


class Wrapped(Tensor):
    """A class of another library."""


def given_back() -> Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


OTHERS: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "subclass": lambda: torch.ones(3).as_subclass(Wrapped),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "given back": given_back,
    "overlapping": lambda: torch.ones(1).expand(5),
    "gaps": lambda: torch.ones(5, 5)[:, 1],
    "integers": lambda: torch.ones(3, dtype=torch.int64),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "8 bits": lambda: torch.ones(3).to(torch.float8_e5m2),
    "large": lambda: torch.ones(MOST + 1),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "none": lambda: torch.ones(0),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_the_door(name: str) -> None:
    other = OTHERS[name]()
    found, unknown = norms([torch.ones(4), other, torch.ones(9)], MOST)
    assert found.tolist() == [2.0, UNKNOWN, 3.0]
    assert unknown == 1
    assert not Copier([other]).is_possible or name in ("integers", "large")


def replaced(tensor: Tensor) -> None:
    tensor.data = torch.full_like(tensor, 2.0)


def set_elsewhere(tensor: Tensor) -> None:
    tensor.set_(torch.full((tensor.numel() + 3,), 2.0).untyped_storage(), 3, tensor.shape)


def grown(tensor: Tensor) -> None:
    tensor.resize_(400_000)  # its old memory is given back
    tensor.fill_(2.0)


def emptied(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def swapped(tensor: Tensor) -> None:
    other = torch.full_like(tensor, 2.0)
    torch.utils.swap_tensors(tensor, other)


def reshaped(tensor: Tensor) -> None:
    tensor.fill_(2.0).resize_(2, tensor.numel() // 2)


def widened(tensor: Tensor) -> None:
    tensor.data = torch.full(tensor.shape, 2.0, dtype=torch.float64)


ATTACKS = (replaced, set_elsewhere, grown, emptied, swapped, reshaped, widened)


@pytest.mark.parametrize("attack", ATTACKS)
def test_memory_that_moves_between_calls_is_noticed(attack: Callable[[Tensor], None]) -> None:
    for _ in range(20):
        tensor = torch.ones(4096)
        assert norms([tensor], 1 << 20)[0][0] == 64.0
        attack(tensor)
        rubbish = [torch.full((4096,), float("nan")) for _ in range(8)]  # where it may have been
        found, unknown = norms([tensor], 1 << 20)
        expected = UNKNOWN if attack is emptied else 2.0 * tensor.numel() ** 0.5
        assert found[0] == pytest.approx(expected, rel=1e-12)
        assert unknown == (attack is emptied)
        del rubbish


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_copy_of_memory_that_moved_is_refused(attack: Callable[[Tensor], None]) -> None:
    sources = [torch.ones(4096), torch.arange(3), torch.ones((), dtype=torch.float16)]
    copier = Copier(sources)
    copies = [torch.zeros_like(source) for source in sources]
    targets = copier.targets(copies)
    assert targets is not None
    sources[1] += 5
    assert copier.copy_to(targets)
    for copy, source in zip(copies, sources, strict=True):
        assert torch.equal(copy, source)
    attack(sources[0])
    sources[1] += 5
    assert not copier.copy_to(targets)
    assert copies[1].tolist() == [5, 6, 7]
    assert copies[0].tolist() == [1.0] * 4096


def test_memory_that_holds_the_opposites_is_left_to_torch() -> None:
    negative = torch._neg_view(torch.arange(1.0, 5.0))
    assert not Copier([negative]).is_possible
    assert Copier([torch.arange(4.0)]).is_possible


def test_targets_of_another_shape_are_refused() -> None:
    copier = Copier([torch.ones(4, 3)])
    assert copier.targets([torch.ones(3, 4)]) is None
    assert copier.targets([torch.ones(4, 3).double()]) is None
    assert copier.targets([torch.ones(4, 3)]) is not None


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def moved_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def loaded(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def moved_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()


def set_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.set_(buffer.clone().untyped_storage(), 0, buffer.shape)


def new_buffers(model: nn.Module) -> None:
    model[1].running_mean = model[1].running_mean.clone()


def new_module(model: nn.Module) -> None:
    state = model[1].state_dict()
    weight, bias = model[1].weight, model[1].bias
    model[1] = nn.BatchNorm1d(8)
    model[1].load_state_dict(state)
    model[1].weight, model[1].bias = weight, bias


CHANGES = (moved_parameters, loaded, moved_buffers, set_buffers, new_buffers, new_module)


@pytest.mark.parametrize("change", CHANGES)
def test_a_training_whose_memory_moves_is_read_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None]
) -> None:
    """Each forward's copies of buffers are those that the model has then; norms are of gradients
    that are there."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies: list[dict[str, Tensor]] = []
    begun = FlightRecorder._begun

    def noted(flight: FlightRecorder, *args: object) -> object:
        forward = begun(flight, *args)  # type: ignore[arg-type]  # as it was called
        copies.append({name: copy.clone() for name, copy in forward.buffers.items()})
        return forward

    monkeypatch.setattr(FlightRecorder, "_begun", noted)
    expected = []
    with ampscope.watch(model, optimizer, every=0, store=tmp_path / "runs.db") as run:
        for step in range(8):
            if step == 5:
                change(model)
                gc.collect()
                optimizer.param_groups[0]["params"] = list(model.parameters())
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            for name, copy in copies[-1].items():
                assert torch.equal(copy, before[name]), (step, name)
            assert copies[-1].keys() == before.keys()
            grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
            expected.append(float(torch.stack([g.norm() for g in grads]).norm()))
            optimizer.step()
    steps = recorded(tmp_path / "runs.db", run.id).steps
    # `assign` makes parameters that the watch does not know: it says so, and has no norm of them.
    known = 5 if change is loaded else 8
    for step, norm in zip(steps[:known], expected[:known], strict=True):
        assert step.grad_norm == pytest.approx(norm, rel=1e-12)


def test_a_model_that_is_gone_is_not_read(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ampscope.watch(model, optimizer, every=0, store=tmp_path / "runs.db")
    for _ in range(4):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.untyped_storage().resize_(0)
    del model
    gc.collect()
    with torch.no_grad():
        optimizer.zero_grad()
    run.close()


def test_without_the_compiled_call_the_record_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for works in (True, False):
        with monkeypatch.context() as patch:
            if not works:
                patch.setattr(tensor_table, "_machine", lambda: None)
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with ampscope.watch(model, optimizer, every=0, store=tmp_path / "runs.db") as run:
                for _ in range(5):
                    optimizer.zero_grad()
                    model(torch.randn(16, 8)).square().mean().backward()
                    optimizer.step()
            found.append(recorded(tmp_path / "runs.db", run.id).steps)
    for one, other in zip(*found, strict=True):
        assert one.loss == other.loss
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)


def test_inside_a_transformation_nothing_is_asked() -> None:
    found = []

    def loss(x: Tensor) -> Tensor:
        found.append((norms([torch.ones(4), x], MOST)[0].tolist(), Copier([x]).is_possible))
        return (x**2).sum()

    torch.func.grad(loss)(torch.ones(3))
    assert found == [([UNKNOWN, UNKNOWN], False)]
    assert norms([torch.ones(4)], MOST)[0].tolist() == [2.0]


def _norm_in_child(answers: multiprocessing.SimpleQueue[float]) -> None:
    answers.put(float(norms([torch.ones(16)], MOST)[0][0]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_fork_can_ask_too() -> None:
    norms([torch.ones(16)], MOST)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_norm_in_child, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == 4.0
