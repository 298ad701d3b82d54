"""Which of oneDNN's implementations ran for which product, from oneDNN's own log.

oneDNN writes a line for each primitive that it runs to the C library's standard output, so the
file descriptor itself is sent to a file meanwhile; before each product a line of our own goes to
the same place::

    ampscope,7
    onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16:…

Products that do not reach oneDNN (torch's own fp16 kernels, MKL's fp32 products) leave no line.
Format: https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

_OURS, _THEIRS, _NOBODY = "ampscope,", "onednn_verbose,", "none"
_STDOUT = 1
# Primitives that multiply; reorders, element-wise ops and sums around them are left out.
_MULTIPLY = {"matmul", "convolution", "deconvolution", "inner_product", "gemm_api", "sdpa"}


class OneDnnLog:
    """While entered, standard output is read; :attr:`kernels` afterwards."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def mark(self, number: int) -> Iterator[None]:
        """Primitives that run inside belong to product ``number``."""
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
    """Product's number -> implementations that ran for it, in order, each once."""
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
