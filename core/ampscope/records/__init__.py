"""Every fact that is recorded, as frozen dataclasses. No other type crosses a room's boundary.

Losses, scales and norms keep NaN and infinities: they are what people look for. ``None`` means
"was not recorded", never "was not finite".
"""

from ampscope.records.measurements import (
    Event,
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    ShadowRecord,
    StepRecord,
    StepTotals,
)
from ampscope.records.runs import Cadence, Machine, RunInfo, RunSpec, ScalerSpec, State

__all__ = [
    "Cadence",
    "Event",
    "Frame",
    "Machine",
    "ModuleRecord",
    "NonFiniteRecord",
    "OpRecord",
    "Role",
    "RunInfo",
    "RunSpec",
    "ScalerSpec",
    "ShadowRecord",
    "State",
    "StepRecord",
    "StepTotals",
]
