"""Counters of energy: RAPL's, NVML's, and one that moves slowly."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ampscope.measure import energy


def test_rapl_is_read_and_its_wrapping_is_followed(tmp_path: Path) -> None:
    (tmp_path / "max_energy_range_uj").write_text("1000000\n")
    counter = tmp_path / "energy_uj"
    counter.write_text("900000\n")
    found = energy.energy_counter(torch.device("cpu"), tmp_path)
    assert found is not None
    name, read = found
    assert name == "RAPL, package 0"
    first = read()
    counter.write_text("100000\n")  # it wrapped at 1 J
    assert read() - first == pytest.approx(0.2)
    assert energy.energy_counter(torch.device("cpu"), tmp_path / "missing") is None


class SlowCounter:
    """A device that draws 300 W in a step of 7 ms and 60 W between; its counter moves every
    100 ms. Time is its own."""

    def __init__(self, began: float) -> None:
        self.now, self._joules, self._shown, self._tick_at = began, 0.0, 0.0, began - began % 0.1

    def pass_(self, seconds: float, watts: float = 60.0) -> None:
        while seconds > 1e-12:
            part = min(seconds, self._tick_at + 0.1 - self.now)
            self.now, self._joules, seconds = (
                self.now + part, self._joules + part * watts, seconds - part,
            )  # fmt: skip
            if self._tick_at + 0.1 - self.now < 1e-9:
                self._tick_at, self._shown = self._tick_at + 0.1, self._joules

    def step(self) -> None:
        self.pass_(0.007, 300.0)

    def read(self) -> float:
        self.pass_(1e-5)
        return self._shown

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("began", [0.0, 0.013, 0.05, 0.099])
def test_energy_is_read_from_tick_to_tick(began: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter's last value is up to 100 ms old: 5 % of two seconds, without a wait."""
    device = SlowCounter(began)
    monkeypatch.setattr(
        energy, "time", SimpleNamespace(monotonic=device.monotonic, sleep=device.pass_)
    )
    joules, steps = energy.energy_of(device.step, device.read, 2.0)
    assert joules / steps == pytest.approx(0.007 * 300, rel=0.006)


def test_a_counter_that_stands_still_ends_the_measurement_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SlowCounter(0.0)
    monkeypatch.setattr(
        energy, "time", SimpleNamespace(monotonic=device.monotonic, sleep=device.pass_)
    )
    joules, steps = energy.energy_of(device.step, lambda: 5.0, 0.6)
    assert (joules, steps > 0) == (0.0, True)
    assert device.now < 2.0


@pytest.mark.parametrize(
    ("known", "uuid", "is_slice"),
    [
        ("GPU-1234", "1234", False),
        ("MIG-1234", "1234", True),
        ("MIG-1234", "MIG-1234", True),
        ("", "1234", False),
    ],
)
def test_a_mig_slice_has_no_energy_and_says_why(
    monkeypatch: pytest.MonkeyPatch, known: str, uuid: str, is_slice: bool
) -> None:
    def handle(name: bytes) -> str:
        if name.decode() != known:
            raise RuntimeError("Not Found")
        return known

    def total(handle: str | None) -> int:
        if handle != "GPU-1234":
            raise RuntimeError("Not Supported")
        return 4_000

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=total,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    device = torch.device("cuda", 0)
    assert ("MIG slice" in energy.why_none(device)) is is_slice
    found = energy.energy_counter(device)
    assert (found is not None) is (known == "GPU-1234")
    assert found is None or found[1]() == 4.0
