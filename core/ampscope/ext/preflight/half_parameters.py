"""Models whose parameters are cast to half: stepped by a GradScaler, which refuses fp16 gradients,
or by an Adam whose state half precision cannot hold.

fp16 rounds below 2^-25 to zero; bf16 keeps eight significant bits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ampscope.ext.preflight.finding import SourceFinding
from ampscope.ext.preflight.roles import is_off
from ampscope.ext.preflight.script import WRAPPERS, Dtype, Script, call_chain, maker_of
from ampscope.ext.preflight.source import dotted, keyword, method_of, number, receiver_of

SMALLEST_FP16 = 2.0**-25  # what is not above it rounds to zero
HALF_ULP = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # relative, at the upper end of a binade
_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")


@dataclass(frozen=True, slots=True)
class _Cast:
    """A cast of a model's parameters."""

    model: str
    dtype: Dtype
    node: ast.Call
    part: bool  # of a submodule only
    at: ast.AST | None  # what has to run for it; None where it runs with the model's constructor


def check(script: Script) -> Iterator[SourceFinding]:
    """AMP022 and AMP023, in no order."""
    if script.uses_a_library and "accelerate" not in script.source.text:
        return
    for node, model in _casts_of_wrapped(script):
        yield _refused_by_the_scaler(script, node, model)
    frozen = "requires_grad" in script.source.text
    for cast in _casts(script):
        for maker in script.roles.calls:
            if (frozen and cast.part) or not script.roles.is_optimizer_maker(maker):
                continue
            made = _made_of(script, maker, cast.model)
            if (
                made is None
                or (cast.at is not None and not _precedes(script, cast, made))
                or _is_undone(script, cast, made)
            ):
                continue
            names = {
                dotted(part)
                for target in getattr(script.source.statement(made), "targets", [])
                for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
            }
            if cast.dtype == "fp16" and _is_scaled(script, names):
                yield _refused_by_the_scaler(script, cast.node, cast.model)
            elif (
                not cast.part
                and any(owner in names for owner, _ in script.roles.by_method["step"])
                and (reason := _lost_in_half(script, cast.dtype, maker))
            ):
                adam = dotted(maker.func).rpartition(".")[2]
                yield SourceFinding.at(
                    script.source, maker, "optimizer_state_range",
                    f"{adam} keeps its state in the half precision of the parameters: {reason}.",
                )  # fmt: skip


def _refused_by_the_scaler(script: Script, cast: ast.Call, model: str) -> SourceFinding:
    return SourceFinding.at(
        script.source, cast, "fp16_params_with_scaler",
        f"{model} is cast to fp16 and its optimizer is stepped by a GradScaler: unscale_ raises "
        "ValueError on fp16 gradients.",
    )  # fmt: skip


def _is_scaled(script: Script, optimizers: set[str]) -> bool:
    """Whether a scaler that is not switched off for good steps one of the optimizers."""
    roles = script.roles
    return not _switched_off(script) and any(
        owner in roles.scalers and call.args and dotted(call.args[0]) in optimizers
        for owner, call in roles.by_method["step"]
    )


def _switched_off(script: Script) -> bool:
    """Whether every scaler that the file makes is switched off for good."""
    roles = script.roles
    return all(is_off(call) for call in roles.calls if roles.is_scaler_maker(call))


def _lost_in_half(script: Script, dtype: Dtype, maker: ast.Call) -> str:
    """What an Adam over parameters of ``dtype`` loses of its state; "" where it loses nothing."""
    name = script.source.full_name(maker.func)
    if not name.startswith("torch.optim.") or name.rpartition(".")[2] not in _ADAMS:
        return ""
    if any(k.arg is None for k in maker.keywords):
        return ""
    given = keyword(maker, "eps")
    eps = 1e-8 if given is None else number(given)
    if dtype == "fp16" and eps is not None and 0 < eps <= SMALLEST_FP16:
        return f"its epsilon {eps:g} rounds to zero in fp16"
    betas = keyword(maker, "betas")
    beta: float | None = 0.999
    if betas is not None:
        pair = betas.elts if isinstance(betas, ast.Tuple | ast.List) else []
        beta = number(pair[1]) if len(pair) == 2 else None
    if beta is not None and 0 < 1 - beta < HALF_ULP[dtype]:
        return f"its second moment cannot fall in {dtype}: {beta:g} times it rounds back to it"
    return ""


def _casts(script: Script) -> Iterator[_Cast]:
    """``model.half()``, ``model = Net().to(torch.bfloat16)``, and ``p.data = p.data.half()`` over
    its parameters."""
    for node in script.source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if dtype := _cast_to(script, node.value):
                name = receiver_of(node.value)
                for model in script.models:
                    if name == model or name.startswith(model + "."):
                        yield _Cast(model, dtype, node.value, name != model, node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield from _casts_of_made(script, node)
        elif isinstance(node, ast.For):
            yield from _casts_in_a_loop(script, node)


def _casts_of_made(script: Script, node: ast.Assign) -> Iterator[_Cast]:
    """A cast between a model's or layer's constructor and its name."""
    name = dotted(node.targets[0]) if len(node.targets) == 1 else ""
    for call in call_chain(node.value):
        dtype = _cast_to(script, call)
        if dtype and name in script.models:
            yield _Cast(name, dtype, call, False, node)
            return
        if dtype and name.startswith("self.") and maker_of(call).args:
            yield from _casts_of_a_layer(script, node, dtype, call)
            return
        if method_of(call) not in ("to", "cuda", "train", "eval", "half", "bfloat16"):
            return


def _casts_of_a_layer(
    script: Script, node: ast.Assign, dtype: Dtype, call: ast.Call
) -> Iterator[_Cast]:
    """A layer that is cast where a model of this file makes it."""
    owner, layer = script.source.owner(node), script.source.full_name(maker_of(call).func)
    if owner is None or not layer.startswith("torch.nn."):
        return
    if any(isinstance(up, ast.If | ast.Try) for up, _ in script.branches(node)):
        return
    for model in script.models:
        if owner.name in script.classes_within(script.class_of(model)):
            yield _Cast(model, dtype, call, True, None)


def _casts_in_a_loop(script: Script, node: ast.For) -> Iterator[_Cast]:
    """``for p in model.parameters(): p.data = p.data.half()``"""
    iterated = dotted(node.iter.func) if isinstance(node.iter, ast.Call) else ""
    model, _, method = iterated.rpartition(".")
    if method != "parameters" or model not in script.models:
        return
    part = any(isinstance(n, ast.If) for n in ast.walk(node))
    for n in ast.walk(node):
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call):
            dtype = _cast_to(script, n.value)
            if dtype and dotted(n.targets[0]) == f"{dotted(node.target)}.data":
                yield _Cast(model, dtype, n.value, part, node)


def _casts_of_wrapped(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """Cast and name of ``model = DistributedDataParallel(model).half()``: what is wrapped so is
    trained, whichever optimizer has its parameters, and a cast changes them in place. DataParallel
    also runs frozen models: there the file must use the parameters or call train()."""
    by_method = script.roles.by_method
    stepped = any(o in script.roles.scalers and c.args for o, c in by_method["step"])
    if not stepped or _switched_off(script):
        return
    back = {owner for owner, _ in by_method["float"]}
    frozen = {o for method in ("requires_grad_", "eval") for o, _ in by_method[method]}
    trained = script.models | {owner for owner, _ in by_method["train"]}
    for node in script.source.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        maker, model = maker_of(node.value), dotted(node.targets[0])
        wrapper = dotted(maker.func).rpartition(".")[2]
        if wrapper not in WRAPPERS or not maker.args:
            continue
        chain = [*call_chain(node.value), *call_chain(maker.args[0])]
        kept = {method_of(c) for c in chain} & {"eval", "requires_grad_", "float"}
        if kept or model in back or model in frozen - trained:
            continue
        if wrapper == "DataParallel" and model not in trained:
            continue
        cast = next((c for c in chain if _cast_to(script, c) == "fp16"), None)
        if cast is not None:
            yield cast, model


def _cast_to(script: Script, call: ast.Call) -> Dtype:
    """The half format that ``x.half()``, ``x.bfloat16()`` or ``x.to(torch.half)`` casts to."""
    method = method_of(call)
    if method == "half" and not call.args:
        return "fp16"
    if method == "bfloat16" and not call.args:
        return "bf16"
    if method in ("to", "type"):
        for given in (*call.args, *(k.value for k in call.keywords)):
            found = script.dtype(given)
            if found in ("fp16", "bf16"):
                return found
    return ""


def _made_of(script: Script, maker: ast.Call, model: str) -> ast.Call | None:
    """The call that makes an optimizer of the model's parameters: ``maker`` itself, or the first
    call of the file's function around it that is handed the model."""
    given = maker.args[0] if maker.args else keyword(maker, "params")
    if given is None:
        return None
    function = script.source.function(maker)
    if function is not None and script.roles.functions.get(function.name) is function:
        for call in script.roles.calls:
            if dotted(call.func) == function.name and any(
                dotted(value) == model and _has_parameters_of(given, name)
                for name, value in script.handed(call)
            ):
                return call
    return maker if _has_parameters_of(given, model) else None


def _has_parameters_of(given: ast.expr, model: str) -> bool:
    """``model.parameters()``, also filtered or in a list of groups."""
    return any(method_of(n) == "parameters" and receiver_of(n) == model for n in ast.walk(given))


def _precedes(script: Script, cast: _Cast, maker: ast.Call) -> bool:
    """Whether the optimizer is made in the same function, later, and only where the cast ran."""
    assert cast.at is not None
    if script.source.function(maker) is not script.source.function(cast.node):
        return False
    if (maker.lineno, maker.col_offset) < (cast.node.lineno, cast.node.col_offset):
        return False
    outer, inner = script.branches(cast.at), script.branches(maker)
    return inner[: len(outer)] == outer


def _is_undone(script: Script, cast: _Cast, maker: ast.Call) -> bool:
    """Whether the model is cast back, or replaced between the cast and the optimizer."""
    for call in script.roles.calls:
        if receiver_of(call) == cast.model:
            given = (*call.args, *(k.value for k in call.keywords))
            method = method_of(call)
            if method in ("float", "double"):
                return True
            if method == "to" and any(script.dtype(a) == "fp32" for a in given):
                return True
    for node in script.source.nodes:
        if (
            isinstance(node, ast.Assign)
            and cast.at is not None
            and cast.node.lineno < node.lineno < maker.lineno
            and cast.model in {dotted(t) for t in node.targets}
        ):
            made = dotted(node.value.func) if isinstance(node.value, ast.Call) else ""
            if not made.startswith(cast.model + ".") and made.rpartition(".")[2] not in (
                "compile", "DataParallel",
            ):  # fmt: skip
                return True
    return False
