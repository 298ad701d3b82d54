"""Callbacks for Lightning, Transformers and Accelerate: thin shells over `ampscope.watch`.

Each module imports its own library, and nothing else in ampscope does.
"""

from __future__ import annotations

from typing import Any

from ampscope.watcher import Watch, watch

# What the callbacks share: one watch from the start of a training to its end, whatever ends it.
#
# A trainer owns its loop, so the policy ``stop`` raises nothing inside it: `Watch.should_stop` is
# set, and the callback asks its trainer to stop in the trainer's own way.


class TrainerWatch:
    """``options`` are those of `ampscope.watch`."""

    def __init__(self, **options: Any) -> None:
        self.run: Watch | None = None
        self._options = options

    @property
    def should_stop(self) -> bool:
        """An alarm under the policy ``stop``, or a user's ``ampscope runs cancel``."""
        return self.run is not None and self.run.should_stop

    def start(self, model: Any, optimizer: Any, scaler: Any) -> None:
        """Watch a training. One that never said that it ended (it raised) is closed first."""
        self.close()
        self.run = watch(model, optimizer, scaler, **self._options)

    def close(self, error: BaseException | None = None) -> None:
        """End the watch, if one goes on; ``error`` is what ended the training."""
        if self.run is not None:
            self.run.close(error)
