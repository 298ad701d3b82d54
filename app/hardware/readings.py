"""What the machine reads now, as key figures, refreshed every two seconds."""

from __future__ import annotations

import streamlit as st

from ampscope.hardware.cpu import CpuReading
from ampscope.hardware.describe import HardwareReport
from ampscope.hardware.gpu import GpuReading
from app import machine
from app.layout import KeyFigure, key_figures
from app.text import code, escape, size


@st.fragment(run_every=machine.READ_EVERY_S)
def draw() -> None:
    """Every GPU as NVML reads it, then the CPU."""
    report = machine.report()
    for gpu in report.gpus:
        _gpu(gpu)
    _cpu(report.cpu)


def software(report: HardwareReport) -> dict[str, str]:
    """Versions; what is missing is said."""
    found = report.software
    cuda = found.torch_cuda or "torch was built without CUDA"
    return {
        "torch": found.torch or "not installed",
        "CUDA of torch": cuda,
        "cuDNN": found.cudnn or ("unknown" if found.torch_cuda else "none, without CUDA"),
        "NVIDIA driver": report.nvidia.driver or report.nvidia.message or "unknown",
        "newest CUDA of the driver": report.nvidia.cuda_driver or "no driver",
        "Python": found.python,
    }


def _gpu(gpu: GpuReading) -> None:
    name = gpu.name or "NVIDIA GPU"
    st.markdown(f"**{escape(f'GPU {gpu.index}: {name}')}**")
    if gpu.problem:
        st.warning(escape(gpu.problem))
        return
    key_figures(
        [
            KeyFigure("Memory used", _of(gpu.memory_used_bytes, gpu.memory_total_bytes)),
            KeyFigure(
                "Busy",
                _unit(gpu.gpu_busy_percent, "%"),
                "Share of the last sample period in which a kernel ran.",
            ),
            KeyFigure(
                "Power",
                _unit(gpu.power_w, "W"),
                f"Limit {_unit(gpu.power_limit_w, 'W')}. {_unit(gpu.temperature_c, '°C')}.",
            ),
            KeyFigure(
                "SM clock",
                _unit(gpu.sm_clock_mhz, "MHz"),
                f"Maximum {_unit(gpu.sm_clock_max_mhz, 'MHz')}. "
                f"Memory {_unit(gpu.memory_clock_mhz, 'MHz')}.",
            ),
        ]
    )
    if gpu.throttled_by:
        st.caption(escape(f"Clocks are held down by: {', '.join(gpu.throttled_by)}."))


def _cpu(cpu: CpuReading) -> None:
    st.markdown(f"**{escape(cpu.model or cpu.architecture)}**")
    used = cpu.memory_total_bytes - cpu.memory_available_bytes
    limit = cpu.memory_limit_bytes
    bound = f"This container may use {size(limit)}." if limit else ""
    load = "unknown" if cpu.load_1min is None else f"{cpu.load_1min:.2f}"
    key_figures(
        [
            KeyFigure("Cores for probes", _cores(cpu), f"{cpu.logical_cores} logical in all."),
            KeyFigure("Memory used", _of(used, cpu.memory_total_bytes), bound),
            KeyFigure("Load, 1 min", load, "Runnable processes, averaged over a minute."),
        ]
    )
    if cpu.flags is None:
        st.caption("Half-precision instructions cannot be read here.")
    else:
        flags = " ".join(code(flag) for flag in cpu.flags) or "none"
        st.caption(f"Vector and half-precision instructions: {flags}")


def _cores(cpu: CpuReading) -> str:
    cores = cpu.usable_cores or cpu.logical_cores
    return "unknown" if cores is None else str(cores)


def _of(used: float | None, total: float | None) -> str:
    if used is None or total is None:
        return "unknown"
    return f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"


def _unit(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,.0f} {unit}"
