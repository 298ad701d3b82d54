"""Tensor Cores by compute capability: a table with a row of its own marked, and its sources."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.hardware.capability import CAPABILITIES, DTYPE_LABELS, CapabilityRow
from ampscope.hardware.describe import HardwareReport
from app import chart, layout
from app.text import escape

SHOWN = ("fp16", "bf16", "tf32", "e4m3", "e5m2", "e2m1", "fp64", "int8", "int4")
GTX_16 = (
    "The GTX 16 series (TU116, TU117) also reports 7.5 and has no Tensor Cores; "
    "before 7.0 no GPU has any."
)


def draw(report: HardwareReport) -> None:
    """The table, its sources and a CSV."""
    table = frame(report)
    st.dataframe(table, hide_index=True, height="content")
    st.caption(escape(GTX_16))
    chart.download(lambda: table, "tensor-cores", key="tensor-cores")
    with layout.details("Sources of the table"):
        for number, source in enumerate(_sources(), start=1):
            st.markdown(escape(f"[{number}] {source}"))


def sentence(report: HardwareReport) -> str:
    """What to see in the table."""
    named = [gpu for gpu in report.gpus if gpu.capability]
    if not named:
        return "No NVIDIA GPU is here; the table says what one would give."
    infos = {gpu.capability: gpu.tensor_cores for gpu in named}
    return " ".join(
        f"{capability} ({info.architecture or 'not in the table'}) is here; its Tensor Cores are "
        f"{info.presence}."
        for capability, info in infos.items()
    )


def frame(report: HardwareReport) -> pd.DataFrame:
    """One row a capability; where GPUs are here, a column "here" names them."""
    numbers = {source: number for number, source in enumerate(_sources(), start=1)}
    rows = []
    for row in CAPABILITIES:
        here = ", ".join(gpu.name or "GPU" for gpu in report.gpus if _is_row(row, gpu.capability))
        flags = {DTYPE_LABELS[d]: "yes" if d in row.dtypes else "" for d in SHOWN}
        rows.append(
            {
                "capability": row.capability,
                "architecture": row.architecture,
                "generation": row.generation,
                **flags,
                "source": f"[{numbers[row.source]}]",
                **({"here": here} if report.gpus else {}),
            }
        )
    return pd.DataFrame(rows)


def _sources() -> list[str]:
    return list(dict.fromkeys(row.source for row in CAPABILITIES))


def _is_row(row: CapabilityRow, capability: str | None) -> bool:
    if capability is None:
        return False
    return capability == row.capability or (
        row.capability.endswith(".x") and capability.split(".")[0] == row.capability.split(".")[0]
    )
