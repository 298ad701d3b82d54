"""What this machine is, and what it can do in half precision. Imports no torch.

capability  Tensor Cores by CUDA compute capability, with sources; whether a matmul fits them, and
            what a kernel's name says about them
gpu         NVIDIA GPUs as NVML reads them now; AMD, Apple and Intel GPUs by name
cpu         model, half-precision instructions, memory and load of the CPU
describe    all of the above and the versions in one frozen report; that report in words, as JSON;
            why torch cannot use the GPUs that are here
"""
