"""Taps: tensors inside compiled code, looked at by ops that a graph pass adds.

No hook is called inside a compiled graph. So inductor is given a pass that runs on each graph,
forward and backward, behind its own passes, and adds the op ``ampscope::tap`` behind chosen
tensors, each of which it names::

    TapPlace("blocks.0.up", "activation", "blocks.0.up", "aten.addmm", "train.py:41", "bf16",
             "Linear", "L['self']", False)

The op hands the tensor to those that listen and returns at once where none does. It is declared to
change a token, so that nothing removes it, and changes nothing. What it looks at stands in its own
text: a graph that comes out of inductor's cache brings it along.

Modules of one class share a graph where they were compiled one by one, or stand behind a graph
break; its paths then begin at each of them in turn. :class:`RunningModules` tells which one runs.

Backends without inductor (``aot_eager``) get the same pass on what AOTAutograd hands them; one that
runs Dynamo's graph (``eager``) has none.

Taps add no graph break, no guard and no generated code. A tensor that is looked at has to be in
memory, and so may be fused and rounded at another place than one that is not: the last bits can
differ (docs/decisions/0019).
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.callback import callback_handler
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ampscope.capture.tensors import in_backward, is_capturing
from ampscope.errors import BadInput
from ampscope.late_imports import late_import
from ampscope.numerics.formats import dtype_name
from ampscope.patches import Patches
from ampscope.source_lines import line_name

ACTIVATION, GRADIENT, DRAW = "activation", "grad_output", "draw"
MATMUL, REDUCTION, SAVED = "matmul", "reduction", "saved"
DECOMPOSED = "decomposed"  # what inductor would decompose: a graph of inductor's has none
MOST = 400  # places of a graph; beyond, those of ops are left out, and outputs of modules stay

aten = torch.ops.aten
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "prod", "cumsum", "var_mean"})
# How Dynamo names what it was given, a local or a global variable: L['self'].blocks.0
_ROOT = re.compile(r"^([LG])\['?(\w+)'?\]\.?")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class TapPlace:
    """A tensor inside compiled code: the module that it belongs to, as a dotted path below what was
    compiled, and what it is there; the module whose code made it, and the op and line that did;
    and the variable of the compiled function at which paths begin."""

    module: str
    role: str
    maker: str
    op: str
    line: str
    dtype: str
    kind: str  # class of ``module``
    root: str = ""  # L['self']; "" of what belongs to no module
    is_backward: bool = False  # the graph is one of a backward pass


Listener = Callable[[TapPlace, Tensor], None]  # hears of a tensor as it passes, to be read now

_listeners: list[Listener] = []
_passes: list[TapPass] = []  # of what is compiled now
_known: dict[str, TapPlace] = {}
# It lives as long as compiled code.
_library: Any = torch.library.Library("ampscope", "DEF")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.define(
    "tap(Tensor(a!) token, Tensor numbers, str place) -> ()",
    # In a CUDA graph it would be called once, and not at replays: inductor leaves it outside.
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _tap(token: Tensor, numbers: Tensor, place: str) -> None:
    if _listeners and not is_capturing():
        if place not in _known:
            _known[place] = TapPlace(*json.loads(place))
        for listener in tuple(_listeners):
            listener(_known[place], numbers)


def _nothing(*args: Any) -> None:
    pass


_library.impl("tap", _tap, "CompositeExplicitAutograd")
_library.impl("tap", _nothing, "Meta")


_Module = tuple[str, str, str]  # path below a variable, class, that variable


def modules_of(node: fx.Node) -> dict[str, str]:
    """Path and class of all modules that the node belongs to, outermost first, from Dynamo's stack:
    ``{"1": ("L['self'].blocks.0", Block)}`` -> ``{"blocks.0": "Block"}``."""
    return {path: kind for path, kind, _ in _modules(node)}


def _modules(node: fx.Node) -> list[_Module]:
    stack = node.meta.get("fwd_nn_module_stack" if is_backward(node) else "nn_module_stack")
    found = []
    for name, kind in (stack or {}).values():
        begins = _ROOT.match(str(name))
        root = "" if begins is None else begins.group().rstrip(".")
        named = kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
        found.append((_below(str(name)), named, root))
    return found


def _below(name: str) -> str:
    plain = _ROOT.sub("", name).replace("._modules", "")
    return plain.replace("['", ".").replace("']", "").strip(".")


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward" or node.name.startswith("tangents")


def _value(node: object) -> Tensor | None:
    """What the node gives, where that is a floating-point tensor that a tap can read."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided:
        return value
    return None


def op_of(node: fx.Node) -> str:
    """``aten.mul``; of one of several results the op that gives them; of what is no op the node's
    own name."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else node.name


def line_of(node: fx.Node) -> str:
    """The innermost line of the user's code that the node came from, ``train.py:41``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, number = frames[-1]
    return line_name((file, int(number)))


def _place(node: fx.Node, role: str, module: _Module | None, *, goes_back: bool) -> TapPlace:
    own = next(reversed(_modules(node)), ("", "", ""))
    path, kind, root = own if module is None else module
    value = _value(node)
    dtype = "" if value is None else dtype_name(value.dtype)
    maker, op, line = own[0], op_of(node), line_of(node)
    return TapPlace(path, role, maker, op, line, dtype, kind, root, goes_back)


def chosen(graph: fx.Graph, *, everything: bool) -> list[tuple[fx.Node, TapPlace]]:
    """The tensors of a graph to look at, in the order in which it makes them: outputs of modules
    and the gradients there. ``everything``: also results of matmuls and reductions, tensors that
    are saved for backward, random numbers, and of each module's ops that inductor would decompose
    the first of a kind."""
    goes_back = any(n.op == "placeholder" and is_backward(n) for n in graph.nodes)
    found: dict[fx.Node, list[TapPlace]] = {}
    for module, node in (_gradients(graph) if goes_back else _outputs(graph)).items():
        role = GRADIENT if goes_back else ACTIVATION
        found.setdefault(node, []).append(_place(node, role, module, goes_back=goes_back))
    if everything:
        leaving = set(graph.output_node().all_input_nodes)
        for node in graph.nodes:
            role = _role(node, leaving)
            if role == DRAW or (role and node not in found and len(found) < MOST):
                found.setdefault(node, []).append(_place(node, role, None, goes_back=goes_back))
        seen: set[tuple[str, str]] = set()
        for node in graph.nodes:
            place = _place(node, DECOMPOSED, None, goes_back=goes_back)
            if node not in found and (place.maker, place.op) not in seen and _is_decomposed(node):
                seen.add((place.maker, place.op))
                if len(found) < MOST:
                    found[node] = [place]
    return [(node, place) for node in graph.nodes for place in found.get(node, ())]


def _role(node: fx.Node, leaving: set[fx.Node]) -> str:
    if node.op != "call_function" or _value(node) is None:
        return ""
    made = node.all_input_nodes[0] if node.target is operator.getitem else node  # one of several
    name = op_of(made).rpartition(".")[2]
    if name == "inductor_random" or _is_seeded(made):
        return DRAW
    for role, names in ((MATMUL, _MATMULS), (REDUCTION, _REDUCTIONS)):
        if name in names:
            return role
    return SAVED if node in leaving else ""


def _is_decomposed(node: fx.Node) -> bool:
    if node.op != "call_function" or _value(node) is None:
        return False
    from torch._inductor.decomposition import select_decomp_table  # few runs compile

    target = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    if not isinstance(target, torch._ops.OpOverload) or target.is_view:
        return False
    return target in select_decomp_table()


def _is_seeded(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _outputs(graph: fx.Graph) -> dict[_Module, fx.Node]:
    """By module the last tensor of its forward pass that something behind it takes; of
    what leaves the graph the first, for what is saved for backward stands behind the results."""
    inner: dict[_Module, fx.Node] = {}
    outer: dict[_Module, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node) or _value(node) is None:
            continue
        users = [modules_of(u) for u in node.users if u.op != "output" and not is_backward(u)]
        for module in _modules(node):
            if any(module[0] not in theirs for theirs in users):
                inner[module] = node
    for node in graph.output_node().all_input_nodes:
        if node.op == "call_function" and not is_backward(node) and _value(node) is not None:
            for module in _modules(node):
                outer.setdefault(module, node)
    return {**outer, **inner}


def _gradients(graph: fx.Graph) -> dict[_Module, fx.Node]:
    """By module the first gradient that its backward pass takes from outside of it."""
    found: dict[_Module, fx.Node] = {}
    for node in graph.nodes:
        if not is_backward(node) or node.op != "call_function":
            continue
        taken = [n for n in node.all_input_nodes if is_backward(n) and _value(n) is not None]
        for module in _modules(node):
            outside = [n for n in taken if module[0] not in modules_of(n)]
            if outside:
                found.setdefault(module, outside[0])
    return found


MOST_FORWARDS = 10_000  # compiled forward passes whose backward passes are awaited


class RunningModules:
    """Finds the module that a tap looks at. A graph names it by a path that begins at a variable of
    the function that was compiled, and modules of one class share a graph.

    A forward pass runs below the frame of that function, which holds the variable. Its backward
    pass is one autograd node, known by autograd's own count of nodes; torch makes the node before
    it runs the forward pass.
    """

    def __init__(self) -> None:
        # By the thread that counts, its count, and the variable.
        self._forwards: dict[tuple[int, int, str], weakref.ref[Any]] = {}
        self._thread: int | None = None  # that runs forward passes
        self._several = False  # threads do
        self._repeating: set[int] = set()  # threads of autograd in which checkpointing repeats them

    def begins(self, place: TapPlace) -> object:
        """What the paths of a tap begin at, while the tap is called: the module that was compiled,
        or an object that holds it; None where nothing tells."""
        if not place.root:
            return None
        return self._of_forward(place) if place.is_backward else self._of_frame(place)

    def _of_frame(self, place: TapPlace) -> object:
        scope, name = _ROOT.match(place.root).groups()  # type: ignore[union-attr]  # it came from there
        frame: Any = sys._getframe(1)
        while frame is not None:
            code, held = frame.f_code, None
            if scope == "G":
                held = frame.f_globals.get(name)
            elif name in code.co_varnames or name in code.co_freevars or name in code.co_cellvars:
                held = frame.f_locals.get(name)
            if type(below(held, place.module)).__name__ == place.kind:
                self._keep(place, held)
                return held
            frame = frame.f_back
        return None

    def _keep(self, place: TapPlace, held: object) -> None:
        thread = threading.get_ident()
        self._thread = self._thread or thread
        if self._thread != thread:
            if in_backward():
                self._repeating.add(thread)
            else:
                self._several = True
        count = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]  # untyped in torch
        if (thread, count, place.root) not in self._forwards:
            with contextlib.suppress(TypeError):  # no weak reference to it
                self._forwards[thread, count, place.root] = weakref.ref(held)
            if len(self._forwards) > MOST_FORWARDS:
                del self._forwards[next(iter(self._forwards))]

    def _of_forward(self, place: TapPlace) -> object:
        node = torch._C._current_autograd_node()
        if node is None or self._several or self._thread is None:
            return None
        count, threads = node._sequence_nr(), (self._thread, *self._repeating)
        kept = [self._forwards.get((thread, count, place.root)) for thread in threads]
        found = [held for one in kept if one is not None and (held := one()) is not None]
        # The node does not say which thread counted it.
        return found[0] if found and all(held is found[0] for held in found) else None


def below(held: object, path: str) -> object:
    """What stands at a path below an object: submodules, attributes, entries; None where nothing
    does. Runs no code of the user's."""
    for part in path.split(".") if path else ():
        if isinstance(held, nn.Module) and part in held._modules:
            held = held._modules[part]
        elif isinstance(held, dict):
            held = held.get(part)
        else:
            held = getattr(held, "__dict__", {}).get(part)
    return held


class TapPass(CustomGraphPass):
    """The pass that adds taps to a graph. One that it cannot read stays as it is, and ``failed`` is
    told why."""

    def __init__(self, *, everything: bool, failed: Callable[[str], None]) -> None:
        self.everything = everything
        self._failed = failed

    def uuid(self) -> Any:
        """What inductor's cache knows the pass by."""
        return get_hash_for_files((__file__,), f"everything={self.everything}")

    def __deepcopy__(self, memo: object) -> TapPass:
        """Itself: torch.compile copies inductor's configuration, and what listens is no part of
        it."""
        return self

    def __call__(self, graph: fx.Graph) -> None:
        """Add the taps."""
        before = set(graph.nodes)
        if any(node.target is torch.ops.ampscope.tap.default for node in before):
            return
        try:
            places = chosen(graph, everything=self.everything)
            if places:
                _add(graph, places)
        except Exception as error:  # the user's compilation goes on without taps
            for node in reversed([n for n in graph.nodes if n not in before]):
                graph.erase_node(node)
            self._failed(f"{type(error).__name__}: {error}")


def _add(graph: fx.Graph, places: list[tuple[fx.Node, TapPlace]]) -> None:
    devices = {value.device for node, _ in places if (value := _value(node)) is not None}
    if len(devices) != 1:
        raise BadInput("a graph on several devices is not looked into")
    options: dict[str, Any] = {"dtype": torch.float32, "device": devices.pop()}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        token = graph.call_function(aten.full.default, ([1], 0.0), options)
    for node, place in places:
        behind = first if node.op == "placeholder" else node.next
        with graph.inserting_before(behind):
            arguments = (token, node, json.dumps(astuple(place)))
            graph.call_function(torch.ops.ampscope.tap.default, arguments)


@contextlib.contextmanager
def tapping(
    listener: Listener, failed: Callable[[str], None], *, everything: bool
) -> Iterator[None]:
    """All that is compiled inside gets taps, and ``listener`` hears them. What was compiled before
    has none; what was compiled inside keeps its taps, which say nothing afterwards.

    The script may set inductor's passes itself, before or after: its own run first.
    """
    backends: Any = late_import("torch._dynamo.backends.common")  # few runs compile
    inductor: Any = late_import("torch._inductor.config")
    own = TapPass(everything=everything, failed=failed)

    def put(*args: object) -> None:
        others = _without(inductor.post_grad_custom_post_pass)
        inductor.post_grad_custom_post_pass = own if not others else _InTurn((*others, own))

    put()
    callback_handler.register_start_callback(put)
    _listeners.append(listener)
    _passes.append(own)
    patches = Patches()
    patches.wrap(backends, "aot_module_simplified", _with_tapped_compilers)
    try:
        yield
    finally:
        patches.undo()
        _listeners.remove(listener)
        _passes.remove(own)
        with contextlib.suppress(ValueError):  # torch.compiler.reset has removed it
            callback_handler.remove_start_callback(put)
        left = _without(inductor.post_grad_custom_post_pass)
        inductor.post_grad_custom_post_pass = left[0] if len(left) == 1 else _InTurn(left)
        if not left:
            inductor.post_grad_custom_post_pass = None


class _InTurn(CustomGraphPass):
    """Several passes as one: inductor of torch 2.11 takes one alone."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        """None, which keeps graphs out of the cache, where one of them has none."""
        known = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in known else tuple(known)


def _without(passes: Any) -> tuple[Any, ...]:
    """The passes of others."""
    if isinstance(passes, _InTurn):
        passes = passes.passes
    several = passes if isinstance(passes, list | tuple) else () if passes is None else (passes,)
    return tuple(p for p in several if not isinstance(p, TapPass))


def _with_tapped_compilers(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AOTAutograd for a backend; inductor's compilers can be stored, and run passes themselves."""
    from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler  # type: ignore[attr-defined]  # torch exports nothing explicitly

    for name in ("fw_compiler", "bw_compiler", "inference_compiler"):
        compiler = kwargs.get(name)
        if compiler is not None and not isinstance(compiler, SerializableAOTDispatchCompiler):
            kwargs[name] = functools.partial(_tapped, compiler)
    return original(*args, **kwargs)


def _tapped(compiler: Callable[..., Any], part: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    for one in _passes:
        one(part.graph)
    part.recompile()
    return compiler(part, *args, **kwargs)


def aot_eager(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
    """The backend ``aot_eager`` with the taps of :func:`tapping`."""
    # Few runs compile.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]  # torch exports nothing explicitly

    def run(part: fx.GraphModule, _: Any) -> Any:
        for one in _passes:
            one(part.graph)
        part.recompile()
        return make_boxed_func(part.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run)(graph, inputs)
