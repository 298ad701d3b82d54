"""What was asked for, where it ran, and how a run stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ampscope.control import Control


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
    policy: str = "auto"  # auto | cuda (rehearsal of CUDA's rules on a CPU) | native
    scaler: ScalerSpec = field(default_factory=ScalerSpec)
    cadence: Cadence = field(default_factory=Cadence)
    loss_factor: float = 1.0
    grace_s: float = 0.0  # a script that has made its steps may go on until it has run so long
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
    settings: tuple[tuple[str, str], ...] = ()  # a lesson's, by name

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


# What a device reads beside a run.


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
