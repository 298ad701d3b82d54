"""Run one script as __main__ under another debugging tool: TOOL SCRIPT POLICY [FOLDER]."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampscope.policy.rehearsal import cuda_autocast_lists

KINDS = (
    "vanishing_gradients",
    "exploding_gradients",
    "dead_neurons",
    "saturated_activations",
    "optimizer_instability",
    "data_anomaly",
)  # what explain_failure may be asked


def debug_every_model() -> None:
    """`DebugUnderflowOverflow` on each model when its forward first runs."""
    from transformers.debug_utils import DebugUnderflowOverflow

    known: set[nn.Module] = set()

    def before(module: nn.Module, inputs: object) -> None:
        if module not in known:  # an inner module is known by its model
            known.update(module.modules())
            DebugUnderflowOverflow(module)

    register_module_forward_pre_hook(before)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """NeuralDBG around each model, told of every loss that backward is called on, and asked at the
    end for each kind of failure that its documentation names. Prints the earliest hypothesis."""
    from neuraldbg import NeuralDbg

    known: set[nn.Module] = set()
    debuggers: list[Any] = []
    backward, scale = torch.Tensor.backward, torch.amp.GradScaler.scale

    def before(module: nn.Module, inputs: object) -> None:
        if module not in known:
            known.update(module.modules())
            debuggers.append(NeuralDbg(module).__enter__())

    def tell(loss: torch.Tensor) -> None:
        if loss.numel() == 1:
            for debugger in debuggers:
                debugger.record_loss(loss.item())
                debugger.step_iteration()

    def scaled(scaler: Any, loss: Any) -> Any:
        result = scale(scaler, loss)
        if isinstance(loss, torch.Tensor):
            tell(loss)
            result._told = True
        return result

    def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss, *args, **kwargs)
        if not hasattr(loss, "_told"):
            tell(loss)

    register_module_forward_pre_hook(before)
    torch.Tensor.backward = watched  # type: ignore[method-assign]
    torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign]
    try:
        yield
    finally:
        found = [h for d in debuggers for kind in KINDS for h in d.explain_failure(kind)]
        for hypothesis in sorted(found, key=lambda h: h.evidence[0].step)[:1]:
            print(f"\nNeuralDBG: {hypothesis.description}")


def main() -> None:
    tool, script, policy, folder = sys.argv[1:5]
    if folder:
        sys.path.append(folder)
    with contextlib.ExitStack() as stack:
        if policy == "cuda":
            stack.enter_context(cuda_autocast_lists())
        if tool == "detect_anomaly":
            stack.enter_context(torch.autograd.detect_anomaly(check_nan=True))
        elif tool == "NeuralDBG":
            stack.enter_context(explained())
        else:
            debug_every_model()
        sys.argv = [script]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
