"""A CUDA device that is not there, simulated on the CPU for scripts that ask for one.

`simulated_device` is where tensors say that they are, `cuda_answers` what ``torch.cuda`` says,
`cuda_streams` and `current_device` what both ask.
"""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/rehearsal.md",
    simulated_device="ampscope.ext.rehearsal.simulated_device:simulated_cuda",
)
