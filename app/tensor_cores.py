"""The page Tensor Cores: its form; of one measured step the answer, key figures and the roofline;
and the table of all matmuls, one line for each layer, phase and matmul.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis import tensor_core_use
from ampscope.number_words import rate_words
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Place, RunInfo
from app import chart, links, states, store
from app.chart import KeyFigure
from app.figures.hardware import Dot, RooflineCeiling, roofline
from app.runs import measurements
from app.runs.module_names import name_of
from app.text import count, cut, escape, percent, plural, share

SLOW = "On this CPU a matmul in fp16 can take a hundred times as long as in fp32."
NAMED_LAYERS = 6  # of one dot, in its hover box
TABLE_PX = 460
_NUMBERS = {"MFLOP": "%.3g", "FLOP/byte": "%.3g", "GFLOP/s": "%.4g", "Spread": "%.0f %%"}
_WIDE = {"Layer": 260, "Shapes": 320, "Why": 320, "Signs": 380, "Kernels": 380}


def show_form() -> None:
    """Workload, size, precision, and the button."""
    found = measurements.form("measuring a step's matmuls", "small")
    if found is None:
        return
    choice, how, on_cuda = found
    with how:
        names = [name for name, mode in PRECISIONS.items() if on_cuda or not mode.tf32]
        precision = st.selectbox(
            "Precision",
            names,
            index=names.index("fp16" if on_cuda else "bf16"),
            format_func=lambda name: f"{name}: {PRECISIONS[name].summary}",
            key="cores-precision",
        )
        if not on_cuda and "fp16" in precision:
            st.caption(escape(SLOW))
        started = st.button("Measure its matmuls", type="primary", key="cores-start")
    if started:
        measurements.start_with(choice, "cores", precision=precision, steps=1)


def show_step(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    use = tensor_core_use.core_use(store.results(run), run.machine)
    if use is None or not use.uses:
        states.nothing_recorded("The step is recorded.", "Its first matmul is being measured.")
        return
    chart.sentence(tensor_core_use.answer(use))
    about = [
        f"One training step of {run.title}.",
        *([tensor_core_use.ON_A_CPU] if use.step.device == "cpu" else []),
    ]
    st.caption(escape(" ".join(about)))
    chart.key_figures(_figures(use))
    chart.see(_what_to_see(use))
    dots = [dot for one in use.uses if (dot := _dot(one)) is not None]
    lines = [RooflineCeiling(dtype, flops_s) for dtype, flops_s in use.ceilings.flops_s.items()]
    figure = roofline(dots, lines, use.ceilings.bytes_s)
    chart.show(figure, "roofline", lambda: product_table(use.layers()), key="roofline")
    gains = tensor_core_use.padding_gains([one.matmul for one in use.uses])
    if gains:
        chart.see(_padding_seen(gains))
        show_padding(gains)
    with chart.details("All matmuls"):
        show_products(use)
    with chart.details("Ceilings, and how a verdict is reached"):
        _how(use)


def _figures(use: tensor_core_use.CoreUse) -> list[KeyFigure]:
    used, calls = use.calls(tensor_core_use.CoreVerdict.USED), use.step.calls
    timed = [u.matmul for u in use.uses if u.matmul.timing and u.matmul.control]
    own = sum(p.count * p.timing.median_s for p in timed if p.timing)
    control = sum(p.count * p.control.median_s for p in timed if p.control)
    faster = f"{control / own:.2f}×" if own else "no control"
    return [
        KeyFigure("Matmuls that use them", f"{count(used)} of {count(calls)}"),
        KeyFigure("Their share of FLOPs", percent(use.share(tensor_core_use.CoreVerdict.USED))),
        KeyFigure(
            "Unknown",
            count(use.calls(tensor_core_use.CoreVerdict.UNKNOWN)),
            "The two signs disagree, or neither is conclusive.",
        ),
        KeyFigure(
            "Against fp32",
            faster,
            "All half and TF32 matmuls of the step together, each run alone, against the same "
            "shapes in fp32 without TF32.",
        ),
    ]


def _what_to_see(use: tensor_core_use.CoreUse) -> str:
    text = (
        f"A dot for each of {plural(len(use.uses), 'different matmul')}. On the left memory "
        "limits, on the right arithmetic; a dot far below both lines waits for something else. "
    )
    return text + "A dot above the slope works within the cache. Bars are quartiles."


def _dot(one: tensor_core_use.MatmulUse) -> Dot | None:
    matmul, timing = one.matmul, one.matmul.timing
    if timing is None or not matmul.flops_s:
        return None
    names = [f"{name_of(p.module)}, {p.phase}" for p in matmul.places]
    more = len(names) - NAMED_LAYERS
    lines = (
        names[0],
        *names[1:NAMED_LAYERS],
        *([f"and {plural(more, 'other')}"] if more > 0 else []),
        f"{matmul.op} {matmul.part}".strip(),
        cut(tensor_core_use.shapes(matmul.operands), 90),
        f"{rate_words(matmul.flops_s)}, {matmul.intensity:.3g} FLOP per byte",
        f"{one.verdict}; {one.eligibility.fit}",
    )
    return Dot(
        intensity=matmul.intensity,
        flops_s=matmul.flops_s,
        low_flops_s=matmul.flops / timing.high_s,
        high_flops_s=matmul.flops / timing.low_s,
        dtype=matmul.dtype,
        verdict=one.verdict.value,
        lines=lines,
    )


def _padding_seen(gains: list[tensor_core_use.PaddingGain]) -> str:
    worth = sum(gain.is_worth_it for gain in gains)
    tried = plural(len(gains), "padding")
    if not worth:
        return f"{tried} of dimensions that miss were measured; none gains beyond its spread."
    return f"{tried} of dimensions that miss were measured; {worth:,} gain beyond the spread."


def _how(use: tensor_core_use.CoreUse) -> None:
    table = pd.DataFrame(
        {
            "Ceiling": [f"{r.op} {r.dtype}" for r in use.rates],
            "Size": ["×".join(map(str, r.shape)) for r in use.rates],
            "Reached": [
                rate_words(r.flops_s) if r.flops_s else f"{(r.bytes_s or 0) / 1e9:.3g} GB/s"
                for r in use.rates
            ],
            "Spread": [f"{r.timing.spread:.0%}" if r.timing else "" for r in use.rates],
        }
    )
    st.dataframe(table, key="cores-ceilings", hide_index=True)
    st.markdown(
        "Two signs are taken independently: the names of the kernels that ran in the step "
        f"({escape(use.step.kernel_source)}), and the rate that each matmul reaches alone against "
        "the same shapes in fp32 without TF32. Where they disagree, or neither tells, the answer "
        "is *unknown*. A name that is in no list says nothing; it never means *not used*."
    )


def show_products(use: tensor_core_use.CoreUse) -> None:
    """With a search over layers, ops, dtypes and verdicts."""
    entries = use.layers()
    text = links.find("matmul", "layer, op, dtype, used, unknown …").lower()
    shown = [e for e in entries if not text or text in _searched(*e)]
    if text:
        st.markdown(escape(f"{share(len(shown), len(entries))} lines hold “{text}”."))
    if not shown:
        return
    chart.table(
        product_table(shown),
        "products",
        key="cores-table",
        most_px=TABLE_PX,
        whole=lambda: product_table(entries),
        columns={
            **{n: st.column_config.NumberColumn(format=f) for n, f in _NUMBERS.items()},
            **{n: st.column_config.TextColumn(width=px) for n, px in _WIDE.items()},
            "× fp32": st.column_config.NumberColumn(
                format="%.2f", help="Times as fast as the same shapes in fp32 without TF32"
            ),
        },
    )


def product_table(entries: Sequence[tuple[tensor_core_use.MatmulUse, Place]]) -> pd.DataFrame:
    """Numbers as numbers, so that a column sorts; None where nothing was measured."""
    return pd.DataFrame([_row(use, place) for use, place in entries])


def _row(use: tensor_core_use.MatmulUse, place: Place) -> dict[str, object]:
    matmul = use.matmul
    rate, timing = matmul.flops_s, matmul.timing
    return {
        "Layer": name_of(place.module),
        "Phase": place.phase,
        "Op": matmul.op.removeprefix("aten.") + (f", {matmul.part}" if matmul.part else ""),
        "Shapes": tensor_core_use.shapes(matmul.operands),
        "Dtype": matmul.dtype,
        "Calls": place.count,
        "MFLOP": matmul.flops / 1e6,
        "FLOP/byte": matmul.intensity,
        "GFLOP/s": rate / 1e9 if rate else None,
        "Spread": 100 * timing.spread if timing else None,
        "× fp32": use.rate.speedup,
        "Fits": use.eligibility.fit.value,
        "Why": use.eligibility.reason,
        "Used": use.verdict.value,
        "Signs": matmul.note or tensor_core_use.signs_words(use),
        "Kernels": ", ".join(matmul.kernels) or "none seen",
    }


def _searched(use: tensor_core_use.MatmulUse, place: Place) -> str:
    matmul = use.matmul
    parts = (name_of(place.module), place.phase, matmul.op, matmul.dtype, use.verdict)
    return " ".join(map(str, parts)).lower()


def show_padding(gains: Sequence[tensor_core_use.PaddingGain]) -> None:
    """What each padding was measured to gain or to cost."""
    table = pd.DataFrame(
        {
            "Layer": [name_of(g.module) for g in gains],
            "Padding": [", ".join(f"{a} to {b}" for a, b in g.changes) for g in gains],
            "Matmuls per step": [g.matmuls for g in gains],
            "ms per step": [1e3 * g.seconds for g in gains],
            "ms padded": [1e3 * g.padded_s for g in gains],
            "Gain": [g.gain for g in gains],
            "Lower quartile": [g.low for g in gains],
            "Upper quartile": [g.high for g in gains],
        }
    )
    times = st.column_config.NumberColumn(format="%.2f ×")
    columns = dict.fromkeys(("Gain", "Lower quartile", "Upper quartile"), times)
    chart.table(table, "padding", key="cores-padding", columns=columns)
