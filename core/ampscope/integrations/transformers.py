"""Transformers: ``Trainer(…, callbacks=[AmpscopeCallback()])``.

The scaler is the one that Accelerate gave to the trainer's optimizer. Losses are seen where the
trainer calls backward: each step's own, where ``on_log`` has the mean since the last log, after
``logging_nan_inf_filter`` has taken out the NaN that one is looking for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ampscope.integrations import TrainerWatch
from ampscope.records import Event
from ampscope.watcher import Watch

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        'Transformers is not installed: pip install "ampscope[transformers]"'
    ) from None


class AmpscopeCallback(TrainerCallback):
    """Watches ``trainer.train()``. Options, and more of them, are those of `ampscope.watch`; the
    policy ``stop`` ends the training after the step that raised an alarm
    (``control.should_training_stop``)."""

    def __init__(
        self,
        every: int | None = None,
        store: str | Path | None = None,
        name: str | None = None,
        on_alarm: Callable[[Event], None] | None = None,
        policy: str | Mapping[str, str] = "warn",
        **more: Any,
    ) -> None:
        self._watch = TrainerWatch(
            every=every, store=store, name=name, on_alarm=on_alarm, policy=policy, **more
        )

    @property
    def run(self) -> Watch | None:
        """The watch: its ``id``, ``store`` and ``alarms``. None before the first training."""
        return self._watch.run

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
        self._watch.start(model, optimizer, getattr(optimizer, "scaler", None))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The trainer looks at its control next."""
        control.should_training_stop |= self._watch.should_stop

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Not reached when the training raises: then the next one, or the end of the process,
        closes the watch."""
        self._watch.close()
