"""PaddlePaddle: the one room that imports paddle.

    from ampscope.frameworks.paddle import Watch, WatchCallback

adapter          what the frame asks for: machine, probe, watching, seed
versions         the fields of Machine
values           a tensor's bits, in place or copied
regions          which auto_cast region is open; in which dtype an op runs there
op_names         Paddle's two names of an op
rounding         rounding to half, of tensors with their gradients and of memory
emulation        ops that round on a CPU as a GPU would
half_parameters  decorate(level="O2") on a CPU: marked parameters, master weights
scalers          GradScaler forced on
layer_paths      dotted paths of layers and parameters
layer_kinds      what a layer computes, in the rules' words
layer_watch      calls of layers and the gradients of their outputs
step_watch       optimizer steps
optimizer_state  accumulators and epsilon
op_arguments     the tensors among an op's arguments and results
op_watch         which ops ran in which dtype; the first bad one in a layer
planned_ops      what each op of an fp32 run would be on a GPU
plan             the plan of a script, as a command
debugging_import Paddle's own operator statistics beside it
loss_watch       backward passes
looks            what is looked at around a step
weight_scans     weights and buffers at the start and end
scaler_state     what a GradScaler says of itself
watch            Watch and WatchCallback, for someone's own training
settings_applied learning rate, epsilon, layers in fp32, an added scaler
watching         all of them at once
models, probe    the shared networks, and their training
patching         attributes replaced for a while
"""

import warnings

with warnings.catch_warnings():
    # Paddle 3.3 recommends ccache to everybody who imports it.
    warnings.filterwarnings("ignore", ".*ccache.*", UserWarning)
    from ampscope.frameworks.paddle.watch import Watch, WatchCallback

__all__ = ["Watch", "WatchCallback"]
