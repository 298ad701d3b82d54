"""A child that says where the tensors of torch files lie, one line of JSON for each line that asks.

    python -m ampscope.ext.checkpoints.child     <- ["model.pt", "/tmp/scratch"]
                                                   -> {"tensors": [...], "groups": [...], ...}

A file is opened by ``torch.load(weights_only=True, mmap=True)``: no code of it runs, and no
number is read. What lies in the file as a tensor has it is reported by its offset there; what does
not (older files, those of a big-endian machine, transposed views) is written to a file in the
scratch folder, in all no more than the file has bytes, or twice as many of older files and those of
a big-endian machine. A tensor that repeats elements of its storage is reported as the stretch of
the storage that it spans, a sparse one as its stored values.

A file may come from anywhere, and a pickle of some bytes can name one object any number of times:
each container is looked at once, names and tensors are counted against the file's size, and the
process has a limit of memory and of processor time for each file. A whole file can be beyond a
limit, too, and is not called damaged.
"""

from __future__ import annotations

import cmath
import json
import os
import pickle
import resource
import struct
import sys
import tarfile
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DEEPEST = 64
MOST_TENSORS = 1_000_000  # 100,000 parameters with their moments and steps of Adam are 400,000
_WHOLES = {torch.qint8: torch.int8, torch.qint32: torch.int32}  # of quantized tensors
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_STORAGES = (torch.TypedStorage, torch.UntypedStorage)
_LOOKED_AT = (Tensor, float, complex, *_CONTAINERS, *_STORAGES)
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex32: "C32", torch.complex64: "C64", torch.complex128: "C128",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip


MEMORY = 512 * 2**20  # bytes that reading a file may take, beside four times its size
PROCESSOR_S = 30  # of processor time, and a second more for each SLOWEST bytes
SLOWEST = 50_000_000
RECORDS_A_SECOND = 2_000  # of an archive's storages; a second more for each so many
NAMES = 1_000_000  # characters of names, beside four times the file's size
LONGEST_NAMES = 200 * MOST_TENSORS  # of any file
_OF_A_TENSOR = 64  # characters that a tensor counts for beside its name
_TOO_MUCH_MEMORY = "opening it took more memory than is allowed for its size"


class DamagedFile(Exception):  # noqa: N818  # says what happened
    """The file is none that torch.save wrote whole; says why, to follow a colon."""


class Beyond(Exception):  # noqa: N818  # says what happened
    """The file may be whole and is not read; says why, as a clause."""


class Walk:
    """Collects tensors and parameter groups of what was loaded. Raises DamagedFile, Beyond."""

    def __init__(self, path: Path, scratch: Path, records: Mapping[int, int] | None) -> None:
        """``records``: sizes of the archive's entries by their offset; None of older files."""
        self.tensors: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._passed_over: dict[str, tuple[str, int]] = {}  # by why: the first's name, how many
        self._scales_kept: list[Tensor] = []
        self._path = path
        self._records = records
        self._maps = _mappings(path)
        self._is_swapped = records is not None and not _is_little_endian(path)
        self._scratch = scratch / f"tensors-{os.getpid()}-{len(list(scratch.iterdir()))}"
        self._end = 0
        size = path.stat().st_size
        # Of older and of big-endian files everything is written aside: storages once, and views as
        # of other archives.
        self._disk = size if records is not None and not self._is_swapped else 2 * size
        self._names = min(4 * size + NAMES, LONGEST_NAMES)
        self._aside: dict[object, int] = {}  # offset in the scratch file by what was written

    def all(self, loaded: object) -> None:
        """All tensors inside ``loaded``, by dotted names. A container that is named twice is looked
        at where it is named first, unless that is too deep."""
        seen: set[int] = set()
        within: list[Iterator[tuple[object, str, str]]] = [iter([(loaded, "", "model")])]
        while within:
            for value, name, kind in within[-1]:
                container = value
                if isinstance(value, Tensor):
                    self._tensor(value, name, kind)
                    container = vars(value)  # attributes are saved, too
                    if not container:
                        continue
                if isinstance(value, float | complex):
                    if not cmath.isfinite(value):
                        self._pass_over(f"{value} is no tensor's, and is not judged", name)
                elif isinstance(value, _STORAGES):
                    self._pass_over("a storage without a tensor", name)
                elif isinstance(container, _CONTAINERS) and id(container) not in seen:
                    if len(within) > DEEPEST:
                        self._pass_over(f"what lies more than {DEEPEST} deep", name)
                        continue
                    seen.add(id(container))
                    within.append(self._parts(container, name, kind))
                    break
            else:
                within.pop()
        for why, (name, count) in self._passed_over.items():
            more = f" and {count - 1:,} more" if count > 1 else ""
            self.left_out.append(f"{name}{more}: {why}.")

    def _pass_over(self, why: str, name: str) -> None:
        """What is not looked at, by the first of that sort."""
        first, count = self._passed_over.get(why, (name[:80], 0))
        self._passed_over[why] = first, count + 1

    def _parts(self, value: Any, name: str, kind: str) -> Iterator[tuple[object, str, str]]:
        """Tensors and containers in a container, with their names and kinds."""
        pairs: Any = enumerate(value)
        if isinstance(value, Mapping):
            pairs = value.items()
            if _is_optimizer(value):
                kind = "optimizer"
                self._groups(value, name)
        for key, part in pairs:
            word = str(key)
            if isinstance(key, Tensor | tuple):
                word = "a key"
                yield key, f"{name}.{word}" if name else word, kind
            if isinstance(part, _LOOKED_AT):
                yield part, f"{name}.{word}" if name else word, kind
        if isinstance(value, OrderedDict) and vars(value):  # attributes, as of a tensor
            yield vars(value), name, kind

    def _groups(self, optimizer: Mapping[str, Any], name: str) -> None:
        prefix = f"{name}.state." if name else "state."
        for place, group in enumerate(optimizer["param_groups"]):
            if not isinstance(group, Mapping):
                continue
            betas, epsilon, states = group.get("betas"), group.get("eps"), group.get("params", ())
            pair = betas if isinstance(betas, list | tuple) and len(betas) == 2 else ()
            decays = [_number(value) for value in pair]
            named = states if isinstance(states, list | tuple) else ()
            usual = [n for n in named if isinstance(n, int | str)]
            known = []
            for n in usual:
                if n in optimizer["state"]:  # without momentum, SGD has no state
                    known.append(f"{prefix}{n}.")
                    self._count(len(known[-1]))
            is_odd = None in decays or (epsilon is not None and _number(epsilon) is None)
            if is_odd or len(usual) < len(named) or named is not states:
                where = f"{name}.param_groups.{place}" if name else f"param_groups.{place}"
                self.left_out.append(f"{where} has betas, eps or params that no optimizer writes.")
            self.groups.append(
                {
                    "states": known,
                    "betas": decays if pair and None not in decays else None,
                    "eps": _number(epsilon),
                }
            )

    def _count(self, characters: int) -> None:
        self._names -= characters
        if self._names < 0:
            raise DamagedFile("it names more tensors than its size allows")

    def _tensor(self, tensor: Tensor, name: str, kind: str) -> None:
        tensor = tensor.detach()
        if tensor.is_meta:
            self._pass_over("on the device meta, which keeps no numbers", name)
            return
        self._count(len(name) + _OF_A_TENSOR)
        if len(self.tensors) >= MOST_TENSORS:
            raise Beyond(f"it names more than {MOST_TENSORS:,} tensors")
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()  # as stored: coalescing would copy them
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        tensor = _spanned(tensor)
        place = self._place(tensor)
        if tensor.is_quantized:
            self._scales(tensor, name, kind)
            whole = _WHOLES.get(tensor.dtype, torch.uint8)
            tensor = torch.empty(tensor.shape, dtype=whole, device="meta")
        self.tensors.append({
            "name": name, "kind": kind, "dtype": _NAMES.get(tensor.dtype, str(tensor.dtype)[6:]),
            "shape": list(tensor.shape), "size": tensor.numel() * tensor.itemsize, **place,
        })  # fmt: skip

    def _scales(self, tensor: Tensor, name: str, kind: str) -> None:
        """Of a quantized tensor, which stand beside its integers."""
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scales = torch.tensor([tensor.q_scale()], dtype=torch.float64)
        else:
            scales = tensor.q_per_channel_scales()
        self._scales_kept.append(scales)  # what is written aside is known by its address
        self._tensor(scales, f"{name}.scale", kind)

    def _place(self, tensor: Tensor) -> dict[str, Any]:
        """The file, and the offset there, at which the tensor's numbers lie in its order."""
        if not tensor.numel():
            return {"file": str(self._path), "offset": 0}
        storage = tensor.untyped_storage()
        begin = self._offset(storage)
        within = tensor.storage_offset() * tensor.itemsize
        is_lazy = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
        if not tensor.is_contiguous() or is_lazy:
            what = (tensor.data_ptr(), *tensor.shape, *tensor.stride(), tensor.dtype, is_lazy)
            numbers = tensor.int_repr() if tensor.is_quantized else tensor
            # A view of single bytes: NumPy has no bf16.
            plain = numbers.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return {"file": str(self._scratch), "offset": self._written(what, plain)}
        if begin is not None:
            return {"file": str(self._path), "offset": begin + within}
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        offset = self._written((storage.data_ptr(), storage.nbytes()), whole)
        return {"file": str(self._scratch), "offset": offset + within}

    def _offset(self, storage: torch.UntypedStorage) -> int | None:
        """Where a storage lies in the file; None where it does not."""
        address, size = storage.data_ptr(), storage.nbytes()
        for begin, end, offset in self._maps:
            if begin <= address < end:
                found = address - begin + offset
                if self._records is not None and size > self._records.get(found, 0):
                    raise DamagedFile("a tensor claims more elements than its storage holds")
                # torch has turned the bytes round in memory, not in the file.
                return None if self._is_swapped else found
        return None

    def _written(self, what: tuple[object, ...], numbers: Tensor) -> int:
        """Where in the scratch file these bytes lie, which are written once."""
        if what not in self._aside:
            self._disk -= numbers.numel()
            if self._disk < 0:
                raise DamagedFile("its tensors claim more than its size")
            self._aside[what] = self._end
            with self._scratch.open("ab") as file:
                for start in range(0, numbers.numel(), 1 << 24):
                    file.write(numbers[start : start + (1 << 24)].numpy().tobytes())
            self._end += numbers.numel()
        return self._aside[what]


def _spanned(tensor: Tensor) -> Tensor:
    """The tensor; where it repeats elements of its storage, the stretch of it that it spans."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * step for length, step in sides)
    if tensor.numel() <= max(span, 0):  # it is below zero where two sides are empty
        return tensor
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def _number(value: object) -> float | None:
    """None of what is no number."""
    try:
        return float(value) if isinstance(value, int | float | Tensor) else None
    except (RuntimeError, ValueError, OverflowError):
        return None


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


def _records(path: Path) -> dict[int, int]:
    """Size of each storage of an archive by its offset in the file. Raises DamagedFile where torch
    did not write it: torch itself believes what the pickle says."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            for entry in entries:
                found[_begin(file, entry)] = entry.file_size
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise DamagedFile("its table of contents is missing or damaged: it was cut short") from None
    if not any(entry.filename.endswith("/data.pkl") for entry in entries):
        raise DamagedFile("it has no data.pkl")
    # torch writes entries as they are; a compressed one could unpack to any size.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DamagedFile("an entry is compressed")
    return found


def _is_little_endian(path: Path) -> bool:
    """Whether all that the archive says of the order of its bytes, if anything, is that."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        # torch finds an entry whatever the case of its letters.
        said = [e for e in archive.infolist() if e.filename.lower().endswith("/byteorder")]
        return all(e.file_size == 6 and _content(file, e, 6) == b"little" for e in said)


def _begin(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes lie in the file. Raises BadZipFile behind the file's end."""
    file.seek(entry.header_offset + 26)
    lengths = file.read(4)  # of the name and of what follows it, in the entry's header
    if len(lengths) < 4:
        raise zipfile.BadZipFile
    name, more = struct.unpack("<HH", lengths)
    return int(entry.header_offset + 30 + name + more)


def _content(file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> bytes:
    """The first bytes of a stored entry, whose checksum torch can be told not to compute."""
    file.seek(_begin(file, entry))
    return file.read(size)


def _refuse_tar(path: Path) -> None:
    """Of torch before 0.1.10, whose parts torch would unpack into a folder."""
    try:
        tarfile.open(path, "r:").close()
    except tarfile.TarError:
        return
    raise DamagedFile("it is a tar file, as only torch before 0.1.10 wrote it")


def read(path: Path, scratch: Path) -> dict[str, Any]:
    """What the parent is told of ``path``."""
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    try:
        records = _records(path) if is_archive else None
        if records is None:
            _refuse_tar(path)
        else:
            _allow_for(len(records))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle's protocol; what fails is said below
            mapped = is_archive or None
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        walk = Walk(path, scratch, records)
        walk.all(loaded)
    except DamagedFile as error:
        return {"damaged": str(error)}
    except Beyond as error:
        return {"beyond": str(error)}
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
    except MemoryError:
        return {"beyond": _TOO_MUCH_MEMORY}
    except (RuntimeError, ValueError, EOFError, KeyError, AttributeError, IndexError, TypeError,
            OverflowError, AssertionError) as error:  # fmt: skip
        text = " ".join(str(error).split())
        if "allocate memory" in text:  # torch's words, also where a file cannot be mapped
            return {"beyond": _TOO_MUCH_MEMORY}
        return {"problem": text[:200] or type(error).__name__}
    return {"tensors": walk.tensors, "groups": walk.groups, "left_out": walk.left_out}


def _limit(path: Path) -> None:
    """Limits of this process, for a file of that size. What was taken before counts from now on."""
    size = path.stat().st_size
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = next((int(x.split()[1]) * 1024 for x in status.splitlines() if "VmData" in x), 0)
    seconds = int(time.process_time()) + PROCESSOR_S + size // SLOWEST
    for what, most in (
        (resource.RLIMIT_DATA, held + MEMORY + 4 * size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),  # which is what becomes of a process at its limit of time
    ):
        _set_limit(what, most)


def _allow_for(records: int) -> None:
    """Raise the limit of processor time, where there is one, by what so many storages take."""
    seconds = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if seconds >= 0:
        more = min(records, MOST_TENSORS) // RECORDS_A_SECOND
        _set_limit(resource.RLIMIT_CPU, seconds + more)


def _set_limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))


if __name__ == "__main__":
    torch.set_num_threads(1)  # before there are others, whose stacks would count as memory
    warnings.simplefilter("ignore")
    for asked in sys.stdin:
        path, scratch = map(Path, json.loads(asked))
        _limit(path)
        try:
            said = json.dumps(read(path, scratch))
        except MemoryError:
            said = json.dumps({"beyond": _TOO_MUCH_MEMORY})
        print(said, flush=True)
