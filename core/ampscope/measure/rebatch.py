"""Batches of another size: the samples of a workload's own batches, repeated or cut off.

The first dimension of every tensor in a batch is taken for the batch dimension; where they differ
there is none, and that is said. Time and memory depend on shapes, not on which samples come twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from ampscope.errors import BadInput
from ampscope.workloads.protocol import Batch


def batch_size(batch: Batch, name: str = "the workload") -> int:
    """Samples in a batch. Raises BadInput where no batch dimension can be told."""
    leaves = tree_leaves(batch, is_leaf=lambda part: isinstance(part, PackedSequence))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise BadInput(f"A batch of {name} is a PackedSequence, which has no batch dimension.")
    if not tensors:
        raise BadInput(f"A batch of {name} holds no tensor with a dimension, so none to enlarge.")
    found = sorted({tensor.shape[0] for tensor in tensors})
    if len(found) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise BadInput(
            f"No batch dimension can be told in {name}: the tensors of a batch begin with "
            f"different numbers ({shapes}). Give every tensor one row a sample."
        )
    if not found[0]:
        raise BadInput(f"A batch of {name} holds no sample.")
    return found[0]


def resized(batches: Iterator[Batch], samples: int, name: str = "the workload") -> Iterator[Batch]:
    """Each batch with so many samples: cut off, or repeated from the beginning."""
    for batch in batches:
        rows = torch.arange(samples) % batch_size(batch, name)

        def chosen(leaf: object, rows: Tensor = rows) -> object:
            is_split = isinstance(leaf, Tensor) and leaf.dim() > 0
            return leaf[rows.to(leaf.device)] if is_split else leaf  # type: ignore[index, attr-defined]  # a Tensor

        yield tree_map(chosen, batch)
