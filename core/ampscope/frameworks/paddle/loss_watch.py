"""The loss of a step: what a backward pass began with, without the scaler's factor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import paddle

from ampscope.frameworks.paddle.patching import Replacement
from ampscope.frameworks.paddle.rounding import dtype_name
from ampscope.frameworks.paddle.values import NAMES

_AmpScaler: Any = paddle.amp.AmpScaler
_RAW = "_ampscope_loss"  # attribute of a scaled loss: the loss


class LossWatch:
    """The last loss, and how many backward passes there were since the last step."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.dtype = "fp32"
        self.scaled = False
        self.backwards = 0
        self._factor: float | None = None  # of a loss that was scaled and not yet propagated

    def replacements(self) -> Iterator[Replacement]:
        """For ``patching.replaced``."""
        yield _AmpScaler, "scale", self._scale(_AmpScaler.scale)
        yield paddle.Tensor, "backward", self._backward(paddle.Tensor.backward)
        several = self._backward_of_several(paddle.autograd.backward)
        yield paddle.autograd, "backward", several

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def scale(scaler: Any, loss: Any) -> Any:
            scaled = original(scaler, loss)
            if scaled is not loss:
                setattr(scaled, _RAW, loss)
                self._factor = float(scaler._scale)
            return scaled

        return scale

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._began(tensor)
            return original(tensor, *args, **kwargs)

        return backward

    def _backward_of_several(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
            one = given[0] if len(given) == 1 else None
            self._began(one if grad_tensors is None else None)
            return original(tensors, grad_tensors, *args, **kwargs)

        return backward

    def _began(self, tensor: Any) -> None:
        """``tensor`` is None where several begin it at once, or with gradients of their own."""
        raw = getattr(tensor, _RAW, None)
        loss = tensor if raw is None else raw
        if loss is not None and loss.dtype in NAMES and len(loss.shape) <= 1 and loss.size == 1:
            # A scaled loss that was worked on since (divided, for accumulation) is unscaled.
            factor = self._factor if raw is None and self._factor else 1.0
            self.value, self.dtype = float(loss) / factor, dtype_name(loss, NAMES)
            self.scaled = self._factor is not None
        elif not self.backwards:  # the loss of the step before is none of this one
            self.value, self.scaled = None, self._factor is not None
        self._factor = None
        self.backwards += 1
