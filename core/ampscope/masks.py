"""Which texts are secrets, and texts without them (docs/privacy.md).

Three kinds of text are masked, each as much as its form allows::

    masked(("--token", "X", "API_KEY=X,Y"))   arguments: all that is behind the name of a secret
    masked_text("user password=X at /data")   a text for a person: the word behind such a name
    masked_source('password: str = "X"')      a program: its quoted texts; names and lines stay

In all of them go credentials in addresses, Bearer, keys that are known by their form, and the
values that :func:`hide_secrets_of` and :func:`hide_environment` were told. Masking twice is masking
once, so what was stored can be stored again.
"""

from __future__ import annotations

import ast
import base64
import bisect
import io
import json
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from urllib.parse import quote, quote_plus

MASK = "***"

# --- names of secrets

_STRONG = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd",
    "credential", "credentials", "authorization", "bearer", "apikey", "cookie", "cookies",
}  # fmt: skip
# Which also mean a word of a text, an entry of a table, a switch: they count at the end of a name.
_WEAK = {"token", "key", "auth", "oauth"}
_BEHIND_WEAK = {"value", "id", "string", "str", "header", "secret"}  # auth_header, access_key_id
# Before "key": what a text calls so is a secret; "missing key: layer.weight" is none.
_OF_A_DOOR = {
    "access", "account", "api", "auth", "aws", "azure", "encryption", "hf", "license", "master",
    "openai", "private", "secret", "security", "service", "session", "shared", "signing", "ssh",
    "storage", "wandb",
}  # fmt: skip
_OF_A_TENSOR = {"access", "master", "session", "shared", "storage"}  # also of these in a sentence
_ENDS = (
    "token", "secret", "password", "passwords", "passwd", "apikeys", "passphrase", "credential",
    "credentials", *(f"{word}key" for word in _OF_A_DOOR),
)  # fmt: skip
# The last word of names such as --key-dim, --token-file, --auth-type: what it says is no secret.
_HARMLESS = {
    "agent", "bias", "budget", "column", "count", "dim", "dims", "dir", "dropout", "dtype", "env",
    "error", "exception", "field", "file", "folder", "format", "heads", "ids", "index", "layer",
    "layers", "len", "length", "limit", "loss", "mask", "mode", "name", "names", "norm", "num",
    "path", "pattern", "prefix", "prob", "proj", "rate", "ratio", "seed", "size", "sock", "socket",
    "step", "steps", "suffix", "type", "url", "weight", "width",
}  # fmt: skip
# Before "token": a word of a vocabulary. Before "key": an entry of a table, or a random state.
_OF_A_VOCABULARY = {
    "additional", "audio", "bos", "class", "cls", "decoder", "dist", "end", "eos", "extra",
    "global", "image", "initializer", "mask", "max", "min", "modifier", "next", "num", "pad",
    "patch", "per", "placeholder", "prompt", "query", "reg", "register", "sep", "special", "start",
    "stop", "sub", "target", "text", "trigger", "unk", "video", "word",
}  # fmt: skip
_OF_A_TABLE = {
    "attention", "attn", "batch", "cache", "column", "config", "cross", "dict", "dropout",
    "feature", "foreign", "group", "image", "index", "input", "label", "loss", "metric", "monitor",
    "output", "param", "primary", "prng", "query", "rng", "self", "sort", "state", "target", "text",
}  # fmt: skip
_SWITCHED = {"true", "false", "none", "null", "yes", "no", "on", "off"}  # what switches are set to
_SWITCHES = {"use", "no", "with", "without", "enable", "disable", "require", "is", "has"}

_NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")
_PARTS_OF_NAME = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


def _words(name: str) -> list[str]:
    return [word.lower() for word in _PARTS_OF_NAME.findall(name)]


def _named(name: str) -> tuple[str, str, list[str]]:
    """The word that says what ``name`` is, the one before it, and all; of ``hf_token_value2`` the
    value is called as ``hf_token`` is."""
    words = [word for word in _words(name) if not word.isdigit()]
    end = len(words)
    if end > 1 and words[-1] in _BEHIND_WEAK and words[-2] in _WEAK | _STRONG:
        end -= 1
    last, before = (words[end - 1 : end] or [""])[0], (words[max(end - 2, 0) : end - 1] or [""])[0]
    return last, before, words


@lru_cache(4_096)
def is_secret(name: str) -> bool:
    """Whether what stands after ``name`` (``--hf-token``, ``API_KEY``) is a secret, or, where
    :func:`_strength` is below 2, may be one."""
    last, before, words = _named(name)
    if not words or words[-1] in _HARMLESS:
        return False
    if words == ["pw"]:
        return name.startswith("-")  # elsewhere it is a pointwise convolution, a positive weight
    if last == "token" and before in _OF_A_VOCABULARY:
        return False
    if last == "key" and before in _OF_A_TABLE:
        return False
    return last in _WEAK or bool(_STRONG & set(words)) or "".join(words).endswith(_ENDS)


def _is_bare(name: str) -> bool:
    """Of names of secrets: whether it may as well mean something else (``key``, ``token``)."""
    words = _words(name)
    return len(words) == 1 and words[0] in _WEAK


@lru_cache(4_096)
def _strength(name: str) -> int:
    """Of a name: 2 for a secret whatever follows, 1 and 0 where what follows must look like one;
    of those 0 says nothing within a text for a person."""
    if not is_secret(name):
        return 0
    last, before, _ = _named(name.rpartition(".")[2])
    if last == "token":
        return 2 if before else 1
    if last == "key":
        return 2 if before in _OF_A_DOOR or before in _STRONG or name.isupper() else 0
    if last in ("auth", "oauth"):
        return 1
    whole = "".join(_words(name.rpartition(".")[2]))
    return 2 if last in _STRONG or last.endswith(_ENDS) or whole.endswith(_ENDS) else 0


def _is_masked(name: str, value: str) -> bool:
    """Whether ``value`` of an argument or a variable is a secret by its name. ``--checkpoint_key
    teacher`` is none, and no switch is one."""
    if not is_secret(name) or (len(value) < 10 and value.strip().lower() in _SWITCHED):
        return False
    if _is_token_id(name, value):
        return False
    return _named(name)[0] != "key" or _strength(name) == 2 or _may_be_one(value)


def _is_token_id(name: str, value: str) -> bool:
    """Whether it is a number, or a list of numbers, of a vocabulary: ``--boi_token_id 255999``."""
    last, _, words = _named(name)
    return last == "token" and words[-1] == "id" and _NUMBERS.fullmatch(value) is not None


_NUMBERS = re.compile(r"[\[(]?[\d, ]+[\])]?")


def _is_hidden(name: str, value: str) -> bool:
    """Whether it is a secret wherever it stands: a plain word of ``--auth`` is none."""
    return (
        _named(name)[0] not in ("key", "auth", "oauth")
        or _strength(name) == 2
        or _may_be_one(value)
    )


def _may_be_one(value: str) -> bool:
    """Of what stands behind a weak name: whether it is like a secret."""
    is_word = not any(c.isspace() for c in value)
    return is_word and (len(value) >= 16 or (len(value) >= 4 and _looks_random(value)))


# --- forms that say by themselves what they are

# Of Hugging Face, GitHub, GitLab, OpenAI and others, AWS, Google, Slack, Stripe, npm, PyPI, Docker,
# SendGrid, Replicate, Groq; JSON web tokens.
_KEYS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|gl(?:pat|ptt|dt|rt|soat)-[\w-]{16,}|sk-[\w-]{20,}|[rs]k_(?:live|test)_\w{16,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[abeoprs]-[\w-]{10,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{30,}|eyJ[\w-]{10,}\.eyJ[\w-]+\.[\w-]+)"
)
_PRIVATE_KEY = re.compile(
    r"(?s)-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}-----|$)"
)
# 40 hexadecimal digits are a commit more often than a key of W&B's: only right behind its name.
_OF_WANDB = re.compile(
    r"(?i)(\bwandb\b(?:[ .]?(?:login|api|key|relogin|--)){0,3}[\"'\s(=:,]{1,4})[0-9a-f]{40}\b"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)([ \t]+)([^\s\"',;]+)")
_NO_BEARER = {"token", "tokens", "auth", "authentication", "authorization", "scheme"}
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-api-key)"
    r"([\"']?[ \t]{0,8}[:=][ \t]{0,8}[\"']?)([^\"'\n]+)"
)
_ADDRESS = re.compile(r"(?<![\w+.-])[A-Za-z0-9][\w+.-]*://(?P<rest>[^\s\"'<>]+)")
# Of an argument: one that begins with an address is one to its end.
_WHOLE_ADDRESS = re.compile(
    r"(?s)(?:(?P<whole>\A(?:-{0,2}[\w.-]+=)?)|(?<![\w+.-]))[A-Za-z0-9][\w+.-]*://"
    r"(?P<rest>(?(whole).+|\S+))"
)
_NEXT_ADDRESS = re.compile(r"([,;|\[\](){}=&?#/\s][A-Za-z][\w+.-]*://)")  # within one
_QUERY = re.compile(r"([?&#;])([\w.%-]+)=((?:(?!&[\w.%-]+=)[^\s#\"'<>])+)")
_OF_QUERY = {"sig", "signature"}  # signed addresses of Azure and AWS

Taken = list[str]  # the secrets that a mask has taken the place of


def _forms(text: str, taken: Taken, address: re.Pattern[str] = _ADDRESS) -> str:
    """``text`` without what is known by its form alone."""

    def keep(found: re.Match[str]) -> str:
        taken.append(found[0])
        return MASK + "\n" * found[0].count("\n")  # a program's lines stay where they are

    def located(found: re.Match[str]) -> str:
        return found[0][: -len(found["rest"])] + _located(found["rest"], taken)

    def bearer(found: re.Match[str]) -> str:
        kind, value = found[1].lower(), found[3]
        if value.lower() in _NO_BEARER or value.startswith((MASK, "{", "%", "$", "<")):
            return found[0]
        if len(value) < 4 or (kind == "basic" and not _is_basic(value)):
            return found[0]
        taken.append(value)
        return f"{found[1]}{found[2]}{MASK}"

    if "://" in text:
        text = address.sub(located, text)
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(keep, text)
    text = _KEYS.sub(keep, text)
    text = _OF_WANDB.sub(rf"\1{MASK}", text)
    return _BEARER.sub(bearer, text)


def _is_basic(value: str) -> bool:
    """``user:password`` in base64, as it stands behind "Basic"; "basic fp16" is a run's name."""
    plain = value.rstrip("=.:)")
    try:
        return b":" in base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        return False


def _located(rest: str, taken: Taken) -> str:
    """What stands behind ``://``, without the user and without secrets in the query."""
    rest = "".join(_without_user(part, taken) for part in _NEXT_ADDRESS.split(rest))

    def one(found: re.Match[str]) -> str:
        if not (is_secret(found[2]) or _OF_QUERY & set(_words(found[2]))):
            return found[0]
        taken.append(found[3])
        return f"{found[1]}{found[2]}={MASK}"

    return _QUERY.sub(one, rest) if "=" in rest else rest


def _without_user(rest: str, taken: Taken) -> str:
    end = _end_of_user(rest)
    words = rest[: max(end, 0)].split()
    if end < 0 or (len(words) > 1 and ":" not in words[0]):  # a blank may be in a password alone
        return rest
    if rest[:end] != MASK:
        taken += [rest[:end], rest[:end].partition(":")[2]]
    return f"{MASK}{rest[end:]}"


def _end_of_user(rest: str) -> int:
    """Where ``user:password`` ends, -1 where there is none. A password that was not quoted for an
    address may hold ``@`` and ``/``."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    last, at = rest.rfind("@"), host.rfind("@")
    if at >= 0:
        behind = host[at + 1 :]
        is_host = "." in behind or ":" in behind or behind == "localhost"
        return at if is_host or ":" not in host[:at] else last
    user, colon, port = host.partition(":")
    if last < 0 or not colon or user.startswith("["):
        return -1
    is_port = port.isdigit() and ("." in user or user == "localhost")
    return -1 if is_port else last


def _looks_random(value: str) -> bool:
    """Whether it is no word: letters and digits, or capitals within."""
    has_digit = any(c.isdigit() for c in value)
    has_letter = any(c.isalpha() for c in value)
    is_mixed = any(c.isupper() for c in value[1:]) and value != value.upper()
    return is_mixed or (has_digit and has_letter)


# --- arguments

_PAIR = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)["']?\]?\s*[:=]\s*(?!//)""")
_LITERAL_ARGUMENT = re.compile(r"(?:-{0,2}[\w.-]+=)?(?=[\[{(])")
_OPTION = re.compile(r"--?[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*(?:=.*)?", re.DOTALL)
LONGEST_LITERAL = 100_000  # characters of a list or an object that is read as one


def masked(args: Sequence[str]) -> tuple[str, ...]:
    """``args`` with every value masked that a name calls a secret, and all that
    :func:`masked_text` masks."""
    return tuple(masked_text(arg) for arg in _masked(args, []))


def _masked(args: Sequence[str], taken: Taken) -> tuple[str, ...]:
    found: list[str] = []
    name, many, switch = "", False, False  # of an option whose value is next
    for arg in args:
        is_option = bool(_OPTION.fullmatch(arg))
        is_value = name and not (is_option and (switch or many) and arg.startswith("--"))
        if is_value and _is_masked(name, arg):
            if arg != MASK and _is_hidden(name, arg):
                taken.append(arg)
            found.append(MASK)
            name = name if many else ""
            continue
        found.append(masked_argument(arg, taken))
        words = _words(arg)
        is_named = arg.startswith("-") and bool(_NAME.fullmatch(arg)) and is_secret(arg)
        name = arg if is_named else ""
        switch = bool(words) and (words == ["auth"] or words[0] in _SWITCHES)
        many = is_named and words[-1] in ("passwords", "secrets", "credentials")
    return tuple(found)


def masked_argument(arg: str, taken: Taken | None = None) -> str:
    """One argument. Of a well-formed list or object each value on its own; else the whole rest
    behind the first name of a secret, whatever signs are in it."""
    taken = [] if taken is None else taken
    arg = _forms(arg, taken, _WHOLE_ADDRESS)
    literal = _LITERAL_ARGUMENT.match(arg) if len(arg) < LONGEST_LITERAL else None
    look = 0
    while (found := _PAIR.search(arg, look)) is not None:
        look = found.end()
        is_done = arg.startswith(MASK, look) and (literal or look + len(MASK) == len(arg))
        if not is_secret(found["name"]) or look == len(arg) or is_done:
            continue
        before = arg[: found.start()]
        if before.endswith(("?", "&")) and "://" in before:
            continue  # of an address: masked above
        if literal is not None and literal.end() <= found.start():
            whole = _masked_program(arg[literal.end() :], taken, ("", ""), values=True)
            if whole is not None:
                return arg[: literal.end()] + whole
            literal = None
        value = arg[look:]
        if _is_masked(found["name"], value):
            if _is_hidden(found["name"], value):
                taken.append(value)
            return arg[:look] + MASK
    return _flags(arg, taken) if _MAY_HOLD_FLAGS.search(arg) else arg


def masked_value(name: str, value: str) -> str:
    """A text that a program calls ``name``: all of it, where that is the name of a secret."""
    if value and is_secret(name) and (_strength(name) == 2 or _may_be_one(value)):
        return MASK
    return masked_text(value)


# --- texts for a person

# A quoted text, which may lie in another: {\"password\": \"X\"}.
_QUOTED_TEXT = (
    r"""(?P<quote>\\{0,3}(?:\"{3}|'{3}|["']))"""
    # To the first quote that no backslash precedes; where there is none, to the first.
    r"""(?P<inner>(?:(?!(?P=quote))(?:\\[\s\S]|[^\\])){0,10000}(?=(?P=quote))"""
    r"""|(?:(?!(?P=quote))[\s\S]){0,10000})(?P=quote)"""
)
_TEXT_PAIR = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]+)\\{0,3}["']?\]?"""
    r"""(?P<sign>[ \t]{0,8}(?:=|:(?!//))[ \t]{0,8}(?:[bru]{1,2}(?=\\{0,3}["']))?)"""
)
_TEXT_VALUE = re.compile(rf"""{_QUOTED_TEXT}|\S{{1,200}}""")
_ITEMS = re.compile(r"""[\[({]\s{0,8}(?=[bru]{0,2}["'])""")  # a list of texts begins
_ITEM = re.compile(rf"{_QUOTED_TEXT}|[\[({{\])}}]")
_FLAG = re.compile(r"""(?<![\w-])(--?[A-Za-z][\w.-]*)([ \t]+)("[^"\n]*"|'[^'\n]*'|[^\s"',;]+)""")
_MAY_HOLD_FLAGS = re.compile(r"""[ \["'(]-|^-|["'],""")
# Behind an option in a sentence: "--password is required".
_PROSE = {
    "a", "an", "and", "are", "argument", "as", "before", "by", "can", "cannot", "expects", "flag",
    "for", "from", "has", "if", "in", "instead", "is", "may", "missing", "must", "needs", "not",
    "of", "on", "option", "or", "requires", "should", "the", "to", "was", "when", "will", "with",
}  # fmt: skip
# 'password', 'X': two of a list.
_NEIGHBOUR = re.compile(
    r"""(?P<before>[\[(]?)(?P<q>["'])(?P<name>-{0,2}[A-Za-z][\w.-]*)(?P=q),\s{0,8}"""
    rf"(?=[bru]{{0,2}}{_QUOTED_TEXT}(?P<behind>[\])]?))"
)
# argparse's and click's.
_REFUSED = re.compile(
    r"(?i)((?:argument|invalid value for) [^:\n]{1,100}: (?:invalid [^:\n]{1,60}: )?)"
    + _QUOTED_TEXT
)
_NO_VALUE = re.compile(
    r"(?i)[-+]?(?:\d{1,5}|\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+\.)(?:e[-+]?\d+)?"
    r"|none|null|true|false|yes|no|on|off|\*\*\*|lambda|(?-i:\[[A-Z_]+\])"
    r"|%(?:\(\w*\))?[sdrifg]|\{[\w.!:\[\]]*\}|\$\{\w*\}|\$(?-i:[A-Z_]+)|(?-i:<[a-z_/|]*>)|<[\w]+(?:\.\w+)+"
)
_SUSPICIOUS = re.compile(r"[:=,]|[ \t]-|_|-|\.|(?i:bearer|basic|wandb|AKIA|ASIA|AIza)")


@lru_cache(16_384)
def masked_text(text: str) -> str:
    """``text`` without secrets: the word, or the quoted text, behind the name of one; what is known
    by its form; what is hidden."""
    return masked_place(without_secrets(text))


def masked_place(text: str) -> str:
    """The path of a script, a line's name: as :func:`masked_text`, but for what is hidden. A folder
    may be called as a password is, and a run of a diagnosis is told which lines to change."""
    if _SUSPICIOUS.search(text) is None:
        return text
    taken: Taken = []
    text = _forms(text, taken)
    if ":" in text or "=" in text:
        text = _HEADER.sub(_headed, text)
        text = _pairs(text)
    return _flags(text, taken) if _MAY_HOLD_FLAGS.search(text) else text


def _headed(found: re.Match[str]) -> str:
    return found[0] if found[3].startswith(MASK) else f"{found[1]}{found[2]}{MASK}"


def _pairs(text: str) -> str:
    parts: list[str] = []
    at = look = 0
    while (found := _TEXT_PAIR.search(text, look)) is not None:
        look = found.end()  # a value may hold another pair
        strength = _strength(found["name"])
        value = _TEXT_VALUE.match(text, look) if strength else None
        if value is None:
            continue
        items = _items(text, look) if strength == 2 else []
        if items:
            for item in items:
                parts += [text[at : item.start()], _unquoted(item)]
                at = look = item.end()
            continue
        quote, whole = value["quote"] or "", value[0]
        if whole.startswith(MASK) and text[max(found.start() - 1, 0)] in "?&#;":
            continue  # of an address: masked above
        inner = value["inner"] if quote else whole.rstrip(_BEHIND)
        ends = range(len(inner), len(whole) + 1) if not quote else ()
        if any(_NO_VALUE.fullmatch(whole[:end]) for end in ends):
            continue  # "{token}" ends in what a sentence puts behind a value
        if not _is_value(found, inner, strength, bool(quote)):
            continue
        parts += [text[at : look + len(quote)], MASK + "\n" * inner.count("\n")]
        if not quote and len(whole) == len(inner):
            rest = _WORD.match(text, value.end())
            inner += rest[0].rstrip(_BEHIND) if rest is not None else ""
        at = look = look + len(quote) + len(inner)
    return "".join([*parts, text[at:]])


def _items(text: str, start: int) -> list[re.Match[str]]:
    """The quoted texts of the list that begins at ``start``, which may have been cut."""
    opened = _ITEMS.match(text, start)
    found: list[re.Match[str]] = []
    look, depth = (start, 0) if opened is None else (opened.end(), 1)
    while depth and (item := _ITEM.search(text, look)) is not None:
        look = item.end()
        if item["quote"]:
            found.append(item)
        else:
            depth += 1 if item[0] in "[({" else -1
    return found


_BEHIND = ".,;:)]}>\"'"  # what a sentence puts behind a value
_WORD = re.compile(r"\S*")


def _unquoted(found: re.Match[str]) -> str:
    """A match of a quoted text without what is quoted."""
    start, end = found.start("inner") - found.start(), found.end("inner") - found.start()
    lines = "\n" * found["inner"].count("\n")
    return f"{found[0][:start]}{MASK}{lines}{found[0][end:]}"


def _is_value(found: re.Match[str], inner: str, strength: int, quoted: bool) -> bool:
    """Whether what stands behind the name of a secret is one."""
    if not inner or inner.startswith("=") or _NO_VALUE.fullmatch(inner):
        return False
    if _is_token_id(found["name"], inner):
        return False
    if found["name"].startswith("-") and ":" in found["sign"]:
        return False  # "argument --token: expected one argument"
    is_prose = found["sign"].endswith((" ", "\t")) and "=" not in found["sign"] and not quoted
    last, before, _ = _named(found["name"])
    is_of_a_door = before in _OF_A_DOOR - _OF_A_TENSOR or found["name"].isupper()
    if strength == 2 and not (is_prose and last in _WEAK and not is_of_a_door):
        return True
    if len(inner) < 4 or "(" in inner:
        return False
    return not is_prose or (len(inner) >= 6 and _looks_random(inner)) or len(inner) >= 16


def _flags(text: str, taken: Taken) -> str:
    """A command within a text: ``train.py --token X``, ``['--token', 'X']``."""

    def is_one(name: str, value: str) -> bool:
        if not is_secret(name) or _NO_VALUE.fullmatch(value) or _OPTION.fullmatch(value):
            return False
        if _is_token_id(name, value):
            return False
        return _strength(name) == 2 or (len(value) >= 4 and _looks_random(value))

    def one(found: re.Match[str]) -> str:
        value = found[3].strip("\"'")
        if value.lower().rstrip(_BEHIND) in _PROSE or not is_one(found[1], value):
            return found[0]
        taken.append(value)
        return f"{found[1]}{found[2]}{MASK}"

    def refused(found: re.Match[str]) -> str:
        names = re.findall(r"--?[A-Za-z][\w-]*", found[1])
        return _unquoted(found) if any(is_one(n, found["inner"]) for n in names) else found[0]

    text = _FLAG.sub(one, text)
    if "'" not in text and '"' not in text:
        return text
    parts, at = [], 0
    for found in _NEIGHBOUR.finditer(text):
        name, value = found["name"], found["inner"]
        if (name.startswith("-") or (found["before"] and found["behind"])) and is_one(name, value):
            taken.append(value)
            parts += [text[at : found.start("inner")], MASK + "\n" * value.count("\n")]
            at = found.end("inner")
    return _REFUSED.sub(refused, "".join([*parts, text[at:]]))


# --- values that are hidden wherever they appear

SHORTEST_HIDDEN = 6  # characters: a shorter one would be found in half of all words
_ANYWHERE = 8  # from this length on also within a longer word
_SPLIT = re.compile(r"[\s,;&\"'{}()@/:?#]+")
_hidden: list[str] = []  # longest first
# As they were when they were last looked at.
_environment: dict[str, str] = {}
_arguments: list[str] = []


def hide_secrets_of(args: Sequence[str]) -> None:
    """From now on this process's texts are stored without the secrets in ``args``: an error may
    quote them, or a part of them."""
    taken: Taken = []
    _masked(args, taken)
    _hide(taken)


def hide_environment() -> None:
    """The same of this process's arguments, and of environment variables whose names call them
    secrets, as they are now."""
    global _arguments, _environment
    every = getattr(sys, "argv", None) or []  # a script may put anything there
    given = [arg for arg in every[1:] if type(arg) is str]
    if given != _arguments:
        _arguments = given
        hide_secrets_of(given)
    try:
        now = dict(os.environ)
    except (KeyError, RuntimeError):  # another thread has deleted one meanwhile
        return
    if now == _environment:
        return
    taken: Taken = []
    for name, value in now.items():
        if _environment.get(name) == value or name in ("PWD", "OLDPWD"):
            continue
        if is_secret(name):
            if _is_masked(name, value) and _is_hidden(name, value):
                taken.append(value)
        elif "://" in value:
            _forms(value, taken, _WHOLE_ADDRESS)
    _environment = now
    _hide(taken)


def _hide(taken: Taken) -> None:
    before = len(_hidden)
    for secret in taken:
        is_path = secret.startswith(("/", "~", "."))
        if is_path and _is_there(secret):
            continue
        # The folders of a path stand in others, too.
        split = [] if is_path else _SPLIT.split(secret[:LONGEST_LITERAL])
        pieces = map(_of_pair, split)
        for part in (secret, secret.strip("\"'-"), *filter(_looks_random, pieces)):
            for form in dict.fromkeys(
                (part, repr(part)[1:-1], json.dumps(part)[1:-1], quote(part, errors="replace"),
                 quote(part, "", errors="replace"), quote_plus(part, errors="replace"))
            ):  # fmt: skip
                if _can_be_hidden(form) and form not in _hidden:
                    _hidden.append(form)
    if len(_hidden) != before:
        _hidden.sort(key=len, reverse=True)
        masked_text.cache_clear()
        masked_by_pattern.cache_clear()


def _is_there(path: str) -> bool:
    try:
        return os.path.exists(os.path.expanduser(path))
    except ValueError:  # of a user's name
        return False


def _of_pair(part: str) -> str:
    """Of a piece of a secret that is itself ``name=value``: the value, if the name says so."""
    name, sign, value = part.partition("=")
    return part if not sign or not _NAME.fullmatch(name) else value if is_secret(name) else ""


def _can_be_hidden(text: str) -> bool:
    if MASK in text or (_OPTION.fullmatch(text) and text.startswith("-")):
        return False
    if len(text) < SHORTEST_HIDDEN or _NO_VALUE.fullmatch(text) or text.lower() in _COMMON:
        return False
    return len(text) >= 8 or not text.isdigit()


_COMMON = {  # values of options that are called auth, key or token
    "bearer", "basic", "digest", "default", "disabled", "enabled", "required", "optional",
    "bfloat16", "float16", "float32", "float64", "running", "finished", "failed", "password",
    "secret", "anonymous", "offline", "online", "always", "weight", "loss", "authorization",
}  # fmt: skip


def without_secrets(text: str) -> str:
    """``text`` without the secrets that :func:`hide_secrets_of` and :func:`hide_environment` found,
    nor the beginning of one at its end, where an error was cut."""
    for secret in _hidden:
        if secret in text:
            if len(secret) >= _ANYWHERE:
                text = text.replace(secret, MASK)
            else:
                text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
        elif len(text) >= 100 and len(secret) > _ANYWHERE:
            begin = text.rfind(secret[:_ANYWHERE])
            if begin >= 0 and secret.startswith(text[begin:]):
                text = text[:begin] + MASK
    return text


# --- programs

_QUOTED = re.compile(r"[A-Za-z]{0,3}(\"\"\"|'''|\"|')")
# Where a program cannot be parsed: a quoted text behind a name and a sign.
_LITERAL = re.compile(
    r"""(?s)(?P<before>(?<![\w.-])(?P<name>[\w.-]+)["']?\]?"""
    r"""(?:[ \t]{0,20}:[ \t]{0,20}[\w.\[\]| ]{1,40}?(?=\s{0,20}=))?"""
    r"""\s{0,20}(?:[:=,(]|==|\bor\b)\s{0,20}(?:default\s{0,3}=\s{0,3})?[rbfuRBFU]{0,2})"""
    r"""(?P<quote>\"\"\"|'''|"|')(?P<text>(?:(?!(?P=quote)).)+)(?P=quote)"""
)
# What can stand around one line for it to be a program: a call, a signature, an object, a block.
_AROUND = (
    ("", ""), ("", " pass"), ("f(", ")"), ("{", "}"), ("", ")"), ("f(", ""), ("def f(", "): pass"),
    ("", "): pass"), ("def f(", " pass"), ("", "\ndef f(): pass"), ("{", ""), ("", "}"), ("[", "]"),
)  # fmt: skip
_READS = {"get", "getenv", "pop", "setdefault", "getattr", "environ_get"}  # (name, default)
_OPENS = {"open", "Path", "input", "getpass", "prompt", "ask"}  # their texts say where, or ask
_CONVERTS = _READS | {
    "str", "bytes", "b64decode", "fromhex", "unhexlify", "SecretStr", "field", "Field",
}  # fmt: skip
_DEFAULTS = {"default", "value", "const", "fallback", "initial"}
_CALLS = {  # say what a thing is called
    "name", "key", "dest", "option", "field", "envvar", "header",
}  # fmt: skip
_ENTERS = {"login", "relogin", "authenticate"}
_VOCABULARY = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|[{}%\w]{0,2}")
Position = tuple[int, int]  # line from 1, character from 0


def masked_source(text: str) -> str:
    """A program, or lines of one, with as many lines: quoted texts are masked whose target,
    parameter, keyword, annotation or neighbour names a secret. ``key = self.key(x)`` stays."""
    found = masked_forms(_program(text.replace("\r", " ")))
    return found if found.count("\n") == text.count("\n") else "\n" * text.count("\n")


@lru_cache(16_384)
def masked_by_pattern(text: str) -> str:
    """Lines of a program that are not parsed, because they are read again and again, or come from
    elsewhere: whoever wrote them chooses how long that takes."""
    return masked_forms(_by_pattern(text))


def masked_forms(text: str) -> str:
    """``text`` without what is hidden, or known by its form alone: of a program that was masked."""
    return known_forms(without_secrets(text))


def known_forms(text: str) -> str:
    """``text`` without what is known by its form alone."""
    return _forms(text, [])


LONGEST_PROGRAM, LONGEST_LINE = 500_000, 250  # characters that are parsed


def _program(text: str) -> str:
    if not any(sign in text for sign in "\"'#"):
        return text
    if "\n" not in text:
        line = text.strip()
        if len(line) > LONGEST_LINE:
            return _by_pattern(text)
        for around in _AROUND:
            if (found := _masked_program(line, [], around)) is not None:
                indent = len(text) - len(text.lstrip())
                return text[:indent] + found + text[len(text.rstrip()) :]
        return _by_pattern(text)
    around = ("if 1:\n", "") if text[:1].isspace() and text.lstrip("\n")[:1].isspace() else ("", "")
    found = _masked_program(text, [], around) if len(text) < LONGEST_PROGRAM else None
    if found is not None:
        return found
    # Cut, or no program of this Python: each statement on its own.
    lines = _by_pattern(text).split("\n")
    begun = [n for n, line in enumerate(lines) if n and line and line[0] not in " \t)]}#"]
    parts = ("\n".join(lines[a:b]) for a, b in pairwise([0, *begun, len(lines)]))
    return "\n".join(_statement(part) for part in parts)


def _statement(text: str) -> str:
    is_short = "\n" in text and len(text) < LONGEST_PROGRAM
    found = _masked_program(text, [], ("", "")) if is_short else None
    return "\n".join(map(_program, text.split("\n"))) if found is None else found


def _by_pattern(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        names, text = (
            re.findall(r"[\w.-]+", found["before"]),
            found["text"],
        )  # of an annotation, too
        is_told = any(is_secret(n) and (_strength(n) == 2 or _may_be_one(text)) for n in names)
        if not is_told or _VOCABULARY.fullmatch(text):
            return found[0]
        lines = "\n" * found["text"].count("\n")
        return f"{found['before']}{found['quote']}{MASK}{lines}{found['quote']}"

    return _LITERAL.sub(one, text)


def _masked_program(
    text: str, taken: Taken, around: tuple[str, str], *, values: bool = False
) -> str | None:
    """``text`` masked, None where it is no program between the two texts of ``around``.
    ``values``: of a literal, numbers and names behind the name of a secret as well."""
    if "\r" in text:
        return None  # it ends a line of ast's, and none of this function's
    found: Taken = []
    try:
        masked_whole = _parsed(around[0] + text + around[1], found, values)
    except (
        SyntaxError, ValueError, RecursionError, MemoryError, LookupError, tokenize.TokenError
    ):  # fmt: skip
        return None
    taken += found
    return masked_whole[len(around[0]) : len(masked_whole) - len(around[1])]


def _parsed(whole: str, taken: Taken, values: bool) -> str:
    """Raises what parsing raises; RecursionError also behind it, for a sum of many terms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of "\d" and the like
        tree = ast.parse(whole)
        tokens = list(tokenize.generate_tokens(io.StringIO(whole).readline))
    lines = whole.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def offset(place: Position) -> int:
        return starts[place[0] - 1] + place[1]

    def of_node(line: int, column: int) -> int:  # ast counts bytes
        kept = lines[line - 1]
        return starts[line - 1] + (
            column if kept.isascii() else len(kept.encode()[:column].decode("utf-8", "replace"))
        )

    spans: list[tuple[int, int]] = []  # of quoted texts that are secrets
    changes: list[tuple[int, int, str]] = []
    keys = _private_keys(tree) if "PRIVATE KEY" in whole else ()
    for node in (*_secret_nodes(tree, values), *keys):
        last = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        span = of_node(node.lineno, node.col_offset), of_node(*last)
        if _is_text(node):
            spans.append(span)
        else:
            taken.append(whole[slice(*span)])
            changes.append((*span, MASK))
    spans.sort()
    ends = list(accumulate((b for _, b in spans), max))
    for begin, end, quoted in _texts(tokens, offset):
        raw = whole[begin:end]
        opened = _QUOTED.match(raw) if quoted else None
        if opened is None:
            changes.append((begin, end, masked_text(raw)))
            continue
        inner = raw[opened.end() : len(raw) - len(opened[1])]
        before_it = bisect.bisect_right(spans, (begin, len(whole)))
        if before_it and end <= ends[before_it - 1] and not _VOCABULARY.fullmatch(inner):
            new = inner if inner.startswith(MASK) else MASK + "\n" * inner.count("\n")
            taken += [] if inner == new else [inner]
        else:
            new = masked_text(inner)
        if new != inner:
            changes.append((begin + opened.end(), end - len(opened[1]), new))
    for start, end, new in sorted(changes, reverse=True):
        whole = whole[:start] + new + whole[end:]
    return whole


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr)


def _texts(
    tokens: Sequence[tokenize.TokenInfo], offset: Callable[[Position], int]
) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it is quoted) of each quoted text and comment. From Python 3.12 on an
    f-string comes in parts, which are put together."""
    starting = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "TSTRING_START", -1)
    ending = getattr(tokenize, "FSTRING_END", -1), getattr(tokenize, "TSTRING_END", -1)
    opened: list[Position] = []
    for token in tokens:
        if token.type in starting:
            opened.append(token.start)
        elif token.type in ending:
            begin = opened.pop()
            if not opened:
                yield offset(begin), offset(token.end), True
        elif opened:
            continue
        elif token.type == tokenize.STRING:
            yield offset(token.start), offset(token.end), True
        elif token.type == tokenize.COMMENT:
            yield offset(token.start), offset(token.end), False


def _secret_nodes(tree: ast.AST, values: bool) -> Iterator[ast.expr]:
    """The constants and f-strings in a program that are secrets by a name beside them."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _assigned(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value) if _kinds(node.annotation):
                names = [*_kinds(node.annotation), *_names(node.target)]
                yield from _told(names, value, deep=True)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
                | ast.AugAssign(target=target, value=value)
            ):
                yield from _assigned(target, value)
            case ast.For(target=target, iter=given) | ast.comprehension(target=target, iter=given):
                items = given.elts if isinstance(given, ast.Tuple | ast.List) else []
                of_each = [(target, given)]
                if isinstance(target, ast.Tuple):
                    of_each = [
                        pair for item in items if isinstance(item, ast.Tuple | ast.List)
                        for pair in zip(target.elts, item.elts, strict=False)
                    ]  # fmt: skip
                for one, value in of_each:
                    yield from _told([n for n in _names(one) if not _is_bare(n)], value)
            case ast.BoolOp(op=ast.Or(), values=parts):
                names = [name for part in parts for name in _read(part)]
                for part in parts:
                    yield from _told(names, part, deep=False)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                # "a" if password else "b" is a choice; x if password else "b" has a default.
                if _is_text(body) != _is_text(orelse):
                    for part in (body, orelse):
                        yield from _told(_read(test), part, deep=False)
            case ast.keyword(arg=str(name)):
                yield from _told([name], node.value)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    names = [] if key is None else _names(key, texts=True)
                    yield from _told(names, value, deep=False, leaf=values)
                keys = [_said(key) if key is not None else "" for key in node.keys]
                yield from _by_role(list(zip(keys, node.values, strict=True)), [])
            case ast.arguments():
                yield from _parameters(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if is_secret(node.name) and not _is_bare(node.name):
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Return) and inner.value is not None:
                            yield from _told([node.name], inner.value)
            case ast.Call():
                yield from _called(node)
            case ast.Compare():
                yield from _compared(node)
            case ast.Tuple() | ast.List():
                yield from _beside(node)


def _private_keys(tree: ast.AST) -> Iterator[ast.expr]:
    """All texts of an expression that puts a private key together, line by line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.BinOp | ast.List | ast.Tuple):
            texts = list(_constants(node))
            if any("-----BEGIN" in _said(text) for text in texts):
                yield from texts


def _told(
    names: Sequence[str], value: ast.expr, *, deep: bool | None = None, leaf: bool = False
) -> Iterator[ast.expr]:
    """The texts in ``value`` that one of ``names`` calls secrets; behind a weak one
    (``dataset(key="image")``) those that are like one. ``deep`` as :func:`_constants` takes it,
    None: unless all names are bare. ``leaf``: a number or a name, too."""
    names = [name for name in names if is_secret(name)]
    if not names:
        return
    inside = not all(map(_is_bare, names)) if deep is None else deep
    for node in [value] if leaf and _is_leaf(value) else _constants(value, inside):
        said = _said(node)
        of_it = [name for name in names if not _is_token_id(name, said)]
        if any(_strength(name) == 2 for name in of_it) or (of_it and _may_be_one(said)):
            yield node


def _said(node: ast.expr) -> str:
    """The text of a constant; of an f-string its own parts."""
    match node:
        case ast.Constant(value=bytes(raw)):
            return raw.decode("latin-1")
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_said(part) for part in parts if isinstance(part, ast.Constant))
    return ast.unparse(node)


def _is_leaf(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str | bytes | bool | None)
    return not isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.JoinedStr)


def _names(node: ast.AST, *, texts: bool = False) -> list[str]:
    """What ``node`` is called: ``token``, ``self.token``, ``d["token"]``; with ``texts`` a quoted
    text that is a name, too."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.Subscript():
            return [*_names(node.slice, texts=True), *_names(node.value)]
        case ast.Starred():
            return _names(node.value)
        case ast.Constant(value=str(text)) if texts and _NAME.fullmatch(text):
            return [text]
        case ast.Constant(value=bytes(raw)) if texts:
            return _names(ast.Constant(raw.decode("latin-1")), texts=True)
    return []


def _read(node: ast.expr) -> list[str]:
    """What the value of an expression is called where it comes from: ``args.token``,
    ``config["token"]``, ``os.getenv("TOKEN")``, ``get_token()``."""
    match node:
        case ast.Call(func=func, args=args):
            names = _names(func)[:1]
            if names and names[0] in _READS:
                texts = [part for part in args[:2] if isinstance(part, ast.Constant)]
                return [name for part in texts for name in _names(part, texts=True)]
            return names + (_read(func.value) if isinstance(func, ast.Attribute) else [])
        case (
            ast.UnaryOp(operand=operand) | ast.Await(value=operand)
            | ast.Compare(left=operand, ops=[ast.Is() | ast.IsNot()])
        ):  # fmt: skip
            return _read(operand)
    return [name for name in _names(node) if name != "key"]


def _kinds(annotation: ast.expr) -> list[str]:
    """``SecretStr``, ``Optional["Password"]``: the names of secrets in an annotation."""
    names = [name for part in ast.walk(annotation) for name in _names(part, texts=True)]
    return [name for name in names if is_secret(name) and not _is_bare(name)]


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield from _told(_names(target), value)
        return
    is_paired = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
    if is_paired and not any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):  # type: ignore[attr-defined]
        for one, other in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
            yield from _assigned(one, other)
        return
    for part in target.elts:
        yield from _told([name for name in _names(part) if not _is_bare(name)], value)


def _parameters(given: ast.arguments) -> Iterator[ast.expr]:
    positional = [*given.posonlyargs, *given.args]
    pairs = [
        *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    for parameter, default in pairs:
        kinds = [] if parameter.annotation is None else _kinds(parameter.annotation)
        if default is not None:
            yield from _told([*kinds, parameter.arg], default, deep=bool(kinds) or None)


def _constants(node: ast.AST, deep: bool = False) -> Iterator[ast.expr]:
    """The texts that the value of an expression is made of. ``deep``: also the arguments of calls
    of any function."""
    match node:
        case ast.Constant(value=str() | bytes()) | ast.JoinedStr():
            yield node
        case ast.Call():
            name = _names(node.func)[:1] or [""]
            if isinstance(node.func, ast.Attribute):
                yield from _constants(node.func.value, deep)
            if name[0] in _OPENS or not (deep or name[0] in _CONVERTS):
                return
            first = 0 if name[0] not in _READS else 2 if name[0] == "getattr" else 1
            for part in (*node.args[first:], *(k.value for k in node.keywords)):
                is_name = isinstance(part, ast.Constant) and str(part.value).isupper()
                if not (is_name and any(map(is_secret, _names(part, texts=True)))):
                    yield from _constants(part, deep)
        case ast.Subscript() | ast.Attribute():
            yield from _constants(node.value, deep)
        case ast.IfExp():
            yield from _constants(node.body, deep)
            yield from _constants(node.orelse, deep)
        case ast.Dict():
            for value in node.values:
                yield from _constants(value, deep)
        case ast.Lambda():
            yield from _constants(node.body, deep)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            yield from _constants(node.elt, deep)
        case (
            ast.BoolOp() | ast.BinOp() | ast.Tuple() | ast.List() | ast.Set() | ast.Starred()
            | ast.Await() | ast.NamedExpr()
        ):  # fmt: skip
            for child in ast.iter_child_nodes(node):
                yield from _constants(child, deep)


def _called(node: ast.Call) -> Iterator[ast.expr]:
    """``set_password("X")``, ``login("X")``; ``getenv("TOKEN", "X")``,
    ``add_argument("--token", default="X")``."""
    name = (_names(node.func) or [""])[0]
    if name in _ENTERS or (is_secret(name) and not _is_bare(name)):
        caller = "password" if name in _ENTERS else name
        for keyword in node.keywords if name in _ENTERS else ():
            if keyword.arg is not None and is_secret(keyword.arg):
                yield from _constants(keyword.value)
        for part in (*node.args, *(k.value for k in node.keywords if k.arg is None)):
            if not any(map(is_secret, _names(part, texts=True))):
                yield from _told([caller], part, deep=False)
    named: list[str] = []
    for part in node.args:
        names = [n for n in _names(part, texts=True) if is_secret(n) and n != "key"]
        if not _is_option(part):
            yield from _told(named, part, deep=False)
        named += names if isinstance(part, ast.Constant) else []
    first, *others = node.args or [node]
    if isinstance(first, ast.expr) and others and all(map(_is_option, others)):
        yield from _told(named, first, deep=False)  # typer.Option("X", "--password")
    given: list[tuple[str, ast.expr]] = []
    for keyword in node.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            parts = zip(keyword.value.keys, keyword.value.values, strict=True)
            given += [(_said(key), value) for key, value in parts if key is not None]
        elif keyword.arg is not None:
            given.append((keyword.arg, keyword.value))
    yield from _by_role(given, named)


def _is_option(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("-")


def _by_role(given: Sequence[tuple[str, ast.expr]], named: Sequence[str]) -> Iterator[ast.expr]:
    """``key="TOKEN", default="X"``: the default of what another part names."""
    names = [n for role, part in given if role in _CALLS for n in _names(part, texts=True)]
    names = [name for name in names if name != "key"]
    for role, part in given:
        if role in _DEFAULTS:
            yield from _told([*named, *names], part, deep=True)


def _compared(node: ast.Compare) -> Iterator[ast.expr]:
    """``args.password == "X"``; in loops over words and tables ``key`` and ``token`` are none."""
    sides = [node.left, *node.comparators]
    names = [name for side in sides for name in _names(side) if not _is_bare(name)]
    for side in sides:
        if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set | ast.JoinedStr):
            yield from _told(names, side, deep=False)


def _beside(node: ast.Tuple | ast.List) -> Iterator[ast.expr]:
    """``("password", "X")``, ``["--token", "X"]``."""
    for one, other in pairwise(node.elts):
        for name in _names(one, texts=True) if isinstance(one, ast.Constant) else ():
            pair = len(node.elts) == 2 and not _is_bare(name)
            if pair or name.startswith("--"):
                yield from _told([name], other, deep=False)
