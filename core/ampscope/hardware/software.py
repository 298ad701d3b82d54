"""Versions of torch, CUDA and cuDNN, read from files, so that the dashboard never imports torch.

torch writes its build into ``torch/version.py`` ("2.13.0+cu130", cuda "13.0"); cuDNN comes with it
as the wheel nvidia-cudnn-cu13. A cuDNN that was installed otherwise (conda, the system) is unknown.
"""

from __future__ import annotations

import ast
import os
import platform
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")


@dataclass(frozen=True, slots=True)
class Software:
    """What is installed; None is "not there" or, for cuDNN, unknown."""

    python: str
    torch: str | None  # "2.13.0+cpu"
    torch_cuda: str | None  # CUDA version that torch was built for
    torch_hip: str | None  # ROCm version that torch was built for
    torch_xpu: str | None  # oneAPI version that torch was built for
    cudnn: str | None
    visible_devices: str | None  # the environment's CUDA_VISIBLE_DEVICES; None when not set


def parse_version_file(text: str) -> dict[str, str]:
    """Names with a text value at the top level of ``torch/version.py``."""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            target: ast.expr = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(value, str):
            found[target.id] = value
    return found


def read_software() -> Software:
    """Versions in the running Python's environment."""
    build = _torch_build()
    return Software(
        python=platform.python_version(),
        torch=build.get("__version__") or _package("torch"),
        torch_cuda=build.get("cuda"),
        torch_hip=build.get("hip"),
        torch_xpu=build.get("xpu"),
        cudnn=_cudnn(build.get("cuda")),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _torch_build() -> dict[str, str]:
    spec = util.find_spec("torch")  # of a top-level package: finds, does not import
    if spec is None or spec.origin is None:
        return {}
    try:
        return parse_version_file(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, SyntaxError):
        return {}


def _cudnn(torch_cuda: str | None) -> str | None:
    """The wheel that fits torch's CUDA first: several may be installed."""
    fitting = [f"nvidia-cudnn-cu{torch_cuda.partition('.')[0]}"] if torch_cuda else []
    versions = (_package(name) for name in (*fitting, *CUDNN_WHEELS))
    return next((version for version in versions if version is not None), None)


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
