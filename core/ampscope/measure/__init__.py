"""What a child process measures: products and copies alone, a step's products, precisions beside
each other, batch sizes. Imports torch; writes records.results to the store.

kinds            which measurement a run asks for
timing           one call, timed often: median and quartiles
cores            which products of a step use Tensor Cores, from a workload or a script
step_products    the products of one step: shapes, FLOPs, bytes, where they ran
script_step      one step of a script that is left as it is
product_calls    one product without its data: made again, in fp32, padded
product_timing   a product alone, its control, its padded sizes; the ceilings
kernel_names     CUDA kernels of each product, from torch.profiler
onednn_log       a CPU's implementations of each product, from oneDNN's own log
"""
