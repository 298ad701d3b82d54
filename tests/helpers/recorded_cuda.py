"""A machine with two GPUs and a torch that is built for CUDA, whose calls into CUDA are recorded.

The installed torch may be a CPU build: what it would ask of CUDA ends in functions of ``torch._C``
that are put there. ``torch.cuda.calls`` lists those that were called in this process, and before a
fork in the one that it was forked from. ``torch.cuda.init`` succeeds, the second GPU is the current
one, and nothing can be computed there. NVML answers with two H100s (see nvml_replay).
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ANSWERS = {"_cuda_getDeviceCount": 2, "_cuda_getDevice": 1}  # of all others None
# The argument that becomes the current device: torch's allocator does not restore it.
MAKES_CURRENT = {"_cuda_setDevice": 0, "_cuda_setMemoryFraction": 1}
QUIET = ("_cuda_isInBadFork",)  # asks torch alone
UUIDS = ["GPU-aaaa", "GPU-bbbb"]
MEMORY = 64 * 2**30  # bytes of each
SITE = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from tests.helpers.recorded_cuda import when_imported
when_imported()
"""
PYNVML = f"""
from tests.helpers.nvml_replay import H100, NOT_FOUND, NVMLError, ReplayedNvml
NVML = ReplayedNvml((H100, H100))
UUIDS = {UUIDS!r}
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid not in UUIDS:
        raise NVMLError(NOT_FOUND)
    return NVML.gpus[UUIDS.index(uuid)]
def __getattr__(name):
    return getattr(NVML, name)
"""


def in_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python that is started from here on finds this machine."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "pynvml.py").write_text(PYNVML)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(folder), inherited)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def when_imported() -> None:
    """Put the functions into torch as soon as that has been imported."""
    sys.meta_path.insert(0, _AtTorch())


class _AtTorch:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            record(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]  # of this one import
        return spec


def record(torch: Any) -> None:
    """From here on every call into CUDA is listed in ``torch.cuda.calls``."""
    calls: list[str] = []
    answers = dict(ANSWERS)
    torch.cuda.calls = calls

    def recorded(name: str) -> Any:
        if not name.startswith("_cuda_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.extend([] if name in QUIET else [f"{name}{args}"])
            if name in MAKES_CURRENT:
                answers["_cuda_getDevice"] = args[MAKES_CURRENT[name]]
            return answers.get(name)

        return call

    def properties(device: Any = None) -> SimpleNamespace:
        index = torch.cuda._get_device_index(device, optional=True)
        calls.append(f"properties({index})")
        facts = {"name": f"H100 number {index}", "major": 9, "minor": 0, "uuid": UUIDS[index][4:]}
        return SimpleNamespace(**facts, total_memory=MEMORY)

    torch._C.__getattr__ = recorded  # of a CPU build, which has none of them
    for name in [name for name in dir(torch._C) if name.startswith("_cuda_")]:
        setattr(torch._C, name, recorded(name))
    torch.cuda.get_device_properties = properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda._cudart = object()
    torch.cuda.default_generators = [torch.Generator() for _ in UUIDS]
    torch.cuda._raw_device_count_nvml = lambda: len(UUIDS)
    torch.cuda._raw_device_uuid_nvml = lambda: UUIDS
    torch.version.cuda = "13.0"
