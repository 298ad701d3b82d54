"""What a Paddle optimizer holds, and what a GradScaler says of itself."""

from __future__ import annotations

from typing import Any

from ampscope.ext.frameworks.paddle.decorated import keeps_half_state
from ampscope.ext.frameworks.paddle.rounding import MARK
from ampscope.ext.frameworks.paddle.values import is_floating, view
from ampscope.ext.frameworks.tensors import Values

# Averages of squares; the denominator of the update is their root plus epsilon.
_SECOND_MOMENTS = ("moment2", "mean_square", "_avg_squared_grad")


def parameters_of(optimizer: Any) -> list[Any]:
    """Parameters that it trains, of all groups."""
    found: list[Any] = []
    for part in optimizer._parameter_list or []:
        found += part["params"] if isinstance(part, dict) else [part]
    return [parameter for parameter in found if not parameter.stop_gradient]


def state_of(optimizer: Any, names: dict[int, str], parameters: list[Any]) -> dict[str, Values]:
    """Accumulators by "kind.parameter", in place. Powers of the betas are left out: one number
    each, and no state of the training."""
    half = keeps_half_state(optimizer)
    by_name = {parameter.name: parameter for parameter in parameters}
    found = {}
    for kind, accumulators in optimizer._accumulators.items():
        for name, tensor in accumulators.items():
            parameter = by_name.get(name)
            if parameter is not None and "pow" not in kind and is_floating(tensor):
                label = getattr(parameter, MARK, "") if half else ""
                found[f"{kind}.{names[id(parameter)]}"] = view(tensor, label)
    return found


def second_moments(state: dict[str, Values]) -> tuple[str, ...]:
    """Names of those in ``state`` that average squared gradients."""
    return tuple(name for name in state if name.partition(".")[0] in _SECOND_MOMENTS)


def eps_of(optimizer: Any) -> float | None:
    """Epsilon; None where the optimizer has none or keeps it in a tensor."""
    eps = getattr(optimizer, "_epsilon", None)
    return float(eps) if isinstance(eps, int | float) else None


def growth_counter(scaler: Any) -> int:
    """Finite steps since the last growth, after this step. ``scaler.minimize`` has updated already;
    with ``scaler.step`` the update is still to come, and follows Paddle's rule."""
    if scaler._optimizer_states == {} or not scaler._use_dynamic_loss_scaling:
        return int(scaler._incr_count)
    if scaler._cache_found_inf:
        return 0
    return int((scaler._incr_count + 1) % scaler._incr_every_n_steps)
