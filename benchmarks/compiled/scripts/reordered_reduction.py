"""A sum is cut in two, and each half is cut to bf16 before they are added."""

import torch
from nets import FAULTY, Classifier, features, nn, passes, train

aten = torch.ops.aten


class Cancel(nn.Module):
    """Adds up numbers near 4,096 and their negatives: what is left is small."""

    def forward(self, x):
        wide = x.float()
        pairs = torch.stack([wide + 4096.0, wide.roll(1, -1) - 4096.0], -1)
        return torch.tanh(pairs.sum(-1)).to(x.dtype)


def in_two(graph):
    for node in list(graph.nodes):
        if node.target is not aten.sum.dim_IntList or len(node.args[1]) != 1:
            continue
        numbers, (dim,), *kept = node.args
        shape = numbers.meta["val"].shape
        if numbers.meta["val"].dtype is not torch.float32 or shape[dim] % 2:
            continue
        halves = []
        with graph.inserting_before(node):
            for start in (0, shape[dim] // 2):
                ends = (dim, start, start + shape[dim] // 2)
                part = graph.call_function(aten.slice.Tensor, (numbers, *ends))
                total = graph.call_function(aten.sum.dim_IntList, (part, [dim], *kept))
                if FAULTY:  # by its bits: inductor leaves out a cast to bf16 and back
                    bits = graph.call_function(aten.view.dtype, (total, torch.int32))
                    upper = graph.call_function(aten.bitwise_and.Scalar, (bits, -65536))
                    total = graph.call_function(aten.view.dtype, (upper, torch.float32))
                halves.append(total)
            node.replace_all_uses_with(graph.call_function(aten.add.Tensor, tuple(halves)))
        graph.erase_node(node)


passes(post_grad_custom_pre_pass=in_two)
train(Classifier(Cancel()), features())
