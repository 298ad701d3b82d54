"""All rules: an explicit tuple, nothing registers itself.

``python -m ampscope.rules.catalog`` prints their documentation, docs/causes.md.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect

from ampscope.rules.verdict import FIX_KINDS, Rule, island_patch

NAMES = (
    "scaler_protocol_error", "fp16_params_with_scaler", "unsafe_op_under_autocast",
    "bad_initial_state", "bad_input_data", "empty_loss_reduction", "fully_masked_row",
    "batchnorm_stats_corrupted", "stale_low_precision_copy", "clip_before_unscale",
    "scaler_bypassed",
    "accumulation_scale_mismatch", "shared_scaler_interference", "scaler_state_lost",
    "scaled_gradient_penalty", "rounded_whole_numbers", "low_precision_constants", "cancellation",
    "half_accumulation_stagnation",
    "optimizer_state_range", "not_amp_divergence", "masked_branch_gradient", "singular_gradient",
    "mask_constant_overflow", "attention_logit_overflow", "log_zero_saturation",
    "norm_eps_underflow", "elementwise_overflow", "reduction_overflow", "activation_overflow",
    "loss_magnitude_overflow", "loss_scale_too_high", "gradient_underflow", "small_update_lost",
    "compiler_precision", "compiler_kernel", "graph_semantics", "vanishes_when_observed",
    "harmful_rounding",
)  # fmt: skip
LIST_VERSION = 4  # of the codes; a new cause raises it


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule with the text of its file as documentation."""
    rules = []
    for name in NAMES:
        module = importlib.import_module(f"ampscope.rules.{name}")
        rules.append(dataclasses.replace(module.RULE, documentation=module.__doc__ or ""))
    return tuple(rules)


@functools.cache
def by_cause() -> dict[str, Rule]:
    """Every rule by the name of its cause."""
    return {rule.id: rule for rule in all_rules()}


INTRODUCTION = """# Root causes

What `ampscope diagnose` can name, printed from the rules (`python -m ampscope.rules.catalog`).
Each rule is one file in `core/ampscope/rules/`; it sees the evidence of the runs and nothing else.
"""


def render() -> str:
    """docs/causes.md."""
    parts = [INTRODUCTION]
    for rule in all_rules():
        parts.append(f"## {rule.code} {rule.title}\n\n`{rule.id}`. {rule.definition}\n")
        for heading, text in sections(rule.documentation):
            parts.append(f"**{heading}.** {text}\n")
    kinds = "\n".join(f"- `{kind}`: {sentence}" for kind, sentence in FIX_KINDS.items())
    parts.append(f"## Kinds of fix\n\n{kinds}\n")
    return "\n".join(parts)


def patches(name: str) -> tuple[str, ...]:
    """Code that the rule's fixes give to paste, in the order of its file; where a rule keeps the
    module or expression that it names in fp32, the form of that."""
    module = importlib.import_module(f"ampscope.rules.{name}")
    own = [text for key, text in vars(module).items() if key.endswith("PATCH")]
    found = tuple(text.replace("{factor}", "factor") for text in own if isinstance(text, str))
    return found or (island_patch(""),)


def sections(documentation: str) -> list[tuple[str, str]]:
    """(heading, text) of a rule's docstring: a heading is a line with no indentation."""
    found: list[tuple[str, list[str]]] = []
    for line in inspect.cleandoc(documentation).splitlines()[1:]:
        if line and not line.startswith(" "):
            found.append((line.strip(), []))
        elif line.strip() and found:
            found[-1][1].append(line.strip())
    return [(heading, " ".join(lines)) for heading, lines in found]


if __name__ == "__main__":
    print(render(), end="")
