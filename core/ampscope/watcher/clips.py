"""Instrument: the training's own `torch.nn.utils.clip_grad_norm_`, so that a step has both norms.

Without a scaler a clip comes before the gradients are read, and the norm before it is the one that
the clip itself took. After ``scaler.unscale_`` it comes behind the reading, and the limit alone
says what was left of the norm. Only clips by the 2-norm, of all gradients that the optimizer steps,
are taken note of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from ampscope.capture.tensors import is_traced
from ampscope.patches import Patches
from ampscope.watcher.guard import Guard


@dataclass(frozen=True, slots=True)
class Clip:
    """One call: the 2-norm that it found (a tensor, perhaps still to be computed) and its limit."""

    norm: Tensor
    limit: float
    parameters: frozenset[int]  # their ids


class WatchedClips:
    """Clips of the threads that train, since the last :meth:`take`."""

    def __init__(self, threads: set[int], guard: Guard) -> None:
        self._threads = threads
        self._guard = guard
        self._patches = Patches()
        self._norm_type = 2.0  # of the norm that was taken last
        self._last: Clip | None = None

    def __enter__(self) -> WatchedClips:
        # What the public function calls: a script may have imported that before the watch began.
        for name, call in (("_get_total_norm", self._norm), ("_clip_grads_with_norm_", self._clip)):
            if hasattr(clip_grad, name):
                self._patches.wrap(clip_grad, name, call)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        self._last = None

    def take(self, parameters: Iterable[Tensor]) -> Clip | None:
        """The last clip, where it was of all these ``parameters``."""
        clip, self._last = self._last, None
        if clip is None or any(id(p) not in clip.parameters for p in parameters):
            return None
        return clip

    def _norm(
        self, original: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_traced():
            self._norm_type = norm_type
        return original(tensors, norm_type, *args, **kwargs)

    def _clip(
        self, original: Any, parameters: Any, limit: Any, norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_traced():
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._guard.call(self._note, parameters, limit, norm)
        return original(parameters, limit, norm, *args, **kwargs)

    def _note(self, parameters: list[Tensor], limit: Any, norm: Any) -> None:
        here = threading.get_ident() in self._threads
        if here and self._norm_type == 2.0 and type(norm) is Tensor and norm.numel() == 1:
            self._last = Clip(norm.detach(), float(limit), frozenset(map(id, parameters)))
