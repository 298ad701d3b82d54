"""Taps see what module hooks see in eager code, and change neither graphs nor numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

from ampscope.capture import taps
from ampscope.capture.global_hooks import REGISTERED
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.taps import (
    ACTIVATION,
    DECOMPOSED,
    DRAW,
    GRADIENT,
    MATMUL,
    RunningModules,
    TapPass,
    TapPlace,
    aot_eager,
    tapping,
)
from ampscope.runner.compiled_recorder import TapLog

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own code
Heard = list[tuple[TapPlace, Tensor]]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(x))))


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(dropout), nn.LayerNorm(8), nn.Linear(8, 2))


def step(model: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(6, 4)).float().square().mean()
    loss.backward()
    return loss.detach()


def tapped(model: nn.Module, *, everything: bool = False, steps: int = 1) -> tuple[Heard, Tensor]:
    """What taps tell of training steps whose graphs torch's own kernels run."""
    torch._dynamo.reset()
    counters.clear()
    heard: Heard = []
    failures: list[str] = []

    def look(place: TapPlace, numbers: Tensor) -> None:
        heard.append((place, numbers.detach().clone()))

    with tapping(look, failures.append, everything=everything):
        compiled = torch.compile(model, backend=aot_eager)
        losses = [step(compiled) for _ in range(steps)]
    assert not failures
    return heard, losses[-1]


def by_hooks(model: nn.Module) -> tuple[dict[tuple[str, str], Tensor], Tensor]:
    """Outputs of modules and the gradients there, by role and path, in eager code."""
    seen: dict[tuple[str, str], Tensor] = {}

    def after(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
            seen[ACTIVATION, path] = output.detach().clone()
            output.register_hook(lambda g: seen.__setitem__((GRADIENT, path), g.clone()))

        return keep

    for path, module in model.named_modules():
        module.register_forward_hook(after(path))
    return seen, step(model)


def test_taps_see_what_hooks_see() -> None:
    seen, loss = by_hooks(net())
    heard, compiled = tapped(net())
    assert torch.equal(loss, compiled)
    found = {(place.role, place.module): numbers for place, numbers in heard}
    # What a Dropout(0) gives back is no tensor of its own.
    assert set(seen) - set(found) <= {(role, "1.drop") for role in (ACTIVATION, GRADIENT)}
    assert set(found) <= set(seen)
    for key, numbers in found.items():
        assert numbers.dtype == seen[key].dtype, key
        assert torch.equal(numbers, seen[key]), key


def test_places_name_class_op_and_line() -> None:
    heard, _ = tapped(net())
    place = next(p for p, _ in heard if (p.role, p.module) == (ACTIVATION, "1.up"))
    assert (place.kind, place.op, place.dtype, place.maker) == (
        "Linear", "aten.addmm", "bf16", "1.up"
    )  # fmt: skip
    assert place.line.partition(":")[0].endswith("test_taps.py")


def test_everything_is_matmuls_and_random_numbers_too() -> None:
    heard, _ = tapped(net(0.5), everything=True)
    roles = {place.role for place, _ in heard}
    assert {DRAW, MATMUL, "reduction", ACTIVATION, GRADIENT} <= roles
    assert {place.module for place, _ in heard if place.role == DRAW} == {"1.drop"}


def test_ops_that_inductor_decomposes_are_named_once_in_each_module() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(torch.nn.functional.gelu(x) + 1) * 2

    model = nn.Sequential(nn.Linear(4, 8), Scaled(), nn.LayerNorm(8), nn.Linear(8, 2))
    heard, _ = tapped(model, everything=True)
    found = [(p.maker, p.op, p.is_backward) for p, _ in heard if p.role == DECOMPOSED]
    assert found.count(("1", "aten.gelu", False)) == 1
    assert not [op for _, op, _ in found if op in ("aten.view", "aten.t")]  # no kernels
    norm = next(p for p, _ in heard if (p.role, p.module) == (ACTIVATION, "2"))
    assert norm.op == "aten.native_layer_norm"  # one of three results


def test_a_diagnosis_names_modules_that_share_a_graph_below_the_model() -> None:
    torch._dynamo.reset()
    names = ModulePaths()
    with REGISTERED.subscribe(names.link):
        model = nn.Sequential(nn.Linear(4, 8), Block(0.0), Block(0.0), nn.Linear(8, 2))
    log = TapLog(lambda: 0, names)
    with tapping(log.look, log.failures.append, everything=True):
        for n in (1, 2):
            model[n] = torch.compile(model[n], backend=aot_eager)
        step(model)
    assert not log.failures
    for role in (ACTIVATION, GRADIENT):
        found = {tap.module for tap in log.records if tap.role == role}
        assert {"1.up", "1.down", "2.up", "2.down"} <= found, role
    made = {tap.maker for tap in log.records if (tap.role, tap.module) == (ACTIVATION, "2.up")}
    assert made == {"2.up"}


def test_taps_break_no_graph_and_compile_nothing_again() -> None:
    torch._dynamo.reset()
    counters.clear()
    bare = torch.compile(net(), backend="aot_eager")
    losses = [step(bare) for _ in range(3)]
    graphs = counters["stats"]["unique_graphs"]
    _, loss = tapped(net(), steps=3)
    assert torch.equal(loss, losses[-1])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs


def test_nothing_stays_behind_and_passes_of_others_are_kept() -> None:
    def other(graph: fx.Graph) -> None:
        pass

    with inductor.patch(post_grad_custom_post_pass=other):
        with tapping(lambda place, numbers: None, print, everything=True):
            assert inductor.post_grad_custom_post_pass is not other
        assert inductor.post_grad_custom_post_pass is other
    with tapping(lambda place, numbers: None, print, everything=True):
        assert isinstance(inductor.post_grad_custom_post_pass, TapPass)
    assert inductor.post_grad_custom_post_pass is None


def test_a_graph_that_cannot_be_tapped_stays_as_it_is() -> None:
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = torch.zeros(2)
    y = graph.call_function(torch.ops.aten.tanh.default, (next(iter(graph.nodes)),))
    y.meta["val"] = torch.zeros(2)
    y.meta["nn_module_stack"] = {"1": ("L['self'].act", object())}  # no class
    graph.output(y)
    before, failures = str(graph), list[str]()
    TapPass(everything=True, failed=failures.append)(graph)
    assert str(graph) == before
    assert len(failures) == 1


def test_inductor_leaves_taps_out_of_cuda_graphs() -> None:
    """By the check with which it divides a graph: all taps, and no other op of this net."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def keep(part: fx.GraphModule, _: object) -> object:
        graphs.append(part.graph)
        return make_boxed_func(part.forward)

    with tapping(lambda *heard: None, [].append, everything=True):
        step(torch.compile(net(), backend=aot_autograd(fw_compiler=keep)))
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    outside = [node.target for node in nodes if is_cudagraph_unsafe_fx_node(node)]
    assert len(graphs) == 2
    assert set(outside) == {torch.ops.ampscope.tap.default}
    assert len(outside) == sum(node.target in outside for node in nodes)


def test_a_tap_says_nothing_while_a_cuda_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hears it would wait for a number, and end the capture."""
    heard: Heard = []
    place = json.dumps(["", ACTIVATION, "", "aten.mm", "", "fp32", "Linear", "", False])
    with tapping(lambda *one: heard.append(one), [].append, everything=False):
        torch.ops.ampscope.tap(torch.zeros(1), torch.ones(2), place)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        torch.ops.ampscope.tap(torch.zeros(1), torch.ones(2), place)
    assert len(heard) == 1


def test_checkpointing_in_a_thread_of_autograd_leaves_gradients_their_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device backward runs in a thread of autograd's, where checkpointing repeats a compiled
    forward. That thread counts nodes for itself: it is no second one that trains."""
    torch._dynamo.reset()
    running, found = RunningModules(), list[object]()
    forward: list[TapPlace] = []

    def look(place: TapPlace, numbers: Tensor) -> None:
        begins = running.begins(place)
        if place.is_backward:
            found.append(begins)
        else:
            forward.append(place)

    plain = net()
    with tapping(look, [].append, everything=False):
        model = torch.compile(plain, backend=aot_eager)
        step(model)
        first = len(found)
        with monkeypatch.context() as patches:
            patches.setattr(taps, "in_backward", lambda: True)
            again = threading.Thread(target=running._keep, args=(forward[0], plain))
            again.start()
            again.join()
        step(model)
        assert first > 0
        assert found == [plain] * (2 * first)
        training = threading.Thread(target=running._keep, args=(forward[0], plain))
        training.start()
        training.join()
        step(model)
    assert found[2 * first :] == [None] * first
