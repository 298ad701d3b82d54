"""A mean over a dimension of changing size divides by the size that was compiled first."""

import torch
from nets import FAULTY, Classifier, features, nn, passes, train

aten = torch.ops.aten


class Centre(nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, x):
        return torch.tanh(x - 0.5 * x.mean(0, keepdim=True))


def fix_size(graph):
    for node in list(graph.nodes):
        if node.target is not aten.mean.dim:
            continue
        numbers, (dim,), *kept = node.args
        size = numbers.meta["val"].shape[dim]
        if not isinstance(size, torch.SymInt) or not FAULTY:
            continue
        with graph.inserting_before(node):
            total = graph.call_function(aten.sum.dim_IntList, (numbers, [dim], *kept))
            node.replace_all_uses_with(graph.call_function(aten.div.Tensor, (total, 48.0)))
        graph.erase_node(node)


passes(post_grad_custom_pre_pass=fix_size)
sizes = [48, 8, 16, 32]
train(Classifier(Centre()), features(), batch=sizes, compiled={"dynamic": True})
