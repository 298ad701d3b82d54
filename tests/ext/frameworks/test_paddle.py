"""The Paddle adapter, each time in the Python that AMPSCOPE_PADDLE_PYTHON names.

Oracles: torch's own fp16 on the same arrays, NumPy, Paddle's operator statistics, the scaler's
policy (which is itself driven in step with the real one), and trainings that nobody watched.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ampscope.ext.frameworks.networks import network
from ampscope.launcher.launch import launch
from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF
from ampscope.records import Cadence, Role, RunSpec, ScalerSpec, State
from ampscope.scalers.replay import POLICIES, ScalerSettings
from ampscope.store.reader import Reader
from ampscope.store.writer import request_cancel
from tests.helpers.child_runs import wait_until
from tests.helpers.exponent_oracle import row_of
from tests.helpers.paddle_python import checked, needs_paddle, run, started

pytestmark = [needs_paddle, pytest.mark.timeout(900)]
SAME = 0.999


def test_a_linear_layer_rounds_as_torchs_half_precision(tmp_path: Path) -> None:
    """Values from below fp16's smallest to beyond its largest, in weights, inputs and gradients."""
    generator = np.random.default_rng(0)

    def spread(*shape: int) -> NDArray[np.float32]:
        size = 2.0 ** generator.uniform(-8, 8, shape)
        return (generator.normal(size=shape) * size).astype(np.float32)

    x, weight, bias = spread(256, 128), spread(128, 64), spread(64)
    gradient = spread(256, 64) * np.float32(2.0) ** generator.integers(-40, 3, (256, 1))
    gradient = gradient.astype(np.float32)
    np.savez(tmp_path / "linear_in.npz", x=x, weight=weight, bias=bias, gradient=gradient)
    answer = checked("linear", tmp_path)
    assert answer["marks"] == ["fp16"]
    ours = np.load(tmp_path / "linear_out.npz")

    x_, w_, b_ = (torch.from_numpy(a).requires_grad_() for a in (x, weight, bias))
    y = torch.nn.functional.linear(x_.half(), w_.half().T, b_.half())
    y.backward(torch.from_numpy(gradient).half())
    for name, tensor in {"y": y, "x": x_.grad, "w": w_.grad, "b": b_.grad}.items():
        assert tensor is not None
        reference = tensor.detach().float().numpy()
        own = ours[name]
        # Entries at the very edge of fp16's range may fall to either side; everything else is
        # the same bits, and non-finite and zero entries are as many.
        same = (own == reference) | (np.isnan(own) & np.isnan(reference))
        assert same.mean() >= SAME, (name, same.mean())
        for kind in (np.isinf, np.isnan, lambda a: a == 0):
            assert kind(own).sum() == kind(reference).sum(), name
    assert np.isinf(ours["y"]).any()
    assert (ours["x"] == 0).any()


def test_lenets_first_step_is_that_of_the_same_graph_in_torch(tmp_path: Path) -> None:
    """Paddle's plan written out by hand: a convolution in half, its bias added in fp32, all that
    follows in fp32 up to the next product; linear layers whole in half."""
    answer = checked("lenet", tmp_path)
    ours = np.load(tmp_path / "lenet_out.npz")
    chosen = network("lenet", 0)
    images, labels = next(chosen.batches())
    w = {n: torch.from_numpy(v).requires_grad_() for n, v in chosen.weights.items()}
    f = torch.nn.functional
    x = torch.from_numpy(images)
    for name in ("conv1", "conv2"):
        half = f.conv2d(x.half(), w[f"{name}.weight"].half()).float()
        x = f.max_pool2d(torch.relu(half + w[f"{name}.bias"].reshape(1, -1, 1, 1)), 2)
    x = x.flatten(1).half()
    x = torch.relu(f.linear(x, w["fc1.weight"].half(), w["fc1.bias"].half()))
    logits = f.linear(x, w["fc2.weight"].half(), w["fc2.bias"].half()).float()
    loss = f.cross_entropy(logits, torch.from_numpy(labels))
    (loss * 1024.0).backward()
    assert answer["loss"] == pytest.approx(loss.item(), rel=1e-4)
    pairs = {"logits": (ours["logits"], logits.detach().numpy())}
    for name, weight in w.items():
        assert weight.grad is not None
        own, reference = ours[name.replace(".", "_")], weight.grad.numpy()
        pairs[name] = own, reference.T if own.shape != reference.shape else reference
    for name, (own, reference) in pairs.items():
        # One rounding that falls to the other side moves everything after it by a last place.
        error = np.linalg.norm(own - reference) / np.linalg.norm(reference)
        assert error < 3e-3, (name, error)
    assert (pairs["logits"][0] == pairs["logits"][1]).mean() > 0.95


def test_rounding_in_memory_is_torchs(tmp_path: Path) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    special = np.array(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 65504, 65519.9, 65520, 1e-8, 6e-8]
    )
    values = np.concatenate([special.astype(np.float32), bits.view(np.float32)])
    np.savez(tmp_path / "rounding_in.npz", values=values)
    checked("rounding", tmp_path)
    ours = np.load(tmp_path / "rounding_out.npz")
    for half, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        reference = torch.from_numpy(values).to(dtype).float().numpy()
        assert np.array_equal(ours[half], reference, equal_nan=True)


def test_every_op_has_the_name_that_paddle_itself_gives_it(tmp_path: Path) -> None:
    answer = checked("names", tmp_path)
    assert answer["wrong"] == {}
    assert answer["functions"] > 60


def test_the_plan_of_an_fp32_run_is_what_the_emulation_runs(tmp_path: Path) -> None:
    answer = checked("plans", tmp_path)
    for name, found in answer.items():
        assert found["differences"] == [], name  # from Paddle's own statistics
        for level in ("O1", "O2"):
            predicted, ran = found[level]
            assert predicted == ran, (name, level)
    # Facts of Paddle's lists: a convolution's bias is added in fp32 under O1, in half under O2.
    assert "conv1|elementwise_add|fp32|1" in answer["lenet"]["O1"][0]
    assert "conv1|elementwise_add|fp16|1" in answer["lenet"]["O2"][0]
    assert "blocks.0.attn|softmax|fp32|1" in answer["transformer"]["O1"][0]
    assert "blocks.0.attn|softmax|fp16|1" in answer["transformer"]["O2"][0]


def test_a_norms_statistics_are_recorded_in_fp32(tmp_path: Path) -> None:
    ops = {op: (inputs, outputs, count) for op, inputs, outputs, count in
           checked("op_records", tmp_path)["ops"]}  # fmt: skip
    assert ops["paddle.batch_norm"] == ("fp16,fp32,fp32,fp32,fp32", "fp16", 1)
    assert ops["paddle.linear_v2"] == ("fp16,fp16,fp16", "fp16", 1)
    assert ops["paddle.cast"][2] == 3  # input, weight and bias; the norm's input is half already


def test_watching_changes_no_bit_of_an_fp32_training(tmp_path: Path) -> None:
    assert checked("fp32_untouched", tmp_path) == {"lenet": True, "mlp": True, "transformer": True}


def test_no_loss_of_an_earlier_step_stands_for_one_that_is_not_known(tmp_path: Path) -> None:
    answer = checked("losses", tmp_path)
    assert answer["recorded"] == answer["true"]
    assert answer["backwards"] == [1] * 6


def test_everything_is_put_back(tmp_path: Path) -> None:
    answer = checked("put_back", tmp_path)
    assert answer["changed"] > 500
    assert (answer["different"], answer["marks"]) == ([], 0)


@pytest.mark.parametrize("master", [True, False])
def test_o2_weights_are_those_of_a_simulation(tmp_path: Path, master: bool) -> None:
    """SGD by NumPy on the recorded gradients: fp32 masters rounded for the model, or half alone."""
    checked("masters", tmp_path)
    found = np.load(tmp_path / f"masters_{master}.npz")
    weight = found["w"][0]
    assert np.array_equal(weight, weight.astype(np.float16).astype(np.float32))
    for gradient, after in zip(found["g"], found["w"][1:], strict=True):
        assert np.array_equal(gradient, gradient.astype(np.float16).astype(np.float32))
        weight = (weight - np.float32(3e-4) * gradient).astype(np.float32)
        shown = weight.astype(np.float16).astype(np.float32)
        assert np.allclose(after, shown, rtol=0, atol=2**-13)  # an ulp of weights below 1/2
        assert (after == shown).mean() > 0.97
        if not master:
            weight = after


def _probe(folder: Path, spec: RunSpec) -> tuple[Any, dict[str, Any]]:
    info = run(folder / "runs.db", spec, "child")
    with Reader(folder / "runs.db") as reader:
        modules = {m.path: m.index for m in reader.modules(info.id)}
        return info, {
            "steps": list(reader.steps(info.id)),
            "modules": modules,
            "frames": {role: reader.frame(info.id, role, 0) for role in Role},
            "ops": reader.ops(info.id, 0),
        }


def test_a_probe_records_what_numpy_computes(tmp_path: Path) -> None:
    spec = RunSpec(
        workload="mlp", precision="fp16", steps=3, framework="paddle",
        cadence=Cadence(1, 1, 0), scaler=ScalerSpec(init_scale=1024.0),
    )  # fmt: skip
    info, found = _probe(tmp_path, spec)
    machine = info.machine
    assert (machine.framework, machine.arithmetic, machine.scaler) == (
        "paddle",
        "emulated",
        "forced",
    )
    chosen = network("mlp", spec.seed)
    images, labels = next(chosen.batches())
    half = {n: v.astype(np.float16).astype(np.float32) for n, v in chosen.weights.items()}
    x = images.astype(np.float16).astype(np.float32)
    outputs = {}
    for name in ("fc1", "fc2", "fc3"):
        y = x @ half[f"{name}.weight"].T + half[f"{name}.bias"]
        outputs[name] = y.astype(np.float16)
        x = np.maximum(outputs[name], 0).astype(np.float32)
    frame = found["frames"][Role.ACTIVATION]
    for name, output in outputs.items():
        row, index = frame.row_of(found["modules"][name]), found["modules"][name]
        assert frame.dtypes[frame.modules.index(index)] == "fp16"
        difference = np.abs(row - row_of(output.astype(np.float64).ravel())).sum() / 2
        assert difference <= 0.002 * output.size, (name, difference)  # sums in another order
    weights = found["frames"][Role.WEIGHT].row_of(found["modules"]["fc1"])
    own = np.concatenate([chosen.weights["fc1.weight"].ravel(), chosen.weights["fc1.bias"]])
    assert np.array_equal(weights, row_of(own.astype(np.float64)))
    logits = outputs["fc3"].astype(np.float64)
    chances = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = -chances[np.arange(len(labels)), labels].mean()
    assert found["steps"][0].loss == pytest.approx(loss, rel=1e-5)
    assert found["frames"][Role.GRAD_OUTPUT].scale == 1024.0
    # The gradient that comes back to the logits, by NumPy: (softmax - one-hot) * scale / batch.
    expected = (np.exp(chances) - np.eye(10)[labels]) * 1024.0 / len(labels)
    own = found["frames"][Role.GRAD_OUTPUT].row_of(found["modules"]["fc3"])
    reference = row_of(expected.astype(np.float16).astype(np.float64).ravel())
    assert np.abs(own - reference).sum() / 2 <= 0.01 * expected.size


def test_a_device_that_paddle_does_not_see_is_named(tmp_path: Path) -> None:
    """No machine has a hundred GPUs."""
    spec = RunSpec(workload="shared-mlp", framework="paddle", steps=1, device="cuda:99")
    run_id = launch(spec, tmp_path / "runs.db")
    info = wait_until(tmp_path / "runs.db", run_id)
    assert info.state is State.FAILED
    assert "There is no device 'cuda:99': Paddle here sees" in info.message


@pytest.mark.parametrize("loop", ["update", "minimize"])
def test_a_probes_scale_is_the_policys(tmp_path: Path, loop: str) -> None:
    settings = ScalerSpec(init_scale=2.0**30, growth_interval=3)
    spec = RunSpec(
        workload="mlp", precision="fp16", steps=40, framework="paddle", scaler=settings,
        cadence=Cadence(0, 0, 0), args=(f"--loop={loop}",),
    )  # fmt: skip
    _, found = _probe(tmp_path, spec)
    steps = found["steps"]
    assert any(step.skipped for step in steps)
    policy, own = POLICIES["paddle"], ScalerSettings(2.0**30, 3)
    state = policy.start(own)
    for step in steps:
        assert step.scale == state.scale
        assert step.skipped == math.isnan(step.grad_norm)
        state = policy.step(state, step.skipped, own)
        assert step.growth_counter == state.good


def test_a_layer_in_fp32_leaves_the_rest_in_half(tmp_path: Path) -> None:
    emulated, real = ["emulated", "rehearsal"], ["real", "native"]
    assert checked("arithmetics", tmp_path) == {
        "as_is": emulated,
        "fp32": real,
        "fp32_modules:fc1": emulated,
        "lr:0.1;fp32": real,
        "bf16": emulated,
    }


def test_a_cancelled_probe_is_stored_as_cancelled(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    spec = RunSpec(workload="shared-mlp", framework="paddle", steps=100_000, time_limit_s=200.0)
    run_id, child = started(store, spec)
    try:
        with Reader(store) as reader:
            while not reader.run(run_id).steps_done:
                assert child.poll() is None
                time.sleep(0.1)
            request_cancel(store, run_id)
            child.wait(timeout=100)
            info = reader.run(run_id)
    finally:
        child.kill()
    assert (info.state, info.message) == (State.CANCELLED, "Cancelled; the steps before are kept.")
    assert info.steps_done > 0


def test_watch_records_scale_skips_and_sampled_histograms(tmp_path: Path) -> None:
    answer = checked("watch", tmp_path)
    with Reader(tmp_path / "watch.db") as reader:
        info = reader.run(answer["loop"])
        assert (info.spec.kind, info.spec.framework, info.state) == (
            "watch",
            "paddle",
            State.FINISHED,
        )
        steps = list(reader.steps(info.id))
        assert [step.scale for step in steps] == answer["scales"]
        fell = [b < a for a, b in zip(answer["scales"], answer["scales"][1:], strict=False)]
        assert [step.skipped for step in steps[:-1]] == fell
        assert {frame.step for frame in reader.frames(info.id, Role.ACTIVATION)} == set(
            range(0, 30, 5)
        )
        gradients = reader.frame(info.id, Role.WEIGHT_GRAD, 0)
        assert gradients.rows[:, [NAN, POS_INF, NEG_INF]].sum() > 0
        fit = reader.run(answer["fit"])
        losses = [step.loss for step in reader.steps(fit.id)]
        assert (fit.state, len(losses)) == (State.FINISHED, 16)
        assert all(math.isfinite(loss) for loss in losses)


def test_a_watched_fit_that_fails_ends_its_run(tmp_path: Path) -> None:
    answer = checked("watch_ends", tmp_path)
    assert answer.pop("put back")
    words = {
        "step": (State.FAILED, 2, "ValueError", "The training raised ValueError"),
        "callback": (State.FAILED, 6, "KeyError", "outside the training steps"),
    }
    with Reader(tmp_path / "ends.db") as reader:
        for case, (state, steps, error, message) in words.items():
            (run_id,), raised = answer[case]
            info = reader.run(run_id)
            assert (info.state, info.steps_done, raised) == (state, steps, error), case
            assert message in info.message
            assert ("Traceback" in info.traceback) is (case == "step")
        runs, raised = answer["again"]
        assert raised == ""
        for run_id in runs:
            info = reader.run(run_id)
            assert (info.state, info.steps_done) == (State.FINISHED, 6)
            assert [step.step for step in reader.steps(run_id)] == list(range(6))
        assert len(runs) == 2


def test_a_store_that_fills_up_ends_no_training(tmp_path: Path) -> None:
    answer = checked("full_store", tmp_path)
    assert len(set(answer["weights"])) == 1
    bare, full, missing, raising = answer["warned"]
    assert bare == []
    assert "records no more of this training" in full[0]
    assert "not recorded the end of this training" in raising[0]
    for said in (full, raising):
        assert len(said) == 1
        assert "full" in said[0]
    assert len(missing) == 1
    assert "does not record this training" in missing[0]
    assert answer["raised"] == ["", "", "", "KeyError"]
    with Reader(tmp_path / "full.db") as reader:
        info = reader.run(answer["run"])
    assert info.state is State.FAILED
    assert info.steps_done < 60
    assert "The recording ended early" in info.message
