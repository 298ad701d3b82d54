"""Pickers of the Gradients page: role, step with play and pause, loss scale, format."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from ampscope.formats import FORMATS, NumberFormat
from ampscope.records import Role, RunInfo
from app import links, store
from app.gradients import rank_frames
from app.gradients.gradient_terms import ROLE_NAMES
from app.gradients.rank_frames import Ranks, Span

FORMAT_NAMES = ("fp16", "bf16", "e4m3", "e5m2", "fp32")
LOWEST_SCALE, HIGHEST_SCALE = -24, 40  # log2: past both ends fp16 holds no gradient at all
BESIDE = (5, 2)  # a slider and its buttons
PLAY_EVERY_S = 0.8  # a drawn frame takes about 0.1 s; slower than this and the eye loses the thread
_PLAYING, _MOVED_AT, _SCALE = "gradients:playing", "gradients:moved-at", "gradients:scale"


def recorded_roles(ranks: Ranks) -> list[Role]:
    """Roles that have histograms, gradients first."""
    return [role for role in ROLE_NAMES if any(store.frame_spans(run, role) for run in ranks)]


def pick_role(roles: Sequence[Role]) -> Role:
    """What to look at."""
    return links.select("Values", "role", roles, format_func=lambda r: ROLE_NAMES[r].capitalize())


def is_playing() -> bool:
    """Whether the steps are being played."""
    return bool(st.session_state.get(_PLAYING))


def pick_span(spans: Sequence[Span]) -> Span:
    """First and last step of the frame to look at. An address may name any step that it covers."""
    lasts = dict(spans)
    asked = links.wanted_number("step")
    default = spans[-1][0]
    if asked is not None:
        default, last = rank_frames.nearest(spans, asked)
        if asked not in lasts and default <= asked <= last:
            links.keep("step", default)
    step = _pick_step(list(lasts), lasts, default)
    return step, lasts[step]


def _pick_step(steps: Sequence[int], lasts: dict[int, int], default: int) -> int:
    """Slider over the recorded steps with a play button; moves on by itself while playing."""
    if is_playing():
        _move_on(steps)
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


def _own_format(run: RunInfo) -> str:
    """bf16 where the run computes in it, else fp16; a script shows it by its activations."""
    if run.spec.kind != "probe":
        steps = store.frame_steps(run, Role.ACTIVATION)
        frame = store.frame(run, Role.ACTIVATION, steps[-1]) if steps else None
        dtypes = frame.dtypes if frame is not None else ()
        return "bf16" if "bf16" in dtypes and "fp16" not in dtypes else "fp16"
    return "bf16" if "bf16" in run.spec.precision else "fp16"


def pick_scale(recorded: int) -> int:
    """log2 of the loss scale to look at. It follows the run's own until somebody moves it."""
    asked = _asked_scale(recorded)
    links.show(_SCALE, asked)
    left, right = st.columns(BESIDE, vertical_alignment="bottom", gap="small")
    left.slider(
        "Loss scale",
        LOWEST_SCALE,
        HIGHEST_SCALE,
        key=_SCALE,
        format="2^%d",
        on_change=_keep_scale,
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


def _asked_scale(recorded: int) -> int:
    try:
        asked = int(links.wanted("scale"))
    except ValueError:
        asked = recorded
    return min(max(asked, LOWEST_SCALE), HIGHEST_SCALE)


def _keep_scale() -> None:
    links.keep("scale", st.session_state[_SCALE])


def _toggle(steps: Sequence[int], step: int) -> None:
    st.session_state[_PLAYING] = not is_playing()
    st.session_state[_MOVED_AT] = time.monotonic()
    if is_playing() and step == steps[-1]:
        st.query_params["step"] = str(steps[0])
    st.rerun(scope="app")  # the fragment's own pace is set outside of it


def _move_on(steps: Sequence[int]) -> None:
    """One step further when it is time; stop at the last."""
    now = time.monotonic()
    if now - st.session_state.get(_MOVED_AT, now) < PLAY_EVERY_S / 2:
        return  # somebody moved another slider in between
    st.session_state[_MOVED_AT] = now
    current = links.chosen("step", steps, steps[-1])
    at = steps.index(current)
    if at + 1 < len(steps):
        st.query_params["step"] = str(steps[at + 1])
    else:
        st.session_state[_PLAYING] = False
        st.rerun(scope="app")
