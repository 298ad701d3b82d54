"""Looking at single ops: which ran in which dtype, and which one made a layer's output bad.

Both listen to :class:`.emulation.Emulation`. In fp32, and with Paddle's lists, the first is the
plan that a GPU would follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.paddle.op_names import FIRST_INPUT_ONLY
from ampscope.ext.frameworks.paddle.rounding import MARK
from ampscope.ext.frameworks.paddle.values import NAMES, floating_tensors, view
from ampscope.ext.frameworks.tensors import TensorBits
from ampscope.records import OpRecord
from ampscope.source_lines import SourceLines, line_name

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


def _kept(tensor: Any, label: str) -> TensorBits:
    values = view(tensor, label if label != NAMES[tensor.dtype] else "")
    return TensorBits(values.bits.copy(), values.dtype, values.label)


def _copied(run: Callable[[], Any]) -> TensorBits | None:
    """The first output of ``run``, which the op's own errors do not end."""
    try:
        with paddle.no_grad():
            found = floating_tensors(run())
    except Exception:
        return None
    return _kept(found[0], "") if found else None
