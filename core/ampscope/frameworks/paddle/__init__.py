"""PaddlePaddle: the one room that imports paddle.

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
settings_applied learning rate, epsilon, layers in fp32, an added scaler
watching         all of them at once
models, probe    the shared networks, and their training
patching         attributes replaced for a while
"""
