"""What this machine is, and what it can do in half precision. Imports no torch.

capability       Tensor Cores by CUDA compute capability; a table, with its sources
nvml             one conversation with NVIDIA's management library, refusals borne
gpu              NVIDIA GPUs as NVML reads them now
cpu              model, half-precision instructions, memory and load of the CPU
accelerators     AMD, Apple and Intel GPUs: named where they can be seen without torch
software         versions of torch, CUDA and cuDNN, read without importing torch
inventory        all of the above in one frozen report
obstacles        why torch cannot use the GPUs that are here
describe         that report as a sentence, as one line, as JSON
vendor_figures   peak rates that NVIDIA prints, each with its source
ceilings         what was reached in each dtype beside them, and which dtypes fall behind
slow_dtypes      the likely reason why
disturbances     clocks held down and others on the device, by the readings beside a run
alignment_costs  what a size costs that is no multiple of 8
bench_view       one measurement as a whole, in words
bench_json       the same for programs
eligibility      whether a product fits Tensor Cores, and why not
kernel_signs     what a kernel's name says about them
"""
