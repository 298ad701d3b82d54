"""Observers change nothing: the same losses bit for bit, and no hook left behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ampscope.capture.global_hooks import Dispatcher
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Cadence, Role, RunSpec, State, StepRecord
from ampscope.runner.probe import drive, prepare
from ampscope.runner.training import ProbeTraining
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.workloads.catalog import BUILTIN

CPU = torch.device("cpu")
STEPS = 3
MODES = [name for name in PRECISIONS if name != "tf32"]  # tf32 needs CUDA
EVERYTHING = Cadence(histogram=1, trace=1, shadow=2)
NOT_ALWAYS = Cadence(histogram=2, trace=3, shadow=0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads may add in another order from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(spec: RunSpec, policy: str, store: Path | None) -> tuple[list[float], ProbeTraining]:
    training = prepare(spec, CPU)
    writer = RunWriter.create(store, spec) if store is not None else None
    loop = drive(spec, training, policy, writer)
    if writer is not None:
        writer.finish(State.FINISHED)
        writer.close()
    return loop.losses, training


def bits(tensors: Iterator[torch.Tensor]) -> list[bytes]:
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("workload", sorted(BUILTIN))
def test_losses_and_weights_are_bit_identical(
    workload: str, precision: str, tmp_path: Path
) -> None:
    spec = RunSpec(workload, precision=precision, steps=STEPS, seed=3, cadence=EVERYTHING)
    bare, untouched = train(spec, "rehearsal", None)
    watched, observed = train(spec, "rehearsal", tmp_path / "s.db")
    assert len(bare) == STEPS
    assert torch.tensor(bare).view(torch.int32).equal(torch.tensor(watched).view(torch.int32))
    assert bits(untouched.model.parameters()) == bits(observed.model.parameters())
    assert bits(untouched.model.buffers()) == bits(observed.model.buffers())


@pytest.mark.parametrize("workload", ["mlp", "rnn"])
@pytest.mark.parametrize("cadence", [EVERYTHING, NOT_ALWAYS], ids=["everything", "not-always"])
def test_the_same_under_the_cpus_own_rules(workload: str, cadence: Cadence, tmp_path: Path) -> None:
    spec = RunSpec(workload, precision="fp16", steps=4, cadence=cadence)
    assert train(spec, "native", None)[0] == train(spec, "native", tmp_path / "s.db")[0]


RANDOM_WORKLOAD = '''
import random

import numpy as np
import torch
from torch import nn

from ampscope import Workload


class Noisy(nn.Module):
    """Draws from every generator there is, and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x + random.random() + np.random.rand()) + torch.rand(())


def build(seed):
    data = [torch.randn(16, 6) for _ in range(3)]
    return Workload(
        model=Noisy(),
        batches=data,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
'''  # noqa: E501  # a file of its own


@pytest.mark.parametrize("precision", ["fp16", "bf16-pure"])
def test_the_shadow_draws_no_random_number_and_moves_no_statistics(
    precision: str, tmp_path: Path
) -> None:
    file = tmp_path / "noisy.py"
    file.write_text(RANDOM_WORKLOAD)
    spec = RunSpec(f"{file}:build", precision=precision, steps=6, cadence=Cadence(0, 0, 1))
    bare, untouched = train(spec, "rehearsal", None)
    watched, observed = train(spec, "rehearsal", tmp_path / "s.db")
    assert bare == watched
    assert bits(untouched.model.buffers()) == bits(observed.model.buffers())
    with Reader(tmp_path / "s.db") as reader:
        assert reader.shadows(reader.runs()[0].id)  # it did run


LOST_AT_THE_DOOR = """
import torch
from ampscope import Workload

def build(seed):
    batch = torch.full((4, 8), 1e-9)  # below 2^-25: zero in fp16, not in fp32
    return Workload(
        model=torch.nn.Linear(8, 2),
        batches=[batch],
        loss=lambda model, batch: model(batch).float().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
"""


def test_the_shadow_is_fed_the_batch_before_it_is_cast(tmp_path: Path) -> None:
    file = tmp_path / "door.py"
    file.write_text(LOST_AT_THE_DOOR)
    spec = RunSpec(f"{file}:build", precision="fp16-pure", steps=1, cadence=Cadence(0, 0, 1))
    train(spec, "native", tmp_path / "s.db")
    with Reader(tmp_path / "s.db") as reader:
        (weights,) = reader.shadows(reader.runs()[0].id, Role.WEIGHT_GRAD)
    assert (weights.total, weights.lost) == (2 * 8 + 2, 2 * 8)  # the bias does not see the batch


def hooks_on(model: torch.nn.Module) -> list[object]:
    """Everything that torch keeps about hooks, module by module and parameter by parameter."""
    found: list[object] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if "hooks" in name and isinstance(value, dict) and value:
                found.append((type(module).__name__, name))
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            found.append(name)
        found += [(name, key) for key in vars(parameter) if key.startswith("_ampscope")]
    return found


def global_hooks() -> list[str]:
    """Those that do anything: an empty dispatcher stays where another thread may run a module."""
    names = [name for name in vars(torch_module) if name.startswith("_global_")]
    tables = {name: getattr(torch_module, name) for name in names}
    return [
        name
        for name, hooks in tables.items()
        if isinstance(hooks, dict) and any(map(_acts, hooks.values()))
    ]


def _acts(hook: object) -> bool:
    return bool(hook.subscribers) if isinstance(hook, Dispatcher) else hook is not True


@pytest.mark.parametrize("fails_at", [None, 0, 2], ids=["ends", "fails at once", "fails later"])
def test_no_hook_is_left_behind(fails_at: int | None, tmp_path: Path) -> None:
    spec = RunSpec("gpt", precision="fp16", steps=4, cadence=EVERYTHING)
    training = prepare(spec, CPU)
    writer = RunWriter.create(tmp_path / "s.db", spec)

    def stop() -> bool:
        if fails_at is not None and len(steps) > fails_at:
            raise ZeroDivisionError
        return False

    steps: list[StepRecord] = []
    add = writer.add_step
    writer.add_step = lambda record: (steps.append(record), add(record))[1]  # type: ignore[method-assign]
    fails = pytest.raises(ZeroDivisionError)
    with contextlib.nullcontext() if fails_at is None else fails:
        drive(spec, training, "rehearsal", writer, stop)
    writer.close()
    assert steps
    assert hooks_on(training.model) == []
    assert global_hooks() == []
    assert not training.optimizer._optimizer_step_post_hooks
    assert not training.optimizer._optimizer_step_pre_hooks
    assert _get_current_dispatch_mode() is None
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_in_the_middle_of_a_step_leaves_no_hook_either(tmp_path: Path) -> None:
    spec = RunSpec("gpt", precision="fp16", steps=4, cadence=EVERYTHING)
    training = prepare(spec, CPU)
    calls = []

    def explode(*_: object) -> None:
        calls.append(1)
        if len(calls) > 8:  # the shadow of step 0 calls it six times, then the step itself
            raise ZeroDivisionError

    blocks = [m for m in training.model.modules() if type(m).__name__ == "FeedForward"]
    handles = [block.register_forward_hook(explode) for block in blocks]
    writer = RunWriter.create(tmp_path / "s.db", spec)
    with pytest.raises(ZeroDivisionError):
        drive(spec, training, "rehearsal", writer)
    writer.close()
    for handle in handles:
        handle.remove()
    assert hooks_on(training.model) == []
    assert global_hooks() == []
    assert _get_current_dispatch_mode() is None


def test_nothing_of_a_step_is_kept_alive(tmp_path: Path) -> None:
    """Hooks hold references; a graph that stays alive is memory that grows step by step."""
    spec = RunSpec("mlp", precision="fp16", steps=12, cadence=EVERYTHING)
    training = prepare(spec, CPU)
    writer = RunWriter.create(tmp_path / "s.db", spec)
    alive: list[int] = []

    def count() -> bool:
        gc.collect()
        alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        return False

    drive(spec, training, "rehearsal", writer, count)
    writer.close()
    assert alive[-1] == alive[5]
