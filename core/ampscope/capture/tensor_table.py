"""Many small tensors of a CPU's memory at once: norms and copies without a call of Python for each.

Python asks a tensor ten questions before its memory may be read. Here compiled code
asks them of all tensors together, through the C functions that torch has for code of its compiler
(``aoti_torch_get_data_ptr`` and the like). It asks each time anew, in the call that reads the
numbers, with the GIL held: no address outlives the memory that it names. What it does not know for
dense numbers is left to :mod:`ampscope.capture.tensors`, one tensor at a time.

A handle of that interface is the address of a C++ ``at::Tensor``, which is one pointer;
``Tensor._cdata`` is that pointer. :func:`works` tries both on tensors of known memory before
anything relies on them. Without numba, without these functions or with another result, every
tensor goes the other way.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import PLAIN
from ampscope.late_imports import late_import, real_builtins

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_NAMES = ("float32", "bfloat16", "float16", "float64", "int64")  # of their codes in torch's library
_pointers = attrgetter("_cdata")
UNKNOWN = -1.0  # for a norm: the tensor has to be looked at alone
_nested = attrgetter("is_nested")  # which have no sizes: torch raises where they are asked
_WIDTH = 4  # of a row
_transformation = torch._C._functorch.peek_interpreter_stack
_has_failed = False  # torch raised an error: it is asked no more


class _Space:
    """Room for what is said of so many tensors, and where it is: to ask NumPy for an address takes
    longer than to look at ten tensors."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.rows = np.zeros((room + 1, _WIDTH), np.int64)
        self.norms = np.zeros(room)
        self.rows_at: int = self.rows.ctypes.data
        self.norms_at: int = self.norms.ctypes.data


class _Machine:
    """The compiled functions, and what they are called with each time."""

    def __init__(
        self, functions: Sequence[Callable[..., int]], calls: array[int], codes: array[int]
    ) -> None:
        """``functions`` are the kernel's ``look``, ``norms`` and ``copy``, ``calls`` and ``codes``
        what it needs of torch."""
        self.look, self.norms, self.copy = functions
        self._kept = calls, codes
        self._calls, self._codes = calls.buffer_info()[0], codes.buffer_info()[0]
        self._spaces: list[_Space] = []  # that no thread uses now

    def space(self, count: int) -> _Space:
        """For ``count`` tensors; to be given back."""
        space = self._spaces.pop() if self._spaces else _Space(2 * count)
        return space if space.room >= count else _Space(2 * count)

    def give_back(self, space: _Space) -> None:
        """Others may write to it."""
        self._spaces.append(space)

    def call(
        self, function: Callable[..., int], tensors: Sequence[Tensor], space: _Space, *given: int
    ) -> int:
        """What one of the three says of tensors, which must be of a plain class; -1 where torch
        raised an error."""
        global _has_failed
        handles = array("q", map(_pointers, tensors))
        where, count = handles.buffer_info()[0], len(tensors)
        answer = function(self._calls, self._codes, where, count, space.rows_at, *given)
        if answer < 0:
            _has_failed = True  # once: torch has written a line to stderr
        return answer

    def rows(self, tensors: Sequence[Tensor]) -> NDArray[np.int64]:
        """What the kernel's ``look`` says of each."""
        space = _Space(len(tensors))
        self.call(self.look, tensors, space)
        return space.rows[: len(tensors)]


def works() -> bool:
    """Whether tensors can be looked at in this way here. The first call loads numba and compiles,
    or reads what it has compiled before."""
    if _has_failed or _transformation() is not None:  # inside torch.func tensors have no memory
        return False
    return _machine() is not None


def norms(tensors: Sequence[Tensor], most: int) -> tuple[NDArray[np.float64], int]:
    """The 2-norm of each dense floating-point CPU tensor of up to ``most`` elements, in fp64;
    :data:`UNKNOWN` for every other tensor; and how many others there are."""
    count = len(tensors)
    if not count or not tensors[0].is_cpu or not works():
        return np.full(count, UNKNOWN), count
    if not PLAIN.issuperset(map(type, tensors)) or any(map(_nested, tensors)):
        found = np.full(count, UNKNOWN)
        places = [i for i, t in enumerate(tensors) if type(t) in PLAIN and not t.is_nested]
        some, unknown = norms([tensors[place] for place in places], most)
        found[places] = some
        return found, count - len(places) + unknown
    machine = _machine()
    assert machine is not None
    space = machine.space(count)
    try:
        unknown = machine.call(machine.norms, tensors, space, most, space.norms_at)
        if unknown < 0:
            return np.full(count, UNKNOWN), count
        return space.norms[:count].copy(), unknown
    finally:
        machine.give_back(space)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds its numbers: with torch's negative bit it holds their opposites."""
    return tensor.is_cpu and type(tensor) in PLAIN and not (tensor.is_nested or tensor.is_neg())


class Copier:
    """Copies some tensors, as long as each is what it was when this was made."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._sources = list(sources)
        self._known: NDArray[np.int64] | None = None
        if sources and all(map(_is_plain, sources)) and works():
            machine = _machine()
            assert machine is not None
            rows = machine.rows(self._sources)
            if (rows[:, 0] >= 0).all():
                self._known, self._known_at = rows, rows.ctypes.data

    @property
    def is_possible(self) -> bool:
        """Whether all of them are dense numbers of this machine's memory."""
        return self._known is not None and works()

    def targets(self, copies: Sequence[Tensor]) -> array[int] | None:
        """Where the copies go, which must be as the sources are and stay where they are; None where
        one has other strides."""
        machine = _machine()
        assert machine is not None
        assert self._known is not None
        rows, same = machine.rows(copies), [0, 2, 3]  # all but the address
        if not np.array_equal(rows[:, same], self._known[:, same]):
            return None
        return array("q", rows[:, 1].tolist())

    def copy_to(self, targets: array[int]) -> bool:
        """Copies to where :meth:`targets` has said. False, and nothing is written, where a source
        has other memory, another shape or another dtype now."""
        machine, count = _machine(), len(self._sources)
        if machine is None or not self.is_possible:
            return False
        if not PLAIN.issuperset(map(type, self._sources)):
            return False
        space = machine.space(count)
        try:
            given = self._known_at, targets.buffer_info()[0]
            return machine.call(machine.copy, self._sources, space, *given) == 1
        finally:
            machine.give_back(space)


@cache
def _machine() -> _Machine | None:
    """None where numba is missing or does not fit NumPy, or where torch answers otherwise."""
    library = _library()
    if library is None:
        return None
    try:
        kernel: Any = late_import("ampscope.capture.tensor_kernel")
        calls = array("q", [_address(library, f"get_{name}") for name in kernel.CALLS])
        codes = ("device_type_cpu", "layout_strided", *(f"dtype_{name}" for name in _NAMES))
        known = array("q", [_function(library, name)() for name in codes])
        with real_builtins():  # numba imports more as it compiles
            machine = _Machine((kernel.look(), kernel.norms(), kernel.copy()), calls, known)
        # Whatever surrounds the first call: a mode, a default device.
        with own_ops(), torch.no_grad():
            return machine if _is_right(machine) else None
    except Exception:  # of any kind: then this is not the numba or the torch that is known here
        return None


def _library() -> ctypes.CDLL | None:
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            try:
                return ctypes.CDLL(str(folder / name))
            except OSError:
                return None
    return None


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, f"aoti_torch_{name}")
    function.restype = ctypes.c_int32
    return function


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(_function(library, name), ctypes.c_void_p).value or 0


def _is_right(machine: _Machine) -> bool:
    """Whether it sees tensors of each kind as they are."""
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    dense = [torch.arange(12).reshape(4, 3)[1:].to(dtype) for dtype in _DTYPES]
    dense += [torch.ones(24).reshape(2, 3, 4)[1:], torch.ones(6, 5).t(), torch.ones(())]
    others = [
        gone, torch.ones(3, device="meta"), torch.ones(3, dtype=torch.bool), torch.ones(6, 5)[:, 1],
        torch.ones(1).expand(4), torch.eye(2).to_sparse(), torch.ones(0),
    ]  # fmt: skip
    rows = machine.rows([*dense, *others])
    expected = [(_DTYPES.index(t.dtype), t.data_ptr(), t.numel()) for t in dense]
    seen = list(map(tuple, rows[: len(dense), :3].tolist()))
    return seen == expected and bool((rows[len(dense) :, 0] == -1).all())
