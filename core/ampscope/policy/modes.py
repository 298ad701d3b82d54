"""The precision modes a run can be made in, as data that the CLI and the pages read without torch.

fp32            everything in fp32, on CUDA without TF32
tf32            fp32 storage, CUDA's matmuls and convolutions in TF32
fp16            fp16 autocast and a GradScaler (what most people mean by AMP)
fp16-noscaler   fp16 autocast, no scaler: small gradients are lost
bf16            bf16 autocast; its exponent range is fp32's, so it needs no scaler
fp16-pure       `model.half()`: weights, gradients and optimizer state in fp16
bf16-pure       the same in bf16
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from ampscope.errors import BadInput

HalfDtype: TypeAlias = Literal["float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Precision:
    """One mode. `autocast_dtype` and `model_dtype` are names of torch dtypes; None is "not used".

    `tf32` says what CUDA's fp32 matmuls and convolutions may do: True TF32, False exact fp32,
    None whatever the process has set.
    """

    name: str
    autocast_dtype: HalfDtype | None
    model_dtype: HalfDtype | None
    scaler: bool
    tf32: bool | None
    summary: str


_MODES: Final = (
    Precision("fp32", None, None, False, False, "everything in fp32"),
    Precision("tf32", None, None, False, True, "fp32, with matmuls in TF32 (CUDA only)"),
    Precision("fp16", "float16", None, True, None, "fp16 autocast with a GradScaler"),
    Precision("fp16-noscaler", "float16", None, False, None, "fp16 autocast without a GradScaler"),
    Precision("bf16", "bfloat16", None, False, None, "bf16 autocast"),
    Precision("fp16-pure", None, "float16", False, None, "the whole model in fp16"),
    Precision("bf16-pure", None, "bfloat16", False, None, "the whole model in bf16"),
)

PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType({mode.name: mode for mode in _MODES})


def resolve(name: str, device_type: str) -> Precision:
    """The mode of that name on that kind of device ("cpu", "cuda").

    Raises BadInput for a name that is not a mode, and for tf32 off CUDA.
    """
    precision = PRECISIONS.get(name)
    if precision is None:
        raise BadInput(f"There is no precision {name!r}. Choose one of: {', '.join(PRECISIONS)}.")
    if precision.tf32 and device_type != "cuda":
        raise BadInput(
            f"Precision tf32 needs a CUDA device, and this run is on {device_type!r}: TF32 is a"
            " mode of NVIDIA Tensor Cores (compute capability 8.0 or newer). Choose fp32 instead."
        )
    return precision
