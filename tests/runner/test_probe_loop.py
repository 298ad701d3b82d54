"""The probe loop with a workload's own step, without a shadow that fails, and what it times."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.comparisons import Comparisons
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.op_trace import Flops, OpTrace
from ampscope.capture.shadow import Shadow
from ampscope.capture.weights import WeightObserver
from ampscope.records import Cadence, Role, RunSpec
from ampscope.runner import __main__ as child
from ampscope.runner import instruments, probe
from ampscope.runner.probe import drive, prepare
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

CPU = torch.device("cpu")
CUSTOM_STEP = '''
import torch
from torch import nn

from ampscope import Workload


def step(model, batch, optimizer, scaler, autocast):
    """Two micro batches a step; unscale_ is left to the scaler."""
    optimizer.zero_grad()
    for half in batch.chunk(2):
        with autocast():
            loss = model(half).square().mean()
        scaler.scale(loss / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def build(seed):
    return Workload(
        model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        batches=[torch.randn(8, 4) for _ in range(2)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        step=step,
    )
'''


def custom(tmp_path: Path) -> str:
    (tmp_path / "custom.py").write_text(CUSTOM_STEP)
    return f"{tmp_path / 'custom.py'}:build"


def test_a_training_step_of_the_workloads_own_is_observed_like_the_default(tmp_path: Path) -> None:
    spec = RunSpec(custom(tmp_path), precision="fp16", steps=3, cadence=Cadence(1, 1, 1))
    writer = RunWriter.create(tmp_path / "s.db", spec)
    loop = drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    assert "a training step of its own" in loop.note
    with Reader(tmp_path / "s.db") as reader:
        steps = reader.steps(writer.run_id)
        assert all(step.scale == 65536.0 and not step.skipped for step in steps)
        assert all(step.grad_norm is not None and step.grad_norm < 100 for step in steps)
        frame = reader.frame(writer.run_id, Role.ACTIVATION, 1)
        assert frame is not None
        row = frame.row_of(1)
        assert row is not None
        assert row.sum() == 8 * 8  # both micro batches
        for role in Role:
            assert reader.frame_steps(writer.run_id, role) == [0, 1, 2]
        assert reader.shadows(writer.run_id) == []


def test_a_copy_that_cannot_be_made_costs_the_shadow_and_not_the_run(tmp_path: Path) -> None:
    spec = RunSpec("mlp", precision="fp16", steps=2, cadence=Cadence(0, 0, 1))
    training = prepare(spec, CPU)

    class Uncopyable(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.held = inner(torch.ones(1, 64))  # a tensor of a graph: deepcopy refuses it

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    training.model = Uncopyable(training.model)
    writer = RunWriter.create(tmp_path / "s.db", spec)
    loop = drive(spec, training, "rehearsal", writer)
    writer.close()
    assert "shadow is off" in loop.note
    with Reader(tmp_path / "s.db") as reader:
        assert len(reader.steps(writer.run_id)) == 2


def test_each_step_says_what_it_cost(tmp_path: Path) -> None:
    spec = RunSpec("mlp", precision="bf16", steps=3, cadence=Cadence(1, 1, 1))
    writer = RunWriter.create(tmp_path / "s.db", spec)
    drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        for step in reader.steps(writer.run_id):
            assert step.step_time_s is not None
            assert step.overhead_s is not None
            assert step.step_time_s > 0
            assert step.overhead_s > 0
            assert step.peak_bytes is not None
            assert step.peak_bytes > 2**20
            assert step.lr is not None


def test_what_an_instrument_does_inside_another_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing with the shadow is timed by the shadow and by the step's end; a step whose time
    went there was left with none of its own."""
    compare = Comparisons.add

    def slow(*arguments: object) -> None:
        time.sleep(0.02)
        compare(*arguments)

    monkeypatch.setattr(Comparisons, "add", slow)
    spec = RunSpec("mlp", precision="bf16", steps=3, cadence=Cadence(1, 1, 1))
    writer = RunWriter.create(tmp_path / "s.db", spec)
    drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        steps = reader.steps(writer.run_id)
    assert all(step.step_time_s for step in steps)
    assert all((step.overhead_s or 0.0) > 0.02 for step in steps)


SPARSE = """
import torch
from torch import nn

from ampscope import Workload


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1))
    return Workload(
        model=model,
        batches=[torch.arange(16) * 3 % 50 for _ in range(2)],
        loss=lambda model, batch: (model(batch).float() - 1).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
"""


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-pure"])
def test_sparse_gradients_do_not_end_a_probe(tmp_path: Path, precision: str) -> None:
    (tmp_path / "sparse.py").write_text(SPARSE)
    workload = f"{tmp_path / 'sparse.py'}:build"
    spec = RunSpec(workload, precision=precision, steps=3, cadence=Cadence(1, 1, 1))
    writer = RunWriter.create(tmp_path / "s.db", spec)
    loop = drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    assert (len(loop.losses), loop.note) == (3, "")
    with Reader(tmp_path / "s.db") as reader:
        records = reader.shadows(writer.run_id, Role.WEIGHT_GRAD)
    totals = {record.module: record.total for record in records}
    assert totals == {1: 128, 2: 9}  # the 16 rows that were looked up, not 50
    assert all(record.relative_error is not None for record in records)


BROKEN = {
    "weights": (WeightObserver, "count_weights"),
    "gradients": (WeightObserver, "count_gradients"),
    "updates": (WeightObserver, "count_updates"),
    "copies": (WeightObserver, "remember"),
    "tensors": (Accumulator, "_count"),
    "outputs": (HistogramHooks, "_look"),
    "ops": (Flops, "of"),
    "op sets": (OpTrace, "take"),
    "comparisons": (Comparisons, "add"),
    "outputs beside fp32": (Shadow, "_unseen"),
    "shadow": (Shadow, "run_shadow"),
    "norm": (instruments, "gradient_norm"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_instrument_that_fails_never_ends_the_training(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does it change the training, and the run says what is missing."""
    spec = RunSpec("mlp", precision="fp16", steps=3, cadence=Cadence(1, 1, 1))
    expected = drive(spec, prepare(spec, CPU), "rehearsal", None).losses

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    owner, name = BROKEN[what]
    monkeypatch.setattr(owner, name, broken)
    writer = RunWriter.create(tmp_path / "s.db", spec)
    loop = drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    assert loop.losses == expected
    assert "RuntimeError" in loop.note
    with Reader(tmp_path / "s.db") as reader:
        assert [step.loss for step in reader.steps(writer.run_id)] == expected


def test_the_norm_before_a_clip_of_the_workloads_own_step_is_kept_too(tmp_path: Path) -> None:
    clips = CUSTOM_STEP.replace(
        "    scaler.step(optimizer)",
        "    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)\n"
        "    scaler.step(optimizer)",
    )
    (tmp_path / "clips.py").write_text(clips)
    spec = RunSpec(f"{tmp_path / 'clips.py'}:build", precision="fp16", steps=2)
    writer = RunWriter.create(tmp_path / "s.db", spec)
    drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    other = RunSpec(custom(tmp_path), precision="fp16", steps=1)
    plain = RunWriter.create(tmp_path / "s.db", other)
    drive(other, prepare(other, CPU), "rehearsal", plain)
    plain.close()
    with Reader(tmp_path / "s.db") as reader:
        (first, _), (unclipped,) = reader.steps(writer.run_id), reader.steps(plain.run_id)
    assert first.grad_norm == pytest.approx(0.001, rel=1e-3)
    assert first.unclipped_norm == pytest.approx(unclipped.grad_norm, rel=1e-3)
    assert unclipped.unclipped_norm is None


@pytest.mark.parametrize("prepares", [1, 0], ids=["probe", "measurement"])
def test_a_probe_says_what_its_counter_needed_and_a_measurement_has_none(
    monkeypatch: pytest.MonkeyPatch, prepares: int
) -> None:
    """The counter is compiled once the run has its turn on the device, which may be exclusive."""
    order: list[str] = []

    def prepare(device: torch.device) -> str:
        order.append("prepare")
        return "Compiled in 9 s."

    def turn(*args: object) -> nullcontext[None]:
        order.append("turn")
        return nullcontext()

    monkeypatch.setattr(probe, "preload", lambda device: None)
    monkeypatch.setattr("ampscope.capture.exponent_count.prepare", prepare)
    monkeypatch.setattr(child, "turn", turn)
    monkeypatch.setattr(child, "_work", lambda *args: "Not recorded: x.")
    readings = nullcontext(MagicMock(note=""))
    monkeypatch.setattr("ampscope.runner.device.sample_telemetry", lambda *args: readings)
    spec = MagicMock(device="cpu", precisions=(), is_training=bool(prepares))
    monkeypatch.setattr("ampscope.runner.device.describe", lambda *args: MagicMock())
    note = child._run(MagicMock(), spec, Path(), MagicMock())
    assert order == ["turn"] + ["prepare"] * prepares
    assert note == "Compiled in 9 s. Not recorded: x." if prepares else "Not recorded: x."
