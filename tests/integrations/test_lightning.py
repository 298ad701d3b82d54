"""The Lightning callback in real fits; Lightning's own log is the oracle."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ampscope
from ampscope.records import State
from ampscope.watcher import AlarmBounds
from tests.helpers.hostile_objects import MODULES, Wrapper, odd
from tests.helpers.script_runner import quick
from tests.helpers.trainers import (
    assert_nothing_left,
    assert_same_bits,
    gradient_scales,
    modules,
    recorded,
)

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402  # after the skip
from lightning.pytorch.loggers import CSVLogger  # noqa: E402  # after the skip
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402  # after the skip

from ampscope.integrations.lightning import AmpscopeCallback  # noqa: E402  # after the skip

STEPS = 12
# Advice on data loaders and log intervals that a run of twelve steps does not heed.
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::pytorch_lightning")


class Classifier(pl.LightningModule):
    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.fail_at = fail_at
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise RuntimeError("planted")
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    folder: Path, precision: str, callback: Any = None, model: Any = None, checkpoint: Any = None,
    **more: Any,
) -> Any:  # fmt: skip
    """A fit of STEPS steps; the fp16 one is given a plugin, since Lightning itself allows fp16 on
    GPUs only."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randint(0, 4, (STEPS * 4,)))
    is_half = precision == "16-mixed"
    plugin = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if is_half else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(folder, name="log", version=0),
        log_every_n_steps=1,
        callbacks=[part for part in (callback, checkpoint) if part is not None],
        enable_checkpointing=checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(plugin or {"precision": precision}),
        **more,
    )
    model = model or Classifier()
    trainer.fit(model, DataLoader(data, batch_size=4))
    return trainer, model


def logged(folder: Path) -> list[tuple[float, float]]:
    """Loss and lr of each step, as Lightning wrote them."""
    with (folder / "log/version_0/metrics.csv").open() as file:
        return [(float(row["train_loss"]), float(row["lr"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_fit_is_recorded_as_lightning_logs_it(tmp_path: Path, precision: str) -> None:
    store = tmp_path / "runs.db"
    callback = AmpscopeCallback(every=4, store=store, name="fit")
    _, model = fit(tmp_path / "with", precision, callback)
    _, plain = fit(tmp_path / "without", precision)
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert_nothing_left()
    info, steps = recorded(store)
    assert (info.state, info.title, info.id) == (State.FINISHED, "fit", callback.run.id)
    assert [step.step for step in steps] == list(range(STEPS))
    losses, rates = zip(*logged(tmp_path / "with"), strict=True)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step.lr for step in steps] == pytest.approx(rates, rel=1e-6)
    assert logged(tmp_path / "with") == logged(tmp_path / "without")
    is_half = precision == "16-mixed"
    assert {step.scale for step in steps} == {65536.0 if is_half else None}
    assert set(gradient_scales(store)) == {65536.0 if is_half else 1.0}
    assert "net.0" in [module.path for module in modules(store)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_step_over_several_batches_has_their_mean_loss(tmp_path: Path, precision: str) -> None:
    callback = AmpscopeCallback(store=tmp_path / "runs.db")
    _, model = fit(tmp_path, precision, callback, accumulate_grad_batches=3)
    _, steps = recorded(tmp_path / "runs.db")
    means = [sum(model.losses[at : at + 3]) / 3 for at in range(0, STEPS, 3)]
    assert [step.loss for step in steps] == pytest.approx(means, rel=1e-5)


# Lightning itself asks a module for the modules in it.
@pytest.mark.parametrize("name", quick(sorted(MODULES.keys() - {"lists raise"}), "every attribute"))
def test_modules_that_answer_as_they_like_are_not_asked(tmp_path: Path, name: str) -> None:
    model, plain = Classifier(), Classifier()
    model.net[1], plain.net[1] = odd(name), odd(name)
    fit(tmp_path, "bf16-mixed", AmpscopeCallback(store=tmp_path / "runs.db"), model)
    fit(tmp_path, "bf16-mixed", model=plain)
    assert_same_bits(model.state_dict(), plain.state_dict())
    info, steps = recorded(tmp_path / "runs.db")
    assert (info.state, info.message, len(steps)) == (State.FINISHED, "", STEPS)


@pytest.mark.parametrize("place", ["optimizer", "elsewhere"])
def test_an_optimizer_that_is_none_of_torchs(tmp_path: Path, place: str) -> None:
    class Wrapped(Classifier):
        def configure_optimizers(self) -> Any:
            return Wrapper(torch.optim.SGD(self.parameters(), lr=0.1), place)

        def log(self, *args: Any, **kwargs: Any) -> None:
            pass

    model, plain = Wrapped(), Wrapped()
    fit(tmp_path, "bf16-mixed", AmpscopeCallback(store=tmp_path / "runs.db"), model)
    fit(tmp_path, "bf16-mixed", model=plain)
    assert_same_bits(model.state_dict(), plain.state_dict())
    info, steps = recorded(tmp_path / "runs.db")
    assert (info.state, len(steps)) == (State.FINISHED, STEPS)


def test_policy_stop_ends_the_fit(tmp_path: Path) -> None:
    heard: list[str] = []
    callback = AmpscopeCallback(
        store=tmp_path / "runs.db",
        policy="stop",
        on_alarm=lambda event: heard.append(event.name),
        alarms=AlarmBounds(scale_below=2.0**20),  # the first scale is 2^16
    )
    with warnings.catch_warnings(record=True):  # the alarm itself
        warnings.simplefilter("always")
        trainer, _ = fit(tmp_path, "16-mixed", callback)
    assert trainer.global_step == 1
    assert heard == ["scale_collapse"]
    info, steps = recorded(tmp_path / "runs.db")
    assert (info.state, len(steps)) == (State.FINISHED, 1)


def test_a_fit_that_raises_is_failed_and_keeps_its_steps(tmp_path: Path) -> None:
    callback = AmpscopeCallback(store=tmp_path / "runs.db")
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, "bf16-mixed", callback, Classifier(fail_at=3))
    assert_nothing_left()
    info, steps = recorded(tmp_path / "runs.db")
    assert (info.state, len(steps)) == (State.FAILED, 3)
    assert "planted" in info.message


def test_under_its_older_name(tmp_path: Path) -> None:
    """`pytorch_lightning` is the same code as another package; its trainer takes the callback."""
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        __init__ = Classifier.__init__
        training_step = Classifier.training_step
        configure_optimizers = Classifier.configure_optimizers

    Older.__init__ = lambda self: older.LightningModule.__init__(self)
    model = Older()
    model.net, model.fail_at, model.losses = nn.Linear(8, 4), -1, []
    trainer = older.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[AmpscopeCallback(store=tmp_path / "runs.db")],
    )  # fmt: skip
    data = TensorDataset(torch.randn(8, 8), torch.randint(0, 4, (8,)))
    trainer.fit(model, DataLoader(data, batch_size=4))
    assert [step.step for step in recorded(tmp_path / "runs.db")[1]] == [0, 1]


class Planted(Classifier):
    """Its loss alone is NaN at one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 5 else loss


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_planted_nan_rings_at_its_step(tmp_path: Path, precision: str) -> None:
    callback = AmpscopeCallback(store=tmp_path / "runs.db", policy="ignore")
    fit(tmp_path, precision, callback, Planted())
    alarms = [(alarm.step, alarm.name) for alarm in callback.run.alarms]
    first = [name for step, name in alarms if step == 5]
    unscaled = ["nonfinite_loss", "nonfinite_gradient", "nonfinite_weight"]
    assert first == (["nonfinite_loss"] if precision == "16-mixed" else unscaled)
    assert min(step for step, _ in alarms) == 5


@pytest.mark.filterwarnings("ignore::ampscope.watcher.alarms.AmpscopeWarning")
def test_the_last_healthy_checkpoint_outlives_rotation(tmp_path: Path) -> None:
    """Step 5 poisons the weights; the callback that saves every step keeps the newest alone."""
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    callback = AmpscopeCallback(store=tmp_path / "runs.db", guard=True)
    fit(tmp_path, "bf16-mixed", callback, Planted(), checkpoint=saver)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=12.ckpt"]
    kept = ampscope.last_healthy(tmp_path)
    assert kept == tmp_path / "ampscope-healthy" / "step-4-step=5.ckpt"
    assert _is_finite(kept)
    assert not _is_finite(tmp_path / "step=12.ckpt")
    (alarm,) = (a for a in callback.run.alarms if a.name == "nonfinite_weight")
    assert alarm.step == 5


@pytest.mark.filterwarnings("ignore::ampscope.watcher.alarms.AmpscopeWarning")
def test_a_checkpoint_that_is_written_again_and_again_is_not_kept(tmp_path: Path) -> None:
    """A hard link to it would become the poisoned one."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
    callback = AmpscopeCallback(store=tmp_path / "runs.db", guard=True)
    fit(tmp_path, "bf16-mixed", callback, Planted(), checkpoint=saver)
    assert (tmp_path / "last.ckpt").exists()
    assert ampscope.last_healthy(tmp_path) is None


def _is_finite(path: Path) -> bool:
    weights = torch.load(path, weights_only=True)["state_dict"]
    return all(weight.isfinite().all() for weight in weights.values())
