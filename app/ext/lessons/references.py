"""What all lessons refer to: primary sources, and words that are explained on hover."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Source(Enum):
    """Where to read on: title and address, each once."""

    def __init__(self, title: str, url: str) -> None:
        self.title, self.url = title, url

    PAPER = (
        "Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740)",
        "https://arxiv.org/abs/1710.03740",
    )
    TORCH_AMP = (
        "PyTorch: Automatic Mixed Precision package",
        "https://docs.pytorch.org/docs/stable/amp.html",
    )
    TORCH_EXAMPLES = (
        "PyTorch: Automatic Mixed Precision examples",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    )
    TORCH_NUMERICS = (
        "PyTorch: Numerical accuracy",
        "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
    )
    NVIDIA = (
        "NVIDIA: Train With Mixed Precision",
        "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html",
    )
    NVIDIA_SHAPES = (
        "NVIDIA: Matrix Multiplication Background",
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
    )
    PADDLE = (
        "PaddlePaddle: Automatic Mixed Precision Training",
        "https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html",
    )
    KERAS = (
        "Keras: Mixed precision policy API",
        "https://keras.io/api/mixed_precision/",
    )
    IEEE_754 = (
        "IEEE 754-2019, Standard for Floating-Point Arithmetic",
        "https://standards.ieee.org/ieee/754/6210/",
    )
    OCP_FP8 = (
        "OCP 8-bit Floating Point Specification (OFP8), 2023",
        "https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1",
    )
    BFLOAT16 = (
        "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322)",
        "https://arxiv.org/abs/1905.12322",
    )
    ADAM = (
        "PyTorch: torch.optim.Adam",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html",
    )
    BATCH_NORM = (
        "Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167)",
        "https://arxiv.org/abs/1502.03167",
    )
    HIGHAM = (
        "Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14, 1993",
        "https://doi.org/10.1137/0914050",
    )


# A lesson uses a word only where it offers it.
TERMS: Final[Mapping[str, str]] = {
    "exponent": "The power of two that a number is multiplied by: 12 is 1.5 × 2^3.",
    "mantissa": "The digits of a number: 12 is 1.5 × 2^3, and 0.5 is stored as its mantissa.",
    "spacing": "The distance from a number to the next one that the format has.",
    "subnormal": "A number below the smallest normal one: it has fewer digits the smaller it is.",
    "underflow": "A number is too small for the format, and becomes zero or subnormal.",
    "overflow": "A number is too large for the format, and becomes infinite.",
    "lost": "Zero in half precision, and not zero in fp32: below the format's range, or cancelled.",
    "gradient": "How much the loss changes with a number; backward computes it for every weight.",
    "loss scale": "A factor on the loss: backward multiplies every gradient by it. The optimizer "
    "divides it out again.",
    "scaler": "The object that keeps the loss scale, undoes it and skips bad steps: GradScaler.",
    "skipped step": "A step whose gradients held Inf or NaN: the weights are left as they were.",
    "autocast": "A region in which the framework chooses the precision of every op by lists.",
    "half precision": "A format of 16 bits: fp16 or bf16.",
    "master weights": "The weights in fp32, which the optimizer changes; half copies are computed "
    "with.",
    "NaN": "Not a number: the result of Inf - Inf, 0 × Inf or 0 / 0.",
    "Inf": "Infinity: what a number too large for its format becomes.",
    "eps": "A small number that an optimizer or a norm adds before it divides.",
    "Tensor Core": "A unit of NVIDIA GPUs that multiplies half matrices and adds up in fp32.",
    "activation": "What a layer puts out in the forward pass and keeps for the backward pass.",
    "throughput": "Training samples per second.",
}
