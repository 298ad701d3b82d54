"""Runs as tables for the terminal, at most 80 columns wide, and as JSON for programs.

Titles and messages may come from an untrusted file (imported runs): what a terminal would obey is
spelled.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from datetime import datetime

from rich import box
from rich.markup import escape
from rich.table import Table

from ampscope.analysis.bench import BenchView
from ampscope.analysis.ceilings import LABELS, Ceiling
from ampscope.control import BASELINE, Control
from ampscope.number_words import bytes_words, rate_words
from ampscope.policy.device_profiles import USUAL
from ampscope.records import Event, Rate, Role, RunInfo, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.story.document import TEXT_LENGTH, line
from ampscope.story.run_words import rules_in_full

MAX_EVENTS = 200  # the first of a run; a training that breaks every step has one per step
MISSING = "–"  # not recorded, or there is no such thing

_COUNTS = ("total", "lost", "subnormal", "zero_before")


def probe_table(reader: Reader, infos: list[RunInfo]) -> Table:
    """What became of the loss, the scale and the gradients, one line per run."""
    table = plain_table(_where(infos))
    table.caption = (
        "The last three are shares of the gradients of module outputs, at the steps that have an "
        "fp32 shadow. The first is zero in half precision and not in fp32: above, too small for "
        "the format (underflow); below, rounded away (a sum that cancelled, a ReLU that switched "
        "otherwise)."
    )
    table.caption_justify = "left"
    table.add_column("run", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    for name in ("loss", "scale", "skips", "below/\ncancel.", "sub-\nnormal", "zero in\nboth"):
        table.add_column(name, justify="right", no_wrap=True)
    for info in infos:
        steps = reader.steps(info.id)
        counts = underflow(reader, info.id).get(Role.GRAD_OUTPUT, {})
        table.add_row(
            info.id,
            _text(info.spec.mode.replace(",", " ")),
            f"{_loss(steps[0].loss)}\n→ {_loss(steps[-1].loss)}" if steps else MISSING,
            _scale(steps),
            str(sum(s.skipped for s in steps)) if steps else MISSING,
            f"{_share(counts, 'below_range')}\n{_share(counts, 'cancelled')}",
            *(_share(counts, name) for name in ("subnormal", "zero_before")),
        )
    return table


def _loss(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"


def _scale(steps: list[StepRecord]) -> str:
    """The last step's, as a power of two where it is one; runs without a scaler have none."""
    value = steps[-1].scale if steps else None
    if value is None:
        return MISSING
    exponent = math.log2(value) if value > 0 and math.isfinite(value) else 0.5
    return f"2^{exponent:.0f}" if exponent == round(exponent) else f"{value:g}"


def runs_table(infos: list[RunInfo]) -> Table:
    """One line per run; what failed says why below the table (`messages`)."""
    table = plain_table("")
    for name in ("run", "started", "title", "state", "steps", "where"):
        table.add_column(
            name, no_wrap=name != "title", justify="right" if name == "steps" else "left"
        )
    for info in infos:
        machine = info.machine
        where = f"{machine.device} {machine.policy}" if machine else MISSING
        if info.spec.kind == "script" and machine and machine.policy == "rehearsal":
            where = f"rehearsed {(info.spec.rehearsed or USUAL).upper()}"
        table.add_row(
            info.id,
            datetime.fromtimestamp(info.created).strftime("%m-%d %H:%M"),
            _text(_titled(info)),
            str(info.state),
            _steps(info),
            _text(where),
        )
    return table


def _titled(info: RunInfo) -> str:
    """The title; of a script's run also which control of a diagnosis it is."""
    role = info.spec.control if info.spec.kind == "script" else ""
    return f"{info.title} ({Control(role).words})" if role and role != BASELINE else info.title


def _where(infos: list[RunInfo]) -> str:
    started = next((info for info in infos if info.machine), None)
    if started is None or started.machine is None:
        return ""
    return _text(f"{started.machine.device_name}, {rules_in_full(started)}")


def messages(infos: list[RunInfo]) -> list[str]:
    """A sentence for each run that has something to say, and for each that did not finish."""
    return [
        line(f"{info.id} ({line(info.title)}): {info.message or info.state}", TEXT_LENGTH)
        for info in infos
        if info.message or info.state not in (State.FINISHED, State.RUNNING, State.QUEUED)
    ]


def run_as_json(reader: Reader, info: RunInfo) -> dict[str, object]:
    """One run as ``--json`` prints it: its loss at both ends, what the shadow counted, and what a
    watched run reported. Non-finite numbers are the strings nan, inf and -inf."""
    steps = reader.steps(info.id)
    totals = reader.step_totals(info.id)
    machine = info.machine
    return {
        "id": info.id,
        "title": info.title,
        "state": str(info.state),
        "message": info.message,
        "policy": machine.policy if machine else None,
        "device": machine.device_name if machine else None,
        "spec": dataclasses.asdict(info.spec),
        "steps": len(steps),
        "skipped": sum(s.skipped for s in steps),
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "last_scale": steps[-1].scale if steps else None,
        "underflow": underflow(reader, info.id),
        "overhead_share": reader.run(info.id).overhead_share,
        "first_bad_step": totals.first_bad,
        "bad_steps": totals.bad,
        "events": [_event(event) for event in reader.events(info.id)][:MAX_EVENTS],
    }


def _event(event: Event) -> dict[str, object]:
    """One event; a capsule with the command that replays it."""
    told: dict[str, object] = {"step": event.step, "kind": event.kind, "name": event.name}
    told["text"] = line(event.text, TEXT_LENGTH)
    if event.path:
        told["path"] = event.path
        told["replay"] = f"ampscope replay {shlex.quote(event.path)} --model FILE.py:build"
    return told


def underflow(reader: Reader, run_id: str) -> dict[str, dict[str, int]]:
    """The counts by role, over all shadow steps and modules. ``lost`` is ``below_range`` and
    ``cancelled`` together."""
    sums: dict[str, dict[str, int]] = {}
    for record in reader.shadows(run_id):
        part = sums.setdefault(record.role, {})
        for name in (*_COUNTS, "below_range", "cancelled"):
            part[name] = part.get(name, 0) + getattr(record, name)
    return sums


def bench_table(run: RunInfo, view: BenchView) -> Table:
    """A bench: one line per dtype, and one for copies."""
    table = plain_table(escape(_title(run)))
    table.padding = (0, 2, 0, 0)
    table.add_column("matmul", no_wrap=True)
    for name in ("reached", "quartiles", "size", "vendor", "share"):
        table.add_column(name, justify="right", no_wrap=name != "size")
    for found in view.ceilings:
        table.add_row(*_cells(found))
    copy, vendor = view.copy, view.vendor
    if copy is not None:
        figure = bytes_words(vendor.bytes_s) if vendor else "unknown"
        size = f"{copy.moved_bytes // 2**21} MiB"
        table.add_row(
            "copy",
            bytes_words(copy.bytes_s),
            quartiles(copy),
            size,
            figure,
            _bandwidth_share(view.copy_share),
        )
    return table


def _title(run: RunInfo) -> str:
    machine = run.machine
    when = datetime.fromtimestamp(run.started or run.created).strftime("%Y-%m-%d %H:%M")
    return f"{machine.device_name}, torch {machine.torch}, {when}" if machine else when


def _cells(found: Ceiling) -> tuple[str, ...]:
    label = LABELS[found.dtype] + (" (!)" if found.reason else "")
    if found.best is None:
        return label, "not measured", MISSING, MISSING, MISSING, MISSING
    vendor = rate_words(found.vendor_flops_s) if found.vendor_flops_s else "unknown"
    return (
        label,
        rate_words(found.flops_s),
        quartiles(found.best),
        str(found.best.shape[0]),
        vendor,
        _bandwidth_share(found.share),
    )


def quartiles(rate: Rate | None) -> str:
    """Distance of the quartiles of the times over their median."""
    return f"{rate.timing.spread:.0%}" if rate and rate.timing else MISSING


def _bandwidth_share(share: float | None) -> str:
    return MISSING if share is None else f"{share:.0%}"


def _steps(info: RunInfo) -> str:
    """Steps done, of how many where that is known before: a watched training says nothing of it,
    and a script may end earlier. A measurement counts what it likes."""
    if not info.spec.is_training:
        return MISSING
    done, wanted = f"{info.steps_done:,}", info.spec.steps
    return f"{done}/{wanted:,}" if wanted and info.spec.kind == "probe" else done


def _share(counts: dict[str, int], name: str) -> str:
    if not counts.get("total"):
        return MISSING
    share = counts[name] / counts["total"]
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def plain_table(title: str) -> Table:
    """Without frame, because 80 columns are few."""
    return Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _text(text: str) -> str:
    return escape(line(text))
