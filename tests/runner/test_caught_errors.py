"""Errors that a training loop catches: counted, the first one kept with its place, and judged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.findings import diagnose
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from tests.helpers.script_runner import Ran, Runner, spec, write_script

# A Function without custom_fwd: its backward multiplies fp16 by fp32, and the loop goes on.
BACKWARD = """
import torch
torch.manual_seed(0)
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g
class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
    def forward(self, x):
        return Product.apply(x, self.weight)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), Mixer())
opt = torch.optim.SGD(model.parameters(), 0.05)
x, y = torch.randn(8, 4), torch.randn(8, 4)
def step(custom):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x) if custom else model[0](x)
    loss = torch.nn.functional.mse_loss(out.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
for i in range(12):
    try:
        step(custom=i >= 5)
    except RuntimeError:
        pass  # out of memory on an odd batch
"""
FORWARD = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(3, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
for i in range(6):
    try:
        x = torch.randn(8, 4)
        loss = model(x).sum() if i % 2 else model[0](x).sum()
        opt.zero_grad(); loss.backward(); opt.step()
    except RuntimeError as error:
        pass
"""
INSIDE = """
import torch
class Careful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(3, 4)
    def forward(self, x):
        try: return self.b(x)
        except RuntimeError: return self.a(x)
model = Careful()
opt = torch.optim.SGD(model.parameters(), 0.1)
for i in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""
TRIES = (
    INSIDE.split("class")[0]
    + """
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for i in range(6):
    x = torch.randn(8, 4)
    try: out = model(x.double()) if i == 0 else model(x)
    except RuntimeError: out = model(x)
    loss = out.square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""
)
MEMORY = """
import torch
model = torch.nn.Linear(4, 4)
def full(module, inputs): raise torch.OutOfMemoryError("CUDA out of memory")
opt = torch.optim.SGD(model.parameters(), 0.1)
for i in range(3):
    if i == 1: hook = model.register_forward_pre_hook(full)
    try:
        model(torch.randn(8, 4)).square().mean().backward(); opt.step()
    except RuntimeError: hook.remove()
"""
LEAVES = """
import sys
import torch
model = torch.nn.Linear(4, 2).half()
opt = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
def train():
    loss = model(torch.randn(8, 4).half()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
try:
    train()
except Exception as error:
    print(error)
    sys.exit(1)
"""
ENDS = BACKWARD.replace("except RuntimeError", "except ZeroDivisionError")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    folder = tmp_path_factory.mktemp("caught")
    texts = {"backward": BACKWARD, "forward": FORWARD, "inside": INSIDE, "memory": MEMORY,
             "tries": TRIES, "leaves": LEAVES}  # fmt: skip
    paths = {n: write_script(folder, f"{n}.py", t) for n, t in {**texts, "ends": ENDS}.items()}
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        run = Runner(runs)
        found = {name: run(path) for name, path in paths.items()}
        yield found | {"fp32": run(paths["backward"], control="fp32")}


def place(outcome: Outcome) -> tuple[str, str, int, int]:
    return (
        outcome.error_line, outcome.error_module, outcome.error_step, outcome.errors_caught
    )  # fmt: skip


def test_an_error_out_of_a_backward_pass(ran: dict[str, Ran]) -> None:
    line = BACKWARD.splitlines().index("        return g @ w.t(), x.t() @ g") + 1
    outcome = ran["backward"].outcome
    assert outcome.ended == "returned"
    assert outcome.error_type == "RuntimeError"
    assert "same dtype" in outcome.error_text or "expected m1 and m2" in outcome.error_text
    assert place(outcome) == (f"backward.py:{line}", "", 5, 7)
    assert len(ran["backward"].steps) == 5
    assert ran["fp32"].outcome.errors_caught == 0


def test_an_error_out_of_a_forward_pass_names_the_innermost_module(ran: dict[str, Ran]) -> None:
    line = next(n for n, text in enumerate(FORWARD.splitlines(), 1) if "model(x).sum()" in text)
    assert place(ran["forward"].outcome) == (f"forward.py:{line}", "1", 1, 3)


@pytest.mark.parametrize("name", ["inside", "memory"])
def test_what_a_model_settles_itself_and_a_lack_of_memory_count_for_nothing(
    ran: dict[str, Ran], name: str
) -> None:
    assert place(ran[name].outcome) == ("", "", 0, 0)


def test_an_error_that_comes_once_is_counted_and_no_more(ran: dict[str, Ran]) -> None:
    outcome = ran["tries"].outcome
    assert (outcome.errors_caught, outcome.error_text) == (1, "")
    views = {name: RunView(name, name, ran["tries"].run.observations) for name in ("as_is", "fp32")}
    assert diagnose(Evidence(views, "native")).verdict == "no_fault"


def test_an_error_that_ends_the_script_is_not_called_caught(ran: dict[str, Ran]) -> None:
    outcome = ran["ends"].outcome
    assert (outcome.ended, outcome.errors_caught, outcome.error_type) == (
        "exception", 0, "RuntimeError",
    )  # fmt: skip


def test_the_error_that_a_script_leaves_for_is_judged(ran: dict[str, Ran]) -> None:
    outcome = ran["leaves"].outcome
    line = LEAVES.splitlines().index("    scaler.step(opt)") + 1
    assert (outcome.ended, outcome.exit_code, outcome.error_type) == ("exit", 1, "ValueError")
    assert outcome.error_line == f"leaves.py:{line}"
    views = {"as_is": RunView("as_is", "a", ran["leaves"].run.observations)}
    found = diagnose(Evidence(views, "native")).findings
    assert [f.cause for f in found] == ["fp16_params_with_scaler"]


def test_the_cause_is_named_although_the_script_ends_well(ran: dict[str, Ran]) -> None:
    views = {
        control: RunView(control, control, ran[name].run.observations)
        for control, name in (("as_is", "backward"), ("fp32", "fp32"))
    }
    found = diagnose(Evidence(views, "native"))
    assert [f.cause for f in found.findings] == ["unsafe_op_under_autocast"]
    verdict = found.findings[0].verdict
    assert (verdict.module, verdict.step) == ("1", 5)
    assert "7 times in all" in verdict.reason


def test_an_error_that_fp32_raises_too_is_no_fault_of_precision(ran: dict[str, Ran]) -> None:
    baseline = RunView("as_is", "a", ran["forward"].run.observations)
    assert diagnose(Evidence({"as_is": baseline, "fp32": baseline}, "native")).verdict == "no_fault"
