"""Charts of a machine's rates: what each dtype reaches at each size, what a misaligned size costs,
and a roofline of the matmuls of a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.bench import DIMENSIONS, STEP, position
from ampscope.analysis.ceilings import LABELS, SERIES, WIDTHS, VendorFigures
from ampscope.number_words import rate_words
from ampscope.records import Rate
from ampscope.story.palette import OUTLINE, dtype_color
from app.figures import ABOVE
from app.text import for_plotly

HEIGHT = 420
# fp64 and int8 share the colour of dtypes without one of their own; the symbol distinguishes all.
SYMBOLS = {
    "fp64": "square",
    "fp32": "circle",
    "tf32": "diamond",
    "bf16": "triangle-up",
    "fp16": "triangle-down",
    "int8": "square-open",
    "e4m3": "star",
}
ALIGNMENT_HEIGHT, COLUMNS = 584, 2
MARGIN_PX, TITLE_PX = 88, 24
DASHES = {"": "solid", "NCHW": "dot", "channels_last": "solid"}
HEIGHT_PX = 460
ROOFLINE_SYMBOLS = {"used": "circle", "not used": "x", "unknown": "diamond-open"}
DOT_PX = 11
MARGIN = 1.6  # room beside the outermost dot, a factor on a log axis


def rates_figure(rates: Sequence[Rate], vendor: VendorFigures | None) -> go.Figure:
    """Both axes logarithmic: rates lie two decades apart."""
    figure = go.Figure()
    ceilings = [r for r in rates if r.series == SERIES and r.timing is not None]
    dtypes = [d for d in WIDTHS if any(r.dtype == d for r in ceilings)]
    for dtype in dtypes:
        points = sorted((r for r in ceilings if r.dtype == dtype), key=lambda r: r.shape)
        figure.add_trace(_line(dtype, points))
    sizes = sorted({r.shape[0] for r in ceilings})
    if vendor is not None and sizes:
        figure.add_traces(_peaks(vendor, dtypes, (sizes[0], sizes[-1])))
    figure.update_layout(
        height=HEIGHT,
        margin={"t": 32, "b": 0, "l": 0, "r": 8},
        legend=ABOVE,
        uirevision="rates",  # a new size must not undo a person's zoom
    )
    figure.update_xaxes(
        type="log",
        title="size of the matmul (m = n = k)",
        tickvals=sizes,
        ticktext=[f"{size:,}" for size in sizes],
        showgrid=False,
    )
    figure.update_yaxes(type="log", title="operations per second", exponentformat="SI", dtick=1)
    return figure


def _line(dtype: str, points: Sequence[Rate]) -> go.Scatter:
    label = LABELS[dtype]
    medians = [p.flops_s or 0.0 for p in points]
    timings = [p.timing for p in points if p.timing is not None]
    highs = [p.flops / t.low_s for p, t in zip(points, timings, strict=True)]
    lows = [p.flops / t.high_s for p, t in zip(points, timings, strict=True)]
    return go.Scatter(
        name=label,
        x=[p.shape[0] for p in points],
        y=medians,
        error_y=error_bars(medians, lows, highs, thickness=1.5, width=4),
        mode="lines+markers",
        line={"color": dtype_color(dtype), "width": 2},
        marker={"symbol": SYMBOLS[dtype], "size": 9},
        hovertext=[
            f"<b>{label}, {p.shape[0]:,}</b><br>{rate_words(p.flops_s)}, quartiles "
            f"{rate_words(low)} to {rate_words(high)}<br>{t.repeats} times"
            for p, t, low, high in zip(points, timings, lows, highs, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def error_bars(
    medians: Sequence[float], lows: Sequence[float], highs: Sequence[float], **look: object
) -> dict[str, object]:
    """Quartiles around medians, as a trace takes them."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - m for m, high in zip(medians, highs, strict=True)],
        "arrayminus": [m - low for m, low in zip(medians, lows, strict=True)],
        **look,
    }


def _peaks(vendor: VendorFigures, dtypes: Sequence[str], ends: tuple[int, int]) -> list[go.Scatter]:
    """One dotted line a figure, named by all dtypes that share it."""
    same: dict[float, list[str]] = defaultdict(list)
    for dtype in dtypes:
        if dtype in vendor.flops_s:
            same[vendor.flops_s[dtype]].append(dtype)
    return [
        go.Scatter(
            x=list(ends),
            y=[figure, figure],
            mode="lines+text",
            text=[f"vendor: {', '.join(LABELS[n] for n in names)}", ""],
            textposition="top right",
            line={"color": dtype_color(names[0]), "width": 1.5, "dash": "dot"},
            hovertemplate=f"vendor: {rate_words(figure)}<extra></extra>",
            showlegend=False,
        )
        for figure, names in same.items()
    ]


def alignment_figure(rates: Sequence[Rate]) -> go.Figure:
    """Rates at 8n + {0, 1, 2, 4}: a panel per dimension; full marks at multiples of 8, hollow
    beside. From zero upwards, so that a small cost looks small."""
    done = [r for r in rates if r.series in DIMENSIONS and r.timing is not None]
    shown = [series for series in DIMENSIONS if any(r.series == series for r in done)]
    rows = max(1, -(-len(shown) // COLUMNS))
    figure = make_subplots(
        rows=rows,
        cols=COLUMNS,
        subplot_titles=[_title(series, done) for series in shown],
        vertical_spacing=0.16,
        horizontal_spacing=0.08,
    )
    named: set[str] = set()
    for place, series in enumerate(shown):
        row, column = divmod(place, COLUMNS)
        for trace in _traces([r for r in done if r.series == series], named):
            figure.add_trace(trace, row=row + 1, col=column + 1)
        even = sorted({position(r) for r in done if r.series == series and _is_even(r)})
        figure.update_xaxes(tickvals=even, showgrid=True, row=row + 1, col=column + 1)
    figure.update_yaxes(rangemode="tozero", exponentformat="SI", title="operations per second")
    figure.update_annotations(font={"size": 13})  # the panels' titles
    height = ALIGNMENT_HEIGHT if rows > 1 else ALIGNMENT_HEIGHT // 2 + 40
    figure.update_layout(
        height=height,
        margin={"t": MARGIN_PX, "b": 0, "l": 0, "r": 8},
        legend=ABOVE | {"y": 1 + TITLE_PX / (height - MARGIN_PX)},  # above the first row's titles
        uirevision="alignment",
    )
    return figure


def _traces(rates: Sequence[Rate], named: set[str]) -> list[go.Scatter]:
    groups = dict.fromkeys((r.dtype, r.layout) for r in rates)
    return [
        _trace([r for r in rates if (r.dtype, r.layout) == group], *group, named=named)
        for group in groups
    ]


def _trace(rates: Sequence[Rate], dtype: str, layout: str, *, named: set[str]) -> go.Scatter:
    name = f"{LABELS[dtype]}{', ' + layout if layout else ''}"
    is_new = name not in named
    named.add(name)
    points = sorted(rates, key=position)
    color = dtype_color(dtype)
    return go.Scatter(
        name=name,
        legendgroup=name,
        showlegend=is_new,
        x=[position(p) for p in points],
        y=[p.flops_s for p in points],
        mode="lines+markers",
        line={"color": color, "width": 1.5, "dash": DASHES[layout]},
        marker={
            "size": 8,
            "symbol": ["circle" if _is_even(p) else "circle-open" for p in points],
            "color": color,
        },
        hovertext=[
            f"<b>{position(p):,}</b>, {name}<br>{rate_words(p.flops_s)}, quartiles "
            f"{p.timing.spread if p.timing else 0:.0%} apart"
            for p in points
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _title(series: str, rates: Sequence[Rate]) -> str:
    shape = next(r.shape for r in rates if r.series == series)
    if series == "align_channels":
        batch, _, height, width, filters = shape
        return f"channels of a 3 × 3 convolution ({batch} × {height} × {width}, {filters} filters)"
    name = DIMENSIONS[series]
    others = [n for n in ("M", "N", "K") if n != name]
    fixed = next(size for axis, size in zip("MNK", shape, strict=True) if axis == others[0])
    return f"{name} of a matmul ({' = '.join(others)} = {fixed:,})"


def _is_even(rate: Rate) -> bool:
    return position(rate) % STEP == 0


@dataclass(frozen=True, slots=True)
class Dot:
    """One matmul; rates in FLOP/s at the median and the quartiles of its times."""

    intensity: float
    flops_s: float
    low_flops_s: float
    high_flops_s: float
    dtype: str
    verdict: str
    lines: tuple[str, ...]  # of the hover box, as plain text; the first is bold


@dataclass(frozen=True, slots=True)
class RooflineCeiling:
    """A flat line."""

    dtype: str
    flops_s: float


def roofline(
    dots: Sequence[Dot], ceilings: Sequence[RooflineCeiling], bytes_s: float | None
) -> go.Figure:
    """What each matmul reaches over how much it computes for each byte, under the ceilings that
    were measured in the same run. Colour is the dtype, symbol the verdict; the legend names both,
    so neither stands alone. Equal matmuls of several layers lie on one spot and are one dot.
    ``bytes_s`` of a copy is the slope on the left; None leaves it out."""
    figure = go.Figure()
    name, scale = unit(dots, ceilings)
    first, last = _range(dots, ceilings, bytes_s)
    for ceiling in sorted(ceilings, key=lambda c: -c.flops_s):
        start = max(first, ceiling.flops_s / bytes_s) if bytes_s else first
        _add_line(figure, ceiling, start, last, name, scale)
    if bytes_s and ceilings:
        end = max(c.flops_s for c in ceilings) / bytes_s
        _add_slope(figure, bytes_s, first, end, scale)
    for dtype, verdict in sorted({(d.dtype, d.verdict) for d in dots}):
        of = [d for d in dots if (d.dtype, d.verdict) == (dtype, verdict)]
        figure.add_trace(_dots(of, dtype, verdict, scale))
    figure.update_layout(
        height=HEIGHT_PX,
        margin={"t": 60, "b": 50, "l": 10, "r": 10},
        legend=ABOVE,
        hovermode="closest",
        xaxis={"title": {"text": "FLOP for each byte moved"}},
        yaxis={"title": {"text": f"{name} reached"}},
    )
    # Labels at 1, 2 and 5 of every decade
    figure.update_xaxes(type="log", tickformat="~g", dtick="D2")
    figure.update_yaxes(type="log", tickformat="~g", dtick="D2")
    return figure


def unit(dots: Sequence[Dot], ceilings: Sequence[RooflineCeiling]) -> tuple[str, float]:
    """(name, FLOP/s) of the y axis, by the highest that is drawn."""
    highest = max([d.flops_s for d in dots] + [c.flops_s for c in ceilings], default=0.0)
    return ("TFLOP/s", 1e12) if highest >= 1e12 else ("GFLOP/s", 1e9)


def _dots(dots: Sequence[Dot], dtype: str, verdict: str, scale: float) -> go.Scatter:
    color = dtype_color(dtype)
    return go.Scatter(
        name=for_plotly(f"{dtype}, {verdict}"),
        mode="markers",
        x=[d.intensity for d in dots],
        y=[d.flops_s / scale for d in dots],
        error_y=error_bars(
            [d.flops_s / scale for d in dots],
            [d.low_flops_s / scale for d in dots],
            [d.high_flops_s / scale for d in dots],
            color=color,
            thickness=1.5,
            width=4,
        ),
        marker={
            "symbol": ROOFLINE_SYMBOLS[verdict],
            "size": DOT_PX,
            "color": color,
            "line": {"color": color if verdict == "unknown" else OUTLINE, "width": 1.5},
        },
        hovertext=[_hover(d.lines) for d in dots],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(lines: Sequence[str]) -> str:
    first, *rest = (for_plotly(line) for line in lines)
    return "<br>".join([f"<b>{first}</b>", *rest])


def _add_line(
    figure: go.Figure, ceiling: RooflineCeiling, start: float, end: float, name: str, scale: float
) -> None:
    height = ceiling.flops_s / scale
    figure.add_scatter(
        mode="lines",
        x=[start, end],
        y=[height, height],
        line={"color": dtype_color(ceiling.dtype), "width": 2},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_annotation(
        text=f"{for_plotly(ceiling.dtype)}, largest matmul: {height:.3g} {name}",
        # Of the plot's width: a place on the axis itself, at its very end, rounds to one outside,
        # and Plotly draws no label there.
        x=1,
        xref="x domain",
        y=math.log10(height),  # a log axis takes exponents here
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
    )


def _add_slope(figure: go.Figure, bytes_s: float, start: float, end: float, scale: float) -> None:
    figure.add_scatter(
        name=f"as fast as a copy moves its bytes ({bytes_s / 1e9:.3g} GB/s)",
        mode="lines",
        x=[start, end],
        y=[bytes_s * start / scale, bytes_s * end / scale],
        line={"color": OUTLINE, "width": 2, "dash": "dash"},
        hoverinfo="skip",
    )


def _range(
    dots: Sequence[Dot], ceilings: Sequence[RooflineCeiling], bytes_s: float | None
) -> tuple[float, float]:
    """Of the x axis: all dots, and the point from which arithmetic and not memory limits."""
    found = [d.intensity for d in dots]
    if bytes_s:
        found += [c.flops_s / bytes_s for c in ceilings]
    return min(found, default=1.0) / MARGIN, max(found, default=1000.0) * MARGIN
