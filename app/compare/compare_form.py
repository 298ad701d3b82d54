"""Start a comparison or a batch search: workload, precisions, and the button."""

from __future__ import annotations

import streamlit as st

from ampscope.errors import AmpscopeError
from ampscope.hardware.describe import uses_cuda
from ampscope.policy.modes import PRECISIONS
from ampscope.records import RunSpec
from app import machine, permissions, states
from app.runs import measurements, workload_choice
from app.text import escape

SLOW = (
    "fp16 products have no instruction on most CPUs: a step can take a hundred times as long. It "
    "then makes a few steps only."
)
LIMIT_S = 170.0
BATCH_LIMIT_S = 600.0
DEFAULT_LIMIT_MIB = 512


def comparison() -> None:
    """Precisions, seeds and steps."""
    if not permissions.offers("starting a comparison"):
        return
    on_cuda = uses_cuda(machine.report())
    what, how = st.columns(2, gap="large")
    with what:
        choice = workload_choice.draw(RunSpec(workload="gpt", size="small"))
    with how:
        chosen = _precisions(("fp32", "bf16"), on_cuda)
        seeds = st.number_input(
            "Seeds", 1, 20, 3, key="cmp-seeds",
            help="Trainings a precision. With one, nobody can say whether a difference in loss is "
            "more than chance.",
        )  # fmt: skip
        steps = st.number_input("Steps a seed", 6, 1000, 30, key="cmp-steps")
        pressed = st.button("Compare", type="primary", disabled=len(chosen) < 2, key="cmp-start")
    if pressed:
        _start(choice, "compare", chosen, seeds=int(seeds), steps=int(steps), time_limit_s=LIMIT_S)


def batch_search() -> None:
    """Precisions, sizes to try and, on a CPU, the memory that training may take."""
    if not permissions.offers("starting a search"):
        return
    on_cuda = uses_cuda(machine.report())
    what, how = st.columns(2, gap="large")
    with what:
        choice = workload_choice.draw(RunSpec(workload="gpt", size="tiny"))
    with how:
        chosen = _precisions(("fp32", "bf16"), on_cuda)
        limit = 0
        if not on_cuda:
            limit = st.number_input(
                "Memory for training (MiB)", 16, 1_000_000, DEFAULT_LIMIT_MIB, key="bs-limit",
                help="Above what Python and torch hold themselves. On CUDA the device decides.",
            )  # fmt: skip
        sizes = {"multiples of 8": 8, "every size": 1, "powers of two": 0}
        step = st.segmented_control("Sizes to try", list(sizes), default="multiples of 8")
        pressed = st.button("Search", type="primary", disabled=not chosen, key="bs-start")
    if pressed:
        _start(
            choice, "batch", chosen, memory_limit_mib=int(limit),
            multiple_of=sizes[step or "multiples of 8"], time_limit_s=BATCH_LIMIT_S,
        )  # fmt: skip


def _precisions(default: tuple[str, ...], on_cuda: bool) -> list[str]:
    names = [name for name, mode in PRECISIONS.items() if on_cuda or not mode.tf32]
    chosen = st.multiselect(
        "Precisions",
        names,
        default=[*default, *(["fp16"] if on_cuda else [])],
        format_func=lambda name: f"{name}: {PRECISIONS[name].summary}",
        key="cmp-precisions",
    )
    if not on_cuda and any("fp16" in name for name in chosen):
        st.caption(escape(SLOW))
    return chosen


def _start(
    choice: workload_choice.Choice, kind: str, precisions: list[str], *, seeds: int = 1,
    steps: int = 1, memory_limit_mib: int = 0, multiple_of: int = 1, time_limit_s: float,
) -> None:  # fmt: skip
    try:
        measurements.start(
            RunSpec(
                workload=workload_choice.named(choice),
                kind=kind,
                size=choice.size,
                precision=",".join(precisions),
                steps=steps,
                seeds=seeds,
                policy="native",  # a rehearsal of CUDA's rules says nothing about time
                memory_limit_mib=memory_limit_mib,
                multiple_of=multiple_of,
                time_limit_s=time_limit_s,
            )
        )
    except AmpscopeError as error:
        states.unreadable(str(error))
