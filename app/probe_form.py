"""Everything that a probe can be asked for, as widgets: a RunSpec for each chosen precision."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st
from ampscope.errors import AmpscopeError, BadInput
from ampscope.experiments.validate import checked
from ampscope.hardware.describe import uses_cuda
from ampscope.policy.modes import PRECISIONS, resolve
from ampscope.records import Cadence, RunSpec, ScalerSpec

from app import machine, states, store, workload_choice
from app.text import escape
from app.workload_choice import Choice

POLICIES = {
    "auto": "CUDA's rules",
    "native": "The CPU's own rules",
}
POLICY_HELP = (
    "On a GPU a probe runs under CUDA. On a CPU it rehearses CUDA by default: CUDA's autocast "
    "lists decide which op runs in half, and products are summed in fp32 as Tensor Cores do. "
    "The CPU's own rules keep more ops in half (softmax, norms, sums) and fp16 is much slower."
)
SCALE_HELP = "The loss is multiplied by this before backward. 65536 is torch's default (2^16)."
FACTOR_HELP = (
    "Multiplies the loss and corrects the optimizer for it, so that in exact arithmetic nothing "
    "changes. A small factor shows what fp16 does to small gradients."
)


def filled() -> list[RunSpec]:
    """Draw the form; the specs as they stand, or none and one sentence on what is wrong."""
    asked, choice, precisions = _widgets()
    try:
        return _specs(asked, choice, precisions)
    except BadInput as error:
        states.unreadable(str(error))
        return []


def _specs(asked: RunSpec, choice: Choice, precisions: list[str]) -> list[RunSpec]:
    if not precisions:
        raise BadInput("Choose at least one precision.")
    on_cuda = asked.device.startswith("cuda") or (
        asked.device == "auto" and uses_cuda(machine.report())
    )
    named = replace(asked, workload=workload_choice.named(choice), size=choice.size)
    for precision in precisions:
        resolve(precision, "cuda" if on_cuda else "cpu")
    return [checked(replace(named, precision=precision)) for precision in precisions]


def _widgets() -> tuple[RunSpec, Choice, list[str]]:
    start = _template()
    what, how = st.columns(2, gap="large")
    with what:
        st.subheader("What is trained", anchor=False)
        choice = workload_choice.draw(start)
        steps, seed = st.columns(2)
        label = st.text_input(
            "Label",
            start.label,
            max_chars=120,
            placeholder="optional, names the run",
            key="np-label",
        )
        asked = replace(
            start,
            label=label.strip(),
            steps=int(steps.number_input("Steps", value=start.steps, step=10, key="np-steps")),
            seed=int(seed.number_input("Seed", value=start.seed, step=1, key="np-seed")),
        )
    with how:
        st.subheader("How it is computed", anchor=False)
        precisions = _precisions(start.precision)
        asked = _where(asked)
    return _details(asked), choice, precisions


def _template() -> RunSpec:
    """A new spec, or that of the run that the URL names to repeat (`?again=…`)."""
    again = st.query_params.get("again")
    if not again:
        return RunSpec(workload="gpt")
    try:
        return replace(store.run(again).spec, group="", parent="", control="")
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
    report = machine.report()
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


def _details(spec: RunSpec) -> RunSpec:
    """The three folded groups."""
    with st.expander("Loss scaler"):
        spec = replace(spec, scaler=_scaler(spec.scaler), loss_factor=_factor(spec.loss_factor))
    with st.expander("What is recorded, and how often"):
        spec = replace(spec, cadence=_cadence(spec.cadence))
    with st.expander("Limits"):
        left, right = st.columns(2)
        time_limit_s = left.number_input(
            "Time limit, s", value=spec.time_limit_s, step=60.0, format="%g", key="np-time"
        )
        memory = right.number_input(
            "Memory limit, MiB",
            value=spec.memory_limit_mib,
            step=1024,
            help="0 is none. A limit needs Linux.",
            key="np-memory",
        )
    return replace(spec, time_limit_s=float(time_limit_s), memory_limit_mib=int(memory))


def _scaler(scaler: ScalerSpec) -> ScalerSpec:
    columns = st.columns(4)
    scale, growth, backoff = (
        float(column.number_input(label, value=value, format="%g", help=help_, key=key))
        for column, label, value, help_, key in (
            (columns[0], "Initial scale", scaler.init_scale, SCALE_HELP, "np-scale"),
            (columns[1], "Growth factor", scaler.growth_factor, None, "np-growth"),
            (columns[2], "Backoff factor", scaler.backoff_factor, None, "np-backoff"),
        )
    )
    interval = columns[3].number_input(
        "Growth interval, steps", value=scaler.growth_interval, step=100, key="np-interval"
    )
    return ScalerSpec(scale, growth, backoff, int(interval))


def _factor(value: float) -> float:
    return float(
        st.number_input("Loss factor", value=value, format="%g", help=FACTOR_HELP, key="np-factor")
    )


def _cadence(cadence: Cadence) -> Cadence:
    st.caption("In steps: 1 is every step, 10 every tenth, 0 never.")
    columns = st.columns(3)
    histogram, trace, shadow = (
        int(column.number_input(label, value=value, step=1, help=help_, key=key))
        for column, label, value, help_, key in (
            (
                columns[0],
                "Histograms",
                cadence.histogram,
                "One count per power of two, module and role.",
                "np-histogram",
            ),
            (
                columns[1],
                "Op trace",
                cadence.trace,
                "Each op with its dtypes and casts. The dearest instrument.",
                "np-trace",
            ),
            (
                columns[2],
                "fp32 shadow",
                cadence.shadow,
                "The same step in fp32: the only way to tell lost values from zeros.",
                "np-shadow",
            ),
        )
    )
    return Cadence(histogram, trace, shadow)
