"""Everything that a probe can be asked for, as widgets: a RunSpec for each chosen precision."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.errors import AmpscopeError, BadInput
from ampscope.experiments.validate import checked
from ampscope.hardware.describe import uses_cuda
from ampscope.policy.modes import PRECISIONS, resolve
from ampscope.records import RunSpec
from app import machine, states, store
from app.new_probe import probe_details
from app.runs import workload_choice
from app.runs.workload_choice import Choice
from app.text import escape

POLICIES = {
    "auto": "CUDA's rules",
    "native": "The CPU's own rules",
}
POLICY_HELP = (
    "On a GPU a probe runs under CUDA. On a CPU it rehearses CUDA by default: CUDA's autocast "
    "lists decide which op runs in half, and products are summed in fp32 as Tensor Cores do. "
    "The CPU's own rules keep more ops in half (softmax, norms, sums) and fp16 is much slower."
)
LABEL_LENGTH = 120


def filled() -> list[RunSpec]:
    """Draw the form; the specs as they stand, or none and one sentence on what is wrong."""
    try:
        asked, choice, precisions = _widgets()
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
            start.label[:LABEL_LENGTH],
            max_chars=LABEL_LENGTH,
            placeholder="optional, names the run",
            key="np-label",
        )
        asked = replace(
            start,
            label=label.strip(),
            steps=int(
                steps.number_input(
                    "Steps", value=probe_details.bounded(start.steps), step=10, key="np-steps"
                )
            ),
            seed=_seed(seed, start.seed),
        )
    with how:
        st.subheader("How it is computed", anchor=False)
        precisions = _precisions(start.precision)
        asked = _where(asked)
    return probe_details.draw(asked), choice, precisions


def _seed(place: DeltaGenerator, value: int) -> int:
    """A browser's numbers end at 2^53; a larger seed, of a run that is repeated, is text."""
    if value == probe_details.bounded(value):
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
