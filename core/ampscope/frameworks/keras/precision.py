"""Controls that change the precision of a whole script: everything in fp32, or fp16 as bf16.

A dtype policy is read from its name, so the name keeps what the script asked for ("mixed_float16")
and the dtypes that it stands for change. Casts that the script makes itself follow.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from ampscope.capture.script.patches import Patches

_DTYPES = {
    "fp32": {"float16": "float32", "bfloat16": "float32"},
    "bf16": {"float16": "bfloat16"},
}


def control_precision(patches: Patches, precision: str) -> None:
    """``precision`` is fp32 or bf16; "" changes nothing."""
    if not precision:
        return
    instead = _DTYPES[precision]
    patches.replace(keras.DTypePolicy, "_parse_name", lambda original: _parsing(original, instead))
    patches.replace(tf, "cast", lambda original: _casting(original, instead))


def _parsing(original: Any, instead: dict[str, str]) -> Any:
    @functools.wraps(original)
    def parse_name(policy: Any, name: Any) -> tuple[str, str]:
        compute, variable = original(policy, name)
        return instead.get(compute, compute), instead.get(variable, variable)

    return parse_name


def _casting(original: Any, instead: dict[str, str]) -> Any:
    @functools.wraps(original)
    def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
        try:
            asked = tf.as_dtype(dtype).name
        except TypeError:
            return original(x, dtype, name=name)
        return original(x, instead.get(asked, dtype), name=name)

    return cast
