"""INSERT statements for records: a record's fields are the columns of its table."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from ampscope.store import door

Insert = tuple[str, tuple[object, ...]]  # statement, values


def of_records(
    table: str, run_id: str, records: Iterable[object], **more: object
) -> Iterator[Insert]:
    """One statement a record, with ``more`` columns in front of the record's own."""
    for record in records:
        # mypy takes object.__hash__ for an unhashable class's; classes are hashable.
        names, values = _fields(type(record))  # type: ignore[arg-type]  # see above
        columns = ("run", *more, *names)
        yield _insert(table, columns, (run_id, *more.values(), *values(record)))


def of_row(table: str, **columns: object) -> Insert:
    """The statement for one row that is not a record."""
    return _insert(table, tuple(columns), tuple(columns.values()))


def _insert(table: str, columns: tuple[str, ...], values: tuple[object, ...]) -> Insert:
    return _statement(table, columns), tuple(map(door.to_column, columns, values))


@cache
def _statement(table: str, columns: tuple[str, ...]) -> str:
    names = ",".join(f'"{name}"' for name in columns)  # "order" is a word of SQL
    marks = ",".join("?" * len(columns))
    return f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"


@cache
def _fields(kind: type) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]:
    """The columns of a record type, and what reads them from a record."""
    names = [field.name for field in dataclasses.fields(kind)]
    columns = tuple("module" if name == "index" else name for name in names)
    return columns, operator.attrgetter(*names)
