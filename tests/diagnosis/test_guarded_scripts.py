"""Scripts that guard themselves: each looks at its loss and leaves when that is not finite.

Every guard stands in one training whose module ``up`` overflows fp16 from some step on, and in its
healthy twin, which never does. The first must be told by cause and module, with a verified fix;
the twin must have no fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ampscope.diagnosis.load import load_diagnosis
from ampscope.store.reader import Reader
from tests.helpers.script_diagnoses import diagnosed, told

TRAINING = """\
import math, os, signal, sys
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        with torch.no_grad():
            self.up.weight.mul_(300)

    def forward(self, x, gain):
        h = self.up(torch.relu(self.inp(x)) * gain)
        return self.out(nn.functional.layer_norm(h.float(), (32,)))


class NonFinite(Exception):
    pass


net = Net()
opt = torch.optim.SGD(net.parameters(), 0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
data = [(torch.randn(32, 16), torch.randint(0, 4, (32,))) for _ in range(8)]
criterion = nn.CrossEntropyLoss()
best = math.inf


def train():
    global best
    total = 0.0
    for step in range(40):
        x, y = data[step % 8]
        gain = 300.0 if step >= FIRST_BAD else 1.0
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = criterion(net(x, gain), y)
        GUARD
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


train()
"""


@dataclass(frozen=True)
class Guard:
    """``code`` stands between the loss and its backward, at the indentation of the loop."""

    name: str
    code: str
    edits: tuple[tuple[str, str], ...] = ()  # of the training around it


DETR = """\
value = loss.item()
if not math.isfinite(value):
    print(f"Loss is {value}, stopping training")
    sys.exit(1)"""
GUARDS = (
    Guard("detr", DETR),
    Guard("exit with a text", "if not torch.isfinite(loss): sys.exit('loss is not finite')"),
    Guard("break", "if not math.isfinite(loss.item()): break"),
    Guard("continue", "if torch.isnan(loss): continue"),
    Guard("assert", "assert torch.isfinite(loss).all(), loss"),
    Guard("not equal to itself", "if loss != loss: raise NonFinite(loss.item())"),
    Guard("os._exit", "if not math.isfinite(float(loss)): os._exit(3)"),
    Guard("kept in a meter", "total += loss.item()\nif math.isnan(total): return"),
    Guard("detached", "if loss.detach().isnan().any(): break"),
    Guard("numpy", "import numpy\nif not numpy.isfinite(loss.detach().numpy()): sys.exit(1)"),
    Guard("tolist", "if not math.isfinite(loss.detach().tolist()): sys.exit(1)"),
    Guard("compared with a number", "if not (loss < 1e6): sys.exit(1)"),
    Guard("counted", "if int((~torch.isfinite(loss)).sum()) > 0: sys.exit(1)"),
    Guard("formatted", "if 'nan' in f'{loss:.3f}': raise SystemExit(1)"),
    Guard(
        "averaged over ranks",
        "mean = torch.stack([loss.detach(), loss.detach()]).mean()\n"
        "if not math.isfinite(mean.item()): sys.exit(1)",
    ),
    Guard(
        "patience",
        "if not math.isfinite(loss.item()):\n"
        "    best -= 1\n    bad = globals().setdefault('bad', [])\n    bad.append(step)\n"
        "    if len(bad) > 5: raise NonFinite('too many')\n    continue",
    ),
    Guard(
        "after the backward",
        "scaler.scale(loss).backward()\nif not math.isfinite(loss.item()): sys.exit(1)\n"
        "scaler.step(opt); scaler.update(); continue",
    ),
    Guard(
        "workers of a DataLoader",
        DETR,
        (("data = [", "loaded = ["),
         ("criterion =", "data = list(torch.utils.data.DataLoader(loaded, batch_size=None, "
          "num_workers=1, multiprocessing_context='fork'))\ncriterion =")),
    ),
)  # fmt: skip
QUICK = ("detr", "continue", "after the backward")  # the others are like one of them
BY_NAME = [
    pytest.param(g, id=g.name, marks=() if g.name in QUICK else pytest.mark.thorough)
    for g in GUARDS
]
HEALTHY = 10**6


def written(folder: Path, guard: Guard, first_bad: int) -> Path:
    """The training with that guard."""
    text = TRAINING.replace("FIRST_BAD", str(first_bad))
    for old, new in guard.edits:
        assert old in text
        text = text.replace(old, new, 1)
    lines = guard.code.splitlines()
    text = text.replace("GUARD", "\n        ".join(lines))
    path = folder / "guarded.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("guard", BY_NAME)
def test_the_overflow_behind_a_guard_is_told(guard: Guard, tmp_path: Path) -> None:
    report = diagnosed(written(tmp_path, guard, first_bad=6), tmp_path / "runs.db")
    assert told(report) == ("activation_overflow", "up", True)
    assert report.diagnosis.findings[0].verdict.step == 6
    with Reader(tmp_path / "runs.db") as reader:  # and so it is read back
        assert told(load_diagnosis(reader, report.runs["as_is"].id)) == told(report)


@pytest.mark.parametrize(
    "guard",
    [
        pytest.param(g, id=g.name, marks=() if g.name == "detr" else pytest.mark.thorough)
        for g in GUARDS
        if g.name in ("detr", "continue", "assert", "os._exit", "workers of a DataLoader")
    ],
)
def test_a_script_that_leaves_before_its_first_step_is_told(guard: Guard, tmp_path: Path) -> None:
    report = diagnosed(written(tmp_path, guard, first_bad=0), tmp_path / "runs.db")
    assert told(report) == ("activation_overflow", "up", True)


@pytest.mark.parametrize("guard", BY_NAME)
def test_a_healthy_script_with_a_guard_has_no_fault(guard: Guard, tmp_path: Path) -> None:
    report = diagnosed(written(tmp_path, guard, first_bad=HEALTHY), tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")


GRADIENT_GUARD = """\
loss.backward()
if not all(torch.isfinite(p.grad).all() for p in net.parameters()): sys.exit(1)
opt.step(); continue"""


def test_gradients_that_are_looked_at_before_the_step_are_told(tmp_path: Path) -> None:
    """The loss is finite in fp16, its gradients are not, and no scaler is there to skip."""
    text = (
        TRAINING.replace("FIRST_BAD", "6")
        .replace("GUARD", "\n        ".join(GRADIENT_GUARD.splitlines()))
        .replace("gain = 300.0", "gain = 1.0")
        .replace("criterion(net(x, gain), y)", "criterion(net(x, gain), y) * big(step)")
        .replace("best = math.inf", "def big(step): return 1e7 if step >= 6 else 1.0")
        .replace("    global best\n", "")
        .replace("net.parameters(), 0.05", "net.parameters(), 1e-9")
    )
    path = tmp_path / "gradients.py"
    path.write_text(text)
    report = diagnosed(path, tmp_path / "runs.db", verify=False)
    assert "gradients are not finite although nothing skipped the step" in report.diagnosis.symptoms
    assert report.diagnosis.verdict != "no_fault"


def test_data_that_both_precisions_leave_out_is_no_fault(tmp_path: Path) -> None:
    """A loader with a bad sample, and a script that knows it."""
    text = TRAINING.replace("FIRST_BAD", str(HEALTHY)).replace(
        "GUARD", "if step % 10 == 7: loss = loss * math.nan\n        if loss != loss: continue"
    )
    path = tmp_path / "knows.py"
    path.write_text(text)
    report = diagnosed(path, tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")


def test_a_metric_that_is_not_finite_and_only_printed_is_no_fault(tmp_path: Path) -> None:
    text = TRAINING.replace("FIRST_BAD", str(HEALTHY)).replace(
        "GUARD", "metric = (loss / 0.0); print(metric.item(), bool(torch.isinf(metric)))"
    )
    path = tmp_path / "metric.py"
    path.write_text(text)
    report = diagnosed(path, tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")


def test_an_early_end_without_a_seen_reason_is_said(tmp_path: Path) -> None:
    """An exit status of its own, and nothing that explains it: undetermined, never healthy."""
    text = TRAINING.replace("FIRST_BAD", str(HEALTHY)).replace(
        "GUARD", "if step == 5 and torch.is_autocast_enabled('cpu') is False and "
        "loss.dtype is not None and next(iter(net.up(x.new_ones(1, 32)))).dtype is HALF: pass"
    )  # fmt: skip
    text = text.replace("HALF: pass", "torch.float32 and HALVED(x): sys.exit(4)").replace(
        "best = math.inf",
        "def HALVED(x):\n    with torch.autocast('cpu', torch.float16):\n"
        "        return net.inp(x).dtype is torch.float16\nbest = math.inf",
    )
    path = tmp_path / "leaves.py"
    path.write_text(text)
    report = diagnosed(path, tmp_path / "runs.db")
    assert report.diagnosis.verdict == "inconclusive"
    assert any("exit status 4 after 5 optimizer steps" in note for note in report.notes)


NONE_GRADIENTS = """\
import torch
from torch import nn

torch.manual_seed(0)


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx, a, b):
        assert b is None
        return a, b


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.aside, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        a, _ = Two.apply(self.first(x), self.aside(x))
        return self.last(torch.tanh(a))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(256, 8)
for step in range(40):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = (out.float() - x[:, :1] * 0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_function_that_is_given_none_for_zeros_is_judged(tmp_path: Path) -> None:
    """Hooks are called with None there, and the Function still gets it."""
    path = tmp_path / "none.py"
    path.write_text(NONE_GRADIENTS)
    report = diagnosed(path, tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")
