"""Recorded runs in which every text is hostile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampscope.records import Event, Machine, Role, State
from ampscope.store.writer import RunWriter
from tests.helpers import script_stores, synthetic_run, watched_stores


def hostile_diagnosis(store: Path, text: str) -> str:
    """Every text of a script's runs is hostile: label, workload, module, line, code, error."""
    spec = replace(script_stores.SPEC, label=text, workload=text, args=(text,))
    op = script_stores.bad_op(text, text, text)
    seen = script_stores.seen(
        [script_stores.broken(i) for i in range(4)],
        replace(op, op=text, module_type=text, consumers=(text,)),
        error_type=text,
        error_text=text,
        notes=(text,),
    )
    head = script_stores.run(store, "as_is", seen, spec, State.FINISHED, text)
    script_stores.healthy_run(store, "fp32", spec)
    script_stores.healthy_run(store, f"fp32_modules:{text}", spec)
    return head


def hostile_training(store: Path, text: str) -> str:
    """A watched run whose machine, modules and events are hostile."""
    spec = replace(watched_stores.SPEC, label=text, workload=text)
    writer = RunWriter.create(store, spec)
    writer.start(Machine(text, text, text, text, text, text, text, text))
    writer.add_modules(
        replace(synthetic_run.module(i, f"{text}{i}"), type=text, weight_dtypes=text)
        for i in range(3)
    )
    for record in watched_stores.bad(12, 8):
        writer.add_step(record)
    for role in (Role.GRAD_OUTPUT, Role.ACTIVATION):
        writer.add_frame(replace(watched_stores.frame(8, role), dtypes=(text[:9], "fp16")))
    writer.add_event(Event(8, text, text, text, text, 1.0))
    writer.finish(State.FAILED, text, text)
    writer.close()
    return writer.run_id
