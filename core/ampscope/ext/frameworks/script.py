"""Child process of a script: ``python -m ampscope.ext.frameworks.script --store FILE --run ID``.

The script runs as ``__main__``, untouched, with its arguments, its folder first on the path of
imports, and its own exceptions; the adapter watches its layers, backward passes and optimizers.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from ampscope.errors import AmpscopeError
from ampscope.ext.frameworks.adapters import Adapter, child_options, load, parse
from ampscope.ext.frameworks.recorder import FrameworkRecorder, Writing
from ampscope.observations import Outcome
from ampscope.privacy import taken
from ampscope.records import RunSpec, State
from ampscope.runner import script_ending
from ampscope.runner.child_frame import Watchdog
from ampscope.runner.private_files import adopted
from ampscope.runner.script_ending import (
    Enough,
    end_python_within,
    hard_limit_s,
    limit_reached,
    raised,
)
from ampscope.runner.script_text import SEED, execute, folder_of, module_of
from ampscope.script_ends import ending
from ampscope.source_lines import SourceLines
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

EXIT_FAILED = 2
# What a script that has ended may still do (a thread that saves a checkpoint), and one that was cut
# off, whose threads may wait for it for ever; in s.
END_LIMIT_S, CUT_OFF_LIMIT_S = 60.0, 5.0


def main() -> None:
    """Run the script of a queued run and write what happened."""
    options = child_options()
    with Reader(options.store) as reader:
        spec = taken(options.run, reader.run(options.run).spec)
    queued = adopted(options.store, options.run, spec, options.view)
    if queued is None:
        return  # no framework is loaded yet, so Python's own end waits for no thread of one
    writer, spec = queued.writer, queued.spec
    state, message, details = State.FINISHED, "", ""
    try:
        with Watchdog(writer, hard_limit_s(spec)) as watchdog:
            run = _Run(spec, writer, watchdog, queued.notes)
            outcome, details = run.run()
            state, message = ending(outcome, spec)
            left_s = hard_limit_s(spec) - (time.monotonic() - run.started) - 1.0
            limit_s = CUT_OFF_LIMIT_S if run.stopped else END_LIMIT_S
            end_python_within(
                max(1.0, min(limit_s, left_s)), lambda: _leave(writer, state, message, details)
            )
    except AmpscopeError as error:
        state, message = State.FAILED, str(error)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        state, message = State.FAILED, f"ampscope itself failed, not the script: {text}"
        details = traceback.format_exc()
    _leave(writer, state, message, details)


def _leave(writer: RunWriter, state: State, message: str, details: str) -> None:
    try:
        writer.finish(state, message, details)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # native threads and destructors of the framework may hang at Python's end


class _Run:
    """One run of one script."""

    def __init__(
        self,
        spec: RunSpec,
        writer: RunWriter,
        watchdog: Watchdog,
        file_notes: Callable[[], tuple[str, ...]],
    ) -> None:
        self.spec = spec
        self.watchdog = watchdog
        self.adapter: Adapter = load(spec.framework)
        self.settings = parse(spec.control)
        self.lines = SourceLines(folder_of(spec.workload))
        self.writing = Writing(writer, keeps_evidence=True)
        self.recorder = FrameworkRecorder(spec.cadence, self._step)
        self.started = time.monotonic()
        self.stopped = ""
        self.file_notes = file_notes
        writer.start(self.adapter.machine(spec))
        watchdog.start_clock()

    def run(self) -> tuple[Outcome, str]:
        """(how the script ended, its traceback)."""
        text, facts = "", Outcome("returned")
        self.adapter.seed(SEED)
        self._set_stage()
        with self.adapter.watching(self.recorder, self.settings) as notes:
            try:
                execute(self.spec.workload)
            except SystemExit as leaving:
                if not isinstance(leaving, Enough):
                    facts = Outcome("exit", exit_code=script_ending.exit_code(leaving))
            except BaseException as error:
                facts, text = self._failed(error)
        said = (*notes, *self.file_notes())
        seen = self.recorder.outcome(self.stopped or facts.ended, said)
        outcome = replace(
            seen,
            framework=self.spec.framework,
            exit_code=facts.exit_code,
            error_type=facts.error_type,
            error_text=facts.error_text,
            error_line=facts.error_line,
            elapsed_s=time.monotonic() - self.started - self.recorder.elapsed_s,
        )
        self.writing.write(self.recorder, outcome)
        return outcome, text

    def _step(self, recorder: FrameworkRecorder) -> None:
        self.writing.write_if_due(recorder)
        elapsed_s = time.monotonic() - self.started
        is_cancelled = self.watchdog.cancelled.is_set
        self.stopped = limit_reached(self.spec, recorder.steps, elapsed_s, is_cancelled)
        if self.stopped:
            raise Enough

    def _failed(self, error: BaseException) -> tuple[Outcome, str]:
        found = raised(error, self.lines)
        script_ending.report(found.error)
        return Outcome("exception", **found.facts), found.text

    def _set_stage(self) -> None:
        """What a script finds at its start: arguments and the import path."""
        workload = self.spec.workload
        sys.argv = [module_of(workload) or workload, *self.spec.args]
        sys.path.insert(0, folder_of(workload))


if __name__ == "__main__":
    main()
