"""Every fact that is recorded, as frozen dataclasses. No other type crosses a room's boundary.

Losses, scales and norms keep NaN and infinities: they are what people look for. ``None`` means
"was not recorded", never "was not finite".
"""

from ampscope.records.batches import BatchPrediction, BatchTry, LargestBatch
from ampscope.records.comparison import EnergyUse, LossCurve, MemorySplit, ProcessPeak, StepTimes
from ampscope.records.lessons import Call, Curve, Fates, Histogram, Reading, Tally
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
from ampscope.records.products import Dimension, Operand, Padded, Place, Product, StepProducts
from ampscope.records.results import RESULT_KINDS, Rate, Result
from ampscope.records.runs import (
    AS_IS,
    MEASUREMENT_KINDS,
    Cadence,
    Machine,
    RunInfo,
    RunSpec,
    ScalerSpec,
    State,
    watched,
)
from ampscope.records.telemetry import Sample
from ampscope.records.timing import Timing

__all__ = [
    "AS_IS",
    "MEASUREMENT_KINDS",
    "RESULT_KINDS",
    "BatchPrediction",
    "BatchTry",
    "Cadence",
    "Call",
    "Curve",
    "Dimension",
    "EnergyUse",
    "Event",
    "Fates",
    "Frame",
    "Histogram",
    "LargestBatch",
    "LossCurve",
    "Machine",
    "MemorySplit",
    "ModuleRecord",
    "NonFiniteRecord",
    "OpRecord",
    "Operand",
    "Padded",
    "Place",
    "ProcessPeak",
    "Product",
    "Rate",
    "Reading",
    "Result",
    "Role",
    "RunInfo",
    "RunSpec",
    "Sample",
    "ScalerSpec",
    "ShadowRecord",
    "State",
    "StepProducts",
    "StepRecord",
    "StepTimes",
    "StepTotals",
    "Tally",
    "Timing",
    "watched",
]
