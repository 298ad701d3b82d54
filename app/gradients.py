"""The page Gradients: heat map, one module's histograms, underflow over time; what is looked at
(role, step, loss scale, format, ranks), its tables and its sentences.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from ampscope.analysis import underflow
from ampscope.analysis.distribution import (
    LOST,
    NONFINITE,
    NORMAL,
    OVERFLOW,
    SUBNORMAL,
    ZERO,
    scale_exponent,
    selected,
    shift_between,
    trouble,
    zone_counts,
)
from ampscope.analysis.distribution import merged as merged_rows
from ampscope.analysis.ranks import merged
from ampscope.analysis.skips import SkipCause, skip_causes
from ampscope.analysis.training import is_bad
from ampscope.numerics.formats import FORMATS, NumberFormat
from ampscope.numerics.histogram import (
    EXPONENTS,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    Raw,
    add_rows,
)
from ampscope.records import Frame, Role, RunInfo, ShadowRecord, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.series import ModuleSeries, module_series, shadow_columns
from ampscope.story.shared import format_of
from app import chart, links, states, store
from app.chart import KeyFigure
from app.figures.exponents import MapRows, exponent_bars, exponent_map
from app.figures.underflow import PANELS, Line, underflow_lines, underflow_map
from app.runs import run_page
from app.runs.module_names import names_by_index, pick_module, short_names
from app.text import count, cut, percent, plural, power, power_of_two, share

# The part of the Gradients page that moves with its sliders: drawn anew without the page.


EVERY, ONE, LOST_OVER_TIME = DETAILS = ("all modules", "one module", "lost over time")


def show_role(ranks: Ranks, role: Role, fmt: NumberFormat) -> None:
    """Everything about one role; while playing it draws itself anew at every step."""
    pace = PLAY_EVERY_S if is_playing() else None
    st.fragment(_show, run_every=pace)(ranks, role, fmt)


def _show(ranks: Ranks, role: Role, fmt: NumberFormat) -> None:
    run = ranks[0]
    look = None
    with states.part():  # the sliders are drawn before what they choose is read
        look = choose_view(ranks, role, fmt)
    if look is None:
        return
    with states.part():
        show_overview(run, look)
    detail = links.pick(
        "Show", "detail", DETAILS, default=ONE if st.query_params.get("module") else EVERY
    )
    if detail == EVERY:
        with states.part():
            show_heat_map(look)
        with states.part():
            show_zone_table(look)
        return
    module = pick_one(look)
    if detail == ONE:
        with states.part():
            show_histogram(look, module)
        with states.part():
            show_history(ranks, look, module)
        return
    with states.part():
        series = show_underflow(run, look, module)
        if series is not None:
            show_underflow_of(series, look, module)


# Pickers of the Gradients page: role, step with play and pause, loss scale, format.


FORMAT_NAMES = ("fp16", "bf16", "e4m3", "e5m2", "fp32")
LOWEST_SCALE, HIGHEST_SCALE = -24, 40  # log2: past both ends fp16 holds no gradient at all
BESIDE = (5, 2)  # a slider and its buttons
PLAY_EVERY_S = 0.8  # a drawn frame takes about 0.1 s; slower than this and the eye loses the thread
_PLAYING, _MOVED_AT = "gradients:playing", "gradients:moved-at"


def recorded_roles(ranks: Ranks) -> list[Role]:
    """Roles that have histograms, gradients first."""
    return [role for role in ROLE_NAMES if any(store.frame_spans(run, role) for run in ranks)]


def pick_role(roles: Sequence[Role]) -> Role:
    """What to look at."""
    return links.select("Values", "role", roles, format_func=lambda r: ROLE_NAMES[r].capitalize())


def is_playing() -> bool:
    """Whether the steps are being played."""
    return bool(st.session_state.get(_PLAYING))


def pick_span(spans: Sequence[Span], bad: BadStep | None) -> Span:
    """First and last step of the frame to look at: the one with the first ``bad`` step, else the
    newest. An address may name any step that a frame covers."""
    lasts = dict(spans)
    asked = links.wanted_number("step")
    default = spans[-1][0] if bad is None else bad.span[0]
    if asked is not None:
        default, last = nearest(spans, asked)
        if asked not in lasts and default <= asked <= last:
            links.keep("step", default)
    step = _pick_step(list(lasts), lasts, default)
    return step, lasts[step]


def _pick_step(steps: Sequence[int], lasts: dict[int, int], default: int) -> int:
    """Slider over the recorded steps with a play button; moves on by itself while playing."""
    if is_playing():
        _move_on(steps, default)
    left, right = st.columns(BESIDE, vertical_alignment="bottom", gap="small")
    step = links.slide(
        "Step",
        "step",
        steps,
        default=default,
        format_func=lambda s: str(s) if lasts[s] == s else f"{s} to {lasts[s]}",
        place=left,
    )
    label = "Pause" if is_playing() else "Play"
    icon = ":material/pause:" if is_playing() else ":material/play_arrow:"
    if right.button(label, icon=icon, disabled=len(steps) < 2):
        _toggle(steps, step)
    return step


def pick_format(run: RunInfo) -> NumberFormat:
    """The format whose limits are drawn; the run's own half format to begin with."""
    name = links.pick("Format", "format", FORMAT_NAMES, default=_own_format(run))
    return FORMATS[name]


@store.of_run
def _own_format(reader: Reader, run_id: str) -> str:
    return format_of(reader, reader.run(run_id)).name


def pick_scale(recorded: int) -> int:
    """log2 of the loss scale to look at. It follows the run's own until the user moves it."""
    asked = _asked_scale(recorded)
    key = links.widget_key("scale", asked)
    left, right = st.columns(BESIDE, vertical_alignment="bottom", gap="small")
    left.slider(
        "Loss scale",
        LOWEST_SCALE,
        HIGHEST_SCALE,
        asked,
        key=key,
        format="2^%d",
        on_change=_scale_moved,
        args=(key,),
        help=f"Now 2^{asked} = {2.0**asked:,.10g}. It moves every histogram and counts again. This "
        f"step ran at 2^{recorded} = {2.0**recorded:,.10g}; 2^0 shows the gradients themselves.",
    )
    buttons = right.container(horizontal=True, gap="small")
    buttons.button(
        "Recorded",
        disabled=asked == recorded,
        help=f"2^{recorded}, the run's own",
        on_click=links.keep,
        args=("scale", None),
    )
    buttons.button(
        "Unscaled",
        disabled=asked == 0,
        help="2^0: the gradients themselves",
        on_click=links.keep,
        args=("scale", 0),
    )
    return asked


def _scale_moved(key: str) -> None:
    if links.is_moved("scale", key):
        links.keep("scale", st.session_state[key])


def _asked_scale(recorded: int) -> int:
    try:
        asked = int(links.wanted("scale"))
    except ValueError:
        asked = recorded
    return min(max(asked, LOWEST_SCALE), HIGHEST_SCALE)


def _toggle(steps: Sequence[int], step: int) -> None:
    st.session_state[_PLAYING] = not is_playing()
    st.session_state[_MOVED_AT] = time.monotonic()
    if is_playing() and step == steps[-1]:
        st.query_params["step"] = str(steps[0])
    st.rerun(scope="app")  # the fragment's own pace is set outside of it


def _move_on(steps: Sequence[int], default: int) -> None:
    """One step further when it is time; stop at the last."""
    now = time.monotonic()
    if now - st.session_state.get(_MOVED_AT, now) < PLAY_EVERY_S / 2:
        return  # the user moved another slider in between
    st.session_state[_MOVED_AT] = now
    current = links.chosen("step", steps, default)
    at = steps.index(current)
    if at + 1 < len(steps):
        st.query_params["step"] = str(steps[at + 1])
    else:
        st.session_state[_PLAYING] = False
        st.rerun(scope="app")


# Histograms of one run, or of all ranks of a training added up.
#
# Each rank thins its frames by itself. They add where they cover the same steps at the same loss
# scale; a rank whose frame covers others is left out of that sum, and the page says which.


Ranks = tuple[RunInfo, ...]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shown:
    """One frame to look at, and what it is made of."""

    frame: Frame
    ranks: tuple[int, ...]  # whose counts are in it
    left_out: tuple[int, ...]  # ranks that cover this step with other ones, or have lost it
    recorded_steps: int | None  # how many it adds up; None where that cannot be told


def frame_spans(ranks: Ranks, role: Role) -> list[Span]:
    """First and last steps of the frames of any rank; one a first step, the longest."""
    longest: dict[int, int] = {}
    for run in ranks:
        for first, last in store.frame_spans(run, role):
            longest[first] = max(last, longest.get(first, last))
    return sorted(longest.items())


def summed_frame(ranks: Ranks, role: Role, span: Span) -> Shown | None:
    """The frame of a span, added up over the ranks that recorded just these steps."""
    having = [run for run in ranks if store.frame_spans(run, role)]
    found = {run.spec.rank: store.frame(run, role, span[0]) for run in having}
    same = {r: f for r, f in found.items() if f is not None and _span(f) == span}
    if not same:
        return None
    scale = next(iter(same.values())).scale
    added = {r: f for r, f in same.items() if f.scale == scale}
    frame = merged(list(added.values())) if len(added) > 1 else next(iter(added.values()))
    left_out = tuple(rank for rank in found if rank not in added)
    one = next(run for run in having if run.spec.rank in added)
    newest = store.frame(one, role, store.frame_spans(one, role)[-1][0])
    return Shown(frame, tuple(added), left_out, recorded_steps(added[one.spec.rank], newest))


def recorded_steps(frame: Frame, single: Frame | None) -> int | None:
    """How many recorded steps a frame adds up. Each counts as many elements as ``single``, a frame
    of one step; where batches differ in size the division leaves a rest, and nothing is said."""
    if frame.last_step is None or frame.last_step == frame.step:
        return 1
    if single is None or single.last_step not in (None, single.step):
        return None
    whole, part = int(frame.rows.sum()), int(single.rows.sum())
    return whole // part if part and whole % part == 0 else None


def rank_series(ranks: Ranks, role: Role, module: int) -> ModuleSeries:
    """One module's histograms over time. Rows of the same steps and scale are added up; where the
    ranks differ there is a row for each."""
    found = [_series(run, role, module) for run in ranks]
    spans_ = [
        key
        for own in found
        for key in zip(own.steps, own.last_steps or own.steps, own.scales, strict=True)
    ]
    keys, rows = add_rows(spans_, np.concatenate([own.rows for own in found]))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return ModuleSeries(
        tuple(keys[n][0] for n in order),
        tuple(keys[n][2] for n in order),
        rows[order],
        tuple(keys[n][1] for n in order),
    )


@store.of_run
def _series(reader: Reader, run_id: str, role: Role, module: int) -> ModuleSeries:
    return module_series(reader, run_id, role, module)


def _span(frame: Frame) -> Span:
    return frame.step, frame.step if frame.last_step is None else frame.last_step


@dataclass(frozen=True, slots=True)
class BadStep:
    """The first bad step that a frame covers."""

    span: Span
    why: str


def first_bad(ranks: Ranks, spans: Sequence[Span]) -> BadStep | None:
    """The first step of any rank that was not finite or was skipped, and whose histograms were
    recorded. A skip with which GradScaler finds its scale is none: healthy runs have it."""
    bad = [found for run in ranks for found in _bad_steps(run)]
    starts = [first for first, _ in spans]
    for step, why in sorted(bad):
        place = bisect_right(starts, step) - 1
        if place >= 0 and step <= spans[place][1]:
            return BadStep(spans[place], why)
    return None


def _bad_steps(run: RunInfo) -> list[tuple[int, str]]:
    """Step, and why it is bad, in order."""
    steps = store.steps(run)
    if not any(map(is_bad, steps)):
        return []
    causes = skip_causes(steps, run_page.optimizers(run), run_page.skip_evidence(run, 0))
    searches = (SkipCause.CALIBRATION, SkipCause.GROWTH)
    return [
        (s.step, _why_bad(s)) for s in steps if is_bad(s) and causes.get(s.step) not in searches
    ]


def _why_bad(step: StepRecord) -> str:
    if step.loss is not None and not math.isfinite(step.loss):
        return "the loss is not finite"
    return "it was skipped" if step.skipped else "gradients are not finite"


def nearest(spans_: Sequence[Span], step: int) -> Span:
    """The span that covers a step, else the one that lies nearest to it."""
    return min(spans_, key=lambda s: max(s[0] - step, step - s[1], 0))


# What the Gradients page looks at, and what roles and numbers are called.


ROLE_NAMES = {
    Role.GRAD_OUTPUT: "output gradients",
    Role.WEIGHT_GRAD: "weight gradients",
    Role.ACTIVATION: "activations",
    Role.WEIGHT: "weights",
    Role.UPDATE: "weight updates",
}
UNDERFLOW_NAMES = {
    "below_range": "below range",
    "cancelled": "cancelled or flipped",
    "subnormal": "subnormal",
    "zero_before": "zero in both",
}


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at: one role at one step, as recorded or at another loss scale."""

    role: Role
    step: int  # of a frame that adds up several steps, the first
    format_name: str
    recorded_scale: float
    wanted_exponent: int | None  # None where no loss scale multiplies these values
    shift: int
    last_step: int | None = None
    recorded_steps: int | None = 1  # in the frame; None where that cannot be told
    why_bad: str = ""  # of the first bad step with histograms, which these are

    @property
    def when(self) -> str:
        """Which steps are shown, and that these hold the first bad one."""
        return self._steps + (f", the first bad one recorded ({self.why_bad})" * bool(self.why_bad))

    @property
    def _steps(self) -> str:
        if self.last_step is None or self.last_step == self.step:
            return f"Step {self.step}"
        many = f"{self.recorded_steps:,} recorded steps" if self.recorded_steps else "several steps"
        return f"Steps {self.step:,} to {self.last_step:,} ({many} added up)"

    @property
    def is_plain(self) -> bool:
        """True where the recorded gradients carry no scale: it is 1, or there is no scaler."""
        return self.recorded_scale == 1.0

    @property
    def axis_title(self) -> str:
        """Title of the magnitude axis, in Plotly's markup: at which loss scale the values are
        shown."""
        if not self.role.is_gradient:
            return "magnitude, as recorded"
        if self.wanted_exponent is None or self.shift == 0:
            exponent = scale_exponent(self.recorded_scale)
            scale = f"{self.recorded_scale:g}" if exponent is None else power(exponent)
            return f"magnitude, as recorded{'' if self.is_plain else f' (× {scale})'}"
        kind = "unscaled" if self.wanted_exponent == 0 else "at another scale"
        return f"magnitude, {kind} (× {power(self.wanted_exponent)})"

    @property
    def title(self) -> str:
        """Which of the views this is; the views are never mixed."""
        if not self.role.is_gradient:
            return "as recorded"
        recorded = power_of_two(self.recorded_scale)
        if self.wanted_exponent is None:
            return f"as recorded, at loss scale {recorded}"
        if self.shift == 0 and self.is_plain:
            return "as recorded, with no loss scale in them"
        if self.shift == 0:
            return f"as recorded, at the run's loss scale {recorded}"
        if self.wanted_exponent == 0:
            return f"unscaled (recorded at loss scale {recorded})"
        return f"as if the loss scale were 2^{self.wanted_exponent} (recorded at {recorded})"


# The heat map of the Gradients page: what is looked at, which modules, and how it is drawn.


TICK_LENGTH = 26  # characters beside the plot: 160 px of the 470 that 800 px leave it
SHOWN = (40, 100, 1000)  # rows of the heat map; more than a screenful is asked for
MODEL_ORDER, WORST_FIRST = "model order", "worst first"


def choose_view(ranks: Ranks, role: Role, fmt: NumberFormat) -> Look:
    """Step and loss scale, and the histograms they lead to."""
    spans = frame_spans(ranks, role)
    bad = first_bad(ranks, spans)
    span = pick_span(spans, bad)
    found = summed_frame(ranks, role, span)
    if found is None:
        raise LookupError(f"step {span[0]} of {role} was listed and is gone")
    frame = merged_rows(found.frame)
    exponent = scale_exponent(frame.scale) if role.is_gradient else None
    wanted = None if exponent is None else pick_scale(exponent)
    shift = (shift_between(frame.scale, wanted) if wanted is not None else None) or 0
    why = bad.why if bad is not None and bad.span == span else ""
    counted = found.recorded_steps
    view = View(role, span[0], fmt.name, frame.scale, wanted, shift, span[1], counted, why)
    names = names_by_index(store.modules(ranks[0]))
    counts = zone_counts(frame, fmt, shift)
    return Look(view, frame, found.frame, fmt, counts, names, found.ranks, found.left_out)


def show_overview(run: RunInfo, look: Look) -> None:
    """The sentence and the key figures."""
    chart.sentence(answer(look.view, look.counts))
    if run.spec.world > 1:
        chart.see(ranks_seen(look.ranks, look.left_out))
    sampled = store.shadows(run, look.view.role, look.view.step)
    if sampled and look.view.role.is_gradient:
        chart.see(lost_on_the_way(sampled))
    window = (
        underflow.common_window(look.recorded, look.fmt) if look.view.role.is_gradient else None
    )
    if window is not None:
        excluded = underflow.excluded_modules(look.recorded, look.fmt)
        name = ROLE_NAMES[look.view.role]
        said = run_page.sentence(window, look.names, look.fmt.name, name, excluded)
        chart.see(f"{said} The zones count them too." if excluded else said)
    total = look.counts.sum(axis=0).tolist()
    finite, whole, fmt = sum(total[:4]), sum(total), look.fmt.name
    chart.key_figures(
        [
            _figure("Too small", total[0], finite, f"non-zero, and would be zero in {fmt}"),
            _figure("Subnormal", total[1], finite, f"kept in {fmt} with fewer bits"),
            _figure("Overflow", total[3], finite, f"beyond {fmt}'s largest number"),
            _figure("Not finite", total[5], whole, "NaN, +Inf and -Inf, as recorded"),
        ]
    )


def show_heat_map(look: Look) -> None:
    """Module by exponent."""
    text, order, limit = _pick_rows(look)
    hits = matching_rows(look, text)
    if not hits:
        st.info("No module's name holds this text.")
        return
    places = rows_to_show(look, hits, order, limit)
    is_trouble = bool(trouble(look.counts).any())
    chart.see(map_seen(len(places), len(hits), text, order, is_trouble=is_trouble))
    part = selected(look.frame, [look.frame.modules[i] for i in places])
    names = [name_in(look, module) for module in part.modules]
    rows = MapRows(
        rows=part.rows,
        ticks=short_names(names, TICK_LENGTH),
        names=[f"{name} ({dtype})" for name, dtype in zip(names, part.dtypes, strict=True)],
        shifts=[look.view.shift] * len(names),
    )
    figure = exponent_map(rows, look.fmt, x_title=look.view.axis_title, y_title="module")
    chart.show(
        figure, "histograms", lambda: histogram_table(look), key="gradients-map", is_wide=True
    )
    st.caption(zeros_seen(look.view, look.counts))


def show_zone_table(look: Look) -> None:
    """Counts of every module, folded."""
    with chart.details("Counts of every module"):
        table = counts_table(look)
        st.dataframe(table, hide_index=True, key="gradients-counts", height=420)
        chart.download(lambda: table, "zones", key="gradients-counts")


def matching_rows(look: Look, text: str) -> list[int]:
    """Places in the frame of the modules whose name holds ``text``, whatever the case."""
    wanted = text.lower()
    return [i for i, m in enumerate(look.frame.modules) if wanted in name_in(look, m).lower()]


def rows_to_show(look: Look, hits: Sequence[int], order: str, limit: int) -> list[int]:
    """At most ``limit`` of ``hits``: those in most trouble, and then in the order asked for."""
    score = trouble(look.counts)
    worst = sorted(hits, key=lambda i: (-score[i], i))[:limit]
    return worst if order == WORST_FIRST else sorted(worst)


def _pick_rows(look: Look) -> tuple[str, str, int]:
    """Search, order and limit."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = links.find("find", "part of a module's path")
        order = links.pick("Order", "order", (MODEL_ORDER, WORST_FIRST))
        modules = len(look.frame.modules)
        limits = [n for i, n in enumerate(SHOWN) if i == 0 or SHOWN[i - 1] < modules]
        limit = links.pick("Rows", "rows", limits) if len(limits) > 1 else limits[0]
    return text, order, limit


def _figure(label: str, n: int, whole: int, meaning: str) -> KeyFigure:
    value = f"{_brief(n)} ({percent(n / whole)})" if n and whole else count(n)
    return KeyFigure(label, value, f"{share(n, whole)}: {meaning}")


def _brief(n: int) -> str:
    """Four figures side by side have room for six digits; the whole count is on hover."""
    return count(n) if n < 10**6 else f"{n / 1e6:,.1f} M"


# One module in detail: its histogram at this step, and at every recorded step.


HISTORY_PX, TALLEST_ROW_PX = 560, 18
AT_ONCE_STEPS = 200  # 30 ms of reading; a longer history is read when a user asks for it
_HISTORY = "gradients:history"
RECORDED, UNSCALED = "as recorded", "unscaled"


def pick_one(look: Look) -> int:
    """The module in detail: the one in most trouble until the user chooses."""
    worst = look.frame.modules[int(np.argmax(trouble(look.counts)))]
    return pick_module("Module", look.names, look.frame.modules, worst)


def show_histogram(look: Look, module: int) -> None:
    """Its histogram in the page's view."""
    place = look.frame.modules.index(module)
    row, counts = look.frame.rows[place], look.counts[place]
    chart.see(module_seen(name_in(look, module), counts, look.fmt.name))
    figure = exponent_bars(row, look.fmt, look.view.shift, x_title=look.view.axis_title)
    chart.show(
        figure,
        "histogram",
        lambda: bins_table([("step", [look.view.step])], row[None, :], [look.view.shift]),
        key="gradients-module",
    )


def show_history(ranks: Ranks, look: Look, module: int) -> None:
    """Its histograms at all recorded steps, as recorded or unscaled, never a mixture."""
    steps = len(frame_spans(ranks, look.view.role))
    if not _wants_history(steps):
        return
    series = rank_series(ranks, look.view.role, module)
    unscaled = look.view.role.is_gradient and (
        links.pick("Over time", "over", (RECORDED, UNSCALED)) == UNSCALED
    )
    shifts = shifts_of(series, unscaled=unscaled)
    bad = [
        s for s, row in zip(series.steps, series.rows, strict=True) if row[NAN : NEG_INF + 1].any()
    ]
    first = bad[0] if bad else None
    name = name_in(look, module)
    chart.see(history_seen(name, len(series.steps), len(bad), first))
    rows = MapRows(
        rows=series.rows,
        ticks=[str(step) for step in series.steps],
        names=_names(series),
        shifts=shifts,
    )
    title = "magnitude, unscaled" if unscaled else "magnitude, as recorded"
    row_px = min(TALLEST_ROW_PX, HISTORY_PX / max(1, len(series.steps)))
    figure = exponent_map(rows, look.fmt, x_title=title, y_title="step", row_px=row_px)
    chart.show(
        figure,
        "history",
        lambda: bins_table([("step", list(series.steps))], series.rows, shifts),
        key="gradients-over-time",
        is_wide=True,
    )


def shifts_of(series: ModuleSeries, *, unscaled: bool) -> list[int]:
    """Powers of two by which each step's row moves: the run's own scale changes over time."""
    if not unscaled:
        return [0] * len(series.steps)
    return [-(scale_exponent(scale) or 0) for scale in series.scales]


def _names(series: ModuleSeries) -> list[str]:
    """Distinct: ranks may cover the same first step with frames of their own."""
    whole = [
        f"step {first}" if first == last else f"steps {first} to {last}"
        for first, last in zip(series.steps, series.last_steps, strict=True)
    ]
    seen: Counter[str] = Counter()
    names = []
    for name in whole:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _wants_history(steps: int) -> bool:
    """Bound to the URL's ``history``; a long one waits until the user asks for it."""
    asked = links.wanted("history") or ("on" if steps <= AT_ONCE_STEPS else "off")
    is_on = st.toggle(f"All {plural(steps, 'recorded step')}", asked == "on", key=_HISTORY)
    links.keep("history", "on" if is_on else "off")
    return is_on


# What the Gradients page draws of one role at one step, and its tables.


ZONE_COLUMNS = ("lost", "subnormal", "normal", "overflow", "zero", "not finite")


@dataclass(frozen=True, slots=True)
class Look:
    """One role at one step in one view: everything the page draws of it."""

    view: View
    frame: Frame  # one row per module, in the model's order
    recorded: Frame  # one row per module and dtype
    fmt: NumberFormat
    counts: Raw  # [modules, 6]
    names: dict[int, str]
    ranks: tuple[int, ...] = (0,)  # whose counts these are
    left_out: tuple[int, ...] = ()


def counts_table(look: Look) -> pd.DataFrame:
    """One line per module: dtype and the six counts."""
    return pd.DataFrame(
        {
            "Module": [name_in(look, m) for m in look.frame.modules],
            "Recorded in": list(look.frame.dtypes),
            **{
                name.capitalize(): look.counts[:, column]
                for column, name in enumerate(ZONE_COLUMNS)
            },
            "Elements": look.counts.sum(axis=1),
        }
    )


def histogram_table(look: Look) -> pd.DataFrame:
    """One line per module and occupied bin, with magnitudes as drawn."""
    names = [name_in(look, module) for module in look.frame.modules]
    shifts = [look.view.shift] * len(names)
    return bins_table(
        [("step", [look.view.step] * len(names)), ("module", names)], look.frame.rows, shifts
    )


def bins_table(
    labels: Sequence[tuple[str, Sequence[object]]], rows: Raw, shifts: Sequence[int]
) -> pd.DataFrame:
    """One line per occupied bin of [n, RAW_LEN] rows; ``labels`` are columns with n values each."""
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


def name_in(look: Look, module: int) -> str:
    """The module's name."""
    return look.names.get(module, f"module {module}")


# Sentences of the Gradients page, computed from counts.


def answer(view: View, counts: Raw) -> str:
    """The page's sentence; ``counts`` is [modules, 6]."""
    name = ROLE_NAMES[view.role]
    start = f"{view.when}, {name} {view.title}: "
    total = counts.sum(axis=0)
    finite = int(total[[LOST, SUBNORMAL, NORMAL, OVERFLOW]].sum())
    parts = [_not_finite(counts)] if total[NONFINITE] else []
    if 2 * total[ZERO] > total.sum():  # more than half: whatever follows is about the rest
        parts.append(f"{share(int(total[ZERO]), int(total.sum()))} were recorded as exactly zero")
    if finite == 0:
        parts.append("no element is finite and non-zero")
        return start + "; ".join(parts) + "."
    fmt = view.format_name
    told = [
        (OVERFLOW, f"overflow {fmt}"),
        (LOST, f"are too small for {fmt} and would be zero in it"),
        (SUBNORMAL, f"are subnormal in {fmt} (fewer bits)"),
    ]
    found = [
        f"{total[column]:,} ({percent(total[column] / finite)}) {words}"
        for column, words in told
        if total[column]
    ]
    if found:
        parts.append(f"of {finite:,} finite non-zero elements " + " and ".join(found))
    else:
        parts.append(f"all {finite:,} finite non-zero elements are normal numbers in {fmt}")
    return start + "; ".join(parts) + "."


def ranks_seen(ranks: Sequence[int], left_out: Sequence[int]) -> str:
    """Whose counts are shown, of a training of several ranks."""
    if len(ranks) == 1 and not left_out:
        return f"Counted by rank {ranks[0]}."
    text = f"Added up over {plural(len(ranks), 'rank')} ({', '.join(map(str, ranks))})."
    if left_out:
        named = ", ".join(map(str, left_out))
        text += f" Not in the sum, because its histograms cover other steps: rank {named}."
    return text


def zeros_seen(view: View, counts: Raw) -> str:
    """What the chart cannot say about elements that were zero or not finite when recorded."""
    total = counts.sum(axis=0)
    text = f"{share(int(total[ZERO]), int(total.sum()))} of the elements are exactly zero."
    if total[ZERO] and view.role.is_gradient:
        text += " Whether they were lost, only the shadow can tell: see lost over time."
    if view.shift and (total[ZERO] or total[NONFINITE]):
        text += " Another loss scale does not move zeros, NaN and Inf that were recorded."
    return text


def map_seen(shown: int, hits: int, text: str, order: str, *, is_trouble: bool) -> str:
    """Above the heat map: how many of the modules that hold ``text`` it shows, and which."""
    found = f" whose path holds “{text}”" if text else ""
    words = "The hue is the zone; the opacity is the share of the module's elements."
    if shown < hits:
        which = f"The {shown} modules in most trouble" if is_trouble else f"The first {shown}"
        return f"{which} of {hits:,}{found}, {order}. {words}"
    return f"{plural(hits, 'module')}{found}, {order}. {words}"


def underflow_seen(series: underflow.UnderflowOverTime, names: dict[int, str]) -> str:
    """What the shadows found, over all modules and sampled steps."""
    totals = int(series.total.sum())
    lost = (
        f"{_part(series.below_range, totals)} below the format's range, "
        f"{_part(series.cancelled, totals)} cancelled or flipped"
    )
    text = (
        f"At {plural(len(series.steps), 'sampled step')}, of {totals:,} elements the shadow found "
        f"{lost}, {_part(series.subnormal, totals)} subnormal and "
        f"{_part(series.zero_before, totals)} zero in both."
    )
    if not series.lost.any():
        return text
    shares = np.nan_to_num(series.share("lost"))
    row, column = np.unravel_index(int(shares.argmax()), shares.shape)
    worst = cut(names.get(series.modules[row], "?"))
    return text + (
        f" Worst: {worst} at step {series.steps[column]}, {percent(float(shares[row, column]))}"
        " lost."
    )


def inconclusive(known: underflow.WithoutShadow, name: str, step: int) -> str:
    """What the histogram of one module says where no shadow was taken."""
    return (
        f"No shadow was taken, so how many gradients were lost is not known. In {cut(name)} at "
        f"step {step}, {share(known.zero, known.total)} elements are zero: any number of them, "
        f"from none to all, may have been lost. {count(known.subnormal)} are subnormal."
    )


def module_seen(name: str, row_counts: Raw, format_name: str) -> str:
    """Above one module's histogram; ``row_counts`` is [6]."""
    finite = int(row_counts[[LOST, SUBNORMAL, NORMAL, OVERFLOW]].sum())
    parts = [
        f"{share(int(row_counts[column]), finite)} {word}"
        for column, word in (
            (LOST, "too small"),
            (SUBNORMAL, "subnormal"),
            (OVERFLOW, "overflowing"),
        )
        if row_counts[column]
    ]
    if row_counts[NONFINITE]:
        parts.insert(0, f"{count(int(row_counts[NONFINITE]))} not finite")
    told = ", ".join(parts) if parts else f"all {finite:,} finite non-zero elements normal"
    return f"{cut(name)} in {format_name}: {told}; {count(int(row_counts[ZERO]))} exactly zero."


def history_seen(name: str, steps: int, nonfinite_steps: int, first: int | None) -> str:
    """Above one module's histograms over time."""
    text = f"{cut(name)} at {plural(steps, 'recorded step')}, the first at the top."
    if nonfinite_steps and first is not None:
        return f"{text} NaN or Inf at {plural(nonfinite_steps, 'step')}, first at step {first}."
    return text + " Never NaN or Inf."


def _not_finite(counts: Raw) -> str:
    modules = int((counts[:, NONFINITE] > 0).sum())
    n, whole = int(counts[:, NONFINITE].sum()), int(counts.sum())
    return f"{share(n, whole)}, are NaN or Inf, in {plural(modules, 'module')}"


def _part(counts: underflow.Counts, whole: int) -> str:
    n = int(counts.sum())
    return f"{n:,} ({percent(n / whole)})" if whole else count(n)


def lines_seen(name: str, lost: Sequence[int], totals: Sequence[int], below: Sequence[int]) -> str:
    """Above the counts of one module; of the ``lost`` ones, ``below`` are below the format's
    range."""
    steps = plural(len(totals), "sampled step")
    hit = sum(n > 0 for n in lost)
    if not hit:
        return f"{cut(name)}: nothing lost at {steps}."
    worst = max(range(len(lost)), key=lambda i: lost[i] / max(totals[i], 1))
    most = share(lost[worst], totals[worst])
    text = f"{cut(name)}: lost elements at {hit} of {steps}, at most {most}."
    return f"{text} {share(sum(below), sum(lost))} of all lost ones are below the format's range."


# What the fp32 shadow of one step says beside the histogram.


def lost_on_the_way(sampled: Sequence[ShadowRecord]) -> str:
    """What had become zero before it could be counted: the histogram alone cannot tell."""
    lost, total = sum(s.lost for s in sampled), sum(s.total for s in sampled)
    if not lost:
        return "Against the fp32 shadow of this step nothing was lost on the way."
    below = sum(s.below_range for s in sampled)
    return (
        f"Against the fp32 shadow of this step {share(lost, total)} of all elements were lost "
        f"on the way: zero as recorded, not zero in fp32. {share(below, lost)} of these are below "
        "the format's range; the others cancelled or flipped. No histogram shows those, and no "
        "scale that is applied now brings them back."
    )


# Zeros and subnormals over time, counted against the fp32 shadow: never one number.


SHOWN_MODULES = 40
_COLORS = {name: color for name, color, _ in PANELS}


def show_underflow(run: RunInfo, look: Look, module: int) -> underflow.UnderflowOverTime | None:
    """Module by sampled step for one of the counts; None where there is no shadow."""
    st.subheader("Zero and subnormal over time", anchor=False)
    series = _underflow_series(run, look.view.role)
    if not series.steps:
        _say_inconclusive(run, look, module)
        return None
    chart.see(underflow_seen(series, look.names))
    names_of = UNDERFLOW_NAMES
    counted = links.pick("Count", "count", list(names_of), format_func=lambda key: names_of[key])
    rows = underflow.worst_modules(series, counted, SHOWN_MODULES)
    names = [look.names.get(series.modules[row], "?") for row in rows]
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
        lambda: underflow_table(series, look.names),
        key="underflow-map",
        is_wide=True,
    )
    return series


def show_underflow_of(series: underflow.UnderflowOverTime, look: Look, module: int) -> None:
    """The counts of the chosen module over time."""
    name = name_in(look, module)
    if module not in series.modules:
        chart.see(f"No shadow was taken of {cut(name)}.")
        return
    row = series.modules.index(module)
    taken = [i for i, total in enumerate(series.total[row]) if total]
    totals = [int(series.total[row, i]) for i in taken]
    lines = {
        key: Line(
            [series.steps[i] for i in taken],
            [int(getattr(series, key)[row, i]) for i in taken],
            totals,
        )
        for key, _, _ in PANELS
    }
    lost = [int(series.lost[row, i]) for i in taken]
    below = [int(series.below_range[row, i]) for i in taken]
    chart.see(lines_seen(name, lost, totals, below))
    figure = underflow_lines(lines)
    own = series.only(row)
    chart.show(
        figure, "underflow-module", lambda: underflow_table(own, look.names), key="underflow-lines"
    )


def underflow_table(series: underflow.UnderflowOverTime, names: dict[int, str]) -> pd.DataFrame:
    """One line per module and sampled step."""
    cells = [
        (row, column)
        for row in range(len(series.modules))
        for column in range(len(series.steps))
        if series.total[row, column]
    ]
    return pd.DataFrame(
        {
            "step": [series.steps[c] for _, c in cells],
            "module": [names.get(series.modules[r], "?") for r, _ in cells],
            **{key: [int(getattr(series, key)[cell]) for cell in cells] for key, _, _ in PANELS},
            "total": [int(series.total[cell]) for cell in cells],
        }
    )


@store.of_run
def _underflow_series(reader: Reader, run_id: str, role: Role) -> underflow.UnderflowOverTime:
    return underflow.from_columns(shadow_columns(reader, run_id, role))


def _say_inconclusive(run: RunInfo, look: Look, module: int) -> None:
    place = look.frame.modules.index(module)
    known = underflow.without_shadow(look.frame.rows[place], look.frame.dtypes[place])
    role: Role = look.view.role
    how = "Start the probe with --shadow-every 10 for a count."
    if run.spec.kind != "probe" or run.spec.framework != "torch":
        how = (
            "Only probes of PyTorch take a shadow. A diagnosis compares a script with its fp32 "
            "control instead."
        )
    states.nothing_recorded(
        f"No fp32 shadow holds {ROLE_NAMES[role]} of this run.",
        f"{inconclusive(known, name_in(look, module), look.view.step)} {how}",
    )
