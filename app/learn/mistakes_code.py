"""The right lines for each of lesson 13's mistakes, in three frameworks."""

from __future__ import annotations

from collections.abc import Mapping

_STEP = """
with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
"""
_PADDLE_STEP = """
with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
"""
_KERAS = """
keras.mixed_precision.set_global_policy("mixed_float16")
"""
_END = _PADDLE_END = "scaler.step(optimizer)\nscaler.update()\n"

_CODE: Mapping[str, tuple[str, str, str]] = {
    "cast_by_hand": (
        f"model = Net().to('cuda')                        # fp32: no half()\n{_STEP}{_END}",
        f"model = Net()                                   # fp32\n{_PADDLE_STEP}{_PADDLE_END}",
        f"{_KERAS}model = build_model()                           # casts by itself",
    ),
    "no_scaler": (
        f"scaler = torch.amp.GradScaler('cuda')\n{_STEP}{_END}",
        f"scaler = paddle.amp.GradScaler()\n{_PADDLE_STEP}{_PADDLE_END}",
        f"{_KERAS}model.compile(optimizer='adam', loss=loss_fn)   # scales by itself",
    ),
    "clip_before_unscale": (
        f"{_STEP}scaler.unscale_(optimizer)                      # first\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{_END}",
        f"{_PADDLE_STEP}scaler.unscale_(optimizer)\n"
        f"paddle.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{_PADDLE_END}",
        f"{_KERAS}optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.0)  # after unscaling",
    ),
    "unscale_each_micro_batch": (
        "for inputs, targets in micro_batches:\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = loss_fn(model(inputs), targets) / len(micro_batches)\n"
        "    scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)                      # once, when all are in\n" + _END,
        "for inputs, targets in micro_batches:\n"
        "    with paddle.amp.auto_cast(dtype='float16'):\n"
        "        loss = loss_fn(model(inputs), targets) / len(micro_batches)\n"
        "    scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)\n" + _PADDLE_END,
        f"{_KERAS}optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)",
    ),
    "scaler_state_not_saved": (
        "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(),\n"
        "            'scaler': scaler.state_dict()}, path)\n"
        "scaler.load_state_dict(torch.load(path)['scaler'])",
        "paddle.save(scaler.state_dict(), 'scaler.pdparams')\n"
        "scaler.load_state_dict(paddle.load('scaler.pdparams'))",
        "model.save('model.keras')                       # with the optimizer, its scale included",
    ),
    "amp_in_evaluation": (
        "right = torch.zeros((), dtype=torch.float32)    # or an integer\n"
        "with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n"
        "    logits = model(inputs)\n"
        "right += (logits.argmax(1) == targets).sum()",
        "right = paddle.zeros([], dtype='float32')\n"
        "with paddle.no_grad(), paddle.amp.auto_cast(dtype='float16'):\n"
        "    logits = model(inputs)\n"
        "right += (logits.argmax(1) == targets).astype('float32').sum()",
        f"{_KERAS}model.evaluate(inputs, targets)                 # metrics are kept in fp32",
    ),
    "bce_loss": (
        "criterion = nn.BCEWithLogitsLoss()              # the model ends in logits\n" + _STEP,
        "criterion = paddle.nn.BCEWithLogitsLoss()\n" + _PADDLE_STEP,
        f"{_KERAS}loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)\n"
        "outputs = keras.layers.Dense(1, dtype='float32')(hidden)",
    ),
    "scaler_for_bf16": (
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "    loss = loss_fn(model(inputs), targets)\n"
        "loss.backward()                                 # no scaler\n"
        "optimizer.step()",
        "with paddle.amp.auto_cast(dtype='bfloat16'):\n"
        "    loss = loss_fn(model(inputs), targets)\n"
        "loss.backward()\n"
        "optimizer.step()",
        "keras.mixed_precision.set_global_policy('mixed_bfloat16')   # no loss scaling",
    ),
}


def of(mistake: str) -> Mapping[str, str]:
    """By framework."""
    return dict(zip(("PyTorch", "Paddle", "Keras"), _CODE[mistake], strict=True))
