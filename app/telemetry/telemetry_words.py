"""The Telemetry page in words: one sentence a device, key figures, why there is nothing."""

from __future__ import annotations

from ampscope.analysis.telemetry import Usage
from ampscope.records import RunInfo
from app.layout import KeyFigure
from app.telemetry.telemetry_data import Telemetry
from app.text import duration, percent, size

UNDISTURBED = "Nothing was read that would make the times of its steps doubtful."


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
    memory = KeyFigure(
        "Peak memory",
        size(used.own_memory_bytes),
        f"Of the run's own process. By everybody: {size(used.memory_bytes)} at most.",
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


def missing(run: RunInfo) -> tuple[str, str]:
    """Why a run has no readings, and what to do."""
    what = "The machine was not read beside this run."
    if run.spec.kind == "watch":
        return what, "Beside a watched training it is read on CUDA only."
    if run.spec.kind == "script" and run.spec.parent:
        return what, "It is read beside the script as it is, not beside its controls."
    return what, (
        "Runs of older versions have no readings, and those under AMPSCOPE_TELEMETRY=0. "
        "Start it again to have some."
    )


def _percent(value: float | None) -> str:
    return "not readable" if value is None else f"{value:.1f} %"
