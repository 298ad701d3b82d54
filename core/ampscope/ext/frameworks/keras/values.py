"""A tensor of TensorFlow as bits with its dtype's name, without a copy.

An eager tensor on a CPU shares its memory with the array that ``_numpy()`` gives, and a variable's
buffer is copied by TensorFlow before an assignment while other code still holds its value: what was
read before an optimizer step stays as it was.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ampscope.ext.frameworks.tensors import TensorBits

SHORT_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
FLOATS = frozenset((tf.float16, tf.bfloat16, tf.float32, tf.float64))


def values_of(tensor: Any) -> TensorBits | None:
    """Bits of an eager floating-point tensor; None for anything else."""
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)  # rows that came twice are added up
    if getattr(tensor, "dtype", None) not in FLOATS:
        return None
    read = getattr(tensor, "_numpy", None)
    if read is None:
        return None  # symbolic, ragged or spread over devices
    return TensorBits.of(read())


def variable_values(variable: Any) -> TensorBits | None:
    """Bits of a variable of Keras or TensorFlow as it is now."""
    inner = getattr(variable, "_value", variable)  # of Keras: without its cast to a layer's dtype
    if getattr(inner, "dtype", None) not in FLOATS:
        return None
    try:
        handle = inner.handle
    except (AttributeError, ValueError):
        return values_of(tf.convert_to_tensor(inner))
    return values_of(tf.raw_ops.ReadVariableOp(resource=handle, dtype=inner.dtype))


def scalar(value: Any) -> float | None:
    """A number, from a tensor, variable or number; None where it cannot be read."""
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    try:
        return float(tf.convert_to_tensor(value))  # a variable that every replica has
    except (TypeError, ValueError):
        return None


def short_name(dtype: Any) -> str:
    """``fp16`` of ``"float16"`` or ``tf.float16``."""
    name = getattr(dtype, "name", str(dtype))
    return SHORT_NAMES.get(name, name)
