"""Tensor Cores of one measured step: the answer, key figures, the roofline, the table."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.analysis.core_use import CoreUse, ProductUse, core_use
from ampscope.analysis.core_verdict import Verdict
from ampscope.analysis.core_words import ON_A_CPU, answer
from ampscope.analysis.padding_gains import PaddingGain, padding_gains
from ampscope.analysis.product_layout import shapes
from ampscope.hardware.bench_view import rate_words
from ampscope.records import RunInfo
from app import chart, layout, states, store
from app.cores import cores_table
from app.figures.roofline import Ceiling, Dot, roofline
from app.layout import KeyFigure
from app.runs.module_names import name_of
from app.text import count, cut, escape, percent, plural

NAMED_LAYERS = 6  # of one dot, in its hover box


def show(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    use = core_use(store.results(run), run.machine)
    if use is None or not use.uses:
        states.nothing_recorded("The step is recorded.", "Its first product is being measured.")
        return
    layout.sentence(answer(use))
    about = [
        f"One training step of {run.title}.",
        *([ON_A_CPU] if use.step.device == "cpu" else []),
    ]
    st.caption(escape(" ".join(about)))
    layout.key_figures(_figures(use))
    layout.see(_what_to_see(use))
    dots = [dot for one in use.uses if (dot := _dot(one)) is not None]
    lines = [Ceiling(dtype, flops_s) for dtype, flops_s in use.ceilings.flops_s.items()]
    figure = roofline(dots, lines, use.ceilings.bytes_s)
    chart.show(figure, "roofline", lambda: cores_table.frame(use.layers()), key="roofline")
    gains = padding_gains([one.product for one in use.uses])
    if gains:
        layout.see(_padding_seen(gains))
        cores_table.padding(gains)
    with layout.details("All products"):
        cores_table.draw(use)
    with layout.details("Ceilings, and how a verdict is reached"):
        _how(use)


def _figures(use: CoreUse) -> list[KeyFigure]:
    used, calls = use.calls(Verdict.USED), use.step.calls
    timed = [u.product for u in use.uses if u.product.timing and u.product.control]
    own = sum(p.count * p.timing.median_s for p in timed if p.timing)
    control = sum(p.count * p.control.median_s for p in timed if p.control)
    faster = f"{control / own:.2f}×" if own else "no control"
    return [
        KeyFigure("Products that use them", f"{count(used)} of {count(calls)}"),
        KeyFigure("Their share of FLOPs", percent(use.share(Verdict.USED))),
        KeyFigure(
            "Unknown",
            count(use.calls(Verdict.UNKNOWN)),
            "The two signs disagree, or neither tells.",
        ),
        KeyFigure(
            "Against fp32",
            faster,
            "All half and TF32 products of the step together, each run alone, against the same "
            "shapes in fp32 without TF32.",
        ),
    ]


def _what_to_see(use: CoreUse) -> str:
    text = (
        f"A dot for each of {plural(len(use.uses), 'different product')}. On the left memory "
        "limits, on the right arithmetic; a dot far below both lines waits for something else. "
    )
    return text + "A dot above the slope works within the cache. Bars are quartiles."


def _dot(one: ProductUse) -> Dot | None:
    product, timing = one.product, one.product.timing
    if timing is None or not product.flops_s:
        return None
    names = [f"{name_of(p.module)}, {p.phase}" for p in product.places]
    more = len(names) - NAMED_LAYERS
    lines = (
        names[0],
        *names[1:NAMED_LAYERS],
        *([f"and {plural(more, 'other')}"] if more > 0 else []),
        f"{product.op} {product.part}".strip(),
        cut(shapes(product.operands), 90),
        f"{rate_words(product.flops_s)}, {product.intensity:.3g} FLOP a byte",
        f"{one.verdict}; {one.eligibility.fit}",
    )
    return Dot(
        intensity=product.intensity,
        flops_s=product.flops_s,
        low_flops_s=product.flops / timing.high_s,
        high_flops_s=product.flops / timing.low_s,
        dtype=product.dtype,
        verdict=one.verdict.value,
        lines=lines,
    )


def _padding_seen(gains: list[PaddingGain]) -> str:
    worth = sum(gain.is_worth_it for gain in gains)
    tried = plural(len(gains), "padding")
    if not worth:
        return f"{tried} of dimensions that miss were measured; none gains beyond its spread."
    return f"{tried} of dimensions that miss were measured; {worth:,} gain beyond the spread."


def _how(use: CoreUse) -> None:
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
        f"({escape(use.step.kernel_source)}), and the rate that each product reaches alone against "
        "the same shapes in fp32 without TF32. Where they disagree, or neither tells, the answer "
        "is *unknown*. A name that is in no list says nothing; it never means *not used*."
    )
