"""What the instruments of a probe measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ampscope.exponents import Raw


class Role(StrEnum):
    """What a histogram counts."""

    ACTIVATION = "activation"
    GRAD_OUTPUT = "grad_output"
    WEIGHT = "weight"
    WEIGHT_GRAD = "weight_grad"
    UPDATE = "update"

    @property
    def is_gradient(self) -> bool:
        """True for the roles whose recorded values still carry the loss scale."""
        return self in (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step, as the loop saw it."""

    step: int
    loss: float | None = None
    scale: float | None = None  # the loss scale that this step used; None without a scaler
    growth_counter: int | None = None  # finite steps since the last growth, after the step
    skipped: bool = False
    grad_norm: float | None = None  # of unscaled gradients as the optimizer got them, 2-norm
    lr: float | None = None
    step_time_s: float | None = None  # wall time less the instruments' own
    overhead_s: float | None = None  # the instruments' own wall time
    peak_bytes: int | None = None  # device memory on CUDA, resident set on a CPU
    moved_share: float | None = None  # weights that the step changed, 0 … 1
    op_set: int | None = None  # which OpSet this step ran, None when it was not traced
    ended_at: float | None = None  # seconds since the epoch
    unclipped_norm: float | None = None  # grad_norm before the script clipped; None without a clip


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Exact counts over all steps of a run. A bad step was skipped, or its loss or gradient norm is
    not finite."""

    steps: int = 0
    skipped: int = 0
    nonfinite_losses: int = 0
    nonfinite_norms: int = 0
    bad: int = 0  # steps that are bad in any of these ways
    scale_changes: int = 0
    first_step: int | None = None
    last_step: int | None = None
    first_bad: int | None = None
    last_bad: int | None = None
    last_scale: float | None = None  # the last that was recorded


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """One module of the model; ``index`` is its id within the run."""

    index: int
    path: str  # dotted; "" is the root
    type: str
    weight_dtypes: str = ""  # "fp32", or "fp16+fp32" when mixed, of its own parameters
    parameter_count: int = 0  # own parameters only
    is_leaf: bool = True
    shared_with: str = ""  # path of the module that owns the same parameters


@dataclass(frozen=True, slots=True)
class OpRecord:
    """Calls of one op with the same dtypes in one module and phase of one step."""

    module: int
    phase: str  # forward | backward | step
    op: str  # "aten.addmm"
    inputs: str  # dtypes of the tensor inputs, "fp16,fp16,fp16"
    outputs: str
    count: int
    flops: int = 0
    is_cast: bool = False  # a dtype conversion; inputs -> outputs


@dataclass(frozen=True, slots=True)
class Frame:
    """All histograms of one role at one step.

    ``rows`` is [n, RAW_LEN]; ``modules[i]`` is the module index and ``dtypes[i]`` the dtype name of
    row i. A module that was called several times has one row a dtype: histograms add.
    """

    step: int
    role: Role
    modules: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: Raw
    scale: float = 1.0  # the loss scale that multiplies these values (1 when it does not)
    last_step: int | None = None  # of a frame that adds up several recorded steps; None: one step

    def row_of(self, module: int) -> Raw | None:
        """Sum of the module's rows, or None when it has none."""
        hits = [i for i, m in enumerate(self.modules) if m == module]
        return None if not hits else np.asarray(self.rows[hits].sum(axis=0))


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """Half against the fp32 shadow for one module and role at a sampled step.

    Three counts, never one: ``lost`` zero in half and not in fp32; ``subnormal`` subnormal in half
    and not zero (in bf16, whose range is fp32's, only where fp32's value is normal);
    ``zero_before`` zero in both. Of those lost, ``below_range`` are smaller in fp32 than the
    format's smallest number above zero: they underflowed. The others are rounding, not underflow.
    """

    step: int
    module: int
    role: Role
    total: int
    lost: int
    subnormal: int
    zero_before: int
    relative_error: float | None  # |half/scale - fp32| / |fp32|, 2-norms
    cosine: float | None
    max_abs_fp32: float | None
    below_range: int | None = None  # None: recorded by a version that did not tell

    @property
    def cancelled(self) -> int | None:
        """Lost although the format has numbers of that size: a sum that cancelled, a ReLU that
        switched otherwise, values lost further up the pass."""
        return None if self.below_range is None else self.lost - self.below_range


@dataclass(frozen=True, slots=True)
class NonFiniteRecord:
    """A parameter whose gradient held NaN or Inf, in the order in which backward reached it."""

    step: int
    parameter: str
    order: int
    total: int
    nan: int
    pos_inf: int
    neg_inf: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a watched run reports at a step, apart from its numbers.

    ``kind``: alarm (``name`` says which), capsule (``path`` is its file), schedule (tightened),
    nonfinite and calibration (``name`` is where this process first saw it: loss, output gradient,
    backward, or gradients where only the sum over ranks was bad; a calibration is a skip by which
    GradScaler finds its scale), replay (the first bad op), note (what cannot be seen, and why).
    """

    step: int
    kind: str
    name: str
    text: str  # one sentence for a person
    path: str = ""
    value: float | None = None
