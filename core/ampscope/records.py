"""Every fact that is recorded, as frozen dataclasses. No other type crosses a room's boundary.

Losses, scales and norms keep NaN and infinities: they are what people look for. ``None`` means
"was not recorded", never "was not finite".

In this order: what was asked for, where it ran and how a run stands; what a training recorded, from
its steps to readings of the devices; and what measurements found (:data:`Result`): rates of the
machine, matmuls of a step, comparisons of precisions, batch searches, lessons.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, get_args

import numpy as np

from ampscope.control import Control
from ampscope.numerics.histogram import Raw


class State(StrEnum):
    """State of a run. A reader derives ``lost`` from pid and heartbeat; it is stored of imported
    runs alone."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_active(self) -> bool:
        """Queued or running: more may still be recorded."""
        return self in (State.QUEUED, State.RUNNING)


# Runs that measure instead of recording one training: what this machine reaches (bench), which
# matmuls of a step use Tensor Cores (cores), precisions beside each other (compare), the largest
# batch (batch), what a lesson shows (lesson).
MEASUREMENT_KINDS = ("bench", "cores", "compare", "batch", "lesson")


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


AUTO = "auto"  # policy: as the CPU computes; CUDA's rules where the script needs CUDA
OP_STEP = "op_step"  # the run's tensors are digested, and in this step the results of its ops
SEED_SHIFT = "seed_shift"  # each seed that the script sets is larger by this
HALF_FROM = "half_from"  # the first step of the baseline in which half precision took part
# A control records losses, gradients and results, and ops in its first step and in HALF_FROM alone;
# it ends after so many steps, or at 0 as others do.
LIGHT = "light"
RUN_OUT_S = "run_out_s"  # seconds in which a control whose steps are made may end by itself
JUDGED_RANK = "judged_rank"  # of a script's processes, the one whose observations count


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What was asked for. Stored as JSON with the run, and enough to repeat it."""

    workload: str
    kind: str = "probe"  # probe | script | watch, or one of MEASUREMENT_KINDS
    size: str = "tiny"
    precision: str = "fp16"  # a comparison and a batch search take several, "fp32,bf16"
    steps: int = 50
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    policy: str = "auto"  # AUTO | cuda (rehearsal of CUDA's rules on a CPU) | native
    rehearsed: str = ""  # the device that a rehearsal stands in for ("t4"); "" is the usual one
    scaler: ScalerSpec = field(default_factory=ScalerSpec)
    cadence: Cadence = field(default_factory=Cadence)
    loss_factor: float = 1.0
    grace_s: float = 0.0  # a script that has made its steps may go on until it has run so long
    skip_to: int = 0  # a script's optimizer steps that pass before anything is recorded
    time_limit_s: float = 600.0
    memory_limit_mib: int = 0  # 0: no limit
    label: str = ""
    group: str = ""  # runs that were started together share it
    args: tuple[str, ...] = ()  # a script's own arguments
    control: str = ""  # what is changed in a script's run, or in a probe's (ampscope.control)
    parent: str = ""  # run id that this run is a control of
    rank: int = 0  # of a distributed training, whose runs share a group
    world: int = 1  # how many ranks it has
    seeds: int = 1  # a comparison trains with so many
    batch: int = 0  # samples a batch; 0: as the workload gives them
    multiple_of: int = 1  # a batch search tries multiples of this; 0: powers of two
    framework: str = "torch"  # torch | keras | paddle
    imported: str = ""  # from which file, and when: such a run is looked at and never run again
    # By name: a lesson's; of a script's run that is compared with another OP_STEP and SEED_SHIFT;
    # of a control JUDGED_RANK, if it has ranks, HALF_FROM and RUN_OUT_S.
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def is_training(self) -> bool:
        """Whether steps of one training are recorded, which the pages of one run show."""
        return self.kind not in MEASUREMENT_KINDS

    @property
    def mode(self) -> str:
        """How a probe computes, in few words: ``fp16``, ``fp16 softmax=half``, ``fp16 keras``."""
        probed = self.kind == "probe"
        changed = ",".join(Control(self.control).values("op_lists")) if probed else ""
        framework = "" if self.framework == "torch" else self.framework
        return " ".join(filter(None, (self.precision, changed, framework)))

    @property
    def precisions(self) -> tuple[str, ...]:
        """The names in ``precision``, each once."""
        names = (name.strip() for name in self.precision.split(","))
        return tuple(dict.fromkeys(name for name in names if name))


def watched(workload: str, histogram_every: int, label: str) -> RunSpec:
    """A user's own training, watched: its numbers are seen, and nothing of it is known before."""
    return RunSpec(
        workload=workload or "notebook",
        kind="watch",
        size="",
        precision="",  # whatever the training does; the recorded dtypes say it
        steps=0,
        policy="native",
        cadence=Cadence(histogram=histogram_every, trace=0, shadow=0),
        time_limit_s=0.0,
        label=label,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place; shown on every page about it."""

    device: str  # "cpu", "cuda:0"
    device_name: str
    policy: str  # "cuda" = real CUDA, "rehearsal" = CUDA's rules on a CPU, "native" = the CPU's own
    capability: str = ""  # "9.0"; of a CPU its flags, "AVX2 AVX512-BF16" or "none"; empty: unread
    torch: str = ""
    python: str = ""
    platform: str = ""
    host: str = ""
    framework: str = "torch"  # torch | keras | paddle
    framework_version: str = ""  # "3.15.0 on TensorFlow 2.21.0"; of torch see ``torch``
    arithmetic: str = "real"  # half precision: real, or "emulated" by rounding fp32 numbers
    scaler: str = ""  # real, "forced" where the framework switches it off here, "" none

    @property
    def software(self) -> str:
        """Framework and version: ``torch 2.13.0``, ``Paddle 3.3.1 (fp16 emulated)``."""
        if self.framework == "torch":
            return f"torch {self.torch}"
        title = {"keras": "Keras", "paddle": "Paddle"}.get(self.framework, self.framework)
        emulated = " (half precision emulated)" if self.arithmetic == "emulated" else ""
        return f"{title} {self.framework_version}{emulated}"


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
        """How the run is listed: its label, else what it ran."""
        spec = self.spec
        if spec.kind == "bench":
            return spec.label or "what this machine reaches"
        if spec.kind == "lesson":
            return spec.label or f"lesson {spec.workload}"
        name = spec.workload.rpartition("/")[2]  # a user's file without its folders
        return spec.label or f"{name} {spec.size} {spec.mode}"


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
    row i. A module that was called several times has one row per dtype: histograms add.
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
    below_range: int = 0

    @property
    def cancelled(self) -> int:
        """Lost although the format has numbers of that size: a sum that cancelled, a ReLU that
        switched otherwise, values lost further up the pass."""
        return self.lost - self.below_range


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


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one device; None is "cannot be read here"."""

    device: str  # "cpu", "cuda:0"
    at: float  # seconds since the epoch
    busy_percent: float | None = None  # of the sample period in which a kernel ran; CPU: all cores
    own_percent: float | None = None  # CPU: of that, the run's own processes
    memory_used_bytes: int | None = None  # by all processes
    own_memory_bytes: int | None = None  # by the run's own process
    power_w: float | None = None
    energy_j: float | None = None  # a counter; differences mean something
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_rx_bytes_s: float | None = None  # into the device
    pcie_tx_bytes_s: float | None = None
    clock_reasons: str = ""  # what holds the clocks down, a comma between them
    other_processes: int | None = None  # with memory on the device, beside the run's own


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of one call: median and quartiles of ``repeats``, in seconds."""

    median_s: float
    low_s: float  # first quartile
    high_s: float  # third quartile
    repeats: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high_s - self.low_s) / self.median_s


@dataclass(frozen=True, slots=True)
class Rate:
    """What one op reached on random data, alone."""

    series: str  # ceiling | copy | align_m | align_n | align_k | align_channels
    op: str  # matmul | copy | conv2d
    dtype: str  # of the inputs, a name of formats; "tf32" is fp32 tensors with TF32 switched on
    shape: tuple[int, ...]  # (m, n, k) | (elements,) | (batch, channels, height, width, filters)
    flops: int  # of one call, a multiplication and an addition counted as two
    moved_bytes: int  # of one call, each operand read and each result written once
    timing: Timing | None  # None: it cannot be done here, and ``note`` says why
    measured_at: float  # seconds since the epoch
    layout: str = ""  # NCHW | channels_last
    note: str = ""

    @property
    def flops_s(self) -> float | None:
        """Operations per second at the median."""
        return self.flops / self.timing.median_s if self.timing and self.flops else None

    @property
    def bytes_s(self) -> float | None:
        """Bytes moved a second at the median."""
        return self.moved_bytes / self.timing.median_s if self.timing else None


@dataclass(frozen=True, slots=True)
class StepMatmuls:
    """The step as a whole, and what of the device decides which matmuls fit. The step's matmuls
    follow, each as it is measured."""

    device: str  # cpu | cuda | rocm
    capability: str  # "9.0"; CUDA alone has one
    cpu_flags: tuple[str, ...] | None  # of hardware.cpu; None on a GPU and where unreadable
    calls: int
    flops: int
    distinct: int  # so many Matmul records follow
    kernel_source: str  # torch.profiler | oneDNN | none


@dataclass(frozen=True, slots=True)
class Matmul:
    """One matmul of the step, alone, on random data of the same shapes, dtypes and strides.
    Convolutions and attention count as matmuls; equal ones are one record with several places::

        Matmul(op="aten.addmm", part="", dtype="bf16", operands=(bias, x, weight),
               dimensions=(Dimension("m", 1024), Dimension("n", 96), Dimension("k", 256)),
               places=(Place("head", "forward", 1),), …)
    """

    op: str  # "aten.addmm"
    part: str  # of a convolution's backward: "input gradient" | "weight gradient"; else empty
    dtype: str  # computed in; "tf32" is fp32 tensors with TF32 switched on
    operands: tuple[Operand, ...]
    dimensions: tuple[Dimension, ...]
    flops: int  # of one call, a multiplication and an addition counted as two
    moved_bytes: int  # of one call, each operand read and each result written once
    places: tuple[Place, ...]
    kernels: tuple[str, ...]  # names seen in the step itself, a CPU's from oneDNN's log
    measured_at: float  # seconds since the epoch
    timing: Timing | None  # None: it could not be run alone, and ``note`` says why
    control: Timing | None  # the same shapes in fp32 without TF32; None where there is none
    padded: tuple[Padded, ...] = ()
    note: str = ""

    @property
    def count(self) -> int:
        """Calls per step."""
        return sum(place.count for place in self.places)

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / max(1, self.moved_bytes)

    @property
    def flops_s(self) -> float | None:
        """Operations per second at the median."""
        return self.flops / self.timing.median_s if self.timing else None


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that a matmul reads: sizes and distances in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # a name of formats


@dataclass(frozen=True, slots=True)
class Dimension:
    """One of the sizes that decide how well a matmul fits the hardware's tiles."""

    name: str  # m | n | k | input channels | output channels | head size
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the step a matmul runs."""

    module: str  # path; empty for the model itself and what runs in no module
    phase: str  # forward | backward | optimizer
    count: int  # times per step


@dataclass(frozen=True, slots=True)
class Padded:
    """The same matmul with some dimensions enlarged, measured."""

    changes: tuple[tuple[int, int], ...]  # (size, padded size) of each dimension that was enlarged
    flops: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of training steps in one precision, interleaved with the others.

    The phases are the default step's; a workload with a step of its own has none. On CUDA the
    phases are the device's time between events, and ``step`` is the host's clock around it all.
    """

    precision: str
    samples: int  # a step
    step: Timing
    forward: Timing | None
    backward: Timing | None
    optimizer: Timing | None  # unscale_, step and update
    cast_share: float | None  # of a profiled step's op time, 0 … 1
    measured_at: float  # seconds since the epoch
    is_base: bool = True  # the batch as the workload gives it, or as it was asked for

    @property
    def samples_s(self) -> float:
        """Throughput at the median."""
        return self.samples / self.step.median_s


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss of every step, the same batches and random state in all precisions of a seed."""

    precision: str
    seed: int
    losses: tuple[float, ...]
    skipped: tuple[int, ...]  # steps that GradScaler left out


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Bytes of tensors that live when a step needs most, by what they are for.

    Every storage that an op allocates is followed until it is freed. ``device_peak`` is what the
    allocator itself says of the same step (CUDA); it also holds workspaces of libraries.
    """

    precision: str
    samples: int
    weights: int  # parameters and buffers
    gradients: int
    optimizer_state: int
    activations: int  # made in the forward pass and still alive
    cast_copies: int  # of these, copies in another floating-point dtype
    temporaries: int  # made in the backward pass or the optimizer's step
    inputs: int  # the batch
    device_peak: int | None
    measured_at: float
    is_base: bool = True

    @property
    def peak(self) -> int:
        """All of it."""
        parts = (self.weights, self.gradients, self.optimizer_state, self.activations)
        return sum((*parts, self.cast_copies, self.temporaries, self.inputs))

    @property
    def fixed(self) -> int:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer_state


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """Peak memory of a whole run of a script, which cannot be split."""

    precision: str
    peak_bytes: int
    what: str  # "CUDA's allocator" | "the process above Python and torch"
    measured_at: float


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Energy of some steps in a row, by a counter of the device."""

    precision: str
    joules: float
    steps: int
    samples: int  # a step
    source: str  # "NVML total energy" | "RAPL, package 0"
    measured_at: float


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """Some training steps with so many samples, in a process of their own."""

    precision: str
    samples: int
    fits: bool
    peak_bytes: int | None  # tensors alive at once; None where the step did not end
    device_peak: int | None  # by CUDA's allocator
    step: Timing | None
    how_it_ended: str  # one sentence when it does not fit
    measured_at: float  # seconds since the epoch

    @property
    def samples_s(self) -> float | None:
        """Throughput at the median."""
        return self.samples / self.step.median_s if self.step else None


@dataclass(frozen=True, slots=True)
class BatchPrediction:
    """Extrapolated from two small trials: memory = fixed bytes + samples * bytes per sample."""

    precision: str
    fixed_bytes: int
    bytes_per_sample: int
    limit_bytes: int
    largest: int  # samples; a multiple of the search's step


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """Where the search ended: ``samples`` fitted, and ``too_many``, or a size between the
    two, did not. Without ``too_many`` every trial fitted."""

    precision: str
    samples: int  # 0: not even the smallest fits
    too_many: int | None
    tries: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of a lesson. ``value`` may be NaN or infinite: lessons are about such numbers.

    All lessons share this record and the five below it. The run's spec says which lesson it is; its
    measurement and its page agree upon what ``name`` and ``series`` mean.
    """

    name: str  # what was measured, "lost share"
    series: str  # in which case, "fp16"
    value: float
    text: str = ""  # what a number cannot say


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured numbers in order."""

    name: str  # "loss"
    series: str  # "model.half()"
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """An exponent histogram: a raw row of :mod:`ampscope.numerics.histogram`."""

    name: str  # "grad_output"
    series: str
    dtype: str  # of the tensors that were counted
    row: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnderflowCounts:
    """What became of the elements of half-precision gradients, told by the fp32 reference: three
    kinds of small, never one, and overflow. The counts are of the same ``total``."""

    series: str
    scale: float  # the loss scale of this pass
    total: int
    lost: int  # zero in half, not in fp32
    subnormal: int  # subnormal in half
    zero_before: int  # zero in both
    nonfinite: int  # NaN or Inf in half, finite in fp32


@dataclass(frozen=True, slots=True)
class NonFiniteCounts:
    """What a tensor held at one place of a step."""

    series: str
    step: int
    place: str  # "softmax"
    phase: str  # forward | backward | weights
    total: int
    nan: int
    inf: int
    largest: float  # magnitude of the finite elements; 0 where there is none


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of one op with the same dtypes in a step."""

    op: str  # "mm", without its namespace
    phase: str  # forward | backward
    inputs: str  # "fp16,fp16"
    outputs: str
    count: int


# One row of the store's ``result``: a frozen dataclass of numbers, texts, booleans, tuples and
# other such dataclasses. A new kind is named here; the store needs nothing else to keep it.
Result: TypeAlias = (
    Rate
    | StepTimes
    | LossCurve
    | MemorySplit
    | ProcessPeak
    | EnergyUse
    | BatchTrial
    | BatchPrediction
    | LargestBatch
    | StepMatmuls
    | Matmul
    | Reading
    | Curve
    | Histogram
    | UnderflowCounts
    | NonFiniteCounts
    | Call
)
RESULT_KINDS: tuple[type[Result], ...] = get_args(Result)
