"""Which names call a secret what stands behind them, and how surely (docs/privacy.md).

``password`` does whatever follows, ``token`` where it looks like one, ``token_mixer`` never.
"""

from __future__ import annotations

import re
from functools import lru_cache

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
_NUMBERS = re.compile(r"[\[(]?[\d, ]+[\])]?")
_PARTS_OF_NAME = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")  # of an option, a variable, an entry


@lru_cache(4_096)
def is_secret(name: str) -> bool:
    """Whether what stands after ``name`` (``--hf-token``, ``API_KEY``) is a secret, or, where
    :func:`strength` is below 2, may be one."""
    last, before, words = _named(name)
    if not words or words[-1] in _HARMLESS:
        return False
    if words == ["pw"]:
        return name.startswith("-")  # elsewhere it is a pointwise convolution, a positive weight
    if before in {"token": _OF_A_VOCABULARY, "key": _OF_A_TABLE}.get(last, ()):
        return False
    return last in _WEAK or bool(_STRONG & set(words)) or "".join(words).endswith(_ENDS)


@lru_cache(4_096)
def strength(name: str) -> int:
    """Of a name: 2 for a secret whatever follows, 1 and 0 where what follows must look like one;
    of those 0 says nothing within a text for a person."""
    if not is_secret(name):
        return 0
    name_alone = name.rpartition(".")[2]
    last, before, _ = _named(name_alone)
    if last == "token":
        return 2 if before else 1
    if last == "key":
        return 2 if before in _OF_A_DOOR or before in _STRONG or name.isupper() else 0
    if last in ("auth", "oauth"):
        return 1
    whole = "".join(words_of(name_alone))
    return 2 if last in _STRONG or last.endswith(_ENDS) or whole.endswith(_ENDS) else 0


def is_bare(name: str) -> bool:
    """Of names of secrets: whether it may as well mean something else (``key``, ``token``)."""
    words = words_of(name)
    return len(words) == 1 and words[0] in _WEAK


def is_sure_in_prose(name: str) -> bool:
    """Of names of strength 2: whether it is one also in a sentence, such as "api_key: X"."""
    last, before, _ = _named(name)
    return last not in _WEAK or before in _OF_A_DOOR - _OF_A_TENSOR or name.isupper()


def is_called_secret(name: str, value: str) -> bool:
    """Whether ``value``, which a program calls ``name``, is a secret; behind a weak name
    (``dataset(key="image")``) it is, if it is like one."""
    return is_secret(name) and (strength(name) == 2 or may_be_one(value))


def is_secret_argument(name: str, value: str) -> bool:
    """Whether ``value`` of an argument or a variable is a secret by its name. ``--checkpoint_key
    teacher`` is none, and no switch is one."""
    is_switched = len(value) < 10 and value.strip().lower() in _SWITCHED
    if not is_secret(name) or is_switched or is_token_id(name, value):
        return False
    return _named(name)[0] != "key" or is_called_secret(name, value)


def is_secret_anywhere(name: str, value: str) -> bool:
    """Of a secret argument: whether it is one wherever it stands. A plain word of ``--auth`` is
    none."""
    return _named(name)[0] not in ("key", "auth", "oauth") or is_called_secret(name, value)


def is_token_id(name: str, value: str) -> bool:
    """Whether it is a number, or a list of numbers, of a vocabulary: ``--boi_token_id 255999``."""
    last, _, words = _named(name)
    return last == "token" and words[-1] == "id" and _NUMBERS.fullmatch(value) is not None


def _named(name: str) -> tuple[str, str, list[str]]:
    """The word that says what ``name`` is, the one before it, and all; of ``hf_token_value2`` the
    value is called as ``hf_token`` is."""
    words = [word for word in words_of(name) if not word.isdigit()]
    end = len(words)
    if end > 1 and words[-1] in _BEHIND_WEAK and words[-2] in _WEAK | _STRONG:
        end -= 1
    last, before = (words[end - 1 : end] or [""])[0], (words[max(end - 2, 0) : end - 1] or [""])[0]
    return last, before, words


def words_of(name: str) -> list[str]:
    """``hfToken2`` and ``--hf-token-2`` are "hf", "token" and "2"."""
    return [word.lower() for word in _PARTS_OF_NAME.findall(name)]


def may_be_one(value: str) -> bool:
    """Of what stands behind a weak name: whether it is like a secret."""
    is_word = not any(c.isspace() for c in value)
    return is_word and (len(value) >= 16 or (len(value) >= 4 and looks_random(value)))


def looks_random(value: str) -> bool:
    """Whether it is no word: letters and digits, or capitals within."""
    has_digit = any(c.isdigit() for c in value)
    has_letter = any(c.isalpha() for c in value)
    is_mixed = any(c.isupper() for c in value[1:]) and value != value.upper()
    return is_mixed or (has_digit and has_letter)
