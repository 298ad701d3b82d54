"""What a child process measures. Imports torch; writes records.results to the store.

timing         one call, timed often: median and quartiles
rates          what the machine reaches: matmuls, copies, misaligned sizes; interleaved timing
matmuls        one matmul as a call: on random data, made again, in fp32, padded
tensor_cores   which matmuls of a step use Tensor Cores, of a workload or of a script
kernel_log     the kernels of each matmul, from torch.profiler; oneDNN's, from its own log
training_steps steps of one model in one precision: time, phases, casts, memory
energy         the energy counters of a GPU and a CPU
live_bytes     which tensors live when a step needs most
"""
