"""A rehearsed step, op by op, against torch's dispatcher for CUDA: all ops of torch's own list.

torch's OpInfo database has a call with samples for each op that it tests. Each is called under fp16
autocast twice: on fake tensors that say they lie on CUDA, so that CUDA's own autocast kernels
decide (as in `test_oracle`), and as a script is rehearsed, on the device that is stood in for. The
result's dtypes and places, and every op below autocast with the dtypes that go in and come out,
must be the same. A fake tensor checks fewer dtypes than a kernel does, so where the rehearsal
raises, the database says whether CUDA has that kernel.
"""

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import types
import unittest
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ampscope.ext.rehearsal.simulated_device import simulated_cuda
from ampscope.policy.device_profiles import PROFILES
from ampscope.runner.half_requests import HalfRequests
from ampscope.runner.probe import arithmetic
from ampscope.runner.script_device import CudaRequests
from ampscope.source_lines import SourceLines
from ampscope.workloads.load import load
from ampscope.workloads.protocol import iterate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is stood in for")

ROOT = Path(__file__).parents[3]
FP16, FP32 = torch.float16, torch.float32
PATTERNS = {"fp32": [FP32], "fp16": [FP16], "fp16 beside fp32": [FP16, FP32]}
# What fake tensors cannot do without a CUDA build, or without values.
NO_ORACLE = (
    "not linked with support for cuda", "not compiled with CUDA", "DataDependentOutput",
    "DynamicOutputShape",
)  # fmt: skip
CAST_INSIDE = "CUDA's kernel reads half and writes fp32, where a CPU casts first"
UNCHECKED = "given two dtypes it raises; a fake tensor lets that pass"
DIFFERENT = {
    **dict.fromkeys(("softmax", "nn.functional.softmin", "log_softmax"), CAST_INSIDE),
    **dict.fromkeys(("_softmax_backward_data",), CAST_INSIDE),
    "nn.functional.multi_head_attention_forward": CAST_INSIDE,
    "nn.functional.rrelu": "a CPU has no such kernel in half: fp32, rounded",
    "tensor_split": "places of the cut on CUDA raise there: a mistake in devices",
}
DIFFERENT_MIXED = dict.fromkeys(
    ("complex", "heaviside", "native_group_norm", "index_copy", "index_add", "index_reduce.mean",
     "index_reduce.prod", "index_reduce.amin", "index_reduce.amax", "put", "grid_sampler_3d",
     "nn.functional.embedding_bag", "linalg.cross"), UNCHECKED,
) | {"normal": "the dtype of its mean, where a fake tensor promotes"}  # fmt: skip


class Trace(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        call = str(func.overloadpacket), dtypes_of((args, kwargs)), dtypes_of(out)
        is_move = call[0] == "aten._to_copy" and call[1] == call[2]
        # Fake tensors are asked for their device by an op.
        if func.namespace != "prim" and not is_move:
            self.seen[call] += 1
        return out


def dtypes_of(values):
    tensors = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
    return tuple(str(t.dtype).removeprefix("torch.") for t in tensors)


@cache
def database():
    """Name -> OpInfo. Their module imports a helper of torch's own tests, which is not needed."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{o.name}.{o.variant_test_name}".rstrip("."): o for o in op_db if FP32 in o.dtypes}


def sample(op, dtypes):
    """The op's first sample, its fp32 tensors in the pattern's dtypes by turns."""
    torch.manual_seed(0)
    first = next(iter(op.sample_inputs("cpu", FP32)))
    turns = Counter()

    def cast(tensor):
        if tensor.dtype is FP32:
            tensor = tensor.to(dtypes[turns[0] % len(dtypes)])
            turns[0] += 1
        return tensor.detach().clone()

    values = first.input, tuple(first.args), dict(first.kwargs)
    return tree_map_only(torch.Tensor, cast, values)


def called(op, values):
    """What came of it (dtype and place of each tensor, or the error), and the ops below."""
    x, args, kwargs = values
    torch.manual_seed(0)
    try:
        with Trace() as trace:
            result = op.op(x, *args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}", Counter()
    tensors = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor)]
    return [(t.dtype, t.device.type) for t in tensors], trace.seen


def on_cuda(op, values):
    if any(t.layout is not torch.strided for t in tree_leaves(values) if torch.is_tensor(t)):
        return NO_ORACLE[0], Counter()
    with FakeTensorMode(), autocast_of_cuda():
        return called(op, tree_map_only(torch.Tensor, fake, values))


def fake(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@contextlib.contextmanager
def autocast_of_cuda():
    """As the oracle has it: torch.autocast("cuda") switches itself off without a GPU."""
    torch.set_autocast_dtype("cuda", FP16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def rehearsal():
    """As a script is rehearsed."""
    lines = SourceLines("/nowhere")
    requests = CudaRequests(lines, redirect=True, requests=HalfRequests(lines))
    with requests.watching(), simulated_cuda(PROFILES["a100"]), arithmetic("rehearsal"):
        yield


def rehearsed(op, values):
    there = tree_map_only(torch.Tensor, lambda t: t.cuda(), values)
    with torch.autocast("cuda"):
        return called(op, there)


def outcomes(ops, dtypes):
    """Of each op: what CUDA's kernels decide, and what the rehearsal does."""
    cuda = {name: on_cuda(op, sample(op, dtypes)) for name, op in ops.items()}
    with rehearsal():
        here = {name: rehearsed(op, sample(op, dtypes)) for name, op in ops.items()}
    return cuda, here


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_ops_of_a_rehearsed_step_are_cudas(pattern, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    warnings.simplefilter("ignore")
    ops = database()
    with ThreadPoolExecutor(1) as thread:  # torch writes the stack down at each seed: a short one
        cuda, here = thread.submit(outcomes, ops, PATTERNS[pattern]).result()
    known = DIFFERENT | (DIFFERENT_MIXED if len(PATTERNS[pattern]) > 1 else {})
    different, compared = {}, 0
    for name, op in ops.items():
        (result, below), (ours, our_below) = cuda[name], here[name]
        if isinstance(result, str) and any(text in result for text in NO_ORACLE):
            continue
        compared += 1
        if isinstance(ours, str):
            if isinstance(result, str) or not {FP16} & op.dtypesIfCUDA:
                continue  # CUDA raises too
            different[name] = f"raises {ours}"
        elif (result, below) != (ours, our_below):
            different[name] = f"{result} {below - our_below}, not {ours} {our_below - below}"
        if "sizes are powers of two" in different.get(name, ""):  # cuFFT's own rule, no fake's
            del different[name]
    assert compared >= 600
    assert {name: text for name, text in different.items() if name not in known} == {}


linked = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fakes need a CUDA build")


@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        "mlp",
        "rnn",
        pytest.param("resnet", marks=linked),
        pytest.param("gpt", marks=linked),
    ],
)
def test_a_forward_pass_of_the_built_in_models_is_cudas(name):
    workload = load(name, size="tiny", seed=0, loss_factor=1.0)
    batch = next(iterate(workload))
    with rehearsal(), torch.autocast("cuda"), torch.no_grad():
        workload.model.requires_grad_(False).cuda()
        there = tree_map_only(torch.Tensor, lambda t: t.cuda(), batch)
        with Trace() as ours:
            workload.loss(workload.model, there)
    with FakeTensorMode(), autocast_of_cuda(), torch.no_grad():
        put_on_fakes(workload.model, requires_grad=False)
        there = tree_map_only(torch.Tensor, fake, batch)
        with Trace() as cudas:
            workload.loss(workload.model, there)
    assert by_decision(ours.seen) == by_decision(cudas.seen)


def put_on_fakes(model, *, requires_grad):
    """Parameters and buffers become fake tensors on CUDA."""
    parameter = partial(nn.Parameter, requires_grad=requires_grad)
    for module in model.modules():
        own = module._parameters, module._buffers
        for held, kind in zip(own, (parameter, lambda t: t), strict=True):
            for key, tensor in held.items():
                held[key] = tensor if tensor is None else kind(fake(tensor))


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
}


def step_of(workload, batch, optimizer, autocast):
    """One training step with a static scale: the ops of forward, backward and the update."""
    update = OPTIMIZERS[optimizer](workload.model.parameters())
    gradients = []
    with Trace() as trace:
        with autocast:
            loss = workload.loss(workload.model, batch)
        (loss * 1024.0).backward()
        gradients += [p.grad for p in workload.model.parameters() if p.grad is not None]
        infinite = torch.zeros((), device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, infinite, torch.full((), 1 / 1024, device="cuda")
        )
        torch.nn.utils.clip_grad_norm_(workload.model.parameters(), 1.0, foreach=False)
        update.step()
    return by_decision(trace.seen)


def step_on_cuda(name, optimizer):
    """By CUDA's own kernels, on fake tensors: in a process that :func:`fakes_learn` has started."""
    workload = load(name, size="tiny", seed=0, loss_factor=1.0)
    batch = next(iterate(workload))
    torch.autograd.set_multithreading_enabled(False)  # no thread for the device that is not there
    with FakeTensorMode():
        put_on_fakes(workload.model, requires_grad=True)
        there = tree_map_only(torch.Tensor, fake, batch)
        return step_of(workload, there, optimizer, autocast_of_cuda())


def as_lists(seen):
    return sorted([*call, count] for call, count in seen.items())


CHILD = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
from tests.ext.rehearsal.test_dispatcher import as_lists, step_on_cuda
print(json.dumps(as_lists(step_on_cuda(*sys.argv[2:]))))
"""


@pytest.fixture(scope="module")
def no_device(tmp_path_factory):
    """The library that lets torch run a backward pass on CUDA without one."""
    if shutil.which("g++") is None or torch.backends.cuda.is_built():
        pytest.skip("needs g++, and a torch without CUDA")
    made = tmp_path_factory.mktemp("library") / "cuda.so"
    own = Path(torch.__file__).parent
    links = [f"-L{own / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{own / 'lib'}"]
    source = ROOT / "tests" / "helpers" / "cuda_without_a_device.cpp"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{own / 'include'}", str(source)]
    subprocess.run([*command, "-o", str(made), *links], check=True)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["lenet", "mlp", "rnn", "resnet", "gpt"])
def test_a_training_step_of_the_built_in_models_is_cudas(name, optimizer, no_device):
    command = [sys.executable, "-c", CHILD, str(no_device), name, optimizer]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    cudas = json.loads(said.stdout.splitlines()[-1])
    workload = load(name, size="tiny", seed=0, loss_factor=1.0)
    batch = next(iterate(workload))
    with rehearsal():
        workload.model.cuda()
        there = tree_map_only(torch.Tensor, lambda t: t.cuda(), batch)
        ours = step_of(workload, there, optimizer, torch.autocast("cuda"))
    assert json.loads(json.dumps(as_lists(ours))) == cudas


def by_decision(seen):
    """Casts made apart, as a CPU makes them; one name for both devices' kernels; no integers."""
    found = Counter()
    for (op, inputs, outputs), count in seen.items():
        if not {"float16", "float32"} & {*inputs, *outputs}:
            continue
        if op == "aten._softmax" and inputs != outputs:
            found["aten._to_copy", inputs, outputs] += count
            inputs = outputs
        if op == "aten._softmax_backward_data" and outputs != inputs[:1]:
            found["aten._to_copy", inputs[:1], outputs] += count
            outputs = inputs[:1]
        if op == "aten.cudnn_batch_norm":  # its last result is cuDNN's own memory
            op, outputs = "aten.native_batch_norm", outputs[:-1]
        found[op, inputs, outputs] += count
    return found
