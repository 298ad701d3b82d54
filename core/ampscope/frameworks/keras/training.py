"""What the instruments of one watched training share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from ampscope.frameworks.keras.layer_paths import LayerPaths
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings

T = TypeVar("T")
# Keras 3.15, LossScaleOptimizer._tf_apply: `finite` is that of the first replica, and gradients are
# summed over replicas only after it. Measured: Inf in the second replica reaches the weights.
FIRST_REPLICA = (
    "Keras' LossScaleOptimizer looks at the gradients of the first replica alone: an overflow in "
    "another one is not skipped and reaches the weights."
)

MAX_KEPT = 20_000  # outputs whose gradients never came: forward passes under a tape for their sake
_Output = tuple[str, Any]  # of a layer by its path


@dataclass(slots=True)
class Backward:
    """One call of ``GradientTape.gradient``."""

    loss: float | None
    loss_dtype: str
    scaled: bool  # the loss had gone through ``scale_loss``
    sources: frozenset[int]  # ids of the variables
    count: int = 1  # calls for the same variables since their last step
    unscaled_by: float | None = None  # ampscope's own scaler divided the gradients by this


@dataclass(slots=True)
class Training:
    """One per ``watching``."""

    recorder: Recorder
    settings: Settings
    line: Callable[[], str] = lambda: ""  # the script's own line that is running
    paths: LayerPaths = field(default_factory=LayerPaths)
    notes: list[str] = field(default_factory=list)
    outputs: list[_Output] = field(default_factory=list)  # of layers, under a tape
    unreached: list[_Output] | None = None  # of these, once a tape was asked
    backwards: list[Backward] = field(default_factory=list)
    own_s: float = 0.0  # of the instruments, since the last step
    began: float = field(default_factory=time.perf_counter)
    quiet: int = 0  # > 0: our own calls of layers, not to be recorded

    def note(self, sentence: str) -> None:
        """Once each."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def keep_outputs(self, path: str, tensors: list[Any]) -> None:
        """For every ``GradientTape.gradient`` until the next forward pass: of two tapes side by
        side each has its own."""
        if self.unreached is not None or len(self.outputs) >= MAX_KEPT:
            self.outputs, self.unreached = [], None
        self.outputs += [(path, t) for t in tensors]

    def take_outputs(self) -> tuple[list[_Output], list[_Output]]:
        """(all, those that no tape has reached yet); a layer that a backward pass calls anew has
        its outputs to itself."""
        outputs, unreached = self.outputs, self.unreached
        self.outputs, self.unreached = [], None
        return outputs, outputs if unreached is None else unreached

    def give_back(
        self, outputs: list[_Output], unreached: list[_Output], gradients: list[Any]
    ) -> None:
        """After a tape was asked; its gradient is None where the target does not depend on one."""
        missed = {id(t) for (_, t), g in zip(outputs, gradients, strict=True) if g is None}
        self.outputs = outputs
        self.unreached = [(path, t) for path, t in unreached if id(t) in missed]

    def forget_reached(self) -> None:
        """An optimizer steps: activations are not held for its time but for another tape."""
        if self.unreached is not None:
            self.outputs = self.unreached

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def quietly(self, look: Callable[[], T]) -> T:
        """What ``look`` returns; nothing of it is recorded."""
        with self.silence():
            return look()

    @property
    def is_watching(self) -> bool:
        """In eager code, in the first replica, and not in a call of our own."""
        return not self.quiet and tf.executing_eagerly() and replica() == 0


def replica() -> int:
    """Number of the replica whose code is running; 0 without a strategy, -1 between replicas."""
    if not tf.distribute.has_strategy():
        return 0
    context = tf.distribute.get_replica_context()
    if context is None:
        return -1
    number = context.replica_id_in_sync_group
    return int(number)


def replicas() -> int:
    """How many there are."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)
