"""Put a precision mode into effect: autocast, the dtype of the model, and the TF32 switches.

precision = resolve("fp16", "cuda")
convert_model(model, precision)
with precision_context(precision, "cuda"):
    loss = workload.loss(model, batch)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ampscope.errors import BadInput
from ampscope.policy.modes import PRECISIONS, HalfDtype, Precision, resolve

__all__ = [
    "PRECISIONS",
    "Precision",
    "convert_model",
    "precision_context",
    "resolve",
    "torch_dtype",
]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def torch_dtype(name: HalfDtype) -> torch.dtype:
    """The dtype that a mode names."""
    return _DTYPES[name]


def convert_model(model: torch.nn.Module, precision: Precision) -> None:
    """Give the model the weights of the mode, in place; only the pure modes change anything."""
    if precision.model_dtype is not None:
        model.to(torch_dtype(precision.model_dtype))


@contextmanager
def precision_context(precision: Precision, device_type: str) -> Iterator[None]:
    """Autocast and TF32 as the mode wants them, for a forward pass; as they were on exit.

    Raises BadInput where the GPU cannot do what the mode asks.
    """
    _check_hardware(precision, device_type)
    with _tf32_context(precision, device_type), _autocast(precision, device_type):
        yield


def _autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    if precision.autocast_dtype is None:
        # fp32 means fp32 and pure means pure, also where somebody has autocast on around it
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=torch_dtype(precision.autocast_dtype))


def _tf32_context(precision: Precision, device_type: str) -> AbstractContextManager[None]:
    if precision.tf32 is None or device_type != "cuda":
        return nullcontext()
    return tf32_switches(precision.tf32)


@contextmanager
def tf32_switches(allowed: bool) -> Iterator[None]:
    """CUDA's matmuls and convolutions in TF32 or in exact fp32 (cuDNN's default is TF32).

    torch has two generations of these switches and raises where they disagree, so both are set:
    the old ones set the new ones as well, and on exit the new ones get their exact value back
    (their default "none" cannot be said in the old ones).
    """
    matmul: Any = torch.backends.cuda.matmul  # Any: the newer switches have no type hints
    cudnn: Any = torch.backends.cudnn
    before = (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before[0] == "tf32", before[1] == "tf32"
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before


def _check_hardware(precision: Precision, device_type: str) -> None:
    if device_type != "cuda":
        return
    if not torch.cuda.is_available():
        raise BadInput("There is no CUDA device that this torch can use. Choose the device cpu.")
    if precision.tf32 and torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        raise BadInput(
            f"TF32 needs compute capability 8.0 or newer, and this GPU has {major}.{minor}."
            " Choose fp32 instead."
        )
