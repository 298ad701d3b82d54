"""A CUDA device that is not there, simulated on the CPU for scripts that ask for one.

`cuda_answers` is what ``torch.cuda`` says, `stand_in_device` where tensors say that they are.
"""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/rehearsal.md",
    simulated_device="ampscope.ext.rehearsal.stand_in_device:stand_in",
)
