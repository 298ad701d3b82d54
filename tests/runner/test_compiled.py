"""Compiled code runs as the eager code that it was made from, and no check of torch.compile fails.

The oracle is the script itself: it asserts what each form gives, and ends with status 0 only when
every form worked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import COMPILED_FRAMES
from tests.helpers.script_runner import BASE, Ran, Runner, spec

FORMS = {
    "decorator": """
@torch.compile
def f(a): return a.sin()
@torch.compile(fullgraph=True, mode="reduce-overhead")
def g(a): return a.sin()
assert torch.equal(f(x), x.sin()) and torch.equal(g(x), x.sin())
""",
    "model": """
for options in ({}, {"fullgraph": True}, {"mode": "max-autotune", "fullgraph": True},
                {"backend": "aot_eager", "dynamic": True}, {"options": {"fallback_random": True}}):
    compiled = torch.compile(m, **options)
    assert torch.equal(compiled(x), m(x))
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.")
""",
    "in place": """
m.compile(fullgraph=True)
m(x)
""",
    "optimizer": """
m(x).sum().backward()
o.step = torch.compile(o.step, fullgraph=True)
o.step()
@torch.compile(fullgraph=False)
def update(): o.step()
update()
""",
    "whole step": """
@torch.compile(fullgraph=True)
def loss_of(a): return m(a).square().mean()
@torch.compile
def train(a):
    o.zero_grad()
    loss = loss_of(a)
    loss.backward()
    o.step()
    return loss
train(x)
""",
    "an optimizer that compiles": """
@torch.compile(fullgraph=True, dynamic=False)
def adam(p, g, lr): p.copy_(p - lr * g)
class Own(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {"lr": torch.tensor(0.1)})
    @torch.no_grad()
    def step(self, closure=None):
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                for p in group["params"]:
                    torch.compile(adam, fullgraph=True)(p, p.grad, group["lr"])
before = m.weight.clone()
m(x).sum().backward()
Own(m.parameters()).step()
assert not torch.equal(before, m.weight)
""",
    "dynamo": """
import torch._dynamo
assert not torch._dynamo.config.disable
torch._dynamo.config.cache_size_limit = 64
torch._dynamo.reset()
torch.compiler.reset()
torch._dynamo.mark_dynamic(x, 0)
torch.compiler.cudagraph_mark_step_begin()
assert not torch.compiler.is_compiling()
assert torch.equal(torch._dynamo.optimize("eager")(torch.sin)(x), x.sin())
def f(a): return a.sin()
assert torch.equal(torch._dynamo.optimize_assert("eager")(f)(x), x.sin())
torch.compiler.disable(m)(x)
torch._dynamo.explain(f)(x)
torch._dynamo.export(f)(x)
torch.export.export(m, (x,))
graph = torch.export.export(m, (x,), strict=True).graph
assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.ops.aten.linear.default]
""",
    "stance": """
import torch._dynamo
for stance in ("default", "force_eager", "eager_on_recompile", "fail_on_recompile"):
    torch.compiler.set_stance(stance)
    torch.compile(m, fullgraph=True)(x)
with torch.compiler.set_stance("default"):
    torch.compile(m, fullgraph=True)(x)
@torch.compiler.set_stance("fail_on_recompile")
def f(): return torch.compile(m, fullgraph=True)(x)
f()
""",
    "higher order": """
from torch.nn.attention.flex_attention import flex_attention
q = torch.randn(1, 2, 16, 8)
plain = torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert torch.allclose(flex_attention(q, q, q), plain, atol=1e-5)
assert torch.allclose(torch.compile(flex_attention, fullgraph=True)(q, q, q), plain, atol=1e-5)
assert torch.equal(torch.cond(x.sum() > 1e9, torch.cos, torch.sin, (x,)), x.sin())
from torch.utils.checkpoint import checkpoint
torch.compile(lambda a: checkpoint(m, a, use_reentrant=False), fullgraph=True)(x)
""",
    "compiled autograd": """
import torch._dynamo
torch._dynamo.config.compiled_autograd = True
torch.compile(lambda: m(x).sum().backward(), fullgraph=True)()
assert m.weight.grad is not None
""",
}
pytestmark = pytest.mark.slow  # nineteen scripts run first
HEAD = BASE + "import warnings\nwarnings.simplefilter('ignore')\nx = torch.randn(8, 4)\n"
CONTROLS = {"optimizer": ("as_is", "fp32", "bf16")}
TAIL = "\nfor i in range(3): step()\n"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Ran]]:
    folder = tmp_path_factory.mktemp("compiled")
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        run, found = Runner(runs), {}
        for name, text in FORMS.items():
            path = folder / f"{name.replace(' ', '_')}.py"
            path.write_text(HEAD + text + TAIL)
            for control in CONTROLS.get(name, ("as_is",)):
                found[name, control] = run(path, control=control)
        yield found


@pytest.mark.parametrize(
    ("name", "control"), [(name, c) for name in FORMS for c in CONTROLS.get(name, ("as_is",))]
)
def test_it_runs_as_the_eager_code(
    name: str, control: str, ran: dict[tuple[str, str], Ran]
) -> None:
    result = ran[name, control]
    assert result.outcome.ended == "returned", result.err.decode()[-2000:]
    assert result.outcome.steps >= 3
    (note,) = result.outcome.notes
    assert "torch.compile was switched off" in note


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_run_left_compiled_counts_what_was_compiled(fullgraph: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        HEAD
        + f"""
net = torch.compile(m, fullgraph={fullgraph})
for i in range(3):
    o.zero_grad()
    net(x).sum().backward()
    o.step()
"""
    )
    with ScriptRuns(spec(), tmp_path / "runs.db") as runs:
        result = Runner(runs)(path, control="compiled;backend:aot_eager")
    (use,) = (u for u in result.run.observations if getattr(u, "name", "") == COMPILED_FRAMES)
    assert use.count > 0


def test_an_overflow_inside_a_compiled_model_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "overflow.py"
    path.write_text(
        HEAD
        + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = m
    def forward(self, a):
        return torch.exp(self.inner(a) + 12)
net = torch.compile(Net(), fullgraph=True)
with torch.autocast("cpu", torch.float16):
    for i in range(3):
        o.zero_grad()
        net(x).sum().backward()
        o.step()
"""
    )
    with ScriptRuns(spec(), tmp_path / "runs.db") as runs:
        result = Runner(runs)(path)
    bad = [b for b in result.run.observations if getattr(b, "kind", "") == "nonfinite"]
    assert bad[0].op == "aten.exp"
    assert bad[0].code == "return torch.exp(self.inner(a) + 12)"
