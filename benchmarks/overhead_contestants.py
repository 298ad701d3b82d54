"""The training that is measured, and ampscope's own contestants in it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.weights import WeightObserver
from ampscope.measure.training_steps import batches_of
from ampscope.policy.tensor_core import TensorCoreMode
from ampscope.records import Cadence, RunSpec
from ampscope.runner.instruments import Instruments
from ampscope.runner.probe import prepare
from ampscope.runner.training import training_step
from ampscope.store.writer import RunWriter


@dataclass(frozen=True, slots=True)
class Contestant:
    """``attached()`` is around a turn of so many steps; ``step(number)`` makes one of them."""

    step: Callable[[int], None]
    attached: Callable[[], AbstractContextManager[object]] = nullcontext
    steps: int = 1


class Session:
    """One built-in workload in one precision, bf16 autocast as a rule, under one policy, with so
    many samples a step (0: as the workload gives them)."""

    def __init__(
        self, workload: str, size: str, device: torch.device, policy: str, precision: str = "bf16",
        batch: int = 0,
    ) -> None:  # fmt: skip
        self.spec = RunSpec(workload, size=size, precision=precision, batch=batch)
        self.device = device
        self.training = prepare(self.spec, device)
        self.model: nn.Module = self.training.model
        self.batches = batches_of(self.training, self.spec)
        self.arithmetic = TensorCoreMode() if policy == "rehearsal" else None
        self.counts = Accumulator()
        self._elements = 0

    def step(self) -> None:
        """A bare step."""
        with self.arithmetic or nullcontext():
            self.train()

    def train(self) -> torch.Tensor:
        """The loss of one step."""
        return training_step(self.training, self.training.real_batch(next(self.batches)))

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take(self) -> None:
        """As at the end of a recorded step: rows leave the device and become frames."""
        frames = self.counts.take(0, 1.0)
        self._elements = sum(int(frame.rows.sum()) for frame in frames.values())

    def recorded(self) -> int:
        """Elements that the last recorded step counted."""
        return self._elements


def ampscope_contestants(session: Session) -> dict[str, Contestant]:
    """The three of the goals, then what is priced apart."""
    names = ModelMap(session.model)
    hooks, weights = HistogramHooks(names, session.counts), WeightObserver(names, session.counts)

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        session.training.scaler.on_gradients = weights.count_gradients
        try:
            with hooks, weights:
                yield
        finally:
            session.training.scaler.unobserved()

    def recorded(number: int) -> None:
        weights.start_step()
        hooks.start_step(number, active=True)
        session.step()
        hooks.end_step()
        session.take()

    def one_in_ten(number: int) -> None:
        if number == 0:
            session.training.scaler.on_gradients = weights.count_gradients
            recorded(number)
        else:
            session.training.scaler.unobserved()
            session.step()

    @contextlib.contextmanager
    def idle() -> Iterator[None]:
        with hooks, weights:
            yield

    return {
        "every layer, every step": Contestant(recorded, watching),
        "every layer, one step in ten": Contestant(one_in_ten, watching, steps=10),
        "hooks idle": Contestant(lambda number: session.step(), idle),
        "with weights, updates and store": _probe(session, Cadence(1, 0, 0)),
        "op trace": _trace(session, names),
        "fp32 shadow, its own step": _probe(session, Cadence(0, 0, 1)),
        "everything, shadow one in ten": _probe(session, Cadence(1, 1, 10), steps=10),
    }


def _trace(session: Session, names: ModelMap) -> Contestant:
    trace = OpTrace(names, executes=session.arithmetic)

    def step(_: int) -> None:
        with trace:
            session.train()
        trace.take()

    return Contestant(step)


def _probe(session: Session, cadence: Cadence, steps: int = 1) -> Contestant:
    """As a probe does it, records written to a store."""
    store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
    writer = RunWriter.create(store, session.spec)
    instruments = Instruments(session.training, cadence, writer, session.arithmetic)

    def step(number: int) -> None:
        batch = next(session.batches)
        instruments.start(number, batch, 1.0)
        with instruments.recording():
            training_step(session.training, session.training.real_batch(batch))
        instruments.finish(skipped=False)
        writer.flush_if_due()

    return Contestant(step, instruments.attached, steps)
