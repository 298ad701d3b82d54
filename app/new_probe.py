"""The page New probe: its form, with the folded scaler, instruments and limits."""

from __future__ import annotations

import math
from dataclasses import replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.errors import AmpscopeError, BadInput
from ampscope.hardware.describe import uses_cuda
from ampscope.launcher.launch import checked
from ampscope.policy.autocast_lists import PRECISIONS, resolve
from ampscope.records import Cadence, RunSpec, ScalerSpec
from app import states, store, telemetry
from app.runs import workload_choice
from app.runs.workload_choice import WorkloadChoice
from app.text import escape

POLICIES = {
    "auto": "CUDA's rules",
    "native": "The CPU's own rules",
}
POLICY_HELP = (
    "On a GPU a probe runs under CUDA. On a CPU it rehearses CUDA by default: CUDA's autocast "
    "lists decide which op runs in half, and matmuls are summed in fp32 as Tensor Cores do. "
    "The CPU's own rules keep more ops in half (softmax, norms, sums) and fp16 is much slower."
)
LABEL_LENGTH = 120
LARGEST_NUMBER = 2**53 - 1  # that a number in a browser holds exactly
SCALE_HELP = "The loss is multiplied by this before backward. torch starts with 65536 (2^16)."
FACTOR_HELP = (
    "Multiplies the loss and corrects the optimizer for it, so that in exact arithmetic nothing "
    "changes. A small factor shows what fp16 does to small gradients."
)
HISTOGRAM_HELP = "One count per power of two, module and role."
TRACE_HELP = "Each op with its dtypes and casts: the dearest instrument."
SHADOW_HELP = "The same step in fp32: the only way to tell lost values from zeros."


def filled() -> list[RunSpec]:
    """Draw the form; the specs as they stand, or none and one sentence on what is wrong."""
    try:
        asked, choice, precisions = _widgets()
        return _specs(asked, choice, precisions)
    except BadInput as error:
        states.unreadable(str(error))
        return []


def _specs(asked: RunSpec, choice: WorkloadChoice, precisions: list[str]) -> list[RunSpec]:
    if not precisions:
        raise BadInput("Choose at least one precision.")
    on_cuda = asked.device.startswith("cuda") or (
        asked.device == "auto" and uses_cuda(telemetry.machine_report())
    )
    named = replace(asked, workload=workload_choice.named(choice), size=choice.size)
    for precision in precisions:
        resolve(precision, "cuda" if on_cuda else "cpu")
    return [checked(replace(named, precision=precision)) for precision in precisions]


def _widgets() -> tuple[RunSpec, WorkloadChoice, list[str]]:
    start = _template()
    what, how = st.columns(2, gap="large")
    with what:
        st.subheader("What is trained", anchor=False)
        choice = workload_choice.pick_workload(start)
        steps, seed = st.columns(2)
        label = st.text_input(
            "Label",
            start.label[:LABEL_LENGTH],
            max_chars=LABEL_LENGTH,
            placeholder="optional, names the run",
            key="np-label",
        )
        asked = replace(
            start,
            label=label.strip(),
            steps=int(
                steps.number_input("Steps", value=bounded(start.steps), step=10, key="np-steps")
            ),
            seed=_seed(seed, start.seed),
        )
    with how:
        st.subheader("How it is computed", anchor=False)
        precisions = _precisions(start.precision)
        asked = _where(asked)
    return _folded(asked), choice, precisions


def _seed(place: DeltaGenerator, value: int) -> int:
    """A browser's numbers end at 2^53; a larger seed, of a run that is repeated, is text."""
    if value == bounded(value):
        return int(place.number_input("Seed", value=value, step=1, key="np-seed"))
    text = place.text_input("Seed", str(value), max_chars=19, key="np-large-seed").strip()
    if not (text.isascii() and text.isdigit()):
        raise BadInput(f"The seed must be a whole number, not {text!r}.")
    return int(text)


def _template() -> RunSpec:
    """A new spec, or that of the run that the URL names to repeat (`?again=…`)."""
    again = st.query_params.get("again")
    if not again:
        return RunSpec(workload="gpt")
    try:
        spec = store.run(again).spec
        return replace(spec, group="", parent="", control="", args=(), imported="")
    except AmpscopeError as error:
        st.warning(escape(str(error)))
        return RunSpec(workload="gpt")


def _precisions(default: str) -> list[str]:
    st.markdown(":small[Precisions]")
    with st.container(gap="xxsmall"):
        chosen = [
            precision.name
            for precision in PRECISIONS.values()
            if st.checkbox(
                f"**{precision.name}**  {escape(precision.summary)}",
                value=precision.name == default,
                key=f"np-{precision.name}",
            )
        ]
    st.caption("One run each, one after another.")
    return chosen


def _where(spec: RunSpec) -> RunSpec:
    telemetry.warn_of_unused_gpu()
    report = telemetry.machine_report()
    gpus = [f"cuda:{gpu.index}" for gpu in report.gpus] if uses_cuda(report) else []
    devices = ["auto", *gpus, "cpu"]
    names = {"auto": f"auto ({gpus[0] if gpus else 'cpu'})"}
    device = st.selectbox(
        "Device",
        devices,
        index=devices.index(spec.device) if spec.device in devices else 0,
        format_func=lambda name: names.get(name, name),
        key="np-device",
    )
    policy = st.radio(
        "Policy",
        list(POLICIES),
        index=1 if spec.policy == "native" else 0,
        format_func=lambda name: POLICIES[name],
        help=POLICY_HELP,
        horizontal=True,
        key="np-policy",
    )
    return replace(spec, device=device, policy=policy)


def _folded(spec: RunSpec) -> RunSpec:
    """Three folded groups; ``spec`` with what they say."""
    with st.expander("Loss scaler and loss factor"):
        spec = replace(spec, scaler=_scaler(spec.scaler))
        factor = _number(st.container(), "Loss factor", spec.loss_factor, "np-factor", FACTOR_HELP)
        spec = replace(spec, loss_factor=factor)
    with st.expander("What is recorded, and how often"):
        spec = replace(spec, cadence=_cadence(spec.cadence))
    with st.expander("Limits"):
        left, right = st.columns(2)
        time_s = _number(left, "Time limit, s", spec.time_limit_s, "np-time")
        help_ = "0 is none. A limit needs Linux."
        mib = _whole(right, "Memory limit, MiB", spec.memory_limit_mib, "np-memory", help_)
    return replace(spec, time_limit_s=time_s, memory_limit_mib=mib)


def _scaler(scaler: ScalerSpec) -> ScalerSpec:
    scale, growth, backoff, interval = st.columns(4)
    return ScalerSpec(
        _number(scale, "Initial scale", scaler.init_scale, "np-scale", SCALE_HELP),
        _number(growth, "Growth factor", scaler.growth_factor, "np-growth"),
        _number(backoff, "Backoff factor", scaler.backoff_factor, "np-backoff"),
        _whole(interval, "Growth interval, steps", scaler.growth_interval, "np-interval"),
    )


def _cadence(cadence: Cadence) -> Cadence:
    st.caption("In steps: 1 is every step, 10 every tenth, 0 never.")
    left, middle, right = st.columns(3)
    return Cadence(
        _whole(left, "Histograms", cadence.histogram, "np-histogram", HISTOGRAM_HELP),
        _whole(middle, "Op trace", cadence.trace, "np-trace", TRACE_HELP),
        _whole(right, "fp32 shadow", cadence.shadow, "np-shadow", SHADOW_HELP),
    )


def _number(
    place: DeltaGenerator, label: str, value: float, key: str, help_: str | None = None
) -> float:
    start = float(value) if math.isfinite(value) else 0.0  # 0 is refused with a sentence
    entered = place.number_input(label, value=start, format="%g", help=help_, key=key)
    return float(entered)


def _whole(
    place: DeltaGenerator, label: str, value: int, key: str, help_: str | None = None
) -> int:
    return int(place.number_input(label, value=bounded(value), step=1, help=help_, key=key))


def bounded(value: int) -> int:
    """What a widget can hold of a whole number that a run brings, which may be any."""
    return max(-LARGEST_NUMBER, min(LARGEST_NUMBER, value))
