"""Losses that a script scales by hand: healthy where the handling is, named where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnose import Diagnosis, diagnose
from ampscope.experiments.script_runs import ScriptRuns
from tests.script_runner import Runner, spec, write_script

DYNAMIC = """
import sys, torch
torch.manual_seed(0)
lg, grow = float(sys.argv[1]), float(sys.argv[2])
vector = torch.nn.utils.parameters_to_vector
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16)).half()
own = list(net.parameters())
master = torch.nn.Parameter(vector([p.detach().float() for p in own]))
opt = torch.optim.AdamW([master], lr=1e-2)
w = torch.randn(16, 16) / 4
for it in range(50):
    net.zero_grad()
    x = torch.randn(64, 16)
    loss = (net(x.half()).float() - x @ w).square().mean()
    (loss * 2 ** lg).backward()
    if any(not torch.isfinite(p.grad).all() for p in own):
        lg -= 1
        continue
    master.grad = vector([p.grad.float() for p in own]).mul_(1 / 2 ** lg)
    opt.step()
    torch.nn.utils.vector_to_parameters(master.detach().to(own[0].dtype), own)
    lg += grow
"""
STATIC = """
import sys, torch
torch.manual_seed(0)
K, mode = float(sys.argv[1]), sys.argv[2]
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))
opt = torch.optim.SGD(net.parameters(), lr=0.05 / (K if mode == "lr" else 1))
w = torch.randn(16, 16) / 4
for it in range(30):
    opt.zero_grad()
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16): y = net(x)
    loss = (y.float() - x @ w).square().mean()
    (loss * K).backward()
    if mode == "div":
        for p in net.parameters(): p.grad.div_(K)
    opt.step()
"""
Found = dict[str, tuple[Diagnosis, RunView]]
CASES = {
    "dynamic": (DYNAMIC, ("16", "0.001")),
    "too high": (DYNAMIC, ("42", "0.001")),
    "too fast": (DYNAMIC, ("16", "1")),
    "divided": (STATIC, ("1024", "div")),
    "in the rate": (STATIC, ("1024", "lr")),
}


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Diagnosis, RunView]]]:
    folder = tmp_path_factory.mktemp("hand")
    with ScriptRuns(replace(spec(), cadence=spec().cadence), folder / "runs.db") as runs:
        runner = Runner(runs)
        made = {}
        for name, (text, arguments) in CASES.items():
            script: Path = write_script(folder, f"{name.replace(' ', '_')}.py", text)
            ids = {c: runner.start(script, arguments, c) for c in ("as_is", "fp32")}
            views = {c: RunView(c, i, runner.fetch(i).run.observations) for c, i in ids.items()}
            made[name] = diagnose(Evidence(views, "native")), views["as_is"]
        yield made


@pytest.mark.parametrize("name", ["dynamic", "divided", "in the rate"])
def test_right_handling_is_healthy(name: str, found: Found) -> None:
    diagnosis, run = found[name]
    assert diagnosis.verdict == "no_fault", [f.verdict.reason for f in diagnosis.findings]
    # The loss that the script prints, and not the product that backward is called on.
    assert max(run.losses) < 100


@pytest.mark.parametrize(
    ("name", "words"),
    [("too high", "starts at"), ("too fast", "grows back into overflow again and again")],
)
def test_steps_that_are_lost_to_the_factor_are_named(name: str, words: str, found: Found) -> None:
    diagnosis, _ = found[name]
    assert [f.cause for f in diagnosis.findings] == ["loss_scale_too_high"]
    assert words in diagnosis.findings[0].verdict.reason
