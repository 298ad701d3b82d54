"""A capsule: what one failing step needs to be run again, elsewhere and later.

It holds, for each forward of the step, the inputs, the gradients at the model's
output, random states and the buffers as they were; the norms of the last steps' gradients; and the
weights, where they fit. `contents` says it in words.

    capsule = collected(about, forwards, parameters, past, limits)   # copies, made at once
    save(capsule, path)
    capsule = load(path)                                             # checked before it is used

The file is in the safetensors format: tensors, and a text that says what they are. Nothing in it
can run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ampscope.capture.tensors import opened, plain
from ampscope.errors import BadInput
from ampscope.number_words import plural
from ampscope.numerics.formats import dtype_name
from ampscope.record_json import Decoder, Refusal
from ampscope.store.db import make_folder
from ampscope.watcher.flight import Autocast, Forward, Randomness, StepSummary
from ampscope.watcher.packed_values import Tensors, packed, unpacked, without_secrets

SHARDED = "sharded"  # why a capsule has no weights
FORMAT = 1
MAX_FILE = 64 * 2**30  # bytes; `CapsuleLimits.mib` is 256 MiB unless a user asks for more
MAX_HEADER = 8 * 2**20  # of a model with 20,000 parameters about 3 MiB
MAX_PARTS, MAX_VALUES = 200_000, 600_000  # lists and objects, and commas, in the header
_DTYPES = {dtype_name(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True, slots=True)
class CapsuleLimits:
    """How much a run may keep: the first capsules and the newest one."""

    count: int = 3  # of one run and rank; 0 keeps none
    mib: float = 256.0  # of one capsule
    weights: bool = True  # keep the weights too, where they fit


@dataclass(frozen=True, slots=True)
class About:
    """What a capsule is of."""

    run: str
    step: int
    rank: int
    where: str  # the first sign: loss, output gradient, backward
    reason: str  # the same as a sentence
    scale: float
    policy: str  # whose autocast rules: cuda, native
    torch: str
    has_weights: bool = False
    left_out: tuple[str, ...] = ()  # what did not fit or cannot be kept


@dataclass(frozen=True, slots=True)
class Capsule:
    """A step that can be run again."""

    about: About
    forwards: tuple[Forward, ...]
    weights: Mapping[str, Tensor]  # by dotted name, the model's in front with several
    checks: Mapping[str, float]  # a sum over each parameter: other weights have others
    past: tuple[StepSummary, ...]
    parameters: tuple[str, ...]  # the names of the norms in `past`

    @property
    def is_of_a_part(self) -> bool:
        """Each rank held a part of the weights: nothing in it distinguishes them from others."""
        return f"the weights ({SHARDED})" in self.about.left_out

    @property
    def contents(self) -> str:
        """One line on what is in it."""
        gradients = sum(len(f.gradients) for f in self.forwards)
        parts = [
            f"{plural(len(self.forwards), 'forward call')} with inputs, random state and buffers",
            f"{plural(gradients, 'gradient')} at outputs",
            *([f"norms of the last {len(self.past)} steps"] if self.past else []),
            f"{len(self.weights)} weights" if self.weights else "no weights",
        ]
        left = f"; left out: {', '.join(self.about.left_out)}" if self.about.left_out else ""
        return ", ".join(parts) + left


def collected(
    about: About,
    forwards: Sequence[Forward],
    parameters: Mapping[str, Tensor],
    past: Sequence[StepSummary],
    limits: CapsuleLimits,
    *,
    without_weights: str = "",
) -> Capsule:
    """A capsule of copies in the host's memory, made at once: the training goes on afterwards.

    What does not fit is left out in this order: the weights, then the earlier forwards.
    ``without_weights`` is a reason why ``parameters`` are not what the step ran with.
    """
    left_out = list(about.left_out)
    kept, room = [], limits.mib * 2**20
    for forward in reversed(forwards):
        if not forward.has_inputs:
            left_out.append(f"a call of {forward.model} (too large to be held for a step longer)")
            continue
        if not forward.is_intact:
            left_out.append(f"a call of {forward.model} whose inputs were overwritten")
            continue
        size = _bytes((forward.args, forward.kwargs, forward.gradients, forward.buffers))
        if size > room:
            left_out.append(f"a call of {forward.model} ({size / 2**20:.0f} MiB)")
            continue
        room -= size
        left_out += [f"{what} of {forward.model}" for what in forward.missing]
        kept.append(_copy(forward))
    weights: Tensors = {}
    if not without_weights:
        weights = {n: v for n, t in parameters.items() if (v := opened(t)) is not None}
        if len(weights) < len(parameters):
            weights, without_weights = {}, "some parameters cannot be read"
    has_weights = limits.weights and 0 < sum(map(_bytes, weights.values())) <= room
    if not has_weights:
        left_out.append(f"the weights ({without_weights or 'too large, or not wanted'})")
    return Capsule(
        dataclasses.replace(about, has_weights=has_weights, left_out=tuple(left_out)),
        tuple(reversed(kept)),
        {n: t.detach().cpu().clone() for n, t in weights.items()} if has_weights else {},
        {name: check(tensor) for name, tensor in weights.items()},
        tuple(past),
        tuple(parameters),
    )


def check(tensor: Tensor) -> float:
    """A sum that distinguishes one set of weights from another."""
    return float(plain(tensor).detach().sum(dtype=torch.float64))


def _copy(forward: Forward) -> Forward:
    """In the host's memory, on its own."""
    return dataclasses.replace(
        forward,
        versions=[],
        **{part: _copied(getattr(forward, part)) for part in _TREES},
    )


def _copied(value: Any) -> Any:
    tensors: Tensors = {}
    tree = packed(value, "", tensors)
    return unpacked(tree, {name: t.detach().cpu().clone() for name, t in tensors.items()})


def _bytes(value: object) -> int:
    tensors: Tensors = {}
    packed(value, "", tensors)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def save(capsule: Capsule, path: Path) -> None:
    """Write ``path``. It appears whole or not at all."""
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
    # so no process has it open under wider permissions.
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    text["digest"] = digest(text, whole)
    save_file(whole, partial, {"ampscope": json.dumps(text)})
    partial.chmod(0o600)
    partial.replace(path)


def load(path: Path) -> Capsule:
    """Raises BadInput for a file that is no capsule, or a damaged one."""
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
    except BadInput as error:
        if not isinstance(error, Refusal):
            raise
        raise BadInput(f"{path} is not a capsule, or damaged ({error}).") from error
    except OSError as error:
        raise BadInput(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # whatever a forged text leads to: it is no capsule
        reason = "what it says is not as ampscope writes it"
        if isinstance(error, SafetensorError):
            reason = str(error)[:300]
        raise BadInput(f"{path} is not a capsule, or damaged ({reason}).") from error


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
    shows accidents; a user who changes a capsule on purpose can recompute it."""
    state = hashlib.blake2b(json.dumps(text, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return state.hexdigest()


def _built(text: dict[str, Any], tensors: Tensors) -> Capsule:
    about = Decoder().record(About, text["about"])
    told = Decoder().record(_Told, {"past": text["past"], "parameters": text["parameters"]})
    norms = tensors.get("past/norms", torch.empty(0, len(told.parameters))).double().numpy()
    if norms.shape != (len(told.past), len(told.parameters)):
        raise Refusal("value", "the norms of its last steps are not one for each parameter")
    past = [StepSummary(*step, norms[i]) for i, step in enumerate(told.past)]
    weights = {
        name.partition("/")[2]: tensor
        for name, tensor in tensors.items()
        if name.startswith("weight/")
    }
    uses = _Uses(tensors)
    forwards = tuple(_forward(part, i, uses) for i, part in enumerate(text["forwards"]))
    checks = {str(k): float(v) for k, v in text["checks"].items()}
    return Capsule(about, forwards, weights, checks, tuple(past), told.parameters)


@dataclass(frozen=True, slots=True)
class _Told:
    """Of a capsule's text: what a user is told of the steps before."""

    past: tuple[tuple[int, float | None, float | None], ...]  # step, loss, scale
    parameters: tuple[str, ...]


class _Uses(Mapping[str, Tensor]):
    """The tensors of a file, each use counted: in all no more bytes than the file has are unpacked.
    :func:`packed` gives every use a name of its own; a text that names one tensor many times would
    get as many gradients of it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._room = sum(t.nbytes for t in tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self._room -= tensor.nbytes
        if self._room < 0:
            raise Refusal("value", "it unpacks to more than its size")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


_TREES = ("args", "kwargs", "buffers", "gradients")  # of a forward: what holds tensors


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
        **{
            part: without_secrets(packed(getattr(forward, part), f"{name}/{part}", tensors))
            for part in _TREES
        },
        "autocast": [forward.autocast.device, None if dtype is None else dtype_name(dtype)],
        "training": forward.training,
        "outputs": forward.outputs,
        "missing": forward.missing,
    }


def _forward(part: dict[str, Any], number: int, tensors: Mapping[str, Tensor]) -> Forward:
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
