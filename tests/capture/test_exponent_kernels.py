"""Every counter against a loop over `math.frexp`, on every bit pattern that a loop can visit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture import exponent_count, exponent_cpu, exponent_torch
from ampscope.capture.accumulator import Accumulator
from ampscope.capture.exponent_count import count_into
from ampscope.capture.exponent_layout import COPY_ELEMENTS, pieces
from ampscope.records import Role
from tests.helpers import exponent_oracle as oracle

Row = NDArray[np.int64]


def by_entry(tensor: Tensor) -> Row:
    """By the public entry: numba, or plain torch for the rarer dtypes."""
    row = np.zeros(oracle.ROW_LENGTH, np.int64)
    count_into(tensor, row)
    return row


def by_torch(tensor: Tensor) -> Row:
    row: Row = exponent_torch.count_flat(tensor.reshape(-1)).numpy()
    return row


@pytest.fixture(params=[by_entry, by_torch], ids=["entry", "torch"])
def count(request: pytest.FixtureRequest) -> Callable[[Tensor], Row]:
    counter: Callable[[Tensor], Row] = request.param
    return counter


def from_bits(bits: NDArray[np.generic] | list[int], dtype: torch.dtype) -> Tensor:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    return torch.from_numpy(np.array(bits, unsigned).view(signed)).view(dtype)


SMALL = {
    torch.float16: oracle.fp16,
    torch.bfloat16: oracle.bf16,
    torch.float8_e5m2: oracle.e5m2,
    torch.float8_e4m3fn: oracle.e4m3fn,
    torch.float8_e5m2fnuz: oracle.e5m2fnuz,
    torch.float8_e4m3fnuz: oracle.e4m3fnuz,
    torch.float8_e8m0fnu: oracle.e8m0fnu,
}


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_bit_pattern(dtype: torch.dtype, count: Callable[[Tensor], Row]) -> None:
    patterns = np.arange(256**dtype.itemsize)
    expected = oracle.row_of(SMALL[dtype](int(b)) for b in patterns)
    # In order, whole cache-sized chunks hold ordinary numbers only; shuffled, none does.
    for order in (patterns, np.random.default_rng(0).permutation(patterns)):
        np.testing.assert_array_equal(count(from_bits(order, dtype)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern_alone(dtype: torch.dtype) -> None:
    """Each pattern by itself lands in its own bin: errors that cancel in a sum do not pass."""
    for start in range(0, 1 << 16, 257):  # every 257th: all fields, many mantissas
        assert by_entry(from_bits([start], dtype))[oracle.bin_of(SMALL[dtype](start))] == 1


def fp32_boundaries() -> Iterator[int]:
    for sign in (0, 1 << 31):
        for field in range(256):  # 2^e and its neighbours; +-0 and +-Inf with theirs
            yield from (sign | max(0, (field << 23) + step) for step in (-1, 0, 1))
        for bit in range(23):  # each power of two of the subnormals and its neighbours
            yield from (sign | max(0, (1 << bit) + step) for step in (-1, 0, 1))
        yield from (sign | nan for nan in (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FA00000))


def test_fp32_boundaries_and_random_bits(count: Callable[[Tensor], Row]) -> None:
    random = np.random.default_rng(1).integers(0, 1 << 32, 60_000, dtype=np.uint64)
    for bits in (list(fp32_boundaries()), random.tolist()):
        expected = oracle.row_of(oracle.fp32(b) for b in bits)
        np.testing.assert_array_equal(count(from_bits(bits, torch.float32)), expected)


ODD_ONES = {
    torch.float16: [0x8000, 0x0001, 0x83FF, 0x0400, 0x7C00, 0xFC00, 0x7E01, 0xFBFF],
    # 2^-45 and 2^17 with their neighbours are the ends of what the kernel counts in pairs.
    torch.bfloat16: [0x8000, 0x0001, 0x807F, 0x28FF, 0x2900, 0x487F, 0x4880, 0x7F80, 0xFF80,
                     0x7FC1],
    torch.float32: [0x80000000, 0x00000001, 0x28FFFFFF, 0x29000000, 0x487FFFFF, 0x48800000,
                    0x7F800000, 0xFF800000, 0x7FC00001],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ODD_ONES, ids=str)
def test_one_odd_number_among_ordinary_ones(dtype: torch.dtype) -> None:
    """Whatever way the kernel takes for a chunk, one number that does not fit is counted."""
    value = {torch.float16: oracle.fp16, torch.bfloat16: oracle.bf16, torch.float32: oracle.fp32}
    ordinary = torch.linspace(-3, 3, 5 * 8192 + 1).to(dtype)  # an odd length, some chunks
    bits = ordinary.view(torch.int32 if dtype.itemsize == 4 else torch.int16).numpy()
    expected = oracle.row_of(ordinary.tolist())
    for pattern in ODD_ONES[dtype]:
        for place in (0, 8191, 8192, 20_480, bits.size - 1):
            tensor = from_bits(bits.view(f"u{dtype.itemsize}").copy(), dtype)
            row = expected.copy()
            row[oracle.bin_of(float(ordinary[place]))] -= 1
            row[oracle.bin_of(value[dtype](pattern))] += 1
            tensor[place] = from_bits([pattern], dtype)[0]
            np.testing.assert_array_equal(by_entry(tensor), row, f"{pattern:#x} at {place}")


def test_fp64_beyond_the_range_of_fp32(count: Callable[[Tensor], Row]) -> None:
    fields = [*range(1023 - 152, 1023 - 147), *range(1023 + 126, 1023 + 131), 0, 1, 2046, 2047]
    bits = [s | max(0, (f << 52) + d) for s in (0, 1 << 63) for f in fields for d in (-1, 0, 1)]
    bits += np.random.default_rng(2).integers(0, 1 << 63, 20_000, dtype=np.uint64).tolist()
    expected = oracle.row_of(oracle.fp64(b) for b in bits)
    assert min(expected[0], expected[278]) > 0
    np.testing.assert_array_equal(count(from_bits(bits, torch.float64)), expected)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 8191, 8192, 8193, 3 * 8192 + 5])
def test_sizes_around_the_kernels_blocks(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    values[size // 2 :: 97] = np.inf  # some chunks ordinary, some not
    np.testing.assert_array_equal(by_entry(torch.from_numpy(values)), oracle.row_of(values))


def test_flush_to_zero_mode_changes_nothing() -> None:
    values = from_bits(list(range(1, 1 << 23, 4099)), torch.float32)
    expected = by_entry(values)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        np.testing.assert_array_equal(by_entry(values), expected)
        np.testing.assert_array_equal(by_torch(values), expected)
    finally:
        torch.set_flush_denormal(False)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A tensor seen through permutations, slices, expansions and overlapping windows."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    exponents = torch.randint(-30, 15, shape, generator=generator).double()
    tensor = (torch.randn(shape, generator=generator).double() * 2**exponents).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, tensor.dim() - 1))
        kind = draw(st.sampled_from(["permute", "slice", "expand", "unfold", "unsqueeze"]))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "slice":
            step = draw(st.integers(1, 3))
            start = draw(st.integers(0, tensor.shape[axis]))
            tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
        elif kind == "expand":
            tensor = tensor.unsqueeze(axis)
            tensor = tensor.expand(*tensor.shape[:axis], 3, *tensor.shape[axis + 1 :])
        elif kind == "unfold" and tensor.shape[axis] >= 2:
            tensor = tensor.unfold(axis, 2, 1)
        else:
            tensor = tensor.unsqueeze(axis)
    return tensor


@settings(max_examples=300)
@given(views())
def test_strided_views_count_every_element_as_often_as_it_occurs(tensor: Tensor) -> None:
    expected = oracle.row_of(tensor.double().reshape(-1).tolist())
    np.testing.assert_array_equal(by_entry(tensor), expected)


def test_rows_add_up_and_bad_rows_are_refused() -> None:
    row = np.zeros(oracle.ROW_LENGTH, np.int64)
    for _ in range(3):
        count_into(torch.ones(5), row)
    assert row[1 + 149] == row.sum() == 15
    for bad in (row[:-1], row.astype(np.int32), np.zeros((284, 2), np.int64)[:, 0]):
        with pytest.raises(ValueError, match="contiguous int64 vector of 284"):
            count_into(torch.ones(5), bad)


def test_without_numba_plain_torch_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10_000).half()
    expected = by_entry(values)
    monkeypatch.setattr(exponent_count, "_numba", lambda: (None, "not here"))
    np.testing.assert_array_equal(by_entry(values), expected)


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """numba refuses the installed NumPy."""

    def refuse() -> None:
        raise SystemError("Numba needs NumPy 2.3 or less\nand more")

    exponent_count._numba.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(exponent_cpu, "compiled_kernel", refuse)
        yield
    exponent_count._numba.cache_clear()


def test_a_run_says_that_numba_cannot_be_used_and_what_that_costs(no_numba: None) -> None:
    note = exponent_count.prepare(torch.device("cpu"))
    assert "numba" in note
    assert "15 to 80 times" in note
    assert "SystemError: Numba needs NumPy 2.3 or less)" in note
    values = torch.randn(100)
    assert by_entry(values).sum() == 100  # and counts nevertheless
    counts = Accumulator()
    assert counts.note == ""
    counts.add(Role.ACTIVATION, 0, values)
    assert counts.note == note


def test_with_numba_there_is_nothing_to_say() -> None:
    counts = Accumulator()
    counts.add(Role.ACTIVATION, 0, torch.randn(4, 4)[:, 1])
    assert counts.note == ""


@pytest.mark.parametrize(
    ("problem", "seconds", "parts"),
    [
        ("RuntimeError: Failed to find C compiler", 9, ("Failed to find C compiler", "10 to 50")),
        ("", 9, ("compiled for cuda:1 in 9 s",)),
        ("", 0.5, ()),
    ],
    ids=["no compiler", "slow", "from the cache"],
)
def test_what_a_run_says_of_the_counter_on_cuda(
    monkeypatch: pytest.MonkeyPatch, problem: str, seconds: float, parts: tuple[str, ...]
) -> None:
    now = [100.0]

    def compiled(device: torch.device) -> str:
        now[0] += seconds
        return problem

    monkeypatch.setattr(exponent_count, "triton_problem", compiled)
    monkeypatch.setattr(exponent_count.time, "perf_counter", lambda: now[0])
    note = exponent_count.prepare(torch.device("cuda", 1))
    assert bool(note) == bool(parts)
    assert all(part in note for part in parts)


def test_large_slices_are_copied_in_bounded_pieces() -> None:
    tensor = torch.ones(3, COPY_ELEMENTS // 2, 2, dtype=torch.bfloat16)[:, :, :1]
    parts = [flat.numel() for flat, _ in pieces(tensor)]
    assert sum(parts) == tensor.numel()
    assert max(parts) <= COPY_ELEMENTS
    assert by_entry(tensor)[1 + 149] == tensor.numel()
