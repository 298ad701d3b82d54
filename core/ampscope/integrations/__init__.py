"""Callbacks for Lightning, Transformers and Accelerate: thin shells over `ampscope.watch`.

Each module imports its own library, and nothing else in ampscope does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ampscope.capture.user_objects import torch_optimizer
from ampscope.records import Event
from ampscope.watcher import Watch, watch


class TrainerWatch:
    """What the callbacks share: one watch from the start of a training to its end, whatever ends
    it. Options, and ``more`` of them, are those of `ampscope.watch`.

    A trainer owns its loop, so the policy ``stop`` raises nothing inside it: `Watch.should_stop` is
    set, and the callback asks its trainer to stop in the trainer's own way.
    """

    def __init__(
        self,
        every: int | None = None,
        store: str | Path | None = None,
        name: str | None = None,
        on_alarm: Callable[[Event], None] | None = None,
        policy: str | Mapping[str, str] = "warn",
        **more: Any,
    ) -> None:
        super().__init__()
        self.run: Watch | None = None  # its ``id``, ``store``, ``alarms``; None before a training
        self._options = more | {
            "every": every,
            "store": store,
            "name": name,
            "on_alarm": on_alarm,
            "policy": policy,
        }

    @property
    def _should_stop(self) -> bool:
        """An alarm under the policy ``stop``, or a user's ``ampscope runs cancel``."""
        return self.run is not None and self.run.should_stop

    def _start(self, model: Any, optimizer: Any, scaler: Any) -> None:
        """Watch a training. One that never said that it ended (it raised) is closed first."""
        self._close()
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        # The trainer chose them: where one holds none of torch's they are found by what they step.
        is_known = all(torch_optimizer(one) is not None for one in several)
        self.run = watch(model, optimizer if is_known else None, scaler, **self._options)

    def _close(self, error: BaseException | None = None) -> None:
        """End the watch, if one goes on; ``error`` is what ended the training."""
        if self.run is not None:
            self.run.close(error)
