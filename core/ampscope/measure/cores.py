"""Which products of a training step use Tensor Cores (on a CPU: its instructions for half
products): one step is recorded, then each of its products is run alone.

The device's own arithmetic runs, never a rehearsal: this is about speed. The products with most
FLOPs come first, so that a run that is stopped early has measured what matters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampscope.capture.model_map import ModelMap
from ampscope.errors import BadInput, Cancelled
from ampscope.hardware.cpu import read_cpu
from ampscope.measure.kernel_names import KernelProfile
from ampscope.measure.onednn_log import OneDnnLog
from ampscope.measure.product_timing import ceiling, copy_ceiling, measured
from ampscope.measure.script_step import script_step
from ampscope.measure.step_products import Found, RecordedStep, StepTrace
from ampscope.measure.timing import synchronize
from ampscope.records import AS_IS, Rate, RunSpec, StepProducts
from ampscope.run.probe import prepare
from ampscope.run.training import Training, training_step
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import iterate


def measure(
    spec: RunSpec,
    device: torch.device,
    writer: RunWriter,
    is_cancelled: Callable[[], bool],
) -> str:
    """Record, then measure. Raises Cancelled between two products, BadInput for a step that has
    none."""
    torch.manual_seed(spec.seed)
    is_script = spec.control == AS_IS
    step = script_step(spec, device) if is_script else _step(prepare(spec, device))
    found = step.found
    if not found:
        raise BadInput(
            "This step has no matrix product, convolution or attention, so there is nothing that "
            "Tensor Cores could do in it."
        )
    writer.add_result(_whole(found, step.source, device))
    for rate in (copy_ceiling(device), *_ceilings(found, device)):
        writer.add_result(rate)
    writer.flush()
    order = sorted(range(len(found)), key=lambda i: -_flops(found[i]))
    not_alone = 0
    for done, number in enumerate(order):
        if is_cancelled():
            raise Cancelled(f"Cancelled after {done} of {len(order)} products.")
        kernels = step.kernels.get(number, ())
        product = measured(found[number], step.names, kernels, device)
        not_alone += bool(product.note)
        writer.add_result(product)
        writer.flush_if_due()
    writer.flush()
    return f"{not_alone} of {len(order)} products could not be run alone." if not_alone else ""


def _step(training: Training) -> RecordedStep:
    """One step of a workload; on CUDA the second one."""
    model_map = ModelMap(training.model)
    batches = iterate(training.workload)
    kernels: KernelProfile | OneDnnLog
    if training.device.type == "cuda":
        # A first step chooses algorithms and loads kernels; its kernels are not those of training.
        training_step(training, training.real_batch(next(batches)))
        synchronize(training.device)
        kernels = KernelProfile()
    else:
        kernels = OneDnnLog()
    batch = training.real_batch(next(batches))
    with kernels, StepTrace(model_map, kernels) as trace:
        training_step(training, batch)
        synchronize(training.device)
    names = {record.index: record.path for record in model_map.records()}
    return RecordedStep(names, trace.found, kernels.kernels, kernels.source)


def _whole(found: list[Found], source: str, device: torch.device) -> StepProducts:
    # torch calls AMD's GPUs "cuda" too, with a capability that means something else there.
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    capability = ""
    if kind == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return StepProducts(
        device=kind,
        capability=capability,
        cpu_flags=read_cpu().flags if device.type == "cpu" else None,
        calls=sum(sum(one.places.values()) for one in found),
        flops=sum(map(_flops, found)),
        distinct=len(found),
        kernel_source=source,
    )


def _ceilings(found: list[Found], device: torch.device) -> list[Rate]:
    """Of every dtype in the step, and of fp32, which the controls are computed in."""
    dtypes = dict.fromkeys(["fp32", *(one.dtype for one in found)])
    return [rate for dtype in dtypes if (rate := ceiling(dtype, device)) is not None]


def _flops(one: Found) -> int:
    """Of all its calls in the step."""
    return one.flops * sum(one.places.values())
