"""Which CUDA kernels ran for which matmul, from torch.profiler.

Each matmul runs in a range of its own. The profiler links a kernel to the op that launched it, so
the kernels of a matmul are those of the ops inside its range.

On a CPU the same is read from oneDNN's own log (:class:`OneDnnLog`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # bound in C++
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "ampscope-matmul-"
_NO_KERNEL = ("Mem", _RANGE)  # copies, fills, and the range itself on the device's time line
_OURS, _THEIRS, _NOBODY = "ampscope,", "onednn_verbose,", "none"
_STDOUT = 1
# Primitives that multiply; reorders, element-wise ops and sums around them are left out.
_MULTIPLY = {"matmul", "convolution", "deconvolution", "inner_product", "gemm_api", "sdpa"}


class KernelProfile:
    """While entered, kernels are recorded; :attr:`kernels` afterwards."""

    source = "torch.profiler"

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[str, ...]] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def __enter__(self) -> KernelProfile:
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        if error[0] is None:
            events = self._profile.events()  # type: ignore[no-untyped-call]  # as above
            self.kernels = kernels_by_matmul(events or ())

    def mark(self, number: int) -> AbstractContextManager[object]:
        """Kernels that are launched inside belong to matmul ``number``."""
        return record_function(f"{_RANGE}{number}")


def kernels_by_matmul(events: Any) -> dict[int, tuple[str, ...]]:
    """Matmul's number -> names of its kernels, each once. ``events`` are FunctionEvents."""
    found: dict[int, dict[str, None]] = {}
    for event in events:
        if event.name.startswith(_RANGE) and event.device_type == DeviceType.CPU:
            number = int(event.name.removeprefix(_RANGE))
            found.setdefault(number, {}).update(dict.fromkeys(_names(event)))
    return {number: tuple(names) for number, names in found.items()}


def _names(event: Any) -> Iterator[str]:
    for kernel in event.kernels:
        if not kernel.name.startswith(_NO_KERNEL):
            yield kernel.name
    for child in event.cpu_children:
        yield from _names(child)


class OneDnnLog:
    """Which of oneDNN's implementations ran for which matmul. While entered, standard output is
    read; :attr:`kernels` afterwards.

    oneDNN writes a line for each primitive that it runs to the C library's standard output, so the
    file descriptor itself is sent to a file meanwhile; before each matmul a line of our own goes to
    the same place::

        ampscope,7
        onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16:…

    Matmuls that do not reach oneDNN (torch's own fp16 kernels, MKL's fp32 matmuls) leave no line.
    Format: https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html
    """

    source = "oneDNN"

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[str, ...]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OneDnnLog:
        onednn: Any = torch.backends.mkldnn  # Any: torch leaves its functions untyped
        if not onednn.is_available():
            return self
        file = self._stack.enter_context(tempfile.TemporaryFile())
        sys.stdout.flush()
        kept = os.dup(_STDOUT)
        self._stack.callback(self._read, file.fileno(), kept)
        os.dup2(file.fileno(), _STDOUT)
        self._stack.enter_context(onednn.verbose(onednn.VERBOSE_ON))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def mark(self, number: int) -> Iterator[None]:
        """Primitives that run inside belong to matmul ``number``."""
        _write(_STDOUT, f"\n{_OURS}{number}\n")
        try:
            yield
        finally:
            _write(_STDOUT, f"\n{_OURS}{_NOBODY}\n")

    def _read(self, log: int, kept: int) -> None:
        """Standard output as it was, and what others wrote meanwhile handed on."""
        sys.stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)
        os.lseek(log, 0, os.SEEK_SET)
        with os.fdopen(os.dup(log), errors="replace") as lines:
            text = lines.read()
        self.kernels = implementations(text)
        others = [x for x in text.split("\n") if x and not x.startswith((_OURS, _THEIRS))]
        if others:
            _write(_STDOUT, "\n".join([*others, ""]))


def implementations(text: str) -> dict[int, tuple[str, ...]]:
    """Matmul's number -> implementations that ran for it, in order, each once."""
    found: dict[int, dict[str, None]] = {}
    current = _NOBODY
    for line in text.splitlines():
        if line.startswith(_OURS):
            current = line.removeprefix(_OURS).strip()
        elif line.startswith(_THEIRS) and current.isdigit():
            fields = line.split(",")
            at = fields.index("exec") if "exec" in fields else len(fields)
            # exec, engine, primitive, implementation
            if len(fields) > at + 3 and fields[at + 2] in _MULTIPLY:
                found.setdefault(int(current), {})[f"{fields[at + 2]} {fields[at + 3]}"] = None
    return {number: tuple(names) for number, names in found.items()}


def _write(descriptor: int, text: str) -> None:
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # a closed standard output: then there is no log either
        os.write(descriptor, text.encode())
