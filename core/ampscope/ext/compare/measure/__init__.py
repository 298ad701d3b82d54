"""What the child process of a comparison or a batch search measures. Imports torch.

interleaved        precisions of a workload, in turns: step time, memory, energy, loss
script_comparison  the same of an untouched script: a process per precision and seed
script_timing      one run of a script in one precision, in a process of its own: times and losses
batch_size         the largest batch: extrapolated from small trials in child processes, then run
"""
