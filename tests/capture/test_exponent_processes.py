"""Processes that count: forked, started together, without a cache to write to, without numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ampscope

COUNT = """
import numpy as np, torch
from ampscope.capture.exponent_count import count_into
torch.set_num_threads(2)
values, row = torch.ones(1 << 21), np.zeros(284, np.int64)
count_into(values, row)
assert row[150] == 1 << 21
"""
KERNEL = (
    "from ampscope.capture import exponent_cpu\nkernel = exponent_cpu.compiled_kernel().kernel\n"
)


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    root = str(Path(ampscope.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": root, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_wait_for_threads_that_it_lacks() -> None:
    fork = """
import os, signal
pid = os.fork()
if pid == 0:
    signal.alarm(30)  # a child that hangs is killed, and the parent sees it
    count_into(values, row)
    os._exit(0 if row[150] == 2 << 21 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    finish(start_python(COUNT + fork))


def test_machine_code_is_cached_by_processes_that_start_together(tmp_path: Path) -> None:
    for process in [start_python(COUNT, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]:
        finish(process)
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    warm = start_python(COUNT + KERNEL + "assert kernel.cache_hits", NUMBA_CACHE_DIR=str(tmp_path))
    finish(warm)


def test_counting_works_where_nothing_can_be_cached() -> None:
    nowhere = "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\n"
    finish(start_python(nowhere + COUNT + KERNEL + "assert not kernel.cache_hits"))


def test_counting_works_without_numba() -> None:
    finish(start_python("import sys\nsys.modules['numba'] = None\n" + COUNT))
