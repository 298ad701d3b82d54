"""The page Gradients: one role at one step and loss scale, as a heat map of all modules, as one
module's histograms, or as what its fp32 shadows lost over time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st

from ampscope.analysis import scale_window, underflow
from ampscope.analysis.distribution import scale_exponent, selected, trouble
from ampscope.numerics.formats import FORMATS, NumberFormat
from ampscope.numerics.histogram import (
    EXPONENTS,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    Raw,
)
from ampscope.records import Role, RunInfo
from ampscope.store.series import ModuleSeries
from ampscope.story.shared import ROLE_NAMES
from app import chart, links, states, store
from app.chart import KeyFigure
from app.figures.exponents import MapRows, exponent_bars, exponent_map
from app.figures.underflow import PANELS, ShadowCounts, underflow_lines, underflow_map
from app.gradients import words
from app.gradients.frames import (
    Ranks,
    RoleFrames,
    RoleSnapshot,
    Span,
    own_format,
    shadow_series,
    snapshot,
)
from app.runs.loss_scales import window_sentence
from app.runs.module_names import pick_module, short_names
from app.text import count, cut, percent, plural, share

FORMAT_NAMES = ("fp16", "bf16", "e4m3", "e5m2", "fp32")
EVERY, ONE, LOST_OVER_TIME = DETAILS = ("all modules", "one module", "lost over time")
PLAY_EVERY_S = 0.8  # a drawn frame takes about 0.1 s; slower than this and the eye loses the thread
LOWEST_SCALE, HIGHEST_SCALE = -24, 40  # log2: past both ends fp16 holds no gradient at all
BESIDE = (5, 2)  # a slider and its buttons
_PLAYING, _MOVED_AT = "gradients:playing", "gradients:moved-at"

TICK_LENGTH = 26  # characters beside the plot: 160 px of the 470 that 800 px leave it
ROW_LIMITS = (40, 100, 1000)  # of the heat map; more than a screenful is asked for
MODEL_ORDER, WORST_FIRST = "model order", "worst first"
ZONE_COLUMNS = ("lost", "subnormal", "normal", "overflow", "zero", "not finite")

HISTORY_PX, TALLEST_ROW_PX = 560, 18
AT_ONCE_STEPS = 200  # 30 ms of reading; a longer history is read when a user asks for it
RECORDED, UNSCALED = "as recorded", "unscaled"

SHADOWED_MODULES = 40  # rows of the map of what shadows counted
UNDERFLOW_NAMES = {
    "below_range": "below range",
    "cancelled": "cancelled or flipped",
    "subnormal": "subnormal",
    "zero_before": "zero in both",
}
_COLORS = {name: color for name, color, _ in PANELS}


def pick_role(roles: Sequence[Role]) -> Role:
    """What to look at."""
    return links.select("Values", "role", roles, format_func=lambda r: ROLE_NAMES[r].capitalize())


def pick_format(run: RunInfo) -> NumberFormat:
    """The format whose limits are drawn; the run's own half format to begin with."""
    return FORMATS[links.pick("Format", "format", FORMAT_NAMES, default=own_format(run))]


def show_role(ranks: Ranks, role: Role, fmt: NumberFormat) -> None:
    """Everything about one role. It moves with its sliders without the rest of the page, and while
    playing draws itself anew at every step."""
    pace = PLAY_EVERY_S if _is_playing() else None
    st.fragment(_show, run_every=pace)(ranks, role, fmt)


def _show(ranks: Ranks, role: Role, fmt: NumberFormat) -> None:
    run = ranks[0]
    chosen = None
    with states.contained():  # the sliders are drawn before what they choose is read
        frames = RoleFrames(ranks, role)
        chosen = choose_view(frames, fmt)
    if chosen is None:
        return
    with states.contained():
        show_overview(run, chosen)
    detail = links.pick(
        "Show", "detail", DETAILS, default=ONE if st.query_params.get("module") else EVERY
    )
    if detail == EVERY:
        with states.contained():
            show_heat_map(chosen)
        with states.contained():
            show_zone_table(chosen)
        return
    # The one in most trouble until the user chooses.
    worst = chosen.frame.modules[int(np.argmax(trouble(chosen.counts)))]
    module = pick_module("Module", chosen.names, chosen.frame.modules, worst)
    if detail == ONE:
        with states.contained():
            show_histogram(chosen, module)
        with states.contained():
            show_history(frames, chosen, module)
        return
    with states.contained():
        show_underflow(run, chosen, module)


def choose_view(frames: RoleFrames, fmt: NumberFormat) -> RoleSnapshot:
    """Step and loss scale, and the histograms they lead to."""
    bad = frames.first_bad()
    span = pick_span(frames.spans, frames.spans[-1] if bad is None else bad.span)
    summed = frames.summed(span)
    exponent = scale_exponent(summed.frame.scale) if frames.role.is_gradient else None
    wanted = None if exponent is None else pick_scale(exponent)
    why_bad = bad.why if bad is not None and bad.span == span else ""
    return snapshot(frames, summed, fmt, wanted, why_bad)


def pick_span(spans: Sequence[Span], default: Span) -> Span:
    """First and last step of the frame to look at, with a play button. An address may name any step
    that a frame covers."""
    lasts = dict(spans)
    steps = list(lasts)
    asked = links.wanted_number("step")
    if asked is not None:  # the frame that covers it, else the nearest
        default = min(spans, key=lambda s: max(s[0] - asked, asked - s[1], 0))
        if asked not in lasts and default[0] <= asked <= default[1]:
            links.keep("step", default[0])
    if _is_playing():
        _move_on(steps, default[0])
    left, right = st.columns(BESIDE, vertical_alignment="bottom", gap="small")
    step = links.slide(
        "Step",
        "step",
        steps,
        default=default[0],
        format_func=lambda s: str(s) if lasts[s] == s else f"{s} to {lasts[s]}",
        place=left,
    )
    label, icon = ("Pause", "pause") if _is_playing() else ("Play", "play_arrow")
    if right.button(label, icon=f":material/{icon}:", disabled=len(steps) < 2):
        st.session_state[_PLAYING] = not _is_playing()
        st.session_state[_MOVED_AT] = time.monotonic()
        if _is_playing() and step == steps[-1]:
            st.query_params["step"] = str(steps[0])
        st.rerun(scope="app")  # the fragment's own pace is set outside of it
    return step, lasts[step]


def _is_playing() -> bool:
    return bool(st.session_state.get(_PLAYING))


def _move_on(steps: Sequence[int], default: int) -> None:
    """One step further when it is time; stop at the last."""
    now = time.monotonic()
    if now - st.session_state.get(_MOVED_AT, now) < PLAY_EVERY_S / 2:
        return  # the user moved another slider in between
    st.session_state[_MOVED_AT] = now
    at = steps.index(links.chosen("step", steps, default))
    if at + 1 < len(steps):
        st.query_params["step"] = str(steps[at + 1])
    else:
        st.session_state[_PLAYING] = False
        st.rerun(scope="app")


def pick_scale(recorded: int) -> int:
    """log2 of the loss scale to look at. It follows the run's own until the user moves it."""
    try:
        asked = int(links.wanted("scale"))
    except ValueError:
        asked = recorded
    asked = min(max(asked, LOWEST_SCALE), HIGHEST_SCALE)
    key = links.widget_key("scale", asked)

    def moved() -> None:
        if links.is_moved("scale", key):
            links.keep("scale", st.session_state[key])

    left, right = st.columns(BESIDE, vertical_alignment="bottom", gap="small")
    left.slider(
        "Loss scale",
        LOWEST_SCALE,
        HIGHEST_SCALE,
        asked,
        key=key,
        format="2^%d",
        on_change=moved,
        help=f"Now 2^{asked} = {2.0**asked:,.10g}. It moves every histogram and counts again. This "
        f"step ran at 2^{recorded} = {2.0**recorded:,.10g}; 2^0 shows the gradients themselves.",
    )
    buttons = right.container(horizontal=True, gap="small")
    for label, exponent, kept, meaning in (
        ("Recorded", recorded, None, f"2^{recorded}, the run's own"),
        ("Unscaled", 0, 0, "2^0: the gradients themselves"),
    ):
        buttons.button(
            label,
            disabled=asked == exponent,
            help=meaning,
            on_click=links.keep,
            args=("scale", kept),
        )
    return asked


def show_overview(run: RunInfo, chosen: RoleSnapshot) -> None:
    """The sentence and the key figures."""
    view, fmt = chosen.view, chosen.fmt
    chart.sentence(words.answer(view, chosen.counts, fmt.name))
    if run.spec.world > 1:
        chart.see(words.ranks_seen(chosen.summed.ranks, chosen.summed.left_out))
    if view.role.is_gradient:
        if sampled := store.shadows(run, view.role, view.span[0]):
            chart.see(words.lost_on_the_way(sampled))
        window = scale_window.common_window(chosen.summed.frame, fmt)
        if window is not None:
            excluded = scale_window.excluded_modules(chosen.summed.frame, fmt)
            name = ROLE_NAMES[view.role]
            text = window_sentence(window, chosen.names, fmt.name, name, excluded)
            chart.see(f"{text} The zones count them too." if excluded else text)
    total = chosen.counts.sum(axis=0).tolist()
    finite, whole = sum(total[:4]), sum(total)
    chart.key_figures(
        [
            _figure("Too small", total[0], finite, f"non-zero, and would be zero in {fmt.name}"),
            _figure("Subnormal", total[1], finite, f"kept in {fmt.name} with fewer bits"),
            _figure("Overflow", total[3], finite, f"beyond {fmt.name}'s largest number"),
            _figure("Not finite", total[5], whole, "NaN, +Inf and -Inf, as recorded"),
        ]
    )


def _figure(label: str, n: int, whole: int, meaning: str) -> KeyFigure:
    # Four figures side by side have room for six digits; the whole count is on hover.
    brief = count(n) if n < 10**6 else f"{n / 1e6:,.1f} M"
    value = f"{brief} ({percent(n / whole)})" if n and whole else count(n)
    return KeyFigure(label, value, f"{share(n, whole)}: {meaning}")


def show_heat_map(chosen: RoleSnapshot) -> None:
    """Module by exponent, of the modules whose name holds what is searched for."""
    modules = chosen.frame.modules
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = links.find("find", "part of a module's path")
        order = links.pick("Order", "order", (MODEL_ORDER, WORST_FIRST))
        below = zip(ROW_LIMITS, (0, *ROW_LIMITS), strict=False)
        limits = [limit for limit, fewer in below if fewer < len(modules)]
        limit = links.pick("Rows", "rows", limits) if len(limits) > 1 else ROW_LIMITS[0]
    hits = [i for i, m in enumerate(modules) if text.lower() in chosen.name(m).lower()]
    if not hits:
        st.info("No module's name holds this text.")
        return
    score = trouble(chosen.counts)
    worst = sorted(hits, key=lambda i: (-score[i], i))[:limit]
    places = worst if order == WORST_FIRST else sorted(worst)
    is_trouble = bool(score.any())
    chart.see(words.map_seen(len(places), len(hits), text, order, is_trouble=is_trouble))
    part = selected(chosen.frame, [modules[i] for i in places])
    names = [chosen.name(module) for module in part.modules]
    shift = chosen.view.shift
    rows = MapRows(
        rows=part.rows,
        ticks=short_names(names, TICK_LENGTH),
        names=[f"{name} ({dtype})" for name, dtype in zip(names, part.dtypes, strict=True)],
        shifts=[shift] * len(names),
    )
    figure = exponent_map(rows, chosen.fmt, x_title=chosen.view.axis_title, y_title="module")

    def table() -> pd.DataFrame:
        n = len(modules)
        paths = [chosen.name(module) for module in modules]
        return bins_table(
            [("step", [chosen.view.span[0]] * n), ("module", paths)], chosen.frame.rows, [shift] * n
        )

    chart.show(figure, "histograms", table, key="gradients-map", is_wide=True)
    st.caption(words.zeros_seen(chosen.view, chosen.counts))


def show_zone_table(chosen: RoleSnapshot) -> None:
    """Counts of every module, folded: dtype and the six counts."""
    table = pd.DataFrame(
        {
            "Module": [chosen.name(m) for m in chosen.frame.modules],
            "Recorded in": list(chosen.frame.dtypes),
            **{
                name.capitalize(): chosen.counts[:, column]
                for column, name in enumerate(ZONE_COLUMNS)
            },
            "Elements": chosen.counts.sum(axis=1),
        }
    )
    with chart.details("Counts of every module"):
        st.dataframe(table, hide_index=True, key="gradients-counts", height=420)
        chart.download(lambda: table, "zones", key="gradients-counts")


def show_histogram(chosen: RoleSnapshot, module: int) -> None:
    """One module's histogram in the page's view."""
    place, view = chosen.place(module), chosen.view
    row = chosen.frame.rows[place]
    chart.see(words.module_seen(chosen.name(module), chosen.counts[place], chosen.fmt.name))
    figure = exponent_bars(row, chosen.fmt, view.shift, x_title=view.axis_title)
    chart.show(
        figure,
        "histogram",
        lambda: bins_table([("step", [view.span[0]])], row[None, :], [view.shift]),
        key="gradients-module",
    )


def show_history(frames: RoleFrames, chosen: RoleSnapshot, module: int) -> None:
    """Its histograms at all recorded steps, as recorded or unscaled, never a mixture."""
    steps = len(frames.spans)
    asked = links.wanted("history") or ("on" if steps <= AT_ONCE_STEPS else "off")
    is_on = st.toggle(
        f"All {plural(steps, 'recorded step')}", asked == "on", key="gradients:history"
    )
    links.keep("history", "on" if is_on else "off")
    if not is_on:
        return
    series = frames.series(module)
    unscaled = frames.role.is_gradient and (
        links.pick("Over time", "over", (RECORDED, UNSCALED)) == UNSCALED
    )
    # The run's own scale changes over time.
    shifts = [-(scale_exponent(scale) or 0) if unscaled else 0 for scale in series.scales]
    bad = [
        s for s, row in zip(series.steps, series.rows, strict=True) if row[NAN : NEG_INF + 1].any()
    ]
    chart.see(words.history_seen(chosen.name(module), len(series.steps), bad))
    rows = MapRows(
        rows=series.rows,
        ticks=[str(step) for step in series.steps],
        names=_names(series),
        shifts=shifts,
    )
    title = f"magnitude, {UNSCALED if unscaled else RECORDED}"
    row_px = min(TALLEST_ROW_PX, HISTORY_PX / max(1, len(series.steps)))
    figure = exponent_map(rows, chosen.fmt, x_title=title, y_title="step", row_px=row_px)
    chart.show(
        figure,
        "history",
        lambda: bins_table([("step", list(series.steps))], series.rows, shifts),
        key="gradients-over-time",
        is_wide=True,
    )


def _names(series: ModuleSeries) -> list[str]:
    """Distinct: ranks may cover the same first step with frames of their own."""
    taken: Counter[str] = Counter()
    names = []
    for first, last in zip(series.steps, series.last_steps, strict=True):
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        taken[name] += 1
        names.append(name if taken[name] == 1 else f"{name} ({taken[name]})")
    return names


def bins_table(
    labels: Sequence[tuple[str, Sequence[object]]], rows: Raw, shifts: Sequence[int]
) -> pd.DataFrame:
    """One line per occupied bin of [n, RAW_LEN] rows, with magnitudes as drawn; ``labels`` are
    columns with n values each."""
    which, column = np.nonzero(rows)
    special = {POS_ZERO: "+0", NEG_ZERO: "-0", NAN: "NaN", POS_INF: "+Inf", NEG_INF: "-Inf"}
    magnitudes = [
        special.get(c) or f"2^{int(EXPONENTS[c]) + shifts[i]}"
        for i, c in zip(which.tolist(), column.tolist(), strict=True)
    ]
    return pd.DataFrame(
        {
            **{title: [values[i] for i in which.tolist()] for title, values in labels},
            "magnitude": magnitudes,
            "count": rows[which, column],
        }
    )


def show_underflow(run: RunInfo, chosen: RoleSnapshot, module: int) -> None:
    """Zeros and subnormals over time, counted against the fp32 shadow: never one number."""
    st.subheader("Zero and subnormal over time", anchor=False)
    series = shadow_series(run, chosen.view.role)
    if not series.steps:
        _say_inconclusive(run, chosen, module)
        return
    _show_shadows_of_all(series, chosen)
    _show_shadows_of_one(series, chosen, module)


def _show_shadows_of_all(series: underflow.UnderflowOverTime, chosen: RoleSnapshot) -> None:
    """Module by sampled step for one of the counts."""
    chart.see(words.underflow_seen(series, chosen.names))
    counted = links.pick(
        "Count", "count", list(UNDERFLOW_NAMES), format_func=UNDERFLOW_NAMES.__getitem__
    )
    rows = underflow.worst_modules(series, counted, SHADOWED_MODULES)
    names = [chosen.names.get(series.modules[row], "?") for row in rows]
    if len(rows) < len(series.modules):
        st.caption(f"The {len(rows)} worst of {len(series.modules):,} modules.")
    figure = underflow_map(
        getattr(series, counted)[rows],
        series.total[rows],
        series.steps,
        short_names(names, TICK_LENGTH),
        names,
        _COLORS[counted],
    )
    chart.show(
        figure,
        "underflow",
        lambda: underflow_table(series, chosen.names),
        key="underflow-map",
        is_wide=True,
    )


def _show_shadows_of_one(
    series: underflow.UnderflowOverTime, chosen: RoleSnapshot, module: int
) -> None:
    """The counts of the chosen module over time."""
    name = chosen.name(module)
    if module not in series.modules:
        chart.see(f"No shadow was taken of {cut(name)}.")
        return
    own = series.only(series.modules.index(module))
    taken = np.flatnonzero(own.total[0])
    steps = [own.steps[i] for i in taken]
    totals = own.total[0, taken].tolist()
    counts = {key: getattr(own, key)[0, taken].tolist() for key, _, _ in PANELS}
    lines = {key: ShadowCounts(steps, found, totals) for key, found in counts.items()}
    lost = own.lost[0, taken].tolist()
    chart.see(words.lines_seen(name, lost, totals, counts["below_range"]))
    chart.show(
        underflow_lines(lines),
        "underflow-module",
        lambda: underflow_table(own, chosen.names),
        key="underflow-lines",
    )


def underflow_table(series: underflow.UnderflowOverTime, names: dict[int, str]) -> pd.DataFrame:
    """One line per module and sampled step."""
    rows, columns = np.nonzero(series.total)
    return pd.DataFrame(
        {
            "step": [series.steps[c] for c in columns],
            "module": [names.get(series.modules[r], "?") for r in rows],
            **{key: getattr(series, key)[rows, columns] for key, _, _ in PANELS},
            "total": series.total[rows, columns],
        }
    )


def _say_inconclusive(run: RunInfo, chosen: RoleSnapshot, module: int) -> None:
    place = chosen.place(module)
    known = underflow.without_shadow(chosen.frame.rows[place], chosen.frame.dtypes[place])
    how = "Start the probe with --shadow-every 10 for a count."
    if run.spec.kind != "probe" or run.spec.framework != "torch":
        how = (
            "Only probes of PyTorch take a shadow. A diagnosis compares a script with its fp32 "
            "control instead."
        )
    states.nothing_recorded(
        f"No fp32 shadow holds {ROLE_NAMES[chosen.view.role]} of this run.",
        f"{words.inconclusive(known, chosen.name(module), chosen.view.span[0])} {how}",
    )
