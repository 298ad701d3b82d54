"""What an adapter hands over: a layer's call, and everything about one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ampscope.frameworks.tensors import Values


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
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    compute_dtype: str  # fp16 | bf16 | fp32
    line: str = ""  # "train.py:41", of the script
    is_training: bool = True
    in_fp32: Callable[[], Values | None] = lambda: None
    closer: Callable[[], LayerCall | None] = lambda: None
    weights: Callable[[], tuple[Values, ...]] = lambda: ()
    consumers: tuple[str, ...] = ()  # of a single op: what took its output, nearest first
    hands_on: bool = False  # a layer inside this one has put out a non-finite value already


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One attempted optimizer step: taken, or skipped by the scaler.

    ``gradients`` are as they came to the scaler or optimizer, in the order in which they are
    applied; ``scaled`` says whether they still carry ``scale``. ``before`` and ``after`` are the
    weights by the same names, and may be left empty where nobody looked. ``loss_scaled`` says
    whether a scaler scaled the loss; None: as it should be, wherever a scaler took part.
    ``static_scale`` is a constant by which the loss is multiplied, without a scaler that skips.
    """

    loss: float | None  # unscaled
    scale: float | None  # None: no scaler took part
    skipped: bool
    lr: float
    optimizer: str = "optimizer0"
    scaler: str = "scaler0"  # where one took part
    loss_dtype: str = "fp32"
    scaled: bool = True
    loss_scaled: bool | None = None
    static_scale: float | None = None
    unscaled_by_user: bool = False
    growth_counter: int | None = None
    backwards: int = 1
    gradients: Mapping[str, Values] = field(default_factory=dict)
    before: Mapping[str, Values] = field(default_factory=dict)
    after: Mapping[str, Values] = field(default_factory=dict)
    state: Mapping[str, Values] = field(default_factory=dict)  # optimizer state, by any name
    second_moments: tuple[str, ...] = ()  # which of them are second moments
    eps: float | None = None
    step_time_s: float | None = None  # without the instruments
    overhead_s: float | None = None
    peak_bytes: int | None = None

    @property
    def carried(self) -> float:
        """The factor that multiplies ``gradients``."""
        return (self.scale or self.static_scale or 1.0) if self.scaled else 1.0
