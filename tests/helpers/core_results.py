"""Results of a measured step, made by hand: no measurement, so every number is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampscope.analysis.tensor_core_use import (
    CoreUse,
    core_use,
)
from ampscope.records import (
    Dimension,
    Machine,
    Matmul,
    Operand,
    Padded,
    Place,
    Rate,
    RunSpec,
    State,
    StepMatmuls,
    Timing,
)
from ampscope.store.writer import RunWriter

NOW = 1.76e9
SPEC = RunSpec(workload="gpt", kind="cores", size="small", precision="bf16", steps=1)
H100 = Machine("cuda:0", "NVIDIA H100 80GB HBM3", "cuda", "9.0", "2.13.0", "3.11", "Linux", "test")
CPU = Machine("cpu", "Test CPU", "native", "", "2.13.0", "3.11", "Linux", "test")
TENSOR_CORE_KERNEL = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"


def timing(seconds: float, spread: float = 0.02) -> Timing:
    return Timing(seconds, seconds * (1 - spread / 2), seconds * (1 + spread / 2), 20)


def linear(
    m: int,
    n: int,
    k: int,
    seconds: float,
    control_s: float | None,
    *,
    module: str = "head",
    dtype: str = "bf16",
    kernels: tuple[str, ...] = (TENSOR_CORE_KERNEL,),
    places: tuple[Place, ...] = (),
    padded: tuple[Padded, ...] = (),
) -> Matmul:
    """A forward matmul of a Linear layer."""
    width = 4 if dtype in ("fp32", "tf32") else 2
    return Matmul(
        op="aten.addmm",
        part="",
        dtype=dtype,
        operands=(Operand((m, k), (k, 1), dtype), Operand((k, n), (1, k), dtype)),
        dimensions=(Dimension("m", m), Dimension("n", n), Dimension("k", k)),
        flops=2 * m * n * k,
        moved_bytes=width * (m * k + k * n + m * n),
        places=places or (Place(module, "forward", 1),),
        kernels=kernels,
        measured_at=NOW,
        timing=timing(seconds),
        control=None if control_s is None else timing(control_s),
        padded=padded,
    )


def ceiling(dtype: str, flops_s: float, size: int = 8192) -> Rate:
    flops = 2 * size**3
    return Rate(
        "ceiling", "matmul", dtype, (size,) * 3, flops, 6 * size**2, timing(flops / flops_s), NOW
    )


def copy(bytes_s: float) -> Rate:
    moved = 2**31
    return Rate("copy", "copy", "fp32", (2**28,), 0, moved, timing(moved / bytes_s), NOW)


def step(matmuls: Sequence[Matmul], device: str = "cuda", more_calls: int = 0) -> StepMatmuls:
    return StepMatmuls(
        device=device,
        capability="9.0" if device == "cuda" else "",
        cpu_flags=("AVX512-BF16",) if device == "cpu" else None,
        calls=sum(p.count for p in matmuls) + more_calls,
        flops=sum(p.flops * p.count for p in matmuls),
        distinct=len(matmuls),
        kernel_source="torch.profiler" if device == "cuda" else "oneDNN",
    )


def stored(
    store: Path,
    matmuls: Sequence[Matmul],
    machine: Machine = H100,
    state: State = State.FINISHED,
    message: str = "",
) -> str:
    """A run that measured them; a running one belongs to this process."""
    writer = RunWriter.create(store, SPEC)
    writer.start(machine)
    is_gpu = machine.device != "cpu"
    if matmuls:
        missing = 3 if state is State.RUNNING else 0
        writer.add_result(step(matmuls, "cuda" if is_gpu else "cpu", missing))
        writer.add_result(copy(2.6e12 if is_gpu else 18e9))
        writer.add_result(ceiling("fp32", 50e12 if is_gpu else 90e9))
        writer.add_result(ceiling("bf16", 700e12 if is_gpu else 200e9))
    for matmul in matmuls:
        writer.add_result(matmul)
    writer.flush()
    if state is not State.RUNNING:
        writer.finish(state, message)
    writer.close()
    return writer.run_id


def used(*matmuls: Matmul, device: str = "cuda") -> CoreUse:
    machine = H100 if device == "cuda" else CPU
    whole = step(matmuls, device)
    rates = (copy(2.6e12), ceiling("fp32", 50e12), ceiling("bf16", 700e12))
    found = core_use([whole, *rates, *matmuls], machine)
    assert found is not None
    return found
