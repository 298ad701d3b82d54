"""The table of the Tensor Cores page: one line for each layer, phase and product."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis.core_use import CoreUse, ProductUse
from ampscope.analysis.core_words import signs_words
from ampscope.analysis.padding_gains import PaddingGain
from ampscope.analysis.product_layout import shapes
from ampscope.records import Place
from app import chart
from app.runs.module_names import find_box, name_of
from app.text import escape, share

TABLE_PX = 460
_NUMBERS = {"MFLOP": "%.3g", "FLOP/byte": "%.3g", "GFLOP/s": "%.4g", "Spread": "%.0f %%"}
_WIDE = {"Layer": 260, "Shapes": 320, "Why": 320, "Signs": 380, "Kernels": 380}


def frame(entries: Sequence[tuple[ProductUse, Place]]) -> pd.DataFrame:
    """Numbers as numbers, so that a column sorts; None where nothing was measured."""
    return pd.DataFrame([_row(use, place) for use, place in entries])


def draw(use: CoreUse) -> None:
    """With a search over layers, ops, dtypes and verdicts."""
    entries = use.layers()
    text = find_box("layer, op, dtype, used, unknown …").lower()
    shown = [e for e in entries if not text or text in _searched(*e)]
    if text:
        st.markdown(escape(f"{share(len(shown), len(entries))} lines hold “{text}”."))
    if not shown:
        return
    table = frame(shown)
    st.dataframe(
        table,
        key="cores-table",
        hide_index=True,
        height=min(TABLE_PX, 38 + 35 * len(shown)),
        column_config={
            **{n: st.column_config.NumberColumn(format=f) for n, f in _NUMBERS.items()},
            **{n: st.column_config.TextColumn(width=px) for n, px in _WIDE.items()},
            "× fp32": st.column_config.NumberColumn(
                format="%.2f", help="Times as fast as the same shapes in fp32 without TF32"
            ),
        },
    )
    chart.download(lambda: frame(entries), "products", key="cores-table")


def padding(gains: Sequence[PaddingGain]) -> None:
    """What each padding was measured to gain or to cost."""
    table = pd.DataFrame(
        {
            "Layer": [name_of(g.module) for g in gains],
            "Padding": [", ".join(f"{a} to {b}" for a, b in g.changes) for g in gains],
            "Products a step": [g.products for g in gains],
            "ms a step": [1e3 * g.seconds for g in gains],
            "ms padded": [1e3 * g.padded_s for g in gains],
            "Gain": [g.gain for g in gains],
            "Lower quartile": [g.low for g in gains],
            "Upper quartile": [g.high for g in gains],
        }
    )
    times = st.column_config.NumberColumn(format="%.2f ×")
    columns = dict.fromkeys(("Gain", "Lower quartile", "Upper quartile"), times)
    st.dataframe(table, key="cores-padding", hide_index=True, column_config=columns)
    chart.download(lambda: table, "padding", key="cores-padding")


def _row(use: ProductUse, place: Place) -> dict[str, object]:
    product = use.product
    rate, timing = product.flops_s, product.timing
    return {
        "Layer": name_of(place.module),
        "Phase": place.phase,
        "Op": product.op.removeprefix("aten.") + (f", {product.part}" if product.part else ""),
        "Shapes": shapes(product.operands),
        "Dtype": product.dtype,
        "Calls": place.count,
        "MFLOP": product.flops / 1e6,
        "FLOP/byte": product.intensity,
        "GFLOP/s": rate / 1e9 if rate else None,
        "Spread": 100 * timing.spread if timing else None,
        "× fp32": use.rate.speedup,
        "Fits": use.eligibility.fit.value,
        "Why": use.eligibility.reason,
        "Used": use.verdict.value,
        "Signs": product.note or signs_words(use),
        "Kernels": ", ".join(product.kernels) or "none seen",
    }


def _searched(use: ProductUse, place: Place) -> str:
    product = use.product
    parts = (name_of(place.module), place.phase, product.op, product.dtype, use.verdict)
    return " ".join(map(str, parts)).lower()
