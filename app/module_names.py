"""Names of a run's modules as the pages write them, and the picker of one module.

The root's path is empty, so it is written out. Ops that ran in no module (the loss, the optimizer)
are the root's too.
"""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from ampscope.records import ModuleRecord

from app import links

ROOT = "(model)"
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


def pick_module(
    label: str, modules: Sequence[ModuleRecord], among: Sequence[int], default: int | None = None
) -> int:
    """Module index chosen by name among ``among`` (not empty), bound to the URL's ``module``."""
    names = names_by_index(modules)
    by_name = {names.get(index, str(index)): index for index in among}
    first = next((n for n, i in by_name.items() if i == default), None)
    chosen = links.select(label, "module", list(by_name), default=first, help="Type to search.")
    return by_name[chosen]


def open_module(path: str) -> None:
    """Choose a module from outside its picker: the picker follows the URL on the next run."""
    st.query_params["module"] = name_of(path)
