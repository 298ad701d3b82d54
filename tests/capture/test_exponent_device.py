"""The device counter: plain torch, Triton (its interpreter on a CPU), CUDA where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture import exponent_count
from ampscope.capture.exponent_count import DeviceCounter, count_into
from tests.helpers import exponent_oracle as oracle

CUDA = torch.cuda.is_available()
INTERPRETED = not CUDA and importlib.util.find_spec("triton") is not None
ROOT = Path(__file__).parents[2]
TRITONS = list(filter(None, os.environ.get("AMPSCOPE_TRITONS", "").split(os.pathsep)))
CAPABILITIES = (75, 80, 86, 89, 90, 100)
ONE = 1 + 149
DECODERS = {
    torch.float16: oracle.fp16,
    torch.bfloat16: oracle.bf16,
    torch.float8_e5m2: oracle.e5m2,
    torch.float8_e4m3fn: oracle.e4m3fn,
}

needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no Triton, or a GPU is used")
needs_cuda = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device"))
TRITON, GPU = pytest.param("triton", marks=needs_triton), pytest.param("cuda", marks=needs_cuda)


@pytest.fixture(params=["torch", TRITON, GPU])
def counter(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceCounter]:
    if request.param == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    exponent_count.triton_problem.cache_clear()
    made = DeviceCounter(torch.device("cuda" if request.param == "cuda" else "cpu"))
    assert made._triton == (request.param != "torch")
    yield made
    exponent_count.triton_problem.cache_clear()


def on_cpu(*tensors: Tensor) -> NDArray[np.int64]:
    rows = np.zeros((len(tensors), oracle.ROW_LENGTH), np.int64)
    for row, tensor in zip(rows, tensors, strict=True):
        count_into(tensor, row)
    return rows


def every_pattern(dtype: torch.dtype) -> Tensor:
    bits = torch.arange(256**dtype.itemsize, dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DECODERS, ids=str)
def test_every_bit_pattern(counter: DeviceCounter, dtype: torch.dtype) -> None:
    patterns = every_pattern(dtype)
    # In order each tile has a narrow range of exponents, which rises or falls from tile to tile;
    # shuffled, each has all there is.
    shuffled = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))]
    falling = patterns[torch.arange(len(patterns) - 1, -1, -1)]
    orders = (patterns, falling, shuffled, patterns[1:])  # the last: not aligned
    for row, tensor in enumerate(orders):
        counter.add(tensor.to(counter.device), row, stable=True)
    whole = [DECODERS[dtype](bits) for bits in range(len(patterns))]
    rows = [oracle.row_of(whole)] * 3 + [oracle.row_of(whole[1:])]
    np.testing.assert_array_equal(counter.collect().rows(), rows)


def test_fp32_and_fp64_of_every_magnitude(counter: DeviceCounter) -> None:
    rng = np.random.default_rng(3)
    single = rng.integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32)
    small = rng.integers(0, 1 << 23, 5_000).astype(np.uint32)  # zero and subnormals
    ordinary = rng.normal(size=5_000).astype(np.float32).view(np.uint32)
    double = rng.integers(0, 1 << 63, 5_000, dtype=np.uint64)
    expected = [
        oracle.row_of(oracle.fp32(int(b)) for b in bits) for bits in (single, small, ordinary)
    ]
    expected.append(oracle.row_of(oracle.fp64(int(b)) for b in double))
    for row, bits in enumerate((single, small, ordinary)):
        values = torch.from_numpy(bits.view(np.float32)).to(counter.device)
        counter.add(values, row, stable=True)
    doubles = torch.from_numpy(double.view(np.float64)).to(counter.device)
    counter.add(doubles[:-2].view(2, 3, 7, 7, 17), 3)
    for one in doubles[-2:]:
        counter.add(one, 3)
    np.testing.assert_array_equal(counter.collect().rows(), expected)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_a_dtype_that_no_kernel_counts_in_any_shape(shape: tuple[int, ...]) -> None:
    counter = DeviceCounter(torch.device("cpu"))
    counter._triton = True  # as where a kernel counts the others
    ones = torch.ones(shape, dtype=torch.float64)
    counter.add(ones, 0, stable=True)
    assert counter.collect().rows()[0, ONE] == ones.numel()


def test_every_position_of_the_window(counter: DeviceCounter) -> None:
    """Whole tiles whose largest exponent field is each of fp16's in turn, infinity without a NaN
    among them: above it the kernel looks at 29 fields, below at the rest."""
    rng = np.random.default_rng(4)
    for top in range(32):
        bits = rng.integers(0, max(1, top << 10) + 1, 4096).astype(np.uint16)
        bits[:2] = top << 10, 0x8000 | top << 10
        bits[2::3] |= 0x8000
        counter.add(torch.from_numpy(bits.view(np.float16)).to(counter.device), top, stable=True)
        row = counter.collect().rows()[top]
        np.testing.assert_array_equal(row, oracle.row_of(oracle.fp16(int(b)) for b in bits))


def test_rows_grow_add_up_and_start_anew(counter: DeviceCounter) -> None:
    ones = torch.ones(1000, dtype=torch.bfloat16, device=counter.device)
    counter.add(ones, 0)
    counter.add(ones, 0, stable=True)
    counter.add(ones[:5], 200)  # far past the first allocation
    rows = counter.collect().rows()
    assert rows.shape == (201, oracle.ROW_LENGTH)
    assert (rows[0, ONE], rows[200, ONE], rows.sum()) == (2000, 5, 2005)
    counter.add(ones[:7], 1)
    rows = counter.collect().rows()
    assert (rows.shape[0], rows[1, ONE], rows.sum()) == (2, 7, 7)
    assert counter.collect().rows().shape == (0, oracle.ROW_LENGTH)


def test_views_expansions_and_empty_tensors(counter: DeviceCounter) -> None:
    base = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)).half()
    made = (base.T, base[:, 3:30:2], base[:, :1].expand(40, 700), base[:0], base[1, 1])
    for row, tensor in enumerate(made):
        counter.add(
            tensor.to(counter.device) if row > 2 else _like(tensor, counter), row, stable=True
        )
    np.testing.assert_array_equal(counter.collect().rows(), on_cpu(*made))


def _like(view: Tensor, counter: DeviceCounter) -> Tensor:
    """The same view of the same storage, on the counter's device."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(counter.device)
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())


def test_a_tensor_that_changes_after_add_is_counted_as_it_was(counter: DeviceCounter) -> None:
    values = torch.full((10_000,), -1.0, device=counter.device)
    counter.add(values, 0)
    values.relu_()
    assert counter.collect().rows()[0, ONE] == 10_000


def test_a_tensor_declared_stable_must_be(counter: DeviceCounter) -> None:
    if not counter._triton:
        pytest.skip("plain torch counts at once")
    weight = torch.nn.Parameter(torch.ones(10, 10, device=counter.device).T)
    counter.add(weight, 4, stable=True)
    torch.no_grad()(weight.mul_)(2)
    with pytest.raises(RuntimeError, match=r"rows \[4\] were changed in place"):
        counter.flush()
    counter.add(weight, 0, stable=True)  # and the counter goes on
    assert counter.collect().rows()[0, ONE + 1] == 100


def test_what_is_made_in_inference_mode_is_counted(counter: DeviceCounter) -> None:
    """It has no version, so it cannot wait; nor can the copy of a slice that is made then."""
    weight = torch.randn(40, 50, device=counter.device)
    with torch.inference_mode():
        made = torch.ones(3, device=counter.device), weight[:, 3:30:2]
        for row, tensor in enumerate(made):
            counter.add(tensor, row, stable=True)
        rows = counter.collect().rows()
    np.testing.assert_array_equal(rows, on_cpu(*(tensor.cpu() for tensor in made)))


def test_one_launch_serves_many_tensors(
    counter: DeviceCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counter._triton:
        pytest.skip("plain torch has no launches of its own")
    from ampscope.capture import exponent_cuda

    launches: list[int] = []
    real = exponent_cuda.launch

    def counted(entries: list[exponent_cuda.Counted], counts: Tensor) -> None:
        launches.append(len(entries))
        real(entries, counts)

    monkeypatch.setattr(exponent_cuda, "launch", counted)
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2)
    made = [torch.randn(300 + i).to(kinds[i % 4]) for i in range(12)]
    for row, tensor in enumerate(made):
        counter.add(tensor.to(counter.device), row, stable=True)
    np.testing.assert_array_equal(counter.collect().rows(), on_cpu(*made))
    assert launches == [12]
    monkeypatch.setattr(exponent_count, "PENDING_BYTES", 8_000)
    for _ in range(6):  # 6,000 bytes each: the second and the fourth fill the bound
        counter.add(torch.ones(1500, device=counter.device), 0, stable=True)
    assert launches == [12, 2, 2, 2]


@needs_triton
def test_one_tensor_is_one_launch_without_a_copy_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an activation, which cannot wait for company, nothing travels to the device."""
    from ampscope.capture import exponent_cuda

    launches: list[tuple[int, tuple[object, ...]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: launches.append((grid[0], args))

    pinned: list[Tensor] = []
    monkeypatch.setattr(exponent_cuda, "_count", Kernel())
    monkeypatch.setattr(exponent_count, "triton_problem", lambda device: "")
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    counter = DeviceCounter(torch.device("cpu"))
    made = [torch.ones(size, dtype=torch.bfloat16) for size in (3, 16_384, 100_000)]
    weight = torch.ones(7)
    counter.add(weight, 3, stable=True)
    for row, tensor in enumerate(made):
        counter.add(tensor, row)
    assert not pinned
    assert [programs for programs, _ in launches] == [1, 1, 7]
    for row, (tensor, (_, args)) in enumerate(zip(made, launches, strict=True)):
        assert args[2:5] == (tensor.data_ptr(), tensor.numel(), row)
    counter.add(weight, 4, stable=True)
    counter.flush()  # many: one launch, one table
    assert (len(launches), len(pinned)) == (4, 1)
    assert launches[3][0] == 2


@needs_triton
def test_why_no_launch_works_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampscope.capture import exponent_cuda

    def fails(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    exponent_cuda.problem.cache_clear()
    assert exponent_cuda.problem(torch.device("cpu")) == ""
    exponent_cuda.problem.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(exponent_cuda, "launch", fails)
        why = exponent_cuda.problem(torch.device("cpu"))
    exponent_cuda.problem.cache_clear()
    assert why == "RuntimeError: Failed to find C compiler. Please specify via CC"


@needs_triton
@pytest.mark.parametrize("place", range(6))
def test_every_variant_counts_the_same(
    place: int, counter: DeviceCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counter._triton:
        pytest.skip("plain torch has no variants")
    from ampscope.capture import exponent_cuda

    assert len(exponent_cuda.VARIANTS) == 6
    launch = partial(exponent_cuda.launch, variant=exponent_cuda.VARIANTS[place])
    monkeypatch.setattr(exponent_cuda, "launch", launch)
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(2))
    made = [(values * torch.exp2(-40 * values.sigmoid())).half(), values[:20_000].bfloat16()]
    for row, tensor in enumerate(made):
        counter.add(tensor, row)  # alone
        counter.add(tensor, row, stable=True)  # with others
    np.testing.assert_array_equal(counter.collect().rows(), 2 * on_cpu(*made))


def test_without_triton_plain_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    exponent_count.triton_problem.cache_clear()
    assert exponent_count.triton_problem(torch.device("cpu")) == "Triton is not installed"
    assert not DeviceCounter(torch.device("cpu"))._triton
    exponent_count.triton_problem.cache_clear()


def beside(number: int, command: list[str], tmp_path: Path) -> str:
    """What Python prints with the Triton of a folder that AMPSCOPE_TRITONS names."""
    if number >= len(TRITONS):
        pytest.skip("AMPSCOPE_TRITONS names no such folder")
    paths = os.pathsep.join([TRITONS[number], os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": paths.rstrip(os.pathsep), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("number", [0, 1])
def test_the_kernel_compiles_for_every_card_ahead_of_time(number: int, tmp_path: Path) -> None:
    """With each Triton that a supported torch brings; needs no GPU. Two blocks of 256 threads fit
    the 65,536 registers of a multiprocessor, and from the A100 on hardly any spills."""
    command = ["tests/helpers/triton_compile.py", *map(str, CAPABILITIES)]
    made = [json.loads(line) for line in beside(number, command, tmp_path).splitlines()]
    assert [one["capability"] for one in made] == list(CAPABILITIES)
    for one in made:
        assert one["registers"] <= 128, one
        assert one["spilled_bytes"] <= 16 or one["capability"] < 80, one


@pytest.mark.parametrize("number", [0, 1])
def test_the_kernel_counts_right_in_the_interpreter(number: int, tmp_path: Path) -> None:
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    command = ["-m", "pytest", "-n", "0", "-q", "-rA", "-k", "triton or one_tensor or kept"]
    said = beside(number, [*command, __file__], tmp_path)
    assert "PASSED tests/capture/test_exponent_device.py::test_every_bit_pattern[triton-" in said
    assert "PASSED tests/capture/test_exponent_device.py::test_one_tensor_is_one_launch" in said


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_streams_are_kept_in_order() -> None:
    """Tensors of two streams, freed at once: no count lost or left over."""
    counter, side = DeviceCounter(torch.device("cuda")), torch.cuda.Stream()
    for _ in range(20):
        for row in range(6):
            with torch.cuda.stream(side if row % 2 else torch.cuda.current_stream()):
                counter.add(torch.ones(1 << 20, device="cuda").mul_(2.0**row), row)
        rows = counter.collect().rows()
        assert [rows[row, ONE + row] for row in range(6)] == [1 << 20] * 6
        assert rows.sum() == 6 << 20
