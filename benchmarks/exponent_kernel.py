"""What one exponent histogram costs, beside the nearest ready-made functions, as JSON.

    python benchmarks/exponent_kernel.py            # CPU: results/exponent_kernel_cpu.json
    python benchmarks/exponent_kernel.py --cuda     # GPU: results/exponent_kernel_cuda.json

On a CPU each timed call follows an untimed one of the same function: caches are warm and threads
awake. "Cold" follows an operation on 128 MiB of other memory; a training step lies in between.
The others count less: `bincount` of the shifted bits leaves subnormals, infinities and NaNs in one
bin each, `histc` sorts values into 64 linear bins. On a GPU the measure is the share of the
bandwidth at which the same memory can be copied, caches cold.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from contest import interleaved, quartiles_ns, setting
from torch import Tensor

from ampscope.capture import exponent_torch
from ampscope.capture.exponent_count import DeviceCounter, count_into
from ampscope.numerics.histogram import RAW_LEN

RESULTS = Path(__file__).parent / "results"
MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
KINDS = ("gaussian", "relu", "gradient", "equal")
SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
GOALS_NS = {torch.float16: 0.4, torch.bfloat16: 0.4, torch.float32: 0.8}  # from 2^20 elements on
# What a model may have in a step: 12 blocks of 16 tensors, the largest 2^24 elements.
MODEL = tuple(1 << (9 + index) for index in range(16)) * 12
GPU_SHAPES = {"192 tensors": MODEL, "one tensor": (1 << 28,)}
VARIANT = "variant"
GPU_GOAL = 0.6  # share of copy bandwidth
# Plain torch takes some 20 launches a block of a tensor, with atomics on few addresses: in more
# rounds, or on larger tensors, it alone would take minutes.
PLAIN_ROUNDS, PLAIN_KINDS, PLAIN_LARGEST = 3, ("gaussian", "gradient"), 1 << 24

Line = dict[str, object]


def make(kind: str, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """``gradient`` spreads over 30 powers of two, a fifth of it subnormal or zero in fp16."""
    generator = torch.Generator(device).manual_seed(size)
    values = torch.randn(size, generator=generator, device=device)
    if kind == "relu":
        values = values.relu()
    elif kind == "gradient":
        values *= torch.exp2(-30 * torch.rand(size, generator=generator, device=device))
    elif kind == "equal":
        values.fill_(1)
    return values.to(dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_cpu(rounds: int) -> list[Line]:
    other, lines = torch.zeros(128 << 20, dtype=torch.uint8), []
    for size, dtype, kind in product(SIZES, MANTISSA, KINDS):
        contestants = cpu_contestants(make(kind, size, dtype, "cpu"))
        before = {**contestants, "ampscope, cold": partial(other.add_, 1)}
        times = interleaved(contestants, rounds, before=before)
        cost = {name: quartiles_ns(seconds, size) for name, seconds in times.items()}
        lines.append({"size": size, "dtype": short(dtype), "kind": kind, "ns_per_element": cost})
        print(size, short(dtype), kind, {name: median for name, (_, median, _) in cost.items()})
    return lines


def cpu_contestants(tensor: Tensor) -> dict[str, Callable[[], object]]:
    row = np.zeros(RAW_LEN, np.int64)
    view = torch.int32 if tensor.dtype is torch.float32 else torch.int16
    shift, mask = MANTISSA[tensor.dtype], (1 << (8 * tensor.element_size() - 1)) - 1
    array = tensor.view(view).numpy()
    return {
        "ampscope": lambda: count_into(tensor, row),
        "ampscope, cold": lambda: count_into(tensor, row),
        "ampscope, plain torch": lambda: exponent_torch.count_flat(tensor),
        "torch.bincount": lambda: torch.bincount((tensor.view(view) & mask) >> shift),
        "np.bincount": lambda: np.bincount((array & mask) >> shift),
        "torch.histc": lambda: torch.histc(tensor.float(), bins=64, min=-8, max=8),
    }


def verdicts_cpu(lines: list[Line]) -> list[Line]:
    """Medians from 2^20 elements on against the goals."""
    verdicts: list[Line] = []
    for dtype, goal in GOALS_NS.items():
        medians = {
            f"{line['size']} {line['kind']}": line["ns_per_element"]["ampscope"][1]  # type: ignore[index]
            for line in lines
            if line["dtype"] == short(dtype) and int(str(line["size"])) >= 1 << 20
        }
        worst = max(medians, key=lambda case: medians[case])
        verdicts.append({"dtype": short(dtype), "goal_ns": goal, "met": medians[worst] <= goal,
                         "worst_median_ns": medians[worst], "worst_case": worst,
                         "best_median_ns": min(medians.values())})  # fmt: skip
    return verdicts


def measure_cuda(asked: argparse.Namespace) -> list[Line]:
    rounds, largest = asked.rounds, asked.largest
    cache = torch.empty(min(256 << 20, largest), dtype=torch.uint8, device="cuda")  # beyond any L2
    lines: list[Line] = []
    dtypes = [dtype for dtype in MANTISSA if short(dtype) in asked.dtypes]
    for (shape, full), dtype, kind in product(GPU_SHAPES.items(), dtypes, asked.kinds):
        sizes = [min(size, largest) for size in full]
        tensors, elements = [make(kind, size, dtype, "cuda") for size in sizes], sum(sizes)
        counter = DeviceCounter(torch.device("cuda"))
        source = torch.empty(elements, dtype=dtype, device="cuda")
        contestants = {
            "copy": partial(torch.empty_like(source).copy_, source),
            "launch a tensor": partial(count_all, counter, tensors, stable=False),
            "launch for many": partial(count_all, counter, tensors, stable=True),
            "torch.histc": partial(for_each, linear_histogram, tensors),
            **variants(counter, tensors),
        }
        times = interleaved(contestants, rounds, partial(gpu_seconds, cache))
        step = interleaved({"step": partial(whole_step, counter, tensors)}, rounds)["step"]
        if kind in PLAIN_KINDS:
            own = [tensor[:PLAIN_LARGEST] for tensor in tensors]
            counted = {"plain torch": partial(for_each, exponent_torch.count_flat, own)}
            clock = partial(gpu_seconds, cache)
            scale = elements / sum(tensor.numel() for tensor in own)  # to as many elements
            times |= {name: [scale * one for one in seconds] for name, seconds in
                      interleaved(counted, min(rounds, PLAIN_ROUNDS), clock).items()}  # fmt: skip
        medians = {name: float(np.median(seconds)) for name, seconds in times.items()}
        share = medians["copy"] / medians["launch for many"] / 2  # a copy reads and writes
        lines.append({
            "tensors": shape, "dtype": short(dtype), "kind": kind, "triton": counter._triton,
            "copy_gb_per_s": round(2e-9 * elements * dtype.itemsize / medians["copy"], 1),
            "share_of_copy_bandwidth": round(share, 3), "met": share >= GPU_GOAL,
            "share_by_variant": {
                name: round(medians["copy"] / median / 2, 3) for name, median in medians.items()
                if name == "launch for many" or name.startswith(VARIANT)
            },
            "ns_per_element": {n: quartiles_ns(s, elements) for n, s in times.items()},
            "step_with_transfer_ms": round(float(np.median(step)) * 1e3, 3),
        })  # fmt: skip
        print(lines[-1])
    return lines


def gpu_seconds(cache: Tensor, function: Callable[[], object]) -> float:
    """Seconds that the GPU spends on ``function``, from a cold cache. Clearing the cache also keeps
    the GPU busy while the host queues the launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(100):
        cache.zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def count_all(counter: DeviceCounter, tensors: list[Tensor], stable: bool) -> None:
    for row, tensor in enumerate(tensors):
        counter.add(tensor, row, stable=stable)
    counter.flush()


def variants(counter: DeviceCounter, tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The kernel in each way to compile it that is kept, by what it is compiled with; none where
    Triton does not work."""
    if not counter._triton:
        return {}
    from ampscope.capture import exponent_cuda

    entries = [exponent_cuda.Counted(tensor, 0, 1) for tensor in tensors]
    counts = torch.zeros(1, RAW_LEN, dtype=torch.int64, device="cuda")
    return {
        f"{VARIANT} {' '.join(f'{k}={v}' for k, v in variant._asdict().items())}":
            partial(exponent_cuda.launch, entries, counts, variant)
        for variant in exponent_cuda.VARIANTS
    }  # fmt: skip


def whole_step(counter: DeviceCounter, tensors: list[Tensor]) -> None:
    count_all(counter, tensors, stable=True)
    counter.collect().rows()


def for_each(function: Callable[[Tensor], object], tensors: list[Tensor]) -> None:
    for tensor in tensors:
        function(tensor)


def linear_histogram(tensor: Tensor) -> Tensor:
    return torch.histc(tensor.float(), bins=64, min=-8, max=8)


def names(text: str) -> list[str]:
    """Those between commas."""
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description="Price one exponent histogram.")
    parser.add_argument("--cuda", action="store_true", help="measure the GPU instead of the CPU")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--largest", type=int, default=1 << 28, help="elements of a GPU's tensors")
    parser.add_argument("--dtypes", type=names, default=[*map(short, MANTISSA)], help="of a GPU's")
    parser.add_argument("--kinds", type=names, default=KINDS, help="of a GPU's tensors")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.cuda and not torch.cuda.is_available():
        parser.error("--cuda: torch sees no CUDA device here")
    started, report = time.perf_counter(), {"setting": setting(), "rounds": arguments.rounds}
    lines = measure_cuda(arguments) if arguments.cuda else measure_cpu(arguments.rounds)
    report["load_average_after"] = round(os.getloadavg()[0], 2)
    report["elapsed_s"] = round(time.perf_counter() - started, 1)
    report["verdicts"] = (
        {"goal": GPU_GOAL, "met": sum(bool(line["met"]) for line in lines), "of": len(lines)}
        if arguments.cuda
        else verdicts_cpu(lines)
    )
    path = (
        arguments.output or RESULTS / f"exponent_kernel_{'cuda' if arguments.cuda else 'cpu'}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, "results": lines}, indent=1) + "\n")
    print(path, report["verdicts"])


if __name__ == "__main__":
    main()
