"""The numbers in what a script printed or logged, by the words that stand before them.

    epoch 3: loss 0.31, acc 90.2% (4.1s)     ->  epoch: 3, loss: 0.31, acc: 90.2
    {'eval_loss': 0.3, 'epoch': 2.0}         ->  eval_loss: 0.3, epoch: 2
    [val] step 40 loss 0.4                   ->  val step: 40, val loss: 0.4

What the clock and the machine make (times, speeds, memory, paths), warnings, tracebacks and
ampscope's own sentences are left out. Of a line that was written over, as a progress bar's is, what
was left standing counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ampscope.observations import Printed

MOST_PATTERNS, MOST_VALUES = 200, 2_000
LONGEST_LINE, LONGEST_WORDS = 2_000, 80  # characters
MOST_ON_A_LINE = 40  # more numbers are a tensor's, not results
_READ_PATTERNS = 4_000  # until so many are met, those with the most numbers are still looked for

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_BAR = re.compile(r"\d+%\|[^|]*\|\s*[^\s\[]*\s*(?:\[[^\]<]*<[^,\]]*(?:,\s*[\d.?]+\s?[\w.]+/\w+)?)?")
_LEFT_OUT = re.compile(
    r"\b\w+://\S+"
    r"|(?<![\w.])(?:[A-Za-z]:\\|~?/|\.{1,2}/)[^\s,;:'\")]+"  # a path
    r"|[\w./-]*\.(?:py|ipynb):\d+"
    r"|\b\d{4}[-/]\d\d[-/]\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|(?<![\w.])\d{1,3}:\d\d(?::\d\d)?(?:[.,]\d+)?(?![\w.])"  # a time of day, or how long
    r"|\b0x[0-9a-fA-F]+\b"
    r"|[,(]?\s*\b(?:grad_fn|device|dtype|requires_grad)=(?:<[^>]*>|'[^']*'|[\w.]+)"
)
_UNIT = (
    r"s|secs?|seconds?|ms|msec|[uµ]s|ns|mins?|minutes?|h|hrs?|hours?|days?"
    r"|[KMGTkmgt]i?[Bb]|[Bb]ytes|[KMGTP]?FLOPS?|s/\w+|[\w.]+/(?:s|sec|second|min|h)"
)
_NUMBER = re.compile(
    r"(?<![\w.@])(?<![\w)][-+])"
    r"(?P<number>[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?(?:nan|inf|infinity)(?![\w.-]))"
    rf"(?:\s?(?P<unit>{_UNIT})(?![\w/]))?"
    r"(?P<percent>\s?%)?(?!\w|\.\d|-[A-Za-z])",
    re.IGNORECASE,
)
_OWN = re.compile(r"\s*(?:ampscope: |Running: )")
_WARNING = re.compile(r"\w*Warning: ")
_TRACEBACK = "Traceback (most recent call last):"
_CLOCK = re.compile(
    r"(?<![a-z])(?:time|runtime|elapsed|eta|duration|seconds?|secs?|speed|throughput|fps|memory|mem"
    r"|vram|rss|pid|port|per[_ ]second|date|mfu|latency|wall|tps|ips|\w+/s|ms(?!-))(?![a-z])",
    re.IGNORECASE,
)
_LEVEL = re.compile(r"\b(?:INFO|DEBUG|WARNING|ERROR|CRITICAL)\b")
_COUNTERS = {
    "epoch", "epochs", "ep", "step", "steps", "global_step", "iter", "iters", "iteration",
    "iterations", "it", "i", "t", "batch", "round", "episode", "fold", "update",
}  # fmt: skip
_SPLITS = ("train", "val", "test", "eval", "dev")
_TRIMMED = " \t'\"`:=,;|()[]{}<>-–—*#~>!/\\"


def printed_numbers(text: str, *, ended: bool = True) -> list[Printed]:
    """Numbers behind the same words, in their order; :data:`MOST_PATTERNS` of them at most, those
    with the most numbers. ``ended``: ``text`` is all that was printed."""
    values: dict[str, list[float]] = {}
    rows: dict[str, list[int]] = {}
    cut: set[str] = set()
    for row, words, value in _found(text):
        if words not in values and len(values) >= _READ_PATTERNS:
            continue
        own = values.setdefault(words, [])
        if len(own) < MOST_VALUES:
            own.append(value)
            rows.setdefault(words, []).append(row)
        else:
            cut.add(words)
    order = sorted(values, key=lambda words: -len(values[words]))[:MOST_PATTERNS]
    kept = [words for words in values if words in set(order)]
    return [
        Printed(words, tuple(values[words]), tuple(rows[words]), ended and words not in cut)
        for words in kept
    ]


def _found(text: str) -> Iterator[tuple[int, str, float]]:
    """Each number with its words and the line that it stands in."""
    label, columns = "", list[str]()
    for row, line in _lines(text):
        line = _LEFT_OUT.sub(" ", _BAR.sub(" ", line))
        if not line.strip():
            continue
        found = list(_NUMBER.finditer(line))
        if not found:
            label = line.strip()
            columns = _columns(label)
            continue
        if len(found) > MOST_ON_A_LINE:
            continue
        names = _in_table(line, found, columns) or _names(line, found, label)
        for match, words in zip(found, names, strict=True):
            if words and not match["unit"] and not _CLOCK.search(words):
                yield row, words, float(match["number"].replace(",", ""))
        label = ""


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines as they were left standing, numbered, without what no script says of its results."""
    in_traceback = after_warning = False
    for row, whole in enumerate(text.split("\n")):
        parts = [part for part in whole.split("\r") if part.strip()]
        line = _ESCAPES.sub("", parts[-1][:LONGEST_LINE]) if parts else ""
        if in_traceback:  # up to the line of the error itself
            in_traceback = not line or line[0].isspace() or line.startswith(_TRACEBACK)
            continue
        if _TRACEBACK in line:
            in_traceback = True
            continue
        was_after, after_warning = after_warning, bool(_WARNING.search(line))
        if after_warning or (was_after and line[:1].isspace()) or _OWN.match(line):
            continue
        yield row, line


def _names(line: str, found: list[re.Match[str]], label: str) -> list[str]:
    """The words of each number: those before it, behind the number before. What a line begins with
    stands before all of it, without the name of its first number: in "[val] step 40 loss 0.4" the
    loss is "val loss", in "test loss 0.3 acc 0.9" the second is "test acc". Numbers without any
    words go by their place."""
    names: list[str] = []
    head, at, before, repeat = "", 0, "", 1
    for number, match in enumerate(found):
        own = _words(line[at : match.start()])
        if number == 0 and not own:
            own = _words(label) if label.endswith(":") else ""
        if number == 0:
            parts = own.split()
            others = [part for part in parts if part not in _COUNTERS]
            head = " ".join(others if len(others) < len(parts) else parts[:-1])
            name = own or f"number 1 of {len(found)}"
        elif own:
            is_split = any(own.startswith(split) for split in _SPLITS)
            name = f"{head} {own}" if head and not is_split else own
            if name in names:  # "train loss 1 acc 2 val loss 3 acc 4"
                name = f"{before} {own}"
        else:
            repeat += 1
            name = f"{before} [{repeat}]" if before else f"number {number + 1} of {len(found)}"
        if own:
            before, repeat = name, 1
        names.append(name[-LONGEST_WORDS:].strip())
        at = match.end()
    return names


def _words(text: str) -> str:
    text = _LEVEL.sub(" ", text).replace("tensor(", " ").lower()
    parts = (part.strip(_TRIMMED) for part in re.split(r"[\s,;|'\"()\[\]{}=]+|:(?=\s|$)", text))
    return " ".join(part for part in parts if part)[-LONGEST_WORDS:].strip()


def _columns(line: str) -> list[str]:
    """The names in a line that may be a table's head."""
    parts = re.split(r"\s*\|\s*|\t+|\s{2,}|\s*,\s*", line.strip(" |"))
    if len(parts) < 2:
        parts = line.split()
    return [_words(part) for part in parts] if 2 <= len(parts) <= MOST_ON_A_LINE else []


def _in_table(line: str, found: list[re.Match[str]], columns: list[str]) -> list[str]:
    """The words of a row's numbers, where the line is a row below ``columns``: that many numbers
    and nothing between them, behind a name or none. A number too many is the row's name."""
    if any(_words(line[a.end() : b.start()]) for a, b in pairwise(found)):
        return []
    name = _words(line[: found[0].start()])
    if len(found) == len(columns) + 1 and not name:
        return ["", *(f"{found[0]['number']} {column}" for column in columns)]
    return [f"{name} {column}".strip() for column in columns] if len(found) == len(columns) else []
