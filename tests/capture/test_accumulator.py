"""The accumulator: rows, dtypes, subclasses; invisible to everything that watches ops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture import accumulator
from ampscope.capture.accumulator import Accumulator
from ampscope.capture.failures import Failures
from ampscope.numerics.histogram import FIRST, LOWEST, RAW_LEN, Raw
from ampscope.records import Role
from tests.helpers.counting import by_hand, counted, hooked


class Spy(TorchDispatchMode):
    """Names of the ops that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_counting_is_invisible_to_dispatch_modes() -> None:
    model = nn.Sequential(nn.Linear(3, 3).half(), nn.Linear(3, 3).half())
    x = torch.ones(2, 3, dtype=torch.float16)

    def seen(run: Callable[[], object]) -> list[str]:
        with Spy() as spy:
            run()
        return spy.seen

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    bare = seen(step)
    with hooked(model):
        assert seen(step) == bare


def test_a_tensor_subclass_is_counted_through_its_own_dispatch() -> None:
    class Named(Tensor):
        pass

    model = nn.Identity()
    frame = counted(model, lambda: model(torch.ones(3).as_subclass(Named)))[Role.ACTIVATION]
    assert frame.rows.sum() == 3


def test_rows_of_roles_owners_and_dtypes_are_kept_apart_and_start_anew() -> None:
    counts = Accumulator()
    ones = torch.ones(3)
    counts.add(Role.ACTIVATION, 1, ones)
    counts.add(Role.ACTIVATION, 1, ones.half())
    counts.add(Role.GRAD_OUTPUT, 1, ones * math.nan)
    counts.add(Role.ACTIVATION, 0, -ones * 0)
    frames = counts.take(5, 2.0)
    activation, gradient = frames[Role.ACTIVATION], frames[Role.GRAD_OUTPUT]
    assert (activation.modules, activation.dtypes) == ((1, 1, 0), ("fp32", "fp16", "fp32"))
    assert (activation.step, activation.scale, gradient.scale) == (5, 1.0, 2.0)
    np.testing.assert_array_equal(activation.rows[2], by_hand(-ones * 0))
    np.testing.assert_array_equal(gradient.rows[0], by_hand(ones * math.nan))
    assert counts.take(6, 2.0) == {}
    counts.add(Role.ACTIVATION, 0, ones)
    assert counts.take(7, 2.0)[Role.ACTIVATION].rows.sum() == 3


def test_more_rows_than_at_first() -> None:
    counts = Accumulator()
    for owner in range(700):
        counts.add(Role.WEIGHT, owner, torch.full((2,), 2.0**-owner if owner < 100 else 1.0))
    rows = counts.take(0, 1.0)[Role.WEIGHT].rows
    assert (rows.sum(axis=1) == 2).all()
    assert rows[42, FIRST - LOWEST - 42] == 2


def test_an_empty_tensor_has_an_empty_row() -> None:
    counts = Accumulator()
    counts.add(Role.ACTIVATION, 0, torch.ones(0, 4))
    assert counts.take(0, 1.0)[Role.ACTIVATION].rows.sum() == 0


class Slow:
    """A device whose counts arrive when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.collected = self.read = 0
        self._rows: dict[int, float] = {}
        made.append(self)

    def add(self, tensor: Tensor, row: int, *, stable: bool) -> None:
        self._rows[row] = self._rows.get(row, 0) + tensor.numel()
        if tensor.dim() == 2:
            raise ValueError("counted, and failed")

    def collect(self) -> Slow:
        self.collected += 1
        self._coming, self._rows = self._rows, {}
        return self

    def rows(self) -> Raw:
        self.read += 1
        rows = np.zeros((max(self._coming, default=-1) + 1, RAW_LEN), np.int64)
        for row, count in self._coming.items():
            rows[row, 0] = count
        return rows


made: list[Slow] = []


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    """Every tensor is on such a device."""
    made.clear()
    monkeypatch.setattr(accumulator, "DeviceCounter", Slow)
    monkeypatch.setattr(accumulator, "count_small_into", lambda tensor, row: False)
    monkeypatch.setattr(Tensor, "device", torch.device("cuda", 0), raising=False)
    return made


def test_steps_that_counted_nothing_ask_no_device(slow: list[Slow]) -> None:
    """Most steps of a watch are quiet: none of them may launch or copy anything."""
    counts = Accumulator(Failures())
    counts.add(Role.ACTIVATION, 0, torch.ones(3))
    assert counts.take(0, 1.0)[Role.ACTIVATION].rows.sum() == 3
    for step in range(1, 6):
        assert counts.take(step, 1.0) == {}
    assert [device.collected for device in slow] == [1]
    counts.add(Role.ACTIVATION, 0, torch.ones(4, 4))  # fails after a part was counted
    assert counts.take(6, 1.0) == {}
    counts.add(Role.ACTIVATION, 0, torch.ones(5))
    assert counts.take(7, 1.0)[Role.ACTIVATION].rows.sum() == 5  # and nothing of that part


def test_counts_of_a_device_are_read_when_they_are_asked_for(slow: list[Slow]) -> None:
    counts = Accumulator()
    counts.add(Role.ACTIVATION, 4, torch.ones(3))
    collected = counts.collect(7, 2.0)
    assert (slow[0].collected, slow[0].read, collected.is_here) == (1, 0, False)
    assert collected.roles == {Role.ACTIVATION}
    counts.add(Role.WEIGHT, 1, torch.ones(2))  # of the next step
    (frame,) = collected.frames().values()
    assert (frame.step, frame.modules, frame.rows.sum()) == (7, (4,), 3)
    assert collected.is_here
    assert collected.frames()[Role.ACTIVATION].rows.sum() == 3  # again: the same
    assert counts.take(8, 1.0)[Role.WEIGHT].rows.sum() == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_counts_on_cuda() -> None:
    x = torch.randn(1 << 16) * 1e-4
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        counts = Accumulator()
        on_device = x.to("cuda", dtype)
        counts.add(Role.ACTIVATION, 0, on_device)
        counts.add(Role.WEIGHT, 0, on_device, stable=True)
        counts.flush()
        on_device.zero_()
        for frame in counts.take(0, 1.0).values():
            np.testing.assert_array_equal(frame.rows[0], by_hand(x.to(dtype)))
