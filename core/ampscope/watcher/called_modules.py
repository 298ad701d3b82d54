"""A module whose calls are kept, and which of its buffers a call changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampscope.capture.tensors import has_own_memory, plain
from ampscope.watcher.models import Root


class CalledModule:
    """A model, or a direct child of one, at its dotted ``path`` below the model."""

    def __init__(self, root: Root, path: str, module: nn.Module) -> None:
        self.root, self.path, self.module = root, path, module
        self._plain = root.plain if not path else module
        self._changing: set[str] | None = None  # unknown before the first call

    @property
    def device(self) -> torch.device:
        """Where it is now; a part without parameters is where its model is."""
        found = (p.device for m in (self.module, self.root.plain) for p in m.parameters())
        return next(found, torch.device("cpu"))

    def copies(self) -> dict[str, Tensor]:
        """Copies of the buffers that a call changes; of all, until that is known."""
        if self._changing is not None and not self._changing:
            return {}
        return {
            name: buffer.detach().clone()
            for name, buffer in self._plain.named_buffers()
            if (self._changing is None or name in self._changing) and has_own_memory(buffer)
        }

    def learn(self, before: dict[str, Tensor]) -> None:
        """After the first call in training: which buffers have other values now."""
        if self._changing is not None:
            return
        now = dict(self._plain.named_buffers())
        changed = {n for n, old in before.items() if n in now and not _same(old, now[n])}
        if self.module.training:
            self._changing = changed


def _same(first: Tensor, second: Tensor) -> bool:
    """Equal, NaN at the same places included."""
    if first.shape != second.shape or not has_own_memory(second):
        return False
    one, other = plain(first), plain(second)
    return bool(((one == other) | ((one != one) & (other != other))).all())
