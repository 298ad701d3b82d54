"""Versions that are read from files, and the accelerators that the file system shows."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ampscope.hardware.describe import parse_version_file, read_software
from ampscope.hardware.gpu import Accelerator, find_accelerators, gfx_name

# The form that torch 2.13's wheels have.
CUDA_BUILD = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
hip: Optional[str] = None
xpu: Optional[str] = None
"""


def test_version_file() -> None:
    assert parse_version_file(CUDA_BUILD) == {"__version__": "2.13.0+cu130", "cuda": "13.0"}


def test_the_installed_torch_is_read_as_it_says_itself() -> None:
    """torch itself is the oracle, in a process of its own."""
    code = "import json, torch.version as v; print(json.dumps([v.__version__, v.cuda, v.hip]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if answer.returncode != 0:
        pytest.skip("torch is not installed")
    software = read_software()
    found = [software.torch, software.torch_cuda, software.torch_hip]
    assert found == json.loads(answer.stdout)
    assert software.python == platform.python_version()


def _environment(folder: Path, files: dict[str, str]) -> dict[str, str | None]:
    """read_software() in a child whose first place to import from is ``folder``."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code = (
        "import dataclasses, json, sys; from ampscope.hardware.describe import read_software; "
        "print(json.dumps(dataclasses.asdict(read_software()))); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1"}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, str | None] = json.loads(answer.stdout)
    return found


def _wheel(name: str, version: str) -> dict[str, str]:
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": text}


def test_a_cuda_build_with_the_cudnn_that_fits_it(tmp_path: Path) -> None:
    files = {"torch/__init__.py": "raise SystemExit('torch was imported')"}
    files |= {"torch/version.py": CUDA_BUILD}
    files |= _wheel("nvidia-cudnn-cu12", "9.10.2.21") | _wheel("nvidia-cudnn-cu13", "9.15.1.9")
    found = _environment(tmp_path, files)
    assert (found["torch"], found["torch_cuda"]) == ("2.13.0+cu130", "13.0")
    assert (found["cudnn"], found["visible_devices"]) == ("9.15.1.9", "0,1")

    older = CUDA_BUILD.replace("cu130", "cu126").replace("13.0'", "12.6'", 1)
    older = older.replace("= '13.0'", "= '12.6'")
    assert _environment(tmp_path, {"torch/version.py": older})["cudnn"] == "9.10.2.21"


@pytest.mark.parametrize("text", ["this is = = not Python", ""])
def test_a_torch_whose_version_file_says_nothing(tmp_path: Path, text: str) -> None:
    files = {"torch/__init__.py": "", "torch/version.py": text} | _wheel("torch", "2.99.0")
    found = _environment(tmp_path, files)
    assert (found["torch"], found["torch_cuda"]) == ("2.99.0", None)


def test_cudnn_is_unknown_where_no_wheel_brought_it() -> None:
    wheels = [d.metadata["Name"] for d in metadata.distributions()]
    if any(str(name).startswith("nvidia-cudnn") for name in wheels):
        pytest.skip("a cuDNN wheel is installed here")
    assert read_software().cudnn is None


# LLVM's "User Guide for AMDGPU Backend" lists these targets.
@pytest.mark.parametrize(
    ("number", "name"),
    [(90010, "gfx90a"), (90402, "gfx942"), (100300, "gfx1030"), (110501, "gfx1151")],
)
def test_gfx_name(number: int, name: str) -> None:
    assert gfx_name(number) == name


def _tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


NODES = "sys/class/kfd/kfd/topology/nodes"


def test_amd_gpus_of_the_kernel_topology(tmp_path: Path) -> None:
    _tree(
        tmp_path,
        {
            "dev/kfd": "",
            f"{NODES}/0/properties": "cpu_cores_count 64\nsimd_count 0\nvendor_id 0\n",
            f"{NODES}/1/properties": "simd_count 1216\nvendor_id 4098\ngfx_target_version 90402\n",
            f"{NODES}/10/properties": "simd_count 440\nvendor_id 4098\ngfx_target_version 90010\n",
        },
    )
    assert find_accelerators(tmp_path) == (
        Accelerator("ROCm", "AMD GPU gfx942"),
        Accelerator("ROCm", "AMD GPU gfx90a"),
    )


def test_an_amd_gpu_without_a_topology_is_still_named(tmp_path: Path) -> None:
    _tree(tmp_path, {"dev/kfd": ""})
    assert find_accelerators(tmp_path) == (Accelerator("ROCm", "AMD GPU, model unknown"),)


def test_intel_gpus_and_no_others(tmp_path: Path) -> None:
    nodes = {"renderD128": ("0x8086", "0x56a0"), "renderD129": ("0x10de", "0x2204")}
    for node, (vendor, device) in nodes.items():
        folder = f"sys/class/drm/{node}/device"
        _tree(tmp_path, {f"{folder}/vendor": f"{vendor}\n", f"{folder}/device": f"{device}\n"})
    (tmp_path / "sys/class/drm/renderD130/device").mkdir(parents=True)  # nothing readable in it
    assert find_accelerators(tmp_path) == (Accelerator("XPU", "Intel GPU, device 0x56a0"),)


def test_apple_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert find_accelerators(tmp_path) == ()
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert find_accelerators(tmp_path) == (Accelerator("MPS", "Apple GPU"),)
