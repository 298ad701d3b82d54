"""The verdict of a rule about compiled code: eager code trains, compiled code computes otherwise.

Shared by the rules that name a layer of the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.compiled_runs import (
    Apart,
    Layer,
    departure,
    kept_out,
    layer,
    left_out,
    parting,
    repeating,
    whole_ops,
)
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE, COMPILED, Control
from ampscope.observations import COMPILED_FRAMES, Kernel, Tap
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Status,
    Verdict,
    inconclusive,
    not_applicable,
    passed,
)

MOST_OPS = 4  # of a kernel that are named


def compiled_verdict(evidence: Evidence, layers: tuple[Layer, ...], text: str, fix: Fix) -> Verdict:
    """Found where one of ``layers`` is to blame; ``text`` says what the runs distinguish, and
    ``fix`` is that of a whole layer, where runs found no module or op to leave out."""
    runs = evidence.runs
    if COMPILED not in runs:
        return not_applicable("The script was not run compiled.")
    if evidence.symptoms:
        return passed("Eager code fails as well.")
    found = departure(runs)
    if found is None:
        return passed("Compiled code computes what eager code does.")
    blamed = layer(runs)
    if blamed is None:
        return inconclusive("The runs do not tell which layer of the compiler it is.")
    if blamed not in layers:
        return passed(f"It is {blamed}.")
    is_kernel = blamed in (Layer.KERNEL, Layer.DECOMPOSITION)
    alone = left_out(runs) if is_kernel or blamed in (Layer.GRAPH, Layer.CAPTURE) else None
    unfused = kept_out(runs) if is_kernel else None
    where = _located(runs, blamed, alone, unfused)
    use = runs[COMPILED].use(COMPILED_FRAMES)
    return Verdict(
        Status.FOUND,
        f"Eager code trains; compiled, {found.words}. {text}{where.words}",
        module=where.module or None,
        op=unfused.values("unfused")[0] if unfused else where.tap.op if where.tap else None,
        step=found.step,
        line=(where.tap.line if where.tap else "") or (use.line if use else ""),
        evidence=_measured(found),
        fix=_unfused(unfused) if unfused else fix if alone is None else _uncompiled(alone),
    )


@dataclass(frozen=True, slots=True)
class _Location:
    """Where compiled code computes something else, as far as runs and taps tell."""

    module: str
    tap: Tap | None  # of the op
    words: str  # sentences for the verdict; "" of none


NOWHERE = _Location("", None, "")


def _located(
    runs: Mapping[str, RunView], blamed: Layer, alone: Control | None, unfused: Control | None
) -> _Location:
    """``alone``: the modules, and ``unfused`` the ops, that brought eager code's numbers back."""
    modules = alone.values("uncompiled") if alone is not None else ()
    module = modules[0] if len(modules) == 1 else ""
    kernels = runs[COMPILED].kernels
    if blamed is Layer.RANDOM:
        drawn = repeating(runs)
        return _Location(drawn.maker, drawn, _kernel(drawn, kernels)) if drawn else NOWHERE
    # Whatever comes behind a wrong decomposition differs too: it is found by leaving ops whole.
    if blamed is Layer.DECOMPOSITION and unfused is not None:
        ops = unfused.values("unfused")
        places = [place for op in ops for place in whole_ops(runs, op)]
        return _Location(
            places[0].maker if len(places) == 1 else module,
            places[0] if places else None,
            f" With {', '.join(ops)} not decomposed it does.",
        )
    inside = parting(runs) if blamed is Layer.KERNEL else None
    if inside is None:
        return replace(NOWHERE, module=module)
    # Taps name an op only where leaving its module out brings eager code's numbers back as well,
    # or torch's own kernel for it does.
    if unfused is not None or (module and module in _around(inside.tap.maker)):
        return _Location(module, inside.tap, f" {inside.words}{_kernel(inside.tap, kernels)}")
    return _Location(module, None, f" {inside.words}" if inside.is_nonfinite else "")


def _kernel(tap: Tap, kernels: Sequence[Kernel]) -> str:
    """The fused kernel that computes the op of ``tap``, as a sentence; "" where none was seen, or
    the op stands alone in it."""
    phase = "backward" if tap.role == "grad_output" else "forward"
    for kernel in kernels:
        is_there = tap.op in kernel.ops and tap.line in kernel.lines and kernel.phase == phase
        others = [op for op in dict.fromkeys(kernel.ops) if op != tap.op]
        if is_there and others:
            more = f" and {len(others) - MOST_OPS} more" if len(others) > MOST_OPS else ""
            lines = ", ".join(kernel.lines[:MOST_OPS])
            named = ", ".join(others[:MOST_OPS])
            which = f"{named}{more} (lines {lines})"
            return f" One kernel computes it in {kernel.computed} with {which}."
    return ""


def _around(path: str) -> list[str]:
    """A module and those that hold it."""
    return [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]


def _uncompiled(control: Control) -> Fix:
    """What is left uncompiled was found by runs."""
    modules = control.values("uncompiled")
    names = ", ".join(modules)
    lines = "".join(
        f'part = model.get_submodule("{path}")\n'
        "part.forward = torch.compiler.disable(part.forward)\n"
        for path in modules
    )
    return Fix(
        "no_compile",
        f"Leave {names} uncompiled (torch.compiler.disable), and compile the rest.",
        f"# before torch.compile\n{lines}",
        (control,),
    )


def _unfused(control: Control) -> Fix:
    """The op was found by runs."""
    ops = control.values("unfused")
    names = ", ".join(ops)
    packets = "".join(f"torch.ops.{op}, " for op in ops)
    return Fix(
        "keep_unfused",
        f"Keep {names} out of the compiler's kernels: torch's own kernel computes it.",
        _UNFUSED.format(packets=packets.rstrip() if len(ops) == 1 else packets.rstrip(", ")),
        (control,),
    )


_UNFUSED = """# before the first compiled call
import torch._inductor.config as inductor
from torch._inductor import decomposition, lowering

inductor.force_disable_caches = True  # code compiled before would be taken from there
for packet in ({packets}):
    for op in (getattr(packet, name) for name in packet.overloads()):
        if not op._schema.is_mutable and not op.is_view:
            decomposition.decompositions.pop(op, None)
            decomposition.fast_random_decomps().pop(op, None)
            lowering.make_fallback(op, warn=False)  # True fails where the variable CI is set
"""


def _measured(found: Apart) -> tuple[Measurement, ...]:
    if found.compiled is None or found.eager is None:
        return (Measurement("compiled", found.what, None, COMPILED, found.step),)
    distance = abs(found.compiled - found.eager)
    return (
        Measurement(f"{found.what}, compiled", found.compiled, None, COMPILED, found.step),
        Measurement(f"{found.what}, eager", found.eager, None, BASELINE, found.step),
        *(
            ()
            if found.allowed is None
            else (Measurement("distance, and what rounding explains", distance, found.allowed),)
        ),
    )
