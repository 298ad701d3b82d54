"""The input of a block is overwritten by its norm before the residual addition has read it."""

import torch
from nets import FAULTY, Classifier, features, passes, train

aten, prims = torch.ops.aten, torch.ops.prims


def reuse(graph):
    if any(n.name.startswith("tangents") for n in graph.nodes):
        return
    order = {n: place for place, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or not isinstance(node.args[1], torch.fx.Node):
            continue
        first, value = node.args[0], node.args[0].meta["val"]
        if first.target is not aten.addmm.default:
            continue
        later = [
            n
            for n in graph.nodes
            if n.target is prims.convert_element_type.default
            and order[first] < order[n] < order[node]
            and n.meta["val"].shape == value.shape
            and n.meta["val"].dtype == value.dtype
        ]
        if later and FAULTY:
            node.args = (later[0], node.args[1])


passes(post_grad_custom_pre_pass=reuse)
train(Classifier(), features())
