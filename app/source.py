"""The page Source: a script's own text with dtypes, casts and first faults beside each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis.line_view import File, Line, files, place
from ampscope.records import RunInfo
from ampscope.report.palette import MEASURE, NONFINITE
from app import chart, links, permissions, states
from app.runs import diagnoses
from app.text import cut, escape, for_html, percent, plural

AROUND = 3  # lines shown before and behind one that something stands beside
WHOLE_UP_TO = 120  # lines: a shorter file is shown whole
COLUMNS = ("Line", "Forward", "Backward", "Source", "Casts", "Lost in casts")
STYLE = f"""<style>
.ampscope-source {{ width: 100%; overflow-x: auto; }}
.ampscope-source table {{ border-collapse: collapse; font-size: 0.85rem; width: 100%; }}
.ampscope-source th {{ text-align: left; font-weight: 600; padding: 2px 10px; }}
.ampscope-source td {{ padding: 1px 10px; white-space: pre; vertical-align: top; }}
.ampscope-source .text, .ampscope-source .number {{ font-family: monospace; }}
.ampscope-source .number {{ text-align: right; opacity: 0.78; user-select: none; }}
.ampscope-source .note td {{ white-space: normal; }}
.ampscope-source .note td:nth-child(2) {{ border-left: 4px solid {NONFINITE}; }}
.ampscope-source .asked {{ font-weight: 600; }}
.ampscope-source .asked td:first-child {{ border-left: 4px solid {MEASURE}; }}
</style>"""


def read(run: RunInfo) -> list[File] | None:
    """The files of the run's diagnosis; None where there are none to show, which the page says."""
    if not (permissions.is_trusted() or permissions.is_of_lesson(run)):
        states.nothing_recorded("The source of this script is not shown to the class.", "")
        return None
    case = diagnoses.case_of(run) if run.spec.kind == "script" else None
    found = [] if case is None else files(diagnoses.observed(case.head))
    if not found:
        states.nothing_recorded(
            "This run holds no source.",
            "`ampscope diagnose train.py` keeps the text of the script's own files, unless "
            "`--leave-out source` was given or the run is older than that.",
        )
        return None
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
        "Dtypes are those that the line's computations took and made in the first two optimizer "
        "steps; an op of the backward pass counts for the line of its forward op. A cast loses an "
        "element when it makes zero of one that was not."
    )
    whole = len(file.lines) <= WHOLE_UP_TO or st.toggle(
        f"All {plural(len(file.lines), 'line')}", key="source-whole"
    )
    st.html(STYLE + _table(file, number, whole=whole))
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
            "began_here": [" ".join(line.notes) for line in file.lines],
        }
    )


def _table(file: File, asked: int, *, whole: bool) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(_rows(file, asked, whole=whole))
    return (
        f'<div class="ampscope-source" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _rows(file: File, asked: int, *, whole: bool) -> Iterator[str]:
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
            yield _gap(left_out)
            left_out = 0
        yield from _row(line, is_asked=line.number == asked)
    if left_out:
        yield _gap(left_out)


def _gap(lines: int) -> str:
    words = plural(lines, "line")
    return (
        f'<tr><td class="number">…</td><td colspan="5">{words} of which nothing is told</td></tr>'
    )


def _row(line: Line, *, is_asked: bool) -> Iterator[str]:
    lost = percent(line.lost / line.cast) if line.cast else ""
    before, behind = (
        "".join(f"<td>{for_html(cell)}</td>" for cell in cells)
        for cells in ((line.forward, line.backward), (line.casts, lost))
    )
    yield (
        f'<tr class="{"asked" if is_asked else ""}"><td class="number">{line.number}</td>{before}'
        f'<td class="text">{for_html(line.text)}</td>{behind}</tr>'
    )
    for note in line.notes:
        yield f'<tr class="note"><td colspan="3"></td><td colspan="3">{for_html(note)}</td></tr>'
