"""What a caller of `watch` gave, looked at: models by name, optimizers, a scaler, a name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampscope.errors import BadInput
from ampscope.watcher.models import WatchedModels, plain_module
from ampscope.watcher.step_hooks import plain_optimizer

_OF_A_SCALER = ("scale", "step", "unscale_", "update", "get_scale", "is_enabled")


def named(models: object) -> dict[str, nn.Module]:
    """The models that a caller gave, by name. Raises BadInput for anything that is not a model."""
    if isinstance(models, Mapping):
        pairs = [(str(name), model) for name, model in models.items()]
    elif isinstance(models, list | tuple):
        names = _class_names([type(plain_module(model)).__name__ for model in models])
        pairs = list(zip(names, models, strict=True))
    else:
        pairs = [("model", models)]
    for name, model in pairs:
        if not isinstance(model, nn.Module):
            raise BadInput(
                f"watch() takes a torch.nn.Module, a list of them or a dict of them; {name!r} is "
                f"of type {type(model).__name__}."
            )
    if not pairs:
        raise BadInput("watch() was given no model.")
    return dict(pairs)


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


def scalers_of(given: Any) -> list[Any]:
    """Raises BadInput for anything that does not scale."""
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for scaler in several:
        if not all(callable(getattr(scaler, name, None)) for name in _OF_A_SCALER):
            raise BadInput(
                "watch() takes torch.amp.GradScaler objects; it was given one of type "
                f"{type(scaler).__name__}. Leave it out to have it found."
            )
    return list(several)


def name_of(models: WatchedModels) -> str:
    """What the run is called when nobody says: the models and the script."""
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    kinds = "+".join(type(root.plain).__name__ for root in models.roots)
    return f"{kinds} in {script}" if script.endswith(".py") else kinds


def _class_names(names: list[str]) -> list[str]:
    """Each class's name, numbered where several models have it."""
    return [
        name if names.count(name) == 1 else f"{name}{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]
