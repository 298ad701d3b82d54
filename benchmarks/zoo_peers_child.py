"""Run one script as __main__ under another debugging tool: TOOL SCRIPT POLICY [FOLDER]."""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampscope.policy.rehearsal import cuda_autocast_lists


def debug_every_model() -> None:
    """`DebugUnderflowOverflow` on each model when its forward first runs."""
    from transformers.debug_utils import DebugUnderflowOverflow

    known: set[nn.Module] = set()

    def before(module: nn.Module, inputs: object) -> None:
        if module not in known:  # an inner module is known by its model
            known.update(module.modules())
            DebugUnderflowOverflow(module)

    register_module_forward_pre_hook(before)


def main() -> None:
    tool, script, policy, folder = sys.argv[1:5]
    if folder:
        sys.path.append(folder)
    with contextlib.ExitStack() as stack:
        if policy == "cuda":
            stack.enter_context(cuda_autocast_lists())
        if tool == "detect_anomaly":
            stack.enter_context(torch.autograd.detect_anomaly(check_nan=True))
        else:
            debug_every_model()
        sys.argv = [script]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
