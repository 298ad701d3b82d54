"""Controls that change the precision of a whole script: everything in fp32, or fp16 as bf16.

A dtype policy is read from its name, so the name keeps what the script asked for
("mixed_float16") and the dtypes that it stands for change. Casts that the script makes itself
follow. Weights that would have been made in half precision get those very values: random numbers
differ by dtype, and runs that begin apart cannot be compared step by step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ampscope.patches import Patches

_DTYPES = {
    "fp32": {"float16": "float32", "bfloat16": "float32"},
    "bf16": {"float16": "bfloat16"},
}


class _Wide(str):
    """A dtype that stands for ``narrow``, which the script asked for."""

    __slots__ = ("narrow",)
    narrow: str


class _Replacing:
    """The dtypes that stand for others."""

    def __init__(self, instead: dict[str, str]) -> None:
        self.instead = instead
        self.is_paused = False  # while weights get the values that they would have had

    def parse_name(self, original: Any, policy: Any, name: Any) -> tuple[str, str]:
        """``DTypePolicy._parse_name``."""
        compute, variable = original(policy, name)
        compute = self.instead.get(compute, compute)
        if variable not in self.instead:
            return compute, variable
        wide = _Wide(self.instead[variable])
        wide.narrow = variable
        return compute, wide

    def initialize(self, original: Any, variable: Any, initializer: Any) -> None:
        """``Variable._initialize_with_initializer``."""
        narrow = getattr(variable._dtype, "narrow", None)
        wide = str(variable._dtype)

        def in_narrow(shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
            self.is_paused = True
            try:
                values = initializer(shape, dtype=narrow, **kwargs)
            finally:
                self.is_paused = False
            return keras.ops.cast(values, wide)

        original(variable, initializer if narrow is None else in_narrow)

    def cast(self, original: Any, x: Any, dtype: Any, name: str | None = None) -> Any:
        """``tf.cast``, through which Keras' own casts go as well."""
        if self.is_paused:
            return original(x, dtype, name=name)
        try:
            asked = tf.as_dtype(dtype).name
        except TypeError:
            return original(x, dtype, name=name)
        return original(x, self.instead.get(asked, dtype), name=name)


def control_precision(patches: Patches, precision: str) -> None:
    """``precision`` is fp32 or bf16; "" changes nothing."""
    if not precision:
        return
    replacing = _Replacing(_DTYPES[precision])
    patches.wrap(keras.DTypePolicy, "_parse_name", replacing.parse_name)
    patches.wrap(keras.Variable, "_initialize_with_initializer", replacing.initialize)
    patches.wrap(tf, "cast", replacing.cast)
