"""Run a kept step again, op by op and beside fp32, and name the first bad op.

First an fp32 copy runs, then the step as it was, under the same autocast and random state. Each op
below autocast is looked at: the first whose finite inputs gave NaN or infinity is what is wanted,
when the bad outputs or gradients descend from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ampscope.capture.model_map import ModelMap, ModuleNumbers
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.script.call_log import wrap_functions
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.shadow import Shadow
from ampscope.capture.user_objects import modules
from ampscope.errors import BadInput
from ampscope.observations import BadOp
from ampscope.patches import Patches
from ampscope.records import OpRecord, ShadowRecord
from ampscope.source_lines import SourceLines, line_name
from ampscope.watcher.flight import Forward
from ampscope.watcher.rerun import Rerun

_OUTSIDE = {
    "loss": "the loss function, which is not part of it, made what was not finite.",
    "output gradient": "the gradient that the loss function gave to its output was not.",
    "backward": (
        "its gradients went bad after they were computed. Look at what changes .grad before the "
        "optimizer steps, at the sum over micro-batches, and at parameters used outside the model."
    ),
}
MOST_OPS = 2_000_000  # looked at in one replay, about a minute


@dataclass(frozen=True, slots=True)
class StepReplay:
    """What came of it; ``first`` is None when no op of the model made something not finite."""

    first: BadOp | None
    where: str  # forward, backward, output gradient, inputs, outside (the model), nowhere
    text: str  # one sentence
    shadows: list[ShadowRecord] = field(default_factory=list)  # of the forward that decided
    ops: tuple[int, list[OpRecord]] = (0, [])  # id of the set, and its ops
    notes: list[str] = field(default_factory=list)

    def explained(self, sign: str) -> StepReplay:
        """With what follows when the model was finite here although the step's first sign
        (`About.where`) was bad."""
        if self.where != "nowhere" or sign not in _OUTSIDE:
            return self
        text = f"The model was finite throughout, forward and backward: {_OUTSIDE[sign]}"
        return dataclasses.replace(self, where="outside", text=text)


def replay(
    models: Mapping[str, nn.Module],
    forwards: Sequence[Forward],
    scale: float,
    names: ModuleNumbers | None = None,
) -> StepReplay:
    """Run the forwards one after another; the first that is not finite decides, else the last.

    ``scale`` is the loss scale in the kept gradients; ``names`` numbers the modules in the records,
    by default each model's own numbers. Raises BadInput when a model is missing, is another one or
    sharded, or takes something that is not in the capsule.
    """
    if not forwards:
        raise BadInput("The capsule holds no forward call: there is nothing to run again.")
    results = []
    for forward in forwards:
        part = _part(models, forward)
        rerun = Rerun(part, forward, scale)
        results.append(_replayed(rerun, forward.module, names or ModelMap(part)))
        if results[-1].where != "nowhere":
            break
    return results[-1]


def sentence(bad: BadOp) -> str:
    """What the first bad op did, for a person."""
    kind = "NaN" if bad.nan and not bad.pos_inf + bad.neg_inf else "infinity"
    module = f"module {bad.module!r}" if bad.module else "the model itself"
    line = f", line {bad.line}" if bad.line else ""
    text = (
        f"{bad.op} in {module} ({bad.module_type}){line}, {bad.phase}: "
        f"finite inputs gave {kind} in {bad.dtype}"
    )
    if bad.fp32_finite and bad.fp32_max is not None:
        return f"{text}; the same inputs give {bad.fp32_max:,.6g} in fp32."
    return f"{text}; fp32 is not finite there either." if bad.fp32_finite is False else f"{text}."


def _part(models: Mapping[str, nn.Module], forward: Forward) -> nn.Module:
    model = models.get(forward.model)
    if model is None and len(models) == 1:
        model = next(iter(models.values()))
    if model is None:
        raise BadInput(f"The capsule is of a model called {forward.model!r}: give it as well.")
    try:
        return model.get_submodule(forward.module)
    except AttributeError as error:
        raise BadInput(f"The capsule is of another model: {error}") from error


def _replayed(rerun: Rerun, path: str, names: ModuleNumbers) -> StepReplay:
    trace = OpTrace(names)
    shadow = Shadow(ModelMap(rerun.model), 0, rerun.scale)
    paths, lines = ModulePaths(), SourceLines()
    watch = OpWatch(paths, lines, MOST_OPS)
    caller = line_name(lines.where())
    notes = []
    with rerun.prepared(), contextlib.ExitStack() as stack:
        if note := _reference(rerun, shadow):
            notes.append(note)
        else:
            stack.enter_context(shadow)
        wrap_functions(watch, stack.enter_context(Patches()))
        stack.enter_context(paths)
        stack.enter_context(watch)
        stack.enter_context(trace)
        outputs, gradients = rerun.as_it_was()
    if not gradients:
        notes.append("No gradient at an output was kept: only the forward was run again.")
    where, first, text = _judged(watch, rerun.forward, outputs, gradients)
    if where == "inputs":
        sources = ", ".join(rerun.bad_sources()) or "what came in"
        text = f"No op made it so: {sources} held NaN or infinity before the step."
    if first is not None:
        # A line outside the model is that of the replay's caller.
        line = "" if first.line == caller else first.line
        module = ".".join(filter(None, (path, first.module)))
        first = dataclasses.replace(first, line=line, module=module)
        text = sentence(first)
    shadows = _numbered(shadow.take(), rerun.model, names)
    return StepReplay(first, where, text, shadows, trace.take(), notes)


def _numbered(
    shadows: list[ShadowRecord], model: nn.Module, names: ModuleNumbers
) -> list[ShadowRecord]:
    """``shadows`` with the caller's module numbers instead of the replay's."""
    every = [module for _, module in modules(model)]
    numbers = ((record, names.index(every[record.module])) for record in shadows)
    return [dataclasses.replace(r, module=n) for r, n in numbers if n is not None]


def _reference(rerun: Rerun, shadow: Shadow) -> str:
    """Run the fp32 copy; a sentence when it cannot be run."""
    try:
        shadow.run_shadow(rerun.reference_loss)
    except Exception as error:  # whatever a copy of the user's model may raise
        shadow.take()
        return f"No fp32 reference: a copy in fp32 raised {type(error).__name__}."
    return ""


def _judged(
    watch: OpWatch, forward: Forward, outputs: list[Tensor], gradients: list[Tensor]
) -> tuple[str, BadOp | None, str]:
    """Where it went bad, the op that the bad values descend from, and else a sentence."""
    bad_outputs = [tensor for tensor in outputs if not _finite(tensor)]
    bad = [*bad_outputs, *(gradient for gradient in gradients if not _finite(gradient))]
    if not bad_outputs and not all(map(_finite, forward.gradients.values())):
        return (
            "output gradient",
            None,
            (
                "The gradient at the model's output was not finite already, while the output was: "
                "look at the loss, and at the loss scale that multiplies it."
            ),
        )
    found = {record.id: record for record in watch.records() if record.kind == "nonfinite"}
    taints = (watch.taint_of(tensor) for tensor in bad)
    roots = [found[taint] for taint in taints if taint is not None and taint in found]
    if roots:
        first = min(roots, key=lambda record: record.id)
        return first.phase, first, ""
    if bad:
        return "inputs", None, ""
    return "nowhere", None, "The replay was finite throughout."


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
