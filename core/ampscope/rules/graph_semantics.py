"""The graph that is compiled is not what the script does.

What it detects
    Losses or gradients leave those of eager code by more than half precision's own rounding
    explains although torch's own kernels run the graph (backend aot_eager): the graph differs, as
    it was captured (backend eager differs too) or as AOTAutograd has made it functional.

Why it matters
    A branch on torch.compiler.is_compiling, a custom op whose functional form, derivative or
    autocast rule differs from what it does eagerly, or a state that was a constant at capture,
    gives another training without a word.

Blind spots
    What only compiled autograd or a graph break at another place would show.

Remedy
    Repair the branch or the custom op; until then leave that part out of the graph with
    torch.compiler.disable.
"""

from __future__ import annotations

from ampscope.analysis.compiled_runs import GRAPH_ALONE, Layer, layer
from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.rules.compiled_code import compiled_verdict
from ampscope.rules.verdict import Fix, Rule, Verdict


def check(evidence: Evidence) -> Verdict:
    """Found when torch's own kernels give the compiled run's numbers too."""
    is_captured = layer(evidence.runs) is Layer.CAPTURE
    return compiled_verdict(
        evidence,
        (Layer.CAPTURE, Layer.GRAPH),
        "No kernel is to blame: the graph as it was captured, run op by op (backend eager), "
        "differs from eager code already. Look for a branch on torch.compiler.is_compiling, and "
        "for state that was a constant at capture."
        if is_captured
        else "No kernel is to blame: torch's own kernels (aot_eager) give other numbers than eager "
        "code too, and the graph as it was captured (backend eager) does not. Look for custom ops "
        "and autograd Functions: their functional form, derivative or autocast rule.",
        Fix(
            "no_compile",
            "Leave that part out of the graph, or train uncompiled."
            if is_captured
            else "Compile with backend eager, or leave that part out of the graph.",
            PATCH,
            (BASELINE,) if is_captured else (GRAPH_ALONE,),
        ),
    )


PATCH = """@torch.compiler.disable  # this function runs as eager code, and breaks the graph
def part(x):
    ...
"""

RULE = Rule(
    code="AMP034",
    id="graph_semantics",
    title="The compiled graph is not what the script does",
    definition="Capturing the script, or making its graph functional, changed what it computes.",
    check=check,
    needs=(BASELINE,),
    order=79,
    is_of_compiler=True,
)
