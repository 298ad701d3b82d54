"""Instrument: the ordered log of scaler, clip, backward, zero_grad, autocast and checkpoint calls.

Public methods are wrapped and put back on exit. A call inside another watched call is marked
nested: the ``unscale_`` that ``scaler.step`` makes by itself is not the user's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.optim import Optimizer

from ampscope.capture.failures import ContainedPatches, Failures
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script import op_facts
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.gradients_by_hand import (
    MOST_COUNTED,
    Asked,
    AskedGradients,
    ClearedGradients,
    address_of,
    share_of_zeros,
)
from ampscope.capture.script.op_taint import root_of_loss, unmark
from ampscope.capture.script.op_watch import OpWatch, autocast_keys
from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.capture.script.stale_copies import Region
from ampscope.capture.tensors import AUTOCAST_KINDS, is_capturing, readable
from ampscope.capture.training_events import StepEvents, StepListener
from ampscope.capture.user_objects import IdSet, parameters, parameters_of
from ampscope.numerics.formats import dtype_name
from ampscope.observations import MIN_HAND_SCALE, Call
from ampscope.patches import Patches

HALVES = frozenset([torch.float16, torch.bfloat16])
SCALED = "ampscope_scaler"  # key in an autograd node's metadata: its scaler's name
DEPTH = 24  # nodes looked at above a root
MAX_DEPTH = 4  # of a checkpoint, in which a scaler's state is looked for
_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval"}  # GradScaler.state_dict

# Scalers that the script enabled and a control disabled. A constant by which such a script
# multiplies its loss is a weight, as in the run with the scaler, and no loss scale.
held_off: IdSet[Any] = IdSet()


class CallLog(StepListener):
    """Hears of steps and wraps torch's methods while entered; the log is :attr:`calls`.

    Scalers are numbered as they are first seen; autocast regions are logged once per dtype and
    line. Of a call that reads or changes gradients the log says whether they carried a loss scale.
    ``raised`` gets what comes out of a backward pass.
    """

    def __init__(
        self,
        log: Calls,
        watch: OpWatch,
        steps: OptimizerSteps,
        raised: Callable[[Exception], None] | None = None,
    ) -> None:
        self._calls = log
        self._watch = watch
        self._steps = steps
        self._raised = raised
        self._scalers = steps.scaler_numbers
        self._asked = AskedGradients()
        self._cleared = ClearedGradients()
        self._counted: Counter[str] = Counter()  # calls of torch.autograd.grad, by line
        self._hand_scaled: set[str] = set()  # lines of backward passes
        self._open: list[str] = []  # dtypes of the open regions, "" for one that is switched off
        self._seen: set[tuple[str, str]] = set()  # regions: dtype, line
        self._regions = 0  # outermost ones so far
        self.failures = steps.failures
        self._events = StepEvents(watch, self, steps, guard=_OutsideGraphs(self.failures))
        self._patches = ContainedPatches(self.failures, "calls of torch's functions")

    def resume(self) -> None:
        """The log begins within a script that has run: an autocast region may be open."""
        kinds = (kind for kind in AUTOCAST_KINDS if torch.is_autocast_enabled(kind))
        self._open = [dtype_name(torch.get_autocast_dtype(kind)) for kind in kinds][:1]
        self._watch.autocast = self._open[-1] if self._open else ""
        self._watch.autocast_keys = autocast_keys()

    @property
    def calls(self) -> list[Call]:
        """All calls so far, in order."""
        return self._calls.records

    def __enter__(self) -> CallLog:
        try:
            self._events.__enter__()
            self._wrap()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        self._events.__exit__(*error)

    def _wrap(self) -> None:
        wrap, scaler = self._patches.wrap, torch.amp.GradScaler
        region = torch.amp.autocast_mode.autocast
        wrap(scaler, "__init__", self._new)
        wrap(scaler, "get_scale", partial(self._logged, "get_scale"))
        wrap(scaler, "state_dict", partial(self._logged, "scaler_state_dict"))
        wrap(scaler, "load_state_dict", partial(self._logged, "scaler_load_state_dict"))
        wrap(torch.Tensor, "backward", self._backward)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.autograd, "grad", self._grad)
        wrap(eager_transforms, "grad_and_value_impl", self._transformed)
        wrap(torch.optim.Optimizer, "__init__", self._new_optimizer)
        wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        wrap(torch.optim.Optimizer, "load_state_dict", self._state_loaded)
        wrap(torch.nn.Module, "zero_grad", self._zero_grad)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                wrap(owner, name, self._clip)
        wrap(region, "__enter__", self._enter)
        wrap(region, "__exit__", self._exit)
        for name in ("half", "bfloat16", "to", "type"):
            wrap(torch.nn.Module, name, partial(self._cast, name))
        wrap_functions(self._watch, self._patches)
        wrap(torch.Tensor, "__reduce_ex__", _without_marks)
        wrap(torch.nn.Parameter, "__reduce_ex__", _without_marks)
        wrap(torch, "save", self._save)
        wrap(torch, "load", self._load)

    # GradScaler: created, scale, unscale_, step, update, its state.

    def _scale_named(self, name: str) -> float:
        """Scale of the scaler called ``name``; 1 when there is none."""
        scaler = self._scalers.named(name)
        return 1.0 if scaler is None else self._calls.scale_of(scaler)

    @property
    def _any_enabled(self) -> bool:
        """Whether the script scales losses by a scaler at all, or would without the control."""
        return any(scaler.is_enabled() or scaler in held_off for scaler in self._scalers.known)

    def _of_factor(self, factor: float) -> str:
        """Name of an enabled scaler whose scale is ``factor``, as in
        ``(loss * scaler.get_scale()).backward()``; "" when none is, or the scale is 1."""
        if factor == 1.0:
            return ""
        return next(
            (
                self._scalers.name_of(scaler)
                for scaler in self._scalers.known
                if scaler.is_enabled()
                and math.isclose(self._calls.scale_of(scaler), factor, rel_tol=1e-5)
            ),
            "",
        )

    def _new(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        enabled = scaler.is_enabled()
        value = self._calls.scale_of(scaler) if enabled else None
        name = self._scalers.name_of(scaler)
        self._calls.add("scaler_new", subject=name, value=value, enabled=enabled)

    def scaled(self, scaler: Any, loss: Any, result: Any) -> None:
        name = self._scalers.name_of(scaler)
        for tensor in op_facts.tensors(result, None):
            mark_scaled(tensor, name)
        self._calls.add("scale", subject=name, value=self._calls.scale_of(scaler), scaled=True)

    def before_unscale(self, optimizer: Any, scaler: Any) -> None:
        self._set_by_hand(optimizer)
        name = self._steps.optimizer_name(optimizer)
        self._calls.add("unscale_", subject=self._scalers.name_of(scaler), note=name)

    def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
        self._set_by_hand(optimizer)
        name, note = self._scalers.name_of(scaler), self._steps.optimizer_name(optimizer)
        try:
            self._calls.add("scaler_step", subject=name, note=note)
        finally:
            self._calls.enter()

    def after_scaler_step(
        self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        self._calls.leave()

    def before_step(self, optimizer: Optimizer, scaler: Any, *, has_closure: bool) -> None:
        if not has_closure:
            self._set_by_hand(optimizer)

    def after_step(self, optimizer: Any, scaler: Any) -> None:
        if scaler is None:
            self._calls.add("optimizer_step", subject=self._steps.optimizer_name(optimizer))

    def updated(self, scaler: Any) -> None:
        value = self._calls.scale_of(scaler)
        self._calls.add("update", subject=self._scalers.name_of(scaler), value=value)

    def _logged(self, name: str, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._calls.inside(original, scaler, *args, **kwargs)
        if name != "get_scale" or not self._calls.is_nested:
            self._calls.add(name, subject=self._scalers.name_of(scaler))
        return result

    # What fills, empties and clips gradients: backward, grad, zero_grad, clip_grad_*.

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._calls.is_nested or is_capturing():
            return self._calls.inside(original, *args, **kwargs)
        self._watch.training_begins(has_begun=True)
        self._asked.drop(self._steps.count)
        with self.failures.contained("gradients that the script cleared"):
            self._cleared.found(self._note_cleared)
        roots = args[0] if args else kwargs.get("tensors")
        create_graph = bool(kwargs.get("create_graph", args[3:] and args[3]))
        for root in op_facts.tensors(roots, None):
            self._note_backward(root, create_graph=create_graph)
        try:
            result = self._calls.gradients(original, *args, **kwargs)
        except Exception as error:
            if self._raised is not None:
                self._raised(error)
            raise
        self._steps.after_backward()
        # Before its first step an optimizer has a name only if it does something.
        known = self._steps.optimizers if self._steps.count else self._steps.living()
        self._cleared.after_backward(known)
        return result

    def _note_cleared(self, optimizer: Optimizer) -> None:
        self._calls.add("zero_grad", subject=self._steps.optimizer_name(optimizer), line="")

    def _note_backward(self, root: Tensor, *, create_graph: bool) -> None:
        facts, factor = self._facts_of(root)
        self._calls.add("backward", create_graph=create_graph, **facts)
        self._watch.reads.backward()
        self._steps.before_backward(
            facts["value"],
            facts["dtype"],
            self._watch.taint_of(root),
            scaled=facts["scaled"],
            by_hand=factor != 1.0,
        )

    def _facts_of(self, root: Tensor) -> tuple[dict[str, Any], float]:
        """Fields of the :class:`Call` of a backward pass from ``root``, and the scale that the
        script multiplied it by without a scaler."""
        note = root_of_loss(root)
        scaler = scaled_by(root) or self._of_factor(_factor(note))
        factor = 1.0 if self._any_enabled else self._hand_scale(note)
        facts = {
            "subject": scaler,
            "value": _sum_of(root) / (self._scale_named(scaler) or 1.0) / factor,
            "scaled": bool(scaler),
            "dtype": dtype_name(root.dtype),
            "note": note,
            "made_at": self._made_at(root),
        }
        return facts, factor

    def _made_at(self, loss: Tensor) -> str:
        """The line that made the loss, before a scaler multiplied it."""
        node = loss.grad_fn
        while node is not None and SCALED in _metadata(node):
            node = node.next_functions[0][0]
        return "" if node is None else self._watch.made_at(node)

    def _hand_scale(self, note: str) -> float:
        """The factor of a loss that is scaled by hand, such as ``loss * 2 ** lg_loss_scale``; 1 of
        any other. Below :data:`MIN_HAND_SCALE` it counts at a line where it was above before."""
        factor, line = _factor(note), self._calls.line()
        if factor >= MIN_HAND_SCALE:
            self._hand_scaled.add(line)
        return factor if line in self._hand_scaled and factor > 0 else 1.0

    def _grad(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._calls.is_nested or torch._C._functorch.peek_interpreter_stack():
            return self._calls.inside(original, outputs, *args, **kwargs)
        self._watch.training_begins(has_begun=True)
        roots = op_facts.tensors(outputs, None)
        create_graph = bool(kwargs.get("create_graph", args[3:] and args[3]))
        self._calls.add("grad", scaled=any(map(scaled_by, roots)), create_graph=create_graph)
        asked: Any = args[0] if args else kwargs.get("inputs")
        if isinstance(asked, GeneratorType):  # net.parameters() gives each of them once
            asked = tuple(asked)
            args, kwargs = (asked, *args[1:]), {k: v for k, v in kwargs.items() if k != "inputs"}
        place = len(self._calls.records) - 1
        found = self._calls.gradients(original, outputs, *args, **kwargs)
        with self.failures.contained("gradients that the script asked for"):
            self._count_zeros(place, found)
        if type(asked) in (list, tuple) or isinstance(asked, Tensor):
            both = zip((asked,) if isinstance(asked, Tensor) else asked, found, strict=False)
            with self.failures.contained("gradients that the script asked for"):
                self._note_asked(roots, [(p, g) for p, g in both if isinstance(g, Tensor)])
        return found

    def _count_zeros(self, place: int, found: Any) -> None:
        """Of the first calls of each line, in the call's own record."""
        call = self._calls.records[place]
        if call.name != "grad" or is_capturing() or self._counted[call.line] >= MOST_COUNTED:
            return
        self._counted[call.line] += 1
        with own_ops():
            share = share_of_zeros(g for g in found if isinstance(g, Tensor))
        self._calls.records[place] = replace(call, value=share)

    def _note_asked(self, roots: list[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> None:
        own = self._steps.of_optimizers(pairs)
        if not own or is_capturing():
            return
        self._steps.gradients_taken(own, scaled=any(map(scaled_by, roots)))
        if len(roots) == 1:
            facts, _ = self._facts_of(roots[0])
            facts["line"] = self._calls.line()
            places = {id(p): address_of(gradient) for p, gradient in own}
            self._asked.add(Asked(places, facts, self._watch.taint_of(roots[0])))

    def _transformed(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.func.grad`` and ``grad_and_value``: the gradients, and the value or the value
        and more. Within another transform there are no numbers."""
        if self._calls.is_nested or torch._C._functorch.peek_interpreter_stack():
            return original(*args, **kwargs)
        self._watch.training_begins(has_begun=True)
        before = len(self._calls.records)
        found = original(*args, **kwargs)
        with self.failures.contained("gradients that the script asked for"):
            value = found[1][0] if type(found[1]) is tuple else found[1]
            scaled = [c.subject for c in self._calls.records[before:] if c.name == "scale"]
            scaler = scaled[-1] if scaled else ""
            self._calls.add("grad", scaled=bool(scaled))
            facts = {
                "subject": scaler,
                "value": _sum_of(value) / (self._scale_named(scaler) or 1.0),
                "scaled": bool(scaled),
                "dtype": dtype_name(value.dtype),
                "line": self._calls.line(),
            }
            self._asked.add(Asked(None, facts, self._watch.taint_of(value)))
        return found

    def _set_by_hand(self, used: Optimizer | list[Tensor]) -> None:
        """The gradients of an optimizer, or of parameters, are used: those that the script asked
        for and set itself had their backward pass then."""
        with self.failures.contained("gradients that the script set"):
            own = used if type(used) is list else parameters_of(used)
            for asked in self._asked.taken(own, self._steps.count):
                self._calls.add("backward", **asked.facts)
                self._watch.reads.backward()
                facts, taint = asked.facts, asked.taint
                self._steps.gradients_set(
                    facts["value"], facts["dtype"], taint, scaled=facts["scaled"]
                )

    def _new_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._steps.optimizer_created(optimizer)

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        is_optimizer = isinstance(owner, torch.optim.Optimizer)
        if not self._calls.is_nested:
            self._watch.training_begins()
            name = self._steps.optimizer_name(owner) if is_optimizer else "model"
            self._calls.add("zero_grad", subject=name)
        result = self._calls.inside(original, owner, *args, **kwargs)
        if not self._calls.is_nested:
            with self.failures.contained("gradients that were emptied"):
                named = [] if is_optimizer else parameters(owner)
                own = parameters_of(owner) if is_optimizer else [p for _, p in named]
                self._steps.replaced.emptied(own)
                self._cleared.emptied(own)
        return result

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if is_capturing():
            return self._calls.inside(original, tensors, *args, **kwargs)
        self._set_by_hand(tensors)
        scaled = self._steps.carried.carries(tensors, self._steps.optimizers)
        norm = self._calls.inside(original, tensors, *args, **kwargs)
        read = readable(norm) if isinstance(norm, Tensor) else None
        value = None if read is None else float(read)
        limits = [*args, kwargs.get("max_norm"), kwargs.get("clip_value")]
        limit = next((x for x in limits if x is not None), 0.0)
        self._calls.add("clip", value=value, scaled=scaled, note=f"{float(limit):g}")
        norm_type = kwargs.get("norm_type", args[1] if len(args) > 1 else 2.0)
        if value is not None and not scaled and float(norm_type) == 2.0:
            self._steps.clips.add(tensors, value, float(limit))
        return norm

    # Casts of whole modules by hand, and autocast regions.

    def _cast(self, name: str, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        asked = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        if name in ("half", "bfloat16") or HALVES & {*asked}:
            self._watch.half_begins()
        was = _parameter_dtypes(module)
        result = self._calls.inside(original, module, *args, **kwargs)
        new = _parameter_dtypes(module) & HALVES - was
        if torch.float32 in was and new and not self._calls.is_nested:
            self._calls.add("cast", dtype=dtype_name(next(iter(new))))
        return result

    def _enter(self, original: Any, region: Any) -> Any:
        self._watch.half_begins()
        enabled = bool(region._enabled)
        dtype = dtype_name(region.fast_dtype) if enabled else ""
        self._open.append(dtype)
        self._watch.autocast = dtype
        line = self._calls.line()
        if len(self._open) == 1:
            self._regions += 1
            self._watch.region = Region(self._regions, line)
        if (dtype, line) not in self._seen:
            self._seen.add((dtype, line))
            note = str(region.device)
            self._calls.add("autocast", dtype=dtype, enabled=enabled, note=note)
        entered = original(region)
        self._watch.autocast_keys = autocast_keys()
        return entered

    def _exit(self, original: Any, region: Any, *args: Any) -> Any:
        if self._open:
            self._open.pop()
        self._watch.autocast = self._open[-1] if self._open else ""
        if not self._open:
            self._watch.region = None
        left = original(region, *args)
        self._watch.autocast_keys = autocast_keys()
        return left

    # Checkpoints: do they hold the state of a GradScaler?

    def _save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._calls.inside(original, *args, **kwargs)
        self._add_checkpoint("save", args[0] if args else kwargs.get("obj"))
        return result

    def _load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._calls.inside(original, *args, **kwargs)
        self._add_checkpoint("load", result)
        return result

    def _state_loaded(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._calls.inside(original, optimizer, *args, **kwargs)
        self._calls.add("load_state")
        return result

    def _add_checkpoint(self, name: str, content: object) -> None:
        has_state = has_scaler_state(content)
        self._calls.add(name, note="with scaler state" if has_state else "without scaler state")


class _OutsideGraphs:
    """Listeners hear of no step that a CUDA graph records: nothing is computed yet."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            return None
        return self._failures.call("steps of an optimizer", function, *args, **kwargs)


def wrap_functions(watch: OpWatch, patches: Patches) -> None:
    """Wrap the user's own autograd.Functions: the op watch hears which one is running. ``patches``
    takes it off.

    The ops of a Function's forward run without gradients, so none of them has an autograd node; the
    Function has one node for all, whose place is where it was applied.
    """

    def make(original: Any) -> Any:
        inner = original.__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if watch.autocast:
                with watch.failures.contained("the script's own autograd.Functions"):
                    code = getattr(cls.forward, "__code__", None)  # none of a functools.partial
                    decorated = code is not None and "autocast_mode" in code.co_filename
                    watch.note_function(cls.__name__, decorated)
            watch.functions.append(cls.__name__)
            try:
                result = inner(cls, *args, **kwargs)
                watch.function_applied()
                return result
            finally:
                watch.functions.pop()

        return classmethod(apply)

    patches.replace(torch.autograd.Function, "apply", make)


def _without_marks(original: Any, tensor: Any, protocol: Any) -> Any:
    """A tensor that is pickled loses its marks: a checkpoint must not hold them."""
    unmark(tensor)
    return original(tensor, protocol)


def mark_scaled(tensor: Tensor, scaler: str) -> None:
    """``tensor`` came from that scaler's ``scale``: noted in its autograd node's own metadata."""
    if tensor.grad_fn is not None:
        _metadata(tensor.grad_fn)[SCALED] = scaler


def scaled_by(root: Tensor, depth: int = DEPTH) -> str:
    """Name of the scaler whose ``scale`` is in the graph just above ``root``; "" when none is.

    A scaled loss is often divided for accumulation or summed with others, so nodes within
    ``depth`` steps count.
    """
    seen, queue = set(), [root.grad_fn]
    while queue and depth:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        depth -= 1
        if SCALED in _metadata(node):
            return str(_metadata(node)[SCALED])
        queue.extend(parent for parent, _ in node.next_functions)
    return ""


def _metadata(node: Any) -> dict[str, object]:
    """An autograd node's own dictionary; torch's stub takes the property for a method."""
    found: dict[str, object] = node.metadata
    return found


def _sum_of(loss: Tensor) -> float:
    """NaN of what cannot be read."""
    with own_ops():
        numbers = readable(loss)
        return math.nan if numbers is None or not numbers.numel() else float(numbers.float().sum())


def _factor(note: str) -> float:
    """The constant that a loss was multiplied by; 1 when by none."""
    name, _, constant = note.partition(" ")
    return float(constant) if constant and name in ("mul", "mul_") else 1.0


def _parameter_dtypes(module: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for _, parameter in parameters(module)}


def has_scaler_state(value: object, depth: int = 0) -> bool:
    """True when ``value`` is or contains a GradScaler's state_dict, known by its keys."""
    if not isinstance(value, Mapping) or depth > MAX_DEPTH:
        return False
    if value.keys() >= _KEYS:
        return True
    return any(has_scaler_state(part, depth + 1) for part in value.values())
