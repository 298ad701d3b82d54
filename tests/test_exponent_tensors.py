"""What a counter is handed in training: parameters, sparse and complex gradients, in threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import ampscope
from ampscope.capture import exponent_cpu, exponent_torch
from ampscope.capture.exponent_count import count_into
from ampscope.capture.exponent_layout import pieces
from tests import exponent_oracle as oracle

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
    with pytest.raises(TypeError, match="meta tensor"):
        count(torch.empty(3, device="meta"))


def test_threads_share_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are split over a pool, from several threads at once, with nothing lost."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    size = 5 * exponent_cpu.PIECE + 12_345
    tensors = [torch.randn(size).to(t) for t in (torch.float16, torch.bfloat16, torch.float32)]
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


def run_python(code: str, **environment: str) -> subprocess.Popen[str]:
    root = str(Path(ampscope.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": root, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


COUNT = """
import numpy as np, torch
from ampscope.capture.exponent_count import count_into
torch.get_num_threads = lambda: 2
values, row = torch.ones(1 << 21), np.zeros(284, np.int64)
count_into(values, row)
assert row[150] == 1 << 21
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_counts_with_threads_of_its_own() -> None:
    child = """
import os, threading
helpers = lambda: [t for t in threading.enumerate() if t.name.startswith("ampscope-exponents")]
assert len(helpers()) == 1
pid = os.fork()
if pid == 0:
    assert not helpers()
    count_into(values, row)
    os._exit(0 if row[150] == 2 << 21 and len(helpers()) == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    process = run_python(COUNT + child)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def test_machine_code_is_cached_by_processes_that_start_together(tmp_path: Path) -> None:
    cold = [run_python(COUNT, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in cold:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert len(list(tmp_path.rglob("*.nbc"))) >= 2
    loaded = (
        "from ampscope.capture import exponent_cpu as e\nassert not e._kernel().stats.cache_misses"
    )
    warm = run_python(COUNT + loaded, NUMBA_CACHE_DIR=str(tmp_path))
    output, _ = warm.communicate(timeout=120)
    assert warm.returncode == 0, output


def test_counting_works_where_nothing_can_be_cached() -> None:
    broken = "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\n"
    cached = (
        "from ampscope.capture import exponent_cpu as e\nassert not e._kernel().stats.cache_path"
    )
    process = run_python(broken + COUNT + cached)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def test_counting_works_without_numba() -> None:
    process = run_python("import sys\nsys.modules['numba'] = None\n" + COUNT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
