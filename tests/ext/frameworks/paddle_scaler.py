"""Drives Paddle's real GradScaler; run by a Python that has Paddle, which need not have ampscope.

Reads JSON from standard input: a list of {"settings": {…}, "found_inf": "0110…"}. Writes the scale
after every step, for each, as JSON. AMP is off on a CPU: while the scaler is made, the place that
it asks for says that it is a GPU; everything after that is Paddle's own code.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from typing import Any

import paddle
from paddle.amp import grad_scaler


class _Place:
    def is_gpu_place(self) -> bool:
        return True


class _Tracer:
    _expected_place = _Place()


def made(settings: dict[str, Any]) -> Any:
    """A scaler that is enabled."""
    real = grad_scaler._dygraph_tracer
    grad_scaler._dygraph_tracer = _Tracer
    try:
        return paddle.amp.GradScaler(
            init_loss_scaling=settings["initial_scale"],
            incr_ratio=settings["growth_factor"],
            decr_ratio=settings["backoff_factor"],
            incr_every_n_steps=settings["growth_interval"],
            decr_every_n_nan_or_inf=settings["backoff_after"],
        )
    finally:
        grad_scaler._dygraph_tracer = real


def driven(settings: dict[str, Any], found_inf: str) -> list[float]:
    """Scale after every step."""
    weight = paddle.create_parameter([1], "float32")
    optimizer = paddle.optimizer.SGD(learning_rate=0.0, parameters=[weight])
    scaler, scales = made(settings), []
    for found in found_inf:
        weight.grad = paddle.to_tensor([math.inf if found == "1" else 0.0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler._scale))
    return scales


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # Paddle prints a line at every Inf
        answers = [driven(job["settings"], job["found_inf"]) for job in json.load(sys.stdin)]
    print(json.dumps({"version": paddle.__version__, "scales": answers}))
