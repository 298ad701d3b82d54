"""Progress bars of runs that were started together; Ctrl-C asks them to stop and waits for that."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich import progress
from rich.console import Console
from rich.markup import escape

from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.cli import stopping
from ampscope.hardware.describe import describe_machine, torch_found_none, unused_gpu
from ampscope.launcher.launch import POLL_S, checked, launch
from ampscope.number_words import plural
from ampscope.pythons import TORCH
from ampscope.records import Result, RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import request_cancel
from ampscope.story.document import line

LAST_WORDS_S = 0.5
EXIT_FAILED = 1
EXIT_CANCELLED = 130  # the shell's own status for Ctrl-C


def say_unused_gpu() -> None:
    """On standard error, before something runs: that torch cannot use the GPU that is here."""
    sentence = unused_gpu(describe_machine())
    if sentence:
        click.echo(sentence, err=True)


def start_together(specs: Sequence[RunSpec], store: Path) -> list[RunInfo]:
    """Start all at once and follow them: while one trains, the others import and wait for the
    device. When one cannot start, and after Ctrl-C, the others do not go on unseen."""
    ids: list[str] = []
    if any(spec.device != "cpu" and spec.framework == TORCH for spec in specs):
        say_unused_gpu()
    try:
        for spec in specs:
            with stopping.deferred():  # ids must hold what has started
                ids.append(launch(spec, store, bound=True))
        return follow(store, ids, Console(stderr=True))
    except BaseException as error:
        with contextlib.suppress(KeyboardInterrupt), stopping.deferred():
            ask_to_stop(store, ids)
        if isinstance(error, KeyboardInterrupt):
            stopping.end()
        raise


def measured(spec: RunSpec, store: Path) -> tuple[RunInfo, list[Result], tuple[str, ...]]:
    """Start one measurement as a child process, and show its progress. Returns the finished run,
    its results, and what disturbed it, which is said on standard error too. Ends the process, with
    one sentence on standard error, when it did not finish."""
    info = start_together([checked(spec)], store)[0]
    if info.state is not State.FINISHED:
        click.echo(f"{info.id} ({info.title}): {info.message or info.state}", err=True)
    leave([info])
    if info.message:
        click.echo(info.message, err=True)
    with Reader(store) as reader:
        disturbed = spoiled(reader.samples(info.id), others_bound(spec))
        results = reader.results(info.id)
    for sentence in disturbed:
        click.echo(f"This measurement was disturbed. {sentence}", err=True)
    return info, results, disturbed


def leave(infos: Sequence[RunInfo]) -> None:
    """End the command with the status that tells how its runs ended."""
    states = {info.state for info in infos}
    if State.CANCELLED in states:
        sys.exit(EXIT_CANCELLED)
    if states != {State.FINISHED}:
        sys.exit(EXIT_FAILED)


def follow(store: Path, ids: Sequence[str], console: Console) -> list[RunInfo]:
    """Show progress until all runs have ended; a second Ctrl-C does not wait for that."""
    has_asked, has_device, told = False, False, set[str]()
    with Reader(store) as reader, _bars(console) as bars, _terminated_like_interrupted():
        tasks = {
            run_id: bars.add_task("", total=None, count="", note="", start=False) for run_id in ids
        }
        while True:
            try:
                infos = [reader.run(run_id) for run_id in ids]
                for info in infos:
                    _show(bars, tasks, info)
                    if not has_device and info.machine and info.spec.framework == TORCH:
                        has_device = True
                        if info.machine.device == "cpu" and info.spec.device == "auto":
                            _print(console, torch_found_none(describe_machine()))
                    if info.place > 1 and info.id not in told and not console.is_terminal:
                        console.print(f"Waiting for the device, place {info.place} in the queue.")
                        told.add(info.id)
                if not any(info.state.is_active for info in infos):
                    if any(info.state is State.LOST for info in infos):
                        time.sleep(LAST_WORDS_S)  # the waiting process says how it died
                        infos = [reader.run(run_id) for run_id in ids]
                    return infos
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                if has_asked:
                    raise
                has_asked = True
                with stopping.deferred():
                    console.print("Stopping. What was recorded is kept.")
                    ask_to_stop(store, ids)


def _print(console: Console, sentence: str) -> None:
    if sentence:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM stops the children too, as Ctrl-C does; they would go on unattended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where signals cannot be handled
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the command line's own handler
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ask_to_stop(store: Path, ids: Sequence[str]) -> None:
    """Every run that is still active ends at its next step."""
    for run_id in ids:
        request_cancel(store, run_id)


def _bars(console: Console) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.fields[count]}", style="progress.download"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[note]}"),
        console=console,
    )


def _show(bars: progress.Progress, tasks: dict[str, progress.TaskID], info: RunInfo) -> None:
    task = tasks[info.id]
    if info.state is not State.QUEUED:
        bars.start_task(task)
    bars.update(
        task,
        description=escape(line(info.title)),
        total=info.spec.steps if info.spec.is_training else None,
        completed=info.steps_done,
        count=_count(info),
        note=_note(info),
    )
    if not info.state.is_active:
        bars.stop_task(task)


def _count(info: RunInfo) -> str:
    """Steps of all steps; of a measurement, whose end is not known in numbers, what it has found
    so far."""
    done, steps = info.steps_done, info.spec.steps
    return f"{done:>{len(str(steps))}}/{steps}" if info.spec.is_training else plural(done, "result")


def _note(info: RunInfo) -> str:
    if info.state is not State.QUEUED:
        return str(info.state)
    return "starts" if info.machine is None else f"waits, place {info.place}"
