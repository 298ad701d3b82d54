"""The loss scale outside of GradScaler's own calls: one that is missing, one that stays in a
gradient penalty, one that a checkpoint loses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampscope.ext.preflight.finding import SourceFinding
from ampscope.ext.preflight.roles import Function, is_off
from ampscope.ext.preflight.script import Script
from ampscope.ext.preflight.source import (
    argument,
    dotted,
    keyword,
    method_of,
    number,
    receiver_of,
)

_SCALING_WORDS = ("scaler", "loss_scal", "scale_loss", "amp_scale")


def check(script: Script) -> Iterator[SourceFinding]:
    """AMP012, AMP020 and AMP021, in no order."""
    yield from _without_scaler(script)
    yield from _scaled_penalties(script)
    if lost := _lost_state(script):
        yield lost


def _without_scaler(script: Script) -> Iterator[SourceFinding]:
    """AMP012: fp16 in a file that has no scaler."""
    text = script.source.text.lower()
    if script.uses_a_library or any(word in text for word in _SCALING_WORDS):
        return
    for call in script.roles.calls:
        if _sends_fp16_backward(script, call):
            yield SourceFinding.at(
                script.source, call, "gradient_underflow",
                "The loss of an fp16 autocast region is sent backward without a GradScaler: "
                "gradients below 6e-8 become zero.",
            )  # fmt: skip


def _sends_fp16_backward(script: Script, call: ast.Call) -> bool:
    """Whether a call is ``loss.backward()`` or ``(loss / n).backward()`` of a loss that is computed
    in a region of fp16, in a function that steps an optimizer, and not scaled by hand."""
    if method_of(call) != "backward" or call.args:
        return False
    loss = call.func.value  # type: ignore[attr-defined]
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
        loss = loss.left
    if not isinstance(loss, ast.Name):
        return False
    here = list(script.scope(script.source.function(call)))
    regions = (
        script.region_of(n)
        for n in here
        if isinstance(n, ast.Assign) and loss.id in {dotted(t) for t in n.targets}
    )
    region = next((r for r in regions if r is not None), None)
    if region is None or not region.on or region.dtype != "fp16":
        return False
    if keyword(region.node, "enabled") is not None and script.branches(call):
        return False  # the branch may be the one without autocast
    if not any(method_of(n) == "step" and receiver_of(n) in script.roles.optimizers for n in here):
        return False
    return not any(
        isinstance(v, ast.BinOp)
        and isinstance(v.op, ast.Mult)
        and any((number(x) or 0) >= 16 for x in (v.left, v.right))
        for v in script.assigned.get(loss.id, [])
    )


def _scaled_penalties(script: Script) -> Iterator[SourceFinding]:
    """AMP020: gradients of a scaled output, kept in the graph for a penalty."""
    for call in script.roles.calls:
        if script.source.full_name(call.func) != "torch.autograd.grad":
            continue
        graph, outputs = keyword(call, "create_graph"), argument(call, 0, "outputs")
        if not (isinstance(graph, ast.Constant) and graph.value is True) or outputs is None:
            continue
        function = script.source.function(call)
        words = {n.attr for n in script.scope(function) if isinstance(n, ast.Attribute)}
        if not words & {"get_scale", "_scale"} and _is_scaled(script, outputs, function):
            yield SourceFinding.at(
                script.source, call, "scaled_gradient_penalty",
                "The penalty's gradients still carry the loss scale, so its value depends on the "
                "scale.",
            )  # fmt: skip


def _is_scaled(script: Script, node: ast.expr, function: Function | None) -> bool:
    """Whether a scaler scales a part of it, or what the function assigns to a name in it."""
    for n in ast.walk(node):
        values: list[ast.expr] = [n] if isinstance(n, ast.Call) else []
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
            values = [
                s.value
                for s in script.scope(function)
                if isinstance(s, ast.Assign) and n.id in {dotted(t) for t in s.targets}
            ]
        if len(values) != 1 or method_of(values[0]) != "scale":
            continue
        if receiver_of(values[0]) in script.roles.scalers:
            return True
    return False


def _lost_state(script: Script) -> SourceFinding | None:
    """AMP021: the place where a checkpoint loses the state of a scaler that the file makes and
    uses."""
    if again := _made_again(script):
        return again
    roles = script.roles
    made = {
        dotted(t)
        for call in roles.calls
        if roles.is_scaler_maker(call) and not is_off(call)
        for t in getattr(script.source.statement(call), "targets", [])
    } - {""}
    used = {owner for method in ("scale", "step") for owner, _ in roles.by_method[method]}
    regions = {region.dtype for region in script.regions if region.on}
    if (script.regions and not regions) or regions == {"bf16"}:
        return None
    # Regions may lie in another file: a scaler that scales and steps is in use all the same.
    if not made or not (regions or made & used) or _escapes(script, made):
        return None
    return _loaded_into_another(script, made, used) or _left_out(script, made, used)


def _made_again(script: Script) -> SourceFinding | None:
    """A scaler that a training loop has stepped, and replaces by a new one beside the state that it
    loads into the optimizer."""
    for maker in script.roles.calls:
        statement = script.source.statement(maker)
        if not script.roles.is_scaler_maker(maker) or not isinstance(statement, ast.Assign):
            continue
        name = dotted(statement.targets[0])
        calls = [
            n for beside in script.source.block(statement) for n in ast.walk(beside)
            if isinstance(n, ast.Call)
        ]  # fmt: skip
        loaded = {receiver_of(call) for call in calls if method_of(call) == "load_state_dict"}
        handed = {dotted(a) for c in calls for a in (*c.args, *(k.value for k in c.keywords))}
        optimizers = sorted(loaded & script.roles.optimizers)
        loops = (n for n in script.source.above(maker) if isinstance(n, ast.For | ast.While))
        loop = next(loops, None)
        stepped = any(
            owner == name
            and call.args
            and call.lineno < maker.lineno
            and any(up is loop for up in script.source.above(call))
            for owner, call in script.roles.by_method["step"]
        )
        if optimizers and stepped and name not in loaded | handed and not is_off(maker):
            return SourceFinding.at(
                script.source, maker, "scaler_state_lost",
                f"{name} is replaced by a new scaler where the state of {optimizers[0]} is loaded, "
                "and its own state is not loaded: the loss scale starts from its initial value.",
            )  # fmt: skip
    return None


def _loaded_into_another(script: Script, made: set[str], used: set[str]) -> SourceFinding | None:
    """A state that is loaded into a scaler that scales and steps nothing."""
    for owner, call in script.roles.by_method["load_state_dict"]:
        idle = owner in made and owner not in used and not _parameters_of(script, {owner})
        if idle and made & used:
            return SourceFinding.at(
                script.source, call, "scaler_state_lost",
                f"The scaler's state is loaded into {owner}, and {min(made & used)} is the one "
                "that scales.",
            )  # fmt: skip
    return None


def _left_out(script: Script, made: set[str], used: set[str]) -> SourceFinding | None:
    """A checkpoint of the optimizer's state that leaves out the scaler's, when it is saved or when
    it is loaded."""
    by_method = script.roles.by_method
    scalers = made | _parameters_of(script, made)
    optimizers = script.roles.optimizers | _parameters_of(script, script.roles.optimizers)
    loads, saves = by_method["load_state_dict"], by_method["state_dict"]
    loaded = [call for owner, call in loads if owner in optimizers]
    saved = [call for owner, call in saves if owner in optimizers]
    if not loaded or any(o in scalers or "scaler" in o.lower() for o, _ in loads):
        return None
    called = {script.source.full_name(call.func) for call in script.roles.calls}
    stores = "torch.save" in called or any(
        dotted(call.func).rpartition(".")[2].startswith("save_") for call in script.roles.calls
    )
    place, verb = loaded[0], "loads"
    if saved and stores:
        if not any(o in scalers or "scaler" in o.lower() for o, _ in saves):
            place, verb = saved[0], "saves"
    elif not made & used or "torch.load" not in called:  # another file saves
        return None
    return SourceFinding.at(
        script.source, place, "scaler_state_lost",
        f"The checkpoint {verb} the optimizer's state and not that of {min(made)}: after a resume "
        "the loss scale starts anew.",
    )  # fmt: skip


def _parameters_of(script: Script, made: set[str]) -> set[str]:
    """The parameters of the file's functions that one of these names is handed to."""
    handed = (pair for call in script.roles.calls for pair in script.handed(call))
    return {name for name, value in handed if dotted(value) in made}


def _escapes(script: Script, made: set[str]) -> bool:
    """Whether a scaler is handed to code that is not in the file, or put into a collection."""
    for node in script.source.nodes:
        if not isinstance(node, ast.Name | ast.Attribute) or dotted(node) not in made:
            continue
        up = script.source.parent(node)
        if isinstance(up, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Starred | ast.Return):
            return True
        if isinstance(up, ast.Assign) and up.value is node:
            return True
        if isinstance(up, ast.keyword):
            up = script.source.parent(up)
        if isinstance(up, ast.Call) and up.func is not node and not _is_own(script, up):
            return True
    return False


def _is_own(script: Script, call: ast.Call) -> bool:
    """Whether a call enters a function or method of the file."""
    name = dotted(call.func)
    first, _, rest = name.partition(".")
    return name in script.roles.functions or (
        first == "self" and any(rest in methods for methods in script.roles.methods.values())
    )
