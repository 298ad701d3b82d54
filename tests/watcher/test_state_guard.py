"""`watch(guard=True)`: poisoned state rings at its step, healthy checkpoints are kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.errors import BadInput
from ampscope.healthy import mark_healthy
from ampscope.watcher.alarms import AmpscopeWarning
from tests.helpers.watched import recorded, small_net

Poison = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Tensor]], None]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["exp_avg_sq"][0, 0] = torch.inf


def _buffer(model: nn.Module, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
    model.get_buffer("1.running_var")[3] = torch.nan


def _ema(model: nn.Module, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
    ema["4.weight"][0, 0] = torch.nan


CASES: dict[str, tuple[Poison, str]] = {
    "optimizer_state_poisoned": (_state, "exp_avg_sq of 0.weight"),
    "buffer_poisoned": (_buffer, "1.running_var"),
    "ema_poisoned": (_ema, "4.weight"),
}


def train(store: Path, folder: Path, poison: Poison | None, at: int = 4) -> ampscope.Watch:
    """Eight steps in evaluation mode, with an average of the weights; a checkpoint after each."""
    torch.manual_seed(0)
    model = small_net().eval()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    model.register_buffer("late", torch.zeros(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = {k: v.detach().clone() for k, v in model.named_parameters()}
    with ampscope.watch(model, optimizer, store=store, every=0, guard=True, ema=ema) as run:
        for step in range(8):
            model(torch.randn(4, 8)).square().mean().backward()
            if poison is not None and step == at and poison is not _ema:
                optimizer.register_step_post_hook(_once(lambda: poison(model, optimizer, ema)))
            optimizer.step()
            optimizer.zero_grad()
            model.get_buffer("late").fill_(-torch.inf)  # a mask that is made in the first step
            for name, weight in model.named_parameters():
                ema[name].lerp_(weight.detach(), 0.1)
            if poison is _ema and step == at:
                poison(model, optimizer, ema)
            path = folder / f"step{step}.pt"
            torch.save(model.state_dict(), path)
            run.checkpoint(path, keep=True)
            if step:
                (folder / f"step{step - 1}.pt").unlink()  # as a trainer's rotation
    return run


def _once(call: Callable[[], None]) -> Callable[..., None]:
    waiting = [call]
    return lambda *_: waiting.pop()() if waiting else None


@pytest.mark.parametrize("alarm", CASES)
def test_poisoned_state_rings_at_its_step_and_names_the_healthy_checkpoint(
    alarm: str, tmp_path: Path
) -> None:
    poison, name = CASES[alarm]
    with pytest.warns(AmpscopeWarning):
        run = train(tmp_path / "runs.db", tmp_path, poison)
    (found,) = [a for a in run.alarms if a.name == alarm]
    assert found.step == 4
    assert name in found.text
    kept = tmp_path / "ampscope-healthy" / "step-3-step3.pt"
    assert f"{kept} (step 3)" in found.text
    assert ampscope.last_healthy(tmp_path) == kept
    assert all(v.isfinite().all() for k, v in torch.load(kept).items() if "." in k)
    assert os.listdir(kept.parent) == [kept.name]
    events = recorded(tmp_path / "runs.db", run.id).of("checkpoint")
    assert [e.step for e in events if e.name == "healthy"] == [0, 1, 2, 3]


def test_masks_are_no_poison_and_a_changed_file_is_not_named(tmp_path: Path) -> None:
    run = train(tmp_path / "runs.db", tmp_path, None)
    assert run.alarms == []
    kept = tmp_path / "ampscope-healthy" / "step-7-step7.pt"
    assert ampscope.last_healthy(tmp_path) == kept
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path, copied, copy_function=shutil.copyfile)  # new inodes, new times
    assert ampscope.last_healthy(copied) == copied / "ampscope-healthy" / kept.name
    with kept.open("r+b") as file:  # in place, and as long as before
        file.write(b"\0")
    assert ampscope.last_healthy(tmp_path) is None
    os.truncate(copied / "ampscope-healthy" / kept.name, 10)
    assert ampscope.last_healthy(copied) is None
    assert ampscope.last_healthy(tmp_path / "none") is None


def test_what_is_asked_wrongly(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(BadInput, match="ema is a module"):
        ampscope.watch(model, store=tmp_path / "runs.db", guard=True, ema={"a": object()})
    run = ampscope.watch(model, store=tmp_path / "runs.db")
    with pytest.raises(BadInput, match="guard=True"):
        run.checkpoint(tmp_path)
    run.close()


_ROTATING = """
import shutil, sys
from pathlib import Path
from ampscope.healthy import mark_healthy
folder = Path(sys.argv[1])
print("started", flush=True)
for step in range(10**9):
    made = folder / f"checkpoint-{step}"
    made.mkdir()
    for name in ("model", "optimizer"):
        (made / name).write_text(f"{step} " * 20_000)
    mark_healthy(made, step, "run", keep=True)
    shutil.rmtree(folder / f"checkpoint-{step - 1}", ignore_errors=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_healthy_checkpoint(tmp_path: Path) -> None:
    """A small form of benchmarks/kill_checkpoint.py."""
    child = subprocess.Popen(
        [sys.executable, "-c", _ROTATING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    marker = tmp_path / "ampscope-healthy.json"
    while not marker.exists():
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    found = ampscope.last_healthy(tmp_path)
    assert found is not None
    step = json.loads(marker.read_text())["step"]
    for name in ("model", "optimizer"):
        assert (found / name).read_text() == f"{step} " * 20_000


def test_the_same_step_saved_again_leaves_no_moment_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that was started again, without resuming, in the folder of the one before."""
    made = tmp_path / "checkpoint-1"
    made.write_text("first")
    mark_healthy(made, 0, "run", keep=True)
    made.unlink()
    made.write_text("second")
    with monkeypatch.context() as killed:

        def kill(self: Path, target: Path) -> Path:
            raise KeyboardInterrupt

        killed.setattr(Path, "rename", kill)
        with pytest.raises(KeyboardInterrupt):
            mark_healthy(made, 0, "again", keep=True)
    found = ampscope.last_healthy(tmp_path)
    assert found is not None
    assert found.read_text() == "first"
    for text in ("second", "third"):
        made.unlink()
        made.write_text(text)
        assert mark_healthy(made, 0, "again", keep=True) == ampscope.last_healthy(tmp_path)
        found = ampscope.last_healthy(tmp_path)
        assert found is not None
        assert found.read_text() == text
        assert list(found.parent.iterdir()) == [found]
