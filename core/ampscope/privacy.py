"""What is not recorded, and what is not handed on: secrets, and whatever a user leaves out.

A run records the arguments of its script, its paths, the machine's name and lines of its source
(docs/privacy.md). Values that are secrets by their name are masked before they are stored::

    masked(("--token", "hf_abc", "API_KEY=123", "https://me:pw@host/x"))
    ("--token", "***", "API_KEY=***", "https://***@host/x")

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
from ampscope.records import Machine, RunSpec

T = TypeVar("T")
MASK = "***"
ARGUMENTS_LEFT_OUT = "(left out)"  # stands for all arguments of a script
VARIABLE = "AMPSCOPE_LEAVE_OUT"
PARTS = ("arguments", "host", "paths", "source")
LONGEST_STORED = 5_000  # characters of an argument that a store surely keeps whole
SHORTEST_SECRET = 4  # characters: a shorter one would be found in half of all words

_WORDS = {
    "token", "key", "secret", "secrets", "password", "passwd", "passphrase", "pwd",
    "credential", "credentials", "auth", "authorization", "bearer", "apikey", "pw", "cookie",
}  # fmt: skip
_ENDS = ("token", "secret", "password", "passwd", "apikey", "passphrase", "credential")
# The last word of names such as --key-dim, --token-file, --auth-type: what it says is no secret.
_HARMLESS = {
    "bias", "count", "dim", "dims", "dropout", "dtype", "file", "format", "heads", "len", "length",
    "limit", "mask", "mode", "norm", "path", "proj", "rate", "size", "type", "url", "width",
}  # fmt: skip
_NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
_PARTS_OF_NAME = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# Names are looked for where words begin: a text's time is in line with its length.
_USERINFO = re.compile(r"(?<![\w+.-])([\w+.-]+://)[^/\s@]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[^\s\"',;]+")
_PAIR = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)["']?\s*[:=]\s*(?!//)""")
_LITERAL = re.compile(r"""(([\w.-]+)["']?\]?\s*[:=,]\s*[rbfu]{0,2})(["'])(?:(?!\3).)+\3""")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&"'}]+""")
# Keys that say by their form what they are: of Hugging Face, GitHub, OpenAI and others, AWS, Slack;
# JSON web tokens.
_KEYS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}|xox[abeoprs]-[\w-]{10,}|eyJ[\w-]{10,}\.eyJ[\w-]+\.[\w-]+)"
)
_FOLDERS = re.compile(r"(?<![\w.:/~-])(?:~|/)(?:[^/\s:\"'<>|]+/)+|(?<![\w.:/~-])/(?=[\w.])")
_SOURCE_LINE = re.compile(r"(?m)^( *)File (\".*\", line \d+.*)\n(?:\1  .*\n?)+")

_hidden: list[str] = []  # secrets of this process's script, longest first


# --- secrets in arguments


def is_secret(name: str) -> bool:
    """Whether what stands after ``name`` (``--hf-token``, ``API_KEY``) is a secret."""
    words = [word.lower() for word in _PARTS_OF_NAME.findall(name)]
    if not words or words[-1] in _HARMLESS:
        return False
    return bool(_WORDS & set(words)) or "".join(words).endswith(_ENDS)


def masked(args: Sequence[str]) -> tuple[str, ...]:
    """``args`` with every value masked that a name calls a secret."""
    found: list[str] = []
    value_is_next = False
    for arg in args:
        if value_is_next and not (arg.startswith("--") and len(arg) > 2):
            found.append(MASK)
            value_is_next = False
            continue
        found.append(masked_text(arg))
        value_is_next = arg.startswith("-") and bool(_NAME.fullmatch(arg)) and is_secret(arg)
    return tuple(found)


def masked_text(text: str) -> str:
    """One text: ``NAME=value`` and ``"name": "value"`` pairs, also in the value of another name;
    credentials in addresses, Bearer, keys that are known by their form."""
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _KEYS.sub(MASK, text)
    parts: list[str] = []
    at = 0  # what stands before it is in `parts`
    look = 0
    while (found := _PAIR.search(text, look)) is not None:
        look = found.end()
        value = _VALUE.match(text, look) if is_secret(found["name"]) else None
        if value is not None:
            quote = value[0][0] if value[0][0] in "\"'" else ""
            parts += [text[at:look], quote, MASK, quote]
            at = look = value.end()
    return "".join([*parts, text[at:]])


def masked_source(line: str) -> str:
    """One line of a program: credentials in addresses, Bearer, keys that are known by their form,
    and texts that stand behind the name of a secret. Names alone stay: ``key = self.key(x)``."""
    line = _KEYS.sub(MASK, _BEARER.sub(rf"\1\2{MASK}", _USERINFO.sub(rf"\1{MASK}@", line)))

    def one(found: re.Match[str]) -> str:
        return f"{found[1]}{found[3]}{MASK}{found[3]}" if is_secret(found[2]) else found[0]

    return _LITERAL.sub(one, line)


def is_masked(args: Sequence[str]) -> bool:
    """Whether stored arguments lack something, so that the script cannot be run with them."""
    return any(MASK in arg for arg in args) or tuple(args) == (ARGUMENTS_LEFT_OUT,)


def hide_secrets_of(args: Sequence[str]) -> None:
    """From now on this process's texts are stored without the secrets in ``args``: an error may
    quote them."""
    for arg, kept in zip(args, masked(args), strict=True):
        # As many groups as there are masks; one that was matched by the rest stays in it.
        around = [re.escape(part) for part in kept[:LONGEST_STORED].split(MASK)]
        found = re.match("(.+?)".join(around) + ("" if around[-1] else "$"), arg, re.DOTALL)
        for secret in found.groups() if found is not None and arg != kept else ():
            is_word = secret.lower() in ("bearer", "basic")
            if len(secret) >= SHORTEST_SECRET and not is_word and secret not in _hidden:
                _hidden.append(secret)
    _hidden.sort(key=len, reverse=True)


def without_secrets(text: str) -> str:
    """``text`` without the secrets that :func:`hide_secrets_of` was given."""
    for secret in _hidden:
        text = text.replace(secret, MASK)
    return text


# --- what a user leaves out


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
    args = masked(spec.args)
    if args and leaves_out("arguments") and spec.kind == "script":
        args = (ARGUMENTS_LEFT_OUT,)
    workload = PurePath(spec.workload).name if leaves_out("paths") else spec.workload
    return replace(spec, args=args, workload=workload)


def recorded_machine(machine: Machine) -> Machine:
    """The machine as the store may hold it: without its host name where that is left out."""
    return replace(machine, host="") if leaves_out("host") else machine


def recorded_text(text: str) -> str:
    """A text on its way into a store."""
    text = without_secrets(text) if _hidden else text
    return without_folders(text) if "/" in text and leaves_out("paths") else text


def recorded_traceback(text: str) -> str:
    """A traceback: its lines of source are left out with the source."""
    return _SOURCE_LINE.sub(r"\1File \2\n", text) if leaves_out("source") else text


def without_folders(text: str) -> str:
    """Every absolute path in ``text`` as the name at its end."""
    return _FOLDERS.sub("", text)


# --- what others may read


def for_others(value: T, *, hosts: Iterable[str] = (), folders: bool = True) -> T:
    """Records with every text in them fit to be handed on: the home folder is ``~``, host names are
    gone; without ``folders`` all folders are."""
    home = str(Path.home())
    names = {socket.gethostname(), *hosts}
    own = [re.escape(name) for name in names if len(name) >= SHORTEST_SECRET]
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


# --- a folder of this user's alone


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


def leave(run_id: str, spec: RunSpec) -> None:
    """For the child that runs ``run_id``: what the store does not hold of ``spec``, if anything."""
    stored = recorded(spec)
    is_plain = all(text.isprintable() for text in (spec.workload, *spec.args))
    longest = max(map(len, (spec.workload, *spec.args)), default=0)
    if (
        (stored.args, stored.workload) == (spec.args, spec.workload)
        and is_plain
        and longest < 5_000
    ):
        return
    given = {"workload": spec.workload, "args": spec.args}
    file = os.open(_given(run_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(file, "w", encoding="utf-8") as opened:
        json.dump(given, opened)


def taken(run_id: str, spec: RunSpec) -> RunSpec:
    """``spec``, read from the store, with what was left for the run; the file is gone then."""
    path = _given(run_id)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return spec
    path.unlink(missing_ok=True)
    hide_secrets_of(given["args"])
    return replace(spec, workload=given["workload"], args=tuple(given["args"]))


def forget(run_id: str) -> None:
    """Remove what was left for a run that never began."""
    with contextlib.suppress(OSError, BadInput):
        _given(run_id).unlink(missing_ok=True)


def _given(run_id: str) -> Path:
    return private_folder() / f"given-{run_id}.json"
