"""Every fact that is recorded, as frozen dataclasses. No other type crosses a room's boundary.

Losses, scales and norms keep NaN and infinities: they are what people look for. ``None`` means
"was not recorded", never "was not finite".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from ampscope.exponents import Raw


class State(StrEnum):
    """State of a run. ``lost`` is never stored: a reader derives it from pid and heartbeat."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_active(self) -> bool:
        return self in (State.QUEUED, State.RUNNING)


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
class ScalerSpec:
    """GradScaler's settings (torch's defaults, torch/amp/grad_scaler.py)."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often each instrument looks, in steps; 0 switches it off."""

    histogram: int = 1
    trace: int = 1
    shadow: int = 10


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What was asked for. Stored as JSON with the run, and enough to repeat it."""

    workload: str
    kind: str = "probe"  # probe | script
    size: str = "tiny"
    precision: str = "fp16"
    steps: int = 50
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    policy: str = "auto"  # auto | cuda (rehearsal of CUDA's rules on a CPU) | native
    scaler: ScalerSpec = field(default_factory=ScalerSpec)
    cadence: Cadence = field(default_factory=Cadence)
    loss_factor: float = 1.0
    time_limit_s: float = 600.0
    memory_limit_mib: int = 0  # 0: no limit
    label: str = ""
    group: str = ""  # runs that were started together share it
    args: tuple[str, ...] = ()  # a script's own arguments
    control: str = ""  # which control or intervention a script's run is
    parent: str = ""  # run id that this run is a control of


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place; shown on every page about it."""

    device: str  # "cpu", "cuda:0"
    device_name: str
    policy: str  # "cuda" = real CUDA, "rehearsal" = CUDA's rules on a CPU, "native" = the CPU's own
    capability: str = ""  # "9.0"
    torch: str = ""
    python: str = ""
    platform: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One row of the run table, with the derived state."""

    id: str
    spec: RunSpec
    state: State
    created: float  # seconds since the epoch
    started: float | None
    ended: float | None
    heartbeat: float | None
    pid: int | None
    machine: Machine | None
    message: str  # one sentence: how it ended, what to do next
    traceback: str  # the child's own, kept for the details
    steps_done: int
    overhead_share: float | None  # instruments' share of the run's step time, 0 … 1
    place: int = 0  # place in the queue, 0 when it does not wait

    @property
    def title(self) -> str:
        spec = self.spec
        name = spec.workload.rpartition("/")[2]  # a user's file without its folders
        return spec.label or f"{name} {spec.size} {spec.precision}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step, as the loop saw it."""

    step: int
    loss: float | None = None
    scale: float | None = None  # the loss scale that this step used; None without a scaler
    growth_counter: int | None = None  # finite steps since the last growth, after the step
    skipped: bool = False
    grad_norm: float | None = None  # of unscaled gradients, all parameters, 2-norm
    lr: float | None = None
    step_time_s: float | None = None  # wall time less the instruments' own
    overhead_s: float | None = None  # the instruments' own wall time
    peak_bytes: int | None = None  # device memory on CUDA, resident set on a CPU
    moved_share: float | None = None  # weights that the step changed, 0 … 1
    op_set: int | None = None  # which OpSet this step ran, None when it was not traced


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

    def row_of(self, module: int) -> Raw | None:
        """Sum of the module's rows, or None when it has none."""
        hits = [i for i, m in enumerate(self.modules) if m == module]
        return None if not hits else np.asarray(self.rows[hits].sum(axis=0))


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """Half against the fp32 shadow for one module and role at a sampled step.

    Three counts, never one: ``lost`` zero in half and not in fp32, ``subnormal`` subnormal in half
    and normal in fp32's value, ``zero_before`` zero in both.
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
