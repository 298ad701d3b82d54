"""A kernel that the compiler generated computes something else than the ops that it stands for.

What it detects
    With torch.compile on, losses or gradients leave those of eager code by more than half
    precision's own rounding explains, also with casts emulated; the same graph run by torch's own
    kernels (backend aot_eager) agrees with eager code. Or its random numbers are the same at every
    step. Taps inside the graph tell the first tensor that differs; the module is the one that was
    left uncompiled and brought eager code's numbers back. Where torch's own kernels differ too once
    inductor has decomposed the ops (aot_eager_decomp_partition), it is a decomposition.

Why it matters
    A wrong fusion, schedule, decomposition or padding raises nothing: the training goes on with
    other numbers.

Blind spots
    Random numbers are compared as eager code draws them: of the compiler's own generator only this
    is seen, that it draws the same numbers at every step. A pass of the user's own on inductor's
    graph counts as part of the compiler.

Remedy
    Another backend, the op kept out of the compiler's kernels, or the module whose kernel it is
    left uncompiled; and a report to PyTorch with the smallest module that shows it.
"""

from __future__ import annotations

from ampscope.analysis.compiled_runs import AOT_EAGER, Layer, layer
from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.rules.compiled_code import compiled_verdict
from ampscope.rules.verdict import Fix, Rule, Verdict


def check(evidence: Evidence) -> Verdict:
    """Found when the graph is right and what inductor makes of it is not."""
    blamed = layer(evidence.runs)
    return compiled_verdict(
        evidence,
        (Layer.KERNEL, Layer.RANDOM, Layer.DECOMPOSITION),
        f"{AGREES}; {WORDS.get(blamed, OF_KERNELS) if blamed else OF_KERNELS}",
        Fix(
            "change_backend",
            "Compile with backend aot_eager, or leave out the module whose kernel it is with "
            "torch.compiler.disable.",
            PATCH,
            (AOT_EAGER,),
        ),
    )


AGREES = "The same graph run by torch's own kernels (aot_eager) agrees with eager code"
OF_KERNELS = "the compiled kernels do not, also when they round wherever eager code rounds."
WORDS = {
    Layer.RANDOM: "with eager code's random numbers the compiled kernels do too. Those that they "
    "draw themselves are the same at every step.",
    Layer.DECOMPOSITION: "after inductor has decomposed the ops (aot_eager_decomp_partition) it "
    "does not. A decomposition computes something else than the op that it stands for.",
}
PATCH = 'model = torch.compile(model, backend="aot_eager")\n'

RULE = Rule(
    code="AMP033",
    id="compiler_kernel",
    title="A compiled kernel computes something else",
    definition="The captured graph is right; the kernels that the compiler made of it are not.",
    check=check,
    needs=(BASELINE,),
    order=81,
    is_of_compiler=True,
)
