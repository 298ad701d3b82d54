"""What a framework's run has measured and the store has not got yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampscope.records import Frame, ModuleRecord, NonFiniteRecord, OpRecord, StepRecord
from ampscope.store.writer import RunWriter


@dataclass(slots=True)
class Measured:
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
