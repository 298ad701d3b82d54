"""Runs the fp32 shadow's own step at sampled steps, where the workload allows one.

Without a shadow, values lost in half precision cannot be told from those that were always zero; the
reason is kept as a sentence for the page that would have shown it.
"""

from __future__ import annotations

import torch

from ampscope.capture.failures import Failures
from ampscope.capture.model_map import ModelMap
from ampscope.capture.shadow import Shadow
from ampscope.run.training import Training, checked_loss
from ampscope.workloads.protocol import Batch

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
        self._every = every if training.compute_format != "fp32" else 0
        if self._every > 0 and training.workload.step is not None:
            self._give_up("the workload has a training step of its own, which it cannot run")

    def run(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        """The shadow of this step, its twin already run; None when it is not sampled."""
        if self._every <= 0 or step % self._every:
            return None
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
