"""Every layer's call: its outputs counted and kept for their gradients, its inputs available when
an output is not finite. Operations between the layers of a functional model are watched too.

Calls while a graph is traced are left alone: their tensors hold no numbers.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.keras.called_again import Called, fp32_policy
from ampscope.ext.frameworks.keras.op_words import layer_kind, op_kind
from ampscope.ext.frameworks.keras.training import KerasTraining, module_record
from ampscope.ext.frameworks.keras.values import FLOATS, short_name, values_of, variable_values
from ampscope.ext.frameworks.tensors import TensorBits, is_vanished
from ampscope.patches import Patches


@dataclass(slots=True)
class LayerWatch:
    """The layers that are being called, outermost first."""

    training: KerasTraining
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
        self, called: Called, path: str, values: tuple[TensorBits, ...], is_training: bool
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


def _weights(layer: Any, is_training: bool) -> tuple[TensorBits, ...]:
    """What the call read: in training not the moving averages, which it has changed by now."""
    variables = getattr(layer, "trainable_weights" if is_training else "weights", ())
    return tuple(v for w in variables if (v := variable_values(w)) is not None)


def _inputs(called: Called) -> list[tuple[str, TensorBits]]:
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


def _values(tensor: Any) -> TensorBits | None:
    if isinstance(tensor, np.ndarray):
        return TensorBits.of(tensor) if tf.as_dtype(tensor.dtype) in FLOATS else None
    return values_of(tensor)
