"""Where the tensors of a checkpoint lie: names, dtypes, shapes, and places in files.

A safetensors file is read here: eight bytes with the length of a JSON text, that text, then the
numbers (huggingface.co/docs/safetensors, "Format"). Everything in the text is checked before it is
believed, as the file may come from anywhere::

    {"fc.weight": {"dtype": "F16", "shape": [4, 8], "data_offsets": [0, 64]}, "__metadata__": {…}}

A torch file (``torch.save``) is opened in a child process by ``torch.load(weights_only=True)``
alone, which runs no code of the file; it reports where in the file each tensor lies
(ampscope.ext.checkpoints.child). Numbers are read by this process in small pieces, so that
memory does not grow with the file.

What a file costs follows its size: a header is counted before it is parsed, and the child has
limits of memory, of processor time and of temporary disk. What is beyond these may be whole, and
is not called damaged.

Folders and ``*.index.json`` files stand for all their parts.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ampscope.errors import BadInput
from ampscope.ext.checkpoints.torch_files import MAY_BE_WHOLE, TorchFiles

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
LONGEST_INDEX = 100_000_000  # bytes
MOST_TENSORS = 250_000  # of one safetensors file or index; the largest known models have 140,000
_MOST_BRACKETS = 3 * MOST_TENSORS  # of JSON: a tensor has an object and two lists
_MOST_COMMAS = 8 * MOST_TENSORS
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "C128": 128, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
_INDEX = ".index.json"
_MAGIC_OF_ZIP = b"PK\x03\x04"
_POINTER_OF_LFS = b"version https://git-lfs.github.com/"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MOST_NAMED = 3  # files of a folder of which none can be read


class NeedsCode(BadInput):
    """A torch file that holds more than tensors, numbers, texts and containers of these."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: ``size`` bytes at ``offset`` of ``file``."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int
    kind: str = "model"  # or "optimizer", "ema"
    part: str = ""  # which file of a folder, where several of its files use the same names

    @property
    def label(self) -> str:
        """The name, behind the file that holds it where that is needed to tell tensors apart."""
        return f"{self.part}: {self.name}" if self.part else self.name

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of an optimizer: the prefixes of its states' names, and its options."""

    states: tuple[str, ...]
    betas: tuple[float, float] | None
    epsilon: float | None
    part: str = ""  # as of the tensors


@dataclass(slots=True)
class Checkpoint:
    """What was found under one path."""

    path: Path
    tensors: list[StoredTensor] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # sentences
    unreadable: list[str] = field(default_factory=list)  # of a folder's files, sentences

    def add(self, other: Checkpoint) -> None:
        """All that another one holds, too."""
        self.tensors += other.tensors
        self.groups += other.groups
        self.left_out += other.left_out

    def of_part(self, part: str) -> Checkpoint:
        """The same with ``part`` at each tensor and group."""
        tensors = [replace(tensor, part=part) for tensor in self.tensors]
        return replace(self, tensors=tensors, groups=[replace(g, part=part) for g in self.groups])


def opened(path: Path, scratch: Path, torch_files: TorchFiles) -> Checkpoint:
    """What ``path`` holds: a file, an index of shards, or a folder. ``scratch`` is a folder for
    what cannot be read where it lies. Raises BadInput with one sentence for anything else."""
    source = _Source(scratch, torch_files)
    try:
        return source.folder(path) if path.is_dir() else source.file(path)
    except OSError as error:
        raise BadInput(f"Cannot read {path}: {error.strerror or error}.") from error


def checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints that ``path`` names: of a folder, each folder in it or below that holds files
    of checkpoints. A link to a folder is not followed."""
    if not path.is_dir():
        return [path]
    found = [Path(where) for where, _, names in os.walk(path) if any(map(_is_named_so, names))]
    return sorted(found) or [path]


def _is_named_so(name: str) -> bool:
    return name.endswith((_INDEX, ".safetensors", *_TORCH_SUFFIXES))


def safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, checked. Raises BadInput, OSError."""

    def wrong(what: str) -> BadInput:
        return BadInput(f"{path} is no whole safetensors file: {what}. Save or download it again.")

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 10:
            raise wrong(f"it has {size} bytes, and the shortest has 10")
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEADER_LIMIT:
            raise wrong(
                f"its header would be {length:,} bytes long, above the limit of 100,000,000"
            )
        if 8 + length > size:
            raise wrong(f"its header would be {length:,} bytes long, and the file has {size:,}")
        text = file.read(length)
    if _holds_too_much(text):
        raise wrong(f"its header holds more than {MOST_TENSORS:,} tensors need")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise wrong("its header is not JSON") from None
    if not isinstance(header, dict):
        raise wrong("its header is no object")
    header.pop("__metadata__", None)
    begin = 8 + length
    found = []
    for name, entry in header.items():
        tensor = _tensor(name, entry, path, begin)
        if tensor is None:
            raise wrong(f"the entry of tensor {name[:80]!r} contradicts itself or is unknown")
        found.append(tensor)
    end = begin
    for tensor in sorted(found, key=lambda t: (t.offset, t.size)):
        if tensor.offset != end:
            raise wrong(f"tensor {tensor.name[:80]!r} does not begin where the one before ends")
        end += tensor.size
    if end > size:
        raise wrong(f"it should have {end:,} bytes and has {size:,}: it was cut short")
    if end < size:
        raise wrong(f"{size - end:,} bytes behind the last tensor belong to none")
    return found


def _holds_too_much(text: bytes) -> bool:
    """Of JSON that is not yet parsed: two bytes of it can become an object of 64."""
    brackets = text.count(b"{") + text.count(b"[")
    return brackets > _MOST_BRACKETS or text.count(b",") > _MOST_COMMAS


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _tensor(name: str, entry: object, path: Path, begin: int) -> StoredTensor | None:
    """None where the entry of a header is not as the format wants it."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        return None
    numbers = [*shape, *offsets]
    # type, not isinstance: True is no length
    if dtype not in _BITS or len(offsets) != 2 or len(shape) > 64:
        return None
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
        return None
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or offsets[0] + bits // 8 != offsets[1]:
        return None
    return StoredTensor(name, dtype, tuple(shape), path, begin + offsets[0], bits // 8)


class _Source:
    """Reads files, indices and folders, with what they share."""

    def __init__(self, scratch: Path, torch_files: TorchFiles) -> None:
        self._scratch = scratch
        self._torch_files = torch_files

    def file(self, path: Path) -> Checkpoint:
        """A checkpoint, or an index of shards."""
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path} is no file: name a checkpoint.")
        if path.name.endswith(_INDEX):
            return self._index(path)
        with path.open("rb") as file:
            start, size = file.read(16), os.fstat(file.fileno()).st_size
        if not size:
            raise BadInput(f"{path} is empty: nothing was saved in it, or saving was cut short.")
        if start == _POINTER_OF_LFS[: len(start)] and size < 1024:
            raise BadInput(f"{path} is a pointer of Git LFS, not the checkpoint: run git lfs pull.")
        if path.suffix == ".safetensors" or start[8:9] == b"{":
            return Checkpoint(path, safetensors(path))
        if start.startswith(_MAGIC_OF_ZIP) or start[:1] == b"\x80":  # a pickle's first byte
            return self._torch_file(path)
        raise BadInput(
            f"{path} is no checkpoint: it is neither a safetensors file nor one of torch.save."
        )

    def _torch_file(self, path: Path) -> Checkpoint:
        """A file of torch.save, of which a child process says where its tensors lie."""
        answer = self._torch_files.ask(path, self._scratch)
        if "damaged" in answer:
            damage = answer["damaged"][:300]
            raise BadInput(f"{path} is no whole torch file: {damage}. Save or download it again.")
        if "beyond" in answer:
            raise BadInput(f"{path} is not looked at: {answer['beyond'][:300]}. {MAY_BE_WHOLE}")
        if "needs_code" in answer:
            what = answer["needs_code"][:200]
            raise NeedsCode(
                f"{path} holds more than tensors ({what}): reading that could run its code. Save "
                "the state_dict alone, or as safetensors."
            )
        if "problem" in answer:
            raise BadInput(f"{path} is no torch file that can be read: {answer['problem'][:300]}")
        tensors = [
            StoredTensor(
                t["name"], t["dtype"], tuple(t["shape"]), Path(t["file"]), t["offset"],
                t["size"], t["kind"],
            )
            for t in answer["tensors"]
        ]  # fmt: skip
        groups = [
            Group(
                tuple(g["states"]), tuple(g["betas"]) if g["betas"] is not None else None, g["eps"]
            )
            for g in answer["groups"]
        ]
        left_out = [f"{path}: {text[:300]}" for text in answer["left_out"]]
        return Checkpoint(path, tensors, groups, left_out)

    def _index(self, path: Path) -> Checkpoint:
        """The shards that a ``*.index.json`` names, beside it."""
        if path.stat().st_size > LONGEST_INDEX:
            raise BadInput(f"{path} is no index of shards: it is larger than 100 MB.")
        text = path.read_bytes()
        if _holds_too_much(text):
            raise BadInput(
                f"{path} is no index of shards: it holds more than {MOST_TENSORS:,} tensors need."
            )
        try:
            table = json.loads(text.decode("utf-8"))
            shards = table["weight_map"]
            named = {str(name): str(shard) for name, shard in shards.items()}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise BadInput(
                f'{path} is no index of shards: it has no "weight_map" of names.'
            ) from None
        found = Checkpoint(path)
        for shard in sorted(set(named.values())):
            if Path(shard).name != shard or shard in ("", ".", ".."):
                raise BadInput(f"{path} names a shard outside its own folder: {shard[:80]!r}.")
            if shard.endswith(_INDEX):
                raise BadInput(
                    f"{path} names the shard {shard[:80]}, which is an index itself: it names no "
                    "tensor."
                )
            part = path.with_name(shard)
            if not part.is_file():
                raise BadInput(
                    f"{path} names the shard {shard[:80]}, which is missing: it was not saved."
                )
            found.add(self.file(part))
        held = {(tensor.name, tensor.file.name) for tensor in found.tensors}
        if lost := sorted(set(named.items()) - held):
            name, shard = lost[0]
            more = f", nor {len(lost) - 1:,} more where they should be" if len(lost) > 1 else ""
            raise BadInput(f"{path}: the shard {shard[:80]} does not hold {name[:80]!r}{more}.")
        return found

    def folder(self, folder: Path) -> Checkpoint:
        """All checkpoint files of a folder, shards once. One that cannot be read does not hide the
        others. Files that use the same names, such as those of several epochs, are told apart."""
        files = sorted(file for file in folder.iterdir() if file.is_file())
        found = Checkpoint(folder)
        parts: list[Checkpoint] = []
        done: set[str] = set()
        for index in (file for file in files if file.name.endswith(_INDEX)):
            try:
                parts.append(self._index(index))
                done |= {tensor.file.name for tensor in parts[-1].tensors}
            except BadInput as error:
                found.unreadable.append(str(error))
        for file in files:
            suffixes = (".safetensors", *_TORCH_SUFFIXES)
            if file.name in done or file.suffix not in suffixes:
                continue
            try:
                parts.append(self.file(file))
            except NeedsCode as error:  # of a trainer's folder: arguments, random states
                found.left_out.append(str(error))
            except BadInput as error:
                found.unreadable.append(str(error))
            except OSError as error:
                found.unreadable.append(f"Cannot read {file}: {error.strerror or error}.")
        if not parts:
            if found.unreadable:
                raise BadInput(" ".join(found.unreadable[:MOST_NAMED]))
            reason = f" {found.left_out[0]}" if found.left_out else ""
            raise BadInput(
                f"{folder} holds no checkpoint: no .safetensors and no torch file to read.{reason}"
            )
        uses = Counter(name for part in parts for name in {t.name for t in part.tensors})
        for part in parts:
            shares = any(uses[tensor.name] > 1 for tensor in part.tensors)
            found.add(part.of_part(part.path.name) if shares else part)
        return found


def pieces(tensor: StoredTensor, length: int) -> Iterator[tuple[int, int]]:
    """Offset and size in bytes of parts of at most ``length`` bytes."""
    for start in range(0, tensor.size, length):
        yield tensor.offset + start, min(length, tensor.size - start)
