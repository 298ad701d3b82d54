"""Sentences and measurements that several rules build from the same bad op."""

from __future__ import annotations

from ampscope.analysis.root_op import RootOp
from ampscope.formats import FORMATS
from ampscope.observations import BadOp
from ampscope.rules.verdict import Fix, Measurement, Status, Verdict

FP16_MAX = FORMATS["fp16"].max


def place(op: BadOp) -> str:
    """Where, for a sentence."""
    module = f"module {op.module!r} ({op.module_type})" if op.module_type else "the script itself"
    return f"{module}, line {op.line}" if op.line else module


def magnitudes(op: BadOp, run: str = "as_is") -> tuple[Measurement, ...]:
    """What went in, and what fp32 would have given."""
    found = [
        Measurement(f"largest input {n}", operand.max_abs, run=run, step=op.attempt)
        for n, operand in enumerate(op.inputs)
        if operand.max_abs is not None
    ]
    limit = FORMATS[op.dtype].max if op.dtype in FORMATS else FP16_MAX
    if op.fp32_max is not None:
        found.append(Measurement("same op in fp32", op.fp32_max, limit, run, op.attempt))
    found.append(Measurement("infinities", op.pos_inf + op.neg_inf, 0, run, op.attempt))
    found.append(Measurement("NaN", op.nan, 0, run, op.attempt))
    return tuple(found)


def op_verdict(root: RootOp, reason: str, fix: Fix, extra: tuple[Measurement, ...] = ()) -> Verdict:
    """A found verdict about one op."""
    op = root.op
    return Verdict(
        Status.FOUND,
        reason,
        module=op.module or None,
        op=op.op,
        phase=op.phase,
        step=op.attempt,
        line=op.line,
        code=op.code,
        evidence=(*magnitudes(op), *extra),
        fix=fix,
    )


def island(op: BadOp, kind: str, text: str, patch: str = "") -> Fix:
    """A fix that computes the op's module, or else its line, in fp32."""
    controls = []
    if op.module:
        controls.append(f"fp32_modules:{op.module}")
    if op.line:
        controls.append(f"fp32_lines:{op.line}")
    return Fix(kind, text, patch or island_patch(op.module), tuple(controls))


def island_patch(module: str) -> str:
    """Plain PyTorch that keeps a module in fp32 under autocast."""
    if not module:
        return (
            "with torch.autocast(device_type, enabled=False):\n"
            "    ...  # this expression, with its inputs as x.float()\n"
        )
    return (
        f"module = model.get_submodule({module!r})\n"
        "forward = module.forward\n\n"
        "def forward_in_fp32(*args, **kwargs):\n"
        "    with torch.autocast(device_type, enabled=False):\n"
        "        args = [a.float() if torch.is_tensor(a) and a.is_floating_point() else a"
        " for a in args]\n"
        "        return forward(*args, **kwargs)\n\n"
        "module.forward = forward_in_fp32\n"
    )
