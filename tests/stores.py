"""Synthetic stores for the pages' tests: every state a run can be in, written by RunWriter.

The numbers follow from simple rules, so a test can say what a page must show: a tiny two-block
model in fp16, a loss that falls as 2.5 / (1 + step/8), a loss scale that starts at 2^16 and halves
in step SKIPPED_STEP, histograms as bell curves over exponents with what fp16 cannot hold counted
as zero.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from ampscope.exponents import ABOVE, EXPONENTS, FIRST, LOWEST, POS_INF, POS_ZERO, RAW_LEN, Raw
from ampscope.records import (
    Frame,
    Machine,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunSpec,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store.writer import RunWriter

INIT_LOG2_SCALE = 16
SKIPPED_STEP = 4  # the one step of every run with more than four that GradScaler leaves out
ELEMENTS = 4096  # in every histogram row
SPEC = RunSpec(workload="gpt", size="tiny", precision="fp16", steps=12)
MACHINE = Machine(
    device="cpu",
    device_name="Test CPU",
    policy="rehearsal",
    torch="2.13.0",
    python="3.11.0",
    platform="Linux",
    host="test",
)
LEAVES = ("ln", "attn.qkv", "attn.proj", "mlp.up", "mlp.down")
FAILURE = "The loss is not a scalar: it has shape (4,). Reduce it with .mean() or .sum()."
HOSTILE = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "a:red[b] **c** $d$ `e` [f](javascript:window.hacked=1)",
    "{{7*7}} %s \\n &lt;b&gt;",
)


def queued(store: Path, spec: RunSpec = SPEC) -> str:
    """Registered, not started."""
    writer = RunWriter.create(store, spec)
    writer.close()
    return writer.run_id


def running(store: Path, spec: RunSpec = SPEC, steps: int = 6) -> str:
    """Owned by this process, so it counts as alive for 30 s after its last heartbeat."""
    writer = _recorded(store, spec, module_paths(), steps)
    writer.close()
    return writer.run_id


def finished(store: Path, spec: RunSpec = SPEC, paths: tuple[str, ...] | None = None) -> str:
    """All steps recorded."""
    writer = _recorded(store, spec, paths or module_paths(), spec.steps)
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def failed(store: Path, spec: RunSpec = SPEC, steps: int = 3) -> str:
    """Ended with a sentence and the child's own traceback; ``steps`` may be 0."""
    writer = _recorded(store, spec, module_paths() if steps else (), steps)
    trace = 'Traceback (most recent call last):\n  File "loss.py", line 3\nValueError: shape (4,)'
    writer.finish(State.FAILED, FAILURE, trace)
    writer.close()
    return writer.run_id


def cancelled(store: Path, spec: RunSpec = SPEC, steps: int = 3) -> str:
    """Stopped by a person."""
    writer = _recorded(store, spec, module_paths(), steps)
    writer.finish(State.CANCELLED, f"Stopped on request after {steps} steps.")
    writer.close()
    return writer.run_id


def lost(store: Path, spec: RunSpec = SPEC, steps: int = 5) -> str:
    """State running, but the process that wrote it is no more."""
    writer = _recorded(store, spec, module_paths(), steps)
    writer._update(pid_started=-1.0)  # this pid now belongs to another process: ours
    writer.close()
    return writer.run_id


def hostile(store: Path) -> str:
    """Modules and label whose names are HTML, Markdown, Streamlit directives and LaTeX."""
    return finished(store, replace(SPEC, label=HOSTILE[0] + HOSTILE[2]), ("", *HOSTILE))


def long_names(store: Path) -> str:
    """Paths of 130 characters and more that differ in the middle."""
    middle = ("encoder", "decoder", "adapter")
    name = "model.backbone.{}." + ".".join(f"residual_attention_block_{i:02d}" for i in range(4))
    return finished(store, paths=("", *(name.format(m) + ".projection_out" for m in middle)))


def many_modules(store: Path, count: int = 1000, steps: int = 3) -> str:
    """A model of ``count`` modules."""
    return finished(store, replace(SPEC, steps=steps), ("", *(f"l.{i}" for i in range(count - 1))))


def large(store: Path, count: int = 500, steps: int = 1000) -> str:
    """500 modules x 1,000 steps, for benchmarks: takes about a minute to write."""
    return many_modules(store, count, steps)


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


def _recorded(store: Path, spec: RunSpec, paths: tuple[str, ...], steps: int) -> RunWriter:
    writer = RunWriter.create(store, spec)
    writer.start(MACHINE)
    writer.add_modules(_module(i, path) for i, path in enumerate(paths))
    if paths:
        writer.add_ops(0, [op for i, p in enumerate(paths) if is_leaf(p) for op in _ops(i, p)])
    for step in range(steps):
        _add_step(writer, paths, step)
        if step % 50 == 49:
            writer.flush()
    writer.flush()
    return writer


def _module(index: int, path: str) -> ModuleRecord:
    if not is_leaf(path):
        return ModuleRecord(index, path, "Block" if path else "GPT", is_leaf=False)
    kind = "LayerNorm" if path.endswith("ln") else "Linear"
    return ModuleRecord(index, path, kind, "fp32", parameter_count=1024)


def _ops(index: int, path: str) -> list[OpRecord]:
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


def _add_step(writer: RunWriter, paths: tuple[str, ...], step: int) -> None:
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
        writer.add_shadow(_shadow(role, step, i) for role in _HALF_ROLES for i in leaves)
    if skipped and leaves:
        last = paths[leaves[-1]]
        writer.add_nonfinite([NonFiniteRecord(step, f"{last}.weight", 0, ELEMENTS, 3, 5, 0)])


_CENTRES = {
    Role.ACTIVATION: -1,
    Role.GRAD_OUTPUT: -26,
    Role.WEIGHT: -5,
    Role.WEIGHT_GRAD: -20,
    Role.UPDATE: -14,
}
_HALF_ROLES = (Role.ACTIVATION, Role.GRAD_OUTPUT)


def _frame(role: Role, step: int, leaves: list[int], log2_scale: int) -> Frame:
    shift = log2_scale if role.is_gradient else 0
    row = bell(_CENTRES[role], shift)
    rows = np.stack([row.copy() for _ in leaves]) if leaves else np.zeros((0, RAW_LEN), np.int64)
    if role.is_gradient and step == SKIPPED_STEP and leaves:
        rows[-1, POS_INF], rows[-1, POS_ZERO] = rows[-1, POS_ZERO], 0
    dtype = "fp16" if role in _HALF_ROLES else "fp32"
    scale = 2.0**log2_scale if role.is_gradient else 1.0
    return Frame(step, role, tuple(leaves), (dtype,) * len(leaves), rows, scale)


def _shadow(role: Role, step: int, module: int) -> ShadowRecord:
    lost_count = 12 if role is Role.GRAD_OUTPUT else 0
    return ShadowRecord(step, module, role, ELEMENTS, lost_count, 40, 8, 1e-3, 0.9999, 1.5)
