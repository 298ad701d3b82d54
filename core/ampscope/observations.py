"""What is recorded of an untouched script: calls, steps, tensors, bad ops, how it ended. Evidence
for the rules; :mod:`ampscope.records` holds what every run has.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

# What a script did to its own gradients between backward and the optimizer's step, as a record.


REPLACED = "replaced"  # a kind of GradientChange


@dataclass(frozen=True, slots=True)
class GradientChange:
    """What a script did to gradients between backward and one step.

    All numbers are of the gradients that changed. ``kind``: factor (all were multiplied by the same
    number), factors (each parameter's by its own), clamp (cut at ``±max_after``), other (anything
    else: noise, masks, centring); all of these while they still carried the loss scale. Or
    :data:`REPLACED`, scaled or not: backward left NaN or infinity, and the step finds finite
    numbers or none; ``norm_before`` is of the finite entries then.
    """

    step: int
    optimizer: str  # "optimizer0"
    scale: float
    kind: str
    changed: int  # parameters
    norm_before: float  # 2-norm over all of them
    norm_after: float
    max_after: float
    each_norm: float | None  # 2-norm of every parameter's gradient after, where they are all equal
    line: str = ""  # the script's line that wrote the last of them, "train.py:41"


INACCURATE_ERROR = 0.05  # relative 2-norm error; one rounding to bf16 gives at most 2^-9 = 0.002
READ_LOSS, READ_GRADIENT = "loss", "gradient"  # what a Call named "read" looked at
# In small letters. Texts of torch 2.11 to 2.13 (c10/core/impl/alloc_cpu.cpp and
# CUDACachingAllocator.cpp), of cuBLAS and cuDNN, of TensorFlow and Paddle.
_MEMORY = (
    "can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory",
    "status_alloc_failed", "oom when allocating",
)  # fmt: skip
MIN_HAND_SCALE = 128  # a smaller factor is mostly the weight of one of several losses
COMPILED_FRAMES = "compiled_frames"  # the OpUse that counts what torch.compile compiled
COMPILED_NOTE = (
    "torch.compile was switched off: compiled code was judged as the eager code that it was made "
    "from, whose rounding may differ from the compiled one's."
)
# OpUses of a script that is one kept step of a training (ampscope.watcher.captured_step).
CAPTURED_STEP, CAPTURED_NOTE = "captured_step", "captured_note"
CAPTURED_FORWARD = "captured_forward"  # no finite gradient came back: backward is a probe alone
STAGNATED_SHARE = 0.9  # of the elements that an addition should have moved
# The OpUse of a parameter (its ``module``) that gets gradients, that no optimizer has stepped, and
# that has not moved since ``step``, where it was first seen with one.
UNSTEPPED = "gradient_without_optimizer"
# OpUses of half copies of weights that are used after the weight has changed: autocast keeps the
# copy, or the script itself does. ``value`` steps computed with them, ``count`` weights, up to
# ``other`` of a weight's norm off; ``line`` opened the autocast region or made the copy.
STALE_CACHED, STALE_KEPT = "stale_cached_copy", "stale_kept_copy"
# The same of a half model whose gradients step fp32 weights that are never copied back; no line.
STALE_MODEL = "stale_model_copy"


@dataclass(frozen=True, slots=True)
class Call:
    """One watched call, in the order in which it was made.

    ``name``: scale, unscale_, scaler_step, update, optimizer_step, zero_grad, backward, grad, clip,
    autocast, scaler_new, get_scale, scaler_state_dict, scaler_load_state_dict, save, load,
    load_state (of an optimizer);
    cast, of a module that had fp32 parameters to ``dtype``; kept, right after a backward that
    began while gradients of an earlier one were there that are not finite;
    inputs, the first model's first call; and read: the script looked at a value that was not finite
    and then left the batch. ``subject`` of a read is :data:`READ_LOSS` or :data:`READ_GRADIENT`,
    ``note`` the number of the bad op behind it (-1: it came with the data).
    """

    seq: int
    step: int  # optimizer steps, skipped ones included, before this call
    name: str
    nested: bool = False  # made inside another watched call, such as unscale_ in scaler.step
    subject: str = ""  # "scaler0", "optimizer1"
    value: float | None = None  # scale, loss or norm; of a grad: the share of exact zeros
    scaled: bool = False  # the tensor came from scaler.scale, or gradients still carry the scale
    create_graph: bool = False
    enabled: bool = True  # of a scaler or of autocast
    dtype: str = ""
    line: str = ""  # "train.py:41"
    note: str = ""
    made_at: str = ""  # of a backward: the line that made the loss


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step: taken, or skipped by a scaler."""

    step: int
    optimizer: str
    scaler: str  # "" when it was called directly
    loss: float | None  # of the last backward before it, unscaled
    loss_dtype: str
    scale: float  # 1 without a scaler
    skipped: bool
    unscaled_before: bool  # unscale_ was called before the step
    backwards: int  # backward calls since the last step of this optimizer
    grad_total: int
    grad_zero: int
    grad_nonfinite: int
    grad_max: float | None  # largest finite magnitude, unscaled
    grad_norm: float | None  # unscaled
    lr: float
    moved_share: float | None
    update_norm: float | None
    weight_nonfinite: int
    grad_dtypes: str
    weight_dtypes: str
    state_dtypes: str
    state_nonfinite: int = 0
    state_zero_share: float | None = None  # second moments that are zero although gradients are not
    state_fell_share: float | None = None  # second moments in half that this step made smaller
    eps: float | None = None
    ended_at: float | None = None  # seconds since the epoch
    expected_change: float | None = None  # of the loss by this step: gradient times way, unscaled
    unclipped_norm: float | None = None  # grad_norm before the script clipped it by its norm
    backward_norm: float | None = None  # at the end of a backward of a loss scaled by hand
    # Of a sample of the weights before the step: the share that differs from what it was before
    # this optimizer's last step, and the half format that holds all of its fp32 values exactly.
    moved_since: float | None = None
    held_in: str = ""
    # Of a sample of second moments in half, those that the optimizer's formula makes smaller: the
    # sum of their falls in spacings of the format, exact and as it was; and the formula's decay.
    state_fall_due: float | None = None
    state_fall_done: float | None = None
    state_decay: float | None = None
    # Of a state in fp32 that something else than a step has written since this optimizer's last
    # one, as a checkpoint that is loaded: the half formats that hold all sampled numbers of a kind
    # of state, and the share of second moments that are zero although their first moments are not.
    written_in: str = ""
    written_zero_share: float | None = None
    # The scaler skipped this optimizer's step before, and what was not finite was still in its
    # parameters' grad at each of the one or more backward passes since.
    kept_nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """One parameter's gradient at a step (kept for the first steps and for bad ones)."""

    step: int
    optimizer: str
    name: str
    order: int
    total: int
    zero: int
    nonfinite: int
    norm: float | None  # unscaled, of the finite entries
    sample: tuple[float, ...] = ()  # unscaled, evenly spaced; of the very first step alone


@dataclass(frozen=True, slots=True)
class Scan:
    """A tensor that was looked at outside the ops: ``moment`` is start, batch or end."""

    moment: str
    kind: str  # parameter, buffer, batch, frozen (a parameter that no optimizer has)
    name: str
    dtype: str
    total: int
    nan: int
    inf: int
    max_abs: float | None
    step: int = 0
    change: float | None = None  # |now - first sight| / |first sight|, 2-norms; at the end only
    distinct: int | None = None  # distinct values; half-precision buffers only
    sample: tuple[float, ...] = ()  # some values, evenly spaced; half-precision buffers only
    std: float | None = None
    index: tuple[int, ...] = ()  # of the first element that is not finite
    displacement: tuple[float, ...] = ()  # now - first sight, evenly spaced; parameters at the end
    still: float | None = None  # share of values as at first sight or its rounding; at the end only


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of a bad op."""

    dtype: str
    shape: tuple[int, ...]
    max_abs: float | None
    min_abs: float | None  # smallest non-zero magnitude
    zeros: int
    nonfinite: int
    producers: tuple[str, ...] = ()  # ops that led to it, nearest first
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class BadOp:
    """An op whose finite inputs gave a non-finite output (or lost it, see ``kind``).

    ``kind``: nonfinite; stall (the sum equals its first term although the second is not zero);
    coarse (a half-precision result far from the fp32 result of the same inputs); drift (a running
    sum whose rounding errors add up to that much); cancelled (a difference of numbers that agree so
    closely that little but their rounding to half is left).
    """

    id: int
    kind: str
    step: int
    phase: str  # forward | backward | other
    op: str  # "aten.addmm"
    node: str  # autograd node in backward, "ExpBackward0"
    module: str
    module_type: str
    line: str  # the script's own line that made the op or, in backward, its forward op
    code: str  # that line's text
    dtype: str  # of the output
    inputs: tuple[Operand, ...]
    scalars: tuple[float, ...]
    nan: int
    pos_inf: int
    neg_inf: int
    total: int
    fp32_max: float | None  # largest magnitude of the same op in fp32 on the same inputs
    fp32_finite: bool | None
    autocast: bool
    consumers: tuple[str, ...] = ()  # ops that took its output, nearest first
    count: int = 1
    last_step: int = 0
    reached_loss: bool = False
    reached_gradient: bool = False
    error: float | None = (
        None  # coarse, drift, cancelled: relative; stall: share of stalled elements
    )
    function: str = ""  # the user's autograd.Function around it
    grad_enabled: bool = True
    tracked: bool = True  # an input depends on parameters or gradients: no preparation of data
    index: tuple[int, ...] = ()  # of the first element that is not finite; first comes the sample
    library: str = ""  # line of an installed package that ``line`` led to, "timm/layers/mlp.py:45"
    # Where a later op made its infinity finite: the largest relative 2-norm error of that op's
    # result against fp32's, and the op, "aten.div, train.py:25". Noted when a gradient came back
    # through that op, or, where ``grad_enabled`` is False, at once.
    lost: float | None = None
    lost_at: str = ""
    # Of a cancelled one: the share of its elements that are off, and the other lines whose results
    # were rounded before, "train.py:24"; ``fp32_max`` is what these in fp32 would have given.
    share: float | None = None
    chain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpUse:
    """A fact about how an op was used that a rule may want, once per op and line.

    Requests for half precision that may have come to nothing are of this kind too, with ``op`` for
    what was asked: cuda_missing (autocast or GradScaler on CUDA), cuda_asked (whether there is a
    CUDA device), nullcontext, trainer_fp16 (of Accelerate, on a CPU), cpu_default (autocast on the
    CPU that names no dtype).
    """

    name: str  # "binary_cross_entropy under autocast", "custom Function without custom_fwd" …
    op: str
    module: str
    line: str
    step: int
    value: float | None = None
    other: float | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class LineUse:
    """Calls of one op with the same dtypes by one line of the script, in its first steps."""

    line: str  # "train.py:41": the innermost line of the user's own code
    op: str  # "mm"
    takes: tuple[str, ...]  # dtypes of its floating-point arguments, each once
    makes: str  # dtype of its first floating-point result, "" without one
    backward: bool = False  # it ran in the backward pass of an op of that line
    calls: int = 0
    cast: int = 0  # elements other than zero that casts to a narrower dtype took
    lost: int = 0  # of these, the elements that became zero


@dataclass(frozen=True, slots=True)
class HalfSite:
    """A place at which numbers became half precision, from the script's first line on.

    ``kind``: cast (written in the script), made (a tensor made in half), module (parameters and
    buffers of a module), loaded (out of a file or an array), autocast (added at an op), saved (kept
    for backward by a hook), function (inside an autograd Function of the user's), state (an
    optimizer's own), sum (an accumulator that lives on). ``role`` is what it makes half: weights,
    buffers, moments, gradients, activations, saved activations, labels, whole numbers, masks,
    constants, loss, data; "" where that was not seen. Counts are of the elements looked at, those
    of the first calls.
    """

    kind: str
    line: str  # "train.py:41", the innermost line of the user's own code
    op: str  # "Tensor.half", "torch.zeros", "addmm"
    dtype: str  # fp16, bf16
    role: str = ""
    step: int = 0  # optimizer steps before its first call
    prepares: bool = False  # its first call came before any training began
    calls: int = 0
    elements: int = 0
    changed: int = 0  # not equal to what they were before
    zeroed: int = 0  # became zero
    infinite: int = 0  # became infinite
    merged: int = 0  # distinct numbers that fell onto one another, of those looked at
    distinct: int = 0  # distinct numbers before
    whole: bool = False  # all of them were whole numbers
    largest: float | None = None  # finite magnitude before
    error: float | None = None  # of what was looked at: relative 2-norm
    names: tuple[str, ...] = ()  # dotted paths of modules or parameters, the first few


@dataclass(frozen=True, slots=True)
class Printed:
    """Numbers that the script printed or logged behind the same words, in their order."""

    words: str  # "test error", the text before the number without other numbers
    values: tuple[float, ...]
    rows: tuple[int, ...]  # which of the script's lines of output each stood in, from 0
    ended: bool = True  # False: the output goes on behind what was kept


@dataclass(frozen=True, slots=True)
class Tap:
    """What a graph pass told of one tensor inside compiled code: of the first steps, of random
    numbers in some more, and of the first that are not finite."""

    step: int
    order: int  # in which the graphs of a step made them
    module: str  # dotted path below what was compiled
    role: str  # activation, grad_output, matmul, reduction, saved, draw (random numbers)
    maker: str  # path of the module whose code made it
    op: str  # "aten.addmm"
    line: str
    dtype: str
    largest: float  # finite magnitude
    total: float  # sum of finite magnitudes
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """What inductor put into one generated kernel; kernels count from 1 in the order in which they
    were compiled. ``computed`` is the dtype of its arithmetic, ``unrounded`` are results in half
    that it handed on without rounding them, where eager code rounds each."""

    number: int
    phase: str  # forward, backward
    ops: tuple[str, ...]  # "aten.mul", in the order of the graph
    modules: tuple[str, ...]  # dotted paths below what was compiled
    lines: tuple[str, ...]  # "train.py:41"
    computed: str
    writes: tuple[str, ...]  # dtypes of its results
    unrounded: tuple[str, ...]  # "aten.mul to bf16, train.py:41"


@dataclass(frozen=True, slots=True)
class SourceText:
    """A file of the script's own as it was when the run read it, at most its first 5,000 lines;
    without lines where sources are left out."""

    file: str  # "train.py", as in the lines of other observations
    lines: tuple[str, ...]


# In the order of a step. ops are of one chosen step alone.
DIGEST_ROLES = (
    "start", "input", "op", "activation", "backward_op", "gradient", "weight", "state", "buffer",
)  # fmt: skip

LINE_ROLE = "line"  # of a diagnosis: what lines of the script computed first, ``names`` are ops


@dataclass(frozen=True, slots=True)
class Digests:
    """What the tensors of one role held at one step, in the order in which they were seen: a
    line of each tuple is one tensor. Only of runs that are made to be compared.

    ``role``: one of :data:`DIGEST_ROLES`, or :data:`LINE_ROLE`. start: weights and buffers at a
    model's first call; weight, state and buffer: after the step. ``names`` are dotted paths, of ops
    that of the module.
    """

    step: int
    role: str
    scale: float  # that norms, peaks and sketches were divided by, and checksums were not
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    totals: tuple[int, ...]  # elements
    checksums: tuple[str, ...]  # 64 bits over the raw bits, hexadecimal
    norms: tuple[float, ...]  # 2-norm of the finite elements
    peaks: tuple[float, ...]  # largest finite magnitude
    nonfinite: tuple[int, ...]
    sketches: tuple[str, ...]  # sums with pseudo-random signs: doubles in base64
    ops: tuple[str, ...] = ()  # "addmm(fp16)", the op and the dtypes that it took
    lines: tuple[str, ...] = ()  # of the op, "train.py:41"


@dataclass(frozen=True, slots=True)
class DtypeEntry:
    """The dtype of one tensor of a run, from ``step`` on, and what set it."""

    kind: str  # parameter, buffer, state, activation
    name: str
    dtype: str
    line: str  # of the user's code, "" where none set it
    why: str  # "torch's default dtype", "autocast (fp16)", "module cast"
    step: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run found around it: versions, switches, the optimizer's options, variables."""

    names: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the script ended."""

    ended: str  # returned | exit | exception | steps | time | killed
    exit_code: int = 0
    error_type: str = ""
    error_text: str = ""
    error_line: str = ""
    error_in_function: str = ""
    error_module: str = ""  # dotted path of the innermost module that was running
    error_step: int = 0  # of a caught error; where those come often, error_… is the first's
    errors_caught: int = 0  # out of a forward or backward pass; the script went on
    steps: int = 0  # that were recorded
    slept: int = 0  # optimizer steps before these, that passed unrecorded (--skip-to)
    half_from: int = 0  # the first step in which half precision takes part
    forwards: int = 0  # batches given to an outermost module in training
    elapsed_s: float = 0.0
    backwards: int = 0
    models: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    scalers: tuple[str, ...] = ()
    uses_autocast: str = ""  # dtypes seen, "fp16"
    uses_half_model: str = ""  # dtypes of half parameters seen
    notes: tuple[str, ...] = ()
    last_loss: float | None = None
    eval_nonfinite: bool = False  # a forward pass without gradients gave NaN or Inf after training
    eval_module: str = ""
    eval_taint: int = -1  # the bad op that the evaluation's non-finite output descends from
    eval_nan: int = 0  # outputs of such passes that hold NaN
    eval_inf: int = 0  # … that hold infinities and no NaN; a mask of -inf means to
    traced_ops: int = 0
    # FLOPs of matmuls, convolutions and attention by dtype, forward and backward, most first; and
    # the other ops on half-precision numbers. Optimizers' own ops count in neither.
    flop_dtypes: tuple[str, ...] = ()
    flop_counts: tuple[int, ...] = ()
    half_ops: int = 0
    framework: str = "torch"  # torch | keras | paddle
    peak_bytes: int = 0  # CUDA memory at its highest, on a CPU the process's; 0 unknown
    # Processor seconds of the process per optimizer step after the first; 0 where it does not say
    # what a step takes (on CUDA), or is unknown.
    step_cpu_s: float = 0.0
    gaps: tuple[str, ...] = ()  # ids of policy.op_lists' gaps that the script met
    rank: int = 0  # whose observations these are, of ``ranks`` processes that train together
    ranks: int = 1

    @property
    def is_out_of_memory(self) -> bool:
        """The script ended because memory ran out."""
        if self.ended != "exception":
            return False
        named = self.error_type in ("MemoryError", "OutOfMemoryError")
        said = self.error_text.lower()
        return named or any(text in said for text in _MEMORY)

    @property
    def is_kept_apart(self) -> bool:
        """The script ended because a file cannot be moved or linked from one file system into
        another (EXDEV): perhaps they are two in the run's private view alone."""
        return bool(self.exit_code) and os.strerror(errno.EXDEV) in self.error_text


Observation = (
    Call
    | OptimizerStep
    | ParameterGradient
    | GradientChange
    | Scan
    | BadOp
    | OpUse
    | LineUse
    | HalfSite
    | Printed
    | Tap
    | Kernel
    | SourceText
    | Digests
    | DtypeEntry
    | Surroundings
    | Outcome
)
