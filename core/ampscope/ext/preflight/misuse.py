"""What a script does wrong with GradScaler's calls: the causes, the sentences, the safe repairs."""

from __future__ import annotations

import ast
from typing import NamedTuple

from ampscope.ext.preflight.finding import Edit, SourceFinding
from ampscope.ext.preflight.roles import Roles
from ampscope.ext.preflight.source import SourceFile, dotted

# Each kind of misuse with its cause and its sentence.
_KINDS: dict[str, tuple[str, str]] = {
    "clip_before_unscale": (
        "clip_before_unscale",
        "Gradients are clipped while they still carry the loss scale: {scaler}.unscale_ is not "
        "called between backward and here.",
    ),
    "unscaled_twice": (
        "scaler_protocol_error",
        "{scaler}.unscale_({optimizer}) is called a second time before {scaler}.update(): it "
        "raises RuntimeError.",
    ),
    "unscaled_after_step": (
        "scaler_protocol_error",
        "{scaler}.unscale_({optimizer}) is called after {scaler}.step({optimizer}) and before "
        "{scaler}.update(): it raises RuntimeError.",
    ),
    "stepped_twice": (
        "scaler_protocol_error",
        "{scaler}.step({optimizer}) is called a second time before {scaler}.update(): it raises "
        "RuntimeError.",
    ),
    "update_without_step": (
        "scaler_protocol_error",
        "{scaler}.update() is called before {scaler}.step since the last backward or update.",
    ),
    "never_updated": (
        "scaler_protocol_error",
        "{scaler}.step({optimizer}) is called and {scaler}.update() nowhere in the file: the scale "
        "never changes, and the next unscale_ or step raises RuntimeError.",
    ),
    "never_scaled": (
        "scaler_protocol_error",
        "{scaler}.step({optimizer}) is called and {scaler}.scale(loss) nowhere in the file: step "
        "divides gradients by a scale that they were never multiplied by.",
    ),
    "unscaled_backward": (
        "scaler_bypassed",
        "backward starts from a loss without the scale, and {scaler}.step({optimizer}) divides "
        "its gradients by the scale.",
    ),
    "optimizer_stepped": (
        "scaler_bypassed",
        "{optimizer}.step() applies gradients that still carry the loss scale; {scaler}.step is "
        "bypassed.",
    ),
    "optimizer_stepped_too": (
        "scaler_bypassed",
        "{optimizer}.step() is called after {scaler}.step({optimizer}): the optimizer steps "
        "twice, also where the scaler skipped.",
    ),
    "scaled_onto_unscaled": (
        "accumulation_scale_mismatch",
        "A scaled loss is sent backward onto gradients that were unscaled and not stepped: the "
        "sum mixes two scales.",
    ),
    "update_between": (
        "shared_scaler_interference",
        "{scaler}.update() is called between the steps of two optimizers of one iteration; each "
        "overflow of one changes the scale of the other.",
    ),
}


class Misuse(NamedTuple):
    """A call that is wrong: a kind (a key of ``_KINDS``), and the scaler and optimizer as the file
    writes them."""

    kind: str
    node: ast.Call
    scaler: str
    optimizer: str


def finding_of(m: Misuse, source: SourceFile, roles: Roles) -> SourceFinding:
    """A misuse with its sentence and its repair."""
    cause, sentence = _KINDS[m.kind]
    scaler = m.scaler or min(roles.scalers, default="scaler")
    message = sentence.format(scaler=scaler, optimizer=m.optimizer or "optimizer")
    return SourceFinding.at(source, m.node, cause, message, _repair(m, source, roles))


def _repair(m: Misuse, source: SourceFile, roles: Roles) -> list[Edit]:
    """A repair that changes nothing but the misuse, where there is one."""
    statement = source.statement(m.node)
    if not source.alone_on_its_lines(statement):
        return []
    if m.kind == "clip_before_unscale":
        return _unscale_before(statement, source, roles)
    block = source.block(statement)
    if m.kind in ("unscaled_twice", "stepped_twice"):
        above = [source.segment(s) for s in block[: block.index(statement)]]
        is_needless = source.segment(statement) in above
    else:
        is_needless = m.kind == "optimizer_stepped_too" and len(block) > 1
    if is_needless and isinstance(statement, ast.Expr) and statement.value is m.node:
        last = statement.end_lineno or statement.lineno
        end = min(source.line_start(last + 1), len(source.text))
        return [Edit(source.line_start(statement.lineno), end, "")]
    return []


def _unscale_before(statement: ast.stmt, source: SourceFile, roles: Roles) -> list[Edit]:
    """The line before a clip, where its function steps one optimizer and unscales none."""
    function = source.function(statement)
    steps = {
        (owner, dotted(call.args[0]))
        for owner, call in roles.by_method["step"]
        if owner in roles.scalers and call.args and source.function(call) is function
    }
    if len(steps) != 1:
        return []
    ((scaler, optimizer),) = steps
    if not optimizer or any(
        source.function(call) is function for _, call in roles.by_method["unscale_"]
    ):
        return []
    # The clip and the step have to run together, or unscale_ would run in every micro-batch.
    step = f"{scaler}.step({optimizer})"
    if not any(
        isinstance(s, ast.Expr) and source.segment(s) == step for s in source.block(statement)
    ):
        return []
    at = source.line_start(statement.lineno)
    return [Edit(at, at, f"{source.indent(statement)}{scaler}.unscale_({optimizer})\n")]
