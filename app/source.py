"""The page Source: a script's own text with dtypes, casts and first faults beside each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis.line_view import File, LineView, files, place
from ampscope.control import COMPILED
from ampscope.records import RunInfo
from app import chart, links, permissions, states
from app.runs import diagnoses
from app.text import bounded, cut, escape, percent, plural

AROUND = 3  # lines shown before and behind one that something stands beside
WHOLE_UP_TO = 120  # lines: a shorter file is shown whole
COLUMNS = ("fwd", "bwd", "casts")  # short: on a phone a line has 45 characters in all
KERNELS = "krn"  # a column more where a kernel of compiled code was recorded
KERNELS_SHOWN = 3  # of a line


def read(run: RunInfo) -> list[File] | None:
    """The files of the run's diagnosis; None where there are none to show, which the page says."""
    if not permissions.may_see_source(run):
        states.nothing_recorded("The source of this script is not shown to the class.", "")
        return None
    case = diagnoses.case_of(run) if run.spec.kind == "script" else None
    compiled = None if case is None else case.run_of(COMPILED)
    kernels = () if compiled is None else diagnoses.observed(compiled).kernels
    found = [] if case is None else files(diagnoses.observed(case.head), kernels)
    if not found:
        states.nothing_recorded(
            "This run holds no source.",
            "A diagnosis keeps the text of the script's own files, unless it ran with --leave-out "
            "source or with an older ampscope.",
        )
        return None
    if case is not None and case.head.id != run.id:
        st.caption("Beside the lines stands what the unchanged run did; this is a control of it.")
    return found


def show_file(found: Sequence[File]) -> None:
    """One file, its sentence, what began in it, and the table."""
    asked, number = place(links.wanted("line"))
    names = [file.name for file in found]
    name = names[0]
    if len(names) > 1:
        default = asked if asked in names else names[0]
        name = links.select("File", "file", names, default=default)
    file = next(file for file in found if file.name == name)
    number = number if asked == name else 0
    chart.sentence(answer(file))
    told = [line for line in file.lines if line.notes]
    if told:
        st.markdown(
            "\n".join(
                f"- **Line {line.number}.** {escape(' '.join(line.notes))}" for line in told[:10]
            )
        )
    chart.see(
        "Beside each line the dtypes in which it computed, forward (fwd) and backward (bwd), in "
        "the first two optimizer steps; an op of the backward pass counts for the line of its "
        "forward op. A cast loses an element when it makes zero of one that was not. Below a line "
        "stands what it makes half precision, from the script's first line on."
    )
    if any(line.kernels for line in file.lines):
        chart.see(
            "krn: which kernels of compiled code, of several ops, compute the line, by their "
            "number on the page Layers."
        )
    whole = len(file.lines) <= WHOLE_UP_TO or st.toggle(
        f"All {plural(len(file.lines), 'line')}", key="source-whole"
    )
    st.code(beside(file, number, whole=whole), language=None)
    chart.download(lambda: table(file), "source", key="source")


def answer(file: File) -> str:
    """What to see, in a sentence."""
    ran = [line for line in file.lines if line.forward or line.backward]
    half = [line for line in ran if "fp16" in line.forward or "bf16" in line.forward]
    text = (
        f"{cut(file.name)}: {plural(len(half), 'line')} of {len(ran):,} that computed did so in "
        "half precision"
    )
    worst = max(file.lines, key=lambda line: line.lost, default=None)
    if worst is not None and worst.lost:
        part = percent(worst.lost / worst.cast)
        text += f"; most is lost by the casts of line {worst.number}: {part} of their elements"
    return f"{text}."


def table(file: File) -> pd.DataFrame:
    """A row for each line."""
    return pd.DataFrame(
        {
            "line": [line.number for line in file.lines],
            "source": [line.text for line in file.lines],
            "forward": [line.forward for line in file.lines],
            "backward": [line.backward for line in file.lines],
            "casts": [line.casts for line in file.lines],
            "cast_elements": [line.cast for line in file.lines],
            "lost_elements": [line.lost for line in file.lines],
            "kernels": [" ".join(map(str, line.kernels)) for line in file.lines],
            "not_rounded": ["; ".join(line.unrounded) for line in file.lines],
            "becomes_half": ["; ".join(line.sites) for line in file.lines],
            "began_here": [" ".join(line.notes) for line in file.lines],
        }
    )


def beside(file: File, asked: int, *, whole: bool) -> str:
    """Number, dtypes and text of each line in columns; below a line its casts and what began there.
    Without ``whole`` only lines near one of which something is told, or that was ``asked`` for."""
    names = (*COLUMNS, KERNELS) if any(line.kernels for line in file.lines) else COLUMNS
    cells = [_cells(line)[: len(names)] for line in file.lines]
    widths = [
        max(len(name), *(len(row[place]) for row in cells)) for place, name in enumerate(names)
    ]
    number = len(str(max(1_000, len(file.lines))))
    head = " ".join(name.ljust(width) for name, width in zip(names, widths, strict=True))
    rows = [f" {'line':>{number}} {head} source"]
    indent = " " * (len(rows[0]) - len("source"))
    for part in _parts(file, asked, whole=whole):
        if isinstance(part, int):
            rows.append(f"{indent}… {plural(part, 'line')} of which nothing is told")
            continue
        filled = zip(_cells(part), widths, strict=False)
        middle = " ".join(cell.ljust(width) for cell, width in filled)
        mark = ">" if part.number == asked else " "
        rows.append(f"{mark}{part.number:>{number}} {middle} {bounded(part.text.expandtabs(4))}")
        rows += [f"{indent}^ {note}" for note in _below(part)]
    return "\n".join(rows)


def _cells(line: LineView) -> tuple[str, ...]:
    casts = f"{line.cast_calls:,}" if line.cast_calls else ""
    more = "+" if len(line.kernels) > KERNELS_SHOWN else ""
    kernels = ",".join(map(str, line.kernels[:KERNELS_SHOWN])) + more
    return line.forward, line.backward, casts, kernels


def _below(line: LineView) -> list[str]:
    casts = []
    if line.lost:
        lost = percent(line.lost / line.cast)
        casts.append(f"casts {line.casts}; {lost} of the elements lost")
    unrounded = [f"not rounded in {what}" for what in line.unrounded[:KERNELS_SHOWN]]
    return [*casts, *line.sites, *unrounded, *line.notes]


def _parts(file: File, asked: int, *, whole: bool) -> Iterator[LineView | int]:
    """Lines to show, and between them how many are left out."""
    near = {
        number
        for line in file.lines
        if line.is_told or line.number == asked
        for number in range(line.number - AROUND, line.number + AROUND + 1)
    }
    left_out = 0
    for line in file.lines:
        if not (whole or line.number in near):
            left_out += 1
            continue
        if left_out:
            yield left_out
            left_out = 0
        yield line
    if left_out:
        yield left_out
