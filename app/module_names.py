"""Names of a run's modules as the pages write them, and the picker of one module.

The root's path is empty, so it is written out. Ops that ran in no module (the loss, the optimizer)
are the root's too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import streamlit as st
from ampscope.records import ModuleRecord

from app import links
from app.text import cut

ROOT = "(model)"
PART_LENGTH = 10  # of one part of a path that is too long
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
    """Names cut to ``length`` so that they stay apart: what all of them begin with goes first, then
    the middle of long parts, then the middle of the whole.

    >>> short_names(["model.encoder.block_01.projection_out", "model.encoder.block_02.mlp"], 20)
    ['block_01.proj…n_out', 'block_02.mlp']
    """
    paths = [name.split(".") for name in names]
    common = len(os.path.commonprefix(paths)) if len(paths) > 1 else 0
    longest = max((len(name) for name in names), default=0)
    if longest <= length:
        return list(names)
    kept = [path[min(common, len(path) - 1) :] for path in paths]
    parted = [".".join(cut(part, PART_LENGTH) for part in path) for path in kept]
    return [cut(name, length) for name in parted]


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
