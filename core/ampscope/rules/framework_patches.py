"""Fixes in the words of Keras and Paddle: rules write PyTorch's code, and a user pastes his own.

Keras 3: keras.optimizers.LossScaleOptimizer, keras.config.set_dtype_policy
(keras.io/api/mixed_precision).
Paddle 3: paddle.amp.auto_cast, decorate and GradScaler (paddlepaddle.org.cn API).
"""

from __future__ import annotations

import dataclasses
import re

from ampscope.control import Control, ControlPart
from ampscope.rules.verdict import Fix, Status, Verdict

_KERAS = {
    "add_scaler": (
        "optimizer = keras.optimizers.LossScaleOptimizer(optimizer)\n"
        "# in a loop of your own: optimizer.scale_loss(loss) before tape.gradient\n"
    ),
    "change_scale": "optimizer = keras.optimizers.LossScaleOptimizer(optimizer{init})\n",
    "fp32_module": (
        'layer = keras.layers.Dense(units, dtype="float32")  # of each layer that is named\n'
    ),
    "use_bf16": 'keras.config.set_dtype_policy("mixed_bfloat16")\n',
    "fp32_params": 'keras.config.set_dtype_policy("mixed_float16")  # weights stay in float32\n',
    "lower_lr": "optimizer.learning_rate = optimizer.learning_rate / 10\n",
    "fix_data": "assert np.isfinite(x).all()  # and find out where it comes from\n",
    "fix_init": "layer = keras.layers.Dense(units, kernel_initializer='glorot_uniform')\n",
    "rewrite_op": "loss = keras.ops.mean(losses)  # a mean, not a sum\n",
}
_KERAS["fp32_optimizer_state"] = _KERAS["fp32_params"]
_PADDLE = {
    "add_scaler": (
        "scaler = paddle.amp.GradScaler()\n"
        "scaled = scaler.scale(loss)\nscaled.backward()\nscaler.minimize(optimizer, scaled)\n"
    ),
    "change_scale": "scaler = paddle.amp.GradScaler({init})\n",
    "fp32_module": (
        "with paddle.amp.auto_cast(enable=False):\n"
        '    y = layer(x.astype("float32"))  # each layer that is named\n'
    ),
    "use_bf16": 'with paddle.amp.auto_cast(dtype="bfloat16"):\n    ...  # and no GradScaler\n',
    "fp32_params": (
        'model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", master_weight=True)\n'
    ),
    "lower_lr": "optimizer.set_lr(optimizer.get_lr() / 10)\n",
    "fix_data": "assert bool(paddle.isfinite(x).all())  # and find out where it comes from\n",
    "fix_init": "paddle.nn.initializer.XavierUniform()(parameter)\n",
    "rewrite_op": "loss = losses.mean()  # a mean, not a sum\n",
}
_PADDLE["fp32_optimizer_state"] = _PADDLE["fp32_params"]
# The scaler's argument for the value that it starts with.
INITIAL_SCALE = {
    "torch": "init_scale", "keras": "initial_scale", "paddle": "init_loss_scaling"
}  # fmt: skip
_CODE = {"keras": _KERAS, "paddle": _PADDLE}


def in_words_of(framework: str, verdict: Verdict) -> Verdict:
    """The verdict with a patch for that framework; PyTorch's verdicts are left alone."""
    if framework not in _CODE or verdict.status is not Status.FOUND:
        return verdict
    fix = dataclasses.replace(verdict.fix, framework=framework)
    return dataclasses.replace(verdict, fix=dataclasses.replace(fix, patch=patch(fix)))


def patch(fix: Fix) -> str:
    """Code to paste for a kind of fix; "" where there is none to give."""
    code = _CODE[fix.framework].get(fix.kind, "")
    tried = Control(fix.controls[0] if fix.controls else "").first
    if tried.name == "fp32_modules":
        code = f"# {', '.join(tried.values)}\n{code}"
    return code.replace("{init}", _initial_scale(fix.framework, tried))


def _initial_scale(framework: str, tried: ControlPart) -> str:
    """The argument that sets the scale that was tried; "" for the framework's default."""
    number = re.match(r"[0-9.e+]+", tried.value)
    is_scale = tried.name in ("scale", "init_scale")
    if not (is_scale and number):
        return ""
    comma = ", " if framework == "keras" else ""  # the optimizer stands before it
    return f"{comma}{INITIAL_SCALE[framework]}={number[0]}"
