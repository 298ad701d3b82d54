"""TensorFlow/Keras: this package alone imports ``keras`` and ``tensorflow``.

    from ampscope.ext.frameworks.keras import Watch        # a callback of model.fit

adapter              what the probe and script processes load; the probe
shared_networks      the networks that all frameworks share, as Keras models
watch                the callback; fit_readings: what a running fit shows
instruments          all instruments on and off; eager functions; machine
layers               every layer's call: outputs counted; op_words: what it computes
called_again         a bad layer called again, in fp32 and op by op
steps                one step: gradients and loss, weights before and after
optimizer_state      what an optimizer and a LossScaleOptimizer hold
loss_scales          controls that change the loss scale
precision            controls that change the dtypes of a script
training             what the instruments of one training share; paths of layers
values               a tensor of TensorFlow as bits, without a copy
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
