"""Every call of a ``paddle.nn.Layer``: its outputs, and the gradients that come back to them.

``Layer.__call__`` is wrapped while the watch lasts. A layer that hands on a child's very
output (Sequential) is not counted twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.paddle.emulation import Emulation
from ampscope.ext.frameworks.paddle.layer_paths import LayerPaths
from ampscope.ext.frameworks.paddle.rounding import MARK
from ampscope.ext.frameworks.paddle.seen_ops import FirstBadOp
from ampscope.ext.frameworks.paddle.values import NAMES, floating_tensors, view
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.ext.frameworks.tensors import TensorBits, is_vanished
from ampscope.patches import Patches
from ampscope.source_lines import SourceLines, line_name

_Layer: Any = paddle.nn.Layer
_COUNTED = "_ampscope_counted"  # attribute of an output: the step and version that were counted
InFp32 = Callable[[Callable[[], Any]], Any]  # runs a function with every op in fp32


class LayerWatch:
    """Hands every call to ``recorder``. ``around`` wraps a layer's call by its path (settings).
    ``is_sparing``: only the calls of steps whose tensors are wanted, and no batches, which are
    evidence for the rules."""

    def __init__(
        self,
        recorder: FrameworkRecorder,
        paths: LayerPaths,
        in_fp32: InFp32,
        emulation: Emulation | None = None,
        around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
        *,
        is_sparing: bool = False,
    ) -> None:
        self.recorder = recorder
        self.paths = paths
        self.stack: list[str] = []  # paths of the layers that are running
        self._in_fp32 = in_fp32
        self._emulation = emulation
        self._around = around
        self._lines = SourceLines()
        self._met: set[str] = set()
        self._bad_calls = 0
        self._asleep = 0
        self._is_sparing = is_sparing

    @property
    def path(self) -> str:
        """Of the innermost layer that is running; "" outside all."""
        return self.stack[-1] if self.stack else ""

    def put_on(self, patches: Patches) -> None:
        """Watch calls of layers."""
        patches.wrap(_Layer, "__call__", self._call)

    def _call(self, original: Any, layer: Any, /, *inputs: Any, **kwargs: Any) -> Any:
        if self._asleep or (self._is_sparing and not self.recorder.wants_tensors):
            return original(layer, *inputs, **kwargs)
        path = self.paths.of(layer)
        if path is None:
            for record in self.paths.add_root(layer):
                self.recorder.module(record)
            path = self.paths.of(layer) or ""
        if not self._is_sparing and not self.stack:
            has_parts = layer._sub_layers or layer._parameters
            self._batch((*inputs, *kwargs.values()), "input" if has_parts else "target")
        bad_before = self._bad_calls
        function: Callable[..., Any] = functools.partial(original, layer)
        if self._around is not None:
            function = self._around(path, function)
        self.stack.append(path)
        try:
            outputs = function(*inputs, **kwargs)
        finally:
            self.stack.pop()
        self._after(layer, path, inputs, kwargs, outputs, self._bad_calls > bad_before)
        return outputs

    def _batch(self, inputs: Any, name: str) -> None:
        """Tensors that no op of the model made."""
        for number, tensor in enumerate(floating_tensors(inputs)):
            if name == "input" or tensor.stop_gradient:
                self.recorder.batch(f"{name}{number}", view(tensor))

    def _after(
        self, layer: Any, path: str, inputs: Any, kwargs: Any, outputs: Any, hands_on: bool
    ) -> None:
        started, spent = time.perf_counter(), self.recorder.elapsed_s
        step, wants = self.recorder.steps, self.recorder.wants_tensors
        new = []
        for tensor in floating_tensors(outputs):
            seen = step, tensor.inplace_version
            if getattr(tensor, _COUNTED, None) != seen:
                setattr(tensor, _COUNTED, seen)
                new.append(tensor)
                if wants and not tensor.stop_gradient and not tensor.is_leaf:
                    tensor.register_hook(functools.partial(self._gradient, path, _label(tensor)))
        if new:
            counted = tuple(view(tensor, _label(tensor)) for tensor in new)
            kind, training = type(layer).__name__, bool(layer.training)
            if path not in self._met:
                self._met.add(path)
                self.recorder.bad_layers.called(self._described(layer, path, (), counted, hands_on))
            is_bad = self.recorder.outputs(path, kind, counted, training) > 0
            if is_bad or (training and is_vanished(counted)):
                self._bad_calls += is_bad
                self.recorder.bad(self._described(layer, path, (inputs, kwargs), counted, hands_on))
        inside = self.recorder.elapsed_s - spent  # the recorder counts its own time
        self.recorder.elapsed_s += time.perf_counter() - started - inside

    def _described(
        self, layer: Any, path: str, given: Any, outputs: tuple[TensorBits, ...], hands_on: bool
    ) -> LayerCall:
        return LayerCall(
            path=path,
            type=type(layer).__name__,
            op=op_of(layer),
            inputs=tuple(view(t, _label(t)) for t in floating_tensors(given)),
            outputs=outputs,
            compute_dtype=outputs[0].name,
            line=line_name(self._lines.where()),
            is_training=bool(layer.training),
            in_fp32=lambda: self._again(layer, given),
            closer=lambda: self._closer(layer, path, given),
            weights=lambda: _own_weights(layer),
            hands_on=hands_on,
        )

    def _gradient(self, path: str, label: str, gradient: Any) -> None:
        if gradient is not None and gradient.dtype in NAMES:
            self.recorder.backward(path, view(gradient, label))

    def _again(self, layer: Any, given: Any) -> TensorBits | None:
        """The same layer on the same inputs in fp32."""
        with self._rerun(layer):
            found = floating_tensors(self._in_fp32(lambda: layer(*given[0], **given[1])))
            # The tensor may be gone before its bits are read.
            return TensorBits(view(found[0]).bits.copy(), NAMES[found[0].dtype]) if found else None
        return None

    def _closer(self, layer: Any, path: str, given: Any) -> LayerCall | None:
        """The op inside that began it; None on CUDA, where ops are not seen."""
        if self._emulation is None:
            return None
        before = self._emulation.op_seen
        first = FirstBadOp(path, type(layer).__name__, self._lines)
        self._emulation.op_seen = first
        try:
            with self._rerun(layer):
                layer(*given[0], **given[1])
        finally:
            self._emulation.op_seen = before
        return first.found

    @contextmanager
    def _rerun(self, layer: Any) -> Iterator[None]:
        """What a second call changes on the way (statistics, the random state) is put back. An
        error of a layer that cannot run twice is ignored."""
        buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
        state = paddle.get_rng_state()
        self._asleep += 1
        try:
            with paddle.no_grad():
                yield
        except Exception:
            return
        finally:
            self._asleep -= 1
            paddle.set_rng_state(state)
            for buffer, before in buffers:
                buffer.set_value(before)


def _label(tensor: Any) -> str:
    return getattr(tensor, MARK, "")


def _own_weights(layer: Any) -> tuple[TensorBits, ...]:
    return tuple(view(p, _label(p)) for p in floating_tensors(list(layer._parameters.values())))


# What a layer computes, in the words of PyTorch's ops that the rules know.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("linear", ("Linear",)),
    (
        "convolution",
        ("Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"),
    ),
    ("embedding", ("Embedding",)),
    ("native_layer_norm", ("LayerNorm",)),
    (
        "native_batch_norm",
        ("BatchNorm", "BatchNorm1D", "BatchNorm2D", "BatchNorm3D", "SyncBatchNorm"),
    ),
    ("native_group_norm", ("GroupNorm",)),
    ("softmax", ("Softmax",)),
    ("log_softmax", ("LogSoftmax",)),
    ("cross_entropy_loss", ("CrossEntropyLoss",)),
    ("mse_loss", ("MSELoss",)),
)
_OPS = {
    getattr(paddle.nn, name): op
    for op, names in _KINDS
    for name in names
    if hasattr(paddle.nn, name)
}


def op_of(layer: object) -> str:
    """ "linear", "convolution", …; "layer" for one that is none of these."""
    for kind in type(layer).__mro__:
        if kind in _OPS:
            return _OPS[kind]
    return "layer"
