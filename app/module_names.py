"""Names of a run's modules as the pages write them, and the picker of one module.

The root's path is empty, so it is written out. Ops that ran in no module (the loss, the optimizer)
are the root's too.
"""

from __future__ import annotations

import itertools
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
    """Names cut to ``length`` so that they stay apart: the middle of long parts goes first, then
    what all names begin with, then the middle of the whole.

    >>> short_names(["model.encoder.block_01.projection_out", "model.encoder.block_02.mlp"], 20)
    ['block_01.proje…n_out', 'block_02.mlp']
    """
    paths = [name.split(".") for name in names]
    common = _common_parts(paths) if len(paths) > 1 else 0
    return [_short(path, min(common, len(path) - 1), length) for path in paths]


def _short(parts: Sequence[str], common: int, length: int) -> str:
    """Long parts give way before short ones do."""
    for start, shortest in ((0, READABLE_PART), (common, SHORTEST_PART)):
        for part_length in range(max(length, shortest), shortest - 1, -1):
            name = ".".join(cut(part, part_length) for part in parts[start:])
            if len(name) <= length:
                return name
    return cut(".".join(parts[common:]), length)


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
