"""A capsule as a file in the safetensors format: tensors, and a text that says what they are.

Nothing in it can run code. `load` checks everything before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from ampscope.errors import BadInput
from ampscope.formats import dtype_name
from ampscope.store.creation import make_folder
from ampscope.watcher.capsule import About, Capsule
from ampscope.watcher.forwards import Autocast, Forward, Past, Randomness
from ampscope.watcher.trees import Tensors, packed, unpacked

FORMAT = 1
MAX_FILE = 64 * 2**30  # bytes; `CapsuleLimits.mib` is 256 MiB unless a user asks for more
MAX_HEADER = 8 * 2**20  # of a model with 20,000 parameters about 3 MiB
MAX_PARTS, MAX_VALUES = 200_000, 600_000  # lists and objects, and commas, in the header
_ABOUT = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
_DTYPES = {dtype_name(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def save(capsule: Capsule, path: Path) -> None:
    """Write ``path``. It appears whole or not at all."""
    from safetensors.torch import save_file

    tensors: Tensors = {f"weight/{name}": t for name, t in capsule.weights.items()}
    described = [_described(f, i, tensors) for i, f in enumerate(capsule.forwards)]
    if capsule.past:
        tensors["past/norms"] = torch.tensor([list(p.norms) for p in capsule.past]).double()
    text: dict[str, Any] = {
        "format": FORMAT,
        "about": dataclasses.asdict(capsule.about),
        "forwards": described,
        "checks": dict(capsule.checks),
        "past": [[p.step, p.loss, p.scale] for p in capsule.past],
        "parameters": capsule.parameters,
    }
    make_folder(path.parent)
    partial = path.with_suffix(".part")
    # A capsule holds what the training saw: its owner alone may read it. The file is new each time,
    # so nobody has it open under wider permissions.
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    text["digest"] = digest(text, whole)
    save_file(whole, partial, _metadata(text))
    partial.chmod(0o600)
    partial.replace(path)


def load(path: Path) -> Capsule:
    """Raises BadInput for a file that is no capsule, or a damaged one."""
    from safetensors import safe_open

    try:
        _check_header(path)
        with safe_open(path, framework="pt") as file:
            text = json.loads((file.metadata() or {}).get("ampscope", "null"))
            if not isinstance(text, dict) or text.get("format") != FORMAT:
                raise BadInput(f"{path} is not a capsule of this ampscope.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        if text.pop("digest", None) != digest(text, tensors):
            raise BadInput(f"{path} is damaged: it does not hold what was written.")
        return _built(text, tensors)
    except FileNotFoundError:
        raise BadInput(f"There is no capsule at {path}.") from None
    except BadInput:
        raise
    except Exception as error:  # whatever a forged text leads to: it is no capsule
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path} is not a capsule, or damaged ({reason[:300]}).") from error


def _check_header(path: Path) -> None:
    """Raises BadInput before anything is read that would take much more memory than the file has
    bytes: the header is JSON, a length in 8 bytes in front of it
    (huggingface.co/docs/safetensors, Format)."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path} is no ordinary file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise BadInput(f"{path} is not a capsule: its header is cut off, or beyond bounds.")
        header = file.read(length)
    parts = header.count(b"{") + header.count(b"[")
    if size > MAX_FILE or parts > MAX_PARTS or header.count(b",") > MAX_VALUES:
        raise BadInput(f"{path} is not read: it holds more than any capsule of ampscope's.")


def digest(text: dict[str, Any], tensors: Tensors) -> str:
    """Of the text, all names and all numbers: a flipped bit would change what a replay says. It
    shows accidents; whoever changes a capsule on purpose can compute it anew."""
    state = hashlib.blake2b(json.dumps(text, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return state.hexdigest()


def _built(text: dict[str, Any], tensors: Tensors) -> Capsule:
    about = dict(text["about"])
    about["left_out"] = tuple(str(what) for what in about["left_out"])
    for field in dataclasses.fields(About):
        wanted = _ABOUT.get(str(field.type))
        if wanted and field.name in about and type(about[field.name]) not in wanted:
            raise ValueError(f"{field.name} is of type {type(about[field.name]).__name__}")
    norms = tensors.get("past/norms", torch.empty(0, 0)).numpy()
    past = [Past(s, loss, scale, norms[i]) for i, (s, loss, scale) in enumerate(text["past"])]
    weights = {
        name.partition("/")[2]: tensor
        for name, tensor in tensors.items()
        if name.startswith("weight/")
    }
    forwards = tuple(_forward(part, i, tensors) for i, part in enumerate(text["forwards"]))
    checks = {str(k): float(v) for k, v in text["checks"].items()}
    return Capsule(
        About(**about), forwards, weights, checks, tuple(past), tuple(text["parameters"])
    )


def _described(forward: Forward, number: int, tensors: Tensors) -> dict[str, object]:
    """The forward as JSON; its tensors go into ``tensors``."""
    name = f"forward{number}"
    tensors[f"{name}/random"] = forward.randomness.cpu
    if forward.randomness.cuda is not None:
        tensors[f"{name}/random_cuda"] = forward.randomness.cuda
    dtype = forward.autocast.dtype
    return {
        "model": forward.model,
        "module": forward.module,
        "args": packed(forward.args, f"{name}/args", tensors),
        "kwargs": packed(forward.kwargs, f"{name}/kwargs", tensors),
        "buffers": packed(forward.buffers, f"{name}/buffers", tensors),
        "gradients": packed(forward.gradients, f"{name}/gradients", tensors),
        "autocast": [forward.autocast.device, None if dtype is None else dtype_name(dtype)],
        "training": forward.training,
        "outputs": forward.outputs,
        "missing": forward.missing,
    }


def _forward(part: dict[str, Any], number: int, tensors: Tensors) -> Forward:
    name = f"forward{number}"
    device, dtype = part["autocast"]
    args, kwargs = unpacked(part["args"], tensors), unpacked(part["kwargs"], tensors)
    return Forward(
        str(part["model"]),
        str(part["module"]),
        args,
        kwargs,
        [],
        Autocast(str(device), None if dtype is None else _DTYPES[dtype]),
        Randomness(tensors[f"{name}/random"], tensors.get(f"{name}/random_cuda")),
        bool(part["training"]),
        unpacked(part["buffers"], tensors),
        int(part["outputs"]),
        {int(place): tensor for place, tensor in unpacked(part["gradients"], tensors).items()},
        [str(what) for what in part["missing"]],
    )


def _metadata(text: dict[str, Any]) -> dict[str, str]:
    return {"ampscope": json.dumps(text)}
