"""PaddlePaddle: the one room that imports paddle.

    from ampscope.ext.frameworks.paddle import Watch, WatchCallback

adapter          what the frame asks for; the probe
shared_networks  the networks that all frameworks share, as Paddle layers
values           a tensor's bits, in place or copied; attributes of Paddle replaced for a while
emulation        half precision on a CPU: ops that round as a GPU would
regions          the open auto_cast region, and in which dtype an op runs in it
op_names         Paddle's two names of an op
rounding         rounding to half precision, with the gradient or in place
decorated        what ``decorate`` makes of models and optimizers
seen_ops         which op ran in which dtype, and which made a layer's output bad
layers           calls of layers, the gradients of their outputs; layer_paths: their paths
steps            optimizer steps, what an optimizer holds, and backward passes
watch            Watch and WatchCallback, for a user's own training
instruments      all instruments at once; applied_settings: what changes a training, scalers
plan             which op of a script would run in which dtype on a GPU
"""

import warnings

with warnings.catch_warnings():
    # Paddle 3.3 recommends ccache on every import.
    warnings.filterwarnings("ignore", ".*ccache.*", UserWarning)
    from ampscope.ext.frameworks.paddle.watch import Watch, WatchCallback

__all__ = ["Watch", "WatchCallback"]
