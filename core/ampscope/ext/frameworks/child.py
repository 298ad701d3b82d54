"""Child process of a probe: ``python -m ampscope.ext.frameworks.child --store FILE --run ID``.

The same frame as ``ampscope.runner``'s, under the framework's own Python.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ampscope.ext.frameworks.adapters import child_options, load
from ampscope.ext.frameworks.recorder import FrameworkRecorder, Writing
from ampscope.records import RunSpec
from ampscope.runner.child_frame import Watchdog, run_queued, text_of, turn
from ampscope.runner.run_server import end_with_parent
from ampscope.store.writer import RunWriter


def main() -> None:
    """Run the queued probe."""
    end_with_parent()
    options = child_options()
    sys.exit(run_queued(options.store, options.run, _run, _sentence))


def _run(writer: RunWriter, spec: RunSpec, store: Path, watchdog: Watchdog) -> str:
    adapter = load(spec.framework)
    machine = adapter.machine(spec)
    writer.wait_for(machine)
    writing = Writing(writer, keeps_evidence=False)
    recorder = FrameworkRecorder(spec.cadence, writing.write_if_due)
    with turn(writer, store, machine, watchdog):
        adapter.seed(spec.seed)
        try:
            return adapter.probe(spec, recorder, watchdog.cancelled.is_set)
        finally:
            writing.write(recorder, recorder.outcome("returned"))


def _sentence(error: BaseException, spec: RunSpec) -> str:
    return f"The training step raised {text_of(error)}. Its traceback is kept."


if __name__ == "__main__":
    main()
