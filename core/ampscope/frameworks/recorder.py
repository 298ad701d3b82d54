"""An adapter's facts as records of a run: modules, frames, steps, attempts, scans, bad layers.

    recorder = Recorder(cadence)
    recorder.module(ModuleRecord(…))            # layers, as they are met
    recorder.forward(LayerCall(…))              # each call of one
    recorder.backward("block.fc1", gradient)    # gradient that came back to its output
    recorder.step(StepFacts(…))                 # ends the step

:meth:`Recorder.take` gives what the store has not got yet; :meth:`Recorder.observations` is the
evidence for the rules, closed with how the script ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ampscope.frameworks.attempt import (
    attempt_of,
    gradient_parts,
    nonfinite_record,
    step_record,
    updates,
)
from ampscope.frameworks.counts import StepCounts
from ampscope.frameworks.layers import BadLayers
from ampscope.frameworks.measured import Measured
from ampscope.frameworks.op_sets import OpSets
from ampscope.frameworks.outcomes import outcome_of
from ampscope.frameworks.scans import scan
from ampscope.frameworks.step_calls import inputs_call, step_calls
from ampscope.frameworks.steps import LayerCall, StepFacts
from ampscope.frameworks.tensors import Values
from ampscope.observations import Attempt, Call, Observation, Outcome, ParameterGradient, Scan
from ampscope.records import Cadence, ModuleRecord, Role

DETAILED = 8  # attempts whose gradients are kept one by one; bad ones always are
MAX_BATCH_SCANS = 2_000
_HALF = ("fp16", "bf16")


class Recorder:
    """Records one training of one model. Used by one thread."""

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.steps = 0  # attempted
        self.half_seen: set[str] = set()  # dtypes in which layers computed
        self.attempts: list[Attempt] = []
        self.calls, self.scans = list[Call](), list[Scan]()
        self.gradients: list[ParameterGradient] = []
        self.bad_layers = BadLayers()
        self.ops = OpSets()
        self.elapsed_s = 0.0  # spent here
        self.on_step: Callable[[int], None] = lambda steps: None  # steps attempted so far
        self._index: dict[str, int] = {}
        self._modules: list[ModuleRecord] = []
        self._counts = StepCounts()
        self._measured = Measured()
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

    def forward(self, call: LayerCall) -> int:
        """A layer was called: count its outputs, and say how many elements are not finite."""
        if call.compute_dtype in _HALF:
            self.half_seen.add(call.compute_dtype)
        bad = self.outputs(call.path, call.type, call.outputs, call.is_training)
        self.bad_layers.called(call)
        if bad:
            self.bad(call)
        return bad

    def bad(self, call: LayerCall) -> None:
        """An output of ``call`` is not finite."""
        if not call.hands_on:
            self.bad_layers.met(call, self.steps)

    def outputs(self, path: str, type_: str, outputs: Iterable[Values], is_training: bool) -> int:
        """What :meth:`forward` counts; with :meth:`bad` where needed, a cheaper way to say it."""
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
        """An optimizer step was attempted: everything since the last one belongs to it."""
        started = time.perf_counter()
        parts = gradient_parts(facts)
        added = updates(facts)
        attempt = attempt_of(self.steps, facts, parts, added)
        self.attempts.append(attempt)
        self.calls += step_calls(len(self.calls), self.steps, facts)
        self._detail(facts, attempt, parts)
        if self.wants_tensors:
            self._count_parameters(facts, added)
        self._measured.frames += self._counts.take(self.steps, facts.carried)
        if attempt.loss is not None and not math.isfinite(attempt.loss):
            self.bad_layers.reached_loss(self.steps)
        elif attempt.grad_nonfinite:
            self.bad_layers.reached_gradient(self.steps)
        record = replace(step_record(attempt, facts), op_set=self.ops.end_step())
        self._measured.steps.append(record)
        self.bad_layers.next_step()
        self.steps += 1
        self.elapsed_s += time.perf_counter() - started
        self.on_step(self.steps)

    def scaler_updated(self, scaler: str) -> None:
        """It decided on its next scale, by the steps through it since it last did."""
        attempt = max(self.steps - 1, 0)
        self.calls.append(Call(len(self.calls), attempt, "update", subject=scaler))

    def take(self) -> Measured:
        """What came since the last call."""
        taken, self._measured = self._measured, Measured()
        taken.ops = self.ops.take()
        return taken

    def forget(self) -> None:
        """Let go of the evidence for the rules, which grows with every step of a long training."""
        del self.attempts[:-1], self.calls[:], self.gradients[:], self.scans[:]

    def observations(self, outcome: Outcome) -> list[Observation]:
        """Everything seen so far, closed with ``outcome``."""
        facts: list[Observation] = [*self.calls, *self.attempts, *self.gradients, *self.scans]
        return [*facts, *self.bad_layers.records(), outcome]

    def outcome(self, ended: str, notes: tuple[str, ...] = ()) -> Outcome:
        """How it stands, with what was seen."""
        kept = self.attempts, self.calls
        return outcome_of(ended, self.steps, *kept, self.half_seen, notes)

    def _count(self, role: Role, index: int, values: Values, *, keep: bool) -> int:
        return self._counts.add(role, index, values, keep=keep and self.wants_tensors)

    def _count_parameters(self, facts: StepFacts, added: Mapping[str, Any]) -> None:
        moved = {name: Values.of(update) for name, update in added.items()}
        roles = {Role.WEIGHT: facts.before, Role.WEIGHT_GRAD: facts.gradients, Role.UPDATE: moved}
        for role, named in roles.items():
            for name, values in named.items():
                self._count(role, self._owner(name), values, keep=True)

    def _owner(self, parameter: str) -> int:
        return self.index_of(parameter.rpartition(".")[0])

    def _detail(self, facts: StepFacts, attempt: Attempt, parts: list[ParameterGradient]) -> None:
        if attempt.attempt < DETAILED or attempt.grad_nonfinite:
            self.gradients += parts
        bad = [part for part in parts if part.nonfinite]
        self._measured.nonfinite += [nonfinite_record(part, facts) for part in bad]
