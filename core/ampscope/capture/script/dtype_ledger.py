"""Instrument: which dtype each parameter, buffer, activation and optimizer state of a run has, and
which line of the user's code, or which default of a library, set it.

Also what is around a run: versions, torch's switches, the optimizer's options, variables of the
environment that change numbers, and seeds that are shifted for a comparison of losses.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.failures import ContainedPatches, Failures
from ampscope.capture.global_hooks import BUFFERS, PARAMETERS
from ampscope.capture.script.run_digests import ParameterNames, RunDigests
from ampscope.capture.tensors import floating_tensors
from ampscope.capture.user_objects import (
    IdMap,
    groups_of,
    modules,
    own_buffers,
    own_parameters,
    state_of,
)
from ampscope.masks import masked_argument
from ampscope.numerics.formats import dtype_name
from ampscope.observations import DtypeEntry, Surroundings
from ampscope.patches import Patches
from ampscope.source_lines import SourceLines, line_name

MOST_ENTRIES = 20_000
MOST_TEXT = 200  # characters of a value
PACKAGES = (
    "torch", "numpy", "triton", "transformers", "accelerate", "lightning", "pytorch-lightning",
    "timm", "torchvision", "torchao", "bitsandbytes", "flash-attn", "xformers", "deepspeed", "apex",
    "safetensors", "datasets", "nvidia-cublas-cu12", "nvidia-cudnn-cu12",
)  # fmt: skip
# Variables that change what is computed, by how they begin.
_PREFIXES = ("TORCH", "PYTORCH", "CUDA", "CUBLAS", "CUDNN", "NVIDIA", "NCCL", "OMP_", "MKL_",
             "KMP_", "ATEN_", "DNNL_", "ONEDNN_", "TRITON", "XLA_", "PYTHONHASHSEED", "ACCELERATE_",
             "OPENBLAS_", "ROCBLAS_", "HIP_")  # fmt: skip
_SWITCHES: Mapping[str, Callable[[], Any]] = {
    "torch.get_default_dtype": torch.get_default_dtype,
    "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "torch.backends.cuda.flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.get_num_threads": torch.get_num_threads,
    "torch.backends.cpu.get_cpu_capability": torch.backends.cpu.get_cpu_capability,
}


WHAT = "where dtypes come from"


class DtypeLedger:
    """Entries in :meth:`records`; a tensor has another when its dtype changes."""

    def __init__(self, lines: SourceLines, autocast: Callable[[], tuple[str, str]]) -> None:
        """``autocast`` gives dtype and line of the region that is open, ("", "") outside."""
        self.failures = Failures()
        self._lines = lines
        self._autocast = autocast
        self._digests: RunDigests | None = None
        self._default = "", ""  # dtype and line of set_default_dtype
        # By the tensor's name: line and why.
        self._made: IdMap[nn.Module, dict[str, tuple[str, str]]] = IdMap()
        self._optimizers: IdMap[Optimizer, str] = IdMap()
        self._entries: dict[tuple[str, str], DtypeEntry] = {}
        self._all: list[DtypeEntry] = []
        self._surroundings: Surroundings | None = None
        self._casts = 0  # nn.Module._apply calls itself for children
        self.step = 0

    @contextlib.contextmanager
    def watching(self, digests: RunDigests) -> Iterator[None]:
        """Hears of modules, casts and defaults while entered."""
        self._digests = digests
        names = digests.names
        patched = ContainedPatches(self.failures, WHAT)
        with patched as patches, contextlib.ExitStack() as stack:
            patches.wrap(nn.Module, "_apply", self._apply)
            patches.wrap(torch, "set_default_dtype", self._set_default)
            patches.wrap(Optimizer, "__init__", self._new_optimizer)

            def registered(module: nn.Module, name: str, parameter: Any) -> None:
                names.register(module, name, parameter)
                self._registered(module, name, parameter)

            hook = self.failures.hook
            stack.enter_context(PARAMETERS.subscribe(hook(WHAT, registered)))
            stack.enter_context(BUFFERS.subscribe(hook(WHAT, self._registered)))
            yield

    def model(self, root: nn.Module, prefix: str) -> None:
        """The dtypes of a model's parameters and buffers as they are now."""
        for path, module in modules(root):
            made = self._made.get(module) or {}
            for kind, held in (
                ("parameter", own_parameters(module)), ("buffer", own_buffers(module))
            ):  # fmt: skip
                for name, tensor in held:
                    if not tensor.is_floating_point():
                        continue
                    full = ".".join(filter(None, (prefix, path, name)))
                    line, why = made.get(name, ("", ""))
                    dtype = dtype_name(tensor.dtype)
                    if not why:
                        line, why = self._by_default(dtype)
                    self._add(kind, full, dtype, line, why)

    def activation(self, path: str, module: nn.Module, output: object) -> None:
        """The dtype of a module's output."""
        found = floating_tensors(output)
        if not found:
            return
        dtype = dtype_name(found[0].dtype)
        region, line = self._autocast()
        own = {dtype_name(p.dtype) for _, p in own_parameters(module)}
        if region == dtype and dtype not in own:
            self._add("activation", path, dtype, line, f"autocast ({dtype})")
        elif dtype in own:
            self._add("activation", path, dtype, "", "the dtype of its weights")
        elif region:
            why = f"autocast ({region}) leaves it in {dtype}"
            self._add("activation", path, dtype, line, why)
        else:
            self._add("activation", path, dtype, "", "the dtype of what it was given")

    def states(self, optimizer: Optimizer, names: ParameterNames) -> None:
        """The dtypes of an optimizer's state."""
        kind = type(optimizer).__name__
        line = self._optimizers.get(optimizer) or ""
        for parameter, state in state_of(optimizer):
            for key, value in state.items():
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                dtype = dtype_name(value.dtype)
                same = value.dtype == parameter.dtype
                why = f"{kind}: the dtype of its parameter" if same else f"{kind}'s own choice"
                name = f"{names.of(parameter, optimizer)}: {key}"
                self._add("state", name, dtype, line, why)

    def look_around(self, optimizers: list[Optimizer]) -> None:
        """Versions, switches and options as they are now; the first call counts."""
        if self._surroundings is None:
            with self.failures.contained("what is around the run"):
                found = surroundings(optimizers)
                self._surroundings = Surroundings(tuple(found), tuple(found.values()))

    def records(self) -> list[DtypeEntry | Surroundings]:
        """All entries in the order in which they were seen, and what is around the run."""
        around = [] if self._surroundings is None else [self._surroundings]
        return [*self._all, *around]

    def _add(self, kind: str, name: str, dtype: str, line: str, why: str) -> None:
        before = self._entries.get((kind, name))
        if before is not None and before.dtype == dtype:
            return
        if len(self._all) < MOST_ENTRIES:
            entry = DtypeEntry(kind, name, dtype, line, why, self.step)
            self._entries[kind, name] = entry
            self._all.append(entry)

    def _by_default(self, dtype: str) -> tuple[str, str]:
        default, line = self._default
        if default == dtype:
            return line, "torch.set_default_dtype"
        return "", "torch's default dtype" if dtype == "fp32" else ""

    def _registered(self, module: nn.Module, name: str, tensor: Any) -> None:
        """A module has got a tensor whose dtype is not torch's default."""
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        if tensor.dtype != torch.get_default_dtype():
            made = line_name(self._lines.where()), "made in this dtype"
            self._made.setdefault(module, {})[name] = made

    def _apply(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._casts:
            return original(module, *args, **kwargs)
        before = _held(module)
        self._casts += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._casts -= 1
            made = line_name(self._lines.where()), "module cast"
            for owner, name, tensor in _tensors_of(module):
                if before.get((id(owner), name), tensor.dtype) != tensor.dtype:
                    self._made.setdefault(owner, {})[name] = made

    def _set_default(self, original: Any, dtype: Any) -> Any:
        result = original(dtype)
        self._default = dtype_name(torch.get_default_dtype()), line_name(self._lines.where())
        return result

    def _new_optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **more: Any) -> Any:
        result = original(optimizer, *args, **more)
        self._optimizers.setdefault(optimizer, line_name(self._lines.where()))
        return result


def _tensors_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for _, owner in modules(module):
        for name, tensor in (*own_parameters(owner), *own_buffers(owner)):
            yield owner, name, tensor


def _held(module: nn.Module) -> dict[tuple[int, str], torch.dtype]:
    return {(id(owner), name): tensor.dtype for owner, name, tensor in _tensors_of(module)}


def surroundings(optimizers: list[Optimizer]) -> dict[str, str]:
    """By name: what may explain that this run computes other numbers than another one."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[f"package {package}"] = metadata.version(package)
    found["torch.version.cuda"] = str(torch.version.cuda)
    for name, read in _SWITCHES.items():
        with contextlib.suppress(Exception):  # a switch that this version of torch lacks
            found[name] = str(read())
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        found[f"optimizer{number}"] = kind
        for place, group in enumerate(groups_of(optimizer)):
            where = f"optimizer{number}" + (f" group {place}" if place else "")
            for key, value in group.items():
                if key != "params" and isinstance(value, bool | int | float | str | tuple | None):
                    found[f"{where} {key}"] = str(value)
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            found[f"variable {name}"] = masked_argument(f"{name}={value}").partition("=")[2]
    return {name: value[:MOST_TEXT] for name, value in found.items() if value}


@contextlib.contextmanager
def shifted_seeds(shift: int, seed: int) -> Iterator[None]:
    """Each seed that the script sets, and ``seed`` that it starts with, is ``shift`` larger: of
    torch, NumPy and ``random``. Seeds of generators of the script's own are not."""
    if not shift:
        yield
        return

    def moved(original: Any, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = value + shift if isinstance(value, int) else value
        return original(value, *args, **kwargs)

    with Patches() as patches:
        for owner in (torch, torch.random):
            patches.wrap(owner, "manual_seed", moved)
        patches.wrap(random, "seed", moved)
        if (numpy := sys.modules.get("numpy")) is not None:
            patches.wrap(numpy.random, "seed", moved)
            patches.wrap(numpy.random, "default_rng", moved)
            numpy.random.seed(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        yield
