"""Accelerate: ``with watch(accelerator, model, optimizer): train()``, after ``prepare``.

The scaler is the accelerator's own (None without fp16). Accelerate's wrapper of the optimizer, and
those round the model (DistributedDataParallel, torch.compile), are looked through by
`ampscope.watch` itself.
"""

from __future__ import annotations

from typing import Any

from ampscope.watcher import Watch
from ampscope.watcher import watch as watch_training

try:
    from accelerate import Accelerator
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        'Accelerate is not installed: pip install "ampscope[accelerate]"'
    ) from None


def watch(accelerator: Accelerator, model: Any, optimizer: Any = None, **options: Any) -> Watch:
    """`ampscope.watch` for what ``accelerator.prepare`` gave back. ``model`` and ``optimizer`` may
    be lists; ``options`` are those of `ampscope.watch`."""
    return watch_training(model, optimizer, accelerator.scaler, **options)
