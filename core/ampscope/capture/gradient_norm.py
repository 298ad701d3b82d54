"""The 2-norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` defines it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.model_map import ModelMap
from ampscope.capture.tensors import floats


def gradient_norm(names: ModelMap) -> float:
    """Over all parameters that have a gradient; 0 without any. One transfer from the device.

    In fp32 whatever the gradients' dtype, because an fp16 norm overflows at 65504. Where fp32 is
    not finite the norm is taken again in fp64: squares of finite fp32 numbers overflow above 2^64.
    """
    held = (p.tensor.grad for p in names.parameters if p.tensor.grad is not None)
    gradients = [values for gradient in held if (values := floats(gradient)) is not None]
    if not gradients:
        return 0.0
    norm = _norm(gradients, torch.float32)
    return norm if math.isfinite(norm) else _norm(gradients, torch.float64)


def _norm(gradients: list[Tensor], dtype: torch.dtype) -> float:
    wide = [g.to(dtype) if g.dtype is torch.float64 else g for g in gradients]
    parts = torch._foreach_norm(wide, 2, dtype)
    device = parts[0].device
    return float(torch.linalg.vector_norm(torch.stack([part.to(device) for part in parts])))
