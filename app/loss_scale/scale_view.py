"""Sections of the Loss scale page: trajectory, and for every skip who held the NaN or Inf."""

from __future__ import annotations

import dataclasses

import pandas as pd
import streamlit as st

from ampscope.analysis.skips import BadStep
from ampscope.records import NonFiniteRecord, RunInfo, StepRecord
from ampscope.report.words import loss_scale
from app import chart, layout, links, sitemap, states, store
from app.figures.scale_trajectory import scale_trajectory
from app.layout import KeyFigure
from app.loss_scale import scale_bad_steps, scale_data, scale_words
from app.loss_scale.scale_data import Trajectory
from app.text import plural, power_of_two, share

TABLE_PX = 380
WHY = (
    "calibration: the next step was taken at a smaller scale, and none near it at this one, which "
    "is how GradScaler finds its scale. growth probing: the same, right after the scale had grown. "
    "spike: steps near it were taken at this scale, and this step's gradients are too large for it "
    "in fp32 too. born as NaN: no gradient holds Inf, so nothing overflowed. fault: the loss or "
    "fp32's own gradients were not finite, or a scale of 1 did not help. unclear: none of these."
)


def overview(found: Trajectory) -> None:
    """The sentence and the key figures."""
    summary, loss, totals = found.summary, found.loss, found.totals
    layout.sentence(loss_scale.answer(summary, totals, loss))
    layout.key_figures(
        [
            KeyFigure(
                "Skipped steps",
                f"{totals.skipped:,} of {totals.steps:,}",
                f"{share(totals.skipped, totals.steps)} steps left the weights as they were",
            ),
            _scale_figure(summary.last_scale),
            KeyFigure("Growths", f"{len(summary.growths):,}", _growth_help(found.steps)),
            KeyFigure(
                "Losses not finite",
                f"{totals.nonfinite_losses:,}",
                f"Of the shown steps: NaN {len(loss.nan_steps)}, +Inf {len(loss.pos_inf_steps)}, "
                f"-Inf {len(loss.neg_inf_steps)}",
            ),
        ]
    )


def trajectory(found: Trajectory) -> None:
    """The chart."""
    if found.summary.last_scale is None:
        states.nothing_recorded(
            "This run has no loss scale.",
            "It ran without a GradScaler; its loss and gradient norm are below.",
        )
    scale_data.pick_span(found)
    layout.see(scale_words.chart_seen(found))
    figure = scale_trajectory(found.steps, found.loss, found.norm)
    chart.show(figure, "loss-scale", lambda: steps_table(found.steps), key="loss-scale")


def skips(run: RunInfo, found: Trajectory) -> None:
    """Skipped steps, and the parameters of one."""
    st.subheader("Skipped steps", anchor=False)
    bad = scale_bad_steps.read(run, found)
    layout.see(scale_words.bad_steps_seen(bad.shown, found.totals, bad.whole))
    if not bad.shown:
        return
    table = _bad_table(bad.shown)
    st.dataframe(
        table,
        key="loss-scale-skips",
        hide_index=True,
        height=min(TABLE_PX, 38 + 35 * len(bad.shown)),
        column_config={
            "Scale": st.column_config.NumberColumn(format="localized"),
            "Why": st.column_config.TextColumn(help=WHY),
        },
    )
    chart.download(lambda: table, "skips", key="loss-scale-skips")
    _one_skip(run, bad.shown)


def steps_table(steps: list[StepRecord]) -> pd.DataFrame:
    """All that is known of every step."""
    return pd.DataFrame([dataclasses.asdict(s) for s in steps])


def parameters_table(records: list[NonFiniteRecord]) -> pd.DataFrame:
    """In backward order, the first that backward reached at the top."""
    return pd.DataFrame(
        {
            "Backward order": [r.order + 1 for r in records],
            "Parameter": [r.parameter for r in records],
            "NaN": [r.nan for r in records],
            "+Inf": [r.pos_inf for r in records],
            "-Inf": [r.neg_inf for r in records],
            "Elements": [r.total for r in records],
            "Not finite, %": [
                100 * (r.nan + r.pos_inf + r.neg_inf) / r.total if r.total else None
                for r in records
            ],
        }
    )


def _one_skip(run: RunInfo, bad: list[BadStep]) -> None:
    steps = [b.step for b in bad if b.parameter_count]
    if not steps:
        st.caption("Which parameters held NaN or Inf was not recorded at these steps.")
        return
    step = links.select("Parameters of step", "skip", steps, writes_default=False)
    records = list(store.nonfinite(run, step))
    layout.see(f"At step {step}, {plural(len(records), 'parameter')} held NaN or Inf.")
    table = parameters_table(records)
    st.dataframe(
        table,
        key="loss-scale-parameters",
        hide_index=True,
        height=min(TABLE_PX, 38 + 35 * len(records)),
        column_config={"Not finite, %": st.column_config.NumberColumn(format="%.3g")},
    )
    chart.download(lambda: table, f"nonfinite-step-{step}", key="loss-scale-parameters")
    st.page_link(
        sitemap.GRADIENTS.file,
        label=f"Step {step} on the Gradients page",
        icon=sitemap.GRADIENTS.icon,
        query_params={"run": run.id, "step": str(step), "role": "weight_grad"},
    )


def _bad_table(bad: list[BadStep]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Step": [b.step for b in bad],
            "Loss scale": [power_of_two(b.scale) if b.scale else "none" for b in bad],
            "Scale": [b.scale for b in bad],
            "Skipped": [b.skipped for b in bad],
            "Why": ["" if b.cause is None else str(b.cause) for b in bad],
            "Parameters not finite": [b.parameter_count for b in bad],
            "First in backward": [b.first_parameter or "not recorded" for b in bad],
        }
    )


def _scale_figure(scale: float | None) -> KeyFigure:
    if scale is None:
        return KeyFigure("Scale at the end", "none", "This run has no GradScaler")
    value = power_of_two(scale)
    return KeyFigure("Scale at the end", value, f"{value} = {scale:,.10g}, used in the last step")


def _growth_help(steps: list[StepRecord]) -> str:
    known = [s.growth_counter for s in steps if s.growth_counter is not None]
    if not known:
        return "Steps that ran at a larger scale than the step before"
    return f"{plural(known[-1], 'finite step')} since the last growth or skip (growth counter)"
