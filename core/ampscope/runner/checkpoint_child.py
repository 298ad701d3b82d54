"""A child that says where the tensors of torch files lie, one line of JSON for each line that asks.

    python -m ampscope.runner.checkpoint_child     <- ["model.pt", "/tmp/scratch"]
                                                   -> {"tensors": [...], "groups": [...]}

A file is opened by ``torch.load(weights_only=True, mmap=True)``: no code of it runs, and no
number is read. What lies in the file as a tensor has it is reported by its offset there; what does
not (older files, tensors that are no plain memory) is written to a file in the scratch folder.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEEPEST = 64
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64", torch.complex128: "C128", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip


class Walk:
    """Collects tensors and parameter groups of what was loaded."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self._path = path
        self._maps = _mappings(path)
        self._scratch = scratch / f"tensors-{os.getpid()}-{len(list(scratch.iterdir()))}"
        self._end = 0

    def value(self, value: object, name: str, kind: str, depth: int = 0) -> None:
        """All tensors inside ``value``, by dotted names."""
        if isinstance(value, Tensor):
            self._tensor(value, name, kind)
        elif depth < DEEPEST and isinstance(value, Mapping):
            if _is_optimizer(value):
                kind = "optimizer"
                self._groups(value, name)
            for key, part in value.items():
                self.value(part, f"{name}.{key}" if name else str(key), kind, depth + 1)
        elif depth < DEEPEST and isinstance(value, list | tuple):
            for place, part in enumerate(value):
                self.value(part, f"{name}.{place}" if name else str(place), kind, depth + 1)

    def _groups(self, optimizer: Mapping[str, Any], name: str) -> None:
        prefix = f"{name}.state." if name else "state."
        for group in optimizer["param_groups"]:
            if not isinstance(group, Mapping):
                continue
            betas, epsilon = group.get("betas"), group.get("eps")
            is_pair = isinstance(betas, list | tuple) and len(betas) == 2
            self.groups.append(
                {
                    "states": [f"{prefix}{number}." for number in group.get("params", ())],
                    "betas": [float(b) for b in betas] if is_pair else None,  # type: ignore[union-attr]  # a pair
                    "eps": float(epsilon) if isinstance(epsilon, int | float) else None,
                }
            )

    def _tensor(self, tensor: Tensor, name: str, kind: str) -> None:
        tensor = tensor.detach()
        if tensor.is_meta:
            return
        if tensor.layout is not torch.strided:
            tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.to_dense()
        if tensor.is_quantized:
            tensor = tensor.int_repr()
        tensor = tensor.resolve_conj().resolve_neg()
        size = tensor.numel() * tensor.itemsize
        self.tensors.append({
            "name": name, "kind": kind, "dtype": _NAMES.get(tensor.dtype, str(tensor.dtype)[6:]),
            "shape": list(tensor.shape), "size": size, **self._place(tensor, size),
        })  # fmt: skip

    def _place(self, tensor: Tensor, size: int) -> dict[str, Any]:
        address = tensor.data_ptr()
        if tensor.is_contiguous() or not size:
            for begin, end, offset in self._maps:
                if begin <= address and address + size <= end:
                    return {"file": str(self._path), "offset": address - begin + offset}
        place = {"file": str(self._scratch), "offset": self._end}
        with self._scratch.open("ab") as file:
            # A view of single bytes: NumPy has no bf16.
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), 1 << 24):
                file.write(flat[start : start + (1 << 24)].numpy().tobytes())
        self._end += size
        return place


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    """torch.optim.Optimizer.state_dict() has these two keys."""
    groups = value.get("param_groups")
    return isinstance(value.get("state"), Mapping) and isinstance(groups, list)


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """First and last address, and place in the file, of each part of it that is mapped."""
    found, real = [], str(path.resolve())
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            parts = line.rstrip("\n").split(maxsplit=5)
            if len(parts) == 6 and parts[5] == real:
                begin, end = (int(x, 16) for x in parts[0].split("-"))
                found.append((begin, end, int(parts[2], 16)))
    return found


def read(path: Path, scratch: Path) -> dict[str, Any]:
    """What the parent is told of ``path``."""
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle's protocol; what fails is said below
            mapped = is_archive or None
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        text = " ".join(str(error).split())
        if "Unsupported operand" in text:  # torch writes no such instruction
            if is_archive:
                return {"problem": "it is damaged."}
            return {"needs_code": "a pickle that torch.save did not write"}
        asks = "GLOBAL" in text or "Unsupported global" in text or "allowlist" in text
        if asks or "Unsupported" in text or "persistent" in text:
            return {"needs_code": text.partition("GLOBAL ")[2].split(" ")[0] or "an object"}
        return {"problem": "it is damaged, or no torch file."}
    except (RuntimeError, ValueError, EOFError, KeyError, AttributeError, IndexError, TypeError,
            MemoryError, OverflowError, AssertionError) as error:  # fmt: skip
        return {"problem": " ".join(str(error).split())[:200] or type(error).__name__}
    walk = Walk(path, scratch)
    walk.value(loaded, "", "model")
    return {"tensors": walk.tensors, "groups": walk.groups}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for asked in sys.stdin:
        path, scratch = json.loads(asked)
        print(json.dumps(read(Path(path), Path(scratch))), flush=True)
