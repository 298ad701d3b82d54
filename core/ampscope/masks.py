"""Texts without the secrets in them (docs/privacy.md).

Three kinds of text are masked, each as much as its form allows::

    masked(("--token", "X", "API_KEY=X,Y"))   arguments: all that is behind the name of a secret
    masked_text("user password=X at /data")   a text for a person: the word behind such a name
    masked_source('password: str = "X"')      a program: its quoted texts; names and lines stay

In all of them go what is known by its form (:mod:`ampscope.secret_forms`) and the values that
:func:`hide_secrets_of` and :func:`hide_environment` were told. Masking twice is masking once, so
what was stored can be stored again.
"""

from __future__ import annotations

import ast
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

from ampscope.secret_expressions import is_text, private_keys, secret_expressions
from ampscope.secret_forms import MASK, WHOLE_ADDRESS, Taken, known_forms, mask_of
from ampscope.secret_names import (
    NAME,
    is_called_secret,
    is_secret,
    is_secret_anywhere,
    is_secret_argument,
    is_sure_in_prose,
    is_token_id,
    looks_random,
    strength,
    words_of,
)

LONGEST_LITERAL = 100_000  # characters of a list or an object that is read as one
LONGEST_PROGRAM, LONGEST_LINE = 500_000, 250  # characters that are parsed
SHORTEST_HIDDEN = 6  # characters: a shorter one would be found in half of all words
_ANYWHERE = 8  # from this length on also within a longer word

_OPTION = re.compile(r"--?[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*(?:=.*)?", re.DOTALL)
_SWITCHES = {"use", "no", "with", "without", "enable", "disable", "require", "is", "has"}
_PAIR = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)["']?\]?\s*[:=]\s*(?!//)""")
_LITERAL_ARGUMENT = re.compile(r"(?:-{0,2}[\w.-]+=)?(?=[\[{(])")


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
        if is_value and is_secret_argument(name, arg):
            if arg != MASK and is_secret_anywhere(name, arg):
                taken.append(arg)
            found.append(MASK)
            name = name if many else ""
            continue
        found.append(masked_argument(arg, taken))
        words = words_of(arg)
        is_named = arg.startswith("-") and bool(NAME.fullmatch(arg)) and is_secret(arg)
        name = arg if is_named else ""
        switch = bool(words) and (words == ["auth"] or words[0] in _SWITCHES)
        many = is_named and words[-1] in ("passwords", "secrets", "credentials")
    return tuple(found)


def masked_argument(arg: str, taken: Taken | None = None) -> str:
    """One argument. Of a well-formed list or object each value on its own; else the whole rest
    behind the first name of a secret, whatever signs are in it."""
    taken = [] if taken is None else taken
    arg = known_forms(arg, taken, WHOLE_ADDRESS)
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
        if is_secret_argument(found["name"], value):
            if is_secret_anywhere(found["name"], value):
                taken.append(value)
            return arg[:look] + MASK
    return _flags(arg, taken) if _MAY_HOLD_FLAGS.search(arg) else arg


def masked_value(name: str, value: str) -> str:
    """A text that a program calls ``name``: all of it, where that is the name of a secret."""
    return MASK if value and is_called_secret(name, value) else masked_text(value)


_SUSPICIOUS = re.compile(r"[:=,]|[ \t]-|_|-|\.|(?i:bearer|basic|wandb|AKIA|ASIA|AIza)")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-api-key)"
    r"([\"']?[ \t]{0,8}[:=][ \t]{0,8}[\"']?)([^\"'\n]+)"
)
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
_WORD = re.compile(r"\S*")
_BEHIND = ".,;:)]}>\"'"  # what a sentence puts behind a value
_NO_VALUE = re.compile(
    r"(?i)[-+]?(?:\d{1,5}|\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+\.)(?:e[-+]?\d+)?"
    r"|none|null|true|false|yes|no|on|off|\*\*\*|lambda|(?-i:\[[A-Z_]+\])"
    r"|%(?:\(\w*\))?[sdrifg]|\{[\w.!:\[\]]*\}|\$\{\w*\}|\$(?-i:[A-Z_]+)|(?-i:<[a-z_/|]*>)|<[\w]+(?:\.\w+)+"
)


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
    text = known_forms(text)
    if ":" in text or "=" in text:
        text = _HEADER.sub(lambda m: m[0] if m[3].startswith(MASK) else f"{m[1]}{m[2]}{MASK}", text)
        text = _pairs(text)
    return _flags(text, []) if _MAY_HOLD_FLAGS.search(text) else text


def _pairs(text: str) -> str:
    parts: list[str] = []
    at = look = 0
    while (found := _TEXT_PAIR.search(text, look)) is not None:
        look = found.end()  # a value may hold another pair
        sureness = strength(found["name"])
        value = _TEXT_VALUE.match(text, look) if sureness else None
        if value is None:
            continue
        items = _items(text, look) if sureness == 2 else []
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
        if not _is_value(found, inner, sureness, bool(quote)):
            continue
        parts += [text[at : look + len(quote)], mask_of(inner)]
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


def _unquoted(found: re.Match[str]) -> str:
    """A match of a quoted text without what is quoted."""
    start, end = found.start("inner") - found.start(), found.end("inner") - found.start()
    return found[0][:start] + mask_of(found["inner"]) + found[0][end:]


def _is_value(found: re.Match[str], inner: str, sureness: int, quoted: bool) -> bool:
    """Whether what stands behind the name of a secret is one."""
    name, sign = found["name"], found["sign"]
    if not inner or inner.startswith("=") or _NO_VALUE.fullmatch(inner) or is_token_id(name, inner):
        return False
    if name.startswith("-") and ":" in sign:
        return False  # "argument --token: expected one argument"
    is_prose = sign.endswith((" ", "\t")) and "=" not in sign and not quoted
    if sureness == 2 and (not is_prose or is_sure_in_prose(name)):
        return True
    if len(inner) < 4 or "(" in inner:
        return False
    return not is_prose or (len(inner) >= 6 and looks_random(inner)) or len(inner) >= 16


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


def _flags(text: str, taken: Taken) -> str:
    """A command within a text: ``train.py --token X``, ``['--token', 'X']``."""

    def is_one(name: str, value: str) -> bool:
        if not is_secret(name) or is_token_id(name, value) or _NO_VALUE.fullmatch(value):
            return False
        is_like_one = strength(name) == 2 or (len(value) >= 4 and looks_random(value))
        return is_like_one and not _OPTION.fullmatch(value)

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
            parts += [text[at : found.start("inner")], mask_of(value)]
            at = found.end("inner")
    return _REFUSED.sub(refused, "".join([*parts, text[at:]]))


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
    elsewhere: their author chooses how long that takes."""
    return masked_forms(_by_pattern(text))


def masked_forms(text: str) -> str:
    """``text`` without what is hidden, or known by its form alone: of a program that was masked."""
    return known_forms(without_secrets(text))


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
        names = re.findall(r"[\w.-]+", found["before"])  # of an annotation, too
        is_told = any(is_called_secret(name, found["text"]) for name in names)
        if not is_told or _VOCABULARY.fullmatch(found["text"]):
            return found[0]
        return f"{found['before']}{found['quote']}{mask_of(found['text'])}{found['quote']}"

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
    keys = private_keys(tree) if "PRIVATE KEY" in whole else ()
    for node in (*secret_expressions(tree, values), *keys):
        last = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        span = of_node(node.lineno, node.col_offset), of_node(*last)
        if is_text(node):
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
            new = inner if inner.startswith(MASK) else mask_of(inner)
            taken += [] if inner == new else [inner]
        else:
            new = masked_text(inner)
        if new != inner:
            changes.append((begin + opened.end(), end - len(opened[1]), new))
    for start, end, new in sorted(changes, reverse=True):
        whole = whole[:start] + new + whole[end:]
    return whole


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
        elif not opened and token.type in (tokenize.STRING, tokenize.COMMENT):
            yield offset(token.start), offset(token.end), token.type == tokenize.STRING


_hidden: list[str] = []  # longest first
_environment: dict[str, str] = {}  # as it was when it was last looked at
_arguments: list[str] = []  # the same
_SPLIT = re.compile(r"[\s,;&\"'{}()@/:?#]+")
_COMMON = {  # values of options that are called auth, key or token
    "bearer", "basic", "digest", "default", "disabled", "enabled", "required", "optional",
    "bfloat16", "float16", "float32", "float64", "running", "finished", "failed", "password",
    "secret", "anonymous", "offline", "online", "always", "weight", "loss", "authorization",
}  # fmt: skip


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
            if is_secret_argument(name, value) and is_secret_anywhere(name, value):
                taken.append(value)
        elif "://" in value:
            known_forms(value, taken, WHOLE_ADDRESS)
    _environment = now
    _hide(taken)


def _hide(taken: Taken) -> None:
    before = len(_hidden)
    for secret in taken:
        is_path = secret.startswith(("/", "~", "."))
        if is_path and _is_there(secret):
            continue
        # The folders of a path stand in others, too.
        pieces = [] if is_path else map(_of_pair, _SPLIT.split(secret[:LONGEST_LITERAL]))
        for part in (secret, secret.strip("\"'-"), *filter(looks_random, pieces)):
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
    return part if not sign or not NAME.fullmatch(name) else value if is_secret(name) else ""


def _can_be_hidden(text: str) -> bool:
    if MASK in text or (_OPTION.fullmatch(text) and text.startswith("-")):
        return False
    if len(text) < SHORTEST_HIDDEN or _NO_VALUE.fullmatch(text) or text.lower() in _COMMON:
        return False
    return len(text) >= 8 or not text.isdigit()


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
