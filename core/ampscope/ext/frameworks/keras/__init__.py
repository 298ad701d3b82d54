"""TensorFlow/Keras: this package alone imports ``keras`` and ``tensorflow``.

    from ampscope.ext.frameworks.keras import Watch        # a callback of model.fit

adapter              what the probe and script processes load; the probe, and the
                     shared networks as Keras models
values               a tensor of TensorFlow as bits, without a copy
layers               every layer's call: outputs counted, the first bad one called again in fp32
steps                one step: gradients and loss, weights before and after
optimizer_state      what an optimizer and a LossScaleOptimizer hold
loss_scales          controls that change the loss scale
training             what the instruments of one training share; paths of layers
watch                the callback; all instruments on and off; dtypes set; eager functions; machine
graph_rewrite        the graph optimizer's automatic mixed precision, op by op
graph_rewrite_child  the process in which that happens

Importing this package loads neither; the names above do when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampscope.ext.frameworks.keras.watch import Watch

__all__ = ["Watch"]


def __getattr__(name: str) -> object:
    """Import Keras only when the callback is asked for (PEP 562)."""
    if name == "Watch":
        from ampscope.ext.frameworks.keras.watch import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
