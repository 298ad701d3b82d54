"""The Transformers callback in real trainings; the trainer's own log is the oracle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ampscope
from ampscope.records import State
from ampscope.watcher import AlarmBounds
from tests.helpers.hostile_objects import TAKEN_BY_ACCELERATE, odd
from tests.helpers.script_runner import quick
from tests.helpers.trainers import (
    assert_nothing_left,
    assert_same_bits,
    gradient_scales,
    modules,
    recorded,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ampscope.integrations.transformers import AmpscopeCallback  # noqa: E402  # after the skip

STEPS = 6


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def train(folder: Path, precision: str, callback: Any = None, name: str = "", **more: Any) -> Any:
    """A GPT-2 of one block. For fp16 the trainer's accelerator is given the scaler that it makes
    by itself on GPUs only."""
    transformers.set_seed(0)
    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (32, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        **({"save_strategy": "no"} | more),
    )
    if name:
        model.transformer.drop = odd(name)
    callbacks = [callback] if callback else []
    trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=callbacks)
    if precision == "fp16":
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        trainer.accelerator.native_amp = True
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[tuple[float, float]]:
    """Loss and lr of each step."""
    return [(e["loss"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_is_recorded_as_the_trainer_logs_it(tmp_path: Path, precision: str) -> None:
    store = tmp_path / "runs.db"
    callback = AmpscopeCallback(every=2, store=store, name="gpt2")
    trainer = train(tmp_path / "with", precision, callback)
    plain = train(tmp_path / "without", precision)
    assert_same_bits(trainer.model.state_dict(), plain.model.state_dict())
    assert_nothing_left()
    assert logged(trainer) == logged(plain)
    info, steps = recorded(store)
    assert (info.state, info.title, info.id) == (State.FINISHED, "gpt2", callback.run.id)
    assert len(steps) == STEPS
    found = [(step.loss, step.lr) for step in steps]
    for (loss, lr), (their_loss, their_lr) in zip(found, logged(trainer), strict=True):
        assert loss == pytest.approx(their_loss, abs=1e-4)
        assert lr == pytest.approx(their_lr, rel=1e-6)
    assert {step.scale for step in steps} == {65536.0 if precision == "fp16" else None}
    assert set(gradient_scales(store)) == {65536.0 if precision == "fp16" else 1.0}
    assert "transformer.h.0.mlp.c_fc" in [module.path for module in modules(store)]


@pytest.mark.parametrize("name", quick(TAKEN_BY_ACCELERATE, "== makes a module"))
def test_modules_that_answer_as_they_like_are_not_asked(tmp_path: Path, name: str) -> None:
    store = tmp_path / "runs.db"
    trainer = train(tmp_path, "bf16", AmpscopeCallback(store=store), name)
    plain = train(tmp_path, "bf16", name=name)
    assert_same_bits(trainer.model.state_dict(), plain.model.state_dict())
    info, steps = recorded(store)
    assert (info.state, info.message, len(steps)) == (State.FINISHED, "", STEPS)


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    trainer = train(tmp_path, "bf16", AmpscopeCallback(store=store), gradient_accumulation_steps=2)
    _, steps = recorded(store)
    assert len(steps) == STEPS == trainer.state.global_step


def test_policy_stop_ends_the_training(tmp_path: Path) -> None:
    callback = AmpscopeCallback(
        store=tmp_path / "runs.db", policy="stop", alarms=AlarmBounds(scale_below=2.0**20)
    )
    with warnings.catch_warnings(record=True):  # the alarm itself
        warnings.simplefilter("always")
        trainer = train(tmp_path, "fp16", callback)
    assert trainer.state.global_step == 1
    assert [alarm.name for alarm in callback.run.alarms] == ["scale_collapse"]
    assert recorded(tmp_path / "runs.db")[0].state is State.FINISHED


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_planted_nan_rings_at_its_step(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own log filters such a loss out."""
    original, seen = transformers.Trainer.compute_loss, []

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        seen.append(loss)
        return loss * float("nan") if len(seen) == 4 else loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", compute_loss)
    callback = AmpscopeCallback(store=tmp_path / "runs.db", policy="ignore")
    train(tmp_path, precision, callback)
    alarms = [(alarm.step, alarm.name) for alarm in callback.run.alarms]
    assert alarms[0] == (3, "nonfinite_loss")
    assert ((3, "nonfinite_weight") in alarms) is (precision == "bf16")


@pytest.mark.filterwarnings("ignore::ampscope.watcher.alarms.AmpscopeWarning")
def test_the_last_healthy_checkpoint_outlives_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth step poisons the weights; the trainer saves every step and keeps the newest."""
    original, seen = transformers.Trainer.compute_loss, []

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        seen.append(loss)
        return loss * float("nan") if len(seen) == 4 else loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", compute_loss)
    callback = AmpscopeCallback(store=tmp_path / "runs.db", guard=True)
    out = tmp_path / "out"
    train(out, "bf16", callback, save_strategy="steps", save_steps=1, save_total_limit=1)
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    kept = ampscope.last_healthy(out)
    assert kept == out / "ampscope-healthy" / "step-2-checkpoint-3"
    model = transformers.GPT2LMHeadModel.from_pretrained(kept)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert (kept / "optimizer.pt").exists()
    poisoned = transformers.GPT2LMHeadModel.from_pretrained(out / f"checkpoint-{STEPS}")
    assert not all(weight.isfinite().all() for weight in poisoned.parameters())
