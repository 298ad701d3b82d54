"""The failure tree. Each message says what happened, where, and what to do next.

AmpscopeError
├── BadInput        the user asked for something that cannot be done as asked
├── StoreError      the store cannot be read or written (path, disk, schema, not SQLite)
│   └── StoreBusy   another program holds it; asking again later helps
└── Cancelled       a person stopped the run
"""

from __future__ import annotations


class AmpscopeError(Exception):
    """Base of every error that ampscope raises on purpose; its text is fit for a person."""


class BadInput(AmpscopeError):  # noqa: N818  # says what happened, as the others
    """What was asked for cannot be done as asked."""


class StoreError(AmpscopeError):
    """The store cannot be opened, read or written."""

    def __init__(self, sentence: str) -> None:
        # It may quote the store's bytes: none of them acts on a terminal or makes a second line.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence))


class StoreBusy(StoreError):  # noqa: N818  # as above
    """Another program holds the store: it is there, and can be read when that program is done."""


class Cancelled(AmpscopeError):  # noqa: N818  # as above
    """A person stopped the run."""
