"""Transformers: ``Trainer(…, callbacks=[AmpscopeCallback()])``.

The scaler is the one that Accelerate gave to the trainer's optimizer. Losses are seen where the
trainer calls backward: each step's own, where ``on_log`` has the mean since the last log, after
``logging_nan_inf_filter`` has taken out the NaN that one is looking for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampscope.capture.user_objects import attribute
from ampscope.integrations import TrainerWatch

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        'Transformers is not installed: pip install "ampscope[transformers]"'
    ) from None


class AmpscopeCallback(TrainerWatch, TrainerCallback):
    """Watches ``trainer.train()``. Options, and more of them, are those of `ampscope.watch`; the
    policy ``stop`` ends the training after the step that raised an alarm
    (``control.should_training_stop``)."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """The model and its optimizer are ready."""
        self._start(model, optimizer, attribute(optimizer, "scaler"))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The trainer looks at its control next."""
        control.should_training_stop |= self._should_stop

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """With ``guard=True``: a healthy checkpoint is kept from rotation."""
        if self.run is not None and self._options.get("guard") and state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                self.run.checkpoint(folder, keep=True)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Not reached when the training raises: then the next one, or the end of the process,
        closes the watch."""
        self._close()
