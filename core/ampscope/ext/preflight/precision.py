"""Which precision a script's source says: autocast regions, casts by hand, constants, losses.

Everything here needs the dtype written in the file. A dtype that comes from an argument, a
configuration or another file is unknown, and unknown reports nothing.

Number formats: fp16 ends at 65,504 and rounds below 2^-25 to zero; bf16 keeps eight significant
bits. Which ops CUDA's autocast runs in half or forbids: ``ampscope.policy.autocast_lists``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from ampscope.ext.preflight.roles import Function, Roles, is_off
from ampscope.ext.preflight.source import Source, argument, children, dotted, keyword, number

Dtype: TypeAlias = Literal["fp16", "bf16", "fp32", ""]  # "" is unknown

LARGEST_FP16 = 65504.0
SMALLEST_FP16 = 2.0**-25  # what is not above it rounds to zero
HALF_ULP = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # relative, at the upper end of a binade
DTYPES: dict[str, Dtype] = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float": "fp32",
}  # fmt: skip
_AUTOCASTS = {
    "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast",
    "torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast", "torch.cpu.amp.autocast",
}  # fmt: skip
_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")
_LIBRARIES = (  # they scale the loss, or manage precision, out of sight
    "accelerate", "apex", "colossalai", "deepspeed", "fastai", "ignite", "lightning", "mmcv",
    "mmengine", "pytorch_lightning", "lightning_fabric", "torch_xla", "horovod", "fairscale",
    "composer", "catalyst", "bitsandbytes", "torchao", "unsloth", "peft",
)  # fmt: skip
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")  # ShardedGradScaler takes fp16
_KEEPS = {  # methods whose result has the dtype of the tensor
    "view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "expand",
    "flatten", "mT", "T", "clone", "detach", "masked_fill", "masked_fill_", "repeat", "swapaxes",
    "mul_", "div_", "mul", "div", "relu", "abs", "amax", "amin", "chunk",
}  # fmt: skip
_MATMULS = {"matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "linear", "conv1d", "conv2d"}
_HALF_LAYERS = {"Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"}


@dataclass(frozen=True, slots=True)
class Trait:
    """A place that the precision makes wrong: a kind (a key of ``codes.CODES``), and words for
    its sentence."""

    kind: str
    node: ast.AST
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """One use of autocast as a context or decorator."""

    node: ast.Call
    dtype: Dtype
    on: bool  # False where enabled=False is written


class Precision:
    """The regions, casts and classes of one file."""

    def __init__(self, source: Source, roles: Roles) -> None:
        self.source, self.roles = source, roles
        self.text = source.text

    # ---- dtypes and regions

    def dtype(self, node: ast.expr | None, depth: int = 0) -> Dtype:
        """The dtype that an expression names, through names that are assigned once."""
        if node is None or depth > 4:
            return ""
        full = self.source.full_name(node)
        if full in DTYPES:
            return DTYPES[full]
        if isinstance(node, ast.IfExp):
            one = self.dtype(node.body, depth + 1)
            return one if one == self.dtype(node.orelse, depth + 1) else ""
        if isinstance(node, ast.Name):
            values = self.assigned.get(node.id, [])
            if len(values) == 1 and node.id not in self._parameters:
                return self.dtype(values[0], depth + 1)
        return ""

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr | None]]:
        """What each dotted name is assigned in the file; None where it cannot be told."""
        found: dict[str, list[ast.expr | None]] = defaultdict(list)
        for node in self.source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if dotted(target):
                        found[dotted(target)].append(node.value)
                    elif isinstance(target, ast.Tuple | ast.List):
                        same = isinstance(node.value, ast.Tuple | ast.List) and len(
                            node.value.elts
                        ) == len(target.elts)
                        for at, element in enumerate(target.elts):
                            part = node.value.elts[at] if same else None  # type: ignore[attr-defined]
                            found[dotted(element)].append(part)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                value = None if isinstance(node, ast.AugAssign) else node.value
                found[dotted(node.target)].append(value)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                for n in ast.walk(node.target):
                    found[dotted(n)].append(None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                found[dotted(node.optional_vars)].append(None)
        return found

    def value(self, node: ast.expr | None) -> float | None:
        """The number that an expression is: written there, or in the one place where its name is
        assigned in the file."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand)
            return None if inner is None else -inner
        name = dotted(node)
        if not name or name.partition(".")[0] in self._parameters - {"self"}:
            return number(node)
        values = self.assigned.get(name, [])
        return number(values[0]) if len(values) == 1 else None

    @cached_property
    def _parameters(self) -> set[str]:
        return {n.arg for n in self.source.nodes if isinstance(n, ast.arg)}

    def region(self, node: ast.AST) -> Region | None:
        """An autocast call as a region."""
        if isinstance(node, ast.Name):
            values = self.assigned.get(node.id, [])
            found = [self.region(v) for v in values if isinstance(v, ast.Call)]
            return found[0] if len(values) == 1 and found else None
        if not isinstance(node, ast.Call):
            return None
        full = self.source.full_name(node.func)
        if full not in _AUTOCASTS:
            return None
        old = ".amp.autocast" in full and full.split(".")[1] in ("cuda", "cpu")
        given = argument(node, 1, "dtype")
        switch = argument(node, 0, "enabled") if old else argument(node, 2, "enabled")
        device: object = full.split(".")[1] if old else None
        if not old:
            first = argument(node, 0, "device_type")
            device = first.value if isinstance(first, ast.Constant) else None
        dtype: Dtype = self.dtype(given)
        if given is None and "set_autocast" not in self.text:
            dtype = {"cuda": "fp16", "cpu": "bf16"}.get(str(device), "")  # type: ignore[assignment]
        off = isinstance(switch, ast.Constant) and switch.value is False
        return Region(node, dtype, not off)

    def region_of(self, node: ast.AST) -> Region | None:
        """The innermost region that a node is written in, within its function."""
        at = node
        for up in self.source.above(node):
            if isinstance(up, ast.With | ast.AsyncWith) and at in up.body:
                for item in reversed(up.items):
                    found = self.region(item.context_expr)
                    if found is not None:
                        return found
            if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in up.decorator_list:
                    found = self.region(decorator)
                    if found is not None:
                        return found
                return None
            at = up
        return None

    @cached_property
    def regions(self) -> list[Region]:
        return [r for c in self.roles.calls if (r := self.region(c)) is not None]

    @cached_property
    def uses_a_library(self) -> bool:
        """Whether precision may be managed by code that is not here."""
        return any(n.lstrip(".").split(".")[0] in _LIBRARIES for n in self.source.imports.values())

    # ---- classes

    def made_as(self, name: str) -> str:
        """The class that a dotted name is an instance of, by its assignments; "" if unknown."""
        made = {
            self.source.full_name(_maker(v).func).rpartition(".")[2] if v is not None else ""
            for v in self.assigned.get(name, [])
            if not (isinstance(v, ast.Call) and dotted(v.func).startswith(f"{name}."))
        }
        return made.pop() if len(made) == 1 else ""

    def parts_of(self, name: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        """Classes of this file that an instance of ``name`` is built from, itself included."""
        if name not in self.roles.classes or name in seen:
            return seen
        seen |= {name}
        for n in ast.walk(self.roles.classes[name]):
            if isinstance(n, ast.Call):
                seen = self.parts_of(dotted(n.func), seen)
        return seen

    @cached_property
    def run_in_fp16(self) -> frozenset[str]:
        """Classes whose forward pass is called within a region that is fp16 for certain."""
        found: frozenset[str] = frozenset()
        for call in self.roles.calls:
            name = dotted(call.func)
            if not name or name in self.roles.classes:
                continue
            made = self.made_as(name)
            if made in self.roles.classes:
                region = self.region_of(call)
                if region is not None and region.on and region.dtype == "fp16":
                    found |= self.parts_of(made)
        return found


def _maker(node: ast.expr) -> ast.Call:
    """``Net(3)`` of ``Net(3).to(device)``; a call of nothing where it is no call."""
    while isinstance(node, ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if not isinstance(inner, ast.Call):
            return node
        node = inner
    return ast.Call(ast.Constant(None), [], [])


def check(source: Source, roles: Roles) -> Iterator[Trait]:
    """What the precision makes wrong, in no order."""
    seen = Precision(source, roles)
    yield from _forbidden_losses(seen)
    yield from _without_scaler(seen)
    yield from _half_parameters(seen)
    yield from _constants(seen)
    yield from _scaler_for_bf16(seen)
    yield from _never_enabled(seen)
    yield from _lost_state(seen)
    yield from _penalties(seen)
    yield from _evaluation(seen)


# ---- losses that autocast forbids


def _forbidden_losses(p: Precision) -> Iterator[Trait]:
    for call in p.roles.calls:
        region = p.region_of(call)
        if region is None or not region.on:
            continue
        if loss := _forbidden(p, call):
            yield Trait("unsafe_op_under_autocast", call, (loss,))
            continue
        called = _called(p, call)
        for n in _scope(p, called) if called is not None else ():
            # One that is shielded by a region of its own is found by its own region, or right.
            if isinstance(n, ast.Call) and p.region_of(n) is None and (loss := _forbidden(p, n)):
                yield Trait("unsafe_op_under_autocast", n, (loss,))
                break


def _forbidden(p: Precision, call: ast.Call) -> str:
    """The loss that a call computes, if autocast forbids it."""
    if p.source.full_name(call.func) == "torch.nn.functional.binary_cross_entropy":
        return "binary_cross_entropy"
    name = dotted(call.func)
    known = name and name not in p._parameters
    return "BCELoss" if known and p.made_as(name) == "BCELoss" else ""


def _called(p: Precision, call: ast.Call) -> Function | None:
    """The function of this file that a call runs: by its name, a method of ``self`` or of an
    object that is made here, or the forward pass of a module that is made here."""
    name = dotted(call.func)
    owner, _, last = name.rpartition(".")
    if not name or name.partition(".")[0] in p._parameters - {"self"}:
        return None
    if made := p.made_as(name):
        return p.roles.methods.get(made, {}).get("forward")
    if owner == "self":
        inside = p.source.owner(call)
        return p.roles.methods.get(inside.name, {}).get(last) if inside is not None else None
    if owner:
        return p.roles.methods.get(p.made_as(owner), {}).get(last)
    return p.roles.functions.get(name)


# ---- fp16 without a scaler


def _without_scaler(p: Precision) -> Iterator[Trait]:
    low, words = p.text.lower(), ("scaler", "loss_scal", "scale_loss", "amp_scale")
    if p.uses_a_library or any(word in low for word in words):
        return
    for call in p.roles.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
            continue
        loss, function = call.func.value, p.source.function(call)
        if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
            loss = loss.left
        if not isinstance(loss, ast.Name) or call.args:
            continue
        region = next(
            (
                r
                for n in _scope(p, function)
                if isinstance(n, ast.Assign)
                and loss.id in {dotted(t) for t in n.targets}
                and (r := p.region_of(n)) is not None
            ),
            None,
        )
        steps = [
            c
            for c in _scope(p, function)
            if isinstance(c, ast.Call)
            and isinstance(c.func, ast.Attribute)
            and c.func.attr == "step"
            and dotted(c.func.value) in p.roles.optimizers
        ]
        if region is None or not region.on or region.dtype != "fp16" or not steps:
            continue
        if keyword(region.node, "enabled") is not None and _branches(p, call):
            continue  # the branch may be the one without autocast
        scaled = any(
            isinstance(v, ast.BinOp)
            and isinstance(v.op, ast.Mult)
            and any((number(x) or 0) >= 16 for x in (v.left, v.right))
            for v in p.assigned.get(loss.id, [])
        )
        if not scaled:
            yield Trait("gradient_underflow", call)


def _scope(p: Precision, function: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes of a function, or of the top level, without what is defined within it."""
    start = function if function is not None else p.source.tree
    waiting = list(children(start))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield node
        waiting += children(node)


# ---- parameters cast by hand


@dataclass(frozen=True, slots=True)
class _Cast:
    model: str
    dtype: Dtype
    node: ast.Call
    part: bool  # of a submodule only
    at: ast.AST | None  # what has to run for it; None where it runs with the model's constructor


def _half_parameters(p: Precision) -> Iterator[Trait]:
    frozen = "requires_grad" in p.text
    if p.uses_a_library and "accelerate" not in p.text:
        return
    yield from _half_wrapped(p)
    for cast in _casts(p):
        for maker in p.roles.calls:
            if not p.roles.is_optimizer_maker(maker):
                continue
            given = maker.args[0] if maker.args else keyword(maker, "params")
            if given is None or (frozen and cast.part):
                continue
            made = _call_that_makes(p, maker, given, cast.model)
            if made is None and _is_parameters_of(p, given, cast.model):
                made = maker
            if made is None or (cast.at is not None and not _precedes(p, cast, made)):
                continue
            if _undone(p, cast, made):
                continue
            names = {
                dotted(part)
                for target in getattr(p.source.statement(made), "targets", [])
                for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
            }
            yield from _half_optimizer(p, cast, maker, names)


def _half_wrapped(p: Precision) -> Iterator[Trait]:
    """``model = DistributedDataParallel(model).half()``: what is wrapped so is trained, whichever
    optimizer has its parameters, and a cast changes them in place. Of DataParallel, which also runs
    frozen models, the file must use the parameters or call train()."""
    stepped = any(o in p.roles.scalers and c.args for o, c in p.roles.by_method["step"])
    if not stepped or _switched_off(p):
        return
    back = {owner for owner, _ in p.roles.by_method["float"]}
    frozen = {o for method in ("requires_grad_", "eval") for o, _ in p.roles.by_method[method]}
    trained = _models(p) | {owner for owner, _ in p.roles.by_method["train"]}
    for node in p.source.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        maker, model = _maker(node.value), dotted(node.targets[0])
        wrapper = dotted(maker.func).rpartition(".")[2]
        if wrapper not in _WRAPPERS or not maker.args:
            continue
        chain = [*_chain(node.value), *_chain(maker.args[0])]
        methods = {c.func.attr for c in chain if isinstance(c.func, ast.Attribute)}
        if methods & {"eval", "requires_grad_", "float"} or model in frozen - trained:
            continue
        if wrapper == "DataParallel" and model not in trained:
            continue
        cast = next((c for c in chain if _half_call(p, c) == "fp16"), None)
        if cast is not None and model not in back:
            yield Trait("fp16_params_with_scaler", cast, (model,))


def _chain(node: ast.expr) -> Iterator[ast.Call]:
    """The calls of ``Net(3).half().cuda()``, the last one first."""
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func


def _switched_off(p: Precision) -> bool:
    """Whether every scaler that the file makes is switched off for good."""
    return all(is_off(call) for call in p.roles.calls if p.roles.is_scaler_maker(call))


def _half_optimizer(p: Precision, cast: _Cast, maker: ast.Call, names: set[str]) -> Iterator[Trait]:
    if cast.dtype == "fp16":
        stepped = [
            call
            for owner, call in p.roles.by_method["step"]
            if owner in p.roles.scalers and call.args and dotted(call.args[0]) in names
        ]
        if stepped and not _switched_off(p):
            yield Trait("fp16_params_with_scaler", cast.node, (cast.model,))
            return
    if cast.part or not any(owner in names for owner, _ in p.roles.by_method["step"]):
        return
    name = p.source.full_name(maker.func)
    kind = name.rpartition(".")[2]
    if not name.startswith("torch.optim.") or kind not in _ADAMS:
        return
    if any(k.arg is None for k in maker.keywords):
        return
    given = keyword(maker, "eps")
    eps = 1e-8 if given is None else number(given)
    if cast.dtype == "fp16" and eps is not None and 0 < eps <= SMALLEST_FP16:
        words = (kind, f"its epsilon {eps:g} rounds to zero in fp16")
        yield Trait("optimizer_state_range", maker, words)
        return
    betas = keyword(maker, "betas")
    beta: float | None = 0.999
    if betas is not None:
        pair = betas.elts if isinstance(betas, ast.Tuple | ast.List) else []
        beta = number(pair[1]) if len(pair) == 2 else None
    if beta is not None and 0 < 1 - beta < HALF_ULP[cast.dtype]:
        words = (
            kind,
            f"its second moment cannot fall in {cast.dtype}: {beta:g} times it rounds back to it",
        )
        yield Trait("optimizer_state_range", maker, words)


def _casts(p: Precision) -> Iterator[_Cast]:
    """Casts of a model to half: ``model.half()``, ``model = Net().to(torch.bfloat16)``, and
    ``p.data = p.data.half()`` over its parameters."""
    for node in p.source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found = _half_call(p, node.value)
            if found and isinstance(node.value.func, ast.Attribute):
                name = dotted(node.value.func.value)
                for model in _models(p):
                    if name == model or name.startswith(model + "."):
                        yield _Cast(model, found, node.value, name != model, node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = dotted(node.targets[0]) if len(node.targets) == 1 else ""
            call: ast.expr = node.value
            while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                found = _half_call(p, call)
                if found and name in _models(p):
                    yield _Cast(name, found, call, False, node)
                    break
                if found and name.startswith("self.") and _maker(call).args:
                    yield from _layer_casts(p, node, found, call)
                    break
                if call.func.attr not in ("to", "cuda", "train", "eval", "half", "bfloat16"):
                    break
                call = call.func.value
        elif isinstance(node, ast.For):
            iterated = dotted(node.iter.func) if isinstance(node.iter, ast.Call) else ""
            model, _, method = iterated.rpartition(".")
            if method != "parameters" or model not in _models(p):
                continue
            for n in ast.walk(node):
                if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call):
                    target = dotted(n.targets[0])
                    found = _half_call(p, n.value)
                    if found and target == f"{dotted(node.target)}.data":
                        part = any(isinstance(x, ast.If) for x in ast.walk(node))
                        yield _Cast(model, found, n.value, part, node)


def _layer_casts(p: Precision, node: ast.Assign, dtype: Dtype, call: ast.Call) -> Iterator[_Cast]:
    """A layer that is cast where a model of this file makes it."""
    owner, layer = p.source.owner(node), p.source.full_name(_maker(call).func)
    if owner is None or not layer.startswith("torch.nn.") or _within_branch(p, node):
        return
    for model in _models(p):
        if owner.name in p.parts_of(p.made_as(model)):
            yield _Cast(model, dtype, call, True, None)


def _models(p: Precision) -> set[str]:
    """Names whose parameters are optimized."""
    found = {owner for owner, _ in p.roles.by_method["parameters"]} - {""}
    return found | _handed_under(p, found)


def _handed_under(p: Precision, names: set[str]) -> set[str]:
    """What functions of the file are handed as parameters of these names."""
    found = set()
    for call in p.roles.calls:
        function = p.roles.functions.get(dotted(call.func))
        if function is None:
            continue
        own = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        found |= {dotted(a) for n, a in zip(own, call.args, strict=False) if n in names}
        found |= {dotted(k.value) for k in call.keywords if k.arg in names}
    return found - {""}


def _half_call(p: Precision, call: ast.Call) -> Dtype:
    """The half format that ``x.half()``, ``x.bfloat16()`` or ``x.to(torch.half)`` casts to."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    method = call.func.attr
    if method == "half" and not call.args:
        return "fp16"
    if method == "bfloat16" and not call.args:
        return "bf16"
    if method in ("to", "type"):
        for given in (*call.args, *(k.value for k in call.keywords)):
            found = p.dtype(given)
            if found in ("fp16", "bf16"):
                return found
    return ""


def _is_parameters_of(p: Precision, given: ast.expr, model: str) -> bool:
    """``model.parameters()``, also filtered or in a list of groups."""
    return any(
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr == "parameters"
        and dotted(n.func.value) == model
        for n in ast.walk(given)
    )


def _call_that_makes(p: Precision, maker: ast.Call, given: ast.expr, model: str) -> ast.Call | None:
    """The first call of a function of this file that is handed ``model`` and makes an optimizer of
    its parameters."""
    function = p.source.function(maker)
    if function is None or p.roles.functions.get(function.name) is not function:
        return None
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    for call in p.roles.calls:
        if dotted(call.func) != function.name:
            continue
        handed = dict(zip(names, call.args, strict=False))
        handed |= {k.arg: k.value for k in call.keywords if k.arg}
        if any(
            dotted(value) == model and _is_parameters_of(p, given, name)
            for name, value in handed.items()
        ):
            return call
    return None


def _branches(p: Precision, node: ast.AST) -> list[tuple[ast.AST, str]]:
    """The branches that a node stands in, outermost first."""
    found: list[tuple[ast.AST, str]] = []
    at = node
    for up in p.source.above(node):
        if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
            break
        if isinstance(up, ast.If | ast.Try | ast.Match | ast.IfExp):
            body = [up.body] if isinstance(up, ast.IfExp) else getattr(up, "body", [])
            side = "body" if at in body else "else"
            found.append((up, side))
        at = up
    return found[::-1]


def _precedes(p: Precision, cast: _Cast, maker: ast.Call) -> bool:
    """Whether the optimizer is made in the same function, later, and only where the cast ran."""
    assert cast.at is not None
    if p.source.function(maker) is not p.source.function(cast.node):
        return False
    if (maker.lineno, maker.col_offset) < (cast.node.lineno, cast.node.col_offset):
        return False
    outer, inner = _branches(p, cast.at), _branches(p, maker)
    return inner[: len(outer)] == outer


def _undone(p: Precision, cast: _Cast, maker: ast.Call) -> bool:
    """Whether the model is cast back or replaced between the cast and the optimizer, or cast
    back at all."""
    for call in p.roles.calls:
        if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == cast.model:
            if call.func.attr in ("float", "double"):
                return True
            if call.func.attr == "to" and any(
                p.dtype(a) == "fp32" for a in (*call.args, *(k.value for k in call.keywords))
            ):
                return True
    for node in p.source.nodes:
        if (
            isinstance(node, ast.Assign)
            and cast.at is not None
            and cast.node.lineno < node.lineno < maker.lineno
            and cast.model in {dotted(t) for t in node.targets}
        ):
            value = node.value
            kept = isinstance(value, ast.Call) and (
                dotted(value.func).startswith(cast.model + ".")
                or dotted(value.func).rpartition(".")[2] in ("compile", "DataParallel")
            )
            if not kept:
                return True
    return False


# ---- constants that half cannot hold


def _constants(p: Precision) -> Iterator[Trait]:
    for call in p.roles.calls:
        if p.dtype(keyword(call, "dtype")) == "fp16":
            position = {"torch.full": 1, "torch.full_like": 1, "torch.tensor": 0}.get(
                p.source.full_name(call.func)
            )
            if position is not None and len(call.args) > position:
                value = p.value(call.args[position])
                if value is not None and LARGEST_FP16 + 16 <= abs(value) < float("inf"):
                    yield Trait("mask_constant_overflow", call, (f"{value:g}",))
    for node in p.source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            owner = p.source.owner(node)
            autocast = owner is not None and node.name == "forward" and owner.name in p.run_in_fp16
            yield from _constants_of(p, node, autocast)
    yield from _constants_of(p, None, False)


def _constants_of(p: Precision, function: Function | None, autocast: bool) -> Iterator[Trait]:
    """Follow fp16 tensors through one function, or through the module's own code, in the order of
    its statements."""
    half: set[str] = set()
    seen = sorted(
        (n for n in _scope(p, function) if isinstance(n, ast.stmt)),
        key=lambda n: (n.lineno, n.col_offset),
    )
    for statement in seen:
        inside = autocast and p.region_of(statement) is None
        own = p.region_of(statement)
        inside = inside or (own is not None and own.on and own.dtype == "fp16")
        for n in _expressions(statement):
            if (
                isinstance(n, ast.Call)
                and isinstance(n.func, ast.Attribute)
                and n.func.attr in ("masked_fill", "masked_fill_")
            ):
                value = p.value(argument(n, 1, "value"))
                if (
                    value is not None
                    and LARGEST_FP16 + 16 <= abs(value) < float("inf")
                    and _is_half(p, n.func.value, half, inside)
                ):
                    yield Trait("mask_constant_overflow", n, (f"{value:g}",))
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add):
                value = p.value(n.right)
                guards = _guards(p, n)
                if (
                    value is not None
                    and 0 < value <= SMALLEST_FP16
                    and guards
                    and _is_half(p, n.left, half, inside)
                ):
                    yield Trait("norm_eps_underflow", n, (f"{value:g}",))
        if isinstance(statement, ast.Assign):
            branch = _within_branch(p, statement)
            pairs = [pair for t in statement.targets for pair in _pairs(t, statement.value)]
            cast = [_is_half(p, value, half, inside) and not branch for _, value in pairs]
            for (target, _), is_half in zip(pairs, cast, strict=True):
                (half.add if is_half else half.discard)(dotted(target))


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in it."""
    waiting: list[ast.AST] = [
        c for c in ast.iter_child_nodes(statement) if not isinstance(c, ast.stmt)
    ]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt | ast.Lambda):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What each target is assigned: its own part of a tuple, or the whole value."""
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    parts = [value] * len(target.elts)
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
        parts = list(value.elts)
    return list(zip(target.elts, parts, strict=True))


def _within_branch(p: Precision, node: ast.AST) -> bool:
    return any(isinstance(up, ast.If | ast.Try) for up, _ in _branches(p, node))


def _guards(p: Precision, node: ast.BinOp) -> bool:
    """Whether a sum is a divisor, or what a logarithm or root is taken of."""
    up = p.source.parent(node)
    if isinstance(up, ast.BinOp) and isinstance(up.op, ast.Div):
        return up.right is node
    if isinstance(up, ast.Attribute):
        return up.attr in ("log", "sqrt", "rsqrt", "reciprocal")
    return isinstance(up, ast.Call) and p.source.full_name(up.func) in (
        "torch.log", "torch.sqrt", "torch.rsqrt", "torch.reciprocal",
    )  # fmt: skip


def _is_half(p: Precision, node: ast.AST, half: set[str], autocast: bool) -> bool:
    """Whether a tensor is fp16 for certain."""
    if dotted(node):
        return dotted(node) in half
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.MatMult):
            both = _is_half(p, node.left, half, False) and _is_half(p, node.right, half, False)
            return autocast or both
        left, right = (_is_half(p, x, half, autocast) for x in (node.left, node.right))
        plain = [_is_scalar(p, x) for x in (node.left, node.right)]
        return (left and (right or plain[1])) or (right and plain[0])
    if isinstance(node, ast.Subscript):
        return _is_half(p, node.value, half, autocast)
    if isinstance(node, ast.Call):
        full = p.source.full_name(node.func)
        last = full.rpartition(".")[2]
        if _half_call(p, node) == "fp16" and not _is_model(p, node):
            return True
        if autocast and last in _MATMULS and full.startswith("torch."):
            return True
        if autocast and full.startswith("self.") and p.made_as(full) in _HALF_LAYERS:
            return True
        if isinstance(node.func, ast.Attribute):
            if autocast and node.func.attr in ("matmul", "bmm", "mm"):
                return True
            return node.func.attr in _KEEPS and _is_half(p, node.func.value, half, autocast)
    return False


def _is_model(p: Precision, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and dotted(call.func.value) in _models(p)


def _is_scalar(p: Precision, node: ast.expr) -> bool:
    """A Python number, which promotes no tensor."""
    if number(node) is not None:
        return True
    if isinstance(node, ast.Call):
        return dotted(node.func) in ("math.sqrt", "float", "int")
    if isinstance(node, ast.BinOp):
        return _is_scalar(p, node.left) and _is_scalar(p, node.right)
    if isinstance(node, ast.Attribute) and dotted(node).startswith("self."):
        values = p.assigned.get(dotted(node), [])
        return bool(values) and all(
            v is not None and (number(v) is not None or _is_root(v)) for v in values
        )
    return False


def _is_root(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return number(node.right) is not None and isinstance(node.left, ast.Name | ast.Attribute)
    return isinstance(node, ast.Call) and dotted(node.func) == "math.sqrt"


# ---- scalers for nothing


def _scaler_for_bf16(p: Precision) -> Iterator[Trait]:
    on = [r for r in p.regions if r.on]
    if not on or {r.dtype for r in on} != {"bf16"} or "set_autocast" in p.text:
        return
    if any(isinstance(r.node.func, ast.Attribute) and r.node.func.attr == "partial" for r in on):
        return
    for call in p.roles.calls:
        if p.roles.is_scaler_maker(call):
            switch = keyword(call, "enabled")
            if (
                (switch is None or (isinstance(switch, ast.Constant) and switch.value is True))
                and any(owner in p.roles.scalers for owner, _ in p.roles.by_method["step"])
            ) and not _branches(p, call):
                yield Trait("scaler_for_bf16", call)


_HALF_WORDS = {"fp16", "float16", "half", "16", "16-mixed", "fp16-mixed", "amp_fp16"}


def _never_enabled(p: Precision) -> Iterator[Trait]:
    for call in p.roles.calls:
        if not p.roles.is_scaler_maker(call):
            continue
        test = keyword(call, "enabled")
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            continue
        if not isinstance(test.ops[0], ast.Eq):
            continue
        sides = [test.left, test.comparators[0]]
        wanted = [s.value for s in sides if isinstance(s, ast.Constant)]
        asked = [s for s in sides if not isinstance(s, ast.Constant)]
        if len(wanted) != 1 or not isinstance(wanted[0], str) or len(asked) != 1:
            continue
        possible = _possible(p, asked[0])
        if possible is None or wanted[0] in possible:
            continue
        if possible & _HALF_WORDS or "torch.float16" in possible:
            words = (wanted[0], ", ".join(sorted(possible)))
            yield Trait("scaler_never_enabled", call, words)


def _possible(p: Precision, node: ast.expr, depth: int = 0) -> set[str] | None:
    """All values that a name can have; None where that is not known."""
    if depth > 4:
        return None
    if isinstance(node, ast.Constant):
        return {str(node.value)}
    if p.dtype(node):
        return {{"fp16": "torch.float16", "bf16": "torch.bfloat16"}.get(p.dtype(node), "other")}
    if isinstance(node, ast.Call) and dotted(node.func) == "str" and len(node.args) == 1:
        return _possible(p, node.args[0], depth + 1)
    if isinstance(node, ast.IfExp):
        one, other = (_possible(p, x, depth + 1) for x in (node.body, node.orelse))
        return one | other if one is not None and other is not None else None
    if isinstance(node, ast.Name):
        values = p.assigned.get(node.id, [])
        if not values or node.id in p._parameters or "exec(" in p.text:
            return None
        found: set[str] = set()
        for value in values:
            part = _possible(p, value, depth + 1) if value is not None else None
            if part is None:
                return None
            found |= part
        return found
    if isinstance(node, ast.Attribute):
        return _choices(p, node.attr)
    return None


def _choices(p: Precision, name: str) -> set[str] | None:
    """The choices of a command-line option."""
    found = None
    for call in p.roles.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if any(str(f).lstrip("-").replace("-", "_") == name for f in flags):
            choices = keyword(call, "choices")
            if found is not None or not isinstance(choices, ast.List | ast.Tuple):
                return None
            if not all(isinstance(c, ast.Constant) for c in choices.elts):
                return None
            found = {str(c.value) for c in choices.elts if isinstance(c, ast.Constant)}
    return found


# ---- the scaler's state


def _lost_state(p: Precision) -> Iterator[Trait]:
    again = _made_again(p)
    if again is not None:
        yield again
        return
    made = {
        dotted(t)
        for call in p.roles.calls
        if p.roles.is_scaler_maker(call) and not is_off(call)
        for t in getattr(p.source.statement(call), "targets", [])
    } - {""}
    on = [r for r in p.regions if r.on]
    aliases = made | _handed_on(p, made)
    used = {o for method in ("scale", "step") for o, _ in p.roles.by_method[method]}
    # Regions may lie in another file: a scaler that scales and steps is in use all the same.
    if (p.regions and not on) or (on and {r.dtype for r in on} == {"bf16"}):
        return
    if not made or not (on or made & used) or _escapes(p, made):
        return
    for owner, call in p.roles.by_method["load_state_dict"]:
        if owner in made and owner not in used and made & used and not _handed_on(p, {owner}):
            yield Trait("scaler_state_lost", call, ("elsewhere", owner, sorted(made & used)[0]))
            return
    saves = p.roles.by_method["state_dict"]
    loads = p.roles.by_method["load_state_dict"]
    if any(o in aliases or "scaler" in o.lower() for o, _ in loads):
        return
    optimizers = p.roles.optimizers | _handed_on(p, p.roles.optimizers)
    saved = [c for o, c in saves if o in optimizers]
    loaded = [c for o, c in loads if o in optimizers]
    stored = [
        c
        for c in p.roles.calls
        if p.source.full_name(c.func) == "torch.save"
        or dotted(c.func).rpartition(".")[2].startswith("save_")
    ]
    if not loaded:
        return
    if not saved or not stored:  # another file saves; that the scaler is not loaded shows here
        if made & used and any(p.source.full_name(c.func) == "torch.load" for c in p.roles.calls):
            yield Trait("scaler_state_lost", loaded[0], ("loads", sorted(made)[0]))
        return
    if any(o in aliases or "scaler" in o.lower() for o, _ in saves):
        yield Trait("scaler_state_lost", loaded[0], ("loads", sorted(made)[0]))
    else:
        yield Trait("scaler_state_lost", saved[0], ("saves", sorted(made)[0]))


def _made_again(p: Precision) -> Trait | None:
    """A scaler that a training loop has stepped, and replaces by a new one beside the state that it
    loads into the optimizer."""
    for maker in p.roles.calls:
        statement = p.source.statement(maker)
        if not p.roles.is_scaler_maker(maker) or not isinstance(statement, ast.Assign):
            continue
        name = dotted(statement.targets[0])
        calls = [
            n for beside in p.source.block(statement) for n in ast.walk(beside)
            if isinstance(n, ast.Call)
        ]  # fmt: skip
        loaded = {
            dotted(call.func.value)
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "load_state_dict"
        }
        handed = {dotted(a) for c in calls for a in (*c.args, *(k.value for k in c.keywords))}
        optimizers = sorted(loaded & p.roles.optimizers)
        loops = [n for n in p.source.above(maker) if isinstance(n, ast.For | ast.While)]
        steps = [c for owner, c in p.roles.by_method["step"] if owner == name and c.args]
        before = any(
            loop in p.source.above(call) and call.lineno < maker.lineno
            for loop in loops[:1]
            for call in steps
        )
        if optimizers and before and name not in loaded | handed and not is_off(maker):
            return Trait("scaler_state_lost", maker, ("again", optimizers[0], name))
    return None


def _escapes(p: Precision, made: set[str]) -> bool:
    """Whether a scaler is handed to code that is not in the file, or put into a collection."""
    for node in p.source.nodes:
        if not isinstance(node, ast.Name | ast.Attribute) or dotted(node) not in made:
            continue
        up = p.source.parent(node)
        if isinstance(up, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Starred | ast.Return):
            return True
        if isinstance(up, ast.keyword):
            up = p.source.parent(up)
        if (
            isinstance(up, ast.Call)
            and up.func is not node
            and p.roles.functions.get(dotted(up.func)) is None
            and not _own_method(p, up)
        ):
            return True
        if isinstance(up, ast.Assign) and up.value is node:
            return True
    return False


def _own_method(p: Precision, call: ast.Call) -> bool:
    first, _, rest = dotted(call.func).partition(".")
    return first == "self" and any(rest in methods for methods in p.roles.methods.values())


def _handed_on(p: Precision, made: set[str]) -> set[str]:
    """The parameters that a scaler arrives in."""
    found = set()
    for call in p.roles.calls:
        function = p.roles.functions.get(dotted(call.func))
        if function is None:
            continue
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        found |= {n for n, a in zip(names, call.args, strict=False) if dotted(a) in made}
        found |= {k.arg for k in call.keywords if k.arg and dotted(k.value) in made}
    return found


# ---- penalties on scaled gradients


def _penalties(p: Precision) -> Iterator[Trait]:
    for call in p.roles.calls:
        if p.source.full_name(call.func) != "torch.autograd.grad":
            continue
        graph = keyword(call, "create_graph")
        outputs = argument(call, 0, "outputs")
        if not (isinstance(graph, ast.Constant) and graph.value is True) or outputs is None:
            continue
        function = p.source.function(call)
        if not _is_scaled(p, outputs, function):
            continue
        words = {n.attr for n in _scope(p, function) if isinstance(n, ast.Attribute)}
        if not words & {"get_scale", "_scale"}:
            yield Trait("scaled_gradient_penalty", call)


def _is_scaled(p: Precision, node: ast.expr, function: ast.AST | None) -> bool:
    for n in ast.walk(node):
        if (
            isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr == "scale"
            and dotted(n.func.value) in p.roles.scalers
        ):
            return True
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
            values = [
                s.value
                for s in _scope(p, function)
                if isinstance(s, ast.Assign) and n.id in {dotted(t) for t in s.targets}
            ]
            if len(values) == 1 and isinstance(values[0], ast.Call):
                call = values[0]
                if (
                    isinstance(call.func, ast.Attribute)
                    and call.func.attr == "scale"
                    and dotted(call.func.value) in p.roles.scalers
                ):
                    return True
    return False


# ---- evaluation


_RENAMING = {*_WRAPPERS, "compile"}  # a model by another name


def _renamed(node: ast.AST, by: set[str]) -> Iterator[tuple[str, str]]:
    """``b, a`` of ``b = Wrapper(a, …)`` and of ``b = copy.deepcopy(a).eval()``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    calls = list(_chain(node.value))
    inner = calls[-1] if calls else None
    if inner is not None and inner.args and dotted(inner.func).rpartition(".")[2] in by:
        yield dotted(node.targets[0]), dotted(inner.args[0])


def _may_be_autocast(p: Precision, node: ast.expr | None, depth: int = 4) -> bool:
    """Whether a class or function is autocast's, or a name that somewhere in the file is given it:
    assigned, or handed to a parameter of that name."""
    if node is None or not depth:
        return False
    if isinstance(node, ast.IfExp):
        return any(_may_be_autocast(p, part, depth - 1) for part in (node.body, node.orelse))
    if isinstance(node, ast.Call):  # functools.partial(autocast, …)
        is_partial = p.source.full_name(node.func) == "functools.partial" and node.args
        return bool(is_partial) and _may_be_autocast(p, node.args[0], depth - 1)
    if p.source.full_name(node) in _AUTOCASTS:
        return True
    if not isinstance(node, ast.Name):
        return False
    handed = [value for c in p.roles.calls if (value := keyword(c, node.id)) is not None]
    given = [*p.assigned.get(node.id, []), *handed]
    return any(_may_be_autocast(p, value, depth - 1) for value in given)


def _runs_in_autocast(p: Precision, call: ast.Call) -> bool:
    """Whether a call is written in a region that is on, or that some value of a name makes one."""
    region = p.region_of(call)
    if region is not None:
        return region.on
    for up in p.source.above(call):
        if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        for item in up.items if isinstance(up, ast.With | ast.AsyncWith) else ():
            held = item.context_expr
            if isinstance(held, ast.Call) and _may_be_autocast(p, held.func):
                return True
    return False


def _is_held_context(p: Precision, node: ast.AST) -> bool:
    """A ``with`` of what a name holds that is not written here: it may be autocast."""
    for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
        expression = item.context_expr
        held = expression.func if isinstance(expression, ast.Call) else expression
        root = dotted(held).partition(".")[0]
        if root in p._parameters | {"self"} or _may_be_autocast(p, held):
            return True
    return False


def _elements(p: Precision, node: ast.AST) -> Iterator[tuple[str, str]]:
    """``entry, self.a`` and ``entry, self.b`` of ``for entry in (self.a, self.b)``, also of a list
    by a name that the file assigns once."""
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
        return
    values = p.assigned.get(dotted(node.iter), [])
    row = values[0] if len(values) == 1 else node.iter
    for element in row.elts if isinstance(row, ast.Tuple | ast.List) else ():
        if dotted(element):
            yield node.target.id, dotted(element)


def _evaluation(p: Precision) -> Iterator[Trait]:
    trained = {
        dotted(c.func)
        for c in p.roles.calls
        if _runs_in_autocast(p, c)
        and any(
            isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr == "backward"
            for n in _scope(p, p.source.function(c))
        )
    }
    classes = {
        up
        for c in p.roles.calls
        if dotted(c.func) in trained
        for up in p.source.above(c)
        if isinstance(up, ast.ClassDef)
    }
    wrapped = [pair for n in p.source.nodes for pair in _renamed(n, _RENAMING)]
    trained |= {inner for name, inner in wrapped if name in trained}
    called_inside = {
        dotted(c.func).rpartition(".")[2] for c in p.roles.calls if _runs_in_autocast(p, c)
    }
    called = {dotted(c.func).rpartition(".")[2] for c in p.roles.calls}
    for node in p.source.nodes:
        if not isinstance(node, ast.FunctionDef) or node.name in called_inside:
            continue
        if node.name not in called and p.source.parent(node) not in classes:
            continue
        inside = list(_scope(p, node))
        regions = [n for n in inside if isinstance(n, ast.Call) and p.region(n) is not None]
        backward = [
            n
            for n in inside
            if isinstance(n, ast.Attribute)
            and n.attr in ("backward", "float")
            and not isinstance(n.value, ast.Compare)  # (a == b).float() casts no precision
        ]
        held = any(_is_held_context(p, n) for n in inside)
        if regions or backward or held or "autocast" in p.source.segment(node):
            continue
        evals = {
            dotted(n.func.value)
            for n in inside
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr == "eval"
        }
        for name, element in {pair for n in inside for pair in _elements(p, n)}:
            own = [e for e in evals if e == name or e.startswith(f"{name}.")]
            evals |= {element + e[len(name) :] for e in own}
        copied = [pair for n in inside for pair in _renamed(n, {"deepcopy"})] if "" in evals else []
        looked_at = {name: name for name in trained & evals}
        looked_at |= {name: inner for name, inner in copied if inner in trained}
        for n in inside:
            if (
                isinstance(n, ast.Call)
                and dotted(n.func) in looked_at
                and any(isinstance(up, ast.For | ast.While) for up in p.source.above(n))
            ):
                yield Trait("evaluation_outside_autocast", n, (looked_at[dotted(n.func)],))
                break
