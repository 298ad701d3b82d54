"""What is not recorded, and what is not handed on: secrets, and whatever a user leaves out.

A run records the arguments of its script, its paths, the machine's name and lines of its source
(docs/privacy.md). Every text on its way into a store passes :func:`recorded_text`, or one of those
beside it; :mod:`ampscope.masks` takes the secrets out.

``AMPSCOPE_LEAVE_OUT=arguments,host,paths,source`` (``--leave-out``) leaves more out. A child that
needs what the store does not hold gets it through a file for its user alone (:func:`leave`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

from ampscope.errors import BadInput
from ampscope.masks import (
    hide_environment,
    hide_secrets_of,
    masked,
    masked_by_pattern,
    masked_place,
    masked_source,
    masked_text,
)
from ampscope.records import Machine, RunSpec
from ampscope.secret_forms import MASK
from ampscope.store.processes import process_start_time

T = TypeVar("T")
ARGUMENTS_LEFT_OUT = "(left out)"  # stands for all arguments of a script
VARIABLE = "AMPSCOPE_LEAVE_OUT"
PARTS = ("arguments", "host", "paths", "source")
SHORTEST_HOST = 4  # characters: a shorter name would be found in half of all words

_FOLDERS = re.compile(r"(?<![\w.:/~-])(?:~|/)(?:[^/\s:\"'<>|]+/)+|(?<![\w.:/~-])/(?=[\w.])")
_SOURCE_LINE = re.compile(r"(?m)^( *)File (\".*\", line \d+.*)\n(?:\1  .*\n?)+")


def is_masked(args: Sequence[str]) -> bool:
    """Whether stored arguments lack something, so that the script cannot be run with them."""
    return any(MASK in arg for arg in args) or tuple(args) == (ARGUMENTS_LEFT_OUT,)


def leaves_out(part: str) -> bool:
    """Whether ``part`` of :data:`PARTS` is not to be recorded. Raises BadInput for other names."""
    return part in _left_out(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _left_out(text: str) -> frozenset[str]:
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := names - set(PARTS):
        raise BadInput(f"{min(unknown)!r} cannot be left out. Name some of: {', '.join(PARTS)}.")
    return frozenset(names)


def recorded(spec: RunSpec) -> RunSpec:
    """``spec`` as it is stored: masked, and without what is left out."""
    hide_environment()
    args = masked(spec.args)
    if args and leaves_out("arguments") and spec.kind == "script":
        args = (ARGUMENTS_LEFT_OUT,)
    workload = PurePath(spec.workload).name if leaves_out("paths") else spec.workload
    return replace(spec, args=args, workload=masked_place(workload))


def recorded_machine(machine: Machine) -> Machine:
    """The machine as the store may hold it: without its host name where that is left out."""
    return replace(machine, host="") if leaves_out("host") else machine


def recorded_text(text: str) -> str:
    """A text for a person on its way into a store."""
    return _as_left_out(masked_text(text))


def recorded_place(text: str) -> str:
    """The path of a file or the name of a line on its way into a store: it still names it."""
    return _as_left_out(masked_place(text))


def recorded_source(text: str, *, parsed: bool = True) -> str:
    """Lines of a program on their way into a store, as many as they were; by patterns alone where
    they are not ``parsed``."""
    return _as_left_out(masked_source(text) if parsed else masked_by_pattern(text))


def recorded_traceback(text: str, *, parsed: bool = True) -> str:
    """A traceback: its lines of source are a program's, and are left out with the source. One that
    is read from a store, or imported, is not ``parsed``."""
    if leaves_out("source"):
        return recorded_text(_SOURCE_LINE.sub(r"\1File \2\n", text))
    parts, at = [], 0
    for found in _SOURCE_LINE.finditer(text):
        code = found.end(2) + 1
        source = recorded_source(text[code : found.end()], parsed=parsed)
        parts += [recorded_text(text[at:code]), source]
        at = found.end()
    return "".join([*parts, recorded_text(text[at:])])


def _as_left_out(text: str) -> str:
    return without_folders(text) if "/" in text and leaves_out("paths") else text


def without_folders(text: str) -> str:
    """Every absolute path in ``text`` as the name at its end."""
    return _FOLDERS.sub("", text)


def for_others(value: T, *, hosts: Iterable[str] = (), folders: bool = True) -> T:
    """Records with every text in them fit to be handed on: the home folder is ``~``, host names are
    gone; without ``folders`` all folders are."""
    home = str(Path.home())
    names = {socket.gethostname(), *hosts}
    own = [re.escape(name) for name in names if len(name) >= SHORTEST_HOST]
    host = re.compile(rf"(?<![\w-])(?:{'|'.join(own)})(?![\w-])") if own else None

    def text(found: str) -> str:
        if len(home) > 1:
            found = found.replace(home, "~")
        if host is not None:
            found = host.sub("this machine", found)
        return found if folders else without_folders(found)

    result: T = _each_text(value, text)
    return result


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value) if type(value) is str else value  # an enum is no text of a run
    if isinstance(value, tuple | list):
        return type(value)(_each_text(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _each_text(part, change) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        changed = {name: new for name, old in fields if (new := _each_text(old, change)) is not old}
        return replace(value, **changed) if changed else value
    return value


def leave(run_id: str, spec: RunSpec) -> None:
    """For the child that runs ``run_id``: what the store does not hold of ``spec``, if anything."""
    stored = recorded(spec)
    is_whole = (stored.args, stored.workload) == (spec.args, spec.workload)
    texts = (spec.workload, *spec.args)
    if is_whole and all(text.isprintable() and len(text) < 5_000 for text in texts):
        return
    pid = os.getpid()  # ampscope.files removes what is left when this process is gone
    name = f"given-{run_id}-{pid}-{int(process_start_time(pid) or 0)}.json"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(private_folder() / name, flags, 0o600)
    with open(file, "w", encoding="utf-8") as opened:
        json.dump({"workload": spec.workload, "args": spec.args}, opened)


def taken(run_id: str, spec: RunSpec) -> RunSpec:
    """``spec``, read from the store, with what was left for the run; the file is gone then."""
    path = next(iter(_given(run_id)), None)
    if path is None:
        return spec
    given = json.loads(path.read_text(encoding="utf-8"))
    path.unlink(missing_ok=True)
    hide_secrets_of(given["args"])
    return replace(spec, workload=given["workload"], args=tuple(given["args"]))


def forget(run_id: str) -> None:
    """Remove what was left for a run that never began."""
    with contextlib.suppress(OSError, BadInput):
        for path in _given(run_id):
            path.unlink(missing_ok=True)


def _given(run_id: str) -> list[Path]:
    return list(private_folder().glob(f"given-{run_id}-*.json"))


def private_folder() -> Path:
    """``ampscope-UID`` in the temporary folder; the number, because a container's user may have no
    name. Raises BadInput where it is another user's: they could read what is put there, or hold the
    locks in it."""
    folder = Path(tempfile.gettempdir()) / f"ampscope-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # no link is followed
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise BadInput(
            f"{folder} is not a folder of yours, so it is not used. Have it removed, or set TMPDIR "
            "to a folder of your own."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
