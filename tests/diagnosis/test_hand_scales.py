"""Losses that a script scales by hand: healthy where the handling is, named where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.findings import Diagnosis, diagnose
from ampscope.launcher.script_runs import ScriptRuns
from tests.helpers.script_runner import OnDemand, Runner, quick, spec, write_script

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
FACTOR = """
import sys, torch
torch.manual_seed(0)
K, lr, mode = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))
kind = torch.optim.Adam if mode == "adam" else torch.optim.SGD
opt = kind(net.parameters(), lr=lr, **({"momentum": 0.9} if mode == "momentum" else {}))
w = torch.randn(16, 16) / 4
if mode == "hook":
    for p in net.parameters(): p.register_hook(lambda g: g / K)
if mode == "late hook":
    def divide(p): p.grad.div_(K)
    for p in net.parameters(): p.register_post_accumulate_grad_hook(divide)
for it in range(30):
    opt.zero_grad()
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16): y = net(x)
    loss = (y.float() - x @ w).square().mean()
    (loss * K).backward()
    if mode == "div":
        for p in net.parameters(): p.grad /= K
    if mode == "clip": torch.nn.utils.clip_grad_norm_(net.parameters(), 1000.0)
    opt.step()
"""
WEIGHTED = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(16, 4)
opt = torch.optim.SGD(net.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(64, 16), torch.randn(64, 4)
for it in range(6):
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = (3e4 if it == 4 else 1.0) * (net(x) - y).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""
Found = dict[str, tuple[Diagnosis, RunView]]
CASES = {
    "dynamic": (DYNAMIC, ("16", "0.001")),
    "too high": (DYNAMIC, ("42", "0.001")),
    "too fast": (DYNAMIC, ("16", "1")),
    "divided": (STATIC, ("1024", "div")),
    "in the rate": (STATIC, ("1024", "lr")),
    "undivided": (FACTOR, ("1024", "0.05", "none")),
    "undivided momentum": (FACTOR, ("1024", "0.05", "momentum")),
    "undivided adam": (FACTOR, ("1024", "0.01", "adam")),
    "mild": (FACTOR, ("1024", "0.0005", "none")),
    "wild divided": (FACTOR, ("1024", "50", "div")),
    "wild hook": (FACTOR, ("1024", "50", "hook")),
    "wild late hook": (FACTOR, ("1024", "50", "late hook")),
    "wild adam": (FACTOR, ("1024", "1e8", "adam")),
    "wild weight": (FACTOR, ("100", "5", "none")),
}


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Diagnosis, RunView]]]:
    folder = tmp_path_factory.mktemp("hand")
    with ScriptRuns(replace(spec(), cadence=spec().cadence), folder / "runs.db") as runs:
        runner = Runner(runs)

        def made(name: str) -> tuple[Diagnosis, RunView]:
            text, arguments = CASES[name]
            script: Path = write_script(folder, f"{name.replace(' ', '_')}.py", text)
            ids = {c: runner.start(script, arguments, c) for c in ("as_is", "fp32")}
            views = {c: RunView(c, i, runner.fetch(i).run.observations) for c, i in ids.items()}
            return diagnose(Evidence(views, "native")), views["as_is"]

        yield OnDemand(made)


HEALTHY = ("dynamic", "divided", "in the rate", "undivided adam", "mild")


@pytest.mark.parametrize("name", quick(HEALTHY, "dynamic", "divided", "undivided adam"))
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


@pytest.mark.parametrize("name", quick(["undivided", "undivided momentum"], "undivided"))
def test_a_factor_that_is_never_divided_out_is_said(name: str, found: Found) -> None:
    """The fp32 control carries the factor too, so that it diverges as well."""
    finding = found[name][0].findings[0]
    assert finding.cause == "not_amp_divergence"
    assert "multiplies the loss by 1,024 before backward and does not divide" in (
        finding.verdict.reason
    )
    assert finding.verdict.fix.text.startswith("Divide the gradients by 1,024 before the step")
    assert finding.verdict.fix.controls[0] == "lr:0.000976562"
    assert "div_(1024)" in finding.verdict.fix.patch


@pytest.mark.parametrize(
    "name", quick([name for name in CASES if name.startswith("wild")], "wild divided", "wild hook")
)
def test_no_missing_division_is_said_where_there_may_be_one(name: str, found: Found) -> None:
    for finding in found[name][0].findings:
        assert "does not divide" not in finding.verdict.reason
        assert "Divide the gradients" not in finding.verdict.fix.text


def test_a_weight_of_the_loss_is_no_loss_scale_in_the_controls_either(tmp_path: Path) -> None:
    """The controls switch the scaler off; the loss that they record is weighted all the same."""
    script = write_script(tmp_path, "weighted.py", WEIGHTED)
    with ScriptRuns(spec(), tmp_path / "runs.db") as runs:
        runner = Runner(runs)
        ids = [runner.start(script, (), control) for control in ("as_is", "fp32", "bf16")]
        views = [RunView("", i, runner.fetch(i).run.observations) for i in ids]
    for view in views:
        losses = [a.loss or 0.0 for a in view.steps]
        assert losses[4] == pytest.approx(3e4 * losses[3], rel=0.05)
