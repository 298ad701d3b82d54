"""What a counter is handed in training: parameters, sparse and complex gradients, in threads."""

from __future__ import annotations

import ctypes
import dataclasses
import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture import exponent_cpu, exponent_torch
from ampscope.capture.exponent_count import count_into
from ampscope.capture.exponent_layout import pieces
from tests.helpers import exponent_oracle as oracle

ONE = 1 + 149  # index of 2^0


def count(tensor: Tensor) -> NDArray[np.int64]:
    row = np.zeros(oracle.ROW_LENGTH, np.int64)
    count_into(tensor, row)
    return row


def test_dense_permutations_and_expansions_are_not_copied() -> None:
    image = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    column = torch.randn(4, 1).expand(4, 9)
    nested = torch.randn(6, 1, 8).expand(6, 5, 8).transpose(0, 2)
    for tensor, times in ((image, 1), (image.permute(3, 0, 2, 1), 1), (column, 9), (nested, 5)):
        ((flat, multiplicity),) = pieces(tensor)
        assert flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert (multiplicity, flat.numel() * times) == (times, tensor.numel())


def test_a_parameter_is_counted_and_left_alone() -> None:
    weight = torch.nn.Parameter(torch.randn(30, 40).T)
    before, version = weight.detach().clone(), weight._version
    row = count(weight)
    np.testing.assert_array_equal(row, oracle.row_of(before.reshape(-1).tolist()))
    assert weight._version == version
    assert weight.grad_fn is None
    assert torch.equal(weight.detach(), before)


def test_a_tensor_within_autograd_inference_and_autocast() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = weight @ weight
        assert count(product).sum() == 64
    product.float().sum().backward()
    with torch.inference_mode():
        assert count(weight @ weight).sum() == 64


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_count_as_two(dtype: torch.dtype) -> None:
    parts = torch.tensor([[1.0, -0.0], [0.0, 2.0], [float("nan"), -4.0]])
    values = torch.view_as_complex(parts.to(dtype.to_real()))
    np.testing.assert_array_equal(count(values), oracle.row_of(parts.reshape(-1).tolist()))


def test_lazy_conjugation_and_negation_are_carried_out() -> None:
    values = torch.complex(torch.tensor([1.0, 1.0]), torch.tensor([0.0, float("inf")]))
    zero = torch.complex(torch.tensor([1.0]), torch.tensor([0.0]))
    # The imaginary part of a conjugate has the negative bit; one element of it is contiguous too.
    assert count(zero.conj().imag)[oracle.SPECIALS["-0"]] == 1
    for view in (values.conj(), values.conj().imag):
        expected = torch.view_as_real(view.resolve_conj()) if view.is_complex() else view.clone()
        row = oracle.row_of(expected.reshape(-1).tolist())
        assert row[oracle.SPECIALS["-0"]] == row[oracle.SPECIALS["-inf"]] == 1
        np.testing.assert_array_equal(count(view), row)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|invariant)")
def test_a_sparse_tensor_counts_its_values() -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([3, 3, 7])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    row = count(gradient)  # row 3 came twice: its four values are 2
    assert (row[ONE], row[ONE + 1], row.sum()) == (4, 4, 8)
    assert count(torch.eye(5).to_sparse_csr())[ONE] == 5
    assert count(torch.eye(4).to_sparse_bsr((2, 2)))[[ONE, 279]].tolist() == [4, 4]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_count_their_values() -> None:
    lengths = [torch.ones(3, 2), torch.ones(5, 2)]
    for layout in (torch.jagged, torch.strided):
        assert count(torch.nested.nested_tensor(lengths, layout=layout))[ONE] == 16


@pytest.mark.parametrize("tensor", [torch.ones(3, dtype=torch.int64), torch.tensor([True])])
def test_integers_are_refused(tensor: Tensor) -> None:
    with pytest.raises(TypeError, match="floating-point tensors"):
        count(tensor)


def test_a_tensor_without_memory_is_refused() -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(TypeError, match="packed several to a byte"):
        count(packed)
    with pytest.raises(TypeError, match="meta tensor"):
        count(torch.empty(3, device="meta"))


def test_threads_share_a_tensor() -> None:
    """Large tensors are split over OpenMP's threads, by several callers at once."""
    assert torch.get_num_threads() == 1 or exponent_cpu.compiled_kernel().together is not None
    size = 5 * exponent_cpu.SPLIT + 12_345
    tensors = [torch.randn(size).to(dtype) for dtype in exponent_cpu.DTYPES]
    expected = [exponent_torch.count_flat(t).numpy() for t in tensors]
    rows = np.zeros((9, oracle.ROW_LENGTH), np.int64)
    start = threading.Barrier(len(rows))

    def work(index: int) -> None:
        start.wait()
        for _ in range(4):
            count_into(tensors[index % 3], rows[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(row, 4 * expected[index % 3])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_counts_the_same(threads: int) -> None:
    values = torch.ones(3 * exponent_cpu.SPLIT + 1).expand(2, -1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert count(values)[ONE] == values.numel()
    finally:
        torch.set_num_threads(before)


def test_a_thread_too_many_stays_out_of_the_rows() -> None:
    """A team may be larger than torch said; here no row is meant for the thread that comes."""
    machine, values = exponent_cpu.compiled_kernel(), torch.ones(100)
    rows = np.zeros((1, oracle.ROW_LENGTH), np.int64)
    job = exponent_cpu.CountJob(0, 0, values.data_ptr(), 100, 4, 23, 0, 1, rows.ctypes.data, 0)
    machine.alone(ctypes.byref(job))
    assert rows.sum() == 0


def test_without_openmp_the_caller_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = dataclasses.replace(exponent_cpu.compiled_kernel(), together=None)
    monkeypatch.setattr(exponent_cpu, "compiled_kernel", lambda: alone)
    assert count(torch.ones(1 << 19))[ONE] == 1 << 19
