"""What the instruments of one watched training share: its layers' dotted paths, its backward
passes, and which replica runs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import keras
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras.values import short_name
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.records import ModuleRecord

# Dotted paths of layers, and names of weights.
#
# A layer is called by the attribute that holds it, lists by their index (``blocks.0.attn.q``),
# inside Sequential and functional models by its own name (``dense_1``). The first model that is
# called is the root, with the path ""; another one's layers begin with its name.


_NOT_CHILDREN = ("_layers", "_functional", "_tracker", "_operations")


class LayerPaths:
    """Paths by layer, and names by variable."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._prefixes: list[str] = []  # of the roots so far

    def of(self, layer: Any, parent: Any | None) -> str:
        """The path of ``layer``, called inside ``parent``, which is None for a root."""
        known = self._paths.get(layer)
        if known is not None:
            return known
        if parent is not None:
            self._adopt(parent, self._paths[parent])  # it may have got new layers since
            if layer not in self._paths:
                self._paths[layer] = _joined(self._paths[parent], layer.name)
            self._adopt(layer, self._paths[layer])
            return self._paths[layer]
        prefix = "" if not self._prefixes and _children(layer) else layer.name
        self._prefixes.append(prefix)
        self._paths[layer] = prefix
        self._adopt(layer, prefix)
        return prefix

    def layers(self) -> list[tuple[str, Any]]:
        """(path, layer) of all that are known, each before those inside it."""
        return [(path, layer) for layer, path in self._paths.items()]

    def is_built(self) -> bool:
        """Whether all of them have their weights."""
        return all(getattr(layer, "built", True) for layer in self._paths)

    def variable_names(self) -> dict[int, tuple[str, str, Any]]:
        """By ``id``: (name, kind, variable); kind is parameter, frozen or buffer. A variable that
        several layers share belongs to the first of them."""
        found: dict[int, tuple[str, str, Any]] = {}
        taken: set[str] = set()
        for path, layer in self.layers():
            trained = {id(v) for v in getattr(layer, "trainable_variables", ())}
            for variable, kind in _own_variables(layer):
                if kind == "parameter" and id(variable) not in trained:
                    kind = "frozen"
                if id(variable) not in found:
                    name = _free(_joined(path, variable.name), taken)
                    taken.add(name)
                    found[id(variable)] = name, kind, variable
        return found

    def _adopt(self, layer: Any, path: str) -> None:
        for name, child in _children(layer):
            if child not in self._paths:
                self._paths[child] = _joined(path, name)
                self._adopt(child, self._paths[child])


def module_record(path: str, layer: Any) -> ModuleRecord:
    """What the store keeps of a layer."""
    own = [v for v, kind in _own_variables(layer) if kind == "parameter"]
    return ModuleRecord(
        0,
        path,
        type(layer).__name__,
        "+".join(sorted({short_name(v._dtype) for v in own})),  # .dtype is that of the call
        sum(int(v.shape.num_elements() or 0) for v in own),
        is_leaf=not _children(layer),
    )


def modules_of(model: Any) -> list[ModuleRecord]:
    """The layers of a model that has its weights, from the root down."""
    paths = LayerPaths()
    paths.of(model, None)
    if not paths.is_built():
        return []
    layers = enumerate(paths.layers())
    return [replace(module_record(path, layer), index=i) for i, (path, layer) in layers]


def _own_variables(layer: Any) -> Iterator[tuple[Any, str]]:
    for variable in getattr(layer, "_trainable_variables", ()):
        yield variable, "parameter"
    for variable in getattr(layer, "_non_trainable_variables", ()):
        yield variable, "buffer"


def _children(layer: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    if isinstance(layer, keras.Sequential) or getattr(layer, "_operations", None):
        found = [(child.name, child) for child in layer.layers]
        seen = {id(child) for _, child in found}
    for name, value in vars(layer).items() if hasattr(layer, "__dict__") else ():
        if name in _NOT_CHILDREN or name.startswith("_self_"):  # TensorFlow's own bookkeeping
            continue
        for at, child in _layers_in(name, value):
            if id(child) not in seen:
                seen.add(id(child))
                found.append((at, child))
    return [(n, c) for n, c in found if not isinstance(c, keras.layers.InputLayer)]


def _layers_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.layers.Layer):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _layers_in(f"{name}.{index}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _layers_in(f"{name}.{key}", item)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _free(name: str, taken: set[str]) -> str:
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    return unique


T = TypeVar("T")
# Keras 3.15, LossScaleOptimizer._tf_apply: `finite` is that of the first replica, and gradients are
# summed over replicas only after it. Measured: Inf in the second replica reaches the weights.
FIRST_REPLICA = (
    "Keras' LossScaleOptimizer looks at the gradients of the first replica alone: an overflow in "
    "another one is not skipped and reaches the weights."
)

MAX_KEPT = 20_000  # outputs whose gradients never came: forward passes under a tape for their sake
_Output = tuple[str, Any]  # of a layer by its path


@dataclass(slots=True)
class Backward:
    """One call of ``GradientTape.gradient``."""

    loss: float | None
    loss_dtype: str
    scaled: bool | None  # the loss had gone through ``scale_loss``; None: not known
    sources: frozenset[int]  # ids of the variables
    count: int = 1  # calls for the same variables since their last step
    unscaled_by: float | None = None  # ampscope's own scaler divided the gradients by this


@dataclass(slots=True)
class KerasTraining:
    """One per ``watching``."""

    recorder: FrameworkRecorder
    settings: ControlSettings
    line: Callable[[], str] = str  # the script's own line that is running
    paths: LayerPaths = field(default_factory=LayerPaths)
    notes: list[str] = field(default_factory=list)
    outputs: list[_Output] = field(default_factory=list)  # of layers, under a tape
    unreached: list[_Output] | None = None  # of these, once a tape was asked
    backwards: list[Backward] = field(default_factory=list)
    own_s: float = 0.0  # of the instruments, since the last step
    began: float = field(default_factory=time.perf_counter)
    quiet: int = 0  # > 0: our own calls of layers, not to be recorded

    def note(self, sentence: str) -> None:
        """Once each."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def keep_outputs(self, path: str, tensors: list[Any]) -> None:
        """For every ``GradientTape.gradient`` until the next forward pass: of two tapes side by
        side each has its own."""
        if self.unreached is not None or len(self.outputs) >= MAX_KEPT:
            self.outputs, self.unreached = [], None
        self.outputs += [(path, t) for t in tensors]

    def take_outputs(self) -> tuple[list[_Output], list[_Output]]:
        """(all, those that no tape has reached yet); a layer that a backward pass calls
        again has its own outputs."""
        outputs, unreached = self.outputs, self.unreached
        self.outputs, self.unreached = [], None
        return outputs, outputs if unreached is None else unreached

    def give_back(
        self, outputs: list[_Output], unreached: list[_Output], gradients: list[Any]
    ) -> None:
        """After a tape was asked; its gradient is None where the target does not depend on one."""
        missed = {id(t) for (_, t), g in zip(outputs, gradients, strict=True) if g is None}
        self.outputs = outputs
        self.unreached = [(path, t) for path, t in unreached if id(t) in missed]

    def forget_reached(self) -> None:
        """An optimizer steps: activations are not held for its time but for another tape."""
        if self.unreached is not None:
            self.outputs = self.unreached

    def quietly(self, look: Callable[[], T]) -> T:
        """What ``look`` returns; nothing inside is recorded."""
        self.quiet += 1
        try:
            return look()
        finally:
            self.quiet -= 1

    @property
    def is_watching(self) -> bool:
        """In eager code, in the first replica, and not in a call of our own."""
        return not self.quiet and tf.executing_eagerly() and replica() == 0


def replica() -> int:
    """Number of the replica whose code is running; 0 without a strategy, -1 between replicas."""
    if not tf.distribute.has_strategy():
        return 0
    context = tf.distribute.get_replica_context()
    if context is None:
        return -1
    number = context.replica_id_in_sync_group
    return int(number)


def replicas() -> int:
    """How many there are."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)
