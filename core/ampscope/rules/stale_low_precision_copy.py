"""A half-precision copy of a weight is older than the weight.

What it detects
    Ops that take a half copy of an fp32 weight whose numbers are not those that a cast of the
    weight would give at that moment: a copy that autocast keeps, or one that the script keeps.
    A half model whose gradients step fp32 weights that are never copied back into it.
    Latent: in less than half of the steps, in a training that has not suffered.

Why it matters
    Autocast casts each weight once and keeps the copy until the outermost region closes. Inside
    one region around the whole loop the model computes with its first weights for ever; an
    optimizer's step and weights that are swapped in do not show.

Blind spots
    Copies that were made before the training began, and those in compiled code. Copies of one or
    two steps before, as where the losses of a GAN share a region. Copies that no gradient goes
    through, which may be meant to lag behind. Half models whose fp32 weights lie in one flat
    tensor, and half weights that belong to no module.

Remedy
    Enter autocast for each forward pass, and close it before the weights change.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.number_words import plural
from ampscope.observations import STALE_CACHED, STALE_KEPT, STALE_MODEL, OpUse
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, passed

NAMES = (STALE_CACHED, STALE_KEPT, STALE_MODEL)
OFTEN = 0.5  # of the steps after the first stale one


def check(evidence: Evidence) -> Verdict:
    """Found at the op itself, by comparing the copy with the weight."""
    run = evidence.baseline
    uses = [use for use in run.uses if use.name in NAMES]
    if not uses:
        return passed("Every half copy of a weight is used before the weight changes.")
    use = max(uses, key=_steps)
    after = max(run.outcome.steps - use.step, 1)
    share = min(_steps(use) / after, 1.0)
    suffers = bool(evidence.symptoms) and evidence.root is None  # an overflow is another fault's
    is_harmful = share >= OFTEN or suffers
    return Verdict(
        Status.FOUND if is_harmful else Status.LATENT,
        _reason(use),
        module=use.module or None,
        op=use.op or None,
        phase="forward",
        step=use.step,
        line=use.line or _cast_line(run),
        evidence=(
            Measurement("steps computed with stale copies", _steps(use), OFTEN * after, BASELINE),
            Measurement("weights concerned", use.count, 0, BASELINE),
            Measurement("distance of a copy over its weight", use.other or 0.0, 0, BASELINE),
        ),
        fix=_fix(use),
    )


def _steps(use: OpUse) -> float:
    return use.value or 0.0


def _cast_line(run: RunView) -> str:
    """The line that made a model half."""
    return next((call.line for call in run.calls if call.name == "cast"), "")


def _reason(use: OpUse) -> str:
    if use.name == STALE_CACHED:
        kept = (
            f"The autocast region that line {use.line} opens stays open while weights change, and"
            " autocast keeps the half copy of each weight until its outermost region closes:"
        )
    elif use.name == STALE_MODEL:
        return (
            "The gradients of a half model step fp32 weights, which are never copied back into it:"
            f" from step {use.step:,} on it computes with {plural(use.count, 'weight')} of before"
            f" the first step, off by up to {use.other or 0.0:.1%}."
        )
    else:
        kept = f"The half copy of a weight that line {use.line} makes is kept while it changes:"
    steps, weights = plural(int(_steps(use)), "step"), plural(use.count, "weight")
    return (
        f"{kept} from step {use.step:,} on, in {steps}, ops took copies of {weights} that no longer"
        f" were those weights rounded, but off by up to {use.other or 0.0:.1%}."
    )


def _fix(use: OpUse) -> Fix:
    if use.name == STALE_CACHED:
        text = (
            "Open the autocast region for each forward pass, and close it before a step or another"
            " change of the weights; or call torch.clear_autocast_cache() after each change, or"
            f" pass cache_enabled=False at {use.line}."
        )
        return Fix("refresh_copies", text, REGION_PATCH, ("fresh_casts",))
    if use.name == STALE_MODEL:
        text = "Copy the fp32 weights into the half model after each step."
        return Fix("refresh_copies", text, MODEL_PATCH, ("fresh_casts",))
    text = f"Cast the weight anew in each forward pass, not once at {use.line}."
    return Fix("refresh_copies", text, KEPT_PATCH, ("fresh_casts",))


REGION_PATCH = """for batch in batches:
    with torch.autocast(device, dtype=dtype):  # inside the loop
        loss = loss_of(model(batch))
    loss.backward()
    optimizer.step()
"""
MODEL_PATCH = """with torch.no_grad():  # behind optimizer.step()
    for half, weight in zip(half_model.parameters(), model.parameters()):
        half.copy_(weight)
"""
KEPT_PATCH = "weight = self.weight.to(x.dtype)  # in forward, each time\n"
RULE = Rule(
    code="AMP037",
    id="stale_low_precision_copy",
    title="A half copy is older than its weight",
    definition="A half-precision copy of a weight, autocast's own or the script's, is used after "
    "the weight has changed.",
    check=check,
    needs=(BASELINE,),
    order=29,
    explains=("gradient_underflow", "small_update_lost"),
    is_measured=True,
    in_one_step=False,
)
