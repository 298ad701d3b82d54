"""Where the figures come from: the machine, the versions, the runs, and how to look again.

The host's name and the folders of files are left out: a report is made to be handed on. (A
traceback is shown as it is, with the paths in it.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ampscope import __version__
from ampscope.records import AS_IS, Machine, RunInfo
from ampscope.report.document import Block, Code, Facts, Link, Links, Paragraph, Section, Table
from ampscope.report.words.controls import control
from ampscope.report.words.numbers import duration, plural
from ampscope.report.words.run import file_name, rules

_READ = (
    Link("PyTorch: automatic mixed precision", "https://docs.pytorch.org/docs/stable/amp.html"),
    Link(
        "PyTorch: examples of autocast and GradScaler",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    ),
)


def sections(runs: Sequence[RunInfo], head: RunInfo) -> list[Section]:
    """Machine and versions, the runs, where to read on."""
    return [
        Section("Machine and versions", _machine(head)),
        Section("The runs", _runs(runs)),
        Section("Look again", _again(runs, head)),
    ]


def subject(run: RunInfo) -> str:
    """Which run a part is about."""
    spec = run.spec
    name = spec.label or file_name(spec.workload)
    kinds = {"script": "script", "watch": "watched training", "probe": "probe"}
    facts = [name, kinds.get(spec.kind, f"measurement ({spec.kind})"), str(run.state)]
    if spec.kind == "probe":
        facts.append(f"{file_name(spec.workload)} {spec.size} {spec.mode}, seed {spec.seed}")
    if spec.world > 1:
        facts.append(f"rank {spec.rank} of {spec.world}")
    facts += [plural(run.steps_done, "step" if spec.is_training else "result"), moment(run.created)]
    return " · ".join(facts)


def moment(seconds: float) -> str:
    """A time that reads the same everywhere."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _machine(run: RunInfo) -> tuple[Block, ...]:
    machine = run.machine
    if machine is None:
        return (Paragraph("The run never started, so no machine was recorded."),)
    pairs = (
        ("Device", _device(machine)),
        ("Capability", machine.capability or "not read"),
        ("Rules", rules(machine)),
        ("Framework", machine.software),
        ("Python", machine.python or "not recorded"),
        ("Platform", machine.platform or "not recorded"),
        ("Report by", f"ampscope {__version__}"),
    )
    return (Facts(pairs),)


def _device(machine: Machine) -> str:
    return f"{machine.device_name} ({machine.device})" if machine.device_name else machine.device


def _runs(runs: Sequence[RunInfo]) -> tuple[Block, ...]:
    rows = tuple(
        (r.id, _what(r), str(r.state), f"{r.steps_done:,}", moment(r.created), _took(r), r.message)
        for r in runs
    )
    columns = ("Id", "What", "State", "Recorded", "Made", "Took", "Said")
    return (Table(columns, rows, numeric=(3,)),)


def _what(run: RunInfo) -> str:
    spec = run.spec
    if spec.kind == "script":
        return f"{file_name(spec.workload)} {control(spec.control or AS_IS)}"
    return f"{file_name(spec.workload)} {spec.size} {spec.mode}"


def _took(run: RunInfo) -> str:
    if run.started is None or run.ended is None:
        return "not known"
    return duration(max(0.0, run.ended - run.started))


def _again(runs: Sequence[RunInfo], head: RunInfo) -> tuple[Block, ...]:
    together = " --together" if len(runs) > 1 else ""
    return (
        Paragraph("To hand on the measurements themselves, and to look at them in the dashboard:"),
        Code(
            f"ampscope runs export {head.id}{together} --out {head.id}.json\n"
            f"ampscope import {head.id}.json\n"
            "ampscope dashboard",
            "bash",
        ),
        Links(_READ),
    )
