"""Words and numbers as a person reads them, and names from runs as nothing but text.

A module's name, a label and a child's message come from code that ampscope did not write. They go
to the screen through :func:`escape` or :func:`code` (Markdown), :func:`for_plotly` (Plotly, which
reads a little HTML), :func:`for_csv` (files that a spreadsheet opens), or as the plain text of
``st.text``, ``st.code`` and ``st.dataframe``.
"""

from __future__ import annotations

import html
import re

from ampscope.number_words import NAME_LENGTH as NAME_LENGTH
from ampscope.number_words import ago as ago
from ampscope.number_words import count as count
from ampscope.number_words import cut as cut
from ampscope.number_words import duration as duration
from ampscope.number_words import number as number
from ampscope.number_words import percent as percent
from ampscope.number_words import plural as plural
from ampscope.number_words import power_of_two as power_of_two
from ampscope.number_words import share as share
from ampscope.number_words import size as size

LONGEST = 2_000  # characters of one text on a page; names of real runs have a few hundred
_JOINER = "\u2060"  # word joiner: no width, no line break
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_SYMBOLS = re.compile(r"([-<>=~:])(?=[-<>=~:])|:|@|www(?=\.)", re.IGNORECASE)
# Plotly's own: a name in a template (%{x}), and TeX between two dollar signs.
_PLOTLY = re.compile(r"%(?=\{)|\$")
# What a spreadsheet takes for a formula at the start of a cell.
_FORMULA = re.compile(r"\s*[=+\-@\t\r]")


def bounded(text: str) -> str:
    """Its beginning, and how much of it is not shown: 100,000 characters would be a page of their
    own, 300,000 px high."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]} … ({len(text) - LONGEST:,} characters more)"


def escape(text: str) -> str:
    """``text`` as Markdown that shows exactly it.

    CommonMark lets every ASCII punctuation mark be escaped. Streamlit replaces ``:name:`` and
    arrows such as ``->`` after that, and makes links of web and e-mail addresses, in the parsed
    text, so an invisible joiner parts those.
    """
    one_line = bounded(" ".join(text.split()))
    parted = _SYMBOLS.sub(lambda m: m.group(0) + _JOINER, one_line)
    return _PUNCTUATION.sub(r"\\\1", parted)


def code(text: str) -> str:
    """``text`` as a Markdown code span; the fence is longer than any run of backticks in it."""
    one_line = bounded(" ".join(text.split())) or " "
    longest = max((len(run) for run in re.findall(r"`+", one_line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if one_line.startswith("`") or one_line.endswith("`") else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


def for_plotly(text: str) -> str:
    """``text`` for Plotly's names, titles, ticks and hover boxes, which know tags and entities."""
    return html.escape(_PLOTLY.sub(lambda m: m[0] + _JOINER, bounded(text)), quote=False)


def power(exponent: float) -> str:
    """A power of two as every chart writes it, for Plotly's names, titles and hover boxes."""
    return f"2<sup>{exponent:.4g}</sup>".replace("-", "−")


def for_csv(value: object) -> object:
    """A cell of a table as a file. A spreadsheet takes a text that begins with one of a few signs
    for a formula, whatever its source: an apostrophe in front makes it a text
    (owasp.org/www-community/attacks/CSV_Injection). A number stays one, also as text ("-4")."""
    if not isinstance(value, str) or not _FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
