"""Record the products of one training step of a script that is left as it is.

The step is what lies between the first and the second step of the script's first optimizer, so the
first one has warmed everything up; then the script is ended. A step that GradScaler skips counts
too: its products ran.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.patches import Patches
from ampscope.capture.script.script_models import ScriptModels
from ampscope.errors import BadInput
from ampscope.measure.kernel_names import KernelProfile
from ampscope.measure.onednn_log import OneDnnLog
from ampscope.measure.step_products import RecordedStep, StepTrace
from ampscope.measure.timing import synchronize
from ampscope.records import RunSpec
from ampscope.run.script_main import stage
from ampscope.run.script_text import execute


class _Enough(BaseException):
    """Ends the script; no script catches it by the way."""


class _Recording:
    """Follows the steps of the first optimizer."""

    def __init__(self, models: ScriptModels, device: torch.device) -> None:
        self.kernels = KernelProfile() if device.type == "cuda" else OneDnnLog()
        self.trace = StepTrace(models, self.kernels)
        self.steps = 0
        self._device = device
        self._first: int | None = None  # id of the optimizer
        self._in_scaler = False
        self._is_open = False

    def optimizer_stepped(self, optimizer: Optimizer, *_: object) -> None:
        """After ``optimizer.step()``; inside ``scaler.step()`` the scaler tells."""
        if not self._in_scaler:
            self._stepped(optimizer)

    def scaler_step(self, original: Any) -> Any:
        """GradScaler.step, which may leave the optimizer's step out."""

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._in_scaler = True
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._in_scaler = False
            self._stepped(optimizer)
            return result

        return step

    def close(self) -> None:
        """Stop recording, however far it came."""
        if self._is_open:
            self._is_open = False
            synchronize(self._device)
            self.trace.__exit__(None, None, None)
            self.kernels.__exit__(None, None, None)

    def _stepped(self, optimizer: Optimizer) -> None:
        self._first = id(optimizer) if self._first is None else self._first
        if id(optimizer) != self._first:
            return
        self.steps += 1
        if self.steps > 1:
            self.close()
            raise _Enough
        self._is_open = True
        self.kernels.__enter__()
        self.trace.__enter__()


def script_step(spec: RunSpec, device: torch.device) -> RecordedStep:
    """Run the script up to its second step. Raises BadInput when it makes none, when it raises, and
    when it trains on another device than the one that is measured."""
    with ModulePaths() as paths, stage(spec.workload, spec.args):
        models = ScriptModels(paths)
        recording = _Recording(models, device)
        patches = Patches()
        patches.replace(torch.amp.GradScaler, "step", recording.scaler_step)
        handle = register_optimizer_step_post_hook(recording.optimizer_stepped)
        try:
            execute(spec.workload)
        except _Enough:
            pass
        except SystemExit as error:
            raise _too_few(recording.steps, f"called sys.exit({error.code})") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise BadInput(f"The script raised {text}. Let it run by itself first.") from error
        finally:
            handle.remove()
            patches.undo()
            recording.close()
            models.close()
    if recording.steps < 2:
        raise _too_few(recording.steps, "ended")
    other = recording.trace.device
    if other not in ("", device.type):
        raise BadInput(
            f"The script trains on {other}, and {device.type} was to be measured: pass --device "
            f"{other}."
        )
    names = {record.index: record.path for record in models.take_records()}
    kernels = recording.kernels
    return RecordedStep({0: "", **names}, recording.trace.found, kernels.kernels, kernels.source)


def _too_few(steps: int, how: str) -> BadInput:
    made = "one optimizer step" if steps else "no optimizer step"
    return BadInput(f"The script {how} after {made}; two are needed to see one step's products.")
