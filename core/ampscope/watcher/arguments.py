"""What a caller of `watch` gave, looked at: optimizers without wrappers, a scaler, a name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ampscope.errors import BadInput
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.step_hooks import plain_optimizer


def optimizers_of(given: Any) -> list[Optimizer]:
    """Raises BadInput for anything that is no optimizer."""
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found = [plain_optimizer(optimizer) for optimizer in several]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise BadInput(
                "watch() takes torch.optim.Optimizer objects or wrappers of them; it was given "
                f"one of type {type(optimizer).__name__}. Leave it out to have it found."
            )
    return found


def scaler_of(given: Any) -> Any:
    """Raises BadInput for anything that does not scale."""
    if given is not None and not all(
        callable(getattr(given, name, None)) for name in ("step", "unscale_", "get_scale")
    ):
        raise BadInput(
            f"watch() takes a torch.amp.GradScaler; it was given a {type(given).__name__}. "
            "Leave it out to have it found."
        )
    return given


def name_of(models: WatchedModels) -> str:
    """What the run is called when nobody says: the models and the script."""
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    kinds = "+".join(type(root.plain).__name__ for root in models.roots)
    return f"{kinds} in {script}" if script.endswith(".py") else kinds
