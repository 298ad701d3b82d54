"""An adapter's facts as records of a run: modules, frames, steps, optimizer steps, scans, bad
layers.

    recorder = Recorder(cadence)
    recorder.module(ModuleRecord(…))            # layers, as they are met
    recorder.outputs("block.fc1", "Linear", …)  # each call of one; with recorder.bad(LayerCall(…))
    recorder.backward("block.fc1", gradient)    # gradient that came back to its output
    recorder.step(StepFacts(…))                 # ends the step

:meth:`Recorder.take` gives what the store has not got yet; :meth:`Recorder.observations` is the
evidence for the rules, closed with how the script ended.

Also here: what an adapter hands over (:class:`LayerCall`, :class:`StepFacts`), steps, bad
layers, exponent counts, ops, scans and the outcome made of it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.ext.frameworks.tensors import Values, count_into
from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF, RAW_LEN, Raw
from ampscope.observations import (
    BadOp,
    Call,
    Observation,
    Operand,
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


class Recorder:
    """Records one training of one model. Used by one thread. ``after_step`` is called with it at
    the end of each optimizer step."""

    def __init__(
        self, cadence: Cadence, after_step: Callable[[Recorder], None] | None = None
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

    def outputs(self, path: str, type_: str, outputs: Iterable[Values], is_training: bool) -> int:
        """A layer was called: count its outputs, and say how many elements are not finite. Where
        some are, the adapter calls :meth:`bad`."""
        started, bad, index = time.perf_counter(), 0, self.index_of(path, type_)
        for values in outputs:
            if values.name in _HALF:
                self.half_seen.add(values.name)
            bad += self._count(Role.ACTIVATION, index, values, keep=is_training)
        self.elapsed_s += time.perf_counter() - started
        return bad

    def backward(self, path: str, gradient: Values) -> None:
        """The gradient that came back to a layer's output, still scaled; the last layer's first."""
        started = time.perf_counter()
        bad = self._count(Role.GRAD_OUTPUT, self.index_of(path), gradient, keep=True)
        self.bad_layers.gradient(path, gradient, is_bad=bad > 0)
        self.elapsed_s += time.perf_counter() - started

    def batch(self, name: str, values: Values) -> None:
        """A tensor that a model was given, before any layer saw it."""
        if self._batches < MAX_BATCH_SCANS and values.size:
            self._batches += 1
            self.scans.append(scan("batch", "batch", name, values, self.steps))
            self.calls += [] if self.calls else [inputs_call(values)]

    def weights(self, moment: str, weights: Mapping[str, Values], kind: str = "parameter") -> None:
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

    def _count(self, role: Role, index: int, values: Values, *, keep: bool) -> int:
        return self._counts.add(role, index, values, keep=keep and self.wants_tensors)

    def _count_parameters(self, facts: StepFacts, added: Mapping[str, Any]) -> None:
        moved = {name: Values.of(update) for name, update in added.items()}
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


# Keeps what a run has shown while it goes on, so that a kill loses at most what came since.
#
# All evidence is written each time, which takes longer as it grows; the pauses grow with it.


WRITING_SHARE = 0.05  # of a run's time goes into writing at most, after its first steps


class Writing:
    """Writes a recorder's facts; ``keeps_evidence`` says whether observations are written too."""

    def __init__(self, writer: RunWriter, *, keeps_evidence: bool) -> None:
        self._writer = writer
        self._keeps_evidence = keeps_evidence
        self._pace = Pace(WRITING_SHARE)

    def write_if_due(self, recorder: Recorder) -> None:
        """Write what there is, unless that was done a moment ago."""
        started = time.monotonic()
        if recorder.steps > FIRST_STEPS and not self._pace.is_due(started):
            return
        self.write(recorder, recorder.outcome("killed"))
        self._pace.wrote(started, time.monotonic() - started)

    def write(self, recorder: Recorder, outcome: Outcome) -> None:
        """Everything so far, closed with ``outcome``."""
        recorder.take().write(self._writer)
        if self._keeps_evidence:
            self._writer.add_observations(recorder.observations(outcome))
        else:
            recorder.forget()
        self._writer.flush()


# One optimizer step, taken or skipped, from an adapter's facts: the numbers that rules and pages
# read.


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
        weight_nonfinite=sum(_nonfinite(v) for v in (facts.after or facts.before).values()),
        grad_dtypes=_dtypes(facts.gradients.values()),
        weight_dtypes=_dtypes((facts.after or facts.before).values()),
        state_dtypes=_dtypes(facts.state.values()),
        state_nonfinite=sum(_nonfinite(v) for v in facts.state.values()),
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
    number: int, facts: StepFacts, order: int, name: str, values: Values
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


def _nonfinite(values: Values) -> int:
    return nonfinite_count(values.floats())


def _dtypes(all_values: Iterable[Values]) -> str:
    return "+".join(sorted({values.name for values in all_values}))


# What an adapter hands over: a layer's call, and everything about one optimizer step.


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer in a forward pass.

    ``op`` says what the layer computes in the words of PyTorch's ops where there is one (linear,
    convolution, matmul, native_layer_norm, native_batch_norm, add, softmax, embedding), so that the
    rules know its kind; else ``layer``. ``in_fp32`` computes the same from the same inputs in fp32;
    it is asked only when a non-finite output came from finite inputs. So is ``closer``, and where
    an output has vanished: the first op inside whose finite inputs gave a non-finite output, as a
    call of the same ``path``; None where there is none, or the layer itself is as close as one can
    look. ``weights`` are the layer's own: a layer whose weights are not finite made nothing bad
    itself.
    """

    path: str
    type: str
    op: str
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    compute_dtype: str  # fp16 | bf16 | fp32
    line: str = ""  # "train.py:41", of the script
    is_training: bool = True
    in_fp32: Callable[[], Values | None] = _unknown
    closer: Callable[[], LayerCall | None] = _unknown
    weights: Callable[[], tuple[Values, ...]] = tuple
    consumers: tuple[str, ...] = ()  # of a single op: what took its output, nearest first
    hands_on: bool = False  # a layer inside this one has put out a non-finite value already


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
    gradients: Mapping[str, Values] = field(default_factory=dict)
    before: Mapping[str, Values] = field(default_factory=dict)
    after: Mapping[str, Values] = field(default_factory=dict)
    state: Mapping[str, Values] = field(default_factory=dict)  # optimizer state, by any name
    second_moments: tuple[str, ...] = ()  # which of them are second moments
    eps: float | None = None
    step_time_s: float | None = None  # without the instruments
    overhead_s: float | None = None
    peak_bytes: int | None = None

    @property
    def carried(self) -> float:
        """The factor that multiplies ``gradients``."""
        return (self.scale or self.static_scale or 1.0) if self.scaled else 1.0


# Layers whose finite inputs gave a non-finite output, or sent a non-finite gradient back.
#
# A layer is looked at as one op. Whether its value reached the loss is read off the step: the
# first bad layer of a step whose loss is not finite is where that began, because layers run in
# order. A layer of an unknown kind whose output has vanished is looked into as well. Gradients
# arrive from the last layer to the first: the first one that is not finite was born in the layer
# whose own gradient, just before it, still was.


_LayerKey = tuple[str, str]  # path, op
MAX_LOOKS = 3  # into a layer whose output has vanished, which may be as it should


class BadLayers:
    """Bad layers by path; a layer that is bad again counts up."""

    def __init__(self) -> None:
        self._known: dict[_LayerKey, BadOp] = {}
        self._seen: dict[str, LayerCall] = {}  # the first call of each layer
        self._looks: Counter[str] = Counter()  # by path, where the output had vanished
        self._around: set[str] = set()  # paths that hold a bad layer of the forward pass under way
        self._first: _LayerKey | None = None  # of the step that is under way
        self._finite: tuple[str, Values] | None = None  # the last gradient that was
        self._born: tuple[str, Values | None, Values] | None = None  # the first that was not

    def called(self, call: LayerCall) -> None:
        """Any call."""
        if call.path not in self._seen:
            kept = call.path, call.type, call.op, (), (), call.compute_dtype, call.line
            self._seen[call.path] = LayerCall(*kept)  # holds no tensors, nor what could give them

    def met(self, call: LayerCall, step: int) -> None:
        """A call with a non-finite output, or with one that has vanished."""
        is_container = call.path in self._around
        self._around |= _around(call.path)
        if not any(_nonfinite(values) for values in call.outputs):
            if not is_container and call.op == "layer":
                self._vanished(call, step)
            return
        if is_container or any(_nonfinite(values) for values in call.inputs):
            return  # it only hands on what came in, or what a layer inside made
        if any(_nonfinite(values) for values in call.weights()):
            return  # broken by an earlier step
        key = call.path, call.op
        if self._first is None and call.is_training:
            self._first = key
        if not self._is_known(key, step):
            self._known[key] = _bad_op(len(self._known), call.closer() or call, call, step)

    def _is_known(self, key: _LayerKey, step: int) -> bool:
        """Whether the layer was bad before; then it counts up."""
        known = self._known.get(key)
        if known is not None:
            self._known[key] = replace(known, count=known.count + 1, last_step=step)
        return known is not None

    def _vanished(self, call: LayerCall, step: int) -> None:
        """Bad where an op inside made infinities that something after it turned into zeros."""
        key = call.path, "vanished"
        if self._is_known(key, step):
            return
        if self._looks[call.path] < MAX_LOOKS and any(map(is_there, call.inputs)):
            self._looks[call.path] += 1
            if op := call.closer():
                self._known[key] = _bad_op(len(self._known), op, call, step)

    def gradient(self, path: str, gradient: Values, *, is_bad: bool) -> None:
        """Came back to a layer's output."""
        if not is_bad:
            if self._born is None:
                self._finite = path, gradient
        elif self._born is None:
            at, came = self._finite or ("", None)
            self._born = at, came, gradient

    def reached_loss(self, step: int) -> None:
        """The loss of this step is not finite."""
        self._mark(self._first, reached_loss=True)

    def reached_gradient(self, step: int) -> None:
        """The loss is finite and a gradient is not."""
        if self._first is not None or self._born is None:
            self._mark(self._first, reached_gradient=True)
            return
        key, op = self._backward_op(len(self._known), step, *self._born)
        if not self._is_known(key, step):
            self._known[key] = op

    def next_step(self) -> None:
        """The step is over."""
        self._first = self._finite = self._born = None
        self._around.clear()

    def records(self) -> list[BadOp]:
        """All of them, in the order in which they were met."""
        return list(self._known.values())

    def _mark(self, key: _LayerKey | None, **reached: bool) -> None:
        if key is not None:
            self._known[key] = replace(self._known[key], **reached)  # type: ignore[arg-type]  # flags

    def _backward_op(
        self, number: int, step: int, path: str, came: Values | None, gradient: Values
    ) -> tuple[_LayerKey, BadOp]:
        """Of the layer at ``path``; "" without a finite gradient before it: of the loss."""
        loss = LayerCall(path, "", "loss", (), (), gradient.name)
        seen = loss if came is None else self._seen.get(path, loss)
        call = replace(
            seen,
            op=f"{seen.op.rpartition('.')[2]}_backward",
            inputs=() if came is None else (came,),
            outputs=(gradient,),
            compute_dtype=gradient.name,
        )
        op = replace(_bad_op(number, call, call, step), phase="backward", reached_gradient=True)
        return (path, call.op), op


def _around(path: str) -> set[str]:
    """{"", "a", "a.b"} of "a.b.c": all that hold it; nothing of the root."""
    parts = path.split(".")
    return {".".join(parts[:depth]) for depth in range(len(parts))} if path else set()


def _bad_op(number: int, call: LayerCall, layer: LayerCall, step: int) -> BadOp:
    """``call`` is the layer's own, or one of an op inside it, which may have taken its weights."""
    weights = layer.weights()
    out = np.concatenate([values.floats() for values in call.outputs])
    reference = call.in_fp32()
    fp32 = None if reference is None else reference.floats()
    has_finite = fp32 is not None and np.isfinite(fp32).any()
    return BadOp(
        id=number,
        kind="nonfinite",
        step=step,
        phase="forward",
        op=call.op if "." in call.op else f"layer.{call.op}",
        node="",
        module=call.path,
        module_type=call.type,
        line=call.line,
        code="",
        dtype=call.compute_dtype,
        inputs=(
            *(replace(_operand(v), is_parameter=_is_one_of(v, weights)) for v in call.inputs),
            *(replace(_operand(v), is_parameter=True) for v in weights if call is layer),
        ),
        scalars=(),
        nan=int(np.isnan(out).sum()),
        pos_inf=int(np.isposinf(out).sum()),
        neg_inf=int(np.isneginf(out).sum()),
        total=int(out.size),
        fp32_max=largest(fp32) if fp32 is not None and has_finite else None,
        fp32_finite=None if fp32 is None else bool(np.isfinite(fp32).all()),
        autocast=call.compute_dtype in ("fp16", "bf16"),
        last_step=step,
        consumers=call.consumers,
    )


def _is_one_of(values: Values, weights: tuple[Values, ...]) -> bool:
    """Whether an op took one of ``weights``, perhaps cast to half precision."""
    same = [w.floats() for w in weights if w.size == values.size]
    return any(np.allclose(w, values.floats(), rtol=2**-8, atol=2**-24) for w in same)


def _operand(values: Values) -> Operand:
    floats = np.abs(values.floats())
    kept = floats[np.isfinite(floats)]
    nonzero = kept[kept > 0]
    return Operand(
        values.name,
        (values.size,),
        float(kept.max()) if kept.size else None,
        float(nonzero.min()) if nonzero.size else None,
        int((floats == 0).sum()),
        _nonfinite(values),
    )


# The calls that every step has, in the words of torch's call log.


def step_calls(first: int, step: int, facts: StepFacts) -> list[Call]:
    """Numbered from ``first`` on."""
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


def inputs_call(values: Values) -> Call:
    """The first call of a model, by which two runs are seen to begin alike."""
    total = float(values.floats().astype(np.float64).sum())
    return Call(0, 0, "inputs", value=total, dtype=values.name)


# Exponent counts of the step that is under way, one row a role, module and dtype.


_CountKey = tuple[Role, int, str]


class StepCounts:
    """:meth:`add` as tensors come by, :meth:`take` at the end of the step."""

    def __init__(self) -> None:
        self._rows: dict[_CountKey, Raw] = {}

    def add(self, role: Role, index: int, values: Values, *, keep: bool) -> int:
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


# Norm, largest magnitude and non-finite entries of large arrays, in as few passes as it takes.
#
# A recorded step reads every weight and gradient. Summing squares in fp32 is several times as fast
# as converting to fp64; where fp32 cannot hold the squares, fp64 is taken after all.


# Squares that sum to no more than this may have lost terms to fp32's subnormals (2^-126, 1.2e-38).
_SMALL_SQUARE = 1e-28
# Entries summed in fp32 before fp64 takes over. Measured: sums of normal numbers are off by 4e-7,
# sums of one number over and over, whose roundings all go one way, by up to 3e-5.
PART = 1 << 16


def _dot(values: NDArray[Any]) -> float:
    """Not BLAS, whose threads would wait for the framework's own."""
    return float(np.einsum("i,i->", values, values))


def square_sum(values: NDArray[Any]) -> float:
    """Sum of the squares of all entries; NaN or Inf where one of them is."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        found = sum(_dot(values[at : at + PART]) for at in range(0, values.size, PART))
        if values.dtype == np.float64 or (_SMALL_SQUARE < found < math.inf):
            return found
        wide = values.astype(np.float64)
        return _dot(wide)


def largest(values: NDArray[Any]) -> float:
    """Largest finite magnitude; 0 where there is none."""
    if not values.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        found = max(float(values.max()), -float(values.min()))
    if math.isfinite(found):
        return found
    kept = values[np.isfinite(values)]
    return float(np.abs(kept).max()) if kept.size else 0.0


def nonfinite_count(values: NDArray[Any]) -> int:
    """NaN and infinities. Their sum is not finite either, and one sum is the cheapest look."""
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(values.sum())):
            return 0
    return int(values.size - np.count_nonzero(np.isfinite(values)))


# What a framework's run has measured and the store has not got yet.


@dataclass(slots=True)
class PendingRecords:
    """Records in the order in which they came."""

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


# The ops of each step, kept once: steps mostly run the same.


class OpSets:
    """:meth:`add` in a step, :meth:`end_step` at its end, :meth:`take` what is new."""

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


# A tensor that was looked at outside the layers: a batch, the weights at the start and end.


def scan(moment: str, kind: str, name: str, values: Values, step: int) -> Scan:
    """What ``values`` hold, at step ``step``."""
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


# Outputs that are nearly all zero.
#
# An infinity inside a layer need not come out of it: a sum that overflows makes every share of it
# zero, and rsqrt makes zero of an infinite mean. What comes out is finite, and nothing; it may be
# fp32, where one op behind the infinity was.


VANISHED = 0.9  # share of zeros from which a look inside is worth a second call
THERE = 0.5  # of what went in, at most so much may be zero
MIN_SIZE = 16
_SAMPLE = 64  # elements that are looked at first: nearly all outputs are known by them


def is_vanished(outputs: Sequence[Values]) -> bool:
    """Whether nearly all elements of all outputs are zero."""
    return bool(outputs) and all(map(_is_nothing, outputs))


def is_there(values: Values) -> bool:
    """Whether enough of ``values`` is not zero for something to be expected of it."""
    return values.size > 0 and _zero_share(values.bits) <= THERE


def _is_nothing(values: Values) -> bool:
    if values.size < MIN_SIZE:
        return False
    sample = values.bits[:: max(1, values.size // _SAMPLE)]
    return _zero_share(sample) >= VANISHED and _zero_share(values.bits) >= VANISHED


def _zero_share(bits: NDArray[Any]) -> float:
    doubled = bits + bits  # of both zeros: the sign bit is shifted out
    return 1.0 - np.count_nonzero(doubled) / bits.size


# Names by the order in which things are met: "optimizer0", "optimizer1".


class Numbering:
    """Of one kind. What it has named stays alive, so that no other thing takes over an id."""

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
