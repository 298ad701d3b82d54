"""A layer whose finite inputs gave a non-finite output, called again: in fp32, and op by op.

Both happen at the first sight of a bad layer only. What a call changes (moving averages, the state
of random generators) is put back, and no tape records it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import execute
from tensorflow.python.eager.context import context
from tensorflow.python.eager.record import stop_recording
from tensorflow.python.framework import op_callbacks

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.keras.op_words import op_kind
from ampscope.ext.frameworks.keras.values import FLOATS, short_name, values_of
from ampscope.ext.frameworks.tensors import TensorBits

_HALF = (tf.float16, tf.bfloat16)


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a layer or operation that can be made again; ``again`` is its own ``__call__``."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: Callable[..., Any]

    def in_fp32(self) -> TensorBits | None:
        """All outputs of the same call in fp32; None where it cannot be made."""
        try:
            with undisturbed(self.layer), fp32_policy(self.layer):
                args, kwargs = tf.nest.map_structure(_widened, (self.args, self.kwargs))
                outputs = tf.nest.flatten(self.again(self.layer, *args, **kwargs))
        except Exception:
            return None  # a layer that insists on half precision
        found = [v.floats().astype(np.float32) for o in outputs if (v := values_of(o)) is not None]
        return TensorBits.of(np.concatenate(found)) if found else None

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
    def in_fp32() -> TensorBits | None:
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
) -> TensorBits | None:
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
