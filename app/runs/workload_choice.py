"""Choose what is trained: a built-in model, or a file below the operator's folder."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from ampscope.records import RunSpec
from ampscope.workloads.catalog import BUILTIN, SIZES
from app import options
from app.runs import workload_files
from app.text import escape

FILE = "file:"  # marks an option that is a path below the operator's folder


@dataclass(frozen=True, slots=True)
class Choice:
    """What the browser sent; nothing of it is trusted before :func:`named`."""

    workload: str
    size: str
    entry: str = workload_files.DEFAULT_ENTRY


def named(choice: Choice) -> str:
    """The workload as RunSpec names it. Raises BadInput for a file that may not be used."""
    if choice.workload in BUILTIN:
        return choice.workload
    relative = choice.workload.removeprefix(FILE)
    return workload_files.chosen(options.current().workloads, relative, choice.entry)


def draw(start: RunSpec) -> Choice:
    """The widgets."""
    folder = options.current().workloads
    files = [FILE + name for name in workload_files.listed(folder)]
    offered = [*BUILTIN, *files]
    choice = st.selectbox(
        "Workload",
        offered,
        index=offered.index(start.workload) if start.workload in offered else 0,
        format_func=_title,
        help=_help(bool(files)),
        key="np-workload",
    )
    size = st.segmented_control(
        "Size",
        SIZES,
        default=start.size if start.size in SIZES else SIZES[0],
        key="np-size",
    )
    size = size or SIZES[0]
    if choice in BUILTIN:
        _describe(choice, size)
        return Choice(choice, size)
    entry = st.text_input(
        "Function",
        workload_files.DEFAULT_ENTRY,
        help="The function in the file that returns an ampscope.Workload.",
        key="np-entry",
    )
    return Choice(choice, size, entry.strip())


def _title(choice: str) -> str:
    return BUILTIN[choice].title if choice in BUILTIN else choice.removeprefix(FILE)


def _describe(name: str, size: str) -> None:
    info = BUILTIN[name]
    st.caption(escape(f"{info.sentence} {info.parameters[size]:,} parameters."))


def _help(has_files: bool) -> str:
    if has_files:
        return "Built-in models, and the files of the folder named by --workloads."
    return "To try a model of your own, start the dashboard with --workloads DIR."
