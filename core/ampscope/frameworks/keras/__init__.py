"""TensorFlow/Keras: this package alone imports ``keras`` and ``tensorflow``.

    from ampscope.frameworks.keras import Watch        # a callback of model.fit

adapter       what the probe and script processes load (``ADAPTER``)
versions      which machine and versions a run takes place with
values        a tensor of TensorFlow as bits, without a copy
layer_paths   dotted paths of layers and names of weights
layer_kinds   what a layer or op computes, in the words of PyTorch's ops
layer_watch   every layer's call: outputs counted, the first bad one looked into
bad_layer     a bad layer again: in fp32, and op by op
loss_watch    the loss and the gradients that come back to the layers' outputs
step_watch    optimizers and LossScaleOptimizer: one attempted step
optimizers    what an optimizer holds: state, second moments, scale
precision     controls that change dtype policies and casts
loss_scales   controls that change the loss scale
training      what the instruments of one training share
eager         functions run as plain Python while something is watched
models        the shared networks as Keras models
probe         trains one of them
watch         the callback
fit_readings  what a running fit shows without a change to its graph
watching      all instruments on, and off again
graph_rewrite the graph optimizer's automatic mixed precision, op by op
graph_rewrite_child  the process in which that happens

Importing this package loads neither; the names above do when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampscope.frameworks.keras.watch import Watch

__all__ = ["Watch"]


def __getattr__(name: str) -> object:
    """Import Keras only when the callback is asked for (PEP 562)."""
    if name == "Watch":
        from ampscope.frameworks.keras.watch import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
