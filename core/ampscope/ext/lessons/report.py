"""What a report says of a lesson's measurement: what was measured as tables and charts, and what it
does not show. What that means stands on the lesson's own page.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampscope import records
from ampscope.number_words import plural
from ampscope.story.measurement import NO_COUNTER, Gaps, Said
from ampscope.story.result_tables import MOST_HISTOGRAMS, by_type, histograms


def lesson_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    """The title, and what was measured."""
    asked = ", ".join(f"{name} {value}" for name, value in run.spec.settings)
    title = f"Lesson {run.spec.workload}{f' ({asked})' if asked else ''}: measured."
    return title, by_type(results)


def lesson_gaps(run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    more = len(histograms(results)) - MOST_HISTOGRAMS
    if more > 0:
        yield plural(more, "histogram"), f"The first {MOST_HISTOGRAMS} are drawn."
    if any(isinstance(r, records.MemorySplit) and r.device_peak is None for r in results):
        yield "Memory by the allocator", "CUDA's alone says what it holds; tensors were followed."
    slow = [r for r in results if isinstance(r, records.Reading) and r.name == "too slow here"]
    if slow:
        what = f"{plural(len(slow), 'rate')}, of {', '.join(dict.fromkeys(r.series for r in slow))}"
        yield what, "One call alone took too long; how long stands among the numbers."
    timed = any(isinstance(r, records.StepTimes) for r in results)
    if run.spec.workload == "cost" and timed:
        if not any(isinstance(r, records.EnergyUse) for r in results):
            yield "Energy", NO_COUNTER
        yield "Money", "Prices are typed in on the lesson's page, and are no part of the run."
