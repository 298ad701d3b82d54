"""fp16 and bf16 on a CPU, where Paddle's auto_cast does nothing: every op rounds as a GPU would.

Each function of ``paddle._C_ops``, each name by which Paddle has imported one, and each operator of
Tensor is replaced by one that decides by Paddle's own lists in which dtype a GPU would run the op
(:func:`dtype_of_op`), rounds inputs and outputs to it, and computes in fp32 in between: half in,
fp32 accumulation, half out, as Tensor Cores do. A tensor that would be half on a GPU is an fp32
tensor that carries a mark.

Also here: looking at single ops, the open auto_cast region, rounding, and decorated models.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.paddle.values import NAMES as FLOAT_NAMES
from ampscope.ext.frameworks.paddle.values import (
    floating_tensors,
    is_floating,
    memory,
    names_of,
    view,
)
from ampscope.ext.frameworks.tensors import Values
from ampscope.patches import Patches
from ampscope.records import OpRecord
from ampscope.source_lines import SourceLines, line_name

# The tensors among an op's arguments and results: found, cast as AMP would, put in place.


Tensor: Any = paddle.Tensor
NAMES = {  # AMP leaves fp64 alone
    paddle.float32: "fp32",
    paddle.float16: "fp16",
    paddle.bfloat16: "bf16",
}


def inputs_of(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Tensors that AMP would look at, in order."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if value.dtype in NAMES:
                found.append(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            found += [t for t in value if isinstance(t, Tensor) and t.dtype in NAMES]
    return found


def any_marked(tensors: list[Any]) -> bool:
    return any(hasattr(tensor, MARK) for tensor in tensors)


def cast_to(tensor: Any, dtype: str, target: str) -> Any:
    """``tensor`` as an op that computes in ``target`` gets it."""
    if target != "fp32":
        known = dtype == target and tensor.stop_gradient
        return tensor if known else rounded(tensor, target)
    return tensor if dtype == "fp32" else rounded_gradient(tensor, dtype)


def swapped(value: Any, cast: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return cast.get(id(value), value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [cast.get(id(part), part) for part in value]
    return value


def marked(result: Any, op: str, target: str, *, moves: bool) -> Any:
    """The op's output, rounded and marked where it is half. Of a norm the first output alone: its
    statistics stay fp32."""
    if target == "fp32":
        return result
    if isinstance(result, Tensor):
        if result.dtype != paddle.float32:
            return result
        if moves:
            setattr(result, MARK, target)
            return result
        return rounded(result, target)
    if isinstance(result, tuple | list):
        first = 1 if op in FIRST_INPUT_ONLY else len(result)
        parts = [marked(p, op, target, moves=moves) for p in result[:first]]
        return type(result)([*parts, *result[first:]])
    return result


# Paddle's two names of an op: that of the call and that of the AMP lists.
#
# ``paddle._C_ops.sum`` is ``reduce_sum`` in the lists and in Paddle's own operator statistics: C++
# translates (phi::TransToFluidOpName) before it looks an op up. A name that is not here is the
# same in both. A test compares these with the statistics that Paddle itself collects.


LISTED = {
    "add": "elementwise_add",
    "bicubic_interp": "bicubic_interp_v2",
    "bilinear_interp": "bilinear_interp_v2",
    "cross_entropy_with_softmax": "softmax_with_cross_entropy",
    "divide": "elementwise_div",
    "embedding": "lookup_table_v2",
    "expand": "expand_v2",
    "flatten": "flatten_contiguous_range",
    "floor_divide": "elementwise_floordiv",
    "fmax": "elementwise_fmax",
    "fmin": "elementwise_fmin",
    "full": "fill_constant",
    "full_like": "fill_any_like",
    "gaussian": "gaussian_random",
    "hardsigmoid": "hard_sigmoid",
    "hardswish": "hard_swish",
    # A CPU build computes F.linear by `linear` (matmul, then add), a CUDA build by `linear_v2`,
    # which is on the white list (nn/functional/common.py).
    "linear": "linear_v2",
    "linear_interp": "linear_interp_v2",
    "matmul": "matmul_v2",
    "matmul_with_flatten": "mul",
    "max": "reduce_max",
    "maximum": "elementwise_max",
    "mean": "reduce_mean",
    "mean_all": "mean",
    "min": "reduce_min",
    "minimum": "elementwise_min",
    "multiply": "elementwise_mul",
    "nearest_interp": "nearest_interp_v2",
    "prod": "reduce_prod",
    "remainder": "elementwise_mod",
    "squeeze": "squeeze2",
    "subtract": "elementwise_sub",
    "sum": "reduce_sum",
    "topk": "top_k_v2",
    "transpose": "transpose2",
    "trilinear_interp": "trilinear_interp_v2",
    "uniform": "uniform_random",
    "unsqueeze": "unsqueeze2",
}

# Operators of Tensor are C++ of their own and go through none of the functions above.
_ARITHMETIC = {
    "add": "elementwise_add",
    "sub": "elementwise_sub",
    "mul": "elementwise_mul",
    "truediv": "elementwise_div",
    "div": "elementwise_div",
    "pow": "elementwise_pow",
    "matmul": "matmul_v2",
}
OPERATORS = {
    **{f"__{side}{name}__": op for name, op in _ARITHMETIC.items() for side in ("", "r")},
    "__mod__": "elementwise_mod",
    "__floordiv__": "elementwise_floordiv",
    "_getitem_dygraph": "slice",
    "clone": "assign",
}

# Ops that move numbers about and change none: what is half going in is half coming out.
MOVING = frozenset((
    "assign", "concat", "expand", "expand_as", "expand_v2", "flatten_contiguous_range", "flip",
    "gather", "gather_nd", "index_select", "masked_select", "pad", "pad3d", "repeat_interleave",
    "reshape", "reshape2", "roll", "slice", "split", "split_with_num", "squeeze2", "stack",
    "strided_slice", "take_along_axis", "tile", "transpose2", "tril", "triu", "unbind",
    "unsqueeze2", "unstack", "view_shape", "where",
))  # fmt: skip

# Their other inputs (scale, bias, statistics) are never cast (AmpAutoCast in eager_amp_auto_cast).
FIRST_INPUT_ONLY = frozenset(("batch_norm", "layer_norm", "sync_batch_norm", "weight_only_linear"))


def listed_name(function: str) -> str:
    """Name in the lists of ``paddle._C_ops.<function>``; in-place ones end with "_"."""
    plain = function[:-1] if function.endswith("_") and not function.startswith("_") else function
    return LISTED.get(plain, plain)


def operator_name(method: str, *, with_number: bool) -> str:
    """Name in the lists of a method of Tensor, whose other operand may be a plain number."""
    name = OPERATORS[method]
    return _WITH_NUMBER.get(method, name) if with_number else name


_WITH_NUMBER = {
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"), "scale"),
    "__truediv__": "div_scale",
    "__div__": "div_scale",
    "__pow__": "pow",
}


# Looking at single ops: which ran in which dtype, and which one made a layer's output bad.
#
# Both listen to :class:`Emulation`. In fp32, and with Paddle's lists, the first is the
# plan that a GPU would follow.


# Words of PyTorch's ops, by which the rules know what an op does; others keep Paddle's name.
_WORDS = {
    "linear_v2": "linear",
    "matmul_v2": "matmul",
    "mul": "mm",
    "conv2d": "convolution",
    "conv3d": "convolution",
    "depthwise_conv2d": "convolution",
    "conv2d_transpose": "convolution",
    "elementwise_add": "add",
    "elementwise_sub": "sub",
    "elementwise_mul": "mul",
    "elementwise_div": "div",
    "elementwise_pow": "pow",
    "scale": "mul",
    "square": "mul",
    "reduce_sum": "sum",
    "reduce_mean": "mean",
    "reduce_prod": "prod",
    "layer_norm": "native_layer_norm",
    "batch_norm": "native_batch_norm",
    "lookup_table_v2": "embedding",
    "softmax_with_cross_entropy": "cross_entropy_loss",
}


@dataclass(frozen=True, slots=True)
class OpRun:
    """One op that ran. ``inputs`` are its tensors as they came, ``dtypes`` what they stand for;
    ``plain`` runs it again without any cast."""

    op: str
    dtype: str
    inputs: list[Any]
    dtypes: list[str]
    result: Any
    plain: Callable[[], Any]


class OpCounts:
    """Calls of each op with the same dtypes in the same layer, in one step, and the casts that AMP
    puts before them. ``module`` gives the layer's number, or None while no model is known."""

    def __init__(self, module: Callable[[], int | None]) -> None:
        self._module = module
        self._counts: Counter[tuple[int, str, tuple[str, ...], str]] = Counter()

    def __call__(self, run: OpRun) -> None:
        """An op ran."""
        module = self._module()
        if module is None:
            return
        cast = 1 if run.op in FIRST_INPUT_ONLY else len(run.dtypes)
        inputs = (*(run.dtype for _ in run.dtypes[:cast]), *run.dtypes[cast:])
        self._counts[module, run.op, inputs, run.dtype] += 1
        for before in run.dtypes[:cast]:
            if before != run.dtype:
                self._counts[module, "cast", (before,), run.dtype] += 1

    def take(self) -> list[OpRecord]:
        """Since the last call."""
        found = [
            OpRecord(
                module, "forward", f"paddle.{op}", ",".join(inputs), outputs, count,
                is_cast=op == "cast",
            )
            for (module, op, inputs, outputs), count in self._counts.items()
        ]  # fmt: skip
        self._counts.clear()
        return found


class FirstBadOp:
    """Keeps the first op whose finite inputs gave a non-finite output, as a call of ``path``."""

    def __init__(self, path: str, type_: str, lines: SourceLines) -> None:
        self.found: LayerCall | None = None
        self._path, self._type, self._lines = path, type_, lines

    def __call__(self, run: OpRun) -> None:
        """An op ran."""
        outputs = floating_tensors(run.result)[:1]  # the others are its statistics
        if self.found is not None or not outputs or _is_finite(outputs[0]):
            return
        if not all(_is_finite(tensor) for tensor in run.inputs):
            return
        reference = _copied(run.plain)
        self.found = LayerCall(
            path=self._path,
            type=self._type,
            op=_WORDS.get(run.op, run.op),
            inputs=tuple(_kept(t, d) for t, d in zip(run.inputs, run.dtypes, strict=True)),
            outputs=tuple(_kept(t, getattr(t, MARK, "")) for t in outputs),
            compute_dtype=run.dtype,
            line=line_name(self._lines.where()),
            in_fp32=lambda: reference,
        )


def _is_finite(tensor: Any) -> bool:
    return bool(np.isfinite(view(tensor).floats()).all())


def _kept(tensor: Any, label: str) -> Values:
    values = view(tensor, label if label != FLOAT_NAMES[tensor.dtype] else "")
    return Values(values.bits.copy(), values.dtype, values.label)


def _copied(run: Callable[[], Any]) -> Values | None:
    """The first output of ``run``, which the op's own errors do not end."""
    try:
        with paddle.no_grad():
            found = floating_tensors(run())
    except Exception:
        return None
    return _kept(found[0], "") if found else None


_FP32, _FP16, _BF16 = paddle.float32, paddle.float16, paddle.bfloat16
TARGETS = {_FP16: "fp16", _BF16: "bf16", "float16": "fp16", "bfloat16": "bf16"}
_SKIPPED_ENDINGS = ("_grad", "_grad_")
# Optimizers and the scaler work on the numbers as they are; `cast` has a function of its own.
_SKIPPED = frozenset((
    "adadelta_", "adagrad_", "adam_", "adamax_", "adamw_", "asgd_", "average_accumulates_",
    "cast", "cast_", "fused_adam_", "check_finite_and_unscale_", "decayed_adagrad", "dpsgd",
    "ftrl", "lamb_", "lars_momentum_", "merged_adam_", "merged_momentum_", "momentum_", "nadam_",
    "radam_", "rmsprop_", "rprop_", "sgd_", "update_loss_scaling_", "assign_value_", "share_data",
    "share_var", "print", "isfinite", "isinf", "isnan", "shape", "shape64",
))  # fmt: skip

OpSeen = Callable[[OpRun], None]


def _instead(value: Any, original: Any) -> Any:
    """What stands in the place of ``original`` while an emulation is active."""
    return value


class Emulation:
    """Replaces ops inside ``with``. ``fp32_depth`` above zero: everything in fp32, whatever the
    region (layers that a setting keeps in fp32). ``op_seen`` hears of every op that ran."""

    def __init__(self, region: OpenRegion) -> None:
        self.region = region
        self.op_seen: OpSeen | None = None
        self.fp32_depth = 0
        self.halves: set[str] = set()  # dtypes of ops that ran in half

    @contextmanager
    def active(self) -> Iterator[Emulation]:
        """Replace the ops; everything is put back."""
        with Patches() as patches:
            for owner, name, value in [*self._functions(), *self._methods()]:
                patches.replace(owner, name, functools.partial(_instead, value))
            yield self

    def run(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """Run one op as a GPU would."""
        found = inputs_of(args, kwargs)
        region = self.region.now()
        if not found or (region is None and self.op_seen is None and not any_marked(found)):
            return function(*args, **kwargs)
        dtypes = [getattr(t, MARK, None) or NAMES[t.dtype] for t in found]
        target = "fp32" if self.fp32_depth else dtype_of_op(region, op, dtypes)
        if target == "fp32" and "fp16" not in dtypes and "bf16" not in dtypes:
            result = function(*args, **kwargs)
        else:
            result = self._rounded(function, op, target, found, dtypes, (args, kwargs))
        if self.op_seen is not None:
            plain = functools.partial(function, *args, **kwargs)
            self.op_seen(OpRun(op, target, found, dtypes, result, plain))
        return result

    def _rounded(
        self, function: Any, op: str, target: str, found: list[Any], dtypes: list[str], given: Any
    ) -> Any:
        args, kwargs = given
        moves = op in MOVING and all(dtype == target for dtype in dtypes)
        if not moves:
            only = found[:1] if op in FIRST_INPUT_ONLY else found
            cast = {id(t): cast_to(t, d, target) for t, d in zip(only, dtypes, strict=False)}
            args = [swapped(a, cast) for a in args]
            kwargs = {k: swapped(v, cast) for k, v in kwargs.items()}
        if target != "fp32":  # a layer may add an fp32 bias at its end, and put out fp32
            self.halves.add(target)
        return marked(function(*args, **kwargs), op, target, moves=moves)

    def run_in_place(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """An op that overwrites its first argument, whose dtype it therefore keeps."""
        found = inputs_of(args, kwargs) if self.op_seen is not None else []
        dtypes = [getattr(t, MARK, None) or NAMES[t.dtype] for t in found]
        result = function(*args, **kwargs)
        if found and self.op_seen is not None:
            self.op_seen(OpRun(op, dtypes[0], found[:1], dtypes[:1], result, lambda: None))
        half = getattr(args[0], MARK, None) if args else None
        if half is not None and op not in MOVING:
            numbers = memory(args[0])
            if numbers is not None:
                round_memory(numbers, half)
        return result

    def cast(self, function: Callable[..., Any], tensor: Any, dtype: Any) -> Any:
        """A cast that the script asks for: to half it rounds and marks, from half it rounds the
        gradient."""
        mark, target = getattr(tensor, MARK, None), TARGETS.get(dtype)
        if target is not None and tensor.dtype == _FP32:
            return rounded(tensor, target)
        if target is not None:
            return rounded(function(tensor, _FP32), target)
        if mark is not None and dtype in (_FP32, "float32"):
            return rounded_gradient(tensor, mark)
        return function(tensor, dtype)

    def _functions(self) -> Iterator[tuple[Any, str, Any]]:
        """Modules, names there, and what is to stand there: wherever Paddle has bound an op."""
        table: Any = paddle._C_ops
        replacements: dict[int, Any] = {}
        for name, function in list(vars(table).items()):
            if isinstance(function, types.BuiltinFunctionType):
                made = self._replacement(name, function)
                if made is not None:
                    replacements[id(function)] = made
        for key, module in list(sys.modules.items()):
            # By key: paddle._C_ops has taken over the __name__ of the C++ module too.
            if key.split(".")[0] == "paddle" and key not in _OWNERS and module is not None:
                for name, value in list(vars(module).items()):
                    if id(value) in replacements:
                        yield module, name, replacements[id(value)]

    def _replacement(self, name: str, function: Callable[..., Any]) -> Any:
        if name == "cast":
            return functools.wraps(function)(lambda x, dtype, *rest: self.cast(function, x, dtype))
        if name in _SKIPPED or name.startswith("sparse") or name.endswith(_SKIPPED_ENDINGS):
            return None
        op, run = listed_name(name), self.run
        if name.endswith("_") and not name.startswith("_"):
            run = self.run_in_place
        return functools.wraps(function)(lambda *args, **kwargs: run(function, op, args, kwargs))

    def _methods(self) -> Iterator[tuple[Any, str, Any]]:
        """The class of tensors, names of its operators, and what is to stand there."""
        for method in OPERATORS:
            yield Tensor, method, self._method(method, getattr(Tensor, method))

    def _method(self, method: str, original: Callable[..., Any]) -> Any:
        number, tensor = (operator_name(method, with_number=n) for n in (True, False))

        def operate(left: Any, *others: Any) -> Any:
            op = tensor if others and isinstance(others[0], Tensor) else number
            return self.run(original, op, (left, *others), {})

        return functools.wraps(original)(operate)


_OWNERS = ("paddle.base.libpaddle.eager.ops", "paddle.base.libpaddle.pir.ops")


# Which auto_cast region is open, and in which dtype an op runs in it.
#
# Paddle keeps the arguments of the innermost ``amp_guard`` in a module variable, on a CPU too,
# where the guard itself does nothing. :func:`dtype_of_op` is GetAmpDestDtype and GetPromoteType of
# Paddle 3.x (paddle/fluid/imperative/amp_utils.h), less what only a GPU build knows: ops that have
# no half kernel there.


# `paddle.amp.auto_cast` is the function of that name, which hides its module.
AUTO_CAST: Any = sys.modules["paddle.amp.auto_cast"]
HALF = {"float16": "fp16", "bfloat16": "bf16"}
DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Region:
    """An enabled auto_cast region."""

    half: str  # fp16 | bf16
    level: str  # OD | O1 | O2
    white: frozenset[str]
    black: frozenset[str]
    promotes: bool = True

    def word(self, op: str) -> str:
        """Which of Paddle's lists holds the op."""
        return "white" if op in self.white else "black" if op in self.black else "grey"


class OpenRegion:
    """Follows Paddle's own variable; ``half`` replaces the script's dtype, "fp32" switches off."""

    def __init__(self, half: str = "") -> None:
        self._half = half
        self._state: Any = None
        self._region: Region | None = None

    def now(self) -> Region | None:
        """The open region, or None."""
        state = AUTO_CAST._g_amp_state_
        if state is not self._state:
            self._state = state
            self._region = None if state is None else self._read(state)
        return self._region

    def _read(self, state: dict[str, Any]) -> Region | None:
        level = str(state["level"]).upper()
        if not state["enable"] or level == "O0" or self._half == "fp32":
            return None
        dtype = state["dtype"]
        name = str(getattr(dtype, "name", dtype)).lower()
        half = self._half or HALF[name]
        lists = AUTO_CAST._update_list(
            state["custom_white_list"], state["custom_black_list"], level, DTYPE_NAMES[half]
        )
        white, black = (frozenset(names) for names in lists)
        return Region(half, level, white, black, bool(state["use_promote"]) or level != "O2")


def dtype_of_op(region: Region | None, op: str, dtypes: Sequence[str]) -> str:
    """ "fp16", "bf16" or "fp32": what ``op`` computes in, given its floating-point inputs' dtypes.

    Outside a region an op runs in its inputs' own dtype; of different ones the wider is taken.
    """
    if not dtypes:
        return "fp32"
    seen = dtypes[:1] if op in FIRST_INPUT_ONLY else dtypes
    if region is None:
        return dtypes[0] if all(d == dtypes[0] for d in seen) else "fp32"
    word = region.word(op)
    if not region.promotes:
        return "fp32" if word == "black" else region.half
    if word != "grey":
        return region.half if word == "white" else "fp32"
    if region.level == "OD" or "fp32" in seen:
        return "fp32"
    return region.half


# Rounding to half precision: of a tensor, with its gradient, and of memory in place.
#
# Two casts, there and back, round the gradient on its way back too, as a half-precision tensor on
# a GPU would have it: what is too large becomes Inf, what is too small zero.


MARK = "_ampscope_dtype"  # attribute of a tensor that stands for a half-precision one
DTYPES = {"fp16": paddle.float16, "bf16": paddle.bfloat16}
_cast = paddle._C_ops.cast  # bound before anything replaces it


def rounded(tensor: Any, half: str) -> Any:
    """fp32 tensor with values of ``half``, marked; its gradient is rounded in the same way."""
    result = _cast(_cast(tensor, DTYPES[half]), paddle.float32)
    setattr(result, MARK, half)
    return result


def rounded_gradient(tensor: Any, half: str) -> Any:
    """What a cast from ``half`` to fp32 gives: the same values, unmarked; a rounded gradient."""
    return _cast(_cast(tensor, DTYPES[half]), paddle.float32)


def round_memory(memory: NDArray[np.float32], half: str) -> None:
    """Round in place."""
    with np.errstate(over="ignore", invalid="ignore"):
        if half == "fp16":
            memory[:] = memory.astype(np.float16)
            return
    bits = memory.view(np.uint32)
    nan = np.isnan(memory)
    kept = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)
    kept[nan] = np.uint32(0x7FC00000)
    bits[:] = kept


def dtype_name(tensor: Any, names: dict[Any, str]) -> str:
    """The dtype that a tensor stands for; "" for what is no floating-point tensor."""
    mark = getattr(tensor, MARK, None)
    return mark if mark is not None else names.get(tensor.dtype, "")


# ``paddle.amp.decorate(level="O2")`` on a CPU: parameters that hold half-precision values.
#
# Paddle leaves a CPU's parameters alone. Here those that it would cast on a GPU, by its own rule
# (need_keep_fp32), are rounded and marked, and optimizers get fp32 master weights unless
# ``master_weight=False``. A parameter's gradient is half then, also after GradScaler divided it by
# the scale, which can bring it to zero; with ``master_grad=True`` it is fp32.


_Scaler: Any = paddle.amp.AmpScaler
_Optimizer: Any = paddle.optimizer.Optimizer
# Their state is fp32 whatever the parameter (`acc_dtype` in paddle/optimizer/*.py of 3.3.1);
# that of all others has the parameter's dtype where there are no master weights.
STATE_IN_FP32 = ("Adam", "AdamW", "Adamax", "Lamb", "NAdam", "RAdam")


def keeps_half_state(optimizer: Any) -> bool:
    """Whether the optimizer's state has the dtype of a half-precision parameter."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    return not optimizer._multi_precision and kinds.isdisjoint(STATE_IN_FP32)


class HalfParameters:
    """Marked parameters and their master weights; ``half`` replaces the script's own dtype."""

    def __init__(self, half: str = "") -> None:
        self._half = half
        self._masters: dict[int, NDArray[np.float32]] = {}
        self._decorated: list[Any] = []
        self.master_grad = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """decorate, optimizers and unscaling as on a GPU. On exit parameters keep their values and
        lose their marks."""
        with Patches() as patches:
            for module, name in list(names_of(AUTO_CAST.amp_decorate)):
                patches.replace(module, name, lambda _: self._decorate)
            patches.wrap(_Optimizer, "_apply_optimize", self._applied)
            patches.wrap(_Scaler, "_unscale", self._unscaled)
            try:
                yield
            finally:
                for parameter in self._decorated:
                    parameter.__dict__.pop(MARK, None)

    def _applied(
        self, original: Any, optimizer: Any, loss: Any, startup_program: Any, params_grads: Any,
        *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        pairs = params_grads["params"] if isinstance(params_grads, dict) else params_grads
        half = [parameter for parameter, _ in pairs if hasattr(parameter, MARK)]
        self._before(optimizer, half)
        result = original(optimizer, loss, startup_program, params_grads, *rest, **kwargs)
        self._after(optimizer, half)
        return result

    def _unscaled(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        result = original(scaler, optimizer)
        if not self.master_grad:
            _round_gradients(optimizer)
        return result

    def _decorate(
        self,
        models: Any,
        optimizers: Any = None,
        level: str = "O1",
        dtype: str = "float16",
        master_weight: bool | None = None,
        save_dtype: str | None = None,
        master_grad: bool = False,
        excluded_layers: Any = None,
    ) -> Any:
        if level not in ("O1", "O2"):
            raise ValueError("level should be O1 or O2")  # as Paddle raises
        if level == "O2" and self._half != "fp32":
            half = self._half or HALF[dtype]
            roots = models if isinstance(models, list) else [models]
            AUTO_CAST.check_models(roots)
            AUTO_CAST.set_excluded_layers(roots, excluded_layers)
            for layer in (part for root in roots for part in root.sublayers(include_self=True)):
                if not AUTO_CAST.need_keep_fp32(layer, dtype):
                    self._cast(layer, half)
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                if optimizer is not None:
                    AUTO_CAST._set_multi_precision(optimizer, master_weight is not False)
            self.master_grad = master_grad
        return models if optimizers is None else (models, optimizers)

    def _cast(self, layer: Any, half: str) -> None:
        own = [*layer._parameters.values(), *layer._buffers.values()]
        for tensor in own:
            numbers = memory(tensor) if tensor is not None and is_floating(tensor) else None
            if numbers is not None and not hasattr(tensor, MARK):
                # A GPU makes master weights of the rounded parameter, and so does this.
                round_memory(numbers, half)
                setattr(tensor, MARK, half)
                self._decorated.append(tensor)

    def _before(self, optimizer: Any, half: list[Any]) -> None:
        """The optimizer works on the master weights."""
        if not optimizer._multi_precision:
            return
        for parameter in half:
            numbers, master = memory(parameter), self._masters.get(id(parameter))
            if numbers is not None and master is not None:
                numbers[:] = master

    def _after(self, optimizer: Any, half: list[Any]) -> None:
        for parameter in half:
            numbers = memory(parameter)
            if numbers is None:
                continue
            if optimizer._multi_precision:
                self._masters[id(parameter)] = numbers.copy()
            round_memory(numbers, getattr(parameter, MARK))
        if half and keeps_half_state(optimizer):
            marks = {parameter.name: getattr(parameter, MARK) for parameter in half}
            for kind, by_name in optimizer._accumulators.items():
                for name, state in by_name.items():
                    numbers = memory(state) if name in marks and "pow" not in kind else None
                    if numbers is not None:
                        round_memory(numbers, marks[name])


def _round_gradients(optimizer: Any) -> None:
    groups = optimizer._parameter_list or []
    for part in groups:
        for parameter in part["params"] if isinstance(part, dict) else [part]:
            gradient = parameter._grad_ivar() if hasattr(parameter, MARK) else None
            numbers = memory(gradient) if gradient is not None else None
            if numbers is not None:
                round_memory(numbers, getattr(parameter, MARK))
