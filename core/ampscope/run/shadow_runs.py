"""Runs the fp32 shadow's own step at sampled steps, where the workload allows one.

Without a shadow, values lost in half precision cannot be told from those that were always zero; the
reason is kept as a sentence for the page that would have shown it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampscope.capture.failures import Failures
from ampscope.capture.model_map import ModelMap
from ampscope.capture.random_state import random_state_kept, remembered
from ampscope.capture.shadow import Shadow
from ampscope.run.training import Training, checked_loss
from ampscope.workloads.protocol import Batch

MOST_SKIPS = 100  # a search from 2^32 skips 20 steps; a run that skips more has shown enough
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class ShadowRuns:
    """One shadow every ``every`` steps; 0, or fp32 training, is none."""

    def __init__(
        self, training: Training, names: ModelMap, every: int, failures: Failures | None = None
    ) -> None:
        self.note = ""  # why there is no shadow although one was asked for
        self._failures = failures or Failures()
        self._training = training
        self._names = names
        self._remembered: Callable[[], None] | None = None
        self._skips = 0  # of which a shadow was run
        self._every = every if training.compute_format != "fp32" else 0
        if self._every > 0 and training.workload.step is not None:
            self._give_up("the workload has a training step of its own, which it cannot run")

    def run(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        """The shadow of this step, its twin already run; None when it is not sampled."""
        self._remembered = None
        if self._every <= 0:
            return None
        if step % self._every:
            # Should the scaler skip this step, the shadow runs it after all, as it was.
            self._remembered = remembered(self._training.model)
            return None
        return self._run(step, scale, batch)

    def run_skipped(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        """The shadow of a step that the scaler has just skipped, where none ran before it: whether
        fp32's gradients are as large. ``scale`` is what the gradients still carry."""
        put_back, self._remembered = self._remembered, None
        if put_back is None or self._skips >= MOST_SKIPS:
            return None
        self._skips += 1
        with random_state_kept(self._training.model):
            put_back()
            return self._run(step, scale, batch)

    def _run(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        training = self._training
        computes_in = _HALVES.get(training.compute_format)
        shadow = Shadow(self._names, step, scale, computes_in, self._failures)
        try:
            twin_batch = training.twin_batch(batch)
            shadow.run_twin(lambda model: checked_loss(training.workload.loss(model, twin_batch)))
        except Exception as error:  # whatever a copy of the user's model may raise: the run goes on
            self._give_up(f"a copy of the model in fp32 raised {type(error).__name__}")
            return None
        return shadow

    def _give_up(self, reason: str) -> None:
        self._every = 0
        self.note = (
            f"The fp32 shadow is off: {reason}. Lost values cannot be told from zeros in this run."
        )
