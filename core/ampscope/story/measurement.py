"""What a report says of a measurement of the machine: its sentence, its figures, and what it does
not show. A kind of measurement says the first and the last for itself, here or in its extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ampscope import records
from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.analysis.tensor_core_use import answer, core_use, shapes
from ampscope.extensions import load
from ampscope.measurements import KINDS
from ampscope.number_words import plural, rate_words
from ampscope.store.reader import Reader
from ampscope.story import document as doc
from ampscope.story import shared
from ampscope.story.result_tables import by_type, rate_tables
from ampscope.story.run_words import rules
from ampscope.story.shared import listed

Said = tuple[str, tuple[doc.Block, ...]]
Gaps: TypeAlias = Iterator[tuple[str, str]]
NO_COUNTER = "No counter of energy could be read: NVML's on a GPU, RAPL's on a CPU."
SERIES = {
    "ceiling": "Matmuls of random matrices",
    "copy": "Copies",
    "align_m": "Misaligned m",
    "align_n": "Misaligned n",
    "align_k": "Misaligned k",
    "align_channels": "Misaligned channels",
}


def part(reader: Reader, run: records.RunInfo, points: int) -> doc.Part:
    """Its verdict, its table, what disturbed it, and the machine."""
    results = reader.results(run.id)
    kind = KINDS.get(run.spec.kind)
    told: Callable[..., Said] = load(kind.told) if kind else _told_by_type
    title, blocks = told(run, results) if results else ("Nothing was measured.", ())
    disturbed = spoiled(reader.samples(run.id), others_bound(run.spec))
    said: list[doc.Block] = [doc.Paragraph(line, "Disturbed.") for line in disturbed]
    said += [doc.Paragraph(run.message)] if run.message else []
    if run.traceback:
        said.append(doc.Fold("The run's own traceback", (doc.Code(run.traceback),)))
    verdict_blocks = tuple(said) or (doc.Paragraph("Nothing that was read disturbed it."),)
    sections = [doc.Section("Verdict", verdict_blocks)]
    if blocks:
        sections.append(doc.Section("Measured", blocks))
    missing = _missing(reader, run, results)
    sections.append(doc.Section("What is missing", missing))
    sections += shared.origin_sections([run], run)
    return doc.Part(title or shared.subject(run), shared.subject(run), tuple(sections))


def _told_by_type(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    """Of a kind whose extension is not here."""
    return f"Measurement ({run.spec.kind}).", by_type(results)


def _missing(
    reader: Reader, run: records.RunInfo, results: Sequence[records.Result]
) -> tuple[doc.Block, ...]:
    """What the report does not show, and why."""
    kind = KINDS.get(run.spec.kind)
    of_kind: Gaps = load(kind.gaps)(run, results) if kind and kind.gaps else iter(())
    found = [*_of_run(reader, run, results), *of_kind]
    return listed(found, "Nothing that this kind of measurement has is missing.")


def _of_run(reader: Reader, run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    if run.state is not records.State.FINISHED:
        yield "The rest of the measurement", f"It is {run.state}. {run.message}".strip()
    elif not results:
        yield "Every figure", "The run ended and left no result."
    machine = run.machine
    if machine is not None and machine.policy != "cuda":
        yield "A GPU", f"It ran under {rules(run)}; times say nothing about a GPU."
    unmeasured = [
        r for r in results if isinstance(r, records.Rate | records.Matmul) and r.timing is None
    ]
    if unmeasured:
        why = "; ".join(dict.fromkeys(r.note for r in unmeasured if r.note))
        yield plural(len(unmeasured), "rate"), why or "They could not be measured here."
    if not reader.samples(run.id, 2):
        yield "Telemetry", "Load, memory and clocks of the machine were not read beside this run."


def bench_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    rates = [r for r in results if isinstance(r, records.Rate)]
    best: dict[str, float] = {}
    for rate in rates:
        if rate.series == "ceiling" and rate.flops_s is not None:
            best[rate.dtype] = max(best.get(rate.dtype, 0.0), rate.flops_s)
    told = "; ".join(f"{dtype} {rate_words(reached)}" for dtype, reached in best.items())
    blocks = [
        doc.Fold(title, (rate_tables([r for r in rates if r.series == name]),))
        for name, title in SERIES.items()
        if any(r.series == name for r in rates)
    ]
    return f"Best rate of a matmul by dtype: {told or 'none was measured'}.", tuple(blocks)


def cores_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    use = core_use(results, run.machine)
    if use is None or not use.uses:
        return "The step's matmuls were not measured.", ()
    rows = tuple(
        (
            one.matmul.op,
            one.matmul.dtype,
            shapes(one.matmul.operands),
            f"{one.matmul.count:,}",
            "" if one.matmul.flops_s is None else rate_words(one.matmul.flops_s),
            str(one.verdict),
            one.eligibility.reason,
        )
        for one in use.uses
    )
    columns = ("Op", "Computed in", "Shapes", "Calls", "Reached", "Matrix units", "Why")
    return answer(use), (doc.Table(columns, rows, numeric=(3, 4)),)


def cores_gaps(run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    step = next((r for r in results if isinstance(r, records.StepMatmuls)), None)
    matmuls = [r for r in results if isinstance(r, records.Matmul)]
    if step is not None and len(matmuls) < step.distinct:
        left = step.distinct - len(matmuls)
        yield plural(left, "matmul"), "They were not reached before the run ended."
    if step is not None and step.kernel_source == "none":
        yield "Names of kernels", "On this device there is no record of which kernels ran."
    alone = [p for p in matmuls if p.timing and not p.control and p.dtype in ("bf16", "fp16")]
    if alone:
        yield f"fp32 beside {plural(len(alone), 'matmul')}", "It could not be run in fp32."
