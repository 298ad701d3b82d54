"""Every layer's call: its outputs counted and kept for their gradients, its inputs available when
an output is not finite. Operations between the layers of a functional model are watched too.

Calls while a graph is traced are left alone: their tensors hold no numbers.

Also here: what a layer or op computes in the words of PyTorch's ops, and a bad layer called again
in fp32 and op by op.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.eager.context import context
from tensorflow.python.eager.record import could_possibly_record, stop_recording
from tensorflow.python.framework import op_callbacks

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.keras.training import Training, module_record
from ampscope.ext.frameworks.keras.values import FLOATS, short_name, values_of, variable_values
from ampscope.ext.frameworks.tensors import Values, is_vanished
from ampscope.patches import Patches


@dataclass(slots=True)
class LayerWatch:
    """The layers that are being called, outermost first."""

    training: Training
    stack: list[Any] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # by path, where it was first called
    known: set[str] = field(default_factory=set)
    roots: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def put_on(self, patches: Patches) -> None:
        """Watch every layer and operation of Keras."""
        patches.wrap(keras.layers.Layer, "__call__", self._layer)
        patches.wrap(keras.Operation, "__call__", self._operation)

    def _layer(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.training.is_watching:
            return original(layer, *args, **kwargs)
        return self._call(original, layer, args, kwargs)

    def _operation(self, original: Any, operation: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_layer = isinstance(operation, keras.layers.Layer)
        if is_layer or not self.stack or not self.training.is_watching:
            return original(operation, *args, **kwargs)
        return self._call(original, operation, args, kwargs)

    def _call(self, original: Any, layer: Any, args: Any, kwargs: Any) -> Any:
        wanted = self.training.settings.fp32_modules
        if not self.stack and _is_symbolic(args, kwargs):
            return original(layer, *args, **kwargs)
        self.stack.append(layer)
        if len(self.stack) == 1 and layer not in self.roots:
            self._root_met(layer)
        try:
            if wanted and self._path(len(self.stack) - 1) in wanted:
                with fp32_policy(layer):
                    outputs = original(layer, *args, **kwargs)
            else:
                outputs = original(layer, *args, **kwargs)
            started = time.perf_counter()
            self._called(Called(layer, args, kwargs, original), outputs)
            self.training.own_s += time.perf_counter() - started
        finally:
            self.stack.pop()
        return outputs

    def _called(self, called: Called, outputs: Any) -> None:
        flat = [outputs] if tf.is_tensor(outputs) else tf.nest.flatten(outputs)
        seen = [(t, v) for t in flat if (v := values_of(t)) is not None]
        if not seen:
            return  # symbolic, or whole numbers
        training, layer = self.training, called.layer
        path = self._path(len(self.stack) - 1)
        if path not in self.known:
            self.known.add(path)
            self.lines[path] = training.line()
            if isinstance(layer, keras.layers.Layer):
                training.recorder.module(module_record(path, layer))
            training.recorder.bad_layers.called(self._described(called, path, (), True))
        is_training = could_possibly_record()
        if is_training:
            if len(self.stack) == 1:
                self._root_called(called)
            training.keep_outputs(path, [t for t, _ in seen])
        values = tuple(v for _, v in seen)
        is_bad = training.recorder.outputs(path, type(layer).__name__, values, is_training)
        if is_bad or (is_training and is_vanished(values)):
            training.recorder.bad(self._described(called, path, values, is_training))

    def _described(
        self, called: Called, path: str, values: tuple[Values, ...], is_training: bool
    ) -> LayerCall:
        layer = called.layer
        op = layer_kind(layer)
        if not isinstance(layer, keras.layers.Layer):
            op = op_kind(type(layer).__name__)
        dtype = getattr(layer, "compute_dtype", None)
        return LayerCall(
            path,
            type(layer).__name__,
            op,
            tuple(v for _, v in _inputs(called)) if values else (),
            values,
            short_name(dtype) if dtype else values[0].name if values else "",
            self.lines[path],
            is_training,
            lambda: self.training.quietly(called.in_fp32),
            lambda: self._closer(called, path, op),
            lambda: _weights(layer, is_training),
        )

    def _closer(self, called: Called, path: str, op: str) -> LayerCall | None:
        """The op inside a layer of an unknown kind."""
        if op != "layer":
            return None
        return self.training.quietly(lambda: called.first_bad_op(path, self.training.line))

    def _root_met(self, layer: Any) -> None:
        """A model that has its weights gets its layers' numbers from the root down."""
        if getattr(layer, "built", False):
            self.roots.add(layer)
            self._path(0)
            if self.training.paths.is_built():
                for path, each in self.training.paths.layers():
                    self.training.recorder.module(module_record(path, each))

    def _root_called(self, called: Called) -> None:
        for name, values in _inputs(called):
            self.training.recorder.batch(name, values)

    def _path(self, level: int) -> str:
        """Of the layer at that level of the stack."""
        parent = self.stack[level - 1] if level else None
        if parent is not None:
            self._path(level - 1)
        return self.training.paths.of(self.stack[level], parent)


def _is_symbolic(args: Any, kwargs: Any) -> bool:
    """A functional model is being put together."""
    return any(isinstance(t, keras.KerasTensor) for t in tf.nest.flatten((args, kwargs)))


def _weights(layer: Any, is_training: bool) -> tuple[Values, ...]:
    """What the call read: in training not the moving averages, which it has changed by now."""
    variables = getattr(layer, "trainable_weights" if is_training else "weights", ())
    return tuple(v for w in variables if (v := variable_values(w)) is not None)


def _inputs(called: Called) -> list[tuple[str, Values]]:
    """Floating-point tensors that went in, ``input``, ``input.1`` or by keyword."""
    found = []
    for at, value in enumerate((*called.args, *called.kwargs.values())):
        if value is None or isinstance(value, bool):
            continue
        names = ["input", *(f"input.{i}" for i in range(1, len(called.args))), *called.kwargs]
        for tensor in [value] if tf.is_tensor(value) else tf.nest.flatten(value):
            values = _values(tensor)
            if values is not None:
                found.append((names[at], values))
    return found


def _values(tensor: Any) -> Values | None:
    if isinstance(tensor, np.ndarray):
        return Values.of(tensor) if tf.as_dtype(tensor.dtype) in FLOATS else None
    return values_of(tensor)


# What a layer of Keras or an op of TensorFlow computes, in the words of PyTorch's ops.
#
# The rules know an op's kind by those words; what has none here is ``layer``.


_LAYERS = {
    "Dense": "linear",
    "EinsumDense": "einsum",
    "BatchNormalization": "native_batch_norm",
    "LayerNormalization": "native_layer_norm",
    "GroupNormalization": "native_group_norm",
    "RMSNormalization": "rms_norm",
    "UnitNormalization": "linalg_vector_norm",
    "Add": "add",
    "Subtract": "sub",
    "Multiply": "mul",
    "Average": "mean",
    "Concatenate": "cat",
    "Dot": "bmm",
    "Softmax": "softmax",
    "Embedding": "embedding",
    "ReLU": "relu",
    "Dropout": "dropout",
    "Rescaling": "mul",
}
_PREFIXES = {
    "Conv": "convolution",
    "DepthwiseConv": "convolution",
    "SeparableConv": "convolution",
    "MaxPooling": "max_pool2d",
    "AveragePooling": "avg_pool2d",
    "GlobalAveragePooling": "mean",
    "GlobalMaxPooling": "amax",
}
# Operations between the layers of a functional model, and kernels of TensorFlow.
_OPS = {
    "MatMul": "matmul", "BatchMatMul": "bmm", "BatchMatMulV2": "bmm", "BatchMatMulV3": "bmm",
    "Matmul": "matmul", "Einsum": "einsum", "Dot": "dot", "Tensordot": "matmul",
    "Conv1D": "convolution", "Conv2D": "convolution", "Conv3D": "convolution",
    "DepthwiseConv2dNative": "convolution", "Add": "add", "AddV2": "add", "AddN": "add",
    "BiasAdd": "add", "Sub": "sub", "Subtract": "sub", "ConcatV2": "cat", "Pack": "stack",
    "Cast": "_to_copy", "Mul": "mul", "Multiply": "mul", "RealDiv": "div", "Div": "div",
    "DivNoNan": "div", "Divide": "div", "Reciprocal": "reciprocal", "Rsqrt": "rsqrt", "Pow": "pow",
    "Power": "pow", "Square": "square", "SquaredDifference": "square", "Exp": "exp",
    "Expm1": "expm1", "Cosh": "cosh", "Sinh": "sinh", "Log": "log", "Log1p": "log1p", "Sum": "sum",
    "Mean": "mean", "Prod": "prod", "Cumsum": "cumsum", "Var": "var", "Std": "std",
    "Softmax": "_softmax", "LogSoftmax": "_log_softmax", "Softplus": "softplus",
    "UnsortedSegmentSum": "segment_reduce", "AvgPool": "avg_pool2d", "L2Loss": "linalg_vector_norm",
    "FusedBatchNormV3": "native_batch_norm", "Fill": "full", "SelectV2": "where",
    "Reshape": "view", "Transpose": "transpose", "ExpandDims": "unsqueeze", "Squeeze": "squeeze",
}  # fmt: skip


def layer_kind(layer: Any) -> str:
    """Of a layer or operation, by its class or a class that it is derived from."""
    return _kind_of(type(layer))  # type: ignore[arg-type]  # a class is hashable


@cache
def _kind_of(layer_type: type) -> str:
    for kind in layer_type.__mro__:
        name = kind.__name__
        if not kind.__module__.startswith("keras."):
            continue
        if name in _LAYERS:
            return _LAYERS[name]
        for prefix, op in _PREFIXES.items():
            if name.startswith(prefix) and name.rstrip("123D").endswith(prefix):
                return op
    return "layer"


def op_kind(name: str) -> str:
    """Of a kernel or an operation between layers, ``aten.matmul``; its own name when unknown."""
    return f"aten.{_OPS[name]}" if name in _OPS else f"tf.{name}"


# A layer whose finite inputs gave a non-finite output, called again: in fp32, and op by op.
#
# Both happen at the first sight of a bad layer only. What a call changes (moving averages, the
# state of random generators) is put back, and no tape records it.


_HALF = (tf.float16, tf.bfloat16)


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a layer or operation that can be made again; ``again`` is its own ``__call__``."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: Callable[..., Any]

    def in_fp32(self) -> Values | None:
        """All outputs of the same call in fp32; None where it cannot be made."""
        try:
            with undisturbed(self.layer), fp32_policy(self.layer):
                args, kwargs = tf.nest.map_structure(_widened, (self.args, self.kwargs))
                outputs = tf.nest.flatten(self.again(self.layer, *args, **kwargs))
        except Exception:
            return None  # a layer that insists on half precision
        found = [v.floats().astype(np.float32) for o in outputs if (v := values_of(o)) is not None]
        return Values.of(np.concatenate(found)) if found else None

    def first_bad_op(self, path: str, line: Callable[[], str]) -> LayerCall | None:
        """The first kernel whose finite inputs gave a non-finite output, and which ones then took
        what it put out."""
        found: list[LayerCall] = []
        consumers: list[str] = []
        descend: list[Any] = []  # held, so that no other tensor gets their ids

        def look(
            op_type: str | bytes,
            inputs: Sequence[Any],
            attrs: Any,
            outputs: Sequence[Any],
            op_name: object = None,
            graph: object = None,
        ) -> None:
            if graph is not None:
                return
            known = {id(t) for t in descend}
            if found and any(id(t) in known for t in inputs):
                consumers.append(_kind(op_type).rpartition(".")[2])
                descend.extend(outputs)
            if not found and _is_born(inputs, outputs):
                found.append(_of_op(path, self.layer, op_type, inputs, attrs, outputs, line()))
                descend.extend(outputs)

        with undisturbed(self.layer):
            op_callbacks.add_op_callback(look)
            try:
                self.again(self.layer, *self.args, **self.kwargs)
            except Exception:
                return None
            finally:
                op_callbacks.remove_op_callback(look)
        return replace(found[0], consumers=tuple(consumers)) if found else None


@contextlib.contextmanager
def undisturbed(layer: Any) -> Iterator[None]:
    """What calls inside change in ``layer`` is put back."""
    kept = [(v, tf.identity(v.value)) for v in getattr(layer, "non_trainable_variables", ())]
    random_numbers = getattr(context(), "_rng", None)
    state = random_numbers.getstate() if random_numbers is not None else None
    try:
        with stop_recording():
            yield
    finally:
        for variable, value in kept:
            variable.assign(value)
        if random_numbers is not None:
            random_numbers.setstate(state)


@contextlib.contextmanager
def fp32_policy(layer: Any) -> Iterator[None]:
    """``layer`` and all layers in it compute in fp32, with their weights as they are."""
    inside = layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else ()
    kept = [(each, each._dtype_policy) for each in inside]
    try:
        for each, policy in kept:
            each._dtype_policy = wide_policy(policy)
        yield
    finally:
        for each, policy in kept:
            each._dtype_policy = policy


def wide_policy(policy: Any) -> Any:
    """fp32 for computing; weights stay in the dtype that they have."""
    wide = keras.DTypePolicy("float32")
    wide._compute_dtype = "float32"
    wide._variable_dtype = policy.variable_dtype
    return wide


def _widened(value: Any) -> Any:
    return tf.cast(value, tf.float32) if getattr(value, "dtype", None) in _HALF else value


def _is_born(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    return any(map(_has_nonfinite, outputs)) and not any(map(_has_nonfinite, inputs))


def _has_nonfinite(tensor: Any) -> bool:
    values = values_of(tensor)
    return values is not None and not bool(np.isfinite(values.floats()).all())


def _of_op(
    path: str, layer: Any, op_type: str | bytes, inputs: Sequence[Any], attrs: Any,
    outputs: Sequence[Any], line: str,
) -> LayerCall:  # fmt: skip
    def in_fp32() -> Values | None:
        return _op_in_fp32(op_type, inputs, attrs, len(outputs))

    dtype = next(o.dtype for o in outputs if o.dtype in FLOATS)
    return LayerCall(
        path,
        type(layer).__name__,
        _kind(op_type),
        tuple(v for t in inputs if (v := values_of(t)) is not None),
        tuple(v for t in outputs if (v := values_of(t)) is not None),
        short_name(dtype),
        line,
        in_fp32=in_fp32,
    )


def _kind(op_type: str | bytes) -> str:
    return op_kind(op_type.decode() if isinstance(op_type, bytes) else op_type)


def _op_in_fp32(
    op_type: str | bytes, inputs: Sequence[Any], attrs: Any, count: int
) -> Values | None:
    """The kernel again with every half-precision input and attribute as fp32."""
    half = {dtype.as_datatype_enum for dtype in _HALF}
    wide = tuple(
        tf.float32.as_datatype_enum if isinstance(a, int) and i % 2 and a in half else a
        for i, a in enumerate(attrs or ())
    )
    with stop_recording():
        args = [_widened(t) for t in inputs]
        try:
            outputs = execute.quick_execute(op_type, count, args, wide, context())
        except Exception:
            return None
    found = [v for t in outputs if (v := values_of(t)) is not None]
    return found[0] if found else None
