"""Primary sources that lessons refer to, each once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """Title and address."""

    title: str
    url: str


PAPER = Source(
    "Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740)",
    "https://arxiv.org/abs/1710.03740",
)
TORCH_AMP = Source(
    "PyTorch: Automatic Mixed Precision package", "https://docs.pytorch.org/docs/stable/amp.html"
)
TORCH_EXAMPLES = Source(
    "PyTorch: Automatic Mixed Precision examples",
    "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
)
TORCH_NUMERICS = Source(
    "PyTorch: Numerical accuracy", "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
)  # fmt: skip
NVIDIA = Source(
    "NVIDIA: Train With Mixed Precision",
    "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html",
)
NVIDIA_SHAPES = Source(
    "NVIDIA: Matrix Multiplication Background",
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
)
PADDLE = Source(
    "PaddlePaddle: Automatic Mixed Precision Training",
    "https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html",
)
KERAS = Source("Keras: Mixed precision policy API", "https://keras.io/api/mixed_precision/")
IEEE_754 = Source(
    "IEEE 754-2019, Standard for Floating-Point Arithmetic",
    "https://standards.ieee.org/ieee/754/6210/",
)
OCP_FP8 = Source(
    "OCP 8-bit Floating Point Specification (OFP8), 2023",
    "https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1",
)
BFLOAT16 = Source(
    "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322)",
    "https://arxiv.org/abs/1905.12322",
)
ADAM = Source(
    "PyTorch: torch.optim.Adam", "https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html"
)  # fmt: skip
BATCH_NORM = Source(
    "Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167)",
    "https://arxiv.org/abs/1502.03167",
)
HIGHAM = Source(
    "Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14, 1993",
    "https://doi.org/10.1137/0914050",
)
