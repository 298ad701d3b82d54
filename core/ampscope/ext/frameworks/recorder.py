"""An adapter's facts as records of a run: modules, frames, steps, optimizer steps, scans, ops.

    recorder = FrameworkRecorder(cadence)
    recorder.module(ModuleRecord(…))            # layers, as they are met
    recorder.outputs("block.fc1", "Linear", …)  # each call of one; with recorder.bad(LayerCall(…))
    recorder.backward("block.fc1", gradient)    # gradient that came back to its output
    recorder.step(StepFacts(…))                 # ends the step

:meth:`~FrameworkRecorder.take` gives what the store has not got yet;
:meth:`~FrameworkRecorder.observations` is the evidence for the rules, closed with how the script
ended.

:class:`StepFacts` is what an adapter knows of one optimizer step, :class:`Writing` keeps what a
recorder holds while the run goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.ext.frameworks.bad_layers import BadLayers, LayerCall
from ampscope.ext.frameworks.tensors import (
    TensorBits,
    count_into,
    largest,
    nonfinite_count,
    square_sum,
)
from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF, RAW_LEN, Raw
from ampscope.observations import (
    Call,
    Observation,
    OptimizerStep,
    Outcome,
    ParameterGradient,
    Scan,
)
from ampscope.records import (
    Cadence,
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    StepRecord,
)
from ampscope.store.writer import FIRST_STEPS, Pace, RunWriter

DETAILED = 8  # steps whose gradients are kept one by one; bad ones always are
MAX_BATCH_SCANS = 2_000
_HALF = ("fp16", "bf16")


class FrameworkRecorder:
    """Records one training of one model. Used by one thread. ``after_step`` is called with it at
    the end of each optimizer step."""

    def __init__(
        self, cadence: Cadence, after_step: Callable[[FrameworkRecorder], None] | None = None
    ) -> None:
        self.cadence = cadence
        self._after_step = after_step
        self.steps = 0  # skipped ones included
        self.half_seen: set[str] = set()  # dtypes in which layers computed
        self.optimizer_steps: list[OptimizerStep] = []
        self.calls, self.scans = list[Call](), list[Scan]()
        self.gradients: list[ParameterGradient] = []
        self.bad_layers = BadLayers()
        self.ops = OpSets()
        self.elapsed_s = 0.0  # spent here
        self._index: dict[str, int] = {}
        self._modules: list[ModuleRecord] = []
        self._counts = StepCounts()
        self._measured = PendingRecords()
        self._batches = 0

    @property
    def wants_ops(self) -> bool:
        """Whether the ops of the step that is under way are wanted."""
        return self._is_due(self.cadence.trace)

    @property
    def wants_tensors(self) -> bool:
        """Whether histograms of the step that is under way are wanted."""
        return self._is_due(self.cadence.histogram)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.steps % every == 0

    def module(self, record: ModuleRecord) -> int:
        """Its number in the run; the record's own ``index`` is not looked at."""
        if record.path not in self._index:
            self._index[record.path] = len(self._modules)
            self._modules.append(replace(record, index=len(self._modules)))
            self._measured.modules.append(self._modules[-1])
        return self._index[record.path]

    def index_of(self, path: str, type_: str = "") -> int:
        """Number of a module by its path; met for the first time it is added."""
        return self._index.get(path) or self.module(ModuleRecord(0, path, type_))

    def bad(self, call: LayerCall) -> None:
        """An output of ``call`` is not finite."""
        if not call.hands_on:
            self.bad_layers.met(call, self.steps)

    def outputs(
        self, path: str, type_: str, outputs: Iterable[TensorBits], is_training: bool
    ) -> int:
        """A layer was called: count its outputs, and say how many elements are not finite. Where
        some are, the adapter calls :meth:`bad`."""
        started, bad, index = time.perf_counter(), 0, self.index_of(path, type_)
        for values in outputs:
            if values.name in _HALF:
                self.half_seen.add(values.name)
            bad += self._count(Role.ACTIVATION, index, values, keep=is_training)
        self.elapsed_s += time.perf_counter() - started
        return bad

    def backward(self, path: str, gradient: TensorBits) -> None:
        """The gradient that came back to a layer's output, still scaled; the last layer's first."""
        started = time.perf_counter()
        bad = self._count(Role.GRAD_OUTPUT, self.index_of(path), gradient, keep=True)
        self.bad_layers.gradient(path, gradient, is_bad=bad > 0)
        self.elapsed_s += time.perf_counter() - started

    def batch(self, name: str, values: TensorBits) -> None:
        """A tensor that a model was given, before any layer saw it."""
        if self._batches < MAX_BATCH_SCANS and values.size:
            self._batches += 1
            self.scans.append(scan("batch", "batch", name, values, self.steps))
            self.calls += [] if self.calls else [inputs_call(values)]

    def weights(
        self, moment: str, weights: Mapping[str, TensorBits], kind: str = "parameter"
    ) -> None:
        """All weights at the ``start`` or ``end``; ``kind`` also frozen and buffer."""
        self.scans += [scan(moment, kind, n, v, self.steps) for n, v in weights.items()]

    def step(self, facts: StepFacts) -> None:
        """An optimizer step ended, taken or skipped: everything since the last one belongs to
        it."""
        started = time.perf_counter()
        parts = [
            _part(self.steps, facts, order, name, values)
            for order, (name, values) in enumerate(facts.gradients.items())
        ]
        added = updates(facts)
        record = optimizer_step_of(self.steps, facts, parts, added)
        self.optimizer_steps.append(record)
        self.calls += step_calls(len(self.calls), self.steps, facts)
        self._detail(facts, record, parts)
        if self.wants_tensors:
            self._count_parameters(facts, added)
        self._measured.frames += self._counts.take(self.steps, facts.carried)
        if record.loss is not None and not math.isfinite(record.loss):
            self.bad_layers.reached_loss(self.steps)
        elif record.grad_nonfinite:
            self.bad_layers.reached_gradient(self.steps)
        self._measured.steps.append(step_record(record, facts, self.ops.end_step()))
        self.bad_layers.next_step()
        self.steps += 1
        self.elapsed_s += time.perf_counter() - started
        if self._after_step is not None:
            self._after_step(self)

    def scaler_updated(self, scaler: str) -> None:
        """Called when a scaler has decided on its next scale, after the steps through it."""
        last = max(self.steps - 1, 0)
        self.calls.append(Call(len(self.calls), last, "update", subject=scaler))

    def take(self) -> PendingRecords:
        """What came since the last call."""
        taken, self._measured = self._measured, PendingRecords()
        taken.ops = self.ops.take()
        return taken

    def forget(self) -> None:
        """Let go of the evidence for the rules, which grows with every step of a long training."""
        del self.optimizer_steps[:-1], self.calls[:], self.gradients[:], self.scans[:]

    def observations(self, outcome: Outcome) -> list[Observation]:
        """Everything seen so far, closed with ``outcome``."""
        facts: list[Observation] = [
            *self.calls,
            *self.optimizer_steps,
            *self.gradients,
            *self.scans,
        ]
        return [*facts, *self.bad_layers.records(), outcome]

    def outcome(self, ended: str, notes: tuple[str, ...] = ()) -> Outcome:
        """How it stands, with what was seen."""
        return Outcome(
            ended=ended,
            steps=self.steps,
            backwards=sum(c.name == "backward" for c in self.calls),
            optimizers=tuple(sorted({a.optimizer for a in self.optimizer_steps})),
            scalers=tuple(sorted({a.scaler for a in self.optimizer_steps} - {""})),
            uses_autocast="+".join(sorted(self.half_seen)),
            notes=notes,
            last_loss=self.optimizer_steps[-1].loss if self.optimizer_steps else None,
        )

    def _count(self, role: Role, index: int, values: TensorBits, *, keep: bool) -> int:
        return self._counts.add(role, index, values, keep=keep and self.wants_tensors)

    def _count_parameters(self, facts: StepFacts, added: Mapping[str, Any]) -> None:
        moved = {name: TensorBits.of(update) for name, update in added.items()}
        roles = {Role.WEIGHT: facts.before, Role.WEIGHT_GRAD: facts.gradients, Role.UPDATE: moved}
        for role, named in roles.items():
            for name, values in named.items():
                self._count(role, self.index_of(name.rpartition(".")[0]), values, keep=True)

    def _detail(
        self, facts: StepFacts, record: OptimizerStep, parts: list[ParameterGradient]
    ) -> None:
        if record.step < DETAILED or record.grad_nonfinite:
            self.gradients += parts
        bad = [part for part in parts if part.nonfinite]
        self._measured.nonfinite += [nonfinite_record(part, facts) for part in bad]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One optimizer step: taken, or skipped by the scaler.

    ``gradients`` are as they came to the scaler or optimizer, in the order in which they are
    applied; ``scaled`` says whether they still carry ``scale``. ``before`` and ``after`` are the
    weights by the same names, and may be left empty where no instrument looked. ``loss_scaled``
    says whether a scaler scaled the loss; None: as it should be, wherever a scaler took part.
    ``static_scale`` is a constant by which the loss is multiplied, without a scaler that skips.
    """

    loss: float | None  # unscaled
    scale: float | None  # None: no scaler took part
    skipped: bool
    lr: float
    optimizer: str = "optimizer0"
    scaler: str = "scaler0"  # where one took part
    loss_dtype: str = "fp32"
    scaled: bool = True
    loss_scaled: bool | None = None
    static_scale: float | None = None
    unscaled_by_user: bool = False
    growth_counter: int | None = None
    backwards: int = 1
    gradients: Mapping[str, TensorBits] = field(default_factory=dict)
    before: Mapping[str, TensorBits] = field(default_factory=dict)
    after: Mapping[str, TensorBits] = field(default_factory=dict)
    state: Mapping[str, TensorBits] = field(default_factory=dict)  # optimizer state, by any name
    second_moments: tuple[str, ...] = ()  # which of them are second moments
    eps: float | None = None
    step_time_s: float | None = None  # without the instruments
    overhead_s: float | None = None
    peak_bytes: int | None = None

    @property
    def carried(self) -> float:
        """The factor that multiplies ``gradients``."""
        return (self.scale or self.static_scale or 1.0) if self.scaled else 1.0


def optimizer_step_of(
    number: int,
    facts: StepFacts,
    parts: list[ParameterGradient],
    added: Mapping[str, NDArray[Any]],
) -> OptimizerStep:
    """The record of step ``number``; ``parts`` are its gradients, ``added`` its
    :func:`updates`."""
    moved, norm = _motion(facts, added)
    return OptimizerStep(
        step=number,
        optimizer=facts.optimizer,
        scaler="" if facts.scale is None else facts.scaler,
        loss=facts.loss,
        loss_dtype=facts.loss_dtype,
        scale=1.0 if facts.scale is None else facts.scale,
        skipped=facts.skipped,
        unscaled_before=facts.unscaled_by_user,
        backwards=facts.backwards,
        grad_total=sum(p.total for p in parts),
        grad_zero=sum(p.zero for p in parts),
        grad_nonfinite=sum(p.nonfinite for p in parts),
        grad_max=max(
            (largest(v.floats()) / facts.carried for v in facts.gradients.values()), default=None
        ),
        grad_norm=math.sqrt(sum((p.norm or 0.0) ** 2 for p in parts)) if parts else None,
        lr=facts.lr,
        moved_share=moved,
        update_norm=norm,
        weight_nonfinite=sum(v.nonfinite for v in (facts.after or facts.before).values()),
        grad_dtypes=_dtypes(facts.gradients.values()),
        weight_dtypes=_dtypes((facts.after or facts.before).values()),
        state_dtypes=_dtypes(facts.state.values()),
        state_nonfinite=sum(v.nonfinite for v in facts.state.values()),
        state_zero_share=_zero_second_moments(facts),
        eps=facts.eps,
        ended_at=time.time(),
    )


def step_record(record: OptimizerStep, facts: StepFacts, op_set: int | None) -> StepRecord:
    """The :class:`StepRecord` of a step, as pages show it."""
    return StepRecord(
        step=record.step,
        loss=record.loss,
        scale=facts.scale,
        growth_counter=facts.growth_counter,
        skipped=record.skipped,
        grad_norm=float("nan") if record.grad_nonfinite else record.grad_norm,
        lr=record.lr,
        step_time_s=facts.step_time_s,
        overhead_s=facts.overhead_s,
        peak_bytes=facts.peak_bytes,
        moved_share=record.moved_share,
        op_set=op_set,
        ended_at=record.ended_at,
    )


def nonfinite_record(part: ParameterGradient, facts: StepFacts) -> NonFiniteRecord:
    """Of a parameter whose gradient is not finite."""
    row = np.zeros(RAW_LEN, np.int64)
    count_into(facts.gradients[part.name], row)
    counts = int(row[NAN]), int(row[POS_INF]), int(row[NEG_INF])
    return NonFiniteRecord(part.step, part.name, part.order, part.total, *counts)


def updates(facts: StepFacts) -> dict[str, NDArray[Any]]:
    """What the step added to each weight; nothing of a skipped one."""
    if facts.skipped:
        return {}
    both = [(name, after) for name, after in facts.after.items() if name in facts.before]
    with np.errstate(over="ignore", invalid="ignore"):
        return {name: after.floats() - facts.before[name].floats() for name, after in both}


def _part(
    number: int, facts: StepFacts, order: int, name: str, values: TensorBits
) -> ParameterGradient:
    """A parameter's gradient in step ``number``, unscaled."""
    floats = values.floats()
    bad = nonfinite_count(floats)
    kept = floats[np.isfinite(floats)] if bad else floats
    norm = math.sqrt(square_sum(kept)) / facts.carried
    zero = int(floats.size - np.count_nonzero(floats))
    return ParameterGradient(number, facts.optimizer, name, order, values.size, zero, bad, norm)


def _motion(
    facts: StepFacts, added: Mapping[str, NDArray[Any]]
) -> tuple[float | None, float | None]:
    """(share of weights that the step changed, 2-norm of the change)."""
    if facts.skipped:
        return 0.0, 0.0
    total = sum(update.size for update in added.values())
    if not total:
        return None, None
    moved = sum(int(np.count_nonzero(update)) for update in added.values())
    return moved / total, math.sqrt(sum(square_sum(update) for update in added.values()))


def _zero_second_moments(facts: StepFacts) -> float | None:
    """Second moments that are zero, where some gradient is not."""
    total = zero = 0
    for name in facts.second_moments:
        floats = facts.state[name].floats()
        total += floats.size
        zero += int(floats.size - np.count_nonzero(floats))
    flows = any(values.floats().any() for values in facts.gradients.values())
    return zero / total if total and flows else None


def _dtypes(all_values: Iterable[TensorBits]) -> str:
    return "+".join(sorted({values.name for values in all_values}))


def step_calls(first: int, step: int, facts: StepFacts) -> list[Call]:
    """The calls that every step has, in the words of torch's call log, numbered from ``first``."""
    has_scaler = facts.scale is not None
    is_scaled = has_scaler if facts.loss_scaled is None else facts.loss_scaled
    backward = Call(0, step, "backward", value=facts.loss, scaled=is_scaled)
    if facts.static_scale is not None:  # as a product written by hand in PyTorch
        backward = replace(backward, note=f"mul {facts.static_scale!r}", scaled=False)
    end = Call(0, step, "optimizer_step", subject=facts.optimizer)
    if has_scaler:
        end = Call(0, step, "scaler_step", subject=facts.scaler, note=facts.optimizer)
    scale = [Call(0, step, "scale", value=facts.scale, scaled=True)] if is_scaled else []
    calls = (*scale, backward, end)
    return [replace(call, seq=first + number) for number, call in enumerate(calls)]


def inputs_call(values: TensorBits) -> Call:
    """The first call of a model, by which two runs are seen to begin alike."""
    total = float(values.floats().astype(np.float64).sum())
    return Call(0, 0, "inputs", value=total, dtype=values.name)


def scan(moment: str, kind: str, name: str, values: TensorBits, step: int) -> Scan:
    """A tensor that was looked at outside the layers: a batch, the weights at the start and end."""
    floats = values.floats()
    is_finite = np.isfinite(floats)
    finite = floats if is_finite.all() else floats[is_finite]
    return Scan(
        moment,
        kind,
        name,
        values.name,
        values.size,
        0 if finite is floats else int(np.isnan(floats).sum()),
        0 if finite is floats else int(np.isinf(floats).sum()),
        float(max(finite.max(), -finite.min())) if finite.size else None,
        step,
        std=float(finite.std(dtype=np.float64)) if finite.size else None,
    )


class StepCounts:
    """Exponent counts of the step that is under way, one row a role, module and dtype: :meth:`add`
    as tensors come by, :meth:`take` at the end of the step."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Role, int, str], Raw] = {}

    def add(self, role: Role, index: int, values: TensorBits, *, keep: bool) -> int:
        """Count ``values`` into the step's frame where ``keep`` says so; how many are NaN or
        infinite."""
        row = self._rows.get((role, index, values.name)) if keep else None
        if row is None:
            row = np.zeros(RAW_LEN, np.int64)
            if keep:
                self._rows[role, index, values.name] = row
        before = _nonfinite_counts(row)
        count_into(values, row)
        return _nonfinite_counts(row) - before

    def take(self, step: int, scale: float) -> list[Frame]:
        """One frame a role that was counted; ``scale`` is what multiplies the gradients."""
        frames = []
        for role in Role:
            mine = [(key, row) for key, row in self._rows.items() if key[0] is role]
            if mine:
                modules, dtypes = tuple(k[1] for k, _ in mine), tuple(k[2] for k, _ in mine)
                rows = np.stack([row for _, row in mine])
                factor = scale if role.is_gradient else 1.0
                frames.append(Frame(step, role, modules, dtypes, rows, factor))
        self._rows.clear()
        return frames


def _nonfinite_counts(row: Raw) -> int:
    return int(row[NAN]) + int(row[POS_INF]) + int(row[NEG_INF])


class OpSets:
    """The ops of each step, kept once, for steps mostly run the same: :meth:`add` in a step,
    :meth:`end_step` at its end, :meth:`take` what is new."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[OpRecord, ...], int] = {}
        self._new: list[tuple[int, tuple[OpRecord, ...]]] = []
        self._current: int | None = None

    def add(self, ops: Iterable[OpRecord]) -> None:
        """All ops of the step that is under way."""
        found = tuple(sorted(ops, key=lambda op: (op.module, op.phase, op.op, op.inputs)))
        if found and found not in self._numbers:
            self._numbers[found] = len(self._numbers)
            self._new.append((self._numbers[found], found))
        self._current = self._numbers.get(found)

    def end_step(self) -> int | None:
        """Number of the step's set; None where its ops were not looked at."""
        number, self._current = self._current, None
        return number

    def take(self) -> list[tuple[int, tuple[OpRecord, ...]]]:
        """Sets that came since the last call."""
        taken, self._new = self._new, []
        return taken


@dataclass(slots=True)
class PendingRecords:
    """What a run has measured and the store has not got yet, in the order in which it came."""

    modules: list[ModuleRecord] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    nonfinite: list[NonFiniteRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    ops: list[tuple[int, tuple[OpRecord, ...]]] = field(default_factory=list)  # by op set

    def write(self, writer: RunWriter) -> None:
        """Hand all of it to ``writer``; flushing is the caller's."""
        writer.add_modules(self.modules)
        writer.add_nonfinite(self.nonfinite)
        for frame in self.frames:
            writer.add_frame(frame)
        for op_set, ops in self.ops:
            writer.add_ops(op_set, ops)
        for step in self.steps:
            writer.add_step(step)


WRITING_SHARE = 0.05  # of a run's time goes into writing at most, after its first steps


class Writing:
    """Writes a recorder's facts while the run goes on: a kill loses at most what came since.
    ``keeps_evidence`` says whether observations are written too. All evidence is written each time,
    which takes longer as it grows; the pauses grow with it."""

    def __init__(self, writer: RunWriter, *, keeps_evidence: bool) -> None:
        self._writer = writer
        self._keeps_evidence = keeps_evidence
        self._pace = Pace(WRITING_SHARE)

    def write_if_due(self, recorder: FrameworkRecorder) -> None:
        """Write what there is, unless that was done a moment ago."""
        started = time.monotonic()
        if recorder.steps > FIRST_STEPS and not self._pace.is_due(started):
            return
        self.write(recorder, recorder.outcome("killed"))
        self._pace.wrote(started, time.monotonic() - started)

    def write(self, recorder: FrameworkRecorder, outcome: Outcome) -> None:
        """Everything so far, closed with ``outcome``."""
        recorder.take().write(self._writer)
        if self._keeps_evidence:
            self._writer.add_observations(recorder.observations(outcome))
        else:
            recorder.forget()
        self._writer.flush()


class ObjectNames:
    """Names by the order in which things of one kind are met: "optimizer0", "optimizer1". What has
    a name stays alive, so that no other thing takes over an id."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.things: list[Any] = []
        self._names: dict[int, str] = {}

    def name(self, thing: Any) -> str:
        """Always the same for the same object."""
        if id(thing) not in self._names:
            self._names[id(thing)] = f"{self.kind}{len(self.things)}"
            self.things.append(thing)
        return self._names[id(thing)]
