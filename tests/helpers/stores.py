"""Synthetic stores for the pages' tests: every state a run can be in, written by RunWriter."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from ampscope.records import Machine, RunSpec, State
from ampscope.store.writer import RunWriter
from tests.helpers.synthetic_run import add_step, is_leaf, module, module_paths, ops

SPEC = RunSpec(workload="gpt", size="tiny", precision="fp16", steps=12)
MACHINE = Machine(
    device="cpu",
    device_name="Test CPU",
    policy="rehearsal",
    torch="2.13.0",
    python="3.11.0",
    platform="Linux",
    host="test",
)
FAILURE = "The loss is not a scalar: it has shape (4,). Reduce it with .mean() or .sum()."
HOSTILE = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "a:red[b] **c** $d$ `e` [f](javascript:window.hacked=1)",
    "{{7*7}} %s \\n &lt;b&gt;",
)


def queued(store: Path, spec: RunSpec = SPEC) -> str:
    """Registered, not started."""
    writer = RunWriter.create(store, spec)
    writer.close()
    return writer.run_id


def running(store: Path, spec: RunSpec = SPEC, steps: int = 6) -> str:
    """Owned by this process, so it counts as alive for 30 s after its last heartbeat."""
    writer = _recorded(store, spec, module_paths(), steps)
    writer.close()
    return writer.run_id


def finished(store: Path, spec: RunSpec = SPEC, paths: tuple[str, ...] | None = None) -> str:
    """All steps recorded."""
    writer = _recorded(store, spec, paths or module_paths(), spec.steps)
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def failed(store: Path, spec: RunSpec = SPEC, steps: int = 3) -> str:
    """Ended with a sentence and the child's own traceback; ``steps`` may be 0."""
    writer = _recorded(store, spec, module_paths() if steps else (), steps)
    trace = 'Traceback (most recent call last):\n  File "loss.py", line 3\nValueError: shape (4,)'
    writer.finish(State.FAILED, FAILURE, trace)
    writer.close()
    return writer.run_id


def cancelled(store: Path, spec: RunSpec = SPEC, steps: int = 3) -> str:
    """Stopped by a person."""
    writer = _recorded(store, spec, module_paths(), steps)
    writer.finish(State.CANCELLED, f"Stopped on request after {steps} steps.")
    writer.close()
    return writer.run_id


def lost(store: Path, spec: RunSpec = SPEC, steps: int = 5) -> str:
    """State running, but the process that wrote it is no more."""
    writer = _recorded(store, spec, module_paths(), steps)
    writer._update(pid_started=-1.0)  # this pid now belongs to another process: ours
    writer.close()
    return writer.run_id


def hostile(store: Path) -> str:
    """Modules and label whose names are HTML, Markdown, Streamlit directives and LaTeX."""
    return finished(store, replace(SPEC, label=HOSTILE[0] + HOSTILE[2]), ("", *HOSTILE))


def long_names(store: Path) -> str:
    """Paths of 130 characters and more that differ in the middle."""
    middle = ("encoder", "decoder", "adapter")
    name = "model.backbone.{}." + ".".join(f"residual_attention_block_{i:02d}" for i in range(4))
    return finished(store, paths=("", *(name.format(m) + ".projection_out" for m in middle)))


def many_modules(store: Path, count: int = 1000, steps: int = 3) -> str:
    """A model of ``count`` modules."""
    return finished(store, replace(SPEC, steps=steps), ("", *(f"l.{i}" for i in range(count - 1))))


def large(store: Path, count: int = 500, steps: int = 1000) -> str:
    """500 modules x 1,000 steps, for benchmarks: takes about a minute to write."""
    return many_modules(store, count, steps)


def _recorded(store: Path, spec: RunSpec, paths: tuple[str, ...], steps: int) -> RunWriter:
    writer = RunWriter.create(store, spec)
    writer.start(MACHINE)
    writer.add_modules(module(i, path) for i, path in enumerate(paths))
    if paths:
        writer.add_ops(0, [op for i, p in enumerate(paths) if is_leaf(p) for op in ops(i, p)])
    for step in range(steps):
        add_step(writer, paths, step)
        if step % 50 == 49:
            writer.flush()
    writer.flush()
    return writer


def change(store: Path, sql: str, *values: object) -> None:
    connection = sqlite3.connect(store)
    connection.execute(sql, values)
    connection.commit()
    connection.close()
