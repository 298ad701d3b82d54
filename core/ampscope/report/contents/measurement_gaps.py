"""What the report of a measurement does not show, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ampscope.records import (
    BatchTry,
    EnergyUse,
    LargestBatch,
    LossCurve,
    MemorySplit,
    ProcessPeak,
    Product,
    Rate,
    Result,
    RunInfo,
    State,
    StepProducts,
    StepTimes,
)
from ampscope.report.contents.gaps import listed
from ampscope.report.contents.lesson import MOST_HISTOGRAMS, histograms
from ampscope.report.document import Block
from ampscope.report.words.numbers import plural
from ampscope.report.words.run import rules
from ampscope.store.reader import Reader

Gaps: TypeAlias = Iterator[tuple[str, str]]
OF_A_SCRIPT = "It is read where ampscope makes the steps itself, not of a script."
NO_COUNTER = "No counter of energy could be read: NVML's on a GPU, RAPL's on a CPU."


def of_measurement(reader: Reader, run: RunInfo, results: Sequence[Result]) -> tuple[Block, ...]:
    """Of a run that measures the machine, or what a lesson shows."""
    found = [*_of_run(reader, run, results), *_OF_KIND.get(run.spec.kind, _none)(run, results)]
    return listed(found, "Nothing that this kind of measurement has is missing.")


def _of_run(reader: Reader, run: RunInfo, results: Sequence[Result]) -> Gaps:
    if run.state is not State.FINISHED:
        yield "The rest of the measurement", f"It is {run.state}. {run.message}".strip()
    elif not results:
        yield "Every figure", "The run ended and left no result."
    machine = run.machine
    if machine is not None and machine.policy != "cuda":
        yield "A GPU", f"It ran under {rules(machine)}; times say nothing about a GPU."
    unmeasured = [r for r in results if isinstance(r, Rate | Product) and r.timing is None]
    if unmeasured:
        why = "; ".join(dict.fromkeys(r.note for r in unmeasured if r.note))
        yield plural(len(unmeasured), "rate"), why or "They could not be measured here."
    if not reader.samples(run.id, 2):
        yield "Telemetry", "Load, memory and clocks of the machine were not read beside this run."


def _of_compare(run: RunInfo, results: Sequence[Result]) -> Gaps:
    for name in run.spec.precisions:
        wanted = (("Steps", StepTimes), ("Losses", LossCurve), ("Split memory", MemorySplit))
        of_it = [r for r in results if getattr(r, "precision", None) == name]
        for what, kind in wanted:
            if not any(isinstance(r, kind) for r in of_it):
                yield f"{what} in {name}", _why_not_compared(of_it, kind)
    is_script = any(isinstance(r, ProcessPeak) for r in results)
    if run.state is State.FINISHED and not any(isinstance(r, EnergyUse) for r in results):
        yield "Energy", OF_A_SCRIPT if is_script else NO_COUNTER


def _why_not_compared(of_it: Sequence[Result], kind: type[Result]) -> str:
    if kind is MemorySplit and any(isinstance(r, ProcessPeak) for r in of_it):
        return "Of a script the peak of the whole process is measured, which cannot be split."
    return "None was recorded; what ended the run, or was refused here, is told above."


def _of_batch(run: RunInfo, results: Sequence[Result]) -> Gaps:
    ended = {r.precision: r for r in results if isinstance(r, LargestBatch)}
    for name in run.spec.precisions:
        if name not in ended:
            yield f"The largest batch in {name}", "Its search did not end."
        elif ended[name].too_many is None:
            yield f"A batch that is too large in {name}", "None was seen not to fit."
    if any(isinstance(r, BatchTry) and r.fits and r.step is None for r in results):
        yield "Times of some tries", "They were seen to fit, and were not timed."


def _of_cores(run: RunInfo, results: Sequence[Result]) -> Gaps:
    step = next((r for r in results if isinstance(r, StepProducts)), None)
    products = [r for r in results if isinstance(r, Product)]
    if step is not None and len(products) < step.distinct:
        left = step.distinct - len(products)
        yield plural(left, "product"), "They were not reached before the run ended."
    if step is not None and step.kernel_source == "none":
        yield "Names of kernels", "Nothing on this device tells which kernels ran."
    alone = [p for p in products if p.timing and not p.control and p.dtype in ("bf16", "fp16")]
    if alone:
        yield f"fp32 beside {plural(len(alone), 'product')}", "It could not be run in fp32."


def _of_lesson(run: RunInfo, results: Sequence[Result]) -> Gaps:
    more = len(histograms(results)) - MOST_HISTOGRAMS
    if more > 0:
        yield plural(more, "histogram"), f"The first {MOST_HISTOGRAMS} are drawn."
    if any(isinstance(r, MemorySplit) and r.device_peak is None for r in results):
        yield "Memory by the allocator", "CUDA's alone says what it holds; tensors were followed."
    timed = any(isinstance(r, StepTimes) for r in results)
    if run.spec.workload == "cost" and timed:
        if not any(isinstance(r, EnergyUse) for r in results):
            yield "Energy", NO_COUNTER
        yield "Money", "Prices are typed in on the lesson's page, and are no part of the run."


def _none(run: RunInfo, results: Sequence[Result]) -> Gaps:
    yield from ()


_OF_KIND: dict[str, Callable[[RunInfo, Sequence[Result]], Gaps]] = {
    "compare": _of_compare,
    "batch": _of_batch,
    "cores": _of_cores,
    "lesson": _of_lesson,
}
