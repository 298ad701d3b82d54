"""What this machine is and reads now, and what it read during a run: the Telemetry page, a part of
every measurement, and the words for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import streamlit as st

from ampscope.analysis import telemetry
from ampscope.analysis.telemetry import Usage
from ampscope.hardware.describe import HardwareReport, describe_machine, one_line, unused_gpu
from ampscope.records import RunInfo, Sample, StepRecord
from ampscope.store.reader import Reader
from app import chart, links, states, store
from app.chart import KeyFigure
from app.figures.telemetry import telemetry_figure
from app.text import duration, escape, percent, size

READ_EVERY_S = 2.0
SUMMED = 20_000  # all readings of the first half hour; of longer runs the sums are estimates
INSTRUMENTS_MEMORY = (
    "A probe's includes its instruments: an fp32 shadow of the model and kept tensors. What the "
    "training alone takes is measured by ampscope compare."
)


@st.cache_data(ttl=READ_EVERY_S, show_spinner=False)
def machine_report() -> HardwareReport:
    """What the machine is and how busy it is now."""
    return describe_machine()


def machine_line() -> None:
    """Device, capability, torch and policy in one line."""
    st.caption(escape(one_line(machine_report())))
    warn_of_unused_gpu()


def warn_of_unused_gpu() -> None:
    """Where something is started or read: that torch cannot use the GPU that is here."""
    sentence = unused_gpu(machine_report())
    if sentence:
        st.warning(escape(sentence))


def show_telemetry(run: RunInfo) -> None:
    """The whole: which device, the sentence, what disturbed it, the chart."""
    by_device, disturbed = sums(run)
    if not by_device:
        states.nothing_recorded(*missing(run))
        return
    devices = list(by_device)
    # As a list: the buttons of pick() render Markdown, and an imported run names its devices.
    device = devices[0] if len(devices) == 1 else links.select("Device", "device", devices)
    found = read(run, device)
    chart.sentence(answer(found))
    chart.key_figures(key_figures(found))
    for text in disturbed:
        st.warning(escape(text))
    if not disturbed:
        chart.see("Nothing was read that would make the times of its steps doubtful.")
    figure = store.drawn(
        run,
        f"telemetry-{device}",
        lambda: telemetry_figure(found.samples, found.origin, found.at_steps, found.steps),
    )
    name = f"telemetry-{device.replace(':', '-')}"
    chart.show(figure, name, lambda: table(found), key="telemetry")


def missing(run: RunInfo) -> tuple[str, str]:
    """Why a run has no readings, and what to do."""
    what = "The machine was not read beside this run."
    if run.spec.kind == "watch":
        return what, "Beside a watched training it is read on CUDA only."
    if run.spec.kind == "script" and run.spec.parent:
        return what, "It is recorded during the baseline run, not during its controls."
    return what, (
        "Runs of older versions have no readings, and those under AMPSCOPE_TELEMETRY=0. "
        "Start it again to have some."
    )


@store.of_run
def sums(
    reader: Reader, run_id: str
) -> tuple[dict[str, tuple[telemetry.Usage, dict[str, float]]], tuple[str, ...]]:
    """Of every device its usage and what held it back; sentences on what disturbed the run."""
    samples = reader.samples(run_id, SUMMED)
    own = telemetry.by_device(samples).items()
    by_name = {name: (telemetry.usage(s), telemetry.held_back(s)) for name, s in own}
    return by_name, telemetry.spoiled(samples)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """One device beside one run."""

    run: RunInfo
    device: str
    samples: list[Sample]  # few enough for a chart
    steps: list[StepRecord]
    at_steps: list[int | None]  # the step under way at each sample
    usage: telemetry.Usage
    held_back: dict[str, float]  # reason -> share of the time

    @property
    def origin(self) -> float:
        """Time 0: when the run started."""
        return self.run.started or self.samples[0].at


def read(run: RunInfo, device: str) -> Telemetry:
    """``device`` is one of those in :func:`sums`."""
    samples = telemetry.by_device(store.samples(run, store.POINTS))[device]
    steps = store.steps(run)
    used, held = sums(run)[0][device]
    at_steps = telemetry.steps_at(samples, steps)
    return Telemetry(run, device, samples, steps, at_steps, used, held)


def answer(found: Telemetry) -> str:
    """How busy the device was, with whose work."""
    used = found.usage
    so_far = "So far the" if found.run.state.is_active else "The"
    if found.device != "cpu":
        return f"{so_far} GPU {found.device} was {_gpu(used)}."
    if used.busy_percent is None:
        return f"{so_far} CPU's load could not be read on this machine."
    busy = f"{so_far} CPU was {_percent(used.busy_percent)} busy"
    if used.others_percent is None:
        return f"{busy}."
    return (
        f"{busy}: the run took {_percent(used.own_percent)}, other processes "
        f"{_percent(used.others_percent)}."
    )


def _gpu(used: Usage) -> str:
    parts = [f"{_percent(used.busy_percent)} busy" if used.busy_percent is not None else "read"]
    parts += [f"at {used.power_w:,.0f} W"] if used.power_w is not None else []
    parts += [f"and {used.clock_mhz:,.0f} MHz"] if used.clock_mhz is not None else []
    return " ".join(parts)


def key_figures(found: Telemetry) -> list[KeyFigure]:
    """Load, memory, energy, clock; what was not read says so."""
    used = found.usage
    readings = f"Mean of {used.readings:,} readings in {duration(used.seconds)}."
    if found.device == "cpu":
        others = f"{readings} With what a hypervisor gave to other machines."
        load = KeyFigure("Other processes", _percent(used.others_percent), others)
    else:
        load = KeyFigure("GPU busy", _percent(used.busy_percent), f"{readings} A kernel ran.")
    kept = f" {INSTRUMENTS_MEMORY}" if found.run.spec.is_training else ""
    memory = KeyFigure(
        "Peak memory",
        size(used.own_memory_bytes),
        f"Of the run's own process. By all processes: {size(used.memory_bytes)} at most.{kept}",
    )
    return [load, memory, _energy(used), _clock(found)]


def _energy(used: Usage) -> KeyFigure:
    if used.energy_j is None:
        return KeyFigure("Energy", "not readable", "This machine shows no energy counter.")
    watts = "" if used.power_w is None else f"{used.power_w:,.1f} W on average."
    return KeyFigure("Energy", f"{used.energy_j:,.0f} J", watts)


def _clock(found: Telemetry) -> KeyFigure:
    used = found.usage
    if used.clock_mhz is None or used.clock_range_mhz is None:
        return KeyFigure("Clock", "not readable")
    low, high = used.clock_range_mhz
    held = ", ".join(f"{reason} {percent(share)}" for reason, share in found.held_back.items())
    warm = "" if used.temperature_c is None else f" At most {used.temperature_c:.0f} °C."
    constant = (
        " It never changed: a virtual machine shows its nominal clock." if low == high else ""
    )
    what = f"From {low:,.0f} to {high:,.0f} MHz.{constant if found.device == 'cpu' else ''}{warm}"
    return KeyFigure("Clock", f"{used.clock_mhz:,.0f} MHz", f"{what} Held back: {held or 'never'}.")


def _percent(value: float | None) -> str:
    return "not readable" if value is None else f"{value:.1f} %"


def table(found: Telemetry) -> pd.DataFrame:
    """Every reading of the device, none left out; beside it the time since the run's start and the
    step under way."""
    samples = telemetry.by_device(store.samples(found.run))[found.device]
    frame = pd.DataFrame(samples)
    frame.insert(2, "seconds", frame["at"] - found.origin)
    frame.insert(3, "step", pd.Series(telemetry.steps_at(samples, found.steps), dtype="Int64"))
    return frame
