"""The one public way to make a report: runs of a store -> a document -> HTML, Markdown, notebook.

    with Reader(path) as reader:
        text = to_html(document(reader, ["1ff374f51ded"]))

Nothing is run for it: verdicts are as stored, or computed from what is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ampscope import __version__
from ampscope.diagnosis.load import counting
from ampscope.privacy import for_others
from ampscope.records import RunInfo
from ampscope.store.reader import Reader
from ampscope.story import diagnosis, measurement, training
from ampscope.story.document import Document, Part

POINTS = 2000  # steps that a curve has at most, about two a pixel on paper


def document(
    reader: Reader, names: Sequence[str], *, as_recorded: bool = False, folders: bool = True
) -> Document:
    """One part per run, in the order asked for; runs of one diagnosis make one part together.
    Raises BadInput for a name that is not in the store.

    The home folder is written ~ and the machine's name is left out, unless ``as_recorded``; without
    ``folders`` every path is its last part.
    """
    runs = heads([reader.run(name) for name in names])
    points = max(100, POINTS // max(1, len(runs)))
    parts = tuple(_part(reader, run, points) for run in runs)
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    made = (
        f"Made by ampscope {__version__} on {now} from what was recorded; nothing was run for it."
    )
    whole = Document(parts, made)
    if as_recorded:
        return whole
    hosts = {run.machine.host for run in runs if run.machine is not None}
    return for_others(whole, hosts=hosts, folders=folders)


def of_reports(reader: Reader, names: Sequence[str]) -> list[RunInfo]:
    """The runs that a report of ``names`` is made of: of a diagnosis all that count."""
    found: dict[str, RunInfo] = {}
    for run in heads([reader.run(name) for name in names]):
        together = counting(reader.group(run.spec.group)) if run.spec.kind == "script" else []
        found |= {r.id: r for r in (together or [run])}
    return list(found.values())


def heads(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """Of each diagnosis the first run that was asked for, and every other run once."""
    found: dict[str, RunInfo] = {}
    for run in runs:
        is_script = run.spec.kind == "script" and run.spec.group
        found.setdefault(f"group {run.spec.group}" if is_script else run.id, run)
    return list(found.values())


def _part(reader: Reader, run: RunInfo, points: int) -> Part:
    if not run.spec.is_training:
        return measurement.part(reader, run, points)
    of_kind = diagnosis.part if run.spec.kind == "script" else training.part
    return of_kind(reader, run, points)
