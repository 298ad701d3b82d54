"""What can be asked of Keras and Paddle: refuse the rest before a process is started for it."""

from __future__ import annotations

from ampscope.errors import BadInput
from ampscope.ext.frameworks import KERAS
from ampscope.ext.frameworks.adapters import parse
from ampscope.ext.frameworks.networks import SHARED
from ampscope.launcher.launch import check_device, check_memory_limit
from ampscope.pythons import framework, python_for
from ampscope.records import RunSpec

PRECISIONS = ("fp32", "fp16", "fp16-noscaler", "bf16")


def checked(spec: RunSpec) -> RunSpec:
    """The spec of a probe, which trains one of the networks that all frameworks have. Raises
    BadInput."""
    title = framework(spec.framework).title
    if spec.precision not in PRECISIONS:
        raise BadInput(
            f"{title} has no precision {spec.precision!r} here. Use one of: "
            f"{', '.join(PRECISIONS)}."
        )
    if spec.workload not in SHARED:
        raise BadInput(
            f"{title} trains the networks that every framework has: {', '.join(SHARED)}; not "
            f"{spec.workload!r}."
        )
    _check_what_adapters_lack(spec, title)
    python_for(spec.framework)
    return spec


def _check_what_adapters_lack(spec: RunSpec, title: str) -> None:
    """What a probe in another framework would silently ignore."""
    if spec.control:
        raise BadInput(f"A probe in {title} runs unchanged: no --op-list, no intervention.")
    check_memory_limit(spec.framework, spec.memory_limit_mib)
    check_device(spec.device)
    factors = (spec.scaler.growth_factor, spec.scaler.backoff_factor)
    if spec.framework == KERAS.name and factors != (2.0, 0.5):
        raise BadInput("Keras' LossScaleOptimizer doubles and halves: leave the factors alone.")


def check_control(control: str) -> None:
    """Raises BadInput for a control or intervention that only torch has."""
    parse(control)
