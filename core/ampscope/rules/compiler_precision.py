"""The compiler rounds elsewhere than eager code, and the training depends on it.

What it detects
    With torch.compile on, losses or gradients leave those of eager code by more than half
    precision's own rounding explains; with casts emulated (emulate_precision_casts) they do not.

Why it matters
    Inductor keeps the intermediate results of a fused chain of ops in fp32, where eager code rounds
    each one to half. That is more exact as a rule; code that was tuned to the rounding, or that
    computes one value in two graphs, sees two different numbers.

Blind spots
    A difference that grows so slowly that the first steps do not show it and the loss still falls.
    What a GPU's compiler leaves out cannot be had on a CPU.

Remedy
    Inductor's switch emulate_precision_casts (in torch._inductor.config), or an explicit cast to
    fp32 where the value is computed, so that both ways agree.
"""

from __future__ import annotations

from ampscope.analysis.compiled_runs import EAGER_CASTS, Layer
from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.rules.compiled_code import compiled_verdict
from ampscope.rules.verdict import Fix, Rule, Verdict


def check(evidence: Evidence) -> Verdict:
    """Found when emulated casts bring the compiled run back to the eager one."""
    return compiled_verdict(
        evidence,
        (Layer.CASTS,),
        "The same graph run by torch's own kernels (aot_eager) agrees with eager code, and so does "
        "inductor when it rounds wherever eager code rounds: what is missing are its casts.",
        Fix(
            "emulate_casts",
            "Let inductor round where eager code rounds.",
            PATCH,
            (EAGER_CASTS,),
        ),
    )


PATCH = """import torch._inductor.config as inductor

inductor.emulate_precision_casts = True  # before the first compiled call
"""

RULE = Rule(
    code="AMP032",
    id="compiler_precision",
    title="The compiler rounds where eager code does not, or the reverse",
    definition="Compiled code leaves out casts of eager code, and the training depends on them.",
    check=check,
    needs=(BASELINE,),
    order=80,
    is_of_compiler=True,
)
