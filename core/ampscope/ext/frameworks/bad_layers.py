"""Layers whose finite inputs gave a non-finite output, or sent a non-finite gradient back.

A layer is looked at as one op. Whether its value reached the loss is read off the step: the first
bad layer of a step whose loss is not finite is where that began, because layers run in order. A
layer of an unknown kind whose output has vanished is looked into as well. Gradients arrive from
the last layer to the first: the first one that is not finite was born in the layer whose own
gradient, just before it, still was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ampscope.ext.frameworks.tensors import TensorBits, is_there, largest
from ampscope.observations import BadOp, Operand

MAX_LOOKS = 3  # into a layer whose output has vanished, which may be as it should
_LayerKey = tuple[str, str]  # path, op


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer in a forward pass.

    ``op`` says what the layer computes in the words of PyTorch's ops where there is one (linear,
    convolution, matmul, native_layer_norm, native_batch_norm, add, softmax, embedding), so that the
    rules know its kind; else ``layer``. ``in_fp32`` computes the same from the same inputs in fp32;
    it is asked only when a non-finite output came from finite inputs. So is ``closer``, and where
    an output has vanished: the first op inside whose finite inputs gave a non-finite output, as a
    call of the same ``path``; None where there is none, or the layer itself is as close as one can
    look. ``weights`` are the layer's own: a layer whose weights are not finite made nothing bad
    itself.
    """

    path: str
    type: str
    op: str
    inputs: tuple[TensorBits, ...]
    outputs: tuple[TensorBits, ...]
    compute_dtype: str  # fp16 | bf16 | fp32
    line: str = ""  # "train.py:41", of the script
    is_training: bool = True
    in_fp32: Callable[[], TensorBits | None] = _unknown
    closer: Callable[[], LayerCall | None] = _unknown
    weights: Callable[[], tuple[TensorBits, ...]] = tuple
    consumers: tuple[str, ...] = ()  # of a single op: what took its output, nearest first
    hands_on: bool = False  # a layer inside this one has put out a non-finite value already


class BadLayers:
    """Bad layers by path; a layer that is bad again counts up."""

    def __init__(self) -> None:
        self._known: dict[_LayerKey, BadOp] = {}
        self._seen: dict[str, LayerCall] = {}  # the first call of each layer
        self._looks: Counter[str] = Counter()  # by path, where the output had vanished
        self._around: set[str] = set()  # paths that hold a bad layer of the forward pass under way
        self._first: _LayerKey | None = None  # of the step that is under way
        self._finite: tuple[str, TensorBits] | None = None  # the last gradient that was
        self._born: tuple[str, TensorBits | None, TensorBits] | None = (
            None  # the first that was not
        )

    def called(self, call: LayerCall) -> None:
        """Any call."""
        if call.path not in self._seen:
            kept = call.path, call.type, call.op, (), (), call.compute_dtype, call.line
            self._seen[call.path] = LayerCall(*kept)  # holds no tensors, nor what could give them

    def met(self, call: LayerCall, step: int) -> None:
        """A call with a non-finite output, or with one that has vanished."""
        is_container = call.path in self._around
        self._around |= _around(call.path)
        if not any(values.nonfinite for values in call.outputs):
            if not is_container and call.op == "layer":
                self._vanished(call, step)
            return
        if is_container or any(values.nonfinite for values in call.inputs):
            return  # it only hands on what came in, or what a layer inside made
        if any(values.nonfinite for values in call.weights()):
            return  # broken by an earlier step
        key = call.path, call.op
        if self._first is None and call.is_training:
            self._first = key
        if not self._is_known(key, step):
            self._known[key] = _bad_op(len(self._known), call.closer() or call, call, step)

    def _is_known(self, key: _LayerKey, step: int) -> bool:
        """Whether the layer was bad before; then it counts up."""
        known = self._known.get(key)
        if known is not None:
            self._known[key] = replace(known, count=known.count + 1, last_step=step)
        return known is not None

    def _vanished(self, call: LayerCall, step: int) -> None:
        """Bad where an op inside made infinities that something after it turned into zeros."""
        key = call.path, "vanished"
        if self._is_known(key, step):
            return
        if self._looks[call.path] < MAX_LOOKS and any(map(is_there, call.inputs)):
            self._looks[call.path] += 1
            if op := call.closer():
                self._known[key] = _bad_op(len(self._known), op, call, step)

    def gradient(self, path: str, gradient: TensorBits, *, is_bad: bool) -> None:
        """Came back to a layer's output."""
        if not is_bad:
            if self._born is None:
                self._finite = path, gradient
        elif self._born is None:
            at, came = self._finite or ("", None)
            self._born = at, came, gradient

    def reached_loss(self, step: int) -> None:
        """The loss of this step is not finite."""
        self._mark(self._first, reached_loss=True)

    def reached_gradient(self, step: int) -> None:
        """The loss is finite and a gradient is not."""
        if self._first is not None or self._born is None:
            self._mark(self._first, reached_gradient=True)
            return
        key, op = self._backward_op(len(self._known), step, *self._born)
        if not self._is_known(key, step):
            self._known[key] = op

    def next_step(self) -> None:
        """The step is over."""
        self._first = self._finite = self._born = None
        self._around.clear()

    def records(self) -> list[BadOp]:
        """All of them, in the order in which they were met."""
        return list(self._known.values())

    def _mark(self, key: _LayerKey | None, **reached: bool) -> None:
        if key is not None:
            self._known[key] = replace(self._known[key], **reached)  # type: ignore[arg-type]  # flags

    def _backward_op(
        self, number: int, step: int, path: str, came: TensorBits | None, gradient: TensorBits
    ) -> tuple[_LayerKey, BadOp]:
        """Of the layer at ``path``; "" without a finite gradient before it: of the loss."""
        loss = LayerCall(path, "", "loss", (), (), gradient.name)
        seen = loss if came is None else self._seen.get(path, loss)
        call = replace(
            seen,
            op=f"{seen.op.rpartition('.')[2]}_backward",
            inputs=() if came is None else (came,),
            outputs=(gradient,),
            compute_dtype=gradient.name,
        )
        op = replace(_bad_op(number, call, call, step), phase="backward", reached_gradient=True)
        return (path, call.op), op


def _around(path: str) -> set[str]:
    """{"", "a", "a.b"} of "a.b.c": all that hold it; nothing of the root."""
    parts = path.split(".")
    return {".".join(parts[:depth]) for depth in range(len(parts))} if path else set()


def _bad_op(number: int, call: LayerCall, layer: LayerCall, step: int) -> BadOp:
    """``call`` is the layer's own, or one of an op inside it, which may have taken its weights."""
    weights = layer.weights()
    out = np.concatenate([values.floats() for values in call.outputs])
    reference = call.in_fp32()
    fp32 = None if reference is None else reference.floats()
    has_finite = fp32 is not None and np.isfinite(fp32).any()
    return BadOp(
        id=number,
        kind="nonfinite",
        step=step,
        phase="forward",
        op=call.op if "." in call.op else f"layer.{call.op}",
        node="",
        module=call.path,
        module_type=call.type,
        line=call.line,
        code="",
        dtype=call.compute_dtype,
        inputs=(
            *(replace(_operand(v), is_parameter=_is_one_of(v, weights)) for v in call.inputs),
            *(replace(_operand(v), is_parameter=True) for v in weights if call is layer),
        ),
        scalars=(),
        nan=int(np.isnan(out).sum()),
        pos_inf=int(np.isposinf(out).sum()),
        neg_inf=int(np.isneginf(out).sum()),
        total=int(out.size),
        fp32_max=largest(fp32) if fp32 is not None and has_finite else None,
        fp32_finite=None if fp32 is None else bool(np.isfinite(fp32).all()),
        autocast=call.compute_dtype in ("fp16", "bf16"),
        last_step=step,
        consumers=call.consumers,
    )


def _is_one_of(values: TensorBits, weights: tuple[TensorBits, ...]) -> bool:
    """Whether an op took one of ``weights``, perhaps cast to half precision."""
    same = [w.floats() for w in weights if w.size == values.size]
    return any(np.allclose(w, values.floats(), rtol=2**-8, atol=2**-24) for w in same)


def _operand(values: TensorBits) -> Operand:
    floats = np.abs(values.floats())
    kept = floats[np.isfinite(floats)]
    nonzero = kept[kept > 0]
    return Operand(
        values.name,
        (values.size,),
        float(kept.max()) if kept.size else None,
        float(nonzero.min()) if nonzero.size else None,
        int((floats == 0).sum()),
        values.nonfinite,
    )
