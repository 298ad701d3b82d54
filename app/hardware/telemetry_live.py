"""The last two minutes of this machine, on Hardware: read by the dashboard's own process, and only
while somebody looks."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import streamlit as st

from ampscope.analysis.telemetry import by_device
from ampscope.records import Sample
from ampscope.telemetry.cpu import CpuReader
from ampscope.telemetry.gpu import GpuReader
from ampscope.telemetry.values import DeviceLost, DeviceReader
from app import chart, layout, machine
from app.figures.telemetry import telemetry_figure
from app.text import escape

KEPT_S = 120.0
EVERY_S = machine.READ_EVERY_S
TOO_LONG_S = 10.0  # after such a pause a reading would speak for time that nobody watched


@dataclass(slots=True)
class Recent:
    """Readings of all devices, shared by all browsers."""

    readers: list[DeviceReader]
    problems: list[str]
    samples: deque[Sample] = field(default_factory=deque)
    read_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self) -> list[Sample]:
        """Read unless somebody else just did; the readings of the last two minutes."""
        with self.lock:
            now = time.time()
            if now - self.read_at > EVERY_S / 2:
                is_new = now - self.read_at > TOO_LONG_S
                found = [s for reader in tuple(self.readers) if (s := self._sample(reader, now))]
                self.samples.extend([] if is_new else found)
                self.read_at = now
            while self.samples and self.samples[0].at < now - KEPT_S:
                self.samples.popleft()
            return list(self.samples)

    def _sample(self, reader: DeviceReader, now: float) -> Sample | None:
        try:
            return Sample(reader.device, now, **reader.read(time.monotonic()))
        except DeviceLost as lost:
            self.problems.append(str(lost))
            self.readers.remove(reader)
            return None


@st.cache_resource(show_spinner=False)
def recent(gpus: tuple[int, ...]) -> Recent:
    """Of NVML's GPUs with these numbers, and the CPU."""
    readers: list[DeviceReader] = []
    problems: list[str] = []
    for number in gpus:
        try:
            readers.append(GpuReader(f"GPU {number}", "", os.getpid(), pcie=False))
        except DeviceLost as lost:
            problems.append(str(lost))
    return Recent([*readers, CpuReader(0)], problems)


@st.fragment(run_every=EVERY_S)
def draw() -> None:
    """The curves of every device, every two seconds."""
    found = recent(tuple(gpu.index for gpu in machine.report().gpus))
    samples = found.update()
    for problem in found.problems:
        st.caption(escape(problem))
    curves = {name: own for name, own in by_device(samples).items() if len(own) > 1}
    if not curves:
        st.caption("The curves of the last two minutes begin with this look.")
    for number, (name, own) in enumerate(curves.items()):
        layout.see(f"{'CPU' if name == 'cpu' else name}, the last {own[-1].at - own[0].at:.0f} s")
        figure = telemetry_figure(own, own[-1].at)
        chart.show(figure, "machine-now", lambda own=own: _table(own), key=f"live-{number}")  # type: ignore[misc]  # a default of a lambda


def _table(samples: Sequence[Sample]) -> pd.DataFrame:
    return pd.DataFrame(list(samples))
