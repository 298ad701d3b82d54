"""A capsule: what one failing step needs to be run again, elsewhere and later.

It holds, for each forward of the step, the inputs, the gradients at the model's
output, random states and the buffers as they were; the norms of the last steps' gradients; and the
weights, where they fit. `contents` says it in words.

    capsule = collected(about, forwards, parameters, past, limits)   # copies, made at once
    save(capsule, path)

Also here: the file format, how a model's arguments are packed, and which steps are kept where.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ampscope.capture.tensors import has_own_memory, opened, plain
from ampscope.errors import BadInput
from ampscope.masks import is_secret, masked_value
from ampscope.number_words import plural
from ampscope.numerics.formats import dtype_name
from ampscope.record_json import Decoder, Refusal
from ampscope.records import Event
from ampscope.store.db import make_folder
from ampscope.watcher.alarms import CALIBRATED_BELOW
from ampscope.watcher.flight import Autocast, Forward, Randomness, StepSummary
from ampscope.watcher.models import WatchedModels

if TYPE_CHECKING:
    from ampscope.watcher.recorder import Recorder

SHARDED = "sharded"  # why a capsule has no weights


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


# A capsule as a file in the safetensors format: tensors, and a text that says what they are.
#
# Nothing in it can run code. `load` checks everything before it is used.


FORMAT = 1
MAX_FILE = 64 * 2**30  # bytes; `CapsuleLimits.mib` is 256 MiB unless a user asks for more
MAX_HEADER = 8 * 2**20  # of a model with 20,000 parameters about 3 MiB
MAX_PARTS, MAX_VALUES = 200_000, 600_000  # lists and objects, and commas, in the header
_DTYPES = {dtype_name(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


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
            part: _without_secrets(packed(getattr(forward, part), f"{name}/{part}", tensors))
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


# Arguments of a model as JSON and tensors, and back: no pickle, and nothing that can run code.
#
#     >>> tensors = {}
#     >>> packed((torch.ones(2), {"mask": None}), "args", tensors)
#     {'tuple': [{'tensor': 'args.0', 'grad': False}, {'dict': [['mask', {'value': None}]]}]}
#
# Tensors, numbers, texts, None, and tuples, lists and dicts of these are kept; named tuples as
# plain tuples, dict-like objects as dicts. Anything else is named in the text, and unpacks as
# :class:`NotKept`, on which a replay gives up.


Tensors = dict[str, Tensor]
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class NotKept:
    """Stands for an argument that a capsule cannot hold."""

    type: str


def packed(value: object, name: str, tensors: Tensors, depth: int = 0) -> dict[str, Any]:
    """``value`` as JSON; its tensors are added to ``tensors`` under names that begin with
    ``name``."""
    if isinstance(value, Tensor) and value.layout is torch.strided and has_own_memory(value):
        tensors[name] = value  # of a wrapper or another layout the numbers alone would say little
        return {"tensor": name, "grad": value.requires_grad}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if depth == MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return {"not kept": type(value).__name__}
    pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))
    parts = [
        (key, packed(part, f"{name}.{place}", tensors, depth + 1))
        for place, (key, part) in enumerate(pairs)
        if isinstance(key, str | int)
    ]
    if isinstance(value, Mapping):
        return {"dict": [list(pair) for pair in parts]}
    return {"list" if isinstance(value, list) else "tuple": [part for _, part in parts]}


def _without_secrets(tree: dict[str, Any], called: str = "") -> dict[str, Any]:
    """What :func:`packed` gave, as a file may hold it: a text with a secret, by what it or what
    holds it is ``called``, is not kept, since a model that ran with another text would say nothing
    of the step; the others are what a model may need."""
    ((kind, content),) = ((k, v) for k, v in tree.items() if k != "grad")
    if kind == "value" and isinstance(content, str):
        return tree if masked_value(called, content) == content else {"not kept": "secret text"}
    if kind == "dict":
        return {
            kind: [
                [key, _without_secrets(part, str(key) if is_secret(str(key)) else called)]
                for key, part in content
            ]
        }
    if kind in ("list", "tuple"):
        return {kind: [_without_secrets(part, called) for part in content]}
    return tree


def unpacked(tree: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of :func:`packed`. Raises KeyError or ValueError for what is not its result."""
    ((kind, content),) = ((k, v) for k, v in tree.items() if k != "grad")
    if kind == "tensor":
        tensor = tensors[content].detach()
        return tensor.requires_grad_() if tree.get("grad") is True else tensor
    if kind == "value":
        return content
    if kind == "dict":
        return {key: unpacked(part, tensors) for key, part in content}
    if kind == "list":
        return [unpacked(part, tensors) for part in content]
    if kind == "tuple":
        return tuple(unpacked(part, tensors) for part in content)
    if kind == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{content!r} is no dtype")
        return dtype
    if kind == "device":
        return torch.device(content)
    if kind == "not kept":
        return NotKept(str(content))
    raise ValueError(f"{kind!r} is no part of a capsule")


def first_not_kept(value: object) -> str:
    """The type of the first argument that is not in the capsule; "" when all are."""
    if isinstance(value, NotKept):
        return value.type
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return next((found for part in parts if (found := first_not_kept(part))), "")  # type: ignore[attr-defined]  # a container
    return ""


# Which failing steps are worth a capsule, and where the files go.
#
# GradScaler's calibration skips steps as a matter of course: finite loss, a few skips, a lower
# scale, and on; many at the start, from 65536 down to 64 at most. A capsule is kept of what is
# more: a loss that is not finite, bad gradients without a scaler to catch them, or many bad steps
# in a row. One of each streak, and one more where the first has no forward; the first ones stay,
# and the newest takes the last place.


MAX_REASON = 300
STREAK = 3  # later on, where a scale that was right is off by a factor of 2 at most


class CapsuleStore:
    """Keeps capsules of one run beside its store."""

    def __init__(
        self,
        models: WatchedModels,
        past: Iterable[Callable[[], StepSummary]],
        store: Path,
        limits: CapsuleLimits,
    ) -> None:
        self.paths: list[Path] = []
        self.last: Capsule | None = None  # in the host's memory, for a replay at once
        self._models = models
        self._past = past
        self._folder = store.with_name(f"{store.name}.capsules").absolute()
        self._limits = limits
        self._streak = 0
        self._was_good = False  # any step so far
        self._has_kept = self._has_bare = False  # of this streak; one without a forward

    def good(self) -> None:
        """A step went well: the streak is over."""
        self._streak, self._was_good = 0, True
        self._has_kept = self._has_bare = False

    def is_fault(self, scale: float | None, *, loss_is_bad: bool) -> bool:
        """A step went bad: whether it is more than a calibration of the loss scale."""
        self._streak += 1
        if loss_is_bad or scale is None:
            return True
        is_searching = not self._was_good and scale > CALIBRATED_BELOW
        return self._streak >= STREAK and not is_searching

    @property
    def has_room(self) -> bool:
        """Whether this streak has no capsule yet that can be run again, and any are wanted."""
        return bool(self._limits.count) and not self._has_kept

    def keep(
        self, about: About, forwards: Sequence[Forward], recorder: Recorder, *, without_weights: str
    ) -> Event:
        """Copy what is needed now; the recorder's thread writes the file, and an event of its own
        says so if that fails. The event says what is in it. ``without_weights`` is why the weights
        are not those of the step."""
        self._has_kept = True
        parameters = {p.name: p.tensor for p in self._models.parameters}
        past = [make() for make in self._past]
        self.last = capsule = collected(
            about, forwards, parameters, past, self._limits, without_weights=without_weights
        )
        self._has_kept = bool(capsule.forwards) or self._has_bare
        self._has_bare = not capsule.forwards
        name = f"{about.run}-rank{about.rank}-step{about.step}.safetensors"
        path = self._folder / name
        old = self.paths.pop() if len(self.paths) >= self._limits.count else None
        self.paths.append(path)

        def write() -> None:
            try:
                save(capsule, path)
                if old is not None:
                    old.unlink(missing_ok=True)
            except Exception as error:  # a full disk, a dtype that the format does not know
                self.paths = [kept for kept in self.paths if kept != path]
                reason = f"The capsule of step {about.step} could not be written: {error}"
                recorder.event(Event(about.step, "note", "no capsule", reason[:MAX_REASON]))

        recorder.later(write)
        text = f"{about.reason} Kept: {capsule.contents}."
        return Event(about.step, "capsule", name, text, path=os.fspath(path))
