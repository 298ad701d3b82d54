"""The closed list of what preflight reports.

Where a finding has the cause that a diagnosis would name, it carries that cause's code
(``ampscope.causes``); the codes ``PRE...`` are preflight's own. A code is for good: one that is
given up keeps its number, and a new one raises ``LIST_VERSION``.
"""

from __future__ import annotations

from ampscope.causes import CAUSES, StableCode
from ampscope.errors import BadInput

LIST_VERSION = 1


def _cause(name: str, level: str, evidence: str, remedy: str) -> StableCode:
    cause = CAUSES[name]
    return StableCode(cause.code, name, cause.title, level, evidence, remedy)


_CODES = (
    _cause(
        "gradient_underflow", "warning",
        "The loss of an fp16 autocast region is sent backward without a loss scale, and the file has no scaler.",
        "A GradScaler, or bfloat16.",
    ),
    _cause(
        "clip_before_unscale", "error",
        "Gradients of a scaled loss are clipped, and unscale_ was not called since, on every path.",
        "scaler.unscale_(optimizer) before the clip.",
    ),
    _cause(
        "scaler_bypassed", "error",
        "optimizer.step() on gradients that carry the scale, or beside scaler.step; or a backward pass without the scale before scaler.step.",
        "scaler.scale(loss).backward(), then scaler.step(optimizer) alone.",
    ),
    _cause(
        "scaler_protocol_error", "error",
        "unscale_ or step twice without update, unscale_ after step, update without step.",
        "scale, unscale_ (once, if at all), step and update, each once per optimizer step.",
    ),
    _cause(
        "accumulation_scale_mismatch", "error",
        "A scaled loss is sent backward onto gradients that were unscaled and not stepped.",
        "unscale_, step and update at the end of the accumulation window only.",
    ),
    _cause(
        "shared_scaler_interference", "warning",
        "One scaler is updated between the steps of two optimizers in one iteration.",
        "One update at the end of the iteration, or one scaler for each optimizer.",
    ),
    _cause(
        "scaled_gradient_penalty", "error",
        "torch.autograd.grad with create_graph on a scaled output, and the scale is not divided out.",
        "Divide the gradients by scaler.get_scale() before their norm.",
    ),
    _cause(
        "scaler_state_lost", "warning",
        "The optimizer's state is saved and loaded, the scaler's is not.",
        "Save scaler.state_dict() with the checkpoint, and load it.",
    ),
    _cause(
        "fp16_params_with_scaler", "error",
        "Parameters are cast to fp16, and their optimizer is stepped by a GradScaler.",
        "Keep the parameters in fp32; autocast chooses the compute precision.",
    ),
    _cause(
        "optimizer_state_range", "warning",
        "Parameters, and so Adam's state, are half precision: the epsilon rounds to zero in fp16, or beta2 rounds the decay away.",
        "fp32 parameters with autocast; in pure bf16 a smaller beta2.",
    ),
    StableCode(
        "PRE001", "deprecated_spelling", "A deprecated spelling", "note",
        "torch.cuda.amp or torch.cpu.amp, deprecated since PyTorch 2.4.",
        "torch.amp.autocast(\"cuda\", ...) and torch.amp.GradScaler(\"cuda\", ...).",
    ),
    StableCode(
        "PRE004", "evaluation_outside_autocast", "Evaluation outside autocast", "note",
        "The model is trained inside autocast and evaluated outside.",
        "The same autocast region around the evaluation's forward pass.",
    ),
)  # fmt: skip

CODES: dict[str, StableCode] = {code.name: code for code in _CODES}


def find_code(text: str) -> StableCode:
    """By code ("PRE001", "AMP015") or name. Raises BadInput for any other text."""
    wanted = text.strip().lower()
    for code in _CODES:
        if wanted in (code.name, code.code.lower()):
            return code
    raise BadInput(f"There is no preflight code {text!r}. `ampscope explain` lists them all.")


def code_of_cause(name: str, level: str) -> StableCode:
    """The code of a cause that a run showed, also of one that the source alone cannot show."""
    cause = CAUSES[name]
    remedy = f"`ampscope explain {cause.code}`, and `ampscope diagnose` runs the fix."
    return StableCode(cause.code, name, cause.title, level, cause.definition, remedy)
