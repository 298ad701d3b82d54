"""What a synthetic run records: a tiny two-block model in fp16, by rules simple enough to check.

The loss falls as 2.5 / (1 + step/8) and is not finite in SKIPPED_STEP; the loss scale starts at
2^16 and halves there; histograms are bell curves over exponents round CENTRES, moved by the loss
scale for gradients, with what fp16 cannot hold counted as zero.
"""

from __future__ import annotations

import math

import numpy as np

from ampscope.numerics.histogram import (
    ABOVE,
    EXPONENTS,
    FIRST,
    LOWEST,
    POS_INF,
    POS_ZERO,
    RAW_LEN,
    Raw,
)
from ampscope.records import (
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    ShadowRecord,
    StepRecord,
)
from ampscope.store.writer import RunWriter

INIT_LOG2_SCALE = 16
SKIPPED_STEP = 4  # the one step of every run with more than four that GradScaler leaves out
ELEMENTS = 4096  # in every histogram row
LEAVES = ("ln", "attn.qkv", "attn.proj", "mlp.up", "mlp.down")
CENTRES = {  # exponents round which a role's magnitudes lie, before the loss scale
    Role.ACTIVATION: -1,
    Role.GRAD_OUTPUT: -26,
    Role.WEIGHT: -5,
    Role.WEIGHT_GRAD: -20,
    Role.UPDATE: -14,
}
HALF_ROLES = (Role.ACTIVATION, Role.GRAD_OUTPUT)


def module_paths() -> tuple[str, ...]:
    """Of the two-block model."""
    blocks = [f"h.{b}" for b in range(2)]
    inner = [path for b in blocks for path in (b, *(f"{b}.{leaf}" for leaf in LEAVES))]
    return ("", "wte", *inner, "head")


def is_leaf(path: str) -> bool:
    """Whether the synthetic model computes something there itself."""
    return path not in ("", "h.0", "h.1")


def bell(centre: int, shift: int = 0, elements: int = ELEMENTS) -> Raw:
    """``elements`` magnitudes around 2^centre times 2^shift, as fp16 would hold them."""
    shape = np.exp(-0.5 * ((EXPONENTS[FIRST:ABOVE] - centre - shift) / 3.0) ** 2)
    row = np.zeros(RAW_LEN, np.int64)
    row[FIRST:ABOVE] = np.floor(elements * shape / shape.sum())
    row[FIRST : FIRST - 24 - LOWEST] = 0  # below fp16's smallest subnormal
    row[POS_ZERO] = elements - int(row.sum())
    return row


def loss_at(step: int) -> float:
    """Falls, and is not finite in the skipped step."""
    return math.inf if step == SKIPPED_STEP else 2.5 / (1 + step / 8)


def log2_scale_at(step: int) -> int:
    """2^16, halved by the skip."""
    return INIT_LOG2_SCALE - (step > SKIPPED_STEP)


def module(index: int, path: str) -> ModuleRecord:
    if not is_leaf(path):
        return ModuleRecord(index, path, "Block" if path else "GPT", is_leaf=False)
    kind = "LayerNorm" if path.endswith("ln") else "Linear"
    return ModuleRecord(index, path, kind, "fp32", parameter_count=1024)


def ops(index: int, path: str) -> list[OpRecord]:
    if path.endswith("ln"):
        return [
            OpRecord(index, "forward", "aten.native_layer_norm", "fp32,fp32,fp32", "fp32", 1),
            OpRecord(index, "forward", "aten._to_copy", "fp16", "fp32", 1, is_cast=True),
        ]
    return [
        OpRecord(index, "forward", "aten.addmm", "fp16,fp16,fp16", "fp16", 1, flops=2_097_152),
        OpRecord(index, "forward", "aten._to_copy", "fp32", "fp16", 2, is_cast=True),
        OpRecord(index, "backward", "aten.mm", "fp16,fp16", "fp16", 2, flops=4_194_304),
    ]


def add_step(writer: RunWriter, paths: tuple[str, ...], step: int) -> None:
    skipped = step == SKIPPED_STEP
    log2_scale = log2_scale_at(step)
    leaves = [i for i, path in enumerate(paths) if is_leaf(path)]
    writer.add_step(
        StepRecord(
            step=step,
            loss=loss_at(step),
            scale=2.0**log2_scale,
            growth_counter=0 if skipped else step % 2000,
            skipped=skipped,
            grad_norm=math.inf if skipped else 1.0 / (1 + step),
            lr=1e-3,
            step_time_s=0.02,
            overhead_s=0.002,
            peak_bytes=200 * 2**20,
            moved_share=0.0 if skipped else 0.9,
            op_set=0,
        )
    )
    for role in Role:
        if role is Role.UPDATE and skipped:
            continue
        writer.add_frame(_frame(role, step, leaves, log2_scale))
    if step % 4 == 0:
        writer.add_shadow(_shadow(role, step, i) for role in HALF_ROLES for i in leaves)
    if skipped and leaves:
        last = paths[leaves[-1]]
        writer.add_nonfinite([NonFiniteRecord(step, f"{last}.weight", 0, ELEMENTS, 3, 5, 0)])


def _frame(role: Role, step: int, leaves: list[int], log2_scale: int) -> Frame:
    shift = log2_scale if role.is_gradient else 0
    row = bell(CENTRES[role], shift)
    rows = np.stack([row.copy() for _ in leaves]) if leaves else np.zeros((0, RAW_LEN), np.int64)
    if role.is_gradient and step == SKIPPED_STEP and leaves:
        rows[-1, POS_INF], rows[-1, POS_ZERO] = rows[-1, POS_ZERO], 0
    dtype = "fp16" if role in HALF_ROLES else "fp32"
    scale = 2.0**log2_scale if role.is_gradient else 1.0
    return Frame(step, role, tuple(leaves), (dtype,) * len(leaves), rows, scale)


def _shadow(role: Role, step: int, module: int) -> ShadowRecord:
    lost_count = 12 if role is Role.GRAD_OUTPUT else 0
    return ShadowRecord(step, module, role, ELEMENTS, lost_count, 40, 8, 1e-3, 0.9999, 1.5)
