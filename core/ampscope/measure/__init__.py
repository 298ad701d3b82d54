"""What a child process measures. Imports torch; writes records.results to the store.

kinds              which measurement a run asks for
timing             one call, timed often: median and quartiles
interleaving       several calls in turns, so that drift falls on all alike

bench              what the machine reaches: the next four, one after the other
products           a product of every dtype as a call without arguments
square_products    their rates at several sizes
copies             copies within the device's memory
alignment          crooked sizes and channels

cores              which products of a step use Tensor Cores, from a workload or a script
step_products      the products of one step: shapes, FLOPs, bytes, where they ran
script_step        one step of a script that is left as it is
product_calls      one product without its data: made again, in fp32, padded
product_timing     a product alone, its control, its padded sizes; the ceilings
kernel_names       CUDA kernels of each product, from torch.profiler
onednn_log         a CPU's implementations of each product, from oneDNN's own log

comparison         precisions turn and turn about: a workload
together           its trainings; phases: one step with marks; cast_share: from the profiler
beside_steps       memory, other batch sizes, energy
live_bytes         which tensors live when a step needs most; energy: counters
script_comparison  precisions turn and turn about: an untouched script
script_clock       one run of it; script_precision: in which precision; step_clock: what is read

batch_search       the largest batch: predicted, then proved
tries, batch_try   one try, in a process that may die of it; rebatch: batches of another size
"""
