"""Runs the lessons' lines of one framework, each after the few names that they speak of.

    echo '{"underflow": "scaler = …"}' | python run_snippets.py torch|paddle|keras

What a line with "# don't" does is tried apart from the lines that say what to do. Prints, as JSON,
what went wrong by snippet: nothing where it ran. Code for a GPU runs on the CPU: the device's name
is changed, and calls that only a GPU answers must exist and then do nothing.
"""

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

GPU_CALLS = (
    "torch.cuda.synchronize",
    "torch.cuda.reset_peak_memory_stats",
    "torch.cuda.max_memory_allocated",
    "paddle.device.synchronize",
    "paddle.device.cuda.max_memory_allocated",
    "tf.config.experimental.get_memory_info",
)


def torch_names() -> dict[str, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    scaler = torch.amp.GradScaler("cpu")
    q = k = x = torch.randn(2, 4, 8)
    loss_fn = nn.CrossEntropyLoss()
    names = {
        "torch": torch, "nn": nn, "model": model, "inputs": inputs, "targets": targets, "q": q,
        "k": k, "x": x, "loss_fn": loss_fn, "scaler": scaler, "values": torch.rand(100),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1), "block": model[0], "layer": model[2],
        "hidden": inputs.clone().requires_grad_(), "Net": lambda: model,
        "loss": loss_fn(model(inputs), targets),
    }  # fmt: skip
    return names | {"train_step": lambda: loss_fn(model(inputs), targets).backward()}


def paddle_names() -> dict[str, Any]:
    import paddle

    model = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 4))
    inputs, targets = paddle.randn([4, 8]), paddle.to_tensor([0, 1, 2, 3])
    loss_fn = paddle.nn.CrossEntropyLoss()
    hidden = inputs.clone()
    hidden.stop_gradient = False
    names = {
        "paddle": paddle, "model": model, "inputs": inputs, "targets": targets, "loss_fn": loss_fn,
        "scaler": paddle.amp.GradScaler(), "values": paddle.rand([100]), "hidden": hidden,
        "q": paddle.randn([2, 4, 8]), "k": paddle.randn([2, 4, 8]), "running": paddle.zeros([]),
        "wide": paddle.randn([4, 1024]),
        "optimizer": paddle.optimizer.SGD(0.1, parameters=model.parameters()), "block": model[0],
        "layer": model[2], "Net": lambda: model,
        "loss": loss_fn(model(inputs), targets),
    }  # fmt: skip
    return names | {"train_step": lambda: loss_fn(model(inputs), targets).backward()}


def keras_names() -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    keras.config.set_floatx("float32")
    keras.mixed_precision.set_global_policy("float32")

    def build_model() -> Any:
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

    model, loss_fn = build_model(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    inputs, targets = np.ones((4, 8), "float32"), np.arange(4)
    model.compile(optimizer="sgd", loss=loss_fn)
    dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(2)
    return {
        "keras": keras, "tf": tf, "model": model, "build_model": build_model, "inputs": inputs,
        "targets": targets, "loss_fn": loss_fn, "dataset": dataset, "number_of_samples": 4,
        "values": inputs, "hidden": tf.ones((4, 8)), "train_step": lambda: None,
    }  # fmt: skip


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_names, "paddle": paddle_names, "keras": keras_names,
}  # fmt: skip


def ran(framework: str, code: str) -> str:
    """What went wrong, or nothing."""
    lines = code.splitlines()
    warned_of = "\n".join(line for line in lines if "# don't" in line)
    advised = "\n".join(line for line in lines if "# don't" not in line)
    return _ran(framework, warned_of) or _ran(framework, advised)


def _ran(framework: str, code: str) -> str:
    import time

    names = NAMES[framework]() | {"time": time, "batch_size": 4, "batch_index": 0}
    if "1024" in code:
        names["inputs"] = names.get("wide")
    names["micro_batches"] = [(names["inputs"], names["targets"])] * 2
    code = re.sub(r"""(["'])cuda\1""", '"cpu"', code)
    try:
        with tempfile.TemporaryDirectory() as folder:
            names["path"] = f"{folder}/checkpoint.pt"
            code = re.sub(r"'(\w+\.(pdparams|keras))'", rf"'{folder}/\1'", code)
            with _gpu_calls(code, names):
                exec(compile(code, "snippet", "exec"), names)
    except Exception:
        return traceback.format_exc().strip()[-400:]
    return ""


def _gpu_calls(code: str, names: dict[str, Any]) -> Any:
    from contextlib import ExitStack

    stack = ExitStack()
    for call in GPU_CALLS:
        owner, _, name = call.rpartition(".")
        if call in code:
            answer = {"peak": 2**20} if name == "get_memory_info" else 2**20
            found = eval(owner, names)
            stack.enter_context(mock.patch.object(found, name, lambda *_, a=answer: a))
    return stack


if __name__ == "__main__":
    snippets = json.load(sys.stdin)
    with mock.patch("sys.stdout", sys.stderr):
        wrong = {name: ran(sys.argv[1], code) for name, code in snippets.items()}
    print(json.dumps(wrong))
