"""One LeNet, MLP and small transformer for every framework: weights and batches in NumPy arrays.

Each framework builds the network from the same description and fills in the same numbers, so what
differs between their runs is how they compute. Layouts are PyTorch's: a linear weight is
(outputs, inputs), a convolution's (outputs, inputs, height, width), images are NCHW; an adapter
transposes, which no histogram notices. All train with plain SGD on the digits that ship with the
package (1,797 images of 8x8 pixels).

    lenet        conv1 5x5 1-8, relu1, pool1, conv2 5x5 8-16, relu2, pool2, flatten, fc1 256-64,
                 relu3, fc2 64-10; images (batch, 1, 28, 28)
    mlp          fc1 64-128, relu1, fc2 128-64, relu2, fc3 64-10; images (batch, 64)
    transformer  embed 17-32 and pos 64-32, two blocks (ln1, attention q k v proj with 2 heads, ln2,
                 fc1 32-64, relu, fc2 64-32, pre-norm with residuals), ln, mean over positions,
                 head 32-10; images as 64 pixel values 0 to 16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ampscope
from ampscope.errors import BadInput

Array = NDArray[Any]
_DIGITS = Path(ampscope.__file__).resolve().parent / "workloads" / "data" / "digits.npz"
BATCH = 32
EPS = 1e-5  # of LayerNorm in all three; Keras' own default is 1e-3
WIDTH, HEADS, BLOCKS, POSITIONS, SYMBOLS = 32, 2, 2, 64, 17


@dataclass(frozen=True, slots=True)
class Network:
    """One network: ``weights`` by dotted name, in the order of the layers."""

    name: str
    weights: dict[str, Array]  # float32
    batches: Callable[[], Iterator[tuple[Array, Array]]]  # inputs; labels (batch,) int64
    lr: float


SHARED = {  # name of the workload -> what it is; a comparison of frameworks trains them
    "shared-lenet": "Two convolutions and two linear layers on handwritten digits.",
    "shared-mlp": "Three linear layers on handwritten digits.",
    "shared-transformer": "Two small attention blocks over the pixels of handwritten digits.",
}
NAMES = tuple(name.removeprefix("shared-") for name in SHARED)


def network(name: str, seed: int) -> Network:
    """The network of that name ("shared-lenet" is "lenet"). Raises BadInput for another."""
    name = name.removeprefix("shared-")
    if name not in NAMES:
        raise BadInput(
            f"There is no network {name!r} for every framework. Use one of: {', '.join(NAMES)}."
        )
    weights, prepare, lr = {
        "lenet": (_lenet, _enlarged, 0.05),
        "mlp": (_mlp, _flat, 0.1),
        "transformer": (_transformer, _symbols, 0.1),
    }[name]
    generator = np.random.default_rng(seed)
    return Network(name, weights(generator), lambda: _batches(prepare, seed), lr)


def _lenet(generator: np.random.Generator) -> dict[str, Array]:
    shapes = {"conv1": (8, 1, 5, 5), "conv2": (16, 8, 5, 5), "fc1": (64, 256), "fc2": (10, 64)}
    return _affines(generator, shapes)


def _mlp(generator: np.random.Generator) -> dict[str, Array]:
    return _affines(generator, {"fc1": (128, 64), "fc2": (64, 128), "fc3": (10, 64)})


def _affines(
    generator: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    return {k: v for name, s in shapes.items() for k, v in _affine(generator, name, s).items()}


def _transformer(generator: np.random.Generator) -> dict[str, Array]:
    def table(rows: int) -> Array:
        return generator.normal(0.0, 0.5, (rows, WIDTH)).astype(np.float32)

    weights = {"embed.weight": table(SYMBOLS), "pos.weight": table(POSITIONS)}
    for block in range(BLOCKS):
        at = f"blocks.{block}"
        weights |= _norm(f"{at}.ln1")
        for name in ("q", "k", "v", "proj"):
            weights |= _affine(generator, f"{at}.attn.{name}", (WIDTH, WIDTH))
        weights |= _norm(f"{at}.ln2")
        weights |= _affine(generator, f"{at}.fc1", (2 * WIDTH, WIDTH))
        weights |= _affine(generator, f"{at}.fc2", (WIDTH, 2 * WIDTH))
    return weights | _norm("ln") | _affine(generator, "head", (10, WIDTH))


def _affine(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> dict[str, Array]:
    """Uniform within 1 / sqrt(inputs), which is PyTorch's own initialisation."""
    bound = 1.0 / np.sqrt(np.prod(shape[1:]))
    weight = generator.uniform(-bound, bound, shape).astype(np.float32)
    bias = generator.uniform(-bound, bound, shape[:1]).astype(np.float32)
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _norm(name: str) -> dict[str, Array]:
    ones = np.ones(WIDTH, np.float32)
    return {f"{name}.weight": ones, f"{name}.bias": np.zeros(WIDTH, np.float32)}


def _batches(prepare: Callable[[Array], Array], seed: int) -> Iterator[tuple[Array, Array]]:
    """Endless; every epoch is a new permutation, its last incomplete batch left out."""
    with np.load(_DIGITS, allow_pickle=False) as data:
        images, labels = prepare(data["images"]), data["labels"].astype(np.int64)
    generator = np.random.default_rng(seed + 1)  # another stream than the weights'
    while True:
        order = generator.permutation(len(labels))
        for first in range(0, len(labels) - BATCH + 1, BATCH):
            chosen = order[first : first + BATCH]
            yield images[chosen], labels[chosen]


def _enlarged(images: Array) -> Array:
    """(n, 8, 8) in 0 … 16 -> (n, 1, 28, 28) in 0 … 1: each pixel 3x3 times, then a border."""
    tripled = (images.astype(np.float32) / 16.0).repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(tripled, ((0, 0), (2, 2), (2, 2)))[:, None]


def _flat(images: Array) -> Array:
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(16.0)


def _symbols(images: Array) -> Array:
    return images.reshape(len(images), -1).astype(np.int64)
