"""What a Paddle GradScaler says of itself."""

from __future__ import annotations

from typing import Any


def growth_counter(scaler: Any) -> int:
    """Finite steps since the last growth, after this step. ``scaler.minimize`` has updated already;
    with ``scaler.step`` the update is still to come, and follows Paddle's rule."""
    if scaler._optimizer_states == {} or not scaler._use_dynamic_loss_scaling:
        return int(scaler._incr_count)
    if scaler._cache_found_inf:
        return 0
    return int((scaler._incr_count + 1) % scaler._incr_every_n_steps)
