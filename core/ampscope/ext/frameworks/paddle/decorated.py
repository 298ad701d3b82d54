"""``paddle.amp.decorate(level="O2")`` on a CPU: parameters that hold half-precision values.

Paddle leaves a CPU's parameters alone. Here those that it would cast on a GPU, by its own rule
(need_keep_fp32), are rounded and marked, and optimizers get fp32 master weights unless
``master_weight=False``. A parameter's gradient is half then, also after GradScaler divided it by
the scale, which can bring it to zero; with ``master_grad=True`` it is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from ampscope.ext.frameworks.paddle.regions import AUTO_CAST, HALF
from ampscope.ext.frameworks.paddle.rounding import MARK, round_memory
from ampscope.ext.frameworks.paddle.values import is_floating, memory, names_of
from ampscope.patches import Patches

_Scaler: Any = paddle.amp.AmpScaler
_Optimizer: Any = paddle.optimizer.Optimizer
# Their state is fp32 whatever the parameter (`acc_dtype` in paddle/optimizer/*.py of 3.3.1);
# that of all others has the parameter's dtype where there are no master weights.
STATE_IN_FP32 = ("Adam", "AdamW", "Adamax", "Lamb", "NAdam", "RAdam")


def keeps_half_state(optimizer: Any) -> bool:
    """Whether the optimizer's state has the dtype of a half-precision parameter."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    return not optimizer._multi_precision and kinds.isdisjoint(STATE_IN_FP32)


class HalfParameters:
    """Marked parameters and their master weights; ``half`` replaces the script's own dtype."""

    def __init__(self, half: str = "") -> None:
        self._half = half
        self._masters: dict[int, NDArray[np.float32]] = {}
        self._decorated: list[Any] = []
        self.master_grad = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """decorate, optimizers and unscaling as on a GPU. On exit parameters keep their values and
        lose their marks."""
        with Patches() as patches:
            for module, name in list(names_of(AUTO_CAST.amp_decorate)):
                patches.replace(module, name, lambda _: self._decorate)
            patches.wrap(_Optimizer, "_apply_optimize", self._applied)
            patches.wrap(_Scaler, "_unscale", self._unscaled)
            try:
                yield
            finally:
                for parameter in self._decorated:
                    parameter.__dict__.pop(MARK, None)

    def _applied(
        self, original: Any, optimizer: Any, loss: Any, startup_program: Any, params_grads: Any,
        *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        pairs = params_grads["params"] if isinstance(params_grads, dict) else params_grads
        half = [parameter for parameter, _ in pairs if hasattr(parameter, MARK)]
        self._before(optimizer, half)
        result = original(optimizer, loss, startup_program, params_grads, *rest, **kwargs)
        self._after(optimizer, half)
        return result

    def _unscaled(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        result = original(scaler, optimizer)
        if not self.master_grad:
            _round_gradients(optimizer)
        return result

    def _decorate(
        self,
        models: Any,
        optimizers: Any = None,
        level: str = "O1",
        dtype: str = "float16",
        master_weight: bool | None = None,
        save_dtype: str | None = None,
        master_grad: bool = False,
        excluded_layers: Any = None,
    ) -> Any:
        if level not in ("O1", "O2"):
            raise ValueError("level should be O1 or O2")  # as Paddle raises
        if level == "O2" and self._half != "fp32":
            half = self._half or HALF[dtype]
            roots = models if isinstance(models, list) else [models]
            AUTO_CAST.check_models(roots)
            AUTO_CAST.set_excluded_layers(roots, excluded_layers)
            for layer in (part for root in roots for part in root.sublayers(include_self=True)):
                if not AUTO_CAST.need_keep_fp32(layer, dtype):
                    self._cast(layer, half)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                if optimizer is not None:
                    AUTO_CAST._set_multi_precision(optimizer, master_weight is not False)
            self.master_grad = master_grad
        return models if optimizers is None else (models, optimizers)

    def _cast(self, layer: Any, half: str) -> None:
        own = [*layer._parameters.values(), *layer._buffers.values()]
        for tensor in own:
            numbers = memory(tensor) if tensor is not None and is_floating(tensor) else None
            if numbers is not None and not hasattr(tensor, MARK):
                # A GPU makes master weights of the rounded parameter, and so does this.
                round_memory(numbers, half)
                setattr(tensor, MARK, half)
                self._decorated.append(tensor)

    def _before(self, optimizer: Any, half: list[Any]) -> None:
        """The optimizer works on the master weights."""
        if not optimizer._multi_precision:
            return
        for parameter in half:
            numbers, master = memory(parameter), self._masters.get(id(parameter))
            if numbers is not None and master is not None:
                numbers[:] = master

    def _after(self, optimizer: Any, half: list[Any]) -> None:
        for parameter in half:
            numbers = memory(parameter)
            if numbers is None:
                continue
            if optimizer._multi_precision:
                self._masters[id(parameter)] = numbers.copy()
            round_memory(numbers, getattr(parameter, MARK))
        if half and keeps_half_state(optimizer):
            marks = {parameter.name: getattr(parameter, MARK) for parameter in half}
            for kind, by_name in optimizer._accumulators.items():
                for name, state in by_name.items():
                    numbers = memory(state) if name in marks and "pow" not in kind else None
                    if numbers is not None:
                        round_memory(numbers, marks[name])


def _round_gradients(optimizer: Any) -> None:
    groups = optimizer._parameter_list or []
    for part in groups:
        for parameter in part["params"] if isinstance(part, dict) else [part]:
            gradient = parameter._grad_ivar() if hasattr(parameter, MARK) else None
            numbers = memory(gradient) if gradient is not None else None
            if numbers is not None:
                round_memory(numbers, getattr(parameter, MARK))
