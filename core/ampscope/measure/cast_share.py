"""How much of a step's op time goes into casts between floating-point formats, by torch.profiler.

The profiler slows the step down, most of all small ops, so its step is not one of those timed; the
share is that of the profiled step.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from ampscope.measure.timing import synchronize
from ampscope.run.training import Training, training_step
from ampscope.workloads.protocol import Batch

DeviceType = torch._C._autograd.DeviceType
CAST = "aten::_to_copy"  # every .to(dtype), autocast's own included


def cast_share(training: Training, batch: Batch) -> float | None:
    """0 … 1 of a step's time in ops; None where the profiler saw none."""
    is_cuda = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as seen:
        training_step(training, batch)
        synchronize(training.device)
    total = casts = 0.0
    for row in seen.key_averages():
        if row.device_type != DeviceType.CPU:
            continue  # a kernel's own row: the row of its op has that time as well
        own = row.self_device_time_total if is_cuda else row.self_cpu_time_total
        total += own
        if row.key == CAST:
            casts = row.device_time_total if is_cuda else row.cpu_time_total
    return min(casts / total, 1.0) if total else None
