"""Run one probe from its spec: build the workload, choose device and precision, drive the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from ampscope.capture.exponent_count import count_into
from ampscope.errors import BadInput, Cancelled
from ampscope.exponents import RAW_LEN
from ampscope.formats import dtype_name
from ampscope.policy.custom_lists import custom_lists
from ampscope.policy.list_changes import changes_of
from ampscope.policy.modes import resolve
from ampscope.policy.precision import (
    convert_model,
    forward_autocast,
    step_arithmetic,
    torch_dtype,
)
from ampscope.policy.rehearsal import cuda_autocast_lists
from ampscope.policy.tensor_core import TensorCoreMode
from ampscope.records import RunSpec
from ampscope.run.loop import ProbeLoop
from ampscope.run.scaler import ObservedScaler
from ampscope.run.training import Training
from ampscope.store.writer import RunWriter
from ampscope.workloads.load import load
from ampscope.workloads.protocol import Workload, iterate, move


def prepare(spec: RunSpec, device: torch.device) -> Training:
    """Workload, model, optimizer and scaler of ``spec`` on ``device``.

    Raises BadInput for anything about the workload or the precision that cannot be done.
    """
    precision = resolve(spec.precision, device.type)
    torch.manual_seed(spec.seed)
    workload = load(spec.workload, size=spec.size, seed=spec.seed, loss_factor=spec.loss_factor)
    model = workload.model.to(device=device)
    convert_model(model, precision)
    model_dtype = torch_dtype(precision.model_dtype) if precision.model_dtype else None
    scaler = ObservedScaler(
        device.type,
        enabled=precision.scaler,
        init_scale=spec.scaler.init_scale,
        growth_factor=spec.scaler.growth_factor,
        backoff_factor=spec.scaler.backoff_factor,
        growth_interval=spec.scaler.growth_interval,
    )
    return Training(
        workload=workload,
        model=model,
        optimizer=_optimizer(workload),
        scaler=scaler,
        autocast=partial(forward_autocast, precision, device.type),
        arithmetic=partial(step_arithmetic, precision, device.type),
        device=device,
        compute_format=dtype_name(precision.autocast_dtype or precision.model_dtype or "float32"),
        real_batch=lambda batch: move(batch, device, model_dtype),
        twin_batch=lambda batch: move(batch, device, torch.float32),
    )


def preload(device: torch.device) -> None:
    """Load what the first step would load: 1.1 s of torch._dynamo, which every optimizer imports,
    and 0.4 s of the compiled counter."""
    import torch._dynamo

    if device.type == "cpu":
        count_into(torch.zeros(1), np.zeros(RAW_LEN, np.int64))


@contextlib.contextmanager
def arithmetic(policy: str) -> Iterator[None]:
    """Under the policy ``rehearsal`` a CPU follows CUDA's autocast lists and computes half
    products as Tensor Cores do; under any other the device's own rules apply."""
    if policy != "rehearsal":
        yield
        return
    with cuda_autocast_lists(), TensorCoreMode():
        yield


def drive(
    spec: RunSpec,
    training: Training,
    policy: str,
    writer: RunWriter | None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ProbeLoop:
    """Run the spec's steps. Raises Cancelled when ``is_cancelled()`` turns true between steps."""
    # Ops are sent to the arithmetic step by step, so that the op trace can run them through it.
    rehearses = policy == "rehearsal"
    loop = ProbeLoop(training, spec.cadence, writer, TensorCoreMode() if rehearses else None)
    lists = cuda_autocast_lists() if rehearses else contextlib.nullcontext()
    batches = iterate(training.workload)
    torch.manual_seed(spec.seed)  # the loop starts from the same state however the build went
    changed = custom_lists(changes_of(spec.control), training.device.type)
    with lists, changed, loop.observing():
        for number in range(spec.steps):
            if is_cancelled():
                raise Cancelled(f"Cancelled after {number} steps.")
            loop.step(number, next(batches))
    return loop


def _optimizer(workload: Workload) -> torch.optim.Optimizer:
    try:
        optimizer = workload.optimizer(workload.model.parameters())
    except Exception as error:
        raise BadInput(f"`optimizer` raised {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"`optimizer` returned {type(optimizer).__name__}, not an optimizer.")
    return optimizer
