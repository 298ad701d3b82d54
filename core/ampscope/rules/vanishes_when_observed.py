"""Compiled code computes something else, and no longer does once its intermediate results are read.

What it detects
    With torch.compile on, losses or gradients leave those of eager code by more than half
    precision's own rounding explains, also with casts emulated; the same graph run by torch's own
    kernels (backend aot_eager) agrees with eager code, and so do the compiled kernels when taps
    read the outputs of modules, matmuls and reductions between them.

Why it matters
    Reading a tensor makes the compiler keep it in memory, and so cut its kernels otherwise. A wrong
    fusion or a wrong use of a value that lives in registers alone is then gone: printing, hooks and
    graph breaks hide it, and it comes back when they are taken out.

Blind spots
    The module is not named: whatever is observed or left out hides the fault. A fault of which the
    taps hide a part counts as a kernel's.

Remedy
    Another backend; and a report to PyTorch, which says that the fault is gone when it is observed.
    A graph break that hides it is no repair.
"""

from __future__ import annotations

from ampscope.analysis.compiled_runs import AOT_EAGER, Layer
from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.rules.compiled_code import compiled_verdict
from ampscope.rules.compiler_kernel import PATCH
from ampscope.rules.verdict import Fix, Rule, Verdict


def check(evidence: Evidence) -> Verdict:
    """Found when compiled code with taps gives eager code's numbers, and without them does not."""
    return compiled_verdict(
        evidence,
        (Layer.OBSERVED,),
        "The same graph run by torch's own kernels (aot_eager) agrees with eager code; the "
        "compiled kernels do not, also when they round wherever eager code rounds. With taps that "
        "read their intermediate results they do: the fault vanishes when it is observed, so "
        "hooks, prints and graph breaks hide it.",
        Fix(
            "change_backend",
            "Compile with backend aot_eager until the compiler is repaired.",
            PATCH,
            (AOT_EAGER,),
        ),
    )


RULE = Rule(
    code="AMP035",
    id="vanishes_when_observed",
    title="A compiled fault vanishes when it is observed",
    definition="Compiled code computes something else, and reading its intermediate results brings "
    "the right ones back.",
    check=check,
    needs=(BASELINE,),
    order=82,
    is_of_compiler=True,
)
