"""The precision modes: their names, what they refuse, what they switch, and switch back."""

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from ampscope.capture.model_map import ModelMap
from ampscope.capture.shadow import Shadow
from ampscope.errors import BadInput
from ampscope.measure.training_steps import timed_step
from ampscope.policy import precision as precision_room
from ampscope.policy.autocast_lists import PRECISIONS, resolve
from ampscope.policy.precision import (
    convert_model,
    forward_autocast,
    step_arithmetic,
    tf32_switches,
)
from ampscope.records import Cadence, RunSpec
from ampscope.runner.controls import applied
from ampscope.runner.probe import ProbeLoop, prepare
from ampscope.workloads.protocol import iterate
from tests.helpers.tf32 import flags, stays_fp32, tf32_state


@contextlib.contextmanager
def precision_context(precision, device_type):
    """A mode around a forward pass alone."""
    with step_arithmetic(precision, device_type), forward_autocast(precision, device_type):
        yield


HALF = {"fp16": torch.float16, "fp16-noscaler": torch.float16, "bf16": torch.bfloat16}
PURE = {"fp16-pure": torch.float16, "bf16-pure": torch.bfloat16}


def test_modes_are_the_seven_of_the_documentation():
    names = ["fp32", "tf32", "fp16", "fp16-noscaler", "bf16", "fp16-pure", "bf16-pure"]
    assert list(PRECISIONS) == names
    assert [name for name, mode in PRECISIONS.items() if mode.scaler] == ["fp16"]


def test_modes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRECISIONS["fp16"].scaler = False


def test_unknown_mode_lists_the_known_ones():
    with pytest.raises(BadInput, match=r"no precision 'fp8'.*fp32, tf32, fp16"):
        resolve("fp8", "cpu")


def test_tf32_off_cuda_is_refused_with_the_reason():
    with pytest.raises(BadInput, match=r"needs a CUDA device.*'cpu'.*Choose fp32"):
        resolve("tf32", "cpu")
    assert resolve("tf32", "cuda").tf32 is True


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "tf32"])
def test_matmul_runs_in_the_dtype_of_the_mode(name):
    precision = resolve(name, "cpu")
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    convert_model(model, precision)
    with precision_context(precision, "cpu"):
        output = model(x.to(model.weight.dtype))
    assert output.dtype is (HALF | PURE).get(name, torch.float32)
    assert model.weight.dtype is PURE.get(name, torch.float32)
    assert not torch.is_autocast_enabled("cpu")


def test_mode_without_autocast_switches_an_outer_one_off():
    with torch.autocast("cpu", torch.float16):
        with precision_context(PRECISIONS["fp32"], "cpu"):
            assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float32
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float16


def test_context_restores_autocast_after_an_error():
    with pytest.raises(ZeroDivisionError), precision_context(PRECISIONS["fp16"], "cpu"):
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


# The switches are plain settings, so they can be tested without a GPU.
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("matmul_before", ["none", "tf32", "ieee"])
def test_tf32_switches_are_set_and_put_back(allowed, matmul_before):
    untouched = tf32_state()
    torch.backends.cuda.matmul.allow_tf32 = matmul_before == "tf32"
    torch.backends.cuda.matmul.fp32_precision = matmul_before
    before = tf32_state()
    with tf32_switches(allowed):
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    assert tf32_state() == before
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "none"
    assert tf32_state() == untouched


def test_cpu_run_leaves_the_tf32_switches_alone():
    before = tf32_state()
    with precision_context(PRECISIONS["fp32"], "cpu"):
        assert tf32_state() == before


def flags_of_a_step(monkeypatch, name, step):
    """Where each phase of one step finds TF32's switches; the step as it would be on CUDA."""
    monkeypatch.setattr(precision_room, "_check_hardware", lambda *_: None)
    training = prepare(RunSpec(workload="mlp", precision="fp32"), torch.device("cpu"))
    training.arithmetic = partial(step_arithmetic, PRECISIONS[name], "cuda")
    seen = {}
    linear = next(m for m in training.model.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(lambda *_: seen.update(forward=flags()))
    linear.weight.register_hook(lambda _: seen.update(backward=flags()))
    training.optimizer.register_step_pre_hook(lambda *_: seen.update(optimizer=flags()))
    step(training, next(iterate(training.workload)))
    return seen


STEPS_OF = {
    "probe": lambda training, batch: ProbeLoop(training, Cadence(), None).step(0, batch),
    "measured phases": timed_step,
}


@pytest.mark.parametrize("step", STEPS_OF)
@pytest.mark.parametrize(("name", "expected"), [
    ("fp32", (False, False, {"ieee"})), ("tf32", (True, True, {"tf32"})),
])  # fmt: skip
def test_backward_and_optimizer_compute_as_the_forward_pass(monkeypatch, step, name, expected):
    before = tf32_state()
    seen = flags_of_a_step(monkeypatch, name, STEPS_OF[step])
    assert seen == dict.fromkeys(("forward", "backward", "optimizer"), expected)
    assert tf32_state() == before


def test_a_step_of_the_workloads_own_computes_as_the_mode_says(monkeypatch):
    def own(training, batch):
        def step(model, batch, optimizer, scaler, autocast):
            with autocast():
                loss = training.workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        training.workload = dataclasses.replace(training.workload, step=step)
        timed_step(training, batch)

    seen = flags_of_a_step(monkeypatch, "fp32", own)
    assert set(map(str, seen.values())) == {str((False, False, {"ieee"}))}


def test_the_shadow_computes_without_tf32():
    model = nn.Linear(4, 1)
    seen = []

    def loss(shadow_model):
        output = shadow_model(torch.ones(2, 4))
        output.register_hook(lambda _: seen.append(flags()))
        seen.append(flags())
        return output.sum()

    Shadow(ModelMap(model), 0, 1.0).run_shadow(loss)
    assert seen == [(False, False, {"ieee"})] * 2


def test_the_fp32_control_is_fp32_whatever_the_script_asks_for():
    stays_fp32(lambda: applied("fp32"))


@pytest.mark.parametrize("before", ["none", "tf32"])
def test_a_general_switch_does_not_reach_into_exact_fp32(before):
    torch.backends.fp32_precision = before
    try:
        with tf32_switches(False):
            assert flags() == (False, False, {"ieee"})
        assert torch.backends.cuda.matmul.fp32_precision == before
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with (
        pytest.raises(BadInput, match="no CUDA device"),
        precision_context(PRECISIONS["fp16"], "cuda"),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp32_on_cuda_is_exact_fp32():
    x = torch.full((64, 64), 1 + 2.0**-12, device="cuda")  # TF32 keeps 10 bits and drops 2^-12
    with precision_context(resolve("fp32", "cuda"), "cuda"):
        assert (x @ torch.eye(64, device="cuda")).equal(x)
