"""Loss scale, skips and steps of a probe, against GradScaler's rules written out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ampscope.records import Cadence, Role, RunSpec, ScalerSpec
from ampscope.runner.probe import drive, prepare
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

CPU = torch.device("cpu")


def recorded(spec: RunSpec, store: Path, policy: str = "rehearsal") -> tuple[Reader, str]:
    writer = RunWriter.create(store, spec)
    drive(spec, prepare(spec, CPU), policy, writer)
    writer.close()
    return Reader(store), writer.run_id


@dataclass
class HandWrittenScaler:
    """torch/amp/grad_scaler.py in six lines: the oracle."""

    spec: ScalerSpec
    scale: float
    counter: int = 0

    def step(self, is_finite: bool) -> None:
        if not is_finite:
            self.scale, self.counter = self.scale * self.spec.backoff_factor, 0
            return
        self.counter += 1
        if self.counter == self.spec.growth_interval:
            self.scale, self.counter = self.scale * self.spec.growth_factor, 0


@pytest.mark.parametrize(
    "scaler",
    [
        ScalerSpec(),
        ScalerSpec(2.0**20, growth_interval=3),
        ScalerSpec(2.0**24, growth_factor=4.0, backoff_factor=0.125, growth_interval=2),
    ],
)
def test_the_scale_follows_gradscalers_rules(scaler: ScalerSpec, tmp_path: Path) -> None:
    spec = RunSpec("mlp", precision="fp16", steps=16, scaler=scaler, cadence=Cadence(1, 0, 0))
    reader, run = recorded(spec, tmp_path / "s.db")
    oracle = HandWrittenScaler(scaler, scaler.init_scale)
    with reader:
        steps = reader.steps(run)
        assert any(step.skipped for step in steps) or scaler == ScalerSpec()
        for step in steps:
            bad = reader.nonfinite(run, step.step)
            assert step.scale == oracle.scale
            assert step.skipped == bool(bad)  # exactly when a gradient held NaN or Inf
            oracle.step(not bad)
            assert step.growth_counter == oracle.counter
            frame = reader.frame(run, Role.WEIGHT_GRAD, step.step)
            assert frame is not None
            assert frame.scale == step.scale


def test_the_skipped_steps_parameters_are_in_backward_order(tmp_path: Path) -> None:
    scaler = ScalerSpec(2.0**40)
    spec = RunSpec("mlp", precision="fp16", steps=1, scaler=scaler, cadence=Cadence(1, 0, 0))
    reader, run = recorded(spec, tmp_path / "s.db")
    with reader:
        bad = reader.nonfinite(run)
        paths = [module.path for module in reader.modules(run)]
    names = [record.parameter for record in bad]
    layers = [paths.index(name.rpartition(".")[0]) for name in names]
    assert len(bad) > 2
    assert layers == sorted(layers, reverse=True)  # the last layer first
    assert [record.order for record in bad] == sorted(record.order for record in bad)


def test_a_skip_moves_no_weight_and_records_no_update(tmp_path: Path) -> None:
    scaler = ScalerSpec(2.0**40, backoff_factor=2.0**-26)
    spec = RunSpec("mlp", precision="fp16", steps=2, scaler=scaler, cadence=Cadence(1, 0, 0))
    reader, run = recorded(spec, tmp_path / "s.db")
    with reader:
        skipped, taken = reader.steps(run)
        assert (skipped.skipped, taken.skipped) == (True, False)
        assert skipped.moved_share == 0.0
        assert taken.moved_share is not None
        assert taken.moved_share > 0.5
        assert reader.frame_steps(run, Role.UPDATE) == [1]
        first, second = (reader.frame(run, Role.WEIGHT, step) for step in (0, 1))
        assert first is not None
        assert second is not None
        assert (first.rows == second.rows).all()


def test_whatever_the_cadence_a_skip_says_which_gradients_were_not_finite(tmp_path: Path) -> None:
    scaler = ScalerSpec(2.0**40)
    spec = RunSpec("mlp", precision="fp16", steps=2, scaler=scaler, cadence=Cadence(0, 0, 0))
    reader, run = recorded(spec, tmp_path / "s.db")
    with reader:
        assert [step.skipped for step in reader.steps(run)] == [True, True]
        assert {record.step for record in reader.nonfinite(run)} == {0, 1}
        assert all(reader.frame_steps(run, role) == [] for role in Role)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16-noscaler", "bf16", "fp16-pure"])
def test_the_gradient_norm_is_unscaled(precision: str, tmp_path: Path) -> None:
    """Against the same first step taken by hand in fp32."""
    cadence = Cadence(0, 0, 0)
    reference = prepare(RunSpec("mlp", precision="fp32"), CPU)
    torch.manual_seed(0)
    loss = reference.workload.loss(reference.model, next(iter(reference.workload.batches())))  # type: ignore[operator]  # a function here
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in reference.model.parameters() if p.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(grads))
    scaler = ScalerSpec(2.0**10)
    spec = RunSpec("mlp", precision=precision, steps=1, scaler=scaler, cadence=cadence)
    reader, run = recorded(spec, tmp_path / "s.db")
    with reader:
        (step,) = reader.steps(run)
    assert step.grad_norm == pytest.approx(expected, rel=0.02)
    assert step.scale == (2.0**10 if precision == "fp16" else None)
