"""Names of a run's modules as the pages write them, and the picker of one module.

The root's path is empty, so it is written out. Ops that ran in no module (the loss, the optimizer)
are the root's too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import streamlit as st

from ampscope.records import ModuleRecord
from app import links
from app.text import cut

ROOT = "(model)"
READABLE_PART, SHORTEST_PART = 9, 5  # characters of one part of a path: four, two at each end
INDENT = "\u2003"  # em space: a table's cell drops plain spaces at its start


def name_of(path: str) -> str:
    """``h.0.attn``, or ``(model)`` for the root."""
    return path or ROOT


def names_by_index(modules: Sequence[ModuleRecord]) -> dict[int, str]:
    """Module index -> name."""
    return {m.index: name_of(m.path) for m in modules}


def in_tree(path: str, depth: int) -> str:
    """The last part of the path, indented by its depth."""
    return INDENT * depth + name_of(path.rpartition(".")[2])


def short_names(names: Sequence[str], length: int) -> list[str]:
    """Names cut to ``length`` so that they stay apart, all in the same way: first goes what all of
    them begin with (but for its last part) and the middle of long parts, then that last part and
    more of the middles, then the middle of the whole.

    >>> short_names(["model.block_01.projection_out", "model.block_02.mlp"], 20)
    ['block_01.proje…n_out', 'block_02.mlp']
    """
    if max((len(name) for name in names), default=0) <= length:
        return list(names)
    paths = [name.split(".") for name in names]
    common = _common_parts(paths) if len(paths) > 1 else 0
    for start, part_length in ((common - 1, length), (common - 1, READABLE_PART), (common, 0)):
        kept = [path[max(0, min(start, len(path) - 1)) :] for path in paths]
        if part_length and all(len(_parted(path, part_length)) <= length for path in kept):
            return _apart([_parted(path, part_length) for path in kept], names, length)
    return _apart([_fitted(path, length) for path in kept], names, length)


def _apart(shorts: Sequence[str], names: Sequence[str], length: int) -> list[str]:
    """Names that were cut alike show their ends instead, and a number where those are alike too."""
    counts = Counter(shorts)
    ends = [
        f"…{n[1 - length :]}" if counts[s] > 1 else s for s, n in zip(shorts, names, strict=True)
    ]
    same = Counter(ends)
    return [f"{end} #{i}" if same[end] > 1 else end for i, end in enumerate(ends)]


def _fitted(parts: Sequence[str], length: int) -> str:
    """As much of each part as fits, long parts giving way before short ones do."""
    for part_length in range(length, SHORTEST_PART - 1, -1):
        if len(_parted(parts, part_length)) <= length:
            return _parted(parts, part_length)
    return cut(".".join(parts), length)


def _parted(parts: Sequence[str], part_length: int) -> str:
    return ".".join(cut(part, part_length) for part in parts)


def _common_parts(paths: Sequence[Sequence[str]]) -> int:
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return len(list(same))


def pick_module(
    label: str, names: dict[int, str], among: Sequence[int], default: int | None = None
) -> int:
    """Module index chosen by name among ``among`` (not empty), bound to the URL's ``module``."""
    by_name = {names.get(index, str(index)): index for index in among}
    first = next((n for n, i in by_name.items() if i == default), None)
    chosen = links.select(label, "module", list(by_name), default=first, help="Type to search.")
    return by_name[chosen]


def open_module(path: str) -> None:
    """Choose a module from outside its picker: the picker follows the URL on the next run."""
    st.query_params["module"] = name_of(path)
